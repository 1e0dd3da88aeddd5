"""What a terminal shows: lines, notes and progress bars."""

import os
import sys
import threading
import time
from contextlib import contextmanager


def one_line(message) -> str:
    """A message with its line breaks, control characters and lone surrogates (of file names) written as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(message))


@contextmanager
def tolerate_closed_stdout():
    """Inside and when it ends, nobody reading stdout any more (`| head`) is no fault: what is printed goes nowhere."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def say(line: str):
    """Prints one line, whatever names are in it."""
    with tolerate_closed_stdout():
        print(one_line(line))


def note(line: str):
    """Says something on stderr that is no result."""
    print(one_line(line), file=sys.stderr)


class ProgressBar:
    """Bytes done, their rate and the time left, on stderr: in place on a terminal, else a line every 5 seconds."""

    def __init__(self, what: str, total: int = 0):
        self.what, self.total, self.done, self.lock = what, total, 0, threading.Lock()
        self.terminal, self.begun = sys.stderr.isatty(), time.monotonic()
        self.shown = self.begun

    def add(self, size: int):
        if not size:
            return
        with self.lock:
            self.done += size
            now, complete = time.monotonic(), self.done == self.total
            if now - self.shown < (0.1 if self.terminal else 5) and not complete:
                return
            self.shown, rate = now, max(1, self.done) / max(1e-3, now - self.begun)
            line = f"{self.what}: {self.done / 1e6:,.1f} MB at {rate / 1e6:,.3g} MB/s"
            if self.total:
                part = self.done / self.total
                line += f" [{'#' * int(30 * part):30}] {part:4.0%}, {(self.total - self.done) / rate:,.0f} s left"
            line = f"\r{line}\033[K" + "\n" * complete if self.terminal else f"{line}\n"
            print(line, end="", file=sys.stderr, flush=True)

"""Print lines, bytes and progress bars to a terminal, with control characters escaped."""

import codecs
import os
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import contextmanager


def one_line(message) -> str:
    """Escape line breaks, control characters and lone surrogates (of file names) in a message."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(message))


@contextmanager
def tolerate_closed_stdout():
    """Discard output inside once stdout is closed (`| head`)."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def say(line: str):
    """Print one line on stdout."""
    with tolerate_closed_stdout():
        print(one_line(line))


def note(line: str):
    """Print one line on stderr, for anything but results."""
    print(one_line(line), file=sys.stderr)


def print_bytes(pieces: Iterable[bytes], raw: bool):
    """Print bytes as they arrive: unchanged if `raw`, else as text with control characters escaped, but for line breaks
    and tabs."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    try:
        for piece in pieces:
            if raw:
                sys.stdout.buffer.write(piece)
            else:
                print(*(c if c in "\n\t" else one_line(c) for c in decoder.decode(piece)), sep="", end="")
            sys.stdout.flush()
    finally:
        print(decoder.decode(b"", final=True), flush=True)


class ProgressBar:
    """Show progress, rate and time left on stderr: updated in place on a terminal, else a line every 5 seconds."""

    def __init__(self, title: str, total: int = 0):
        self.title, self.total, self.done, self.lock = title, total, 0, threading.Lock()
        self.terminal, self.start = sys.stderr.isatty(), time.monotonic()
        self.shown = self.start

    def add(self, size: int):
        if not size:
            return
        with self.lock:
            self.done += size
            now, complete = time.monotonic(), self.done == self.total
            if now - self.shown < (0.1 if self.terminal else 5) and not complete:
                return
            self.shown, rate = now, max(1, self.done) / max(1e-3, now - self.start)
            line = f"{self.title}: {self.done / 1e6:,.1f} MB at {rate / 1e6:,.3g} MB/s"
            if self.total:
                fraction, left = self.done / self.total, (self.total - self.done) / rate
                line += f" [{'#' * int(30 * fraction):30}] {fraction:4.0%}, {left:,.0f} s left"
            line = f"\r{line}\033[K" + "\n" * complete if self.terminal else f"{line}\n"
            print(line, end="", file=sys.stderr, flush=True)

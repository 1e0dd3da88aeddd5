"""Errors, output on a terminal, and how a program ends. Does not import torch.

A SpiderError becomes one line on stderr and exit status 2. File names, data and other foreign text
are printed with their control characters escaped.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path

from spider.vocabulary import BOS_ID, EOS_ID, PAD_ID


class SpiderError(Exception):
    """An error that the user can fix. The message is one line with the cause and the remedy."""


class UsageError(SpiderError):
    """A bad flag, variable or setting, or a machine that does not support it."""


class DataError(SpiderError):
    """Unusable data; the message names the file, the offset and, if there is one, the remedy."""


class CheckpointError(SpiderError):
    """An unusable checkpoint or directory of checkpoints."""


class TooLarge(SpiderError):
    """A step that needs more memory than the device has."""


class Diverged(SpiderError):
    """Training that diverged; the message gives advice."""


class WorldError(SpiderError):
    """Ranks that cannot start."""


class Stopped(BaseException):
    """A signal asked the process to stop. Not an Exception, so that libraries do not catch it."""


# --------------------------------------------------------------------------------------------------
# The terminal


def one_line(message) -> str:
    """Escape line breaks, control characters and lone surrogates (from file names) in a message."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in str(message)
    )


def printable(ids: Iterable[int]) -> str:
    r"""Format ids for a terminal: printable text stays as it is; other bytes become \n, \x07 or
    \\; ids above 255 become \<BOS> or \<259>."""
    names = {PAD_ID: "PAD", BOS_ID: "BOS", EOS_ID: "EOS"}
    parts = []
    for is_byte, group in groupby(ids, lambda i: i < 256):
        if is_byte:
            text = bytes(group).decode("utf-8", "surrogateescape")
            parts += [printable_character(character) for character in text]
        else:
            parts += [f"\\<{names.get(i, i)}>" for i in group]
    return "".join(parts)


def printable_character(character: str) -> str:
    """Escape a character, or a lone surrogate that stands for a byte, as Python's repr does."""
    if character.isprintable() and character != "\\":
        return character
    return repr(character.encode("utf-8", "surrogateescape"))[2:-1]


def print_line(line: str):
    """Print one line of results on stdout."""
    print(one_line(line))


def print_status(line: str):
    """Print one line on stderr: anything except results."""
    print(one_line(line), file=sys.stderr)


def print_error(prog: str, line: str):
    """Print a line on stderr, over a progress bar; shorten a very long one, which quotes a file."""
    if len(line) > 1000:
        line = f"{line[:500]} ... {line[-500:]}"
    clear = "\r\033[K" if sys.stderr.isatty() else ""
    print(f"{clear}{prog}: {one_line(line)}", file=sys.stderr)


class ProgressBar:
    """Show progress, rate and time left on stderr: in place on a terminal, else one line every 5
    seconds."""

    def __init__(self, title: str, total: int):
        self.title = title
        self.total = total  # bytes; 0: unknown
        self.done = 0
        self.terminal = sys.stderr.isatty()
        self.start = time.monotonic()
        self.shown = self.start  # time of the last update

    def add(self, size: int):
        """Count bytes, and show the progress if an update is due."""
        if not size:
            return
        self.done += size
        now = time.monotonic()
        is_due = now - self.shown >= (0.1 if self.terminal else 5)
        is_complete = self.done == self.total
        if not is_due and not is_complete:
            return
        self.shown = now
        line = self._line(now)
        if self.terminal:
            line = f"\r{line}\033[K"  # overwrite the last update
        if is_complete or not self.terminal:
            line += "\n"
        print(line, end="", file=sys.stderr, flush=True)

    def _line(self, now: float) -> str:
        rate = max(1, self.done) / max(1e-3, now - self.start)
        line = f"{self.title}: {self.done / 1e6:,.1f} MB at {rate / 1e6:,.3g} MB/s"
        if self.total:
            fraction = self.done / self.total
            seconds = (self.total - self.done) / rate
            line += f" [{'#' * int(30 * fraction):30}] {fraction:4.0%}, {seconds:,.0f} s left"
        return line


# --------------------------------------------------------------------------------------------------
# The end of a program

# Exceptions that end a program with one line instead of a traceback
EXPECTED = (SpiderError, FloatingPointError, OSError, KeyboardInterrupt)


def run_command(main: Callable[[], int | None], prog: str, interrupted: str = "") -> int:
    """Run a command and return its exit status.

    interrupted: the line to print on Ctrl-C, see `handle_error`."""
    try:
        prepare_streams()
        status = main() or 0
        sys.stdout.flush()
        return status
    except EXPECTED as fault:
        return handle_error(prog, fault, interrupted)


def handle_error(
    prog: str, fault: BaseException, interrupted: str = "", silent: bool = False
) -> int:
    """Print an expected error as one line; return the exit status of the program:

        KeyboardInterrupt   130; prints `interrupted`, if any
        BrokenPipeError     0; prints nothing: stdout is closed, as with `| head`
        Diverged            1
        others of EXPECTED  2

    silent: another process prints the line."""
    status = 2
    line = f"error: {fault}"
    match fault:
        case BrokenPipeError():
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        case KeyboardInterrupt():
            status = 130
            line = interrupted
        case Diverged():
            status = 1
        case OSError():
            file = f"{fault.filename}: " if fault.filename else ""
            line = f"error: {file}{fault.strerror or fault}"
    if line and not silent:
        print_error(prog, line)
    report = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if report:  # torchrun then ends its own report with this line
        failure = dict(message=line, extraInfo=dict(timestamp=int(time.time())))
        Path(report).write_text(json.dumps(dict(message=failure)))
    return status


def prepare_streams():
    """Open the standard streams that the caller closed, as with `>&-`, on /dev/null, and let stdout
    take any text.

    A file opened later would get the descriptor of a closed stream, and the messages with it."""
    if sys.platform == "win32":  # has no SIGHUP, and cannot sync directories
        raise UsageError("Windows is not supported: run this under WSL")
    descriptor = 0
    while descriptor <= 2:
        descriptor = os.open(os.devnull, os.O_RDWR)
    os.close(descriptor)
    sys.stdin = sys.stdin or open(os.devnull)
    sys.stdout = sys.stdout or open(os.devnull, "w")
    sys.stderr = sys.stderr or open(os.devnull, "w")
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")


def raise_on_signals():
    """Turn signals that end a script into exceptions, so that incomplete files are deleted: Ctrl-C
    into KeyboardInterrupt, SIGTERM and SIGHUP (a lost terminal) into SystemExit."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, lambda number, _: sys.exit(128 + number))

"""Shared by all scripts: errors, the terminal, command lines, files. Does not import torch.

A SpiderError is shown as one line, with the exit status 2. Whatever is printed of files, data or
other people's names has its control characters escaped.
"""

import argparse
import difflib
import errno
import glob
import importlib.util
import json
import os
import platform
import re
import secrets
import shlex
import signal
import sys
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import field, fields
from itertools import groupby
from pathlib import Path
from typing import IO, Any, NamedTuple

from spider.vocabulary import BOS_ID, EOS_ID, PAD_ID

ROOT = Path(__file__).resolve().parents[1]
PARENT = os.getppid()  # the process that started this one, noted before the slow import of torch


# --------------------------------------------------------------------------------------------------
# Errors


class SpiderError(Exception):
    """An error that the user can fix. The message is one line with the cause and the remedy."""


class UsageError(SpiderError):
    """A bad flag, variable or setting, or a machine that does not support it."""


class DataError(SpiderError):
    """Unusable data; the message has the file, the offset and, if there is one, the remedy."""


class CheckpointError(SpiderError):
    """An unusable checkpoint or directory of checkpoints."""


class TooLarge(SpiderError):
    """A step that needs more memory than there is."""


class Diverged(SpiderError):
    """Training that diverged; the message gives advice."""


class WorldError(SpiderError):
    """Ranks that cannot start."""


class Stopped(BaseException):
    """A signal asked the process to stop. Not an Exception, so that libraries do not catch it."""


# --------------------------------------------------------------------------------------------------
# The terminal


def one_line(message) -> str:
    """Escape line breaks, control characters and lone surrogates (of file names) in a message."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in str(message)
    )


def printable(ids: Iterable[int]) -> str:
    r"""Format ids for a terminal: printable text unchanged, other bytes as \n, \x07 or \\, ids as
    \<BOS> or \<259>."""
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
    """Escape a character, or the lone surrogate of a byte, as Python writes bytes."""
    if character.isprintable() and character != "\\":
        return character
    return repr(character.encode("utf-8", "surrogateescape"))[2:-1]


def say(line: str):
    """Print one line on stdout."""
    print(one_line(line))


def note(line: str):
    """Print one line on stderr, for anything but results."""
    print(one_line(line), file=sys.stderr)


class ProgressBar:
    """Show progress, rate and time left on stderr: updated in place on a terminal, else a line
    every 5 seconds."""

    def __init__(self, title: str, total: int):
        self.title = title
        self.total = total  # bytes; 0: unknown
        self.done = 0
        self.terminal = sys.stderr.isatty()
        self.start = time.monotonic()
        self.shown = self.start  # when it was last shown

    def add(self, size: int):
        """Count bytes, and show the progress if that is due."""
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
            line = f"\r{line}\033[K"  # over the one before
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
# Command lines


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keep line breaks of the description, and show the defaults that are values."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        is_value = isinstance(default, int | float | str) and default != argparse.SUPPRESS
        if not is_value or default is False or action.nargs == 0:
            return action.help
        return f"{action.help} (default: {default})"


# By script: a flag, or what to give instead, and the names of that flag in other projects
OTHER_NAMES = Path(__file__).with_name("other_names.toml")
SECTIONS = re.compile(r"^(train|training|optimizer)\.")  # of torchtitan's and LitGPT's flags


class Parser(argparse.ArgumentParser):
    """ArgumentParser that raises UsageError, refuses abbreviations, and suggests a flag for an
    unknown one."""

    def __init__(self, **options):
        super().__init__(allow_abbrev=False, formatter_class=HelpFormatter, **options)

    def error(self, message: str):
        if message.endswith("expected one argument"):
            message += " (one that begins with - as --NAME=VALUE)"
        raise UsageError(f"{message}; see python {self.prog} --help")

    def parse_known_args(self, args=None, namespace=None):
        """Parse a command line, or the rest of it after a command such as prepare.

        Raise UsageError for a word that is unknown."""
        words = words_of(args)
        for word in words:
            if word.endswith("=--"):  # Python 3.11 makes the value a list
                self.error(f"{word.removesuffix('=--')}: -- is not a value")
        namespace, unknown = super().parse_known_args(words, namespace)
        if unknown:
            flags = [word for word in unknown if re.match("--?[A-Za-z]", word)]
            self.error("; ".join(map(self.describe_unknown, flags or unknown[:1])))
        return namespace, unknown

    def describe_unknown(self, word: str) -> str:
        """Describe an unknown flag or word, with the flag that is meant, if any is like it."""
        others = tomllib.loads(OTHER_NAMES.read_text())
        script = self.prog.partition(" ")[0]  # without the command
        meanings: dict[str, str] = {}
        for remedy, names in others.get(script, others["train.py"]).items():  # as for bench.py
            meanings |= dict.fromkeys(names.split(), remedy)
        for flag, value in re.findall(r"(--[\w-]+)( \[)?", self.format_usage()):
            plain = without_dashes(flag)
            meanings[plain] = flag
            if value:  # it is optional, as that of a switch
                meanings[f"no_{plain}"] = f"{flag}=False"

        name = word.partition("=")[0]
        plain = SECTIONS.sub("", without_dashes(name))
        unknown = f"unknown {'flag' if word.startswith('-') else 'word'} {name}"
        if plain in meanings:
            return f"{unknown}: use {meanings[plain]}"
        if word.endswith((".toml", ".py")) and "config" in meanings:
            return f"{unknown}: give a config file, which is TOML, by --config"
        if "text" in meanings and not word.startswith("-"):
            return f"{unknown}: give a text by --text, shards by --data_dir"
        for nearest in difflib.get_close_matches(plain, meanings, 1, cutoff=0.8):  # misspelt
            return f"{unknown}: the nearest is {meanings[nearest]}"
        return unknown


def words_of(argv: Sequence[object] | None) -> list[str]:
    """Return the words of a command line, by default those of this process."""
    if argv is None:
        argv = sys.argv[1:]
    return [str(word) for word in argv]


def without_dashes(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_").lower()


def flag(
    default: object,
    help: str,
    type: Callable | None = None,
    metavar: str | None = None,
    *,
    heading: str = "",
    **options: Any,
) -> Any:
    """Declare a flag as a field of a frozen dataclass.

    type, metavar, options: see add_argument; heading: in --help, above this flag."""
    options |= dict(help=help, type=type, metavar=metavar, heading=heading)
    return field(default=default, metadata=options)


def add_flags(parser: argparse.ArgumentParser, table: type):
    """Add the flags that a dataclass declares to a parser."""
    group: argparse._ActionsContainer = parser
    for one in fields(table):
        options = dict(one.metadata)
        heading = options.pop("heading")
        if heading:
            group = parser.add_argument_group(heading)
        if isinstance(one.default, bool):
            options |= dict(type=truth, nargs="?", const=True, metavar="BOOL")
        group.add_argument(f"--{one.name}", **options)


def parse_words(parser: Parser, source: str, words: Sequence[str]) -> dict[str, Any]:
    """Parse the words of a source that is named in errors; return the flags by name."""
    try:
        return vars(parser.parse_args(words))
    except UsageError as fault:
        raise UsageError(f"{source}: {fault}") from None


def read_toml(path: str) -> list[str]:
    """Read a TOML file of flags; return them as the words of a command line. Sections are ignored,
    but group flags for the reader."""
    words: dict[str, str] = {}
    try:
        with open(path, "rb") as file:
            content = tomllib.load(file)
        entries = list(content.items())
        for name, value in entries:  # grows in the loop
            if isinstance(value, dict):
                entries += value.items()
            elif name in (*words, "config"):
                raise ValueError(f"{name} is set already")
            else:
                words[name] = f"--{name}={value}"
    except OSError as fault:
        raise UsageError(f"--config: {path}: {fault.strerror}") from None
    except (ValueError, RecursionError) as fault:
        raise UsageError(f"--config: {path}: not a TOML file of flags: {fault}") from None
    return list(words.values())


def truth(text: str) -> bool:
    """Parse True or False, for `type` of a switch."""
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither True nor False")
    return text.lower() == "true"


# whole number of a flag or in a checkpoint: two of them add up within 64 bits
LARGEST = (1 << 62) - 1
LARGEST_FLOAT = sys.float_info.max  # infinity is in no range


class Range(NamedTuple):
    """The numbers from low to high; with `above`, without low."""

    low: float
    high: float = LARGEST_FLOAT
    above: bool = False

    def has(self, value: float) -> bool:
        is_high_enough = value > self.low if self.above else value >= self.low
        return is_high_enough and value <= self.high

    def __str__(self) -> str:
        text = f"above {self.low:,}" if self.above else f"at least {self.low:,}"
        return f"{text}, at most {self.high:,}" if self.high < LARGEST else text


def integer(low: int, high: int = LARGEST) -> Callable:
    """Make a parser of whole numbers in a range, also in the form 10e9, for `type` of an
    argument."""
    return number(Range(low, high), whole=True)


def real(low: float, high: float = LARGEST_FLOAT, above: bool = False) -> Callable:
    """Make a parser of numbers in a range, for `type` of an argument."""
    return number(Range(low, high, above), whole=False)


def number(allowed: Range, whole: bool) -> Callable:
    """Make a parser of numbers in a range, or of the whole ones alone."""

    def parse(text: str) -> float:
        with suppress(ValueError):
            value = int(text) if text.isdigit() else float(text)
            if allowed.has(value) and not (whole and value % 1):
                return int(value) if whole else float(value)
        kind = "a whole number" if whole else "a number"
        remedy = " (give 1e6 for 1M)" if re.fullmatch(r"[0-9.]+[kKmMgGbBtT]", text) else ""
        raise argparse.ArgumentTypeError(f"{text!r} is not {kind} that is {allowed}{remedy}")

    return parse


def quoted(path: object) -> str:
    """Quote a path for a shell command; one that begins with - gets ./ in front."""
    text = str(path)
    return shlex.quote(f"./{text}" if text.startswith("-") else text)


def path_name(text: str) -> str:
    """Check a path, for `type` of an argument.

    pathlib would turn an empty one into the working directory. No system call takes NUL."""
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is not a path")
    return text


def refuse_address(path: str):
    """Raise DataError for an address, where a path of a file or directory is expected."""
    if "://" in path and not os.path.exists(path):
        raise DataError(
            f"{path}: an address: download it first; a data set of the hub is named OWNER/NAME"
        )


# What ends a program with a line instead of a traceback
EXPECTED = (SpiderError, FloatingPointError, OSError, KeyboardInterrupt)


def run_program(main: Callable[[], int | None], prog: str, interrupted: str = "") -> int:
    """Run a command and return its exit status.

    interrupted: the line that Ctrl-C prints, see `end_of_program`."""
    try:
        prepare_streams()
        status = main() or 0
        sys.stdout.flush()
        return status
    except EXPECTED as fault:
        return end_of_program(prog, fault, interrupted)


def end_of_program(
    prog: str, fault: BaseException, interrupted: str = "", silent: bool = False
) -> int:
    """Print the line of an expected error that ends a program; return the exit status.

    That is 2, or 1 for divergence. Ctrl-C is the line `interrupted`, if there is one, and the
    status 130. A closed stdout is no error. silent: another process prints the line."""
    status = 2
    line = f"error: {fault}"
    match fault:
        case BrokenPipeError():  # stdout is closed, as by `| head`
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
    if report:  # torchrun's traceback then ends with this line
        failure = dict(message=line, extraInfo=dict(timestamp=int(time.time())))
        Path(report).write_text(json.dumps(dict(message=failure)))
    return status


def prepare_streams():
    """Open standard streams that the caller closed, as by `>&-`, on /dev/null, and let stdout take
    any text.

    Else a file that is opened later takes the place of one, and messages are written into it."""
    if sys.platform == "win32":  # it lacks SIGHUP, and directories there cannot be synced
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


def start_script(prog: str):
    """Prepare the process of a script, before it imports torch, which takes seconds.

    Until the imports are done, Ctrl-C ends the process without a traceback. If packages are
    missing, print a line and exit."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    status = run_program(check_installed, prog)
    if status:
        sys.exit(status)
    set_allocator()


def end_by_exceptions():
    """Make the signals that end a script raise exceptions: Ctrl-C KeyboardInterrupt, SIGTERM and
    SIGHUP (a lost terminal) SystemExit. Then files that are not complete are deleted."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, lambda number, _: sys.exit(128 + number))


def check_installed():
    """Raise UsageError if packages are missing that every script imports."""
    needed = ("numpy", "torch", "loguru", "filelock")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"{sys.executable} has no {', '.join(missing)}: activate the environment that has "
            f"Spider, or install it by pip install -e ."
        )


def set_allocator():
    """Let torch's CUDA allocator extend its segments, because the number of rows varies by step.

    Call it before torch is imported. Settings of the user stay.

    Not on WSL2: drivers before R615 refuse to map such segments ("CUDA driver error: unknown
    error"), or report a lack of memory as "device not ready" (pytorch/pytorch#192330)."""
    if "PYTORCH_CUDA_ALLOC_CONF" in os.environ or "microsoft" in platform.release().lower():
        return
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def print_error(prog: str, line: str):
    """Print a line on stderr, over a progress bar; of a very long one, which quotes a file, the
    first and last characters."""
    if len(line) > 1000:
        line = f"{line[:500]} ... {line[-500:]}"
    clear = "\r\033[K" if sys.stderr.isatty() else ""
    print(f"{clear}{prog}: {one_line(line)}", file=sys.stderr)


# --------------------------------------------------------------------------------------------------
# Files

MIB = 1 << 20
# The most bytes of a line of JSON or a cell of CSV, which parsed may take 30 times as much memory
MOST_OF_RECORD = 32 * MIB


def bounded_lines(file: IO[bytes]) -> Iterator[bytes]:
    """Yield each line of a file; of one that is longer than a record may be, the first bytes alone,
    one more than the limit."""
    while line := file.readline(MOST_OF_RECORD + 1):
        yield line
        rest = line
        while rest and not rest.endswith(b"\n"):  # skip what is left of a long line
            rest = file.readline(MIB)


@contextmanager
def locked(directory: Path, file: Path | None = None):
    """Lock a directory against other processes, or raise UsageError.

    A file is locked, by default `.lock` in the directory, and deleted in the end. The lock ends
    with the process."""
    import filelock  # not at the top: exports have this module, and lock nothing

    if file is None:
        file = directory / ".lock"
    # A soft lock would outlive a killed process.
    lock = filelock.FileLock(file, fallback_to_soft=False)
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout:
        raise UsageError(
            f"{directory}: another command is using it: wait for it, or use another directory "
            f"(if there is none, as after the failure of another machine, delete {file})"
        ) from None
    except OSError as fault:
        if fault.filename is not None:  # the file could not be opened
            raise
        note(
            f"{directory} cannot be locked ({fault.strerror}): make sure that nothing else uses it"
        )
    try:
        yield
    finally:
        with suppress(OSError):
            file.unlink()  # before the release, after which it may be another process's
        lock.release()


def sync(path: Path):
    """Flush a file, or the entries of a directory, to disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


@contextmanager
def durable(path: Path, mode: str = "w") -> Iterator[IO]:
    """Write a file atomically: yield a temporary file beside it, which replaces the old one once it
    is complete and synced.

    A kill or a power loss leaves one of the two, an exception the old one. What a killed process
    left of a file is deleted when it is written again. The temporary name is random: two processes
    do not share it, and nobody can guess it and put a link there."""
    # os.replace would replace a device such as /dev/null, or the link /dev/stdout
    if path.exists() and (not path.is_file() or path.parent == Path("/dev")):
        raise FileExistsError(errno.EEXIST, "not a regular file: use another name", str(path))
    delete_unfinished(path.parent, glob.escape(path.name))
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        try:
            file = open(temporary, mode.replace("w", "x"))
        except OSError as fault:
            fault.filename = str(path)  # the name that the user knows
            raise
        with suppress(OSError):  # a file system may have no locks
            hold(file.fileno(), waits=True)
        if temporary.exists():
            break
        file.close()  # another writer held it first, and deleted it as left by a killed process
    with file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    sync(path.parent)


def hold(descriptor: int, waits: bool = False):
    """Lock an open file until its process ends or closes it. If another one holds it, wait or raise
    BlockingIOError. Raise OSError if the file system has no locks."""
    import fcntl  # not at the top: exports have this module, and Windows lacks it

    fcntl.flock(descriptor, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)


def delete_unfinished(directory: Path, pattern: str):
    """Delete the temporary files that killed processes left of `durable` files with such names. A
    process that lives holds its own."""
    digits = "[0-9a-f]" * 8
    for unfinished in directory.glob(f".{pattern}.{digits}.tmp"):
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            with os.fdopen(os.open(unfinished, flags), "rb") as file:
                hold(file.fileno())
                unfinished.unlink()
        except (BlockingIOError, FileNotFoundError):  # it is held, or another process was faster
            pass
        except OSError as fault:  # such as another owner's; it only takes space
            note(f"{unfinished}, which a killed process left, cannot be deleted: {fault.strerror}")

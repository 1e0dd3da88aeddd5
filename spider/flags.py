"""Command lines: flags, their values, and errors that name the right flag. Does not import
torch."""

import argparse
import difflib
import os
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import field, fields
from pathlib import Path
from typing import Any

from spider.config import MAX_FLOAT, MAX_INT, Range
from spider.errors import DataError, UsageError


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keep the description's line breaks; show a default only if it is a value."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        is_value = isinstance(default, int | float | str) and default != argparse.SUPPRESS
        if not is_value or default is False or action.nargs == 0:
            return action.help
        return f"{action.help} (default: {default})"


# For each script: a flag (or another remedy), and the names that other projects give that flag
OTHER_NAMES = Path(__file__).with_name("other_names.toml")
SECTIONS = re.compile(r"^(train|training|optimizer)\.")  # prefixes of torchtitan and LitGPT flags


class Parser(argparse.ArgumentParser):
    """ArgumentParser that raises UsageError, refuses abbreviations, and suggests a flag in place of
    an unknown one."""

    def __init__(self, **options):
        super().__init__(allow_abbrev=False, formatter_class=HelpFormatter, **options)

    def error(self, message: str):
        if message.endswith("expected one argument"):
            message += " (write --NAME=VALUE if the value begins with -)"
        raise UsageError(f"{message}; see python {self.prog} --help")

    def parse_known_args(self, args=None, namespace=None):
        """Parse a command line, or the part after a subcommand such as prepare.

        Raise UsageError for an unknown word."""
        words = words_of(args)
        for word in words:
            if word.endswith("=--"):  # Python 3.11 would parse it as a list
                self.error(f"{word.removesuffix('=--')}: -- is not a value")
        namespace, unknown = super().parse_known_args(words, namespace)
        if unknown:
            flags = [word for word in unknown if re.match("--?[A-Za-z]", word)]
            self.error("; ".join(map(self.describe_unknown, flags or unknown[:1])))
        return namespace, unknown

    def describe_unknown(self, word: str) -> str:
        """Describe an unknown flag or word; suggest the flag that the user probably meant."""
        others = tomllib.loads(OTHER_NAMES.read_text())
        script = self.prog.partition(" ")[0]  # without the subcommand
        meanings: dict[str, str] = {}
        for remedy, names in others.get(script, others["train.py"]).items():  # bench.py: train.py's
            meanings |= dict.fromkeys(names.split(), remedy)
        for flag, value in re.findall(r"(--[\w-]+)( \[)?", self.format_usage()):
            plain = without_dashes(flag)
            meanings[plain] = flag
            if value:  # an optional value: the flag is a switch
                meanings[f"no_{plain}"] = f"{flag}=False"

        name = word.partition("=")[0]
        plain = SECTIONS.sub("", without_dashes(name))
        unknown = f"unknown {'flag' if word.startswith('-') else 'word'} {name}"
        if plain in meanings:
            return f"{unknown}: use {meanings[plain]}"
        if word.endswith((".toml", ".py")) and "config" in meanings:
            return f"{unknown}: give a config file (TOML) with --config"
        if "text" in meanings and not word.startswith("-"):
            return f"{unknown}: give a text with --text, shards with --data_dir"
        for nearest in difflib.get_close_matches(plain, meanings, 1, cutoff=0.8):  # misspelled
            return f"{unknown}: the nearest is {meanings[nearest]}"
        return unknown


def words_of(argv: Sequence[object] | None) -> list[str]:
    """Return the words of a command line as strings; by default, this process's own."""
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

    type, metavar, options: as in add_argument. heading: printed above this flag in --help."""
    options |= dict(help=help, type=type, metavar=metavar, heading=heading)
    return field(default=default, metadata=options)


def add_flags(parser: argparse.ArgumentParser, table: type):
    """Add the flags declared in a dataclass to a parser."""
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
    """Parse the words of a source; return the flags by name. Errors name the source."""
    try:
        return vars(parser.parse_args(words))
    except UsageError as fault:
        raise UsageError(f"{source}: {fault}") from None


def read_toml(path: str) -> list[str]:
    """Read flags from a TOML file; return them as words of a command line. Its sections are for the
    reader only."""
    words: dict[str, str] = {}
    try:
        with open(path, "rb") as file:
            content = tomllib.load(file)
        entries = list(content.items())
        for name, value in entries:  # the loop appends to it
            if isinstance(value, dict):
                entries += value.items()
            elif name in (*words, "config"):
                raise ValueError(f"{name} is already set")
            else:
                words[name] = f"--{name}={value}"
    except OSError as fault:
        raise UsageError(f"--config: {path}: {fault.strerror}") from None
    except (ValueError, RecursionError) as fault:
        raise UsageError(f"--config: {path}: not a TOML file of flags: {fault}") from None
    return list(words.values())


# --------------------------------------------------------------------------------------------------
# Values


def truth(text: str) -> bool:
    """Parse True or False: the `type` of a switch."""
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither True nor False")
    return text.lower() == "true"


def integer(low: int, high: int = MAX_INT) -> Callable:
    """Make an argument's `type` that parses whole numbers in a range, also written as 10e9."""
    return number(Range(low, high), whole=True)


def real(low: float, high: float = MAX_FLOAT, above: bool = False) -> Callable:
    """Make an argument's `type` that parses numbers in a range."""
    return number(Range(low, high, above), whole=False)


def number(allowed: Range, whole: bool) -> Callable:
    """Make an argument's `type` that parses numbers, or only whole numbers, in a range."""

    def parse(text: str) -> float:
        with suppress(ValueError):
            value = int(text) if text.isdigit() else float(text)
            if allowed.has(value) and not (whole and value % 1):
                return int(value) if whole else float(value)
        expected = "a whole number" if whole else "a number"
        remedy = " (give 1e6 for 1M)" if re.fullmatch(r"[0-9.]+[kKmMgGbBtT]", text) else ""
        raise argparse.ArgumentTypeError(f"{text!r} is not {expected} that is {allowed}{remedy}")

    return parse


def path_name(text: str) -> str:
    """Check a path: an argument's `type`.

    pathlib would turn an empty path into the working directory. No system call accepts NUL."""
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is not a path")
    return text


def refuse_url(path: str):
    """Raise DataError for a URL in place of the path of a file or directory."""
    if "://" in path and not os.path.exists(path):
        raise DataError(
            f"{path}: a URL: download it first; a data set of the hub is named OWNER/NAME"
        )


def quoted(path: object) -> str:
    """Quote a path for a shell command; prefix it with ./ if it begins with -."""
    text = str(path)
    return shlex.quote(f"./{text}" if text.startswith("-") else text)

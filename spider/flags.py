"""Flags: parsers of values, and the argument parser of every command line."""

import argparse
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO

from spider import console
from spider.console import reader_may_leave
from spider.errors import UsageError


@dataclass(frozen=True)
class Flag:
    """One setting of the command line; `parse` turns its text into a value or raises ValueError with what it wants."""
    name: str
    default: object
    parse: Callable | None                # None: a switch; alone it means on, and `off` undoes a recipe's
    help: str
    env: str | None = None
    alone: str | None = None              # the text that it stands for without one, where it need not have one


def integer(low: int, high: int = (1 << 62) - 1) -> Callable:
    def parse(text):
        try:
            value = int(text) if decimal(text).isdigit() else float(text)  # 10e9 is a whole number too
        except ValueError:
            value = math.nan
        if not low <= value <= high or value != int(value):
            raise ValueError(f"a whole number of at least {low}" + f" and at most {high}" * (high < 1 << 61))
        return int(value)
    return parse


def real(low: float, high: float = math.inf, open_low: bool = False, open_high: bool = False) -> Callable:
    def parse(text):
        value = number(text)
        excluded = (open_low and value == low) or (open_high and value == high) or math.isinf(value)
        if excluded or not low <= value <= high:
            raise ValueError(f"a number {'above' if open_low else 'of at least'} {low:g}" + (
                "" if high == math.inf else f" and {'below' if open_high else 'at most'} {high:g}"))
        return value
    return parse


def one_of(*choices: str) -> Callable:
    def parse(text):
        if text not in choices:
            raise ValueError(f"one of {', '.join(choices)}")
        return text
    parse.choices = choices               # --help shows them
    return parse


DECIMAL = re.compile(r"[+-]?([0-9]+([.][0-9]*)?|[.][0-9]+)([eE][+-]?[0-9]+)?")


def decimal(text: str) -> str:
    """Return a number as it was written, in plain ASCII decimals: int() and float() take 1_0, nan and other digits."""
    if not DECIMAL.fullmatch(text):
        raise ValueError("a number")
    return text


def number(text: str) -> float:
    return float(decimal(text))


def filled(kind: str) -> Callable:
    """Make a parser that refuses the empty text: of an empty path pathlib makes the working directory."""
    def parse(text: str) -> str:
        if not text:
            raise ValueError(kind)
        return text
    return parse


a_path = filled("a path")


def checked(parse: Callable) -> Callable:
    """Make of a parser a type for argparse, which names the flag."""
    def convert(text: str):
        try:
            return parse(text)
        except ValueError as wanted:
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}") from None
    return convert


def whole(low: int, high: int = (1 << 62) - 1) -> Callable:
    def parse(text: str) -> int:
        value = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else -1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} to {high}")
        return value
    return parse


class Parser(argparse.ArgumentParser):
    """ArgumentParser that raises UsageError in place of ending the process."""

    def parse_args(self, argv: Sequence[str] | None = None, namespace=None) -> argparse.Namespace:
        for word in sys.argv[1:] if argv is None else argv:
            if word.startswith("--") and word.endswith("=--"):  # of which argparse makes []
                self.error(f"argument {word[:-3]}: '--' is no value")
        return super().parse_args(argv, namespace)

    def print_help(self, file: IO | None = None):
        with reader_may_leave():
            super().print_help(file)

    def error(self, message: str):
        raise UsageError(f"{console.one_line(message)}; see {self.prog} --help")

"""Declare and parse flags, and run a program: shared by all command lines. Does not import torch, so that --help is
fast.

Flag, integer, real, one_of, path_name, nonempty  a flag, and parsers of its value, which raise BadValue
Parser                                            argparse with suggestions for misspelled flags
parse_flags, config_text                          read flags, variables and --config files; write a --config file
run_program, error_line                           show expected errors as one line on stderr; return the exit status
"""

import argparse
import difflib
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import IO

from spider.console import one_line, tolerate_closed_stdout
from spider.errors import SpiderError, UsageError

CONFIG_LIMIT = 1 << 20                    # bytes of a --config file that are read


@dataclass(frozen=True)
class Flag:
    """A flag. `parse` turns its text into a value or raises BadValue; None makes a switch, which takes `on`, `off` or
    no value (on)."""
    name: str
    default: object
    parse: Callable | None
    help: str
    env: str | None = None                # environment variable that also sets it
    alone: str | None = None              # its text if no value is given; None: a value is required
    metavar: str | None = None            # placeholder of the value in --help

    @property
    def choices(self) -> tuple[str, ...]:
        return ("on", "off") if self.parse is None else getattr(self.parse, "choices", ())

    def value(self, text: str):
        return self.parse(text) if self.parse else on_or_off(text) == "on"

    def check(self, value):
        """Validate a recorded value as if it were given to the flag, and return it; raise BadValue if it is bad."""
        parsed = self.value(value_text(value))
        if parsed != value:
            raise BadValue(str(value), f"a {type(parsed).__name__}")
        return parsed


# ---------------------------------------------------------------------------------------------------------------------
# Parsers of values


class BadValue(argparse.ArgumentTypeError, ValueError):
    """A bad value of a flag; the message names the expected kind."""

    def __init__(self, text, wanted: str):
        super().__init__(f"{text!r} is not {wanted}")


def integer(low: int, high: int = (1 << 62) - 1) -> Callable:
    """Make a parser of integers from low to high, also in the form 10e9."""
    def parse(text: str) -> int:
        try:
            value = int(text) if decimal(text).isdigit() else float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high or value != int(value):
            raise BadValue(text, f"a whole number of at least {low}" + f" and at most {high}" * (high < 1 << 61))
        return int(value)
    parse.metavar = "N"
    return parse


def real(low: float, high: float = math.inf, open_low: bool = False, open_high: bool = False) -> Callable:
    """Make a parser of finite numbers from low to high; open bounds are excluded."""
    def parse(text: str) -> float:
        value = number(text)
        excluded = (open_low and value == low) or (open_high and value == high) or math.isinf(value)
        if excluded or not low <= value <= high:
            raise BadValue(text, f"a number {'above' if open_low else 'of at least'} {low:g}" + (
                "" if high == math.inf else f" and {'below' if open_high else 'at most'} {high:g}"))
        return value
    parse.metavar = "NUMBER"
    return parse


def one_of(*choices: str) -> Callable:
    def parse(text: str) -> str:
        if text not in choices:
            raise BadValue(text, f"one of {', '.join(choices)}")
        return text
    parse.choices = choices               # --help shows them
    return parse


def nonempty(kind: str) -> Callable:
    """Make a parser that refuses empty text, since pathlib turns an empty path into the working directory."""
    def parse(text: str) -> str:
        if not text:
            raise BadValue(text, kind)
        return text
    parse.metavar = kind.split()[-1].upper()
    return parse


path_name = nonempty("a path")
on_or_off = one_of("on", "off")
DECIMAL = re.compile(r"[+-]?([0-9]+([.][0-9]*)?|[.][0-9]+)([eE][+-]?[0-9]+)?")


def decimal(text: str) -> str:
    """Check that a number is in plain ASCII decimals, and return it; int() and float() accept 1_0, nan and more."""
    if not DECIMAL.fullmatch(text):
        raise BadValue(text, "a number")
    return text


def number(text: str) -> float:
    return float(decimal(text))


# ---------------------------------------------------------------------------------------------------------------------
# The argument parser

# Names of our flags in other programs.
SYNONYMS = {
    "model": "preset arch architecture size model_size",
    "data_dir": "data dataset data_path dataset_dir dataset_path train_data input",
    "mock_data": "mock synthetic dummy_data fake_data",
    "ckpt_dir": "out_dir output_dir out output checkpoint_dir save_dir save_path",
    "ckpt_every": "save_every save_steps save_interval checkpoint_every checkpoint_interval",
    "keep_last": "save_total_limit keep max_checkpoints",
    "resume": "checkpoint ckpt load resume_from resume_from_checkpoint init_from restore",
    "max_steps": "steps num_steps n_steps train_steps max_iters iters iterations num_iterations total_steps",
    "target_tokens": "tokens max_tokens num_tokens total_tokens train_tokens epochs num_train_epochs max_epochs",
    "seq_len": "block_size context context_length context_len sequence_length max_seq_len max_length ctx_len",
    "micro_batch": "batch_size batch bs device_batch_size per_device_train_batch_size micro_batch_size",
    "global_batch": "total_batch_size global_batch_size",
    "grad_accum": "gradient_accumulation_steps accumulate_grad_batches accumulation_steps accumulate",
    "n_loops": "loops num_loops recurrence mean_recurrence",
    "lr": "learning_rate max_lr peak_lr matrix_lr",
    "min_lr_fraction": "min_lr final_lr final_lr_frac lr_min",
    "schedule": "lr_scheduler lr_scheduler_type scheduler decay lr_decay",
    "warmup_steps": "warmup warmup_iters num_warmup_steps lr_warmup",
    "weight_decay": "wd decay_rate",
    "grad_clip": "clip clip_grad clip_grad_norm max_grad_norm gradient_clipping",
    "optimizer": "optim opt",
    "beta1": "adam_beta1 betas",
    "beta2": "adam_beta2",
    "precision": "dtype amp mixed_precision bf16 fp16 fp8",
    "compile": "torch_compile",
    "recompute": "gradient_checkpointing activation_checkpointing checkpoint_activations",
    "device": "gpu cuda cpu",
    "shards": "fsdp world_size shard tensor_parallel",
    "eval_every": "eval_interval eval_steps val_every val_interval",
    "eval_tokens": "eval_iters eval_batches val_tokens",
    "log_every": "log_interval logging_steps log_steps",
    "patience": "early_stopping early_stopping_patience",
    "keep_best": "save_best best",
    "run": "wandb wandb_name wandb_run run_name wandb_project project name",
    "config": "config_file cfg yaml toml",
    "dry_run": "dry check",
    "set": "override overrides model_args",
    "bytes": "max_new_tokens max_tokens num_tokens length",
    "samples": "num_samples n_samples num_return_sequences",
    "temperature": "temp",
    "out": "output output_dir out_dir",
}


def suggest(word: str, names: Collection[str]) -> str:
    """Return "; did you mean NAME?" with the closest of `names`, or an empty text."""
    dashes = "--" if any(name.startswith("--") for name in names) else ""
    word, known = word.lower().lstrip("-").replace("-", "_"), {name.lstrip("-") for name in names}
    known = {name.replace("-", "_"): name for name in known}
    found = [word] if word in known else [
        name for name in known if word in SYNONYMS.get(name, "").split()] or difflib.get_close_matches(
        word, known, 1, 0.75) or [name for name in known if len(word) > 1 and name.startswith(word)]
    return f"; did you mean {' or '.join(dashes + known[name] for name in found[:2])}?" if found else ""


class Parser(argparse.ArgumentParser):
    """ArgumentParser that raises UsageError instead of exiting, and refuses abbreviated flags."""

    def __init__(self, **options):
        super().__init__(**dict(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter) | options)

    def parse_args(self, argv: Sequence[str] | None = None, namespace=None) -> argparse.Namespace:
        for word in sys.argv[1:] if argv is None else argv:
            if word.startswith("--") and word.endswith("=--"):  # argparse would return []
                self.error(f"argument {word[:-3]}: '--' is not a value")
        namespace, unknown = self.parse_known_args(argv, namespace)
        if unknown:
            flags = [word.partition("=")[0] for word in unknown if word.startswith("--")]
            self.error(f"unrecognized arguments: {' '.join(unknown)}" + "".join(
                suggest(flag, self.known_flags()) for flag in flags[:1]))
        return namespace

    def known_flags(self) -> list[str]:
        """List the flags of this parser and its subcommands."""
        commands = [command for action in self._actions if isinstance(action, argparse._SubParsersAction)
                    for command in action.choices.values()]
        return [flag for parser in (self, *commands) for flag in parser._option_string_actions if flag[:2] == "--"]

    def print_help(self, file: IO | None = None):
        with tolerate_closed_stdout():
            super().print_help(file)

    def error(self, message: str):
        raise UsageError(f"{one_line(message)}{' See' if message.endswith('?') else '; see'} {self.prog} --help")


# ---------------------------------------------------------------------------------------------------------------------
# Flags, environment variables and --config files


def value_text(value) -> str:
    """Write a value as --help and the log show it; functions compute a default from the horizon."""
    return "by the horizon" if callable(value) else {True: "on", False: "off"}[value] if type(value) is bool else (
        str(value))


def parse_flags(groups: Mapping[str, Sequence[Flag]], argv: Sequence[str] | None, environ: Mapping[str, str], *,
                prog: str, doc: str, recipes: Mapping[str, dict] | None = None,
                alternatives: Iterable[Collection[str]] = ()) -> SimpleNamespace:
    """Return the values of all flags by name. Precedence: argv, environment variable, the file of the flag `config`,
    default. Raise UsageError for a bad value.

    groups: flags by heading of --help. recipes: further defaults, only shown in --help. alternatives: groups of names
    that exclude each other: one on the command line or in the environment overrides the others in the file. The result
    also has `given`, the names set anywhere, and `environment`, a line NAME=VALUE for each variable that was used.
    """
    texts = vars(flag_parser(groups, prog, doc, recipes or {}).parse_args(argv))
    values = SimpleNamespace(given=set(), environment=[])
    for flag in (flag for flags in groups.values() for flag in flags):
        text, source = texts[flag.name], f"--{flag.name}"
        if text is None and flag.env and environ.get(flag.env):
            text, source = environ[flag.env], flag.env
            values.environment.append(f"{source}={text}")
        try:
            setattr(values, flag.name, flag.default if text is None else flag.value(text))
        except BadValue as fault:
            raise UsageError(f"{source}: {fault}") from None
        values.given |= {flag.name} - ({flag.name} if text is None else set())
    if getattr(values, "config", None) is not None:
        replaced = values.given.union(*(names for names in alternatives if values.given & {*names}))
        found = {name: value for name, value in read_config(values.config, groups).items() if name not in replaced}
        vars(values).update(found)
        values.given |= found.keys()
    return values


def flag_parser(groups: Mapping[str, Sequence[Flag]], prog: str, doc: str, recipes: Mapping[str, dict]) -> Parser:
    """Make a parser that returns every flag's value as text, with a heading per group."""
    parser = Parser(prog=prog, description=doc, usage=f"python {prog} [--FLAG VALUE ...]")
    for heading, flags in groups.items():
        group = parser.add_argument_group(heading)
        for flag in flags:
            text = flag.help + (f"; default {flag.default}" if flag.default not in (None, False) else "")
            text += "".join(f"; {name}: {value_text(recipe[flag.name])}"
                            for name, recipe in recipes.items() if flag.name in recipe)
            text += f"; environment {flag.env}" if flag.env else ""
            alone = "on" if flag.parse is None else flag.alone
            metavar = flag.metavar or ("{" + ",".join(flag.choices) + "}" if flag.choices else
                                       getattr(flag.parse, "metavar", "TEXT"))
            group.add_argument(f"--{flag.name}", metavar=metavar, help=text.replace("%", "%%"),
                               **dict(nargs="?", const=alone) if alone else {})
    return parser


def read_config(name: str, groups: Mapping[str, Sequence[Flag]]) -> dict:
    """Read the values of flags from a TOML file, in sections named like `groups` or before any section.

    Raise UsageError, with the file's name, for an unknown name or section or a bad value.
    """
    def refuse(fault: str):
        raise UsageError(one_line(f"--config: {name}: {fault}"))
    try:                                  # imported here, since other command lines do not need it
        import tomllib
    except ModuleNotFoundError:           # Python 3.10
        import tomli as tomllib
    try:
        with open(name, "rb") as file:
            content = tomllib.loads(file.read(CONFIG_LIMIT).decode())
    except OSError as fault:
        refuse(fault.strerror)
    except (ValueError, RecursionError) as fault:
        refuse(f"not TOML: {fault}")
    sections = {flag.name: heading for heading, flags in groups.items() for flag in flags if flag.name != "config"}
    flags, values = {flag.name: flag for flags in groups.values() for flag in flags}, {}
    entries = [("", key, value) for key, value in content.items() if not isinstance(value, dict)]
    for section, entry in content.items():
        if isinstance(entry, dict):
            if section not in groups:
                refuse(f"unknown section [{section}]{suggest(section, groups)}")
            entries += [(section, key, value) for key, value in entry.items()]
    for section, key, value in entries:
        if key not in sections:
            refuse(f"unknown flag {key}{suggest(key, sections)}")
        if section not in ("", sections[key]):
            refuse(f"{key} belongs in section [{sections[key]}], not [{section}]")
        if key in values:
            refuse(f"{key} is set twice")
        try:
            values[key] = flags[key].value(config_word(value, flags[key]))
        except BadValue as fault:
            refuse(f"{key}: {fault}")
    return values


def config_word(value, flag: Flag) -> str:
    """Write a TOML value as the text of a flag."""
    if type(value) is bool and "on" in flag.choices:
        return value_text(value)
    if type(value) in (str, int, float) and flag.parse is not None:
        return str(value)
    wanted = "true or false" if flag.parse is None else "a number or a quoted text"
    raise BadValue(value, wanted)


def config_text(groups: Mapping[str, Sequence[Flag]], values: Mapping[str, object]) -> str:
    """Write values by name as a file for --config, a section per group; leave out None, which TOML does not have."""
    sections = []
    for heading, flags in groups.items():
        lines = [f"{flag.name} = {toml(values[flag.name])}" for flag in flags
                 if values.get(flag.name) is not None and flag.name != "config"]
        name = heading if heading.isidentifier() else toml(heading)
        sections += ["\n".join((f"[{name}]", *lines))] * bool(lines)
    return "\n\n".join(sections) + "\n"


def toml(value) -> str:
    """Write a bool, number or text in TOML. Numbers keep every bit; special characters are escaped."""
    if type(value) is bool:
        return "true" if value else "false"
    if type(value) in (int, float):
        return repr(value)
    return '"' + "".join(f"\\{c}" if c in '"\\' else c if c.isprintable() else f"\\u{ord(c):04x}" if ord(c) < 1 << 16
                         else f"\\U{ord(c):08x}" for c in str(value)) + '"'


# ---------------------------------------------------------------------------------------------------------------------
# Programs


def error_line(fault: BaseException) -> str | None:
    """Return the line to show for an expected error, or None for any other, which needs a traceback."""
    if isinstance(fault, (SpiderError, FloatingPointError)):
        return f"error: {fault}"
    if isinstance(fault, OSError):
        return f"error: {f'{fault.filename}: ' if fault.filename else ''}{fault.strerror or fault}"
    return None


def run_program(main: Callable[[], int | None], prog: str, *, interrupted: str | None = None) -> int:
    """Run a command and return its exit status: 2 after an expected error, shown as one line on stderr; 130 after
    Ctrl-C, with the line `interrupted` if given; 0 after a closed stdout; else its own."""
    try:
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="backslashreplace")
        status = main() or 0
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        status, line = 130, interrupted
    except Exception as fault:
        status, line = 2, error_line(fault)
        if line is None:
            raise
    try:
        sys.stdout.flush()
    except OSError:                       # else the rest of the output would fail again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if line is not None:
        print_error(prog, line)
    return status


def print_error(prog: str, line: str):
    """Print a line on stderr, over a progress bar."""
    print("\r\033[K" * sys.stderr.isatty() + f"{prog}: {one_line(line)}", file=sys.stderr)

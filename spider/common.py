"""Shared by all scripts: errors, the terminal, command lines, files. Does not import torch.

A SpiderError is shown as one line, with the exit status 2. Whatever is printed of files, data or
other people's names has its control characters escaped.
"""

import argparse
import difflib
import errno
import glob
import importlib.util
import math
import os
import platform
import re
import secrets
import shlex
import signal
import sys
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from itertools import groupby
from pathlib import Path
from typing import IO, Any

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
    """Keep line breaks of the description, and show defaults."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        is_off = action.nargs == 0 and default != action.const
        if is_off or default in (None, argparse.SUPPRESS) or isinstance(default, list | tuple):
            return action.help
        return f"{action.help} (default: {default})"


# By script: our flag, or what to give instead, and its names in nanoGPT, nanochat, torchtitan,
# LitGPT and libraries of Hugging Face
OTHER_NAMES = {
    "train.py": {
        "--micro_batch": "batch_size bs device_batch_size local_batch_size "
        "per_device_train_batch_size",
        "--grad_accum, of each rank": "gradient_accumulation_steps",
        "--global_batch BYTES": "total_batch_size global_batch_size",
        "--seq_len": "block_size max_seq_len max_seq_length max_length context_length",
        "--target_tokens BYTES (epochs times the text)": "epochs num_epochs num_train_epochs",
        "--target_tokens BYTES": "lr_decay_iters max_tokens total_tokens",
        "--target_tokens BYTES for a run, --max_steps to stop it": "max_iters num_iterations "
        "num_steps steps",
        "--lr": "learning_rate max_lr matrix_lr",
        "--min_lr_fraction, of the peak": "min_lr final_lr_frac",
        "--warmup_steps STEPS": "warmup_iters warmup_ratio",
        "--schedule wsd --wsd_decay_fraction": "warmdown_ratio",
        "--schedule cosine or wsd": "lr_scheduler_type decay_lr",
        "--beta1": "adam_beta1",
        "--beta2": "adam_beta2",
        "--optimizer": "optim",
        "--grad_clip": "max_grad_norm gradient_clipping",
        "--eval_every STEPS": "eval_interval eval_steps eval_strategy evaluation_strategy",
        "--eval_tokens BYTES": "eval_iters",
        "--ckpt_every STEPS": "checkpoint_every save_every save_interval save_steps save_strategy",
        "--keep_last": "save_total_limit",
        "--keep_best": "load_best_model_at_end",
        "--patience": "early_stopping early_stopping_patience",
        "--log_every STEPS": "log_freq log_interval logging_steps print_every",
        "--ckpt_dir": "out_dir output_dir save_dir",
        "--ckpt_dir to save, --resume to load": "checkpoint_dir",
        "--data_dir": "dataset dataset_name data train_file",
        "--resume": "init_from resume_from_checkpoint resume_from_step ckpt checkpoint",
        "--resume DIR --reset_steps": "model_name_or_path",
        "--run NAME": "run_name wandb_run_name",
        "--run NAME (without it, wandb is off)": "report_to use_wandb wandb wandb_log",
        "WANDB_PROJECT in the environment": "wandb_project",
        "--model, or --set n_prelude_layers=N": "depth n_layer num_hidden_layers",
        "--model, or --set hidden_size=N": "n_embd hidden_size",
        "--model, or --set n_heads=N": "n_head n_heads num_attention_heads",
        "--precision": "dtype bf16 fp16 fp8",
        "--recompute": "gradient_checkpointing",
        "--compile": "torch_compile",
        "--device": "device_type",
        "--device cpu": "cpu no_cuda",
        "--deterministic": "full_determinism",
        "torchrun (docs/scaling.md)": "backend ddp fsdp gpus devices num_nodes",
        "python sample.py CHECKPOINT": "max_new_tokens num_samples start temperature top_k",
        "python sample.py CHECKPOINT --eval TEXT": "eval_only do_eval",
        "python data.py prepare --val_fraction": "val_fraction val_split",
    },
    "sample.py": {
        "--bytes": "max_new_tokens max_tokens max_length length",
        "--samples": "num_return_sequences num_samples",
        "--eval TEXT": "eval_only do_eval",
        "--prompt": "start input",
        "--temperature": "temp",
        "--temperature 0": "greedy",
        "the path of a checkpoint, without a flag": "ckpt checkpoint ckpt_dir init_from model "
        "model_name_or_path out_dir",
        "--batch": "batch_size",
        "--seq_len": "block_size",
        "--precision": "dtype",
    },
    "data.py": {
        "--out": "output output_dir out_dir",
        "--field": "text_column text_field column key",
        "--config": "dataset_config subset",
        "--val_fraction": "val_split test_size",
        "--shard_mb": "shard_size",
        "its path, without a flag": "input input_file dataset data data_dir",
    },
}


class Parser(argparse.ArgumentParser):
    """ArgumentParser that raises UsageError, with the flag that is meant for an unknown one. It
    refuses abbreviations, takes --NAME=True and --NAME=False for a switch, and tells the flags that
    are given from those that are not."""

    def __init__(self, passes_on_to: tuple["Parser", ...] = (), **options):
        """passes_on_to: parsers of the words that parse_known_args returns."""
        super().__init__(allow_abbrev=False, formatter_class=HelpFormatter, **options)
        self.parsers = (self, *passes_on_to)

    def error(self, message: str):
        message = message.replace("ignored explicit argument", "is True or False, not")
        if message.endswith("expected one argument"):
            message += " (one that begins with - as --NAME=VALUE)"
        raise UsageError(f"{message}; see python {self.prog} --help")

    def parse_args(self, args=None, namespace=None):
        namespace, rest = self.parse_known_args(args, namespace)
        if rest:
            self.error(self.describe_word(rest[0]))
        return namespace

    def parse_known_args(self, args=None, namespace=None):
        """Parse the flags; return the namespace and the words that no flag takes. An unknown flag
        is an error, before one that is missing."""
        words = words_of(args)
        unknown = [self.describe_flag(name) for name in self.unknown_flags(words)]
        if unknown:
            self.error("; ".join(unknown))
        if namespace is None:
            namespace = argparse.Namespace()
        return super().parse_known_args(self.without_truth_values(words, namespace), namespace)

    def without_truth_values(
        self, words: Sequence[str], namespace: argparse.Namespace
    ) -> list[str]:
        """Return the words as argparse takes them. TOML and sweeps have --NAME=True and
        --NAME=False: a switch that is off is set in the namespace instead."""
        out: list[str] = []
        for word in words:
            name, _, value = word.partition("=")
            action = self._option_string_actions.get(name)
            is_true = value.lower() == "true"
            if action is not None and value == "--":  # Python 3.11 makes it a list
                self.error(f"{name}: -- is not a value")
            if action is None or value.lower() not in ("true", "false"):
                out.append(word)
            elif "on" in (action.choices or ()):
                out.append(f"{name}=on" if is_true else f"{name}=off")
            elif not is_switch(action):
                out.append(word)
            elif is_true:
                out.append(name)
            else:
                setattr(namespace, action.dest, False)
                out = [other for other in out if other != name]  # the last one counts
        return out

    def unknown_flags(self, words: Sequence[str]) -> Iterator[str]:
        """Yield the names of flags that neither this parser nor those of the other words have."""
        known: dict[str, argparse.Action] = {}
        for parser in self.parsers:
            known |= parser._option_string_actions
        takes_value = False  # argparse says so if there is none
        for word in words:
            if word == "--" or (self._subparsers and not word.startswith("-")):
                return
            name = word.partition("=")[0]
            is_flag = re.match("--?[A-Za-z]", word) and " " not in word
            if is_flag and name not in known and not takes_value:
                yield name
            takes_value = word in known and known[word].nargs is None

    def meanings(self) -> dict[str, str]:
        """Return what to use, by name without dashes."""
        meanings: dict[str, str] = {}
        for parser in self.parsers:
            script = parser.prog.partition(" ")[0]  # the first word, also of a subcommand's name
            for remedy, names in OTHER_NAMES.get(script, {}).items():
                meanings |= dict.fromkeys(names.split(), remedy)
            meanings |= {without_dashes(flag): flag for flag in parser._option_string_actions}
        return meanings

    def describe_flag(self, name: str) -> str:
        """Describe an unknown flag, with the one that is meant, if any is like it."""
        if self._subparsers:
            return f"flag {name}: write it after the command"
        meanings = self.meanings()
        sections = r"^(train|training|optimizer)\."  # of torchtitan and LitGPT
        plain = re.sub(sections, "", without_dashes(name))
        positive = plain.removeprefix("no_")
        if plain in meanings:
            return f"unknown flag {name}: use {meanings[plain]}"
        action = self._option_string_actions.get(f"--{positive}")
        if is_switch(action):
            return f"unknown flag {name}: use --{positive}=False"
        if action is not None and "off" in (action.choices or ()):
            return f"unknown flag {name}: use --{positive}=off"
        for nearest in difflib.get_close_matches(plain, meanings, 1, cutoff=0.84):  # misspelt
            return f"unknown flag {name}: the nearest is {meanings[nearest]}"
        return f"unknown flag {name}"

    def describe_word(self, word: str) -> str:
        """Describe a word that is no flag and no flag's value, with the remedy."""
        meanings = self.meanings()
        name, equals, _ = word.partition("=")
        if equals and name in meanings:
            return f"{word}: use {meanings[name]}"
        if word.endswith((".toml", ".py")) and "config" in meanings:
            return f"{word}: give a config file, which is TOML, by --config"
        if word.lower() in ("true", "false"):
            return f"unexpected {word}: write --NAME={word}, without a space"
        return f"unexpected word {word}"

    def given(self, argv: Sequence[str] | None) -> dict:
        """Parse argv; return the values of the flags that it sets, without defaults."""
        # The parser itself stands for "not set", since it is no flag's value.
        unset = argparse.Namespace(**dict.fromkeys(vars(self.parse_args([])), self))
        return {
            name: value
            for name, value in vars(self.parse_args(argv, unset)).items()
            if value is not self
        }

    def value(self, name: str, value, source: str) -> dict:
        """Parse the value of a flag as read from `source`, as it would be parsed on the command
        line."""
        flag = self._option_string_actions[f"--{name}"]
        if isinstance(value, bool) and flag.const is None:  # else it would be a text
            raise UsageError(f"{source}: --{name} is no switch, but {value} is given")
        try:
            return self.given([f"--{name}={value}"])
        except (UsageError, ValueError) as fault:  # such as a number of too many digits to print
            raise UsageError(f"{source}: {fault}") from None


def words_of(argv: Sequence[object] | None) -> list[str]:
    """Return the words of a command line, by default those of this process."""
    if argv is None and "kernel_launcher" not in sys.argv[0]:
        argv = sys.argv[1:]
    if argv is None or isinstance(argv, str):  # a notebook's words are those of its kernel
        raise UsageError('give the flags as a list, ["--seq_len", "512"]')
    return [str(word) for word in argv]


def is_switch(action: argparse.Action | None) -> bool:
    return isinstance(action, argparse._StoreTrueAction)


def without_dashes(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_").lower()


@dataclass(frozen=True)
class FlagSpec:
    """Describe a flag, besides its name, type and default."""

    help: str
    options: Mapping[str, Any]  # for argparse: type, choices, metavar, nargs, const
    heading: str = ""  # in --help, above this flag and those after it
    environment: bool = False  # a variable of the same name, in capitals, sets it
    recorded: bool = False  # checkpoints have its value
    reads: bool = False  # it decides which sequences a step reads
    evaluates: bool = False  # it decides which bytes an evaluation reads
    # another flag that sets a value of this one: its name, the value, its help
    alias: tuple[str, object, str] | None = None


def flag(default: object, help: str, **settings: Any) -> Any:
    """Declare a flag as a field of a frozen dataclass. settings: fields of FlagSpec, and options of
    argparse."""
    names = FlagSpec.__dataclass_fields__.keys() & settings.keys()
    own = {name: settings.pop(name) for name in names}
    return field(default=default, metadata={"flag": FlagSpec(help, settings, **own)})


def flag_specs(table: type) -> dict[str, FlagSpec]:
    """Return the flags that a dataclass declares, by name."""
    return {one.name: one.metadata["flag"] for one in fields(table)}


def add_flags(parser: argparse.ArgumentParser, table: type):
    """Add the flags that a dataclass declares to a parser, grouped by heading."""
    group: argparse._ActionsContainer = parser
    for one in fields(table):
        spec: FlagSpec = one.metadata["flag"]
        if spec.heading:
            group = parser.add_argument_group(spec.heading)
        options = dict(spec.options)
        if isinstance(one.default, bool):
            options["action"] = "store_true"
        help = spec.help
        if spec.environment:
            help += f"; in the environment {one.name.upper()}"
        group.add_argument(f"--{one.name}", default=one.default, help=help, **options)
        if spec.alias is not None:
            name, value, help = spec.alias
            group.add_argument(
                f"--{name}",
                dest=one.name,
                action="store_const",
                const=value,
                default=argparse.SUPPRESS,
                help=help,
            )


def read_toml(parser: Parser, path: str) -> dict[str, Any]:
    """Read the values of a parser's flags from a TOML file; sections are ignored, but group flags
    for the reader."""
    try:
        with open(path, "rb") as file:
            content = tomllib.loads(read_whole(file, "config file").decode())
    except OSError as fault:
        raise UsageError(f"--config: {path}: {fault.strerror}") from None
    except (ValueError, RecursionError) as fault:
        raise UsageError(f"--config: {path}: a config file is TOML: {fault}") from None
    values: dict[str, Any] = {}
    assigned = set()  # names of flags; an alias counts as the flag that it sets
    entries = list(content.items())
    for name, value in entries:  # grows in the loop
        if isinstance(value, dict):
            entries += value.items()
            continue
        action = parser._option_string_actions.get(f"--{name}")
        if action is None or action.dest in ("config", "help"):
            raise UsageError(f"--config: {path}: {parser.describe_flag(name)}")
        if action.dest in assigned:
            raise UsageError(f"--config: {path}: {name} is set twice")
        assigned.add(action.dest)
        values |= parser.value(name, value, f"--config: {path}")
    return values


# whole number of a flag or in a checkpoint: two of them add up within 64 bits
LARGEST = (1 << 62) - 1


def integer(low: int, high: int = LARGEST) -> Callable:
    """Make a parser of whole numbers from low to high, also in the form 10e9, for `type` of an
    argument."""

    def parse(text: str) -> int:
        with suppress(ValueError):
            value = int(text) if text.isdigit() else float(text)
            if low <= value <= high and value == int(value):
                return int(value)
        bounds = f"of at least {low}" if high == LARGEST else f"from {low} to {high}"
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {bounds}")

    return parse


def real(low: float, high: float = math.inf, above: bool = False) -> Callable:
    """Make a parser of finite numbers from low to high, or `above` low, for `type` of an
    argument."""

    def parse(text: str) -> float:
        with suppress(ValueError):
            value = float(text)
            if low <= value <= high and value < math.inf and not (above and value == low):
                return value
        bounds = f"above {low:g}" if above else f"of at least {low:g}"
        if high < math.inf:
            bounds += f", at most {high:g}"
        raise argparse.ArgumentTypeError(f"{text!r} is not a number {bounds}")

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


def exit_on_error(check: Callable[[], None], prog: str):
    """Run a check of a script before its imports; exit with one line if it raises an error."""
    status = run_program(check, prog)
    if status:
        sys.exit(status)


def check_installed(*packages: str):
    """Raise UsageError if packages are missing, by default those that training imports."""
    needed = packages or ("numpy", "torch", "loguru")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"{sys.executable} has no {', '.join(missing)}: activate the environment that has "
            f"Spider, or install it by pip install -e ."
        )


def check_flags_early(parse_args: Callable, prog: str):
    """Check the command line of a script before it imports torch, which takes seconds; exit if it
    is bad.

    Until the import is done, Ctrl-C ends the process without a traceback."""

    def check() -> None:
        parse_args()
        check_installed()

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    exit_on_error(check, prog)
    print(f"{prog}: starting", file=sys.stderr)


def set_allocator():
    """Let torch's CUDA allocator extend its segments, because the number of rows varies by step.

    Call it before torch is imported. Settings of the user stay.

    Not on WSL2: drivers before R615 refuse to map such segments ("CUDA driver error: unknown
    error"), or report a lack of memory as "device not ready" (pytorch/pytorch#192330)."""
    if "PYTORCH_CUDA_ALLOC_CONF" in os.environ or "microsoft" in platform.release().lower():
        return
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def print_error(prog: str, line: str):
    """Print a line on stderr, over a progress bar."""
    clear = "\r\033[K" if sys.stderr.isatty() else ""
    print(f"{clear}{prog}: {one_line(line)}", file=sys.stderr)


# --------------------------------------------------------------------------------------------------
# Files

MIB = 1 << 20
# The most bytes that are read whole, by kind. Parsed, JSON and CSV may take 30 times as much
# memory. What has no limit here is read in pieces, or mapped.
LIMITS = {
    "record": 32 * MIB,  # a value of JSON, or a line or a cell of CSV
    "prompt": 32 * MIB,
    "metadata.json": 32 * MIB,
    "JSON file": 4 * MIB,  # in an export
    "config file": MIB >> 6,  # a name of thousands of dotted parts takes quadratic time and memory
    "line": MIB,  # in metrics.jsonl
    "data.pkl": 16 * MIB,  # in a checkpoint: all but its tensors
}


def read_whole(file: IO[bytes], kind: str) -> bytes:
    """Read an open file of one of the kinds of LIMITS. Raise ValueError if it is longer, as a
    device may be without end."""
    limit = LIMITS[kind]
    content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"longer than {limit:,} bytes")
    return content


def bounded_lines(file: IO[bytes], kind: str) -> Iterator[bytes]:
    """Yield each line of a file; of one that is longer than its kind may be, the first bytes alone,
    one more than the limit."""
    limit = LIMITS[kind]
    while line := file.readline(limit + 1):
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
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        file = open(temporary, mode.replace("w", "x"))
    except OSError as fault:
        fault.filename = str(path)  # the name that the user knows
        raise
    with file:
        with suppress(OSError):  # a file system may have no locks
            hold(file.fileno())
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    sync(path.parent)


def hold(descriptor: int):
    """Lock an open file until its process ends or closes it. Raise BlockingIOError if another one
    holds it, or OSError if the file system has no locks."""
    import fcntl  # not at the top: exports have this module, and Windows lacks it

    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


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

"""Checkpoints: write one atomically, read one safely, choose the one to resume from and those to
keep.

A checkpoint is one file, `spider-step{N}.pt`, whatever the number of ranks: torch.save's archive of
tensors and plain values. It is read with `torch.load(weights_only=True)`, so loading executes no
code. All randomness is a function of (seed, step), so there is no random state in it. The keys:
`model_state_dict`, `optimizer_state_dict`, `cfg`, the fields of run.RunProgress (`step`, `epoch`,
`best_loss`, ...), `recipe`, `flags` (those that should not change), and `targets` and `shares`
(training bytes of each source, and its part of the sequences).
"""

import json
import math
import re
import time
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from loguru import logger
from torch import Tensor, nn

from spider import common
from spider.common import CheckpointError
from spider.config import MAX_LOOPS, PRESETS, SpiderConfig
from spider.distributed import ShardedRows, World, host_buffer, is_plain

REQUIRED = {"model_state_dict", "optimizer_state_dict", "step", "cfg"}
WEIGHT_DTYPES = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
MOST_STEPS = 1 << 31  # of an optimizer: 8-bit AdamW's kernel takes 32 bits
RENAMED = {"core.place_proj": "core.offset_proj"}  # old and new names of weights


# --------------------------------------------------------------------------------------------------
# The file format


def write_archive(file: BinaryIO, state: dict):
    """Write a state to a binary file; raise OSError if writing fails."""
    try:
        torch.save(state, file)
    except RuntimeError as fault:  # torch.save hides the file's own error
        raise fault.__context__ or OSError(str(fault)) from None


def check_sums(path: Path):
    """Raise ValueError or BadZipFile if an archive does not match its own checksums, which
    torch.load ignores, or if its records have more bytes than the file: a small one could fill the
    memory."""
    with zipfile.ZipFile(path) as archive:
        if sum(info.file_size for info in archive.infolist()) > path.stat().st_size:
            raise ValueError("its records are compressed, or overlap")
        damaged = archive.testzip() or next(
            (info.filename for info in archive.infolist() if info.external_attr), None
        )
    if damaged is not None:  # torch.load does not read a record with the attribute of a directory
        raise ValueError(f"truncated or altered: {damaged} is damaged")


@contextmanager
def reading(path: Path):
    """Turn any error inside, as a damaged or foreign file may cause, into a CheckpointError that
    names the file."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as fault:
        unsafe = re.search(r"Unsupported .*?(?= by default|[.] |\n|$)", str(fault))
        reason = (
            unsafe[0] if unsafe else f"{type(fault).__name__}: " + str(fault).partition("\n")[0]
        )
        raise CheckpointError(
            f"{path} is not a checkpoint that can be read safely: {reason}"
        ) from None


# --------------------------------------------------------------------------------------------------
# Reading


def load_checkpoint(path: Path, mapped: bool = False) -> dict:
    """Read a checkpoint, or an export, which has only weights; this executes nothing.

    mapped: leave the tensors in the file, and skip the checksum. Raise CheckpointError if anything
    is wrong."""
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    with reading(path):
        if is_export(path):
            state, required = read_export(path), {"model_state_dict", "cfg"}
        else:
            check_regular(path)
            if not mapped:
                check_sums(path)
            state, required = (
                torch.load(path, map_location="cpu", weights_only=True, mmap=mapped),
                REQUIRED,
            )
    check_state(path, state, required)
    state["model_state_dict"] = {
        RENAMED.get(name, name): value for name, value in state["model_state_dict"].items()
    }
    return state


class Rule(NamedTuple):
    """What a value of a checkpoint must be."""

    wanted: str
    holds: Callable[[object], bool]


def whole(low: int, high: int = (1 << 62) - 1) -> Rule:
    bounds = f"from {low} to {high}" if high < 1 << 61 else f"of at least {low}"
    return Rule(
        f"a whole number {bounds}", lambda value: type(value) is int and low <= value <= high
    )


def optional(rule: Rule) -> Rule:
    return Rule(f"{rule.wanted} or None", lambda value: value is None or rule.holds(value))


def list_of(rule: Rule) -> Rule:
    return Rule(
        f"a list, each {rule.wanted}",
        lambda value: type(value) is list and all(map(rule.holds, value)),
    )


def dict_of(rule: Rule) -> Rule:
    def holds(value) -> bool:
        return isinstance(value, dict) and all(
            type(name) is str and rule.holds(value[name]) for name in value
        )

    return Rule(f"a dict, each value {rule.wanted}", holds)


def is_number(value) -> bool:
    """Return whether a value is an int or float that arithmetic takes, infinity and NaN
    included."""
    return type(value) is float or type(value) is int and abs(value) < 1 << 62


def is_finite(value) -> bool:
    return is_number(value) and math.isfinite(value)


SWITCH = Rule("true or false", lambda value: type(value) is bool)
TEXT = Rule("text", lambda value: type(value) is str)
FINITE = Rule("a finite number", is_finite)
LOWEST = Rule("a number and not NaN", lambda value: is_number(value) and not math.isnan(value))
METRIC = Rule("a number", lambda value: is_number(value) or SWITCH.holds(value))
FLAG = Rule(
    "a number or text", lambda value: is_finite(value) or SWITCH.holds(value) or TEXT.holds(value)
)
DICT = Rule("a dict", lambda value: isinstance(value, dict))
WANDB_RUN = Rule(
    "a dict with the texts name and id",
    lambda value: dict_of(TEXT).holds(value) and {"name", "id"} <= value.keys(),
)

# Of the fields of RunProgress and the other keys, any of which may be absent.
RULES = {
    "cfg": DICT,
    "model_state_dict": DICT,
    "optimizer_state_dict": DICT,
    "step": whole(0),
    "bytes_seen": whole(0),
    "epoch": whole(0),
    "best_loss": LOWEST,
    "val_loss": optional(FINITE),
    "unimproved": whole(0),
    "metrics": optional(dict_of(optional(METRIC))),
    "recent": list_of(FINITE),
    "lowest_peak": LOWEST,
    "exploded": SWITCH,
    "skipped": whole(0),
    "wandb": optional(WANDB_RUN),
    "n_loops": whole(1, MAX_LOOPS),
    "recipe": Rule(
        f"one of {', '.join(PRESETS)}", lambda value: TEXT.holds(value) and value in PRESETS
    ),
    "targets": list_of(whole(0)),
    "shares": list_of(FINITE),
    "flags": dict_of(optional(FLAG)),
    "flags.seq_len": whole(2, 1 << 24),  # these have an effect before they are compared
    "flags.eval_tokens": whole(1),
    "flags.target_tokens": whole(1),
    "flags.minutes": optional(FINITE),
    "flags.data_dir": TEXT,
}


def check_state(path: Path, state, required: set[str]):
    """Raise CheckpointError unless a state has the required keys, a valid `cfg`, tensors whose
    shapes can be relied on, and values by the RULES."""
    state = state if isinstance(state, dict) else {}
    if missing := required - state.keys():
        raise CheckpointError(
            f"{path} is not a Spider checkpoint: it lacks {', '.join(sorted(missing))}"
        )
    try:
        for key, rule in RULES.items():
            table, _, name = key.rpartition(".")
            values = state.get(table, {}) if table else state
            if name in values and not rule.holds(values[name]):
                raise ValueError(f"{key} must be {rule.wanted}")
        SpiderConfig.from_saved(state["cfg"])
        for name, weight in state["model_state_dict"].items():
            check_tensor(weight, f"model_state_dict.{name}")
        check_optimizers(state.get("optimizer_state_dict", {}), "optimizer_state_dict", set())
    except (TypeError, ValueError, RecursionError) as fault:
        raise CheckpointError(f"{path}: {fault}") from None


def check_tensor(value, name: str):
    """Raise ValueError for a tensor whose shape cannot be relied on."""
    if isinstance(value, Tensor) and not (is_plain(value) and value.device.type == "cpu"):
        raise ValueError(
            f"{name} must be a dense, contiguous tensor with a storage of its own: "
            f"save it by .contiguous().clone()"
        )


def check_optimizers(value, name: str, seen: set[int]):
    """Raise ValueError unless, in nested dicts of optimizers' states, each tensor is plain and the
    only one in its memory (but for the tables of 8-bit AdamW, which are only read), and each `step`
    is a number that a run may reach.
    seen: addresses of dicts and tensors so far."""
    check_tensor(value, name)
    key = name.rpartition(".")[2]
    address = 0
    if isinstance(value, dict):
        address = id(value)
    elif isinstance(value, Tensor):
        address = value.data_ptr()  # 0 if it is empty
    if key == "step":
        steps = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        if not is_number(steps) or not 0 <= steps < MOST_STEPS:
            raise ValueError(f"{name} must be a number from 0 to {MOST_STEPS - 1}")
    if address in seen:
        raise ValueError(f"{name} shares its memory with another value")
    if address and key not in ("qmap1", "qmap2"):
        seen.add(address)
    for entry_name, entry in value.items() if isinstance(value, dict) else ():
        check_optimizers(entry, f"{name}.{entry_name}", seen)


def check_weights(path: Path | None, state: dict, model: nn.Module):
    """Raise CheckpointError unless a state's weights have the names and shapes of a model's.

    Floating-point weights may have any of the WEIGHT_DTYPES. The model may be on the meta
    device."""

    def kinds(weights: dict) -> dict:
        return {
            name: (tuple(tensor.shape), tensor.dtype in WEIGHT_DTYPES or tensor.dtype)
            for name, tensor in weights.items()
            if isinstance(tensor, Tensor)
        }

    with reading(path):
        expected = kinds(model.state_dict())
        found = kinds(state["model_state_dict"])
        odd = sorted(
            str(name)
            for name in expected.keys() | state["model_state_dict"].keys()
            if expected.get(name) != found.get(name)
        )
    if odd:
        more = ", ..." if len(odd) > 3 else ""
        raise CheckpointError(
            f"{path}: weights do not match {type(model).__name__} with its cfg: "
            f"{', '.join(odd[:3])}{more}: load it with the program that trained it"
        )


# --------------------------------------------------------------------------------------------------
# Exports (see export.py): reading one executes no code either

PREFIX = "spider."  # of an export's names of weights: the adapter's attribute for the model


def safetensors():
    """Return the library; raise CheckpointError with the remedy if it is not installed."""
    try:
        import safetensors.torch
    except ImportError:
        raise CheckpointError('safetensors is not installed: pip install -e ".[hf]"') from None
    return safetensors


def is_export(path: Path) -> bool:
    """Return whether a path is an export, or its weights."""
    return path.suffix == ".safetensors" or (path / "config.json").exists()


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files of an export: one, or those that an index lists, as
    save_pretrained writes them for large models. Raise ValueError if the index names a file
    elsewhere."""
    whole, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if whole.exists() or not index.exists():
        return [whole]
    check_regular(index)
    names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ValueError(
                f"{index.name} names {name!r}, which is not a safetensors file beside it"
            )
    return [directory / name for name in names]


def check_regular(path: Path):
    """Raise ValueError for anything but a regular file: to open a pipe would wait for ever."""
    if not path.is_file():
        raise ValueError(f"{path.name} is not a regular file")


def read_export(path: Path) -> dict:
    """Read an export, a directory or one safetensors file with all weights, as the state of a
    checkpoint: weights, cfg, n_loops, step, recipe, and the flags of evaluation."""
    if path.suffix == ".safetensors":
        directory, files = path.parent, [path]
    else:
        directory, files = path, weight_files(path)
    for part in (*files, directory / "config.json"):
        check_regular(part)
    weights = {}
    for file in files:
        weights |= safetensors().torch.load_file(file)
    config = json.loads((directory / "config.json").read_bytes())
    training = config.get("training", {})
    flags = training.get("flags", {})
    state = dict(
        model_state_dict={name.removeprefix(PREFIX): weight for name, weight in weights.items()},
        cfg=config["spider"],
        n_loops=config["n_loops"],
        step=training.get("step", 0),
        flags={name: flags[name] for name in ("seq_len", "eval_tokens") if name in flags},
    )
    if "recipe" in training:
        state["recipe"] = training["recipe"]
    return state


# --------------------------------------------------------------------------------------------------
# The directory of a run


class SavedCheckpoint(NamedTuple):
    """A checkpoint in a directory; sorts from the oldest to the newest."""

    step: int
    path: Path
    exploded: bool = False  # whether the loss had exploded
    val_loss: float | None = None  # nats per byte, if the step was evaluated
    best_loss: float = math.inf  # the lowest so far


def saved_checkpoint(path: Path, state: dict) -> SavedCheckpoint:
    return SavedCheckpoint(
        state["step"],
        path,
        state.get("exploded", False),
        state.get("val_loss"),
        state.get("best_loss", math.inf),
    )


def checkpoint_path(directory: Path, step: int) -> Path:
    """Return the path of a step's checkpoint."""
    return directory / f"spider-step{step}.pt"


def checkpoint_paths(directory: Path) -> list[Path]:
    """List the paths named like checkpoints, oldest first, but not manual copies
    (spider-step100-best.pt)."""
    paths = [
        path
        for path in directory.glob("spider-step*.pt")
        if re.fullmatch("spider-step[0-9]+[.]pt", path.name)
    ]
    return sorted(paths, key=lambda path: int(path.stem.removeprefix("spider-step")))


def load_of_directory(path: Path, mapped: bool = False) -> dict | None:
    """Load a checkpoint of a run's directory, see load_checkpoint; if it is damaged, or has the
    name of another step, log a warning and return None."""
    try:
        state = load_checkpoint(path, mapped)
        if path != checkpoint_path(path.parent, state["step"]):
            raise CheckpointError(f"{path} is renamed: it holds step {state['step']}")
    except CheckpointError as fault:
        logger.warning(f"skipped: {fault}")
        return None
    return state


def find_checkpoints(directory: Path) -> list[SavedCheckpoint]:
    """List a directory's checkpoints, oldest first, without reading their tensors; see
    load_of_directory."""
    saved = []
    for path in checkpoint_paths(directory):
        state = load_of_directory(path, mapped=True)
        if state is not None:
            saved.append(saved_checkpoint(path, state))
    return saved


def load_newest(directory: Path) -> tuple[Path, dict] | None:
    """Load the newest good checkpoint of a directory, see load_of_directory; return its path and
    state, or None."""
    for path in reversed(checkpoint_paths(directory)):
        state = load_of_directory(path)
        if state is not None:
            return path, state
    return None


def best_checkpoint(directory: Path) -> SavedCheckpoint:
    """Return the checkpoint with the lowest validation loss in a directory (see --keep_best). Raise
    CheckpointError if none was saved after an evaluation."""
    best = lowest_loss(find_checkpoints(directory))
    if best is None:
        raise CheckpointError(
            f"{directory}: no checkpoint in it was saved after an evaluation: train with "
            f"--keep_best, or use the newest one"
        )
    return best


def load_named(resume: Path) -> tuple[Path, dict]:
    """Load what --resume names: a checkpoint, an export, or the newest good checkpoint of a run's
    directory; return its path and state. Raise CheckpointError if that is not possible."""
    if not resume.is_dir() or is_export(resume):
        return resume, load_checkpoint(resume)
    found = load_newest(resume)
    if found is None:
        raise CheckpointError(f"--resume: there is no usable checkpoint in {resume}")
    logger.info(f"--resume {resume}: its newest good checkpoint is {found[0].name}")
    return found


class Origin(NamedTuple):
    """The checkpoint that a run begins with."""

    path: Path | None = None  # None: a run from scratch
    state: dict | None = None
    resumes: bool = False  # continue the checkpoint's run; else only take its weights

    @property
    def flags(self) -> dict:
        """The flags that the checkpoint recorded."""
        return (self.state or {}).get("flags", {})


FROM_SCRATCH = Origin()


def load_origin(directory: Path, resume: str | None, reset_steps: bool) -> Origin:
    """Load the checkpoint that a run begins with.

    If the directory holds checkpoints, its run resumes from the newest good one: `resume` and
    `reset_steps` say where an empty directory begins, so that repeating a command, as torchrun and
    Slurm do, continues the run. Raise CheckpointError for a request to go back or start over inside
    a directory, or a checkpoint that cannot be used."""
    found = load_newest(directory)
    named = None if resume is None else Path(resume).resolve()
    own = named is not None and directory.resolve() == (named if named.is_dir() else named.parent)
    if found is None:
        if checkpoint_paths(directory) and not own:
            raise CheckpointError(
                f"--ckpt_dir: none of the checkpoints in {directory} is usable: restore a good "
                f"one, "
                f"or use another directory"
            )
        if reset_steps and resume is None:
            raise CheckpointError("--reset_steps needs --resume CHECKPOINT, whose weights it loads")
        if resume is None:
            return FROM_SCRATCH
        path, state = load_named(Path(resume))
        if not reset_steps and "optimizer_state_dict" not in state:
            raise CheckpointError(
                f"--resume: {path} has no optimizer state: add --reset_steps to start a new run "
                f"from "
                f"its weights"
            )
        return Origin(path, state, resumes=not reset_steps)
    path, state = found
    if reset_steps and (own or resume is None):
        raise CheckpointError(
            f"--reset_steps: {directory} already holds a run: name a new --ckpt_dir, and the "
            f"checkpoint by --resume"
        )
    if own and named not in (path.resolve(), directory.resolve()):
        raise CheckpointError(
            f"--resume: {directory} holds a later checkpoint than {resume}, {path.name}: to go "
            f"back, "
            f"name a new --ckpt_dir"
        )
    if resume is not None and not own:
        logger.info(
            f"{directory} holds a run, which resumes from its own checkpoint: --resume {resume} "
            f"is not read"
        )
    return Origin(path, state, resumes=True)


# --------------------------------------------------------------------------------------------------
# Writing


def lowest_loss(saved: Sequence[SavedCheckpoint]) -> SavedCheckpoint | None:
    """Return the (oldest) checkpoint with the lowest validation loss, of those oldest first; None
    if none was evaluated. Where the validation data changed, best_loss began anew
    (RunProgress.forget_losses): a checkpoint with a loss below the newest one's best_loss was
    evaluated on the old data, and does not count."""
    comparable = [
        one for one in saved if one.val_loss is not None and one.val_loss >= saved[-1].best_loss
    ]
    return min(comparable, key=lambda one: one.val_loss, default=None)


def retained(
    saved: Sequence[SavedCheckpoint], keep_last: int, keep_best: bool
) -> list[SavedCheckpoint]:
    """Choose which checkpoints (oldest first) to keep: the newest `keep_last`; the newest two that
    had not exploded; and, if `keep_best`, the one with the lowest validation loss. Two, because the
    update right after a sound loss may already have ruined the weights."""
    sound = [one for one in saved if not one.exploded]
    kept = [*saved[-keep_last:], *sound[-2:]]
    if keep_best:
        kept.append(lowest_loss(saved))
    return [one for one in saved if one in kept]


def copy_to_host(value, into, keeps: bool):
    """Copy a nested state to host memory, into the tensors of an earlier copy where they fit. This
    gathers ShardedRows, so every rank calls it; only the rank that `keeps` the copy makes one."""
    if isinstance(value, ShardedRows):
        return value.gather(into)
    if isinstance(value, Tensor):
        return (
            host_buffer(value.shape, value, into).copy_(value.detach(), non_blocking=True)
            if keeps
            else None
        )
    if isinstance(value, dict):
        return {
            key: copy_to_host(entry, into.get(key) if isinstance(into, dict) else None, keeps)
            for key, entry in value.items()
        }
    if isinstance(value, (list, tuple)):
        old = (
            into
            if isinstance(into, (list, tuple)) and len(into) == len(value)
            else [None] * len(value)
        )
        return type(value)(
            copy_to_host(entry, earlier, keeps) for entry, earlier in zip(value, old, strict=True)
        )
    return value


class CheckpointWriter:
    """Write checkpoints in a background thread, so that the loop only waits for the copy out of
    device memory.

    A file under its final name is complete and durable. A failure (a full disk) is logged, and the
    next save tries again; older files stay. With several ranks, rank 0 writes and the others send
    it their rows."""

    def __init__(
        self,
        directory: Path,
        saved: list[SavedCheckpoint],
        keep_last: int,
        keep_best: bool,
        world: World,
    ):
        """saved: the directory's checkpoints so far. What a killed process left half-written is
        deleted."""
        self.directory, self.saved, self.keep_last, self.keep_best = (
            directory,
            saved,
            keep_last,
            keep_best,
        )
        self.step, self.world, self.failed = -1, world, False  # step: of the newest saved state
        self.thread, self.copy = ThreadPoolExecutor(1), None
        self.writing = self.thread.submit(lambda: None)
        if world.is_rank0:
            common.delete_unfinished(directory, "spider-step*.pt", "metrics.jsonl", "curves.png")

    def save(self, state: dict, sync_metrics: Callable):
        """Wait for the previous write, copy a state, and start to write it. Every rank calls it."""
        began = time.perf_counter()
        self.writing.result()
        self.copy = copy_to_host(state, self.copy, self.world.is_rank0)
        self.step = state["step"]
        if not self.world.is_rank0:
            return
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # until the copies are complete
        self.writing = self.thread.submit(
            self._write, self.copy, sync_metrics, time.perf_counter() - began
        )

    def mark_unsaved(self, step: int):
        """Have the state of a step saved again, because it has changed."""
        self.step = step - 1

    def holds(self, step: int) -> bool:
        """Wait for the current write; return whether the state of a step is saved. Every rank calls
        it."""
        self.writing.result()
        return self.world.on_rank0(lambda: self.step == step and not self.failed)

    def _write(self, state: dict, sync_metrics: Callable, in_loop: float):
        began, path = time.perf_counter(), checkpoint_path(self.directory, state["step"])
        try:
            with common.durable(path, "wb") as file:
                write_archive(file, state)
                sync_metrics()
        except OSError as fault:
            self.failed = True
            logger.error(
                f"CHECKPOINT NOT SAVED: {path}: {fault.strerror or fault}; older checkpoints are "
                f"intact; "
                f"training continues and will retry"
            )
            return
        self.failed = False
        logger.info(
            f"saved {path}: {1e3 * in_loop:.0f} ms in the loop, "
            f"{time.perf_counter() - began:.1f} s in the "
            f"background"
        )
        others = [one for one in self.saved if one.step != state["step"]]
        kept = retained([*others, saved_checkpoint(path, state)], self.keep_last, self.keep_best)
        for one in others:
            if one not in kept:
                delete(one.path)
        self.saved = kept


def delete(path: Path):
    """Delete an old checkpoint; where that is not possible, log it, since training can go on."""
    try:
        path.unlink(missing_ok=True)
    except OSError as fault:  # immutable, of another owner, a file system's fault
        logger.warning(f"{path} is no longer needed, but cannot be deleted: {fault.strerror}")

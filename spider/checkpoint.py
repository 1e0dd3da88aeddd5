"""Checkpoints: write one atomically, read one safely, choose the one to resume from and those to
keep.

A checkpoint is one file, `spider-step{N}.pt`, whatever the number of ranks: torch.save's archive of
tensors and plain values. It is read with `torch.load(weights_only=True)`, so loading executes no
code. All randomness is a function of (seed, step), so there is no random state in it. The keys:

    model_state_dict, optimizer_state_dict    see state.py
    cfg, recipe                               the fields of SpiderConfig, and the preset's name
    step, epoch, best_loss, ...               the fields of run.RunProgress
    flags                                     those that should not change in a run
    targets, shares                           by source: training bytes, and part of the sequences
"""

import json
import math
import re
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
from loguru import logger
from torch import Tensor, nn

from spider import common
from spider.common import CheckpointError, UsageError, flag_specs
from spider.config import MAX_LOOPS, PRESETS, SpiderConfig
from spider.distributed import World
from spider.optim import Optimizers
from spider.run import RunProgress
from spider.state import check_tensors, copy_to_host, load_model

if TYPE_CHECKING:
    from data import Loader
    from spider.plan import Plan

REQUIRED = {"model_state_dict", "optimizer_state_dict", "step", "cfg"}
REQUIRED_OF_EXPORT = {"model_state_dict", "cfg"}
WEIGHT_DTYPES = {torch.float64, torch.float32, torch.float16, torch.bfloat16}


# --------------------------------------------------------------------------------------------------
# The file format


def write_archive(file: IO[bytes], state: dict):
    """Write a state to a binary file; raise OSError if writing fails."""
    try:
        torch.save(state, file)
    except RuntimeError as fault:  # torch.save hides the file's own error
        raise fault.__context__ or OSError(str(fault)) from None


def check_archive(path: Path, sums: bool):
    """Raise ValueError or BadZipFile if the records of an archive have more bytes than the file, or
    its pickle has too many: a small file could fill the memory.

    sums: the same if they do not match the archive's own checksums, which torch.load ignores."""
    with zipfile.ZipFile(path) as archive:
        records = archive.infolist()
        if sum(record.file_size for record in records) > path.stat().st_size:
            raise ValueError("its records are compressed, or overlap")
        limit = common.LIMITS["data.pkl"]
        for record in records:
            if record.filename.endswith("/data.pkl") and record.file_size > limit:
                raise ValueError(f"{record.filename} is longer than {limit:,} bytes")
        damaged = archive.testzip() if sums else None
        for record in records:
            if damaged is None and record.external_attr:
                # torch.load does not read a record with the attribute of a directory
                damaged = record.filename
    if damaged is not None:
        raise ValueError(f"truncated or altered: {damaged} is damaged")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn any error inside into a CheckpointError that names the file. A damaged or foreign file
    may cause errors of any kind."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as fault:
        unsafe = re.search(r"Unsupported .*?(?= by default|[.] |\n|$)", str(fault))
        first_line = str(fault).partition("\n")[0]
        reason = unsafe[0] if unsafe else f"{type(fault).__name__}: {first_line}"
        raise CheckpointError(
            f"{path} is not a checkpoint that can be read safely: {reason}"
        ) from None


# --------------------------------------------------------------------------------------------------
# Reading


def load_checkpoint(path: Path, mapped: bool = False) -> dict:
    """Read a checkpoint, or an export, which has only weights; this executes nothing. Raise
    CheckpointError if anything is wrong.

    mapped: leave the tensors in the file, and skip the checksums."""
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    required = REQUIRED
    with reading(path):
        if is_export(path):
            required = REQUIRED_OF_EXPORT
            state = read_export(path)
        else:
            check_regular(path)
            check_archive(path, sums=not mapped)
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    check_state(path, state, required)
    return state


# --------------------------------------------------------------------------------------------------
# Values that a checkpoint may have

Rule = Callable[[Any], bool]  # whether a run may save a value


def whole(low: int, high: int = (1 << 62) - 1) -> Rule:
    """Make a rule for whole numbers from low to high. Within the default no sum of two overflows 64
    bits."""
    return lambda value: type(value) is int and low <= value <= high


def optional(rule: Rule) -> Rule:
    return lambda value: value is None or rule(value)


def list_of(rule: Rule) -> Rule:
    return lambda value: type(value) is list and all(map(rule, value))


def dict_of(rule: Rule) -> Rule:
    def holds(value: Any) -> bool:
        if not is_dict(value):
            return False
        return all(type(name) is str and rule(entry) for name, entry in value.items())

    return holds


def is_dict(value: object) -> bool:
    return isinstance(value, dict)


def is_switch(value: object) -> bool:
    return type(value) is bool


def is_text(value: object) -> bool:
    return type(value) is str


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is an int or float that arithmetic takes, infinity and NaN
    included."""
    return type(value) is float or (type(value) is int and abs(value) < 1 << 62)


def is_finite(value: object) -> bool:
    return is_number(value) and math.isfinite(value)


def is_ordered(value: object) -> bool:
    """Return whether a value is a number that compares with others."""
    return is_number(value) and not math.isnan(value)


def is_metric(value: object) -> bool:
    return is_number(value) or is_switch(value)


def is_flag(value: object) -> bool:
    return is_finite(value) or is_switch(value) or is_text(value)


def is_wandb_run(value: Any) -> bool:
    return dict_of(is_text)(value) and {"name", "id"} <= value.keys()


# By key; any key may be absent. Beside the keys that the docstring of this file lists, a key with a
# dot is that of an entry: "flags.seq_len" of state["flags"]["seq_len"].
RULES: dict[str, Rule] = {
    "cfg": is_dict,
    "model_state_dict": is_dict,
    "optimizer_state_dict": is_dict,
    "step": whole(0),
    "bytes_seen": whole(0),
    "epoch": whole(0),
    "best_loss": is_ordered,
    "val_loss": optional(is_finite),
    "unimproved": whole(0),
    "metrics": optional(dict_of(optional(is_metric))),
    "recent": list_of(is_finite),
    "lowest_peak": is_ordered,
    "exploded": is_switch,
    "skipped": whole(0),
    "wandb": optional(is_wandb_run),
    "n_loops": whole(1, MAX_LOOPS),
    "recipe": lambda value: is_text(value) and value in PRESETS,
    "targets": list_of(whole(0)),
    "shares": list_of(is_finite),
    "flags": dict_of(optional(is_flag)),
    # flags that have an effect before they are compared with the run's
    "flags.seq_len": whole(2, 1 << 24),
    "flags.eval_tokens": whole(1),
    "flags.target_tokens": whole(1),
    "flags.minutes": optional(is_finite),
    "flags.data_dir": is_text,
}


def check_state(path: Path, state: object, required: set[str]):
    """Raise CheckpointError unless a state has the required keys, a valid `cfg`, tensors whose
    shapes can be relied on, and values by the RULES."""
    if not isinstance(state, dict):
        state = {}
    missing = required - state.keys()
    if missing:
        raise CheckpointError(
            f"{path} is not a Spider checkpoint: it lacks {', '.join(sorted(missing))}"
        )
    try:
        for key, rule in RULES.items():
            table, _, name = key.rpartition(".")
            # The rule of the table itself comes first in RULES, so the table is a dict here.
            values = state.get(table, {}) if table else state
            if name in values and not rule(values[name]):
                raise ValueError(f"{key} has a value that no run saves")
        SpiderConfig.from_saved(state["cfg"])
        check_tensors(state["model_state_dict"], state.get("optimizer_state_dict", {}))
    except (TypeError, ValueError, RecursionError) as fault:
        raise CheckpointError(f"{path}: {fault}") from None


def weight_kinds(weights: dict) -> dict[str, tuple[torch.Size, torch.dtype | None]]:
    """Return what a weight of a checkpoint must have in common with that of a model: its shape, and
    its dtype, None for any of the WEIGHT_DTYPES. Values that are no tensors are left out."""
    kinds = {}
    for name, weight in weights.items():
        if isinstance(weight, Tensor):
            dtype = None if weight.dtype in WEIGHT_DTYPES else weight.dtype
            kinds[name] = weight.shape, dtype
    return kinds


def check_weights(path: Path, state: dict, model: nn.Module):
    """Raise CheckpointError unless a state's weights have the names and shapes of a model's.

    Floating-point weights may have any of the WEIGHT_DTYPES. The model may be on the meta
    device."""

    with reading(path):
        saved = state["model_state_dict"]
        expected_kinds = weight_kinds(model.state_dict())
        saved_kinds = weight_kinds(saved)
        odd = sorted(
            str(name)
            for name in expected_kinds.keys() | saved.keys()
            if expected_kinds.get(name) != saved_kinds.get(name)
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
    only = directory / "model.safetensors"
    index = directory / "model.safetensors.index.json"
    if only.exists() or not index.exists():
        return [only]
    names = sorted(set(read_json(index)["weight_map"].values()))
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


def read_json(path: Path) -> Any:
    check_regular(path)
    with open(path, "rb") as file:
        return json.loads(common.read_whole(file, "JSON file"))


def read_export(path: Path) -> dict:
    """Read an export, a directory or one safetensors file with all weights, as the state of a
    checkpoint: weights, cfg, n_loops, step, recipe, and the flags of evaluation."""
    if path.suffix == ".safetensors":
        directory = path.parent
        files = [path]
    else:
        directory = path
        files = weight_files(path)
    config_file = directory / "config.json"
    config = read_json(config_file)
    for file in files:
        check_regular(file)
    weights: dict[str, Tensor] = {}
    for file in files:
        for name, weight in safetensors().torch.load_file(file).items():
            weights[name.removeprefix(PREFIX)] = weight
    training = config.get("training", {})
    flags = training.get("flags", {})
    state = dict(
        model_state_dict=weights,
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
    """A checkpoint in a directory, and what decides whether it is kept."""

    step: int
    path: Path
    exploded: bool = False  # whether the loss had exploded
    val_loss: float | None = None  # nats per byte, if the step was evaluated
    best_loss: float = math.inf  # the lowest so far


def saved_checkpoint(path: Path, state: dict) -> SavedCheckpoint:
    """Describe the checkpoint of a state."""
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
    by_step = {}
    for path in directory.glob("spider-step*.pt"):
        named = re.fullmatch("spider-step([0-9]+)[.]pt", path.name)
        if named:
            by_step[path] = int(named[1])
    return sorted(by_step, key=by_step.__getitem__)


def load_or_skip(path: Path, mapped: bool = False) -> dict | None:
    """Load a checkpoint by its path in a run's directory, see load_checkpoint. If it is damaged, or
    has the name of another step, log a warning and return None."""
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
    load_or_skip."""
    saved = []
    for path in checkpoint_paths(directory):
        state = load_or_skip(path, mapped=True)
        if state is not None:
            saved.append(saved_checkpoint(path, state))
    return saved


def load_newest(directory: Path) -> tuple[Path, dict] | None:
    """Load the newest good checkpoint of a directory, see load_or_skip; return its path and
    state, or None."""
    for path in reversed(checkpoint_paths(directory)):
        state = load_or_skip(path)
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


def load_named(resume: str) -> tuple[Path, dict]:
    """Load what --resume names: a checkpoint, an export, or the newest good checkpoint of a run's
    directory; return its path and state. Raise CheckpointError if that is not possible."""
    named = Path(resume)
    if not named.is_dir() or is_export(named):
        return named, load_checkpoint(named)
    newest = load_newest(named)
    if newest is None:
        raise CheckpointError(f"--resume: there is no usable checkpoint in {named}")
    path, _ = newest
    logger.info(f"--resume {named}: its newest good checkpoint is {path.name}")
    return newest


class Origin(NamedTuple):
    """The checkpoint that a run begins with."""

    path: Path | None = None  # None: a run from scratch
    state: dict | None = None
    resumes: bool = False  # continue the checkpoint's run; else only take its weights

    @property
    def flags(self) -> dict:
        """The flags that the checkpoint recorded."""
        return {} if self.state is None else self.state.get("flags", {})

    def is_in(self, directory: str) -> bool:
        """Return whether a run continues in the directory of its checkpoint."""
        return self.resumes and self.path is not None and self.path.parent == Path(directory)


FROM_SCRATCH = Origin()


def load_origin(directory: Path, resume: str | None, reset_steps: bool) -> Origin:
    """Load the checkpoint that a run in a directory begins with.

    A directory with a good checkpoint holds a run, which resumes from the newest one. `resume` and
    `reset_steps` say where a run begins that has no checkpoint yet. Therefore the same command
    continues the run when it is repeated, as torchrun and Slurm do. Raise CheckpointError for a
    request to go back or start over inside a directory, or a checkpoint that cannot be used."""
    newest = load_newest(directory)
    if newest is None:
        return begin_run(directory, resume, reset_steps)
    path, state = newest
    check_continues(directory, path, resume, reset_steps)
    return Origin(path, state, resumes=True)


def names_inside(directory: Path, resume: str) -> bool:
    """Return whether --resume names a run's directory, or a file in it."""
    named = Path(resume).resolve()
    named_directory = named if named.is_dir() else named.parent
    return named_directory == directory.resolve()


def begin_run(directory: Path, resume: str | None, reset_steps: bool) -> Origin:
    """Load what --resume names, if anything, for a run in a directory without a good checkpoint;
    see load_origin."""
    elsewhere = resume is None or not names_inside(directory, resume)
    if elsewhere and checkpoint_paths(directory):
        raise CheckpointError(
            f"--ckpt_dir: none of the checkpoints in {directory} is usable: restore a good one, or "
            f"use another directory"
        )
    if resume is None:
        if reset_steps:
            raise CheckpointError("--reset_steps needs --resume CHECKPOINT, whose weights it loads")
        return FROM_SCRATCH
    path, state = load_named(resume)
    if not reset_steps and "optimizer_state_dict" not in state:
        raise CheckpointError(
            f"--resume: {path} has no optimizer state: add --reset_steps to start a new run "
            f"from its weights"
        )
    return Origin(path, state, resumes=not reset_steps)


def check_continues(directory: Path, newest: Path, resume: str | None, reset_steps: bool):
    """Raise CheckpointError for flags that contradict a directory whose run resumes from its
    `newest` checkpoint; see load_origin. Log that a checkpoint elsewhere is not read."""
    inside = resume is not None and names_inside(directory, resume)
    if reset_steps and (inside or resume is None):
        raise CheckpointError(
            f"--reset_steps: {directory} already holds a run: name a new --ckpt_dir, and the "
            f"checkpoint by --resume"
        )
    if resume is None:
        return
    if not inside:
        logger.info(
            f"{directory} holds a run, which resumes from its own checkpoint: --resume {resume} "
            f"is not read"
        )
    elif Path(resume).resolve() not in (newest.resolve(), directory.resolve()):
        raise CheckpointError(
            f"--resume: {directory} holds a later checkpoint than {resume}, {newest.name}: to go "
            f"back, name a new --ckpt_dir"
        )


# --------------------------------------------------------------------------------------------------
# Writing


def lowest_loss(saved: Sequence[SavedCheckpoint]) -> SavedCheckpoint | None:
    """Return the checkpoint with the lowest validation loss, the oldest of several, or None if none
    was evaluated. `saved`: the oldest first.

    Where the validation data changed, best_loss began anew (RunProgress.forget_losses). So a loss
    below the newest checkpoint's best_loss is one of the old data, and does not count."""
    best = None
    lowest = math.inf
    for one in saved:
        if one.val_loss is not None and saved[-1].best_loss <= one.val_loss < lowest:
            best = one
            lowest = one.val_loss
    return best


def retained(
    saved: Sequence[SavedCheckpoint], keep_last: int, keep_best: bool
) -> list[SavedCheckpoint]:
    """Choose which checkpoints (oldest first) to keep: the newest `keep_last`; the newest two that
    had not exploded; and, if `keep_best`, the one with the lowest validation loss. Two, because the
    update right after a sound loss may already have ruined the weights."""
    sound = [one for one in saved if not one.exploded]
    kept = [*saved[-keep_last:], *sound[-2:]]
    best = lowest_loss(saved)
    if keep_best and best is not None:
        kept.append(best)
    return [one for one in saved if one in kept]


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
        saved_step: int = -1,
    ):
        """saved: the directory's checkpoints so far. saved_step: the step that a run resumes from,
        if its checkpoint is in the directory. Unfinished files that a killed process left are
        deleted."""
        self.directory = directory
        self.saved = saved
        self.keep_last = keep_last
        self.keep_best = keep_best
        self.world = world
        self.saved_step = saved_step  # of the newest saved state; -1: none
        self.failed = False  # whether the newest write failed
        self.host_copy: Any = None  # of the newest saved state; the next save reuses its memory
        self.thread = ThreadPoolExecutor(1)
        self.writing: Future[None] = self.thread.submit(lambda: None)
        if world.is_rank0:
            common.delete_unfinished(directory, "spider-step*.pt")

    def save(self, state: dict, sync_metrics: Callable[[], None]):
        """Wait for the previous write, copy a state, and start to write it. Every rank calls it.

        sync_metrics: on rank 0, completes metrics.jsonl before the file is renamed."""
        began = time.perf_counter()
        self.writing.result()
        self.host_copy = copy_to_host(state, self.host_copy, self.world.is_rank0)
        self.saved_step = state["step"]
        if not self.world.is_rank0:
            return
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # until the copies are complete
        in_loop = time.perf_counter() - began
        self.writing = self.thread.submit(self._write, self.host_copy, sync_metrics, in_loop)

    def mark_unsaved(self, step: int):
        """Have the state of a step saved again, because it has changed."""
        self.saved_step = step - 1

    def holds(self, step: int) -> bool:
        """Wait for the current write; return whether the state of a step is saved. Every rank calls
        it."""
        self.writing.result()
        return self.world.on_rank0(lambda: self.saved_step == step and not self.failed)

    def _write(self, state: dict, sync_metrics: Callable[[], None], in_loop: float):
        """Write a state to its file, and log the outcome. in_loop: seconds that the save took in
        the loop."""
        began = time.perf_counter()
        path = checkpoint_path(self.directory, state["step"])
        try:
            with common.durable(path, "wb") as file:
                write_archive(file, state)
                sync_metrics()
        except OSError as fault:
            self.failed = True
            logger.error(
                f"CHECKPOINT NOT SAVED: {path}: {fault.strerror or fault}; older checkpoints are "
                f"intact; training continues and will retry"
            )
            return
        self.failed = False
        in_background = time.perf_counter() - began
        logger.info(
            f"saved {path}: {1e3 * in_loop:.0f} ms in the loop, {in_background:.1f} s in the "
            f"background"
        )
        self._retain(saved_checkpoint(path, state))

    def _retain(self, newest: SavedCheckpoint):
        """Add a checkpoint to those of the directory, and delete those that are not kept."""
        others = [one for one in self.saved if one.step != newest.step]
        self.saved = retained([*others, newest], self.keep_last, self.keep_best)
        for one in others:
            if one not in self.saved:
                delete(one.path)


def delete(path: Path):
    """Delete an old checkpoint; where that is not possible, log it, since training can go on."""
    try:
        path.unlink(missing_ok=True)
    except OSError as fault:  # immutable, of another owner, a file system's fault
        logger.warning(f"{path} is no longer needed, but cannot be deleted: {fault.strerror}")


# --------------------------------------------------------------------------------------------------
# Resuming

MIXTURE = {"targets", "shares"}  # of the sources, see Loader.mixture
# No changes by themselves: the same data may have moved, and the same step be split otherwise.
MOVED = {"data_dir", "micro_batch"}


def changes_since(state: dict, plan: "Plan", mixture: dict[str, Any]) -> dict[str, str]:
    """Compare a plan with the checkpoint that it resumes from: describe each change by name.

    What an older checkpoint lacks counts as unchanged. --minutes chose a horizon, which is compared
    itself."""
    now = asdict(plan.config)
    for name, spec in flag_specs(type(plan.flags)).items():
        if spec.recorded and name != "minutes":
            now[name] = getattr(plan.flags, name)
    now |= dict(n_loops=plan.flags.n_loops, **mixture)
    before = asdict(SpiderConfig.from_saved(state["cfg"])) | state.get("flags", {})
    before |= {name: state[name] for name in ("n_loops", *mixture) if name in state}
    return {
        name: f"{name} was {before[name]}, is {value}"
        for name, value in now.items()
        if before.get(name, value) != value
    }


def progress_of(
    origin: Origin, plan: "Plan", loader: "Loader"
) -> tuple[RunProgress, dict[str, str]]:
    """Return the progress of the run that a checkpoint continues, and its `changes_since`; for
    other runs that of step 0, and no change.

    Losses that the changes make incomparable are forgotten."""
    flags = plan.flags
    progress = RunProgress()
    changed: dict[str, str] = {}
    if origin.resumes:
        assert origin.state is not None
        known = {one.name for one in fields(RunProgress)}
        progress = RunProgress(
            **{name: value for name, value in origin.state.items() if name in known}
        )
        changed = changes_since(origin.state, plan, loader.mixture)
    if changed.keys() - MOVED:
        specs = flag_specs(type(flags))
        evaluates = {name for name, spec in specs.items() if spec.evaluates} | MIXTURE
        progress.forget_losses(evaluations=bool(evaluates & changed.keys()))
        # With more data the position may be in an earlier epoch; tables are cleared when an epoch
        # exceeds this one.
        epoch = loader.epoch(progress.next_sequence(flags.seq_len))
        progress.epoch = min(progress.epoch, epoch)
    progress.n_loops = flags.n_loops
    return progress, changed


def lacks_only_evaluation(
    origin: Origin, plan: "Plan", progress: RunProgress, changed: dict[str, str], last_step: int
) -> bool:
    """Return whether a run without a step to train has the evaluation of its last one to make up
    for, as after a signal. If not, it writes nothing.

    Raise UsageError if it has other settings than its checkpoint, or another directory, and
    Diverged if it had diverged."""
    progress.check_divergence(1)
    nothing_left = f"{origin.path}: no step is left to train"
    longer = "train longer (--max_steps, --target_tokens, --patience)"
    if not origin.is_in(plan.flags.ckpt_dir):
        raise UsageError(
            f"--resume: {nothing_left}: {longer}, or add --reset_steps to begin a new run from its "
            f"weights"
        )
    differences = [line for name, line in changed.items() if name not in MOVED]
    if differences:
        raise UsageError(
            f"{nothing_left}, but settings differ: {'; '.join(differences)}: leave them as they "
            f"were, {longer}, or name a new --ckpt_dir"
        )
    evaluated = progress.metrics is None or "val_loss" in progress.metrics
    return plan.flags.eval_every > 0 and not evaluated and progress.step == last_step


def restore(
    origin: Origin,
    plan: "Plan",
    model: nn.Module,
    optimizers: Optimizers,
    progress: RunProgress,
    changed: dict[str, str],
):
    """Load a checkpoint into model and optimizers, or only its weights.

    Log what is loaded, and the settings that have changed since."""
    state = origin.state
    if state is None:
        return
    what = "resuming from" if origin.resumes else "weights of"
    logger.info(f"{what} {origin.path} (step {state['step']})")
    load_model(model, state["model_state_dict"])
    if not origin.resumes:
        return
    optimizers.load_state_dict(state["optimizer_state_dict"])
    if changed:
        logger.warning(f"settings differ from the run so far: {'; '.join(changed.values())}")
    specs = flag_specs(type(plan.flags))
    reads = {name for name, spec in specs.items() if spec.reads} | MIXTURE
    if reads & changed.keys():
        logger.warning(
            "they change which text a step reads: until each source begins its next epoch, some of "
            "its text is read again, and some is skipped"
        )
    if progress.exploded:
        logger.warning(
            f"{origin.path}: the loss had exploded by then; to go back, name an earlier checkpoint "
            f"by --resume, and a new --ckpt_dir"
        )

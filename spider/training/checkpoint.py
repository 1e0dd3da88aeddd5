"""Checkpoints: write them atomically, read them safely, choose which to resume from and which to
keep.

A checkpoint is one file, `spider-step{N}.pt`, for any number of ranks: torch.save's archive of
tensors and plain values. `torch.load(weights_only=True)` reads it, so loading executes no code. All
randomness is a function of (seed, step), so a checkpoint holds no random state. Its keys:

    model_state_dict, optimizer_state_dict    see state.py
    cfg, recipe                               the fields of SpiderConfig, the name of the preset
    step, epoch, best_loss, ...               the fields of run.RunProgress
    flags                                     the flags that should not change during a run
    targets, shares                           by source: training bytes, fraction of the sequences
"""

import errno
import itertools
import json
import math
import os
import re
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from operator import attrgetter
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from loguru import logger
from torch import Tensor, nn

from spider import files, machine
from spider.config import MAX_INT, PRESETS, SEQ_LEN, Range, SpiderConfig
from spider.errors import CheckpointError, UsageError
from spider.training.distributed import World
from spider.training.optim import Optimizers
from spider.training.plan import Plan
from spider.training.run import RunProgress
from spider.training.state import copy_to_host, load_model
from spider_model import Spider

REQUIRED = {"model_state_dict", "optimizer_state_dict", "step", "cfg"}
# Type of each entry of a checkpoint
ENTRIES = {one.name: one.type for one in fields(RunProgress)} | dict(
    model_state_dict=dict,
    optimizer_state_dict=dict,
    cfg=dict,
    recipe=str,
    flags=dict,
    targets=list,
    shares=list,
)
# Type of each recorded flag that is used before changes_since compares it with the run's flag
FLAGS = dict(
    seq_len=int, eval_tokens=int, target_tokens=int, minutes=float | int | None, data_dir=str
)
# Ranges of integers; other integers are at least 0
SIZE = Range(1, MAX_INT)
SIZES = dict(seq_len=Range(*SEQ_LEN), eval_tokens=SIZE, target_tokens=SIZE)


# --------------------------------------------------------------------------------------------------
# The file format


def write_archive(file: IO[bytes], state: dict):
    """Write a state to a binary file. Raise OSError if writing fails."""
    try:
        torch.save(state, file)
    except RuntimeError as fault:  # torch.save hides the file's own error
        raise fault.__context__ or OSError(str(fault)) from None


def check_archive(path: Path, sums: bool):
    """Check an archive before torch.load reads it. Raise ValueError or BadZipFile if its records
    have more bytes than the file: a small file could fill the memory.

    sums: also check the checksums in the archive, which torch.load ignores."""
    with zipfile.ZipFile(path) as archive:
        records = archive.infolist()
        if sum(record.file_size for record in records) > path.stat().st_size:
            raise ValueError("its records are compressed, or overlap")
        damaged = archive.testzip() if sums else None
        for record in records:
            if damaged is None and record.external_attr:
                # torch.load does not read a record that is marked as a directory
                damaged = record.filename
    if damaged is not None:
        raise ValueError(f"truncated or altered: {damaged} is damaged")


@contextmanager
def checkpoint_errors(path: Path) -> Iterator[None]:
    """Turn errors in the block into errors that name the file: SYSTEM_ERRORS into an OSError, all
    others into a CheckpointError, since a damaged or foreign file may cause any error."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as fault:
        number = error_number(fault)
        if number in SYSTEM_ERRORS:
            raise OSError(number, os.strerror(number), str(path)) from None
        unsafe = re.search(r"Unsupported .*?(?= by default|[.] |\n|$)", str(fault))
        first_line = str(fault).partition("\n")[0]
        reason = unsafe[0] if unsafe else f"{type(fault).__name__}: {first_line}"
        raise CheckpointError(
            f"{path} is not a checkpoint that can be read safely: {reason[:300]}"
        ) from None


# Too little memory, no permission, too many open files: not the fault of the file
SYSTEM_ERRORS = {errno.ENOMEM, errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE}


def error_number(fault: Exception) -> int:
    """Return the errno of a system error, or 0 for other errors."""
    if machine.is_out_of_memory(fault):
        return errno.ENOMEM
    if isinstance(fault, OSError):
        return fault.errno or 0
    torch_number = re.search(r"\((\d+)\)$", str(fault))  # torch's own errors end with the errno
    return int(torch_number[1]) if torch_number else 0


# --------------------------------------------------------------------------------------------------
# Reading


def load_checkpoint(path: Path, mapped: bool = False) -> dict:
    """Read a checkpoint, or the weights of an export, without executing any code from the file.
    Raise CheckpointError if anything is wrong.

    mapped: leave the tensors in the file, and skip the checksums."""
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    with checkpoint_errors(path):
        if is_export(path):
            state = read_export(path)
        else:
            check_regular(path)
            check_archive(path, sums=not mapped)
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
            missing = REQUIRED - (state.keys() if isinstance(state, dict) else set())
            if missing:
                raise ValueError(f"it lacks {', '.join(sorted(missing))}")
        return checked_entries(state)


def checked_entries(state: dict) -> dict:
    """Return the known entries of a checkpoint, after checking all values except tensors. Raise an
    error, of any type, for a value that no run records."""
    known = {name: state[name] for name in ENTRIES if name in state}
    types = ENTRIES | FLAGS
    for name, value in (*known.items(), *known.get("flags", {}).items()):
        valid = isinstance(value, types.get(name, float | int | str | None))
        if valid and isinstance(value, float):
            valid = math.isfinite(value) or name in ENTRIES  # best_loss starts at infinity
        if valid and isinstance(value, int):
            valid = SIZES.get(name, Range(0, MAX_INT)).has(value)
        if not valid:
            raise ValueError(f"{name} has a value that no run records")
    metrics = known.get("metrics") or {}
    lists = [known.get(name, []) for name in ("recent", "targets", "shares")]
    for number in (*metrics.values(), *itertools.chain(*lists)):
        math.isfinite(number)  # raises an error unless it is a number within the range of float
    config = SpiderConfig.from_saved(known["cfg"])
    known.setdefault("n_loops", config.n_loops)  # early versions recorded none
    replace(config, n_loops=known["n_loops"])  # checks the range
    if known.get("recipe", "1b") not in PRESETS:
        raise ValueError("its recipe is unknown")
    return known


def check_weights(path: Path, state: dict, model: Spider):
    """Raise CheckpointError, with the settings that differ, if the weights of a checkpoint and a
    model differ in names, shapes or dtypes. The model may be on the meta device."""
    with checkpoint_errors(path):
        saved = shapes_of(state["model_state_dict"])
        expected = shapes_of(model.state_dict())
        before = vars(SpiderConfig.from_saved(state["cfg"]))
    if saved == expected:
        return
    remedy = "Leave --model and --set out, or train a new model in another --ckpt_dir"
    different = [
        f"{name} is {before[name]}, not {value}"
        for name, value in vars(model.config).items()
        if before[name] != value
    ]
    if not different:
        remedy = "Load it with the program that trained it"
        different = sorted({str(name)[:80] for name, _ in saved.items() ^ expected.items()})
    more = ", ..." if len(different) > 3 else ""
    raise CheckpointError(
        f"{path}: holds another model: {'; '.join(different[:3])}{more}. {remedy}"
    )


def shapes_of(weights: dict[str, Tensor]) -> dict[str, tuple]:
    """Return the shape of each weight by name, with any dtype that is not a floating-point type."""
    return {
        name: (*weight.shape, weight.dtype.is_floating_point or weight.dtype)
        for name, weight in weights.items()
    }


# --------------------------------------------------------------------------------------------------
# Exports (see export.py); reading an export executes no code either

PREFIX = "spider."  # begins the weights' names in an export: the adapter holds the model there


def safetensors():
    """Import safetensors. Raise CheckpointError with the remedy if it is not installed."""
    try:
        import safetensors.torch
    except ImportError:
        raise CheckpointError('safetensors is not installed: pip install -e ".[hf]"') from None
    return safetensors


def is_export(path: Path) -> bool:
    """Return whether a path is the directory of an export, or one of its weight files."""
    return path.suffix == ".safetensors" or (path / "config.json").exists()


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files of an export: one file, or for large models all files in the
    index that save_pretrained writes. Raise ValueError if the index names a file outside the
    export."""
    only = directory / "model.safetensors"
    index = directory / "model.safetensors.index.json"
    if only.exists() or not index.exists():
        return [only]
    names = sorted(set(read_json(index)["weight_map"].values()))
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ValueError(
                f"{index.name} names {name!r}, which is not a safetensors file next to it"
            )
    return [directory / name for name in names]


def check_regular(path: Path):
    """Raise ValueError unless a path is a regular file: opening a pipe could wait forever."""
    if not path.is_file():
        raise ValueError(f"{path.name} is not a regular file")


def read_json(path: Path) -> Any:
    check_regular(path)
    return json.loads(path.read_bytes())


def read_export(path: Path) -> dict:
    """Read an export as the state of a checkpoint: weights, cfg, n_loops, and the recorded facts
    about its training. path: the export's directory, or a safetensors file with all weights."""
    if path.suffix == ".safetensors":
        directory = path.parent
        files = [path]
    else:
        directory = path
        files = weight_files(path)
    config = read_json(directory / "config.json")
    weights = {}
    for file in files:
        check_regular(file)
        for name, weight in safetensors().torch.load_file(file).items():
            weights[name.removeprefix(PREFIX)] = weight
    facts = {"step": 0} | config.get("training", {})
    return facts | dict(model_state_dict=weights, cfg=config["spider"], n_loops=config["n_loops"])


# --------------------------------------------------------------------------------------------------
# The directory of a run


class SavedCheckpoint(NamedTuple):
    """A checkpoint in a directory, with the facts that decide whether it is kept."""

    step: int
    path: Path
    exploded: bool = False  # see RunProgress
    val_loss: float | None = None  # nats per byte, if the step was evaluated
    best_loss: float = math.inf  # the lowest val_loss so far

    @property
    def val_bpb(self) -> float | None:
        """Return the validation loss in bits per byte."""
        return None if self.val_loss is None else self.val_loss / math.log(2)


def saved_checkpoint(path: Path, state: dict) -> SavedCheckpoint:
    """Return the SavedCheckpoint of a state."""
    recorded = {name: state[name] for name in SavedCheckpoint._fields if name in state}
    return SavedCheckpoint(**recorded | {"path": path})


def checkpoint_path(directory: Path, step: int) -> Path:
    """Return the path of a step's checkpoint."""
    return directory / f"spider-step{step}.pt"


def checkpoint_paths(directory: Path) -> list[Path]:
    """List the paths with the names of checkpoints, oldest first. Copies that a user made, such as
    spider-step100-best.pt, are not listed."""
    found = directory.glob("spider-step*.pt")
    steps = {path: path.stem.removeprefix("spider-step") for path in found}
    named = [path for path, step in steps.items() if step.isdecimal()]
    return sorted(named, key=lambda path: int(steps[path]))


def good_checkpoints(directory: Path, mapped: bool = False) -> Iterator[tuple[Path, dict]]:
    """Yield path and state of each checkpoint in a directory, newest first (see load_checkpoint).
    Skip, with a warning, a checkpoint that is damaged or has the name of another step."""
    for path in reversed(checkpoint_paths(directory)):
        try:
            state = load_checkpoint(path, mapped)
            if path != checkpoint_path(directory, state["step"]):
                raise CheckpointError(f"{path} is renamed: it holds step {state['step']}")
        except CheckpointError as fault:
            logger.warning(f"skipped: {fault}")
        else:
            yield path, state


def find_checkpoints(directory: Path) -> list[SavedCheckpoint]:
    """List the good checkpoints in a directory, oldest first, without reading their tensors."""
    newest_first = good_checkpoints(directory, mapped=True)
    return [saved_checkpoint(path, state) for path, state in newest_first][::-1]


def best_checkpoint(directory: Path) -> SavedCheckpoint:
    """Return the checkpoint with the lowest validation loss in a directory (see --keep_best). Raise
    CheckpointError if no checkpoint was saved after an evaluation."""
    best = lowest_loss(find_checkpoints(directory))
    if best is None:
        raise CheckpointError(
            f"{directory}: no checkpoint in it was saved after an evaluation: train with "
            f"--keep_best, or use the newest one"
        )
    return best


class StartCheckpoint(NamedTuple):
    """The checkpoint that a run starts from."""

    path: Path | None = None  # None: a run from scratch
    state: dict = {}  # its content; {}: a run from scratch
    resumes: bool = False  # True: continue the checkpoint's run; False: take only its weights

    @property
    def flags(self) -> dict:
        """The flags that the checkpoint recorded."""
        return self.state.get("flags", {})

    def without_tensors(self) -> "StartCheckpoint":
        """Return the part of the checkpoint that rank 0 sends to all ranks."""
        if not self.state:
            return self
        return self._replace(state=self.state | dict(model_state_dict={}, optimizer_state_dict={}))

    def is_in(self, directory: str) -> bool:
        """Return whether the run resumes in the directory of its checkpoint."""
        return self.resumes and self.path is not None and self.path.parent == Path(directory)


FROM_SCRATCH = StartCheckpoint()


def load_start(directory: Path, resume: str | None, reset_steps: bool) -> StartCheckpoint:
    """Load the checkpoint from which a run in a directory starts.

        in the directory  --resume names               the run starts from  with --reset_steps
        a good            nothing, the directory       the newest           error
        checkpoint        its newest checkpoint        the newest           error
                          another file in it           error                error
                          what its run started from    the newest           the newest
                          anything else                the newest           error
        only bad ones     the directory, a file in it  what is named        what is named
                          nothing, anything else       error                error
        no checkpoint     nothing                      scratch              error
                          anything                     what is named        what is named

    "The newest" is the newest good checkpoint in the directory. So a repeated command, as with
    torchrun or Slurm, continues its run, and does not read a checkpoint elsewhere that --resume
    names. Raise CheckpointError for "error", and for a checkpoint that cannot be used."""
    newest = next(good_checkpoints(directory), None)
    here = directory.resolve()
    named = None
    is_inside = False  # whether --resume names the directory, or a file in it
    if resume is not None:
        named = Path(os.path.realpath(resume))  # Path.resolve raises for cyclic links
        is_inside = here == (named if named.is_dir() else named.parent)
    if newest is None:
        if not is_inside and checkpoint_paths(directory):
            raise CheckpointError(
                f"--ckpt_dir: none of the checkpoints in {directory} is usable: restore a good "
                f"one, or use another directory"
            )
        return begin_run(resume, reset_steps)
    path, state = newest
    if resume is not None and not is_inside:
        # A checkpoint of an early version does not record what its run started from.
        if reset_steps and state.get("origin", str(named)) != str(named):
            raise CheckpointError(
                f"--reset_steps: the run in {directory} did not begin from {resume}: name a new "
                f"--ckpt_dir; or, to continue that run, leave out --resume and --reset_steps"
            )
        logger.info(
            f"{directory} holds a run, which resumes from its own checkpoint: --resume {resume} "
            f"is not read"
        )
    elif reset_steps:
        raise CheckpointError(
            f"--reset_steps: {directory} already holds a run: name a new --ckpt_dir, and the "
            f"checkpoint with --resume"
        )
    elif named not in (None, here, path.resolve()):
        raise CheckpointError(
            f"--resume: {directory} holds a later checkpoint than {resume}, {path.name}: to go "
            f"back, name a new --ckpt_dir"
        )
    return StartCheckpoint(path, state, resumes=True)


def begin_run(resume: str | None, reset_steps: bool) -> StartCheckpoint:
    """Load what --resume names, for a run in a directory without a good checkpoint: nothing, a
    checkpoint, an export, or a run's directory (its newest good checkpoint)."""
    if resume is None:
        if reset_steps:
            raise CheckpointError("--reset_steps needs --resume CHECKPOINT, whose weights it loads")
        return FROM_SCRATCH
    path = Path(resume)
    if path.is_dir() and not is_export(path):
        newest = next(good_checkpoints(path), None)
        if newest is None:
            raise CheckpointError(f"--resume: there is no usable checkpoint in {path}")
        path, state = newest
        logger.info(f"--resume {resume}: its newest good checkpoint is {path.name}")
    else:
        state = load_checkpoint(path)
    if not reset_steps and "optimizer_state_dict" not in state:
        raise CheckpointError(
            f"--resume: {path} has no optimizer state: add --reset_steps to start a new run "
            f"from its weights"
        )
    return StartCheckpoint(path, state, resumes=not reset_steps)


# --------------------------------------------------------------------------------------------------
# Writing


def lowest_loss(saved: Sequence[SavedCheckpoint]) -> SavedCheckpoint | None:
    """Return the checkpoint with the lowest validation loss, or None if none was evaluated. Among
    equals, return the oldest. saved: oldest first.

    When the validation data changes, best_loss starts again (RunProgress.forget_losses). So a loss
    below the newest checkpoint's best_loss was measured on the old data, and does not count."""
    comparable = [
        one for one in saved if one.val_loss is not None and one.val_loss >= saved[-1].best_loss
    ]
    return min(comparable, key=attrgetter("val_loss"), default=None)


class CheckpointWriter:
    """Write checkpoints in a background thread, so that the loop waits only for the copy to host
    memory.

    A file under its final name is complete and durable. If writing fails (a full disk), log an
    error, keep the older files, and try again at the next save. With several ranks, rank 0 writes,
    and the others send it their rows of sharded tensors."""

    def __init__(
        self,
        directory: Path,
        keep_last: int,
        keep_best: bool,
        world: World,
        step: int = 0,
        resumes_in_place: bool = False,
    ):
        """Delete unfinished files that a killed process left.

        step: the last step before this process. resumes_in_place: the checkpoint of this step is in
        the directory."""
        self.directory = directory
        self.saved = []  # in the directory, oldest first
        self.keep_last = keep_last
        self.keep_best = keep_best
        self.world = world
        self.saved_step = step if resumes_in_place else 0  # step of the newest saved state
        self.host_copy: Any = None  # the newest saved state; the next save reuses its memory
        self.thread = ThreadPoolExecutor(1)
        self.writing = self.thread.submit(lambda: True)  # whether it succeeded
        if world.is_rank0:
            files.delete_unfinished(directory, "spider-step*.pt")
            # Later checkpoints are damaged: load_start skipped them by their checksums, which
            # find_checkpoints does not read.
            self.saved = [one for one in find_checkpoints(directory) if one.step <= step]

    def save(self, state: dict, sync_metrics: Callable[[], None]):
        """Wait for the previous write, copy a state, and start to write it. Every rank calls this.

        sync_metrics: completes metrics.jsonl on rank 0, before the file gets its final name."""
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
        """Mark the state of a step as changed, so that it is saved again."""
        self.saved_step = step - 1

    def holds(self, step: int) -> bool:
        """Wait for the current write. Return whether the state of a step is saved. Every rank calls
        this."""
        written = self.writing.result()
        return self.world.on_rank0(lambda: self.saved_step == step and written)

    def _write(self, state: dict, sync_metrics: Callable[[], None], in_loop: float) -> bool:
        """Write a state to its file, and log the outcome. Return whether the file was written.

        in_loop: seconds for which the save held up the loop."""
        began = time.perf_counter()
        path = checkpoint_path(self.directory, state["step"])
        try:
            with files.atomic_write(path, "wb") as file:
                write_archive(file, state)
                sync_metrics()
        except OSError as fault:
            logger.error(
                f"CHECKPOINT NOT SAVED: {path}: {fault.strerror or fault}; older ones stay as they "
                f"are; the next save tries again"
            )
            return False
        in_background = time.perf_counter() - began
        logger.info(f"saved {path} in {in_loop:.1f} + {in_background:.1f} s")
        self._retain(saved_checkpoint(path, state))
        return True

    def _retain(self, newest: SavedCheckpoint):
        """Add a checkpoint to the list, and delete all checkpoints except

        - the newest `keep_last`,
        - the newest two whose loss had not exploded; two, since the update after a normal loss may
          already have ruined the weights,
        - with `keep_best`, the checkpoint with the lowest validation loss."""
        others = [one for one in self.saved if one.step != newest.step]
        saved = [*others, newest]
        sound = [one for one in saved if not one.exploded]
        kept = [*saved[-self.keep_last :], *sound[-2:]]
        best = lowest_loss(saved)
        if self.keep_best and best is not None:
            kept.append(best)
        self.saved = [one for one in saved if one in kept]
        for one in others:
            if one in self.saved:
                continue
            try:
                one.path.unlink(missing_ok=True)
            except OSError as fault:  # immutable, another owner's, or a file system error
                logger.warning(
                    f"{one.path} is no longer needed, but cannot be deleted: {fault.strerror}"
                )


# --------------------------------------------------------------------------------------------------
# Resuming

READS = {"mock_data", "seq_len", "seed"}  # flags that decide which sequences a step reads
EVALUATES = {"mock_data", "seq_len", "eval_tokens"}  # flags that decide which bytes are evaluated
# Keys of Loader.mixture, with names for people
MIXTURE = {"targets": "the size of the data", "shares": "the mixture of the data"}
# Flags that may change: --target_tokens is compared instead of --minutes, which chose it; the data
# may have moved; a step may be split differently.
NOT_COMPARED = {"minutes", "data_dir", "micro_batch"}


def changes_since(state: dict, plan: Plan, mixture: dict[str, Any]) -> dict[str, str]:
    """Compare a plan with the checkpoint that it resumes from. Return a description of each change,
    by name.

    mixture: see Loader.mixture. Values that an older checkpoint lacks count as unchanged."""
    now = asdict(plan.config) | plan.flags.recorded() | dict(n_loops=plan.flags.n_loops, **mixture)
    before = asdict(SpiderConfig.from_saved(state["cfg"])) | state.get("flags", {})
    before |= {name: state[name] for name in ("n_loops", *mixture) if name in state}
    return {
        name: f"{MIXTURE.get(name, name)} was {before[name]}, is {value}"
        for name, value in now.items()
        if before.get(name, value) != value and name not in NOT_COMPARED
    }


def progress_of(
    start: StartCheckpoint, plan: Plan, mixture: dict[str, Any], epoch_of: Callable[[int], int]
) -> tuple[RunProgress, dict[str, str]]:
    """Return the progress of the resumed run and its `changes_since`; for a new run, return the
    progress of step 0, and no changes.

    mixture, epoch_of: attributes of the Loader. Forget losses that the changes make incomparable.
    Raise CheckpointError if --reset_steps is given and the run was trained on other data: then the
    command means another fine-tune of its weights."""
    flags = plan.flags
    progress = RunProgress()
    if flags.reset_steps and flags.resume:
        progress.origin = os.path.realpath(flags.resume)
    changed = {}
    if start.resumes:
        names = vars(progress).keys() & start.state.keys()
        progress = replace(progress, **{name: start.state[name] for name in names})
        changed = changes_since(start.state, plan, mixture)
        if flags.reset_steps and MIXTURE.keys() & changed.keys():
            raise CheckpointError(
                f"--reset_steps: the run in {flags.ckpt_dir} was trained on other data: name a new "
                f"--ckpt_dir; or, to continue that run, leave out --resume and --reset_steps"
            )
    if changed:
        evaluates = EVALUATES | MIXTURE.keys()
        progress.forget_losses(evaluations=bool(evaluates & changed.keys()))
        # With more data, the position may be in an earlier epoch. Engram tables are cleared when a
        # step's epoch exceeds progress.epoch.
        epoch = epoch_of(progress.next_sequence(flags.seq_len))
        progress.epoch = min(progress.epoch, epoch)
    progress.n_loops = flags.n_loops
    return progress, changed


def check_finished(
    start: StartCheckpoint, plan: Plan, progress: RunProgress, changed: dict[str, str]
):
    """Check a run that has no step left to train. Raise Diverged if it had diverged, and UsageError
    if its settings or its directory are not those of its checkpoint."""
    progress.check_divergence(1)
    nothing_left = f"{start.path}: no step is left to train"
    longer = "train longer (--max_steps, --target_tokens, --patience)"
    if not start.is_in(plan.flags.ckpt_dir):
        raise UsageError(
            f"--resume: {nothing_left}: {longer}, or add --reset_steps to begin a new run from its "
            f"weights"
        )
    if changed:
        raise UsageError(
            f"{nothing_left}, but settings differ: {'; '.join(changed.values())}: leave them as "
            f"they were, {longer}, or name a new --ckpt_dir"
        )


def restore(
    start: StartCheckpoint,
    model: nn.Module,
    optimizers: Optimizers,
    progress: RunProgress,
    changed: dict[str, str],
):
    """Load a checkpoint into model and optimizers; for a new run, load only the weights.

    Log what is loaded, and which settings have changed since."""
    state = start.state
    if not state:
        return
    what = "resuming from" if start.resumes else "weights of"
    logger.info(f"{what} {start.path} (step {state['step']})")
    load_model(model, state["model_state_dict"])
    if not start.resumes:
        return
    optimizers.load_state_dict(state["optimizer_state_dict"])
    if changed:
        logger.warning(f"settings differ from the run so far: {'; '.join(changed.values())}")
    if changed.keys() & (READS | MIXTURE.keys()):
        logger.warning(
            "these changes alter which text a step reads: until each source begins its next epoch, "
            "some of its text is read again, and some is skipped"
        )
    if progress.exploded:
        logger.warning(
            f"{start.path}: the loss had exploded by then; to go back, name an earlier checkpoint "
            f"with --resume, and a new --ckpt_dir"
        )

"""The directory of a run (`RunDirectory`): lock it, find the checkpoint to resume from, or start over."""

import shutil
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

from loguru import logger
from torch import nn

from spider import files
from spider.data.loader import Loader
from spider.errors import CheckpointError, DataError
from spider.training.checkpoint_contents import check_classes
from spider.training.checkpoint_files import checkpoint_paths, existing_parent, remove_leftovers, set_aside
from spider.training.checkpoint_loading import find_checkpoints, holds_checkpoints, load_checkpoint
from spider.training.checkpoint_writer import CheckpointWriter
from spider.training.metrics import Metrics
from spider.training.plan import OutputPlan
from spider.training.progress import RunProgress
from spider.training.ranks import World
from spider.training.retention import SavedCheckpoint
from spider.training.run_identity import RunIdentity, differences
from spider.training.sharding import sharding_of
from spider.training.started_over import note_path, read_note, write_note


def locked(directory: Path):
    """Return a context that locks a directory against other runs."""
    busy = CheckpointError(f"--ckpt_dir: another run is using {directory}: wait for it, or use another directory")
    return files.locked(directory, busy, logger.warning)


class RunDirectory:
    """A run's directory: choose the checkpoint to resume from, and write metrics and checkpoints. Writes nothing before
    `open`.

    A run that starts over (--reset_steps) or goes back (--resume of an older checkpoint) is a new run, with the next
    `lineage`; it keeps the files of earlier runs. Until it has saved, started-over.json records its start, so that the
    same command restarts it after a kill.

    Runs on mock data and on real data do not resume from each other, unless --resume names the checkpoint. With several
    ranks, only rank 0 accesses the directory.
    """

    def __init__(self, path: Path, resume: str | None, reset_steps: bool, closing: ExitStack, look_only: bool,
                 world: World, mock_data: bool, model_class: type[nn.Module]):
        self.path, self.closing, self.is_locked, self.model_class = path, closing, False, model_class
        self.is_named, self.mock_data, self.world = bool(resume), mock_data, world
        self.found, self.origin, self.begins_again, self.reset_steps, self.starts_over, self.lineage = (
            self.world.on_rank0(lambda: self._look(resume, reset_steps, look_only)))

    def _look(self, resume: str | None, reset_steps: bool, look_only: bool) -> tuple:
        """Lock the directory if it exists, and choose what to resume from."""
        path = self.path
        there = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
        if not there.is_dir():
            raise DataError(f"--ckpt_dir: {there} is a file, not a directory: use another name")
        self.is_locked = path.is_dir() and not look_only
        if self.is_locked:
            self.closing.enter_context(locked(path))
        found = find_checkpoints(path, self.model_class)
        if checkpoint_paths(path) and not found and not resume:
            raise CheckpointError(f"--ckpt_dir: none of the checkpoints in {path} is usable: restore a good one, name "
                                  f"one by --resume, or use another directory")
        newest, note = found[-1] if found else None, read_note(path)
        if note and newest and newest.lineage >= note.lineage:
            note = None                   # that run has saved a checkpoint
        origin = resume or (note.origin if note else newest.path if newest else None)
        if reset_steps and origin is None:
            raise CheckpointError(f"--reset_steps: no checkpoint in {path} to load weights from; name one by --resume")
        origin = None if origin is None else Path(origin)
        if origin is not None and holds_checkpoints(origin):
            raise CheckpointError(f"--resume: {origin} is not a checkpoint, but a directory: name a checkpoint in it")
        begins_again = note is not None and not resume and not reset_steps
        starts_over = origin is not None and (
            reset_steps or note is not None or newest is None or origin.resolve() != newest.path.resolve())
        past = max((one.lineage for one in (newest, note) if one), default=0)
        return (found, origin, begins_again, note.reset_steps if begins_again else reset_steps, starts_over,
                past + (starts_over and not begins_again))

    def load(self) -> dict | None:
        """Load the state to resume from, or return None. With several ranks, only rank 0 has the tensors, mapped from
        the file."""
        return None if self.origin is None else self.world.on_rank0(self._load)

    def _load(self) -> dict:
        if self.begins_again:
            if not self.origin.exists():
                raise CheckpointError(f"{note_path(self.path)}: a run started from {self.origin}, which is missing: "
                                      f"restore it, or delete this file to resume the earlier run")
            logger.info(f"the run from {self.origin} has saved nothing yet: starting it again")
        state = load_checkpoint(self.origin, self.model_class, self.starts_over, mapped=self.world.ranks > 1)
        of_mock_data = state.get("flags", {}).get("mock_data", self.mock_data)
        if of_mock_data != self.mock_data and not self.is_named:
            kinds = ("mock data", "real data") if of_mock_data else ("real data", "mock data")
            raise CheckpointError(f"--ckpt_dir: {self.origin} was trained on {kinds[0]}, but this run reads "
                                  f"{kinds[1]}: use another --ckpt_dir, or name it by --resume to continue anyway")
        if not self.reset_steps and "optimizer_state_dict" not in state:
            raise CheckpointError(f"--resume: {self.origin} has no optimizer state: add --reset_steps to start a new "
                                  f"run from its weights")
        if state.get("exploded"):
            sound = [one.path for one in self.found if not one.exploded]
            back = f"; to go back, use --resume {sound[-1]}" if sound else ""
            logger.warning(f"{self.origin}: the loss had exploded by then{back}")
        return state

    def start_line(self, state: dict) -> str:
        """Describe what the run loads from a state."""
        adapted = f", adapted to {state['adapted']:,} bytes since training" if state.get("adapted") else ""
        return f"{'weights of' if self.reset_steps else 'resuming from'} {self.origin} (step {state['step']}{adapted})"

    def restore(self, state: dict | None, model: nn.Module, optimizers, n_loops: int, loader: Loader,
                identity: RunIdentity) -> RunProgress:
        """Load a state into model and optimizers, log what has changed since, and return the run's progress."""
        names = [f.name for f in fields(RunProgress) if state and not self.reset_steps and f.name in state]
        progress = RunProgress(**{name: state[name] for name in names})
        progress.n_loops, progress.lineage = n_loops, self.lineage
        progress.wandb = None if self.starts_over else progress.wandb
        if not state:
            return progress
        if not self.reset_steps:
            check_classes(self.origin, state, model)
        sharding_of(model).load_model(model, state["model_state_dict"])
        logger.info(self.start_line(state))
        changed = [f"{name} was {before}, is {is_now}"
                   for name, (before, is_now) in differences(state["cfg"], model.config).items()]
        if self.reset_steps:
            if changed:
                logger.info(f"changed by --set: {'; '.join(changed)}")
            return progress
        optimizers.load_state_dict(state["optimizer_state_dict"])
        changed += identity.changes_since(state, n_loops)
        targets = loader.targets.tolist()
        if state.get("targets", targets) != targets:
            changed.append(f"training bytes were {state['targets']}, are {targets}")
        if changed:
            logger.warning(f"settings differ from the run so far: {'; '.join(changed)}")
            progress.expect_other_losses()
            progress.epoch = min(progress.epoch, loader.epoch(progress.bytes_seen // loader.seq_len))  # of other data
        return progress

    def open(self, progress: RunProgress, last_step: int, out: OutputPlan,
             size: float) -> tuple[Metrics, CheckpointWriter]:
        """Create the directory if needed; return its metrics.jsonl, cut to the current step, and its checkpoint writer.

        Raise CheckpointError if checkpoints of `size` bytes do not fit: two, or one that replaces the oldest.
        """
        past_end = progress.withdraw_end_evaluation(last_step)
        self.metrics = SimpleNamespace(write=lambda numbers: None, sync=None)  # for ranks other than 0
        saved = self.world.on_rank0(lambda: self._make(progress, past_end, out.keep_last + out.keep_best, size))
        writer = CheckpointWriter(self.path, saved, out.keep_last, progress.written, self.world,
                                  out.sharded_checkpoints, out.keep_best)
        return self.metrics, self.closing.enter_context(writer)

    def _make(self, progress: RunProgress, past_end: bool, keep: int, size: float) -> list[SavedCheckpoint]:
        """Prepare the directory's files for `open`; return the run's checkpoints so far."""
        remove_leftovers(self.path)
        saved = [one for one in self.found if one.lineage == progress.lineage]
        copies, free = 2 if len(saved) < keep else 1, shutil.disk_usage(existing_parent(self.path)).free
        if free < copies * size:
            raise CheckpointError(f"--ckpt_dir: {self.path} has {free / 1e9:.3g} GB free, but needs room for {copies} "
                                  f"checkpoint{'s' * (copies > 1)} of {size / 1e9:.3g} GB: free some, or use another "
                                  f"directory")
        if not self.is_locked:
            self.path.mkdir(parents=True, exist_ok=True)
            self.closing.enter_context(locked(self.path))
        lines = self.path / "metrics.jsonl"
        if self.starts_over and not self.begins_again:
            if lines.exists():
                set_aside(lines, progress.lineage)
            write_note(self.path, progress.lineage, self.origin, self.reset_steps)
        self.metrics = self.closing.enter_context(
            Metrics(lines, -1 if self.starts_over else progress.written, past_end))
        return saved

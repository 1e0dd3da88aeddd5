"""The directory of a run: find the checkpoint to resume from, lock it, keep its metrics."""

import json
import shutil
from contextlib import ExitStack
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import SimpleNamespace

import torch
from loguru import logger
from torch import nn

from spider import errors, files
from spider.data.loader import Loader
from spider.errors import CheckpointError
from spider.model.config import SpiderConfig
from spider.training.checkpoint import is_in_parts, load_checkpoint, remove
from spider.training.checkpoint_files import (STARTED_OVER, Found, StartedOver, checkpoint_paths, existing_parent,
                                              find_checkpoints, read_started_over, set_aside)
from spider.training.checkpoint_writer import CheckpointWriter
from spider.training.progress import RunProgress
from spider.training.ranks import World
from spider.training.sharding import sharding_of
from spider.training.run_log import Metrics


def locked(directory: Path):
    """A context in which no other run works in a directory."""
    busy = CheckpointError(f"--ckpt_dir: another run works in {directory}: wait for it, or use another")
    return files.locked(directory, busy, logger.warning)


# What makes a run the same run: other values go on from the same weights, but as another run.
IDENTITY = ("seed", "data_dir", "mock_data", "seq_len", "micro_batch", "global_batch", "lr", "schedule", "warmup_steps",
            "target_tokens", "random_loops", "engram_reset", "engram_lr", "weight_decay", "dropout", "beta1",
            "beta2", "momentum", "grad_clip", "min_lr_fraction", "wsd_decay_fraction", "eval_tokens", "optimizer")


def run_state(model: nn.Module, optimizers, progress: RunProgress, loader: Loader, args, world: World) -> dict:
    """What a checkpoint holds: tensors and plain values; randomness has no state, all of it is from (seed, step)."""
    return dict(model_state_dict=sharding_of(model).model_state(model), optimizer_state_dict=optimizers.state_dict(),
                recipe=args.recipe, cfg=asdict(model.config), flags={name: getattr(args, name) for name in IDENTITY},
                targets=loader.targets.tolist(), exploded=progress.exploded, **asdict(progress))


class RunDirectory:
    """A run's directory: what the run goes on from, and what it writes there; before `open` that is nothing.

    A run that starts over (--reset_steps) or goes back (--resume of another checkpoint than the newest) is one of its
    own, of the next `lineage`: it leaves the files of those before it. What it began with stands in started-over.json
    until it has saved, so that it is this run that goes on if it is killed before.

    Weights of mock data are no start for real data, nor the other way round, unless --resume names them.
    Of several ranks the first one alone looks into it, reads and writes, and tells the others what it found.
    """

    def __init__(self, path: Path, resume: str | None, reset_steps: bool, closing: ExitStack, look_only: bool = False,
                 world: World | None = None, mock_data: bool = False):
        self.path, self.closing, self.is_locked = path, closing, False
        self.is_named, self.mock_data = bool(resume), mock_data
        self.world = World() if world is None else world
        self.found, self.origin, self.begins_again, self.reset_steps, self.starts_over, self.lineage = self.world.on_rank0(
            lambda: self._look(resume, reset_steps, look_only))

    def _look(self, resume: str | None, reset_steps: bool, look_only: bool) -> tuple:
        """Locks the directory where it is there, and settles what the run goes on from."""
        from spider.export.read_back import is_export  # which reads by what is here
        path, closing = self.path, self.closing
        there = next(part for part in (path, *path.absolute().parents) if part.exists())
        if not there.is_dir():
            raise errors.DataError(f"--ckpt_dir: {there} is a file, not a directory: name another")
        self.is_locked = path.is_dir() and not look_only
        if self.is_locked:
            closing.enter_context(locked(path))
        found = find_checkpoints(path)
        if checkpoint_paths(path) and not found and not resume:
            raise CheckpointError(f"--ckpt_dir: none of the checkpoints in {path} can be used: put back a good one, "
                                  f"name one by --resume, or use another directory")
        newest, begun = found[-1] if found else None, read_started_over(path / STARTED_OVER)
        if begun and newest and newest.lineage >= begun.lineage:
            begun = None                  # it has saved
        origin = resume or (begun.origin if begun else newest.path if newest else None)
        if reset_steps and origin is None:
            raise CheckpointError(f"--reset_steps: no checkpoint in {path} to take weights from; name one by --resume")
        origin = None if origin is None else Path(origin)
        if origin is not None and origin.is_dir() and not is_export(origin) and not is_in_parts(origin):
            raise CheckpointError(f"--resume: {origin} is not a checkpoint: it is a directory, and no export; "
                                  f"name one in it")
        begins_again = begun is not None and not resume and not reset_steps
        starts_over = origin is not None and (
            reset_steps or begun is not None or newest is None or origin.resolve() != newest.path.resolve())
        past = max((one.lineage for one in (newest, begun) if one), default=0)
        return (found, origin, begins_again, begun.reset_steps if begins_again else reset_steps, starts_over,
                past + (starts_over and not begins_again))

    def load(self) -> dict | None:
        """The state to go on from; None: there is none. Of several ranks the first has its tensors, in the file."""
        return None if self.origin is None else self.world.on_rank0(self._load)

    def _load(self) -> dict:
        if self.begins_again:
            if not self.origin.exists():
                raise CheckpointError(f"{self.path / STARTED_OVER}: a run began from {self.origin}, which is gone: put "
                                      f"it back, or delete this file to go on with the run before")
            logger.info(f"the run that began from {self.origin} had saved nothing yet: it begins again")
        state = load_checkpoint(self.origin, sealed=self.starts_over, mapped=self.world.ranks > 1)
        of_mock_data = state.get("flags", {}).get("mock_data", self.mock_data)
        if of_mock_data != self.mock_data and not self.is_named:
            kinds = ("mock data", "real data") if of_mock_data else ("real data", "mock data")
            raise CheckpointError(f"--ckpt_dir: {self.origin} learned from {kinds[0]}, this run reads {kinds[1]}: use "
                                  f"another --ckpt_dir, or name it by --resume to go on from it all the same")
        if not self.reset_steps and "optimizer_state_dict" not in state:
            raise CheckpointError(f"--resume: {self.origin} has weights alone: --reset_steps starts a run with them")
        if state.get("exploded"):
            sound = [one.path for one in self.found if not one.exploded]
            back = f"; --resume {sound[-1]} goes back" if sound else ""
            logger.warning(f"{self.origin}: the loss had exploded before it{back}")
        return state

    def start_line(self, state: dict) -> str:
        """What a run takes from a state."""
        return f"{'weights of' if self.reset_steps else 'goes on from'} {self.origin} (step {state['step']})"

    def restore(self, state: dict | None, model: nn.Module, optimizers, n_loops: int, loader: Loader,
                args) -> RunProgress:
        """Fills model and optimizers from a state, and says what of the run changed since; where the run stands."""
        names = [f.name for f in fields(RunProgress) if state and not self.reset_steps and f.name in state]
        progress = RunProgress(**{name: state[name] for name in names})
        progress.n_loops, progress.lineage = n_loops, self.lineage
        progress.wandb = None if self.starts_over else progress.wandb
        if not state:
            return progress
        sharding_of(model).load_model(model, state["model_state_dict"])
        logger.info(self.start_line(state))
        changed = [f"{name} was {before}, is {is_now}"
                   for name, (before, is_now) in changes_of(state["cfg"], model.config).items()]
        if self.reset_steps:
            if changed:
                logger.info(f"changed by --set: {'; '.join(changed)}")
            return progress
        optimizers.load_state_dict(state["optimizer_state_dict"])
        before = dict(n_loops=state.get("n_loops", n_loops), dropout=0.0) | state.get("flags", {})  # dropout came later
        now = dict(n_loops=n_loops) | {name: getattr(args, name) for name in IDENTITY}
        changed += [f"--{name} was {before[name]}, is {now[name]}" for name in sorted(before.keys() & now)
                    if before[name] != now[name]]
        targets = loader.targets.tolist()
        if state.get("targets", targets) != targets:
            changed.append(f"bytes to train on were {state['targets']}, are {targets}")
        if changed:
            logger.warning(f"not the same run any more: {'; '.join(changed)}")
            progress.expect_other_losses()
            progress.epoch = min(progress.epoch, loader.epoch(progress.bytes_seen // args.seq_len))  # of other data
        return progress

    def open(self, progress: RunProgress, last_step: int, keep_last: int, size: float,
             in_parts: bool = False, keep_best: bool = False) -> tuple["Metrics", CheckpointWriter]:
        """Makes the directory, if need be; its metrics.jsonl, up to where the run stands, and its writer.

        CheckpointError where checkpoints of `size` bytes do not fit: two, or one where it replaces the oldest.
        """
        went_past_end = progress.goes_past_end(last_step)
        self.metrics = SimpleNamespace(write=lambda numbers: None, sync=None)  # of ranks that write nothing
        kept = self.world.on_rank0(lambda: self._make(progress, went_past_end, keep_last + keep_best, size))
        writer = CheckpointWriter(self.path, kept, keep_last, progress.written, self.world, in_parts,
                                  keep_best)
        return self.metrics, self.closing.enter_context(writer)

    def _make(self, progress: RunProgress, went_past_end: bool, keep: int, size: float) -> list[Found]:
        """What `open` does to files; the run's checkpoints so far."""
        for leftover in self.path.glob(".spider-step*.tmp"):     # of a run that was killed while it saved
            remove(leftover)
        kept = [one for one in self.found if one.lineage == progress.lineage]
        copies, free = 2 if len(kept) < keep else 1, shutil.disk_usage(existing_parent(self.path)).free
        if free < copies * size:
            raise CheckpointError(f"--ckpt_dir: {self.path} has {free / 1e9:.3g} GB free, {copies} "
                                  f"checkpoint{'s' * (copies > 1)} of {size / 1e9:.3g} GB must fit: make room, or use "
                                  f"another")
        if not self.is_locked:
            self.path.mkdir(parents=True, exist_ok=True)
            self.closing.enter_context(locked(self.path))
        lines = self.path / "metrics.jsonl"
        if self.starts_over and not self.begins_again:
            if lines.exists():
                set_aside(lines, progress.lineage)
            with files.durable(self.path / STARTED_OVER) as file:
                json.dump(StartedOver(progress.lineage, str(self.origin.resolve()), self.reset_steps)._asdict(), file)
        metrics = Metrics(lines, -1 if self.starts_over else progress.written, went_past_end)
        self.metrics = self.closing.enter_context(metrics)
        return kept


def changes_of(saved: dict, config: SpiderConfig) -> dict[str, tuple]:
    """The fields in which a config is not a checkpoint's, what they were there and what they are; loops have a flag."""
    there = SpiderConfig(**saved)             # fields that came since then have their defaults
    return {f.name: (getattr(there, f.name), getattr(config, f.name)) for f in fields(config)
            if f.name != "n_loops" and getattr(there, f.name) != getattr(config, f.name)}


def shapes(config: SpiderConfig) -> dict[str, tuple]:
    """Shapes by name of all that a model holds."""
    with torch.device("meta"):
        from spider_model import Spider
        model = Spider(config)
    return {name: tuple(x.shape) for part in (model.named_parameters(), model.named_buffers()) for name, x in part}


def check_same_model(path: Path, saved: dict, asked: SpiderConfig):
    """CheckpointError naming the fields by which the weights of a config have other shapes, or names, than a
    checkpoint's; those that change none, and loops, may differ."""
    there, changes = SpiderConfig(**saved), changes_of(saved, asked)
    if not changes or shapes(replace(asked, n_loops=there.n_loops)) == shapes(there):
        return

    def reshapes(name: str) -> bool:
        try:
            return shapes(replace(there, **{name: getattr(asked, name)})) != shapes(there)
        except ValueError:                # it goes with another field's change alone
            return True
    differing = [f"{name} {before} there, {now} asked for" for name, (before, now) in changes.items() if reshapes(name)]
    raise CheckpointError(f"{path} holds another model ({'; '.join(differing[:3])}), and its weights keep their "
                          f"shapes: leave that out of --model and --set, or train anew, without --resume, in a "
                          f"--ckpt_dir of its own")

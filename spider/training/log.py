"""Log a run: its settings, its steps, and how it ended.

run.py has metrics.jsonl and wandb, which record every step."""

import math
import shlex
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from loguru import logger

from spider.flags import quoted
from spider.training import checkpoint, estimate
from spider.training.distributed import World
from spider.training.plan import Plan
from spider.training.run import RunProgress, StepEvents
from spider_model import Spider

# --------------------------------------------------------------------------------------------------
# What was chosen


def describe_run(
    plan: Plan,
    sources: Iterable[object],
    last_step: int,
    inherited: Mapping[str, Mapping[str, object]],
    world: World,
) -> list[str]:
    """Return the first lines of the log: model, hardware and data, the number of steps, what `auto`
    and --minutes chose, and flags from elsewhere than the command line.

    sources: the data. inherited: flags from the environment and --config, by source."""
    flags = plan.flags
    hardware = f"{world.device}, threads: {torch.get_num_threads()}"
    if world.device.type == "cuda":
        hardware = torch.cuda.get_device_name(world.device)
    if world.ranks > 1:
        hardware += f", ranks: {world.ranks}"
    parameters = sum(p.numel() for p in plan.model.parameters()) / 1e6
    lines = [
        f"model {plan.recipe}, {parameters:.3g}M parameters, loops: {flags.n_loops}; {hardware}",
        *map(str, sources),
        f"steps: {last_step:,} of {plan.step_bytes:,} bytes, micro-batch {flags.micro_batch}, "
        f"saved in {flags.ckpt_dir}",
        f"chosen: {flags.precision}, compile {flags.compile}, {flags.moe_backend} experts, "
        f"{flags.optimizer}, recompute {flags.recompute}",
    ]
    if flags.minutes:
        lines.append(f"--minutes {flags.minutes:g} chose --target_tokens {flags.target_tokens}")
    for source, settings in inherited.items():
        lines += describe_settings(source, settings)
    return lines


def describe_recipe(plan: Plan) -> list[str]:
    """Return a line of the dry run with the flags that the recipe set, or nothing."""
    names = (plan.defaults.values.keys() | plan.defaults.rules.keys()) - plan.given
    settings = {name: value for name, value in vars(plan.flags).items() if name in names}
    return describe_settings(f"recipe of {plan.recipe}", settings)


def describe_settings(source: str, settings: Mapping[str, object]) -> list[str]:
    """Return a line with flags as on the command line, or nothing if there are none."""
    words = [as_argument(name, value) for name, value in settings.items()]
    return [f"{source}: {' '.join(words)}"] if words else []


def as_argument(name: str, value: object) -> str:
    """Format a flag as on the command line."""
    if value is True:
        return f"--{name}"
    text = str(value)
    separator = "=" if value is False or text.startswith("-") else " "
    return f"--{name}{separator}{shlex.quote(text)}"


# --------------------------------------------------------------------------------------------------
# Steps

# Without --log_every, two lines are as far apart as 1 / LOG_LINES of the run or LOG_SECONDS,
# whichever is longer, but at most MAX_SILENCE.
LOG_LINES = 100
LOG_SECONDS = 10.0
MAX_SILENCE = 600.0  # seconds


@dataclass
class StepLog:
    """Log the steps of a run: a line every --log_every steps, by default as often as the constants
    above allow, and whatever is unusual about a step."""

    plan: Plan
    progress: RunProgress
    last_step: int

    def __post_init__(self):
        self.first_step = self.progress.step + 1
        self.began = time.perf_counter()
        self.logged = self.began  # time of the last line
        self.logged_step = self.progress.step

    def is_due(self, step: int, now: float) -> bool:
        """Return whether to log a line for a step."""
        if step in (self.first_step, self.last_step):
            return True
        if self.plan.flags.log_every:
            return step % self.plan.flags.log_every == 0
        seconds = now - self.logged
        is_hundredth = (step - self.logged_step) * LOG_LINES >= self.last_step
        return seconds >= MAX_SILENCE or (seconds >= LOG_SECONDS and is_hundredth)

    def log(self, events: StepEvents):
        """Log the last step, if a line is due, and the step's events."""
        progress = self.progress
        step = progress.step
        now = time.perf_counter()
        if self.is_due(step, now):
            self.logged = now
            self.logged_step = step
            # seconds per step, with evaluations
            pace = (now - self.began) / (step - self.first_step + 1)
            left = estimate.describe_duration((self.last_step - step) * pace)
            metrics = progress.metrics
            assert metrics is not None
            logger.info(
                f"step {step}/{self.last_step}  bpb {metrics['loss'] / math.log(2):.3f}  loss "
                f"{metrics['loss']:.3f}  {metrics['tok_per_sec'] / 1e3:,.1f} kB/s  ETA "
                f"{left.partition(',')[0]}"  # only the days, if it takes days
            )
        if events.begins_epoch:
            line = f"step {step} begins epoch {progress.epoch} (from 0)"
            if events.cleared:
                line += ", tables cleared: the loss rises"
            logger.info(line)
        if progress.skipped or events.spike:
            logger.warning(describe_odd_step(progress, self.plan))


def describe_odd_step(progress: RunProgress, plan: Plan) -> str:
    """Describe a skipped step or a loss spike, with the command that prints the step's batch."""
    flags = plan.flags
    what = "skipped: loss or gradient is not finite" if progress.skipped else "is a spike"
    where = "--mock_data" if flags.mock_data else quoted(flags.data_dir)
    first = progress.next_sequence(flags.seq_len) - plan.layout.sequences
    return (
        f"step {progress.step} {what}; its batch: python data.py show {where} --seq_len "
        f"{flags.seq_len} --seed {flags.seed} --first {first} --count {plan.layout.sequences}"
    )


# --------------------------------------------------------------------------------------------------
# The end


def log_end(plan: Plan, progress: RunProgress, horizon: int, how: str):
    """Log the result of a finished run, its checkpoint, and what a user can do next.

    how: the last words of the first line, such as "0:00:12"."""
    found = ""
    best = progress.best_loss
    last = (progress.metrics or {}).get("val_loss")
    if last is not None:
        found = f"validation bpb {last / math.log(2):.4f}, "
    logger.info(f"done: step {progress.step}, {progress.bytes_seen:,} bytes, {found}{how}")
    if last is not None and last > best:
        logger.info(f"the best validation bpb was {best / math.log(2):.4f}; --keep_best keeps it")
    path = checkpoint.checkpoint_path(Path(plan.flags.ckpt_dir), progress.step)
    if path.exists():  # not on other hosts
        logger.info(f"checkpoint: {path}, {path.stat().st_size / 1e6:,.0f} MB")
    if plan.model_class is Spider:  # sample.py loads no other class
        logger.info(f"next: python sample.py {quoted(plan.flags.ckpt_dir)}")
    logger.info(how_to_train_longer(plan, progress, horizon))


def how_to_train_longer(plan: Plan, progress: RunProgress, horizon: int) -> str:
    """Return a line that says how to train a finished run for longer."""
    flags = plan.flags
    if progress.out_of_patience(flags.patience):
        return f"ended by --patience {flags.patience}: to continue, raise it, or set it to 0"
    if progress.step < horizon:
        return "to continue, raise --max_steps"
    return (
        f"to train longer: the same flags without --minutes, and --resume {quoted(flags.ckpt_dir)} "
        f"--ckpt_dir NEW --target_tokens MORE"
    )

"""The log of a run: what was chosen, its steps, and how it ended.

metrics.jsonl and wandb, which have every step, are in run.py."""

import math
import shlex
import time
from collections.abc import Mapping

import torch
from loguru import logger

from spider import estimate
from spider.common import quoted
from spider.distributed import World
from spider.plan import Plan
from spider.run import RunProgress, StepEvents
from spider_model import Spider

# --------------------------------------------------------------------------------------------------
# What was chosen


def describe_plan(
    plan: Plan, inherited: Mapping[str, Mapping[str, object]], world: World
) -> list[str]:
    """Return the lines of the log that say what was chosen: by `auto`, by the recipe, by the
    environment.

    inherited: the flags that the environment and --config set."""
    flags = plan.flags
    parameters = sum(p.numel() for p in plan.model.parameters()) / 1e6
    hardware = f"{torch.get_num_threads()} threads"
    if world.device.type == "cuda":
        hardware = torch.cuda.get_device_name(world.device)
    layout = ""
    if world.ranks > 1:
        layout = f", {world.ranks} ranks: {world.replicas} replicas of {world.shards} shards"
    lines = [
        f"model {plan.recipe}, {parameters:.1f}M parameters, {flags.n_loops} loops; "
        f"{world.device}, {hardware}{layout}",
        f"precision {flags.precision}, compile {flags.compile}, expert backend "
        f"{flags.moe_backend}, optimizer {flags.optimizer}, recompute {flags.recompute}",
        f"a step of {plan.step_bytes:,} bytes: --micro_batch {flags.micro_batch} --grad_accum "
        f"{flags.grad_accum}",
        *plan.reasons,
    ]
    if flags.minutes:
        lines.append(
            f"--minutes {flags.minutes:g} set this run's horizon, {flags.target_tokens:,} bytes, "
            f"when the run was started; to train longer, give --target_tokens instead"
        )
    if "lr" in plan.defaults.rules:
        lines.append(describe_rate(plan))
    by_source = {f"recipe of {plan.recipe}": set_by_recipe(plan)} | dict(inherited)
    for source, settings in by_source.items():
        if settings:
            words = [as_argument(name, value) for name, value in settings.items()]
            lines.append(f"{source}: {' '.join(words)}")
    return lines


def set_by_recipe(plan: Plan) -> dict[str, object]:
    """Return the flags whose values the recipe decided."""
    names = (plan.defaults.values.keys() | plan.defaults.rules.keys()) - plan.given
    names -= {"micro_batch", "global_batch"}  # which describe_plan has
    return {name: value for name, value in vars(plan.flags).items() if name in names}


def describe_rate(plan: Plan) -> str:
    """Say what a computed learning rate follows from, or what it would be without --lr."""
    rate = plan.flags.lr
    if "lr" in plan.given:
        computed = plan.defaults.rules["lr"](plan.flags, plan.config)
        return f"--lr {rate:g}: without it, the recipe would take {computed:g}"
    return (
        f"--lr {rate:g} follows from {plan.horizon:,} steps and a width of "
        f"{plan.config.hidden_size:,} (docs/results/learning.md)"
    )


def as_argument(name: str, value: object) -> str:
    """Format a flag as on the command line."""
    if value is True:
        return f"--{name}"
    text = str(value)
    separator = "=" if value is False or text.startswith("-") else " "
    return f"--{name}{separator}{shlex.quote(text)}"


# --------------------------------------------------------------------------------------------------
# Steps

LOG_LINES = 100  # without --log_every: about so many lines of steps in a run
LOG_SECONDS = 60.0  # ... and at least one every so often


def columns_of(plan: Plan, device: torch.device) -> dict[str, str]:
    """Return the columns of a step's line that suit a model and a device: the meaning of each, by
    the format of the step's metrics."""
    config = plan.config
    columns = {
        "loss {loss:.4f}": "loss (cross-entropy in nats per byte)",
        "bpb {bpb:.4f}": "bpb (the same in bits per byte)",
        "lr {lr:.2e}": "lr (learning rate)",
        "norm {grad_norm:.3f}": "norm (of the gradient, before clipping)",
        "{tok_per_sec:,.0f} bytes/s": "bytes/s (of this step)",
    }
    if device.type == "cuda":
        columns["MFU {bf16_mfu:.1%}"] = "MFU (model FLOPs relative to the measured bf16 peak)"
    if config.n_recurrent_layers:
        columns["{bytes_per_segment:.2f} bytes/segment"] = "bytes/segment (mean length)"
        if plan.flags.random_loops or (plan.flags.n_loops > 1 and config.act):
            columns["{mean_loops:.2f} loops"] = "loops (until a segment halts, mean)"
    if config.has_experts:
        columns["balance {expert_balance:.2f}"] = "balance (load of the busiest expert, 1 is even)"
    columns["{memory:.2f} GB"] = "GB (peak memory so far)"
    columns["ETA {eta}"] = "ETA (time left)"
    return columns


class StepLog:
    """Log steps: a line every --log_every steps, or about LOG_LINES of them, and what is
    unusual."""

    def __init__(self, plan: Plan, device: torch.device, progress: RunProgress, last_step: int):
        self.plan = plan
        self.progress = progress
        self.columns = columns_of(plan, device)
        self.first_step = progress.step + 1
        self.last_step = last_step
        self.every = plan.flags.log_every or math.ceil(last_step / LOG_LINES)
        self.began = time.perf_counter()
        self.logged = self.began  # time of the last line
        length = plan.config.bytes_per_segment
        cost = estimate.flops_per_byte(plan.model, length, plan.flags.n_loops, plan.flags.seq_len)
        logger.info(
            f"step {progress.step:,} of {last_step:,}, each of {plan.step_bytes:,} bytes; "
            f"{cost / 1e9:.2g} GFLOP per byte at {length:.2g} bytes per segment; checkpoints in "
            f"{plan.flags.ckpt_dir}"
        )
        logger.info(f"columns of a step: {', '.join(self.columns.values())}")

    def log(self, events: StepEvents):
        """Log the last step, if a line is due, and its events."""
        progress = self.progress
        step = progress.step
        now = time.perf_counter()
        overdue = self.plan.flags.log_every is None and now - self.logged > LOG_SECONDS
        at_an_end = step in (self.first_step, self.last_step)
        if overdue or at_an_end or step % self.every == 0:
            self.logged = now
            pace = (now - self.began) / (step - self.first_step + 1)  # evaluations and all
            metrics = progress.metrics
            assert metrics is not None
            values = metrics | dict(
                bpb=metrics["loss"] / math.log(2),
                eta=estimate.describe_duration((self.last_step - step) * pace),
            )
            cells = [cell.format(**values) for cell in self.columns]
            logger.info(" | ".join((f"step {step}/{self.last_step}", *cells)))
        if events.begins_epoch:
            line = f"step {step} begins epoch {progress.epoch} (counted from 0)"
            if events.cleared:
                line += (
                    ": the Engram tables are empty again (--engram_reset), so the next losses are "
                    "higher"
                )
            logger.info(line)
        if progress.skipped or events.spike:
            logger.warning(odd_step_line(progress, self.plan))


def odd_step_line(progress: RunProgress, plan: Plan) -> str:
    """Describe a skipped step or a loss spike, with the command that prints its batch."""
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
    """Log what a run that has ended by itself gave, and what a user can do next.

    how: the last words of the line, such as "12 s"."""
    best = progress.best_loss
    found = f"best validation loss {best:.4f}, " if math.isfinite(best) else ""
    last = (progress.metrics or {}).get("val_loss")
    if last is not None and last > best:
        found = f"validation loss {last:.4f} (the best was {best:.4f}; --keep_best keeps it), "
    logger.info(f"done: step {progress.step}, {progress.bytes_seen:,} bytes, {found}{how}")
    if plan.model_class is Spider:  # sample.py loads no other
        logger.info(f"next: python sample.py {quoted(plan.flags.ckpt_dir)}")
    logger.info(how_to_train_longer(plan, progress, horizon))


def how_to_train_longer(plan: Plan, progress: RunProgress, horizon: int) -> str:
    """Say how to train longer after a run that has ended by itself."""
    flags = plan.flags
    if progress.out_of_patience(flags.patience):
        return (
            f"ended by --patience {flags.patience}: the last {progress.unimproved} evaluations did "
            f"not lower the validation loss; to continue, raise it, or set it to 0"
        )
    if progress.step < horizon:
        return "to continue, raise --max_steps"
    return (
        f"to train longer: the same flags, but --resume {quoted(flags.ckpt_dir)}, a new --ckpt_dir "
        f"and a larger --target_tokens as the only horizon; the rate rises again, and with it the "
        f"loss at first"
    )

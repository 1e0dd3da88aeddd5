"""Estimate a run before it starts, as --dry_run prints it: bytes per segment, throughput, duration."""

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from loguru import logger
from torch import nn

from spider.console import one_line
from spider.data.loader import Loader
from spider.data.shards import Source
from spider.model.config import SpiderConfig
from spider.model.costs import parameter_table
from spider.model.ngrams import shifted_bytes
from spider.model.packing import Packing, document_cu_seqlens
from spider.training.checkpoint_files import checkpoint_paths, existing_parent
from spider.training.machine import free_memory
from spider.training.memory import describe_memory
from spider.training.plan import Plan
from spider.training.metrics import read_lines
from tokenizer import PAD_ID

SAMPLED, AT_ONCE = 1 << 18, 1 << 14       # bytes to measure the segments of a source on, in all and per batch
LONG_SEGMENT = 64                         # bytes: the core runs once per segment, and contributes little then


def segment_lengths(model: nn.Module, sources: Sequence[Source], seq_len: int, seed: int) -> dict[str, float]:
    """Measure the bytes per segment of each source's training data, by name. Return nothing for learned boundaries or
    a model without a core."""
    c, lengths = model.config, {}
    for source in sources if model.core is not None and model.boundary_predictor is None else ():
        loader, rows = Loader([source], seq_len, seed), max(1, AT_ONCE // seq_len)
        real = segments = 0
        for first in range(0, max(1, SAMPLED // seq_len), rows):
            ids, _ = loader.rows(np.arange(first, first + rows))
            packing = Packing.build(document_cu_seqlens(ids), ids.numel(), seq_len, c, torch.float32)
            shifted = shifted_bytes(ids.flatten(), packing.position, 2)
            real += int((ids != PAD_ID).sum())
            segments += int(model.boundaries(None, ids, shifted, packing, None).sum())
        lengths[source.name] = min(seq_len, real / max(1, segments))
    return lengths


def mean_length(c: SpiderConfig, sources: Sequence[Source], lengths: dict[str, float]) -> float:
    """Return the bytes per segment over all sources, or the config's estimate if none was measured."""
    return 1 / sum(s.weight / lengths[s.name] for s in sources) if lengths else c.bytes_per_segment


def segment_warnings(c: SpiderConfig, lengths: dict[str, float], seq_len: int) -> list[str]:
    """Return a warning for each of `lengths`, bytes per segment by name, that leaves the core nearly idle."""
    remedy = " or ".join(rule for rule in ("every_third", "learned") if rule != c.boundaries)
    return [f"{name}: segments have {length:,.0f} bytes on average, so that the core hardly runs: use --set "
            f"boundaries={remedy} instead of {c.boundaries}"
            for name, length in lengths.items() if c.n_recurrent_layers and length >= min(LONG_SEGMENT, seq_len)]


TOO_LONG = 30.0                           # seconds: a step that takes longer even at the peak rate is not timed


def rate_of_run(directory: str, step: int) -> float | None:
    """Return the bytes/s of the last steps of the run in --ckpt_dir, of `step` bytes each; None if there are none."""
    with suppress(OSError, KeyError, TypeError):
        lines = [*read_lines(Path(directory) / "metrics.jsonl")][-100:]
        rates = [float(line["tok_per_sec"]) for before, line in pairwise(lines)
                 if line["bytes_seen"] - before["bytes_seen"] == step]
        if rates and all(1e-3 < rate < 1e15 for rate in rates):
            return float(np.median(rates))


def expected_rate(plan: Plan, device: torch.device, bound: float, time_steps: Callable) -> tuple[str, float, str]:
    """Return the expected bytes/s of a run as (qualifier, rate, origin).

    The rate is measured by the run in --ckpt_dir, else by `time_steps`. Otherwise it is `bound`, the upper bound from
    matrix products alone; the qualifier of the duration is then "at least"."""
    step, directory = plan.batch.bytes, plan.output.ckpt_dir
    if (rate := rate_of_run(directory, step)) is not None:
        return "", rate, f"measured by the run in {directory}"
    needed = sum(plan.memory.values())
    obstacle = ("there are several ranks" if plan.batch.ranks > 1 else "compiling the layers takes minutes"
                if plan.machine.compile else "there is too little memory" if needed > free_memory(device) else
                "a step takes too long" if step > TOO_LONG * bound else None)
    if obstacle:
        return "at least ", bound, (f"an upper bound from matrix products alone; no step was timed, because "
                                    f"{obstacle}")
    logger.info(f"timing a step of {step:,} bytes")
    return "", time_steps(), "timed steps of this size"


def lasting(seconds: float) -> str:
    """Format a duration for people."""
    for unit, length in (("years", 365.25 * 86400), ("days", 86400), ("hours", 3600), ("minutes", 60), ("seconds", 1)):
        if seconds >= 2 * length or unit == "seconds":
            count = seconds / length
            return f"{count:,.0f} {unit}" if count >= 10 else f"{count:.1f} {unit}"


MOST_EPOCHS = 20                          # of a horizon without a warning


def epochs_over(loader: Loader, target_tokens: int) -> np.ndarray:
    """Return the number of epochs over each source for a horizon in bytes."""
    return target_tokens * loader.share / loader.targets


def horizon_warnings(plan: Plan, loader: Loader | None, horizon: int, lr_factor: Callable) -> list[str]:
    """Return warnings for a `horizon` in steps that does not suit the data or --max_steps; `lr_factor` is that of
    train.py."""
    schedule, max_steps, warnings = plan.schedule, plan.schedule.max_steps, []
    target = schedule.target_tokens
    epochs = 0.0 if loader is None else epochs_over(loader, target).max()
    if epochs > MOST_EPOCHS:
        warnings.append(f"--target_tokens {target:,} is {epochs:,.0f} epochs, in which the model memorizes the data: "
                        f"use at most {int(target * MOST_EPOCHS / epochs):,}, or more data")
    factor = lr_factor(max_steps - 1, horizon, schedule)
    high = max_steps - 1 < schedule.warmup_steps or factor > 2 * schedule.min_lr_fraction
    if 0 < max_steps < horizon and high:
        warnings.append(f"--max_steps {max_steps:,} ends the run at {factor:.0%} of the peak learning rate, which "
                        f"decays over {horizon:,} steps: use --target_tokens {max_steps * target // horizon} instead "
                        f"for a better loss")
    if max_steps > horizon:
        warnings.append(f"--max_steps {max_steps:,}: steps {horizon + 1:,} to {max_steps:,} are beyond the horizon, at "
                        f"a learning rate of {schedule.lr * factor:.3g}: use --target_tokens "
                        f"{max_steps * plan.batch.bytes} to spread the schedule over all steps")
    return warnings


def print_verdict(plan: Plan, there: float) -> bool:
    """Print whether `there` bytes of memory and the disk suffice, with the estimates, and return it."""
    directory, checkpoint = plan.output.ckpt_dir, plan.checkpoint_size
    keep = plan.output.keep_last + plan.output.keep_best
    free = shutil.disk_usage(existing_parent(directory)).free
    kept = min(keep, len(checkpoint_paths(Path(directory))))
    lacking = [what for what, short in (("memory", sum(plan.memory.values()) > there),
                                        ("disk", (keep + 1 - kept) * checkpoint > free)) if short]
    print(f"NOT ENOUGH {' and '.join(lacking)}" if lacking else "enough memory and disk")
    print(describe_memory(plan.memory, there))
    print(f"disk: {free / 1e9:.1f} GB free for {keep + 1} checkpoints of {checkpoint / 1e9:.2f} GB"
          + f", {kept} of which exist" * (kept > 0), flush=True)
    return not lacking


def print_outlook(plan: Plan, loader: Loader | None, sources: Sequence[Source], expected: tuple[str, float, str],
                  warnings: list[str]):
    """Print steps, passes over the data and duration of a run at the rate `expected`, then the data and warnings."""
    at_least, rate, origin = expected
    step, steps = plan.batch.bytes, plan.schedule.max_steps or plan.horizon  # from the start
    passes = "" if loader is None else f"{epochs_over(loader, steps * step).max():.3g} epochs, "
    print(one_line(f"run: {steps:,} steps of {step:,} bytes, {passes}{at_least}{lasting(steps * step / rate)} of "
                   f"training at {rate:,.0f} bytes/s ({origin})"))
    if not sources:
        print(one_line(f"data: {plan.data_dir!r} does not exist yet: python data.py prepare INPUT --out "
                       f"{plan.data_dir}"))
    for source in sources:
        print(one_line(f"data: {source.name} (weight {source.weight:.3g}): {len(source.train):,} training ids, "
                       f"{len(source.val):,} validation ids, all checked"))
    for warning in warnings:
        print(one_line(f"warning: {warning}"))


def print_tables(plan: Plan, model: nn.Module):
    """Print parameters by component, FLOPs per byte, configuration and flags; the model may be on the meta device."""
    table, expected = parameter_table(model), plan.bytes_per_segment
    total, active = (sum(column) for column in zip(*table.values()))
    print(f"\n{'parameters by component':36}{'parameters':>14}{'share':>8}{'active per byte':>18}")
    for component, (count, used) in sorted(table.items(), key=lambda item: -item[1][0]):
        print(f"  {component:34}{count:14,}{count / total:8.1%}{used:18,.0f}")
    print(f"  {'total':34}{total:14,}{1:8.0%}{active:18,.0f}")
    flops = {rate: model.flops_per_byte(rate, plan.n_loops, plan.batch.seq_len) for rate in (1, expected, 8)}
    print("\ntraining FLOPs per byte, " + ", ".join(
        f"{cost / 1e9:.3g} G at {rate:.2g} bytes per segment" for rate, cost in flops.items()))
    print("\nconfiguration")
    for field in dataclasses.fields(plan.config):
        print(f"  {field.name} = {getattr(plan.config, field.name)}")
    print("flags")
    for name, value in plan.flags.items():
        print(one_line(f"  --{name} = {value}"))

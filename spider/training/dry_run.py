"""What a run would take, printed before it takes it."""

import dataclasses
import math
import shutil
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from loguru import logger
from torch import nn

from spider import console
from spider.data import shards
from spider.data.loader import Loader
from spider.model.config import SpiderConfig
from spider.model.ngrams import shifted_bytes
from spider.model.packing import Packing, document_cu_seqlens
from spider.training.checkpoint_files import checkpoint_paths, existing_parent
from spider.training.machine import free_memory
from spider.training.run_log import numbers_of
from tokenizer import PAD_ID


def describe_memory(memory: dict[str, float], there: float) -> str:
    """One line: what a run takes of `there` bytes, and for what."""
    needed = sum(memory.values())
    verdict = "NOT ENOUGH" if needed > there else "enough"
    return (f"memory: about {needed / 1e9:.3g} GB of {there / 1e9:.3g}, {verdict}: "
            + ", ".join(f"{name} {size / 1e9:.2f}" for name, size in memory.items() if size >= 5e6))


SAMPLED, AT_ONCE = 1 << 18, 1 << 14       # bytes of a source that its segments are measured on, and of them at a time
LONG_SEGMENT = 64                         # bytes: the core, which runs once a segment, has little to say then


def segment_lengths(model: nn.Module, sources: list[shards.Source], args) -> dict[str, float]:
    """Bytes per segment that the model's rule makes of each source's training data, by its name; of none where cuts are
    learned, or there is no core."""
    c, lengths = model.config, {}
    for source in sources if model.core is not None and c.boundaries != "learned" else ():
        loader, rows = Loader([source], args.seq_len, args.seed), max(1, AT_ONCE // args.seq_len)
        real = segments = 0
        for first in range(0, max(1, SAMPLED // args.seq_len), rows):
            ids, _ = loader.rows(np.arange(first, first + rows))
            packing = Packing.build(document_cu_seqlens(ids), ids.numel(), args.seq_len, c, torch.float32)
            shifted = shifted_bytes(ids.flatten(), packing.position, 2)
            real += int((ids != PAD_ID).sum())
            segments += int(model.boundaries(None, ids, shifted, packing, None).sum())
        lengths[source.name] = min(args.seq_len, real / max(1, segments))
    return lengths


def mean_length(c: SpiderConfig, sources: list[shards.Source], lengths: dict[str, float]) -> float:
    """Bytes per segment of all sources together; the config's where none was measured."""
    return 1 / sum(s.weight / lengths[s.name] for s in sources) if lengths else c.bytes_per_segment


def segment_warnings(c: SpiderConfig, lengths: dict[str, float], seq_len: int) -> list[str]:
    """A line for each of `lengths`, bytes per segment by what has them, at which the core is next to idle."""
    remedy = " or ".join(rule for rule in ("every_third", "learned") if rule != c.boundaries)
    return [f"{name}: a segment has {length:,.0f} bytes on average, and the core, which runs once a segment, next to "
            f"nothing to do: --set boundaries={remedy} in place of {c.boundaries}"
            for name, length in lengths.items() if c.n_recurrent_layers and length >= min(LONG_SEGMENT, seq_len)]


TOO_LONG = 30.0                           # seconds: a step that takes more at the machine's full rate is not timed


def rate_of_run(args) -> float | None:
    """Bytes/s of the last steps of a run in --ckpt_dir, of as many bytes each; None where there are none."""
    path = Path(args.ckpt_dir) / "metrics.jsonl"
    with suppress(OSError, ValueError, KeyError, TypeError):
        lines = [numbers_of(line) for line in path.read_text().splitlines()[-100:]] if path.is_file() else []
        rates = [float(line["tok_per_sec"]) for before, line in pairwise(lines)
                 if line["bytes_seen"] - before["bytes_seen"] == args.global_batch]
        if rates and all(1e-3 < rate < 1e15 for rate in rates):
            return float(np.median(rates))


def expected_rate(args, device: torch.device, ranks: int, needed: float, bound: float,
                  time_steps: Callable) -> tuple[str, float, str]:
    """"at least" where a run takes longer than its rate says, else nothing; the rate in bytes/s, and where that comes
    from: of a run in --ckpt_dir, else of `time_steps`, else the `bound` that the machine's products set. `needed`:
    bytes of memory."""
    if (rate := rate_of_run(args)) is not None:
        return "", rate, f"measured by the run in {args.ckpt_dir}"
    obstacle = ("of several ranks" if ranks > 1 else "of compiled layers: they take minutes to compile"
                if args.compile == "on" else "for want of memory" if needed > free_memory(device) else
                "since it takes too long" if args.global_batch > TOO_LONG * bound else None)
    if obstacle:
        return "at least ", bound, f"its products alone, at this machine's rate of them; no step was timed, {obstacle}"
    logger.info(f"times a step of {args.global_batch:,} bytes")
    return "", time_steps(), "steps of these sizes, timed here"


def lasting(seconds: float) -> str:
    """A duration for people."""
    for unit, length in (("years", 365.25 * 86400), ("days", 86400), ("hours", 3600), ("minutes", 60), ("seconds", 1)):
        if seconds >= 2 * length or unit == "seconds":
            count = seconds / length
            return f"{count:,.0f} {unit}" if count >= 10 else f"{count:.1f} {unit}"


MOST_EPOCHS = 20                          # of a horizon, before it is a warning


def epochs_over(loader: Loader, target_tokens: int) -> np.ndarray:
    """Times that a horizon in bytes reads each source of the data."""
    return target_tokens * loader.share / loader.targets


def horizon_warnings(args, loader: Loader | None, horizon: int, lr_factor) -> list[str]:
    """A line each for a `horizon` of steps that does not suit the data, if there are any, or the steps that --max_steps
    leaves of it or adds to it; `lr_factor` is train.py's."""
    warnings, end = [], args.max_steps - 1
    epochs = 0.0 if loader is None else epochs_over(loader, args.target_tokens).max()
    if epochs > MOST_EPOCHS:
        warnings.append(f"--target_tokens {args.target_tokens:,} reads the data {epochs:,.0f} times over, which learns "
                        f"it by heart: at most {int(args.target_tokens * MOST_EPOCHS / epochs):,}, or more data")
    high = end < args.warmup_steps or lr_factor(end, horizon, args) > 2 * args.min_lr_fraction
    if 0 < args.max_steps < horizon and high:
        warnings.append(f"--max_steps {args.max_steps:,} ends the run at {lr_factor(end, horizon, args):.0%} of the "
                        f"peak rate, which falls over {horizon:,} steps: --target_tokens "
                        f"{args.max_steps * args.target_tokens // horizon} in its place would end at a better loss")
    if args.max_steps > horizon:
        warnings.append(f"--max_steps {args.max_steps:,}: steps {horizon + 1:,} to {args.max_steps:,} lie beyond the "
                        f"horizon, at a rate of {args.lr * lr_factor(end, horizon, args):.3g}: --target_tokens "
                        f"{args.max_steps * args.global_batch} spreads the schedule over all of them")
    return warnings


def print_verdict(args, memory: dict[str, float], there: float, checkpoint: float) -> bool:
    """Prints whether `there` bytes of memory and the disk suffice, and what is needed of them; returns it."""
    free = shutil.disk_usage(existing_parent(args.ckpt_dir)).free
    keep = args.keep_last + args.keep_best
    kept = min(keep, len(checkpoint_paths(Path(args.ckpt_dir))))
    lacking = [what for what, short in (("memory", sum(memory.values()) > there),
                                        ("disk", (keep + 1 - kept) * checkpoint > free)) if short]
    print(f"NOT ENOUGH {' and '.join(lacking)}" if lacking else "enough memory and disk")
    print(describe_memory(memory, there))
    print(f"disk: {free / 1e9:.1f} GB free for checkpoints of {checkpoint / 1e9:.2f} GB, {keep + 1} at a time"
          + f", {kept} of them there" * (kept > 0), flush=True)
    return not lacking


def print_outlook(args, loader: Loader | None, sources: list[shards.Source], expected: tuple[str, float, str],
                  warnings: list[str]):
    """Prints steps, passes over the data and the time of a run at the rate `expected`, what its data is, and
    warnings."""
    at_least, rate, origin = expected
    step = args.global_batch
    steps = args.max_steps or math.ceil(args.target_tokens / step)     # from the start
    passes = "" if loader is None else f"{epochs_over(loader, steps * step).max():.3g} times over the data, "
    print(console.one_line(f"run: {steps:,} steps of {step:,} bytes, {passes}{at_least}{lasting(steps * step / rate)} of "
                         f"training at {rate:,.0f} bytes/s ({origin})"))
    if not sources:
        print(console.one_line(f"data: {args.data_dir!r} does not exist yet: python data.py prepare INPUT --out "
                             f"{args.data_dir}"))
    for source in sources:
        print(console.one_line(f"data: {source.name} (weight {source.weight:.3g}): {len(source.train):,} training ids, "
                             f"{len(source.val):,} for validation; ids checked"))
    for warning in warnings:
        print(console.one_line(f"warning: {warning}"))


def print_tables(model: nn.Module, n_loops: int, args, flags: list[str], usual: float):
    """Prints parameters by component, cost at the `usual` bytes per segment and others, configuration, `flags` by
    name; of a model on the meta device, too."""
    c, table = model.config, model.parameter_table()
    total, active = (sum(column) for column in zip(*table.values()))
    print(f"\n{'parameters by component':36}{'parameters':>14}{'share':>8}{'active per byte':>18}")
    for component, (count, used) in sorted(table.items(), key=lambda item: -item[1][0]):
        print(f"  {component:34}{count:14,}{count / total:8.1%}{used:18,.0f}")
    print(f"  {'total':34}{total:14,}{1:8.0%}{active:18,.0f}")
    flops = {rate: model.flops_per_byte(rate, n_loops, args.seq_len) for rate in (1, usual, 8)}
    print("\ntraining FLOPs per byte, " + ", ".join(
        f"{cost / 1e9:.3g} G at {rate:.2g} bytes per segment" for rate, cost in flops.items()))
    print("\nconfiguration")
    for field in dataclasses.fields(c):
        print(f"  {field.name} = {getattr(c, field.name)}")
    print("flags")
    for name in flags:
        print(console.one_line(f"  --{name} = {getattr(args, name)}"))

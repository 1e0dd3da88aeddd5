"""Evaluate a model on held-out bytes, and print samples of what it writes."""

import math
import os
import sys
from collections.abc import Iterable, Mapping

import torch
from loguru import logger
from torch import Tensor, nn

import tokenizer
from spider import console
from spider.training.plan import Plan, step_seed
from spider.training.ranks import World

EVAL_BYTES = 8192                         # least bytes to evaluate at a time


@torch.no_grad()
def sum_losses(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], size: int, n_loops: int, device,
               world: World | None = None) -> list[float]:
    """Sum nats, labels that count, bytes and segments over batches of (ids, labels), each [n, T] int64, of `size` ids
    together, shared out to ranks. The model returns to the mode that it was in."""
    world = World() if world is None else world
    progress = console.ProgressBar("evaluates", size) if sys.stderr.isatty() and world.is_rank0 else None
    sums, training = torch.zeros(4, device=device, dtype=torch.float64), model.training
    model.eval()
    with model.cast_weights_once():
        for batch, counts in world.distribute(batches):
            ids, labels = (tensor.to(device) for tensor in batch)
            out = model(ids, labels, n_loops=n_loops)
            counted = (labels != -100).sum()
            sums += counts * torch.stack((out.nats_per_byte.double() * counted, counted,
                                          (ids != tokenizer.PAD_ID).sum(), out.segments))
            if progress:
                progress.add(ids.numel() * world.ranks)
    model.train(training)
    return world.sum(sums).tolist()


def means(sums: list[float]) -> tuple[float, int, float]:
    """Return mean nats per byte, the number of bytes, and bytes per segment."""
    nats, count, real, segments = sums
    return nats / count if count else math.nan, int(count), real / max(1, segments)


def evaluate(model: nn.Module, sets: Mapping[str, tuple[Tensor, Tensor]], micro_batch: int, n_loops: int, device,
             world: World | None = None) -> dict[str, float]:
    """Return cross-entropy on validation rows (ids and labels [n, T]) by source: nats and bits per byte and bytes per
    segment of all of them together, and of several sources the bits per byte of each, as val_bpb/NAME."""
    logger.info(f"evaluates on {sum(ids.numel() for ids, _ in sets.values()):,} bytes")
    sums = {name: sum_losses(model, list(zip(*(tensor.split(micro_batch) for tensor in rows))), rows[0].numel(),
                             n_loops, device, world) for name, rows in sets.items()}
    loss, _, rate = means([sum(column) for column in zip(*sums.values())])
    by_source = {name: means(own)[0] / math.log(2) for name, own in sums.items()} if len(sums) > 1 else {}
    logger.info(f"validation: loss {loss:.4f} nats per byte, bpb {loss / math.log(2):.4f}, {rate:.2f} bytes per segment"
                + "".join(f", {name} {bpb:.4f}" for name, bpb in by_source.items()))
    return (dict(val_loss=loss, val_bpb=loss / math.log(2), val_bytes_per_segment=rate)
            | {f"val_bpb/{name}": bpb for name, bpb in by_source.items()})


SAMPLE_START = 64                         # bytes of held-out text that a sample without prompt continues


def print_sample(model: nn.Module, step: int, plan: Plan, validation: Mapping[str, tuple[Tensor, Tensor]]):
    """Log 200 bytes that the model writes; the generator is a function of (--seed, step).

    They continue --sample_prompt, or the beginning of the `validation` rows, or a line's end: where a text file is one
    document, BOS stands once in all of the data, and what follows it was never learned."""
    if plan.output.sample_prompt:
        prompt, start = [tokenizer.BOS_ID, *os.fsencode(plan.output.sample_prompt)], plan.output.sample_prompt
    elif not validation:
        prompt = start = "\n"
        prompt = list(prompt.encode())
    else:
        ids, _ = next(iter(validation.values()))
        prompt = ids[0, :SAMPLE_START].tolist()
        start = f"(held-out text) {tokenizer.decode(prompt)}"
    logger.info("samples 200 bytes")
    seed = step_seed(plan.schedule.seed, step, "sample")
    generator = torch.Generator(model.embed_tokens.device).manual_seed(seed)
    model.eval()
    with torch.no_grad():
        try:
            text = tokenizer.decode(list(model.generate(prompt, 200, generator=generator, n_loops=plan.n_loops)))
            logger.info(f"step {step} continues {start!r}: {text!r}")
        except FloatingPointError as fault:
            logger.warning(f"step {step} writes nothing: {fault}")
    model.train()

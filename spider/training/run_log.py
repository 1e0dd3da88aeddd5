"""The lines of the log: `progress_line` for each step, `odd_step_line` for a skipped step or a loss spike."""

import math
import shlex
from collections.abc import Iterable
from datetime import timedelta

import torch
from loguru import logger

from spider.training.plan import Plan
from spider.training.progress import RunProgress


def log_lines(level: str, lines: Iterable[str]):
    """Log each line."""
    for line in lines:
        logger.log(level, line)


def progress_line(metrics: dict, last_step: int, remaining: float, device: torch.device) -> str:
    """Format a step's metrics for the log; `remaining` in seconds."""
    bpb = metrics["loss"] / math.log(2)
    return (f"step {metrics['step']}/{last_step} | loss {metrics['loss']:.4f} | bpb {bpb:.4f} | "
            f"lr {metrics['lr']:.2e} | norm {metrics['grad_norm']:.3f} | {metrics['tok_per_sec']:,.0f} bytes/s | "
            + f"MFU {metrics['bf16_mfu']:.1%} | " * (device.type == "cuda")
            + f"{metrics['bytes_per_segment']:.2f} bytes/segment | {metrics['mean_loops']:.2f} loops | "
            f"balance {metrics['expert_balance']:.2f} | {metrics['memory']:.2f} GB | "
            f"ETA {timedelta(seconds=round(remaining))}")


def odd_step_line(progress: RunProgress, plan: Plan) -> str:
    """Describe a skipped step or a loss spike, with the command that prints its batch."""
    loss, where = progress.owed["loss"], "--mock_data" if plan.mock_data else shlex.quote(plan.data_dir)
    what = ("skipped: loss or gradient is not finite" if progress.skipped else
            f"is a spike: loss {loss:.3f}, average {progress.average_loss:.3f}")
    first = progress.bytes_seen // plan.batch.seq_len - plan.batch.sequences
    return (f"step {progress.step} {what}; its batch: python data.py show {where} --seq_len {plan.batch.seq_len} "
            f"--seed {plan.schedule.seed} --first {first} --count {plan.batch.sequences}")

"""metrics.jsonl, and the lines of the log."""

import json
import math
import os
import shlex
import threading
from datetime import timedelta
from pathlib import Path

import torch
from loguru import logger

from spider import files
from spider.errors import CheckpointError
from spider.training.checkpoint import is_count
from spider.training.plan import Plan
from spider.training.progress import RunProgress


def progress_line(metrics: dict, last_step: int, remaining: float, device: torch.device) -> str:
    """The step's numbers for people; `remaining` in seconds."""
    bpb = metrics["loss"] / math.log(2)
    return (f"step {metrics['step']}/{last_step} | loss {metrics['loss']:.4f} | bpb {bpb:.4f} | "
            f"lr {metrics['lr']:.2e} | norm {metrics['grad_norm']:.3f} | {metrics['tok_per_sec']:,.0f} bytes/s | "
            + f"MFU {metrics['bf16_mfu']:.1%} | " * (device.type == "cuda")
            + f"{metrics['bytes_per_segment']:.2f} bytes/segment | {metrics['mean_loops']:.2f} loops | "
            f"balance {metrics['expert_balance']:.2f} | {metrics['memory']:.2f} GB | "
            f"ETA {timedelta(seconds=round(remaining))}")


def odd_step_line(progress: RunProgress, plan: Plan) -> str:
    """Say what was odd about the last step, and which command shows its sequences."""
    loss, where = progress.owed["loss"], "--mock_data" if plan.mock_data else shlex.quote(plan.data_dir)
    what = ("skipped: loss or gradient is not finite" if progress.skipped else
            f"is a spike: loss {loss:.3f}, {progress.average_loss:.3f} on average")
    first = progress.bytes_seen // plan.batch.seq_len - plan.batch.sequences
    return (f"step {progress.step} {what}; its batch: python data.py show {where} --seq_len {plan.batch.seq_len} --seed "
            f"{plan.schedule.seed} --first {first} --count {plan.batch.sequences}")


def numbers_of(line: str) -> dict:
    """Read a line of metrics.jsonl; what is no finite number there becomes null, as where it is written. ValueError
    where it is not that of a step."""
    def finite(text: str) -> float | None:
        return value if math.isfinite(value := float(text)) else None
    try:
        numbers = json.loads(line, parse_float=finite, parse_constant=finite)
    except RecursionError:
        raise ValueError("nested too deep") from None
    if not isinstance(numbers, dict) or not is_count(numbers.get("step")):
        raise ValueError("it has no step")
    return numbers


class Metrics:
    """metrics.jsonl, a line a step. What a full disk does not take is said once, and written with a later line."""

    def __init__(self, path: Path, step: int, went_past_end: bool = False):
        """Drops the lines behind `step`, which a resumed run writes again, and marks an evaluation that was due to the
        end of a run alone where it now goes on."""
        if path.exists() and not path.is_file():
            raise CheckpointError(f"{path} is no regular file: move it away")
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        with files.durable(path) as file:
            for number, line in enumerate(lines, 1):
                try:
                    numbers = numbers_of(line)
                    if numbers["step"] == step and went_past_end:
                        numbers["at_end"] = True
                    if numbers["step"] <= step:
                        file.write(json.dumps(numbers, allow_nan=False) + "\n")
                except ValueError:
                    logger.warning(f"{path}: line {number} is left out, it was cut off or altered")
        self.path, self.pending, self.complete, self.lock = path, b"", True, threading.Lock()
        self.file = files.open_own(path, "ab", 0)

    def write(self, numbers: dict):
        """Numbers that are not finite become null."""
        finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        with self.lock:
            self.pending += json.dumps(finite, allow_nan=False).encode() + b"\n"
        try:
            self._write_pending()
            self.complete = True
        except OSError as fault:
            if self.complete:
                logger.error(f"METRICS NOT WRITTEN: {self.path}: {fault.strerror}; kept for later")
            self.complete = False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def _write_pending(self):
        with self.lock:
            while self.pending:
                self.pending = self.pending[self.file.write(self.pending):]

    def sync(self):
        """Makes all lines durable, or raises OSError: no checkpoint is newer than the lines before it."""
        self._write_pending()
        os.fsync(self.file.fileno())

"""metrics.jsonl: a line of JSON per step, without gaps or repeats when a run resumes (`Metrics`); `read_lines` reads
the valid lines."""

import json
import math
import os
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from loguru import logger

from spider import files
from spider.errors import CheckpointError
from spider.files import is_count

LONGEST_LINE = 1 << 16                    # characters: what is longer is read in pieces, of which none is a line


def numbers_of(line: str) -> dict:
    """Read a step's line of metrics.jsonl; non-finite numbers become None. Raise ValueError for any other line."""
    def finite(text: str) -> float | None:
        return value if math.isfinite(value := float(text)) else None
    try:
        numbers = json.loads(line, parse_float=finite, parse_constant=finite)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(numbers, dict) or not is_count(numbers.get("step")):
        raise ValueError("it has no step")
    return numbers


def read_lines(path: Path) -> Iterator[dict]:
    """Yield the numbers of each valid line of metrics.jsonl; nothing if there is no such file."""
    if not path.is_file():
        return
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in iter(partial(file.readline, LONGEST_LINE), ""):
            try:
                numbers = numbers_of(line)
            except ValueError:            # truncated or altered
                continue
            yield numbers


class Metrics:
    """Write metrics.jsonl, a line per step. If the disk is full, log that once, and write the lines later."""

    def __init__(self, path: Path, step: int, past_end: bool = False):
        """Drop the lines after `step`, which a resumed run writes again. `past_end`: the run continues after its end,
        so mark the evaluation at `step`."""
        if path.exists() and not path.is_file():
            raise CheckpointError(f"{path} is not a regular file: move it away")
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        with files.durable(path) as file:
            for number, line in enumerate(lines, 1):
                try:
                    numbers = numbers_of(line)
                    if numbers["step"] == step and past_end:
                        numbers["at_end"] = True
                    if numbers["step"] <= step:
                        file.write(json.dumps(numbers, allow_nan=False) + "\n")
                except ValueError:
                    logger.warning(f"{path}: dropped line {number}, which was truncated or altered")
        self.path, self.pending, self.complete, self.lock = path, b"", True, threading.Lock()
        self.file = files.open_own(path, "ab", 0)

    def write(self, numbers: Mapping):
        """Write the line of a step; non-finite numbers become null."""
        finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        with self.lock:
            self.pending += json.dumps(finite, allow_nan=False).encode() + b"\n"
        try:
            self._write_pending()
            self.complete = True
        except OSError as fault:
            if self.complete:
                logger.error(f"METRICS NOT WRITTEN: {self.path}: {fault.strerror}; will retry")
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
        """Sync all lines to disk, or raise OSError; a checkpoint is renamed only after this."""
        self._write_pending()
        os.fsync(self.file.fileno())

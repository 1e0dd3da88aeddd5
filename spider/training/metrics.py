"""metrics.jsonl: a line of JSON for each step, exact when a run resumes (`Metrics`); `read_lines` reads those
that are sound."""

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


def read_lines(path: Path) -> Iterator[dict]:
    """Yield the numbers of each line of metrics.jsonl that is sound; nothing where there is no such file."""
    if not path.is_file():
        return
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in iter(partial(file.readline, LONGEST_LINE), ""):
            try:
                numbers = numbers_of(line)
            except ValueError:            # cut off or altered
                continue
            yield numbers


class Metrics:
    """metrics.jsonl, a line a step. What a full disk does not take is logged once, and written with a later line."""

    def __init__(self, path: Path, step: int, past_end: bool = False):
        """Drop the lines behind `step`, which a resumed run writes again, and mark an evaluation that was due to the
        end of a run alone where the run now goes `past_end`."""
        if path.exists() and not path.is_file():
            raise CheckpointError(f"{path} is no regular file: move it away")
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
                    logger.warning(f"{path}: line {number} is left out, it was cut off or altered")
        self.path, self.pending, self.complete, self.lock = path, b"", True, threading.Lock()
        self.file = files.open_own(path, "ab", 0)

    def write(self, numbers: Mapping):
        """Write the line of a step; numbers that are not finite become null."""
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
        """Make all lines durable, or raise OSError: no checkpoint is newer than the lines before it."""
        self._write_pending()
        os.fsync(self.file.fileno())

"""Helpers for tests of data: run data.py in this process, write shards, read prepared data."""

import json
import shlex
from pathlib import Path

import numpy as np

import data
from conftest import refused
from data import Shard, Source, Stream
from tokenizer import BOS_ID, EOS_ID

# --------------------------------------------------------------------------------------------------
# Commands


def run_data(command: str) -> int:
    """Run a command of data.py; return its exit status."""
    return data.main(shlex.split(command))


def prepare(command: str):
    """Run `data.py prepare`, which must succeed."""
    assert run_data(f"prepare {command}") == 0


def train_texts(command: str, out: str = "o") -> list[bytes]:
    """Prepare inputs without a validation split; return the documents."""
    prepare(f"{command} --val_fraction 0 --out {out}")
    return documents(out, "train")


def error_line(capsys, command: str) -> str:
    """Run a command that must be refused; return the error."""
    return refused(shlex.split(command), capsys, program="data.py", main=data.main)


# --------------------------------------------------------------------------------------------------
# Shards


def write_shard(path: str | Path, ids) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.asarray(ids, "<u2").tofile(path)
    return path


def stream(ids) -> Stream:
    return Stream([Shard("memory", np.asarray(ids, np.uint16))])


def source(ids, val=(), name="s", weight=1.0) -> Source:
    return Source(name, weight, stream(ids), stream(val))


# --------------------------------------------------------------------------------------------------
# Prepared data


def metadata(directory: str | Path) -> dict:
    return json.loads(Path(directory, "metadata.json").read_text())


def joined(directory: str | Path, split: str) -> bytes:
    """Return the concatenated shards of a split."""
    shards = sorted(Path(directory).glob(f"{split}-*.bin"))
    return b"".join(path.read_bytes() for path in shards)


def documents(directory: str | Path, split: str) -> list[bytes]:
    """Return the texts of a split; check that each begins with BOS and ends with EOS."""
    texts = []
    ids = np.frombuffer(joined(directory, split), "<u2")
    ends = np.flatnonzero(ids == EOS_ID) + 1
    *parts, rest = np.split(ids, ends)
    assert len(rest) == 0
    for part in parts:
        assert part[0] == BOS_ID and part[-1] == EOS_ID
        assert (part[1:-1] < 256).all()
        texts.append(part[1:-1].astype(np.uint8).tobytes())
    return texts

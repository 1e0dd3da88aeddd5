"""Shards for the tests of data, and the complaint of a command."""

from pathlib import Path

import numpy as np

import data
from data import Shard, Source, Stream
from tokenizer import BOS_ID, EOS_ID

PROGRESS = "prepare: ", "verify: "


def complaint(capsys, *argv) -> str:
    """Return the complaint of data.py about a command line; fail unless it is one line on stderr,
    and the status 2."""
    status = data.main([*map(str, argv)])
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if not line.startswith(PROGRESS)]
    assert (status, len(lines), out) == (2, 1, "") and lines[0].startswith("data.py: error: "), (
        argv,
        status,
        err,
        out,
    )
    assert lines[0].isprintable()
    return lines[0]


def write_shard(path: Path, ids) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.asarray(ids, "<u2").tofile(path)
    return path


def stream(ids) -> Stream:
    return Stream([Shard("memory", np.asarray(ids, np.uint16))])


def source(ids, val=(), name="s", weight=1.0) -> Source:
    return Source(name, weight, stream(ids), stream(val))


def joined(directory: Path, split: str) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(directory.glob(f"{split}-*.bin")))


def documents(directory: Path, split: str) -> list[bytes]:
    """The documents of a split; fails where one does not begin with BOS and end with EOS."""
    out = []
    stream = np.frombuffer(joined(directory, split), "<u2")
    for ids in np.split(stream, np.flatnonzero(stream == EOS_ID) + 1)[:-1]:
        assert ids[0] == BOS_ID and ids[-1] == EOS_ID and (ids[1:-1] < 256).all()
        out.append(ids[1:-1].astype(np.uint8).tobytes())
    return out

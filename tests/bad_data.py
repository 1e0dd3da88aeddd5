"""Shards, inputs and texts for the tests of data, sound and spoilt, and what a command answers."""

import json
import os
import random
import signal
import socket
from pathlib import Path

import numpy as np
import pytest

import data
from spider.data import inputs, readers
from spider.data.shards import Shard, Source, Stream
from tokenizer import BOS_ID, EOS_ID

PROGRESS = "prepare: ", "verify: ", "standard input: "
TEXTS = ["", " ", "-", "--", "-1", "+-3", "--5", "nan", "inf", "-inf", "1e400", "1e-400", "0x10", "1_0", "2.5",
         "9" * 5000, "\u00b2", "\u0663", "\u2167", "a\nb", "\x1b[2J", "\udcff", "\u202e", "\U0001f577", "None", "true",
         "1,2", "a b"]


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch):
    """No waiting for the disk: thousands of cases, and no power cut among them."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def snapshot(directory: Path) -> dict[Path, object]:
    """All that is in and below a directory: contents of files, targets of links."""
    return {path: os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
            for path in directory.rglob("*")}


def complaint(capsys, *argv) -> str:
    """Return the complaint of data.py about a command line; fail unless it is one line on stderr, and the status 2."""
    status = data.main([*map(str, argv)])
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if not line.startswith(PROGRESS)]
    assert (status, len(lines), out) == (2, 1, "") and lines[0].startswith("data.py: error: "), (argv, status, err, out)
    return lines[0]


def text(rng: random.Random, length: int) -> str:
    """Unicode of all kinds, control characters and lone surrogates included."""
    return "".join(chr(rng.choice((rng.randrange(1, 128), rng.randrange(1, 0x3000), rng.randrange(1, 0x110000))))
                   for _ in range(rng.randrange(length)))


@pytest.fixture
def prepared(tmp_path, capsys) -> Path:
    """A directory with five shards and their metadata."""
    lines = [json.dumps(dict(text=f"document {i} " + "x" * (i % 70))) + "\n" for i in range(60)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    assert data.main(["prepare", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "data" / "web"), "--workers", "1",
                      "--unit_mb", "0.001"]) == 0
    capsys.readouterr()
    assert len(list(tmp_path.glob("data/web/*.bin"))) > 4
    return tmp_path / "data"


def pipe(path):
    os.mkfifo(path)


def a_socket(path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(path))                    # 107 bytes at most


def device(path):
    path.symlink_to("/dev/zero")


@pytest.fixture
def no_waiting():
    """Fail where something waits for ever."""
    def fail(*_):
        raise TimeoutError("waits")
    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(240)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


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
    for ids in np.split(ids := np.frombuffer(joined(directory, split), "<u2"), np.flatnonzero(ids == EOS_ID) + 1)[:-1]:
        assert ids[0] == BOS_ID and ids[-1] == EOS_ID and (ids[1:-1] < 256).all()
        out.append(ids[1:-1].astype(np.uint8).tobytes())
    return out


@pytest.fixture
def mixed(tmp_path) -> Path:
    """A directory with a text, JSON-lines with unicode, blank lines and long lines, and a file of another kind."""
    rng, inputs = np.random.default_rng(0), tmp_path / "in"
    (inputs / "sub").mkdir(parents=True)
    (inputs / "a.txt").write_bytes(rng.integers(0, 256, 5000).astype(np.uint8).tobytes())
    texts = ["plain", "", "na\u00efve \u4f60\u597d \U0001f577", 'quote " and \\ and\nnewline']
    texts += ["x" * n for n in range(0, 3000, 40)]
    lines = [json.dumps(dict(id=i, text=text), ensure_ascii=i % 2 == 0) for i, text in enumerate(texts)]
    (inputs / "sub" / "b.jsonl").write_text("\n\n" + "\n  \n".join(lines), encoding="utf-8")
    (inputs / "sub" / "ignored.md").write_text("not data")
    return inputs


def limit(name: str, value: int, monkeypatch):
    """Set MIB or LINE_LIMIT of what reads inputs, in this process: in workers it stays what it is."""
    for module in (inputs, readers):
        monkeypatch.setattr(module, name, value)


def nodes(value, path=()):
    """The paths of all values inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, below in items:
        yield *path, name
        yield from nodes(below, (*path, name))


LINE = b'{"text": "fine"}\n'
KILLED = """
import os, signal, sys, data
name, count = sys.argv[1], int(sys.argv[2])
real = getattr(os, name)
def kill_at(*args):
    global count
    count -= 1
    if count < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*args)
setattr(os, name, kill_at)
sys.exit(data.main(sys.argv[3:]))
"""

"""Shards from anywhere: found, split, mapped, and refused where they are bad."""

import json
import math
import os
import random
import resource
from pathlib import Path

import zlib

import numpy as np
import pytest
import torch

from bad_data import quick_disk  # noqa: F401
from bad_data import TEXTS, complaint, snapshot, stream, text, write_shard
from spider import errors
from spider.console import one_line
from spider.data import shards
from spider.data.loader import Loader
from spider.data.shards import Shard, Source, Stream, check, mock_source, open_data
from tokenizer import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE


def test_the_cut_into_files_does_not_change_what_is_read():
    ids = np.random.default_rng(0).integers(0, 256, 1000).astype(np.uint16)
    shards = Stream([Shard(f"{i}", part) for i, part in enumerate(np.split(ids, [1, 2, 300, 333, 999]))])
    loaders = [Loader([Source("s", 1.0, train, stream([]))], 64, 9) for train in (stream(ids), shards)]
    assert all(torch.equal(*pair) for pair in zip(*(loader.rows(np.arange(40)) for loader in loaders)))
    assert shards.where(300) == "3: byte offset 0"
    assert shards.slice(298, 400).slice(1, 9).where(0) == "2: byte offset 594"


def test_mock_data_are_documents_easy_to_learn_and_a_function_of_the_seed():
    mock, again, other = (mock_source(seed) for seed in (1, 1, 2))
    ids = mock.train.read(0, len(mock.train))
    assert np.array_equal(ids, again.train.read(0, len(again.train)))
    assert not np.array_equal(ids[:500], other.train.read(0, 500))
    assert 900_000 < len(ids) < 2_000_000 and len(mock.val) > 20_000
    assert (ids == BOS_ID).sum() == (ids == EOS_ID).sum() == 5000 and ids[0] == BOS_ID and ids.max() == EOS_ID
    text = ids[ids < 256].astype(np.uint8).tobytes()
    assert len(zlib.compress(text)) < 0.15 * len(text) and len(set(text)) < 26


def test_shards_of_others_load_from_nested_folders_in_order_of_their_names(tmp_path):
    write_shard(tmp_path / "b" / "part-2.bin", [5, 6])
    write_shard(tmp_path / "b" / "part-10.bin", [3, 4])
    write_shard(tmp_path / "a.bin", [1, 2])
    write_shard(tmp_path / "c" / "validation" / "x.bin", [8, 9])
    write_shard(tmp_path / "b" / "val_1.bin", [7])
    (tmp_path / "metadata.json").write_text('{"tokens": 9, "shards": 14}')            # of somebody else's kind
    [found] = open_data(str(tmp_path))
    assert found.train.read(0, 6).tolist() == [1, 2, 3, 4, 5, 6] and len(found.train) == 6
    assert found.val.read(0, 3).tolist() == [7, 8, 9]


def test_metadata_says_which_shards_validate(tmp_path):
    write_shard(tmp_path / "one.bin", [1, 2])
    write_shard(tmp_path / "value.bin", [3])
    entries = [dict(name=f"{name}.bin", split=split, ids=ids, sha256="")
               for name, split, ids in [("one", "val", 2), ("value", "train", 1)]]
    (tmp_path / "metadata.json").write_text(json.dumps(dict(shards=entries)))
    [found] = open_data(str(tmp_path))
    assert found.train.read(0, 1).tolist() == [3] and found.val.read(0, 2).tolist() == [1, 2]


def test_without_a_validation_shard_the_last_hundredth_is_held_out(tmp_path):
    write_shard(tmp_path / "a.bin", np.arange(1000) % 256)
    write_shard(tmp_path / "b.bin", np.arange(1000, 1005) % 256)
    [found] = open_data(str(tmp_path))
    assert len(found.train) == 995 and found.val.read(0, 10).tolist() == [i % 256 for i in range(995, 1005)]
    assert found.val.where(0) == f"{tmp_path}/a.bin: byte offset 1990"
    assert found.val.where(6) == f"{tmp_path}/b.bin: byte offset 2"


def test_a_mixture_names_directories_and_weights(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("web", "code", "a:1"):
        write_shard(tmp_path / name / "x.bin", range(200))
    assert [(s.name, s.weight) for s in open_data("web:3,code:1")] == [("web", 0.75), ("code", 0.25)]
    assert [(s.name, s.weight) for s in open_data("a:1")] == [("a:1", 1.0)]      # a directory of that name


def test_more_shards_than_a_process_may_first_open_load(tmp_path):
    for i in range(40):
        write_shard(tmp_path / f"{i:02}.bin", [i])
    low, high = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 9, high))
        [found] = open_data(str(tmp_path))
        assert found.train.read(0, 40).tolist() == list(range(40))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (low, high))


def unfinished(path):
    write_shard(path / "train-00000.bin", [1, 2])
    (path / "prepare.jsonl").write_text('"x"\n')


def described(path, values, **entry):
    write_shard(path / "t.bin", values)
    (path / "metadata.json").write_text(json.dumps(dict(shards=[dict(name="t.bin", split="train", sha256="") | entry])))


SENTINELS = [0, 1, 2, 3, BOS_ID, PAD_ID, EOS_ID, 259, VOCAB_SIZE - 1]


def test_sentinels_and_control_bytes_in_a_foreign_shard_are_read_unchanged_and_only_pad_is_no_target(tmp_path):
    write_shard(tmp_path / "x.bin", [*SENTINELS, 65] * 30)
    [found] = sources = open_data(str(tmp_path))
    check(sources)
    ids, labels = Loader(sources, len(found.train) - 1, 0).rows(np.arange(1))
    read = found.train.read(0, len(found.train)).astype(int).tolist()
    assert ids[0].tolist() == read[:-1] and set(read) == {*SENTINELS, 65}
    assert labels[0].tolist() == [-100 if i == PAD_ID else i for i in read[1:]]


FAULTS = {
    "missing directory": (lambda p: None, "{p}/nowhere", ["{p}/nowhere", "no such directory", "data.py prepare"]),
    "no shard": (lambda p: (p / "x.txt").write_text("x"), "{p}", ["{p}", "no .bin file", "data.py prepare"]),
    "empty file": (lambda p: write_shard(p / "a" / "x.bin", []), "{p}", ["{p}/a/x.bin", "empty", "offset 0"]),
    "odd length": (lambda p: (p / "x.bin").write_bytes(b"abc"), "{p}", ["{p}/x.bin", "odd", "offset 2"]),
    "unreadable": (lambda p: (p / "x.bin").symlink_to(p / "gone"), "{p}", ["{p}/x.bin", "No such file"]),
    "cut off": (lambda p: described(p, [1, 2], ids=3), "{p}", ["{p}/t.bin", "offset 4", "says 6"]),
    "lost": (lambda p: described(p, [1], name="u.bin", ids=1), "{p}", ["{p}/u.bin", "missing"]),
    "broken metadata": (lambda p: (p / "metadata.json").write_text("{"), "{p}", ["{p}/metadata.json", "not JSON"]),
    "bad id": (lambda p: write_shard(p / "x.bin", [1, 2, 272]), "{p}", ["{p}/x.bin", "offset 4", "id 272", "271"]),
    "only validation": (lambda p: write_shard(p / "val.bin", [1]), "{p}", ["{p}", "none for training"]),
    "unfinished": (unfinished, "{p}", ["{p}", "was interrupted", "repeat its command"]),
    "no number": (lambda p: None, "web:x,code:1", ["web:x,code:1", "dir:weight"]),
    "zero weight": (lambda p: None, "web:0,code:1", ["web:0,code:1", "positive weights"]),
    "infinite weight": (lambda p: None, "web:inf,code:1", ["positive weights"]),
    "nan weight": (lambda p: None, "web:nan,code:1", ["positive weights"]),
    "no name": (lambda p: None, ":1,code:1", ["dir:weight"]),
    "missing part": (lambda p: None, "{p}/web:1,code:1", ["{p}/web", "no such directory"]),
}


@pytest.mark.parametrize("make, spec, said", FAULTS.values(), ids=FAULTS)
def test_bad_data_is_one_line_that_names_the_place(tmp_path, make, spec, said):
    make(tmp_path)
    with pytest.raises(errors.DataError) as fault:
        check(open_data(spec.format(p=tmp_path)))
    message = str(fault.value)
    assert "\n" not in message and all(part.format(p=tmp_path) in message for part in said), message


def test_large_data_are_checked_at_their_ends_and_the_rest_when_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "CHECK_ALL", 1000)
    monkeypatch.setattr(shards, "MIB", 200)
    ids = np.zeros(1000, int)
    for place in (50, 950):
        ids[:], ids[place] = 0, 300
        write_shard(tmp_path / "x.bin", ids)
        with pytest.raises(errors.DataError, match=f"x.bin: byte offset {2 * place}: id 300"):
            check(open_data(str(tmp_path)))
    ids[:], ids[500] = 0, 300
    write_shard(tmp_path / "x.bin", ids)
    sources = open_data(str(tmp_path))
    check(sources)
    with pytest.raises(errors.DataError, match="x.bin: byte offset 1000: id 300"):
        Loader(sources, 100, 0).rows(np.arange(10))


@pytest.mark.parametrize("spec", ("web:1,web:1", "web:0.7,code:0.2,web:0.1", "web:1,./web:1", "web:1,link:1"))
def test_a_source_that_is_named_twice_is_refused_under_whatever_names(tmp_path, monkeypatch, capsys, spec):
    monkeypatch.chdir(tmp_path)
    for name in ("web", "code"):
        Path(name).mkdir()
        np.zeros(300, "<u2").tofile(f"{name}/x.bin")
    Path("link").symlink_to("web")
    assert f"{spec}: a directory is named twice" in complaint(capsys, "show", "--seq_len", "8", spec)
    assert len(open_data("web:1,code:1")) == 2


def test_any_mixture_is_opened_or_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("web", "code"):
        Path(name).mkdir()
        np.zeros(300, "<u2").tofile(f"{name}/x.bin")
    rng, before, opened = random.Random(11), snapshot(tmp_path), 0
    weights = ["1", "0.7", "3", "1e-300", "1e308", "5e-324", "0", "-1", *TEXTS]
    for case in range(1000):
        parts = [rng.choice(("web", "code") * 2 + ("gone", "", text(rng, 5))) + rng.choice((":",) * 6 + ("", "::"))
                 + rng.choice(weights[:4] if case % 2 else weights) for _ in range(rng.randrange(1, 4))]
        spec = ",".join(parts)
        try:
            sources = open_data(spec)
            assert math.isclose(sum(s.weight for s in sources), 1) and {s.name for s in sources} <= {"web", "code"}
            Loader(sources, 8, 0).rows([0, 1])
            opened += 1
        except errors.DataError as fault:
            line = complaint(capsys, "show", "--seq_len", "8", "--", spec)
            assert one_line(fault) in line
            assert line.startswith(tuple(f"data.py: error: {one_line(name)}: " for name in (
                spec, *(part.rpartition(":")[0] for part in parts)))), (spec, line)
    assert snapshot(tmp_path) == before and 50 < opened < 1000

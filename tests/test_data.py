"""Shards, their order in training, and the commands that check and show them."""

import hashlib
import json
import os
import re
import resource
import subprocess
import sys
import zlib
from operator import mul
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import data
from conftest import ROOT, prepare
from spider import errors
from spider.data import shards
from spider.data.loader import BLOCK, Loader, key, permute, shares, validation_rows
from spider.data.shards import Shard, Source, Stream, check, mock_source, open_data
from tokenizer import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE


def stream(ids) -> Stream:
    return Stream([Shard("memory", np.asarray(ids, np.uint16))])


def source(ids, val=(), name="s", weight=1.0) -> Source:
    return Source(name, weight, stream(ids), stream(val))


def write_shard(path: Path, ids) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.asarray(ids, "<u2").tofile(path)
    return path


# ---------------------------------------------------------------------------------------------------------------------
# The order

@given(st.integers(1, 3000), st.integers(0, 2 ** 64 - 1))
@settings(max_examples=60, deadline=None)
def test_the_permutation_is_a_bijection(n, seed):
    index = np.arange(n)
    keys = key(seed, np.zeros(n, int))
    assert sorted(permute(index, n, keys)) == list(index)


def test_permutations_scatter_and_do_not_resemble_each_other():
    index = np.arange(1000)
    orders = [permute(index, 1000, key(seed, 0 * index)) for seed in range(20)]
    for order, other in zip(orders, orders[1:]):
        assert 280 < np.abs(np.diff(order)).mean() < 390     # of a random order: 333
        assert (order == other).sum() < 9                    # on average one place agrees
    assert np.allclose(np.mean(orders, 0).mean(), 499.5) and 50 < np.mean(orders, 0).std() < 80   # 289 / sqrt(20)


def test_each_index_is_permuted_under_its_own_key_and_size():
    sizes, keys = np.array([10, 1000, 10, 7]), key(3, np.array([0, 1, 2, 3]))
    together = permute(np.array([4, 4, 4, 4]), sizes, keys)
    alone = [permute(np.array([4]), int(n), keys[i:i + 1])[0] for i, n in enumerate(sizes)]
    assert list(together) == alone


@given(st.data(), st.integers(1, 255), st.integers(0, 3), st.integers(0, 2 ** 63))
@settings(max_examples=150, deadline=None)
def test_every_epoch_covers_each_target_exactly_once(draw, targets, epoch, seed):
    seq_len = draw.draw(st.integers(1, targets))
    loader, n = Loader([source(range(targets + 1))], seq_len, seed), -(-targets // seq_len)
    assert [loader.epoch(g) for g in (n * epoch, n * epoch + n - 1)] == [epoch, epoch]
    ids, labels = loader.rows(np.arange(n * epoch, n * epoch + n))
    assert ids.shape == labels.shape == (n, seq_len) and ids.dtype == labels.dtype == torch.int64
    counted = labels != -100
    assert sorted(labels[counted].tolist()) == list(range(1, targets + 1))
    assert (ids[counted] == labels[counted] - 1).all() and (ids[~counted] == PAD_ID).all()
    assert (counted[:, 1:] <= counted[:, :-1]).all()          # a short window is filled at its end


def test_epochs_differ_in_order_and_cut():
    loader, n = Loader([source(range(251))], 16, 1), 16
    epochs = [loader.rows(np.arange(n) + n * epoch)[1][:, 0].tolist() for epoch in range(8)]
    assert len({tuple(firsts) for firsts in epochs}) == 8 and len({frozenset(firsts) for firsts in epochs}) > 3
    even = Loader([source(range(241))], 16, 1)           # windows fit: only the order differs
    epochs = [even.rows(np.arange(15) + 15 * epoch)[1][:, 0].tolist() for epoch in range(8)]
    assert len({tuple(firsts) for firsts in epochs}) == 8 and len({frozenset(firsts) for firsts in epochs}) == 1
    assert Loader([source(range(251))], 16, 2).rows(np.arange(n))[1][:, 0].tolist() != epochs[0]


def test_the_order_of_a_single_source_is_that_of_every_version():
    """Two stretches of 64 sequences, so that checkpoints of runs go on with the bytes that come next."""
    loader = Loader([source(range(251))], 16, 1)
    for first, digest in ((0, "e77f9ec93055275e"), (25_000, "f779e3482e77c273")):
        ids, labels = loader.rows(np.arange(first, first + 64))
        assert hashlib.sha256(ids.numpy().tobytes() + labels.numpy().tobytes()).hexdigest().startswith(digest)


@pytest.mark.parametrize("first", (30, BLOCK - 7))
@pytest.mark.parametrize("ranks, micro_batch, grad_accum", [(1, 16, 1), (1, 4, 4), (2, 8, 1), (2, 1, 8), (8, 2, 1)])
def test_the_global_batch_is_the_same_on_any_ranks_and_micro_steps(ranks, micro_batch, grad_accum, first):
    sources = [source(range(200)), source(range(50, 250), name="t", weight=0.5)]
    loader = Loader(sources, 8, 5)
    parts = [loader.micro_batch(first, m, micro_batch, rank, ranks) for m in range(grad_accum) for rank in range(ranks)]
    ids, labels, g = (torch.cat(part) for part in zip(*parts))
    assert g.tolist() == list(range(first, first + 16)) and g.dtype == torch.int64
    assert all(torch.equal(*pair) for pair in zip((ids, labels), loader.rows(np.arange(first, first + 16))))


def test_targets_that_are_pad_do_not_count():
    ids, labels = Loader([source([1, 2, PAD_ID, 3, PAD_ID])], 4, 0).rows(np.arange(1))
    assert ids.tolist() == [[1, 2, PAD_ID, 3]] and labels.tolist() == [[2, -100, 3, -100]]


def test_the_cut_into_files_does_not_change_what_is_read():
    ids = np.random.default_rng(0).integers(0, 256, 1000).astype(np.uint16)
    shards = Stream([Shard(f"{i}", part) for i, part in enumerate(np.split(ids, [1, 2, 300, 333, 999]))])
    loaders = [Loader([Source("s", 1.0, train, stream([]))], 64, 9) for train in (stream(ids), shards)]
    assert all(torch.equal(*pair) for pair in zip(*(loader.rows(np.arange(40)) for loader in loaders)))
    assert shards.where(300) == "3: byte offset 0" and shards.slice(298, 400).slice(1, 9).where(0) == "2: byte offset 594"


def test_sources_have_their_exact_shares_in_every_block_and_their_own_epochs():
    sources = [source([200] * 5000, weight=7.0), source(range(101), name="t", weight=3.0)]
    loader, block = Loader(sources, 1, 4), np.arange(BLOCK)
    orders = []
    for number in (0, 3):
        labels = loader.rows(number * BLOCK + block)[1].flatten()
        assert torch.bincount(labels, minlength=201)[1:].tolist() == [30] * 100 + [0] * 99 + [7000]
        assert 0.6 < (labels[:2000] == 200).float().mean() < 0.8
        orders.append(labels.tolist())
    assert [label == 200 for label in orders[0]] != [label == 200 for label in orders[1]]
    assert orders[0] == Loader(sources, 1, 4).rows(block)[1].flatten().tolist()
    assert orders[0] != Loader(sources, 1, 5).rows(block)[1].flatten().tolist()
    passes = [loader.epochs(g).tolist() for g in (0, 1, 10_000, 20_000)]          # of 4,999 windows and of 100
    assert passes == [[0, 0], [0, 0], [1, 30], [2, 60]] and loader.epoch(20_000) == int(0.7 * 2 + 0.3 * 60)
    epochs = [loader.epoch(g) for g in range(0, 25_000, 50)]
    assert epochs == sorted(epochs) and epochs[0] == 0


MIXTURES = st.lists(st.tuples(st.integers(1, 80), st.integers(1, 9)), min_size=2, max_size=3)  # targets, weight


@given(MIXTURES, st.data(), st.integers(20, 300), st.integers(0, 2 ** 63))
@settings(max_examples=60, deadline=None)
def test_a_mixture_reads_each_source_to_its_end_before_it_begins_it_again(mixture, draw, block, seed):
    seq_len, count = draw.draw(st.integers(1, min(targets for targets, _ in mixture))), 600
    sources = [source(range(81 * k, 81 * k + targets + 1), name=str(k), weight=weight)
               for k, (targets, weight) in enumerate(mixture)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("spider.data.loader.BLOCK", block)
        loader = Loader(sources, seq_len, seed)
        rows = loader.rows(np.arange(count))
        labels = [row[row != -100].tolist() for row in rows[1]]
        owners, windows = [row[0] // 81 for row in labels], [-(-targets // seq_len) for targets, _ in mixture]
        for k, (targets, _) in enumerate(mixture):
            own = [row for row, owner in zip(labels, owners) if owner == k]
            for start in range(0, len(own), windows[k]):
                read = sorted(label for row in own[start:start + windows[k]] for label in row)
                whole = list(range(81 * k + 1, 81 * k + targets + 1))
                assert read == whole if start + windows[k] <= len(own) else len({*read}) == len(read)
        for g in range(0, count, 23):                         # so often was each one read to its end before
            passes = [owners[:g].count(k) // windows[k] for k in range(len(mixture))]
            assert loader.epochs(g).tolist() == passes
            assert loader.epoch(g) == sum(map(mul, loader.counts.tolist(), passes)) // block
        first = draw.draw(st.integers(0, count - 1))          # and another process goes on anywhere
        again = Loader(sources, seq_len, seed).micro_batch(first, 0, count - first)
        assert torch.equal(again[0], rows[0][first:]) and torch.equal(again[1], rows[1][first:])


def test_shares_go_by_largest_remainder():
    assert shares([1, 2], 10_000) == [3333, 6667] and shares([1, 1, 1], 10_000) == [3334, 3333, 3333]
    assert shares([1e-9, 1], 100) == [0, 100] and shares([0.7, 0.3], 0) == [0, 0]


def test_validation_rows_are_the_first_targets_shared_by_weight():
    a, b = source(range(9), range(0, 50), "a", 3.0), source(range(9), range(100, 106), "b", 1.0)
    ids, labels = validation_rows([a], 4, 10)
    assert labels.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, -100, -100]]
    assert ids.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, PAD_ID, PAD_ID]]
    labels = validation_rows([a, b], 4, 16)[1]
    assert labels[labels != -100].tolist() == [*range(1, 13), *range(101, 105)]
    labels = validation_rows([a, b], 4, 1000)[1]         # what a source lacks is not there
    assert labels[labels != -100].tolist() == [*range(1, 50), *range(101, 106)]
    again = validation_rows([a, b], 7, 16)[1]            # the cut does not change the bytes
    assert again[again != -100].tolist() == [*range(1, 13), *range(101, 105)]


def test_mock_data_are_documents_easy_to_learn_and_a_function_of_the_seed():
    mock, again, other = (mock_source(seed) for seed in (1, 1, 2))
    ids = mock.train.read(0, len(mock.train))
    assert np.array_equal(ids, again.train.read(0, len(again.train)))
    assert not np.array_equal(ids[:500], other.train.read(0, 500))
    assert 900_000 < len(ids) < 2_000_000 and len(mock.val) > 20_000
    assert (ids == BOS_ID).sum() == (ids == EOS_ID).sum() == 5000 and ids[0] == BOS_ID and ids.max() == EOS_ID
    text = ids[ids < 256].astype(np.uint8).tobytes()
    assert len(zlib.compress(text)) < 0.15 * len(text) and len(set(text)) < 26


# ---------------------------------------------------------------------------------------------------------------------
# Shards from anywhere

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


def test_sentinels_and_control_bytes_in_a_foreign_shard_are_read_as_they_stand_and_only_pad_is_no_target(tmp_path):
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
    "unfinished": (unfinished, "{p}", ["{p}", "cut short", "same command"]),
    "no number": (lambda p: None, "web:x,code:1", ["web:x,code:1", "dir:weight"]),
    "zero weight": (lambda p: None, "web:0,code:1", ["web:0,code:1", "above 0"]),
    "infinite weight": (lambda p: None, "web:inf,code:1", ["weights above 0"]),
    "nan weight": (lambda p: None, "web:nan,code:1", ["weights above 0"]),
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


@pytest.mark.parametrize("sources, said", [
    ([source(range(64))], "s: a sequence of 64 bytes is longer than the data (63 bytes): lower --seq_len"),
    ([source([])], "s: a sequence of 64 bytes is longer than the data (0 bytes): lower --seq_len"),
    ([source(range(99)), source(range(99), name="t", weight=1e-5)], "t: weight 1e-05 is not one sequence in 10,000"),
])
def test_sources_that_cannot_be_drawn_from_are_refused(sources, said):
    with pytest.raises(errors.DataError) as fault:
        Loader(sources, 64, 0)
    assert str(fault.value).startswith(said)
    Loader([source(range(65))], 64, 0)


@pytest.mark.parametrize("val, tokens", [([], 10), ([1], 10), ([1, 2], 0)])
def test_validation_without_a_byte_is_refused(val, tokens):
    with pytest.raises(errors.DataError, match="s: no byte to validate on"):
        validation_rows([source([1, 2], val)], 4, tokens)


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


# ---------------------------------------------------------------------------------------------------------------------
# verify, and the script itself

def test_verify_notices_what_changed(tmp_path, capsys):
    (tmp_path / "a.txt").write_bytes(bytes(range(256)) * 300)
    out = tmp_path / "o"
    assert prepare(tmp_path / "a.txt", "--out", out, "--unit_mb", "0.02") == 0 and data.main(["verify", str(out)]) == 0
    assert "shards are sound\n" in capsys.readouterr().out
    shard = out / "train-00001.bin"
    sound = shard.read_bytes()
    for change, said in [(bytes([sound[0], sound[1], sound[2] ^ 1]) + sound[3:], "SHA-256"), (sound[:-2], "cut off"),
                         (sound[:4] + b"\xff\xff" + sound[6:], "byte offset 4: id 65535"), (b"", "empty")]:
        shard.write_bytes(change)
        assert data.main(["verify", str(out)]) == 2
        lines = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
        assert len(lines) == 1 and str(shard) in lines[0] and said in lines[0]
    shard.unlink()
    assert data.main(["verify", str(out)]) == 2 and "missing" in capsys.readouterr().err


def test_verify_without_metadata_says_that_it_checked_the_format_alone(tmp_path, capsys):
    write_shard(tmp_path / "a" / "x.bin", range(100))
    assert data.main(["verify", str(tmp_path)]) == 0
    assert "1 shards are sound, 1 of them by their format alone" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["prepare", "nowhere", "--out", "o"], ["verify", "nowhere"], ["verify"],
                                       ["polish"], []])
def test_the_script_fails_in_one_line_with_status_2(tmp_path, arguments):
    done = subprocess.run([sys.executable, ROOT / "data.py", *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith("data.py: error: ")


def test_whatever_is_in_a_name_is_printed_escaped(tmp_path, capsys):
    """Of files, folders, columns, and whatever other people's metadata say."""
    evil = "\x1b[2Jred\n\x07\u202e\udcff"
    folder, out = tmp_path / f"in{evil}", tmp_path / f"out{evil}"
    folder.mkdir()
    (folder / f"a{evil}.txt").write_text("some text")
    (folder / f"b{evil}.md{evil}").write_text("passed over")
    (folder / f"loop{evil}").symlink_to(".")
    (folder / f"c{evil}.jsonl").write_text('{"text": 5}')
    (tmp_path / f"d{evil}.parquet").write_bytes(b"PAR1 and no more")
    stranger = tmp_path / f"shards{evil}"
    write_shard(stranger / f"x{evil}.bin", range(100))
    write_shard(stranger / f"long{evil}.bin", [300])
    (stranger / f"loop{evil}").symlink_to(".")
    assert prepare(folder, "--out", out) == 2
    (folder / f"c{evil}.jsonl").unlink()
    assert prepare(folder, "--out", out) == prepare(folder, "--out", out) == data.main(["verify", str(out)]) == 0
    assert data.main(["show", str(out), "--seq_len", "3"]) == 0
    assert prepare(tmp_path / f"d{evil}.parquet", "--out", tmp_path / "o") == 2
    assert prepare(folder, "--field", evil, "--out", out) == 2
    assert data.main(["verify", str(stranger)]) == 2
    (stranger / f"long{evil}.bin").unlink()
    assert data.main(["verify", str(stranger)]) == data.main(["show", str(stranger), "--seq_len", "3"]) == 0
    (stranger / "metadata.json").write_text(json.dumps(dict(shards=[dict(
        name=evil, ids=1, split="train", sha256=evil)])))
    assert data.main(["verify", str(stranger)]) == 2
    out, err = capsys.readouterr()
    assert all(line.isprintable() for line in (out + err).split("\n")), [out, err]
    assert "shards are sound" in out and "already prepared" in out and r"\x1b[2Jred\n" in out


# ---------------------------------------------------------------------------------------------------------------------
# show

def shown(text: str) -> list[int]:
    """The ids of what `show` prints."""
    ids, names = [], dict(PAD=PAD_ID, BOS=BOS_ID, EOS=EOS_ID)
    for name, byte, escaped, plain in re.findall(r"\\<(\w+)>|\\x(..)|\\(.)|(.)", text):
        ids += [names[name] if name in names else int(name)] if name else [int(byte, 16)] if byte else \
            [ord(dict(n="\n", t="\t", r="\r").get(escaped, escaped))] if escaped else plain.encode()
    return ids


def test_show_prints_what_the_loader_gives(tmp_path, capsys):
    rng = np.random.default_rng(0)
    wild = rng.integers(0, VOCAB_SIZE, 900)                   # control bytes, what is no UTF-8, every id above 255
    tame = np.frombuffer("na\u00efve \\ \u4f60\u597d\n\\<BOS>\x1b[2J\u202e".encode() * 40, np.uint8)
    write_shard(tmp_path / "wild" / "1.bin", wild[:500])
    write_shard(tmp_path / "wild" / "2.bin", wild[500:])
    write_shard(tmp_path / "tame" / "x.bin", tame)
    spec = f"{tmp_path}/wild:2,{tmp_path}/tame:1"
    sources = open_data(spec)
    loader, first, count = Loader(sources, 64, 3), 20, 60
    ids, labels, g = loader.micro_batch(first, 0, count)
    assert data.main(["show", spec, *f"--seq_len 64 --seed 3 --first {first} --count {count}".split()]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 * count and all(line.isprintable() for line in lines)
    epochs = set()
    for i in range(count):
        head, row = lines[2 * i], shown(lines[2 * i + 1][4:])
        assert [-100 if target == PAD_ID else target for target in row[1:]] == labels[i].tolist(), head
        assert row[:-1] == torch.where(ids[i] == PAD_ID, torch.tensor(row[:-1]), ids[i]).tolist(), head
        shape = r"(.*): epoch (.*), (.*), (.*): byte offset (.*)"
        number, epoch, name, path, offset = re.fullmatch(shape, head).groups()
        assert int(number) == g[i] and path.startswith(name) and name in (source.name for source in sources)
        assert np.fromfile(path, "<u2", 1, offset=int(offset))[0] == row[0]
        assert int(epoch) == loader.epochs(int(number))[[source.name for source in sources].index(name)]
        epochs.add(int(epoch))
    assert len(epochs) > 3 and PAD_ID in ids[:, -1]           # there were short windows too


def test_show_of_the_mock_data_is_what_a_mock_run_reads(capsys):
    assert data.main(["show", "--mock_data", "--seed", "7", "--first", "5", "--seq_len", "100", "--count", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    ids, labels, _ = Loader([mock_source(7)], 100, 7).micro_batch(5, 0, 2)
    assert [shown(line[4:]) for line in lines[1::2]] == torch.cat([ids, labels[:, -1:]], 1).tolist()
    assert lines[0].startswith("5: epoch 0, mock, mock data: byte offset ")
    for arguments in ([], ["data", "--mock_data"]):
        assert data.main(["show", *arguments]) == 2
        assert "either the run's --data_dir or its --mock_data" in capsys.readouterr().err


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", ["show --mock_data --count 100000", "--help", "verify o",
                                       "prepare in.txt --out p --workers 1"])
def test_a_pipe_that_nobody_reads_is_no_fault(tmp_path, arguments, unbuffered):
    (tmp_path / "in.txt").write_text("some text")
    assert prepare(tmp_path / "in.txt", "--out", tmp_path / "o") == 0
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, ROOT / "data.py", *arguments.replace("in.txt", str(tmp_path / "in.txt")).split()]
    run = subprocess.run(command, cwd=tmp_path, stdout=writing, stderr=subprocess.PIPE, text=True,
                         env=os.environ | {"PYTHONUNBUFFERED": unbuffered})
    os.close(writing)
    assert run.returncode == 0 and all(line.startswith(("prepare: ", "verify: ")) for line in run.stderr.splitlines())
    assert "--out p" not in arguments or (tmp_path / "p" / "metadata.json").exists()


def test_show_into_a_pipe_that_closes_says_nothing():
    command = [sys.executable, ROOT / "data.py", "show", "--mock_data", "--seq_len", "64", "--count", "100000"]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert run.stdout.readline().startswith(b"0: epoch 0, mock")
    run.stdout.close()
    assert run.stderr.read() == b"" and run.wait() == 0

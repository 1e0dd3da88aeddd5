"""data.py: shards of any origin, the order of training, batches, validation rows, verify and
show."""

import hashlib
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import zlib
from operator import mul
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import data
import sample
from bad_data import complaint, source, stream, write_shard
from conftest import ROOT, prepare
from data import BLOCK, Feed, Loader, Shard, Source, Stream, mock_source, open_data, validation_sets
from spider import common
from spider.packing import longest_bound
from spider.shard_files import files_below
from tokenizer import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE

# --------------------------------------------------------------------------------------------------
# Order


@given(st.data(), st.integers(1, 255), st.integers(0, 3), st.integers(0, 2**63))
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
    assert (counted[:, 1:] <= counted[:, :-1]).all()  # a short window is filled at its end


def test_the_order_is_that_of_every_version():
    """Stretches of 64 sequences, so that checkpoints of runs resume with the bytes that come
    next."""
    one = Loader([source(range(251))], 16, 1)
    mixture = Loader([source(range(251), weight=0.7), source(range(20, 200), weight=0.3)], 16, 1)
    for loader, first, digest in (
        (one, 0, "e77f9ec93055275e"),
        (one, 25_000, "f779e3482e77c273"),
        (mixture, 9_970, "cbbdf5bbe8e7dca2"),
    ):
        ids, labels = loader.rows(np.arange(first, first + 64))
        assert (
            hashlib.sha256(ids.numpy().tobytes() + labels.numpy().tobytes())
            .hexdigest()
            .startswith(digest)
        )


def shape(micro_batch: int, grad_accum: int = 1, ranks: int = 1) -> SimpleNamespace:
    return SimpleNamespace(
        micro_batch=micro_batch,
        grad_accum=grad_accum,
        ranks=ranks,
        sequences=micro_batch * grad_accum * ranks,
    )


@pytest.mark.parametrize("first", (30, BLOCK - 7))
@pytest.mark.parametrize(
    "micro_batch, grad_accum, ranks", [(16, 1, 1), (4, 4, 1), (8, 1, 2), (1, 8, 2), (2, 1, 8)]
)
def test_the_global_batch_is_the_same_on_any_ranks_and_micro_steps(
    micro_batch, grad_accum, ranks, first
):
    loader = Loader([source(range(200)), source(range(50, 250), name="t", weight=0.5)], 8, 5)
    ids, labels = loader.rows(np.arange(first, first + 16))
    noise = next(loader.batches(7, first, shape(16))).noise_seed
    for rank in range(ranks):
        batches = list(loader.batches(7, first, shape(micro_batch, grad_accum, ranks), rank))
        assert len(batches) == grad_accum
        for micro_step, batch in enumerate(batches):
            begin = (micro_step * ranks + rank) * micro_batch
            assert torch.equal(batch.ids, ids[begin : begin + micro_batch])
            assert (
                torch.equal(batch.labels, labels[begin : begin + micro_batch])
                and batch.noise_seed == noise + begin
            )


def test_a_batch_counts_its_targets_its_bytes_and_its_documents():
    ids = torch.tensor([[BOS_ID, 1, EOS_ID, BOS_ID], [2, 3, PAD_ID, PAD_ID]])
    batch = data.Batch.of(ids, torch.tensor([[1, EOS_ID, BOS_ID, 5], [3, 4, -100, -100]]), 0)
    assert (batch.targets, batch.n_bytes) == (6, 6) and batch.cu_seqlens.tolist()[:3] == [0, 3, 4]
    assert batch.longest == 4


@pytest.mark.parametrize(
    "lengths, length, bound",
    (
        ((3, 97), 100, 100),
        ((50, 50), 100, 64),
        ((32, 32, 36), 100, 64),
        ((33, 31, 36), 100, 64),
        ((32,) * 3, 96, 32),
        ((1,) * 100, 100, 16),
        ((2, 2), 2, 2),
        ((1025, 1023), 2048, 2048),
        ((1024, 1024), 2048, 1024),
    ),
)
def test_the_bound_of_documents_is_a_power_of_two_at_least_16_and_at_most_a_sequence(
    lengths, length, bound
):
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    assert longest_bound(cu_seqlens, length) == bound


def test_the_feed_gives_the_batches_of_step_after_step_and_fetches_the_next_one_ahead(monkeypatch):
    loader = Loader([source(range(200))], 8, 5)
    feed = Feed(loader, shape(2, 3), 0, torch.device("cpu"), 4, 24)
    for step in range(4, 8):
        expected = loader.batches(step, 6 * step, shape(2, 3))
        for batch, other in zip(feed.take(), expected, strict=True):
            assert torch.equal(batch.ids, other.ids) and batch.noise_seed == other.noise_seed
    feed.fetched.result()
    monkeypatch.setattr(Stream, "rows", lambda *_: 1 / 0)
    feed.take()  # was fetched before
    with pytest.raises(ZeroDivisionError):
        feed.take()


def test_the_feeds_copies_to_a_gpu_may_end_late_since_no_other_batch_takes_their_memory(
    monkeypatch,
):
    """Pinned memory and copies are stand-ins here: a copy takes place long after the call that
    begins it."""
    pinned, copies, device = [], [], torch.device("cuda")

    def pin_memory(tensor):
        pinned.append(tensor.clone())
        return pinned[-1]

    def to(tensor, target, *args, to=torch.Tensor.to, **kwargs):
        if target != device:
            return to(tensor, target, *args, **kwargs)
        assert kwargs == dict(non_blocking=True) and any(tensor is one for one in pinned)
        copies.append((torch.zeros_like(tensor), tensor))
        return copies[-1][0]

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.Tensor, "to", to)
    loader = Loader([source(range(200))], 8, 5)
    feed = Feed(loader, shape(2, 3), 0, device, 0, 0)
    taken = [feed.take() for _ in range(3)]
    feed.fetched.result()
    for on_device, tensor in copies:
        on_device.copy_(tensor)
    for step, batches in enumerate(taken):
        for batch, other in zip(batches, loader.batches(step, 6 * step, shape(2, 3)), strict=True):
            for name in ("ids", "labels", "cu_seqlens"):
                (arrived,) = [
                    on_device for on_device, _ in copies if on_device is getattr(batch, name)
                ]
                assert torch.equal(arrived, getattr(other, name))


FETCH_AT_THE_END = """
import time, torch
from data import Feed

class Slow:
    def batches(self, *_):
        began = time.perf_counter()
        while time.perf_counter() - began < 0.5:
            torch.arange(2048).flip(0)
        return []

Feed(Slow(), None, 0, torch.device("cpu"), 0, 0)
"""


def test_a_process_that_ends_while_a_step_is_fetched_succeeds():
    done = subprocess.run(
        [sys.executable, "-c", FETCH_AT_THE_END], cwd=ROOT, text=True, capture_output=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_sources_have_their_exact_shares_in_every_block_and_every_block_an_order_of_its_own():
    sources = [source([200] * 5000, weight=7.0), source(range(101), name="t", weight=3.0)]
    loader, block = Loader(sources, 1, 4), np.arange(BLOCK)
    orders = []
    for number in (0, 3):
        labels = loader.rows(number * BLOCK + block)[1].flatten()
        assert torch.bincount(labels, minlength=201)[1:].tolist() == [30] * 100 + [0] * 99 + [7000]
        assert 0.6 < (labels[:2000] == 200).float().mean() < 0.8
        orders.append(labels.tolist())
    assert [label == 200 for label in orders[0]] != [label == 200 for label in orders[1]]


# targets, weight
MIXTURES = st.lists(st.tuples(st.integers(1, 80), st.integers(1, 9)), min_size=2, max_size=3)


@given(MIXTURES, st.data(), st.integers(20, 300), st.integers(0, 2**63))
@settings(max_examples=60, deadline=None)
def test_a_mixture_reads_each_source_to_its_end_before_it_begins_it_again(
    mixture, draw, block, seed
):
    seq_len, count = draw.draw(st.integers(1, min(targets for targets, _ in mixture))), 600
    sources = [
        source(range(81 * k, 81 * k + targets + 1), name=str(k), weight=weight)
        for k, (targets, weight) in enumerate(mixture)
    ]
    if True:
        loader = Loader(sources, seq_len, seed, block)
        rows = loader.rows(np.arange(count))
        labels = [row[row != -100].tolist() for row in rows[1]]
        owners, windows = (
            [row[0] // 81 for row in labels],
            [-(-targets // seq_len) for targets, _ in mixture],
        )
        for k, (targets, _) in enumerate(mixture):
            own = [row for row, owner in zip(labels, owners, strict=True) if owner == k]
            for start in range(0, len(own), windows[k]):
                read = sorted(label for row in own[start : start + windows[k]] for label in row)
                whole = list(range(81 * k + 1, 81 * k + targets + 1))
                assert (
                    read == whole if start + windows[k] <= len(own) else len({*read}) == len(read)
                )
        for g in range(0, count, 23):  # so often was each one read to its end before
            passes = [owners[:g].count(k) // windows[k] for k in range(len(mixture))]
            assert loader.epochs(g).tolist() == passes
            assert loader.epoch(g) == sum(map(mul, loader.counts.tolist(), passes)) // block
        first = draw.draw(st.integers(0, count - 1))  # and another process goes on anywhere
        again = next(Loader(sources, seq_len, seed, block).batches(0, first, shape(count - first)))
        assert torch.equal(again.ids, rows[0][first:]) and torch.equal(
            again.labels, rows[1][first:]
        )


def validation_targets(sources, seq_len: int, tokens: int) -> dict[str, list[int]]:
    """Return the targets that each source validates with."""
    return {
        name: labels[labels != -100].tolist()
        for name, (_, labels) in validation_sets(sources, seq_len, tokens).items()
    }


def test_validation_sets_hold_the_first_targets_shared_by_weight():
    a, b = source(range(9), range(0, 50), "a", 3.0), source(range(9), range(100, 106), "b", 1.0)
    ids, labels = validation_sets([a], 4, 10)["a"]
    assert labels.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, -100, -100]]
    assert ids.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, PAD_ID, PAD_ID]]
    none = source(range(9), [], "none", 4.0)
    for seq_len in (4, 7):  # the cut does not change the bytes
        found = validation_targets([a, none, b], seq_len, 32)
        assert [*found.items()] == [("a", [*range(1, 13)]), ("b", [*range(101, 105)])]
    for val, tokens in ([], 10), ([1], 10), ([1, 2], 0):
        with pytest.raises(common.DataError, match="s: no validation data"):
            validation_sets([source([1, 2], val)], 4, tokens)
    padding = source(range(9), [PAD_ID] * 9, "padding", 1.0)
    assert [*validation_sets([a, padding], 4, 10)] == ["a"]
    # no more than there is
    assert validation_targets([a, b], 4, 1000) == dict(a=[*range(1, 50)], b=[*range(101, 106)])


@pytest.mark.parametrize(
    "sources, said",
    [
        (
            [source(range(64))],
            "s: a sequence of 64 bytes is longer than the data (63 bytes): lower --seq_len",
        ),
        (
            [source([])],
            "s: a sequence of 64 bytes is longer than the data (0 bytes): lower --seq_len",
        ),
        (
            [source(range(99)), source(range(99), name="t", weight=1e-5)],
            "t: weight 1e-05 is less than one sequence",
        ),
    ],
)
def test_sources_that_cannot_be_drawn_from_are_refused(sources, said):
    with pytest.raises(common.DataError) as fault:
        Loader(sources, 64, 0)
    assert str(fault.value).startswith(said)
    Loader([source(range(65))], 64, 0)


# --------------------------------------------------------------------------------------------------
# Shards


def test_the_cut_into_files_does_not_change_what_is_read():
    ids = np.random.default_rng(0).integers(0, 256, 1000).astype(np.uint16)
    shards = Stream(
        [Shard(f"{i}", part) for i, part in enumerate(np.split(ids, [1, 2, 300, 333, 999]))]
    )
    loaders = [
        Loader([Source("s", 1.0, train, stream([]))], 64, 9) for train in (stream(ids), shards)
    ]
    assert all(
        torch.equal(*pair)
        for pair in zip(*(loader.rows(np.arange(40)) for loader in loaders), strict=True)
    )
    assert shards.where(300) == "3: byte offset 0"
    assert shards.slice(298, 400).slice(1, 9).where(0) == "2: byte offset 594"


def test_mock_data_are_documents_easy_to_learn_and_a_function_of_the_seed():
    mock, again, other = (mock_source(seed) for seed in (1, 1, 2))
    ids = mock.train.read(0, len(mock.train))
    assert np.array_equal(ids, again.train.read(0, len(again.train)))
    assert not np.array_equal(ids[:500], other.train.read(0, 500))
    assert 900_000 < len(ids) < 2_000_000 and len(mock.val) > 20_000
    assert (
        (ids == BOS_ID).sum() == (ids == EOS_ID).sum() == 5000
        and ids[0] == BOS_ID
        and ids.max() == EOS_ID
    )
    text = ids[ids < 256].astype(np.uint8).tobytes()
    assert len(zlib.compress(text)) < 0.15 * len(text) and len(set(text)) < 26


def test_shards_of_others_load_from_nested_and_linked_folders_once_in_order_of_their_names(
    tmp_path,
):
    shards = tmp_path / "shards"
    write_shard(shards / "b" / "part-2.bin", [5, 6])
    write_shard(shards / "b" / "part-10.bin", [3, 4])
    write_shard(shards / "a.bin", [1, 2])
    write_shard(tmp_path / "far" / "x.bin", [8, 9])
    write_shard(shards / "b" / "val_1.bin", [7])
    write_shard(shards / ".hidden" / "x.bin", [99])
    (shards / "c").mkdir()
    (shards / "c" / "validation").symlink_to(tmp_path / "far")
    (shards / "b" / "again").symlink_to(shards)  # a circle
    (shards / "b" / "z.bin").symlink_to(shards / "a.bin")
    (shards / "metadata.json").write_text('{"tokens": 9, "shards": 14}')  # of somebody else's kind
    [found] = open_data(str(shards))
    assert found.train.read(0, 6).tolist() == [1, 2, 3, 4, 5, 6] and len(found.train) == 6
    assert found.val.read(0, 3).tolist() == [7, 8, 9]


def described(path, *entries):
    shards = [dict(dict(split="train", sha256=64 * "0"), **entry) for entry in entries]
    (path / "metadata.json").write_text(json.dumps(dict(vocab_size=VOCAB_SIZE, shards=shards)))


def test_metadata_says_which_shards_validate(tmp_path):
    write_shard(tmp_path / "one.bin", [1, 2])
    write_shard(tmp_path / "value.bin", [3])
    described(tmp_path, dict(name="one.bin", split="val", ids=2), dict(name="value.bin", ids=1))
    [found] = open_data(str(tmp_path))
    assert found.train.read(0, 1).tolist() == [3] and found.val.read(0, 2).tolist() == [1, 2]


def test_without_a_validation_shard_the_last_hundredth_is_held_out(tmp_path):
    write_shard(tmp_path / "a.bin", np.arange(1000) % 256)
    write_shard(tmp_path / "b.bin", np.arange(1000, 1005) % 256)
    [found] = open_data(str(tmp_path))
    assert len(found.train) == 995 and found.val.read(0, 10).tolist() == [
        i % 256 for i in range(995, 1005)
    ]
    assert found.val.where(0) == f"{tmp_path}/a.bin: byte offset 1990"
    assert found.val.where(6) == f"{tmp_path}/b.bin: byte offset 2"


def test_a_mixture_names_directories_and_weights(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("web", "code", "a:1"):
        write_shard(tmp_path / name / "x.bin", range(200))
    assert [(s.name, s.weight) for s in open_data("web:3,code:1")] == [
        ("web", 0.75),
        ("code", 0.25),
    ]
    # a directory of that name
    assert [(s.name, s.weight) for s in open_data("a:1")] == [("a:1", 1.0)]
    (tmp_path / "link").symlink_to("web")
    for spec in ("web:0.7,code:0.2,web:0.1", "web:1,link:1"):
        with pytest.raises(common.DataError, match="a directory is named twice"):
            open_data(spec)


SENTINELS = [0, 1, 2, 3, BOS_ID, PAD_ID, EOS_ID, 259, VOCAB_SIZE - 1]


def test_ids_of_a_foreign_shard_are_read_unchanged_and_only_pad_is_no_target(
    tmp_path,
):
    write_shard(tmp_path / "x.bin", [*SENTINELS, 65] * 30)
    [found] = sources = open_data(str(tmp_path))
    ids, labels = Loader(sources, len(found.train) - 1, 0).rows(np.arange(1))
    read = found.train.read(0, len(found.train)).astype(int).tolist()
    assert ids[0].tolist() == read[:-1] and set(read) == {*SENTINELS, 65}
    assert labels[0].tolist() == [-100 if i == PAD_ID else i for i in read[1:]]


ENTRY = dict(name="t.bin", split="train", ids=2, sha256=64 * "0")
BAD_ENTRIES = (
    [("entry", entry) for entry in (None, 5, "t.bin", [], [ENTRY])]
    + [
        (field, {**ENTRY, field: value})
        for field, values in dict(
            name=(None, 5, ["t.bin"], "", "t.txt", "/t.bin", "../t.bin", "a/../t.bin", "t\0.bin"),
            split=(None, True, "valid", "x", ["train"]),
            ids=(None, True, -2, 0, 2.0, "2", [2], 10**4299),
            sha256=(None, 5, "", "0" * 63, "0" * 63 + "\n", "Z" * 64),
        ).items()
        for value in values
    ]
    + [(field, {key: value for key, value in ENTRY.items() if key != field}) for field in ENTRY]
)


@pytest.mark.parametrize(
    "field, entry", BAD_ENTRIES, ids=[str(entry)[:60] for _, entry in BAD_ENTRIES]
)
def test_a_bad_entry_of_metadata_is_one_line_that_names_it(tmp_path, capsys, field, entry):
    write_shard(tmp_path / "t.bin", [1, 2])
    metadata = dict(vocab_size=VOCAB_SIZE, shards=[dict(ENTRY), entry])
    (tmp_path / "metadata.json").write_text(json.dumps(metadata))
    for command in ("verify", "show"):
        line = complaint(capsys, command, tmp_path)
        assert f"{tmp_path}/metadata.json: shard 1 has no valid {field}; delete it" in line


def test_a_shard_that_metadata_lists_twice_is_refused(tmp_path, capsys):
    write_shard(tmp_path / "t.bin", [1, 2])
    metadata = dict(vocab_size=VOCAB_SIZE, shards=[ENTRY, ENTRY | dict(split="val")])
    (tmp_path / "metadata.json").write_text(json.dumps(metadata))
    assert "metadata.json: lists t.bin twice" in complaint(capsys, "verify", tmp_path)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, "", "\xff", '{"vocab_size": %s}' % ("1" * 5000)]
)
def test_metadata_that_are_not_json_are_one_line(tmp_path, capsys, text):
    write_shard(tmp_path / "t.bin", [1, 2])
    (tmp_path / "metadata.json").write_text(text, encoding="latin-1")
    assert f"{tmp_path}/metadata.json: not JSON" in complaint(capsys, "verify", tmp_path)


@pytest.mark.parametrize(
    "shards", ["", ', "shards": null', ', "shards": {}', ', "shards": "t.bin"']
)
def test_metadata_of_ours_without_a_list_of_shards_are_one_line(tmp_path, capsys, shards):
    write_shard(tmp_path / "t.bin", [1, 2])
    (tmp_path / "metadata.json").write_text(f'{{"vocab_size": {VOCAB_SIZE}{shards}}}')
    assert f"{tmp_path}/metadata.json: has no list of shards" in complaint(
        capsys, "verify", tmp_path
    )


@pytest.mark.parametrize(
    "text", ["null", "5", '"x"', "[]", "{}", '{"vocab_size": 9, "shards": 5}', '{"shards": [5]}']
)
def test_metadata_of_another_program_count_as_none(tmp_path, capsys, text):
    write_shard(tmp_path / "t.bin", [1, 2])
    (tmp_path / "metadata.json").write_text(text)
    assert data.main(["verify", str(tmp_path)]) == 0
    assert "1 of them are not in a metadata.json" in capsys.readouterr().out


def socket_at(path):
    socket.socket(socket.AF_UNIX).bind(str(path))


SPECIAL = {
    "directory": lambda path: path.mkdir(),
    "pipe": os.mkfifo,
    "socket": socket_at,
    "dead link": lambda path: path.symlink_to("nowhere"),
    "loop": lambda path: path.symlink_to(path),
    "device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("make", SPECIAL.values(), ids=SPECIAL)
def test_what_is_no_file_in_place_of_metadata_or_a_shard_is_one_line_and_is_not_waited_for(
    tmp_path, monkeypatch, capsys, make
):
    monkeypatch.chdir(tmp_path)  # the path of a socket has at most 107 bytes
    write_shard(Path("m", "u.bin"), [1, 2])
    make(Path("m", "metadata.json"))
    for command in ("verify", "show"):
        assert "m/metadata.json: not a regular file" in complaint(capsys, command, "m")
    Path("t").mkdir()
    make(Path("t", "t.bin"))
    line = complaint(capsys, "show", "t")
    assert "t/t.bin: " in line or make is SPECIAL["directory"] and "t: no .bin file in it" in line
    assert data.main(["verify", "t"]) == 2


def test_directories_that_are_linked_into_one_another_are_searched_once(tmp_path):
    """Searched by every path, two links are 2^40 of them."""
    write_shard(tmp_path / "a" / "x.bin", [1, 2])
    write_shard(tmp_path / "b.bin", [3, 4])
    for name in ("a/1", "a/2", "a/z", "0"):
        (tmp_path / name).symlink_to(tmp_path / "a")
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    assert files_below(str(tmp_path)) == [f"{tmp_path}/0/x.bin", f"{tmp_path}/b.bin"]
    # of several paths to a file the first is listed
    (tmp_path / "0.bin").symlink_to(tmp_path / "a" / "x.bin")
    assert files_below(str(tmp_path)) == [f"{tmp_path}/0.bin", f"{tmp_path}/b.bin"]


def test_a_directory_that_cannot_be_read_is_an_error_and_not_left_out(
    tmp_path, monkeypatch, capsys
):
    write_shard(tmp_path / "a" / "x.bin", [1, 2])
    write_shard(tmp_path / "b" / "x.bin", [1, 2])

    def scandir(path, real=os.scandir):
        if path == f"{tmp_path}/b":
            raise PermissionError(13, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)  # root may read everything
    assert f"{tmp_path}/b: Permission denied" in complaint(capsys, "verify", tmp_path)


@pytest.mark.parametrize("name", ["a dir; touch X", "x$(touch P)", "-x", "it's"])
def test_a_printed_command_has_its_path_quoted(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    line = complaint(capsys, "verify", "./-x" if name == "-x" else name)
    command = re.search("`(.*)`", line)[1]
    assert shlex.split(command)[3:] in (["INPUT", "--out", name], ["INPUT", "--out", "./-x"])
    with pytest.raises(common.DataError) as fault:
        sample.read_ids(f"{name}.gz", "text")
    command = re.search("(python .*), then", str(fault.value))[1]
    assert shlex.split(command)[3] in (f"{name}.gz", "./-x.gz")


def cut_off(path):
    write_shard(path / "t.bin", [1, 2])
    described(path, dict(name="t.bin", ids=3))


FAULTS = {
    "missing directory": (
        lambda p: None,
        "{p}/nowhere",
        ["{p}/nowhere: no such directory", "data.py prepare"],
    ),
    "no shard": (
        lambda p: (p / "x.txt").write_text("x"),
        "{p}",
        ["{p}: no .bin file", "data.py prepare"],
    ),
    "empty file": (
        lambda p: write_shard(p / "a" / "x.bin", []),
        "{p}",
        ["{p}/a/x.bin: has 0 bytes"],
    ),
    "odd length": (
        lambda p: (p / "x.bin").write_bytes(b"abc"),
        "{p}",
        ["{p}/x.bin: has 3 bytes", "an odd number"],
    ),
    "cut off": (cut_off, "{p}", ["{p}/t.bin: has 4 bytes", "says 6"]),
    "lost": (lambda p: described(p, dict(name="u.bin", ids=1)), "{p}", ["{p}/u.bin: missing"]),
    "broken metadata": (
        lambda p: (p / "metadata.json").write_text("{"),
        "{p}",
        ["{p}/metadata.json: not JSON"],
    ),
    "bad id": (
        lambda p: write_shard(p / "x.bin", [1, 2, 272]),
        "{p}",
        ["{p}/x.bin", "offset 4", "id 272", "271"],
    ),
    "only validation": (
        lambda p: write_shard(p / "val.bin", [1]),
        "{p}",
        ["{p}", "none for training"],
    ),
    "bad weight": (lambda p: None, "web:x,code:1", ["web:x,code:1", "dir:weight"]),
    "zero weight": (lambda p: None, "web:0,code:1", ["web:0,code:1", "positive weights"]),
    "nan weight": (lambda p: None, "web:nan,code:1", ["positive weights"]),
    "no name": (lambda p: None, ":1,code:1", ["dir:weight"]),
    "missing part": (lambda p: None, "{p}/web:1,code:1", ["{p}/web: no such directory"]),
}


@pytest.mark.parametrize("make, spec, said", FAULTS.values(), ids=FAULTS)
def test_bad_data_is_one_line_that_names_the_place(tmp_path, make, spec, said):
    make(tmp_path)
    with pytest.raises(common.DataError) as fault:
        Loader(open_data(spec.format(p=tmp_path)), 1, 0).rows(np.arange(2))
    message = str(fault.value)
    assert "\n" not in message and all(part.format(p=tmp_path) in message for part in said), message


# --------------------------------------------------------------------------------------------------
# verify and show


def test_verify_notices_what_changed(tmp_path, capsys):
    (tmp_path / "a.txt").write_bytes(bytes(range(256)) * 300)
    out = tmp_path / "o"
    assert (
        prepare(tmp_path / "a.txt", "--out", out, "--shard_mb", "0.02") == 0
        and data.main(["verify", str(out)]) == 0
    )
    assert f"{out}: 8 shards are valid\n" in capsys.readouterr().out
    shard = out / "train-00001.bin"
    sound = shard.read_bytes()
    for change, said in [
        (bytes([sound[0], sound[1], sound[2] ^ 1]) + sound[3:], "SHA-256"),
        (sound[:-2], "truncated"),
        (sound[:4] + b"\xff\xff" + sound[6:], "byte offset 4: id 65535"),
        (b"", "truncated"),
    ]:
        shard.write_bytes(change)
        assert data.main(["verify", str(out)]) == 2
        line, last = [
            line for line in capsys.readouterr().err.splitlines() if not line.startswith("verify: ")
        ]
        assert (
            str(shard) in line
            and said in line
            and last.endswith(f"{out}: 1 of 8 shards are damaged")
        )
    shard.unlink()
    assert "train-00001.bin: missing" in complaint(capsys, "verify", out)
    (out / "metadata.json").unlink()
    assert data.main(["verify", str(out)]) == 0
    assert "7 shards are valid\n7 of them are not in a metadata.json" in capsys.readouterr().out


def test_show_prints_what_the_loader_gives(tmp_path, capsys):
    # what is no UTF-8, every id above 255
    ids = np.random.default_rng(0).integers(0, VOCAB_SIZE, 1500)
    write_shard(tmp_path / "a" / "1.bin", ids[:500])
    write_shard(tmp_path / "a" / "2.bin", ids[500:900])
    write_shard(tmp_path / "b" / "x.bin", ids[900:])
    spec, first, count = f"{tmp_path}/a:2,{tmp_path}/b:1", 20, 60
    loader = Loader(open_data(spec), 64, 3)
    rows = [
        torch.cat((ids[:1], labels))
        for ids, labels in zip(*loader.rows(np.arange(first, first + count)), strict=True)
    ]
    assert (
        data.main(["show", spec, *f"--seq_len 64 --seed 3 --first {first} --count {count}".split()])
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 * count and all(line.isprintable() for line in lines)
    for g, (row, head, text) in enumerate(zip(rows, lines[::2], lines[1::2], strict=True), first):
        assert text == "    " + common.printable(row.masked_fill(row < 0, PAD_ID).tolist())
        number, epoch, name, path, offset = re.fullmatch(
            r"(.*): epoch (.*), (.*), (.*): byte offset (.*)", head
        ).groups()
        assert int(number) == g and path.startswith(name)
        assert np.fromfile(path, "<u2", 1, offset=int(offset))[0] == row[0]
        assert int(epoch) == loader.epochs(g)[int(name.endswith("b"))]
    assert data.main(["show", "--mock_data", "--seed", "7"]) == 0
    assert capsys.readouterr().out.startswith("0: epoch 0, mock, mock data: byte offset ")
    for arguments in ([], ["data", "--mock_data"]):
        complaint(capsys, "show", *arguments)


def test_shards_are_read_where_python_has_no_modules_of_unix(shards):
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('fcntl', 'grp', 'pwd', 'resource', "
        "'termios'))); "
        "import data; print(len(data.open_data(sys.argv[1])[0].train))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, shards], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout == "640\n", done.stderr

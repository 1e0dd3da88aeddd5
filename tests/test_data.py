"""data.py: shards of any origin, the order of training, batches, validation rows, verify and
show."""

import hashlib
import json
import os
import re
import resource
import shlex
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sample
from conftest import ROOT
from data import (
    BLOCK,
    Batch,
    Feed,
    Loader,
    StepLayout,
    Stream,
    mock_source,
    open_data,
    validation_sets,
)
from preparing import error_line, prepare, run_data, source, write_shard
from spider import common
from spider.common import LIMITS
from spider.packing import longest_bound
from spider.shard_files import files_below
from tokenizer import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE


@pytest.fixture
def in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


# --------------------------------------------------------------------------------------------------
# Order


@given(st.data(), st.integers(1, 255), st.integers(0, 3), st.integers(0, 2**63))
@settings(max_examples=150, deadline=None)
def test_every_epoch_covers_each_target_exactly_once(draw, targets, epoch, seed):
    seq_len = draw.draw(st.integers(1, targets))
    loader = Loader([source(range(targets + 1))], seq_len, seed)
    windows = -(-targets // seq_len)
    first = windows * epoch
    last = first + windows - 1
    assert loader.epoch(first) == loader.epoch(last) == epoch
    ids, labels = loader.rows(np.arange(first, last + 1))
    assert ids.shape == labels.shape == (windows, seq_len)
    assert ids.dtype == labels.dtype == torch.int64
    counted = labels != -100
    assert sorted(labels[counted].tolist()) == list(range(1, targets + 1))
    assert (ids[counted] == labels[counted] - 1).all()
    assert (ids[~counted] == PAD_ID).all()
    assert (counted[:, 1:] <= counted[:, :-1]).all()  # a short window is filled at its end


def test_order_never_changes():
    """Checkpoints resume with the sequences that come next, whatever version saved them."""
    one = Loader([source(range(251))], 16, 1)
    mixture = Loader([source(range(251), weight=0.7), source(range(20, 200), weight=0.3)], 16, 1)
    for loader, first, digest in (
        (one, 0, "e77f9ec93055275e"),
        (one, 25_000, "f779e3482e77c273"),
        (mixture, 9_970, "cbbdf5bbe8e7dca2"),
    ):
        ids, labels = loader.rows(np.arange(first, first + 64))
        read = ids.numpy().tobytes() + labels.numpy().tobytes()
        assert hashlib.sha256(read).hexdigest().startswith(digest)


@pytest.mark.parametrize("first", (30, BLOCK - 7))
@pytest.mark.parametrize(
    "micro_batch, grad_accum, ranks", [(16, 1, 1), (4, 4, 1), (8, 1, 2), (1, 8, 2), (2, 1, 8)]
)
def test_global_batch_is_the_same_on_any_ranks_and_micro_steps(
    micro_batch, grad_accum, ranks, first
):
    loader = Loader([source(range(200)), source(range(50, 250), name="t", weight=0.5)], 8, 5)
    ids, labels = loader.rows(np.arange(first, first + 16))
    [whole] = loader.batches(7, first, StepLayout(16, 1))
    for rank in range(ranks):
        batches = list(loader.batches(7, first, StepLayout(micro_batch, grad_accum, ranks), rank))
        assert len(batches) == grad_accum
        for micro_step, batch in enumerate(batches):
            begin = (micro_step * ranks + rank) * micro_batch
            assert torch.equal(batch.ids, ids[begin : begin + micro_batch])
            assert torch.equal(batch.labels, labels[begin : begin + micro_batch])
            assert batch.noise_seed == whole.noise_seed + begin


# (targets, weight) of each source
MIXTURES = st.lists(st.tuples(st.integers(1, 80), st.integers(1, 9)), min_size=2, max_size=3)


@given(MIXTURES, st.data(), st.integers(20, 300), st.integers(0, 2**63))
@settings(max_examples=60, deadline=None)
def test_mixture_reads_each_source_to_its_end_before_it_repeats(mixture, draw, block, seed):
    seq_len = draw.draw(st.integers(1, min(targets for targets, _ in mixture)))
    count = 600
    sources = []
    for k, (targets, weight) in enumerate(mixture):  # source k has the ids from 81 k on
        ids = range(81 * k, 81 * k + targets + 1)
        sources.append(source(ids, name=str(k), weight=weight))
    loader = Loader(sources, seq_len, seed, block)
    ids, labels = loader.rows(np.arange(count))
    targets_of = [row[row != -100].tolist() for row in labels]
    source_of = [row[0] // 81 for row in targets_of]
    windows = [-(-targets // seq_len) for targets, _ in mixture]
    for k, (targets, _) in enumerate(mixture):
        rows = [row for row, own in zip(targets_of, source_of, strict=True) if own == k]
        for start in range(0, len(rows), windows[k]):
            epoch = rows[start : start + windows[k]]
            read = sorted(target for row in epoch for target in row)
            if len(epoch) == windows[k]:
                assert read == list(range(81 * k + 1, 81 * k + targets + 1))
            else:
                assert len(set(read)) == len(read)

    for g in range(0, count, 23):
        passes = [source_of[:g].count(k) // windows[k] for k in range(len(mixture))]
        assert loader.epochs(g).tolist() == passes
        assert loader.epoch(g) == int(np.dot(loader.counts, passes)) // block

    first = draw.draw(st.integers(0, count - 1))  # another process continues anywhere
    again = Loader(sources, seq_len, seed, block)
    [batch] = again.batches(0, first, StepLayout(count - first, 1))
    assert torch.equal(batch.ids, ids[first:])
    assert torch.equal(batch.labels, labels[first:])


@pytest.mark.parametrize(
    "sources, message",
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
def test_source_that_gives_no_sequence_is_refused(sources, message):
    with pytest.raises(common.DataError, match=re.escape(message)):
        Loader(sources, 64, 0)
    Loader([source(range(65))], 64, 0)


# --------------------------------------------------------------------------------------------------
# Batches


def test_batch_counts_targets_bytes_and_documents():
    ids = torch.tensor([[BOS_ID, 1, EOS_ID, BOS_ID], [2, 3, PAD_ID, PAD_ID]])
    labels = torch.tensor([[1, EOS_ID, BOS_ID, 5], [3, 4, -100, -100]])
    batch = Batch.of(ids, labels, 0)
    assert batch.targets == 6
    assert batch.n_bytes == 6
    assert batch.cu_seqlens.tolist()[:3] == [0, 3, 4]
    assert batch.longest == 4


@pytest.mark.parametrize(
    "lengths, length, bound",
    [
        ((3, 97), 100, 100),
        ((50, 50), 100, 64),
        ((32,) * 3, 96, 32),
        ((1,) * 100, 100, 16),
        ((2, 2), 2, 2),
        ((1025, 1023), 2048, 2048),
    ],
)
def test_bound_of_documents_is_a_power_of_two_from_16_to_a_sequence(lengths, length, bound):
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    assert longest_bound(cu_seqlens, length) == bound


def assert_is_step(batches: list[Batch], loader: Loader, step: int):
    """Check that batches are those of a step of StepLayout(2, 3)."""
    expected = loader.batches(step, 6 * step, StepLayout(2, 3))
    for batch, other in zip(batches, expected, strict=True):
        assert torch.equal(batch.ids, other.ids)
        assert torch.equal(batch.labels, other.labels)
        assert torch.equal(batch.cu_seqlens, other.cu_seqlens)
        assert batch.noise_seed == other.noise_seed


def test_feed_gives_step_after_step_and_fetches_the_next_one_ahead(monkeypatch):
    loader = Loader([source(range(200))], 8, 5)
    feed = Feed(loader, StepLayout(2, 3), 0, torch.device("cpu"), 4, 24)
    for step in range(4, 8):
        assert_is_step(feed.take(), loader, step)
    feed.fetched.result()
    monkeypatch.setattr(Stream, "rows", lambda *_: 1 / 0)
    feed.take()  # was fetched before
    with pytest.raises(ZeroDivisionError):
        feed.take()


def test_copies_to_a_gpu_may_end_after_later_steps_are_fetched(monkeypatch):
    """No other batch takes the pinned memory of a copy. Pinned memory and copies are stand-ins: a
    copy takes place long after the call that begins it."""
    device = torch.device("cuda")
    pinned = []
    copies = []  # (on the device, pinned)
    real_to = torch.Tensor.to

    def pin_memory(tensor):
        pinned.append(tensor.clone())
        return pinned[-1]

    def to(tensor, target, *args, **options):
        if target != device:
            return real_to(tensor, target, *args, **options)
        assert options == dict(non_blocking=True)
        assert any(tensor is one for one in pinned)
        on_device = torch.zeros_like(tensor)
        copies.append((on_device, tensor))
        return on_device

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.Tensor, "to", to)
    loader = Loader([source(range(200))], 8, 5)
    feed = Feed(loader, StepLayout(2, 3), 0, device, 0, 0)
    steps = [feed.take() for _ in range(3)]
    feed.fetched.result()
    for on_device, tensor in copies:
        on_device.copy_(tensor)
    assert len(copies) == 4 * 3 * 3  # steps, micro-steps, tensors
    for step, batches in enumerate(steps):
        assert_is_step(batches, loader, step)


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


def test_process_that_ends_while_a_step_is_fetched_succeeds():
    command = [sys.executable, "-c", FETCH_AT_THE_END]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")


# --------------------------------------------------------------------------------------------------
# Validation rows


def validation_targets(sources, seq_len: int, tokens: int) -> dict[str, list[int]]:
    """Return the targets of each source's validation rows."""
    sets = validation_sets(sources, seq_len, tokens)
    return {name: labels[labels != -100].tolist() for name, (_, labels) in sets.items()}


def test_validation_targets_are_shared_by_weight_among_sources_that_have_some():
    a = source(range(9), range(50), "a", 3.0)
    b = source(range(9), range(100, 106), "b", 1.0)
    without = source(range(9), [], "none", 4.0)
    padding = source(range(9), [PAD_ID] * 9, "padding", 1.0)
    for seq_len in (4, 7):  # it does not change which targets they are
        found = validation_targets([a, without, b], seq_len, 32)
        assert list(found.items()) == [("a", [*range(1, 13)]), ("b", [*range(101, 105)])]
    assert list(validation_sets([a, padding], 4, 10)) == ["a"]
    assert validation_targets([a, b], 4, 2) == dict(a=[1, 2])  # of 1.5 and 0.5
    all_targets = dict(a=[*range(1, 50)], b=[*range(101, 106)])
    assert validation_targets([a, b], 4, 1000) == all_targets


@pytest.mark.parametrize("val, tokens", [([], 10), ([1, 2], 0)])
def test_evaluation_without_a_target_is_refused(val, tokens):
    with pytest.raises(common.DataError, match="s: no validation data"):
        validation_sets([source([1, 2], val)], 4, tokens)


# --------------------------------------------------------------------------------------------------
# Shards and sources


def test_mock_data_are_documents_easy_to_learn_and_a_function_of_the_seed():
    mock = mock_source(1)
    ids = mock.train.read(0, len(mock.train))
    assert np.array_equal(ids, mock_source(1).train.read(0, len(ids)))
    assert not np.array_equal(ids[:500], mock_source(2).train.read(0, 500))
    assert 900_000 < len(ids) < 2_000_000
    assert len(mock.val) > 20_000
    assert (ids == BOS_ID).sum() == (ids == EOS_ID).sum() == 5000
    assert ids[0] == BOS_ID and ids[-1] == EOS_ID and ids.max() == EOS_ID
    text = ids[ids < 256].astype(np.uint8).tobytes()
    assert len(zlib.compress(text)) < 0.15 * len(text)
    assert len(set(text)) < 26


def test_shards_of_others_are_read_once_from_nested_and_linked_folders_in_order(tmp_path):
    shards = tmp_path / "shards"
    write_shard(shards / "b/part-2.bin", [5, 6])
    write_shard(shards / "b/part-10.bin", [3, 4])
    write_shard(shards / "a.bin", [1, 2])
    write_shard(shards / "b/val_1.bin", [7])
    write_shard(shards / ".hidden/x.bin", [99])
    write_shard(tmp_path / "far/x.bin", [8, 9])
    (shards / "c").mkdir()
    (shards / "c/validation").symlink_to(tmp_path / "far")
    (shards / "b/again").symlink_to(shards)  # a circle
    (shards / "b/z.bin").symlink_to(shards / "a.bin")
    (shards / "metadata.json").write_text('{"tokens": 9, "shards": 14}')  # of another program
    [found] = open_data(str(shards))
    assert len(found.train) == 6
    assert found.train.read(0, 6).tolist() == [1, 2, 3, 4, 5, 6]
    assert found.val.read(0, 3).tolist() == [7, 8, 9]


def test_files_below_enters_each_directory_once(tmp_path):
    """By every path, the two links of a directory to itself would lead to 2^40 directories."""
    write_shard(tmp_path / "a/x.bin", [1, 2])
    write_shard(tmp_path / "b.bin", [3, 4])
    for name in ("a/1", "a/2", "a/z", "0"):
        (tmp_path / name).symlink_to(tmp_path / "a")
    (tmp_path / "a/up").symlink_to(tmp_path)
    assert files_below(str(tmp_path)) == [f"{tmp_path}/0/x.bin", f"{tmp_path}/b.bin"]


def test_without_a_validation_shard_the_last_hundredth_is_held_out(tmp_path):
    """At most ten million ids; the zeros take no room on the disk."""
    write_shard(tmp_path / "a.bin", np.arange(1000) % 256)
    write_shard(tmp_path / "b.bin", np.arange(1000, 1005) % 256)
    [found] = open_data(str(tmp_path))
    assert len(found.train) == 995
    assert found.val.read(0, 10).tolist() == [i % 256 for i in range(995, 1005)]
    assert len(found.val.read(0, 6)) == 6
    assert found.val.slice(1, 9).where(0) == f"{tmp_path}/a.bin: byte offset 1992"
    assert found.val.where(6) == f"{tmp_path}/b.bin: byte offset 2"
    line = f"data: 995 training and 10 validation ids in {tmp_path} (the end of its data"
    assert str(found).startswith(line)
    os.truncate(tmp_path / "b.bin", 2 * 1_100_000_000)
    assert len(open_data(str(tmp_path))[0].val) == 10_000_000


def test_mixture_names_directories_and_weights(tmp_path, in_tmp_path):
    for name in ("web", "code", "a:1"):
        write_shard(tmp_path / name / "x.bin", range(200))
    found = [(source.name, source.weight) for source in open_data("web:3,code:1")]
    assert found == [("web", 0.75), ("code", 0.25)]
    [directory] = open_data("a:1")  # there is a directory of this name
    assert (directory.name, directory.weight) == ("a:1", 1.0)
    (tmp_path / "link").symlink_to("web")
    with pytest.raises(common.DataError, match="a directory is named twice"):
        open_data("web:1,link:1")


def test_special_ids_of_a_shard_are_read_and_only_pad_is_no_target(tmp_path):
    special = [0, 1, 2, 3, BOS_ID, PAD_ID, EOS_ID, 259, VOCAB_SIZE - 1]
    write_shard(tmp_path / "x.bin", [*special, 65] * 30)
    [found] = sources = open_data(str(tmp_path))
    ids, labels = Loader(sources, len(found.train) - 1, 0).rows(np.arange(1))
    read = found.train.read(0, len(found.train)).tolist()
    assert set(read) == {*special, 65}
    assert ids[0].tolist() == read[:-1]
    assert labels[0].tolist() == [-100 if i == PAD_ID else i for i in read[1:]]


def test_shards_are_read_where_python_has_no_modules_of_unix(shards):
    code = (
        "import sys; sys.modules.update(dict.fromkeys('fcntl grp pwd resource termios'.split())); "
        "import data; print(len(data.open_data(sys.argv[1])[0].train))"
    )
    command = [sys.executable, "-c", code, shards]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "640\n", done.stderr


def test_limit_of_open_files_is_raised_as_far_as_the_system_allows(shards, monkeypatch):
    """macOS reports no hard limit, but may refuse more than 61,440 files."""
    limits = []

    def setrlimit(_, limit):
        if limit[0] > 61_440:
            raise ValueError("current limit exceeds maximum limit")
        limits.append(limit)

    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", setrlimit)
    open_data(str(shards))
    assert limits == [(10_240, resource.RLIM_INFINITY)]


# --------------------------------------------------------------------------------------------------
# metadata.json

ENTRY = dict(name="t.bin", split="train", ids=2, sha256=64 * "0")


def write_metadata(directory: Path, *entries):
    metadata = dict(vocab_size=VOCAB_SIZE, shards=entries)
    (directory / "metadata.json").write_text(json.dumps(metadata))


def test_metadata_decides_which_shards_validate(tmp_path):
    write_shard(tmp_path / "one.bin", [1, 2])
    write_shard(tmp_path / "value.bin", [3])
    one = ENTRY | dict(name="one.bin", split="val")
    write_metadata(tmp_path, one, ENTRY | dict(name="value.bin", ids=1))
    [found] = open_data(str(tmp_path))
    assert found.train.read(0, 1).tolist() == [3]
    assert found.val.read(0, 2).tolist() == [1, 2]


BAD_VALUES = dict(
    name=(5, ["t.bin"], "", "t.txt", "/t.bin", "../t.bin", "a/../t.bin", "t\0.bin"),
    split=("valid", ["train"]),
    ids=(True, -2, 0, 2.0, "2", 10**4299),
    sha256=(5, "0" * 63, "0" * 63 + "\n", "Z" * 64),
)
# (field that is reported, entry)
BAD_ENTRIES = [("entry", entry) for entry in (None, "t.bin", [ENTRY])]
for field, values in BAD_VALUES.items():
    without = {key: value for key, value in ENTRY.items() if key != field}
    BAD_ENTRIES += [(field, without), *((field, ENTRY | {field: value}) for value in values)]


@pytest.mark.parametrize(
    "field, entry", BAD_ENTRIES, ids=[str(entry)[:60] for _, entry in BAD_ENTRIES]
)
def test_bad_entry_is_refused_with_its_number_and_field(tmp_path, capsys, field, entry):
    write_shard(tmp_path / "t.bin", [1, 2])
    write_metadata(tmp_path, ENTRY, entry)
    line = error_line(capsys, ["verify", tmp_path])
    assert f"{tmp_path}/metadata.json: shard 1 has no valid {field}; delete it" in line


def test_shard_that_metadata_lists_twice_is_refused(tmp_path, capsys):
    write_shard(tmp_path / "t.bin", [1, 2])
    write_metadata(tmp_path, ENTRY, ENTRY | dict(split="val"))
    assert "metadata.json: lists t.bin twice" in error_line(capsys, ["verify", tmp_path])


OURS = f'"vocab_size": {VOCAB_SIZE}'
NO_LIST = [f"{{{OURS}{shards}}}" for shards in ("", ', "shards": {}', ', "shards": "t.bin"')]
NO_JSON = ["[" * 100_000, "", "\xff", '{"vocab_size": %s}' % ("1" * 5000)]


@pytest.mark.parametrize(
    "text, message",
    [("[]" + " " * 1_000_000, "not JSON: longer than 1,000,000 bytes")]
    + [(text, "not JSON") for text in NO_JSON]
    + [(text, "has no list of shards") for text in NO_LIST],
    ids=lambda text: text[:30],
)
def test_unreadable_metadata_is_refused(tmp_path, monkeypatch, capsys, text, message):
    write_shard(tmp_path / "t.bin", [1, 2])
    (tmp_path / "metadata.json").write_text(text, encoding="latin-1")
    monkeypatch.setitem(LIMITS, "metadata.json", 1_000_000)
    assert f"{tmp_path}/metadata.json: {message}" in error_line(capsys, ["verify", tmp_path])


@pytest.mark.parametrize(
    "text", ["null", "[]", '{"vocab_size": 9, "shards": 5}', '{"shards": [5]}']
)
def test_metadata_of_another_program_counts_as_none(tmp_path, capsys, text):
    write_shard(tmp_path / "t.bin", [1, 2])
    (tmp_path / "metadata.json").write_text(text)
    assert run_data(["verify", tmp_path]) == 0
    assert "1 of them are not in a metadata.json" in capsys.readouterr().out


# --------------------------------------------------------------------------------------------------
# Faults

SPECIAL_FILES = {
    "directory": lambda path: path.mkdir(),
    "pipe": os.mkfifo,
    "dead link": lambda path: path.symlink_to("nowhere"),
    "device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("kind", SPECIAL_FILES)
def test_special_file_in_place_of_metadata_or_a_shard_is_refused_and_not_waited_for(
    in_tmp_path, capsys, kind
):
    make = SPECIAL_FILES[kind]
    write_shard("m/u.bin", [1, 2])
    make(Path("m/metadata.json"))
    assert "m/metadata.json: not a regular file" in error_line(capsys, "verify m")
    Path("t").mkdir()
    make(Path("t/t.bin"))
    message = "t: no .bin file in it" if kind == "directory" else "t/t.bin: "
    assert message in error_line(capsys, "show t")
    assert run_data("verify t") == 2


def test_directory_that_cannot_be_read_is_an_error(tmp_path, monkeypatch, capsys):
    write_shard(tmp_path / "a/x.bin", [1, 2])
    write_shard(tmp_path / "b/x.bin", [1, 2])
    real = os.scandir

    def scandir(path):
        if path == f"{tmp_path}/b":
            raise PermissionError(13, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)  # root may read everything
    assert f"{tmp_path}/b: Permission denied" in error_line(capsys, ["verify", tmp_path])


def test_printed_command_has_its_path_quoted(in_tmp_path, capsys):
    name = "a dir; touch X"
    line = error_line(capsys, ["verify", name])
    command = re.search("`(.*)`", line)[1]
    assert shlex.split(command)[3:] == ["INPUT", "--out", name]
    with pytest.raises(common.DataError) as error:
        sample.read_ids(f"{name}.gz", "text")
    command = re.search("(python .*), then", str(error.value))[1]
    assert shlex.split(command)[3] == f"{name}.gz"


def nothing(directory: Path):
    pass


# (what makes the fault in directory D, --data_dir, a regular expression for the message)
FAULTS = {
    "missing directory": (nothing, "D/nowhere", "^D/nowhere: no such directory; .*data.py prepare"),
    "a file": (
        lambda path: (path / "x.txt").write_text("x"),
        "D/x.txt",
        "^D/x.txt: a file: .*data.py prepare D/x.txt --out DIR",
    ),
    "no shard": (
        lambda path: (path / "x.txt").write_text("x"),
        "D",
        "^D: no .bin file in it; .*data.py prepare",
    ),
    "empty file": (
        lambda path: write_shard(path / "a/x.bin", []),
        "D",
        "^D/a/x.bin: has 0 bytes",
    ),
    "odd length": (
        lambda path: (path / "x.bin").write_bytes(b"abc"),
        "D",
        "^D/x.bin: has 3 bytes, none or an odd number",
    ),
    "bad id": (
        lambda path: write_shard(path / "x.bin", [1, 2, 272]),
        "D",
        "^D/x.bin: byte offset 4: id 272 is above 271",
    ),
    "only validation": (
        lambda path: write_shard(path / "val.bin", [1]),
        "D",
        "^D: has only validation shards, none for training",
    ),
    "bad weight": (nothing, "web:x,code:1", "^web:x,code:1: .*dir:weight"),
    "zero weight": (nothing, "web:0,code:1", "positive weights"),
    "infinite weight": (nothing, "web:inf,code:1", "positive weights"),
    "no name": (nothing, ":1,code:1", "dir:weight"),
    "address": (nothing, "https://host/web", "^https://host/web: an address: download it first"),
}


@pytest.mark.parametrize("make, spec, message", FAULTS.values(), ids=FAULTS)
def test_bad_data_is_refused_with_its_place(tmp_path, make, spec, message):
    make(tmp_path)
    with pytest.raises(common.DataError) as error:
        Loader(open_data(spec.replace("D", str(tmp_path))), 1, 0).rows(np.arange(2))
    line = str(error.value).replace(str(tmp_path), "D")
    assert re.search(message, line), line
    assert "\n" not in line


# --------------------------------------------------------------------------------------------------
# verify and show


@pytest.fixture
def prepared(in_tmp_path, capsys) -> Path:
    """Prepare eight shards in a directory `o`; return the path of one."""
    Path("a.txt").write_bytes(bytes(range(32, 256)) * 343)
    prepare("a.txt --out o --shard_mb 0.02")
    capsys.readouterr()
    return Path("o/train-00001.bin")


def test_verify_reports_each_damaged_shard(prepared, capsys):
    assert run_data("verify o") == 0
    assert "o: 8 shards are valid\n" in capsys.readouterr().out
    sound = prepared.read_bytes()
    for content, message in (
        (sound[:2] + bytes([sound[2] ^ 1]) + sound[3:], "SHA-256"),
        (sound[:-2], "truncated"),
        (sound[:-2] + b"\xff\xff", f"byte offset {len(sound) - 2}: id 65535"),
        (b"", "truncated"),
    ):
        prepared.write_bytes(content)
        assert run_data("verify o") == 2
        err = capsys.readouterr().err
        line, last = [line for line in err.splitlines() if not line.startswith("verify: ")]
        assert str(prepared) in line and message in line
        assert last.endswith("o: 1 of 8 shards are damaged")
    with pytest.raises(common.DataError, match="has 0 bytes, but metadata.json says"):
        open_data("o")


def test_verify_needs_the_shards_that_metadata_lists_but_no_metadata(prepared, capsys):
    prepared.unlink()
    assert "o/train-00001.bin: missing" in error_line(capsys, "verify o")
    Path("o/metadata.json").unlink()
    assert run_data("verify o") == 0
    assert "7 shards are valid\n7 of them are not in a metadata.json" in capsys.readouterr().out


def test_show_prints_the_sequences_that_the_loader_reads(in_tmp_path, capsys):
    # every id, and bytes that are no UTF-8
    ids = np.random.default_rng(0).integers(0, VOCAB_SIZE, 1500)
    write_shard("a/1.bin", ids[:500])
    write_shard("a/2.bin", ids[500:900])
    write_shard("b/x.bin", ids[900:])
    assert run_data("show a:2,b:1 --seq_len 64 --seed 3 --first 20 --count 60") == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.isprintable() for line in lines)
    loader = Loader(open_data("a:2,b:1"), 64, 3)
    input_ids, labels = loader.rows(np.arange(20, 80))
    shown = zip(lines[::2], lines[1::2], input_ids, labels, strict=True)
    for g, (head, text, inputs, targets) in enumerate(shown, 20):
        row = [int(inputs[0]), *targets.masked_fill(targets < 0, PAD_ID).tolist()]
        assert text == "    " + common.printable(row)
        pattern = r"(.*): epoch (.*), (.*), (.*): byte offset (.*)"
        number, epoch, name, path, offset = re.fullmatch(pattern, head).groups()
        assert int(number) == g
        assert path.startswith(name)
        assert np.fromfile(path, "<u2", 1, offset=int(offset))[0] == row[0]
        assert int(epoch) == loader.epochs(g)["ab".index(name)]


def test_show_prints_mock_data_or_a_directory_but_not_both(capsys):
    assert run_data("show --mock_data --seed 7") == 0
    assert capsys.readouterr().out.startswith("0: epoch 0, mock, mock data: byte offset ")
    error_line(capsys, "show")
    error_line(capsys, "show data --mock_data")

"""data.py: shards of any origin, training order, batches, validation data, verify and show."""

import hashlib
import json
import os
import re
import resource
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import assert_same, run_python
from data import (
    BLOCK,
    Batch,
    Loader,
    Prefetcher,
    StepLayout,
    Stream,
    mock_source,
    open_data,
    validation_sets,
)
from preparing import error_line, prepare, run_data, source, write_shard
from spider import errors
from tokenizer import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE

# --------------------------------------------------------------------------------------------------
# Order


def test_training_order_never_changes():
    """A checkpoint must resume with the next sequences, whichever version saved it."""
    one = Loader([source(range(251))], 16, 1)
    mixture = Loader([source(range(251), weight=0.7), source(range(20, 200), weight=0.3)], 16, 1)
    mock = Loader([mock_source(1)], 64, 1)
    for loader, first, digest in (
        (one, 0, "e77f9ec93055275e"),
        (one, 25_000, "f779e3482e77c273"),
        (mixture, 9_970, "cbbdf5bbe8e7dca2"),
        (mock, 0, "7f63d5d8d5ff0163"),
    ):
        ids, labels = loader.rows(np.arange(first, first + 64))
        read = ids.numpy().tobytes() + labels.numpy().tobytes()
        assert hashlib.sha256(read).hexdigest().startswith(digest)


@pytest.mark.parametrize("first", (30, BLOCK - 7))
@pytest.mark.parametrize("micro_batch, grad_accum, ranks", [(4, 4, 1), (1, 8, 2)])
def test_global_batch_is_independent_of_ranks_and_micro_steps(
    micro_batch, grad_accum, ranks, first
):
    loader = Loader([source(range(200)), source(range(50, 250), name="t", weight=0.5)], 8, 5)
    [whole] = loader.batches(7, first, StepLayout(16, 1))
    for rank in range(ranks):
        batches = loader.batches(7, first, StepLayout(micro_batch, grad_accum, ranks), rank)
        for micro_step, batch in enumerate(batches):
            begin = (micro_step * ranks + rank) * micro_batch
            assert torch.equal(batch.ids, whole.ids[begin : begin + micro_batch])
            assert torch.equal(batch.labels, whole.labels[begin : begin + micro_batch])
            assert batch.noise_seed == whole.noise_seed + begin
        assert micro_step == grad_accum - 1


# (targets, weight) of each source
MIXTURES = st.lists(st.tuples(st.integers(1, 80), st.integers(1, 9)), min_size=1, max_size=3)


@given(MIXTURES, st.data(), st.integers(20, 300), st.integers(0, 2**63))
@settings(max_examples=60, deadline=None)
def test_every_epoch_of_a_source_covers_each_target_exactly_once(mixture, draw, block, seed):
    seq_len = draw.draw(st.integers(1, min(targets for targets, _ in mixture)))
    sources = []
    for k, (targets, weight) in enumerate(mixture):  # the ids of source k start at 81 k
        ids = range(81 * k, 81 * k + targets + 1)
        sources.append(source(ids, name=str(k), weight=weight))
    loader = Loader(sources, seq_len, seed, block)
    ids, labels = loader.rows(np.arange(600))
    assert ids.shape == labels.shape == (600, seq_len)
    assert ids.dtype == labels.dtype == torch.int64
    counted = labels != -100
    assert (ids[counted] == labels[counted] - 1).all()
    assert (ids[~counted] == PAD_ID).all()
    assert (counted[:, 1:] <= counted[:, :-1]).all()  # a short window is padded at its end
    sequences_of = [[] for _ in mixture]
    for sequence in labels.tolist():
        sequences_of[sequence[0] // 81].append([target for target in sequence if target != -100])
    for k, ((targets, _), sequences) in enumerate(zip(mixture, sequences_of, strict=True)):
        windows = -(-targets // seq_len)
        assert loader.epochs(600)[k] == len(sequences) // windows
        for start in range(0, len(sequences), windows):
            read = sorted(sum(sequences[start : start + windows], []))
            assert len(set(read)) == len(read)
            if start + windows <= len(sequences):
                assert read == list(range(81 * k + 1, 81 * k + targets + 1))
    if len(mixture) == 1:
        assert loader.epoch(600) == 600 // windows


# --------------------------------------------------------------------------------------------------
# Batches


def test_batch_counts_targets_bytes_and_documents():
    ids = torch.tensor([[BOS_ID, 1, EOS_ID, BOS_ID], [2, 3, PAD_ID, PAD_ID]])
    labels = torch.tensor([[1, EOS_ID, BOS_ID, 5], [3, 4, -100, -100]])
    batch = Batch.of(ids, labels, 0)
    assert batch.targets == 6
    assert batch.n_bytes == 6
    assert batch.cu_seqlens.tolist()[:3] == [0, 3, 4]
    assert batch.max_seqlen == 4


def test_feed_fetches_the_next_step_ahead(monkeypatch):
    prefetcher = Prefetcher(
        Loader([source(range(200))], 8, 5), StepLayout(2, 3), 0, torch.device("cpu"), 4, 24
    )
    prefetcher.take()
    prefetcher.fetched.result()
    monkeypatch.setattr(Stream, "rows", lambda *_: 1 / 0)
    prefetcher.take()
    with pytest.raises(ZeroDivisionError):
        prefetcher.take()


def test_gpu_batches_are_copied_from_pinned_memory_asynchronously(monkeypatch):
    """The stand-in for a copy fills the tensor on the device one step later. Prefetcher must not
    make a CUDA stream, because a step would not wait for copies in another stream."""
    copies = []

    def to(pinned, device, non_blocking):
        assert (device.type, non_blocking) == ("cuda", True)
        copies.append((torch.zeros_like(pinned), pinned))
        return copies[-1][0]

    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    monkeypatch.setattr(torch.cuda, "Stream", None)
    [batch] = Loader([source(range(200))], 8, 5).batches(0, 0, StepLayout(2, 1))
    made = SimpleNamespace(batches=lambda *_: [batch])
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "to", to)
        [copied] = Prefetcher(made, None, 0, torch.device("cuda"), 0, 0).fetched.result()
    assert len(copies) == 3
    assert copies[0][1] is not batch.ids  # the source is a copy in pinned memory
    for on_device, pinned in copies:
        on_device.copy_(pinned)
    assert_same(vars(copied), vars(batch))


FETCH_AT_THE_END = """
import time, torch
from data import Prefetcher

class Slow:
    def batches(self, *_):
        began = time.perf_counter()
        while time.perf_counter() - began < 0.5:
            torch.arange(2048).flip(0)
        return []

Prefetcher(Slow(), None, 0, torch.device("cpu"), 0, 0)
"""


def test_process_can_exit_while_a_step_is_fetched():
    done = run_python(FETCH_AT_THE_END)
    assert (done.returncode, done.stderr) == (0, "")


# --------------------------------------------------------------------------------------------------
# Validation data


def test_validation_targets_are_split_by_weight_among_sources_with_any():
    a = source(range(9), range(50), "a", 3.0)
    b = source(range(9), range(100, 106), "b", 1.0)
    without = source(range(9), [], "none", 4.0)
    padding = source(range(9), [PAD_ID] * 9, "padding", 1.0)

    def targets(sources, seq_len: int, tokens: int) -> dict[str, list[int]]:
        sets = validation_sets(sources, seq_len, tokens)
        return {name: labels[labels != -100].tolist() for name, (_, labels) in sets.items()}

    for seq_len in (4, 7):
        expected = dict(a=[*range(1, 13)], b=[*range(101, 105)])
        assert targets([a, without, b], seq_len, 32) == expected
    assert targets([a, padding, b], 4, 1000) == dict(a=[*range(1, 50)], b=[*range(101, 106)])
    assert targets([a, b], 4, 2) == dict(a=[1, 2])  # 1.5 and 0.5 targets, rounded
    for val, tokens in (([], 10), ([1, 2], 0)):
        with pytest.raises(errors.DataError, match="s: no validation data"):
            validation_sets([source([1, 2], val)], 4, tokens)


# --------------------------------------------------------------------------------------------------
# Shards and sources


def test_foreign_shards_in_nested_linked_folders_are_read_once_in_order(tmp_path):
    """Following the links to the root along every path would visit 2^40 directories."""
    shards = tmp_path / "shards"
    write_shard(shards / "b/part-2.bin", [5, 6])
    write_shard(shards / "b/part-10.bin", [3, 4])
    write_shard(shards / "a.bin", [1, 2])
    write_shard(shards / "b/val_1.bin", [7])
    write_shard(shards / ".hidden/x.bin", [99])
    write_shard(tmp_path / "far/x.bin", [8, 9])
    (shards / "c").mkdir()
    (shards / "c/validation").symlink_to(tmp_path / "far")
    for name in ("b/again", "b/1", "b/2"):
        (shards / name).symlink_to(shards)
    (shards / "b/z.bin").symlink_to(shards / "a.bin")
    (shards / "0").symlink_to(shards / "b")  # b is read under this name, which sorts first
    for name, text in (("metadata.json", '{"shards": 14}'), ("b/metadata.json", "null")):
        (shards / name).write_text(text)  # written by other programs
    [found] = open_data(f"{shards}//")
    assert found.train.read(0, 6).tolist() == [3, 4, 5, 6, 1, 2]
    assert found.train.where(0) == f"{shards}/0/part-10.bin: byte offset 0"
    assert len(found.train) == 6
    assert found.val.read(0, 3).tolist() == [7, 8, 9]


def test_without_validation_shards_the_last_hundredth_is_held_out(tmp_path):
    """The limit is ten million ids. The file of zeros is sparse and takes no disk space."""
    write_shard(tmp_path / "a.bin", np.arange(1000))
    write_shard(tmp_path / "b.bin", np.arange(1000, 1005))
    [found] = open_data(str(tmp_path))
    assert len(found.train) == 995
    assert found.val.read(0, 10).tolist() == list(range(995, 1005))
    assert len(found.val.read(0, 6)) == 6
    assert found.val.slice(1, 9).where(0) == f"{tmp_path}/a.bin: byte offset 1992"
    assert found.val.where(6) == f"{tmp_path}/b.bin: byte offset 2"
    line = f"data: 995 ids in {tmp_path}, its last 10 for validation"
    assert str(found).startswith(line)
    os.truncate(tmp_path / "b.bin", 2 * 1_100_000_000)
    assert len(open_data(str(tmp_path))[0].val) == 10_000_000


def test_mixture_is_parsed_into_directories_and_weights(tmp_path, in_tmp_path):
    for name in ("web", "code", "a:1"):
        write_shard(tmp_path / name / "x.bin", range(200))
    found = [(source.name, source.weight) for source in open_data("web:3,code:1")]
    assert found == [("web", 0.75), ("code", 0.25)]
    [directory] = open_data("a:1")  # a directory has this name
    assert (directory.name, directory.weight) == ("a:1", 1.0)


def test_open_file_limit_is_raised_as_far_as_the_system_allows(shards, monkeypatch):
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


def listing(**shards) -> bytes:
    return json.dumps(dict(vocab_size=VOCAB_SIZE, **shards)).encode()


def test_metadata_decides_which_shards_are_for_validation(tmp_path):
    write_shard(tmp_path / "one.bin", [1, 2])
    write_shard(tmp_path / "value.bin", [3])
    entries = [ENTRY | dict(name="one.bin", split="val"), ENTRY | dict(name="value.bin", ids=1)]
    (tmp_path / "metadata.json").write_bytes(listing(shards=entries))
    [found] = open_data(str(tmp_path))
    assert found.train.read(0, 1).tolist() == [3]
    assert found.val.read(0, 2).tolist() == [1, 2]


# --------------------------------------------------------------------------------------------------
# Errors

SHARD = b"\1\0\2\0"


def metadata(text: bytes) -> dict[str, bytes]:
    return {"d/t.bin": SHARD, "d/metadata.json": text}


# (files by name, arguments of data.py, a fragment of the error)
REFUSALS = [
    ({}, "show d", "d: not a directory of shards; to train on a text: python train.py --text FILE"),
    (
        {"a file; touch X": b"x"},
        "show 'a file; touch X'",
        "X: not a directory of shards; "
        "to train on a text: python train.py --text 'a file; touch X'",
    ),
    (
        {"d/x.txt": b"x"},
        "show d",
        "d: contains no .bin file; to train on a text: python train.py --t",
    ),
    ({"d/a/x.bin": b""}, "show d", "d/a/x.bin: has 0 bytes"),
    ({"d/x.bin": b"abc"}, "show d", "d/x.bin: has 3 bytes; a shard has two for each id"),
    (
        {"d/x.bin": SHARD + b"\x10\1"},
        "show d --seq_len 2",
        "d/x.bin: byte offset 4: id 272 is above",
    ),
    ({"d/val.bin": SHARD}, "show d", "d: has only validation shards, none for training"),
    ({"d/x.bin": SHARD}, "show d --seq_len 2", "longer than the data (1 bytes): lower --seq_len"),
    (
        {"d/x.bin": SHARD, "e/x.bin": SHARD},
        "show d:1,e:1e-5 --seq_len 1",
        "e: weight 9.9999e-06 is less than one sequence in 10,000: raise it",
    ),
    *(
        ({}, f"show {mixture}", f"{mixture}: neither a directory nor a mixture dir:weight,")
        for mixture in ("web:x,code:1", "web:0,code:1", "web:inf,code:1", ":1,code:1")
    ),
    ({}, "show d:1,./d:1", "names a directory twice"),
    ({}, "prepare - --out o", "1 empty (-)"),
    ({"x.jsonl": b"\n \n"}, "prepare x.jsonl --out o", "x.jsonl: nothing to train on: no document"),
    ({"x.txt": b"\xef\xbb\xbf"}, "prepare x.txt --out o", "1 empty (x.txt)"),
    (
        {"x.json": b'{"a": [\n1]}'},
        "prepare x.json --out o",
        "1 without a text in 'text' (x.json:1: it has a:",
    ),
    ({}, "prepare x.txt --out o", "x.txt: no such file"),
    ({}, "prepare https://host/x.txt --out o", "x.txt: a URL: download it first"),
    ({"in/x.log": b"a"}, "prepare in --out o", "in: no text, code, JSON or table file; for"),
    ({"x.txt": b"a"}, "prepare x.txt --ext .py,.md --out o", "x.txt: no .py .md file"),
    ({}, "prepare x.txt --out o --val_fraction 1", "--val_fraction: '1' is not a number"),
    ({}, "prepare x.txt --out=", "--out: '' is not a path"),
    *(
        ({"a.txt": b"a text", name: b"{}"}, "prepare a.txt --out o", "o: already has shards of ")
        for name in ("o/metadata.json", "o/below/x.bin")
    ),
    ({"x.jsonl": b'"a"'}, "prepare x.jsonl --val_fraction 0.999 --out o", "lower --val_fraction"),
    *(
        (metadata(text), "verify d", "d/metadata.json: not JSON")
        for text in (b"[" * 100_000, b"\xff")
    ),
    (metadata(listing(shards="t.bin")), "verify d", "d/metadata.json: has no list of shards"),
    (
        metadata(listing(shards=[ENTRY | dict(name="../d/t.bin")])),
        "verify d",
        "d/../d/t.bin: missing, though metadata.json lists it",
    ),
    *(
        (
            metadata(listing(shards=[ENTRY, value])),
            "verify d",
            "metadata.json: shard 1 has no valid name, split, ids or sha256; delete",
        )
        for value in (
            "t.bin",
            ENTRY | dict(split="valid"),
            ENTRY | dict(sha256=None),
        )
    ),
]


@pytest.mark.parametrize("files, command, message", REFUSALS)
def test_bad_data_or_command_gives_one_line(
    in_tmp_path, monkeypatch, capsys, files, command, message
):
    monkeypatch.setattr(sys, "stdin", None)
    for name, content in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(content)
    assert message in error_line(capsys, command)
    assert {str(path) for path in Path().rglob("*") if path.is_file()} == files.keys()


@pytest.mark.parametrize("make", (os.mkfifo, lambda path: path.symlink_to("/dev/zero")))
def test_special_file_as_metadata_or_shard_is_refused_without_blocking(in_tmp_path, capsys, make):
    write_shard("m/u.bin", [1, 2])
    make(Path("m/metadata.json"))
    assert "m/metadata.json: not a regular file" in error_line(capsys, "verify m")
    Path("t").mkdir()
    make(Path("t/t.bin"))
    assert "t/t.bin: " in error_line(capsys, "show t")
    assert run_data("verify t") == 2


# --------------------------------------------------------------------------------------------------
# verify and show


@pytest.fixture
def prepared(in_tmp_path, capsys) -> Path:
    """Prepare eight shards in a directory `o`; return the path of one."""
    Path("a.txt").write_bytes(bytes(range(32, 256)) * 343)
    prepare("a.txt --binary --out o --shard_mb 0.02")
    capsys.readouterr()
    return Path("o/train-00001.bin")


def test_verify_reports_each_damaged_shard(prepared, capsys):
    assert run_data("verify o") == 0
    assert "o: valid shards: 8\n" in capsys.readouterr().out
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
        assert last.endswith("o: damaged shards: 1 of 8")
    with pytest.raises(errors.DataError, match="has 0 bytes, but metadata.json says"):
        open_data("o")


def test_verify_requires_listed_shards_but_no_metadata(prepared, capsys):
    prepared.unlink()
    assert "o/train-00001.bin: missing" in error_line(capsys, "verify o")
    Path("o/metadata.json").unlink()
    assert run_data("verify o") == 0
    out = capsys.readouterr().out
    assert (
        "valid shards: 7\nonly their format was checked, since no metadata.json lists them: 7"
        in out
    )


def test_show_prints_the_sequences_that_the_loader_reads(in_tmp_path, capsys):
    # all ids, and bytes that are not UTF-8
    ids = np.random.default_rng(0).integers(0, VOCAB_SIZE, 1500)
    write_shard("a/1.bin", ids[:500])
    write_shard("a/2.bin", ids[500:900])
    write_shard("b/x.bin", ids[900:])
    assert run_data("show a:2,b:1 --seq_len 64 --seed 3 --first 20 --count 60") == 0
    lines = capsys.readouterr().out.splitlines()
    loader = Loader(open_data("a:2,b:1"), 64, 3)
    input_ids, labels = loader.rows(np.arange(20, 80))
    shown = zip(lines[::2], lines[1::2], input_ids, labels, strict=True)
    for g, (head, text, inputs, targets) in enumerate(shown, 20):
        sequence = [int(inputs[0]), *targets.masked_fill(targets < 0, PAD_ID).tolist()]
        assert text == "    " + errors.printable(sequence)
        name, path, offset = re.fullmatch(r".*, (.), (.*): byte offset (.*)", head).groups()
        assert head.startswith(f"{g}: epoch {loader.epochs(g)['ab'.index(name)]}, {path[0]}, ")
        assert np.fromfile(path, "<u2", 1, offset=int(offset))[0] == sequence[0]
    assert run_data("show --mock_data --seed 7") == 0
    assert capsys.readouterr().out.startswith("0: epoch 0, mock, mock data: byte offset ")

"""Documents of text, JSON lines and parquet; bad lines and rows are named."""

import gzip
import json
import os
import random
import resource
import shutil
import subprocess
import sys

import numpy as np
import pytest

import data
from bad_data import quick_disk  # noqa: F401
from bad_data import LINE, PROGRESS, complaint, documents, joined, limit, snapshot, text
from conftest import ROOT, measured, prepare
from fuzzing import JUNK, mutated
from spider.data.inputs import Input, Options
from spider.data.prepare import plan
from spider.data.shards import read_metadata
from tokenizer import BOS_ID, EOS_ID, VOCAB_SIZE


@pytest.mark.parametrize("unit_bytes", [1, 16, 17, 18, 34, 100, 1000])
def test_a_line_belongs_to_the_unit_that_it_begins_in(tmp_path, unit_bytes):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"".join(b'{"text": "%04d"}\n' % i for i in range(20)))          # 17 bytes each
    source, options = Input(str(path), path.stat().st_size, 0, "jsonl"), Options("text", 0.0, unit_bytes)
    units = plan([source], options)
    texts = [text for _, pieces in units for _, reader, path, *rest in pieces
             for _, text, _, _ in reader(open(path, "rb"), *rest)]
    assert texts == [b"%04d" % i for i in range(20)] and len(units) == -(-340 // unit_bytes)


def test_parquet_rows_become_documents(tmp_path, capsys):
    pyarrow = pytest.importorskip("pyarrow", reason="parquet needs the extra: pip install -e '.[parquet]'")
    import pyarrow.parquet as parquet
    texts = [f"row {i} \u00e4\u4e2d" for i in range(1000)]
    parquet.write_table(pyarrow.table(dict(id=range(1000), text=texts)), tmp_path / "a.parquet", row_group_size=70)
    assert prepare(tmp_path / "a.parquet", "--out", tmp_path / "one") == 0
    assert prepare(tmp_path / "a.parquet", "--out", tmp_path / "many", "--unit_mb", "0.001") == 0
    train, val = ([document.decode() for document in documents(tmp_path / "one", split)] for split in ("train", "val"))
    assert sorted(train + val) == sorted(texts) and 50 < len(val) < 150
    assert train == [text for text in texts if text in set(train)]
    parquet.write_table(pyarrow.table(dict(text=texts)), tmp_path / "b.parquet")        # the same in one row group
    assert prepare(tmp_path / "b.parquet", "--out", tmp_path / "whole") == 0
    for split in ("train", "val"):
        assert joined(tmp_path / "one", split) == joined(tmp_path / "many", split) == joined(tmp_path / "whole", split)
    assert len(list((tmp_path / "many").glob("train-*.bin"))) > 5
    parquet.write_table(pyarrow.table(dict(text=["a", None])), tmp_path / "null.parquet")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and no more")
    capsys.readouterr()
    for name, field, said in [("a", "body", "no string column 'body'; use --field for one of: id (int64), text"),
                              ("a", "id", "no string column 'id'"), ("null", "text", "row 1 (from 0) has no 'text'"),
                              ("broken", "text", "magic bytes not found")]:
        assert prepare(tmp_path / f"{name}.parquet", "--field", field, "--out", tmp_path / "bad") == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and f"{name}.parquet: " in error and said in error
        assert not list(tmp_path.glob("bad/*.bin"))


@pytest.mark.parametrize("encoding, size", [("RLE_DICTIONARY", 4 << 20), ("DELTA_BYTE_ARRAY", 1 << 20)])
def test_parquet_is_read_in_memory_for_a_row_not_for_as_many_as_there_are(tmp_path, encoding, size):
    """A row 256 times over, which both encodings store once."""
    pyarrow = pytest.importorskip("pyarrow", reason="parquet needs the extra: pip install -e '.[parquet]'")
    import pyarrow.parquet as parquet
    row, path = pyarrow.array(["a" * size]), tmp_path / "a.parquet"
    rows = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 256, pyarrow.int32()), row)
    if encoding == "RLE_DICTIONARY":
        how = dict(store_schema=False)
    else:
        rows, how = rows.cast("string"), dict(use_dictionary=False, column_encoding=dict(text=encoding))
    parquet.write_table(pyarrow.table(dict(text=rows)), path, compression="zstd", **how)
    assert path.stat().st_size < 5000
    code = ("import sys; from spider.data import inputs, readers; options = inputs.Options('text', 0.0, 1);"
            "source = inputs.measure(sys.argv[1], 'parquet');"
            "[(_, (reader, path, *rest))] = readers.cut_parquet(source, 0, options);"
            "read = [len(text) for _, text, _, _ in reader(open(path, 'rb'), *rest)]; print(len(read), *set(read))")
    done, peak = measured(code, path)
    assert done.stdout.startswith(f"256 {size}\n") and peak < 260_000, done          # kB: Python, LINE_LIMIT some times


def test_a_parquet_row_of_more_bytes_than_a_json_line_may_have_is_refused(tmp_path, monkeypatch, capsys):
    pyarrow = pytest.importorskip("pyarrow", reason="parquet needs the extra: pip install -e '.[parquet]'")
    import pyarrow.parquet as parquet
    limit("LINE_LIMIT", 5000, monkeypatch)
    for lengths, said in (([5000, 10, 5001], "row 2 (from 0) has more than 5,000 bytes"), ([5000, 10, 5000], None),
                          ([9000, 9000], "row group 0 has rows of more than 5,000 bytes")):
        texts = [random.Random(i).randbytes(length).hex()[:length] for i, length in enumerate(lengths)]
        parquet.write_table(pyarrow.table(dict(text=texts)), tmp_path / "a.parquet")
        status = prepare(tmp_path / "a.parquet", "--val_fraction", "0", "--out", tmp_path / "o")
        error = capsys.readouterr().err
        assert status == 2 * (said is not None) and (not said or f"a.parquet: {said}" in error and ".txt" in error)
        if status == 0:
            assert [len(text) for text in documents(tmp_path / "o", "train")] == lengths
            shutil.rmtree(tmp_path / "o")


def values(size: int) -> bytes:
    """A JSON line of about so many bytes, of which Python makes an object each three."""
    return b'{"text": "a", "more": [' + b"{}," * (size // 3) + b"0]}\n"


def limited(memory: int, *argv) -> subprocess.CompletedProcess:
    """`data.py prepare` in processes of at most so many bytes."""
    return subprocess.run([sys.executable, "data.py", "prepare", *argv], cwd=ROOT, text=True, capture_output=True,
                          env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
                          preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (memory, memory)))


@pytest.mark.parametrize("workers", ["1", "2"])
def test_want_of_memory_is_one_line_that_names_the_file_and_leaves_no_shard(tmp_path, workers):
    (tmp_path / "a.jsonl").write_bytes(LINE)
    (tmp_path / "b.jsonl").write_bytes(values(24 << 20))      # 600 MB
    done = limited(600_000_000, tmp_path, "--workers", workers, "--unit_mb", "1", "--out", tmp_path / "o")
    lines = [line for line in done.stderr.splitlines() if not line.startswith("prepare: ")]
    assert done.returncode == 2 and len(lines) == 1 and f"error: {tmp_path}/b.jsonl: out of memory" in lines[0], done
    assert not list(tmp_path.glob("o/*.tmp"))


def test_a_packed_line_that_is_far_longer_than_its_file_is_refused_before_it_fills_memory(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(values(60 << 20)))
    assert path.stat().st_size < 65_000
    done = limited(500_000_000, path, "--workers", "1", "--out", tmp_path / "o")
    assert done.returncode == 2 and done.stderr.startswith(f"data.py: error: {path}:1: a line of more than 33,554,432 "
                                                           "bytes: ") and ".txt" in done.stderr, done
    assert done.stderr.count("\n") == 1 and os.listdir(tmp_path) == [path.name]


def test_text_that_spells_sentinels_holds_bytes_alone(tmp_path):
    """Control bytes 0-3, and the characters and names whose numbers or words are those of PAD, BOS and EOS."""
    spelled = "".join(map(chr, (0, 1, 2, 3, *range(256, VOCAB_SIZE)))) + "<PAD><BOS><EOS>\\u0101" + "\x03\x00"
    (tmp_path / "a.txt").write_bytes(spelled.encode() + b"\xff\xfe")
    (tmp_path / "b.jsonl").write_text(json.dumps(dict(text=spelled)))
    for name, raw in (("a.txt", spelled.encode() + b"\xff\xfe"), ("b.jsonl", spelled.encode())):
        assert prepare(tmp_path / name, "--val_fraction", "0", "--out", tmp_path / name[0]) == 0
        assert documents(tmp_path / name[0], "train") == [raw] and raw[:4] == bytes(range(4))


LIMIT = 2000


def bad_line(rng: random.Random) -> tuple[bytes, str]:
    """A line that is no document, and what is said of it."""
    good = json.dumps(dict(id=5, text="a word " + text(rng, 20).encode("utf-8", "ignore").decode())).encode()
    match rng.randrange(8):
        case 0: return good[:rng.randrange(1, len(good))], "not JSON"
        case 1: return good.replace(b'"text"', b'"body"'), "not an object with a string 'text'"
        case 2: return json.dumps(dict(text=rng.choice(JUNK[:7] + JUNK[-5:]))).encode(), "not an object with a string"
        case 3: return json.dumps(rng.choice(JUNK)).encode(), "not an object with a string"
        case 4: return good[:-4] + rng.choice((b"\xff", b"\xc3", b"\xed\xa0\x80")) + good[-4:], "not UTF-8 at byte"
        case 5: return good[:-2] + b'\\ud8%02x"}' % rng.randrange(256), "a lone surrogate at character"
        case 6: return good[:-2] + b"x" * rng.randrange(LIMIT, 2 * LIMIT) + b'"}', f"a line of more than {LIMIT:,} byte"
        case 7: return rng.randbytes(rng.randrange(1, 9)).replace(b"\n", b"") + b"\xfe", "not UTF-8 at byte"


def test_a_bad_json_line_is_named_by_its_number_and_offset(tmp_path, monkeypatch, capsys):
    limit("LINE_LIMIT", LIMIT, monkeypatch)
    rng, path = random.Random(4), tmp_path / "in" / "a.jsonl"
    path.parent.mkdir()
    for _ in range(500):
        bad, said = bad_line(rng)
        lines = [rng.choice((b"", b"  ", b'{"text": "fine"}')) for _ in range(rng.randrange(6))]
        lines.insert(number := rng.randrange(len(lines) + 1), bad)
        path.write_bytes(b"\n".join(lines) + b"\n" * rng.randrange(2))
        before = snapshot(tmp_path)
        line = complaint(capsys, "prepare", path.parent, "--workers", "1", "--out", tmp_path / "o")
        offset = sum(len(other) + 1 for other in lines[:number])
        assert f"{path}:{number + 1}: " in line and f"(the line at byte offset {offset})" in line and said in line, line
        assert snapshot(tmp_path) == before


def test_mutated_json_lines_are_named_or_prepared(tmp_path, capsys):
    rng, path = random.Random(5), tmp_path / "a.jsonl"
    raw = b"".join(json.dumps(dict(text=f"document {i} \u00e4")).encode() + b"\n" for i in range(4))
    refused = 0
    for _ in range(300):
        path.write_bytes(mutated(rng, raw))
        before = snapshot(tmp_path)
        argv = ["prepare", str(path), "--workers", "1", "--val_fraction", "0", "--out", str(tmp_path / "o")]
        status = data.main(argv)
        lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith(PROGRESS)]
        if status:
            refused += 1
            assert status == 2 and len(lines) == 1 and f"{path}:" in lines[0] and snapshot(tmp_path) == before, lines
        else:
            documents = [json.loads(line)["text"] for line in path.read_bytes().split(b"\n") if line.strip()]
            ids = np.fromfile(tmp_path / "o" / "train-00000.bin", "<u2").tolist()
            assert ids == [i for document in documents for i in (BOS_ID, *document.encode(), EOS_ID)]
            shutil.rmtree(tmp_path / "o")
    assert 100 < refused < 300


def test_a_parquet_file_without_the_column_or_damaged_is_named(tmp_path, capsys):
    pyarrow = pytest.importorskip("pyarrow", reason="parquet needs the extra: pip install -e '.[parquet]'")
    import pyarrow.parquet as parquet
    rng, path, refused = random.Random(6), tmp_path / "a.parquet", 0
    table = pyarrow.table(dict(id=range(50), text=[f"row {i} \u00e4" for i in range(50)], part=[b"x", None] * 25))
    parquet.write_table(table, path, write_page_checksum=True)
    sound, argv = path.read_bytes(), ["prepare", str(path), "--workers", "1", "--out", str(tmp_path / "o"), "--field"]
    for field in ("body", "id", "part", "", "a\nb", *(text(rng, 9) or "no" for _ in range(30))):
        line = complaint(capsys, *argv, field)
        assert f"{path}: no string column" in line and "text (string)" in line and len(os.listdir(tmp_path)) == 1
    assert data.main([*argv, "text"]) == 0
    shards = [entry["sha256"] for entry in read_metadata(tmp_path / "o")["shards"]]
    shutil.rmtree(tmp_path / "o")
    for case in range(250):
        path.write_bytes(mutated(rng, sound) if case else sound.replace(b"part", b"\x80art"))  # a name, no UTF-8
        capsys.readouterr()
        status = data.main([*argv, "text"])
        lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith(PROGRESS)]
        if status:
            refused += 1
            assert status == 2 and len(lines) == 1 and f"{path}: " in lines[0] and len(os.listdir(tmp_path)) == 1, lines
        else:                                                 # the damage was to what is not read
            assert [entry["sha256"] for entry in read_metadata(tmp_path / "o")["shards"]] == shards
            shutil.rmtree(tmp_path / "o")
    assert refused > 120


@pytest.mark.slow
def test_a_line_of_a_gigabyte_is_refused_in_bounded_memory(tmp_path):
    with open(tmp_path / "a.jsonl", "wb") as file:
        file.write(b'{"text": "fine"}\n{"text": "')
        file.truncate(1 << 30)                                # of zeros that take no room on the disk
    done, peak = measured("import sys, data; sys.exit(data.main(sys.argv[1:]))", "prepare", tmp_path / "a.jsonl",
                          "--workers", "1", "--out", tmp_path / "o")
    assert done.returncode == 2 and f"{tmp_path}/a.jsonl:2: a line of more than 33,554,432 bytes" in done.stderr
    assert done.stderr.count("\n") == 1 and os.listdir(tmp_path) == ["a.jsonl"]
    assert peak < 250_000                                     # kB: the limit of a line, twice, and Python

"""Inputs that data.py prepares through Hugging Face `datasets`, and compressed ones."""

import gzip
import json
import sys

import pytest

from bad_data import complaint, documents, joined
from conftest import contents, prepare
from spider import common, datasets_import

datasets = pytest.importorskip("datasets", reason='needs the extra: pip install -e ".[data]"')
TEXTS = [f"row {i} \u00e4\u4e2d, \"quoted\"\n" for i in range(300)] + ["", "NA", "0017", "null"]


@pytest.fixture
def table():
    return datasets.Dataset.from_dict(dict(id=range(len(TEXTS)), text=TEXTS))


@pytest.mark.parametrize("name", ["a.parquet", "a.csv", "a.csv.gz", "saved"])
def test_the_rows_of_a_table_are_documents_as_they_stand(tmp_path, table, name):
    match name:
        case "a.parquet": table.to_parquet(tmp_path / name, batch_size=70)
        case "saved": table.save_to_disk(tmp_path / name)         # with an .arrow file
        case _:
            table.to_csv(tmp_path / "a.csv")
            (tmp_path / "a.csv.gz").write_bytes(gzip.compress((tmp_path / "a.csv").read_bytes()))
    assert prepare(tmp_path / name, "--out", tmp_path / "o") == 0
    train, val = ([document.decode() for document in documents(tmp_path / "o", split)] for split in ("train", "val"))
    assert sorted(train + val) == sorted(TEXTS) and 10 < len(val) < 60
    lines = tmp_path / "b.jsonl"
    lines.write_text("".join(json.dumps(dict(text=text)) + "\n" for text in TEXTS))
    assert prepare(lines, "--val_fraction", "0", "--out", tmp_path / "p") == 0
    order = [document.decode() for document in documents(tmp_path / "p", "train")]
    assert train == [text for text in order if text in set(train)]


def test_a_number_in_a_csv_file_is_a_text_as_it_stands(tmp_path):
    (tmp_path / "a.csv").write_text("text\n0017\n12.0\n")
    assert prepare(tmp_path / "a.csv", "--val_fraction", "0", "--out", tmp_path / "o") == 0
    assert documents(tmp_path / "o", "train") == [b"0017", b"12.0"]


def test_a_data_set_of_the_hub_is_streamed_by_name_configuration_and_split(tmp_path, monkeypatch, capsys):
    asked = []

    def load(*args, **options):
        asked.append((args, options))
        return datasets.Dataset.from_dict(dict(text=TEXTS, body=TEXTS)).to_iterable_dataset()
    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.chdir(tmp_path)
    argv = ["owner/set-1.0", "--config", "sample", "--split", "test", "--field", "body", "--out", tmp_path / "o"]
    assert prepare(*argv) == 0
    assert asked == [(("owner/set-1.0", "sample"), dict(split="test", streaming=True))]
    assert sum(len(documents(tmp_path / "o", split)) for split in ("train", "val")) == len(TEXTS)


def test_a_local_directory_is_read_as_the_hub_would_have_it(tmp_path, table):
    (tmp_path / "set" / "data").mkdir(parents=True)
    table.to_parquet(tmp_path / "set" / "data" / "train-0.parquet")
    table.select(range(3)).to_parquet(tmp_path / "set" / "data" / "test-0.parquet")
    for split, count in (("train", len(TEXTS)), ("test", 3)):
        rows = datasets_import.rows(str(tmp_path / "set"), "text", None, split)
        assert [row["text"] for row in rows] == TEXTS[:count]


def test_a_bad_row_is_skipped_and_what_cannot_be_read_is_one_line_that_names_the_remedy(
        tmp_path, table, monkeypatch, capsys):
    datasets.Dataset.from_dict(dict(text=["a", None, "b"])).to_parquet(tmp_path / "null.parquet")
    assert prepare(tmp_path / "null.parquet", "--val_fraction", "0", "--out", tmp_path / "o") == 0
    assert documents(tmp_path / "o", "train") == [b"a", b"b"]
    assert f"skipped 1 without a text in 'text' (--field) (first: {tmp_path}/null.parquet:2)" in capsys.readouterr().err
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and no more")
    table.to_csv(tmp_path / "a.csv")
    table.to_parquet(tmp_path / "a.parquet")
    capsys.readouterr()
    for name, field, said in (("a.parquet", "body", "'body'"), ("a.csv", "body", "'body'"),
                              ("broken.parquet", "text", "magic bytes"), ("owner/set", "text", "Hugging Face hub")):
        path = name if "/" in name else tmp_path / name
        line = complaint(capsys, "prepare", path, "--field", field, "--out", tmp_path / "p")
        assert f"error: {path}: " in line and said in line and contents(tmp_path / "p") == {}
    monkeypatch.setitem(sys.modules, "datasets", None)
    line = complaint(capsys, "prepare", tmp_path / "a.parquet", "--out", tmp_path / "p")
    assert 'needs Hugging Face `datasets`; run: pip install -e ".[data]"' in line


def compressed(raw: bytes, ending: str) -> bytes:
    """Compressed with a checksum, in two members or frames."""
    parts = raw[:len(raw) // 2], raw[len(raw) // 2:]
    if ending == ".gz":
        return b"".join(map(gzip.compress, parts))
    zstd = pytest.importorskip("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")
    return b"".join(zstd.compress(part, options={zstd.CompressionParameter.checksum_flag: 1}) for part in parts)


@pytest.mark.parametrize("ending", datasets_import.COMPRESSED)
def test_compressed_files_become_what_they_are_decompressed(tmp_path, ending):
    lines = "".join(json.dumps(dict(text=text)) + "\n" for text in TEXTS).encode()
    files = {"a.txt": "".join(TEXTS).encode(), "b.jsonl": lines, "c.md": b"a document"}
    for options in ([], ["--ext", ".md"]):
        for folder, suffix in (("plain", ""), ("packed", ending)):
            out = tmp_path / f"{folder}-out{len(options)}"
            (tmp_path / folder).mkdir(exist_ok=True)
            for name, raw in files.items():
                (tmp_path / folder / (name + suffix)).write_bytes(compressed(raw, ending) if suffix else raw)
            fraction = "0" if options else "0.3"
            assert prepare(tmp_path / folder, "--val_fraction", fraction, *options, "--out", out) == 0
        for split in ("train", "val"):
            assert joined(out, split) == joined(tmp_path / f"plain-out{len(options)}", split)
        assert joined(out, "train")


@pytest.mark.parametrize("ending", datasets_import.COMPRESSED)
def test_a_compressed_file_that_is_damaged_or_cut_off_is_named_and_leaves_no_shard(tmp_path, capsys, ending):
    path, sound = tmp_path / f"a.txt{ending}", compressed(b"some text " * 999, ending)
    altered = sound[:30] + bytes([sound[30] ^ 1]) + sound[31:]
    for bad in (sound[:-3], sound[:len(sound) // 2 + 9], altered, b"plain text"):
        path.write_bytes(bad)
        assert f"error: {path}: " in complaint(capsys, "prepare", path, "--out", tmp_path / "o")
        assert contents(tmp_path / "o") == {}


def test_without_a_library_for_zst_the_remedy_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("fsspec.compression.available_compressions", lambda: ["gzip"])
    with pytest.raises(common.DataError, match="a.txt.zst: .zst needs backports.zstd; run: pip install"):
        datasets_import.open_input("a.txt.zst", tmp_path)

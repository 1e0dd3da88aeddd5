"""Tables, data sets of the hub, and compressed files that data.py prepares."""

import gzip
import json
import sys
from pathlib import Path

import pytest
from fsspec.compression import compr

from bad_data import complaint, documents, joined
from conftest import contents, prepare
from spider import common, inputs

datasets = pytest.importorskip("datasets", reason='needs the extra: pip install -e ".[data]"')
ipc = pytest.importorskip("pyarrow.ipc")
TEXTS = [f'row {i} \u00e4\u4e2d, "quoted"\n' for i in range(300)] + ["", "NA", "0017", "null"]


@pytest.fixture
def table():
    return datasets.Dataset.from_dict(dict(id=range(len(TEXTS)), text=TEXTS))


def write_table(table, path):
    """Write a data set in the format that the path's extension names; compressed with a further
    one."""
    plain = path.with_name("plain")
    ending = path.suffixes[0].lower()
    if ending == ".parquet":
        table.to_parquet(plain, batch_size=70)
    elif ending == ".csv":
        table.to_csv(plain)
    elif ending == ".json":
        table.to_json(plain, lines=False)
    else:
        with ipc.new_file(str(plain), table.data.schema) as writer:
            writer.write_table(table.data.table, max_chunksize=70)
    raw = plain.read_bytes()
    plain.unlink()
    path.write_bytes(compressed(raw, path.suffix) if len(path.suffixes) == 2 else raw)


@pytest.mark.parametrize(
    "name",
    [
        "a.parquet",
        "a.csv",
        "a.csv.gz",
        "a.parquet.gz",
        "a.PARQUET.zst",
        "a.arrow",
        "a.arrow.gz",
        "a.json",
        "a.json.gz",
        "a.json.zst",
        "saved",
    ],
)
def test_the_rows_of_a_table_are_documents_as_they_stand(tmp_path, table, name):
    if name == "saved":  # an .arrow file in Arrow's other format, and two .json files about it
        table.save_to_disk(tmp_path / name)
    else:
        write_table(table, tmp_path / name)
    assert prepare(tmp_path / name, "--out", tmp_path / "o") == 0
    train, val = (
        [document.decode() for document in documents(tmp_path / "o", split)]
        for split in ("train", "val")
    )
    assert sorted(train + val) == sorted(TEXTS) and 10 < len(val) < 60
    lines = tmp_path / "b.jsonl"
    lines.write_text("".join(json.dumps(dict(text=text)) + "\n" for text in TEXTS))
    assert prepare(lines, "--val_fraction", "0", "--out", tmp_path / "p") == 0
    order = [document.decode() for document in documents(tmp_path / "p", "train")]
    assert train == [text for text in order if text in set(train)]


ODD_NAMES = [
    "p[1]",
    "*",
    "a?",
    "{1,2}",
    "a::b",
    "file:",
    "hf:",
    "zip::p1",
    "%41",
    "a#b",
    "~",
    "$HOME",
    "-a",
    "a\nb",
    "\udcff",
    "p1;x",
]


@pytest.mark.parametrize("ending", [".csv", ".parquet", ".arrow", ".json", ".csv.gz", ".txt.gz"])
def test_a_file_is_read_as_the_one_that_was_named_whatever_its_characters(
    tmp_path, monkeypatch, ending
):
    monkeypatch.chdir(tmp_path)
    for url in ("hf:", "http:"):  # hf://owner/x.csv is a local path too
        Path(url, "owner").mkdir(parents=True)
    names = [*ODD_NAMES, "hf://owner/x", "http://owner/x"]
    Path("p1" + ending).write_bytes(b"another file")
    for number, name in enumerate(names):
        if ending == ".txt.gz":
            Path(name + ending).write_bytes(gzip.compress(b"%d" % number))
        else:
            write_table(
                datasets.Dataset.from_dict(dict(text=[str(number)])), Path("table" + ending)
            )
            Path("table" + ending).rename(name + ending)
    for number, name in enumerate(names):
        path = "./" * name.startswith("-") + name + ending
        assert prepare(path, "--val_fraction", "0", "--out", f"o{number}") == 0
        assert documents(Path(f"o{number}"), "train") == [b"%d" % number], name


CSV = {  # rows after the header id,text; what is read of them
    b"1,0017\n2,12.0\n3,NA\n4,\n": [b"0017", b"12.0", b"NA", b""],  # texts as they stand
    b'1,"a, ""b""\nc"\r\n\r\n2,"d"\r3, e "f" ': [b'a, "b"\nc', b"d", b' e "f" '],
    b"1,a\n2,b,c\n3\n4,d\n": [b"a", b"d"],  # a comma without quotes, a row that is too short
    b"1,a\n2,\xff\n3,b": [b"a", b"b"],
    b"1," + b"x" * 200_000: [b"x" * 200_000],
}


@pytest.mark.parametrize("rows", CSV, ids=[str(rows)[:30] for rows in CSV])
def test_cells_of_a_csv_file_are_texts_as_they_stand_and_bad_rows_are_counted(tmp_path, rows):
    (tmp_path / "a.csv").write_bytes(b"id,text\n" + rows)
    assert prepare(tmp_path / "a.csv", "--val_fraction", "0", "--out", tmp_path / "o") == 0
    assert documents(tmp_path / "o", "train") == CSV[rows]
    skipped = json.loads((tmp_path / "o" / "metadata.json").read_text())["skipped"]
    assert sum(skipped.values()) == {b"1,a\n2,b,c\n3\n4,d\n": 2, b"1,a\n2,\xff\n3,b": 1}.get(
        rows, 0
    )


@pytest.mark.parametrize(
    "rows, said",
    [
        (b'1,"a\n2,b\n', "line 3: unexpected end of data"),
        (b'1,"a"b\n', "line 2: ',' expected"),
        (b"1," + b"x" * 3000, "line 2: longer than 2,000"),
        (b'1,"' + b"x\n" * 3000, "line 1,002: field larger"),
    ],
)
def test_a_csv_file_with_bad_quotes_is_one_line_that_names_the_place(
    tmp_path, monkeypatch, capsys, rows, said
):
    monkeypatch.setattr(inputs, "LINE_LIMIT", 2000)
    (tmp_path / "a.csv").write_bytes(b"id,text\n" + rows)
    assert f"a.csv: {said}" in complaint(
        capsys, "prepare", tmp_path / "a.csv", "--out", tmp_path / "o"
    )


def test_a_data_set_of_the_hub_is_streamed_by_name_configuration_and_split(
    tmp_path, monkeypatch, capsys
):
    asked = []

    def load(*args, **options):
        asked.append((args, options))
        return datasets.Dataset.from_dict(dict(text=TEXTS, body=TEXTS)).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.chdir(tmp_path)
    argv = [
        "owner/set-1.0",
        "--config",
        "sample",
        "--split",
        "test",
        "--field",
        "body",
        "--out",
        tmp_path / "o",
    ]
    assert prepare(*argv) == 0
    assert asked == [(("owner/set-1.0", "sample"), dict(split="test", streaming=True))]
    assert sum(len(documents(tmp_path / "o", split)) for split in ("train", "val")) == len(TEXTS)


def test_a_local_directory_is_read_as_the_hub_would_have_it(tmp_path, table):
    (tmp_path / "set" / "data").mkdir(parents=True)
    table.to_parquet(tmp_path / "set" / "data" / "train-0.parquet")
    table.select(range(3)).to_parquet(tmp_path / "set" / "data" / "test-0.parquet")
    for split, count in (("train", len(TEXTS)), ("test", 3)):
        assert list(inputs.hub_cells(str(tmp_path / "set"), "text", None, split)) == TEXTS[:count]


def test_a_bad_row_is_skipped_and_what_cannot_be_read_is_one_line_that_names_the_remedy(
    tmp_path, table, monkeypatch, capsys
):
    datasets.Dataset.from_dict(dict(text=["a", None, "b"])).to_parquet(tmp_path / "null.parquet")
    assert prepare(tmp_path / "null.parquet", "--val_fraction", "0", "--out", tmp_path / "o") == 0
    assert documents(tmp_path / "o", "train") == [b"a", b"b"]
    assert (
        f"skipped 1 without a text in 'text' (--field) (first: {tmp_path}/null.parquet:2)"
        in capsys.readouterr().err
    )
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and no more")
    table.to_csv(tmp_path / "a.csv")
    table.to_parquet(tmp_path / "a.parquet")
    capsys.readouterr()
    for name, field, said in (
        ("a.parquet", "body", "'body'"),
        ("a.csv", "body", "'body'"),
        ("broken.parquet", "text", "magic bytes"),
        ("owner/set", "text", "Hugging Face hub"),
    ):
        path = name if "/" in name else tmp_path / name
        line = complaint(capsys, "prepare", path, "--field", field, "--out", tmp_path / "p")
        assert f"error: {path}: " in line and said in line and contents(tmp_path / "p") == {}
    for module, name in (("datasets", "owner/set"), ("pyarrow.parquet", tmp_path / "a.parquet")):
        monkeypatch.setitem(sys.modules, module, None)
        line = complaint(capsys, "prepare", name, "--out", tmp_path / "p")
        assert f'needs {module}; run: pip install -e ".[data]"' in line


def compressed(raw: bytes, ending: str) -> bytes:
    """Compressed with a checksum, in two members or frames."""
    parts = raw[: len(raw) // 2], raw[len(raw) // 2 :]
    if ending == ".gz":
        return b"".join(map(gzip.compress, parts))
    zstd = pytest.importorskip(
        "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
    )
    return b"".join(
        zstd.compress(part, options={zstd.CompressionParameter.checksum_flag: 1}) for part in parts
    )


@pytest.mark.parametrize("ending", inputs.COMPRESSIONS)
def test_compressed_files_become_what_they_are_decompressed(tmp_path, ending):
    lines = "".join(json.dumps(dict(text=text)) + "\n" for text in TEXTS).encode()
    files = {"a.txt": "".join(TEXTS).encode(), "b.jsonl": lines, "c.md": b"a document"}
    for options in ([], ["--ext", ".md"]):
        for folder, suffix in (("plain", ""), ("packed", ending)):
            out = tmp_path / f"{folder}-out{len(options)}"
            (tmp_path / folder).mkdir(exist_ok=True)
            for name, raw in files.items():
                (tmp_path / folder / (name + suffix)).write_bytes(
                    compressed(raw, ending) if suffix else raw
                )
            fraction = "0" if options else "0.3"
            assert (
                prepare(tmp_path / folder, "--val_fraction", fraction, *options, "--out", out) == 0
            )
        for split in ("train", "val"):
            assert joined(out, split) == joined(tmp_path / f"plain-out{len(options)}", split)
        assert joined(out, "train")


@pytest.mark.parametrize("ending", inputs.COMPRESSIONS)
def test_a_compressed_file_that_is_damaged_or_cut_off_is_named_and_leaves_no_shard(
    tmp_path, capsys, ending
):
    path, sound = tmp_path / f"a.txt{ending}", compressed(b"some text " * 999, ending)
    altered = sound[:30] + bytes([sound[30] ^ 1]) + sound[31:]
    for bad in (sound[:-3], sound[: len(sound) // 2 + 9], altered, b"plain text"):
        path.write_bytes(bad)
        assert f"error: {path}: " in complaint(capsys, "prepare", path, "--out", tmp_path / "o")
        assert contents(tmp_path / "o") == {}


def test_without_a_library_for_zst_the_remedy_is_named(tmp_path, monkeypatch):
    monkeypatch.delitem(compr, "zstd", raising=False)
    (tmp_path / "a.txt.zst").write_bytes(b"x")
    with pytest.raises(
        common.DataError, match="a.txt.zst: .zst needs backports.zstd; run: pip install"
    ):
        inputs.open_input(str(tmp_path / "a.txt.zst"), tmp_path)

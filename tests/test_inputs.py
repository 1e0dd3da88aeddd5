"""spider/inputs.py: tables, data sets of the Hugging Face hub, and compressed files."""

import gzip
import json
import sys
from pathlib import Path

import pytest
from fsspec.compression import compr

from conftest import contents
from preparing import documents, error_line, joined, metadata, prepare, run_data
from spider import common, inputs

datasets = pytest.importorskip("datasets", reason='needs the extra: pip install -e ".[data]"')
pyarrow = pytest.importorskip("pyarrow")
ipc = pytest.importorskip("pyarrow.ipc")
pytestmark = pytest.mark.usefixtures("in_tmp_path")
TEXTS = [f'row {i} \u00e4\u4e2d, "quoted"\n' for i in range(300)]
TEXTS += ["", "NA", "0017", "2020-01-01", "null"]
JSON_LINES = "".join(json.dumps(dict(text=text)) + "\n" for text in TEXTS)


@pytest.fixture
def table():
    return datasets.Dataset.from_dict(dict(id=range(len(TEXTS)), text=TEXTS))


def write_table(table, path: Path):
    """Write a data set in the format of the path's first extension, compressed if there is a
    second one."""
    plain = path.with_name("plain")
    extension = path.suffixes[0].lower()
    if extension == ".parquet":
        table.to_parquet(plain, batch_size=70)
    elif extension == ".csv":
        table.to_csv(plain)
    elif extension == ".json":
        table.to_json(plain, lines=False)
    else:
        with ipc.new_file(str(plain), table.data.schema) as writer:
            writer.write_table(table.data.table, max_chunksize=70)
    raw = plain.read_bytes()
    plain.unlink()
    path.write_bytes(compressed(raw, path.suffix) if len(path.suffixes) == 2 else raw)


def compressed(raw: bytes, extension: str) -> bytes:
    """Compress with a checksum, in two members or frames."""
    half = len(raw) // 2
    parts = raw[:half], raw[half:]
    if extension == ".gz":
        return b"".join(map(gzip.compress, parts))
    module = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
    zstd = pytest.importorskip(module)
    options = {zstd.CompressionParameter.checksum_flag: 1}
    return b"".join(zstd.compress(part, options=options) for part in parts)


# --------------------------------------------------------------------------------------------------
# Tables

TABLE_NAMES = (
    "a.parquet a.csv a.csv.gz a.parquet.gz a.PARQUET.zst a.arrow a.arrow.gz a.json a.json.gz "
    "a.json.zst saved"
)


@pytest.mark.parametrize("name", TABLE_NAMES.split())
def test_rows_of_a_table_become_the_same_documents_as_json_lines(table, name):
    if name == "saved":  # a directory: an .arrow file in the stream format, and two .json files
        table.save_to_disk(name)
    else:
        write_table(table, Path(name))
    Path("b.jsonl").write_text(JSON_LINES)
    prepare(f"{name} --out o")
    prepare("b.jsonl --out lines")
    for split in ("train", "val"):
        assert joined("o", split) == joined("lines", split)
    assert len(documents("o", "train")) + len(documents("o", "val")) == len(TEXTS)


ODD_NAMES = (
    "p[1] * a? {1,2} a::b file: hf: zip::p1 %41 a#b ~ $HOME -a \udcff p1;x hf://owner/x "
    "http://owner/x"
).split() + ["a\nb"]


@pytest.mark.parametrize("extension", ".csv .parquet .arrow .json .csv.gz .txt.gz".split())
def test_name_of_a_file_is_neither_a_pattern_nor_an_address(extension):
    for url in ("hf:", "http:"):  # hf://owner/x.csv is a local path, too
        Path(url, "owner").mkdir(parents=True)
    Path("p1" + extension).write_bytes(b"another file")
    for number, name in enumerate(ODD_NAMES):
        plain = Path("table" + extension)
        if extension == ".txt.gz":
            plain.write_bytes(gzip.compress(b"%d" % number))
        else:
            write_table(datasets.Dataset.from_dict(dict(text=[str(number)])), plain)
        plain.rename(name + extension)
    for number, name in enumerate(ODD_NAMES):
        path = f"./{name}" if name.startswith("-") else name
        prepare([path + extension, "--val_fraction", "0", "--out", f"o{number}"])
        assert documents(f"o{number}", "train") == [b"%d" % number], name


# rows after the header id,text; the texts that are read; how many rows are skipped
CSV = {
    "as they stand": (b"1,0017\n2,12.0\n3,NA\n4,\n", [b"0017", b"12.0", b"NA", b""], 0),
    "quotes": (
        b'1,"a, ""b""\nc"\r\n\r\n2,"d"\r3, e "f" ',
        [b'a, "b"\nc', b"d", b' e "f" '],
        0,
    ),
    "other numbers of fields": (b"1,a\n2,b,c\n3\n4,d\n", [b"a", b"d"], 2),
    "not UTF-8": (b"1,a\n2,\xff\n3,b", [b"a", b"b"], 1),
    "long": (b"1," + b"x" * 200_000, [b"x" * 200_000], 0),
}


@pytest.mark.parametrize("rows, texts, skipped", CSV.values(), ids=CSV)
def test_cells_of_csv_are_read_unchanged_and_bad_rows_are_counted(rows, texts, skipped):
    Path("a.csv").write_bytes(b"id,text\n" + rows)
    prepare("a.csv --val_fraction 0 --out o")
    assert documents("o", "train") == texts
    assert sum(metadata("o")["skipped"].values()) == skipped


@pytest.mark.parametrize(
    "rows, message",
    [
        (b'1,"a\n2,b\n', "line 3: unexpected end of data"),
        (b"1,a\n" * 1000 + b'1,"a"b\n', "line 1,002: ',' expected"),
        (b"1," + b"x" * 1997 + b"\n2," + b"x" * 1998 + b"\n", "line 3: longer than 2,000 bytes"),
        (b'1,"' + b"x\n" * 3000, "line 1,002: field larger than field limit (2000)"),
    ],
)
def test_csv_with_bad_quotes_is_refused_with_the_line(monkeypatch, capsys, rows, message):
    monkeypatch.setitem(common.LIMITS, "record", 2000)
    Path("a.csv").write_bytes(b"id,text\n" + rows)
    assert f"a.csv: {message}" in error_line(capsys, "prepare a.csv --out o")


BYTES = [b'{"text": "in"}', b'"q"', b"[1]", b" \n", b"", b"\xef\xbb\xbfa", b"plain", b"\xff"]


@pytest.mark.parametrize("name", ("a.parquet", "a.arrow"))
@pytest.mark.parametrize(
    "cells, texts, fault",
    (
        (BYTES, BYTES, ""),
        (["a", None], [b"a"], "skipped 1 without a text in 'text': it is None (first: {}:2)"),
        ([{"text": "in"}], [], "1 without a text in 'text': it is {'text': 'in'}"),
    ),
)
def test_binary_cell_is_its_bytes_and_one_of_another_type_is_skipped(
    capsys, name, cells, texts, fault
):
    write_table(datasets.Dataset.from_dict(dict(text=cells)), Path(name))
    run_data(f"prepare {name} --val_fraction 0 --out o")
    assert documents("o", "train") == texts
    assert fault.replace("{}", name) in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("a.parquet --field body", "without a text in 'body': it has id, text: --field NAME"),
        ("a.csv --field body", "without a text in 'body': it has id, text: --field NAME"),
        ("broken.parquet", "magic bytes"),
        ("broken.arrow", "non-monotonic offset"),
        ("owner/set", "Hugging Face hub"),  # the tests are offline
    ],
)
def test_table_that_cannot_be_read_is_named(table, capsys, arguments, message):
    table.to_csv("a.csv", columns=["id", "text"])
    table.to_parquet("a.parquet")
    Path("broken.parquet").write_bytes(b"PAR1 and no more")
    offsets = pyarrow.array([0, 9, 2], pyarrow.int32()).buffers()[1]
    texts = pyarrow.StringArray.from_buffers(2, offsets, pyarrow.py_buffer(b"x" * 9))
    broken = pyarrow.table(dict(text=texts))
    with ipc.new_file("broken.arrow", broken.schema) as writer:
        writer.write_table(broken)
    capsys.readouterr()
    line = error_line(capsys, f"prepare {arguments} --out o")
    assert line.startswith(f"data.py: error: {arguments.split()[0]}: ")
    assert message in line
    assert contents(Path("o")) == {}


# --------------------------------------------------------------------------------------------------
# The hub


def test_data_set_of_the_hub_is_streamed_by_name_configuration_and_split(monkeypatch):
    calls = []

    def load(*args, **options):
        calls.append((args, options))
        return datasets.Dataset.from_dict(dict(text=TEXTS, body=TEXTS)).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load)
    prepare("owner/set-1.0 --config sample --split test --field body --out o")
    assert calls == [(("owner/set-1.0", "sample"), dict(split="test", streaming=True))]
    assert len(documents("o", "train")) + len(documents("o", "val")) == len(TEXTS)


def test_hub_rows_reads_the_files_of_a_split(table):
    """`datasets` reads a local directory as it reads one of the hub."""
    Path("set/data").mkdir(parents=True)
    table.to_parquet("set/data/train-0.parquet")
    table.select(range(3)).to_parquet("set/data/test-0.parquet")
    for split, texts in (("train", TEXTS), ("test", TEXTS[:3])):
        rows = inputs.hub_rows("set", "text", None, split)
        assert list(rows) == [dict(text=text) for text in texts]


# --------------------------------------------------------------------------------------------------
# Compressed files


@pytest.mark.parametrize("extension", inputs.COMPRESSIONS)
@pytest.mark.parametrize("options", ["--val_fraction 0.3", "--val_fraction 0 --ext .md"])
def test_compressed_files_become_what_the_plain_files_become(extension, options):
    files = {
        "a.txt": "".join(TEXTS).encode(),
        "b.jsonl": JSON_LINES.encode(),
        "c.md": b"a document",
    }
    Path("plain").mkdir()
    Path("packed").mkdir()
    for name, raw in files.items():
        Path("plain", name).write_bytes(raw)
        Path("packed", name + extension).write_bytes(compressed(raw, extension))
    prepare(f"plain {options} --out plain-o")
    prepare(f"packed {options} --out packed-o")
    assert joined("packed-o", "train") == joined("plain-o", "train") != b""
    assert joined("packed-o", "val") == joined("plain-o", "val")


@pytest.mark.parametrize("extension", inputs.COMPRESSIONS)
def test_damaged_compressed_file_is_named_and_leaves_no_shard(capsys, extension):
    path = Path(f"a.txt{extension}")
    sound = compressed(b"some text " * 999, extension)
    altered = sound[:30] + bytes([sound[30] ^ 1]) + sound[31:]
    for damaged in (sound[:-3], sound[: len(sound) // 2 + 9], altered, b"plain text"):
        path.write_bytes(damaged)
        assert f"error: {path}: " in error_line(capsys, f"prepare {path} --out o")
        assert contents(Path("o")) == {}


# --------------------------------------------------------------------------------------------------
# Libraries that are not installed


@pytest.mark.parametrize(
    "module, name", [("datasets", "owner/set"), ("pyarrow.parquet", "a.parquet"), ("", "a.txt.zst")]
)
def test_without_a_library_the_remedy_is_named(monkeypatch, capsys, module, name):
    monkeypatch.delitem(compr, "zstd", raising=False)
    monkeypatch.setitem(sys.modules, module, None)
    for path in ("a.parquet", "a.txt.zst"):
        Path(path).write_bytes(b"x")
    line = error_line(capsys, f"prepare {name} --out o")
    assert f"{name}: " in line
    assert f'needs {module or "backports.zstd"}; run: pip install -e ".[data]"' in line

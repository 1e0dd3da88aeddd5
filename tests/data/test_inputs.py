"""spider/data/inputs.py: tables, data sets of the Hugging Face hub, and compressed files."""

import gzip
import json
import sys
from pathlib import Path

import pytest

from conftest import contents
from preparing import documents, error_line, joined, metadata, prepare, train_texts
from spider import files
from spider.data import inputs

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
    """Write a data set in the format and the compression of the path's extensions."""
    plain = Path("plain")
    extension = Path(inputs.uncompressed_name(path)).suffix
    if extension == ".parquet":
        table.to_parquet(plain, batch_size=70)
    elif extension == ".csv":
        table.to_csv(plain)
    elif extension == ".json":
        table.to_json(plain, lines=False)
    else:
        with ipc.new_file(str(plain), table.data.schema) as writer:
            writer.write_table(table.data.table, max_chunksize=70)
    path.write_bytes(compressed(plain.read_bytes(), path.suffix))
    plain.unlink()


def compressed(raw: bytes, extension: str) -> bytes:
    """Compress as the extension says, in two members or frames."""
    half = len(raw) // 2
    if extension == ".gz":
        return gzip.compress(raw[:half]) + gzip.compress(raw[half:])
    if extension == ".zst":
        codec = pyarrow.Codec("zstd")
        return codec.compress(raw[:half], asbytes=True) + codec.compress(raw[half:], asbytes=True)
    return raw


# --------------------------------------------------------------------------------------------------
# Tables

# A file name is not a glob or a URL, although some libraries would look for p1.csv, or for a host.
TABLE_NAMES = "a.arrow a.PARQUET.zst a.csv.gz a.json.zst saved p[1].csv a::b.parquet hf:.arrow"


@pytest.mark.parametrize("name", TABLE_NAMES.split())
def test_tables_and_json_lines_give_equal_documents(table, name):
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


# Lines after the header id,text; expected texts; number of skipped lines
CSV = {
    "as they stand": (b"1,0017\n2,12.0\n3,NA\n4,\n", [b"0017", b"12.0", b"NA", b""], 0),
    "quotes": (
        b'1,"a, ""b""\r\nc"\r\n\r\n2,"d"\r3, e "f" ',
        [b'a, "b"\r\nc', b"d", b' e "f" '],
        0,
    ),
    "other numbers of fields": (b"1,a\n2,b,c\n3\n4,d\n", [b"a", b"d"], 2),
    "not UTF-8": (b"1,a\n2,\xff\n3,b", [b"a", b"b"], 1),
}


@pytest.mark.parametrize("lines, texts, skipped", CSV.values(), ids=CSV)
def test_csv_cells_are_read_unchanged_and_bad_lines_counted(lines, texts, skipped):
    Path("a.csv").write_bytes(b"id,text\n" + lines)
    assert train_texts("a.csv") == texts
    assert sum(metadata("o")["skipped"].values()) == skipped


def test_binary_cells_are_read_and_other_types_are_skipped(capsys):
    cells = [b'{"text": "in"}', b'"q"', b" \n", b"", b"\xef\xbb\xbfa", b"\xff"]
    write_table(datasets.Dataset.from_dict(dict(text=[*cells, None])), Path("a.arrow"))
    assert train_texts("a.arrow") == cells
    fault = "skipped 1 without a text in 'text' (a.arrow:7: it is None)"
    assert fault in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            "a.parquet --field body",
            "without a text in 'body' (a.parquet:1: it has id, text: make ",
        ),
        ("long.csv", "field larger than field limit (2000)"),
        ("twice.arrow", "nothing is read after the end of its first stream"),
        ("owner/set", "Hugging Face hub"),  # the tests are offline
    ],
)
def test_unreadable_table_is_reported_by_name(monkeypatch, table, capsys, arguments, message):
    monkeypatch.setattr(files, "MAX_RECORD_BYTES", 2000)
    write_table(table, Path("a.parquet"))
    Path("long.csv").write_bytes(b'id,text\n1,"' + b"x\n" * 3000)
    with ipc.new_stream("twice.arrow", table.data.schema) as writer:
        writer.write_table(table.data.table)
    Path("twice.arrow").write_bytes(2 * Path("twice.arrow").read_bytes())
    line = error_line(capsys, f"prepare {arguments} --out o")
    assert line.startswith(f"data.py: error: {arguments.split()[0]}: ")
    assert message in line
    assert contents(Path("o")) == {}


# --------------------------------------------------------------------------------------------------
# The hub


def test_hub_data_set_is_streamed_by_name_config_and_split(monkeypatch, table):
    """Tests are offline, so `datasets` reads a local directory in place of the hub's data set."""
    Path("set").mkdir()
    table.to_parquet("set/test-0.parquet")
    table.select(range(3)).to_parquet("set/train-0.parquet")
    calls = []
    load_dataset = datasets.load_dataset

    def load(*args, **options):
        calls.append((args, options))
        return load_dataset("set", **options)

    monkeypatch.setattr(datasets, "load_dataset", load)
    prepare("owner/set-1.0 --config sample --split test --out o")
    assert calls == [(("owner/set-1.0", "sample"), dict(split="test", streaming=True))]
    assert len(documents("o", "train")) + len(documents("o", "val")) == len(TEXTS)
    assert train_texts("owner/set", out="three") == [text.encode() for text in TEXTS[:3]]


# --------------------------------------------------------------------------------------------------
# Compressed files


@pytest.mark.parametrize("extension", inputs.COMPRESSIONS)
@pytest.mark.parametrize("options", ["--val_fraction 0.3", "--val_fraction 0 --ext .md"])
def test_compressed_and_plain_files_give_equal_documents(extension, options):
    texts = "".join(TEXTS).encode()
    for name, raw in (("a.txt", texts), ("b.jsonl", JSON_LINES.encode()), ("c.md", b"a document")):
        for folder, end in (("plain", ""), ("packed", extension)):
            Path(folder).mkdir(exist_ok=True)
            Path(folder, name + end).write_bytes(compressed(raw, end))
    prepare(f"plain {options} --out plain-o")
    prepare(f"packed {options} --out packed-o")
    assert joined("packed-o", "train") == joined("plain-o", "train") != b""
    assert joined("packed-o", "val") == joined("plain-o", "val")


@pytest.mark.parametrize("extension", inputs.COMPRESSIONS)
def test_damaged_compressed_file_is_reported_and_leaves_no_shard(capsys, extension):
    path = Path(f"a.txt{extension}")
    sound = compressed(b"some text " * 999, extension)
    for damaged in (sound[:-3], sound[: len(sound) // 2 + 9], b"plain text"):
        path.write_bytes(damaged)
        assert f"error: {path}: " in error_line(capsys, f"prepare {path} --out o")
        assert contents(Path("o")) == {}


# --------------------------------------------------------------------------------------------------
# Missing libraries


@pytest.mark.parametrize(
    "module, name",
    [("datasets", "owner/set"), ("pyarrow.ipc", "a.parquet"), ("pyarrow", "a.txt.zst")],
)
def test_missing_library_error_has_the_pip_command(monkeypatch, capsys, module, name):
    monkeypatch.setitem(sys.modules, module, None)
    for path in ("a.parquet", "a.txt.zst"):
        Path(path).write_bytes(b"x")
    line = error_line(capsys, f"prepare {name} --out o")
    assert f"{name}: " in line
    assert f'needs {module}; run: pip install -e ".[data]"' in line

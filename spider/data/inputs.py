"""Open the inputs of `prepare`, compressed ones too, and read their records.

    json_records("a.json", file)            # .json: an array, objects in a row, or JSON lines
    table_rows("a.parquet", file, "text")   # .parquet, .arrow, .csv
    hub_rows("HuggingFaceFW/fineweb-edu", "text", "sample-10BT", "train")
    text_of(record, "text")                 # the text of a record, in UTF-8, or why it has none

Text and JSON lines are read a few MB at a time. pyarrow and `datasets`, which the extra `data`
installs, are imported where they are used: that takes seconds, and most inputs need neither.
"""

import codecs
import csv
import gzip
import io
import json
import os
import reprlib
import sys
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import IO, NamedTuple

from spider import files
from spider.errors import DataError
from spider.files import MIB, bounded_lines

PYDOC = "pydoc_data.topics"  # in place of a path: the documentation that Python carries
COMPRESSIONS = (".gz", ".zst")
SEPARATORS = tuple(" \t\r\n,")  # between the elements of a JSON array
GIT_LFS = b"version https://git-lfs.github.com/spec/"


def uncompressed_name(path: str | Path) -> str:
    """Return a file's name in lower case, without .gz or .zst, so that its extension is that of the
    format."""
    return Path(path).name.lower().removesuffix(".gz").removesuffix(".zst")


# --------------------------------------------------------------------------------------------------
# Errors


class Fault(NamedTuple):
    """Why a record is skipped."""

    kind: str  # faults are counted by it, so that it has nothing of the record
    detail: str = ""  # what this record has


@contextmanager
def any_error_as_data_error(path: str) -> Iterator[None]:
    """Turn any error of a library that reads `path` into a DataError of one line."""
    try:
        yield
    except ImportError as error:
        remedy = 'run: pip install -e ".[data]"'
        raise DataError(f"{path}: needs {error.name}; {remedy}") from None
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0]
        raise DataError(f"{path}: {first_line or type(error).__name__}") from None


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Add `path` to an OSError that names no file, as those of reading and writing do."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


# --------------------------------------------------------------------------------------------------
# Bytes


def open_input(path: str, scratch: Path) -> IO[bytes]:
    """Open a file, standard input (-) or PYDOC, as a seekable file.

    A text is split by its length, so the length must be known before. Standard input, pipes and
    compressed files are therefore copied first, into an unnamed file in the directory `scratch`.
    Raise DataError for a compressed file that is damaged or cut off.
    """
    if path == PYDOC:
        from pydoc_data.topics import topics

        paragraphs = "\n\n".join(topics.values()).split("\n\n")
        text = "\n\n".join(dict.fromkeys(paragraphs)) + "\n"  # each once
        return io.BytesIO(text.encode())
    if path == "-":
        return copy_of(sys.stdin.buffer, path, scratch)
    file = io.BufferedReader(io.FileIO(path), MIB)
    _, extension = os.path.splitext(path.lower())
    if file.peek().startswith(GIT_LFS):
        extension = ""  # it is not compressed; its caller refuses it by any name
    if file.seekable() and extension not in COMPRESSIONS:
        return file
    stream: IO[bytes] = file
    if extension == ".gz":
        stream = gzip.GzipFile(fileobj=file)  # type: ignore[assignment]  # is no IO to mypy
    elif extension == ".zst":
        with any_error_as_data_error(path):
            import pyarrow

            stream = pyarrow.CompressedInputStream(file, "zstd")
    with file:
        return copy_of(stream, path, scratch)


def copy_of(stream: IO[bytes], path: str, scratch: Path) -> IO[bytes]:
    """Copy a stream that reads `path` into an unnamed file in the directory `scratch`. Return that
    file, at its start."""
    copy = tempfile.TemporaryFile(buffering=MIB, dir=scratch)
    copy.writelines(pieces(stream, sys.maxsize, path))
    copy.seek(0)
    return copy


def pieces(stream: IO[bytes], size: int, path: str) -> Iterator[bytes]:
    """Yield the next `size` bytes of a stream that reads `path`, in pieces of a few MB."""
    while size > 0:
        with any_error_as_data_error(path):
            piece = stream.read(min(4 * MIB, size))
        if not piece:
            return
        yield piece
        size -= len(piece)


def fault_of(head: bytes, is_text: bool, binary: bool) -> str | None:
    """Return why a file is not what is meant, given its first bytes; None if they show nothing.

    is_text: it is read as it stands. Then it may have no NUL, and no more than 3% of bytes that are
    not UTF-8. binary: it may have any bytes, but not be a pointer to another file.
    """
    if head.startswith(GIT_LFS):
        return "Git LFS pointer instead of the file: run `git lfs pull`"
    if binary:
        return None
    if head.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        return "UTF-32: convert it by `iconv -f UTF-32 -t UTF-8`"
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "UTF-16: convert it by `iconv -f UTF-16 -t UTF-8`"
    if is_text and 0 in head:
        return (
            "binary, or UTF-16 without a byte order mark: convert a PDF or a document to text; "
            "`train.py --data_dir` reads shards, `data.py prepare --binary` any bytes"
        )
    in_utf_8 = len(head.decode(errors="ignore").encode())
    if is_text and in_utf_8 < 0.97 * len(head):
        return (
            "Latin-1 or another encoding that is not UTF-8: convert it by `iconv -f ENCODING -t "
            "UTF-8` (LATIN1, CP1251, ...), or take its bytes by `data.py prepare --binary`"
        )
    return None


# --------------------------------------------------------------------------------------------------
# Records


def json_records(path: str, file: IO[bytes]) -> Iterator[object]:
    """Yield the records of a .json file.

    If the first of several lines is JSON by itself, the records are the lines. Otherwise the
    whole file is read, and the records are the elements of an array, or the values that follow one
    another.
    """
    start = file.tell()
    not_blank = filter(bytes.strip, bounded_lines(file))
    lines = list(islice(not_blank, 2))
    file.seek(start)
    if len(lines) == 2 and is_json(lines[0]):
        yield from bounded_lines(file)
        return
    # `datasets` would change texts: a date such as 2020-01-01 becomes a time
    with any_error_as_data_error(path):  # there may be too little memory
        text = file.read().strip().decode(errors="surrogateescape")
    closing = "]" if text.startswith("[") else ""
    position = len(closing)  # after the bracket that opens an array
    decoder = json.JSONDecoder()
    with suppress(ValueError, RecursionError):
        while True:
            while text.startswith(SEPARATORS, position):
                position += 1
            value, position = decoder.raw_decode(text, position)
            yield value
    if text[position:] != closing:
        yield Fault("not JSON, and nothing is read from there on")


def is_json(line: bytes) -> bool:
    with suppress(ValueError, RecursionError):
        json.loads(line)
        return True
    return False


def table_rows(path: str, file: IO[bytes], field: str) -> Iterator[object]:
    """Yield the rows of a table, with the column `field` alone. The extension of `path` names the
    format. Raise DataError for anything that cannot be read."""
    extension = Path(uncompressed_name(path)).suffix
    with any_error_as_data_error(path):
        if extension == ".csv":
            yield from csv_rows(file)
            return
        import pyarrow.ipc
        import pyarrow.parquet

        if extension == ".parquet":
            # buffer_size and pre_buffer: read what a batch needs, not a whole row group
            table = pyarrow.parquet.ParquetFile(file, buffer_size=MIB, pre_buffer=False)
            schema = table.schema_arrow
            batches = table.iter_batches(100, columns=[field])
        else:
            # Arrow's file format is its stream format after 8 bytes, with an index at the end.
            is_file_format = file.read(6) == b"ARROW1"
            file.seek(8 if is_file_format else 0)
            batches = pyarrow.ipc.open_stream(file)
            schema = batches.schema
        if field not in schema.names:
            yield without_field(field, schema.names)
            return
        for batch in batches:
            batch.validate(full=True)  # before a damaged offset is followed
            for cell in batch.column(field):
                yield {field: cell.as_py()}
        if extension == ".arrow" and not is_file_format and file.read(1):
            raise ValueError("nothing is read after the end of its first stream")


def csv_rows(file: IO[bytes]) -> Iterator[object]:
    """Yield the rows of a CSV file."""
    csv.field_size_limit(files.MAX_RECORD_BYTES)
    text = io.TextIOWrapper(file, "utf-8", "surrogateescape", newline="")
    rows = csv.DictReader(text, strict=True)  # the first row has the names
    try:
        for row in rows:
            is_whole = None not in row and None not in row.values()
            yield row if is_whole else Fault("with more or fewer fields than line 1")
    except csv.Error as error:
        raise ValueError(f"line {rows.line_num:,}: {error}") from None


def hub_rows(name: str, field: str, config: str | None, split: str) -> Iterator[object]:
    """Yield the rows of a data set of the Hugging Face hub, with the column `field` alone.

    name, config, split: owner/name, configuration and split of the data set. Raise DataError for
    anything that cannot be read.
    """
    with any_error_as_data_error(
        f"{name}: no such file, and as a data set of the Hugging Face hub"
    ):
        import datasets

        # what it would log is in the exception
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)
        table = datasets.load_dataset(name, config, split=split, streaming=True)
        names = table.column_names or [field]
        if field not in names:
            raise ValueError("".join(without_field(field, names)))
        yield from table.select_columns([field])


def without_field(field: str, names: Collection[str]) -> Fault:
    """Describe a record or a table that has fields of other names."""
    shown = ", ".join(names)[:400] or "nothing"
    remedy = "make one text of them (docs/guide/data.md), or use `data.py prepare --field NAME`"
    return Fault(f"without a text in {field!r}", f": it has {shown}: {remedy}")


def text_of(record: object, field: str) -> bytes | Fault | None:
    """Return the text of a record in UTF-8, None for a blank line.

    A record of type bytes is a JSON line. The text is the `field` of an object or of a table's row,
    where bytes are taken as they are. If there are no fields, the record is the text.
    """
    if isinstance(record, bytes):
        limit = files.MAX_RECORD_BYTES
        if len(record) > limit:
            return Fault(f"longer than {limit:,} bytes")
        if not record.strip():
            return None
        try:
            record = json.loads(record)
        except (ValueError, RecursionError):
            return Fault("not JSON in UTF-8")
    text = record
    if isinstance(record, dict):
        if field not in record:
            return without_field(field, record)
        text = record[field]
    if isinstance(text, bytes | Fault):
        return text
    if not isinstance(text, str):
        remedy = "; chat data: see docs/guide/data.md" if isinstance(text, dict | list) else ""
        return Fault(f"without a text in {field!r}", f": it is {reprlib.repr(text)}{remedy}")
    try:
        return text.encode()
    except UnicodeEncodeError:
        return Fault("with a lone surrogate, or not UTF-8")

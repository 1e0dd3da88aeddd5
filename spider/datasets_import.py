"""Open the inputs of `data.py prepare`, compressed ones too, and yield their records; get the text
of a record.

    json_lines(file), json_records(file)                # .jsonl; .json: an array, or JSON lines
    table_cells("pages.parquet", file, "text")                          # .parquet, .csv, .arrow
    hub_cells("HuggingFaceFW/fineweb-edu", "text", "sample-10BT", "train")

Each holds a few MB at a time. Local files are read from open files, not by name: to `datasets` and
fsspec the name p[1].csv is a pattern, and :: or :// in a name make it an address. `datasets`
streams data sets of the hub. It, and pyarrow, on which it depends, are imported when they are first
used, since that takes seconds.
"""

import codecs
import csv
import io
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO

from spider.common import DataError, SpiderError

# fsspec's names of compressions, by the file's extension
COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
MIB = 1 << 20
LINE_LIMIT = 32 * MIB  # bytes of a JSON line, which may take 30 times its size to parse
BOM = b"\xef\xbb\xbf"  # UTF-8's
INSTALL = 'run: pip install -e ".[data]"'


def is_compressed(path: str | Path) -> bool:
    return Path(path).suffix.lower() in COMPRESSED


def uncompressed_name(path: str | Path) -> str:
    """Return a file's name in lower case without .gz or .zst; its extension decides how the file is
    read."""
    name = Path(path).name.lower()
    return Path(name).stem if is_compressed(name) else name


@contextmanager
def faults_of(path: str) -> Iterator[None]:
    """Turn any error of a library that reads `path` into a DataError of one line."""
    try:
        yield
    except SpiderError:
        raise
    except ImportError as fault:
        raise DataError(f"{path}: needs {fault.name}; {INSTALL}") from None
    except Exception as fault:
        reason = str(fault).strip().partition("\n")[0] or type(fault).__name__
        raise DataError(f"{path}: {reason}") from None


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Name `path` in an OSError that names no file, as those of reading and writing do."""
    try:
        yield
    except OSError as fault:
        if fault.filename is None:
            fault.filename = str(path)
        raise


def open_input(path: str, scratch: Path) -> IO[bytes]:
    """Open a file, or standard input (-). Of that, of pipes and of compressed files an unnamed copy
    in the directory `scratch` is opened, since a text is cut by its length. Raise DataError for a
    compressed file that is damaged or cut off."""
    if path == "-":
        if sys.stdin is None:
            raise DataError("-: standard input is closed")
        return copied(sys.stdin.buffer, path, scratch)
    file = open(path, "rb", MIB)
    if file.seekable() and not is_compressed(path):
        return file
    with file:
        return copied(decompressed(file, path) if is_compressed(path) else file, path, scratch)


def decompressed(file: IO[bytes], path: str) -> IO[bytes]:
    """Open a compressed file's content."""
    from fsspec.compression import compr  # torch needs fsspec too

    compression = COMPRESSED[Path(path).suffix.lower()]
    if compression not in compr:
        raise DataError(f"{path}: .zst needs backports.zstd; {INSTALL}")
    with faults_of(path):
        return compr[compression](file, mode="rb")


def copied(source: IO[bytes], path: str, scratch: Path) -> IO[bytes]:
    """Copy a stream, which reads `path`, into an unnamed file in the directory `scratch`; return
    that at its start."""
    copy = tempfile.TemporaryFile(buffering=MIB, dir=scratch)
    while True:
        with faults_of(path):
            piece = source.read(MIB)
        if not piece:
            copy.seek(0)
            return copy
        copy.write(piece)


def pieces(file: IO[bytes], size: int, path: str) -> Iterator[bytes]:
    """Yield the next `size` bytes of a file, a few MB at a time; `path`: for its errors."""
    with naming(path):
        while size > 0 and (piece := file.read(min(4 * MIB, size))):
            yield piece
            size -= len(piece)


# --------------------------------------------------------------------------------------------------
# JSON


def json_lines(file: IO[bytes]) -> Iterator[bytes]:
    """Yield each line; of one that is longer than LINE_LIMIT its beginning."""
    while line := file.readline(LINE_LIMIT + 1):
        yield line
        while not line.endswith(b"\n") and (line := file.readline(MIB)):
            pass  # the rest of a long line


def json_records(file: IO[bytes]) -> Iterator[object]:
    """Yield the records of a .json file: the elements of an array, or objects that follow one
    another (json_values), or its lines, where one of the first two holds a whole value."""
    start = file.tell()
    lines = [*islice((line for line in json_lines(file) if line.strip()), 2)]
    file.seek(start)
    if not lines or lines[0].lstrip()[:1] not in (b"[", b"{"):
        return json_lines(file)
    if lines[0].lstrip().startswith(b"["):
        by_line = len(lines) == 2 and is_json(lines[0], list)
    else:
        by_line = any(is_json(line, dict) for line in lines)
    return json_lines(file) if by_line else json_values(file)


def is_json(text: bytes, kind: type) -> bool:
    with suppress(ValueError, RecursionError):
        return isinstance(json.loads(text), kind)
    return False


def json_values(file: IO[bytes]) -> Iterator[object]:
    """Yield the elements of a JSON array, or the objects that follow one another in a file. Raise
    ValueError with the kind of a bad record where no further one can be found.

    Not by `datasets`: it holds the whole array several times, and a text such as a date, or one
    beside a number in the same field, changes (2020-01-01 becomes a time, x becomes "x")."""
    decode = json.JSONDecoder().raw_decode
    separators = re.compile(r"[\s,]*")
    end, text = None, ""  # end: what follows the last value
    for piece in codecs.iterdecode(iter(partial(file.read, MIB), b""), "utf-8", "surrogateescape"):
        text += piece
        if end is None and (text := text.lstrip()):
            end = "]" if text.startswith("[") else ""
            text = text.removeprefix("[")
        start = 0
        with suppress(ValueError, RecursionError):  # the last value of the text is not whole
            while True:
                start = separators.match(text, start).end()
                value, start = decode(text, start)
                yield value
        text = text[start:]
        if len(text) > LINE_LIMIT:
            break
    if text.strip() != (end or ""):
        raise ValueError(
            f"not JSON, or longer than {LINE_LIMIT:,} bytes, and nothing is read from there on"
        )


# --------------------------------------------------------------------------------------------------
# Tables


def table_cells(path: str, file: IO[bytes], field: str) -> Iterator[object]:
    """Yield the cells of the column `field` of a table; `path` tells its format. Raise DataError
    for anything that cannot be read."""
    with faults_of(path):
        yield from TABLES[Path(uncompressed_name(path)).suffix](file, field)


def check_column(field: str, names: Sequence[str]):
    """Raise ValueError if a table has no column `field`. Without a line of names the first row of
    CSV counts as one."""
    if field not in names:
        raise ValueError(f"no column {field!r} (--field), but {', '.join(names)[:200]}")


def parquet_cells(file: IO[bytes], field: str) -> Iterator[object]:
    from pyarrow.parquet import ParquetFile

    # of a row group, only what a batch needs
    table = ParquetFile(file, buffer_size=MIB, pre_buffer=False)
    check_column(field, table.schema_arrow.names)
    for batch in table.iter_batches(100, columns=[field]):
        for cell in batch.column(field):
            yield cell.as_py()


def arrow_cells(file: IO[bytes], field: str) -> Iterator[object]:
    from pyarrow import ipc

    is_stream = file.read(6) != b"ARROW1"  # the two formats of Arrow
    file.seek(0)
    if is_stream:
        reader = ipc.open_stream(file)
        batches = iter(reader)
    else:
        reader = ipc.open_file(file)
        batches = map(reader.get_batch, range(reader.num_record_batches))
    check_column(field, reader.schema.names)
    for batch in batches:
        batch.validate(full=True)  # before anything reads by a damaged offset
        for cell in batch.column(field):
            yield cell.as_py()


def csv_cells(file: IO[bytes], field: str) -> Iterator[object]:
    """Yield each cell as it stands, None for a row with another number of fields than the first one
    has."""
    text = io.TextIOWrapper(file, "utf-8", "surrogateescape", newline="")

    def lines() -> Iterator[str]:  # a longer one would fill the memory
        while line := text.readline(LINE_LIMIT + 1):
            if len(line) > LINE_LIMIT:
                raise ValueError(f"line {rows.line_num + 1:,}: longer than {LINE_LIMIT:,} bytes")
            yield line

    csv.field_size_limit(LINE_LIMIT)  # of a quoted cell of several lines
    rows = csv.reader(lines(), strict=True)
    try:
        names = next(rows, [])
        check_column(field, names)
        column = names.index(field)
        for row in rows:
            if row:
                yield row[column] if len(row) == len(names) else None
    except csv.Error as fault:
        raise ValueError(f"line {rows.line_num:,}: {fault}") from None


TABLES: dict[str, Callable[[IO[bytes], str], Iterator[object]]] = {
    ".parquet": parquet_cells,
    ".csv": csv_cells,
    ".arrow": arrow_cells,
}


def hub_cells(name: str, field: str, config: str | None, split: str) -> Iterator[object]:
    """Yield the cells of the column `field` of a data set of the hub, by its name, configuration
    and split. Raise DataError for anything that cannot be read."""
    with faults_of(f"{name}: no such file, and as a data set of the Hugging Face hub"):
        import datasets

        # what it would log is in the exception
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)
        table = datasets.load_dataset(name, config, split=split, streaming=True)
        for row in table.select_columns([field]):
            yield row[field]


# --------------------------------------------------------------------------------------------------
# Records


def text_of(record: object, field: str) -> bytes | None:
    """Return the text of a record in UTF-8: of a JSON line (bytes), an object's `field`, or the
    record itself. Return None for a blank line; raise ValueError with the kind of a bad record."""
    if isinstance(record, bytes):
        if not record.strip():
            return None
        if len(record) > LINE_LIMIT:
            raise ValueError(f"longer than {LINE_LIMIT:,} bytes")
        try:
            record = json.loads(record.removeprefix(BOM).decode())
        except (ValueError, RecursionError):
            raise ValueError("not JSON in UTF-8") from None
    text = record.get(field) if isinstance(record, dict) else record
    if not isinstance(text, str):
        raise ValueError(f"without a text in {field!r} (--field)")
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise ValueError("with a lone surrogate, or not UTF-8") from None

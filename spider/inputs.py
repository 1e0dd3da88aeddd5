"""Open the inputs of `prepare`, compressed ones too, and read their records.

    json_records(file)                     # .json: an array, objects in a row, or JSON lines
    table_rows("a.parquet", file, "text")  # .parquet, .csv, .arrow
    hub_rows("HuggingFaceFW/fineweb-edu", "text", "sample-10BT", "train")
    text_of(record, "text")                # the text of a record, in UTF-8, or why it has none

Each reader holds a few MB at a time.

Local files are read from open files, not by name: to `datasets` and fsspec a name such as p[1].csv
is a pattern, and one with :: or :// in it is an address. Only data sets of the Hugging Face hub are
read by `datasets`, which streams them. `datasets` and pyarrow are imported where they are used,
since that takes seconds.
"""

import codecs
import csv
import io
import json
import re
import reprlib
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, NamedTuple

from spider.common import LIMITS, MIB, DataError, SpiderError, bounded_lines

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}  # file extension -> fsspec's name
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # in UTF-8
GIT_LFS = b"version https://git-lfs.github.com/spec/"
UTF_16 = "UTF-16: convert it by `iconv -f UTF-16 -t UTF-8`"
# How files begin that are not the text that is meant, and what to do about them
STARTS = {
    b"\xff\xfe": UTF_16,
    b"\xfe\xff": UTF_16,
    GIT_LFS: "Git LFS pointer instead of the file: run `git lfs pull`",
    b"%PDF-": "PDF: extract its text first, as by pdftotext",
}
# The bytes of text in all encodings but UTF-16 and UTF-32; BEL, BS and ESC are for terminals.
TEXT_BYTES = b"\a\b\t\n\v\f\r\x1b" + bytes(range(32, 256))
INSTALL = 'run: pip install -e ".[data]"'


def is_compressed(path: str | Path) -> bool:
    return Path(path).suffix.lower() in COMPRESSIONS


def uncompressed_name(path: str | Path) -> str:
    """Return a file's name in lower case, without .gz or .zst. Its extension then names the
    format."""
    name = Path(path).name.lower()
    return Path(name).stem if is_compressed(name) else name


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
    except SpiderError:
        raise
    except ImportError as error:
        raise DataError(f"{path}: needs {error.name}; {INSTALL}") from None
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
    """Open a file, or standard input (-), as a file that can be sought in.

    A text is split by its length, so the length must be known before. Standard input, pipes and
    compressed files are therefore copied first, into an unnamed file in the directory `scratch`.
    Raise DataError for a compressed file that is damaged or cut off.
    """
    if path == "-":
        return copy_of(sys.stdin.buffer, path, scratch)
    file = open(path, "rb", MIB)
    stream: IO[bytes] = file
    if is_compressed(path):
        stream = decompressed(file, path)
    elif file.seekable():
        return file
    with file:
        return copy_of(stream, path, scratch)


def decompressed(file: IO[bytes], path: str) -> IO[bytes]:
    """Return a stream of the content of a compressed file; of a Git LFS pointer, the pointer."""
    from fsspec.compression import compr  # torch needs fsspec, too

    with any_error_as_data_error(path):
        if file.peek().startswith(GIT_LFS):  # type: ignore[attr-defined]  # a BufferedReader
            return file
        compression = COMPRESSIONS[Path(path).suffix.lower()]
        if compression not in compr:
            raise DataError(f"{path}: .zst needs backports.zstd; {INSTALL}")
        return compr[compression](file, mode="rb")


def copy_of(stream: IO[bytes], path: str, scratch: Path) -> IO[bytes]:
    """Copy a stream that reads `path` into an unnamed file in the directory `scratch`. Return that
    file, at its start."""
    copy = tempfile.TemporaryFile(buffering=MIB, dir=scratch)
    while True:
        with any_error_as_data_error(path):
            piece = stream.read(MIB)
        if not piece:
            copy.seek(0)
            return copy
        copy.write(piece)


def pieces(file: IO[bytes], size: int, path: str) -> Iterator[bytes]:
    """Yield the next `size` bytes of a file in pieces of a few MB; errors name `path`."""
    with naming(path):
        while size > 0:
            piece = file.read(min(4 * MIB, size))
            if not piece:
                return
            yield piece
            size -= len(piece)


# --------------------------------------------------------------------------------------------------
# JSON


# A whole number may have more digits than Python makes an int of. None is a text.
DECODER = json.JSONDecoder(parse_int=float)


def json_records(file: IO[bytes]) -> Iterator[object]:
    """Yield the records of a .json file, whose layout its first two lines tell.

    They are either the values that `json_values` finds: the elements of an array, or objects in a
    row, over several lines or not. Or they are its lines, if a line is a whole value by itself.
    """
    start = file.tell()
    not_blank = filter(bytes.strip, bounded_lines(file, "record"))
    lines = list(islice(not_blank, 2))
    file.seek(start)
    first = lines[0].lstrip() if lines else b""
    if first.startswith(b"["):
        # An array on one line, with more lines after it, is a bad record of JSON lines.
        has_line_records = len(lines) == 2 and is_json(lines[0], list)
    elif first.startswith(b"{"):
        has_line_records = any(is_json(line, dict) for line in lines)
    else:
        has_line_records = True
    return bounded_lines(file, "record") if has_line_records else json_values(file)


def is_json(text: bytes, kind: type) -> bool:
    with suppress(ValueError, RecursionError):
        return isinstance(DECODER.decode(text.decode()), kind)
    return False


def json_values(file: IO[bytes]) -> Iterator[object]:
    """Yield the elements of a JSON array, or objects that follow one another in a file.

    After a syntax error, or a value longer than a record may be, no further value can be found: the
    last record is then a Fault.

    `datasets` is not used for this. It holds the whole array several times, and it changes texts: a
    date (2020-01-01) becomes a time, and a text beside a number in the same field gets quotes.
    """
    limit = LIMITS["record"]
    separators = re.compile(r"[\s,]*")
    chunks = iter(partial(file.read, MIB), b"")
    text = ""  # read but not decoded yet
    closing = None  # what must follow the last value; None until the first character is read
    for chunk in codecs.iterdecode(chunks, "utf-8", "surrogateescape"):
        text += chunk
        if closing is None:
            text = text.lstrip()
            if text:
                closing = "]" if text.startswith("[") else ""
                text = text.removeprefix("[")
        position = 0
        # Decoding fails at the text's last value, of which a part is not read yet.
        with suppress(ValueError, RecursionError):
            while True:
                gap = separators.match(text, position)
                assert gap is not None  # it may be empty
                position = gap.end()
                value, position = DECODER.raw_decode(text, position)
                yield value
        text = text[position:]
        if len(text) > limit:
            break
    if text.strip() != (closing or ""):
        yield Fault(f"not JSON, or longer than {limit:,} bytes, and nothing is read from there on")


# --------------------------------------------------------------------------------------------------
# Tables


def table_rows(path: str, file: IO[bytes], field: str) -> Iterator[dict[str, object]]:
    """Yield the rows of a table, with the column `field` alone. The extension of `path` names its
    format. Raise DataError for anything that cannot be read."""
    read_cells = TABLES[Path(uncompressed_name(path)).suffix]
    with any_error_as_data_error(path):
        for cell in read_cells(file, field):
            yield {field: cell}


def check_column(field: str, names: Collection[str]):
    """Raise ValueError if a table has no column `field`. In a CSV file without a header, the first
    row is taken for one."""
    if field not in names:
        raise ValueError("".join(without_field(field, names)))


def parquet_cells(file: IO[bytes], field: str) -> Iterator[object]:
    from pyarrow.parquet import ParquetFile

    # buffer_size and pre_buffer: read what a batch needs, not a whole row group
    table = ParquetFile(file, buffer_size=MIB, pre_buffer=False)
    check_column(field, table.schema_arrow.names)
    for batch in table.iter_batches(100, columns=[field]):
        yield from batch.column(field).to_pylist()


def arrow_cells(file: IO[bytes], field: str) -> Iterator[object]:
    """Yield the cells of a column in either of Arrow's two formats, file or stream."""
    from pyarrow import ipc

    is_file_format = file.read(6) == b"ARROW1"
    file.seek(0)
    if is_file_format:
        reader = ipc.open_file(file)
        batches = map(reader.get_batch, range(reader.num_record_batches))
    else:
        reader = ipc.open_stream(file)
        batches = iter(reader)
    check_column(field, reader.schema.names)
    for batch in batches:
        batch.validate(full=True)  # before anything is read by a damaged offset
        for cell in batch.column(field):
            yield cell.as_py()
    if not is_file_format and file.read(1):
        raise ValueError("nothing is read after the end of its first stream")


def csv_cells(file: IO[bytes], field: str) -> Iterator[object]:
    """Yield the cells of a column as they stand; a Fault for a row with more or fewer fields than
    the header."""
    text = io.TextIOWrapper(file, "utf-8", "surrogateescape", newline="")
    limit = LIMITS["record"]

    def lines() -> Iterator[str]:
        while line := text.readline(limit + 1):
            if len(line) > limit:  # it would fill the memory
                raise ValueError(f"line {rows.line_num + 1:,}: longer than {limit:,} bytes")
            yield line

    csv.field_size_limit(limit)  # a field may have several lines
    rows = csv.reader(lines(), strict=True)
    try:
        names = next(rows, [])
        check_column(field, names)
        column = names.index(field)
        for row in rows:
            if row:
                is_whole = len(row) == len(names)
                yield row[column] if is_whole else Fault("with more or fewer fields than line 1")
    except csv.Error as error:
        raise ValueError(f"line {rows.line_num:,}: {error}") from None


TABLES: dict[str, Callable[[IO[bytes], str], Iterator[object]]] = {
    ".parquet": parquet_cells,
    ".csv": csv_cells,
    ".arrow": arrow_cells,
}


def hub_rows(name: str, field: str, config: str | None, split: str) -> Iterator[dict]:
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
        if table.column_names is not None:
            check_column(field, table.column_names)
        yield from table.select_columns([field])


# --------------------------------------------------------------------------------------------------
# Texts


def fault_of(head: bytes, is_text: bool) -> str | None:
    """Return why a file is not what is meant, given its first bytes; None if they show nothing.

    is_text: it is read as it stands. Then its first 8 KiB (git judges by as many) may have at most
    4 NULs and 5% of control bytes that texts do not have. A log may have a few of both; random
    bytes have 9%, and formats that store texts among numbers have more NULs.
    """
    for start, fault in STARTS.items():
        if head.startswith(start):
            return fault
    sample = head[:8192]
    controls = sample.translate(None, TEXT_BYTES)
    if is_text and (len(controls) > max(1, len(sample) / 20) or controls.count(0) > 4):
        return "binary, or UTF-16 without a byte order mark: --binary takes any bytes"
    return None


def without_field(field: str, names: Collection[str]) -> Fault:
    """Describe a record or a table that has fields of other names."""
    shown = [name[:40] for name in islice(names, 12)]
    if len(names) > len(shown):
        shown.append("...")
    return Fault(
        f"without a text in {field!r}",
        f": it has {', '.join(shown) or 'nothing'}: --field NAME, or make one text of several",
    )


def text_of(record: object, field: str) -> bytes | Fault | None:
    """Return the text of a record in UTF-8, None for a blank line.

    A record of type bytes is a JSON line. The text is the `field` of an object or of a table's row,
    where it may be bytes, which are taken as they are. Else it is the record itself.
    """
    if isinstance(record, bytes):
        limit = LIMITS["record"]
        if len(record) > limit:
            return Fault(f"longer than {limit:,} bytes")
        if not record.strip():
            return None
        try:
            record = DECODER.decode(record.removeprefix(BYTE_ORDER_MARK).decode())
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

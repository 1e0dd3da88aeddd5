"""Open the inputs of `data.py prepare`: compressed files, tables by Hugging Face `datasets`; get the text of a record.

    rows("HuggingFaceFW/fineweb-edu", "text", "sample-10BT", "train")   # a data set of the hub, streamed
    rows("pages.parquet", "text")                                       # a local .parquet, .csv or .arrow file

Tables are streamed: no data set is downloaded as a whole or copied into a cache. `pip install -e ".[data]"` installs
what is needed; it is imported when it is first used, since that takes seconds.
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from spider.common import DataError

READERS = {".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}  # builders of `datasets` by the file's extension
COMPRESSED = (".gz", ".zst")
MIB = 1 << 20
LINE_LIMIT = 32 * MIB         # bytes of a JSON line, which may take 30 times its size to parse
BOM = b"\xef\xbb\xbf"         # UTF-8's
INSTALL = 'run: pip install -e ".[data]"'


def uncompressed_name(path: str | Path) -> str:
    """Return a file's name in lower case without .gz or .zst; its extension decides how the file is read."""
    name = Path(path).name.lower()
    return Path(name).stem if name.endswith(COMPRESSED) else name


@contextmanager
def faults_of(path: str) -> Iterator[None]:
    """Turn any error of a library that reads `path` into a DataError of one line."""
    try:
        yield
    except Exception as fault:
        reason = str(fault).strip().partition("\n")[0] or type(fault).__name__
        raise DataError(f"{path}: {reason}") from None


def open_input(path: str, scratch: Path) -> IO[bytes]:
    """Open a file, or standard input (-). Of that, of pipes and of compressed files an unnamed copy in the directory
    `scratch` is opened, since a text is cut by its length. Raise DataError for a compressed file that is damaged or cut
    off."""
    compressed = path.lower().endswith(COMPRESSED)
    if Path(path).is_file() and not compressed:
        return open(path, "rb", MIB)
    copy = tempfile.TemporaryFile(buffering=MIB, dir=scratch)
    if path == "-":
        shutil.copyfileobj(sys.stdin.buffer, copy, MIB)
    elif not compressed:
        with open(path, "rb") as pipe:
            shutil.copyfileobj(pipe, copy, MIB)
    else:
        import fsspec                     # which torch needs too
        from fsspec.compression import available_compressions
        if path.lower().endswith(".zst") and "zstd" not in available_compressions():
            raise DataError(f"{path}: .zst needs backports.zstd; {INSTALL}")
        with faults_of(path), fsspec.open(path, "rb", compression="infer") as file:
            shutil.copyfileobj(file, copy, MIB)
    copy.seek(0)
    return copy


def rows(name: str, field: str, config: str | None = None, split: str = "train") -> Iterator[dict]:
    """Yield the rows of a local file, or of a data set of the hub by its name, configuration and split; a row has the
    column `field` alone. Raise DataError for anything that cannot be read."""
    try:
        import datasets
    except ImportError:
        raise DataError(f"{name}: needs Hugging Face `datasets`; {INSTALL}") from None
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it would log is in the exception
    builder = READERS.get(Path(uncompressed_name(name)).suffix)
    # Every cell of a CSV file is a text as it stands, neither a number nor a missing value.
    options = dict(usecols=[field], converters={field: str}, keep_default_na=False) if builder == "csv" else {}
    with faults_of(name if builder else f"{name}: no such file, and as a data set of the Hugging Face hub"):
        if builder:
            table = datasets.load_dataset(builder, data_files=name, split="train", streaming=True, **options)
        else:
            table = datasets.load_dataset(name, config, split=split, streaming=True)
        yield from table.select_columns([field])


def pieces(file: IO[bytes], size: int) -> Iterator[bytes]:
    """Yield the next `size` bytes of a file, a few MB at a time."""
    while size > 0 and (piece := file.read(min(4 * MIB, size))):
        yield piece
        size -= len(piece)


def json_lines(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield the byte offset of each line, and the line; of one that is longer than LINE_LIMIT its beginning."""
    start = file.tell()
    while line := file.readline(LINE_LIMIT + 1):
        yield start, line
        while not line.endswith(b"\n") and (line := file.readline(MIB)):
            pass                          # the rest of a long line
        start = file.tell()


def text_of(record: bytes | dict, field: str) -> bytes | None:
    """Return the text of a JSON line or of a table's row, in UTF-8, None for a blank line; raise ValueError with the
    kind of a bad record."""
    if isinstance(record, bytes):
        if not record.strip():
            return None
        if len(record) > LINE_LIMIT:
            raise ValueError(f"longer than {LINE_LIMIT:,} bytes")
        try:
            record = json.loads(record.removeprefix(BOM).decode())
        except (ValueError, RecursionError):
            raise ValueError("not JSON in UTF-8") from None
    text = record.get(field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise ValueError(f"without a text in {field!r} (--field)")
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise ValueError("with a lone surrogate") from None

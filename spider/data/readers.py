"""Cut the inputs of `data.py prepare` into pieces, and read the documents of a piece.

A cutter takes an Input, its number among all inputs and the Options, and yields pieces (size, (reader, path, ...)); for
a compressed file the size is that on disk. A reader takes the open file and the rest of its piece, and yields (split,
bytes, begins a document, ends it).

CUTTERS       the cutter of each kind of input
read_stream   read a whole file as a stream of ids, in memory
ids_of        return the ids of a piece of a document
"""

import hashlib
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import numpy as np

from spider.data.inputs import LINE_LIMIT, Input, Options, is_packed, kind_of, measure, open_input
from spider.data.shards import MIB, Shard, Stream, map_shard
from spider.errors import DataError
from tokenizer import BOS_ID, EOS_ID


def draw_split(number: int, start: int, options: Options) -> str:
    """Draw the split of the document that begins at `start` (byte offset or row) of input `number`, by a hash."""
    draw = hashlib.blake2b(b"%d:%d" % (number, start), digest_size=8).digest()
    return "val" if int.from_bytes(draw, "little") < options.val_fraction * 2 ** 64 else "train"


def cut_text(source: Input, number: int, options: Options) -> Iterator:
    """Cut a text file into a training document and, its last val_fraction, a validation document."""
    if is_packed(source.path):
        yield 2 * source.size, (read_packed_text, source.path, options)  # read twice
        return
    cut = int(source.size * (1 - options.val_fraction))
    yield from cut_part(source, "train", 0, cut, options)
    yield from cut_part(source, "val", cut, source.size, options)


def cut_document(source: Input, number: int, options: Options) -> Iterator:
    split = draw_split(number, 0, options)
    if is_packed(source.path):
        yield source.size, (read_packed_document, source.path, split)
    else:
        yield from cut_part(source, split, 0, source.size, options)


def cut_part(source: Input, split: str, first: int, last: int, options: Options) -> Iterator:
    """Cut the bytes first .. last - 1 of a file as one document."""
    for start in range(first, last, options.unit_bytes):
        stop = min(start + options.unit_bytes, last)
        yield stop - start, (read_text, source.path, split, start, stop, start == first, stop == last)


def read_text(file: IO[bytes], split: str, start: int, stop: int, begins: bool, ends: bool) -> Iterator:
    file.seek(start)
    while start < stop:
        piece = file.read(min(4 * MIB, stop - start))
        if not piece:
            raise DataError(f"{file.name}: ends at byte offset {start}, since it changed while it was read")
        start += len(piece)
        yield split, piece, begins, ends and start == stop
        begins = False


def read_packed_text(file: IO[bytes], options: Options) -> Iterator:
    """Read a compressed text file like cut_text and read_text; a first pass finds its size."""
    size = 0
    while piece := file.read(MIB):
        size += len(piece)
    if not size:
        raise DataError(f"{file.name}: empty")
    cut = int(size * (1 - options.val_fraction))
    yield from read_text(file, "train", 0, cut, True, True)
    yield from read_text(file, "val", cut, size, True, True)


def read_packed_document(file: IO[bytes], split: str) -> Iterator:
    piece, begins = file.read(4 * MIB), True
    while piece:
        after = file.read(4 * MIB)
        yield split, piece, begins, not after
        piece, begins = after, False


def cut_jsonl(source: Input, number: int, options: Options) -> Iterator:
    if is_packed(source.path):
        yield source.size, (read_jsonl, source.path, number, 0, math.inf, options)
        return
    for start in range(0, source.size, options.unit_bytes):
        stop = min(start + options.unit_bytes, source.size)
        yield stop - start, (read_jsonl, source.path, number, start, stop, options)


def read_jsonl(file: IO[bytes], number: int, start: int, stop: float, options: Options) -> Iterator:
    """Yield the documents of the lines that begin in start .. stop - 1."""
    file.seek(max(0, start - 1))
    while start and (rest := file.readline(MIB)) and not rest.endswith(b"\n"):
        pass
    offset = file.tell()
    while offset < stop and (line := file.readline(LINE_LIMIT + 1)):
        try:
            if line.strip() or len(line) > LINE_LIMIT:
                yield draw_split(number, offset, options), parse_document(line, options.field), True, True
        except (ValueError, RecursionError) as fault:
            file.seek(0)
            before = sum(file.read(min(MIB, offset - i)).count(b"\n") for i in range(0, offset, MIB))
            raise DataError(f"{file.name}:{before + 1}: {fault} (the line at byte offset {offset})") from None
        offset += len(line)


def too_long() -> str:
    return f"more than {LINE_LIMIT:,} bytes: put such a document into a .txt file, or split it"


def parse_document(line: bytes, field: str) -> bytes:
    """Return the bytes of a JSON line's document; raise ValueError with the reason if there is none."""
    if len(line) > LINE_LIMIT:
        raise ValueError(f"a line of {too_long()}")
    try:
        record = json.loads(line.decode("utf-8"))
        if not isinstance(record, dict) or not isinstance(record.get(field), str):
            raise ValueError(f"not an object with a string {field!r}; use --field for another field")
        return record[field].encode("utf-8")
    except UnicodeDecodeError as fault:
        raise ValueError(f"not UTF-8 at byte {fault.start} of the line") from None
    except UnicodeEncodeError as fault:
        raise ValueError(f"a lone surrogate at character {fault.start} of {field!r}") from None
    except json.JSONDecodeError as fault:
        raise ValueError(f"not JSON: {fault.msg} at column {fault.colno}") from None


@contextmanager
def open_parquet(file: IO[bytes]):
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(f'{file.name}: parquet needs pyarrow; run: pip install -e ".[parquet]"') from None
    try:  # verify pages with checksums; read columns in chunks
        with pyarrow.parquet.ParquetFile(file, page_checksum_verification=True, buffer_size=MIB) as table:
            yield table
    except MemoryError:                   # a base class of pyarrow's own
        raise
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as fault:
        raise DataError(f"{file.name}: {' '.join(str(fault).split())}") from None


def cut_parquet(source: Input, number: int, options: Options) -> Iterator:
    with open_input(source.path) as file, open_parquet(file) as table:
        columns, row = {column.name: str(column.type) for column in table.schema_arrow}, 0
        if columns.get(options.field) not in ("string", "large_string"):
            raise DataError(f"{source.path}: no string column {options.field!r}; use --field for one of: "
                            + ", ".join(f"{name} ({kind})" for name, kind in columns.items()))
        for group in range(table.num_row_groups):
            rows = table.metadata.row_group(group)
            stored = sum(column.total_uncompressed_size for column in map(rows.column, range(rows.num_columns))
                         if column.path_in_schema == options.field)
            if stored // LINE_LIMIT > rows.num_rows:
                raise DataError(f"{source.path}: row group {group} has rows of {too_long()}")
            # No row is longer than all stored text, so these have at most LINE_LIMIT bytes; fewer than 4 are slow.
            at_once = max(4, min(256, LINE_LIMIT // max(1, stored)))
            yield rows.total_byte_size, (read_parquet, source.path, number, group, row, at_once, options)
            row += rows.num_rows


def read_parquet(file: IO[bytes], number: int, group: int, row: int, at_once: int, options: Options) -> Iterator:
    """Yield the documents of a row group, whose first row is row `row` of the file. Decode only `at_once` rows at a
    time, since with dictionaries and shared prefixes a kilobyte may expand to gigabytes."""
    with open_parquet(file) as table:
        for batch in table.iter_batches(at_once, row_groups=[group], columns=[options.field], use_threads=False):
            for text in batch.column(0):
                if not text.is_valid:
                    raise DataError(f"{file.name}: row {row} (from 0) has no {options.field!r}")
                if len(text := text.as_buffer()) > LINE_LIMIT:
                    raise DataError(f"{file.name}: row {row} (from 0) has {too_long()}")
                yield draw_split(number, row, options), text.to_pybytes(), True, True
                row += 1


CUTTERS = {"txt": cut_text, "jsonl": cut_jsonl, "parquet": cut_parquet, "document": cut_document}


def read_stream(path: str, field: str) -> Stream:
    """Read a whole file like `prepare`, in memory and without a split: each JSON line or parquet row is a document, any
    other file is one; a .bin shard is mapped. Raise DataError if there is no document."""
    if path.endswith(".bin"):
        return Stream([map_shard(path, None)])
    kind = kind_of(path, Options(field, 0.0, 1))
    source, ids = measure(path, kind if kind in ("jsonl", "parquet") else "document"), []
    options = Options(field, 0.0, max(1, source.size))
    for _, (reader, _, *arguments) in CUTTERS[source.kind](source, 0, options):
        with open_input(path) as file:
            ids += [ids_of(text, begins, ends) for _, text, begins, ends in reader(file, *arguments)]
    if not ids:
        raise DataError(f"{path}: no document in it")
    return Stream([Shard(path, np.concatenate(ids))])


def ids_of(text: bytes, begins: bool, ends: bool) -> np.ndarray:
    """Return the ids of a piece of a document, uint16, with BOS and EOS if it begins and ends the document."""
    ids = np.empty(begins + len(text) + ends, "<u2")
    ids[begins:begins + len(text)] = np.frombuffer(text, np.uint8)
    ids[:begins], ids[len(ids) - ends:] = BOS_ID, EOS_ID
    return ids

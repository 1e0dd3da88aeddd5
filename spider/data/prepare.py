"""`data.py prepare`: text, JSON lines and parquet become shards, on all cores; a killed run goes on where it stopped.

Inputs are cut into pieces, and pieces make units of work. A unit becomes shards of its own, which a line of the journal
prepare.jsonl records once they are on the disk; metadata.json takes the journal's place at the end. Neither --workers
nor --unit_mb changes a split's stream of ids.
"""

import argparse
import codecs
import gzip
import hashlib
import json
import math
import multiprocessing
import os
import queue
import re
import signal
import sys
import threading
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from spider.console import ProgressBar, note, say
from spider.data.shards import (MIB, Shard, Stream, find_shards, is_entry, map_shard, read_metadata,
                                read_record)
from spider.errors import DataError
from spider.files import durable, each_once, is_count, locked, naming, note_again, open_own, open_plain, put_in_place, walk
from tokenizer import BOS_ID, EOS_ID, VOCAB_SIZE

LINE_LIMIT = 32 * MIB         # longest JSON line, which may take 30 times its size to parse, and longest parquet row
STDIN = ".stdin.txt"          # standard input, while it is prepared


# ---------------------------------------------------------------------------------------------------------------------
# Reading: cutters plan pieces (size, (reader, path, ...)), of a packed file one with its size on disk;
# readers of an open file yield (split, bytes, begins a document, ends it)

class Input(NamedTuple):
    path: str
    size: int
    stamp: int | str          # time of change, ns; of standard input its SHA-256
    kind: str                 # one of CUTTERS


class Options(NamedTuple):
    field: str
    val_fraction: float
    unit_bytes: int
    ext: str | None = None    # endings such as .py,.md, or TEXT: the files that are read, each of them one document
    format: str | None = None  # of standard input


KINDS = {".txt": "txt", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
PACKED = ".gz", ".zst"        # behind any of them but .parquet
TEXT = "text"                 # of --ext: whatever is UTF-8
STRANGERS = {b"PAR1": "parquet", b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}  # by their first bytes


def find_inputs(arguments: Sequence[str], out: Path, options: Options) -> list[Input]:
    """The files that the arguments name, directories searched in sorted order."""
    inputs = []
    for argument in arguments:
        if argument == "-":
            found = [spool(out / STDIN, options.format)]
        elif os.path.isdir(argument):
            found = search(argument, out, options)
        else:
            kind = kind_of(argument, options)
            found = [measure(argument, kind)] if kind else []
            if found and (fault := unfit(found[0], options)):
                raise DataError(f"{argument}: {fault}")
        if not found and options.ext:
            raise DataError(f"{argument}: --ext {options.ext} takes nothing of it")
        if not found:
            raise DataError(f"{argument}: takes {', '.join(KINDS)}, all but the last with {' or '.join(PACKED)} too, a "
                            "directory of them, or - for standard input; --ext takes others, each file as a document")
        inputs += found
    return inputs


def kind_of(path: str, options: Options) -> str | None:
    """How a file is cut, by its name; None: it is none of those that are read."""
    name = Path(path).name.lower()
    if options.ext == TEXT:
        return None if is_packed(name) else "document"
    name = Path(name).stem if is_packed(name) else name
    if options.ext:
        return "document" if name.endswith(tuple(options.ext.split(","))) else None
    kind = KINDS.get(Path(name).suffix)
    return None if kind == "parquet" and is_packed(path) else kind


def is_packed(path: str) -> bool:
    return path.lower().endswith(PACKED)


@contextmanager
def open_input(path: str, report: Callable = lambda count: None) -> Iterator[IO[bytes]]:
    """A file to read, unpacked as its name says; `report` gets the numbers of bytes as they are read from the disk.

    Memory does not hang on what is in it. DataError where it is damaged, or cut off, or nothing here unpacks it.
    """
    with naming(path), open_plain(path, report) as raw:
        if not is_packed(path):
            yield raw
            return
        faults = EOFError, zlib.error, gzip.BadGzipFile
        if path.lower().endswith(".zst"):
            zstd = import_zstd(path)
            faults = EOFError, zstd.ZstdError
        try:
            with gzip.GzipFile(fileobj=raw) if path.lower().endswith(".gz") else zstd.ZstdFile(raw) as file:
                yield file
        except faults as fault:
            raise DataError(f"{path}: cannot be unpacked: {fault}; copy it again, or unpack it otherwise") from None


def import_zstd(path: str):
    """Python's module, or the same for a Python that has none: others take a file that is cut off for a whole one."""
    try:
        from compression import zstd  # from Python 3.14 on
    except ImportError:
        try:
            from backports import zstd
        except ImportError:
            raise DataError(f'{path}: .zst needs backports.zstd; run: pip install -e ".[zstd]"') from None
    return zstd


def search(directory: str, out: Path, options: Options) -> list[Input]:
    """The inputs in and below a directory, sorted by name; what is passed over is counted by kind, in one line."""
    paths, hidden, again = walk(directory, own=out)
    paths = [str(path) for path in sorted(map(Path, paths)) if not path.is_dir()]
    kinds = {path: kind for path in paths if (kind := kind_of(path, options))}
    wanted, others = each_once("", list(kinds))
    note_again(f"prepare: {directory}", again + others)
    found, passed = [], defaultdict(list, hidden=hidden)
    for path in paths:
        if path not in kinds:
            passed[ending(path) or "without an ending"].append(path)
    for path in wanted:
        if options.ext == TEXT and not os.path.isfile(path):
            passed["not a file"].append(path)
            continue
        source = measure(path, kinds[path])
        if fault := unfit(source, options):
            if not options.ext:
                raise DataError(f"{path}: {fault}")
            passed[fault].append(path)
        else:
            found.append(source)
    parts = [f"{len(some):,} {fault} ({some[0]}{', ...' * (len(some) > 1)})"
             for fault, some in sorted(passed.items(), key=lambda item: -len(item[1])) if some]
    if parts:
        note(f"prepare: {directory}: passed over {', '.join(parts[:8])}{', ...' * (len(parts) > 8)}"
             + "; --ext takes other kinds, each file as a document" * (len(kinds) < len(paths) and not options.ext))
    return found


def ending(path: str) -> str:
    suffixes = Path(path).suffixes
    return "".join(suffixes[-2:] if is_packed(path) else suffixes[-1:]).lower()


def unfit(source: Input, options: Options) -> str | None:
    """Why there is no document in a file, as far as that is known before it is read in earnest."""
    if not source.size:
        return "empty"
    if is_packed(source.path):
        with open_input(source.path) as file:
            return None if file.read(1) else "empty"
    if options.ext == TEXT:
        decoder = codecs.getincrementaldecoder("utf-8")()
        with naming(source.path), open_plain(source.path) as file:
            try:
                while piece := file.read(MIB):
                    decoder.decode(piece)
                    if b"\0" in piece:
                        return "not text"
                decoder.decode(b"", final=True)
            except UnicodeDecodeError:
                return "not UTF-8"
    return None


def measure(path: str, kind: str) -> Input:
    with open_plain(path) as file:
        status = os.stat(file.fileno())
    return Input(path, status.st_size, status.st_mtime_ns, kind)


def spool(path: Path, format: str | None) -> Input:
    """Standard input as a file: its length must be known before it is split. DataError where it needs a --format."""
    digest, progress = hashlib.sha256(), ProgressBar("standard input")
    with open_own(path, "wb") as file:
        while piece := sys.stdin.buffer.read(MIB):
            file.write(piece)
            digest.update(piece)
            progress.add(len(piece))
    if not progress.done:
        raise DataError("-: empty")
    with open_plain(path) as file:
        line = file.readline(LINE_LIMIT)
    kind = next((kind for begin, kind in STRANGERS.items() if line.startswith(begin)), None)
    with suppress(ValueError, RecursionError):
        kind = "JSON-lines" if isinstance(json.loads(line), dict) else kind
    if kind and format is None:
        raise DataError(f"-: looks like {kind}: --format says what it is ({', '.join(FORMATS)}); unpack what is packed")
    return Input(str(path), progress.done, digest.hexdigest(), format or "txt")


def draw_split(number: int, place: int, options: Options) -> str:
    """The split of the document at a place (byte offset, row) of input file `number`: hangs on nothing else."""
    draw = hashlib.blake2b(b"%d:%d" % (number, place), digest_size=8).digest()
    return "val" if int.from_bytes(draw, "little") < options.val_fraction * 2 ** 64 else "train"


def cut_text(source: Input, number: int, options: Options) -> Iterator:
    """A text file is one document, but its last val_fraction is another, which validates."""
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
    """The bytes first .. last - 1 of a file as one document."""
    for start in range(first, last, options.unit_bytes):
        stop = min(start + options.unit_bytes, last)
        yield stop - start, (read_text, source.path, split, start, stop, start == first, stop == last)


def read_text(file: IO[bytes], split: str, start: int, stop: int, begins: bool, ends: bool) -> Iterator:
    file.seek(start)
    while start < stop:
        piece = file.read(min(4 * MIB, stop - start))
        if not piece:
            raise DataError(f"{file.name}: ends at byte offset {start}: it changed while it was read")
        start += len(piece)
        yield split, piece, begins, ends and start == stop
        begins = False


def read_packed_text(file: IO[bytes], options: Options) -> Iterator:
    """What cut_text and read_text make of the same file unpacked, whose size is known once it was read."""
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
    """The documents of the lines that begin in start .. stop - 1."""
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
    return f"more than {LINE_LIMIT:,} bytes: give a document as long as that as a .txt file, or in parts"


def parse_document(line: bytes, field: str) -> bytes:
    """The bytes of a JSON line's document; ValueError with the reason where there is none."""
    if len(line) > LINE_LIMIT:
        raise ValueError(f"a line of {too_long()}")
    try:
        record = json.loads(line.decode("utf-8"))
        if not isinstance(record, dict) or not isinstance(record.get(field), str):
            raise ValueError(f"no object with a string {field!r}; --field names another field")
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
    try:  # checks the pages that have a checksum; reads a column of a row group piece by piece
        with pyarrow.parquet.ParquetFile(file, page_checksum_verification=True, buffer_size=MIB) as table:
            yield table
    except MemoryError:                   # pyarrow's own is one
        raise
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as fault:
        raise DataError(f"{file.name}: {' '.join(str(fault).split())}") from None


def cut_parquet(source: Input, number: int, options: Options) -> Iterator:
    with open_input(source.path) as file, open_parquet(file) as table:
        columns, row = {column.name: str(column.type) for column in table.schema_arrow}, 0
        if columns.get(options.field) not in ("string", "large_string"):
            raise DataError(f"{source.path}: no string column {options.field!r}; --field names another of: "
                            + ", ".join(f"{name} ({kind})" for name, kind in columns.items()))
        for group in range(table.num_row_groups):
            rows = table.metadata.row_group(group)
            stored = sum(column.total_uncompressed_size for column in map(rows.column, range(rows.num_columns))
                         if column.path_in_schema == options.field)
            if stored // LINE_LIMIT > rows.num_rows:
                raise DataError(f"{source.path}: row group {group} has rows of {too_long()}")
            # No row is longer than all that is stored, so these hold at most LINE_LIMIT bytes; fewer than 4 are slow.
            at_once = max(4, min(256, LINE_LIMIT // max(1, stored)))
            yield rows.total_byte_size, (read_parquet, source.path, number, group, row, at_once, options)
            row += rows.num_rows


def read_parquet(file: IO[bytes], number: int, group: int, row: int, at_once: int, options: Options) -> Iterator:
    """Yield the documents of a row group, whose first row is row `row` of the file, decoding `at_once` rows at a time:
    with dictionaries and shared prefixes a kilobyte may hold gigabytes."""
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
FORMATS = "txt", "jsonl", "parquet"  # of standard input


def plan(inputs: Sequence[Input], options: Options) -> list[tuple[int, list]]:
    """Units of work (size, pieces): consecutive pieces (size, reader, path, ...) until they have unit_bytes or more."""
    units, size, pieces = [], 0, []
    for number, source in enumerate(inputs):
        for piece_size, piece in CUTTERS[source.kind](source, number, options):
            size += piece_size
            pieces.append((piece_size, *piece))
            if size >= options.unit_bytes:
                units.append((size, pieces))
                size, pieces = 0, []
    return units + [(size, pieces)] if pieces else units


def read_stream(path: str, field: str) -> Stream:
    """What `prepare` would make of a whole file, in memory and unsplit: JSON lines and parquet rows are a document
    each, any other file is one; a .bin shard is mapped as it is. DataError where there is no document."""
    if path.endswith(".bin"):
        return Stream([map_shard(path, None)])
    kind = kind_of(path, Options(field, 0.0, 1))
    source, ids = measure(path, kind if kind in ("jsonl", "parquet") else "document"), []
    options = Options(field, 0.0, max(1, source.size))
    for _, (reader, _, *arguments) in CUTTERS[source.kind](source, 0, options):
        with open_input(path) as file:
            ids += [ids_of(text, begins, ends) for _, text, begins, ends in reader(file, *arguments)]
    if not ids:
        raise DataError(f"{path}: no document in there")
    return Stream([Shard(path, np.concatenate(ids))])


# ---------------------------------------------------------------------------------------------------------------------
# Writing


def ids_of(text: bytes, begins: bool, ends: bool) -> np.ndarray:
    """Ids of a piece of a document, uint16, with BOS and EOS where the document begins and ends."""
    ids = np.empty(begins + len(text) + ends, "<u2")
    ids[begins:begins + len(text)] = np.frombuffer(text, np.uint8)
    ids[:begins], ids[len(ids) - ends:] = BOS_ID, EOS_ID
    return ids


class ShardWriter:
    """A shard under way: `write` fills a temporary file, `finish` makes it durable and gives it its name."""

    def __init__(self, path: Path):
        self.path, self.temporary = path, path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self.file, self.sha256 = open_own(self.temporary, "wb", MIB), hashlib.sha256()
        self.ids = self.documents = self.size = 0  # the last of bytes of text

    def write(self, text: bytes, begins: bool, ends: bool):
        ids = ids_of(text, begins, ends)
        with naming(self.path):
            self.file.write(ids)
        self.sha256.update(ids)
        self.ids, self.documents, self.size = self.ids + len(ids), self.documents + begins, self.size + len(text)

    def finish(self) -> dict:
        with naming(self.path), self.file:
            put_in_place(self.file, self.path)
        return dict(name=self.path.name, split=self.path.name.partition("-")[0], ids=self.ids, documents=self.documents,
                    sha256=self.sha256.hexdigest())


def write_unit(out: Path, unit: int, pieces: list, limit: int, report: Callable) -> list[dict]:
    """Writes train-UNIT.bin and val-UNIT.bin, as far as there is something for them; returns their metadata entries.

    Behind `limit` bytes of text a split goes on in UNIT_00001, and so on. `report` is told of the input that is read.
    """
    writers, entries, left = dict(train=[], val=[]), [], 0

    def read(count: int):                 # what is read ahead, or again, is no progress
        nonlocal left
        count = max(0, min(count, left - 1))
        left -= count
        report(count)
    try:
        for left, reader, path, *arguments in pieces:
            with open_input(path, read) as file:
                for split, text, begins, ends in reader(file, *arguments):
                    parts = writers[split]
                    if not parts or parts[-1].size >= limit:
                        entries += [part.finish() for part in parts[-1:]]
                        more = f"_{len(parts):05d}" if parts else ""  # behind train-00000.bin by name, too
                        parts.append(ShardWriter(out / f"{split}-{unit:05d}{more}.bin"))
                    parts[-1].write(text, begins, ends)
            report(left)
        entries += [part.finish() for parts in writers.values() for part in parts[-1:]]
        return sorted(entries, key=lambda entry: entry["name"])
    except BaseException:
        for entry in entries:             # half of a unit is nothing to go on from
            (out / entry["name"]).unlink()
        raise
    finally:
        for writer in writers["train"][-1:] + writers["val"][-1:]:
            writer.temporary.unlink(missing_ok=True)
            with suppress(OSError):       # of a full disk: the rest of this file is not wanted
                writer.file.close()


class Cancelled(Exception):
    """Another unit failed, or the run is to end; nobody asks for this one any more."""


progress_of_all = is_cancelled = None     # in a worker: what it shares with the others and with their parent


def begin_worker(*shared):
    """A worker must not outlive a killed run, beside whose successor it would write, nor answer Ctrl-C by itself."""
    global progress_of_all, is_cancelled
    progress_of_all, is_cancelled = shared
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if not parent.is_alive():  # or the thread would come too late: work is waiting
        os._exit(1)
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def report_to_parent(count: int):
    with progress_of_all.get_lock():
        progress_of_all.value += count
    if is_cancelled.value:
        raise Cancelled


def write_units(out: Path, units: dict[int, list], workers: int, limit: int, progress: ProgressBar) -> Iterator:
    """(unit, its metadata entries) as the units get done."""
    if min(workers, len(units)) < 2:
        for unit, pieces in units.items():
            yield unit, write_unit(out, unit, pieces, limit, progress.add)
        return
    context, results = multiprocessing.get_context("spawn"), queue.SimpleQueue()
    shared = done, cancelled = context.Value("q"), context.RawValue("b")
    pool = ProcessPoolExecutor(min(workers, len(units)), context, begin_worker, shared)
    try:
        futures = {}
        for unit, pieces in units.items():
            futures[future := pool.submit(write_unit, out, unit, pieces, limit, report_to_parent)] = unit
            future.add_done_callback(results.put)
        for _ in units:
            future = None
            while future is None:
                with suppress(queue.Empty):
                    future = results.get(timeout=0.1)
                progress.add(done.get_obj().value - progress.done)  # without its lock, which a killed worker may hold
            yield futures[future], future.result()
    except BrokenProcessPool:
        raise DataError(f"{out}: a worker died (memory?); the same command goes on, with fewer --workers") from None
    finally:
        cancelled.value = True
        pool.shutdown(cancel_futures=True)


def read_journal(path: Path) -> tuple[str | None, dict[int, list[dict]]]:
    """The fingerprint of a run that was cut short, and the entries of its units whose files are there."""
    records, done = [], {}
    for line in read_record(path).splitlines() if path.exists() else ():
        try:
            records.append(json.loads(line))
        except (ValueError, RecursionError):  # the last line, which a kill cut short
            break
    for record in records[1:]:
        unit, entries = (record.get("unit"), record.get("shards")) if isinstance(record, dict) else (None, None)
        if is_count(unit) and isinstance(entries, list) and all(
                is_entry(entry) and is_count(entry.get("documents"))
                and re.fullmatch(f"{entry['split']}-{unit:05d}(_[0-9]{{5,}})?[.]bin", entry["name"])
                and is_file_of(path.parent / entry["name"], 2 * entry["ids"]) for entry in entries):
            done[unit] = entries
    return records[0] if records and isinstance(records[0], str) else None, done


def is_file_of(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def prepare(args: argparse.Namespace):
    """Turns args.inputs into shards in args.directory; the same command again goes on where a killed run stopped."""
    if not 0 <= args.val_fraction < 1 or not 0 < args.unit_mb <= 1e6:
        raise DataError("--val_fraction takes 0 or more, but less than 1; --unit_mb more than 0 and at most 1e6")
    if args.format and "-" not in args.inputs:
        raise DataError("--format says what standard input is, and - is not among the inputs")
    out, unit_bytes = Path(args.directory), max(1, int(args.unit_mb * 1e6))
    options = Options(args.field, args.val_fraction, unit_bytes, args.ext, args.format)
    made = [path for path in (out, *out.parents) if not path.exists()]
    out.mkdir(parents=True, exist_ok=True)
    with locked(out, DataError(f"{out}: another prepare works in it: wait for it, or choose another --out")):
        try:
            fill(out, args.inputs, options, args.workers)
        except DataError as fault:
            if not any(out.glob("*.bin")):  # nothing to go on from
                (out / "prepare.jsonl").unlink(missing_ok=True)
            raise DataError(str(fault).replace(str(out / STDIN), "-")) from None
        finally:
            (out / STDIN).unlink(missing_ok=True)
            with suppress(OSError):  # of a directory that is not empty
                for path in made:
                    path.rmdir()


def fill(out: Path, arguments: Sequence[str], options: Options, workers: int):
    """Turns what the arguments name into shards and metadata.json, in a directory where no other process works."""
    inputs = find_inputs(arguments, out, options)
    units = plan(inputs, options)
    spooled = str(out / STDIN)
    known = [("-" if source.path == spooled else source.path, source.size, source.stamp) for source in inputs]
    given = [option for option in options if option is not None]
    fingerprint = hashlib.sha256(json.dumps([known, given]).encode()).hexdigest()
    started, done = read_journal(out / "prepare.jsonl")
    if (out / "metadata.json").exists() and read_metadata(out).get("fingerprint") == fingerprint:
        find_shards(str(out))
        (out / "prepare.jsonl").unlink(missing_ok=True)
        say(f"{out}: already prepared from these inputs; nothing to do")
        return
    if (out / "metadata.json").exists() or started != fingerprint and any(out.glob("*.bin")):
        raise DataError(f"{out}: holds shards from other inputs or options; choose another --out, or delete it")
    done = {unit: done[unit] for unit in done if started == fingerprint and unit < len(units)}
    if done:
        say(f"{out}: goes on; {len(done)} of {len(units)} units are done")
    shards = write_shards(out, units, done, fingerprint, workers, 2 * options.unit_bytes)  # no plain unit has more
    for source in inputs:
        if source.path != spooled and measure(source.path, source.kind) != source:
            raise DataError(f"{source.path}: changed while it was prepared; delete {out} and prepare again")
    if not shards:
        raise DataError(f"{', '.join(arguments)}: no document in there")
    totals = {split: {count: sum(entry[count] for entry in shards if entry["split"] == split)
                      for count in ("ids", "documents")} for split in ("train", "val")}
    metadata = dict(vocab_size=VOCAB_SIZE, dtype="uint16", totals=totals, inputs=arguments, options=options._asdict(),
                    fingerprint=fingerprint, shards=shards)
    with durable(out / "metadata.json") as file:
        file.write(json.dumps(metadata, indent=1) + "\n")
    (out / "prepare.jsonl").unlink()
    say(f"{out}: {len(shards)} shards; " + "; ".join(
        f"{split} {total['ids']:,} ids, {total['documents']:,} documents" for split, total in totals.items()))


def write_shards(out: Path, units: list, done: dict[int, list], fingerprint: str, workers: int, limit: int) -> list:
    """Does the units that are not done, each recorded in the journal; returns all metadata entries in order."""
    for leftover in out.glob(".*.tmp"):
        leftover.unlink()
    records = [fingerprint, *(dict(unit=unit, shards=entries) for unit, entries in done.items())]
    with durable(out / "prepare.jsonl") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    todo = {unit: pieces for unit, (_, pieces) in enumerate(units) if unit not in done}
    progress = ProgressBar("prepare", sum(units[unit][0] for unit in todo))
    with open_own(out / "prepare.jsonl", "a") as journal:
        for unit, entries in write_units(out, todo, workers, limit, progress):
            done[unit] = entries
            journal.write(json.dumps(dict(unit=unit, shards=entries)) + "\n")
            journal.flush()
            os.fsync(journal.fileno())
    return [entry for unit in sorted(done) for entry in done[unit]]


def endings(text: str) -> str:
    parts = text.lower().split(",")
    if text != TEXT and not all(re.fullmatch(r"[.][^\s/]+", part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is neither endings such as .py,.md nor {TEXT}")
    if not_text := [part for part in parts if KINDS.get(part, "txt") != "txt" or part in PACKED]:
        raise argparse.ArgumentTypeError(f"{', '.join(not_text)} would be taken as it stands, not read: leave it out")
    return ",".join(parts)

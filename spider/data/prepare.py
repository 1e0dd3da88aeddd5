"""Turn text, JSON lines and parquet into shards, on all cores; after a kill, the same command resumes.

Inputs are cut into pieces, and pieces are grouped into units of work. Each unit becomes its own shards, recorded as a
line of the journal prepare.jsonl once they are on disk; at the end metadata.json replaces the journal. --workers and
--unit_mb do not change the ids of a split. `prepare` does it all; `plan`, `write_units` and `read_journal` are its
steps.
"""

import hashlib
import json
import multiprocessing
import os
import queue
import re
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from pathlib import Path

from spider.console import ProgressBar, say
from spider.data.inputs import STDIN, Input, Options, find_inputs, measure, open_input
from spider.data.readers import CUTTERS, ids_of
from spider.data.shards import MIB, find_shards, is_entry, read_metadata, read_record
from spider.errors import DataError
from spider.files import durable, is_count, locked, naming, open_own, put_in_place
from tokenizer import VOCAB_SIZE


def prepare(inputs: Sequence[str], out: Path, workers: int, options: Options):
    """Turn inputs into shards in a directory; the same call again resumes a killed one."""
    if options.format and "-" not in inputs:
        raise DataError("--format is for standard input, but - is not among the inputs")
    made = [path for path in (out, *out.parents) if not path.exists()]
    out.mkdir(parents=True, exist_ok=True)
    with locked(out, DataError(f"{out}: another prepare is using it: wait for it, or use another --out")):
        try:
            fill(out, inputs, options, workers)
        except DataError as fault:
            if not any(out.glob("*.bin")):  # nothing to resume
                (out / "prepare.jsonl").unlink(missing_ok=True)
            raise DataError(str(fault).replace(str(out / STDIN), "-")) from None
        finally:
            (out / STDIN).unlink(missing_ok=True)
            with suppress(OSError):  # the directory is not empty
                for path in made:
                    path.rmdir()


def fill(out: Path, arguments: Sequence[str], options: Options, workers: int):
    """Turn inputs into shards and metadata.json, in a locked directory."""
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
        raise DataError(f"{out}: has shards of other inputs or options; use another --out, or delete it")
    done = {unit: done[unit] for unit in done if started == fingerprint and unit < len(units)}
    if done:
        say(f"{out}: resuming; {len(done)} of {len(units)} units are done")
    shards = write_shards(out, units, done, fingerprint, workers, 2 * options.unit_bytes)  # limit of compressed units
    for source in inputs:
        if source.path != spooled and measure(source.path, source.kind) != source:
            raise DataError(f"{source.path}: changed while it was prepared; delete {out} and prepare again")
    if not shards:
        raise DataError(f"{', '.join(arguments)}: no document in them")
    totals = {split: {count: sum(entry[count] for entry in shards if entry["split"] == split)
                      for count in ("ids", "documents")} for split in ("train", "val")}
    metadata = dict(vocab_size=VOCAB_SIZE, dtype="uint16", totals=totals, inputs=arguments, options=options._asdict(),
                    fingerprint=fingerprint, shards=shards)
    with durable(out / "metadata.json") as file:
        file.write(json.dumps(metadata, indent=1) + "\n")
    (out / "prepare.jsonl").unlink()
    say(f"{out}: {len(shards)} shards; " + "; ".join(
        f"{split} {total['ids']:,} ids, {total['documents']:,} documents" for split, total in totals.items()))


def plan(inputs: Sequence[Input], options: Options) -> list[tuple[int, list]]:
    """Return units of work (size, pieces): consecutive pieces (size, reader, path, ...) of at least unit_bytes."""
    units, size, pieces = [], 0, []
    for number, source in enumerate(inputs):
        for piece_size, piece in CUTTERS[source.kind](source, number, options):
            size += piece_size
            pieces.append((piece_size, *piece))
            if size >= options.unit_bytes:
                units.append((size, pieces))
                size, pieces = 0, []
    return units + [(size, pieces)] if pieces else units


def write_shards(out: Path, units: list, done: dict[int, list], fingerprint: str, workers: int, limit: int) -> list:
    """Process the remaining units and record each in the journal; return all metadata entries in order."""
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


def read_journal(path: Path) -> tuple[str | None, dict[int, list[dict]]]:
    """Return the fingerprint of an interrupted `prepare`, and the entries of its completed units."""
    records, done = [], {}
    for line in read_record(path).splitlines() if path.exists() else ():
        try:
            records.append(json.loads(line))
        except (ValueError, RecursionError):  # the last line, truncated by a kill
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


# ---------------------------------------------------------------------------------------------------------------------
# Units of work


class ShardWriter:
    """Write a shard: `write` appends to a temporary file, `finish` syncs and renames it."""

    def __init__(self, path: Path):
        self.path, self.temporary = path, path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self.file, self.sha256 = open_own(self.temporary, "wb", MIB), hashlib.sha256()
        self.ids = self.documents = self.size = 0  # size: bytes of text

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
    """Write train-UNIT.bin and val-UNIT.bin, unless they are empty; return their metadata entries.

    After `limit` bytes of text a split continues in UNIT_00001, and so on. `report` gets the numbers of bytes read.
    """
    writers, entries, left = dict(train=[], val=[]), [], 0

    def read(count: int):                 # bytes read ahead or twice do not count as progress
        nonlocal left
        count = max(0, min(count, left - 1))
        left -= count
        report(count)
    try:
        for left, reader, path, *arguments in pieces:
            with open_input(path, read) as file:
                for split, text, begins, ends in reader(file, *arguments):
                    made = writers[split]
                    if not made or made[-1].size >= limit:
                        entries += [writer.finish() for writer in made[-1:]]
                        more = f"_{len(made):05d}" if made else ""  # also sorts after train-00000.bin
                        made.append(ShardWriter(out / f"{split}-{unit:05d}{more}.bin"))
                    made[-1].write(text, begins, ends)
            report(left)
        entries += [writer.finish() for made in writers.values() for writer in made[-1:]]
        return sorted(entries, key=lambda entry: entry["name"])
    except BaseException:
        for entry in entries:             # an incomplete unit cannot be resumed
            (out / entry["name"]).unlink()
        raise
    finally:
        for writer in writers["train"][-1:] + writers["val"][-1:]:
            writer.temporary.unlink(missing_ok=True)
            with suppress(OSError):       # the disk is full, but this file is discarded anyway
                writer.file.close()


class Cancelled(Exception):
    """Another unit failed or the command stops, so this unit is abandoned."""


progress_of_all = is_cancelled = None     # in a worker: values shared with its parent and the other workers


def begin_worker(*shared):
    """Initialize a worker: leave Ctrl-C to the parent, and exit with it, so as not to write beside a new command."""
    global progress_of_all, is_cancelled
    progress_of_all, is_cancelled = shared
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if not parent.is_alive():  # the thread below could be too late
        os._exit(1)
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def report_to_parent(count: int):
    with progress_of_all.get_lock():
        progress_of_all.value += count
    if is_cancelled.value:
        raise Cancelled


def write_units(out: Path, units: dict[int, list], workers: int, limit: int, progress: ProgressBar) -> Iterator:
    """Yield (unit, its metadata entries) as units complete."""
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
                progress.add(done.get_obj().value - progress.done)  # no lock: a killed worker may hold it
            yield futures[future], future.result()
    except BrokenProcessPool:
        raise DataError(f"{out}: a worker died (out of memory?): the same command resumes, with fewer "
                        "--workers") from None
    finally:
        cancelled.value = True
        pool.shutdown(cancel_futures=True)

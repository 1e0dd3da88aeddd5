"""Find and open the inputs of `data.py prepare`: files, directories of them, standard input, packed or not.

Input, Options   a file to read, and how it is read
find_inputs      the files that the arguments of the command name
open_input       a file, unpacked as its name says
"""

import argparse
import codecs
import gzip
import hashlib
import json
import os
import re
import sys
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple

from spider.console import ProgressBar, note
from spider.data.shards import MIB
from spider.errors import DataError
from spider.files import each_once, naming, note_again, open_own, open_plain, walk

LINE_LIMIT = 32 * MIB         # longest JSON line, which may take 30 times its size to parse, and longest parquet row
STDIN = ".stdin.txt"          # standard input, while it is prepared
KINDS = {".txt": "txt", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
PACKED = ".gz", ".zst"        # behind any of them but .parquet
TEXT = "text"                 # of --ext: whatever is UTF-8
FORMATS = "txt", "jsonl", "parquet"  # of standard input
MAGIC = {b"PAR1": "parquet", b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}  # by their first bytes


class Input(NamedTuple):
    """A file to read."""
    path: str
    size: int
    stamp: int | str          # time of change, ns; of standard input its SHA-256
    kind: str                 # one of CUTTERS


class Options(NamedTuple):
    """The way to read inputs; with these they make the fingerprint of a run."""
    field: str
    val_fraction: float
    unit_bytes: int
    ext: str | None = None    # endings such as .py,.md, or TEXT: the files that are read, each of them one document
    format: str | None = None  # of standard input


def find_inputs(arguments: Sequence[str], out: Path, options: Options) -> list[Input]:
    """List the files that the arguments name, directories searched in sorted order."""
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
    """Return how a file is cut, by its name; None where it is not one of those that are read."""
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
    """Open a file to read, unpacked as its name says; `report` gets the number of bytes of each read from the disk.

    Memory does not depend on the content. DataError where it is damaged, cut off, or nothing here unpacks it.
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
    """Import Python's module, or the same for a Python without it: others take a truncated file for a whole one."""
    try:
        from compression import zstd  # from Python 3.14 on
    except ImportError:
        try:
            from backports import zstd
        except ImportError:
            raise DataError(f'{path}: .zst needs backports.zstd; run: pip install -e ".[zstd]"') from None
    return zstd


def search(directory: str, out: Path, options: Options) -> list[Input]:
    """List the inputs in and below a directory, sorted by name; what is skipped is counted by kind, in one line."""
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
        note(f"prepare: {directory}: skipped {', '.join(parts[:8])}{', ...' * (len(parts) > 8)}"
             + "; --ext takes other kinds, each file as a document" * (len(kinds) < len(paths) and not options.ext))
    return found


def ending(path: str) -> str:
    suffixes = Path(path).suffixes
    return "".join(suffixes[-2:] if is_packed(path) else suffixes[-1:]).lower()


def unfit(source: Input, options: Options) -> str | None:
    """Return why a file holds no document, as far as a look at it tells; None where it may hold one."""
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
    """Write standard input to a file: its length must be known before it is cut. DataError where it needs --format."""
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
    kind = next((kind for begin, kind in MAGIC.items() if line.startswith(begin)), None)
    with suppress(ValueError, RecursionError):
        kind = "JSON-lines" if isinstance(json.loads(line), dict) else kind
    if kind and format is None:
        raise DataError(f"-: looks like {kind}: --format says what it is ({', '.join(FORMATS)}); unpack what is packed")
    return Input(str(path), progress.done, digest.hexdigest(), format or "txt")


def endings(text: str) -> str:
    """Parse --ext: endings such as .py,.md, or TEXT."""
    parts = text.lower().split(",")
    if text != TEXT and not all(re.fullmatch(r"[.][^\s/]+", part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is neither endings such as .py,.md nor {TEXT}")
    if not_text := [part for part in parts if KINDS.get(part, "txt") != "txt" or part in PACKED]:
        raise argparse.ArgumentTypeError(f"{', '.join(not_text)} would be taken as it stands, not read: leave it out")
    return ",".join(parts)

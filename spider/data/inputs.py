"""Find and open the inputs of `data.py prepare`: files, directories, standard input, compressed or not.

Input, Options   a file to read, and how to read it
find_inputs      list the files that the arguments name
open_input       open a file, decompressed by its extension
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

LINE_LIMIT = 32 * MIB         # of a JSON line, which may take 30 times its size to parse, and of a parquet row
STDIN = ".stdin.txt"          # copy of standard input
KINDS = {".txt": "txt", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
PACKED = ".gz", ".zst"        # may follow any of them but .parquet
TEXT = "text"                 # value of --ext: all UTF-8 files
FORMATS = "txt", "jsonl", "parquet"  # of standard input
MAGIC = {b"PAR1": "parquet", b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}  # formats by first bytes


class Input(NamedTuple):
    """A file to read."""
    path: str
    size: int
    stamp: int | str          # mtime in ns; for standard input its SHA-256
    kind: str                 # one of CUTTERS


class Options(NamedTuple):
    """Settings for reading inputs; part of the fingerprint of a `prepare`."""
    field: str
    val_fraction: float
    unit_bytes: int
    ext: str | None = None    # extensions such as .py,.md, or TEXT: only these files are read, each as one document
    format: str | None = None  # of standard input


def find_inputs(arguments: Sequence[str], out: Path, options: Options) -> list[Input]:
    """List the files that the arguments name; directories are searched in sorted order."""
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
            raise DataError(f"{argument}: nothing in it matches --ext {options.ext}")
        if not found:
            raise DataError(f"{argument}: supported are {', '.join(KINDS)}, all but the last also with "
                            f"{' or '.join(PACKED)}, directories of them, and - for standard input; for other text "
                            "files use --ext, each file is then a document")
        inputs += found
    return inputs


def kind_of(path: str, options: Options) -> str | None:
    """Return the kind of a file by its name, or None if it is not to be read."""
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
    """Open a file to read, decompressed by its extension, in bounded memory; `report` gets the bytes of each disk read.

    Raise DataError if the file is damaged or truncated, or its decompressor is missing.
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
            raise DataError(f"{path}: cannot be decompressed: {fault}; copy it again, or decompress it yourself"
                            ) from None


def import_zstd(path: str):
    """Import Python's module or its backport; other packages do not notice truncated files."""
    try:
        from compression import zstd  # from Python 3.14 on
    except ImportError:
        try:
            from backports import zstd
        except ImportError:
            raise DataError(f'{path}: .zst needs backports.zstd; run: pip install -e ".[zstd]"') from None
    return zstd


def search(directory: str, out: Path, options: Options) -> list[Input]:
    """List the inputs below a directory, sorted by name; print the number of skipped files by reason."""
    paths, hidden, again = walk(directory, own=out)
    paths = [str(path) for path in sorted(map(Path, paths)) if not path.is_dir()]
    kinds = {path: kind for path in paths if (kind := kind_of(path, options))}
    wanted, others = each_once("", list(kinds))
    note_again(f"prepare: {directory}", again + others)
    found, skipped = [], defaultdict(list, hidden=hidden)
    for path in paths:
        if path not in kinds:
            skipped[ending(path) or "without an extension"].append(path)
    for path in wanted:
        if options.ext == TEXT and not os.path.isfile(path):
            skipped["not a file"].append(path)
            continue
        source = measure(path, kinds[path])
        if fault := unfit(source, options):
            if not options.ext:
                raise DataError(f"{path}: {fault}")
            skipped[fault].append(path)
        else:
            found.append(source)
    counts = [f"{len(some):,} {reason} ({some[0]}{', ...' * (len(some) > 1)})"
              for reason, some in sorted(skipped.items(), key=lambda item: -len(item[1])) if some]
    if counts:
        note(f"prepare: {directory}: skipped {', '.join(counts[:8])}{', ...' * (len(counts) > 8)}"
             + "; use --ext to read other files, each as a document" * (len(kinds) < len(paths) and not options.ext))
    return found


def ending(path: str) -> str:
    suffixes = Path(path).suffixes
    return "".join(suffixes[-2:] if is_packed(path) else suffixes[-1:]).lower()


def unfit(source: Input, options: Options) -> str | None:
    """Return why a file has no document, or None if it may have one."""
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
    """Copy standard input to a file, since its length must be known; raise DataError if it needs --format."""
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
        raise DataError(f"-: looks like {kind}: name its format by --format ({', '.join(FORMATS)}), and decompress it "
                        "if it is compressed")
    return Input(str(path), progress.done, digest.hexdigest(), format or "txt")


def endings(text: str) -> str:
    """Parse --ext: extensions such as .py,.md, or TEXT."""
    found = text.lower().split(",")
    if text != TEXT and not all(re.fullmatch(r"[.][^\s/]+", one) for one in found):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a list of extensions such as .py,.md nor {TEXT}")
    if not_text := [one for one in found if KINDS.get(one, "txt") != "txt" or one in PACKED]:
        raise argparse.ArgumentTypeError(f"{', '.join(not_text)} would be read as plain text: leave it out")
    return ",".join(found)

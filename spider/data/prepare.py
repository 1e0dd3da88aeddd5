"""The work of `data.py prepare`: inputs become documents, and documents become shards.

    prepare(["books.txt", "web/"], Path("data/mine"), Documents())

`Documents` finds the files that an argument names, reads their documents one by one, and draws the
split of each. `ShardWriter` writes the documents of a split. How a format is read is in inputs.py.
"""

import dataclasses
import hashlib
import json
import math
import os
import re
import shutil
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, NamedTuple

import numpy as np

from spider.data.inputs import (
    COMPRESSIONS,
    MIB,
    PYDOC,
    Fault,
    fault_of,
    hub_rows,
    json_records,
    naming,
    open_input,
    pieces,
    table_rows,
    text_of,
    uncompressed_name,
)
from spider.data.shard_files import (
    ID_BYTES,
    METADATA,
    SPLITS,
    ShardEntry,
    files_below,
    read_metadata,
)
from spider.errors import DataError, ProgressBar, print_line, print_status
from spider.files import atomic_write, bounded_lines, locked, sync
from spider.flags import quoted, refuse_url
from spider.vocabulary import BOS_ID, EOS_ID, VOCAB_SIZE

HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+")  # owner/name of a data set
UNFINISHED = ".prepare"  # folder in --out for shards until all are complete, and for copies
MAX_BUFFERED = 10_000  # documents, at most, that are divided anew if a split gets too little
SHARD_MB = 256  # size of a shard

# Numbers of documents are hashes of 64 bits, but for the two parts of a text
VALIDATES = -1
TRAINS = 2**64

# Source code and markup that people write; not configuration, data, drawings (.yaml, .toml, .xml,
# .svg) and notebooks.
CODE_EXTENSIONS = """
    .adoc .asm .bash .bat .c .cc .clj .cmake .cpp .cs .css .cu .cuh .cxx .dart .el .ex .exs .f .f90
    .fs .go .h .hh .hpp .hs .htm .html .java .jl .js .jsx .kt .less .lisp .lua .m .markdown .md .mjs
    .ml .mli .mm .nim .org .pas .php .pl .pm .proto .ps1 .py .pyi .pyx .r .rb .rs .rst .s .scala
    .scm .scss .sh .sql .sv .svelte .swift .tcl .tex .ts .tsx .v .vhd .vim .vue .zig
""".split()

# How a file is read, by its extension
KINDS = dict.fromkeys(CODE_EXTENSIONS, "document") | {
    ".txt": "text",
    ".jsonl": "JSON lines",
    ".ndjson": "JSON lines",
    ".json": "JSON",
    ".parquet": "table",
    ".csv": "table",
    ".arrow": "table",
}

# JSON that this program writes. Directories are read without it, so that a run there does not
# change the text.
WRITTEN = (METADATA, "metrics.jsonl", "trace.json")

# --------------------------------------------------------------------------------------------------
# Inputs become documents


class Input(NamedTuple):
    """A file, standard input (-), PYDOC or a data set of the hub, and how it is read."""

    path: str
    kind: str  # a value of KINDS, or stdin, hub

    def size(self) -> int | None:
        """Return how many bytes will be read, None if that is not known before."""
        is_compressed = self.path.lower().endswith(COMPRESSIONS)
        if self.kind == "table" or is_compressed or not os.path.isfile(self.path):
            return None
        return os.path.getsize(self.path)


# its number, and the pieces of its text; read once, before the next document
Document = tuple[int, Iterable[bytes]]


@dataclass
class Documents:
    """Read the documents of inputs, and draw the split of each.

    Bad records and files are skipped and counted by kind; with `strict` the first one raises
    DataError.
    """

    field: str = "text"  # the name of the JSON field or the column that has the text
    val_fraction: float = 0.1
    endings: tuple[str, ...] = ()  # if any: read files with these alone, a document each
    hub_config: str | None = None  # configuration of a data set of the hub
    hub_split: str = "train"  # split of a data set of the hub
    strict: bool = False
    binary: bool = False  # read any bytes as text
    skipped: Counter[str] = dataclasses.field(default_factory=Counter)  # by kind of fault
    # files below directories that are not read because of their names, by extension
    unread: Counter[str] = dataclasses.field(default_factory=Counter)
    # by kind of fault: all files, or the first record
    places: dict[str, list[str]] = dataclasses.field(default_factory=dict)

    def find(self, argument: str) -> list[Input]:
        """List the inputs that an argument of the command line names."""
        if argument == "-":
            return [Input("-", "stdin")]
        if os.path.exists(argument):
            return self._find_files(argument)
        if argument == "pydoc":
            return [Input(PYDOC, "text")]
        refuse_url(argument)
        # Neither a dead link nor a mistyped name of a file is looked up at the hub.
        is_file = os.path.lexists(argument) or self._kind_of(argument) is not None
        if self.endings or is_file or not HUB_NAME.fullmatch(argument):
            raise DataError(f"{argument}: no such file or directory")
        return [Input(argument, "hub")]

    def _kind_of(self, path: str | Path) -> str | None:
        """Return how a file is read, by its name; None if it is not."""
        name = uncompressed_name(path)
        if self.endings:
            return "document" if name.endswith(self.endings) else None
        return KINDS.get(Path(name).suffix)

    def _find_files(self, argument: str) -> list[Input]:
        """List a named file, or the inputs below a directory in sorted order, and count the other
        files there. A named file whose extension is not in KINDS is read as text."""

        def skip_folder(error: OSError):
            if error.filename == argument:
                raise error
            self.skip(f"unreadable: {error.strerror}", error.filename)

        paths = [Path(argument)]
        is_named = not os.path.isdir(argument)
        if not is_named:
            below = map(Path, files_below(argument, skip_folder))
            paths = sorted(path for path in below if path.name not in WRITTEN)
        default = "text" if is_named and not self.endings else None
        inputs = []
        for path in paths:
            kind = self._kind_of(path) or default
            if kind is None:
                self.unread[path.suffix or "without extension"] += 1
            elif is_named or os.path.isfile(path) and os.access(path, os.R_OK):
                inputs.append(Input(str(path), kind))
            else:
                self.skip("unreadable, a dead link or no regular file", str(path))
        if not inputs and not self.skipped:
            kinds = " ".join(self.endings) or "text, code, JSON or table"
            raise DataError(
                f"{argument}: no {kinds} file: `data.py prepare --ext .EXT` reads other texts, "
                f"`train.py --data_dir` shards"
            )
        return inputs

    def read_all(self, inputs: Sequence[Input], scratch: Path) -> Iterator[Document]:
        """Yield the documents of inputs, and show a progress bar."""
        sizes = [source.size() for source in inputs]
        total = 0 if None in sizes else sum(filter(None, sizes))
        progress = ProgressBar("prepare", total)

        def counted(text: Iterable[bytes]) -> Iterator[bytes]:
            for piece in text:
                yield piece
                progress.add(len(piece))

        end = 0  # bytes of the inputs up to this one
        for source, size in zip(inputs, sizes, strict=True):
            for number, text in self.read(source, scratch):
                yield number, counted(text)
            end += size or 0
            # Only texts were counted: add the rest of JSON lines.
            progress.add(max(0, end - progress.done))

    def read(self, source: Input, scratch: Path) -> Iterator[Document]:
        """Yield the documents of an input. `scratch`: directory for temporary copies, see
        open_input."""
        path = source.path
        if source.kind == "hub":
            rows = hub_rows(path, self.field, self.hub_config, self.hub_split)
            yield from self._documents_of_records(rows, path)
            return
        with open_input(path, scratch) as file, naming(path):
            yield from self._documents_of_file(file, source)

    def _documents_of_file(self, file: IO[bytes], source: Input) -> Iterator[Document]:
        path = source.path
        head = file.read(8192)  # git, too, judges by as many
        start = len(BOM_UTF8) if head.startswith(BOM_UTF8) else 0
        size = file.seek(0, os.SEEK_END) - start
        file.seek(start)
        kind = guess_kind(head[start:]) if source.kind == "stdin" else source.kind
        fault = fault_of(head, kind in ("text", "document"), self.binary)
        if size == 0:
            self.skip("empty", path)
        elif fault is not None:
            self.skip(fault, path)
        elif kind == "table":
            yield from self._documents_of_records(table_rows(path, file, self.field), path)
        elif kind == "JSON lines":
            yield from self._documents_of_records(bounded_lines(file), path)
        elif kind == "JSON":
            yield from self._documents_of_records(json_records(path, file), path)
        elif kind == "document":
            number = hash_of(pieces(file, size, path))
            file.seek(start)
            yield number, pieces(file, size, path)
        else:
            yield from self._cut(file, size, path)

    def _cut(self, file: IO[bytes], size: int, path: str) -> Iterator[Document]:
        """Yield the next `size` bytes of a file as two documents, since the end validates."""
        train_size = int(size * (1 - self.val_fraction))
        if train_size:
            yield TRAINS, pieces(file, train_size, path)
        if train_size < size:
            yield VALIDATES, pieces(file, size - train_size, path)

    def _documents_of_records(self, records: Iterator[object], path: str) -> Iterator[Document]:
        """Yield the documents of an input's records (see text_of), but for bad ones and blank
        lines."""
        for number, record in enumerate(records, 1):
            text = text_of(record, self.field)
            if isinstance(text, Fault):
                self.skip(text.kind, f"{path}:{number}", text.detail, is_file=False)
            elif text is not None:
                yield hash_of([text]), [text]

    def divide(
        self, documents: Iterator[Document], scratch: Path
    ) -> Iterator[tuple[str, Iterable[bytes]]]:
        """Yield the split of each document, and its text.

        The number draws the split. So equal texts never fall into both splits, and a document that
        is for validation at one --val_fraction is so at any higher one. But if there are few
        documents, and a split gets less than half of its share of their bytes, the documents with
        the lowest numbers validate until val_fraction of the bytes is held out. Of a document that
        has half of the bytes, or more than five times val_fraction of them, only the end validates.

        The first MAX_BUFFERED documents wait in a temporary file in the directory `scratch`.
        """
        limit = self.val_fraction * 2**64  # of the numbers that validate
        longest = math.inf  # bytes of a document that is not cut
        file_name = str(scratch)

        def splits_of(parts: Iterable[Document]) -> Iterator[tuple[str, Iterable[bytes]]]:
            for number, text in parts:
                yield "val" if number < limit else "train", text

        waiting: list[tuple[int, int]] = []  # number and size of each document
        sizes: Counter[int] = Counter()  # of all equal documents, by number
        with TemporaryFile(dir=scratch) as file:
            for number, text in islice(documents, MAX_BUFFERED):
                is_part = number in (TRAINS, VALIDATES)  # of a text, which may be large
                if is_part and not waiting:
                    yield from splits_of([(number, text)])
                    continue
                start = file.tell()
                file.writelines(text)
                size = file.tell() - start
                waiting.append((number, size))
                if not is_part:
                    sizes[number] += size
            following = list(islice(documents, 1))
            total = sizes.total()
            share = self.val_fraction * total
            val = sum(size for number, size in sizes.items() if number < limit)
            is_enough = share / 2 <= val <= (total + share) / 2
            if not following and not is_enough:
                longest = min(total / 2, 5 * share)
                for number, size in sorted(sizes.items()):
                    limit = number + 1
                    share -= size if size < longest else self.val_fraction * size
                    if share <= 0:
                        break
            file.seek(0)
            for number, size in waiting:
                if number < limit and sizes[number] >= longest:
                    yield from splits_of(self._cut(file, size, file_name))
                else:
                    yield from splits_of([(number, pieces(file, size, file_name))])
            yield from splits_of(chain(following, documents))

    def skip(self, kind: str, place: str, detail: str = "", is_file: bool = True):
        """Count a bad file or record. kind: what is wrong with it; place: where it is; detail: what
        is printed of it, if it is the first of its kind."""
        if self.strict:
            raise DataError(f"{place}: {kind}{detail}")
        self.skipped[kind] += 1
        places = self.places.setdefault(kind, [])
        if is_file or not places:
            places.append(place + detail)


def hash_of(text: Iterable[bytes]) -> int:
    """Return the number of a document, a hash of its text."""
    digest = hashlib.blake2b(digest_size=8, person=b"validation")
    for piece in text:
        digest.update(piece)
    return int.from_bytes(digest.digest(), "little")


def guess_kind(head: bytes) -> str:
    """Guess the kind of standard input by its first bytes, and say which one it is."""
    kind = "text"
    if re.match(rb'\s*\{\s*"', head):
        kind = "JSON lines"
    elif re.match(rb'\s*\[\s*\{\s*"', head):
        kind = "JSON"
    print_status(f"prepare: -: read as {kind}, by its first bytes")
    return kind


# --------------------------------------------------------------------------------------------------
# Documents become shards


class ShardWriter:
    """Write the shards of a split into a folder, each of `shard_ids` ids but the last."""

    name: str  # of the unfinished shard
    file: IO[bytes]

    def __init__(self, folder: Path, split: str, shard_ids: int):
        self.folder = folder
        self.split = split
        self.shard_ids = shard_ids
        self.entries: list[ShardEntry] = []  # finished shards
        self.n_ids = 0  # in the unfinished shard, like the digest
        self.new_documents = 0  # that began after the last finished shard

    def write(self, text: Iterable[bytes]):
        """Write a document, given the pieces of its text."""
        self._append(np.array([BOS_ID], "<u2"))
        self.new_documents += 1
        for piece in text:
            self._append(np.frombuffer(piece, np.uint8).astype("<u2"))
        self._append(np.array([EOS_ID], "<u2"))

    def _append(self, ids: np.ndarray):
        """Append ids to the unfinished shard, and to further ones where it is full."""
        while len(ids):
            if self.n_ids == 0:
                self.name = f"{self.split}-{len(self.entries):05d}.bin"
                self.file = open(self.folder / self.name, "xb", MIB)
                self.digest = hashlib.sha256()
            room = self.shard_ids - self.n_ids
            part = ids[:room]
            ids = ids[room:]
            self.file.write(part.data)
            self.digest.update(part.data)
            self.n_ids += len(part)
            if self.n_ids == self.shard_ids:
                self.finish_shard()

    def finish_shard(self):
        """Complete the unfinished shard, if there is one, and flush it to disk."""
        if self.n_ids == 0:
            return
        self.file.close()
        sync(self.folder / self.name)
        digest = self.digest.hexdigest()
        entry = ShardEntry(self.name, self.split, self.n_ids, self.new_documents, digest)
        self.entries.append(entry)
        self.n_ids = 0
        self.new_documents = 0

    def totals(self) -> dict[str, int]:
        """Count ids and documents, by key of metadata.json."""
        documents = sum(entry.documents for entry in self.entries)
        return dict(ids=sum(entry.ids for entry in self.entries), documents=documents)


def prepare(
    arguments: Sequence[str],
    out: Path,
    documents: Documents,
    shard_mb: float = SHARD_MB,
    reuse: bool = False,
):
    """Turn inputs into shards of `shard_mb` MB and a metadata.json, in one pass. With `reuse`, for
    train.py --text, do nothing if `out` has the shards of the same, unchanged inputs.

    Shards leave the folder UNFINISHED last, after metadata.json is written. So nothing that a
    killed process left is taken for data, and the next `prepare` deletes it. After an error nothing
    is left.
    """
    path = out / METADATA
    metadata = read_metadata(path) if path.exists() else {}
    before = metadata.get("sources", {})
    if reuse:
        documents.endings = tuple(metadata.get("ext", ()))
    inputs: list[Input] = []
    sources = {}  # size and newest change of the files of each argument; 0 for the hub
    for argument in arguments:
        found = documents.find(argument)
        inputs += found
        stats = [os.stat(source.path) for source in found if os.path.exists(source.path)]
        sources[os.path.relpath(argument)] = dict(
            size=sum(stat.st_size for stat in stats),
            modified=max((stat.st_mtime_ns for stat in stats), default=0),
        )
    if reuse and before == sources:
        return
    shard_ids = max(1, int(shard_mb * 1e6 / ID_BYTES))
    out.mkdir(parents=True, exist_ok=True)
    folder = out / UNFINISHED
    with locked(out):
        shutil.rmtree(folder, ignore_errors=True)
        if path.exists() or any(out.rglob("*.bin")):
            new = out
            while new.exists():
                new = Path(f"{new}-new")
            origin = " ".join(before) or "other data"
            raise DataError(
                f"{out}: has shards already, of {origin} as it was then. To go on with them: "
                f"{run_on(out)}. New ones: python data.py prepare "
                f"{' '.join(map(quoted, arguments))} --out {quoted(new)}, then {run_on(new)}"
            )
        try:
            with naming(out):
                folder.mkdir()
                writers = {split: ShardWriter(folder, split, shard_ids) for split in SPLITS}
                read = documents.read_all(inputs, folder)
                for split, text in documents.divide(read, folder):
                    writers[split].write(text)
                entries = []
                for writer in writers.values():
                    writer.finish_shard()
                    entries += writer.entries
                totals = {split: writer.totals() for split, writer in writers.items()}
                report(arguments, documents, totals)
                metadata = dict(
                    vocab_size=VOCAB_SIZE,
                    dtype="uint16",
                    totals=totals,
                    inputs=arguments,
                    sources=sources,
                    field=documents.field,
                    ext=documents.endings,
                    binary=documents.binary,
                    val_fraction=documents.val_fraction,
                    split_by="blake2b of the text",
                    skipped=documents.skipped,
                    skipped_at=documents.places,
                    shards=[entry._asdict() for entry in entries],
                )
                with atomic_write(path) as file:
                    json.dump(metadata, file, indent=1)
                for entry in entries:
                    os.replace(folder / entry.name, out / entry.name)
                sync(out)
        except BaseException:
            for left in (path, *out.glob("*.bin")):
                left.unlink(missing_ok=True)
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    counts = "; ".join(
        f"{split} {total['ids']:,} ids, documents: {total['documents']:,}"
        for split, total in totals.items()
    )
    print_line(f"{out}: {counts}")


def run_on(data: Path) -> str:
    """Return the flags of train.py that replace --text, for shards in a directory."""
    run = f"checkpoints/{data.name}"
    return f"--data_dir {quoted(data)} --ckpt_dir {quoted(run)} instead of --text"


def report(arguments: Sequence[str], documents: Documents, totals: dict[str, dict[str, int]]):
    """Print what was skipped, and whether there is a validation split. Raise DataError without
    training data."""
    if documents.unread:
        most = documents.unread.most_common(5)
        shown = ", ".join(f"{number:,} {name}" for name, number in most)
        print_status(f"prepare: skipped by name: {shown}; --ext names all that are read")
    faults = []
    for kind, count in documents.skipped.items():
        places = documents.places[kind][:20]
        first = "first: " if len(places) < count else ""
        faults.append(f"{count:,} {kind} ({first}{', '.join(places)})")
    if not totals["train"]["ids"]:
        reason = ", ".join(faults) or "no document, or validation took all: lower --val_fraction"
        raise DataError(f"{', '.join(arguments)}: nothing to train on: {reason}")
    for fault in faults:
        print_status(f"prepare: skipped {fault}")
    if not totals["val"]["ids"]:
        print_status(
            "prepare: no validation split: training will hold out the last 1% of its data; for a "
            "real one raise --val_fraction or add documents"
        )

"""Turn inputs into documents, and documents into shards: the work of `data.py prepare`.

    prepare(["books.txt", "web/"], Path("data/mine"), Documents())

`Documents` finds the files that an argument names, reads their documents one by one, and assigns
each document to a split. `ShardWriter` writes the shards of a split. inputs.py reads the formats.
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
    find_fault,
    hub_rows,
    json_records,
    open_input,
    read_pieces,
    record_text,
    table_rows,
    uncompressed_name,
    with_filename,
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
UNFINISHED = ".prepare"  # folder in --out for temporary copies, and for shards until all are done
MAX_BUFFERED = 10_000  # maximum number of documents whose splits can be corrected
SHARD_MB = 256  # size of a shard

# Instead of a document's 64-bit hash, for the two parts of a text
ALWAYS_VAL = -1
ALWAYS_TRAIN = 2**64

# Source code and markup that people write; no configuration, data or drawings (.yaml, .toml, .xml,
# .svg) and no notebooks.
CODE_EXTENSIONS = """
    .adoc .asm .bash .bat .c .cc .clj .cmake .cpp .cs .css .cu .cuh .cxx .dart .el .ex .exs .f .f90
    .fs .go .h .hh .hpp .hs .htm .html .java .jl .js .jsx .kt .less .lisp .lua .m .markdown .md .mjs
    .ml .mli .mm .nim .org .pas .php .pl .pm .proto .ps1 .py .pyi .pyx .r .rb .rs .rst .s .scala
    .scm .scss .sh .sql .sv .svelte .swift .tcl .tex .ts .tsx .v .vhd .vim .vue .zig
""".split()

# The format of a file by its extension. document: the file is one document; text: its end validates
FORMATS = dict.fromkeys(CODE_EXTENSIONS, "document") | {
    ".txt": "text",
    ".jsonl": "JSON lines",
    ".ndjson": "JSON lines",
    ".json": "JSON",
    ".parquet": "table",
    ".csv": "table",
    ".arrow": "table",
}

# JSON that Spider writes. Directories are read without it, so that a run in a directory does not
# change the text of the directory.
OWN_JSON_FILES = (METADATA, "metrics.jsonl", "trace.json")

# --------------------------------------------------------------------------------------------------
# Inputs become documents


class Input(NamedTuple):
    """A file, standard input (-), PYDOC or a data set of the hub, and its format."""

    path: str
    format: str  # a value of FORMATS, or stdin, hub

    def size(self) -> int | None:
        """Return how many bytes will be read, or None if this is not known in advance."""
        is_compressed = self.path.lower().endswith(COMPRESSIONS)
        if self.format == "table" or is_compressed or not os.path.isfile(self.path):
            return None
        return os.path.getsize(self.path)


# The hash of a document, and its text in pieces, to be read once, before the next document
Document = tuple[int, Iterable[bytes]]


@dataclass
class Documents:
    """Read the documents of inputs, and assign each to a split.

    Bad records and files are skipped and counted by reason; with `strict`, the first one raises
    DataError.
    """

    field: str = "text"  # name of the JSON field or the column that has the text
    val_fraction: float = 0.1
    extensions: tuple[str, ...] = ()  # if any: read only files with these, each as one document
    hub_config: str | None = None  # configuration of a data set of the hub
    hub_split: str = "train"  # split of a data set of the hub
    strict: bool = False
    binary: bool = False  # read any bytes as text
    skipped: Counter[str] = dataclasses.field(default_factory=Counter)  # by reason
    # files in directories that are not read because of their names, by extension
    unread: Counter[str] = dataclasses.field(default_factory=Counter)
    # by reason: all bad files, or the first bad record
    skipped_at: dict[str, list[str]] = dataclasses.field(default_factory=dict)

    def find(self, argument: str) -> list[Input]:
        """List the inputs that a command line argument names."""
        if argument == "-":
            return [Input("-", "stdin")]
        if os.path.exists(argument):
            return self._find_files(argument)
        if argument == "pydoc":
            return [Input(PYDOC, "text")]
        refuse_url(argument)
        # Do not look up a dead link or a mistyped file name on the hub.
        is_file = os.path.lexists(argument) or self._format_of(argument) is not None
        if self.extensions or is_file or not HUB_NAME.fullmatch(argument):
            raise DataError(f"{argument}: no such file or directory")
        return [Input(argument, "hub")]

    def _format_of(self, path: str | Path) -> str | None:
        """Return a file's format by its name, or None if such files are not read."""
        name = uncompressed_name(path)
        if self.extensions:
            return "document" if name.endswith(self.extensions) else None
        return FORMATS.get(Path(name).suffix)

    def _find_files(self, argument: str) -> list[Input]:
        """List a named file, or the inputs below a directory in sorted order, and count the other
        files below the directory. Read a named file with any other extension as text."""

        def skip_folder(error: OSError):
            if error.filename == argument:
                raise error
            self.skip(f"unreadable: {error.strerror}", error.filename)

        paths = [Path(argument)]
        is_named = not os.path.isdir(argument)
        if not is_named:
            below = map(Path, files_below(argument, skip_folder))
            paths = sorted(path for path in below if path.name not in OWN_JSON_FILES)
        default = "text" if is_named and not self.extensions else None
        inputs = []
        for path in paths:
            file_format = self._format_of(path) or default
            if file_format is None:
                self.unread[path.suffix or "without extension"] += 1
            elif is_named or os.path.isfile(path) and os.access(path, os.R_OK):
                inputs.append(Input(str(path), file_format))
            else:
                self.skip("unreadable, a dead link or not a regular file", str(path))
        if not inputs and not self.skipped:
            formats = " ".join(self.extensions) or "text, code, JSON or table"
            raise DataError(
                f"{argument}: no {formats} file; for other texts use `data.py prepare --ext .EXT`, "
                f"for shards `train.py --data_dir`"
            )
        return inputs

    def read_all(self, inputs: Sequence[Input], scratch: Path) -> Iterator[Document]:
        """Yield the documents of inputs, with a progress bar."""
        sizes = [source.size() for source in inputs]
        total = 0 if None in sizes else sum(filter(None, sizes))
        progress = ProgressBar("prepare", total)

        def counted(text: Iterable[bytes]) -> Iterator[bytes]:
            for piece in text:
                yield piece
                progress.add(len(piece))

        end = 0  # bytes of the inputs up to and including this one
        for source, size in zip(inputs, sizes, strict=True):
            for text_hash, text in self.read(source, scratch):
                yield text_hash, counted(text)
            end += size or 0
            # Only texts have been counted: add the input's other bytes, such as JSON syntax.
            progress.add(max(0, end - progress.done))

    def read(self, source: Input, scratch: Path) -> Iterator[Document]:
        """Yield the documents of an input. scratch: directory for temporary copies, see
        open_input."""
        path = source.path
        if source.format == "hub":
            rows = hub_rows(path, self.field, self.hub_config, self.hub_split)
            yield from self._documents_of_records(rows, path)
            return
        with open_input(path, scratch) as file, with_filename(path):
            yield from self._documents_of_file(file, source)

    def _documents_of_file(self, file: IO[bytes], source: Input) -> Iterator[Document]:
        path = source.path
        head = file.read(8192)  # as much as git reads to tell text from binary
        start = len(BOM_UTF8) if head.startswith(BOM_UTF8) else 0
        size = file.seek(0, os.SEEK_END) - start
        file.seek(start)
        is_stdin = source.format == "stdin"
        file_format = guess_format(head[start:]) if is_stdin else source.format
        fault = find_fault(head, file_format in ("text", "document"), self.binary)
        if size == 0:
            self.skip("empty", path)
        elif fault is not None:
            self.skip(fault, path)
        elif file_format == "table":
            yield from self._documents_of_records(table_rows(path, file, self.field), path)
        elif file_format == "JSON lines":
            yield from self._documents_of_records(bounded_lines(file), path)
        elif file_format == "JSON":
            yield from self._documents_of_records(json_records(path, file), path)
        elif file_format == "document":
            text_hash = hash_text(read_pieces(file, size, path))
            file.seek(start)
            yield text_hash, read_pieces(file, size, path)
        else:
            yield from self._cut(file, size, path)

    def _cut(self, file: IO[bytes], size: int, path: str) -> Iterator[Document]:
        """Yield the next `size` bytes of a file as two documents, the second for validation."""
        train_size = int(size * (1 - self.val_fraction))
        if train_size:
            yield ALWAYS_TRAIN, read_pieces(file, train_size, path)
        if train_size < size:
            yield ALWAYS_VAL, read_pieces(file, size - train_size, path)

    def _documents_of_records(self, records: Iterator[object], path: str) -> Iterator[Document]:
        """Yield the documents of an input's records (see record_text). Skip bad records and blank
        lines."""
        for number, record in enumerate(records, 1):
            text = record_text(record, self.field)
            if isinstance(text, Fault):
                self.skip(text.reason, f"{path}:{number}", text.detail, is_file=False)
            elif text is not None:
                yield hash_text([text]), [text]

    def assign_splits(
        self, documents: Iterator[Document], scratch: Path
    ) -> Iterator[tuple[str, Iterable[bytes]]]:
        """Yield the split of each document, and its text.

        A document validates if its hash is below val_fraction * 2**64. So equal texts never fall
        into both splits, and a document that validates at one --val_fraction also validates at any
        higher one.

        The exception: if there are at most MAX_BUFFERED documents, and a split gets less than half
        of the bytes that it should have, the documents with the lowest hashes validate until
        val_fraction of the bytes is held out. If such a document has half of all bytes, or five
        times val_fraction of them, only its end validates.

        The first MAX_BUFFERED documents wait in a temporary file in the directory `scratch`.
        """
        limit = self.val_fraction * 2**64  # hashes below it validate
        too_large = math.inf  # bytes; of a document this large, only the end validates
        file_name = str(scratch)

        def with_splits(parts: Iterable[Document]) -> Iterator[tuple[str, Iterable[bytes]]]:
            for text_hash, text in parts:
                yield "val" if text_hash < limit else "train", text

        waiting: list[tuple[int, int]] = []  # hash and size of each document
        sizes: Counter[int] = Counter()  # hash -> bytes of all documents with this hash
        with TemporaryFile(dir=scratch) as file:
            for text_hash, text in islice(documents, MAX_BUFFERED):
                is_part = text_hash in (ALWAYS_TRAIN, ALWAYS_VAL)  # of a text, which may be large
                if is_part and not waiting:
                    yield from with_splits([(text_hash, text)])
                    continue
                start = file.tell()
                file.writelines(text)
                size = file.tell() - start
                waiting.append((text_hash, size))
                if not is_part:
                    sizes[text_hash] += size
            following = list(islice(documents, 1))
            total = sizes.total()
            wanted = self.val_fraction * total  # bytes for validation
            val = sum(size for text_hash, size in sizes.items() if text_hash < limit)
            is_enough = wanted / 2 <= val <= (total + wanted) / 2
            if not following and not is_enough:
                too_large = min(total / 2, 5 * wanted)
                for text_hash, size in sorted(sizes.items()):
                    limit = text_hash + 1
                    wanted -= size if size < too_large else self.val_fraction * size
                    if wanted <= 0:
                        break
            file.seek(0)
            for text_hash, size in waiting:
                if text_hash < limit and sizes[text_hash] >= too_large:
                    yield from with_splits(self._cut(file, size, file_name))
                else:
                    yield from with_splits([(text_hash, read_pieces(file, size, file_name))])
            yield from with_splits(chain(following, documents))

    def skip(self, reason: str, location: str, detail: str = "", is_file: bool = True):
        """Count a bad file or record. detail: about this file, or about the first record that is
        skipped for this reason."""
        if self.strict:
            raise DataError(f"{location}: {reason}{detail}")
        self.skipped[reason] += 1
        locations = self.skipped_at.setdefault(reason, [])
        if is_file or not locations:
            locations.append(location + detail)


def hash_text(text: Iterable[bytes]) -> int:
    """Return the 64-bit hash of a document, given its text in pieces."""
    digest = hashlib.blake2b(digest_size=8, person=b"validation")
    for piece in text:
        digest.update(piece)
    return int.from_bytes(digest.digest(), "little")


def guess_format(head: bytes) -> str:
    """Guess the format of standard input from its first bytes, and print it."""
    guess = "text"
    if re.match(rb'\s*\{\s*"', head):
        guess = "JSON lines"
    elif re.match(rb'\s*\[\s*\{\s*"', head):
        guess = "JSON"
    print_status(f"prepare: -: read as {guess}, judging by its first bytes")
    return guess


# --------------------------------------------------------------------------------------------------
# Documents become shards


class ShardWriter:
    """Write the shards of a split into a folder. Each has `shard_ids` ids, except the last."""

    name: str  # of the unfinished shard
    file: IO[bytes]

    def __init__(self, folder: Path, split: str, shard_ids: int):
        self.folder = folder
        self.split = split
        self.shard_ids = shard_ids
        self.entries: list[ShardEntry] = []  # finished shards
        self.n_ids = 0  # ids in the unfinished shard
        self.new_documents = 0  # documents that began after the last finished shard

    def write(self, text: Iterable[bytes]):
        """Write a document, given its text in pieces."""
        self._append(np.array([BOS_ID], "<u2"))
        self.new_documents += 1
        for piece in text:
            self._append(np.frombuffer(piece, np.uint8).astype("<u2"))
        self._append(np.array([EOS_ID], "<u2"))

    def _append(self, ids: np.ndarray):
        """Append ids to the unfinished shard. Whenever it is full, start the next one."""
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
        """Count ids and documents. The keys are those of metadata.json."""
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

    Shards leave the folder UNFINISHED last, after metadata.json is written. What a killed process
    leaves is therefore never taken for data, and the next `prepare` deletes it. An error leaves
    nothing.
    """
    path = out / METADATA
    metadata = read_metadata(path) if path.exists() else {}
    before = metadata.get("sources", {})
    if reuse:
        documents.extensions = tuple(metadata.get("ext", ()))
    found = [documents.find(argument) for argument in arguments]
    names = map(os.path.relpath, arguments)
    sources = dict(zip(names, map(file_stats, found), strict=True))
    if reuse and before == sources:
        return
    out.mkdir(parents=True, exist_ok=True)
    folder = out / UNFINISHED
    with locked(out):
        shutil.rmtree(folder, ignore_errors=True)
        if path.exists() or any(out.rglob("*.bin")):
            refuse_overwriting(out, before, arguments)
        try:
            with with_filename(out):
                folder.mkdir()
                writers = write_shards([*chain.from_iterable(found)], documents, folder, shard_mb)
                entries = [entry for writer in writers for entry in writer.entries]
                totals = {writer.split: writer.totals() for writer in writers}
                report_skipped(arguments, documents, totals)
                metadata = dict(
                    vocab_size=VOCAB_SIZE,
                    dtype="uint16",
                    totals=totals,
                    inputs=arguments,
                    sources=sources,
                    field=documents.field,
                    ext=documents.extensions,
                    binary=documents.binary,
                    val_fraction=documents.val_fraction,
                    split_by="blake2b of the text",
                    skipped=documents.skipped,
                    skipped_at=documents.skipped_at,
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


def file_stats(inputs: Sequence[Input]) -> dict[str, int]:
    """Return the size and newest modification time of the files of inputs; 0 for the hub."""
    stats = [os.stat(source.path) for source in inputs if os.path.exists(source.path)]
    return dict(
        size=sum(stat.st_size for stat in stats),
        modified=max((stat.st_mtime_ns for stat in stats), default=0),
    )


def write_shards(
    inputs: Sequence[Input], documents: Documents, folder: Path, shard_mb: float
) -> list[ShardWriter]:
    """Write the documents of inputs as shards into a folder; return the writer of each split."""
    shard_ids = max(1, int(shard_mb * 1e6 / ID_BYTES))
    writers = {split: ShardWriter(folder, split, shard_ids) for split in SPLITS}
    for split, text in documents.assign_splits(documents.read_all(inputs, folder), folder):
        writers[split].write(text)
    for writer in writers.values():
        writer.finish_shard()
    return [*writers.values()]


def refuse_overwriting(out: Path, before: Iterable[str], arguments: Sequence[str]):
    """Raise DataError because a directory already has shards, made from `before`. The message says
    how to use these shards, and how to make new ones."""
    new = out
    while new.exists():
        new = Path(f"{new}-new")
    names = " ".join(before) or "other data"
    raise DataError(
        f"{out}: already has shards of {names} as it was then. To keep using them: "
        f"{training_flags(out)}. To make new ones: python data.py prepare "
        f"{' '.join(map(quoted, arguments))} --out {quoted(new)}, then {training_flags(new)}"
    )


def training_flags(data: Path) -> str:
    """Return the flags of train.py that use the shards in a directory instead of --text."""
    run = f"checkpoints/{data.name}"
    return f"--data_dir {quoted(data)} --ckpt_dir {quoted(run)} instead of --text"


def report_skipped(
    arguments: Sequence[str], documents: Documents, totals: dict[str, dict[str, int]]
):
    """Print what was skipped, and if there is no validation split. Raise DataError if there is no
    training data."""
    if documents.unread:
        shown = ", ".join(f"{number:,} {name}" for name, number in documents.unread.most_common(5))
        print_status(f"prepare: skipped by extension: {shown}; --ext sets which to read")
    faults = []
    for reason, count in documents.skipped.items():
        locations = documents.skipped_at[reason][:20]
        first = "first: " if len(locations) < count else ""
        faults.append(f"{count:,} {reason} ({first}{', '.join(locations)})")
    if not totals["train"]["ids"]:
        cause = ", ".join(faults) or "no document, or all are for validation: lower --val_fraction"
        raise DataError(f"{', '.join(arguments)}: nothing to train on: {cause}")
    for fault in faults:
        print_status(f"prepare: skipped {fault}")
    if not totals["val"]["ids"]:
        print_status(
            "prepare: no validation split: training will hold out the last 1% of its data; to get "
            "a validation split, raise --val_fraction or add documents"
        )

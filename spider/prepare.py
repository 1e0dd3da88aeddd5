"""The work of `data.py prepare`: inputs become documents, and documents become shards.

    documents = Documents("text", val_fraction=0.1)
    prepare(["books.txt", "web/"], Path("data"), documents, shard_ids=128_000_000)

`Documents` finds the files that an argument names, reads their documents one by one, and draws the
split of each. `ShardWriter` writes the documents of a split. How a format is read is in inputs.py.
"""

import dataclasses
import hashlib
import json
import os
import re
import shutil
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import IO, NamedTuple, Self

import numpy as np

from spider.common import (
    DataError,
    ProgressBar,
    bounded_lines,
    durable,
    locked,
    note,
    refuse_address,
    say,
    sync,
)
from spider.inputs import (
    COMPRESSIONS,
    MIB,
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
from spider.shard_files import METADATA, SPLITS, ShardEntry, files_below
from spider.vocabulary import BOS_ID, EOS_ID, VOCAB_SIZE

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")  # owner/name of a data set
UNFINISHED = ".prepare"  # folder in --out for shards until all are complete, and for copies
FEW = 10_000  # different documents, at most, that are divided anew if a split gets too little

# How a file is read, by its extension
KINDS = {
    ".txt": "text",
    ".jsonl": "JSON lines",
    ".ndjson": "JSON lines",
    ".json": "JSON",
    ".parquet": "table",
    ".csv": "table",
    ".arrow": "table",
}

# --------------------------------------------------------------------------------------------------
# Inputs become documents


class Input(NamedTuple):
    """A file, standard input (-) or a data set of the hub, and how it is read."""

    path: str
    kind: str  # a value of KINDS, or document (of --ext), stdin, hub

    def size(self) -> int | None:
        """Return how many bytes will be read, None if that is not known before."""
        is_compressed = self.path.lower().endswith(COMPRESSIONS)
        if self.kind == "table" or is_compressed or not os.path.isfile(self.path):
            return None
        return os.path.getsize(self.path)


# its split, and the pieces of its text; read once, before the next document
Document = tuple[str, Iterable[bytes]]


@dataclass
class Documents:
    """Read the documents of inputs, and draw the split of each.

    Bad records and files are skipped and counted by kind; with `strict` the first one raises
    DataError.
    """

    field: str  # the name of the JSON field or the column that has the text
    val_fraction: float
    endings: tuple[str, ...] = ()  # if any: read files with these alone, a document each
    hub_config: str | None = None  # configuration of a data set of the hub
    hub_split: str = "train"  # split of a data set of the hub
    strict: bool = False
    binary: bool = False  # read any bytes as text
    sizes: dict[int, int] = dataclasses.field(default_factory=dict)  # of documents, by hash
    splits: dict[int, str] = dataclasses.field(default_factory=dict)  # other than drawn, by hash
    copies: dict[str, IO[bytes]] = dataclasses.field(default_factory=dict)  # of streams, by path
    skipped: Counter[str] = dataclasses.field(default_factory=Counter)  # by kind of fault
    # by kind of fault: all files, or the first record
    places: dict[str, list[str]] = dataclasses.field(default_factory=dict)

    def find(self, argument: str) -> list[Input]:
        """List the inputs that an argument of the command line names."""
        if argument == "-":
            return [Input("-", "stdin")]
        if os.path.exists(argument):
            return self._find_files(argument)
        refuse_address(argument)
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
        """List a file, or the inputs below a directory in sorted order; say how many files are left
        out."""

        def skip_folder(error: OSError):
            if error.filename == argument:
                raise error
            self.skip(f"unreadable: {error.strerror}", error.filename)

        paths = [Path(argument)]
        is_named = not os.path.isdir(argument)
        if not is_named:
            paths = sorted(map(Path, files_below(argument, skip_folder)))
        inputs = []
        others: Counter[str] = Counter()
        for path in paths:
            kind = self._kind_of(path)
            if kind is None:
                others[path.suffix or "without extension"] += 1
            elif is_named or os.path.isfile(path) and os.access(path, os.R_OK):
                inputs.append(Input(str(path), kind))
            else:
                self.skip("unreadable, a dead link or no regular file", str(path))
        if others.total() == len(paths):
            extensions = " ".join(self.endings or KINDS)
            raise DataError(f"{argument}: no {extensions} file; --ext names other text files")
        if others:
            shown = ", ".join(f"{count:,} {name}" for name, count in others.most_common(5))
            note(f"prepare: {argument}: skipped by name: {shown}; --ext names all that are read")
        return inputs

    def read(self, source: Input, scratch: Path) -> Iterator[Document]:
        """Yield the documents of an input. `scratch`: directory for temporary copies, see
        open_input."""
        path = source.path
        if source.kind == "hub":
            rows = hub_rows(path, self.field, self.hub_config, self.hub_split)
            yield from self._documents_of_records(rows, path)
            return
        file = self.copies.get(path) or open_input(path, scratch)
        is_kept = not os.path.isfile(path)  # standard input or a pipe
        if is_kept:
            self.copies[path] = file
            file.seek(0)
        with nullcontext(file) if is_kept else file, naming(path):
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
        else:
            split = "both"
            if kind == "document":
                split = self._draw_split(pieces(file, size, path))
                file.seek(start)
            yield from self._documents_of_text(split, file, size, path)

    def _documents_of_text(
        self, split: str, file: IO[bytes], size: int, path: str
    ) -> Iterator[Document]:
        """Yield the next `size` bytes of a file as a document, or as two if its end validates."""
        train_size = int(size * (1 - self.val_fraction))
        if split != "both":
            train_size = size if split == "train" else 0
        if train_size:
            yield "train", pieces(file, train_size, path)
        if train_size < size:
            yield "val", pieces(file, size - train_size, path)

    def _documents_of_records(self, records: Iterator[object], path: str) -> Iterator[Document]:
        """Yield the documents of an input's records (see text_of), but for bad ones and blank
        lines."""
        for number, record in enumerate(records, 1):
            text = text_of(record, self.field)
            if isinstance(text, Fault):
                self.skip(text.kind, f"{path}:{number}", text.detail, is_file=False)
            elif text is not None:
                split = self._draw_split([text])
                if split == "both":
                    yield from self._documents_of_text(split, BytesIO(text), len(text), path)
                else:
                    yield split, [text]

    def _draw_split(self, text: Iterable[bytes]) -> str:
        """Draw the split of a document by a hash of its text: train, val, or both.

        Equal texts never fall into both splits. A document that is for validation at one
        --val_fraction is so at any higher one.
        """
        digest = hashlib.blake2b(digest_size=8, person=b"validation")
        size = 0
        for piece in text:
            digest.update(piece)
            size += len(piece)
        number = int.from_bytes(digest.digest(), "little")
        if len(self.sizes) <= FEW:
            self.sizes[number] = self.sizes.get(number, 0) + size
        drawn = "val" if number < self.val_fraction * 2**64 else "train"
        return self.splits.get(number, drawn)

    def divided_anew(self, train: int, val: int) -> Self | None:
        """Return how to read few documents again, given the ids of both splits; None if the draw
        stands.

        It stands if each split has at least half of its share of the ids. If not, the documents
        with the lowest hashes validate until val_fraction of the bytes of documents are held out.
        Of a document that has half of these bytes, only the end validates.
        """
        share = self.val_fraction * (train + val)
        is_enough = 2 * val >= share and 2 * train >= train + val - share
        if is_enough or not 0 < len(self.sizes) <= FEW:
            return None
        n_bytes = sum(self.sizes.values())
        held_out = 0
        splits = {}
        for number, size in sorted(self.sizes.items()):
            splits[number] = "train"
            if held_out < self.val_fraction * n_bytes:
                splits[number] = "both" if 2 * size >= n_bytes else "val"
                held_out += size
        return dataclasses.replace(self, splits=splits, skipped=Counter(), places={})

    def skip(self, kind: str, place: str, detail: str = "", is_file: bool = True):
        """Count a bad file or record. kind: what is wrong with it; place: where it is; detail: what
        is printed of it, if it is the first of its kind."""
        if self.strict:
            raise DataError(f"{place}: {kind}{detail}")
        self.skipped[kind] += 1
        places = self.places.setdefault(kind, [])
        if is_file or not places:
            places.append(place + detail)


def guess_kind(head: bytes) -> str:
    """Guess the kind of standard input by its first bytes, and say which one it is."""
    kind = "text"
    if re.match(rb'\s*\{\s*"', head):
        kind = "JSON lines"
    elif re.match(rb'\s*\[\s*\{\s*"', head):
        kind = "JSON"
    note(f"prepare: -: read as {kind}, by its first bytes")
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


def prepare(arguments: Sequence[str], out: Path, documents: Documents, shard_ids: int):
    """Turn inputs into shards of `shard_ids` ids and a metadata.json, in one pass, or in two if
    there are few documents (see divided_anew).

    Shards leave the folder UNFINISHED last, after metadata.json is written. So nothing that a
    killed process left is taken for data, and the next `prepare` deletes it. After an error nothing
    is left.
    """
    inputs: list[Input] = []
    for argument in arguments:
        inputs += documents.find(argument)
    out.mkdir(parents=True, exist_ok=True)
    folder = out / UNFINISHED
    with locked(out):
        shutil.rmtree(folder, ignore_errors=True)
        if (out / METADATA).exists() or any(out.rglob("*.bin")):
            raise DataError(f"{out}: has shards already: use another --out, or delete it")
        try:
            with naming(out):
                folder.mkdir()
                writers = write_shards(inputs, folder, documents, shard_ids)
                again = documents.divided_anew(*[writer.totals()["ids"] for writer in writers])
                if again is not None:
                    note("prepare: too little fell into a split: reading again, to divide by size")
                    for shard in folder.glob("*.bin"):
                        shard.unlink()
                    writers = write_shards(inputs, folder, again, shard_ids)
                totals = {writer.split: writer.totals() for writer in writers}
                report(arguments, documents, totals)
                entries = [entry for writer in writers for entry in writer.entries]
                metadata = dict(
                    vocab_size=VOCAB_SIZE,
                    dtype="uint16",
                    totals=totals,
                    inputs=arguments,
                    field=documents.field,
                    ext=documents.endings,
                    binary=documents.binary,
                    val_fraction=documents.val_fraction,
                    split_by="blake2b of the text",
                    skipped=documents.skipped,
                    skipped_at=documents.places,
                    shards=[entry._asdict() for entry in entries],
                )
                with durable(out / METADATA) as file:
                    json.dump(metadata, file, indent=1)
                for entry in entries:
                    os.replace(folder / entry.name, out / entry.name)
                sync(out)
        except BaseException:
            for left in (out / METADATA, *out.glob("*.bin")):
                left.unlink(missing_ok=True)
            raise
        finally:
            for copy in documents.copies.values():
                copy.close()
            shutil.rmtree(folder, ignore_errors=True)
    counts = "; ".join(
        f"{split} {total['ids']:,} ids, documents: {total['documents']:,}"
        for split, total in totals.items()
    )
    say(f"{out}: {counts}")


def write_shards(
    inputs: Sequence[Input], folder: Path, documents: Documents, shard_ids: int
) -> list[ShardWriter]:
    """Write the documents of all inputs; return a writer for each split."""
    writers = {split: ShardWriter(folder, split, shard_ids) for split in SPLITS}
    sizes = [source.size() for source in inputs]
    total = 0 if None in sizes else sum(size or 0 for size in sizes)
    progress = ProgressBar("prepare", total)

    def counted(text: Iterable[bytes]) -> Iterator[bytes]:
        for piece in text:
            yield piece
            progress.add(len(piece))

    end = 0  # bytes of the inputs up to this one
    for source, size in zip(inputs, sizes, strict=True):
        for split, text in documents.read(source, folder):
            writers[split].write(counted(text))
        end += size or 0
        # Only texts were counted: add the rest of JSON lines.
        progress.add(max(0, end - progress.done))
    for writer in writers.values():
        writer.finish_shard()
    return list(writers.values())


def report(arguments: Sequence[str], documents: Documents, totals: dict[str, dict[str, int]]):
    """Print what was skipped, and whether there is a validation split. Raise DataError without
    training data."""
    faults = []
    for kind, count in documents.skipped.items():
        places = documents.places[kind][:20]
        first = "first: " if len(places) < count else ""
        faults.append(f"{count:,} {kind} ({first}{', '.join(places)})")
    if not totals["train"]["ids"]:
        reason = ", ".join(faults) or "no document, or too little: lower --val_fraction"
        raise DataError(f"{', '.join(arguments)}: nothing to train on: {reason}")
    for fault in faults:
        note(f"prepare: skipped {fault}")
    if not totals["val"]["ids"]:
        note(
            "prepare: no validation split: training will hold out the last 1% of its data; for a "
            "real one raise --val_fraction or add documents"
        )

"""Describe and find the files in a directory of shards. `prepare` writes them, data.py reads them.

A shard is a headerless file of little-endian uint16 ids (see tokenizer.py). `metadata.json` next to
the shards has an entry for each shard. Shards of other programs need no metadata.json.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from spider.errors import DataError
from spider.vocabulary import VOCAB_SIZE

SPLITS = ("train", "val")
METADATA = "metadata.json"
ID_BYTES = 2  # bytes that an id takes in a shard
SKIPPED = (
    ".",
    "node_modules",
    "site-packages",
)  # do not enter folders whose names start with these


class ShardEntry(NamedTuple):
    """The entry of a shard in metadata.json. The fields are its keys, in this order."""

    name: str  # relative to metadata.json
    split: str  # one of SPLITS
    ids: int
    documents: int  # for people: written, but not checked when it is read
    sha256: str  # of the file, in hexadecimal digits


def raise_error(error: OSError):
    raise error


def files_below(
    directory: str, on_unreadable: Callable[[OSError], None] = raise_error
) -> list[str]:
    """List the files below a directory, sorted, without hidden files and installed libraries.

    Links are followed. If several paths lead to a file, only the first path is listed; each
    directory is searched once. `on_unreadable` gets the error of a directory that cannot be read;
    by default it raises this error.
    """
    searched = set()  # real paths of directories
    path_of: dict[str, str] = {}  # real path of a file -> the first path to it
    walk = os.walk(directory, onerror=on_unreadable, followlinks=True)
    for folder, subfolders, names in walk:
        real_folder = os.path.realpath(folder)
        if real_folder in searched:  # links may form a circle
            subfolders.clear()
            continue
        searched.add(real_folder)
        visible = [name for name in subfolders if not name.startswith(SKIPPED)]
        # os.walk enters the subfolders in the order of this list. The slash makes it the order of
        # the paths of their files.
        subfolders[:] = sorted(visible, key=lambda name: name + "/")
        for name in names:
            if name.startswith("."):
                continue
            path = os.path.join(folder, name)
            real_path = os.path.realpath(path)
            path_of[real_path] = min(path, path_of.get(real_path, path))
    return sorted(path_of.values())


# --------------------------------------------------------------------------------------------------
# metadata.json


def read_metadata(path: str | Path) -> dict[str, Any]:
    """Return the content of a metadata.json, with `shards` as a list of ShardEntry; no shards if
    another program wrote the file.

    Raise DataError if the file is not JSON, or if it is one of ours and has an invalid entry.
    """
    remedy = "delete it if it does not belong to these shards"
    if not os.path.isfile(path):  # opening a pipe would wait for its writer
        raise DataError(f"{path}: not a regular file; {remedy}")
    try:
        with open(path, "rb") as file:
            metadata = json.load(file)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON: {error}; {remedy}") from None
    if not isinstance(metadata, dict) or metadata.get("vocab_size") != VOCAB_SIZE:
        return dict(shards=[])
    values = metadata.get("shards")
    if not isinstance(values, list):
        raise DataError(f"{path}: has no list of shards; {remedy}")
    for number, value in enumerate(values):
        if not is_entry(value):
            raise DataError(
                f"{path}: shard {number} has no valid name, split, ids or sha256; {remedy}"
            )
    entries = [ShardEntry(*map(value.get, ShardEntry._fields)) for value in values]
    return metadata | dict(shards=entries)


def is_entry(value: object) -> bool:
    """Return whether a JSON value is a usable entry, since anyone may have written the file. The
    name needs no check: it is only compared with the names of files that were found."""
    return (
        isinstance(value, dict)
        and isinstance(value.get("name"), str)
        and value.get("split") in SPLITS
        and isinstance(value.get("ids"), int)
        and isinstance(value.get("sha256"), str)
    )

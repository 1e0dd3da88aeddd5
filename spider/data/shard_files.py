"""The files in a directory of shards. `prepare` writes them and data.py reads them.

A shard is a headerless file of little-endian uint16 ids (see tokenizer.py). `metadata.json` beside
the shards has an entry for each of them. Shards of other programs need no metadata.json.
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
SKIPPED = (".", "node_modules", "site-packages")  # folders with such names are not entered


class ShardEntry(NamedTuple):
    """What metadata.json records of a shard. The fields are the keys there, in this order."""

    name: str  # relative to metadata.json
    split: str  # one of SPLITS
    ids: int
    documents: int  # for people: it is written, but not checked when it is read
    sha256: str  # the file's, in hexadecimal digits


def raise_error(error: OSError):
    raise error


def files_below(
    directory: str, on_unreadable: Callable[[OSError], None] = raise_error
) -> list[str]:
    """List the files below a directory, sorted, without hidden names and installed libraries.

    Links are followed. A file to which several paths lead is listed once, by the first of them, and
    a directory is searched once. The error of a directory that cannot be read is passed to
    `on_unreadable`, or raised.
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
        # os.walk enters the subfolders in the order of this list. With the slash, it is that of
        # the paths of the files in them.
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
    """Return the content of a metadata.json, its `shards` as ShardEntry; no shards if another
    program wrote it.

    Raise DataError if it is no JSON file, or if one of our own has an invalid entry.
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
    """Return whether a JSON value is an entry that can be used, since anyone may have written the
    file. Its name leads nowhere: it is compared with those of the files that are found."""
    return (
        isinstance(value, dict)
        and isinstance(value.get("name"), str)
        and value.get("split") in SPLITS
        and isinstance(value.get("ids"), int)
        and isinstance(value.get("sha256"), str)
    )

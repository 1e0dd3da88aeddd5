"""Encode and decode bytes, which are the tokens: ids 0-255 are raw bytes, a few ids above them are markers.

    0-255     raw bytes, most often of UTF-8 text
    256       PAD, fills a row after its last byte; never a target
    257       BOS, begins a document
    258       EOS, ends a document
    259-271   boundary and loop sentinels: reserved, nothing here writes them

There is nothing to train and nothing to load, and whatever bytes a file holds can be modelled. In text that `data.py
prepare` takes, a byte stays that byte: none is read as an id above 255, not even where the text spells one. In a shard
made by others every id up to 271 is read as it stands: BOS and EOS begin and end documents wherever they occur and are
targets like bytes, PAD is an input but never a target.
"""

from collections.abc import Iterable

PAD_ID = 256
BOS_ID = 257
EOS_ID = 258
VOCAB_SIZE = 272

# The original's image sentinels. They alias the control bytes 0x00-0x03: in a text that holds such bytes, only the
# position of an id tells a sentinel from a byte, so `encode` and `decode` treat them as the bytes that they also are.
IMG_START = 0
IMG_END = 1
IMG_PATCH = 2
IMG_NEWLINE = 3


def encode(text: str) -> list[int]:
    """Encode a text as one document: BOS, its UTF-8 bytes, EOS. A lone surrogate raises UnicodeEncodeError."""
    return [BOS_ID, *text.encode("utf-8"), EOS_ID]


def decode(ids: Iterable[int]) -> str:
    """Decode ids: those above 255 are dropped, and bytes that are not UTF-8 become U+FFFD."""
    return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

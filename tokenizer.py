"""Encode and decode text: the tokens are raw bytes and a few special ids.

    0-255     raw bytes, usually of UTF-8 text
    256       PAD: fills a row after its last byte; never a target
    257       BOS: begins a document
    258       EOS: ends a document
    259-271   boundary and loop sentinels: reserved, not used here

There is nothing to train or load, and any file can be modeled. `data.py prepare` produces only
bytes, BOS and EOS: no text can spell a special id, unlike with an export's tokenizer. In shards
from other programs, every id up to 271 is accepted: BOS and EOS begin and end documents and are
targets like bytes; PAD is an input but never a target.
"""

from collections.abc import Iterable

from spider.vocabulary import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE

__all__ = ["BOS_ID", "EOS_ID", "PAD_ID", "VOCAB_SIZE", "decode", "encode"]

# The original's image sentinels. They have the same ids as the control bytes 0x00-0x03, so `encode`
# and `decode` treat them as bytes.
IMG_START, IMG_END, IMG_PATCH, IMG_NEWLINE = range(4)


def encode(text: str) -> list[int]:
    """Encode a text as one document: BOS, its UTF-8 bytes, EOS. Raise UnicodeEncodeError for a lone
    surrogate."""
    return [BOS_ID, *text.encode("utf-8"), EOS_ID]


def decode(ids: Iterable[int]) -> str:
    """Decode ids: drop ids above 255, and replace invalid UTF-8 with U+FFFD."""
    return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

"""tokenizer.py: text to ids and back."""

import random
import sys

import tokenizer
from tokenizer import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE, decode, encode


def test_decode_inverts_encode():
    characters = "".join(map(chr, (*range(0xD800), *range(0xE000, sys.maxunicode + 1))))
    ids = encode(characters)
    assert ids == [BOS_ID, *characters.encode(), EOS_ID]
    assert decode(ids) == characters


def test_decode_replaces_invalid_utf_8_and_drops_ids_above_255():
    raw = random.Random(0).randbytes(100_000)
    ids = [BOS_ID, *raw[:9], PAD_ID, 259, VOCAB_SIZE - 1, *raw[9:], EOS_ID, PAD_ID]
    assert decode(ids) == raw.decode(errors="replace")


def test_special_ids_never_change():
    assert (PAD_ID, BOS_ID, EOS_ID, VOCAB_SIZE) == (256, 257, 258, 272)
    image_ids = (tokenizer.IMG_START, tokenizer.IMG_END, tokenizer.IMG_PATCH, tokenizer.IMG_NEWLINE)
    assert image_ids == (0, 1, 2, 3)

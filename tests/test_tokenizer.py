"""tokenizer.py: texts to ids and back."""

from hypothesis import given
from hypothesis import strategies as st

import tokenizer
from tokenizer import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE, decode, encode


@given(st.text())
def test_decode_returns_the_text_that_was_encoded(text):
    ids = encode(text)
    assert ids == [BOS_ID, *text.encode("utf-8"), EOS_ID]
    assert decode(ids) == text


@given(st.binary())
def test_decode_replaces_invalid_utf_8(raw):
    assert decode(raw) == raw.decode("utf-8", errors="replace")


def test_decode_drops_ids_above_255():
    assert decode([BOS_ID, ord("h"), PAD_ID, 259, VOCAB_SIZE - 1, ord("i"), EOS_ID, PAD_ID]) == "hi"


def test_special_ids_never_change():
    assert (PAD_ID, BOS_ID, EOS_ID, VOCAB_SIZE) == (256, 257, 258, 272)
    image_ids = (tokenizer.IMG_START, tokenizer.IMG_END, tokenizer.IMG_PATCH, tokenizer.IMG_NEWLINE)
    assert image_ids == (0, 1, 2, 3)

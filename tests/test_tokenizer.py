"""The byte tokenizer: what goes in comes out, and nothing else does."""

from hypothesis import given
from hypothesis import strategies as st

import tokenizer
from tokenizer import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE, decode, encode


@given(st.text())
def test_decode_gives_back_what_encode_was_given(text):
    ids = encode(text)
    assert ids[0] == BOS_ID and ids[-1] == EOS_ID
    assert bytes(ids[1:-1]) == text.encode("utf-8")
    assert decode(ids) == text


@given(st.binary())
def test_any_bytes_decode_and_what_is_not_utf8_becomes_the_replacement_character(raw):
    assert decode(raw) == raw.decode("utf-8", errors="replace")


def test_ids_above_255_are_dropped():
    assert decode([BOS_ID, ord("h"), PAD_ID, 259, VOCAB_SIZE - 1, ord("i"), EOS_ID, PAD_ID]) == "hi"


def test_special_ids_are_the_contracts_and_image_sentinels_alias_control_bytes():
    assert (PAD_ID, BOS_ID, EOS_ID, VOCAB_SIZE) == (256, 257, 258, 272)
    sentinels = [tokenizer.IMG_START, tokenizer.IMG_END, tokenizer.IMG_PATCH, tokenizer.IMG_NEWLINE]
    assert sentinels == [0, 1, 2, 3]
    assert encode("\x00\x01\x02\x03")[1:-1] == sentinels and decode(sentinels) == "\x00\x01\x02\x03"

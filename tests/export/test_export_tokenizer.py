"""The exported tokenizer's ids are a text's bytes."""

from exporting import checkpoint, exported, loaded_tokenizer, tokenizer  # noqa: F401
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenizer import BOS_ID, EOS_ID, PAD_ID, decode, encode


@settings(deadline=None, max_examples=40)
@given(st.text())
def test_a_text_is_its_bytes_and_comes_back(tokenizer, content):
    ids = tokenizer(content)["input_ids"]
    assert ids == encode(content)[1:-1] == tokenizer.encode(content, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=True) == tokenizer.decode(ids) == content
    assert tokenizer.convert_tokens_to_string(tokenizer.tokenize(content)) == content


@settings(deadline=None, max_examples=40)
@given(st.binary())
def test_any_bytes_come_back_where_they_are_asked_for(exported, tokenizer, content):
    assert tokenizer.decode(list(content)) == decode(content)
    tokenizer.errors = "surrogateescape"
    try:
        kept = tokenizer.decode(list(content))
        assert tokenizer.encode(kept, add_special_tokens=False) == list(content)
    finally:
        tokenizer.errors = "replace"


def test_ids_above_255_come_from_nothing_that_a_text_spells(exported, tokenizer):
    assert tokenizer("<bos><eos> <pad>")["input_ids"] == list(b"<bos><eos> <pad>")
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (PAD_ID, BOS_ID, EOS_ID)
    assert len(tokenizer) == tokenizer.vocab_size == 272 and len(tokenizer.get_vocab()) == 272
    assert tokenizer.decode([BOS_ID, 97, EOS_ID, 270, PAD_ID]) == "<bos>a<eos><reserved_270><pad>"
    assert tokenizer.decode([BOS_ID, 97, EOS_ID, 270, PAD_ID], skip_special_tokens=True) == "a"
    assert tokenizer("a", "b")["input_ids"] == [97, EOS_ID, BOS_ID, 98]
    batch = tokenizer(["a", "bcd"], padding=True, return_tensors="pt")
    assert batch["input_ids"].tolist() == [[PAD_ID, PAD_ID, 97], [*b"bcd"]]
    assert batch["attention_mask"].tolist() == [[0, 0, 1], [1, 1, 1]]
    kept = loaded_tokenizer(exported, errors="surrogateescape", add_bos_token=True)
    assert kept(kept.decode([0xff, 97]))["input_ids"] == [BOS_ID, 0xff, 97]
    assert kept("ab", return_special_tokens_mask=True)["special_tokens_mask"] == [1, 0, 0]


"""Dialogues, loading, and windows of a text that is scored."""

import builtins
import io
import os
import signal
import sys

import pytest
import torch

from bad_data import stream
from conftest import awake, small_config
from spider.decode import forbid_repeats
from spider.inference import Sampler, converse, windows
from spider_model import Spider
from tokenizer import BOS_ID, EOS_ID


def written_by(monkeypatch, capsysbinary, model, turns: list[str], stop=None) -> list[bytes]:
    """Return what a model writes in each turn of a dialogue, greedily and up to 9 bytes."""
    lines, written = iter(turns), []

    def ask(prompt):
        written.append(capsysbinary.readouterr().out[:-1])
        if (line := next(lines, None)) is None:
            raise EOFError
        return line

    monkeypatch.setattr(builtins, "input", ask)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    sampler = Sampler(
        model,
        bytes=9,
        temperature=0,
        top_k=None,
        top_p=None,
        no_repeat_ngram_size=0,
        samples=1,
        seed=0,
        raw=True,
        stop=stop,
    )
    converse(sampler, model.decoding_state())
    return written[1:]


def test_a_dialogue_continues_from_all_that_was_typed_and_written(monkeypatch, capsysbinary):
    model, text = awake(small_config(), seed=1).eval(), b""
    turns = ["ab", "", "c\\", "d", "", os.fsdecode(b"\xff")]
    written = written_by(monkeypatch, capsysbinary, model, turns)
    assert written.pop(2) == b""  # the break of the line that went on
    for typed, answer in zip((b"ab", b"", b"c\nd", b"", b"\xff"), written, strict=True):
        if typed and text and not text.endswith(b"\n"):
            text += b"\n"
        text += typed
        assert (
            answer == bytes(model.generate([BOS_ID, *text], 9, temperature=0)) and len(answer) == 9
        )
        text += answer


def test_ctrl_c_ends_a_turn_and_what_was_written_until_then_stays_in_context(
    monkeypatch, capsysbinary
):
    model, generate_batch = awake(small_config(), seed=1).eval(), Spider.generate_batch

    def interrupted(*args, **kwargs):
        for number, column in enumerate(generate_batch(*args, **kwargs)):
            if number == 3:
                os.kill(os.getpid(), signal.SIGINT)
            yield column

    monkeypatch.setattr(Spider, "generate_batch", interrupted)
    first, second = written_by(monkeypatch, capsysbinary, model, ["ab", "cd"])
    monkeypatch.undo()
    assert first == bytes(model.generate([BOS_ID, *b"ab"], 4, temperature=0))
    assert second == bytes(model.generate([BOS_ID, *b"ab", *first, *b"\ncd"], 4, temperature=0))
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


@pytest.mark.parametrize("typed", ("c", ""))
def test_input_after_a_stop_text_follows_it_directly_and_an_empty_one_continues(
    monkeypatch, capsysbinary, typed
):
    model = awake(small_config(), seed=1).eval()
    answer = bytes(model.generate([BOS_ID, *b"ab"], 9, temperature=0))
    stop = answer[3:5]
    assert stop not in answer[:4] and not stop.endswith(b"\n")
    first, second = written_by(monkeypatch, capsysbinary, model, ["ab", typed], [stop])
    text = b"ab" + first + stop + typed.encode()
    assert first == answer[:3]
    assert written_by(monkeypatch, capsysbinary, model, ["ab"], [answer[-2:] + b"!"]) == [answer]
    assert second == bytes(model.generate([BOS_ID, *text], 9, temperature=0)).partition(stop)[0]


def test_after_the_end_of_a_document_a_dialogue_begins_another(monkeypatch, capsysbinary):
    model, fed, read = awake(small_config(), seed=1).eval(), [], Sampler.read
    monkeypatch.setattr(
        Sampler, "read", lambda self, state, ids: fed.append(ids) or read(self, state, ids)
    )
    monkeypatch.setattr(Spider, "generate_batch", lambda *args, **kwargs: iter([[100]]))
    written_by(monkeypatch, capsysbinary, model, ["ab", "c", ""])
    assert fed == [[BOS_ID, *b"ab"], [EOS_ID, BOS_ID, *b"c"], [EOS_ID, BOS_ID]]


@pytest.mark.parametrize("size", (1, 2, 3, 5))
def test_no_sequence_is_written_twice_as_in_transformers(size):
    """Beside transformers' processor of the same name; EOS and what the model writes are not
    changed by another."""
    from transformers import NoRepeatNGramLogitsProcessor

    written = torch.randint(0, 4, (3, 40), generator=torch.Generator().manual_seed(size))
    logits = torch.randn(3, 272)
    for n in (0, 1, size - 1, size, 40):
        found = forbid_repeats(logits, written[:, :n], size)
        if n < size:
            assert torch.equal(found, logits)
        else:
            assert torch.equal(
                found, NoRepeatNGramLogitsProcessor(size)(written[:, :n], logits.clone())
            )
    model = awake(small_config()).eval()
    state = model.decoding_state(2)
    first = model.step(torch.full((2, 1), BOS_ID), state)[:, -1]
    columns = [
        *zip(
            *model.generate_batch(first, state, 30, temperature=0, no_repeat_ngram_size=size),
            strict=True,
        )
    ]
    for row in columns:
        grams = [row[i : i + size] for i in range(len(row) - size + 1)]
        assert len(grams) == len(set(grams))


@pytest.mark.parametrize("seq_len", (2, 7, 16, 64))
@pytest.mark.parametrize("length", (1, 2, 7, 8, 9, 50, 250))
def test_windows_predict_every_byte_once_after_half_a_window_or_all_that_there_is(seq_len, length):
    for batch in (1, 3, 1000):
        seen = []
        for ids, labels in windows(stream([BOS_ID, *range(length)]), seq_len, batch):
            assert len(ids) <= batch and ids.shape == labels.shape == (len(ids), seq_len)
            for row, offset in (labels != -100).nonzero().tolist():
                seen.append(byte := int(labels[row, offset]))
                assert ids[row, offset] == (byte - 1 if byte else BOS_ID) and offset >= min(
                    byte, seq_len // 2
                )
        assert sorted(seen) == list(range(length))

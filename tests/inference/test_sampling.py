"""Dialogues and repetitions."""

import builtins
import io
import os
import signal
import sys

import pytest
import torch

import sample
from conftest import awake, small_config
from spider.inference.sampling import Sampler, converse
from spider.model.decode import forbid_repeats
from spider_model import Spider
from tokenizer import BOS_ID, EOS_ID

MAX_BYTES = 9


@pytest.fixture
def model() -> Spider:
    return awake(small_config(), seed=1).eval()


@pytest.fixture
def dialogue(monkeypatch, capsysbinary):
    """Hold a dialogue of typed lines; return what the model prints in each turn, greedily."""

    def hold(model: Spider, typed: list[str], stop: tuple[bytes, ...] = ()) -> list[bytes]:
        lines = iter(typed)
        printed = []

        def type_line(prompt: str) -> str:
            printed.append(capsysbinary.readouterr().out.removesuffix(b"\n"))
            try:
                return next(lines)
            except StopIteration:
                raise EOFError from None

        monkeypatch.setattr(builtins, "input", type_line)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
        words = f"--bytes {MAX_BYTES} --temperature 0 --no_repeat_ngram_size 0 --raw"
        flags = sample.parse_args(words.split())
        flags.stop = stop
        converse(Sampler(model, flags), model.decoding_state())
        return printed[1:]

    return hold


def greedy(model: Spider, text: bytes, count: int = MAX_BYTES) -> bytes:
    """Return what the model writes after a document's beginning."""
    return bytes(model.generate([BOS_ID, *text], count, temperature=0))


def test_dialogue_keeps_all_input_and_output_in_context(model, dialogue):
    printed = dialogue(model, ["ab", "", "c\\", "d", "", os.fsdecode(b"\xff")])
    assert printed.pop(2) == b""  # between the two lines of one input
    text = b""
    for typed, answer in zip((b"ab", b"", b"c\nd", b"", b"\xff"), printed, strict=True):
        if typed and text and not text.endswith(b"\n"):
            text += b"\n"
        text += typed
        assert answer == greedy(model, text)
        assert len(answer) == MAX_BYTES
        text += answer


def test_ctrl_c_ends_a_turn_and_keeps_its_bytes_in_context(model, dialogue, monkeypatch):
    generate_batch = Spider.generate_batch

    def interrupt_fourth_byte(*args, **kwargs):
        for number, column in enumerate(generate_batch(*args, **kwargs)):
            if number == 3:
                os.kill(os.getpid(), signal.SIGINT)
            yield column

    with monkeypatch.context() as patch:
        patch.setattr(Spider, "generate_batch", interrupt_fourth_byte)
        first, second = dialogue(model, ["ab", "cd"])
    assert first == greedy(model, b"ab", 4)
    assert second == greedy(model, b"ab" + first + b"\ncd", 4)
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


@pytest.mark.parametrize(
    "answer, before_c, before_nothing",
    (
        (b"d", [EOS_ID, BOS_ID], [EOS_ID, BOS_ID]),  # shorter than --bytes: EOS follows
        (b"12345678\n", b"\n", b"\n"),
        (b"12xy", b"y", b"y"),
    ),
)
def test_input_starts_a_document_after_eos_but_not_after_a_line_or_stop_text(
    model, dialogue, monkeypatch, answer, before_c, before_nothing
):
    fed = []
    read = Sampler.read

    def record_ids(self, state, ids):
        fed.append(ids)
        return read(self, state, ids)

    monkeypatch.setattr(Sampler, "read", record_ids)
    columns = [[byte] for byte in answer]
    monkeypatch.setattr(Spider, "generate_batch", lambda *_, **__: iter(columns))
    assert dialogue(model, ["ab", "c", ""], (b"xy",)) == 3 * [answer.removesuffix(b"xy")]
    assert fed == [[BOS_ID, *b"ab"], [*before_c, *b"c"], [*before_nothing]]


@pytest.mark.parametrize("size", (1, 2, 3, 5))
def test_no_repeat_ngram_size_matches_transformers(size):
    from transformers import NoRepeatNGramLogitsProcessor

    written = torch.randint(0, 4, (3, 40), generator=torch.Generator().manual_seed(size))
    logits = torch.randn(3, 272)
    for n in (0, 1, size - 1, size, 40):
        expected = logits
        if n >= size:
            expected = NoRepeatNGramLogitsProcessor(size)(written[:, :n], logits.clone())
        ours = forbid_repeats(logits, written[:, :n].numpy(), size)
        assert torch.equal(ours, expected)

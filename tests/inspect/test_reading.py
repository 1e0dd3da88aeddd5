"""The record of a text that was read has what the model computes."""

import io
import math
import sys

import pytest
import torch
from loguru import logger
from looking import model_of, text_of

import data
from spider.inspect import reading
from spider.model.decoding import PIECE
from tokenizer import BOS_ID


@pytest.mark.parametrize("length", (1, 2 * PIECE + 50))
def test_what_is_shown_is_what_the_full_pass_computes(length):
    model, text = model_of(), text_of(length)
    ids = torch.tensor([[BOS_ID, *text]])
    shown = reading.read(model, text, 3)
    record = shown.record
    out = model(ids, torch.cat((ids[:, 1:], torch.tensor([[-100]])), dim=1), n_loops=3)
    assert shown.bits_per_byte * math.log(2) == pytest.approx(out.nats_per_byte.item(), rel=1e-9)
    assert len(record.loops) == sum(record.ends) == int(out.segments)
    assert shown.segment[-1] + shown.ends[-1] == len(record.loops) and len(shown.bits) == length
    assert sum(record.loops) == pytest.approx(float(out.mean_loops) * len(record.loops))
    for layer, tokens in enumerate(out.tokens_per_expert):
        loads = [load for (i, _), load in record.load.items() if i == layer]
        assert torch.equal(sum(loads, torch.zeros(4)), tokens.float())
    if length > PIECE:
        assert len(set(record.loops)) > 1                                # else this compares nothing
        for (_, loop), gates in record.gates.items():
            assert sorted(gates) == [segment for segment, loops in enumerate(record.loops) if loops > loop]
        assert len(record.byte_gates) == length + 1


def test_gates_shown_are_the_ones_that_the_model_multiplies_by(monkeypatch):
    model, text = model_of(), text_of(40)
    before = reading.read(model, text, 2)
    engram, gate = model.core.layers[1].engram, model.engram_output.gate
    monkeypatch.setattr(type(engram), "gate", lambda self, h, key: h.new_full((len(h), 1), 0.25))
    gate.weight.data.zero_()
    after = reading.read(model, text, 2)
    assert {value for gates in after.record.gates.values() for value in gates.values()} == {0.25}
    assert {value for gates in after.record.byte_gates for value in gates} == {0.5}
    assert all(0 < value < 1 and value != 0.25 for gates in before.record.gates.values() for value in gates.values())
    assert after.bits != before.bits


def test_a_model_that_was_looked_at_is_as_it_was_before(monkeypatch):
    model, text = model_of(), text_of(20)
    calls = []
    for fails in (False, True):
        if fails:
            monkeypatch.setattr(model, "after_core", lambda *_: calls.append(1) or 1 / 0)
        try:
            reading.read(model, text, 2)
        except ZeroDivisionError:
            calls.append(2)
        assert "boundaries" not in vars(model)
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert calls == [1, 2]


def test_a_text_is_a_file_or_standard_input_or_stands_for_itself_and_is_cut_between_characters(tmp_path, monkeypatch):
    path = tmp_path / "text"
    path.write_bytes(b"from a file")
    assert reading.take_text(str(path)) == (b"from a file", str(path))
    assert reading.take_text("no file, \udcff") == (b"no file, \xff", "a text")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"x" * (reading.LONGEST + 1))))
    assert reading.take_text("-") == (b"x" * reading.LONGEST, f"the first {reading.LONGEST:,} bytes of standard input")
    path.write_bytes(b"x" * reading.LONGEST)
    assert reading.take_text(str(path)) == (b"x" * reading.LONGEST, str(path))
    for before in range(1, 5):
        path.write_bytes(b"x" * (reading.LONGEST - before) + "🕸🕸".encode())
        text = reading.take_text(str(path))[0]
        assert text.decode().endswith("x🕸" if before == 4 else "xx") and len(text) == reading.LONGEST - before % 4
    path.write_bytes(b"\x80" * 5000)
    assert len(reading.take_text(str(path))[0]) >= reading.LONGEST - 3
    for empty in ("", str(tmp_path / "nothing")):
        (tmp_path / "nothing").write_bytes(b"")
        with pytest.raises(data.DataError, match="empty"):
            reading.take_text(empty)


def test_a_text_that_is_cut_is_said_to_be():
    said = []
    sink = logger.add(said.append, format="{message}")
    try:
        reading.take_text("x" * reading.LONGEST)
        assert not said
        reading.take_text("x" * (reading.LONGEST + 1))
    finally:
        logger.remove(sink)
    assert len(said) == 1 and f"the first {reading.LONGEST:,} bytes of a text" in said[0]


"""Contexts: word ends, the hash of a span, keys shared by memories. test_memory.py tests every kind
of context."""

from contextlib import nullcontext
from itertools import combinations

import pytest
import torch

from conftest import awake, small_config, text
from spider.config import PRESETS
from spider.model.contexts import BASE, PastBytes, word_ends
from stand_in_gpu import stand_in_gpu


@pytest.mark.parametrize(
    "given, ends",
    (
        (b"to be, or", b"__x__x___"),
        (b"self.x_1 = f(a2)\n\n  y", b"____x___x___x__x_____"),
        (b"  ,,", b"____"),
        ("gr\u00fc\u00df \u4f60\u597d".encode(), b"______x___x__"),
        (b"a`z{A@Z[0/9:_^", b"_x_x_x_x_x_x_x"),
        (b"\x80\xe0\xc3\x7f\xbf\xc2\xdf\xff", b"_x_x_x_x"),
        ("\u0434\u0430\u00a0\u0438\u2026".encode(), b"____x___x__"),
    ),
)
def test_word_ends_are_the_first_bytes_after_words(given, ends):
    ids = torch.tensor(list(given))
    is_end = word_ends(ids, torch.arange(len(ids)))
    assert "".join("x" if end else "_" for end in is_end) == ends.decode()


def test_hash_of_a_span_is_a_sum_over_its_bytes_modulo_2_64():
    """The bytes are the example in PastBytes's docstring; both spans `ab` have the same hash."""
    given = b"xab ab"
    index = torch.arange(6)
    past = PastBytes(torch.tensor(list(given)), index, index)
    spans = [*combinations(range(7), 2)]
    hashes = past.hash(*torch.tensor(spans).T).tolist()
    for (begin, end), value in zip(spans, hashes, strict=True):
        terms = [(given[k] + 1) * pow(BASE, k + 1 - end, 1 << 64) for k in range(begin, end)]
        assert (value - sum(terms)) % (1 << 64) == 0
    assert hashes[spans.index((1, 3))] == hashes[spans.index((4, 6))]


@pytest.mark.parametrize("unit, end, reach", (("word", b"a ", 31), ("line", b"\n", 255)))
def test_word_ends_are_found_within_31_bytes_and_line_ends_within_255(unit, end, reach):
    ids = torch.tensor([*end, *b"x" * 300])
    index = torch.arange(len(ids))
    since = PastBytes(ids, index, index).since(unit, 1)
    assert since[len(end) :].tolist() == [min(distance, reach) for distance in range(1, 301)]


@pytest.mark.parametrize("device", (nullcontext, stand_in_gpu))
def test_memories_of_a_pass_share_the_keys_of_contexts(device, monkeypatch):
    model = awake(small_config(**PRESETS["1b"]))
    computed = []

    def span(past, context, original=PastBytes.span):
        computed.append((len(past.index), context))
        return original(past, context)

    monkeypatch.setattr(PastBytes, "span", span)
    with device():
        model(text(2, 64))
    assert len(computed) == len(set(computed)) > 0

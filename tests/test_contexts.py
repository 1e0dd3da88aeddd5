"""Contexts: the ends of words, and keys that do not depend on where a context stands."""

import pytest
import torch

from conftest import text
from spider.contexts import Past, word_ends


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
def test_words_end_at_the_first_byte_that_is_not_part_of_a_word(given, ends):
    ids = torch.tensor(list(given))
    is_end = word_ends(ids, torch.arange(len(ids)))
    assert "".join("x" if end else "_" for end in is_end) == ends.decode()


def test_a_key_is_that_of_the_same_bytes_anywhere_in_a_text():
    ids = torch.cat((text(1, 70)[0], torch.tensor(list(b"\nab cd ef\ngh ij k"))))
    twice = torch.cat((ids, ids))
    position = torch.arange(len(twice))
    contexts = ("3", "1-4", "word1", "word2", "word1-2", "above")
    keys = Past(twice, position, position).keys(contexts, torch.tensor([3, 5, 7]))
    first, second = keys.chunk(2, dim=1)
    last = slice(-7, None)  # the line before, and two ends of words, stand in both
    assert torch.equal(first[:, last], second[:, last])
    # of "gh ij k": word1 is empty after each word, word1-2 is "ef", "gh", "ij"
    assert [len({*key.tolist()}) for key in first[:, last]] == [7, 7, 6, 7, 3, 7]

"""The match memory: what followed the last time."""

import pytest
import torch

from conftest import documents, small_config, text
from spider.model import match_memory
from spider.model.ngrams import shifted_bytes
from spider.model.packing import Packing, document_cu_seqlens
from tokenizer import BOS_ID, EOS_ID, PAD_ID


def last_bytes(part: list[int], t: int, n: int) -> list[int] | None:
    return part[t + 1 - n:t + 1] if t >= n - 1 else None


def since_words(part: list[int], t: int, n: int) -> list[int]:
    """The bytes up to t behind the n-th last end of a word, PAD before the document."""
    ends = [s for s in range(t, max(t - 31, 0), -1) if part[s] not in {*b"ABCD"} and part[s - 1] in {*b"ABCD"}]
    return part[ends[n - 1] + 1:t + 1] if len(ends) >= n else ([PAD_ID] * 31 + part)[t + 1:t + 32]


@pytest.mark.parametrize("orders, words, occurrences", (
    ((1,), (), 2), ((2, 3, 7), (1, 2), 4), ((4, 32), (3,), 3), ((), (1, 4), 2)))
def test_matches_are_what_followed_the_last_times_in_the_same_document(orders, words, occurrences):
    rows = torch.cat((text(2, 60, 3) % 4 + 65, documents(7, 2, 30, 21) % 3 + 65))
    if words:
        rows[rows == ord("B")], rows[1][rows[1] == ord("C")] = ord(" "), 0
        rows[0, 12:50] = ord("A")  # no word ends within as many bytes as are read
    rows[0, [9, 30]], rows[1, 4], rows[2, 6], rows[2, 20] = EOS_ID, PAD_ID, EOS_ID, BOS_ID
    ids, cu_seqlens = rows.flatten(), document_cu_seqlens(rows)
    packing = Packing.build(cu_seqlens, len(ids), 60, small_config(), torch.float32)
    memory = match_memory.MatchMemory(orders, words, occurrences)
    memory.init_hash(0)
    found, all_followed = memory(ids, shifted_bytes(ids, packing.position, len(memory.multiplier)), packing.document)
    for begin, end in zip(cu_seqlens.tolist(), cu_seqlens[1:].tolist()):
        part = ids[begin:end].tolist()
        for t in range(len(part)):
            for j, n in enumerate((*orders, *words)):
                context = last_bytes if j < len(orders) else since_words
                here = context(part, t, n)
                before = [s for s in range(t) if here is not None and context(part, s, n) == here]
                followed = [part[s + 1] for s in before[::-1]]
                kind = 0 if len(before) < 2 else 256 if followed[0] == followed[1] else 512
                assert found[begin + t, j] == (followed[0] + kind if before and followed[0] < 256 else 768)
                assert all_followed[begin + t, j].tolist() == (followed + [-1] * occurrences)[:occurrences]
    assert all(((low <= found) & (found < low + 256)).any() for low in (0, 512, 768))

"""Packed documents: where they start, and how far they are filled up."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import small_config
from spider.model.packing import Packing, document_cu_seqlens, fill_up
from tokenizer import BOS_ID, EOS_ID, PAD_ID


def document_starts(ids: list[list[int]]) -> list[int]:
    """document_cu_seqlens byte by byte."""
    flat = [(at == 0, row[at - 1], byte) for row in ids for at, byte in enumerate(row)]
    return [i for i, (new, before, id) in enumerate(flat) if new or id == BOS_ID or before == EOS_ID] + [len(flat)]


@settings(deadline=None)
@given(st.integers(1, 5).flatmap(lambda rows: st.integers(1, 9).flatmap(lambda length: st.lists(st.lists(
    st.sampled_from((65, PAD_ID, BOS_ID, EOS_ID)), min_size=length, max_size=length), min_size=rows, max_size=rows))))
def test_documents_start_at_rows_at_bos_and_behind_eos_whatever_stands_between(ids):
    """One-byte documents, rows of PAD alone, EOS in the middle, BOS without EOS."""
    cu_seqlens = document_cu_seqlens(torch.tensor(ids))
    assert cu_seqlens.dtype == torch.int32 and cu_seqlens.tolist() == document_starts(ids)
    packing = Packing.build(cu_seqlens, cu_seqlens[-1], len(ids[0]), small_config(), torch.float32)
    place = [(d, at) for d, length in enumerate(cu_seqlens.diff().tolist()) for at in range(length)]
    assert list(zip(packing.document.tolist(), packing.position.tolist())) == place


@settings(deadline=None)
@given(st.lists(st.integers(0, 700) | st.integers(0, 5), min_size=1, max_size=60).filter(any))
def test_documents_are_filled_up_to_twice_their_rows_and_half_as_many_scores_again_at_most(lengths):
    buckets, start = fill_up(torch.tensor(lengths, dtype=torch.int32), max(lengths))
    assert sum(count * size for count, size in buckets) <= 2 * sum(lengths)
    assert sum(count * size ** 2 for count, size in buckets) <= 4 * sum(length ** 2 for length in lengths)
    assert len(buckets) <= 1 + math.log2(max(lengths)) and sum(count for count, _ in buckets) == sum(map(bool, lengths))
    if start is None:
        assert buckets[0][0] * buckets[0][1] == sum(lengths)
    else:
        ends = sorted((int(at), int(at) + length) for at, length in zip(start, lengths) if length)
        assert all(end <= at for (_, end), (at, _) in zip(ends, ends[1:]))

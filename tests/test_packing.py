"""Packed rows: documents, and padded batches of them."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import small_config, text
from spider.packing import Packing, document_cu_seqlens, longest_bound, pad_documents, row_step
from spider_model import Spider
from tokenizer import BOS_ID, EOS_ID, PAD_ID


@settings(deadline=None)
@given(
    st.integers(1, 5).flatmap(
        lambda rows: st.integers(1, 9).flatmap(
            lambda length: st.lists(
                st.lists(
                    st.sampled_from((65, PAD_ID, BOS_ID, EOS_ID)), min_size=length, max_size=length
                ),
                min_size=rows,
                max_size=rows,
            )
        )
    )
)
def test_documents_start_at_rows_at_bos_and_after_eos(ids):
    flat = [(t == 0, row[t - 1], byte) for row in ids for t, byte in enumerate(row)]
    starts = [
        i
        for i, (first, before, byte) in enumerate(flat)
        if first or byte == BOS_ID or before == EOS_ID
    ]
    cu_seqlens = document_cu_seqlens(torch.tensor(ids))
    assert cu_seqlens.dtype == torch.int32 and cu_seqlens.tolist() == [*starts, len(flat)]
    packing = Packing.build(cu_seqlens, len(flat), len(ids[0]), small_config(), torch.float32)
    rows = [
        (document, t)
        for document, length in enumerate(cu_seqlens.diff().tolist())
        for t in range(length)
    ]
    assert list(zip(packing.document.tolist(), packing.position.tolist(), strict=True)) == rows


@settings(deadline=None)
@given(st.lists(st.integers(0, 700) | st.integers(0, 5), min_size=1, max_size=60).filter(any))
def test_padding_at_most_doubles_the_rows_and_never_overlaps(lengths):
    buckets, start = pad_documents(torch.tensor(lengths, dtype=torch.int32), max(lengths))
    assert sum(count * size for count, size in buckets) <= 2 * sum(lengths)
    assert sum(count * size**2 for count, size in buckets) <= 4 * sum(
        length**2 for length in lengths
    )
    assert len(buckets) <= 1 + math.log2(max(lengths)) and sum(
        count for count, _ in buckets
    ) == sum(map(bool, lengths))
    if start is None:
        assert buckets[0][0] * buckets[0][1] == sum(lengths)
    else:
        ends = sorted(
            (int(first), int(first) + length)
            for first, length in zip(start, lengths, strict=True)
            if length
        )
        assert all(end <= first for (_, end), (first, _) in zip(ends, ends[1:], strict=False))


@pytest.mark.parametrize(
    "n_bytes, longest, step",
    (
        (28_672, 256, 256),
        (114_688, 256, 256),
        (131_072, 2048, 2048),
        (131_072, 64, 64),
        (4096, 4096, 64),
        (600, 200, 16),
        (4000, 1000, 64),
        (9, 3, 16),
    ),
)
def test_rows_of_the_core_grow_in_multiples_of_16_that_a_document_can_fill(n_bytes, longest, step):
    """In FP8 other numbers need other graphs; padding is a document, for which attention is not
    launched otherwise."""
    assert row_step(n_bytes, longest) == step


# of the second the padding is longer than a row
@pytest.mark.parametrize("sequences, length", ((3, 200), (3, 9)))
def test_the_core_has_a_multiple_of_16_rows_and_its_padding_is_no_longer_than_the_bound(
    sequences, length
):
    model, seen = Spider(small_config(boundaries="words")), []
    model.core.register_forward_pre_hook(
        lambda module, args: seen.append((len(args[0]), args[1].packing))
    )
    ids = text(sequences, length)
    model(
        ids,
        cu_seqlens=document_cu_seqlens(ids),
        longest=longest_bound(document_cu_seqlens(ids), length),
    )
    ((rows, packing),) = seen
    assert rows % 16 == 0 and int(packing.cu_seqlens.diff().max()) <= packing.longest

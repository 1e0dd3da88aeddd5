"""Packed documents, and padded batches of documents."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import small_config, text
from spider.model.packing import (
    Packing,
    document_cu_seqlens,
    max_seqlen_of,
    pad_documents,
    padding_multiple,
)
from spider_model import Spider
from tokenizer import BOS_ID, EOS_ID, PAD_ID


@st.composite
def batches_of_ids(draw) -> list[list[int]]:
    """Draw up to 5 sequences of equal length, up to 9."""
    length = draw(st.integers(1, 9))
    ids = st.sampled_from((65, PAD_ID, BOS_ID, EOS_ID))
    sequence = st.lists(ids, min_size=length, max_size=length)
    return draw(st.lists(sequence, min_size=1, max_size=5))


@settings(deadline=None)
@given(batches_of_ids())
def test_documents_start_at_sequences_at_bos_and_after_eos(sequences):
    expected = []  # (document, position) of every byte
    for ids in sequences:
        for t, byte in enumerate(ids):
            if t == 0 or byte == BOS_ID or ids[t - 1] == EOS_ID:
                document = expected[-1][0] + 1 if expected else 0
                expected.append((document, 0))
            else:
                document, position = expected[-1]
                expected.append((document, position + 1))
    starts = [index for index, (_, position) in enumerate(expected) if position == 0]

    cu_seqlens = document_cu_seqlens(torch.tensor(sequences))
    assert cu_seqlens.dtype == torch.int32
    assert cu_seqlens.tolist() == [*starts, len(expected)]
    packing = Packing.build(
        cu_seqlens, len(expected), len(sequences[0]), small_config(), torch.float32
    )
    found = zip(packing.document.tolist(), packing.position.tolist(), strict=True)
    assert list(found) == expected


@settings(deadline=None)
@given(st.lists(st.integers(0, 700) | st.integers(0, 5), min_size=1, max_size=60).filter(any))
def test_padding_at_most_doubles_the_tokens(lengths):
    buckets, _ = pad_documents(torch.tensor(lengths, dtype=torch.int32), max(lengths))
    present = [length for length in lengths if length > 0]
    assert sum(bucket.documents for bucket in buckets) == len(present)
    assert len(buckets) <= 1 + math.log2(max(lengths))

    padded_tokens = sum(bucket.documents * bucket.length for bucket in buckets)
    padded_scores = sum(bucket.documents * bucket.length**2 for bucket in buckets)
    assert padded_tokens <= 2 * sum(lengths)
    assert padded_scores <= 4 * sum(length**2 for length in lengths)


@pytest.mark.parametrize("length, buckets", ((800, [(11, 1000)]), (600, [(1, 1000), (10, 608)])))
def test_padding_adds_at_most_half_the_scores(length, buckets):
    assert pad_documents(torch.tensor([1000] + 10 * [length]), 1000)[0] == buckets


@pytest.mark.parametrize(
    "n_bytes, max_seqlen, step",
    (
        (131_072, 2048, 2048),
        (131_072, 64, 64),
        (4096, 4096, 64),
        (600, 200, 16),
        (4000, 1000, 64),
        (9, 3, 16),
    ),
)
def test_core_size_grows_in_multiples_of_16_within_a_document(n_bytes, max_seqlen, step):
    """FP8 would need new graphs for other numbers. Padding is a document, so attention's launch
    must cover its length."""
    assert padding_multiple(n_bytes, max_seqlen) == step


# In the second case the padding is longer than a sequence.
@pytest.mark.parametrize("sequences, length", ((3, 200), (3, 9)))
def test_core_pads_to_multiples_of_16_tokens_within_the_longest_bound(sequences, length):
    model = Spider(small_config(boundaries="words"))
    inputs = []
    model.core.register_forward_pre_hook(lambda module, args: inputs.append(args))
    ids = text(sequences, length)
    cu_seqlens = document_cu_seqlens(ids)
    model(ids, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen_of(cu_seqlens, length))
    ((z, core_inputs),) = inputs
    assert len(z) % 16 == 0
    packing = core_inputs.packing
    assert int(packing.cu_seqlens.diff().max()) <= packing.max_seqlen


def test_attention_kernel_is_launched_for_the_longest_bound():
    cu_seqlens = torch.empty(5, dtype=torch.int32, device="meta")
    packing = Packing.build(cu_seqlens, 2048, 700, small_config(), torch.bfloat16)
    assert packing.max_seqlen_as_size.shape == (700, 0)

"""Packed rows: documents, padded batches of them, pooling and unpooling of segments, the cache of
decoding."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import small_config, text
from spider.attention import Cache
from spider.packing import Packing, document_cu_seqlens, longest_bound, pad_documents, row_step
from spider.segments import pool_segments, segment_offsets, unpool_segments
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


def dense_pool(h, b, cu_seqlens):
    """Pool by the published form, per document: an einsum with a [bytes, segments] matrix of
    weights."""
    pooled, counts = [], [0]
    for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        h_d, b_d = h[start:end], b[start:end]
        count = b_d.cumsum(0) - b_d  # c_t
        segments = int(b_d.detach().sum().round())
        distance = torch.arange(segments, dtype=h.dtype) - count[:, None]  # 0 inside the segment
        weight = (distance.detach().abs() < 0.5) * (1 - distance)
        pooled.append((weight / weight.sum(0, keepdim=True)).T @ h_d)
        counts.append(counts[-1] + segments)
    return torch.cat(pooled), torch.tensor(counts)


def unpool_in_turn(z, null, b, cu_seqlens, segment_cu_seqlens, back=0):
    """Unpool byte by byte: z [N, offsets, D], null [D]; the last offset serves all further
    bytes."""
    out = []
    for d in range(len(cu_seqlens) - 1):
        rows, ended = iter(z[segment_cu_seqlens[d] : segment_cu_seqlens[d + 1]]), []
        for t, end in enumerate(b[cu_seqlens[d] : cu_seqlens[d + 1]].tolist()):
            ended += [(next(rows), t)] if end else []
            segment, first = ended[-1 - back] if len(ended) > back else (null[None], t)
            out.append(segment[min(t - first, len(segment) - 1)])
    return torch.stack(out)


@pytest.mark.parametrize("offsets, back", ((1, 0), (3, 0), (3, 1)))
@pytest.mark.parametrize("rate", (0.0, 0.3, 1.0))
@pytest.mark.parametrize("lengths", ((1,), (40,), (7, 1, 30, 2)))
def test_pool_and_unpool_equal_the_dense_form_in_value_and_gradient(lengths, rate, offsets, back):
    generator = torch.Generator().manual_seed(3)
    rows, cu = sum(lengths), F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(torch.int32)
    b = (torch.rand(rows, generator=generator) < rate).double().requires_grad_()
    h, weight = torch.randn(2, rows, 6, generator=generator, dtype=torch.float64).unbind()
    mix, null = torch.randn(6 * offsets + 1, 6, generator=generator, dtype=torch.float64).split(
        (6 * offsets, 1)
    )
    inputs = h.requires_grad_(), b, null.squeeze(0).requires_grad_()
    results = []
    for dense in (False, True):
        z, segment_cu = (dense_pool if dense else pool_segments)(h, b, cu)
        read, null = (z @ mix.T).tanh().unflatten(1, (offsets, 6)), inputs[2]
        if dense:
            out = unpool_in_turn(read, null, b, cu, segment_cu, back)
        elif offsets == 1:
            out = unpool_segments(read.squeeze(1), null, b, cu, segment_cu)
        else:
            offset = segment_offsets(b, cu[:-1].repeat_interleave(cu.diff()), offsets, back=back)
            out = unpool_segments(read, null.repeat(offsets, 1), b, cu, segment_cu, offset, back)
        grads = torch.autograd.grad((out * weight).sum(), inputs, allow_unused=True)
        results.append(
            (
                z,
                segment_cu.long(),
                out,
                *(
                    torch.zeros_like(x) if grad is None else grad
                    for grad, x in zip(grads, inputs, strict=True)
                ),
            )
        )
    for ours, dense in zip(*results, strict=True):
        torch.testing.assert_close(ours, dense, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("window", (0, 1, 3, 8))
@pytest.mark.parametrize("parts", ([1] * 23, [9, 1, 1, 7, 5], [23]))
def test_a_cache_with_a_window_keeps_only_that_and_masks_the_rest(window, parts):
    """Two documents side by side; the second starts five rows later."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 30, 4, dtype=torch.float64, generator=generator)
    q = torch.randn(2, 30, 2, 4, dtype=torch.float64, generator=generator)
    held, before = (
        torch.zeros(1, 1, 2, 1, 4, dtype=torch.float64),
        torch.zeros(2, dtype=torch.int64),
    )
    for rows in ([5, 0], *([n, n] for n in parts)):
        cu_seqlens = torch.tensor([0, rows[0], sum(rows)], dtype=torch.int32)
        packing = Packing.build(
            cu_seqlens, sum(rows), max(rows), small_config(), torch.float64, 0, before
        )
        at = packing.document, packing.position
        cache = Cache(held, packing, before, window)
        for d, p, y in zip(
            *(t.tolist() for t in at), cache.attend(q[at], x[at], 0.7, 3), strict=True
        ):
            keys = x[d, max(0, p + 1 - window) if window else 0 : p + 1]
            torch.testing.assert_close(
                y, (0.7 * q[d, p] @ keys.T).softmax(-1) @ keys[:, :3], rtol=0, atol=1e-12
            )
        held, before = cache.held, before + torch.tensor(rows)
    assert not window or held.shape[3] <= max(16, 2 * (window + max(parts) - 1))


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

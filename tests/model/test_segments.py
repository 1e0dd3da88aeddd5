"""Segments: pooled and unpooled as in the dense form, each offset its row."""

import math

import pytest
import torch
import torch.nn.functional as F
from segment_checks import check_pooling, dense_unpool_by_place

import spider_model
from conftest import awake, small_config
from spider.model.segments import pool_segments, segment_offsets, unpool_segments


@pytest.mark.parametrize("kind", ("none", "all", "some"))
@pytest.mark.parametrize("lengths", ((1,), (40,), (7, 1, 30, 2)))
def test_pool_and_unpool_equal_the_dense_form_in_value_and_gradient(lengths, kind):
    check_pooling(lengths, kind)


@pytest.mark.parametrize("rate", (0.0, 0.3, 1.0))
def test_a_byte_receives_the_row_of_its_segment_offset_and_the_last_one_beyond(rate):
    generator = torch.Generator().manual_seed(5)
    cu = torch.tensor([0, 1, 9, 40], dtype=torch.int32)
    b = (torch.rand(40, generator=generator) < rate).double()
    segment_cu = F.pad(b.cumsum(0), (1, 0))[cu.long()].to(torch.int32)
    z = torch.randn(int(segment_cu[-1]), 3, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    null = torch.randn(5, generator=generator, dtype=torch.float64).repeat(3, 1).requires_grad_()
    weight = torch.randn(40, 5, generator=generator, dtype=torch.float64)
    start = cu[:-1].repeat_interleave(cu.diff())
    results = []
    for unpool, place in ((unpool_segments, (segment_offsets(b, start, 3),)), (dense_unpool_by_place, ())):
        out = unpool(z, null, b, cu, segment_cu, *place)
        given = torch.autograd.grad((out * weight).sum(), (z, null), allow_unused=True)
        given = [torch.zeros_like(x) if grad is None else grad for x, grad in zip((z, null), given)]
        results.append((out, given[0], given[1].sum(0)))      # null is the same at every place
    for ours, dense in zip(*results):
        torch.testing.assert_close(ours, dense, rtol=1e-12, atol=1e-12)


def test_a_batch_without_any_segment_still_trains():
    model = awake(small_config(boundaries="whitespace"))
    ids = torch.full((2, 16), ord("x"))
    out = model(ids, ids)
    out.loss.backward()
    assert out.segments == 0 and math.isfinite(float(out.loss.detach())) and model.null_segment.grad.abs().sum() > 0


def pool_across_documents(h, b, cu_seqlens):
    whole = torch.tensor([0, len(h)], dtype=torch.int32)
    z, _ = pool_segments(h, b, whole)
    return z, pool_segments(h, b, cu_seqlens)[1]


def test_a_segment_that_crosses_documents_is_noticed(monkeypatch):
    monkeypatch.setattr(spider_model, "pool_segments", pool_across_documents)
    with pytest.raises((AssertionError, RuntimeError)):
        check_pooling((7, 1, 30, 2), "some")

"""What always holds of the model, each point also seen failing on a planted fault; `model.md` lists the points."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import spider_model
import tile_moe
from conftest import ROOT, awake, documents, gradients, small_config, text
from spider.model import attention, casting, costs, layers, match_memory, norm
from spider.model.config import BOUNDARIES, PRESETS, RANGES, RECOMPUTE, SpiderConfig
from spider.model.ngrams import shifted_bytes, word_ends
from spider.model.noise import byte_noise, dropped, uniform
from spider.model.packing import Packing, document_cu_seqlens, fill_up
from spider.model.segments import segment_offsets, pool_segments, unpool_segments
from spider.training.optim import RowwiseAdagrad
from spider_model import Halting, Spider
from tokenizer import BOS_ID, EOS_ID, PAD_ID

CUTS = {
    "nothing": {}, "learned boundaries": dict(boundaries="whitespace"), "stride": dict(boundaries="every_third"),
    "segment engram": dict(engram_layers=()), "byte engram": dict(engram_byte_orders=()), "lora": dict(lora_rank=0),
    "matches": dict(engram_match_orders=()), "byte memory": dict(engram_byte_orders=(), engram_match_orders=()),
    "since words": dict(engram_match_words=(1, 2)),
    "since words alone": dict(engram_byte_orders=(), engram_match_orders=(), engram_match_words=(1, 3)),
    "lti": dict(lti=False), "act": dict(act=False), "experts": dict(n_routed_experts=0, n_shared_experts=3),
    "shared expert": dict(n_shared_experts=0), "loops": dict(n_loops=1), "core": dict(n_recurrent_layers=0),
    "all but a window": dict(byte_window=5), "pooling": dict(boundaries="every_byte"),
}
EVERY_CUT = pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS.keys())


# ---------------------------------------------------------------------------------------------------------------------
# The checks: plain functions, so that a planted fault can be shown to them

def check_causality(model: Spider, training: bool, seed: int):
    """Changing a byte changes no logit before it, and some logit from it on; other documents stay as they were."""
    model.train(training)
    row = documents(23, 41, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for at in torch.randint(1, 62, (6,), generator=generator).tolist():
        if row[0, at] > 255:
            continue
        other = row.clone()
        other[0, at] = 32 + (row[0, at] - 31) % 90
        with torch.no_grad():
            a, b = (model(ids, noise_seed=seed).logits[0] for ids in (row, other))
        same = torch.ones(64, dtype=torch.bool)
        same[at:23 if at < 23 else 64] = False
        torch.testing.assert_close(a[same], b[same], rtol=0, atol=2e-5)
        assert (a[at] - b[at]).abs().max() > 1e-4


def check_packing(model: Spider):
    """Two documents in one row give the logits that they give apart, and rows may be in any order."""
    model.eval()
    row = documents(21, 43, seed=5)
    with torch.no_grad():
        together = model(row).logits[0]
        apart = torch.cat([model(part).logits[0] for part in (row[:, :21], row[:, 21:])])
        rows = text(4, 32, seed=6)
        order = torch.tensor([2, 0, 3, 1])
        torch.testing.assert_close(model(rows[order]).logits, model(rows).logits[order], rtol=0, atol=2e-5)
    torch.testing.assert_close(together, apart, rtol=0, atol=2e-5)


def dense_pool(h, b, cu_seqlens):
    """The published form, per document: softmax-free einsum with a [bytes, segments] matrix of weights."""
    pooled, counts = [], [0]
    for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist()):
        h_d, b_d = h[start:end], b[start:end]
        count = b_d.cumsum(0) - b_d                                                          # c_t
        segments = int(b_d.detach().sum().round())
        distance = torch.arange(segments, dtype=h.dtype) - count[:, None]                    # 0 inside the segment
        inside = (distance.detach().abs() < 0.5).to(h.dtype)
        weight = inside * (1 - distance)
        pooled.append((weight / weight.sum(0, keepdim=True)).T @ h_d)
        counts.append(counts[-1] + segments)
    return torch.cat(pooled), torch.tensor(counts)


def dense_unpool(z, null, b, cu_seqlens, segment_cu_seqlens):
    out = []
    for d in range(len(cu_seqlens) - 1):
        seen = b[cu_seqlens[d]:cu_seqlens[d + 1]].detach().cumsum(0).round().long()
        table = torch.cat((null[None], z[segment_cu_seqlens[d]:segment_cu_seqlens[d + 1]]))
        out.append(F.one_hot(seen, len(table)).to(z.dtype) @ table)
    return torch.cat(out)


def dense_unpool_by_place(z, null, b, cu_seqlens, segment_cu_seqlens):
    """z [N, P, D]: a byte receives the row of its place behind the boundary, the last one from there on."""
    out, places = [], z.shape[1]
    for d in range(len(cu_seqlens) - 1):
        rows, segment, place = iter(z[segment_cu_seqlens[d]:segment_cu_seqlens[d + 1]]), null, 0
        for end in b[cu_seqlens[d]:cu_seqlens[d + 1]].tolist():
            segment, place = (next(rows), 0) if end else (segment, min(place + 1, places - 1))
            out.append(segment[place])
    return torch.stack(out)


def check_pooling(lengths, kind):
    """pool and unpool equal the dense form in value and gradient, in float64."""
    generator = torch.Generator().manual_seed(3)
    rows = sum(lengths)
    cu = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(torch.int32)
    hard = {"none": torch.zeros(rows), "all": torch.ones(rows),
            "some": (torch.rand(rows, generator=generator) < 0.3).float()}[kind].double()
    b = hard.requires_grad_()
    h = torch.randn(rows, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    null = torch.randn(6, generator=generator, dtype=torch.float64, requires_grad=True)
    mix = torch.randn(6, 6, generator=generator, dtype=torch.float64)
    weight = torch.randn(rows, 6, generator=generator, dtype=torch.float64)
    results = []
    for pool, unpool in ((spider_model.pool_segments, spider_model.unpool_segments), (dense_pool, dense_unpool)):
        z, segment_cu = pool(h, b, cu)
        out = unpool((z @ mix).tanh(), null, b, cu, segment_cu)
        grads = torch.autograd.grad((out * weight).sum(), (h, b, null), allow_unused=True)
        results.append((z, segment_cu.long(), out, *(torch.zeros(()) if g is None else g for g in grads)))
    for ours, dense in zip(*results):
        torch.testing.assert_close(ours, dense.expand_as(ours), rtol=1e-9, atol=1e-9)


def check_halting():
    """Weights sum to 1, are p until the threshold, and what remains on the loop that reaches it."""
    p = torch.tensor([[0.2, 0.999, 0.5], [0.3, 0.5, 0.495], [0.1, 0.1, 0.9]]).T                # [segment, loop]
    for leave in (True, False):
        halting = Halting(torch.full((3,), 1 / 3), 0.99, leave, ends=True)
        for loop in range(3):
            state = F.one_hot(torch.full((3,), loop), 3).float()
            halting.add(halting.active.pick(state), halting.active.pick(p[:, loop]), loop == 2)
        expected = torch.tensor([[0.2, 0.3, 0.5], [1.0, 0.0, 0.0], [0.5, 0.5, 0.0]])
        torch.testing.assert_close(halting.output, expected)
        torch.testing.assert_close(halting.loops, torch.tensor(2.0))
        torch.testing.assert_close(halting.ponder, torch.tensor((3.5 + 2.0 + 2.5) / 3))


def check_noise():
    """A row's noise is a function of seed + row alone: however a batch is split, its rows keep theirs."""
    whole = spider_model.byte_noise(1000, 8, 16, torch.device("cpu"))
    halves = [spider_model.byte_noise(1000 + i, 4, 16, torch.device("cpu")) for i in (0, 4)]
    assert torch.equal(whole, torch.cat(halves))


# ---------------------------------------------------------------------------------------------------------------------
# 1, 2: causality and packing

@EVERY_CUT
@pytest.mark.parametrize("training", (True, False))
def test_a_byte_changes_no_logit_before_it_and_no_other_document(cut, training):
    check_causality(awake(small_config(**cut)), training, seed=len(cut) + 1)


@EVERY_CUT
def test_documents_packed_in_one_row_give_the_logits_that_they_give_apart(cut):
    check_packing(awake(small_config(**cut)))


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


@pytest.mark.parametrize("training", (True, False))
def test_rows_of_odd_ids_give_finite_gradients_and_no_segment_to_pad(training):
    model = awake(small_config()).train(training)
    mixed = [BOS_ID, 65, EOS_ID, EOS_ID, 66, BOS_ID, 67, BOS_ID, BOS_ID, EOS_ID, PAD_ID, PAD_ID]
    ids = torch.tensor([[PAD_ID] * 12, [EOS_ID] * 12, [BOS_ID] * 12, mixed])
    out = model(ids, ids, noise_seed=0)
    out.loss.backward()
    assert out.loss.isfinite() and out.segments >= 12 + 3 and model(ids[:1], noise_seed=0).segments == 0
    assert all(grad is None or grad.isfinite().all() for grad in gradients(model).values())
    with torch.no_grad():                                                  # each row as it is alone
        torch.testing.assert_close(model.eval()(ids).logits, torch.cat([model(row[None]).logits for row in ids]),
                                   rtol=0, atol=2e-5)


# ---------------------------------------------------------------------------------------------------------------------
# Attention without a kernel for documents: on a CPU, and in fp32

MIXED = ((1,), (5, 1, 1, 2, 0, 3), (16, 256, 0, 256) + (16,) * 20, (4,) * 100 + (130,) + (4,) * 100,
         (600, 1, 30, 17, 0, 16, 200, 513), (1,) * 50, (96, 80, 70, 33))


def attention_of(lengths, dtype, window=0) -> tuple[torch.Tensor, torch.Tensor, Packing]:
    """qkv [rows, 2, 3, 8] with a gradient, cu_seqlens and packing of documents of these lengths."""
    cu_seqlens = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(torch.int32)
    rows = int(cu_seqlens[-1])
    qkv = torch.randn(rows, 2, 3, 8, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    return qkv, cu_seqlens, Packing.build(cu_seqlens, rows, max(lengths), small_config(), dtype, window)


def attend_alone(part, window):
    """One document's rows [n, 2, 3, 8], each looking back on `window` of them, by a mask over all of them."""
    ahead = torch.arange(len(part)) - torch.arange(len(part))[:, None]
    mask = (ahead <= 0) & (ahead > -(window or len(part)))
    return F.scaled_dot_product_attention(*part.permute(2, 1, 0, 3), attn_mask=mask).transpose(0, 1)


@pytest.mark.parametrize("dtype,atol", ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.03)),
                         ids=("float64", "float32", "bfloat16"))
@pytest.mark.parametrize("window", (0, 1, 16, 24))
@pytest.mark.parametrize("lengths", MIXED, ids=lambda lengths: f"{len(lengths)} documents up to {max(lengths)}")
def test_documents_of_any_lengths_attend_as_each_would_alone_in_value_and_gradient(lengths, window, dtype, atol):
    qkv, cu_seqlens, packing = attention_of(lengths, dtype, window)
    upstream = torch.randn(len(qkv), 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    out = attention.attend_filled(qkv, packing)
    grad, = torch.autograd.grad(out, qkv, upstream)
    alone = qkv.detach().double().requires_grad_()
    expected = torch.cat([attend_alone(part, window) for part in alone.split(cu_seqlens.diff().tolist())]).flatten(1)
    expected_grad, = torch.autograd.grad(expected, alone, upstream.double())
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=atol)
    torch.testing.assert_close(grad.double(), expected_grad, rtol=0, atol=4 * atol)


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


class Made(TorchDispatchMode):
    """Counts the elements that operations make inside it."""
    elements = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        if not operation.is_view:
            self.elements += sum(t.numel() for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor))
        return out


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_many_short_documents_beside_a_long_one_cost_what_they_cost_apart(dtype):
    """16,384 bytes, 3,584 documents of four of them: filled up to the longest, they would cost 640 times as much."""
    short, long = (4,) * 1792, (2048,)

    def cost(lengths):
        with Made() as made:
            qkv, _, packing = attention_of(lengths, dtype)
            attention.attend_filled(qkv, packing).sum().backward()
        return made.elements
    assert cost(short + long + short) < 3 * (cost(short + short) + cost(long))


# ---------------------------------------------------------------------------------------------------------------------
# 4: segments

@pytest.mark.parametrize("kind", ("none", "all", "some"))
@pytest.mark.parametrize("lengths", ((1,), (40,), (7, 1, 30, 2)))
def test_pool_and_unpool_equal_the_dense_form_in_value_and_gradient(lengths, kind):
    check_pooling(lengths, kind)


@pytest.mark.parametrize("rate", (0.0, 0.3, 1.0))
def test_a_byte_receives_the_row_of_its_place_behind_the_boundary_and_the_last_one_beyond(rate):
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


@pytest.mark.parametrize("given, ends", (
    (b"to be, or", b"__x__x___"), (b"self.x_1 = f(a2)\n\n  y", b"____x___x___x__x_____"), (b"  ,,", b"____"),
    ("gr\u00fc\u00df \u4f60\u597d".encode(), b"______x___x__"), (b"a", b"_"),
    ("\u0434\u0430\u00a0\u0438\u2026".encode(), b"____x___x__")))
def test_words_end_at_the_first_byte_that_is_none_of_theirs(given, ends):
    ids = torch.tensor(list(given))
    found = word_ends(shifted_bytes(ids, torch.arange(len(ids)), 2)).squeeze(0)
    assert "".join("x" if end else "_" for end in found) == ends.decode()


def test_no_word_ends_at_the_first_byte_of_a_document():
    ids = torch.tensor([[BOS_ID, *b"ab", EOS_ID, *b" cd.", EOS_ID, *b".e"]])
    model = awake(small_config(boundaries="words")).eval()
    cut = []
    model.boundaries = lambda *given: cut.append(Spider.boundaries(model, *given)) or cut[-1]
    model(ids)
    assert cut[0].tolist() == [0, 0, 0, 1, 0, 0, 0, 1, 1, 0, 0]


def test_what_the_core_alone_says_is_scored_with_its_weight_and_teaches_the_core():
    ids = text(2, 40)
    plain, scored = (awake(small_config(core_loss_weight=weight)) for weight in (0.0, 0.5))
    without, out = (model(ids, ids, noise_seed=0) for model in (plain, scored))
    assert without.loss_terms["core_loss"] == 0 and out.nats_per_byte == without.nats_per_byte
    said = scored.lm_head(norm.rms_norm(handed_back(scored, ids))).view(-1, out.logits.shape[-1])
    torch.testing.assert_close(out.loss_terms["core_loss"], 0.5 * F.cross_entropy(said, ids.flatten()).detach())
    torch.testing.assert_close(out.loss, without.loss + out.loss_terms["core_loss"])
    assert awake(small_config(core_loss_weight=0.5, n_recurrent_layers=0))(ids, ids).loss_terms["core_loss"] == 0
    assert scored.eval()(ids, ids).loss_terms["core_loss"] == 0


def handed_back(model, ids):
    """What bytes receive of the core, [M, D]."""
    received, original = [], model.unpool
    model.unpool = lambda *given: received.append(original(*given)) or received[-1]
    model(ids, noise_seed=0)
    del model.unpool
    return received[0]


def check_uniform(noise):
    """Of numbers in (0, 1), [rows, columns]: as many of each size, and neighbours that say nothing of one another."""
    assert 0 < noise.min() and noise.max() < 1
    assert abs(noise.mean() - 1 / 2) < 0.005 and abs(noise.var() - 1 / 12) < 0.002
    for a, b in ((noise[:, 1:], noise[:, :-1]), (noise[1:], noise[:-1])):
        assert abs(torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1]) < 0.02


def test_noise_is_uniform_and_splits_with_the_batch():
    check_noise()
    check_uniform(uniform(byte_noise(7, 200, 500, torch.device("cpu"))))
    check_uniform(uniform(byte_noise(None, 200, 500, torch.device("cpu"))))


def test_dropout_drops_its_part_of_each_row_and_column_and_leaves_the_mean():
    noise, x = byte_noise(3, 1, 2000, torch.device("cpu"))[0], torch.ones(2000, 400)
    first, other = (dropped(x, 0.25, noise, site) for site in (0, 1))
    assert set(first.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    out = (first == 0).float()
    assert abs(out.mean() - 0.25) < 0.002
    assert (out.mean(0) - 0.25).abs().max() < 0.05 and (out.mean(1) - 0.25).abs().max() < 0.11  # five sigma
    for a, b in ((out[:, 1:], out[:, :-1]), (out[1:], out[:-1]), (out, (other == 0).float())):
        assert abs(torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1]) < 0.01


@pytest.mark.parametrize("cut", ({}, dict(boundaries="words", places=3, core_loss_weight=0.2)), ids=str)
def test_dropout_is_of_training_a_function_of_the_rows_seed_and_falls_where_it_says(cut):
    def nats(model, ids, seed):
        return model(ids, ids, noise_seed=seed).nats_per_byte
    ids = text(4, 48, seed=8)
    model = awake(small_config(**cut))
    with torch.no_grad():
        plain, evaluated = nats(model, ids, 0), nats(model.eval(), ids, 0)
        model.dropout = 0.5
        assert nats(model, ids, 0) == evaluated
        model.train()
        assert abs(nats(model, ids, 0) - plain) > 1e-5 and nats(model, ids, 0) == nats(model, ids, 0)
        rows = torch.stack([nats(model, ids[i:i + 1], i) for i in range(4)])
        torch.testing.assert_close(nats(model, ids, 0), rows.mean())
    seen, boundaries = {}, model.boundaries
    model.boundaries = lambda x, *given: seen.update({"prelude": x}) or boundaries(x, *given)
    for name, module in (("core", model.core.layers[0]), ("handed", model.core.out_proj), ("coda", model.coda[0])):
        module.register_forward_pre_hook(lambda module, args, name=name: seen.update({name: args[0]}))
    with torch.no_grad():
        model.core.loop_embedding.zero_()
        segments = int(model(ids, n_loops=1, noise_seed=0).segments)
    out = {name: rows[:segments if name in ("core", "handed") else None] == 0 for name, rows in seen.items()}
    for name, other, rate in (("core", "handed", 0.5), ("handed", "core", 0.5), ("prelude", "coda", 0.1),
                              ("coda", "prelude", 0.1)):
        assert abs(out[name].float().mean() - rate) < rate / 5, name
        assert abs(out[name][out[other]].float().mean() - rate) < rate / 2, "sites share what they drop"


def test_a_byte_is_cut_as_often_as_its_probability_says_and_segments_are_even():
    model = awake(small_config())
    ids = text(1, 64)
    with torch.no_grad():
        model.boundary_predictor[2].weight.normal_(std=0.5)
        cu_seqlens = torch.tensor([0, 64], dtype=torch.int32)
        packing = Packing.build(cu_seqlens, 64, 64, model.config, torch.float32)
        x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
        p = model.boundary_predictor(norm.rms_norm(x)).squeeze(1).sigmoid()
        shifted = shifted_bytes(ids.flatten(), packing.position, 2)
        cuts = torch.stack([model.boundaries(x, ids, shifted, packing, noise) for noise in byte_noise(
            0, 3000, 64, x.device)])
    assert p.std() > 0.05 and (cuts.mean(0) - p).abs().max() < 0.04
    assert (cuts.sum(1) - p.sum()).abs().max() <= 1  # independent draws would differ by several


def test_eos_ends_a_segment_and_pad_never_does():
    model = awake(small_config())
    ids = torch.cat((documents(9, 7), torch.full((1, 4), PAD_ID)), dim=1)
    with torch.no_grad():
        model.boundary_predictor[2].bias.fill_(-100)
        assert model(ids, noise_seed=0).segments == 2
        model.boundary_predictor[2].bias.fill_(100)
        assert model(ids, noise_seed=0).segments == 16


def test_many_short_rows_need_no_longer_document_than_a_row():
    model = awake(small_config())
    ids = text(96, 8)
    model(ids, ids, noise_seed=0).loss.backward()
    together = model.eval()(ids).logits
    torch.testing.assert_close(together[:3], model(ids[:3]).logits, rtol=0, atol=2e-5)


def test_a_batch_without_any_segment_still_trains():
    model = awake(small_config(boundaries="whitespace"))
    ids = torch.full((2, 16), ord("x"))
    out = model(ids, ids)
    out.loss.backward()
    assert out.segments == 0 and math.isfinite(float(out.loss.detach())) and model.null_segment.grad.abs().sum() > 0


def test_evaluation_cuts_as_often_as_training_within_a_tenth():
    model = awake(small_config())
    ids = text(32, 64, seed=4)
    with torch.no_grad():
        trained = model.train()(ids, noise_seed=5).segments
        evaluated = model.eval()(ids).segments
    assert abs(evaluated / trained - 1) < 0.1


# ---------------------------------------------------------------------------------------------------------------------
# 5, 6: recurrence and halting

def test_the_decay_stays_inside_0_and_1_and_the_state_bounded_at_64_loops():
    model = awake(small_config())
    ids = text(4, 64)
    with torch.no_grad():
        torch.testing.assert_close(model.core.decay(), torch.full((32,), math.exp(-0.1)), rtol=0, atol=1e-6)
    for lr in (1e-2, 1.0, 1e3, 1e6):
        dense = [p for name, p in model.core.named_parameters() if not name.endswith("table.weight")]
        optimizer = torch.optim.SGD(dense, lr=lr)
        model(ids, ids, noise_seed=1).loss.backward()
        for p in (model.core.log_A, model.core.dt):
            p.grad.add_(torch.randn_like(p))
        optimizer.step()
        optimizer.zero_grad()
        decay = model.core.decay()
        assert (decay > 0).all() and (decay < 1).all()
        model.core.load_state_dict(awake(small_config()).core.state_dict())
    states = []
    model.core.adapt, adapt = lambda y, loop: (states.append(adapt(y, loop)), states[-1])[1], model.core.adapt
    with torch.no_grad():
        model.core.halt_predictor.bias.fill_(-30)                          # no segment halts before the last loop
        model.core.dt.fill_(-20)                                           # the slowest decay there is
        model(ids, n_loops=64, noise_seed=1)
    sizes = torch.stack([h.norm(dim=1).max() for h in states])
    added = F.pad(sizes, (1, 0)).diff()  # what a loop adds does not grow with what is there
    assert sizes.isfinite().all() and added[32:].max() <= 1.2 * added[:32].max()


def test_the_state_at_the_start_grows_no_more_than_what_it_takes_in():
    """Each loop takes e in whole, at a layer's input size, and keeps 0.9 of what was there."""
    torch.manual_seed(0)
    model = Spider(small_config(n_loops=6))
    states = []
    model.core.adapt, adapt = lambda y, loop: (states.append(adapt(y, loop)), states[-1])[1], model.core.adapt
    with torch.no_grad():
        model(text(8, 64), noise_seed=1)
    size = [h.square().mean().sqrt().item() for h in states]
    summed = [(1 - math.exp(-0.1 * t)) / (1 - math.exp(-0.1)) for t in range(1, 7)]  # of A h + e, e of size 1
    assert all(0.8 * alone < with_layers < 1.5 * alone for with_layers, alone in zip(size, summed)), size


def test_act_weights_sum_to_one_and_one_loop_gives_the_first_state():
    check_halting()
    model = awake(small_config())
    states = []
    model.core.adapt, adapt = lambda y, loop: (states.append(adapt(y, loop)), states[-1])[1], model.core.adapt
    halting = {}
    model.core.register_forward_hook(lambda module, args, out: halting.update(out=out[0]))
    with torch.no_grad():
        out = model(text(2, 32), n_loops=1, noise_seed=0)
    torch.testing.assert_close(halting["out"], model.core.out_proj(norm.rms_norm(states[0])))
    assert out.mean_loops == 1


@pytest.mark.parametrize("recompute", ("nothing", "core"))
@pytest.mark.parametrize("at_once", (False, True))
@pytest.mark.parametrize("cut", ({}, dict(n_routed_experts=0), dict(lti=False, lora_rank=0), dict(
    boundaries="words", places=3, core_loss_weight=0.2)), ids=str)
def test_rows_that_leave_the_core_compute_what_masked_ones_do(cut, at_once, recompute):
    """Also where all of a loop's segments have halted, and documents have halted as a whole."""
    ids, labels, results = documents(30, 2, 70, 1, 25), text(1, 128, seed=9), []
    for leave in (True, False):
        model = awake(small_config(n_loops=5, n_recurrent_layers=3, engram_layers=(1, 2), **cut), dtype=torch.float64)
        model.core.halted_leave, model.recompute, model.dropout = leave, recompute, 0.3
        model.set_backend("loop")         # grouped products know no float64
        with torch.no_grad():
            model.core.halt_predictor.weight.mul_(0 if at_once else 100)
            model.core.halt_predictor.bias.fill_(8 if at_once else 0.5)
        rows = []
        model.core.layers[0].register_forward_pre_hook(lambda module, args: rows.append(len(args[0])))
        out = model(ids, labels, noise_seed=3)
        visited = rows.copy()             # recomputation comes later
        out.loss.backward()
        results.append((out, {name: p.grad for name, p in model.named_parameters()}, visited))
    (leaving, gradients, rows), (masked, others, all_rows) = results
    assert rows == sorted(rows, reverse=True) and rows[0] == all_rows[0] and len(set(all_rows)) == 1
    if at_once:
        assert float(leaving.mean_loops) == pytest.approx(1) and len(rows) == 1 < len(all_rows)
    else:
        assert 1.2 < leaving.mean_loops < 4.8 and rows[-1] < rows[0]
    for name, value in vars(leaving).items():
        rtol = 1e-6 if name in ("tokens_per_expert", "loss_terms") else 1e-10  # counted in fp32
        torch.testing.assert_close(value, vars(masked)[name], rtol=rtol, atol=1e-12, msg=name)
    for name, grad in gradients.items():
        if grad is not None or others[name] is not None:
            torch.testing.assert_close(grad, others[name], rtol=1e-8, atol=1e-10, msg=name)  # the load is fp32


@pytest.mark.parametrize("leave", (True, False))
def test_what_a_halted_segment_leaves_behind_is_of_the_state_it_halted_with_and_stays(leave):
    """With every segment halting at once but the last, they are computed once more and then the last alone."""
    model = awake(small_config(boundaries="every_third", n_loops=4)).eval()
    ids, seen, computed = text(1, 24), [], []
    model.core.halted_leave = leave
    model.core.halt = lambda h: F.pad(h.new_ones(len(h) - 1), (0, 1))
    model.core.layers[0].register_forward_hook(lambda module, args, out: seen.append(out[2][0]))
    model.core.layers[0].register_forward_pre_hook(lambda module, args: computed.append(len(args[0])))
    with torch.no_grad():
        model(ids)
    first, second, *later = seen
    assert computed == ([8, 8, 1, 1] if leave else [8] * 4) and len(later) == 2
    assert ((first - second).abs().amax(1) > 1e-3).all()
    for loop in later:
        assert torch.equal(loop[:-1], second[:-1]) and not torch.equal(loop[-1], second[-1])


def test_where_all_segments_halt_nothing_is_computed_once_more_unless_later_ones_come():
    model = awake(small_config(boundaries="every_third", n_loops=4)).eval()
    ids, computed = text(1, 24), []
    model.core.halt = lambda h: h.new_ones(len(h))
    model.core.layers[0].register_forward_pre_hook(lambda module, args: computed.append(len(args[0])))
    with torch.no_grad():
        whole = model(ids).logits
        assert computed == [8]
        stepped = model.step(ids, model.decoding_state())
        assert computed == [8, 8, 8]
    torch.testing.assert_close(whole, stepped, rtol=1e-4, atol=1e-5)


TYPES = torch.float16, torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize("parameters", TYPES, ids=str)
@pytest.mark.parametrize("products", TYPES, ids=str)
def test_parameters_and_products_may_be_of_any_types_and_sums_are_as_exact(parameters, products):
    """In bf16 a segment's bytes would be counted to 256 at most."""
    model, ids = awake(small_config(boundaries="words")), torch.full((1, 600), ord("a"))
    ids[0, 5], ids[0, 550:] = ord(" "), text(1, 50)
    expected = model.eval()(ids, ids).loss
    model = model.to(parameters).train()
    assert model.compute_dtype == parameters
    model.compute_dtype = products
    out = model(ids, ids, noise_seed=0)
    assert out.logits.dtype == torch.promote_types(torch.promote_types(parameters, products), torch.float32)
    torch.testing.assert_close(out.loss.float(), expected, rtol=0, atol=2e-2 if torch.bfloat16 in (
        parameters, products) else 2e-3)
    out.loss.backward()
    optimizer = RowwiseAdagrad([model.engram_input.table], lr=0.25)
    optimizer.step()
    assert all(g is None or g.isfinite().all() for g in gradients(model).values())
    assert model.engram_input.table.weight.isfinite().all() and model.engram_input.table.weight.dtype == parameters
    with torch.no_grad():
        full, state = model.eval()(ids).logits, model.decoding_state()
        stepped = torch.cat([model.step(part, state) for part in ids.split([300, 299, 1], dim=1)], dim=1)
    torch.testing.assert_close(stepped, full, rtol=0, atol=1e-1 if torch.finfo(products).bits == 16 else 1e-5)


def test_without_core_there_is_neither_segment_nor_loop():
    model = awake(small_config(n_recurrent_layers=0))
    out = model(ids := text(2, 32), ids, noise_seed=0)
    out.loss.backward()
    assert out.segments == 0 and out.mean_loops == 0 and out.loss == out.nats_per_byte
    assert not any(name.startswith(("core", "null", "boundary")) for name, _ in model.named_parameters())


def test_more_loops_than_trained_use_the_last_adapter():
    model = awake(small_config(n_loops=2)).eval()
    ids = text(2, 32)
    with torch.no_grad():
        four = model(ids, n_loops=4).logits
        model.core.loop_embedding.data = model.core.loop_embedding.data[[0, 1, 1, 1]]
        model.core.lora_up.data, model.core.lora_down.data = (
            w.data[[0, 1, 1, 1]] for w in (model.core.lora_up, model.core.lora_down))
        model.core.config = dataclasses.replace(model.config, n_loops=4)
        torch.testing.assert_close(model(ids, n_loops=4).logits, four)


# ---------------------------------------------------------------------------------------------------------------------
# 7, 8: construction, gradients, components

def test_meta_construction_then_init_weights_equals_direct_construction():
    config = small_config()
    torch.manual_seed(1)
    direct = Spider(config)
    with torch.device("meta"):
        model = Spider(config)
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(77)
    torch.manual_seed(1)
    model.init_weights()
    for (name, a), (_, b) in zip([*direct.named_parameters(), *direct.named_buffers()],
                                 [*model.named_parameters(), *model.named_buffers()]):
        assert torch.equal(a, b), name


class Convolved(layers.Block):
    """A block as a researcher may extend it: modules of torch's own, and a parameter in a list."""

    def __init__(self, *given):
        super().__init__(*given)
        config = given[0]
        self.conv, self.norm = torch.nn.Conv1d(config.hidden_size, 8, 4), torch.nn.BatchNorm1d(8)
        self.scales = torch.nn.ParameterList([torch.nn.Parameter(torch.empty(3))])

    def reset_parameters(self):
        self.scales[0].data.fill_(2)


def everything(model) -> dict:
    return dict([*model.named_parameters(), *model.named_buffers()])


def from_meta(config) -> Spider:
    """A model as train.py makes it, in memory that holds something."""
    with torch.device("meta"):
        model = Spider(config)
    model.to_empty(device="cpu")
    for tensor in everything(model).values():
        tensor.data.fill_(77)
    torch.manual_seed(1)
    model.init_weights()
    return model


def test_modules_that_the_model_does_not_know_initialize_themselves_and_change_no_weight_of_its_own(monkeypatch):
    torch.manual_seed(1)
    plain = everything(Spider(config := small_config()))
    monkeypatch.setattr(Spider, "block_class", Convolved)
    torch.manual_seed(1)
    direct, later = everything(Spider(config)), everything(from_meta(config))
    assert direct.keys() == later.keys() > plain.keys()
    for name, tensor in direct.items():
        assert torch.equal(tensor, later[name]) and (name not in plain or torch.equal(tensor, plain[name])), name
    assert 0 < direct["prelude.0.conv.weight"].abs().max() <= 128 ** -0.5
    assert not torch.equal(direct["prelude.0.conv.weight"], direct["coda.0.conv.weight"])
    assert (direct["prelude.0.scales.0"] == 2).all() and (direct["coda.0.norm.running_var"] == 1).all()
    assert direct["coda.0.norm.num_batches_tracked"] == 0


class Gained(casting.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.gain = torch.nn.Parameter(torch.ones(()))


FORGOTTEN = {
    "scale": lambda block: setattr(block, "scale", torch.nn.Parameter(torch.ones(3))),
    "halves": lambda block: block.register_parameter("halves", torch.nn.Parameter(torch.ones(2, dtype=torch.float16))),
    "mask": lambda block: block.register_buffer("mask", torch.ones(4, 4).tril().bool()),
    "counts": lambda block: block.register_buffer("counts", torch.arange(3), persistent=False),
    "more.gain": lambda block: block.add_module("more", Gained(4, 4)),
    "mixing.in_proj_weight": lambda block: block.add_module("mixing", torch.nn.MultiheadAttention(4, 2)),
}


@pytest.mark.parametrize("make", (Spider, from_meta))
@pytest.mark.parametrize("name", FORGOTTEN)
def test_what_nobody_initializes_is_named(monkeypatch, make, name):
    """However it was constructed: what a constructor sets is lost where a model is made on the meta device."""
    class Forgetful(layers.Block):
        def __init__(self, *given):
            super().__init__(*given)
            FORGOTTEN[name](self)
    monkeypatch.setattr(Spider, "block_class", Forgetful)
    with pytest.raises(RuntimeError, match=f"nobody initializes prelude.0.{name}.*coda.0.{name}.*reset_parameters"):
        make(small_config())
    with torch.device("meta"):
        Spider(small_config())            # where there is no value


def test_the_1b_model_has_996m_parameters_in_the_shares_of_the_design():
    with torch.device("meta"):
        model = Spider(SpiderConfig.preset("1b"))
    table = costs.parameter_table(model)
    total = sum(count for count, _ in table.values())
    assert total == sum(p.numel() for p in model.parameters())
    assert abs(total / 996e6 - 1) < 0.005
    engram = sum(count for name, (count, _) in table.items() if name.startswith("Engram"))
    assert 0.17 < engram / total < 0.19
    assert abs(model.flops_per_byte(10 / 3, 6, 256) / 2.0e9 - 1) < 0.1                     # performance.md's floor
    assert abs(model.flops_per_byte(1, 6, 256) / 4.8e9 - 1) < 0.15


def test_every_parameter_receives_a_gradient_on_real_text():
    model = awake(small_config())
    ids = torch.tensor(list((ROOT / "LICENSE").read_bytes()[1000:8 * 128 + 1001]))
    model(ids[:-1].view(8, 128), ids[1:].view(8, 128), noise_seed=0).loss.backward()
    for name, grad in gradients(model).items():
        assert grad.isfinite().all() and grad.abs().sum() > 0, name
    for layer in model.core.layers:
        assert (layer.moe.w_down.grad.abs().sum((1, 2)) > 0).all()


@pytest.mark.parametrize("preset", PRESETS)
def test_every_number_of_the_config_has_a_range_that_its_presets_lie_inside(preset):
    config = SpiderConfig.preset(preset)
    numbers = {f.name for f in dataclasses.fields(config) if type(f.default) in (int, float)}
    assert RANGES.keys() == numbers
    for name in numbers:
        twice = 2 * type(getattr(config, name))(RANGES[name][1])
        for beyond in (twice, -1, math.nan, math.inf, 10 ** 5000, "1", None, True):
            with pytest.raises(ValueError, match=f"^{name} must be "):
                dataclasses.replace(config, **{name: beyond})


def test_what_a_model_cannot_be_given_is_named_with_what_it_takes():
    model, ids = awake(small_config()), text(2, 8)
    for backend in ("nonsense", "auto", None):
        with pytest.raises(ValueError, match=f"{backend!r} is not one of loop, grouped, tile"):
            model.set_backend(backend)
    with pytest.raises(ValueError, match="'huge' is not one of 1b, small, tiny"):
        SpiderConfig.preset("huge")
    for odd, found in ((ids[0], r"\[8\]"), (ids[None], r"\[1, 2, 8\]"), (ids.float(), "float32"), (ids.int(), "int32"),
                       (ids[:, :0], r"\[2, 0\]"), (ids[:0], r"\[0, 8\]")):
        with pytest.raises(ValueError, match=rf"^input_ids must be int64 \[B, T\], .*{found}"):
            model(odd)
    for odd, found in ((ids[0], r"\[8\]"), (ids[:, 1:], r"\[2, 7\]"), (ids[:1], r"\[1, 8\]"), (ids.float(), "float32")):
        with pytest.raises(ValueError, match=rf"^labels must be int64 \[2, 8\], .*{found}"):
            model(ids, odd)
    model.eval()
    for odd, found in ((ids[0], r"\[8\]"), (ids[:1], r"\[1, 8\]"), (ids[:, :0], r"\[2, 0\]"), (ids.int(), "int32")):
        with pytest.raises(ValueError, match=rf"^input_ids must be int64 \[2, n\], .*{found}"):
            model.step(odd, model.decoding_state(2))
    with pytest.raises(ValueError, match=r"^input_ids must be int64 \[1, n\], .*\[1, 0\]"):
        list(model.generate([], 3))


@st.composite
def configs(draw) -> dict:
    """A few fields of small_config changed, to sense and nonsense."""
    whole = st.sampled_from((0, 1, 2, 3, 5, 7, 8, 15, 16, 17, 24, 32, 48, 64, 65, -1, 10 ** 9, 10 ** 18, 4 * 10 ** 18))
    kinds = {int: whole, float: st.floats(0, 1.5) | st.floats(), bool: st.booleans(), tuple: st.lists(
        whole | st.integers(0, 8), max_size=4), str: st.sampled_from(BOUNDARIES)}
    names = draw(st.lists(st.sampled_from(dataclasses.fields(SpiderConfig)), min_size=1, max_size=4))
    return {f.name: draw(kinds[type(f.default)]) for f in names}


@settings(deadline=None, max_examples=60)
@given(configs())
def test_a_config_is_refused_by_the_name_of_a_field_or_makes_a_model_that_trains(changes):
    try:
        config = small_config(**changes)
    except ValueError as fault:
        assert any(f.name in str(fault) for f in dataclasses.fields(SpiderConfig)) and len(str(fault)) < 200
        return
    with torch.device("meta"):
        parameters = sum(p.numel() for p in Spider(config).parameters())
    if parameters * config.n_loops * config.n_recurrent_layers < 4e6:
        for dtype in (torch.float32, torch.bfloat16):
            model, ids = Spider(config), text(2, 24)
            model.compute_dtype = dtype
            loss = model(ids, ids, noise_seed=0).loss
            loss.backward()
            assert loss.isfinite() and all(g is None or g.isfinite().all() for g in gradients(model).values())


def last_bytes(part: list[int], t: int, n: int) -> list[int] | None:
    return part[t + 1 - n:t + 1] if t >= n - 1 else None


def since_words(part: list[int], t: int, n: int) -> list[int]:
    """The bytes up to t behind the n-th last end of a word, PAD before the document."""
    ends = [s for s in range(t, max(t - 31, 0), -1) if part[s] not in {*b"ABCD"} and part[s - 1] in {*b"ABCD"}]
    return part[ends[n - 1] + 1:t + 1] if len(ends) >= n else ([PAD_ID] * 31 + part)[t + 1:t + 32]


@pytest.mark.parametrize("orders, words", (((1,), ()), ((2, 3, 7), (1, 2)), ((4, 32), (3,)), ((), (1, 4))))
def test_matches_are_what_followed_the_last_time_in_the_same_document(orders, words):
    rows = torch.cat((text(2, 60, 3) % 4 + 65, documents(7, 2, 30, 21) % 3 + 65))
    if words:
        rows[rows == ord("B")], rows[1][rows[1] == ord("C")] = ord(" "), 0
        rows[0, 12:50] = ord("A")  # no word ends within as many bytes as are read
    rows[0, [9, 30]], rows[1, 4], rows[2, 6], rows[2, 20] = EOS_ID, PAD_ID, EOS_ID, BOS_ID
    ids, cu_seqlens = rows.flatten(), document_cu_seqlens(rows)
    packing = Packing.build(cu_seqlens, len(ids), 60, small_config(), torch.float32)
    memory = match_memory.MatchMemory(orders, words)
    memory.init_hash(0)
    found = memory(ids, shifted_bytes(ids, packing.position, len(memory.multiplier)), packing.document)
    for begin, end in zip(cu_seqlens.tolist(), cu_seqlens[1:].tolist()):
        part = ids[begin:end].tolist()
        for t in range(len(part)):
            for j, n in enumerate((*orders, *words)):
                context = last_bytes if j < len(orders) else since_words
                here = context(part, t, n)
                before = [s for s in range(t) if here is not None and context(part, s, n) == here]
                followed = [part[s + 1] for s in before[-2:]]
                kind = 0 if len(before) < 2 else 256 if followed[0] == followed[1] else 512
                assert found[begin + t, j] == (followed[-1] + kind if before and followed[-1] < 256 else 768)
    assert all(((low <= found) & (found < low + 256)).any() for low in (0, 512, 768))


@pytest.mark.parametrize("cut", ("engram_input", "engram_output", "matches", "segment engram", "prelude", "core", "coda", "lora",
                                 "injection", "halting", "experts", "shared", "attention", "loop_embedding", "null"))
def test_every_component_changes_the_loss_when_it_is_cut_out(cut):
    model = awake(small_config())
    ids, labels = text(4, 64, seed=8), text(4, 64, seed=9)
    with torch.no_grad():
        before = model(ids, labels, noise_seed=0).nats_per_byte
        layer = model.core.layers[1]
        weights = {"engram_input": [model.engram_input.table.weight],
                   "engram_output": [model.engram_output.table.weight],
                   "matches": [model.engram_input.followed, model.engram_output.followed],
                   "segment engram": [layer.engram.table.weight], "lora": [model.core.lora_up],
                   "prelude": [model.prelude[0].ffn.down_proj.weight], "coda": [model.coda[0].ffn.down_proj.weight],
                   "core": [model.core.B, model.core.loop_embedding], "injection": [model.core.B],
                   "halting": [model.core.halt_predictor.weight, model.core.halt_predictor.bias],
                   "experts": [layer.moe.w_down], "shared": [layer.moe.shared.down_proj.weight],
                   "attention": [layer.attention.o_proj.weight], "loop_embedding": [model.core.loop_embedding],
                   "null": [model.null_segment]}[cut]
        for weight in weights:
            weight.zero_()
        after = model(ids, labels, noise_seed=0).nats_per_byte
    assert abs(after - before) > 1e-5


@EVERY_CUT
def test_recomputation_changes_no_gradient_and_counts_no_token_twice(cut):
    ids = text(4, 48, seed=8)
    results = []
    for recompute in RECOMPUTE:
        model = awake(small_config(**cut))
        model.recompute, model.dropout = recompute, 0.3
        out = model(ids, ids, noise_seed=0)
        out.loss.backward()
        results.append((out, gradients(model)))
    (a, plain), *others = results
    for b, recomputed in others:
        assert torch.equal(a.tokens_per_expert, b.tokens_per_expert)
        assert a.loss == b.loss
        for name, grad in plain.items():
            if grad is not None:
                torch.testing.assert_close(grad, recomputed[name], rtol=0, atol=1e-7, msg=name)


def test_recomputation_keeps_the_first_routing_even_if_the_scores_have_moved():
    model = awake(small_config(n_recurrent_layers=1, n_loops=1, engram_layers=()))
    model.recompute = "core"
    seen = []
    def route(score, bias, k, backend, topk_idx=None, original=tile_moe.route):
        chosen, weights = original(score if not seen else -score, bias, k, backend, topk_idx)
        seen.append(chosen)
        return chosen, weights
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spider_model, "route", route)
        ids = text(2, 32)
        model(ids, ids, noise_seed=0).loss.backward()
    assert len(seen) == 2 and torch.equal(*seen)


def test_products_of_rows_in_bf16_with_a_weight_in_fp32_are_those_of_fp32_in_value_and_gradient():
    """A weight in bf16 alone would be off by 1e-3."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 64, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(8, 64, generator=generator, requires_grad=True)
    upstream = torch.randn(50, 8, generator=generator)
    ours = casting._Wide.apply(x, weight, casting.halves(weight.detach(), 0))
    theirs = x.double() @ weight.double().T
    for a, b, tolerance in ((ours, theirs, 1e-5), *zip(torch.autograd.grad(ours, (weight, x), upstream),
                                                       torch.autograd.grad(theirs, (weight, x), upstream.double()),
                                                       (1e-5, 5e-3))):
        assert (a.double() - b.double()).norm() < tolerance * b.double().norm()


def test_the_expert_bias_moves_towards_balance():
    model = awake(small_config())
    for layer in model.core.layers:
        layer.moe.expert_bias.zero_()
    model.update_expert_bias(torch.tensor([[4.0, 0.0, 2.0, 2.0], [1.0, 1.0, 1.0, 1.0]]))
    torch.testing.assert_close(model.core.layers[0].moe.expert_bias, torch.tensor([-0.001, 0.001, 0, 0]))
    assert not model.core.layers[1].moe.expert_bias.any()


def test_labels_of_minus_100_do_not_count():
    model = awake(small_config()).eval()
    ids, labels = text(2, 32), text(2, 32, seed=1)
    half = labels.clone()
    half[:, 16:] = -100
    with torch.no_grad():
        expected = F.cross_entropy(model(ids).logits[:, :16].reshape(-1, 272), labels[:, :16].reshape(-1))
        torch.testing.assert_close(model(ids, half).nats_per_byte, expected)
        assert model(ids, torch.full_like(labels, -100)).nats_per_byte == 0


def test_generation_is_reproducible_stops_at_eos_and_writes_bytes_only():
    model = awake(small_config()).eval()
    runs = [list(model.generate([257, 65], 20, generator=torch.Generator().manual_seed(3))) for _ in range(2)]
    assert runs[0] == runs[1] and all(0 <= byte < 256 for byte in runs[0])
    greedy = list(model.generate([257, 65], 5, temperature=0))
    with torch.no_grad():
        assert greedy[0] == model(torch.tensor([[257, 65]])).logits[0, -1, :256].argmax()
        model.lm_head.weight.zero_()
        model.lm_head.weight[EOS_ID] = 1e3 * torch.randn(32)
    lengths = {len(list(model.generate([257, 65 + i], 40, temperature=0))) for i in range(8)}
    assert min(lengths) == 0


# ---------------------------------------------------------------------------------------------------------------------
# Planted faults: each check above fails on the mistake that it is there for

def shifted_unpool(z, null, b, *where):
    return unpool_segments(z, null, b.roll(-1), *where)


def pool_across_documents(h, b, cu_seqlens):
    whole = torch.tensor([0, len(h)], dtype=torch.int32)
    z, _ = pool_segments(h, b, whole)
    return z, pool_segments(h, b, cu_seqlens)[1]


def wrong_remainder(self, h, p, last, original=Halting.add):
    return original(self, h, p, False)


def noise_of_the_batch(seed, sequences, length, device):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1 << 62, (sequences, length), generator=generator)


def test_a_shifted_unpool_is_noticed(monkeypatch):
    monkeypatch.setattr(spider_model, "unpool_segments", shifted_unpool)
    with pytest.raises(AssertionError):
        for seed in range(4):
            check_causality(awake(small_config()), training=True, seed=seed)
    with pytest.raises(AssertionError):
        check_pooling((7, 1, 30, 2), "some")


def test_a_segment_that_crosses_documents_is_noticed(monkeypatch):
    monkeypatch.setattr(spider_model, "pool_segments", pool_across_documents)
    with pytest.raises((AssertionError, RuntimeError)):
        check_pooling((7, 1, 30, 2), "some")


def test_attention_across_documents_is_noticed(monkeypatch):
    monkeypatch.setattr(spider_model, "document_cu_seqlens",
                        lambda ids: torch.arange(0, ids.numel() + 1, ids.shape[1], dtype=torch.int32))
    with pytest.raises(AssertionError):
        check_packing(awake(small_config()))


def test_a_wrong_act_remainder_is_noticed(monkeypatch):
    monkeypatch.setattr(Halting, "add", wrong_remainder)
    with pytest.raises(AssertionError):
        check_halting()


def test_noise_that_depends_on_the_batch_split_is_noticed(monkeypatch):
    monkeypatch.setattr(spider_model, "byte_noise", noise_of_the_batch)
    with pytest.raises(AssertionError):
        check_noise()

"""Invariants of the model; each check is also seen failing on a planted fault."""

import pytest
import torch
import torch.nn.functional as F
from segment_checks import check_pooling
from torch import nn

import spider_model
from conftest import ROOT, awake, documents, gradients, small_config, text
from spider.model import norm
from spider.model.config import RECOMPUTE, SpiderConfig
from spider.model.segments import unpool_segments
from spider.training.optimizers import RowwiseAdagrad
from spider_model import Spider
from tokenizer import BOS_ID, EOS_ID, PAD_ID

CUTS = {
    "nothing": {}, "surprise": dict(boundaries="learned"), "learned boundaries": dict(boundaries="whitespace"),
    "stride": dict(boundaries="every_third"),
    "segment engram": dict(engram_layers=()), "byte engram": dict(engram_byte_orders=()), "lora": dict(lora_rank=0),
    "matches": dict(engram_match_orders=()), "byte memory": dict(engram_byte_orders=(), engram_match_orders=()),
    "since words": dict(engram_match_words=(1, 2)),
    "since words alone": dict(engram_byte_orders=(), engram_match_orders=(), engram_match_words=(1, 3)),
    "votes": dict(engram_votes=3), "logits": dict(engram_logits=True),
    "votes, logits": dict(engram_votes=4, engram_match_orders=(1, 2, 5), engram_match_words=(1,), engram_logits=True),
    "votes alone": dict(engram_byte_orders=(), engram_votes=1),
    "lti": dict(lti=False), "act": dict(act=False), "experts": dict(n_routed_experts=0, n_shared_experts=3),
    "shared expert": dict(n_shared_experts=0), "loops": dict(n_loops=1), "core": dict(n_recurrent_layers=0),
    "all but a window": dict(byte_window=5), "pooling": dict(boundaries="every_byte"),
}
EVERY_CUT = pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS.keys())


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


@EVERY_CUT
@pytest.mark.parametrize("training", (True, False))
def test_a_byte_changes_no_logit_before_it_and_no_other_document(cut, training):
    check_causality(awake(small_config(**cut)), training, seed=len(cut) + 1)


@EVERY_CUT
def test_documents_packed_in_one_row_give_the_logits_that_they_give_apart(cut):
    check_packing(awake(small_config(**cut)))


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
    """Return the rows that bytes receive of the core, [M, D]."""
    received, original = [], model.unpool
    model.unpool = lambda *given: received.append(original(*given)) or received[-1]
    model(ids, noise_seed=0)
    del model.unpool
    return received[0]


def test_many_short_rows_need_no_longer_document_than_a_row():
    model = awake(small_config())
    ids = text(96, 8)
    model(ids, ids, noise_seed=0).loss.backward()
    together = model.eval()(ids).logits
    torch.testing.assert_close(together[:3], model(ids[:3]).logits, rtol=0, atol=2e-5)


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


@pytest.mark.parametrize("changes", ({}, CUTS["votes, logits"]), ids=("rows of matches", "votes"))
def test_every_parameter_receives_a_gradient_on_real_text(changes):
    model = awake(small_config(**changes))
    ids = torch.tensor(list((ROOT / "LICENSE").read_bytes()[1000:8 * 128 + 1001]))
    model(ids[:-1].view(8, 128), ids[1:].view(8, 128), noise_seed=0).loss.backward()
    for name, grad in gradients(model).items():
        assert grad.isfinite().all() and grad.abs().sum() > 0, name
    for layer in model.core.layers:
        assert (layer.moe.w_down.grad.abs().sum((1, 2)) > 0).all()


def test_what_a_model_cannot_be_given_is_named_with_what_it_takes():
    model, ids = awake(small_config()), text(2, 8)
    for backend in ("nonsense", "auto", None):
        with pytest.raises(ValueError, match=f"{backend!r} is not one of loop, grouped, tile"):
            model.set_backend(backend)
    with pytest.raises(ValueError, match="'huge' is not one of 1b, base, small, tiny"):
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


@pytest.mark.parametrize("cut", ("engram_input", "engram_output", "matches", "segment engram", "prelude", "core",
                                 "coda", "lora", "injection", "halting", "experts", "shared", "attention",
                                 "loop_embedding", "null", "votes", "logits"))
def test_every_component_changes_the_loss_when_it_is_cut_out(cut):
    model = awake(small_config(**CUTS["votes, logits"] if cut in ("votes", "logits") else {}))
    ids, labels = text(4, 64, seed=8), text(4, 64, seed=9)
    with torch.no_grad():
        before = model(ids, labels, noise_seed=0).nats_per_byte
        layer = model.core.layers[1]
        weights = {"engram_input": [model.engram_input.table.weight],
                   "engram_output": [model.engram_output.table.weight],
                   "matches": [model.engram_input.followed, model.engram_output.followed],
                   "votes": [*(model.engram_output.votes or nn.Identity()).parameters()],
                   "logits": [*(model.engram_output.logits or nn.Identity()).parameters()],
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


def shifted_unpool(z, null, b, *where):
    return unpool_segments(z, null, b.roll(-1), *where)


def test_a_shifted_unpool_is_noticed(monkeypatch):
    monkeypatch.setattr(spider_model, "unpool_segments", shifted_unpool)
    with pytest.raises(AssertionError):
        for seed in range(4):
            check_causality(awake(small_config()), training=True, seed=seed)
    with pytest.raises(AssertionError):
        check_pooling((7, 1, 30, 2), "some")


def test_attention_across_documents_is_noticed(monkeypatch):
    monkeypatch.setattr(spider_model, "document_cu_seqlens",
                        lambda ids: torch.arange(0, ids.numel() + 1, ids.shape[1], dtype=torch.int32))
    with pytest.raises(AssertionError):
        check_packing(awake(small_config()))

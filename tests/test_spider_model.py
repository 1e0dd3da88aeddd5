"""Invariants of the whole model: causality, separate documents, gradients, activation
checkpointing, dtypes, bad inputs."""

import pytest
import torch
from torch import Tensor

from conftest import ROOT, awake, documents, gradients, small_config, text
from spider.config import RECOMPUTE
from spider.training.optim import RowwiseAdagrad
from spider_model import Spider
from table import EVERY_VARIANT
from tokenizer import BOS_ID, EOS_ID, PAD_ID


def assert_close(actual: Tensor, expected: Tensor, atol: float = 2e-5):
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


@torch.no_grad()
def logits_of(model: Spider, ids: Tensor) -> Tensor:
    return model(ids, noise_seed=0).logits


# --------------------------------------------------------------------------------------------------
# Causality and documents


@EVERY_VARIANT
@pytest.mark.parametrize("training", (True, False))
def test_a_byte_affects_only_later_logits_of_its_own_document(changes, training):
    model = awake(small_config(**changes)).train(training)
    ids = documents(23, 41, seed=len(changes))
    logits = logits_of(model, ids)[0]
    for t in (3, 15, 21, 24, 40, 62):
        changed = ids.clone()
        changed[0, t] = 32 + (ids[0, t] - 31) % 90
        end_of_document = 23 if t < 23 else 64
        same = torch.ones(64, dtype=torch.bool)
        same[t:end_of_document] = False
        others = logits_of(model, changed)[0]
        assert_close(logits[same], others[same])
        assert (logits[t] - others[t]).abs().max() > 1e-4


@EVERY_VARIANT
def test_packed_documents_have_the_same_logits_as_separate_documents(changes):
    model = awake(small_config(**changes)).eval()
    ids = documents(21, 43, seed=5)
    apart = [logits_of(model, part)[0] for part in (ids[:, :21], ids[:, 21:])]
    assert_close(logits_of(model, ids)[0], torch.cat(apart))


@pytest.mark.parametrize("training", (True, False))
def test_sequences_of_special_ids_have_finite_gradients_and_pad_no_segment(training):
    model = awake(small_config()).train(training)
    mixed = [BOS_ID, 65, EOS_ID, EOS_ID, 66, BOS_ID, 67, BOS_ID, BOS_ID, EOS_ID, PAD_ID, PAD_ID]
    ids = torch.tensor([[PAD_ID] * 12, [EOS_ID] * 12, [BOS_ID] * 12, mixed])
    out = model(ids, ids, noise_seed=0)
    out.loss.backward()
    assert out.loss.isfinite()
    assert out.segments >= 12 + 3  # each EOS ends one
    assert model(ids[:1], noise_seed=0).segments == 0
    assert all(grad is None or grad.isfinite().all() for grad in gradients(model).values())
    alone = [logits_of(model.eval(), sequence[None]) for sequence in ids]
    assert_close(logits_of(model, ids), torch.cat(alone))


# --------------------------------------------------------------------------------------------------
# Losses and gradients


@EVERY_VARIANT
def test_recomputation_changes_no_gradient_and_no_expert_count(changes):
    ids = text(4, 48, seed=8)
    outs = {}
    grads = {}
    for recompute in RECOMPUTE:
        model = awake(small_config(**changes))
        model.recompute = recompute
        outs[recompute] = model(ids, ids, noise_seed=0, dropout=0.3)
        outs[recompute].loss.backward()
        grads[recompute] = gradients(model)
    for recompute in RECOMPUTE[1:]:
        assert torch.equal(outs["nothing"].tokens_per_expert, outs[recompute].tokens_per_expert)
        assert outs["nothing"].loss == outs[recompute].loss
        for name, grad in grads["nothing"].items():
            if grad is not None:
                assert_close(grad, grads[recompute][name], atol=1e-7)


@EVERY_VARIANT
def test_every_parameter_receives_a_gradient_on_real_text(changes):
    model = awake(small_config(**changes))
    ids = torch.tensor(list((ROOT / "LICENSE").read_bytes()[1000 : 8 * 128 + 1001]))
    model(ids[:-1].view(8, 128), ids[1:].view(8, 128), noise_seed=0).loss.backward()
    grads = gradients(model)
    if model.config.n_loops == 1:  # the state before the first loop is zero
        del grads["core.log_A"], grads["core.dt"], grads["core.halt_predictor.weight"]
        del grads["core.halt_predictor.bias"]
    for name, grad in grads.items():
        assert grad.isfinite().all() and grad.abs().sum() > 0, name
        if name.endswith("moe.w_down"):
            assert (grad.abs().sum((1, 2)) > 0).all(), name  # of every expert


def test_evaluation_has_no_core_loss():
    ids = text(2, 40)
    model = awake(small_config(core_loss_weight=0.5)).eval()
    assert model(ids, ids).loss_terms["core_loss"] == 0


def test_model_without_core_has_no_segments_loops_or_core_loss():
    model = awake(small_config(n_recurrent_layers=0, core_loss_weight=0.5))
    ids = text(2, 32)
    out = model(ids, ids, noise_seed=0)
    assert out.segments == 0 and out.mean_loops == 0
    assert out.loss == out.nats_per_byte and out.loss_terms["core_loss"] == 0
    names = [name for name, _ in model.named_parameters()]
    assert not any(name.startswith(("core", "null", "boundary")) for name in names)


def test_batch_without_segments_still_trains():
    model = awake(small_config(boundaries="words"))
    ids = torch.full((2, 16), ord("x"))
    out = model(ids, ids)
    out.loss.backward()
    assert out.segments == 0 and out.loss.isfinite()
    assert model.null_segment.grad.abs().sum() > 0


# --------------------------------------------------------------------------------------------------
# Dtypes and bad inputs

DTYPES = (
    (torch.float16, torch.float16),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float64),
    (torch.float32, torch.float16),
    (torch.float32, torch.bfloat16),
    (torch.float64, torch.float32),
)


@pytest.mark.parametrize("parameters, products", DTYPES, ids=str)
def test_any_dtypes_of_parameters_and_products_keep_sums_exact(parameters, products):
    """One segment has 544 bytes; in bf16 a count of bytes would stop at 256."""
    model = awake(small_config(boundaries="words"))
    ids = torch.full((1, 600), ord("a"))
    ids[0, 5] = ord(" ")
    ids[0, 550:] = text(1, 50)
    expected = model.eval()(ids, ids).loss
    model = model.to(parameters).train()
    assert model.compute_dtype == parameters
    model.compute_dtype = products
    out = model(ids, ids, noise_seed=0)
    at_least_fp32 = torch.promote_types(torch.promote_types(parameters, products), torch.float32)
    assert out.logits.dtype == at_least_fp32
    in_bf16 = torch.bfloat16 in (parameters, products)
    assert_close(out.loss.float(), expected, atol=2e-2 if in_bf16 else 2e-3)
    out.loss.backward()
    table = model.engram_input.table
    RowwiseAdagrad([table], lr=0.25).step()
    assert all(grad is None or grad.isfinite().all() for grad in gradients(model).values())
    assert table.weight.isfinite().all() and table.weight.dtype == parameters
    full = logits_of(model.eval(), ids)
    state = model.decoding_state()
    pieces = [model.step(piece, state) for piece in ids.split([300, 299, 1], dim=1)]
    in_16_bits = torch.finfo(products).bits == 16
    assert_close(torch.cat(pieces, dim=1), full, atol=1e-1 if in_16_bits else 1e-5)


def test_bad_inputs_are_refused_with_the_required_shape():
    model = awake(small_config()).eval()
    ids = text(2, 8)
    for backend in ("nonsense", "auto", None):
        with pytest.raises(ValueError, match=f"{backend!r} is not one of loop, grouped, triton"):
            model.set_backend(backend)
    for bad in (ids[0], ids.int(), ids[:, :0], ids[:0]):
        with pytest.raises(ValueError, match=r"^input_ids must be int64 \[B, T\], "):
            model(bad)
    for bad in (ids[:, 1:], ids.float()):
        with pytest.raises(ValueError, match=r"^labels must be int64 \[2, 8\], "):
            model(ids, bad)
    for bad in (ids[:1], ids[:, :0], ids.int()):
        with pytest.raises(ValueError, match=r"^input_ids must be int64 \[2, T\], "):
            model.step(bad, model.decoding_state(2))
    for bad in (-1, 272):
        with pytest.raises(ValueError, match="input_ids must be 0 to 271"):
            model.step(torch.full_like(ids, bad), model.decoding_state(2))

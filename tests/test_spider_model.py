"""Invariants of the whole model: causality, separate documents, gradients, dtypes, recomputation,
bad inputs."""

import pytest
import torch
import torch.nn.functional as F

from conftest import ROOT, awake, documents, gradients, small_config, text
from spider.config import RECOMPUTE
from spider.layers import rms_norm
from spider.optim import RowwiseAdagrad
from tokenizer import BOS_ID, EOS_ID, PAD_ID
from variants import VARIANTS

EVERY_VARIANT = pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())


@EVERY_VARIANT
@pytest.mark.parametrize("training", (True, False))
def test_a_byte_changes_no_logit_before_it_and_no_other_document(changes, training):
    model, row = (
        awake(small_config(**changes)).train(training),
        documents(23, 41, seed=len(changes)),
    )
    for t in (3, 15, 21, 24, 40, 62):
        other, same = row.clone(), torch.ones(64, dtype=torch.bool)
        other[0, t] = 32 + (row[0, t] - 31) % 90
        same[t : 23 if t < 23 else 64] = False
        with torch.no_grad():
            a, b = (model(ids, noise_seed=0).logits[0] for ids in (row, other))
        torch.testing.assert_close(a[same], b[same], rtol=0, atol=2e-5)
        assert (a[t] - b[t]).abs().max() > 1e-4


@EVERY_VARIANT
def test_documents_and_rows_give_the_logits_together_that_they_give_apart(changes):
    model, row, rows = (
        awake(small_config(**changes)).eval(),
        documents(21, 43, seed=5),
        text(4, 32, seed=6),
    )
    with torch.no_grad():
        apart = torch.cat([model(part).logits[0] for part in (row[:, :21], row[:, 21:])])
        torch.testing.assert_close(model(row).logits[0], apart, rtol=0, atol=2e-5)
        order = [2, 0, 3, 1]
        torch.testing.assert_close(
            model(rows[order]).logits, model(rows).logits[order], rtol=0, atol=2e-5
        )


@EVERY_VARIANT
def test_recomputation_changes_no_gradient_and_counts_no_token_twice(changes):
    ids, results = text(4, 48, seed=8), []
    for recompute in RECOMPUTE:
        model = awake(small_config(**changes))
        model.recompute = recompute
        out = model(ids, ids, noise_seed=0, dropout=0.3)
        out.loss.backward()
        results.append((out, gradients(model)))
    (a, plain), *others = results
    for b, recomputed in others:
        assert torch.equal(a.tokens_per_expert, b.tokens_per_expert) and a.loss == b.loss
        for name, grad in plain.items():
            if grad is not None:
                torch.testing.assert_close(grad, recomputed[name], rtol=0, atol=1e-7, msg=name)


@pytest.mark.parametrize(
    "changes", ({}, VARIANTS["votes and logits"]), ids=("rows of matches", "votes")
)
def test_every_parameter_receives_a_gradient_on_real_text(changes):
    model = awake(small_config(**changes))
    ids = torch.tensor(list((ROOT / "LICENSE").read_bytes()[1000 : 8 * 128 + 1001]))
    model(ids[:-1].view(8, 128), ids[1:].view(8, 128), noise_seed=0).loss.backward()
    for name, grad in gradients(model).items():
        assert grad.isfinite().all() and grad.abs().sum() > 0, name
    for layer in model.core.layers:
        assert (layer.moe.w_down.grad.abs().sum((1, 2)) > 0).all()


def test_labels_of_minus_100_do_not_count():
    model = awake(small_config()).eval()
    ids, labels = text(2, 32), text(2, 32, seed=1)
    half = labels.clone()
    half[:, 16:] = -100
    with torch.no_grad():
        expected = F.cross_entropy(
            model(ids).logits[:, :16].reshape(-1, 272), labels[:, :16].reshape(-1)
        )
        torch.testing.assert_close(model(ids, half).nats_per_byte, expected)
        assert model(ids, torch.full_like(labels, -100)).nats_per_byte == 0


def test_the_cores_own_prediction_is_a_term_of_the_loss_in_training():
    ids = text(2, 40)
    plain, scored = (awake(small_config(core_loss_weight=weight)) for weight in (0.0, 0.5))
    received, unpool = [], scored.unpool
    scored.unpool = lambda *given: received.append(unpool(*given)) or received[-1]
    without, out = (model(ids, ids, noise_seed=0) for model in (plain, scored))
    assert without.loss_terms["core_loss"] == 0 and out.nats_per_byte == without.nats_per_byte
    of_core = scored.lm_head(rms_norm(received[0]))
    torch.testing.assert_close(
        out.loss_terms["core_loss"], 0.5 * F.cross_entropy(of_core, ids.flatten()).detach()
    )
    torch.testing.assert_close(out.loss, without.loss + out.loss_terms["core_loss"])
    assert (
        awake(small_config(core_loss_weight=0.5, n_recurrent_layers=0))(ids, ids).loss_terms[
            "core_loss"
        ]
        == 0
    )
    assert scored.eval()(ids, ids).loss_terms["core_loss"] == 0


def test_a_model_without_core_has_neither_segments_nor_loops():
    model, ids = awake(small_config(n_recurrent_layers=0)), text(2, 32)
    out = model(ids, ids, noise_seed=0)
    assert out.segments == 0 and out.mean_loops == 0 and out.loss == out.nats_per_byte
    assert not any(
        name.startswith(("core", "null", "boundary")) for name, _ in model.named_parameters()
    )


@pytest.mark.parametrize("training", (True, False))
def test_rows_of_sentinels_give_finite_gradients_and_no_segment_to_pad(training):
    model = awake(small_config()).train(training)
    mixed = [BOS_ID, 65, EOS_ID, EOS_ID, 66, BOS_ID, 67, BOS_ID, BOS_ID, EOS_ID, PAD_ID, PAD_ID]
    ids = torch.tensor([[PAD_ID] * 12, [EOS_ID] * 12, [BOS_ID] * 12, mixed])
    out = model(ids, ids, noise_seed=0)
    out.loss.backward()
    assert (
        out.loss.isfinite()
        and out.segments >= 12 + 3
        and model(ids[:1], noise_seed=0).segments == 0
    )
    assert all(grad is None or grad.isfinite().all() for grad in gradients(model).values())
    with torch.no_grad():  # each row as it is alone
        torch.testing.assert_close(
            model.eval()(ids).logits,
            torch.cat([model(row[None]).logits for row in ids]),
            rtol=0,
            atol=2e-5,
        )


def test_a_batch_without_any_segment_still_trains():
    model, ids = awake(small_config(boundaries="words")), torch.full((2, 16), ord("x"))
    out = model(ids, ids)
    out.loss.backward()
    assert out.segments == 0 and out.loss.isfinite() and model.null_segment.grad.abs().sum() > 0


def test_a_batch_of_many_short_rows_trains():
    """Its core has more padding rows than a row has bytes."""
    model, ids = awake(small_config()), text(96, 8)
    model(ids, ids, noise_seed=0).loss.backward()
    torch.testing.assert_close(
        model.eval()(ids).logits[:3], model(ids[:3]).logits, rtol=0, atol=2e-5
    )


DTYPES = torch.float16, torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize("parameters", DTYPES, ids=str)
@pytest.mark.parametrize("products", DTYPES, ids=str)
def test_parameters_and_products_may_have_any_dtype_while_sums_stay_exact(parameters, products):
    """In bf16 a segment's bytes would be counted to 256 at most."""
    model, ids = awake(small_config(boundaries="words")), torch.full((1, 600), ord("a"))
    ids[0, 5], ids[0, 550:] = ord(" "), text(1, 50)
    expected = model.eval()(ids, ids).loss
    model = model.to(parameters).train()
    assert model.compute_dtype == parameters
    model.compute_dtype = products
    out = model(ids, ids, noise_seed=0)
    assert out.logits.dtype == torch.promote_types(
        torch.promote_types(parameters, products), torch.float32
    )
    torch.testing.assert_close(
        out.loss.float(),
        expected,
        rtol=0,
        atol=2e-2 if torch.bfloat16 in (parameters, products) else 2e-3,
    )
    out.loss.backward()
    table = model.engram_input.table
    RowwiseAdagrad([table], lr=0.25).step()
    assert all(g is None or g.isfinite().all() for g in gradients(model).values())
    assert table.weight.isfinite().all() and table.weight.dtype == parameters
    with torch.no_grad():
        full, state = model.eval()(ids).logits, model.decoding_state()
        stepped = torch.cat(
            [model.step(part, state) for part in ids.split([300, 299, 1], dim=1)], dim=1
        )
    torch.testing.assert_close(
        stepped, full, rtol=0, atol=1e-1 if torch.finfo(products).bits == 16 else 1e-5
    )


def test_bad_inputs_are_refused_with_the_shape_that_is_needed():
    model, ids = awake(small_config()).eval(), text(2, 8)
    for backend in ("nonsense", "auto", None):
        with pytest.raises(
            ValueError, match=f"{backend!r} is not one of loop, grouped, triton, tile"
        ):
            model.set_backend(backend)
    for bad in (ids[0], ids[None], ids.float(), ids.int(), ids[:, :0], ids[:0]):
        with pytest.raises(ValueError, match=r"^input_ids must be int64 \[B, T\], "):
            model(bad)
    for bad in (ids[0], ids[:, 1:], ids[:1], ids.float()):
        with pytest.raises(ValueError, match=r"^labels must be int64 \[2, 8\], "):
            model(ids, bad)
    for bad in (ids[0], ids[:1], ids[:, :0], ids.int()):
        with pytest.raises(ValueError, match=r"^input_ids must be int64 \[2, n\], "):
            model.step(bad, model.decoding_state(2))

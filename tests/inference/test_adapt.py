"""Texts are scored in windows, or while weights learn from what was read, each byte scored before;
`sample.py --eval FILE --adapt`."""

import math
import shutil
from functools import partial

import numpy as np
import pytest
import torch

import conftest
from conftest import assert_same, lookups_of, metrics, run, weights_of
from data import Source, validation_sets
from preparing import stream
from spider.errors import CheckpointError
from spider.inference.adapt import (
    CHUNK,
    DENSE_LR,
    TABLE_LR,
    DynamicEvaluation,
    cut_spans,
    window_batches,
)
from spider.inference.load import model_of, read_checkpoint
from spider.model.memory import tables_of
from spider.training.scoring import Totals
from spider_model import Spider
from tokenizer import BOS_ID, EOS_ID, PAD_ID


@pytest.fixture
def checkpoint(trained) -> dict:
    return read_checkpoint(str(trained), Spider)[1]


def plain_model(saved: dict) -> Spider:
    return model_of(saved, torch.device("cpu"), torch.float32, Spider)


def adaptation_of(saved: dict) -> DynamicEvaluation:
    return DynamicEvaluation(plain_model(saved), saved, n_loops=2)


def text(length: int) -> torch.Tensor:
    """BOS and random bytes, int64 [length]."""
    ids = conftest.text(1, length)[0]
    ids[0] = BOS_ID
    return ids


def read(adaptation: DynamicEvaluation, ids: torch.Tensor) -> Totals:
    return adaptation.score(stream(ids), special=False)


@torch.no_grad()
def nats(model: Spider, ids: torch.Tensor, context: int = 0) -> float:
    """Return the nats of a text by one full pass, without its first `context` labels."""
    labels = ids[None, 1:].clone()
    labels[:, :context] = -100
    out = model(ids[None, :-1], labels, n_loops=2)
    return out.nats_per_byte.item() * (labels.shape[1] - context)


def tables(adaptation: DynamicEvaluation) -> list[list[torch.Tensor]]:
    """Return copies of each table's rows and accumulators."""
    adagrad = adaptation.adagrad
    return [
        [weight.detach().clone(), adagrad.state[weight]["sum"].clone()] for weight in adagrad.tables
    ]


def test_chunks_score_each_label_once_with_up_to_1024_bytes_of_context():
    chunks = [*cut_spans(2500, first=1024, counted=1024, context=1024)]
    assert chunks == [(0, 1024, 0), (0, 2048, 1024), (1024, 2499, 1024)]


def test_later_chunks_score_better_than_with_the_checkpoint(checkpoint):
    ids = text(CHUNK + 200)
    plain = plain_model(checkpoint)
    totals = read(adaptation_of(checkpoint), ids[: CHUNK + 1])
    assert totals.targets == CHUNK
    assert totals.nats == pytest.approx(nats(plain, ids[: CHUNK + 1]), rel=1e-6)
    totals = read(adaptation_of(checkpoint), ids)
    assert totals.targets == len(ids) - 1
    assert totals.nats < nats(plain, ids) - 1


def test_step_updates_tables_as_in_training_and_other_weights_with_adamw(checkpoint):
    """Compare with dense arithmetic. Tables: row-wise Adagrad with the gradient of the sum over
    bytes, divided by the bytes of a training step. In AdamW's first step, every weight with a
    gradient moves by the learning rate, whatever the gradient's size."""
    ids = text(60)
    model = plain_model(checkpoint)
    loss = model(ids[None, :-1], ids[None, 1:], n_loops=2).nats_per_byte
    bytes_per_step = checkpoint["bytes_seen"] / checkpoint["step"]
    (loss * (len(ids) - 1) / bytes_per_step).backward()

    adaptation = adaptation_of(checkpoint)
    before = tables(adaptation)
    weights = weights_of(adaptation.model)
    read(adaptation, ids)

    for table, old, new in zip(tables_of(model), before, tables(adaptation), strict=True):
        weight, total = old
        row, grad = lookups_of(table)
        grad = torch.zeros_like(weight).index_add(0, row, grad)
        total = total + grad.square().mean(1)
        weight = weight - TABLE_LR * grad / (total.sqrt() + 1e-10)[:, None]
        torch.testing.assert_close(new, [weight, total])
        assert not torch.equal(new[0], old[0])

    compared = 0
    for name, p in model.named_parameters():
        if p.grad is not None and not name.endswith("table.weight"):
            clear = p.grad.abs() > 1e-3
            step = adaptation.model.get_parameter(name).detach() - weights[name]
            expected = -DENSE_LR * p.grad[clear].sign()
            torch.testing.assert_close(step[clear], expected, rtol=0.02, atol=1e-7)
            compared += int(clear.sum())
    assert compared > 100


def test_special_ids_are_only_context_and_no_gradients_remain(checkpoint):
    ids = text(300)
    ids[1:200] = EOS_ID + 1 + ids[1:200] % 13  # sentinels, which end no document
    adaptation = adaptation_of(checkpoint)
    buffers = {name: value.clone() for name, value in adaptation.model.named_buffers()}
    assert read(adaptation, ids[:200]).targets == 0
    assert not adaptation.adamw.state  # no step was taken

    totals = read(adaptation, ids)
    assert totals.targets == 100
    assert totals.nats == pytest.approx(nats(plain_model(checkpoint), ids, context=199), rel=1e-6)
    assert all(p.grad is None for p in adaptation.model.parameters())
    assert_same(dict(adaptation.model.named_buffers()), buffers)


def test_dynamic_evaluation_requires_tables_and_their_accumulators(checkpoint):
    model = plain_model(checkpoint)
    for change in (dict(optimizer_state_dict={}), dict(bytes_seen=0), dict(step=0)):
        with pytest.raises(CheckpointError, match="an export has no optimizer state"):
            DynamicEvaluation(model, checkpoint | change, n_loops=2)


@pytest.mark.parametrize("seq_len", (2, 7, 16, 64))
@pytest.mark.parametrize("length", (1, 2, 7, 8, 9, 50, 250))
def test_windows_score_each_byte_once_with_half_a_window_of_context(seq_len, length):
    """Or with all of the text before it. A text that fits into a window is read once. Byte i of the
    text is i, so a label names its place."""
    text = stream([BOS_ID, *range(length)])
    n_windows = 1 + max(0, math.ceil((length - seq_len) / (seq_len // 2)))
    for batch in (1, 3, 1000):
        scored = []
        batches = [*window_batches(text, seq_len, batch, special=False)]
        assert sum(len(ids) for ids, _ in batches) == n_windows
        for ids, labels in batches:
            assert len(ids) <= batch
            assert ids.shape == labels.shape == (len(ids), seq_len)
            for row, column in (labels != -100).nonzero().tolist():
                byte = int(labels[row, column])
                assert ids[row, column] == (byte - 1 if byte else BOS_ID)
                assert column >= min(byte, seq_len // 2)
                scored.append(byte)
        assert sorted(scored) == list(range(length))


@pytest.mark.parametrize("seq_len", (2, 7, 16, 64))
def test_windows_of_a_prepared_directory_are_the_rows_that_training_evaluates(seq_len):
    ids = [BOS_ID, *range(50), EOS_ID, BOS_ID, *range(30), EOS_ID, PAD_ID]
    source = Source("a", 1.0, stream([]), stream(ids))
    (rows,) = validation_sets([source], seq_len, eval_tokens=70).values()
    batches = [*window_batches(source.val.slice(0, 71), seq_len, batch=3, special=True)]
    assert all(len(ids) <= 3 for ids, _ in batches)
    assert_same([torch.cat(tensors) for tensors in zip(*batches, strict=True)], list(rows))


# --------------------------------------------------------------------------------------------------
# sample.py


@pytest.fixture
def figures(figures):
    return partial(figures, "--precision", "fp32")


def test_eval_adapts_to_each_text_starting_from_the_checkpoint(trained, tmp_path, figures):
    first = tmp_path / "a.txt"
    first.write_text("abcdefgh " * 200)
    second = tmp_path / "b.jsonl"
    second.write_text('{"text": "' + "hgfedcba " * 300 + '"}\n{"text": "dcba"}')
    plain = figures(trained, "--eval", first, second)
    adapted = figures(trained, "--eval", first, second, "--adapt")
    for one, other in zip(plain, adapted, strict=True):
        assert not one["adapt"] and other["adapt"]
        assert other["bits_per_byte"] < one["bits_per_byte"] - 0.1
    assert adapted[1:] == figures(trained, "--eval", second, "--adapt")


def test_prepared_data_is_scored_on_the_same_targets_as_in_training(trained, tmp_path, figures):
    data = trained.parent / "data"
    (found,) = figures(trained, "--eval", data, "--adapt")
    assert found["bytes"] == 299
    assert found["bits_per_byte"] == pytest.approx(metrics(trained)[-1]["val_bpb"], rel=0.05)
    padded = shutil.copytree(data, tmp_path / "padded")
    np.memmap(padded / "val-0.bin", "<u2", "r+")[:100] = PAD_ID
    for flags in ((), ("--adapt",)):
        (found,) = figures(trained, "--eval", padded, *flags)
        assert found["bytes"] == found["characters"] == 200
    other = run(tmp_path, data, "--eval_tokens 64", steps=1)
    (found,) = figures(other, "--eval", data, "--adapt")
    assert found["bytes"] == 64

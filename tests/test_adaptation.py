"""Adaptation: weights learn from what was read, each byte scored before; `sample.py --eval FILE
--adapt`."""

import json

import pytest
import torch

import sample
from bad_data import stream
from conftest import assert_same, metrics, run
from spider.common import CheckpointError
from spider.inference import CHUNK, DENSE_RATE, RATE, Adaptation, model_of, read_checkpoint
from spider.memory import EngramTable
from spider_model import Spider
from tokenizer import BOS_ID, EOS_ID


@pytest.fixture
def checkpoint(trained) -> dict:
    return read_checkpoint(str(trained), Spider)[1]


def plain_model(state: dict) -> Spider:
    return model_of(state, torch.device("cpu"), torch.float32, Spider)


def adaptation_of(state: dict) -> Adaptation:
    return Adaptation(plain_model(state), state, 2)


def text(length: int, seed: int = 0) -> torch.Tensor:
    """BOS and words of few letters, int64 [length]."""
    letters = torch.tensor([BOS_ID, *b"abcdef gh"])
    ids = letters[
        torch.randint(1, len(letters), (length,), generator=torch.Generator().manual_seed(seed))
    ]
    ids[0] = BOS_ID
    return ids


def read(adaptation: Adaptation, ids: torch.Tensor) -> Adaptation:
    adaptation.score([stream(ids)], special=False)
    return adaptation


def tables(adaptation: Adaptation) -> list[torch.Tensor]:
    """Rows and accumulators."""
    adagrad = adaptation.adagrad
    return [
        part.clone()
        for weight in adagrad.tables
        for part in (weight.detach(), adagrad.state[weight]["sum"])
    ]


def learned(adaptation: Adaptation) -> list[torch.Tensor]:
    """All that adaptation changes: tables, other weights, and their moments."""
    (params,) = (group["params"] for group in adaptation.adamw.param_groups)
    return tables(adaptation) + [
        part.clone()
        for p in params
        for part in (p.detach(), *adaptation.adamw.state.get(p, {}).values())
    ]


def test_the_first_chunk_is_scored_by_the_checkpoint_and_the_next_ones_by_what_was_learned(
    checkpoint,
):
    ids, plain = text(CHUNK + 200), plain_model(checkpoint)
    with torch.no_grad():
        first = (
            plain(ids[None, :CHUNK], ids[None, 1 : CHUNK + 1], n_loops=2).nats_per_byte.item()
            * CHUNK
        )
        whole = plain(ids[None, :-1], ids[None, 1:], n_loops=2).nats_per_byte.item() * (
            len(ids) - 1
        )
    adaptation = read(adaptation_of(checkpoint), ids[: CHUNK + 1])
    assert adaptation.nats == pytest.approx(first, rel=1e-6) and adaptation.count == CHUNK
    adaptation = read(adaptation_of(checkpoint), ids)
    assert adaptation.count == len(ids) - 1 and adaptation.nats < whole - 1


def test_later_bytes_change_no_score_of_earlier_ones(checkpoint):
    scores = []
    for last in (ord("a"), ord("z")):
        ids, adaptation = text(2 * CHUNK + 100), adaptation_of(checkpoint)
        ids[2 * CHUNK + 1 :] = last

        def learn_and_note(*window, adaptation=adaptation, learn=adaptation._learn):
            learn(*window)
            scores.append(adaptation.nats)

        adaptation._learn = learn_and_note
        read(adaptation, ids)
    assert scores[:2] == scores[3:5] and scores[2] != scores[5]


def test_a_step_is_rowwise_adagrad_at_the_scale_of_training_and_adamw_at_its_own_rate(checkpoint):
    """Beside dense arithmetic: tables by the gradient of the sum over bytes, divided by the bytes
    of a training step. In AdamW's first step every weight with a gradient moves by the rate,
    whatever the gradient's size."""
    ids, adaptation = text(60), adaptation_of(checkpoint)
    before, model, seen = tables(adaptation), plain_model(checkpoint), 0
    weights = {name: p.detach().clone() for name, p in adaptation.model.named_parameters()}
    loss = model(ids[None, :-1], ids[None, 1:], n_loops=2).nats_per_byte
    (loss * (len(ids) - 1) / (checkpoint["bytes_seen"] / checkpoint["step"])).backward()
    after = tables(read(adaptation, ids))
    assert not any(map(torch.equal, before[::2], after[::2]))
    for i, table in enumerate(
        module for module in model.modules() if isinstance(module, EngramTable)
    ):
        weight, total = before[2 * i : 2 * i + 2]
        for row, _, square in table.gathered():
            total = total.index_add(0, row, square)
        for row, grad, _ in table.gathered():
            weight = weight.index_add(0, row, -RATE * grad / (total[row].sqrt() + 1e-10)[:, None])
        torch.testing.assert_close(after[2 * i : 2 * i + 2], [weight, total])
    for name, p in model.named_parameters():
        if p.grad is not None and not name.endswith("table.weight"):
            clear = p.grad.abs() > 1e-3
            step = adaptation.model.get_parameter(name).detach() - weights[name]
            torch.testing.assert_close(
                step[clear], -DENSE_RATE * p.grad[clear].sign(), rtol=0.02, atol=1e-7
            )
            seen += clear.sum()
    assert seen > 100


def test_ids_that_do_not_count_are_context_alone_and_no_gradient_is_left(checkpoint):
    """Nothing is learned from them, but what follows is predicted with them in view."""
    ids, adaptation = text(300), adaptation_of(checkpoint)
    ids[1:200] = EOS_ID + 1 + ids[1:200] % 13  # sentinels, which end no document
    before, buffers = (
        learned(adaptation),
        {name: value.clone() for name, value in adaptation.model.named_buffers()},
    )
    read(adaptation, ids[:200])
    assert adaptation.count == 0
    assert_same(before, learned(adaptation))
    read(adaptation, ids)
    labels = ids[None, 1:].clone()
    labels[:, :199] = -100
    with torch.no_grad():
        nats = plain_model(checkpoint)(ids[None, :-1], labels, n_loops=2).nats_per_byte.item() * 100
    assert adaptation.count == 100 and adaptation.nats == pytest.approx(nats, rel=1e-6)
    assert all(p.grad is None for p in adaptation.model.parameters())
    assert_same(dict(adaptation.model.named_buffers()), buffers)
    assert_same(before, learned(adaptation_of(checkpoint)))  # the checkpoint itself stays


def test_a_model_without_tables_and_a_checkpoint_without_accumulators_are_refused(checkpoint):
    model = plain_model(checkpoint)
    for change in (dict(optimizer_state_dict={}), dict(bytes_seen=0), dict(step=0)):
        with pytest.raises(CheckpointError, match="an export has no optimizer state"):
            Adaptation(model, checkpoint | change, 2)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, EngramTable):
                setattr(module, name, torch.nn.Identity())
    with pytest.raises(CheckpointError, match="needs a model with Engram tables"):
        Adaptation(model, checkpoint, 2)


# --------------------------------------------------------------------------------------------------
# sample.py


def figures(tmp_path, *argv) -> list[dict]:
    assert (
        sample.main([*map(str, argv), "--json", str(tmp_path / "out.json"), "--precision", "fp32"])
        == 0
    )
    return json.loads((tmp_path / "out.json").read_text())


def test_eval_adapts_to_each_text_from_the_checkpoints_weights(trained, tmp_path):
    (tmp_path / "a.txt").write_text("abcdefgh " * 200)
    (tmp_path / "b.jsonl").write_text(
        json.dumps(dict(text="hgfedcba " * 300)) + "\n" + json.dumps(dict(text="dcba"))
    )
    texts = tmp_path / "a.txt", tmp_path / "b.jsonl"
    plain = figures(tmp_path, trained, "--eval", *texts)
    adapted = figures(tmp_path, trained, "--eval", *texts, "--adapt")
    assert (
        [entry["bytes"] for entry in adapted] == [entry["bytes"] for entry in plain] == [1800, 2704]
    )
    assert all(
        one["bits_per_byte"] > other["bits_per_byte"] + 0.1
        for one, other in zip(plain, adapted, strict=True)
    )
    assert [entry["adapt"] for entry in plain + adapted] == [False, False, True, True]
    assert adapted[1:] == figures(tmp_path, trained, "--eval", texts[1], "--adapt")


def test_a_prepared_directory_is_scored_by_what_counts_in_training(trained, tmp_path):
    (found,) = figures(tmp_path, trained, "--eval", trained.parent / "data", "--adapt")
    for tokens in (64, 1):
        directory = run(
            tmp_path,
            trained.parent / "data",
            "--eval_tokens",
            str(tokens),
            steps=1,
            ckpt=str(tokens),
        )
        assert (
            figures(tmp_path, directory, "--eval", trained.parent / "data", "--adapt")[0]["bytes"]
            == tokens
        )
    assert found["bytes"] == 299 and found["bits_per_byte"] == pytest.approx(
        metrics(trained)[-1]["val_bpb"], rel=0.05
    )

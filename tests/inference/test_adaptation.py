"""Adaptation: weights learn from what was read, each byte scored before; --adapt and --save_adapted of sample.py."""

import json
import math
import os
import signal
from pathlib import Path

import pytest
import torch

import sample
from conftest import final_state, make_shards, metrics, run
from spider.errors import CheckpointError
from spider.inference import dialogue
from spider.inference.adaptation import CHUNK, CONTEXT, DENSE_RATE, RATE, Adaptation, adapted_state
from spider.inference.loading import model_of, read_checkpoint
from spider.model.engram_table import EngramTable
from spider.training.optimizers import RowwiseAdagrad
from spider_model import Spider
from tokenizer import BOS_ID, EOS_ID


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The directory of a run of three steps."""
    root = tmp_path_factory.mktemp("trained")
    return run(root, make_shards(root / "data"), steps=3)


@pytest.fixture
def checkpoint(trained) -> dict:
    return read_checkpoint(str(trained), Spider)[1]


def adaptation_of(state: dict, **settings) -> Adaptation:
    return Adaptation(model_of(state, torch.device("cpu"), torch.float32, Spider), state, 2, **settings)


def text(length: int, seed: int = 0) -> torch.Tensor:
    """BOS and words of few letters, int64 [length]."""
    letters = torch.tensor([BOS_ID, *b"abcdef gh"])
    ids = letters[torch.randint(1, len(letters), (length,), generator=torch.Generator().manual_seed(seed))]
    ids[0] = BOS_ID
    return ids


def read(adaptation: Adaptation, ids: torch.Tensor, *cuts: int) -> Adaptation:
    for piece in ids.tensor_split(cuts):
        adaptation.read(piece, piece < 256)
    adaptation.flush()
    return adaptation


def tables(adaptation: Adaptation) -> list[torch.Tensor]:
    """Rows and accumulators."""
    return [part.clone() for weight in adaptation.adagrad.tables for part in (weight, adaptation.accumulator(weight))]


def learned(adaptation: Adaptation) -> list[torch.Tensor]:
    """All that adaptation changes: tables, other weights, and their moments."""
    (params,) = (group["params"] for group in adaptation.adamw.param_groups)
    return tables(adaptation) + [part.clone() for p in params
                                 for part in (p.detach(), *adaptation.adamw.state.get(p, {}).values())]


def assert_equal(left: list[torch.Tensor], right: list[torch.Tensor]):
    assert len(left) == len(right) and all(map(torch.equal, left, right))


def test_the_first_chunk_is_scored_by_the_checkpoint_as_it_is_and_the_next_ones_by_what_was_learned(checkpoint):
    ids = text(CHUNK + 200)
    adaptation, plain = adaptation_of(checkpoint), model_of(checkpoint, torch.device("cpu"), torch.float32, Spider)
    with torch.no_grad():
        first = plain(ids[None, :CHUNK], ids[None, 1:CHUNK + 1], n_loops=2).nats_per_byte.item() * CHUNK
        whole = plain(ids[None, :-1], ids[None, 1:], n_loops=2).nats_per_byte.item() * (len(ids) - 1)
    adaptation.read(ids[:CHUNK + 1], ids[:CHUNK + 1] < 256)
    assert adaptation.nats == pytest.approx(first, rel=1e-6) and adaptation.count == CHUNK
    read(adaptation, ids[CHUNK + 1:])
    assert adaptation.count == len(ids) - 1 and adaptation.nats < whole - 1


def test_what_comes_later_changes_no_score_of_what_came_before(checkpoint):
    ids, other = text(2 * CHUNK + 100), text(2 * CHUNK + 100)
    other[2 * CHUNK + 1:] = ord("z")
    scores = []
    for one in (ids, other):
        adaptation = adaptation_of(checkpoint)
        adaptation.read(one, one < 256)
        scores.append(adaptation.nats)
        adaptation.flush()
        scores.append(adaptation.nats)
    assert scores[0] == scores[2] and scores[1] != scores[3]


@pytest.mark.parametrize("seed", range(3))
def test_a_text_in_any_number_of_calls_gives_the_same_to_the_bit(checkpoint, seed):
    ids = torch.cat((text(CHUNK + 77, seed), torch.tensor([EOS_ID]), text(700, seed + 10)))
    cuts = torch.randint(0, len(ids), (9,), generator=torch.Generator().manual_seed(seed)).sort().values.tolist()
    for settings in ({}, dict(per_document=True)):
        whole, parts = (read(adaptation_of(checkpoint, **settings), ids, *at) for at in ((), cuts))
        assert (whole.nats, whole.count) == (parts.nats, parts.count)
        assert_equal(learned(whole), learned(parts))


def test_a_step_is_rowwise_adagrad_with_the_accumulators_and_the_scale_of_training(checkpoint):
    """Beside dense arithmetic: the gradient of the sum over bytes, divided by the bytes of a training step."""
    ids, adaptation = text(60), adaptation_of(checkpoint)
    before, model = tables(adaptation), model_of(checkpoint, torch.device("cpu"), torch.float32, Spider)
    loss = model(ids[None, :-1], ids[None, 1:], n_loops=2).nats_per_byte
    (loss * (len(ids) - 1) / (checkpoint["bytes_seen"] / checkpoint["step"])).backward()
    expected = []
    for weight, total, table in zip(before[::2], before[1::2],
                                    (module for module in model.modules() if isinstance(module, EngramTable))):
        for row, grad, square in table.gathered():
            total = total.index_add(0, row, square)
        for row, grad, _ in table.gathered():
            weight = weight.index_add(0, row, -RATE * grad / (total[row].sqrt() + 1e-10)[:, None])
        expected += [weight, total]
    after = tables(read(adaptation, ids))
    assert not any(map(torch.equal, before[::2], after[::2]))
    for found, wanted in zip(after, expected):
        torch.testing.assert_close(found, wanted)


def test_other_weights_take_a_step_of_adamw_at_their_own_rate(checkpoint):
    """In its first step every weight with a gradient moves by the rate, whatever the gradient's size."""
    ids, adaptation = text(60), adaptation_of(checkpoint)
    before = {name: p.detach().clone() for name, p in adaptation.model.named_parameters()}
    model = model_of(checkpoint, torch.device("cpu"), torch.float32, Spider)
    model(ids[None, :-1], ids[None, 1:], n_loops=2).nats_per_byte.backward()
    read(adaptation, ids)
    seen = 0
    for name, p in model.named_parameters():
        if p.grad is not None and not name.endswith("table.weight"):
            clear = p.grad.abs() > 1e-3
            step = adaptation.model.get_parameter(name).detach() - before[name]
            torch.testing.assert_close(step[clear], -DENSE_RATE * p.grad[clear].sign(), rtol=0.02, atol=1e-7)
            seen += clear.sum()
    assert seen > 100


def test_no_gradient_is_left_and_the_checkpoint_itself_stays(checkpoint):
    adaptation = adaptation_of(checkpoint)
    before, buffers = learned(adaptation), {name: value.clone() for name, value in adaptation.model.named_buffers()}
    read(adaptation, text(700))
    assert not any(map(torch.equal, tables(adaptation)[::2], before[:len(tables(adaptation)):2]))
    assert all(p.grad is None for p in adaptation.model.parameters())
    assert all(torch.equal(value, buffers[name]) for name, value in adaptation.model.named_buffers())
    assert_equal(before, learned(adaptation_of(checkpoint)))


def test_ids_that_do_not_count_are_context_alone(checkpoint):
    """Nothing is learned from them, but what follows is predicted with them in view."""
    ids, adaptation = text(300), adaptation_of(checkpoint)
    before = learned(adaptation)
    adaptation.read(ids[:200], torch.zeros(200, dtype=torch.bool))
    adaptation.flush()
    assert adaptation.count == 0
    assert_equal(before, learned(adaptation))
    adaptation.read(ids[200:], torch.ones(100, dtype=torch.bool))
    adaptation.flush()
    model = model_of(checkpoint, torch.device("cpu"), torch.float32, Spider)
    labels = ids[None, 1:].clone()
    labels[:, :199] = -100
    with torch.no_grad():
        nats = model(ids[None, :-1], labels, n_loops=2).nats_per_byte.item() * 100
    assert adaptation.count == 100 and adaptation.nats == pytest.approx(nats, rel=1e-6)


@pytest.mark.parametrize("adapted", (False, True))
def test_documents_of_their_own_are_scored_as_if_each_was_read_alone_and_then_undone(checkpoint, adapted):
    if adapted:
        checkpoint = adapted_state(checkpoint, read(adaptation_of(checkpoint), text(300, 4)))
    pieces = [text(CHUNK + CONTEXT + 300, 1), text(40, 2), text(600, 3)]
    alone = sum(read(adaptation_of(checkpoint), piece).nats for piece in pieces)
    together = adaptation_of(checkpoint, per_document=True)
    before = learned(together)
    read(together, torch.cat(pieces))
    assert together.nats == pytest.approx(alone, rel=1e-9) and together.count == sum(map(len, pieces)) - 3
    together.rewind()
    assert_equal(before, learned(together))
    through = read(adaptation_of(checkpoint), torch.cat(pieces))
    assert through.count == together.count and through.nats < together.nats


def test_a_model_without_tables_and_a_checkpoint_without_accumulators_are_refused(trained, checkpoint, tmp_path,
                                                                                  capsys):
    assert sample.main([str(trained), "--export", str(tmp_path / "export")]) == 0
    (tmp_path / "a.txt").write_text("abc")
    capsys.readouterr()
    assert sample.main([str(tmp_path / "export"), "--eval", str(tmp_path / "a.txt"), "--adapt"]) == 2
    assert "no optimizer state of the Engram tables" in capsys.readouterr().err.splitlines()[-1]
    engram = checkpoint["optimizer_state_dict"]["engram"]
    first = {key: dict(sum=value["sum"][:-1]) for key, value in engram["state"].items()}
    odd = checkpoint | dict(optimizer_state_dict=dict(engram=engram | dict(state=first)))
    with pytest.raises(CheckpointError, match="does not fit its model"):
        adaptation_of(odd)
    none = Spider(model_of(checkpoint, torch.device("cpu"), torch.float32, Spider).config)
    for module in list(none.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, EngramTable):
                setattr(module, name, torch.nn.Identity())
    with pytest.raises(CheckpointError, match="needs Engram tables"):
        Adaptation(none, checkpoint, 2)


def test_documents_that_eos_alone_separates_are_documents_of_their_own(checkpoint):
    """The byte behind EOS is predicted from it, with the checkpoint's weights, for any split into calls."""
    pieces = [torch.cat((text(length, length)[bool(length - 60):], torch.tensor([EOS_ID]))) for length in (60, 600, 90)]
    alone = sum(read(adaptation_of(checkpoint), torch.cat((torch.tensor([EOS_ID]) if i else pieces[0][:0], piece))).nats
                for i, piece in enumerate(pieces))
    together, parts = (adaptation_of(checkpoint, per_document=True) for _ in range(2))
    read(together, torch.cat(pieces))
    read(parts, torch.cat(pieces), 1, 60, 61, 62, 300)
    assert together.nats == pytest.approx(alone, rel=1e-9) and parts.nats == together.nats
    assert together.count == sum(map(len, pieces)) - 4    # the EOS do not count here, and BOS is predicted from nothing


def test_what_rewinding_takes_back_is_kept_once_for_each_row(checkpoint):
    """Its memory is bounded by the tables, and not by the document."""
    adaptation = adaptation_of(checkpoint, per_document=True)
    read(adaptation, text(6 * CHUNK))
    kept = sum(len(row) for weight, row, part, _ in adaptation.undo if part is weight)
    assert 0 < kept <= sum(map(len, adaptation.adagrad.tables))


@pytest.mark.parametrize("spoil, fault", (
    (lambda moments: {"0": moments[0]}, "unknown parameters: '0'"), (lambda moments: {0: moments[1]}, "a parameter"),
    (lambda moments: {0: {}, 1: [1]}, ""), (lambda moments: [moments], "")))
def test_moments_that_do_not_fit_are_refused(checkpoint, spoil, fault):
    state = adapted_state(checkpoint, read(adaptation_of(checkpoint), text(60)))
    state["adaptation"]["state"] = spoil(state["adaptation"]["state"])
    with pytest.raises(CheckpointError, match=f"the checkpoint's state of adamw does not fit its model .*{fault}"):
        adaptation_of(state)


def test_a_ruined_model_is_not_saved(checkpoint):
    state = adapted_state(checkpoint, read(adaptation_of(checkpoint), text(60)))
    state["adaptation"]["state"][0]["exp_avg"].fill_(math.nan)
    with pytest.raises(FloatingPointError, match="weights are not finite"):
        adapted_state(state, read(adaptation_of(state), text(60)))


def test_a_loss_that_is_no_number_ends_it(checkpoint):
    adaptation = adaptation_of(checkpoint)
    adaptation.model.lm_head.weight.data.fill_(math.nan)
    with pytest.raises(FloatingPointError, match="not a finite number"):
        read(adaptation, text(50))


# ---------------------------------------------------------------------------------------------------------------------
# sample.py

def figures(tmp_path, *argv) -> list[dict]:
    assert sample.main([*map(str, argv), "--json", str(tmp_path / "out.json"), "--precision", "fp32"]) == 0
    return json.loads((tmp_path / "out.json").read_text())


def test_eval_adapts_to_each_text_from_the_checkpoints_weights_and_says_how(trained, tmp_path, capfd):
    (tmp_path / "a.txt").write_text("abcdefgh " * 200)
    (tmp_path / "b.jsonl").write_text(json.dumps(dict(text="hgfedcba " * 300)) + "\n" + json.dumps(dict(text="dcba")))
    texts = tmp_path / "a.txt", tmp_path / "b.jsonl"
    plain = figures(tmp_path, trained, "--eval", *texts)
    adapted = figures(tmp_path, trained, "--eval", *texts, "--adapt")
    assert [entry["bytes"] for entry in adapted] == [entry["bytes"] for entry in plain] == [1800, 2704]
    assert all(one["bits_per_byte"] > other["bits_per_byte"] + 0.1 for one, other in zip(plain, adapted))
    assert [entry["adapt"] for entry in plain + adapted] == [False, False, True, True]
    assert adapted[1:] == figures(tmp_path, trained, "--eval", texts[1], "--adapt")
    assert "adapted through all of it" in capfd.readouterr().err
    (own,) = figures(tmp_path, trained, "--eval", texts[1], "--adapt", "--per_document")
    assert own["per_document"] and own["bits_per_byte"] >= adapted[1]["bits_per_byte"]
    assert "adapted within each document" in capfd.readouterr().err


def test_a_prepared_directory_is_scored_by_what_counts_in_training(trained, tmp_path):
    (found,) = figures(tmp_path, trained, "--eval", trained.parent / "data", "--adapt")
    for tokens in (64, 1):
        directory = run(tmp_path, trained.parent / "data", "--eval_tokens", str(tokens), steps=1, ckpt=str(tokens))
        assert figures(tmp_path, directory, "--eval", trained.parent / "data", "--adapt")[0]["bytes"] == tokens
    assert found["bytes"] == 299 and found["bits_per_byte"] == pytest.approx(metrics(trained)[-1]["val_bpb"], rel=0.05)


@pytest.mark.parametrize("name", ("adapted.pt", "adapted"))
def test_an_adapted_checkpoint_says_so_scores_as_the_model_did_and_can_be_trained_on(trained, tmp_path, capfd, name):
    (tmp_path / "a.txt").write_text("abcdefgh " * 200)
    target = tmp_path / name
    (first,) = figures(tmp_path, trained, "--eval", tmp_path / "a.txt", "--adapt", "--save_adapted", target)
    assert f"saved {target}: adapted to 1,800 bytes" in capfd.readouterr().err
    (again,) = figures(tmp_path, target, "--eval", tmp_path / "a.txt", "--adapt", "--save_adapted", tmp_path / "b.pt")
    assert again["bits_per_byte"] < first["bits_per_byte"] - 0.1
    assert "adapted to 1,800 bytes since training" in capfd.readouterr().err
    state = read_checkpoint(str(target), Spider)[1]
    assert state["adapted"] == 1800 and state["step"] == 3 and state["val_loss"] is None
    assert sample.main([str(target), "--export", str(tmp_path / "export")]) == 0
    assert "adapted to 1,800 bytes since" in (tmp_path / "export" / "README.md").read_text()
    assert read_checkpoint(str(tmp_path / "b.pt"), Spider)[1]["adapted"] == 3600
    resumed = run(tmp_path, trained.parent / "data", "--resume", str(target), steps=4, ckpt="resumed")
    assert final_state(resumed)["step"] == 4
    assert "(step 3, adapted to 1,800 bytes since training)" in capfd.readouterr().err


def test_reading_on_with_a_saved_checkpoint_is_reading_on(checkpoint):
    first, second = text(900, 1), text(800, 2)
    adaptation = read(adaptation_of(checkpoint), first)
    state = adapted_state(checkpoint, adaptation)
    before, later = adaptation.nats, read(adaptation_of(state), second)
    adaptation.start()
    read(adaptation, second)
    assert adaptation.nats - before == pytest.approx(later.nats, rel=1e-12)
    assert_equal(learned(adaptation), learned(later))


def test_a_prompt_is_learned_from_before_it_is_continued(trained, tmp_path, capsys):
    argv = [str(trained), "--prompt", "abcabcabc " * 30, "--bytes", "12", "--temperature", "0"]
    assert sample.main(argv) == 0
    plain = capsys.readouterr().out
    assert sample.main([*argv, "--adapt", "--save_adapted", str(tmp_path / "a.pt")]) == 0
    adapted = capsys.readouterr()
    assert adapted.out != plain and "300 bytes" in adapted.err
    assert read_checkpoint(str(tmp_path / "a.pt"), Spider)[1]["adapted"] == 300


def test_a_dialogue_learns_from_what_is_typed_alone_and_saves_also_at_ctrl_c(trained, tmp_path, monkeypatch, capsys):
    lines = iter(("abc def", "gh"))

    def ask():
        try:
            return next(lines)
        except StopIteration:
            raise KeyboardInterrupt from None
    monkeypatch.setattr(sample, "bytes_to_continue", lambda prompt: None)
    monkeypatch.setattr(dialogue, "ask", ask)
    monkeypatch.setattr(dialogue.sys, "stdin", open(os.devnull))
    assert sample.main([str(trained), "--bytes", "20", "--adapt", "--save_adapted", str(tmp_path / "a.pt")]) == 130
    assert read_checkpoint(str(tmp_path / "a.pt"), Spider)[1]["adapted"] == 9


def test_ctrl_c_while_a_long_text_is_learned_comes_between_two_steps(checkpoint, monkeypatch):
    adaptation, step = adaptation_of(checkpoint), RowwiseAdagrad.step

    def interrupted(optimizer):
        step(optimizer)
        os.kill(os.getpid(), signal.SIGINT)
    monkeypatch.setattr(RowwiseAdagrad, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        dialogue.learn(adaptation, text(4000).tolist(), 3999)
    assert adaptation.count == CHUNK and not any(table.gathered() for table in adaptation.adagrad.tables.values())


@pytest.mark.parametrize("flags, words", (
    (("--per_document", "--eval", "a"), "--per_document needs --adapt"),
    (("--save_adapted", "x.pt", "--prompt", "a"), "--save_adapted needs --adapt"),
    (("--adapt", "--per_document", "--prompt", "a"), "--per_document applies to --eval, not to talking"),
    (("--adapt", "--show", "a"), "--adapt applies to talking or --eval, not to --show"),
    (("--adapt", "--seq_len", "64", "--eval", "a"), "--seq_len has no effect with --adapt"),
    (("--adapt", "--save_adapted", "x.pt", "--eval", "a", "b"), "--save_adapted needs a single checkpoint"),
    (("--adapt", "--save_adapted", "{here}", "--prompt", "a"), "exists: use another name"),
    (("--adapt", "--save_adapted", "{here}/no/x.pt", "--prompt", "a"), "create its directory first"),
    (("--adapt", "--save_adapted", "{here}/no/x", "--prompt", "a"), "create its directory first"),
    (("--adapt", "--save_adapted", "{here}/x", "--json", "{here}/x", "--eval", "a"), "name the same file"),
))
def test_flags_of_adapting_that_would_be_ignored_are_refused(trained, tmp_path, capsys, flags, words):
    assert sample.main([str(trained), *(flag.format(here=tmp_path) for flag in flags)]) == 2
    assert words in capsys.readouterr().err.splitlines()[-1]

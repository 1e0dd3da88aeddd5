"""Mechanisms on the tasks of docs/results/mechanisms.py, at sizes that take seconds."""

import importlib.util
import sys

import pytest
import torch

from conftest import ROOT
from spider.model.config import SpiderConfig
from spider_model import Spider

spec = importlib.util.spec_from_file_location("mechanisms", ROOT / "docs" / "results" / "mechanisms.py")
mechanisms = sys.modules["mechanisms"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(mechanisms)

SMALL = mechanisms.BARE | dict(hidden_size=48, moe_intermediate_size=96)


def few_chains(generator, rows):
    return mechanisms.chains(generator, rows, statements=9, n_chains=3, values=8)


def trained(task, steps: int, **changes) -> dict:
    """The scores of a small model."""
    model = mechanisms.fit(SpiderConfig(**SMALL | changes), task, steps, seed=0, lr=0.015, halting_from=0.5)
    return mechanisms.score(model, task)


def test_the_values_of_chains_follow_from_their_assignments():
    ids, labels, depth = mechanisms.chains(torch.Generator().manual_seed(0), 4)
    for row, asked, hops in zip(ids.view(4, -1, 3).tolist(), labels.view(4, -1, 3).tolist(), depth.view(4, -1, 3)):
        known = {}
        for (name, of, value), (_, _, label), hop in zip(row, asked, hops[:, 2].tolist()):
            known[name - 64] = (value, 0) if of == ord("=") else (known[of][0], known[of][1] + 1)
            assert known[name - 64] == (label, hop)


def test_a_question_for_a_word_has_the_last_digit_of_its_name():
    ids, labels, depth = mechanisms.words(torch.Generator().manual_seed(0), 8)
    for row, asked, size in zip(ids.tolist(), labels.tolist(), depth.tolist()):
        known, start = {}, 0
        for end, byte in enumerate(row):
            if byte != ord(" "):
                continue
            *name, mark = row[start:end] or [ord("?")]
            if name and mark == ord("?"):
                assert (asked[end], size[end]) == (known[tuple(name)], len(name))
            elif name:
                known[tuple(name)] = mark
            start = end + 1
    assert (labels >= 0).sum() > 20


@pytest.mark.slow
def test_loops_solve_what_one_layer_cannot_and_halting_spends_them_on_depth():
    one = trained(few_chains, 150)["accuracy"]
    looped = trained(few_chains, 150, n_loops=3, act=True)
    assert one[1] > 0.9 and one[2] < 0.75
    assert looped["accuracy"][2] > 0.9
    assert looped["loops"][2] > looped["loops"][1] + 0.3


def test_tables_recall_planted_n_grams_that_a_dense_model_does_not():
    task = mechanisms.Dictionary((4, 6), 32)
    dense, tables = (trained(task, 60, boundaries="every_third", **changes)["accuracy"] for changes in (
        dict(n_prelude_layers=1), dict(engram_byte_orders=(4, 6), engram_byte_rows=5000, engram_byte_dim=8)))
    assert max(dense.values()) < 0.3 and min(tables.values()) > 0.8


@pytest.mark.slow
def test_a_cut_where_words_end_answers_what_a_stride_does_not():
    task = lambda generator, rows: mechanisms.words(generator, rows, length=48, n_names=2)  # noqa: E731
    arms = {cut: trained(task, 120, n_coda_layers=1, boundaries=cut)["mean"] for cut in ("whitespace", "every_third")}
    assert arms["whitespace"] > arms["every_third"] + 0.15


def test_only_in_its_warm_up_is_a_segment_that_halts_at_once_taught_to_go_on():
    """Why the warm-up is there; and what the loss hands to the loops behind the first one."""
    torch.manual_seed(0)
    model = Spider(SpiderConfig(**SMALL | dict(n_loops=3, act=True, ponder_weight=0.0)))
    torch.nn.init.normal_(model.core.out_proj.weight)
    torch.nn.init.constant_(model.core.halt_predictor.bias, 9)
    ids, labels, _ = few_chains(torch.Generator().manual_seed(0), 2)
    for warmup, learns in ((1.0, False), (0.5, True)):
        model.halting_warmup = warmup
        model(ids, labels).loss.backward()
        taught = [p.grad is not None and bool(p.grad.abs().sum() > 0)
                  for p in (model.core.halt_predictor.bias, model.core.log_A)]
        assert taught == [learns, learns]
        model.zero_grad()

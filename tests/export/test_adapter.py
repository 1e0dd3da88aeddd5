"""An exported model computes behind Hugging Face's interfaces what Spider computes."""

import importlib.metadata
import runpy

import pytest
import torch
from conftest import ROOT, text
from exporting import checkpoint, continuation, exported, loaded, model, spider, tokenizer  # noqa: F401

from tokenizer import BOS_ID, EOS_ID, PAD_ID


def test_logits_and_loss_are_spiders_own_and_labels_are_shifted_inside(model, spider):
    ids = text(2, 40)
    labels = ids.clone()
    labels[0, 5:9] = -100
    shifted = torch.cat((labels[:, 1:], torch.full((2, 1), -100)), dim=1)
    ours, theirs = spider(ids, shifted, 3), model(ids, labels=labels)
    for name in ("logits", "loss", "nats_per_byte"):
        assert torch.equal(getattr(ours, name), theirs[name]), name
    assert not torch.equal(model(ids, labels=ids).loss, theirs.loss)
    assert model(ids).loss is None and model(ids).cache is None
    assert torch.equal(model(ids, return_dict=False)[0], theirs.logits)
    assert torch.equal(spider(ids, n_loops=1).logits, model(ids, n_loops=1).logits)
    theirs.loss.backward()
    assert sum(p.grad is not None for p in model.parameters()) > 40
    model.zero_grad()
    with pytest.raises(ValueError, match="labels: the loss needs a full pass"):
        model(ids, labels=ids, use_cache=True)


def test_generate_writes_what_spider_writes_and_reads_every_byte_once(model, spider, monkeypatch):
    prompt, read, step = [BOS_ID, *b"abc def g"], [], type(model.spider).step
    monkeypatch.setattr(type(model.spider), "step", lambda self, ids, state: read.append(ids.shape[1]) or step(
        self, ids, state))
    expected = list(spider.generate(prompt, 30, temperature=0, n_loops=3))
    for _ in range(2):
        read.clear()
        assert continuation(model, prompt, 30)[:len(expected)] == expected
        assert read == [len(prompt)] + [1] * (len(read) - 1)
    assert continuation(model, prompt, 30, n_loops=1)[:9] == list(spider.generate(prompt, 9, 0, n_loops=1))[:9]
    read.clear()
    assert continuation(model, prompt, 30, use_cache=False)[:len(expected)] == expected and not read


def test_what_is_drawn_has_the_models_probabilities_and_is_never_an_id_that_no_text_has(model, spider):
    torch.manual_seed(0)
    drawn = model.generate(torch.tensor([[BOS_ID, 97]]), max_new_tokens=1, num_return_sequences=4000, temperature=1.0)
    logits = spider(torch.tensor([[BOS_ID, 97]]), n_loops=3).logits[0, -1].detach()
    logits[[PAD_ID, BOS_ID, *range(EOS_ID + 1, 272)]] = -torch.inf
    found = torch.bincount(drawn[:, 2], minlength=272) / 4000
    assert found[[PAD_ID, BOS_ID, *range(EOS_ID + 1, 272)]].sum() == 0
    assert (found - logits.softmax(0)).abs().sum() < 0.2 < (found - logits.mul(2).softmax(0)).abs().sum()


def test_padding_changes_nothing_in_front_of_a_row_or_behind_it(model):
    rows = [[BOS_ID, *b"abc def"], [*b"no begin"], [*b"x"], [BOS_ID, *b"the longest of the four"]]
    longest = max(map(len, rows))
    for side in ("left", "right"):
        ids, mask = torch.full((4, longest), 7), torch.zeros(4, longest, dtype=torch.int64)
        places = [slice(longest - len(row), None) if side == "left" else slice(len(row)) for row in rows]
        for i, (row, place) in enumerate(zip(rows, places)):
            ids[i, place], mask[i, place] = torch.tensor(row), 1
        together = model(ids, attention_mask=mask, labels=ids)
        stepwise = model(ids, attention_mask=mask, use_cache=True).logits
        alone = [model(torch.tensor([row]), labels=torch.tensor([row])) for row in rows]
        for i, place in enumerate(places):
            torch.testing.assert_close(together.logits[i, place], alone[i].logits[0])
            torch.testing.assert_close(stepwise[i, place], alone[i].logits[0])
        told = [len(row) - 1 for row in rows]
        nats = sum(one.nats_per_byte * n for one, n in zip(alone, told) if n) / sum(told)
        torch.testing.assert_close(together.nats_per_byte, nats)
        if side == "left":
            written = model.generate(ids, attention_mask=mask, max_new_tokens=10, do_sample=False)[:, longest:]
            for i, row in enumerate(rows):
                expected = continuation(model, row, 10)
                assert written[i, :len(expected)].tolist() == expected


@pytest.mark.parametrize("row", ([BOS_ID, *b"abc def gh"], [*b"no begin"], [*b"two", EOS_ID, BOS_ID, *b"ab", EOS_ID]))
def test_padding_changes_no_part_of_the_loss_whatever_the_mask_and_labels_say_of_it(model, row):
    alone = model(torch.tensor([row]), labels=torch.tensor([row]))
    for front, behind, filler in ((7, 0, PAD_ID), (7, 0, 9), (1, 0, PAD_ID), (0, 5, PAD_ID), (3, 4, PAD_ID),
                                  (3, 4, EOS_ID)):
        ids = torch.tensor([[filler] * front + row + [filler] * behind])
        mask = torch.tensor([[0] * front + [1] * len(row) + [0] * behind])
        unlabelled = ids.masked_fill(mask == 0, -100)
        cases = [(mask, ids), (mask, unlabelled)]
        if filler == PAD_ID:              # as the tokenizer pads; then the ids say as much as the mask
            cases += [(None, ids), (None, unlabelled), (torch.ones_like(mask), ids)]
        for given, labels in cases:
            padded = model(ids, attention_mask=given, labels=labels)
            for part in ("loss", "nats_per_byte"):
                torch.testing.assert_close(padded[part], alone[part], rtol=0, atol=2e-6)
            torch.testing.assert_close(padded.logits[:, front:front + len(row)], alone.logits)
    ids, labels = torch.tensor([row[:4] + [PAD_ID] + row[4:]]), torch.tensor([row[:4] + [-100] + row[4:]])
    torch.testing.assert_close(model(ids, labels=ids).loss, model(ids, labels=labels).loss)


@pytest.mark.parametrize("row", ([1, 0, 1, 1], [0, 0, 0, 0], [0, 1, 0, 1], [1, 1, 1]))
def test_a_mask_that_is_no_padding_is_refused(model, row):
    with pytest.raises(ValueError, match="attention_mask must have the shape of input_ids"):
        model(text(1, 4), attention_mask=torch.tensor([row]))


def test_a_kept_cache_continues_and_several_texts_continue_from_one(model):
    prompt = [BOS_ID, *b"abc def g"]
    first = model.generate(torch.tensor([prompt]), max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
    cache = first.cache
    assert cache.get_seq_length() == len(prompt) + 4      # the last byte was written and not read
    ids = torch.cat((first.sequences, torch.tensor([list(b" and then")])), dim=1)
    fresh = continuation(model, ids[0].tolist(), 8)
    went_on = model.generate(ids, cache=cache, max_new_tokens=8, do_sample=False)
    assert went_on[0, ids.shape[1]:].tolist() == fresh


def test_beam_search_reorders_states(model):
    prompt, beams = torch.tensor([[BOS_ID, *b"abc"], [BOS_ID, *b"xyz"]]), dict(num_beams=3, do_sample=False)
    held = model.generate(prompt, max_new_tokens=8, num_return_sequences=2, **beams)
    assert torch.equal(held, model.generate(prompt, max_new_tokens=8, num_return_sequences=2, use_cache=False, **beams))
    assert not torch.equal(held[::2], model.generate(prompt, max_new_tokens=8, do_sample=False))


def test_drafts_which_no_state_takes_back_are_refused(model):
    with pytest.raises(ValueError, match="not supported with stateful models"):
        continuation(model, [BOS_ID, *b"abcabcabc"], prompt_lookup_num_tokens=2)
    with pytest.raises(NotImplementedError, match="no input embedding module to replace"):
        model.get_input_embeddings()


def test_a_lower_precision_is_that_of_products_alone(exported, model, spider):
    half = loaded(exported, dtype=torch.bfloat16)
    assert half.spider.compute_dtype == torch.bfloat16 and {p.dtype for p in half.parameters()} == {torch.float32}
    ids = text(1, 30)
    spider.compute_dtype = torch.bfloat16
    try:
        with torch.no_grad():
            assert torch.equal(half(ids).logits, spider(ids, n_loops=3).logits)
    finally:
        spider.compute_dtype = torch.float32
    assert len(continuation(half, ids[0].tolist(), 5)) == 5 and model.spider.compute_dtype == torch.float32


@pytest.mark.parametrize("dtype", ("float16", "bfloat16", "float64"))
@pytest.mark.parametrize("how", ("loaded", "cast"))
def test_a_model_of_any_precision_tells_learns_and_writes(exported, model, dtype, how):
    """Loaded in a type, a model keeps its parameters; half(), bfloat16() and to() cast them, and products with them."""
    dtype, ids = getattr(torch, dtype), text(2, 30)
    other = loaded(exported, dtype=dtype) if how == "loaded" else loaded(exported).to(dtype)
    assert {p.dtype for p in other.parameters()} == {dtype if how == "cast" else torch.float32}
    assert other.spider.compute_dtype == dtype
    expected, found = (one(ids, labels=ids) for one in (model, other))
    assert found.logits.dtype == found.loss.dtype == torch.promote_types(dtype, torch.float32)
    near = {torch.float16: 5e-3, torch.bfloat16: 5e-2, torch.float64: 1e-5}[dtype]
    torch.testing.assert_close(found.loss.float(), expected.loss, rtol=0, atol=near)
    found.loss.backward()
    assert sum(p.grad is not None and bool(p.grad.isfinite().all()) for p in other.parameters()) > 40
    assert other.generate(ids[:, :9], max_new_tokens=5, do_sample=False).shape == (2, 14)
    assert other.float().spider.compute_dtype == torch.float32 == other.spider.wide_dtype


def test_a_transformers_that_passes_the_cache_by_another_name_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "5.23.0")
    with pytest.raises(ImportError, match="transformers>=5.24 is required"):
        runpy.run_path(str(ROOT / "spider/export/modeling_spider.py"))

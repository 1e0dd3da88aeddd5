"""An exported model computes behind Hugging Face's interfaces what Spider computes, and trains by
LoRA."""

import importlib.metadata
import json
import math
import runpy
from dataclasses import asdict

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import ROOT, awake, gradients, small_config, text
from exporting import checkpoint, exported, loaded, loaded_tokenizer, model, spider, tokenizer
from tokenizer import BOS_ID, EOS_ID, PAD_ID, decode, encode


def continuation(model, ids: list[int], n: int = 12, **settings) -> list[int]:
    """Return what generate() writes after one prompt, the likeliest bytes unless told otherwise."""
    written = model.generate(
        torch.tensor([ids]), max_new_tokens=n, **(dict(do_sample=False) | settings)
    )
    return written[0, len(ids) :].tolist()


def test_logits_and_loss_are_spiders_own_and_labels_are_shifted_inside(model, spider):
    ids = text(2, 40)
    labels = ids.clone()
    labels[0, 5:9] = -100
    shifted = torch.cat((labels[:, 1:], torch.full((2, 1), -100)), dim=1)
    ours, theirs = spider(ids, shifted, 3), model(ids, labels=labels)
    for name in ("logits", "nats_per_byte"):
        assert torch.equal(getattr(ours, name), theirs[name]), name
    assert torch.equal(theirs.loss, theirs.nats_per_byte)
    assert not torch.equal(model(ids, labels=ids).loss, theirs.loss)
    assert model(ids).loss is None and model(ids).cache is None
    assert torch.equal(model(ids, return_dict=False)[0], theirs.logits)
    assert torch.equal(spider(ids, n_loops=1).logits, model(ids, n_loops=1).logits)
    theirs.loss.backward()
    assert sum(p.grad is not None for p in model.parameters()) > 40
    model.zero_grad()
    with pytest.raises(ValueError, match="labels: the loss needs a full pass"):
        model(ids, labels=ids, use_cache=True)


def test_the_loss_of_training_mode_is_spiders_own():
    model, ids = adapter().train(), text(2, 40)
    shifted = torch.cat((ids[:, 1:], torch.full((2, 1), -100)), dim=1)
    ours, theirs = model.spider(ids, shifted), model(ids, labels=ids)
    assert torch.equal(ours.loss, theirs.loss) and torch.equal(
        ours.nats_per_byte, theirs.nats_per_byte
    )
    assert theirs.loss > theirs.nats_per_byte


def test_generate_writes_what_spider_writes_and_reads_every_byte_once(model, spider, monkeypatch):
    prompt, read, step = [BOS_ID, *b"abc def g"], [], type(model.spider).step
    monkeypatch.setattr(
        type(model.spider),
        "step",
        lambda self, ids, state: read.append(ids.shape[1]) or step(self, ids, state),
    )
    expected = list(spider.generate(prompt, 30, temperature=0, n_loops=3))
    for _ in range(2):
        read.clear()
        assert continuation(model, prompt, 30)[: len(expected)] == expected
        assert read == [len(prompt)] + [1] * (len(read) - 1)
    assert (
        continuation(model, prompt, 30, n_loops=1)[:9]
        == list(spider.generate(prompt, 9, 0, n_loops=1))[:9]
    )
    read.clear()
    assert (
        continuation(model, prompt, 30, use_cache=False)[: len(expected)] == expected and not read
    )


def test_what_is_drawn_has_the_models_probabilities_and_is_never_an_id_that_no_text_has(
    model, spider
):
    torch.manual_seed(0)
    drawn = model.generate(
        torch.tensor([[BOS_ID, 97]]), max_new_tokens=1, num_return_sequences=4000, temperature=1.0
    )
    logits = spider(torch.tensor([[BOS_ID, 97]]), n_loops=3).logits[0, -1].detach()
    logits[[PAD_ID, BOS_ID, *range(EOS_ID + 1, 272)]] = -torch.inf
    found = torch.bincount(drawn[:, 2], minlength=272) / 4000
    assert found[[PAD_ID, BOS_ID, *range(EOS_ID + 1, 272)]].sum() == 0
    assert (
        (found - logits.softmax(0)).abs().sum()
        < 0.2
        < (found - logits.mul(2).softmax(0)).abs().sum()
    )


def test_rows_of_a_padded_batch_are_as_each_alone(model):
    rows = [
        [BOS_ID, *b"abc def"],
        [*b"no begin"],
        [*b"x"],
        [BOS_ID, *b"the longest of the four"],
        [],
    ]
    longest = max(map(len, rows))
    for side in ("left", "right"):
        ids, mask = torch.full((5, longest), 7), torch.zeros(5, longest, dtype=torch.int64)
        spans = [
            slice(longest - len(row), None) if side == "left" else slice(len(row)) for row in rows
        ]
        for i, (row, span) in enumerate(zip(rows, spans, strict=True)):
            ids[i, span], mask[i, span] = torch.tensor(row), 1
        together = model(ids, attention_mask=mask).logits
        stepwise = model(ids, attention_mask=mask, use_cache=True).logits
        for i, (row, span) in enumerate(zip(rows[:4], spans[:4], strict=True)):
            alone = model(torch.tensor([row])).logits[0]
            torch.testing.assert_close(together[i, span], alone)
            torch.testing.assert_close(stepwise[i, span], alone)
        torch.testing.assert_close(together[4, -1], model(torch.tensor([[BOS_ID]])).logits[0, -1])
        if side == "left":
            written = model.generate(ids, attention_mask=mask, max_new_tokens=10, do_sample=False)[
                :, longest:
            ]
            for i, row in enumerate(rows):
                expected = continuation(model, row or [BOS_ID], 10)
                assert written[i, : len(expected)].tolist() == expected
        else:
            with pytest.raises(ValueError, match="pad on the left"):
                model.generate(ids, attention_mask=mask, max_new_tokens=2)


@pytest.mark.parametrize(
    "row", ([BOS_ID, *b"abc def gh"], [*b"no begin"], [*b"two", EOS_ID, BOS_ID, *b"ab", EOS_ID])
)
def test_padding_changes_no_part_of_the_loss_whatever_the_mask_and_labels_say_of_it(model, row):
    alone = model(torch.tensor([row]), labels=torch.tensor([row]))
    for front, behind, filler in (
        (7, 0, PAD_ID),
        (7, 0, 9),
        (1, 0, PAD_ID),
        (0, 5, PAD_ID),
        (3, 4, PAD_ID),
        (3, 4, EOS_ID),
    ):
        ids = torch.tensor([[filler] * front + row + [filler] * behind])
        mask = torch.tensor([[0] * front + [1] * len(row) + [0] * behind])
        unlabelled = ids.masked_fill(mask == 0, -100)
        cases = [(mask, ids), (mask, unlabelled)]
        if filler == PAD_ID:  # as the tokenizer pads; then the ids say as much as the mask
            cases += [(None, ids), (None, unlabelled), (torch.ones_like(mask), ids)]
        for attention_mask, labels in cases:
            padded = model(ids, attention_mask=attention_mask, labels=labels)
            for part in ("loss", "nats_per_byte"):
                torch.testing.assert_close(padded[part], alone[part], rtol=0, atol=2e-6)
            torch.testing.assert_close(padded.logits[:, front : front + len(row)], alone.logits)
    ids, labels = (
        torch.tensor([row[:4] + [PAD_ID] + row[4:]]),
        torch.tensor([row[:4] + [-100] + row[4:]]),
    )
    torch.testing.assert_close(model(ids, labels=ids).loss, model(ids, labels=labels).loss)


@pytest.mark.parametrize("row", ([1, 0, 1, 1], [0, 1, 0, 1], [1, 1, 1]))
def test_a_mask_that_is_no_padding_is_refused(model, row):
    with pytest.raises(ValueError, match="attention_mask must have the shape of input_ids"):
        model(text(1, 4), attention_mask=torch.tensor([row]))


def test_the_vocabulary_keeps_its_size_and_loops_begin_at_one(model):
    model.resize_token_embeddings(272)
    with pytest.raises(ValueError, match="vocabulary"):
        model.resize_token_embeddings(300)
    for how in ({}, dict(use_cache=True)):
        with pytest.raises(ValueError, match="n_loops must be at least 1"):
            model(text(1, 4), n_loops=0, **how)


def test_a_kept_cache_continues_and_several_texts_continue_from_one(model):
    prompt = [BOS_ID, *b"abc def g"]
    first = model.generate(
        torch.tensor([prompt]), max_new_tokens=5, do_sample=False, return_dict_in_generate=True
    )
    cache = first.cache
    assert cache.get_seq_length() == len(prompt) + 4  # the last byte was written and not read
    ids = torch.cat((first.sequences, torch.tensor([list(b" and then")])), dim=1)
    fresh = continuation(model, ids[0].tolist(), 8)
    went_on = model.generate(ids, cache=cache, max_new_tokens=8, do_sample=False)
    assert went_on[0, ids.shape[1] :].tolist() == fresh
    for other in (
        first.sequences,
        ids.repeat(2, 1),
        went_on + 1,
        torch.cat((went_on + 1, ids), dim=1),
    ):
        with pytest.raises(
            ValueError, match="cache: input_ids must continue the ids that it has read"
        ):
            model.generate(other, cache=cache, max_new_tokens=2)
    with pytest.raises(ValueError, match="cache: it continues 1 rows, but input_ids has 2"):
        model(ids.repeat(2, 1), cache=cache)


def test_beam_search_reorders_states(model):
    prompt, beams = (
        torch.tensor([[BOS_ID, *b"abc"], [BOS_ID, *b"xyz"]]),
        dict(num_beams=3, do_sample=False),
    )
    held = model.generate(prompt, max_new_tokens=8, num_return_sequences=2, **beams)
    assert torch.equal(
        held,
        model.generate(prompt, max_new_tokens=8, num_return_sequences=2, use_cache=False, **beams),
    )
    assert not torch.equal(held[::2], model.generate(prompt, max_new_tokens=8, do_sample=False))


def test_what_spider_does_not_have_is_refused_by_name(model):
    ids = text(1, 8)
    assert torch.equal(
        model(ids, inputs_embeds=None, past_key_values=None, output_attentions=False).logits,
        model(ids).logits,
    )
    for name, value in dict(
        inputs_embeds=torch.ones(1, 8, 32),
        output_hidden_states=True,
        position_ids=ids,
        cache=transformers.DynamicCache(),
    ).items():
        with pytest.raises(ValueError, match=name):
            model(ids, **{name: value})
    for name, value in dict(
        output_hidden_states=True, output_attentions=True, cache=transformers.DynamicCache()
    ).items():
        with pytest.raises(ValueError, match=name):
            model.generate(ids, max_new_tokens=2, return_dict_in_generate=True, **{name: value})
    with pytest.raises(ValueError, match="input_ids"):
        model()
    with pytest.raises(ValueError, match="not supported with stateful models"):
        # no state takes drafts back
        continuation(model, [BOS_ID, *b"abcabcabc"], prompt_lookup_num_tokens=2)


@pytest.mark.parametrize("kind", ("flash_attention_2", "sdpa"))
def test_other_attention_is_refused_when_a_model_is_loaded(exported, kind):
    with pytest.raises(
        ValueError, match=f"attn_implementation='{kind}' is not available in Spider"
    ):
        loaded(exported, attn_implementation=kind)


@pytest.mark.slow
def test_quantization_is_refused_when_a_model_is_loaded(exported):
    """It would replace no layer, as Spider's Linears are of another class."""
    with pytest.raises(ValueError, match="quantization_config is not available in Spider"):
        loaded(exported, quantization_config=transformers.BitsAndBytesConfig(load_in_8bit=True))


def test_output_that_a_config_asks_for_is_refused(exported):
    with pytest.raises(ValueError, match="output_hidden_states is not available in Spider"):
        loaded(exported, output_hidden_states=True)(text(1, 8))


def test_an_empty_prompt_is_the_beginning_of_a_document(model, tokenizer):
    from transformers import pipeline

    greedy = dict(max_new_tokens=8, do_sample=False)
    expected = continuation(model, [BOS_ID], 8)
    nothing = tokenizer("", return_tensors="pt")
    for inputs in (nothing, {}):
        assert model.generate(**inputs, **greedy)[0].tolist() == [BOS_ID, *expected]
    (written,) = pipeline("text-generation", model=model, tokenizer=tokenizer)("", **greedy)
    assert written["generated_text"] == tokenizer.decode(expected, skip_special_tokens=True)
    both = tokenizer(["", "abc"], padding=True, return_tensors="pt")
    assert model.generate(**both, **greedy)[1].tolist() == [
        *b"abc",
        *continuation(model, [*b"abc"], 8),
    ]


@pytest.mark.parametrize("dtype", ("float16", "bfloat16", "float64"))
@pytest.mark.parametrize("how", ("loaded", "cast"))
def test_a_model_of_any_precision_tells_learns_and_writes(exported, model, dtype, how):
    """Loaded in a type, a model keeps its parameters; half(), bfloat16() and to() cast them, and
    products with them."""
    dtype, ids = getattr(torch, dtype), text(2, 30)
    other = loaded(exported, dtype=dtype) if how == "loaded" else loaded(exported).to(dtype)
    assert {p.dtype for p in other.parameters()} == {dtype if how == "cast" else torch.float32}
    assert other.spider.compute_dtype == dtype
    expected, found = (one(ids, labels=ids) for one in (model, other))
    assert found.logits.dtype == found.loss.dtype == torch.promote_types(dtype, torch.float32)
    near = {torch.float16: 5e-3, torch.bfloat16: 5e-2, torch.float64: 1e-5}[dtype]
    torch.testing.assert_close(found.loss.float(), expected.loss, rtol=0, atol=near)
    found.loss.backward()
    assert (
        sum(p.grad is not None and bool(p.grad.isfinite().all()) for p in other.parameters()) > 40
    )
    assert other.generate(ids[:, :9], max_new_tokens=5, do_sample=False).shape == (2, 14)
    assert other.float().spider.compute_dtype == torch.float32 == other.spider.wide_dtype


def test_a_transformers_that_passes_the_cache_by_another_name_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "5.23.0")
    with pytest.raises(ImportError, match="transformers>=5.24 is required"):
        runpy.run_path(str(ROOT / "spider/modeling_spider.py"))


# --------------------------------------------------------------------------------------------------
# The Trainer


def trainer(
    model, tokenizer, directory, sequences, steps=1, callbacks=(), compute_metrics=None, **settings
):
    """Make a Trainer of sequences of ids, whose labels are the ids, but -100 for padding."""
    quick = dict(
        output_dir=str(directory),
        max_steps=steps,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    return transformers.Trainer(
        model=model,
        train_dataset=[dict(input_ids=ids) for ids in sequences],
        callbacks=[*callbacks],
        compute_metrics=compute_metrics,
        data_collator=transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False),
        args=transformers.TrainingArguments(**(quick | settings)),
    )


def adapter(**changes):
    """The project's own class, whose weights are awake."""
    from spider.modeling_spider import SpiderForCausalLM, SpiderHFConfig

    config = small_config(boundaries="words", **changes)
    model = SpiderForCausalLM(SpiderHFConfig(spider=asdict(config)))
    model.spider.load_state_dict(awake(config).state_dict())
    return model


def gradient_of_a_step(model, *rest, **settings) -> tuple[torch.Tensor, float]:
    """The gradient with which the Trainer steps, tables included, as a single vector; the loss that
    it logs."""
    found = []

    class See(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, *_, **__):
            by_name = {
                name: grad for name, grad in gradients(model.spider).items() if grad is not None
            }
            found.append(torch.cat([by_name[name].flatten() for name in sorted(by_name)]))

    trained = trainer(
        model,
        *rest,
        callbacks=[See()],
        learning_rate=0.0,
        max_grad_norm=0.0,
        logging_steps=1,
        **settings,
    )
    trained.train()
    return *found, trained.state.log_history[0]["loss"]


@pytest.mark.parametrize("side, rows, near", (("right", 1, 1e-5), ("left", 2, 1e-2)))
def test_accumulation_over_documents_of_unequal_length_has_the_gradient_of_one_batch(
    tmp_path, side, rows, near
):
    """Padding on the left makes the Trainer count a byte of each padded row that has no context,
    and no loss."""
    from spider.modeling_spider import SpiderTokenizer

    documents = [text(1, length, seed=length)[0].tolist() for length in (12, 90, 40, 6)]
    model = adapter(aux_loss_weight=0.0, z_loss_weight=0.0, ponder_weight=0.0)
    (whole, loss), (accumulated, its_loss) = (
        gradient_of_a_step(
            model,
            SpiderTokenizer(padding_side=side),
            tmp_path,
            documents,
            per_device_train_batch_size=at_once,
            gradient_accumulation_steps=len(documents) // at_once,
        )
        for at_once in (len(documents), rows)
    )
    assert (accumulated - whole).norm() < near * whole.norm() and its_loss == pytest.approx(
        loss, rel=near
    )


def test_all_terms_of_the_loss_are_weighted_by_a_passs_share_of_the_labels():
    model, ids = adapter().train(), text(2, 20)
    alone = model(ids, labels=ids).loss
    labels = ids.clone()
    labels[1, 10:] = -100
    fewer = model(ids, labels=labels).loss
    for count in (56, torch.tensor(56)):
        torch.testing.assert_close(
            model(ids, labels=ids, num_items_in_batch=count).loss, alone * 38 / 56
        )
        torch.testing.assert_close(
            model(ids, labels=labels, num_items_in_batch=count).loss, fewer * 28 / 56
        )
    assert model(ids, labels=ids * 0 - 100, num_items_in_batch=0).loss.isfinite()


def test_labels_of_padding_are_refused_where_they_would_distort_the_mean():
    model, ids = adapter().train(), text(2, 20)
    ids[0, 9:] = PAD_ID
    assert torch.equal(
        model(ids, labels=ids, num_items_in_batch=38).loss, model(ids, labels=ids).loss
    )
    with pytest.raises(ValueError, match="labels: .* those of padding must be -100"):
        model(ids, labels=ids, num_items_in_batch=76)


def test_label_smoothing_trains_no_copier(exported, tokenizer, tmp_path):
    model, ids = loaded(exported), torch.tensor([[*b"abcdefgh" * 4]])
    trainer(
        model,
        tokenizer,
        tmp_path,
        ids.tolist() * 4,
        steps=10,
        per_device_train_batch_size=4,
        learning_rate=0.01,
        label_smoothing_factor=0.1,
    ).train()
    likeliest = model.eval()(ids).logits.argmax(2)
    assert (likeliest[:, :-1] == ids[:, 1:]).float().mean() > 0.9


def test_an_evaluation_reports_the_cross_entropy_and_hands_logits_alone_to_compute_metrics(
    exported, tokenizer, tmp_path
):
    model, ids, given = loaded(exported), text(3, 20), []
    found = trainer(
        model, tokenizer, tmp_path, [], compute_metrics=lambda it: given.append(it) or {}
    ).evaluate([dict(input_ids=row) for row in ids.tolist()])
    expected = model(ids, labels=ids)
    assert found["eval_loss"] == pytest.approx(expected.nats_per_byte.item(), rel=1e-5)
    torch.testing.assert_close(torch.from_numpy(given[0].predictions), expected.logits.detach())
    assert given[0].label_ids.tolist() == ids.tolist()


# --------------------------------------------------------------------------------------------------
# LoRA

# as in the guide
NAMED = ["q_a_proj", "q_b_proj", "kv_a_proj", "kv_b_proj", "o_proj", "gate_up_proj", "down_proj"]


@pytest.mark.parametrize("checkpointing", (False, True))
@pytest.mark.parametrize("targets", ("all-linear", NAMED), ids=str)
def test_lora_trains_saves_and_loads_by_the_standard_task_type(
    exported, tokenizer, tmp_path, targets, checkpointing
):
    peft = pytest.importorskip("peft")
    from transformers import Trainer, TrainingArguments

    base = loaded(exported)
    lora = peft.get_peft_model(
        base, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=targets, r=4)
    )
    before = {name: p.clone() for name, p in base.named_parameters()}
    ids = torch.tensor([[*b"abcdefgh" * 4]] * 8)
    Trainer(
        model=lora,
        train_dataset=[dict(input_ids=row, labels=row) for row in ids],
        args=TrainingArguments(
            output_dir=str(tmp_path / "trainer"),
            max_steps=12,
            per_device_train_batch_size=4,
            learning_rate=0.02,
            gradient_checkpointing=checkpointing,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
        ),
    ).train()
    assert base.gradient_checkpointing == checkpointing == (base.spider.recompute == "all")
    changed = {name for name, p in base.named_parameters() if not torch.equal(p, before[name])}
    assert changed and all("lora_" in name and "lm_head" not in name for name in changed)
    lora.eval()
    with lora.disable_adapter():
        untrained = lora(ids[:1], labels=ids[:1]).nats_per_byte
    assert lora(ids[:1], labels=ids[:1]).nats_per_byte < untrained - 0.5
    lora.save_pretrained(tmp_path / "lora")
    again = peft.PeftModel.from_pretrained(loaded(exported), tmp_path / "lora").eval()
    assert torch.equal(again(ids).logits, lora(ids).logits)
    prompt = tokenizer("abcdef", return_tensors="pt")
    written, uncached = (
        again.generate(**prompt, max_new_tokens=30, do_sample=False, use_cache=use)
        for use in (True, False)
    )
    merged = again.merge_and_unload().generate(**prompt, max_new_tokens=30, do_sample=False)
    assert torch.equal(written, uncached) and torch.equal(written, merged)


# --------------------------------------------------------------------------------------------------
# The tokenizer


@settings(deadline=None, max_examples=40)
@given(st.text())
def test_a_text_is_its_bytes_and_comes_back(tokenizer, content):
    ids = tokenizer(content)["input_ids"]
    assert ids == encode(content)[1:-1] == tokenizer.encode(content, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=True) == tokenizer.decode(ids) == content
    assert tokenizer.convert_tokens_to_string(tokenizer.tokenize(content)) == content


@settings(deadline=None, max_examples=40)
@given(st.binary())
def test_any_bytes_come_back_where_they_are_asked_for(exported, tokenizer, content):
    assert tokenizer.decode(list(content)) == decode(content)
    tokenizer.errors = "surrogateescape"
    try:
        kept = tokenizer.decode(list(content))
        assert tokenizer.encode(kept, add_special_tokens=False) == list(content)
    finally:
        tokenizer.errors = "replace"


def test_a_surrogate_that_stands_for_no_byte_is_a_replacement_character(tokenizer):
    assert tokenizer("a\ud800b\udcff")["input_ids"] == [97, *"\ufffd".encode(), 98, 255]
    assert tokenizer("")["input_ids"] == []


def test_ids_above_255_come_from_nothing_that_a_text_spells(exported, tokenizer):
    assert tokenizer("<bos><eos> <pad>")["input_ids"] == list(b"<bos><eos> <pad>")
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (
        PAD_ID,
        BOS_ID,
        EOS_ID,
    )
    assert len(tokenizer) == tokenizer.vocab_size == 272 and len(tokenizer.get_vocab()) == 272
    assert tokenizer.decode([BOS_ID, 97, EOS_ID, 270, PAD_ID]) == "<bos>a<eos><reserved_270><pad>"
    assert tokenizer.decode([BOS_ID, 97, EOS_ID, 270, PAD_ID], skip_special_tokens=True) == "a"
    assert tokenizer("a", "b")["input_ids"] == [97, EOS_ID, BOS_ID, 98]
    batch = tokenizer(["a", "bcd"], padding=True, return_tensors="pt")
    assert batch["input_ids"].tolist() == [[PAD_ID, PAD_ID, 97], [*b"bcd"]]
    assert batch["attention_mask"].tolist() == [[0, 0, 1], [1, 1, 1]]
    kept = loaded_tokenizer(exported, errors="surrogateescape", add_bos_token=True)
    assert kept(kept.decode([0xFF, 97]))["input_ids"] == [BOS_ID, 0xFF, 97]
    assert kept("ab", return_special_tokens_mask=True)["special_tokens_mask"] == [1, 0, 0]


# --------------------------------------------------------------------------------------------------
# lm-evaluation-harness, from local files


def nats(model, context: list[int], told: list[int]) -> float:
    """Nats that the model needs for ids behind a context, by the full pass."""
    with torch.no_grad():
        logits = model(torch.tensor([[*context, *told]])).logits[0, len(context) - 1 : -1]
    return torch.nn.functional.cross_entropy(logits, torch.tensor(told), reduction="sum").item()


@pytest.mark.parametrize("kind", ("loglikelihood_rolling", "multiple_choice"))
def test_lm_evaluation_harness_measures_local_texts(exported, model, tmp_path, kind):
    pytest.importorskip("lm_eval")
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    lines = dict(
        loglikelihood_rolling=[
            "doc_to_text: ''",
            "doc_to_target: '{{text}}'",
            "metric: bits_per_byte",
        ],
        multiple_choice=[
            "doc_to_text: '{{text}}'",
            "doc_to_choice: choices",
            "doc_to_target: gold",
            "metric: acc",
        ],
    )[kind]
    task = "\n".join(lines).replace("metric:", "metric_list:\n- metric:") + "\n"
    documents = [
        dict(text=one, choices=["abc", "hg", "d ef"], gold=1)
        for one in ("abc def gh", "é漢🕸", "dd e")
    ]
    (tmp_path / "documents.jsonl").write_text("".join(json.dumps(one) + "\n" for one in documents))
    (tmp_path / "task.yaml").write_text(
        f"task: local\ndataset_path: json\ntest_split: test\noutput_type: {kind}\n"
        f"dataset_kwargs:\n  data_files:\n    test: {tmp_path}/documents.jsonl\n{task}"
    )
    lm = HFLM(str(exported), trust_remote_code=True, device="cpu", batch_size=3)
    found = simple_evaluate(
        model=lm,
        tasks=["local"],
        bootstrap_iters=0,
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
    )
    texts = [list(one["text"].encode()) for one in documents]
    if kind == "loglikelihood_rolling":
        bits = sum(nats(model, [BOS_ID], ids) for ids in texts) / math.log(2) / sum(map(len, texts))
        assert found["results"]["local"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-4)
    else:
        likeliest = []
        for ids, logged in zip(
            texts, sorted(found["samples"]["local"], key=lambda one: one["doc_id"]), strict=True
        ):
            costs = [
                nats(model, ids, list(f" {choice}".encode())) for choice in documents[0]["choices"]
            ]
            assert [-cost for cost, _ in logged["filtered_resps"]] == pytest.approx(costs, rel=1e-4)
            likeliest.append(costs.index(min(costs)))
        assert found["results"]["local"]["acc,none"] == pytest.approx(likeliest.count(1) / 3)

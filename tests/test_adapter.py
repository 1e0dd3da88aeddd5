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
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from conftest import ROOT, awake, gradients, small_config, text, weights_of
from exporting import checkpoint, exported, load_model, load_tokenizer, model, spider, tokenizer
from tokenizer import BOS_ID, EOS_ID, PAD_ID, decode, encode


def continuation(model, ids: list[int], n: int = 12, **settings) -> list[int]:
    """Return what generate() writes after one prompt, greedily."""
    written = model.generate(torch.tensor([ids]), max_new_tokens=n, do_sample=False, **settings)
    return written[0, len(ids) :].tolist()


def adapter(**changes):
    """The project's own class, in training mode, whose weights are awake."""
    from spider.modeling_spider import SpiderForCausalLM, SpiderHFConfig

    config = small_config(boundaries="words", **changes)
    model = SpiderForCausalLM(SpiderHFConfig(spider=asdict(config)))
    model.spider.load_state_dict(awake(config).state_dict())
    return model.train()


# --------------------------------------------------------------------------------------------------
# Logits and losses


@pytest.mark.parametrize("training", (False, True))
def test_logits_and_losses_are_spiders_own_and_labels_are_shifted_inside(training):
    model = adapter().train(training)
    ids = text(2, 40)
    labels = ids.clone()
    labels[0, 5:9] = -100
    shifted = torch.cat((labels[:, 1:], torch.full((2, 1), -100)), dim=1)
    expected = model.spider(ids, shifted)
    found = model(ids, labels=labels)
    assert torch.equal(found.logits, expected.logits)
    assert torch.equal(found.nats_per_byte, expected.nats_per_byte)
    assert torch.equal(found.loss, expected.loss if training else expected.nats_per_byte)


def test_forward_takes_the_arguments_of_transformers(model, spider):
    ids = text(2, 40)
    out = model(ids)
    assert out.loss is None and out.cache is None
    assert torch.equal(model(ids, return_dict=False)[0], out.logits)
    assert torch.equal(model(ids, n_loops=1).logits, spider(ids, n_loops=1).logits)
    nothing = dict(inputs_embeds=None, past_key_values=None, output_attentions=False)
    assert torch.equal(model(ids, **nothing).logits, out.logits)


def test_without_labels_training_mode_computes_the_logits_of_evaluation(exported):
    """TRL compares passes of both modes, and multiplies last_hidden_state by the head itself."""
    model = load_model(exported).train()
    ids = text(2, 40)
    out = model(ids)
    head = model.get_output_embeddings()
    product = torch.nn.functional.linear(out.last_hidden_state, head.weight, head.bias)
    assert torch.equal(product, out.logits)
    assert torch.equal(product, model.eval()(ids).logits)
    model.forward = lambda *_: None  # as TRL and accelerate replace it
    assert torch.equal(product, model.base_model(ids).logits)


# --------------------------------------------------------------------------------------------------
# Padding


@pytest.mark.parametrize("side", ("left", "right"))
def test_rows_of_a_padded_batch_are_as_each_alone(model, side):
    rows = [
        [BOS_ID, *b"abc def"],
        [*b"no begin"],
        [*b"x"],
        [BOS_ID, *b"the longest of the four"],
        [],
    ]
    longest = max(map(len, rows))
    ids = torch.full((5, longest), 7)
    mask = torch.zeros(5, longest, dtype=torch.int64)
    spans = []
    for i, row in enumerate(rows):
        span = slice(longest - len(row), None) if side == "left" else slice(len(row))
        ids[i, span] = torch.tensor(row)
        mask[i, span] = 1
        spans.append(span)
    full = model(ids, attention_mask=mask).logits
    cached = model(ids, attention_mask=mask, use_cache=True).logits
    for i, (row, span) in enumerate(zip(rows[:4], spans[:4], strict=True)):
        alone = model(torch.tensor([row])).logits[0]
        torch.testing.assert_close(full[i, span], alone)
        torch.testing.assert_close(cached[i, span], alone)
    torch.testing.assert_close(full[4, -1], model(torch.tensor([[BOS_ID]])).logits[0, -1])
    if side == "right":
        with pytest.raises(ValueError, match="pad on the left"):
            model.generate(ids, attention_mask=mask, max_new_tokens=2)
        return
    written = model.generate(ids, attention_mask=mask, max_new_tokens=10, do_sample=False)
    for i, row in enumerate(rows):
        expected = continuation(model, row or [BOS_ID], 10)
        assert written[i, longest:][: len(expected)].tolist() == expected


@pytest.mark.parametrize(
    "row", ([BOS_ID, *b"abc def gh"], [*b"no begin"], [*b"two", EOS_ID, BOS_ID, *b"ab", EOS_ID])
)
@pytest.mark.parametrize(
    "before, after, filler", ((7, 0, 9), (0, 5, PAD_ID), (1, 4, PAD_ID), (3, 4, EOS_ID))
)
def test_padding_changes_no_loss_whatever_mask_and_labels_have_there(
    model, row, before, after, filler
):
    alone = model(torch.tensor([row]), labels=torch.tensor([row]))
    ids = torch.tensor([[filler] * before + row + [filler] * after])
    mask = torch.tensor([[0] * before + [1] * len(row) + [0] * after])
    ignored = ids.masked_fill(mask == 0, -100)
    cases = [(mask, ids), (mask, ignored)]
    if filler == PAD_ID:  # as the tokenizer pads: then the ids tell as much as the mask
        cases += [(None, ids), (None, ignored), (torch.ones_like(mask), ids)]
    for attention_mask, labels in cases:
        padded = model(ids, attention_mask=attention_mask, labels=labels)
        torch.testing.assert_close(padded.loss, alone.loss, rtol=0, atol=2e-6)
        torch.testing.assert_close(padded.nats_per_byte, alone.nats_per_byte, rtol=0, atol=2e-6)


def test_a_label_of_pad_within_a_row_is_ignored(model):
    ids = torch.tensor([[BOS_ID, *b"abc", PAD_ID, *b"def"]])
    labels = ids.masked_fill(ids == PAD_ID, -100)
    torch.testing.assert_close(model(ids, labels=ids).loss, model(ids, labels=labels).loss)


# --------------------------------------------------------------------------------------------------
# Generation


def test_generate_writes_what_spider_writes_and_reads_every_byte_once(model, spider, monkeypatch):
    prompt = [BOS_ID, *b"abc def g"]
    lengths = []  # of the steps
    step = type(model.spider).step

    def record_length(self, ids, state):
        lengths.append(ids.shape[1])
        return step(self, ids, state)

    monkeypatch.setattr(type(model.spider), "step", record_length)
    for n_loops in (3, 1):
        expected = list(spider.generate(prompt, 30, temperature=0, n_loops=n_loops))
        lengths.clear()
        assert continuation(model, prompt, 30, n_loops=n_loops)[: len(expected)] == expected
        assert lengths == [len(prompt)] + [1] * (len(lengths) - 1)
    lengths.clear()
    assert continuation(model, prompt, 30, n_loops=1, use_cache=False)[: len(expected)] == expected
    assert not lengths


@pytest.mark.parametrize(
    "stops, ends", (("Schü", "Schü"), (["日", "", "ler:"], "ler:"), (["ö"], "Ende"), ("", "Ende"))
)
def test_generation_stops_at_texts_of_any_characters(model, tokenizer, stops, ends):
    """The forced text ends with Ende, at the most bytes."""
    text = "Ja. Schüler: nein. Ende".encode()

    def force(input_ids, scores):
        forced = torch.full_like(scores, -math.inf)
        forced[:, text[input_ids.shape[1] - 1]] = 0
        return forced

    prompt = torch.tensor([[BOS_ID]])
    options = dict(max_new_tokens=len(text), logits_processor=[force], tokenizer=tokenizer)
    ids = model.generate(prompt, stop_strings=stops, **options)
    assert tokenizer.decode(ids[0, 1:]) == text.decode().partition(ends)[0] + ends


def test_generate_as_a_trainer_leaves_the_model_writes_the_same(model):
    """In training mode, under accelerate's autocast; the mode stays."""
    prompt = [BOS_ID, *b"abc def g"]
    expected = continuation(model, prompt, 9)
    model.train()
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert continuation(model, prompt, 9) == expected
        assert model.training and model.spider.training
    finally:
        model.eval()


def test_ids_that_texts_lack_are_never_drawn(model):
    prompt = torch.tensor([[BOS_ID, 97]])
    drawn = model.generate(prompt, max_new_tokens=1, num_return_sequences=4000, temperature=1e6)
    assert set(drawn[:, 2].tolist()) == {*range(272)} - {PAD_ID, BOS_ID}


def test_a_kept_cache_continues_its_text_alone(model):
    prompt = torch.tensor([[BOS_ID, *b"abc def g"]])
    first = model.generate(prompt, max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
    cache = first.cache
    assert cache.get_seq_length() == prompt.shape[1] + 4  # the last byte was written and not read
    ids = torch.cat((first.sequences, torch.tensor([list(b" and then")])), dim=1)
    continued = model.generate(ids, cache=cache, max_new_tokens=8, do_sample=False)
    assert continued[0, ids.shape[1] :].tolist() == continuation(model, ids[0].tolist(), 8)

    for other in (first.sequences, ids.repeat(2, 1), continued + 1):
        with pytest.raises(ValueError, match="input_ids must continue the ids that it has read"):
            model.generate(other, cache=cache, max_new_tokens=2)
    with pytest.raises(ValueError, match="cache: it continues 1 rows, but input_ids has 2"):
        model(ids.repeat(2, 1), cache=cache)


def test_beam_search_reorders_states(model):
    prompt = torch.tensor([[BOS_ID, *b"abc"], [BOS_ID, *b"xyz"]])
    beams = dict(max_new_tokens=8, num_return_sequences=2, num_beams=3, do_sample=False)
    written = model.generate(prompt, **beams)
    assert torch.equal(written, model.generate(prompt, use_cache=False, **beams))
    greedy = model.generate(prompt, max_new_tokens=8, do_sample=False)
    assert not torch.equal(written[::2], greedy)


def test_an_empty_prompt_is_the_beginning_of_a_document(model, tokenizer):
    greedy = dict(max_new_tokens=8, do_sample=False)
    expected = continuation(model, [BOS_ID], 8)
    for inputs in (tokenizer("", return_tensors="pt"), {}):
        assert model.generate(**inputs, **greedy)[0].tolist() == [BOS_ID, *expected]
    pipeline = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    (written,) = pipeline("", **greedy)
    assert written["generated_text"] == tokenizer.decode(expected, skip_special_tokens=True)
    both = tokenizer(["", "abc"], padding=True, return_tensors="pt")
    _, second = model.generate(**both, **greedy).tolist()
    assert second == [*b"abc", *continuation(model, [*b"abc"], 8)]


# --------------------------------------------------------------------------------------------------
# What is refused

IDS = text(1, 8)
SHORT = dict(max_new_tokens=2, return_dict_in_generate=True)


@pytest.mark.parametrize(
    "call, words",
    (
        (lambda it: it(), "input_ids is missing"),
        (lambda it: it(IDS, inputs_embeds=torch.ones(1, 8, 32)), "inputs_embeds is not available"),
        (lambda it: it(IDS, output_hidden_states=True), "output_hidden_states is not available"),
        (lambda it: it(IDS, cache=transformers.DynamicCache()), "cache must be the cache"),
        (lambda it: it(IDS, labels=IDS, use_cache=True), "labels: the loss needs a full pass"),
        (lambda it: it(IDS, n_loops=0), "n_loops must be at least 1"),
        (lambda it: it(IDS, n_loops=0, use_cache=True), "n_loops must be at least 1"),
        (lambda it: it(IDS, attention_mask=torch.tensor([[1, 0] + [1] * 6])), "contiguous ones"),
        (lambda it: it(IDS, attention_mask=torch.ones(1, 7)), "the shape of input_ids"),
        (lambda it: it.generate(IDS, output_hidden_states=True, **SHORT), "output_hidden_states"),
        (lambda it: it.generate(IDS, output_attentions=True, **SHORT), "output_attentions"),
        (lambda it: it.generate(IDS, cache=transformers.DynamicCache(), **SHORT), "cache must be"),
        # a state cannot be rolled back
        (lambda it: it.generate(IDS, prompt_lookup_num_tokens=2), "with stateful models"),
        (lambda it: it.resize_token_embeddings(300), r"pass len\(tokenizer\)"),
    ),
)
def test_what_the_model_lacks_is_refused_by_name(model, call, words):
    with pytest.raises(ValueError, match=words):
        call(model)


def test_the_vocabulary_keeps_its_size(model, tokenizer):
    model.resize_token_embeddings(len(tokenizer))
    # as TRL's clone_chat_template and PEFT's AutoPeftModel read it
    assert model.vocab_size == tokenizer.vocab_size == len(tokenizer.vocab) == 272
    assert len(model.get_input_embeddings().weight) == 272


@pytest.mark.slow
def test_quantization_is_refused_when_a_model_is_loaded(exported):
    """It would replace no layer, as Spider's Linears are of another class."""
    quantization = transformers.BitsAndBytesConfig(load_in_8bit=True)
    with pytest.raises(ValueError, match="quantization_config is not available in Spider"):
        load_model(exported, quantization_config=quantization)


def test_output_that_a_config_asks_for_is_refused(exported):
    model = load_model(exported, output_hidden_states=True)
    with pytest.raises(ValueError, match="output_hidden_states is not available in Spider"):
        model(text(1, 8))


def test_a_transformers_that_passes_the_cache_by_another_name_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "5.23.0")
    with pytest.raises(ImportError, match="transformers>=5.24 is required"):
        runpy.run_path(str(ROOT / "spider/modeling_spider.py"))


# --------------------------------------------------------------------------------------------------
# Precision


@pytest.mark.parametrize("how", ("loaded", "cast"))
@pytest.mark.parametrize(
    "dtype, tolerance",
    ((torch.float16, 5e-3), (torch.bfloat16, 5e-2), (torch.float64, 1e-5)),
    ids=str,
)
def test_a_model_of_any_precision_scores_learns_and_writes(exported, model, dtype, tolerance, how):
    """Loaded in a dtype, a model keeps fp32 parameters; half(), bfloat16() and to() cast them, and
    products with them."""
    if how == "loaded":
        other = load_model(exported, dtype=dtype)
        assert {p.dtype for p in other.parameters()} == {torch.float32}
    else:
        other = load_model(exported).to(dtype)
        assert {p.dtype for p in other.parameters()} == {dtype}
    assert other.spider.compute_dtype == dtype
    ids = text(2, 30)
    expected = model(ids, labels=ids)
    found = other(ids, labels=ids)
    assert found.logits.dtype == found.loss.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(found.loss.float(), expected.loss, rtol=0, atol=tolerance)
    found.loss.backward()
    finite = [p for p in other.parameters() if p.grad is not None and p.grad.isfinite().all()]
    assert len(finite) > 40
    assert other.generate(ids[:, :9], max_new_tokens=5, do_sample=False).shape == (2, 14)
    other.float()
    assert other.spider.compute_dtype == other.spider.wide_dtype == torch.float32


# --------------------------------------------------------------------------------------------------
# The Trainer


def trainer(
    model, tokenizer, directory, sequences, callbacks=(), compute_metrics=None, **settings
) -> transformers.Trainer:
    """Make a Trainer of sequences of ids, by default of one step. Labels are the ids, but -100 for
    padding."""
    quick = dict(
        output_dir=str(directory),
        max_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    return transformers.Trainer(
        model=model,
        train_dataset=[dict(input_ids=ids) for ids in sequences],
        callbacks=list(callbacks),
        compute_metrics=compute_metrics,
        data_collator=transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False),
        args=transformers.TrainingArguments(**(quick | settings)),
    )


class RecordGradient(transformers.TrainerCallback):
    """Record the gradient with which the Trainer steps, tables included, as a single vector."""

    def __init__(self, model):
        self.model = model
        self.gradient = None

    def on_pre_optimizer_step(self, *_, **__):
        by_name = gradients(self.model.spider)
        parts = [by_name[name] for name in sorted(by_name)]
        self.gradient = torch.cat([grad.flatten() for grad in parts if grad is not None])


@pytest.mark.parametrize("side, rows, tolerance", (("right", 1, 1e-5), ("left", 2, 1e-2)))
def test_accumulation_over_unequal_documents_has_the_gradient_of_one_batch(
    tmp_path, side, rows, tolerance
):
    """Padding on the left makes the Trainer count a byte of each padded row that has no context,
    and no loss."""
    from spider.modeling_spider import SpiderTokenizer

    documents = [text(1, length, seed=length)[0].tolist() for length in (12, 90, 40, 6)]
    model = adapter(aux_loss_weight=0.0, z_loss_weight=0.0, ponder_weight=0.0)

    def step(batch_size: int) -> tuple[torch.Tensor, float]:
        """Return the gradient of a step of all documents, and the loss that is logged."""
        record = RecordGradient(model)
        done = trainer(
            model,
            SpiderTokenizer(padding_side=side),
            tmp_path,
            documents,
            callbacks=[record],
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=len(documents) // batch_size,
            learning_rate=0.0,
            max_grad_norm=0.0,
            logging_steps=1,
        )
        done.train()
        return record.gradient, done.state.log_history[0]["loss"]

    gradient, loss = step(len(documents))
    accumulated, accumulated_loss = step(rows)
    assert (accumulated - gradient).norm() < tolerance * gradient.norm()
    assert accumulated_loss == pytest.approx(loss, rel=tolerance)


def test_a_step_without_labels_has_a_finite_loss():
    ids = text(2, 20)
    none = torch.full_like(ids, -100)
    assert adapter()(ids, labels=none, num_items_in_batch=0).loss.isfinite()


def test_labels_of_padding_are_refused_where_they_would_distort_the_mean():
    model = adapter()
    ids = text(2, 20)
    ids[0, 9:] = PAD_ID
    alone = model(ids, labels=ids).loss
    assert torch.equal(model(ids, labels=ids, num_items_in_batch=38).loss, alone)
    with pytest.raises(ValueError, match="labels: .* those of padding must be -100"):
        model(ids, labels=ids, num_items_in_batch=76)


def test_label_smoothing_trains_no_model_that_copies(exported, tokenizer, tmp_path):
    model = load_model(exported)
    ids = torch.tensor([[*b"abcdefgh" * 4]])
    trainer(
        model,
        tokenizer,
        tmp_path,
        ids.tolist() * 4,
        max_steps=10,
        per_device_train_batch_size=4,
        learning_rate=0.01,
        label_smoothing_factor=0.1,
    ).train()
    likeliest = model.eval()(ids).logits.argmax(2)
    assert (likeliest[:, :-1] == ids[:, 1:]).float().mean() > 0.9


def test_an_evaluation_reports_cross_entropy_and_passes_logits_alone(exported, tokenizer, tmp_path):
    model = load_model(exported)
    ids = text(3, 20)
    predictions = []

    def compute_metrics(prediction) -> dict:
        predictions.append(prediction)
        return {}

    evaluation = trainer(model, tokenizer, tmp_path, [], compute_metrics=compute_metrics)
    found = evaluation.evaluate([dict(input_ids=row) for row in ids.tolist()])
    expected = model(ids, labels=ids)
    assert found["eval_loss"] == pytest.approx(expected.nats_per_byte.item(), rel=1e-5)
    (prediction,) = predictions
    torch.testing.assert_close(torch.from_numpy(prediction.predictions), expected.logits.detach())
    assert prediction.label_ids.tolist() == ids.tolist()


# --------------------------------------------------------------------------------------------------
# LoRA

# as in the guide
NAMED = "q_a_proj q_b_proj kv_a_proj kv_b_proj o_proj gate_up_proj down_proj".split()


@pytest.mark.parametrize(
    "targets, checkpointing", (("all-linear", False), (NAMED, True)), ids=("all", "named")
)
def test_lora_trains_saves_and_loads_by_the_standard_task_type(
    exported, tokenizer, tmp_path, targets, checkpointing
):
    peft = pytest.importorskip("peft")
    base = load_model(exported)
    before = weights_of(base)
    settings = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=targets, r=4)
    lora = peft.get_peft_model(base, settings)
    ids = torch.tensor([[*b"abcdefgh" * 4]] * 8)
    trainer(
        lora,
        tokenizer,
        tmp_path / "trainer",
        ids.tolist(),
        max_steps=12,
        per_device_train_batch_size=4,
        learning_rate=0.02,
        gradient_checkpointing=checkpointing,
    ).train()
    assert base.gradient_checkpointing == checkpointing == (base.spider.recompute == "all")
    for name, p in base.named_parameters():
        frozen = name.replace(".base_layer", "")
        if frozen in before:
            assert torch.equal(p, before[frozen]), name
        else:
            assert "lora_" in name

    lora.eval()
    with lora.disable_adapter():
        untrained = lora(ids[:1], labels=ids[:1]).nats_per_byte
    assert lora(ids[:1], labels=ids[:1]).nats_per_byte < untrained - 0.5
    lora.save_pretrained(tmp_path / "lora")
    again = peft.PeftModel.from_pretrained(load_model(exported), tmp_path / "lora").eval()
    assert torch.equal(again(ids).logits, lora(ids).logits)
    greedy = tokenizer("abcdef", return_tensors="pt") | dict(max_new_tokens=30, do_sample=False)
    written = again.generate(**greedy)
    assert torch.equal(written, again.generate(**greedy, use_cache=False))
    assert torch.equal(written, again.merge_and_unload().generate(**greedy))


# --------------------------------------------------------------------------------------------------
# TRL


@pytest.mark.slow
@pytest.mark.parametrize("targets", (None, "all-linear"))
def test_trl_trains_on_the_models_own_probabilities(exported, model, tokenizer, tmp_path, targets):
    """SFT's first loss is the model's cross-entropy of the completions, DPO's is ln 2."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    lora = None
    if targets is not None:
        peft = pytest.importorskip("peft")
        lora = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=targets)
    prompts = ["abc ", "é: ", "x" * 30]
    answers = dict(completion="yes", chosen="yes", rejected="no, never")
    records = [dict(prompt=prompt, **answers) for prompt in prompts]

    def nats_per_record(answer: str) -> float:
        ids = [*answer.encode(), EOS_ID]
        return sum(nats(model, list(prompt.encode()), ids) for prompt in prompts) / len(prompts)

    def first_log(trainer_class, config_class, *columns, **more) -> dict:
        """Train two steps, the defaults but for precision; return what the first one logs."""
        short = dict(max_steps=2, logging_steps=1, save_strategy="no", report_to="none")
        rate = dict(learning_rate=1e-3, bf16=False, use_cpu=True)
        trainer = trainer_class(
            model=load_model(exported),
            args=config_class(output_dir=str(tmp_path), **short, **rate, **more),
            train_dataset=Dataset.from_list(records).select_columns(list(columns)),
            processing_class=tokenizer,
            peft_config=lora,
        )
        weights = dict(trainer.model.named_parameters())
        before = {name: p.detach().clone() for name, p in weights.items()}
        trainer.train()
        moved = {name for name, p in weights.items() if not torch.equal(p, before[name])}
        assert any("lm_head" in name for name in moved)
        assert all("lora_" in name for name in moved) == (lora is not None)
        assert not any("table" in name for name in moved)  # which need RowwiseAdagrad
        return trainer.state.log_history[0]

    tuned = first_log(trl.SFTTrainer, trl.SFTConfig, "prompt", "completion")
    assert tuned["loss"] == pytest.approx(nats_per_record("yes") / 4, rel=1e-4)
    preferred = first_log(
        trl.DPOTrainer, trl.DPOConfig, "prompt", "chosen", "rejected", trust_remote_code=True
    )
    assert preferred["loss"] == pytest.approx(math.log(2), abs=1e-6)
    for kind in ("chosen", "rejected"):
        expected = -nats_per_record(answers[kind])
        assert preferred[f"logps/{kind}"] == pytest.approx(expected, rel=1e-4)


# --------------------------------------------------------------------------------------------------
# The tokenizer


@settings(deadline=None, max_examples=40)
@given(st.text())
def test_a_text_is_its_bytes_and_comes_back(tokenizer, content):
    assume(not any(token in content for token in tokenizer.all_special_tokens))
    ids = tokenizer(content)["input_ids"]
    assert ids == encode(content)[1:-1] == tokenizer.encode(content, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=True) == tokenizer.decode(ids) == content
    assert tokenizer.convert_tokens_to_string(tokenizer.tokenize(content)) == content


@settings(deadline=None, max_examples=40)
@given(st.binary())
def test_any_bytes_come_back_with_surrogateescape(exported, tokenizer, content):
    assert tokenizer.decode(list(content)) == decode(content)
    exact = load_tokenizer(exported, errors="surrogateescape")
    decoded = exact.decode(list(content))
    assert exact.encode(decoded, add_special_tokens=False) == list(content)


def test_a_surrogate_that_stands_for_no_byte_is_a_replacement_character(tokenizer):
    assert tokenizer("a\ud800b\udcff")["input_ids"] == [97, *"\ufffd".encode(), 98, 255]
    assert tokenizer("")["input_ids"] == []


def test_special_tokens_in_a_text_are_special_unless_they_are_split(exported, tokenizer, tmp_path):
    spelled = "<bos>a<eos> <pad><reserved_270>"
    reserved = list(b"<reserved_270>")  # no special token until it is added
    assert tokenizer(spelled)["input_ids"] == [BOS_ID, 97, EOS_ID, 32, PAD_ID, *reserved]
    assert tokenizer(spelled, split_special_tokens=True)["input_ids"] == list(spelled.encode())
    other_end = load_tokenizer(exported, eos_token="<|im_end|>")
    ids = [104, 270, EOS_ID]
    assert other_end.decode(ids, skip_special_tokens=True) == "h"
    ids += other_end("<|im_end|>")["input_ids"]
    assert other_end.decode(ids) == "h<reserved_270><eos><|im_end|>"
    load_tokenizer(exported, split_special_tokens=True).save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path)(spelled)["input_ids"] == list(spelled.encode())


def test_added_tokens_take_the_reserved_ids_until_these_are_used_up(exported, tmp_path):
    tokenizer = load_tokenizer(exported)
    assert tokenizer.add_special_tokens({"extra_special_tokens": ["<|user|>", "→"]}) == 2
    assert tokenizer.add_tokens(["<tool>", "<|user|>", "\n"]) == 1
    tokenizer.save_pretrained(tmp_path)
    for one in (tokenizer, load_tokenizer(tmp_path)):
        ids = one("é<|user|>→<tool>\n")["input_ids"]
        assert ids == [*"é".encode(), 259, 260, 261, 10]
        assert one.decode(ids) == "é<|user|>→<tool>\n"
        assert one.decode(ids, skip_special_tokens=True) == "é<tool>\n"
        assert one.get_special_tokens_mask(ids) == [0, 0, 1, 1, 0, 0]
        assert len(one) == len(one.get_vocab()) == 272
    with pytest.raises(ValueError, match="two characters or more"):
        tokenizer.add_tokens("§")  # chr(0xA7), which stands for this byte
    names = [f"<{i}>" for i in range(11)]
    with pytest.raises(ValueError, match="11 tokens to add, but 10 of 13 reserved ids are free"):
        tokenizer.add_tokens(names)
    assert tokenizer.add_tokens(names[:10]) == 10


def test_offsets_and_masks_that_need_them_are_refused(tokenizer):
    with pytest.raises(NotImplementedError, match="ids are the bytes of text.encode"):
        tokenizer("a", return_offsets_mapping=True)
    with pytest.raises(NotImplementedError, match="split records into prompt and completion"):
        tokenizer.apply_chat_template([], return_assistant_tokens_mask=True)


def test_pairs_bos_and_eos_of_the_tokenizer(exported, tokenizer):
    assert tokenizer("a", "b")["input_ids"] == [97, EOS_ID, BOS_ID, 98]
    with_bos = load_tokenizer(exported, errors="surrogateescape", add_bos_token=True)
    assert with_bos(with_bos.decode([0xFF, 97]))["input_ids"] == [BOS_ID, 0xFF, 97]
    assert with_bos("ab", return_special_tokens_mask=True)["special_tokens_mask"] == [1, 0, 0]
    with_eos = load_tokenizer(exported, add_eos_token=True)
    assert with_eos("a")["input_ids"] == [97, EOS_ID]


# --------------------------------------------------------------------------------------------------
# lm-evaluation-harness, from local files


def nats(model, context: list[int], ids: list[int]) -> float:
    """Return the nats of ids after a context, by the full pass."""
    with torch.no_grad():
        logits = model(torch.tensor([[*context, *ids]])).logits[0, len(context) - 1 : -1]
    return torch.nn.functional.cross_entropy(logits, torch.tensor(ids), reduction="sum").item()


def test_lm_evaluation_harness_measures_bits_per_byte(exported, model, tmp_path):
    pytest.importorskip("lm_eval")
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    texts = ("abc def gh", "é漢🕸", "dd e")
    lines = [json.dumps(dict(text=text)) for text in texts]
    (tmp_path / "documents.jsonl").write_text("\n".join(lines))
    (tmp_path / "task.yaml").write_text(
        f"""
task: local
dataset_path: json
test_split: test
dataset_kwargs:
  data_files:
    test: {tmp_path}/documents.jsonl
output_type: loglikelihood_rolling
doc_to_text: ''
doc_to_target: '{{{{text}}}}'
metric_list:
- metric: bits_per_byte
"""
    )
    found = simple_evaluate(
        model=HFLM(str(exported), trust_remote_code=True, device="cpu", batch_size=3),
        tasks=["local"],
        bootstrap_iters=0,
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
    )
    documents = [list(text.encode()) for text in texts]
    bits = sum(nats(model, [BOS_ID], ids) for ids in documents) / math.log(2)
    bits_per_byte = bits / sum(map(len, documents))
    assert found["results"]["local"]["bits_per_byte,none"] == pytest.approx(bits_per_byte, rel=1e-4)

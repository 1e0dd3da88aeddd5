"""An export equals Spider under Hugging Face's interfaces, has a stock tokenizer, and works with
the Trainer, PEFT, TRL and lm-evaluation-harness."""

import json
import math
import re
from dataclasses import asdict

import pytest
import torch
import transformers
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import sample
from conftest import awake, code_blocks, small_config, text
from exporting import checkpoint, exported, load_model, load_tokenizer, model, spider, tokenizer
from spider.training.checkpoint import load_checkpoint
from table import EVERY_VARIANT_IN_TIME
from tokenizer import BOS_ID, EOS_ID, PAD_ID


def continuation(model, ids: list[int], n: int = 12, **settings) -> list[int]:
    """Return the ids that generate() writes greedily after one prompt."""
    written = model.generate(torch.tensor([ids]), max_new_tokens=n, do_sample=False, **settings)
    return written[0, len(ids) :].tolist()


# --------------------------------------------------------------------------------------------------
# Logits, losses, padding


@EVERY_VARIANT_IN_TIME
def test_exported_logits_and_losses_equal_spiders(checkpoint, model, tmp_path, changes):
    ours = awake(small_config(**changes))
    saved = load_checkpoint(checkpoint)
    saved |= dict(model_state_dict=ours.state_dict(), cfg=asdict(ours.config))
    torch.save(saved, tmp_path / "spider-step6.pt")
    assert sample.main([str(tmp_path / "spider-step6.pt"), "--export", str(tmp_path / "new")]) == 0
    exported = type(model).from_pretrained(tmp_path / "new")
    ids = text(2, 40)
    labels = ids.clone()
    labels[0, 5:9] = -100
    shifted = torch.cat((labels[:, 1:], torch.full((2, 1), -100)), dim=1)
    labels[0, 5] = PAD_ID  # also ignored
    for training in (False, True):
        torch.manual_seed(0)
        expected = ours.train(training)(ids, shifted, 3)
        torch.manual_seed(0)
        found = exported.train(training)(ids, labels=labels)
        assert torch.equal(found.logits, expected.logits)
        assert torch.equal(found.nats_per_byte, expected.nats_per_byte)
        assert torch.equal(found.loss, expected.loss if training else expected.nats_per_byte)


@pytest.mark.parametrize("side", ("left", "right"))
def test_padding_changes_no_logits_losses_or_texts(model, tokenizer, side):
    texts = ["abc def", "no begin", "the longest of the three"]
    batch = tokenizer(texts, padding=True, padding_side=side, return_tensors="pt")
    kept = batch["attention_mask"] == 1
    by_ids = model(batch["input_ids"], labels=batch["input_ids"])
    batch["input_ids"][~kept] = 7  # only the mask shows the padding
    full = model(**batch, labels=batch["input_ids"])
    nats = []
    for i, one_text in enumerate(texts):
        ids = tokenizer(one_text, return_tensors="pt")["input_ids"]
        alone = model(ids, labels=ids)
        torch.testing.assert_close(full.logits[i, kept[i]], alone.logits[0])
        nats += [alone.loss] * (len(one_text) - 1)
    torch.testing.assert_close(full.loss, sum(nats) / len(nats))
    torch.testing.assert_close(by_ids.loss, full.loss)
    generating = dict(max_new_tokens=10, do_sample=False)
    if side == "right":
        with pytest.raises(ValueError, match="pad on the left"):
            model.generate(**batch, **generating)
        return
    written = model.generate(**batch, **generating)[:, kept.shape[1] :].tolist()
    for one_text, found in zip(texts, written, strict=True):
        expected = continuation(model, [*one_text.encode()], 10)
        assert found[: len(expected)] == expected


# --------------------------------------------------------------------------------------------------
# Generation


def test_generate_equals_spiders_and_reads_each_byte_once(model, spider, monkeypatch):
    prompt = [BOS_ID, *b"abc def g"]
    lengths = []  # bytes read per step
    step = type(model.spider).step

    def record_length(self, ids, state):
        lengths.append(ids.shape[1])
        return step(self, ids, state)

    monkeypatch.setattr(type(model.spider), "step", record_length)
    expected = list(spider.generate(prompt, 30, temperature=0, n_loops=1))
    lengths.clear()
    assert continuation(model, prompt, 30, n_loops=1)[: len(expected)] == expected
    assert lengths == [len(prompt)] + [1] * (len(lengths) - 1)
    lengths.clear()
    assert continuation(model, prompt, 30, n_loops=1, use_cache=False)[: len(expected)] == expected
    assert not lengths


def test_generate_in_training_mode_under_autocast_writes_the_same(model):
    """The Trainer leaves a model in this state. generate() restores the training mode."""
    prompt = [BOS_ID, *b"abc def g"]
    expected = continuation(model, prompt)
    model.train()
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert continuation(model, prompt) == expected
        assert model.training and model.spider.training
    finally:
        model.eval()


def test_generate_never_samples_pad_bos_or_reserved_ids(model):
    prompt = torch.tensor([[BOS_ID, 97]])
    drawn = model.generate(prompt, max_new_tokens=1, num_return_sequences=4000, temperature=1e6)
    assert set(drawn[:, 2].tolist()) == {*range(256), EOS_ID}


def test_device_map_never_splits_a_model(model):
    from accelerate import infer_auto_device_map

    size = model.get_memory_footprint()
    memory = {0: size // 2, 1: 2 * size, "cpu": 2 * size}
    classes = model._no_split_modules
    devices = infer_auto_device_map(model, max_memory=memory, no_split_module_classes=classes)
    assert devices == {"": 1}


def test_cache_continues_only_its_own_text(model):
    prompt = torch.tensor([[BOS_ID, *b"abc def g"]])
    first = model.generate(prompt, max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
    ids = [*first.sequences[0].tolist(), *b" and then"]
    assert continuation(model, ids, cache=first.cache) == continuation(model, ids)
    with pytest.raises(ValueError, match="input_ids must continue the ids that the cache has read"):
        continuation(model, [*b"another text, which is longer"], cache=first.cache)


def test_beam_search_reorders_states(model):
    prompt = torch.tensor([[BOS_ID, *b"abc"], [BOS_ID, *b"xyz"]])
    beams = dict(max_new_tokens=8, num_return_sequences=2, num_beams=3, do_sample=False)
    written = model.generate(prompt, **beams)
    assert torch.equal(written, model.generate(prompt, use_cache=False, **beams))
    greedy = model.generate(prompt, max_new_tokens=8, do_sample=False)
    assert not torch.equal(written[::2], greedy)


def test_empty_prompt_starts_a_document(model, tokenizer):
    expected = tokenizer.decode(continuation(model, [BOS_ID]), skip_special_tokens=True)
    pipeline = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    (written,) = pipeline("", max_new_tokens=12, do_sample=False)
    assert written["generated_text"] == expected


IDS = text(1, 8)
HOLE = torch.tensor([[1, 0] + [1] * 6])


@pytest.mark.parametrize(
    "arguments, words",
    (
        (dict(input_ids=IDS, output_hidden_states=True), "output_hidden_states is not available"),
        (dict(input_ids=IDS, labels=IDS, use_cache=True), "labels: the loss needs a full pass"),
        (dict(input_ids=IDS, attention_mask=HOLE), "contiguous ones"),
        (dict(input_ids=IDS, cache=transformers.DynamicCache()), "cache must be the cache"),
    ),
)
def test_unsupported_arguments_are_refused_by_name(model, arguments, words):
    with pytest.raises(ValueError, match=words):
        model(**arguments)


# --------------------------------------------------------------------------------------------------
# Precision


@pytest.mark.slow
def test_quantization_is_refused_on_loading(exported):
    """bitsandbytes would replace no layer, because Spider's Linear is not torch's."""
    quantization = transformers.BitsAndBytesConfig(load_in_8bit=True)
    with pytest.raises(ValueError, match="quantization_config is not available in Spider"):
        load_model(exported, quantization_config=quantization)


@pytest.mark.parametrize("cast", (False, True), ids=("loaded", "cast"))
def test_half_precision_model_scores_trains_and_generates(exported, model, cast):
    """Loading in a dtype keeps parameters in fp32; half(), bfloat16() and to() cast parameters and
    products."""
    half = load_model(exported).half() if cast else load_model(exported, dtype=torch.float16)
    assert {p.dtype for p in half.parameters()} == {torch.float16 if cast else torch.float32}
    assert half.spider.compute_dtype == torch.float16
    ids = text(2, 30)
    loss = half(ids, labels=ids).loss
    torch.testing.assert_close(loss, model(ids, labels=ids).loss, rtol=0, atol=5e-3)
    loss.backward()
    assert half.generate(ids[:, :9], max_new_tokens=5, do_sample=False).shape == (2, 14)


# --------------------------------------------------------------------------------------------------
# The Trainer, LoRA, TRL


def settings_of_trainer(directory, **settings) -> dict:
    quick = dict(save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True)
    return dict(output_dir=str(directory), logging_steps=1, **quick, **settings)


def trainer(model, tokenizer, directory, sequences, **settings):
    """Make a Trainer on sequences of ids. The labels are the ids, with -100 for padding."""
    return transformers.Trainer(
        model=model,
        train_dataset=[dict(input_ids=ids) for ids in sequences],
        data_collator=transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False),
        args=transformers.TrainingArguments(**settings_of_trainer(directory, **settings)),
    )


def test_gradient_accumulation_over_unequal_documents_equals_one_batch(exported, tmp_path):
    # these losses are means over a micro-batch, so accumulation changes them
    changes = dict(aux_loss_weight=0.0, z_loss_weight=0.0, ponder_weight=0.0, boundaries="words")
    config = asdict(small_config(**changes))
    documents = [text(1, length, seed=length)[0].tolist() for length in (12, 90, 40, 6)]
    logs = []
    for micro_batch in (4, 1):
        done = trainer(
            load_model(exported, spider=config),
            load_tokenizer(exported, padding_side="right"),
            tmp_path,
            documents,
            max_steps=1,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=4 // micro_batch,
        )
        done.train()
        logs.append(done.state.log_history[0])
    for name in ("loss", "grad_norm"):
        assert logs[1][name] == pytest.approx(logs[0][name], rel=1e-4)


def test_trainer_evaluation_returns_cross_entropy_and_logits(exported, tokenizer, tmp_path):
    model = load_model(exported)
    ids = text(3, 20)
    dataset = [dict(input_ids=sequence) for sequence in ids.tolist()]
    found = trainer(model, tokenizer, tmp_path, []).predict(dataset)
    expected = model(ids, labels=ids)
    assert found.metrics["test_loss"] == pytest.approx(expected.nats_per_byte.item(), rel=1e-5)
    torch.testing.assert_close(torch.from_numpy(found.predictions), expected.logits.detach())


def test_lora_trains_saves_loads_and_merges(exported, model, tokenizer, tmp_path):
    peft = pytest.importorskip("peft")
    base = load_model(exported)
    settings = peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=4)
    lora = peft.get_peft_model(base, settings)
    ids = torch.tensor([[*b"abcdefgh" * 4]] * 8)
    trainer(
        lora,
        tokenizer,
        tmp_path,
        ids.tolist(),
        max_steps=12,
        per_device_train_batch_size=4,
        learning_rate=0.02,
        gradient_checkpointing=True,
    ).train()
    assert base.spider.recompute == "all"
    lora.eval()
    assert lora(ids, labels=ids).loss < model(ids, labels=ids).loss - 0.5
    lora.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(load_model(exported), tmp_path)
    greedy = tokenizer("abcdef", return_tensors="pt") | dict(max_new_tokens=30, do_sample=False)
    written = lora.generate(**greedy)
    assert torch.equal(written, again.generate(**greedy, use_cache=False))
    assert torch.equal(written, again.merge_and_unload().generate(**greedy))


def nats(model, context: list[int], ids: list[int]) -> float:
    """Return the nats of ids after a context, from a full pass."""
    with torch.no_grad():
        logits = model(torch.tensor([[*context, *ids]])).logits[0, len(context) - 1 : -1]
    return torch.nn.functional.cross_entropy(logits, torch.tensor(ids), reduction="sum").item()


@pytest.mark.slow
def test_sft_starts_at_the_models_cross_entropy_and_improves(exported, model, tokenizer, tmp_path):
    """The bf16 autocast ends with each step."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    prompts = ["abc ", "é: ", "x" * 30]
    done = trl.SFTTrainer(
        model=load_model(exported),
        args=trl.SFTConfig(**settings_of_trainer(tmp_path, max_steps=3, learning_rate=1e-2)),
        train_dataset=Dataset.from_list([dict(prompt=p, completion="yes") for p in prompts]),
        processing_class=tokenizer,
    )
    done.train()
    assert not torch.is_autocast_enabled("cpu")
    ids = [*b"yes", EOS_ID]
    expected = sum(nats(model, list(prompt.encode()), ids) for prompt in prompts) / 12
    losses = [log["loss"] for log in done.state.log_history[:3]]
    assert losses[0] == pytest.approx(expected, rel=1e-2)
    assert losses[2] < losses[0] - 0.1


@pytest.mark.slow
def test_chat_guide_trains_on_answers_only_and_on_every_table(
    exported, tmp_path, monkeypatch, capsys
):
    """All code blocks of the page run, with fewer steps and words."""
    pytest.importorskip("trl")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").symlink_to(exported)
    blocks = "\n".join(code_blocks("guide/a-model-that-answers.md"))
    for size, smaller in (("=300", "=2"), ("words[:50]", "words[:1]"), ("[50:]", "[50:99]")):
        assert blocks.count(size) == 1
        blocks = blocks.replace(size, smaller)
    exec(blocks, {})
    said = re.search(r"^input:  (.*)\nlabels: (.*)$", capsys.readouterr().out, re.MULTILINE)
    assert said[2] == "".join(re.findall(r"<\|assistant\|>(.*?<\|end\|>)", said[1]))
    base, tuned = load_model(exported), load_model(tmp_path / "chat")
    before, after = base.state_dict(), tuned.state_dict()
    tables = [name for name, module in base.named_modules() if hasattr(module, "lookups")]
    assert len(tables) == 3
    assert all((before[f"{name}.weight"] != after[f"{name}.weight"]).any() for name in tables)
    assert 261 in tuned.generation_config.eos_token_id
    assert 261 not in tuned.generation_config.suppress_tokens


# --------------------------------------------------------------------------------------------------
# The tokenizer


@settings(deadline=None, max_examples=40)
@given(st.text(), st.binary())
def test_tokenizer_ids_are_bytes_and_any_bytes_decode(tokenizer, content, other):
    assume(not any(token in content for token in tokenizer.all_special_tokens))
    ids = tokenizer(content)["input_ids"]
    assert ids == list(content.encode())
    assert tokenizer.decode(ids) == content
    assert tokenizer.decode(list(other)) == other.decode(errors="replace")


def test_special_tokens_in_a_text_are_parsed_unless_split(tokenizer):
    spelled = "<bos>é<eos> <pad>"
    found = tokenizer(spelled, return_offsets_mapping=True)
    assert found["input_ids"] == [BOS_ID, *"é".encode(), EOS_ID, 32, PAD_ID]
    assert found["offset_mapping"][:4] == [(0, 5), (5, 6), (5, 6), (6, 11)]
    assert tokenizer.decode(found["input_ids"], skip_special_tokens=True) == "é "
    assert tokenizer(spelled, split_special_tokens=True)["input_ids"] == list(spelled.encode())


def test_added_tokens_get_reserved_ids(exported, tmp_path):
    tokenizer = load_tokenizer(exported)
    assert tokenizer.add_special_tokens({"extra_special_tokens": ["<|user|>", "→"]}) == 2
    assert tokenizer.add_tokens(["<tool>"]) == 1
    tokenizer.save_pretrained(tmp_path)
    for one in (tokenizer, load_tokenizer(tmp_path)):
        ids = one("é<|user|>→<tool>")["input_ids"]
        assert ids == [*"é".encode(), 259, 260, 261]
        assert one.decode(ids, skip_special_tokens=True) == "é<tool>"


# --------------------------------------------------------------------------------------------------
# lm-evaluation-harness, from local files

TASK = """
task: local
dataset_path: json
test_split: test
dataset_kwargs: {{data_files: {{test: {0}/documents.jsonl}}}}
output_type: loglikelihood_rolling
doc_to_text: ''
doc_to_target: '{{{{text}}}}'
metric_list: [{{metric: bits_per_byte}}]
"""


def test_lm_evaluation_harness_measures_bits_per_byte(exported, model, tmp_path):
    pytest.importorskip("lm_eval")
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    texts = ("abc def gh", "é漢🕸", "dd e")
    lines = [json.dumps(dict(text=text)) for text in texts]
    (tmp_path / "documents.jsonl").write_text("\n".join(lines))
    (tmp_path / "task.yaml").write_text(TASK.format(tmp_path))
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

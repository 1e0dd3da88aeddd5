"""An exported model behind Hugging Face's interfaces says what Spider says; and what comes back is not trusted."""

import ast
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import sample
from conftest import awake, final_state, make_shards, metrics, run, small_config, text
from spider.export import directory
from spider.export.flatten import ROOT, flat_modules
from spider.training.export_reading import INDEX
from spider.training.checkpoint import load_checkpoint
from tokenizer import BOS_ID, EOS_ID, PAD_ID, decode, encode
from train import command_line

CPU = torch.device("cpu")
MODULES = flat_modules("spider.export.modeling_spider")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A checkpoint whose model has every component awake, with the metrics of a run of six steps."""
    root = tmp_path_factory.mktemp("run")
    directory, config = run(root, make_shards(root / "data")), small_config()
    weights = awake(config).state_dict()
    weights["lm_head.weight"] *= 20       # what is likely is told from what is not
    path = directory / "spider-step6.pt"
    torch.save(final_state(directory) | dict(model_state_dict=weights, cfg=asdict(config), n_loops=3), path)
    return path


@pytest.fixture(scope="module")
def exported(checkpoint, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("export") / "new" / "model"
    assert sample.main([str(checkpoint), "--export", str(directory)]) == 0
    return directory


@pytest.fixture(scope="module")
def spider(checkpoint):
    return sample.load_model(str(checkpoint), CPU)[0]


def loaded(directory, **settings):
    return AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True, **settings)


@pytest.fixture(scope="module")
def model(exported):
    return loaded(exported)


@pytest.fixture(scope="module")
def tokenizer(exported):
    return AutoTokenizer.from_pretrained(exported, trust_remote_code=True)


def continuation(model, ids: list[int], n: int = 12, **settings) -> list[int]:
    """Return what generate() writes after one prompt, the likeliest bytes unless told otherwise."""
    written = model.generate(torch.tensor([ids]), max_new_tokens=n, **(dict(do_sample=False) | settings))
    return written[0, len(ids):].tolist()


# ---------------------------------------------------------------------------------------------------------------------
# There

def test_an_export_carries_its_code_and_looks_for_no_module_of_ours_elsewhere(exported, model):
    assert {file.name for file in exported.iterdir()} == MODULES.keys() | {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer_config.json", "README.md", "LICENSE"}
    assert (exported / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert "\nlicense: apache-2.0\n" in (exported / "README.md").read_text().split("---")[1]
    assert len({file.stat().st_mode for file in exported.iterdir()}) == 1
    for name in MODULES:
        code, [source] = (exported / name).read_text(), [*ROOT.glob(name), *ROOT.glob(f"spider/**/{name}")]
        flat = re.sub("from spider[.](?:[a-z_]+[.])*(?=[a-z_]+ import)", "from ", source.read_text())
        assert re.sub("from [.]", "from ", code) == flat
        imported = {node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
                    for node in ast.walk(ast.parse(code)) if isinstance(node, (ast.Import, ast.ImportFrom))
                    and not getattr(node, "level", 0)}
        roots = {name.partition(".")[0] for name in imported}
        assert roots <= sys.stdlib_module_names | {"torch", "transformers", "torchao", "tile_kernels", "tilelang"}, name
    assert type(model).__module__.startswith("transformers_modules.")
    assert type(model.spider).__module__ == type(model).__module__.replace("modeling_spider", "spider_model")


@pytest.mark.slow
def test_an_export_works_where_spider_is_not_installed(exported, spider, tmp_path):
    script = """
import sys, torch
class Nothing:
    def find_spec(self, name, *_):
        if name in ("spider_model", "tile_moe", "tokenizer", "spider", "data"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Nothing())
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
inputs = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)("abc def", return_tensors="pt")
torch.save(model(**inputs).logits, sys.argv[2])
"""
    subprocess.run([sys.executable, "-c", script, exported, tmp_path / "logits.pt"], check=True, cwd=tmp_path)
    with torch.no_grad():
        expected = spider(torch.tensor([list(b"abc def")]), n_loops=3).logits
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), expected)


def test_logits_and_loss_are_spiders_own_and_labels_are_shifted_inside(model, spider):
    ids = text(2, 40)
    labels = ids.clone()
    labels[0, 5:9] = -100
    shifted = torch.cat((labels[:, 1:], torch.full((2, 1), -100)), dim=1)
    ours, theirs = spider(ids, shifted, 3), model(ids, labels=labels)
    for name in ("logits", "loss", "nats_per_byte"):
        assert torch.equal(getattr(ours, name), theirs[name]), name
    assert not torch.equal(model(ids, labels=ids).loss, theirs.loss)
    assert model(ids).loss is None and model(ids).past_key_values is None
    assert torch.equal(model(ids, return_dict=False)[0], theirs.logits)
    assert torch.equal(spider(ids, n_loops=1).logits, model(ids, n_loops=1).logits)
    theirs.loss.backward()
    assert sum(p.grad is not None for p in model.parameters()) > 40
    model.zero_grad()
    with pytest.raises(ValueError, match="labels: a loss is that of a full pass"):
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
    with pytest.raises(ValueError, match="attention_mask: of the form of input_ids"):
        model(text(1, 4), attention_mask=torch.tensor([row]))


def test_a_cache_that_was_kept_goes_on_and_several_texts_go_on_from_one(model):
    prompt = [BOS_ID, *b"abc def g"]
    first = model.generate(torch.tensor([prompt]), max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
    cache = first.past_key_values
    assert cache.get_seq_length() == len(prompt) + 4      # the last byte was written and not read
    ids = torch.cat((first.sequences, torch.tensor([list(b" and then")])), dim=1)
    fresh = continuation(model, ids[0].tolist(), 8)
    went_on = model.generate(ids, past_key_values=cache, max_new_tokens=8, do_sample=False)
    assert went_on[0, ids.shape[1]:].tolist() == fresh


def test_beam_search_reorders_states(model):
    prompt, beams = torch.tensor([[BOS_ID, *b"abc"], [BOS_ID, *b"xyz"]]), dict(num_beams=3, do_sample=False)
    held = model.generate(prompt, max_new_tokens=8, num_return_sequences=2, **beams)
    assert torch.equal(held, model.generate(prompt, max_new_tokens=8, num_return_sequences=2, use_cache=False, **beams))
    assert not torch.equal(held[::2], model.generate(prompt, max_new_tokens=8, do_sample=False))


def test_drafts_which_no_state_takes_back_are_refused(model):
    with pytest.raises(ValueError, match="not supported with stateful models"):
        continuation(model, [BOS_ID, *b"abcabcabc"], prompt_lookup_num_tokens=2)
    with pytest.raises(NotImplementedError, match="there is no module to be exchanged"):
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
    """A model that is loaded in a type keeps its parameters; half(), bfloat16() and to() cast them, and products with
    them."""
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


def test_weights_in_several_files_are_the_same_weights(checkpoint, exported, tmp_path, monkeypatch):
    monkeypatch.setattr(directory, "SHARD_BYTES", 60_000)
    assert sample.main([str(checkpoint), "--export", str(tmp_path / "shards")]) == 0
    names = [file.name for file in (tmp_path / "shards").glob("*.safetensors")]
    assert len(names) > 2 and f"model-00001-of-{len(names):05}.safetensors" in names
    whole, parts = (loaded(directory).state_dict() for directory in (exported, tmp_path / "shards"))
    back = load_checkpoint(tmp_path / "shards")["model_state_dict"]
    assert all(torch.equal(weight, parts[name]) for name, weight in whole.items())
    assert all(torch.equal(weight, back[name.removeprefix("spider.")]) for name, weight in whole.items())


def test_what_is_saved_and_loaded_again_is_the_same_model(exported, model, tokenizer, tmp_path):
    model.save_pretrained(tmp_path / "again")
    tokenizer.save_pretrained(tmp_path / "again")
    again, ids = loaded(tmp_path / "again"), text(1, 30)
    assert torch.equal(model(ids).logits, again(ids).logits) and again.config.to_dict()["n_loops"] == 3
    for name in (*MODULES, "generation_config.json"):
        assert (tmp_path / "again" / name).exists(), name
    assert again.generation_config.suppress_tokens == model.generation_config.suppress_tokens
    back = load_checkpoint(tmp_path / "again")
    assert all(torch.equal(weight, model.state_dict()[f"spider.{name}"])
               for name, weight in back["model_state_dict"].items())
    once_more = AutoTokenizer.from_pretrained(tmp_path / "again", trust_remote_code=True)
    assert once_more("a<bos>é")["input_ids"] == tokenizer("a<bos>é")["input_ids"]


# ---------------------------------------------------------------------------------------------------------------------
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


def test_ids_above_255_come_from_nothing_that_a_text_spells(exported, tokenizer):
    assert tokenizer("<bos><eos> <pad>")["input_ids"] == list(b"<bos><eos> <pad>")
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (PAD_ID, BOS_ID, EOS_ID)
    assert len(tokenizer) == tokenizer.vocab_size == 272 and len(tokenizer.get_vocab()) == 272
    assert tokenizer.decode([BOS_ID, 97, EOS_ID, 270, PAD_ID]) == "<bos>a<eos><reserved_270><pad>"
    assert tokenizer.decode([BOS_ID, 97, EOS_ID, 270, PAD_ID], skip_special_tokens=True) == "a"
    assert tokenizer("a", "b")["input_ids"] == [97, EOS_ID, BOS_ID, 98]
    batch = tokenizer(["a", "bcd"], padding=True, return_tensors="pt")
    assert batch["input_ids"].tolist() == [[PAD_ID, PAD_ID, 97], [*b"bcd"]]
    assert batch["attention_mask"].tolist() == [[0, 0, 1], [1, 1, 1]]
    kept = AutoTokenizer.from_pretrained(exported, trust_remote_code=True, errors="surrogateescape", add_bos_token=True)
    assert kept(kept.decode([0xff, 97]))["input_ids"] == [BOS_ID, 0xff, 97]
    assert kept("ab", return_special_tokens_mask=True)["special_tokens_mask"] == [1, 0, 0]


# ---------------------------------------------------------------------------------------------------------------------
# lm-evaluation-harness, from local files

def scores(tmp_path, exported, task: str, documents: list[dict], **settings) -> tuple[dict, list]:
    """Results of one task whose YAML and documents are written here, and what it logged of each document."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    (tmp_path / "documents.jsonl").write_text("".join(json.dumps(one) + "\n" for one in documents))
    (tmp_path / "task.yaml").write_text(
        f"task: local\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {tmp_path}/documents.jsonl\n"
        f"test_split: test\n{task}")
    found = simple_evaluate(
        model=HFLM(str(exported), trust_remote_code=True, device="cpu", batch_size=3, **settings), tasks=["local"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False), bootstrap_iters=0)
    return found["results"]["local"], found["samples"]["local"]


def nats(model, context: list[int], told: list[int]) -> float:
    """Nats that the model needs for ids behind a context, by the full pass."""
    with torch.no_grad():
        logits = model(torch.tensor([[*context, *told]])).logits[0, len(context) - 1:-1]
    return torch.nn.functional.cross_entropy(logits, torch.tensor(told), reduction="sum").item()


def test_the_harness_counts_the_bits_that_a_local_text_takes(exported, model, tmp_path):
    texts = ["abc def gh", "é漢🕸 and some more of it, more than a window holds"]
    result, _ = scores(tmp_path, exported, """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: bits_per_byte
""", [dict(text=one) for one in texts], max_length=32)
    total = 0
    for one in texts:
        ids = list(one.encode())
        for start in range(0, len(ids), 32):  # windows apart from each other but for a byte of context
            last = start + 32 >= len(ids) and start
            context = [BOS_ID] if not start else ids[start - 1:start]
            if last:                          # the last window is a full one, whose end counts
                context = ids[len(ids) - 33:start]
            total += nats(model, context, ids[start:start + 32])
    expected = total / torch.log(torch.tensor(2.0)).item() / sum(len(one.encode()) for one in texts)
    assert result["bits_per_byte,none"] == pytest.approx(expected, rel=1e-4)


def test_the_harness_asks_which_of_several_answers_is_likeliest(exported, model, tmp_path):
    documents = [dict(question=question, choices=["abc", "hg", "d ef"], gold=1) for question in ("abc", "dd e", "f g")]
    result, logged = scores(tmp_path, exported, """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: gold
metric_list:
  - metric: acc
""", documents)
    likeliest = []
    for one in sorted(logged, key=lambda one: one["doc_id"]):
        costs = [nats(model, list(one["doc"]["question"].encode()), list(f" {choice}".encode()))
                 for choice in one["doc"]["choices"]]
        assert [-found[0] for (found,) in zip(one["filtered_resps"])] == pytest.approx(costs, rel=1e-4)
        likeliest.append(costs.index(min(costs)))
    assert len(likeliest) == 3 and result["acc,none"] == pytest.approx(likeliest.count(1) / 3)


# ---------------------------------------------------------------------------------------------------------------------
# And back

def refusal(capsys, argv, main=command_line) -> str:
    """The one line with which a command ends, status 2."""
    assert main([*map(str, argv)]) == 2
    out, err = capsys.readouterr()
    line = err.splitlines()[-1]
    assert "error: " in line and line.isprintable() and "Traceback" not in err
    return line


def resuming(tmp_path, origin, *flags) -> list[str]:
    return ["--mock_data", "--seq_len", "32", "--micro_batch", "2", "--max_steps", "2", "--eval_every", "0", "--device",
            "cpu", "--ckpt_dir", str(tmp_path / "on"), "--resume", str(origin), *flags]


@pytest.mark.parametrize("file", ("", "model.safetensors"))
def test_a_run_starts_with_the_weights_of_an_export_and_can_be_taken_up_again(exported, checkpoint, tmp_path, file):
    weights = torch.load(checkpoint)["model_state_dict"]
    argv = resuming(tmp_path, exported / file, "--reset_steps", "--lr", "1e-9", "--engram_lr", "0")
    assert command_line(argv) == 0
    state = final_state(tmp_path / "on")
    assert state["step"] == 2 and state["n_loops"] == 3 and state["recipe"] == "tiny"
    assert torch.equal(state["model_state_dict"]["engram_input.table.weight"], weights["engram_input.table.weight"])
    for name, weight in weights.items():
        torch.testing.assert_close(state["model_state_dict"][name], weight, atol=5e-3, rtol=0)
    argv[argv.index("--max_steps") + 1] = "3"
    assert command_line([arg for arg in argv if arg not in ("--resume", str(exported / file), "--reset_steps")]) == 0
    assert final_state(tmp_path / "on")["step"] == 3


def test_weights_alone_go_on_with_no_run(exported, tmp_path, capsys):
    line = refusal(capsys, resuming(tmp_path, exported))
    assert "has weights alone: --reset_steps starts a run with them" in line and str(exported) in line
    assert not (tmp_path / "on").exists()


def test_an_export_talks(exported, checkpoint, capsys):
    for name in (checkpoint, exported):
        assert sample.main([str(name), "--prompt", "abc", "--bytes", "20"]) == 0
    texts = capsys.readouterr().out
    assert texts[:len(texts) // 2] == texts[len(texts) // 2:]
    assert "--export takes a checkpoint of a run" in refusal(capsys, [exported, "--export", "x"], sample.main)


def test_an_export_is_measured_as_its_checkpoint_is(exported, checkpoint, tmp_path):
    """By the sequences and the validation bytes of the run, which are not its recipe's."""
    flags = torch.load(checkpoint)["flags"] | dict(eval_tokens=64)
    torch.save(torch.load(checkpoint) | dict(flags=flags), tmp_path / "spider-step6.pt")
    assert sample.main([str(tmp_path / "spider-step6.pt"), "--export", str(tmp_path / "out")]) == 0
    (tmp_path / "text").write_bytes(b"abc def gh " * 20)
    origins = [tmp_path / "spider-step6.pt", tmp_path / "out", tmp_path / "out" / "model.safetensors"]
    out, texts = tmp_path / "figures.json", [checkpoint.parent.parent / "data", tmp_path / "text"]
    assert sample.main([*map(str, origins), "--eval", *map(str, texts), "--json", str(out)]) == 0
    names = "file", "bytes", "bits_per_byte", "seq_len"
    figures = [tuple(one[name] for name in names) for one in json.loads(out.read_text())]
    assert figures[:2] == figures[2:4] == figures[4:] and [seq_len for *_, seq_len in figures[:2]] == [32, 32]
    assert figures[0][1] <= 64
    changed(tmp_path / "out" / "config.json", lambda config: config["training"].pop("flags"))
    assert sample.main([str(tmp_path / "out"), "--eval", str(texts[1]), "--json", str(out)]) == 0  # an older export
    assert json.loads(out.read_text())[0]["seq_len"] == 4096                                 # the recipe's


@pytest.mark.parametrize("name", ("seq_len", "eval_tokens"))
@pytest.mark.parametrize("value", (1 << 60, 0, -1, 32.0, "32", True, None, [32], "x\x1b[2J", float("inf")))
def test_a_length_that_no_run_had_is_refused_in_a_line_before_it_is_used(exported, tmp_path, capsys, name, value):
    directory = copied(exported, tmp_path)
    changed(directory / "config.json", lambda config: config["training"]["flags"].update({name: value}))
    assert name in refusal(capsys, [directory, "--eval", directory / "README.md"], sample.main)


def copied(exported, tmp_path) -> Path:
    directory = tmp_path / "copy"
    directory.mkdir()
    for file in exported.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    return directory


def test_nothing_of_an_export_is_executed_or_read_but_config_and_weights(exported, tmp_path):
    directory, mark = copied(exported, tmp_path), tmp_path / "executed"
    for name in MODULES:
        (directory / name).write_text(f"open({str(mark)!r}, 'w')")
    for name in ("pytorch_model.bin", "model.pt", "spider-step9.pt"):
        (directory / name).write_bytes(b"cposix\nsystem\n(S'touch " + os.fsencode(mark) + b"'\ntR.")
    assert command_line(resuming(tmp_path, directory, "--reset_steps")) == 0 and not mark.exists()
    os.mkfifo(directory / "generation_config.json.pipe")
    assert load_checkpoint(directory) and not mark.exists()


def changed(path: Path, change) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def spoil_weights(change):
    def spoil(directory):
        weights = load_file(directory / "model.safetensors")
        change(weights)
        save_file(weights, directory / "model.safetensors")
    return spoil


def spoil_config(change):
    return lambda directory: changed(directory / "config.json", change)


def index_of(name):
    def spoil(directory):
        (directory / INDEX).write_text(json.dumps(dict(weight_map=dict(a=name))))
    return spoil


def pipe(name):
    def spoil(directory):
        (directory / name).unlink()
        os.mkfifo(directory / name)
    return spoil


SPOILT = {
    "no config": (lambda d: (d / "config.json").write_text("no JSON"), "config.json is not a checkpoint"),
    "list": (lambda d: (d / "config.json").write_text("[]"), "no JSON object"),
    "deep": (lambda d: (d / "config.json").write_text("[" * 100_000), "config.json is not a checkpoint"),
    "pipe for config": (pipe("config.json"), "no regular file"),
    "another model": (spoil_config(lambda c: c.pop("spider")), "spider"),
    "foreign field": (spoil_config(lambda c: c["spider"].update(code="x")), "unexpected keyword argument 'code'"),
    "odd size": (spoil_config(lambda c: c["spider"].update(hidden_size=1 << 40)), "cfg.hidden_size"),
    "other size": (spoil_config(lambda c: c["spider"].update(hidden_size=48)), "weights differ from its cfg's"),
    "many layers": (spoil_config(lambda c: c["spider"].update(n_coda_layers=200)), "more layers than there are"),
    "nan": (spoil_config(lambda c: c["spider"].update(rope_theta=float("nan"))), "rope_theta"),
    "loops": (spoil_config(lambda c: c.update(n_loops=1 << 40)), "n_loops"),
    "recipe": (spoil_config(lambda c: c["training"].update(recipe="x")), "recipe"),
    "step": (spoil_config(lambda c: c["training"].update(step="x")), "step"),
    "flags": (spoil_config(lambda c: c["training"].update(flags=[1])), "config.json is not"),
    "training": (spoil_config(lambda c: c.update(training=3)), "config.json is not a checkpoint"),
    "cut off": (lambda d: os.truncate(d / "model.safetensors", 9000), "model.safetensors is not a checkpoint"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "model.safetensors does not exist"),
    "pipe for weights": (pipe("model.safetensors"), "no regular file"),
    "missing": (spoil_weights(lambda w: w.pop("spider.null_segment")), "null_segment"),
    "too many": (spoil_weights(lambda w: w.update(more=torch.ones(2))), "more"),
    "shape": (spoil_weights(lambda w: w.update({"spider.null_segment": torch.ones(33)})), "null_segment"),
    "numbers": (spoil_weights(lambda w: w.update({"spider.null_segment": torch.ones(32).long()})), "null_segment"),
    "type": (spoil_weights(lambda w: w.update({"spider.null_segment": torch.ones(32).bool()})), "is of type BOOL"),
    "elsewhere": (index_of("../model.safetensors"), "is no file beside it"),
    "in the root": (index_of("/dev/zero"), "is no file beside it"),
    "no name": (index_of([1]), INDEX),
    "a number": (index_of(3), INDEX),
    "control characters": (index_of("\x1b[2J"), "\\x1b[2J does not exist"),
}


@pytest.mark.parametrize("what", SPOILT)
def test_what_is_no_export_is_refused_in_a_line(exported, tmp_path, capsys, what):
    directory, (spoil, said) = copied(exported, tmp_path), SPOILT[what]
    spoil(directory)
    assert said in refusal(capsys, resuming(tmp_path, directory, "--reset_steps"))
    assert not (tmp_path / "on").exists()


def test_an_export_is_whole_or_not_there_and_takes_no_files_place(checkpoint, exported, tmp_path, monkeypatch, capsys):
    def to(directory):
        return refusal(capsys, [checkpoint, "--export", directory], sample.main)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("x")
    (tmp_path / "file").write_text("x")
    os.symlink("nowhere", tmp_path / "link")
    for name in ("full", "file"):
        assert f"{name} is there already and not an empty directory: name another" in to(tmp_path / name)
    assert "is there already" in to(exported) and "below cannot be written" in to(tmp_path / "file" / "below")
    assert [file.name for file in (tmp_path / "full").iterdir()] == ["mine.txt"]

    def fail(library, directory, weights):
        (directory / "model.safetensors").write_bytes(b"half")
        raise library.SafetensorError("No space left on device")
    (tmp_path / "empty").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(directory, "write_weights", fail)
        for name in ("empty", "new"):
            assert f"{name} cannot be written: No space left on device" in to(tmp_path / name)
    assert not list((tmp_path / "empty").iterdir())
    assert sorted(file.name for file in tmp_path.iterdir()) == ["empty", "file", "full", "link"]
    assert sample.main([str(checkpoint), "--export", str(tmp_path / "empty")]) == 0
    assert sample.main([str(checkpoint), "--export", str(tmp_path / "link")]) == 0
    assert (tmp_path / "nowhere" / "config.json").exists()


def test_the_model_card_has_the_facts_and_nothing_that_others_wrote_but_as_json(checkpoint, exported, tmp_path):
    card, state = (exported / "README.md").read_text(), torch.load(checkpoint)
    line = json.loads((checkpoint.parent / "metrics.jsonl").read_text().splitlines()[-1])
    for fact in (f"{state['bytes_seen']:,} bytes in 6 steps", f"{line['val_bpb']:.4f} bits per byte", "at step 6",
                 "32 bytes a sequence", '"lr": 0.01', '"data_dir": "data"', "the middle ones 3 times"):
        assert fact in card, fact
    assert str(checkpoint.parent.parent) not in card
    assert json.loads((exported / "config.json").read_text())["training"]["val_bpb"] == line["val_bpb"]
    state["flags"]["data_dir"] = "a\n```\n# Not so\x1b[2J\n"
    torch.save(state | dict(step=5), tmp_path / "spider-step5.pt")
    (tmp_path / "metrics.jsonl").write_text('{"step": 5, "bytes_seen": 7, "val_bpb": 0.1}\n{"step": [}\n')
    assert sample.main([str(tmp_path / "spider-step5.pt"), "--export", str(tmp_path / "out")]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "0.1000" not in card and "\n# Not so" not in card and "\x1b" not in card


HEADING = "5\n\n# Not so <img src=x onerror=alert(1)>\n"


@pytest.mark.parametrize("name, value", (
    ("lr", math.inf), ("lr", -math.inf), ("lr", math.nan), ("lr", -1.0), ("lr", HEADING), ("lr", True),
    ("seq_len", HEADING), ("seq_len", math.inf), ("seq_len", -5), ("seq_len", 10 ** 15), ("seq_len", "32"),
    ("seq_len", False), ("seq_len", None), ("schedule", HEADING), ("engram_reset", HEADING), ("seed", 0.5),
    ("data_dir", ""), ("data_dir", 7), ("no_such_flag", math.inf)))
def test_flags_that_no_run_has_are_refused_before_they_reach_the_model_card(checkpoint, tmp_path, capsys, name, value):
    state = torch.load(checkpoint)
    torch.save(state | dict(flags=state["flags"] | {name: value}), tmp_path / "spider-step6.pt")
    line = refusal(capsys, [tmp_path / "spider-step6.pt", "--export", tmp_path / "out"], sample.main)
    assert f"{tmp_path / 'spider-step6.pt'}: flags: not" in line or f"{name} of the checkpoint's run: " in line, line
    assert [file.name for file in tmp_path.iterdir()] == ["spider-step6.pt"]


def test_a_model_card_holds_whatever_a_stranger_wrote_as_json_alone(checkpoint, tmp_path):
    state = torch.load(checkpoint)
    flags = {"data_dir": HEADING, HEADING: HEADING, "```": "```\n</pre>\u2028# Not so", "recipe": HEADING,
             "seq_len": 48}
    torch.save(state | dict(flags=state["flags"] | flags), tmp_path / "spider-step6.pt")
    assert sample.main([str(tmp_path / "spider-step6.pt"), "--export", str(tmp_path / "out")]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    above, _, below = card.partition("```json\n")
    block, _, below = below.partition("\n```\n")
    assert "48 bytes a sequence" in above and "Not so" not in above + below and "<" not in above + below
    name, _, written = block.partition("\n")
    assert json.loads(name) == "spider-step6.pt" and json.loads(written).items() >= {HEADING: HEADING}.items()
    config = json.loads((tmp_path / "out" / "config.json").read_text(), parse_constant=pytest.fail)
    assert config["max_position_embeddings"] == 48 and card.isascii()


@pytest.mark.parametrize("value", ("Infinity", "-Infinity", "NaN", "1e999", "-1", "true", "null", '"<b>"', "[]",
                                   "9" * 400))
@pytest.mark.parametrize("name", ("val_bpb", "step", "bytes_seen"))
def test_figures_of_metrics_that_no_run_writes_are_passed_over(checkpoint, tmp_path, name, value):
    state = torch.load(checkpoint)
    torch.save(state, tmp_path / "spider-step6.pt")
    lines = [dict(step=5, bytes_seen=320, val_bpb=2.5), dict(step=6, bytes_seen=state["bytes_seen"])]
    (tmp_path / "metrics.jsonl").write_text(
        f"{json.dumps(lines[0])}\n" + json.dumps(dict(step=6, bytes_seen=state["bytes_seen"], val_bpb=9.5) | {
            name: "VALUE"}).replace('"VALUE"', value) + f"\n{json.dumps(lines[1])}\n")
    assert sample.main([str(tmp_path / "spider-step6.pt"), "--export", str(tmp_path / "out")]) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text(), parse_constant=pytest.fail)
    assert config["training"]["val_bpb"] in ((2.5, 9.5) if name == "bytes_seen" else (2.5,))
    assert config["training"]["val_bpb_at_step"] in (5, 6)
    assert "2.5000 bits per byte" in (tmp_path / "out" / "README.md").read_text() or name == "bytes_seen"


# ---------------------------------------------------------------------------------------------------------------------
# Fine-tuning

def shards_of_words(directory: Path, seed: int) -> Path:
    """Shards of one language's words; each seed has its own order and frequencies of them."""
    words = [bytes(word) for word in np.random.default_rng(0).integers(97, 123, (24, 5), np.uint8)]
    generator = np.random.default_rng(seed)
    frequencies = generator.dirichlet(np.full(len(words), 0.5))
    directory.mkdir()
    for name, count in (("train-0.bin", 2000), ("val-0.bin", 200)):
        content = b" ".join(words[i] for i in generator.choice(len(words), count, p=frequencies))
        np.frombuffer(content, np.uint8).astype("<u2").tofile(directory / name)
    return directory


def test_a_few_steps_from_weights_are_worth_more_than_as_many_from_none(tmp_path):
    before, after = (shards_of_words(tmp_path / f"words-{seed}", seed) for seed in (1, 2))
    flags = ("--micro_batch", "8", "--warmup_steps", "5", "--eval_every", "1000")
    base = run(tmp_path, before, *flags, "--target_tokens", "15360", steps=60, ckpt="base")
    origin = ("--resume", str(base / "spider-step60.pt"), "--reset_steps")
    scratch, adapted = (metrics(run(tmp_path, after, *flags, "--target_tokens", "2560", *start, steps=10, ckpt=name))
                        for name, start in (("scratch", ()), ("adapted", origin)))
    assert adapted[-1]["val_loss"] < scratch[-1]["val_loss"] - 0.5
    assert [line["step"] for line in adapted][::9] == [1, 10]

"""An export is read back by train.py and sample.py, and not trusted."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import final_state, metrics, run
from exporting import MODULES, changed, checkpoint, copied, exported, model, refusal, resuming, spider  # noqa: F401
from safetensors.torch import load_file, save_file

import sample
from spider.training.checkpoint_loading import load_checkpoint
from spider.training.export_reading import INDEX
from train import command_line


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


def test_weights_without_optimizer_state_resume_no_run(exported, tmp_path, capsys):
    line = refusal(capsys, resuming(tmp_path, exported))
    assert "has no optimizer state: add --reset_steps" in line and str(exported) in line
    assert not (tmp_path / "on").exists()


def test_an_export_talks(exported, checkpoint, capsys):
    for name in (checkpoint, exported):
        assert sample.main([str(name), "--prompt", "abc", "--bytes", "20"]) == 0
    texts = capsys.readouterr().out
    assert texts[:len(texts) // 2] == texts[len(texts) // 2:]
    assert "--export needs a checkpoint of a training run" in refusal(capsys, [exported, "--export", "x"], sample.main)


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


def test_nothing_of_an_export_is_executed_or_read_but_config_and_weights(exported, tmp_path):
    directory, mark = copied(exported, tmp_path), tmp_path / "executed"
    for name in MODULES:
        (directory / name).write_text(f"open({str(mark)!r}, 'w')")
    for name in ("pytorch_model.bin", "model.pt", "spider-step9.pt"):
        (directory / name).write_bytes(b"cposix\nsystem\n(S'touch " + os.fsencode(mark) + b"'\ntR.")
    assert command_line(resuming(tmp_path, directory, "--reset_steps")) == 0 and not mark.exists()
    os.mkfifo(directory / "generation_config.json.pipe")
    assert load_checkpoint(directory) and not mark.exists()


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
    "list": (lambda d: (d / "config.json").write_text("[]"), "not a JSON object"),
    "deep": (lambda d: (d / "config.json").write_text("[" * 100_000), "config.json is not a checkpoint"),
    "pipe for config": (pipe("config.json"), "not a regular file"),
    "another model": (spoil_config(lambda c: c.pop("spider")), "spider"),
    "foreign field": (spoil_config(lambda c: c["spider"].update(code="x")), "unexpected keyword argument 'code'"),
    "odd size": (spoil_config(lambda c: c["spider"].update(hidden_size=1 << 40)), "cfg: hidden_size"),
    "other size": (spoil_config(lambda c: c["spider"].update(hidden_size=48)), "weights do not match its cfg"),
    "many layers": (spoil_config(lambda c: c["spider"].update(n_coda_layers=200)), "more layers than weights"),
    "nan": (spoil_config(lambda c: c["spider"].update(rope_theta=float("nan"))), "rope_theta"),
    "loops": (spoil_config(lambda c: c.update(n_loops=1 << 40)), "n_loops"),
    "recipe": (spoil_config(lambda c: c["training"].update(recipe="x")), "recipe"),
    "step": (spoil_config(lambda c: c["training"].update(step="x")), "step"),
    "flags": (spoil_config(lambda c: c["training"].update(flags=[1])), "config.json is not"),
    "training": (spoil_config(lambda c: c.update(training=3)), "config.json is not a checkpoint"),
    "cut off": (lambda d: os.truncate(d / "model.safetensors", 9000), "model.safetensors is not a checkpoint"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "model.safetensors does not exist"),
    "pipe for weights": (pipe("model.safetensors"), "not a regular file"),
    "missing": (spoil_weights(lambda w: w.pop("spider.null_segment")), "null_segment"),
    "too many": (spoil_weights(lambda w: w.update(more=torch.ones(2))), "more"),
    "shape": (spoil_weights(lambda w: w.update({"spider.null_segment": torch.ones(33)})), "null_segment"),
    "numbers": (spoil_weights(lambda w: w.update({"spider.null_segment": torch.ones(32).long()})), "null_segment"),
    "type": (spoil_weights(lambda w: w.update({"spider.null_segment": torch.ones(32).bool()})), "is of type BOOL"),
    "elsewhere": (index_of("../model.safetensors"), "is not a file beside it"),
    "in the root": (index_of("/dev/zero"), "is not a file beside it"),
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
    base = run(tmp_path, before, *flags, "--target_tokens", "5120", steps=20, ckpt="base")
    origin = ("--resume", str(base / "spider-step20.pt"), "--reset_steps")
    scratch, adapted = (metrics(run(tmp_path, after, *flags, "--target_tokens", "2560", *start, steps=10, ckpt=name))
                        for name, start in (("scratch", ()), ("adapted", origin)))
    assert adapted[-1]["val_loss"] < scratch[-1]["val_loss"] - 0.5
    assert [line["step"] for line in adapted][::9] == [1, 10]


"""A checkpoint, its export and what is loaded from it, for the tests of spider/export."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from conftest import awake, final_state, make_shards, run, small_config

import sample
from spider.export.flatten import flat_modules
from spider.inference.loading import load_model
from spider_model import Spider
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
    return load_model(str(checkpoint), CPU, Spider)[0]


def loaded(directory, **settings):
    from transformers import AutoModelForCausalLM  # takes a second, which whoever runs another test has not
    return AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True, **settings)


@pytest.fixture(scope="module")
def model(exported):
    return loaded(exported)


def loaded_tokenizer(directory, **settings):
    from transformers import AutoTokenizer
    return AutoTokenizer.from_pretrained(directory, trust_remote_code=True, **settings)


@pytest.fixture(scope="module")
def tokenizer(exported):
    return loaded_tokenizer(exported)


def continuation(model, ids: list[int], n: int = 12, **settings) -> list[int]:
    """Return what generate() writes after one prompt, the likeliest bytes unless told otherwise."""
    written = model.generate(torch.tensor([ids]), max_new_tokens=n, **(dict(do_sample=False) | settings))
    return written[0, len(ids):].tolist()


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


def copied(exported, tmp_path) -> Path:
    directory = tmp_path / "copy"
    directory.mkdir()
    for file in exported.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    return directory


def changed(path: Path, change) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


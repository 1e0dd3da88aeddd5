"""Fixtures for test_export.py and test_adapter.py: a checkpoint, its export, the loaded model."""

from dataclasses import asdict
from pathlib import Path

import pytest
import torch

import sample
from conftest import awake, final_state, make_shards, run, small_config
from spider.inference.load import decoder_of, read_checkpoint
from spider_model import Spider


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """Return a checkpoint with the metrics of a run of six steps and a model in which every
    component has an effect."""
    root = tmp_path_factory.mktemp("run")
    directory = run(root, make_shards(root / "data"))
    config = small_config()
    weights = awake(config).state_dict()
    weights["lm_head.weight"] *= 20  # so that the likeliest byte has no near-tie
    path = directory / "spider-step6.pt"
    saved = final_state(directory)
    torch.save(saved | dict(model_state_dict=weights, cfg=asdict(config), n_loops=3), path)
    return path


@pytest.fixture(scope="module")
def exported(checkpoint, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("export") / "new" / "model"
    assert sample.main([str(checkpoint), "--export", str(directory)]) == 0
    return directory


@pytest.fixture(scope="module")
def spider(checkpoint) -> Spider:
    _, saved = read_checkpoint(str(checkpoint), Spider)
    return decoder_of(saved, torch.device("cpu"), Spider)


def load_model(directory, **settings):
    # imported here, because the import takes a second
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True, **settings)


def load_tokenizer(directory, **settings):
    from transformers import AutoTokenizer

    # with False, transformers does not ask whether to trust the code that config.json names
    return AutoTokenizer.from_pretrained(directory, trust_remote_code=False, **settings)


@pytest.fixture(scope="module")
def model(exported):
    return load_model(exported)


@pytest.fixture(scope="module")
def tokenizer(exported):
    return load_tokenizer(exported)

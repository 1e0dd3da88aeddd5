"""The model of a checkpoint."""

import torch

from spider.inference.load import decoder_of, read_checkpoint
from spider_model import Spider


def test_a_cpu_with_bf16_decodes_in_fp32(trained, monkeypatch):
    monkeypatch.setattr("spider.inference.load.has_bf16", lambda _: True)
    _, saved = read_checkpoint(str(trained), Spider)
    assert decoder_of(saved, torch.device("cpu"), Spider).compute_dtype == torch.float32

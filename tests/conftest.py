"""What several test files share: a small model with every component awake, and bytes to run it on."""

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared" / "data"
sys.path.insert(0, str(ROOT))

from spider_model import Spider, SpiderConfig  # noqa: E402
from tokenizer import BOS_ID, EOS_ID  # noqa: E402


def pytest_collection_modifyitems(items):
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs CUDA"))


def small_config(**changes) -> SpiderConfig:
    """Every component at a size for tests."""
    sizes = dict(hidden_size=32, n_prelude_layers=1, n_recurrent_layers=2, n_coda_layers=1, n_loops=2, n_heads=2,
                 q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=16,
                 intermediate_size=48, n_routed_experts=4, moe_intermediate_size=16, lora_rank=4, engram_layers=(1,),
                 engram_heads=2, engram_rows=200, engram_dim=8, engram_byte_rows=300, engram_byte_dim=8)
    return SpiderConfig(**(sizes | changes))


def awake(config: SpiderConfig, seed: int = 0, dtype=torch.float32) -> Spider:
    """A model in which nothing is zero and the boundaries hang on the text."""
    torch.manual_seed(seed)
    model = Spider(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("table.weight", "conv_weight", "lora_up", "null_segment", "bias")):
                p.add_(torch.randn_like(p) * 0.5)
        if config.boundaries == "learned":
            model.boundary_predictor[2].weight.normal_(std=1.0)
    model.to(dtype)
    model.compute_dtype = dtype
    return model.train()


def text(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    """Random plain bytes [rows, length]."""
    return torch.randint(32, 127, (rows, length), generator=torch.Generator().manual_seed(seed))


def documents(*lengths: int, seed: int = 0) -> torch.Tensor:
    """One row of documents, BOS ... EOS, each of a given length."""
    row = text(1, sum(lengths), seed)[0]
    end = 0
    for length in lengths:
        row[end], row[end + length - 1], end = BOS_ID, EOS_ID, end + length
    return row[None]

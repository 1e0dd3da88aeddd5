"""Initial values against the table in the docstring of spider_model.init_weights, by statistics.

The table's numbers are written here a second time. All sizes differ, so that a wrong fan-in shows.
Statistics are over REPEATS initializations.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from spider.config import SpiderConfig
from spider_model import Spider

REPEATS = 16  # halt_predictor.weight, the smallest, then has 4,096 values
SIGMAS = 4  # standard errors that an estimate may be off: there 4.4% of the deviation
HIDDEN = 256
SIZES = dict(
    hidden_size=HIDDEN,
    n_prelude_layers=1,
    n_recurrent_layers=2,
    n_coda_layers=2,
    n_loops=3,
    n_heads=2,
    q_lora_rank=48,
    kv_lora_rank=24,
    qk_nope_head_dim=24,
    qk_rope_head_dim=16,
    v_head_dim=40,
    intermediate_size=112,
    n_routed_experts=3,
    n_shared_experts=2,
    moe_intermediate_size=48,
    lora_rank=5,
    engram_layers=(1,),
    engram_contexts=("3", "4"),
    engram_heads=2,
    engram_rows=60,
    engram_dim=8,
    engram_byte_contexts=("1", "2", "3"),
    engram_byte_rows=90,
    engram_byte_dim=12,
    engram_match_contexts=("3", "4", "5", "word1"),
)
DEPTH = 1 + 2 * 3 + 2  # layers, the core's counted once per loop
MODELS = {
    "flexitokens": SpiderConfig(**SIZES, boundaries="flexitokens", boundary_prior=0.3),
    "learned": SpiderConfig(
        **SIZES,
        boundaries="learned",
        boundary_rate=0.19,
        segment_offsets=3,
        engram_votes=2,
        engram_logits=True,
    ),
}


def drawn(model: str) -> dict[str, Tensor]:
    """Return all parameters and buffers of REPEATS initializations by name, [REPEATS, ...]."""
    spider = Spider(MODELS[model])
    values = defaultdict(list)
    torch.manual_seed(0)
    for _ in range(REPEATS):
        spider.init_weights()
        for name, tensor in (*spider.named_parameters(), *spider.named_buffers()):
            values[name].append(tensor.detach().clone())
    return {name: torch.stack(tensors) for name, tensors in values.items()}


# --------------------------------------------------------------------------------------------------
# What a row of the table says of values [REPEATS, ...]


def normal(variance: float) -> Callable[[Tensor], None]:
    """Values are N(0, variance): mean, deviation, and half of them within 0.6745 deviations."""

    def check(values: Tensor):
        z = values.double().flatten() / math.sqrt(variance)
        error = SIGMAS / math.sqrt(len(z))  # error of a mean of numbers with deviation 1
        assert abs(float(z.mean())) < error
        assert abs(float(z.std()) - 1) < error / math.sqrt(2)
        assert abs(float((z.abs() < 0.67449).double().mean()) - 0.5) < error / 2

    return check


def constant(value: float) -> Callable[[Tensor], None]:
    def check(values: Tensor):
        torch.testing.assert_close(values, torch.full_like(values, value), rtol=1e-6, atol=0)

    return check


def surprise_and_gain(values: Tensor):
    """The second output, the gain, is 0 at the start."""
    normal(4 / HIDDEN)(values[:, 0])
    constant(0)(values[:, 1])


def multiplier_of(order: int) -> Callable[[Tensor], None]:
    """The hash constants of a model's table: odd, from its number in the order of modules."""

    def check(values: Tensor):
        numbers = torch.Generator().manual_seed(order)
        expected = 2 * torch.randint(-(2**62), 2**62, values.shape[1:], generator=numbers) + 1
        assert torch.equal(values, expected.expand_as(values))

    return check


def numbers(*expected: int) -> Callable[[Tensor], None]:
    def check(values: Tensor):
        assert values[0].flatten().tolist() == list(expected)
        assert torch.equal(values, values[:1].expand_as(values))

    return check


ROWS = {  # by a regular expression for the whole name
    r"embed_tokens": normal(1),
    # Linears, by their fan-in
    r".*attention\.(q_a|kv_a)_proj\.weight": normal(1 / HIDDEN),
    r".*((ffn|shared)\.gate_up_proj|router)\.weight": normal(1 / HIDDEN),
    r".*attention\.q_b_proj\.weight": normal(1 / 48),
    r".*attention\.kv_b_proj\.weight": normal(1 / 24),
    r"core.*engram\.(key|value)_proj\.weight": normal(1 / (2 * 2 * 8)),
    r"engram_input\.proj\.weight": normal(1 / (7 * 12)),
    r"engram_output\.(gate|votes\.0)\.weight": normal(1 / HIDDEN),
    r".*moe\.w_(gate|up)": normal(1 / HIDDEN),
    # Outputs of residual branches
    r".*o_proj\.weight": normal(1 / (2 * 40) / (2 * DEPTH)),
    r".*ffn\.down_proj\.weight": normal(1 / 112 / (2 * DEPTH)),
    r".*shared\.down_proj\.weight": normal(1 / 96 / (2 * DEPTH)),
    r".*moe\.w_down": normal(1 / 48 / (2 * DEPTH)),
    # Predictions
    r"lm_head\.weight|core\.halt_predictor\.weight": normal(0.02**2),
    r"core\.halt_predictor\.bias": constant(-3),
    # The core
    r"core\.loop_embedding": normal(0.02**2),
    r"core\.log_A": constant(0),
    r"core\.dt": constant(-2.2521684),  # log(exp(0.1) - 1)
    r"core\.B": constant(1),
    r"core\.lora_down": normal(1 / HIDDEN),
    r"core\.lora_up|core\.out_proj\.weight|core\.offset_proj|null_segment": constant(0),
    # Memories
    r".*table\.weight|.*conv_weight|.*followed|engram_output\.(logits|votes\.2)\.weight": constant(
        0
    ),
    r"engram_match\.multiplier|engram_input\.table\.multiplier": multiplier_of(0),
    r"core\.layers\.1\.engram\.table\.multiplier": multiplier_of(1),
    r"engram_output\.table\.multiplier": multiplier_of(2),
    r"engram_(input|output)\.table\.prime": numbers(89, 83, 79),
    r"engram_(input|output)\.table\.offset": numbers(0, 89, 89 + 83),
    r"core.*engram\.table\.prime": numbers(59, 53, 47, 43),
    r"core.*engram\.table\.offset": numbers(0, 59, 59 + 53, 59 + 53 + 47),
    r".*expert_bias": constant(0),
}
ROWS_OF = {
    "flexitokens": ROWS
    | {
        r"engram_output\.proj\.weight": normal(1 / (7 * 12)),
        r"boundary_predictor\.0\.weight": normal(1 / HIDDEN),
        r"boundary_predictor\.0\.bias": constant(0),
        r"boundary_predictor\.2\.weight": normal(4 / HIDDEN),
        r"boundary_predictor\.2\.bias": constant(-0.8472979),  # log(0.3 / 0.7)
    },
    "learned": ROWS
    | {
        r"engram_output\.proj\.weight": normal(1 / (3 * 12)),  # votes replace matches
        r"boundary_predictor\.regression\.0\.weight": normal(1 / HIDDEN),
        r"boundary_predictor\.regression\.2\.weight": surprise_and_gain,
        r"boundary_predictor\.regression\.[02]\.bias": constant(0),
        r"boundary_predictor\.(pairs|entropy|histogram|steps)": constant(0),
        r"boundary_predictor\.threshold": constant(0.81 * 64 * 16 / 65536),  # cuts 0.19 of ties
        r"boundary_predictor\.mean_loss": constant(math.log(272)),
    },
}


@pytest.mark.parametrize("model", MODELS)
def test_every_parameter_and_buffer_starts_as_its_row_of_the_table_says(model):
    table = ROWS_OF[model]
    used = set()
    for name, values in drawn(model).items():
        rows = [pattern for pattern in table if re.fullmatch(pattern, name)]
        assert len(rows) == 1, f"{name} has {len(rows)} rows"
        used.add(rows[0])
        check = table[rows[0]]
        try:
            check(values)
        except AssertionError as fault:
            raise AssertionError(f"{name}: {fault}") from fault
    assert used == table.keys()

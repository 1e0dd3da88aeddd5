"""Compare initial values, by statistics, with the table in the docstring of init_weights.

This file repeats the numbers of the table. Statistics are over REPEATS initializations.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable
from itertools import accumulate

import torch
from torch import Tensor

from conftest import on_meta, small_config
from spider.config import SpiderConfig
from spider_model import Spider
from table import EVERY_VARIANT

REPEATS = 8  # gives halt_predictor.weight, the smallest, 512 values
SIGMAS = 5  # tolerance of an estimate, in standard errors
SIZES = dict(hidden_size=64, intermediate_size=112, n_coda_layers=2, n_loops=3, lora_rank=5)


def config_of(changes: dict) -> SpiderConfig:
    return small_config(**SIZES | changes)


def drawn(config: SpiderConfig) -> dict[str, Tensor]:
    """Return parameters and buffers of REPEATS initializations by name, each [REPEATS, ...]."""
    spider = Spider(config)
    values = defaultdict(list)
    torch.manual_seed(0)
    for _ in range(REPEATS):
        spider.init_weights()
        for name, tensor in (*spider.named_parameters(), *spider.named_buffers()):
            values[name].append(tensor.detach().clone())
    return {name: torch.stack(tensors) for name, tensors in values.items()}


# --------------------------------------------------------------------------------------------------
# Rows of the table, as checks of values [REPEATS, ...]

Check = Callable[[Tensor], None]


def normal(variance: float) -> Check:
    """Values are N(0, variance): check mean, deviation, and half within 0.6745 deviations."""

    def check(values: Tensor):
        z = values.double().flatten() / math.sqrt(variance)
        error = SIGMAS / math.sqrt(len(z))  # error of a mean of numbers with deviation 1
        assert abs(float(z.mean())) < error
        assert abs(float(z.std()) - 1) < error / math.sqrt(2)
        assert abs(float((z.abs() < 0.67449).double().mean()) - 0.5) < error / 2

    return check


def by_fan_in(dimension: int, divisor: float = 1) -> Check:
    """Values are N(0, 1 / fan_in / divisor). dimension: the weight's dimension of inputs."""
    return lambda values: normal(1 / values.shape[dimension] / divisor)(values)


def constant(value: float) -> Check:
    def check(values: Tensor):
        torch.testing.assert_close(values, torch.full_like(values, value), rtol=1e-6, atol=0)

    return check


def surprise_and_gain(values: Tensor):
    """The second output, the gain, starts at 0."""
    by_fan_in(-1)(values[:, :1])
    constant(0)(values[:, 1])


def multiplier_of(order: int) -> Check:
    """Hash constants of a table: odd, seeded by the table's number in the order of modules."""

    def check(values: Tensor):
        numbers = torch.Generator().manual_seed(order)
        expected = 2 * torch.randint(-(2**62), 2**62, values.shape[1:], generator=numbers) + 1
        assert torch.equal(values, expected.expand_as(values))

    return check


def primes_up_to(limit: int) -> list[int]:
    return [n for n in range(limit, 1, -1) if all(n % k for k in range(2, n))]


def begins(expected: list[int]) -> Check:
    """Values are the first of these numbers."""

    def check(values: Tensor):
        for repeat in values.flatten(1).tolist():
            assert repeat == expected[: len(repeat)]

    return check


def table_of(c: SpiderConfig) -> dict[str, Check]:
    """Return the rows by regular expressions for whole names. The first match applies."""
    depth = c.n_prelude_layers + c.n_recurrent_layers * c.n_loops + c.n_coda_layers
    byte_primes = primes_up_to(c.engram_byte_rows)
    primes = primes_up_to(c.engram_rows)
    names = [name for name, _ in on_meta(c).named_buffers()]
    multipliers = [name for name in names if name.endswith("table.multiplier")]
    return {
        r"embed_tokens": normal(1),
        # Outputs of residual branches of any module
        r".*(o_proj|down_proj)\.weight": by_fan_in(-1, 2 * depth),
        r".*moe\.w_down": by_fan_in(-2, 2 * depth),
        r".*moe\.w_(gate|up)": by_fan_in(-2),
        r".*expert_bias": constant(0),
        # Predictions
        r"lm_head\.weight|core\.halt_predictor\.weight": normal(0.02**2),
        r"core\.halt_predictor\.bias": constant(-3),
        r"boundary_predictor\.2\.bias": constant(
            math.log(c.boundary_prior / (1 - c.boundary_prior))
        ),
        r"boundary_predictor\.regression\.2\.weight": surprise_and_gain,
        r"boundary_predictor\.(pairs|entropy|histogram|steps)": constant(0),
        # in the 65,536 steps of a score, the cut that leaves boundary_rate of ties
        r"boundary_predictor\.threshold": constant((1 - c.boundary_rate) * 64 * 16 / 65536),
        r"boundary_predictor\.mean_loss": constant(math.log(c.vocab_size)),
        # The core
        r"core\.loop_embedding": normal(0.02**2),
        r"core\.log_A": constant(0),
        r"core\.dt": constant(-2.2521684),  # log(exp(0.1) - 1)
        r"core\.B": constant(1),
        r"core\.lora_down": normal(1 / 64),
        r"core\.lora_up|core\.out_proj\.weight|core\.offset_proj|null_segment": constant(0),
        # Memories
        r".*table\.weight|.*conv_weight|.*followed": constant(0),
        r"engram_output\.(logits|votes\.2)\.weight": constant(0),
        r"engram_match\.multiplier": multiplier_of(0),
        **{re.escape(name): multiplier_of(order) for order, name in enumerate(multipliers)},
        r"engram_(input|output)\.table\.prime": begins(byte_primes),
        r"engram_(input|output)\.table\.offset": begins([0, *accumulate(byte_primes)]),
        r"core.*engram\.table\.prime": begins(primes),
        r"core.*engram\.table\.offset": begins([0, *accumulate(primes)]),
        # Linears
        r".*\.weight": by_fan_in(-1),
        r".*\.bias": constant(0),
    }


@EVERY_VARIANT
def test_initial_values_match_the_table(changes):
    config = config_of(changes)
    table = table_of(config)
    for name, values in drawn(config).items():
        rows = [pattern for pattern in table if re.fullmatch(pattern, name)]
        assert rows, f"{name} has no row in table_of, nor in the docstring of init_weights"
        try:
            table[rows[0]](values)
        except AssertionError as fault:
            raise AssertionError(f"{name} does not match the row {rows[0]}: {fault}") from fault

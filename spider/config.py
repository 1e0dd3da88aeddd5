"""SpiderConfig, which has every size of the model, and the presets. Does not import torch."""

import difflib
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, NamedTuple

from spider.vocabulary import VOCAB_SIZE

BOUNDARIES = ("learned", "flexitokens", "words")
RECOMPUTE = ("nothing", "core", "all")
OPTIMIZERS = ("adamw", "adamw8bit", "muon")
BACKENDS = ("loop", "grouped", "triton", "tile")  # see tile_moe.py
MAX_CONTEXT_BYTES = 32  # longest context of a memory
# how many past bytes a context in these units may read
REACH = {"byte": MAX_CONTEXT_BYTES, "word": MAX_CONTEXT_BYTES, "line": 256}

MAX_INT = (1 << 62) - 1  # largest accepted integer: the sum of two fits in int64
MAX_FLOAT = sys.float_info.max  # largest accepted float: no range contains infinity


class Range(NamedTuple):
    """The numbers that a field, a flag or a checkpoint accepts: low <= number <= high, or with
    `above` low < number <= high. str() describes them in an error message."""

    low: float
    high: float = MAX_FLOAT
    above: bool = False

    def has(self, value: float) -> bool:
        is_high_enough = value > self.low if self.above else value >= self.low
        return is_high_enough and value <= self.high

    def __str__(self) -> str:
        text = f"above {self.low:,}" if self.above else f"at least {self.low:,}"
        return f"{text}, at most {self.high:,}" if self.high < MAX_INT else text


@dataclass
class SpiderConfig:
    """Sizes and loss weights of the model as plain values, saved in the checkpoint.

    RANGES and USUAL_RANGES have the range of each number. The defaults are the preset `original`,
    the model that this project started from.
    """

    vocab_size: int = VOCAB_SIZE
    hidden_size: int = 2048  # a multiple of 16, as grouped products require
    n_prelude_layers: int = 2
    n_recurrent_layers: int = 6  # 0: no core, only byte layers (a baseline)
    n_coda_layers: int = 2
    n_loops: int = 6  # loops in training; further loops use the last one's LoRA
    # attention (MLA)
    n_heads: int = 16
    q_lora_rank: int = 768
    kv_lora_rank: int = 320
    qk_nope_head_dim: int = 64
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128  # qk_nope_head_dim + qk_rope_head_dim; all kernels need a multiple of 8
    rope_theta: float = 10000.0
    byte_window: int = 0  # attention window of prelude and coda in bytes; 0: unlimited
    # feed-forward and experts
    intermediate_size: int = 4096  # width of the dense feed-forward in prelude and coda
    n_routed_experts: int = 32  # 0: only the shared expert, a dense feed-forward layer
    n_shared_experts: int = 1  # one SwiGLU of width n_shared_experts * moe_intermediate_size
    n_experts_per_tok: int = 2  # weights add up to 1; a single expert's weight is its probability
    moe_intermediate_size: int = 512  # width of a routed expert; a multiple of 16
    expert_bias_rate: float = 0.001  # change of the selection bias per optimizer step
    aux_loss_weight: float = 0.01
    z_loss_weight: float = 0.001
    # segments
    boundaries: str = "flexitokens"  # learned (by predicted surprise), flexitokens (sampled), words
    boundary_rate: float = 0.19  # learned: boundaries per byte
    boundary_prior: float = 0.3  # flexitokens: initial boundaries per byte
    boundary_loss_weight: float = 1.0
    # The boundary loss keeps boundaries per byte between alpha - lambda * sigma and alpha.
    boundary_alpha: float = 1 / 3
    boundary_lambda: float = 3.0
    boundary_sigma: float = 0.023
    segment_offsets: int = 1  # projections of a segment, one for each of the next bytes
    # recurrence
    lora_rank: int = 16  # rank of the per-loop adapters; 0: none
    act: bool = True  # adaptive computation time; False: output the last loop's state
    act_threshold: float = 0.99
    ponder_weight: float = 0.001  # weight of the cost of loops; 0: none
    core_loss_weight: float = 0.0  # weight of the core's own next-byte loss; 0: none
    # Engram: tables of hashed contexts, at segment rate before some core layers, and at byte rate
    # (engram_byte_...) before prelude and head.
    engram_layers: tuple[int, ...] = (1, 4)  # core layers that have an Engram
    engram_contexts: tuple[str, ...] = ("3", "4", "6", "8")  # see contexts.py
    engram_heads: int = 4  # hashes per context
    engram_rows: int = 29_000  # rows per hash, rounded down to a prime that no other hash uses
    engram_dim: int = 64  # width of a row
    engram_byte_contexts: tuple[str, ...] = ("1", "2", "3", "4", "5", "6", "7", "8")
    engram_byte_rows: int = 47_300
    engram_byte_dim: int = 128
    # The match memory: what followed the last occurrence of a context.
    engram_match_contexts: tuple[str, ...] = ("3", "4", "5", "6", "8", "12", "16", "24")
    # How many past occurrences of each context vote on the logits. With byte tables, the votes
    # replace the rows of matches before the head.
    engram_votes: int = 0
    engram_vote_ages: bool = False  # weigh votes also by how long ago the context occurred
    engram_logits: bool = False  # rows before the head also add to the logits directly

    def __post_init__(self):
        """Raise ValueError for a value of the wrong type, or sizes that do not fit together."""
        for field in fields(self):
            name = field.name
            default: Any = field.default
            expected = type(default)
            value = getattr(self, name)
            if expected is tuple and type(value) is list:  # from JSON
                value = tuple(value)
                setattr(self, name, value)
            # type, not isinstance: True is not a number of layers
            accepted = type(value) is expected or (expected is float and type(value) is int)
            if expected is tuple and accepted:
                accepted = all(type(element) is type(default[0]) for element in value)
            if not accepted:
                raise ValueError(f"{name} must be a value such as {default!r}")
            if expected in USUAL_RANGES:
                allowed = Range(*RANGES.get(name, USUAL_RANGES[expected]))
                if not allowed.has(value):
                    raise ValueError(f"{name} must be {allowed}")
        self._check_sizes()
        self._check_memories()

    def _check_sizes(self):
        layers = self.n_recurrent_layers or 256  # without a core, engram_layers have no effect
        for holds, rule in (
            (self.hidden_size % 16 == 0, "hidden_size must be a multiple of 16"),
            (
                self.moe_intermediate_size % 16 == 0,
                "moe_intermediate_size must be a multiple of 16",
            ),
            (
                self.qk_nope_head_dim + self.qk_rope_head_dim == self.v_head_dim,
                "qk_nope_head_dim + qk_rope_head_dim must equal v_head_dim",
            ),
            (self.v_head_dim % 8 == 0, "v_head_dim must be a multiple of 8"),
            (
                self.n_prelude_layers + self.n_recurrent_layers + self.n_coda_layers > 0,
                "n_prelude_layers, n_recurrent_layers, n_coda_layers: there must be a layer",
            ),
            (self.qk_rope_head_dim % 2 == 0, "qk_rope_head_dim must be even"),
            (self.boundaries in BOUNDARIES, f"boundaries must be one of {', '.join(BOUNDARIES)}"),
            (0 < self.act_threshold <= 1, "act_threshold must be above 0, at most 1"),
            (0 < self.boundary_prior < 1, "boundary_prior must lie between 0 and 1"),
            (0 < self.boundary_rate < 1, "boundary_rate must lie between 0 and 1"),
            (
                self.n_routed_experts + self.n_shared_experts > 0,
                "n_routed_experts, n_shared_experts: there must be a routed or a shared expert",
            ),
            (
                not self.n_routed_experts or self.n_experts_per_tok <= self.n_routed_experts,
                "n_experts_per_tok must lie between 1 and n_routed_experts",
            ),
            (
                all(0 <= layer < layers for layer in self.engram_layers),
                "engram_layers must lie between 0 and n_recurrent_layers - 1",
            ),
            (not self.engram_layers or self.engram_contexts, "engram_layers need engram_contexts"),
        ):
            if not holds:
                raise ValueError(rule)

    def _check_memories(self):
        """Reject contexts that span_of does not know, and table sizes with too few primes below:
        each table has a different prime number of rows."""
        for name in ("engram_contexts", "engram_byte_contexts", "engram_match_contexts"):
            for context in getattr(self, name):
                try:
                    span_of(context)
                except ValueError as fault:
                    raise ValueError(f"{name}: {fault}") from None
        for name, rows, tables in (
            ("engram_rows", self.engram_rows, len(self.engram_contexts) * self.engram_heads),
            ("engram_byte_rows", self.engram_byte_rows, len(self.engram_byte_contexts)),
        ):
            if len(primes_below(rows, tables)) < tables:
                raise ValueError(f"{name} must be larger: {tables} tables need primes below it")

    @property
    def bytes_per_segment(self) -> float:
        """Estimate bytes per segment; flexitokens: from the middle of the boundary loss's band."""
        if self.boundaries == "learned":
            return 1 / self.boundary_rate
        if self.boundaries == "words":
            return 5.5  # English prose; about 9 for Python, 3 for Chinese
        least = self.boundary_alpha - self.boundary_lambda * self.boundary_sigma
        return 2 / max(1e-6, self.boundary_alpha + max(0, least))

    @property
    def reach(self) -> int:
        """Return how many past bytes the memories and word boundaries read."""
        names = (*self.engram_contexts, *self.engram_byte_contexts, *self.engram_match_contexts)
        return max((2, *(REACH[span_of(name)[0]] for name in names)))

    @property
    def matches_before_head(self) -> int:
        """Return how many contexts have rows of matches before the head."""
        votes_replace_rows = self.engram_votes > 0 and len(self.engram_byte_contexts) > 0
        return 0 if votes_replace_rows else len(self.engram_match_contexts)

    @property
    def has_experts(self) -> bool:
        """Return whether any layer has routed experts."""
        return self.n_recurrent_layers > 0 and self.n_routed_experts > 0

    def changed(self, text: str) -> "SpiderConfig":
        """Return a copy with the changes of --set, NAME=VALUE,...; raise ValueError for a bad name
        or value."""
        changes = {}
        names = vars(self).keys() - {"n_loops"}  # n_loops is a flag
        for setting in text.split(",") if text else ():
            name, _, value = setting.partition("=")
            if name not in names:
                nearest = difflib.get_close_matches(name, names, 1)
                remedy = f": the nearest is {nearest[0]}" if nearest else ""
                raise ValueError(
                    f"{name!r} is not a field of SpiderConfig (spider/config.py) that --set "
                    f"changes{remedy}"
                )
            changes[name] = parse_value(name, value, getattr(SpiderConfig, name))
        return replace(self, **changes)

    @classmethod
    def from_saved(cls, saved: Mapping[str, Any]) -> "SpiderConfig":
        """Return the config of a checkpoint or an export. Raise TypeError for an unknown field,
        ValueError for a bad value."""
        values = dict(saved)
        for use in ("", "byte_", "match_"):  # contexts had no names before November 2026
            if f"engram_{use}orders" in values:
                orders = values.pop(f"engram_{use}orders")
                values[f"engram_{use}contexts"] = [f"{n:d}" for n in orders]
        if "engram_match_words" in values:
            names = [f"word{n:d}" for n in values.pop("engram_match_words")]
            values["engram_match_contexts"] = [*values.get("engram_match_contexts", ()), *names]
        return cls(**values)

    @classmethod
    def preset(cls, name: str) -> "SpiderConfig":
        """Return the config of a preset; raise ValueError for other names."""
        if name not in PRESETS:
            raise ValueError(f"preset: {name!r} is not one of {', '.join(PRESETS)}")
        return cls(**PRESETS[name])


@cache
def span_of(context: str) -> tuple[str, int, int]:
    """Parse the name of a context (see contexts.py): return its unit, and how many units back its
    span ends and begins. Raise ValueError for an unknown name.

        4 -> byte, 0, 4     1-4 -> byte, 1, 4     word2 -> word, 0, 2"""
    if context == "above":
        return "line", 1, 2
    match = CONTEXT.fullmatch(context)
    if match is not None:
        unit = match["unit"] or "byte"
        first = int(match["first"] or 0)
        last = int(match["last"])
        most = MAX_CONTEXT_BYTES if unit == "byte" else MAX_CONTEXT_BYTES // 2
        if first < last <= most:
            return unit, first, last
    raise ValueError(
        f"{context!r} is not a context, such as 3, 1-4, word1, word1-2 or above, of at most "
        f"{MAX_CONTEXT_BYTES} bytes or {MAX_CONTEXT_BYTES // 2} words"
    )


def parse_value(name: str, text: str, default: Any) -> Any:
    """Parse a value of --set as the type of the field's default; raise ValueError if that fails."""
    expected = type(default)
    wanted = expected.__name__
    try:
        if expected is bool:
            wanted = "true or false"
            return {"true": True, "false": False}[text.lower()]
        if expected is tuple:
            wanted = "whole numbers joined by +"
            return tuple(map(type(default[0]), filter(None, text.split("+"))))
        return expected(text)
    except (ValueError, KeyError):
        raise ValueError(f"{name} takes {wanted}, not {text!r}") from None


NUMBER = "[1-9][0-9]?"
CONTEXT = re.compile(f"(?P<unit>word)?((?P<first>{NUMBER})-)?(?P<last>{NUMBER})")

SEQ_LEN = (2, 1 << 24)  # the range of --seq_len
# The usual range of each type of number, and the fields with a range of their own. Within these
# ranges no product of sizes overflows, and no model takes minutes to construct.
USUAL_RANGES = {int: (1, 1 << 18), float: (0, 1_000_000)}
RANGES = {
    "vocab_size": (VOCAB_SIZE, 65_536),
    "n_prelude_layers": (0, 256),
    "n_recurrent_layers": (0, 256),
    "n_coda_layers": (0, 256),
    "n_loops": (1, 4096),
    "rope_theta": (1, 10**12),
    "byte_window": (0, 1 << 24),
    "n_routed_experts": (0, 4096),
    "n_shared_experts": (0, 256),
    "expert_bias_rate": (0, 1),
    "boundary_alpha": (0, 1),
    "boundary_sigma": (0, 1),
    "lora_rank": (0, 4096),
    "engram_heads": (1, 16),
    "engram_rows": (1, 1 << 24),
    "engram_byte_rows": (1, 1 << 24),
    "engram_votes": (0, 64),
}


@cache
def primes_below(limit: int, count: int) -> tuple[int, ...]:
    """Return the `count` largest primes up to `limit`, descending, or all if there are fewer."""
    primes: list[int] = []
    for n in range(limit, 1, -1):
        if len(primes) == count:
            break
        if all(n % divisor for divisor in range(2, math.isqrt(n) + 1)):
            primes.append(n)
    return tuple(primes)


# --------------------------------------------------------------------------------------------------
# Presets (docs/results/learning.md shows what each difference from `original` gains)

# These lower the loss, or need fewer FLOPs for the same loss, at almost no cost in time.
IMPROVEMENTS = dict(
    boundaries="learned",
    engram_byte_contexts=tuple("1 2 3 4 5 6 8 1-4 word1 word1-2 above".split()),
    engram_byte_rows=34_400,  # so that `1b` and `base` have as many parameters as with 8 contexts
    engram_match_contexts=tuple("1 2 3 4 5 6 8 12 16 24 word1 word2".split()),
    engram_votes=4,
    engram_vote_ages=True,
    engram_logits=True,
)
# Each segment offset costs a matrix, and segment offsets need the core's own loss.
WITH_OFFSETS = IMPROVEMENTS | dict(segment_offsets=8, core_loss_weight=0.2)
TINY = WITH_OFFSETS | dict(
    hidden_size=128,
    n_prelude_layers=1,
    n_recurrent_layers=1,
    n_coda_layers=1,
    n_loops=1,
    n_heads=2,
    q_lora_rank=64,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=32,
    v_head_dim=64,
    byte_window=64,
    intermediate_size=256,
    n_routed_experts=8,
    moe_intermediate_size=64,
    lora_rank=4,
    engram_layers=(0,),
    engram_heads=2,
    engram_rows=2_000,
    engram_dim=16,
    engram_byte_rows=131_072,
    engram_byte_dim=32,
)
BASE = WITH_OFFSETS | dict(
    n_prelude_layers=4,
    n_recurrent_layers=1,
    n_coda_layers=4,
    n_loops=1,
    engram_layers=(0,),
)
SMALL = TINY | dict(
    hidden_size=256,
    n_prelude_layers=2,
    n_coda_layers=2,
    n_heads=4,
    q_lora_rank=128,
    intermediate_size=512,
    n_routed_experts=0,
    moe_intermediate_size=384,
    engram_byte_rows=262_144,
)
PRESETS: dict[str, dict[str, Any]] = {
    "1b": IMPROVEMENTS,  # 999M parameters, for GPUs
    "base": BASE,  # 570M; about the compute of `1b`, without loops
    "original": {},  # 996M; the model that this project started from
    "small": SMALL,  # 189M, for CPUs
    "tiny": TINY,  # 94M, for CPUs
}

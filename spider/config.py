"""SpiderConfig, every size of the model, and the presets. Does not import torch."""

import math
from dataclasses import dataclass, fields
from functools import cache

from tokenizer import VOCAB_SIZE

BOUNDARIES = ("learned", "flexitokens", "words")
RECOMPUTE = ("nothing", "core", "all")
OPTIMIZERS = "adamw", "adamw8bit", "muon"
BACKENDS = ("loop", "grouped", "triton", "tile")  # of tile_moe.py
WORD_BYTES = 32  # that are searched for the ends of words
MAX_LOOPS = 4096  # of the core, in flags and checkpoints


@dataclass
class SpiderConfig:
    """All sizes of the model as plain values, saved in the checkpoint. The defaults are the
    original's."""

    vocab_size: int = VOCAB_SIZE
    hidden_size: int = 2048  # multiple of 16, like the experts' width: grouped products need that
    n_prelude_layers: int = 2
    n_recurrent_layers: int = 6  # 0: no core, only byte layers, as a baseline
    n_coda_layers: int = 2
    n_loops: int = 6  # loops in training; further ones use the last loop's adapter
    # attention (MLA)
    n_heads: int = 16
    q_lora_rank: int = 768
    kv_lora_rank: int = 320
    qk_nope_head_dim: int = 64
    qk_rope_head_dim: int = 64
    # equal to the query/key width, a multiple of 8, for all attention kernels
    v_head_dim: int = 128
    rope_theta: float = 10000.0
    byte_window: int = 0  # attention window of prelude and coda in bytes; 0: unlimited
    # feed-forward and experts
    intermediate_size: int = 4096  # of the dense layers of prelude and coda
    n_routed_experts: int = 32  # 0: only the shared expert, a dense feed-forward
    n_shared_experts: int = 1  # one SwiGLU of width n_shared_experts * moe_intermediate_size
    n_experts_per_tok: int = 2
    moe_intermediate_size: int = 512
    expert_bias_rate: float = 0.001  # step of the selection bias, once per optimizer step
    aux_loss_weight: float = 0.01
    z_loss_weight: float = 0.001
    # segments
    # flexitokens: sampled, as published; learned: by predicted surprise; words
    boundaries: str = "flexitokens"
    boundary_rate: float = 0.19  # learned: boundaries per byte
    boundary_prior: float = 0.3  # flexitokens: initial boundaries per byte
    boundary_loss_weight: float = 1.0
    # the loss keeps boundaries per byte between alpha - lambda * sigma and alpha
    boundary_alpha: float = 1 / 3
    boundary_lambda: float = 3.0
    boundary_sigma: float = 0.023
    segment_offsets: int = 1  # outputs of a segment: one projection for each of the next bytes
    # recurrence
    lora_rank: int = 16  # of the per-loop adapters; 0: none
    act: bool = True  # False: the last loop's state is the output
    act_threshold: float = 0.99
    ponder_weight: float = 0.001  # of the ACT cost; 0: none
    # of the cross-entropy when the core alone predicts the next byte; 0: none
    core_loss_weight: float = 0.0
    # Engram: tables of hashed n-grams, before some core layers and at byte rate before prelude and
    # head
    engram_layers: tuple[int, ...] = (1, 4)
    engram_orders: tuple[int, ...] = (3, 4, 6, 8)
    engram_heads: int = 4  # hashes per order
    engram_rows: int = 29_000  # rows of each hash's table, rounded down to an unused prime
    engram_dim: int = 64  # width of a row
    engram_byte_orders: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8)
    engram_byte_rows: int = 47_300
    engram_byte_dim: int = 128
    # contexts of the match memory; (): none
    engram_match_orders: tuple[int, ...] = (3, 4, 5, 6, 8, 12, 16, 24)
    # further contexts: the bytes since the n-th last end of a word
    engram_match_words: tuple[int, ...] = ()
    # occurrences of each context that vote on the logits before the head; beside tables these
    # replace the rows of matches there
    engram_votes: int = 0
    engram_logits: bool = False  # rows before the head add to the logits directly, too

    def __post_init__(self):
        """Raise ValueError for a value of another type, or sizes that do not fit together."""
        for f in fields(self):
            value, kind = getattr(self, f.name), type(f.default)
            if kind is tuple and type(value) is list:  # from JSON
                setattr(self, f.name, value := tuple(value))
            if type(value) not in ((int, float) if kind is float else (kind,)) or (
                kind is tuple and any(type(number) is not int for number in value)
            ):
                raise ValueError(
                    f"{f.name} must be of type {'tuple of int' if kind is tuple else kind.__name__}"
                )
            low, high = RANGES.get(f.name, (value, value))
            if not low <= value <= high:
                raise ValueError(f"{f.name} must be from {low:,} to {high:,}")
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
                all(0 <= i < (self.n_recurrent_layers or 256) for i in self.engram_layers),
                "engram_layers must lie between 0 and n_recurrent_layers - 1",
            ),
            (
                len({*self.engram_layers}) == len(self.engram_layers),
                "engram_layers must name each layer once",
            ),
            (not self.engram_layers or self.engram_orders, "engram_layers need engram_orders"),
        ):
            if not holds:
                raise ValueError(rule)
        for name in (
            "engram_orders",
            "engram_byte_orders",
            "engram_match_orders",
            "engram_match_words",
        ):
            orders = getattr(self, name)
            unit, most = ("words", WORD_BYTES // 2) if name.endswith("words") else ("bytes", 32)
            if list(orders) != sorted(set(orders)) or not all(
                1 <= order <= most for order in orders
            ):
                raise ValueError(f"{name} must be ascending numbers of {unit} from 1 to {most}")
        for name, tables in (("engram", self.engram_heads), ("engram_byte", 1)):
            orders, rows = getattr(self, f"{name}_orders"), getattr(self, f"{name}_rows")
            if len(primes_below(rows, len(orders) * tables)) < len(orders) * tables:
                raise ValueError(
                    f"{name}_rows must be larger: {len(orders) * tables} tables need primes "
                    f"below it"
                )

    @property
    def bytes_per_segment(self) -> float:
        """Estimate bytes per segment: 1 / boundary_rate, the middle of the boundary loss's band, or
        of words the value for English prose (about 9 for Python, 3 for Chinese)."""
        least = self.boundary_alpha - self.boundary_lambda * self.boundary_sigma
        return {
            "learned": 1 / self.boundary_rate,
            "flexitokens": 2 / max(1e-6, self.boundary_alpha + max(0, least)),
            "words": 5.5,
        }[self.boundaries]

    @property
    def longest_order(self) -> int:
        """Return the number of past bytes that any memory reads."""
        word = WORD_BYTES if self.engram_match_words else 2
        return max(
            2, word, *self.engram_orders, *self.engram_byte_orders, *self.engram_match_orders
        )

    @property
    def match_contexts(self) -> int:
        """Count the contexts of the match memory."""
        return len(self.engram_match_orders) + len(self.engram_match_words)

    @property
    def matches_before_head(self) -> int:
        """Count the contexts whose matches have rows before the head."""
        return 0 if self.engram_votes and self.engram_byte_orders else self.match_contexts

    @property
    def has_experts(self) -> bool:
        """Return whether any layer has routed experts."""
        return self.n_recurrent_layers > 0 and self.n_routed_experts > 0

    @property
    def scores_core(self) -> bool:
        """Return whether training has the loss of the core's own prediction."""
        return self.n_recurrent_layers > 0 and self.core_loss_weight > 0

    @property
    def learns_boundaries(self) -> bool:
        """Return whether a SurprisePredictor decides where segments end."""
        return self.n_recurrent_layers > 0 and self.boundaries == "learned"

    def changed(self, text: str) -> "SpiderConfig":
        """Return a config with the changes of --set, NAME=VALUE,...; raise ValueError for a bad
        name or value."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        for setting in text.split(",") if text else ():
            name, _, value = setting.partition("=")
            if name not in values or name == "n_loops":
                raise ValueError(
                    f"{name!r} is not a field of SpiderConfig (spider/config.py) that --set changes"
                )
            kind = type(values[name])
            try:
                if kind is bool:
                    values[name] = {"true": True, "false": False}[value.lower()]
                elif kind is tuple:
                    values[name] = tuple(int(number) for number in value.split("+") if number)
                else:
                    values[name] = kind(value)
            except (ValueError, KeyError):
                wanted = {bool: "true or false", tuple: "whole numbers joined by +"}.get(
                    kind, kind.__name__
                )
                raise ValueError(f"{name} takes {wanted}, not {value!r}") from None
        return SpiderConfig(**values)

    @classmethod
    def from_saved(cls, saved: dict) -> "SpiderConfig":
        """Return the config of a checkpoint or an export, also of earlier versions. Raise
        ValueError or TypeError for fields that this version does not have."""
        saved = dict(saved)
        if (
            saved.get("boundaries") == "learned"
            and "boundary_prior" in saved
            and "boundary_rate" not in saved
        ):
            saved["boundaries"] = "flexitokens"  # their name before boundary_rate
        if "places" in saved:
            saved["segment_offsets"] = saved.pop("places")
        if not saved.pop("lti", True):
            raise ValueError("lti=False, an ablation of an earlier version")
        return cls(**saved)

    @classmethod
    def preset(cls, name: str) -> "SpiderConfig":
        """Return `tiny` (69M parameters) or `small` (139M) for CPUs, `1b` (997M), `base` (569M:
        about the compute of `1b`, without loops) or `original` (996M: the model that this project
        began from) for GPUs; raise ValueError for other names."""
        if name not in PRESETS:
            raise ValueError(f"preset: {name!r} is not one of {', '.join(PRESETS)}")
        return cls(**PRESETS[name])


# Of every number. Within the upper bounds no product of sizes overflows, and no model takes minutes
# to construct.
WEIGHT = (0, 1_000_000)  # of a term of the loss
RANGES = {
    "vocab_size": (VOCAB_SIZE, 65_536),
    "hidden_size": (1, 65_536),
    "n_prelude_layers": (0, 256),
    "n_recurrent_layers": (0, 256),
    "n_coda_layers": (0, 256),
    "n_loops": (1, MAX_LOOPS),
    "n_heads": (1, 1024),
    "q_lora_rank": (1, 65_536),
    "kv_lora_rank": (1, 65_536),
    "qk_nope_head_dim": (1, 1024),
    "qk_rope_head_dim": (1, 1024),
    "v_head_dim": (1, 1024),
    "rope_theta": (1, 10**12),
    "byte_window": (0, 1 << 24),
    "intermediate_size": (1, 1 << 18),
    "n_routed_experts": (0, 4096),
    "n_shared_experts": (0, 256),
    "n_experts_per_tok": (1, 256),
    "moe_intermediate_size": (1, 1 << 18),
    "expert_bias_rate": (0, 1),
    "aux_loss_weight": WEIGHT,
    "z_loss_weight": WEIGHT,
    "boundary_rate": (0, 1),
    "boundary_prior": (0, 1),
    "boundary_loss_weight": WEIGHT,
    "boundary_alpha": (0, 1),
    "boundary_lambda": (0, 1_000_000),
    "boundary_sigma": (0, 1),
    "segment_offsets": (1, 256),
    "lora_rank": (0, 4096),
    "act_threshold": (0, 1),
    "ponder_weight": WEIGHT,
    "core_loss_weight": WEIGHT,
    "engram_heads": (1, 16),
    "engram_rows": (1, 1 << 24),
    "engram_dim": (1, 4096),
    "engram_byte_rows": (1, 1 << 24),
    "engram_byte_dim": (1, 4096),
    "engram_votes": (0, 64),
}


@cache
def primes_below(limit: int, count: int) -> tuple[int, ...]:
    """Return the `count` largest primes up to `limit`, descending, or all if there are fewer."""
    found = []
    for n in range(limit, 1, -1):
        if len(found) == count:
            break
        if n == 2 or n % 2 and all(n % d for d in range(3, math.isqrt(n) + 1, 2)):
            found.append(n)
    return tuple(found)


# What lowers the loss, or takes fewer FLOPs for the same, at almost no cost in parameters; and
# segment offsets with the core's own loss, which cost a matrix per offset
# (docs/results/learning.md).
EARNED = dict(
    boundaries="learned",
    engram_match_orders=(1, 2, 3, 4, 5, 6, 8, 12, 16, 24),
    engram_match_words=(1, 2),
    engram_votes=4,
    engram_logits=True,
)
WITH_OFFSETS = EARNED | dict(segment_offsets=8, core_loss_weight=0.2)
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
PRESETS = {
    "1b": EARNED,
    "base": WITH_OFFSETS
    | dict(
        n_prelude_layers=4, n_recurrent_layers=1, n_coda_layers=4, n_loops=1, engram_layers=(0,)
    ),
    "original": {},
    "small": TINY
    | dict(
        hidden_size=256,
        n_prelude_layers=2,
        n_coda_layers=2,
        n_heads=4,
        q_lora_rank=128,
        intermediate_size=512,
        n_routed_experts=0,
        moe_intermediate_size=384,
        engram_byte_rows=262_144,
    ),
    "tiny": TINY,
}

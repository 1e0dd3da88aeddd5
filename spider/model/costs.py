"""Count parameters and FLOPs of a model, from its config and the table of parameters (spider.model.parameters).

This counts parameters by name, not modules by class, since FP8 conversion replaces Linears.
"""

from torch import nn

from spider.model.parameters import ENGRAM_TABLES, Read, kinds_of


def parameter_table(model: nn.Module) -> dict[str, tuple[int, float]]:
    """Return for each component (parameters, active parameters per byte): core layers count once, experts top-k."""
    table = {}
    for name, kind in kinds_of(model).items():
        size, share = model.get_parameter(name).numel(), 1.0
        if kind.read is Read.CHOSEN:
            share = model.config.n_experts_per_tok / model.config.n_routed_experts
        elif kind.component == ENGRAM_TABLES:
            share = 0.0                   # only a few rows are read
        total, active = table.get(kind.component, (0, 0.0))
        table[kind.component] = (total + size, active + size * share)
    return table


def products_per_byte(model: nn.Module, bytes_per_segment: float, n_loops: int) -> float:
    """Count the multiply-adds per byte of the forward pass, as weights times their uses."""
    c, rate, products = model.config, 1 / bytes_per_segment, 0.0
    for name, kind in kinds_of(model).items():
        p = model.get_parameter(name)
        if p.ndim < 2 or kind.read is Read.LOOKUP:
            continue
        size = p.numel()
        if kind.read is Read.CHOSEN:
            size *= c.n_experts_per_tok / c.n_routed_experts
        if kind.read is Read.ONE_LOOP:
            size /= c.n_loops
        if kind.read is not Read.BYTE:
            size *= rate * (1 if kind.read is Read.SEGMENT else n_loops)
        products += size
    return products


def flops_per_byte(model: nn.Module, bytes_per_segment: float, n_loops: int, seq_len: int) -> float:
    """Count training FLOPs (forward and backward, no recomputation) per byte, causal attention included."""
    c, rate = model.config, 1 / bytes_per_segment
    products = products_per_byte(model, bytes_per_segment, n_loops) + c.scores_core * model.lm_head.weight.numel()
    window = min(c.byte_window or seq_len, seq_len)
    seen = window - window * window / (2 * seq_len)                                          # bytes, on average
    attention = 2 * c.n_heads * c.v_head_dim * (
        seen * (c.n_prelude_layers + c.n_coda_layers) + c.n_recurrent_layers * n_loops * rate * rate * seq_len / 2)
    return 6 * products + 3 * 2 * attention

"""Spider: a byte-level Recurrent-Depth Transformer.

    bytes -> embed_tokens -> prelude (byte rate)
          -> segments -> recurrent core (segment rate, looped)
          -> unpool + residual -> coda (byte rate) -> norm -> lm_head

Features and their sources:
    MLA, latent attention with a decoupled rotary key                  DeepSeek-V2, arXiv 2405.04434
    mixture of experts, balanced by a bias, no capacity limit          DeepSeek-V3, arXiv 2412.19437
    mean pooling of learned segments                                   FlexiTokens, arXiv 2507.12720
    ... by a published gradient                                             Nawrot, arXiv 2211.09761
    segments that end where the next byte is hard to predict         this project, see boundaries.py
    segments that end with a word                                        SpaceByte, arXiv 2404.14408
    recurrent depth                                                        Huginn, arXiv 2502.05171
    ... with a stable linear injection (LTI)                               Parcae, arXiv 2604.12946
    adaptive computation time (ACT)                                        Graves, arXiv 1603.08983
    Engram, a memory of hashed n-grams, at segment rate                            arXiv 2601.07372
    ... and at byte rate                                                      BLT, arXiv 2412.09871
    match memory: the byte after a context's last occurrence         PAQ's match model, Mahoney 2005

Everything runs on packed rows, [rows, hidden_size]; `cu_seqlens` marks where documents start.
Sequences are not padded, memory grows with the number of bytes, and documents do not see each
other. Shapes in comments: B sequences of T bytes, M = B * T bytes, N segments, D hidden size, H
heads, E experts, k experts per token, L core layers. Parameters are fp32 (or another dtype, if
converted); products run in `Spider.compute_dtype`; sums over rows, logits and losses are at least
fp32 (`wide_dtype`).
"""

import logging
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from spider.attention import ALL_ROWS, MLA, ActiveRows, Cache
from spider.boundaries import Observed, SurprisePredictor, boundary_loss, flexitokens_boundaries
from spider.config import BACKENDS, SpiderConfig
from spider.decode import DecodingMixin, check_ids
from spider.layers import (
    Linear,
    SwiGLU,
    WideLinear,
    cast_weights_once,
    rms_norm,
    wide,
)
from spider.memory import (
    ByteEngram,
    EngramTable,
    Matches,
    MatchMemory,
    OutputEngram,
    Recalled,
    SegmentEngram,
    shifted_bytes,
    word_ends,
)
from spider.noise import byte_noise, dropped
from spider.packing import Packing, document_cu_seqlens, mark_rows_dynamic, round_up, row_step
from spider.segments import last_byte_of, pool_segments, segment_offsets, unpool_segments
from tile_moe import MoE, Routing, balance, resolve_backend
from tokenizer import EOS_ID, PAD_ID

# --------------------------------------------------------------------------------------------------
# The layer at byte rate


class Block(nn.Module):
    """A dense layer of prelude or coda, [M, D] -> [M, D]."""

    compiled: Callable | None = None  # of `in_one_graph`, see Spider.compile_layers

    def __init__(self, config: SpiderConfig, attention_class: type[nn.Module] = MLA):
        super().__init__()
        self.attention = attention_class(config)
        self.ffn = SwiGLU(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor, packing: Packing, cache: Cache | None = None) -> Tensor:
        if self.compiled is not None and torch.is_grad_enabled():
            return self.compiled(self, x, packing)
        return self.run(x, packing, cache)

    def run(self, x: Tensor, packing: Packing, cache: Cache | None = None) -> Tensor:
        x = x + self.attention(rms_norm(x), packing, ALL_ROWS, cache=cache)[0]
        return x + self.ffn(rms_norm(x))

    def in_one_graph(self, x: Tensor, packing: Packing) -> Tensor:
        return self.run(x, packing)


# --------------------------------------------------------------------------------------------------
# The recurrent core

# of a core layer: latents [N, C]; what Engram's convolution reads
LayerState = tuple[Tensor | None, Tensor | None]
LayerCaches = tuple[Cache | None, Cache | None]  # their caches of earlier decoding steps


@dataclass(frozen=True)
class CorePass:
    """The inputs of a forward pass through the core, other than the pooled segments z [N, D]."""

    packing: Packing  # of the segments
    last_bytes: Tensor  # int64 [K, N], the last bytes of each segment, see memory.shifted_bytes
    share: Tensor  # [N], 1 / segments, 0 for padding rows
    n_loops: int
    recompute: bool = False  # activation checkpointing of every visit of a layer
    warmup: float = 1.0  # factor on halting probabilities
    dropout: float = 0.0  # rate at both ends of the core
    noise: Tensor | None = None  # int64 [N], for dropout; None: no dropout
    latents: Cache | None = None  # in decoding: attention latents of earlier segments
    # in decoding: inputs of the Engram convolutions from earlier segments
    convolved: Cache | None = None


class RecurrentBlock(nn.Module):
    """A layer of the core at segment rate: Engram in some layers, attention, experts."""

    compiled: Callable | None = None  # of `in_one_graph`, see Spider.compile_layers

    def __init__(
        self, config: SpiderConfig, has_engram: bool, attention_class: type[nn.Module] = MLA
    ):
        super().__init__()
        self.engram = SegmentEngram(config) if has_engram else None
        self.attention = attention_class(config)
        self.moe = MoE(config)

    def forward(
        self,
        x: Tensor,
        packing: Packing,
        recalled: Recalled | None,
        active: ActiveRows,
        state: LayerState,
        caches: LayerCaches,
        decided: Routing | None = None,
    ) -> tuple[Tensor, Routing, LayerState]:
        """Compute one visit of the active rows x [n, D]. `state`: of the loop before; `decided`:
        see MoE."""
        latent, read = state
        if self.engram is not None:
            x, read = self.engram(x, recalled, active, read, caches[1])
        y, latent = self.attention(rms_norm(x), packing, active, latent, caches[0])
        x = x + y
        y, routing = self.moe(rms_norm(x), decided)
        return x + y, routing, (latent, read)

    def in_one_graph(
        self,
        x: Tensor,
        packing: Packing,
        recalled: Recalled | None,
        active: ActiveRows,
        state: LayerState,
        recompute: bool,
    ) -> tuple[Tensor | None, ...]:
        """Run `forward` as a single graph for torch.compile, with a flat tuple of results.
        Recomputation is then part of the backward graph, and reuses the routing."""

        def run(x):
            y, routing, (latent, read) = self(x, packing, recalled, active, state, (None, None))
            return y, latent, read, routing.score, routing.topk_idx

        if not recompute:
            return run(x)
        keep_routing = partial(create_selective_checkpoint_contexts, [torch.ops.aten.sort.stable])
        return checkpoint(
            run, x, use_reentrant=False, preserve_rng_state=False, context_fn=keep_routing
        )


class CoreStats(NamedTuple):  # FSDP looks for tensors with gradients in tuples, not in dataclasses
    """The statistics of a pass through the core. Losses are means over layer visits or segments."""

    aux_loss: Tensor  # f_e * P_e balance loss
    z_loss: Tensor  # router z-loss
    ponder: Tensor  # ACT's loops + remainder, per segment
    mean_loops: Tensor  # loops until halting, per segment
    load: Tensor  # [L, E] fp32, tokens per expert relative to an even load, summed over loops


class Halting:
    """ACT over the loops of one pass (Graves, arXiv 1603.08983).

    The weight of a loop is p while the running sum is below the threshold. On the loop that reaches
    it, and on the last one, the weight is the remainder to 1, and the segment halts. It is computed
    once more, with weight 0, so that later segments can read its final state instead of the one
    before, and then leaves the core.

    A segment that halts in its first loop has weight 1 there for any p, so there is no gradient to
    continue, nor for later loops. Therefore a warm-up scales p until all loops have learned.
    """

    def __init__(self, share: Tensor, threshold: float, leave: bool, ends: bool):
        """Begin a pass. share [N]: 1 / segments, 0 for padding rows; leave: halted rows leave the
        products; ends: no later segment reads these, so the pass ends once all have halted."""
        self.threshold, self.leave, self.ends, self.active = threshold, leave, ends, ALL_ROWS
        # [n] of active rows. share: once halted 0, for the last visit; remaining: 1 - weights so
        # far, 0 once halted
        self.share, self.remaining = share, torch.ones_like(share)
        self.output: Tensor | None = None  # [N, D]
        self.loops = self.ponder = 0  # means over segments: loops; loops + remainder

    def add(self, h: Tensor, p: Tensor, last: bool) -> Tensor:
        """Add the states after a loop, h [n, D], with halting probabilities p [n]; return the
        states for the next loop, none after the last."""
        stays = self.share > 0  # the others halted in the loop before
        stops = torch.ones_like(stays) if last else 1 - self.remaining + p >= self.threshold
        weight = torch.where(stops, self.remaining, p)
        weighted = weight[:, None].to(h.dtype) * h
        index = self.active.index
        self.output = (
            weighted
            if self.output is None
            else (
                self.output + weighted
                if index is None
                else self.output.index_add(0, index, weighted)
            )
        )
        share = self.share.sum()
        self.loops = self.loops + share
        self.ponder = self.ponder + share + self.share @ torch.where(stops, self.remaining, 0)
        self.share, self.remaining = (
            self.share * ~stops,
            torch.where(stops, 0, self.remaining - weight),
        )
        if last or not self.leave:
            self.active = ActiveRows(mask=stays)
            return h[:0] if last else h
        if self.ends and not self.share.any():
            return h[:0]
        stay = stays.nonzero().squeeze(1)
        if len(stay) < len(h):
            index = stay if index is None else index.index_select(0, stay)
            self.share, self.remaining = (
                self.share.index_select(0, stay),
                self.remaining.index_select(0, stay),
            )
            h = h.index_select(0, stay)
        self.active = ActiveRows(index, halted=self.share == 0)
        return h


class RecurrentCore(nn.Module):
    """The looped layers: h <- y + LoRA_t(y), y = layers(A h + B e + loop_embedding[t]), weighted by
    ACT."""

    compiled: Callable | None = None  # of `in_one_graph`, the injection; see Spider.compile_layers

    def __init__(
        self,
        config: SpiderConfig,
        block_class: type[nn.Module] = RecurrentBlock,
        attention_class: type[nn.Module] = MLA,
    ):
        super().__init__()
        self.config, d, loops = config, config.hidden_size, config.n_loops
        self.layers = nn.ModuleList(
            block_class(config, i in config.engram_layers, attention_class)
            for i in range(config.n_recurrent_layers)
        )
        self.loop_embedding = nn.Parameter(torch.empty(loops, d))
        self.log_A, self.dt, self.B = (nn.Parameter(torch.empty(d)) for _ in range(3))
        if config.lora_rank:
            self.lora_down = nn.Parameter(torch.empty(loops, d, config.lora_rank))
            self.lora_up = nn.Parameter(torch.empty(loops, config.lora_rank, d))
        self.halt_predictor = WideLinear(d, 1, bias=True) if config.act else None
        self.out_proj = Linear(d, d)
        if config.segment_offsets > 1:
            # added to out_proj for each segment offset, [offsets, out, in]
            self.offset_proj = nn.Parameter(torch.empty(config.segment_offsets, d, d))
        # whether halted rows leave the products; None: only on a CPU
        self.halted_leave: bool | None = None

    def decay(self) -> Tensor:
        """Return A [D] = exp(-dt * exp(log_A)), always inside (0, 1) in fp32."""
        rate = F.softplus(wide(self.dt)) * wide(self.log_A).clamp(-15, 15).exp()
        return torch.exp(-rate.clamp(1e-4, 15))

    def inject(self, h: Tensor | None, e: Tensor, loop: int, decay: Tensor) -> Tensor:
        """Return A h + B e + loop_embedding, summed in fp32; h is None before the first loop."""
        embedding = self.loop_embedding[loop]
        if self.compiled is not None and torch.is_grad_enabled():
            mark_rows_dynamic(h, e)
            return self.compiled(self, h, e, embedding, decay)
        return self.in_one_graph(h, e, embedding, decay)

    def in_one_graph(self, h: Tensor | None, e: Tensor, embedding: Tensor, decay: Tensor) -> Tensor:
        """Compute `inject` with the loop's row of loop_embedding [D]."""
        v = torch.addcmul(wide(embedding), wide(self.B), e)
        return (v if h is None else torch.addcmul(v, decay, h)).to(e.dtype)

    def adapt(self, y: Tensor, loop: int) -> Tensor:
        """Apply the loop's adapter to the normed state, so that its output is bounded and cannot
        undo A < 1."""
        if not self.config.lora_rank:
            return y
        return y + rms_norm(y) @ self.lora_down[loop].to(y.dtype) @ self.lora_up[loop].to(y.dtype)

    def halt(self, h: Tensor) -> Tensor:
        """Return halting probabilities [n] of states [n, D]; without ACT they are 0."""
        if self.halt_predictor is None:
            return self.loop_embedding.new_zeros(len(h))
        return self.halt_predictor(rms_norm(h)).sigmoid().squeeze(1)

    def forward(self, z: Tensor, run: CorePass) -> tuple[Tensor, CoreStats | None]:
        """Loop over the pooled segments z [N, D].

        Returns the output of each segment for all segment offsets, [N, offsets * D], and statistics
        (None in decoding)."""
        decoding = run.latents is not None
        leave = (decoding or not z.is_cuda) if self.halted_leave is None else self.halted_leave
        halting = Halting(run.share, self.config.act_threshold, leave, ends=not decoding)
        e, h, decay, visits = (
            dropped(rms_norm(z), run.dropout, run.noise, 1),
            None,
            self.decay(),
            [],
        )
        recalled = [
            layer.engram and layer.engram.recall(run.last_bytes, run.packing.position, z.dtype)
            for layer in self.layers
        ]
        states: list[LayerState] = [(None, None)] * len(self.layers)
        for t in range(run.n_loops):
            loop, active = min(t, self.config.n_loops - 1), halting.active
            y = self.inject(h, active.select(e), loop, decay)
            for i, layer in enumerate(self.layers):
                y, routing, states[i] = visit(
                    layer,
                    y,
                    run.packing,
                    recalled[i],
                    active,
                    states[i],
                    self._caches(run, i, t),
                    run.recompute,
                )
                visits.append((routing.score, routing.topk_idx, halting.share))
            h = self.adapt(y, loop)
            h = halting.add(h, run.warmup * self.halt(h), last=t == run.n_loops - 1)
            if len(h) == 0:
                break
        output = self._read_out(dropped(rms_norm(halting.output), run.dropout, run.noise, 2))
        if decoding:
            return output, None
        aux_loss, z_loss, load = self.balance(visits)
        # halting.loops is 0 without segments
        means = (
            loss / (len(self.layers) * halting.loops.clamp_min(1e-9)) for loss in (aux_loss, z_loss)
        )
        ponder = halting.ponder
        if run.n_loops > 1:  # A has a gradient on every rank, also where all segments halt at once
            ponder = ponder + 0 * decay.sum()
        return output, CoreStats(*means, ponder, halting.loops, load.detach())

    def _caches(self, run: CorePass, layer: int, loop: int) -> LayerCaches:
        """Return the caches of a layer in a loop; None outside decoding."""
        if run.latents is None:
            return None, None
        return run.latents.of(layer, loop), run.convolved.of(
            sum(i < layer for i in self.config.engram_layers), loop
        )

    def _read_out(self, normed: Tensor) -> Tensor:
        """Project states [N, D] to outputs [N, offsets * D], one row per segment offset."""
        output, offsets = self.out_proj(normed), self.config.segment_offsets
        if offsets > 1:
            output = output.repeat(1, offsets) + F.linear(
                normed, self.offset_proj.to(normed.dtype).flatten(0, 1)
            )
        return output

    def balance(self, visits: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
        """Sum the balance losses (see tile_moe.balance) and the load [L, E] of visits (score,
        topk_idx, share). Visits with equally many rows are computed together."""
        layers, zero = len(self.layers), visits[0][2].new_zeros(())
        if not self.config.n_routed_experts:
            return zero, zero, zero.new_zeros(layers, 0)
        sums = []
        for _, group in groupby(visits, key=lambda visited: len(visited[0])):
            sums.append(
                balance(*map(torch.stack, zip(*group, strict=True)), self.layers[0].moe.backend)
            )
        aux_loss, z_loss, load = map(list, zip(*sums, strict=True))
        return sum(aux_loss), sum(z_loss), torch.cat(load).unflatten(0, (-1, layers)).sum(0)


def visit(
    layer: nn.Module,
    x: Tensor,
    packing: Packing,
    recalled,
    active: ActiveRows,
    state: LayerState,
    caches: LayerCaches,
    recompute: bool,
) -> tuple[Tensor, Routing, LayerState]:
    """Run a core layer once, with activation checkpointing if asked. Recomputation reuses the
    routing, since a near-tie that falls the other way would corrupt the gradient."""
    if layer.compiled is not None and torch.is_grad_enabled():
        mark_rows_dynamic(x, active.mask, *(recalled or ()), *state, *vars(packing).values())
        y, latent, read, score, topk_idx = layer.compiled(
            layer, x, packing, recalled, active, state, recompute
        )
        return y, Routing(score, topk_idx, None), (latent, read)
    if not recompute:
        return layer(x, packing, recalled, active, state, caches)
    decided = [None]  # `run` is called twice: the first call adds its routing for the second one

    def run(x):
        y, routing, later = layer(x, packing, recalled, active, state, caches, decided[-1])
        decided.append(Routing(None, routing.topk_idx, routing.rows))
        return y, routing, later

    return checkpoint(run, x, use_reentrant=False, preserve_rng_state=False)


# --------------------------------------------------------------------------------------------------
# Initialization


@torch.no_grad()
def init_weights(model: "Spider"):
    """Initialize every value of a Spider, buffers included:

        embed_tokens               N(0, 1)
        Linear.weight, w_gate, w_up  N(0, 1 / fan_in); biases 0
        o_proj, down_proj, w_down  the same / sqrt(2 * layers); the core's count once per loop
        lm_head, halt_predictor    N(0, 0.02^2); halting's bias -3: at 0 it would stick at one loop
        boundary_predictor         the last bias logit(boundary_prior); gain of learned boundaries 0
        loop_embedding             N(0, 0.02^2)
        log_A, dt, B               such that A = 0.905 and B = 1. (1 - A) / (1 - A^n_loops) would
                                   keep the state at e's size, but then the layers' output drowns e
                                   (docs/results/mechanisms.md)
        lora_down, lora_up         N(0, 1 / fan_in), 0
        core.out_proj, .offset_proj  0: at the start the core adds nothing to the bytes
        null_segment, conv_weight  0
        engram_output.logits, .votes  0, of votes the last Linear
        Engram tables, followed    0; their hash constants from the table's order in the model
        expert_bias                0
        modules of a subclass      their reset_parameters, after all of these

    Raise RuntimeError with the names of uninitialized tensors."""

    def values() -> dict[str, Tensor]:
        named = (*model.named_parameters(), *model.named_buffers())
        return {name: t for name, t in named if t.is_floating_point() and not t.is_meta}

    for tensor in values().values():
        tensor.fill_(math.nan)  # what is never initialized stays NaN
    _init_layers(model)
    model.embed_tokens.normal_()
    model.lm_head.weight.normal_(std=0.02)
    if model.core is not None:
        model.null_segment.zero_()
        _init_core(model.core)
    if model.config.learns_boundaries:
        model.boundary_predictor.init_weights()
    elif model.boundary_predictor is not None:
        prior = model.config.boundary_prior
        model.boundary_predictor[2].bias.fill_(math.log(prior / (1 - prior)))
    for name, tensor in values().items():
        path = name.split(".")[:-1]
        holders = [model.get_submodule(".".join(path[:depth])) for depth in range(len(path), 0, -1)]
        holder = next((module for module in holders if hasattr(module, "reset_parameters")), None)
        if holder is not None and tensor.isnan().any():
            holder.reset_parameters()
    if names := [name for name, tensor in values().items() if tensor.isnan().any()]:
        raise RuntimeError(
            f"uninitialized: {', '.join(names)}: add a reset_parameters() to the module; values "
            f"from "
            f"the constructor are lost when a model is built on the meta device"
        )


def _init_layers(model: "Spider"):
    """Initialize the layers, in the order of modules; output projections of residual branches
    shrink with depth."""
    c = model.config
    depth = c.n_prelude_layers + c.n_recurrent_layers * c.n_loops + c.n_coda_layers
    tables = 0
    # Drawn by their own init_weights later, so that all other weights start as they do with words.
    excluded = {*model.boundary_predictor.modules()} if c.learns_boundaries else {}
    for module in model.modules():
        if isinstance(module, Linear) and module not in excluded:
            module.weight.normal_(std=module.in_features**-0.5)
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, MoE):
            module.expert_bias.zero_()
            if c.n_routed_experts:
                module.w_gate.normal_(std=c.hidden_size**-0.5)
                module.w_up.normal_(std=c.hidden_size**-0.5)
                module.w_down.normal_(std=(2 * depth * c.moe_intermediate_size) ** -0.5)
        elif isinstance(module, EngramTable):
            module.weight.zero_()
            module.forget()
            module.init_hash(tables)
            tables += 1
        elif isinstance(module, SegmentEngram):
            module.conv_weight.zero_()
        elif isinstance(module, MatchMemory):
            module.init_hash(0)
        elif isinstance(module, ByteEngram) and module.followed is not None:
            module.followed.zero_()
    for module in model.modules():
        if isinstance(module, MLA):
            module.o_proj.weight.mul_((2 * depth) ** -0.5)
        elif isinstance(module, SwiGLU):
            module.down_proj.weight.mul_((2 * depth) ** -0.5)
        elif isinstance(module, OutputEngram):
            for linear in (module.logits, module.votes and module.votes[2]):
                if linear is not None:
                    linear.weight.zero_()


def _init_core(core: RecurrentCore):
    c, rate = core.config, 0.1
    core.loop_embedding.normal_(std=0.02)
    core.out_proj.weight.zero_()
    if c.segment_offsets > 1:
        core.offset_proj.zero_()
    core.log_A.zero_()
    core.dt.fill_(math.log(math.expm1(rate)))
    core.B.fill_(1)
    if c.lora_rank:
        core.lora_down.normal_(std=c.hidden_size**-0.5)
        core.lora_up.zero_()
    if c.act:
        core.halt_predictor.weight.normal_(std=0.02)
        core.halt_predictor.bias.fill_(-3)


# --------------------------------------------------------------------------------------------------
# The model


@dataclass
class SpiderOutput:
    """The result of a forward pass; tensors are scalars unless a shape is given."""

    logits: Tensor  # [B, T, vocab_size], fp32
    loss: Tensor | None  # to minimize; None without labels
    nats_per_byte: Tensor | None  # cross-entropy alone, without labels of -100
    segments: Tensor  # number of segments in all sequences
    mean_loops: Tensor
    tokens_per_expert: Tensor  # [L, E] fp32, over all loops
    boundary_counts: Tensor  # of learned boundaries, see SurprisePredictor; else empty
    # the weighted terms of the loss beside nats_per_byte, detached
    loss_terms: dict[str, Tensor] | None = None
    # the part of the loss that is a mean over bytes: nats_per_byte, BYTE_TERMS
    by_byte: Tensor | None = None
    BYTE_TERMS: ClassVar = ("core_loss", "surprise_loss")


def add_losses(
    model: "Spider",
    out: SpiderOutput,
    labels: Tensor,
    stats: CoreStats,
    cut_loss: Tensor,
    unpooled: Tensor | None,
    observed: Observed | None,
) -> SpiderOutput:
    """Fill in the loss and its terms; unpooled [M, D]: the core's output, unpooled to bytes."""
    c, targets, logits = model.config, labels.reshape(-1), out.logits.flatten(0, 1)
    counted = (targets != -100).sum().clamp_min(1)
    losses = F.cross_entropy(
        logits, targets, ignore_index=-100, reduction="sum" if observed is None else "none"
    )
    nats = losses if observed is None else losses.sum()
    out.nats_per_byte = nats / counted
    core_loss = cut_loss.new_zeros(())
    if model.training and c.scores_core:
        # initially unpooled is 0: the gradient's norm exceeds 100, and is clipped
        of_core = model.lm_head(rms_norm(unpooled)).to(logits.dtype)
        core_loss = F.cross_entropy(of_core, targets, ignore_index=-100, reduction="sum") / counted
    terms = dict(
        boundary_loss=c.boundary_loss_weight * cut_loss,
        aux_loss=c.aux_loss_weight * stats.aux_loss,
        z_loss=c.z_loss_weight * stats.z_loss,
        ponder_loss=c.ponder_weight * model.halting_warmup * stats.ponder,
        core_loss=c.core_loss_weight * core_loss,
    )
    if observed is not None:
        terms["surprise_loss"] = (
            model.boundary_predictor.surprise_loss(observed, nats, losses.detach(), targets != -100)
            / counted
        )
    if model.training:
        terms |= model.extra_losses(out, labels)
    out.loss = sum(terms.values(), out.nats_per_byte)
    out.by_byte = sum((terms[name] for name in out.BYTE_TERMS if name in terms), out.nats_per_byte)
    out.loss_terms = {name: term.detach() for name, term in terms.items()}
    return out


class Spider(DecodingMixin, nn.Module):
    """The model; see the module's docstring for its features.

    To try an idea (docs/guide/trying-an-idea.md), a subclass replaces classes of layers or
    overrides a method: block_class(config, attention_class), core_block_class(config, has_engram,
    attention_class), attention_class(config), and `extra_losses`."""

    attention_class: type[nn.Module] = MLA
    block_class: type[nn.Module] = Block
    core_block_class: type[nn.Module] = RecurrentBlock

    def __init__(self, config: SpiderConfig):
        super().__init__()
        self.config, c = config, config
        # restored below: a subclass's modules may draw random values here
        random_state = torch.get_rng_state()
        self.compute_dtype = torch.float32  # dtype of products and activations, not of parameters
        self.recompute = "nothing"  # one of RECOMPUTE: layers with activation checkpointing
        self.compiled = False  # see compile_layers
        self.backend = "grouped"  # of the experts, see set_backend
        self.casts_early = True  # False under FSDP, which casts in each group's forward
        self.halting_warmup = 1.0  # in training, factor on halting probabilities and ponder_weight
        self.dropout = 0.0  # in training, at both ends of the core; a fifth of it for bytes
        self.embed_tokens = nn.Parameter(torch.empty(c.vocab_size, c.hidden_size))
        byte_memory = len(c.engram_byte_orders) + c.match_contexts > 0
        self.engram_match = None
        if c.match_contexts:
            self.engram_match = MatchMemory(
                c.engram_match_orders, c.engram_match_words, max(2, c.engram_votes)
            )
        self.engram_input = ByteEngram(c, c.match_contexts) if byte_memory else None
        self.prelude = nn.ModuleList(
            self.block_class(c, self.attention_class) for _ in range(c.n_prelude_layers)
        )
        self.core = (
            RecurrentCore(c, self.core_block_class, self.attention_class)
            if c.n_recurrent_layers
            else None
        )
        if self.core is not None:
            self.null_segment = nn.Parameter(torch.empty(c.hidden_size))
        self.boundary_predictor = None
        if self.core is not None and c.boundaries == "flexitokens":
            width = c.hidden_size // 4
            self.boundary_predictor = nn.Sequential(
                WideLinear(c.hidden_size, width, bias=True), nn.GELU(), Linear(width, 1, bias=True)
            )
        if c.learns_boundaries:
            self.boundary_predictor = SurprisePredictor(
                c.hidden_size, c.vocab_size, c.boundary_rate
            )
        self.coda = nn.ModuleList(
            self.block_class(c, self.attention_class) for _ in range(c.n_coda_layers)
        )
        self.engram_output = OutputEngram(c) if byte_memory else None
        self.lm_head = Linear(c.hidden_size, c.vocab_size)
        torch.set_rng_state(random_state)
        if not self.embed_tokens.is_meta:
            # where no tensor has values, and some operations import torch._dynamo
            self.init_weights()

    @property
    def wide_dtype(self) -> torch.dtype:
        """The dtype of sums, logits and losses: at least fp32."""
        return torch.promote_types(
            torch.promote_types(self.embed_tokens.dtype, self.compute_dtype), torch.float32
        )

    def _apply(self, fn, recurse: bool = True):
        """Apply `half()`, `to(dtype)` and the like to compute_dtype, too."""
        self.compute_dtype = fn(torch.empty(0, dtype=self.compute_dtype)).dtype
        return super()._apply(fn, recurse)

    def init_weights(self):
        """Initialize all parameters and buffers, see the function init_weights."""
        init_weights(self)

    # ----------------------------------------------------------------------------------------------
    # Segments

    def predict_boundaries(self, x: Tensor) -> Tensor | None:
        """Return what the boundary predictor makes of x [M, D]: logits [M, 1] of flexitokens,
        surprise and gain [M, 2] of learned boundaries, None for words."""
        return None if self.boundary_predictor is None else self.boundary_predictor(rms_norm(x))

    def boundaries(
        self,
        predicted: Tensor | None,
        input_ids: Tensor,
        shifted: Tensor,
        packing: Packing,
        noise: Tensor | None,
        summed: Tensor | None = None,
    ) -> Tensor:
        """Decide where segments end: b [M] fp32, 0 or 1. EOS always ends a segment, PAD never.
        predicted: see predict_boundaries; noise [M]: of training; summed [documents]: see
        boundaries.flexitokens_boundaries."""
        ids = input_ids.reshape(-1)
        if self.config.boundaries == "learned":
            b = self.boundary_predictor.boundaries(predicted, ids, packing.position, noise).to(
                self.wide_dtype
            )
        elif self.config.boundaries == "flexitokens":
            p = predicted.squeeze(1).sigmoid()  # [M]
            b = flexitokens_boundaries(p, packing, self.wide_dtype, noise, summed)
        else:
            b = word_ends(shifted[:2]).squeeze(0).to(self.wide_dtype)
        return torch.where(ids == EOS_ID, 1, torch.where(ids == PAD_ID, 0, b))

    def run_core(
        self,
        z: Tensor,
        b: Tensor,
        cu_seqlens: Tensor,
        shifted: Tensor,
        longest: int,
        n_loops: int,
        noise: Tensor | None,
    ) -> tuple[Tensor, CoreStats]:
        """Run the core on pooled segments z [N, D] that end where b [M] is 1. longest: upper bound
        of a document's bytes; noise [M]: for dropout in training.

        Rows are padded to a few sizes (see row_step); the padding is a separate document. The core
        runs even without segments, because all ranks must run the same collectives."""
        segments = len(z)
        step = row_step(len(b), longest)
        rows = round_up(max(1, segments), step)
        last_byte = last_byte_of(b, rows)
        share = F.pad(
            z.new_full((segments,), 1 / max(1, segments), dtype=self.wide_dtype),
            (0, rows - segments),
        )
        cu_seqlens = F.pad(cu_seqlens, (0, int(rows > segments)), value=rows)
        bound = max(longest, step)  # of segments in a document, and of rows in the padding
        packing = Packing.build(cu_seqlens, rows, bound, self.config, self.compute_dtype)
        z, stats = self.core(
            F.pad(z, (0, 0, 0, rows - segments)),
            CorePass(
                packing,
                shifted.index_select(1, last_byte),
                share,
                n_loops,
                recompute=self.recompute != "nothing" and torch.is_grad_enabled(),
                warmup=self.halting_warmup if self.training else 1.0,
                dropout=self.dropout,
                noise=noise if noise is None else noise.index_select(0, last_byte),
            ),
        )
        return z[:segments], stats

    def decode_core(
        self,
        z: Tensor,
        packing: Packing,
        last_bytes: Tensor,
        share: Tensor,
        n_loops: int,
        latents: Cache,
        convolved: Cache,
    ) -> Tensor:
        """Run the core on the segments z [N, D] that a decoding step has finished, after those in
        the caches; see CorePass."""
        core_pass = CorePass(
            packing, last_bytes, share, n_loops, latents=latents, convolved=convolved
        )
        return self.core(z, core_pass)[0]

    def null_rows(self) -> Tensor:
        """Return the unpooled output for bytes before a document's first boundary, at all offsets:
        [offsets * D]."""
        return self.null_segment.repeat(self.config.segment_offsets)

    def unpool(
        self,
        z: Tensor,
        null: Tensor,
        b: Tensor,
        packing: Packing,
        segment_cu_seqlens: Tensor,
        open_bytes: Tensor | int = 0,
        back: int = 0,
    ) -> Tensor:
        """Unpool the core's output to bytes: z [N, offsets * D], null [offsets * D] or one per
        document, b [M] -> [M, D]; open_bytes, back: see segment_offsets."""
        offsets, cu_seqlens, offset = self.config.segment_offsets, packing.cu_seqlens, None
        if offsets > 1:
            z, null = z.unflatten(-1, (offsets, -1)), null.unflatten(-1, (offsets, -1))
            offset = segment_offsets(
                b, cu_seqlens.index_select(0, packing.document), offsets, open_bytes, back
            )
        return unpool_segments(z, null, b, cu_seqlens, segment_cu_seqlens, offset, back)

    # ----------------------------------------------------------------------------------------------
    # Forward

    def before_core(
        self,
        ids: Tensor,
        packing: Packing,
        shifted: Tensor,
        matches: Matches | None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Apply embedding, byte memory and prelude: ids [M] -> [M, D]."""
        x = F.embedding(ids, self.embed_tokens).to(self.compute_dtype)
        if self.engram_input is not None:
            x = x + self.engram_input(x, shifted, matches)
        for i, block in enumerate(self.prelude):
            x = self.run(block, x, packing, cache and cache.of(i))
        return x

    def run(self, block: Block, x: Tensor, packing: Packing, cache: Cache | None) -> Tensor:
        """Run a byte layer, with activation checkpointing if `recompute` is "all"."""
        if self.recompute == "all" and torch.is_grad_enabled():
            return checkpoint(block, x, packing, use_reentrant=False, preserve_rng_state=False)
        return block(x, packing, cache)

    def after_core(
        self,
        x: Tensor,
        packing: Packing,
        shifted: Tensor,
        matches: Matches | None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Apply coda, byte memory and head: [M, D] -> logits [M, vocab_size]."""
        direct = None
        for i, block in enumerate(self.coda, len(self.prelude)):
            x = self.run(block, x, packing, cache and cache.of(i))
        if self.engram_output is not None:
            memory, direct = self.engram_output(x, shifted, matches)
            x = x + memory
        logits = self.lm_head(rms_norm(x)).to(self.wide_dtype)
        return logits if direct is None else logits + direct

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        n_loops: int | None = None,
        noise_seed: int | Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        longest: int | None = None,
        dropout: float = 0.0,
        halting_warmup: float = 1.0,
    ) -> SpiderOutput:
        """Compute logits and, given labels, the loss. input_ids [B, T] int64; labels [B, T],
        already shifted, -100 is ignored; n_loops defaults to the config's.

        In training mode the noise of row i (for segments and dropout) is a function of noise_seed +
        i; without a seed, torch's default generator draws it. Documents end at EOS and begin at
        BOS; every row begins one. cu_seqlens: document_cu_seqlens(input_ids), if computed on the
        host beforehand, which saves a wait for the device; longest: its longest_bound, by default
        T.

        Raise ValueError for bad shapes or dtypes.
        """
        self.dropout, self.halting_warmup = dropout, halting_warmup
        check_ids("input_ids", input_ids)
        c, (sequences, length) = self.config, input_ids.shape
        if labels is not None:
            check_ids("labels", labels, sequences, length)
        n_loops = self.loops_of(n_loops)
        ids = input_ids.reshape(-1)
        cu_seqlens = document_cu_seqlens(input_ids) if cu_seqlens is None else cu_seqlens
        longest = length if longest is None else longest
        packing = Packing.build(cu_seqlens, len(ids), longest, c, self.compute_dtype, c.byte_window)
        if self.compiled:  # else each number of documents would need another graph, and each bound
            mark_rows_dynamic(cu_seqlens, packing.extent)
        shifted = shifted_bytes(ids, packing.position, c.longest_order)
        matches = self.engram_match and self.engram_match(ids, shifted, packing.document)
        noise, of_bytes = None, self.dropout / 5
        if self.training and (self.dropout or self.boundary_predictor is not None):
            noise = byte_noise(noise_seed, sequences, length, ids.device).flatten()
        x = dropped(self.before_core(ids, packing, shifted, matches), of_bytes, noise, 0)  # [M, D]
        zero = self.embed_tokens.new_zeros((), dtype=self.wide_dtype)
        segments, cut_loss, unpooled, observed = 0, zero, None, None
        stats = CoreStats(zero, zero, zero, zero, zero.new_zeros(0, c.n_routed_experts))
        if self.core is not None:
            predicted = self.predict_boundaries(x)
            b = self.boundaries(predicted, input_ids, shifted, packing, noise)
            cut_loss = boundary_loss(b, input_ids, c)
            z, segment_cu_seqlens = pool_segments(x, b, packing.cu_seqlens)
            segments = len(z)
            z, stats = self.run_core(z, b, segment_cu_seqlens, shifted, longest, n_loops, noise)
            unpooled = self.unpool(z, self.null_rows(), b, packing, segment_cu_seqlens)
            if self.training and c.learns_boundaries:
                earlier = self.unpool(
                    z.detach(), self.null_rows().detach(), b, packing, segment_cu_seqlens, back=1
                )
                unpooled, observed = self.boundary_predictor.observe(
                    predicted, ids, b, packing, unpooled, earlier
                )
            x = x + unpooled
        # [M, vocab_size]
        logits = self.after_core(dropped(x, of_bytes, noise, 3), packing, shifted, matches)
        # From loads relative to an even one, which is segments * k / E tokens, back to counts
        tokens = (
            stats.load * (segments * c.n_experts_per_tok / max(1, c.n_routed_experts))
        ).round()
        out = SpiderOutput(
            logits.view(sequences, length, -1),
            None,
            None,
            zero + segments,
            stats.mean_loops.detach(),
            tokens,
            zero.new_zeros(0) if observed is None else observed.counts,
        )
        return (
            out
            if labels is None
            else add_losses(self, out, labels, stats, cut_loss, unpooled, observed)
        )

    def extra_losses(self, out: SpiderOutput, labels: Tensor) -> dict[str, Tensor]:
        """Return further loss terms for training, scalars by name: a hook for subclasses. train.py
        averages them over micro-steps and ranks, and logs them to metrics.jsonl."""
        return {}

    # ----------------------------------------------------------------------------------------------
    # Training

    def cast_weights_once(self):
        """Cast weights once for all passes inside, see layers.cast_weights_once."""
        return cast_weights_once(self)

    def zero_grad(self, set_to_none: bool = True):
        """Drop all gradients, including those gathered by Engram tables."""
        super().zero_grad(set_to_none)
        for module in self.modules():
            if isinstance(module, EngramTable):
                module.forget()

    def compile_layers(self, **settings) -> str | None:
        """Compile each kind of layer to one graph by torch.compile, the core's injection and what
        its Engrams compute once for all loops, for passes with gradients; evaluation and decoding,
        with other shapes, stay eager. `settings` go to torch.compile; the numbers of segments and
        documents are dynamic sizes. The compiled function is `in_one_graph` of the module's class,
        not the module, which has FSDP's hooks.

        Returns why the core's layers are not compiled, or None. They are left out if the graph
        would break."""
        obstacle = None
        if self.compute_dtype != torch.bfloat16:
            obstacle = "torch.compile supports grouped products only in bf16"
        elif self.backend == "tile":
            obstacle = "torch.compile does not support TileKernels; use --moe_backend grouped"
        self.compiled = True
        # Products of fp32 are those of router, halting and boundaries, whose near-ties TF32 would
        # decide otherwise.
        warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")
        # torch warns of recomputed in-place operations; these only modify fresh tensors.
        logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
        compiled = {}  # one per kind of module
        for module in self._compilable_modules(with_core=obstacle is None):
            function = type(module).in_one_graph
            if function not in compiled:
                compiled[function] = torch.compile(function, **settings)
            module.compiled = compiled[function]
        return obstacle

    def uncompile_layers(self):
        """Run all layers uncompiled again."""
        self.compiled = False
        for module in self._compilable_modules():
            module.compiled = None

    def _compilable_modules(self, with_core: bool = True) -> list[nn.Module]:
        """Return the modules that compile_layers compiles: byte layers, and what of the core can be
        compiled."""
        of_core = self.core.modules() if self.core is not None and with_core else ()
        return [
            module
            for module in (*self.prelude, *self.coda, *of_core)
            if hasattr(type(module), "in_one_graph")
        ]

    def loops_of(self, n_loops: int | None) -> int:
        """Return a number of loops, by default the config's; raise ValueError if it is below 1."""
        n_loops = self.config.n_loops if n_loops is None else n_loops
        if n_loops < 1:
            raise ValueError(f"n_loops must be at least 1, not {n_loops}")
        return n_loops

    def set_backend(self, backend: str):
        """Choose the backend of the experts, one of config.BACKENDS; raise ValueError for any other
        name."""
        if backend not in BACKENDS:
            raise ValueError(f"backend: {backend!r} is not one of {', '.join(BACKENDS)}")
        self.backend = backend
        for module in self.modules():
            if isinstance(module, MoE):
                module.backend = backend

    def choose_backend(self) -> str:
        """Choose the backend for decoding and scoring on this device; return a line to log, or "".
        TileKernels would take longer to compile than most samples, so the choice is that of `auto`
        for compiled layers."""
        device, dtype = self.embed_tokens.device, self.compute_dtype
        backend, remark = resolve_backend("auto", device, self.config, dtype, compiled=True)
        self.set_backend(backend)
        return remark

    @torch.no_grad()
    def update_expert_bias(self, tokens_per_expert: Tensor):
        """Adjust the experts' selection bias towards an even load, once per optimizer step.
        tokens_per_expert [L, E]: over all loops, micro-steps and ranks."""
        for layer, tokens in zip(
            () if self.core is None else self.core.layers, tokens_per_expert, strict=True
        ):
            layer.moe.expert_bias += self.config.expert_bias_rate * (tokens.mean() - tokens).sign()

    def update_boundaries(self, counts: Tensor, nats_per_byte: float):
        """Update learned boundaries once per optimizer step, from SpiderOutput.boundary_counts
        summed over micro-steps and ranks, and the step's mean loss; see SurprisePredictor."""
        if self.config.learns_boundaries:
            self.boundary_predictor.update(counts, nats_per_byte)

"""Spider: a byte-level Recurrent-Depth Transformer.

    bytes -> embed_tokens -> prelude (byte rate)
          -> segments -> recurrent core (segment rate, looped)
          -> unpool + residual -> coda (byte rate) -> norm -> lm_head

Features and their sources:
    MLA, latent attention with a decoupled rotary key                  DeepSeek-V2, arXiv 2405.04434
    mixture of experts, balanced by a bias, no capacity limit          DeepSeek-V3, arXiv 2412.19437
    mean pooling of learned segments                                   FlexiTokens, arXiv 2507.12720
    ... with a published gradient                                           Nawrot, arXiv 2211.09761
    segments that end where the next byte is hard to predict         this project, see boundaries.py
    segments that end with a word                                        SpaceByte, arXiv 2404.14408
    recurrent depth                                                        Huginn, arXiv 2502.05171
    ... with a stable linear injection (LTI)                               Parcae, arXiv 2604.12946
    adaptive computation time (ACT)                                        Graves, arXiv 1603.08983
    Engram, a memory of hashed contexts, at segment rate                           arXiv 2601.07372
    ... and at byte rate                                                      BLT, arXiv 2412.09871
    match memory: the byte after a context's last occurrence         PAQ's match model, Mahoney 2005

A token is what a layer sees: a byte in the byte layers, a segment in the core. Tokens are packed,
[tokens, hidden_size], and `cu_seqlens` marks where documents start. So sequences need no padding,
memory grows with the number of bytes, and documents do not see each other. Parameters are fp32
unless the model is converted, matrix products run in `Spider.compute_dtype`, and sums over tokens,
logits and losses are at least fp32 (`wide_dtype`).

Tensor names end with their shape: `h_nD` is [n, D]. Each file has its own legend; in this one,

    B  sequences                             T  bytes of a sequence
    M  packed bytes, B * T                   V  vocab_size
    N  segments, in the core with padding    n  active segments: those that the loop computes
    D  hidden_size                           O  segment_offsets
    E  routed experts                        K  experts per token
    L  core layers
    C  kv_lora_rank                          R  qk_rope_head_dim
"""

import logging
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

# isort: split
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from spider.config import BACKENDS, SpiderConfig
from spider.errors import UsageError
from spider.model.attention import MLA, LatentCache
from spider.model.boundaries import (
    PredictorTerms,
    SurprisePredictor,
    boundary_loss,
    end_documents,
    flexitokens_boundaries,
    surprise_loss,
)
from spider.model.contexts import Integers, PastBytes, to_device
from spider.model.decode import (
    DecodingState,
    StepSegments,
    draw,
    fewer_threads,
    forbid_repeats,
    split_pieces,
)
from spider.model.layers import (
    Linear,
    SwiGLU,
    WideLinear,
    cast_weights_once,
    rms_norm,
    wide,
)
from spider.model.memory import (
    ByteEngram,
    ConvolutionCache,
    EngramTable,
    InputEngram,
    Matches,
    MatchMemory,
    OutputEngram,
    PackedBytes,
    RetrievedMemory,
    SegmentEngram,
    tables_of,
)
from spider.model.noise import apply_dropout, byte_noise
from spider.model.packing import (
    ALL_TOKENS,
    ActiveTokens,
    Packing,
    StepTokens,
    check_ids,
    document_cu_seqlens,
    document_starts,
    mark_tokens_dynamic,
    padding_multiple,
    round_up,
)
from spider.model.segments import pool_segments, segment_ends, unpool_segments
from spider.vocabulary import BOS_ID, EOS_ID, PAD_ID
from tile_moe import MoE, Routing, balance

# Dropout sites: each makes its own mask from the same noise. Site 5 is boundaries.STRAY_SITE.
BYTES_BEFORE_CORE = 0
CORE_INPUT = 1
CORE_OUTPUT = 2
BYTES_AFTER_CORE = 3


# --------------------------------------------------------------------------------------------------
# The layer at byte rate


class Block(nn.Module):
    """A dense layer of prelude or coda, [M, D] -> [M, D]."""

    compiled: Callable | None = None  # see Spider.compile_layers

    def __init__(self, config: SpiderConfig, attention_class: type[nn.Module] = MLA):
        super().__init__()
        self.attention = attention_class(config)
        self.ffn = SwiGLU(config.hidden_size, config.intermediate_size)

    def forward(self, x_MD: Tensor, packing: Packing, cache: LatentCache | None = None) -> Tensor:
        if self.compiled is not None and torch.is_grad_enabled():
            return self.compiled(self, x_MD, packing)
        return self.run(x_MD, packing, cache)

    def run(self, x_MD: Tensor, packing: Packing, cache: LatentCache | None = None) -> Tensor:
        """Compute the layer; a subclass overrides this."""
        attended_MD, _ = self.attention(rms_norm(x_MD), packing, ALL_TOKENS, cache=cache)
        x_MD = x_MD + attended_MD
        return x_MD + self.ffn(rms_norm(x_MD))

    def in_one_graph(self, x_MD: Tensor, packing: Packing) -> Tensor:
        return self.run(x_MD, packing)


# --------------------------------------------------------------------------------------------------
# The layer of the core, at segment rate


class LayerState(NamedTuple):
    """The tensors of a core layer that later segments read. A halted segment keeps the tensors of
    its last loop."""

    latents: Tensor | None = None  # [N, C + R], read by attention
    convolved: Tensor | None = None  # read by Engram's convolution, see SegmentEngram.forward


# In decoding: a core layer's LayerState for the segments of earlier steps.
LayerCaches = tuple[LatentCache | None, ConvolutionCache | None]


class LayerOutput(NamedTuple):
    """The result of running a core layer once."""

    x_nD: Tensor
    routing: Routing
    state: LayerState


class RecurrentBlock(nn.Module):
    """A core layer, at segment rate: Engram (in some layers), attention, experts."""

    compiled: Callable | None = None  # see Spider.compile_layers

    def __init__(
        self, config: SpiderConfig, has_engram: bool, attention_class: type[nn.Module] = MLA
    ):
        super().__init__()
        self.engram = SegmentEngram(config) if has_engram else None
        self.attention = attention_class(config)
        self.moe = MoE(config)

    def forward(
        self,
        x_nD: Tensor,
        packing: Packing,
        retrieved: RetrievedMemory | None,
        active: ActiveTokens,
        state: LayerState,
        caches: LayerCaches = (None, None),
        reuse: Routing | None = None,
    ) -> LayerOutput:
        """Run the layer once on the active segments.

        retrieved: what this layer's Engram looked up. state: from the previous loop. reuse: a
        routing to use again, see MoE."""
        latents, convolved = state
        latent_cache, convolution_cache = caches
        if self.engram is not None:
            x_nD, convolved = self.engram(x_nD, retrieved, active, convolved, convolution_cache)
        attended_nD, latents = self.attention(
            rms_norm(x_nD), packing, active, latents, latent_cache
        )
        x_nD = x_nD + attended_nD
        y_nD, routing = self.moe(rms_norm(x_nD), reuse)
        return LayerOutput(x_nD + y_nD, routing, LayerState(latents, convolved))

    def in_one_graph(
        self,
        x_nD: Tensor,
        packing: Packing,
        retrieved: RetrievedMemory | None,
        active: ActiveTokens,
        state: LayerState,
        recompute: bool,
    ) -> tuple[Tensor | None, ...]:
        """Run `forward` as a single graph for torch.compile.

        Return a flat tuple, because checkpoint can return nothing else from a graph: the output,
        the two tensors of LayerState, and score_nE and topk_idx_nK of Routing. Recomputation is
        part of the backward graph; it reuses the routing, because the sort's results are saved."""

        def compute(x_nD: Tensor) -> tuple[Tensor | None, ...]:
            y_nD, routing, (latents, convolved) = self(x_nD, packing, retrieved, active, state)
            return y_nD, latents, convolved, routing.score, routing.topk_idx

        if not recompute:
            return compute(x_nD)
        keep_routing = partial(create_selective_checkpoint_contexts, [torch.ops.aten.sort.stable])
        return checkpoint(
            compute, x_nD, use_reentrant=False, preserve_rng_state=False, context_fn=keep_routing
        )


def visit(
    layer: RecurrentBlock,
    x_nD: Tensor,
    packing: Packing,
    retrieved: RetrievedMemory | None,
    active: ActiveTokens,
    state: LayerState,
    caches: LayerCaches,
    recompute: bool,
) -> LayerOutput:
    """Run a core layer once: compiled, eager, or with activation checkpointing.

    Recomputation reuses the routing: a near-tie that falls the other way would corrupt the
    gradient."""
    if layer.compiled is not None and torch.is_grad_enabled():
        mark_tokens_dynamic(x_nD, *vars(packing).values(), *(retrieved or ()))
        mark_tokens_dynamic(*vars(active).values(), *state)
        y_nD, latents, convolved, score_nE, topk_idx_nK = layer.compiled(
            layer, x_nD, packing, retrieved, active, state, recompute
        )
        routing = Routing(score_nE, topk_idx_nK, None)
        return LayerOutput(y_nD, routing, LayerState(latents, convolved))
    if not recompute:
        return layer(x_nD, packing, retrieved, active, state, caches)

    reuse = None  # set by the first call of `compute`, read by the recomputation

    def compute(x_nD: Tensor) -> LayerOutput:
        nonlocal reuse
        output = layer(x_nD, packing, retrieved, active, state, caches, reuse)
        if reuse is None:
            # without the score, which would keep the first call's graph alive
            reuse = Routing(None, output.routing.topk_idx, output.routing.slots)
        return output

    return checkpoint(compute, x_nD, use_reentrant=False, preserve_rng_state=False)


# --------------------------------------------------------------------------------------------------
# Halting


class Halting:
    """Adaptive computation time (ACT) over the loops of a pass (Graves, arXiv 1603.08983).

    The output is the weighted sum of a segment's states after each loop. Let p be the segment's
    halting probability in a loop, and `remaining` 1 minus its weights so far. Its weight is

        p           while 1 - remaining + p < threshold
        remaining   in the first loop that reaches the threshold, or in the last: the segment halts
        0           in one more loop, so later segments read its final state, not the one before

    Then the segment leaves the core. A segment that halts in loop 1 has weight 1 whatever p is, so
    neither p nor the later loops get a gradient. Therefore a warm-up scales p until all loops have
    learned.
    """

    def __init__(self, segment_weight_N: Tensor, threshold: float, drop_halted: bool):
        """Start a pass.

        segment_weight_N: each segment's weight in means, 1 / segments, 0 for padding. drop_halted:
        compute only the segments that are still in the core (the host waits for their number); else
        compute all."""
        self.threshold = threshold
        self.drop_halted = drop_halted
        self.active = ALL_TOKENS
        self.segment_weight_N = segment_weight_N  # 0 once a segment has halted
        self.running_N = segment_weight_N > 0
        self.remaining_N = torch.ones_like(segment_weight_N)  # 1 - weights so far; 0 once halted
        self.output_ND: Tensor | None = None  # sum of weight * state
        # means over segments: loops until halting, and ACT's cost, loops + remainder
        self.loops = segment_weight_N.new_zeros(())
        self.ponder = segment_weight_N.new_zeros(())

    def add(self, h_ND: Tensor, p_N: Tensor, last: bool):
        """Add the states after a loop with their halting probabilities, and choose the segments of
        the next loop. p is 0 for a segment that the loop did not compute."""
        if last:
            halts_N = torch.ones_like(self.running_N)
        else:
            halts_N = 1 - self.remaining_N + p_N >= self.threshold
        weight_N = torch.where(halts_N, self.remaining_N, p_N)
        weighted_ND = weight_N[:, None].to(h_ND.dtype) * h_ND
        self.output_ND = weighted_ND if self.output_ND is None else self.output_ND + weighted_ND

        running = self.segment_weight_N.sum()  # fraction of segments that were running
        remainder = self.segment_weight_N @ torch.where(halts_N, self.remaining_N, 0)
        self.loops = self.loops + running
        self.ponder = self.ponder + running + remainder

        self.segment_weight_N = self.segment_weight_N * ~halts_N
        self.remaining_N = torch.where(halts_N, 0, self.remaining_N - weight_N)
        # Segments that halted in this loop are computed once more.
        active_N = self.running_N
        self.running_N = self.segment_weight_N > 0
        index = None
        if self.drop_halted:
            index = active_N.nonzero().squeeze(1)  # host synchronisation
        self.active = ActiveTokens(active_N, index, self.running_N)


# --------------------------------------------------------------------------------------------------
# The recurrent core


@dataclass(frozen=True)
class CoreInputs:
    """What a pass through the core takes in addition to the pooled segments z [N, D]: where they
    are in the text, the settings of the pass, and in decoding the caches."""

    packing: Packing  # the segments' documents
    past: PastBytes  # the bytes up to the last byte of each segment
    segment_weight_N: Tensor  # each segment's weight in means: 1 / segments, 0 for padding
    n_loops: int
    recompute: bool = False  # activation checkpointing of every layer in every loop
    halting_warmup: float = 1.0  # factor on halting probabilities
    dropout: float = 0.0  # rate, at the core's input and output
    noise_N: Tensor | None = None  # int64, for dropout; None: no dropout
    # those of all layers and loops, in decoding only
    caches: tuple[LatentCache, ConvolutionCache] | None = None

    def caches_of(self, layer: int, loop: int, engram_layers: tuple[int, ...]) -> LayerCaches:
        """Return the caches of a layer in a loop; outside decoding there are none."""
        if self.caches is None:
            return None, None
        latents, convolved = self.caches
        if layer not in engram_layers:
            return latents.of(layer, loop), None
        return latents.of(layer, loop), convolved.of(engram_layers.index(layer), loop)


class CoreOutput(NamedTuple):  # FSDP looks for tensors with gradients in tuples, not in dataclasses
    """The result of a pass through the core. A visit is one run of a layer in one loop."""

    output: Tensor | None  # [N, O * D], a segment's output at each offset; None without a core
    aux_loss: Tensor  # f_e * P_e balance loss, mean over visits
    z_loss: Tensor  # router z-loss, mean over visits
    ponder: Tensor  # ACT's loops + remainder, mean over segments
    mean_loops: Tensor  # loops until halting, mean over segments
    tokens_per_expert: Tensor  # [L, E] fp32, over all loops
    # Set by Spider._through_core:
    segments: int = 0
    boundary_loss: Tensor | None = None
    unpooled_MD: Tensor | None = None  # the output, unpooled to bytes
    predictor_terms: PredictorTerms | None = None  # with learned boundaries, in training


# The routing of a visit: scores [N, E], topk_idx [N, K], and each segment's weight in means [N],
# which is 1 / segments, or 0 for padding and halted segments.
RoutedVisit = tuple[Tensor, Tensor, Tensor]


class RecurrentCore(nn.Module):
    """The looped layers. All loops share their weights, except loop_embedding and LoRA:

        v   = A h + B e + loop_embedding[t]
        y   = layers(v)
        h'  = y + LoRA_t(y)

    e: the normed segments. The output is the sum of the states h' of all loops, weighted by ACT."""

    compiled: Callable | None = None  # the compiled injection, see Spider.compile_layers
    layers: Sequence[RecurrentBlock]  # a ModuleList, which has no types

    def __init__(
        self,
        config: SpiderConfig,
        block_class: type[nn.Module],
        attention_class: type[nn.Module],
    ):
        super().__init__()
        self.config = config
        width = config.hidden_size
        loops = config.n_loops
        self.layers = nn.ModuleList(  # type: ignore[assignment]
            block_class(config, i in config.engram_layers, attention_class)
            for i in range(config.n_recurrent_layers)
        )
        self.loop_embedding = nn.Parameter(torch.empty(loops, width))
        self.log_A = nn.Parameter(torch.empty(width))
        self.dt = nn.Parameter(torch.empty(width))
        self.B = nn.Parameter(torch.empty(width))
        if config.lora_rank:
            self.lora_down = nn.Parameter(torch.empty(loops, width, config.lora_rank))
            self.lora_up = nn.Parameter(torch.empty(loops, config.lora_rank, width))
        self.halt_predictor = WideLinear(width, 1, bias=True) if config.act else None
        self.out_proj = Linear(width, width)
        if config.segment_offsets > 1:
            # added to out_proj at each segment offset, [offsets, out, in]
            self.offset_proj = nn.Parameter(torch.empty(config.segment_offsets, width, width))
        # See Halting. None: on a CPU; a GPU's host would wait in each loop.
        self.drop_halted: bool | None = None

    def init_weights(self):
        """Initialize the parameters outside the layers, see Spider.init_weights."""
        c = self.config
        self.loop_embedding.normal_(std=0.02)
        self.out_proj.weight.zero_()
        if c.segment_offsets > 1:
            self.offset_proj.zero_()
        self.log_A.zero_()
        self.dt.fill_(math.log(math.expm1(0.1)))  # softplus(dt) = 0.1, so that A = exp(-0.1)
        self.B.fill_(1)
        if c.lora_rank:
            self.lora_down.normal_(std=c.hidden_size**-0.5)
            self.lora_up.zero_()
        if self.halt_predictor is not None:
            self.halt_predictor.weight.normal_(std=0.02)
            self.halt_predictor.bias.fill_(-3)

    def forward(self, z_ND: Tensor, core_inputs: CoreInputs) -> CoreOutput:
        """Run all loops on the pooled segments. In decoding, skip balance losses and counts."""
        n_loops = core_inputs.n_loops
        decoding = core_inputs.caches is not None
        drop_halted = self.drop_halted
        if drop_halted is None:
            drop_halted = not z_ND.is_cuda
        halting = Halting(core_inputs.segment_weight_N, self.config.act_threshold, drop_halted)
        e_ND = apply_dropout(rms_norm(z_ND), core_inputs.dropout, core_inputs.noise_N, CORE_INPUT)
        decay_D = self.decay()  # A
        position_N = core_inputs.packing.position
        # looked up once, for all loops
        retrieved = [
            None
            if layer.engram is None
            else layer.engram.retrieve(core_inputs.past, position_N, z_ND.dtype)
            for layer in self.layers
        ]
        states = [LayerState()] * len(self.layers)
        visits = []
        h_nD = None
        for t in range(n_loops):
            loop = min(t, self.config.n_loops - 1)  # further loops use the last one's parameters
            active = halting.active
            # v = A h + B e + loop_embedding[t]
            y_nD = self.inject(h_nD, active.select(e_ND), loop, decay_D)
            # y = layers(v)
            for i, layer in enumerate(self.layers):
                y_nD, routing, states[i] = visit(
                    layer,
                    y_nD,
                    core_inputs.packing,
                    retrieved[i],
                    active,
                    states[i],
                    core_inputs.caches_of(i, t, self.config.engram_layers),
                    core_inputs.recompute,
                )
                if routing.topk_idx is not None and not decoding:
                    assert routing.score is not None
                    score_NE = active.scatter(routing.score)
                    topk_idx_NK = active.scatter(routing.topk_idx)
                    visits.append((score_NE, topk_idx_NK, halting.segment_weight_N))
            # h' = y + LoRA_t(y)
            h_nD = self.apply_lora(y_nD, loop)
            h_ND = active.scatter(h_nD)
            p_n = core_inputs.halting_warmup * self.halt(h_nD)
            halting.add(h_ND, active.scatter(p_n), last=t == n_loops - 1)
            h_nD = halting.active.select(h_ND)
            # In decoding, later steps read the segments that halted in this loop, so one more loop
            # computes them.
            are_computed = not decoding or len(h_nD) == 0
            if drop_halted and are_computed and not halting.running_N.any():
                break
        assert halting.output_ND is not None  # there is at least one loop
        normed_ND = rms_norm(halting.output_ND)
        normed_ND = apply_dropout(normed_ND, core_inputs.dropout, core_inputs.noise_N, CORE_OUTPUT)
        output = self._read_out(normed_ND)
        return self._result(output, visits, halting, n_loops, decay_D)

    # ----------------------------------------------------------------------------------------------
    # The equations of a loop

    def decay(self) -> Tensor:
        """Return A [D] = exp(-softplus(dt) * exp(log_A)) (Parcae, arXiv 2604.12946).

        The clamps keep A inside (0, 1) in fp32, whatever the parameters are."""
        rate = F.softplus(wide(self.dt)) * wide(self.log_A).clamp(-15, 15).exp()
        return torch.exp(-rate.clamp(1e-4, 15))

    def inject(self, h_nD: Tensor | None, e_nD: Tensor, loop: int, decay_D: Tensor) -> Tensor:
        """Return A h + B e + loop_embedding[loop], summed in fp32; h is None in the first loop."""
        embedding_D = self.loop_embedding[loop]
        if self.compiled is not None and torch.is_grad_enabled():
            mark_tokens_dynamic(h_nD, e_nD)
            return self.compiled(self, h_nD, e_nD, embedding_D, decay_D)
        return self.in_one_graph(h_nD, e_nD, embedding_D, decay_D)

    def in_one_graph(
        self, h_nD: Tensor | None, e_nD: Tensor, embedding_D: Tensor, decay_D: Tensor
    ) -> Tensor:
        """Compute `inject`, given the loop's row of loop_embedding."""
        v_nD = torch.addcmul(wide(embedding_D), wide(self.B), e_nD)
        if h_nD is not None:
            v_nD = torch.addcmul(v_nD, decay_D, h_nD)
        return v_nD.to(e_nD.dtype)

    def apply_lora(self, y_nD: Tensor, loop: int) -> Tensor:
        """Return y + LoRA_t(y). The LoRA reads the normed state, so that its output is bounded and
        cannot undo A < 1."""
        if not self.config.lora_rank:
            return y_nD
        down = self.lora_down[loop].to(y_nD.dtype)  # [D, lora_rank]
        up = self.lora_up[loop].to(y_nD.dtype)  # [lora_rank, D]
        return y_nD + rms_norm(y_nD) @ down @ up

    def halt(self, h_nD: Tensor) -> Tensor:
        """Return the halting probabilities [n]; without ACT, zeros."""
        if self.halt_predictor is None:
            return self.loop_embedding.new_zeros(len(h_nD))
        return self.halt_predictor(rms_norm(h_nD)).sigmoid().squeeze(1)

    # ----------------------------------------------------------------------------------------------
    # After the loops

    def _read_out(self, normed_ND: Tensor) -> Tensor:
        """Project states to outputs [N, O * D], one output per segment offset."""
        output = self.out_proj(normed_ND)
        offsets = self.config.segment_offsets
        if offsets > 1:
            weight = self.offset_proj.to(normed_ND.dtype).flatten(0, 1)  # [O * D, D]
            output = output.repeat(1, offsets) + F.linear(normed_ND, weight)
        return output

    def _result(
        self,
        output: Tensor,
        visits: list[RoutedVisit],
        halting: Halting,
        n_loops: int,
        decay_D: Tensor,
    ) -> CoreOutput:
        """Compute the balance losses and tokens per expert, and return them with the output.

        visits: loop by loop, in the order of layers. Without routed experts there are no visits:
        balance losses are 0, and there are no counts."""
        layers = len(self.layers)
        aux_loss = halting.loops.new_zeros(())
        z_loss = aux_loss
        tokens_per_expert = aux_loss.new_zeros(layers, 0)
        if visits:
            score, topk_idx, segment_weight = map(torch.stack, zip(*visits, strict=True))
            sums = balance(score, topk_idx, segment_weight, self.layers[0].moe.backend)
            aux_loss = sums.aux_loss
            z_loss = sums.z_loss
            # summed over loops
            tokens_per_expert = sums.tokens_per_expert.unflatten(0, (-1, layers)).sum(0)
        visited = layers * halting.loops.clamp_min(1e-9)  # loops are 0 without segments
        ponder = halting.ponder
        if n_loops > 1:
            # Keep `decay` in the graph even if all segments halt in the first loop: FSDP reduces
            # every parameter on every rank.
            ponder = ponder + 0 * decay_D.sum()
        return CoreOutput(
            output, aux_loss / visited, z_loss / visited, ponder, halting.loops, tokens_per_expert
        )


# --------------------------------------------------------------------------------------------------
# Initialization, see Spider.init_weights


def _float_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the floating-point parameters and buffers by name."""
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: t for name, t in named if t.is_floating_point() and not t.is_meta}


def _effective_depth(config: SpiderConfig) -> int:
    """Count the layers of a pass; a core layer counts once per loop."""
    looped = config.n_recurrent_layers * config.n_loops
    return config.n_prelude_layers + looped + config.n_coda_layers


def _init_added_modules(model: nn.Module):
    """Call reset_parameters of the modules that a subclass added: for each tensor that is still
    uninitialized, the innermost module around it that has the method."""
    for name, tensor in _float_tensors(model).items():
        path = name.split(".")[:-1]
        for depth in range(len(path), 0, -1):
            module = model.get_submodule(".".join(path[:depth]))
            reset_parameters = getattr(module, "reset_parameters", None)
            if reset_parameters is not None:
                if tensor.isnan().any():
                    reset_parameters()
                break


# --------------------------------------------------------------------------------------------------
# The model


@dataclass
class SpiderOutput:
    """The result of a forward pass; tensors are scalars unless a shape is given."""

    logits: Tensor  # [B, T, V], at least fp32
    segments: Tensor  # number of segments in all sequences
    mean_loops: Tensor  # loops until halting, mean over segments
    tokens_per_expert: Tensor  # [L, E] fp32, segments routed to each expert over all loops
    boundary_counts: Tensor  # see SurprisePredictor.count; empty without learned boundaries
    # None without labels:
    loss: Tensor | None = None  # to minimize: nats_per_byte + loss_terms
    nats_per_byte: Tensor | None = None  # cross-entropy, mean over labels other than -100
    loss_terms: dict[str, Tensor] | None = None  # the other terms, weighted and detached
    byte_loss: Tensor | None = None  # the means over bytes: nats_per_byte + BYTE_TERMS
    BYTE_TERMS: ClassVar = ("core_loss", "surprise_loss")


class Spider(nn.Module):
    """The model; this file's docstring lists its features.

    To try an idea (docs/guide/trying-an-idea.md), write a subclass that replaces a class of layers
    or overrides `extra_losses`. The classes are called as block_class(config, attention_class),
    core_block_class(config, has_engram, attention_class) and attention_class(config)."""

    attention_class: type[nn.Module] = MLA
    block_class: type[nn.Module] = Block
    core_block_class: type[nn.Module] = RecurrentBlock

    engram_match: MatchMemory | None
    engram_input: InputEngram | None
    prelude: Sequence[Block]  # like the coda, a ModuleList, which has no types
    core: RecurrentCore | None
    boundary_predictor: nn.Sequential | SurprisePredictor | None  # flexitokens, learned, words
    coda: Sequence[Block]
    engram_output: OutputEngram | None

    def __init__(self, config: SpiderConfig):
        super().__init__()
        c = config
        self.config = config
        # restored below, since constructors of a subclass's modules may draw random values
        random_state = torch.get_rng_state()
        self.compute_dtype = torch.float32  # of products and activations, not of parameters
        self.recompute = "nothing"  # one of RECOMPUTE: the layers with activation checkpointing
        self.compiled = False  # see compile_layers
        self.backend = "grouped"  # of the experts, see set_backend
        self.casts_early = True  # False under FSDP, which casts in each group's forward
        # whether decoding is compared with a full pass, see _check_decoding
        self.checks_decoding = type(self) is not Spider

        match_contexts = len(c.engram_match_contexts)
        has_byte_memory = len(c.engram_byte_contexts) + match_contexts > 0
        self.embed_tokens = nn.Parameter(torch.empty(c.vocab_size, c.hidden_size))
        self.engram_match = None
        if match_contexts:
            self.engram_match = MatchMemory(c.engram_match_contexts, max(2, c.engram_votes))
        self.engram_input = InputEngram(c, match_contexts) if has_byte_memory else None
        self.prelude = self._new_byte_layers(c.n_prelude_layers)
        self.core = None
        if c.n_recurrent_layers > 0:
            self.core = RecurrentCore(c, self.core_block_class, self.attention_class)
            self.null_segment = nn.Parameter(torch.empty(c.hidden_size))
        self.boundary_predictor = self._new_boundary_predictor()
        self.coda = self._new_byte_layers(c.n_coda_layers)
        self.engram_output = OutputEngram(c) if has_byte_memory else None
        self.lm_head = Linear(c.hidden_size, c.vocab_size)

        torch.set_rng_state(random_state)
        # Meta tensors have no values, and some operations on them import torch._dynamo.
        if not self.embed_tokens.is_meta:
            self.init_weights()

    def _new_byte_layers(self, count: int) -> Sequence[Block]:
        layers = [self.block_class(self.config, self.attention_class) for _ in range(count)]
        return nn.ModuleList(layers)  # type: ignore[return-value]

    def _new_boundary_predictor(self) -> nn.Sequential | SurprisePredictor | None:
        c = self.config
        if c.n_recurrent_layers == 0 or c.boundaries == "words":
            return None
        if c.boundaries == "learned":
            return SurprisePredictor(c.hidden_size, c.vocab_size, c.boundary_rate)
        width = c.hidden_size // 4
        return nn.Sequential(
            WideLinear(c.hidden_size, width, bias=True), nn.GELU(), Linear(width, 1, bias=True)
        )

    @property
    def wide_dtype(self) -> torch.dtype:
        """Return the dtype of sums, logits and losses: at least fp32."""
        dtype = torch.promote_types(self.embed_tokens.dtype, self.compute_dtype)
        return torch.promote_types(dtype, torch.float32)

    def _apply(self, fn, recurse: bool = True):
        """Apply `half()`, `to(dtype)` and similar calls to compute_dtype, too."""
        self.compute_dtype = fn(torch.empty(0, dtype=self.compute_dtype)).dtype
        return super()._apply(fn, recurse)

    # ----------------------------------------------------------------------------------------------
    # Initialization

    @torch.no_grad()
    def init_weights(self):
        """Initialize every value, buffers included:

            embed_tokens                 N(0, 1)
            Linear.weight, w_gate, w_up  N(0, 1 / fan_in); biases 0
            o_proj, down_proj, w_down    the same / sqrt(2 * layers), core layers once per loop
            lm_head                      N(0, 0.02^2)
            halt_predictor               N(0, 0.02^2); bias -3: with 0 it would stick at one loop
            boundary_predictor           as Linear; flexitokens: last bias logit(boundary_prior);
                                         learned: the gain's weights 0
            loop_embedding               N(0, 0.02^2)
            log_A, dt, B                 A = 0.905, B = 1. B = (1 - A) / (1 - A^n_loops) would keep
                                         the state at e's size, but then the layers' output drowns e
                                         (docs/results/mechanisms.md)
            lora_down, lora_up           N(0, 1 / fan_in), 0
            core.out_proj, .offset_proj  0: at the start the core adds nothing to the bytes
            null_segment, conv_weight    0
            engram_output.logits         0
            engram_output.votes          as Linear; the last one 0
            Engram tables, followed      0; hash constants by the table's order in the model
            expert_bias                  0
            a subclass's modules         by their reset_parameters, after everything else

        Raise RuntimeError with the names of uninitialized tensors."""
        for tensor in _float_tensors(self).values():
            tensor.fill_(math.nan)  # what is never initialized stays NaN
        self._init_layers()
        self._scale_residual_outputs()
        self.embed_tokens.normal_()
        self.lm_head.weight.normal_(std=0.02)
        if self.core is not None:
            self.null_segment.zero_()
            self.core.init_weights()
        if isinstance(self.boundary_predictor, SurprisePredictor):
            self.boundary_predictor.init_weights()
        elif self.boundary_predictor is not None:
            prior = self.config.boundary_prior
            bias = self.boundary_predictor.get_parameter("2.bias")
            bias.fill_(math.log(prior / (1 - prior)))
        _init_added_modules(self)
        uninitialized = [name for name, t in _float_tensors(self).items() if t.isnan().any()]
        if uninitialized:
            raise RuntimeError(
                f"uninitialized: {', '.join(uninitialized)}: add a reset_parameters() to the "
                f"module; values from the constructor are lost when a model is built on the meta "
                f"device"
            )

    def _init_layers(self):
        """Initialize the layers, in the order of modules: random values are drawn in this order."""
        c = self.config
        depth = _effective_depth(c)
        # SurprisePredictor draws its weights later, so that all others start as they do without it.
        excluded = set()
        if isinstance(self.boundary_predictor, SurprisePredictor):
            excluded = set(self.boundary_predictor.modules())
        tables = 0
        for module in self.modules():
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

    def _scale_residual_outputs(self):
        """Scale every o_proj and down_proj, in any module, down with depth: they are the output
        projections of residual branches. Zero the projections that add to the logits."""
        scale = (2 * _effective_depth(self.config)) ** -0.5
        for name, p in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                p.mul_(scale)
        before_head = self.engram_output
        if before_head is not None:
            if before_head.logits is not None:
                before_head.logits.weight.zero_()
            if before_head.votes is not None:
                before_head.votes.get_parameter("2.weight").zero_()

    # ----------------------------------------------------------------------------------------------
    # Forward

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        n_loops: int | None = None,
        noise_seed: int | Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        dropout: float = 0.0,
        halting_warmup: float = 1.0,
        segment_noise: bool = True,
    ) -> SpiderOutput:
        """Compute logits and, given labels, the loss.

        input_ids [B, T] int64. labels [B, T] int64, already shifted; -100 is ignored. n_loops
        defaults to the config's. Documents begin at BOS and end at EOS; every row begins one.

        cu_seqlens: document_cu_seqlens(input_ids). Computing it on the host beforehand saves a wait
        for the device. max_seqlen: from max_seqlen_of; by default T.

        In training mode only:
        noise_seed: the noise of row i, for segments and dropout, is a function of noise_seed + i;
        None: draw it with torch's default generator. dropout: the rate at the core's input and
        output; bytes get a fifth of it. halting_warmup: factor on halting probabilities and
        ponder_weight. segment_noise=False: without dropout, segments end as in evaluation mode.

        Raise ValueError for bad shapes or dtypes.
        """
        check_ids("input_ids", input_ids)
        sequences, length = input_ids.shape
        if labels is not None:
            check_ids("labels", labels, sequences, length)
        n_loops = self.loops_of(n_loops)
        if not self.training:
            halting_warmup = 1.0
        byte_dropout = dropout / 5

        noise_M = None
        draws_ends = segment_noise and self.boundary_predictor is not None
        if self.training and (dropout or draws_ends):
            noise_M = byte_noise(noise_seed, sequences, length, input_ids.device).flatten()
        packed = self._pack(input_ids, cu_seqlens, max_seqlen, noise_M)

        x_MD = self.before_core(packed)
        x_MD = apply_dropout(x_MD, byte_dropout, noise_M, BYTES_BEFORE_CORE)
        if self.core is None:
            result = self._without_core()
        else:
            result = self._through_core(x_MD, packed, n_loops, dropout, halting_warmup)
        if result.unpooled_MD is not None:
            x_MD = x_MD + result.unpooled_MD
        x_MD = apply_dropout(x_MD, byte_dropout, noise_M, BYTES_AFTER_CORE)
        logits_MV = self.after_core(x_MD, packed)

        zero = logits_MV.new_zeros((), dtype=self.wide_dtype)
        boundary_counts = zero.new_zeros(0)
        if result.predictor_terms is not None:
            boundary_counts = result.predictor_terms.counts
        out = SpiderOutput(
            logits_MV.view(sequences, length, -1),
            segments=zero + result.segments,
            mean_loops=result.mean_loops.detach(),
            tokens_per_expert=result.tokens_per_expert,
            boundary_counts=boundary_counts,
        )
        if labels is not None:
            self._add_losses(out, labels, result, halting_warmup)
        return out

    def loops_of(self, n_loops: int | None) -> int:
        """Return n_loops, or the config's for None; raise ValueError if it is below 1."""
        n_loops = self.config.n_loops if n_loops is None else n_loops
        if n_loops < 1:
            raise ValueError(f"n_loops must be at least 1, not {n_loops}")
        return n_loops

    def _pack(
        self,
        input_ids: Tensor,
        cu_seqlens: Tensor | None,
        max_seqlen: int | None,
        noise_M: Tensor | None,
    ) -> PackedBytes:
        """Find the documents of a batch, the last bytes up to each byte, and the matches."""
        c = self.config
        if cu_seqlens is None:
            cu_seqlens = document_cu_seqlens(input_ids)
        if max_seqlen is None:
            max_seqlen = input_ids.shape[1]
        ids_M = input_ids.reshape(-1)
        packing = Packing.build(
            cu_seqlens, len(ids_M), max_seqlen, c, self.compute_dtype, c.byte_window
        )
        if self.compiled:  # else each number of documents and each max_seqlen needs its own graph
            mark_tokens_dynamic(cu_seqlens, packing.max_seqlen_as_size)
        past = PastBytes(ids_M, packing.position, torch.arange(len(ids_M), device=ids_M.device))
        matches = None
        if self.engram_match is not None:
            matches = self.engram_match(past, packing.document)
        return PackedBytes(input_ids, packing, past, matches, noise_M)

    def before_core(self, packed: PackedBytes, cache: LatentCache | None = None) -> Tensor:
        """Apply embedding, byte memory and prelude: -> [M, D]."""
        x_MD = F.embedding(packed.ids_M, self.embed_tokens).to(self.compute_dtype)
        if self.engram_input is not None:
            x_MD = x_MD + self.engram_input(x_MD, packed)
        for i, block in enumerate(self.prelude):
            x_MD = self._byte_layer(block, x_MD, packed.packing, cache, i)
        return x_MD

    def after_core(
        self, x_MD: Tensor, packed: PackedBytes, cache: LatentCache | None = None
    ) -> Tensor:
        """Apply coda, byte memory and head: [M, D] -> logits [M, V]."""
        for i, block in enumerate(self.coda, len(self.prelude)):
            x_MD = self._byte_layer(block, x_MD, packed.packing, cache, i)
        direct_MV = None
        if self.engram_output is not None:
            memory_MD, direct_MV = self.engram_output(x_MD, packed)
            x_MD = x_MD + memory_MD
        logits_MV = self.lm_head(rms_norm(x_MD)).to(self.wide_dtype)
        if direct_MV is not None:
            logits_MV = logits_MV + direct_MV
        return logits_MV

    def _byte_layer(
        self, block: Block, x_MD: Tensor, packing: Packing, cache: LatentCache | None, number: int
    ) -> Tensor:
        """Apply a byte layer, with activation checkpointing if `recompute` is "all". number: the
        layer's number in the cache."""
        if self.recompute == "all" and torch.is_grad_enabled():
            return checkpoint(block, x_MD, packing, use_reentrant=False, preserve_rng_state=False)
        return block(x_MD, packing, None if cache is None else cache.of(number))

    def _through_core(
        self,
        x_MD: Tensor,
        packed: PackedBytes,
        n_loops: int,
        dropout: float,
        halting_warmup: float,
    ) -> CoreOutput:
        """Pool bytes to segments, run the core on them, and unpool its output to bytes.

        The core runs even if there are no segments: all ranks must run the same collectives."""
        assert self.core is not None
        packing = packed.packing
        predicted = self.predict_boundaries(x_MD)
        b_M = self.boundaries(predicted, packed)
        band_loss = boundary_loss(b_M, packed.input_ids, self.config)
        z_ND, segment_cu_seqlens = pool_segments(x_MD, b_M, packing.cu_seqlens)

        segments = len(z_ND)
        segment_packing = self._pack_segments(segments, segment_cu_seqlens, packed)
        tokens = len(segment_packing.document)
        padding = tokens - segments
        last_byte_N = segment_ends(b_M, tokens)
        segment_weight = z_ND.new_full((segments,), 1 / max(1, segments), dtype=self.wide_dtype)
        noise_M = packed.noise_M
        core_inputs = CoreInputs(
            segment_packing,
            past=packed.past.select(last_byte_N),
            segment_weight_N=F.pad(segment_weight, (0, padding)),
            n_loops=n_loops,
            recompute=self.recompute != "nothing" and torch.is_grad_enabled(),
            halting_warmup=halting_warmup,
            dropout=dropout,
            noise_N=None if noise_M is None else noise_M.index_select(0, last_byte_N),
        )
        result = self.core(F.pad(z_ND, (0, 0, 0, padding)), core_inputs)
        output = result.output[:segments]

        unpool = partial(
            unpool_segments,
            b=b_M,
            cu_seqlens=packing.cu_seqlens,
            segment_cu_seqlens=segment_cu_seqlens,
            offsets=self.config.segment_offsets,
        )
        null = self.null_output()
        unpooled_MD = unpool(output, null)
        predictor_terms = None
        predictor = self.boundary_predictor
        if self.training and isinstance(predictor, SurprisePredictor):
            assert predicted is not None
            earlier_MD = unpool(output.detach(), null.detach(), back=1)
            unpooled_MD, predictor_terms = predictor.observe(
                predicted, packed.ids_M, b_M, packing.position, unpooled_MD, earlier_MD
            )
        return result._replace(
            segments=segments,
            boundary_loss=band_loss,
            unpooled_MD=unpooled_MD,
            predictor_terms=predictor_terms,
        )

    def _pack_segments(
        self, segments: int, segment_cu_seqlens: Tensor, packed: PackedBytes
    ) -> Packing:
        """Pack the segments, padded to one of a few numbers of tokens (see padding_multiple).
        The padding is a document of its own."""
        max_bytes = packed.packing.max_seqlen  # no document has more segments than bytes
        multiple = padding_multiple(len(packed.ids_M), max_bytes)
        tokens = round_up(max(1, segments), multiple)
        if tokens > segments:
            segment_cu_seqlens = F.pad(segment_cu_seqlens, (0, 1), value=tokens)
        max_seqlen = max(max_bytes, multiple)  # the padding has at most `multiple` tokens
        return Packing.build(
            segment_cu_seqlens, tokens, max_seqlen, self.config, self.compute_dtype
        )

    def _without_core(self) -> CoreOutput:
        """Return the result without a core: no segments, all losses zero."""
        zero = self.embed_tokens.new_zeros((), dtype=self.wide_dtype)
        no_tokens = zero.new_zeros(0, self.config.n_routed_experts)
        return CoreOutput(None, zero, zero, zero, zero, no_tokens, boundary_loss=zero)

    # ----------------------------------------------------------------------------------------------
    # Loss

    def _add_losses(
        self, out: SpiderOutput, labels: Tensor, result: CoreOutput, halting_warmup: float
    ):
        """Set the loss and its terms in `out`."""
        c = self.config
        assert result.boundary_loss is not None
        predictor_terms = result.predictor_terms
        labels_M = labels.reshape(-1)
        logits_MV = out.logits.flatten(0, 1)
        has_label_M = labels_M != -100
        n_labels = has_label_M.sum().clamp_min(1)

        if predictor_terms is None:
            nats = F.cross_entropy(logits_MV, labels_M, ignore_index=-100, reduction="sum")
        else:  # SurprisePredictor learns from the loss of each byte
            losses_M = F.cross_entropy(logits_MV, labels_M, ignore_index=-100, reduction="none")
            nats = torch.where(has_label_M, losses_M + predictor_terms.zero_nats_M, 0).sum()
        nats_per_byte = nats / n_labels
        out.nats_per_byte = nats_per_byte
        core_loss = torch.zeros_like(nats)
        if self.training and c.core_loss_weight and result.unpooled_MD is not None:
            # at first unpooled_MD is 0, so the gradient's norm exceeds 100 and is clipped
            core_logits_MV = self.lm_head(rms_norm(result.unpooled_MD)).to(logits_MV.dtype)
            core_nats = F.cross_entropy(
                core_logits_MV, labels_M, ignore_index=-100, reduction="sum"
            )
            core_loss = core_nats / n_labels

        terms = dict(
            boundary_loss=c.boundary_loss_weight * result.boundary_loss,
            aux_loss=c.aux_loss_weight * result.aux_loss,
            z_loss=c.z_loss_weight * result.z_loss,
            ponder_loss=c.ponder_weight * halting_warmup * result.ponder,
            core_loss=c.core_loss_weight * core_loss,
        )
        if predictor_terms is not None:
            error = surprise_loss(predictor_terms.predicted_loss_M, losses_M.detach(), has_label_M)
            terms["surprise_loss"] = error / n_labels
        if self.training:
            terms |= self.extra_losses(out, labels)

        byte_terms = [terms[name] for name in out.BYTE_TERMS if name in terms]
        out.loss = sum(terms.values(), nats_per_byte)
        out.byte_loss = sum(byte_terms, nats_per_byte)
        out.loss_terms = {name: term.detach() for name, term in terms.items()}

    def extra_losses(self, out: SpiderOutput, labels: Tensor) -> dict[str, Tensor]:
        """Return extra loss terms for training, scalars by name: a hook for subclasses. train.py
        averages them over micro-steps and ranks, and logs them to metrics.jsonl."""
        return {}

    # ----------------------------------------------------------------------------------------------
    # Segments

    def predict_boundaries(self, x_MD: Tensor) -> Tensor | None:
        """Run the boundary predictor on the bytes. Return logits [M, 1] for flexitokens, surprise
        and gain [M, 2] for learned boundaries, None for words."""
        if self.boundary_predictor is None:
            return None
        return self.boundary_predictor(rms_norm(x_MD))

    def boundaries(self, predicted: Tensor | None, packed: PackedBytes) -> Tensor:
        """Decide where segments end: b [M], 0 or 1. predicted: from predict_boundaries."""
        b_M = self._boundaries_inside(predicted, packed).to(self.wide_dtype)
        return end_documents(b_M, packed.ids_M)

    def _boundaries_inside(
        self, predicted: Tensor | None, packed: PackedBytes, summed: Tensor | None = None
    ) -> Integers:
        """Decide where segments end inside documents: [M], 0 or 1, or bool.

        summed [documents]: in decoding, see boundaries.flexitokens_boundaries."""
        packing = packed.packing
        if predicted is None:
            return packed.past.word_ends[packed.past.index]
        if isinstance(self.boundary_predictor, SurprisePredictor):
            return self.boundary_predictor.boundaries(
                predicted, packed.ids_M, packing.position, packed.noise_M
            )
        p_M = predicted.squeeze(1).sigmoid()
        return flexitokens_boundaries(p_M, packing, packed.noise_M, summed)

    def null_output(self) -> Tensor:
        """Return the unpooled output for bytes before a document's first boundary, at all offsets:
        [O * D]; without a core, zeros [D]."""
        if self.core is None:
            return self.embed_tokens.new_zeros(self.config.hidden_size)
        return self.null_segment.repeat(self.config.segment_offsets)

    # ----------------------------------------------------------------------------------------------
    # Decoding. The state and sampling are in spider/model/decode.py.

    def decoding_state(self, rows: int = 1, n_loops: int | None = None) -> DecodingState:
        """Make the state of `rows` rows that have no bytes yet. n_loops defaults to the config's.

        Raise UsageError if the model is a subclass whose decoding is wrong, see _check_decoding."""
        n_loops = self.loops_of(n_loops)
        if self.checks_decoding and not self.training:
            self._check_decoding(n_loops)
        null = self.null_output().detach().to(self.compute_dtype)
        return DecodingState(self.config, rows, n_loops, null, self.wide_dtype)

    @torch.no_grad()
    def _check_decoding(self, n_loops: int):
        """Raise UsageError unless a text that is decoded in steps has the logits of a full pass.

        A layer of a subclass that mixes tokens sees only the tokens of a step, unless it keeps
        earlier ones."""
        unchecked = copy(self)  # with the same weights
        unchecked.checks_decoding = False
        # in fp32, so that near-ties of experts or boundaries do not flip
        unchecked.compute_dtype = self.wide_dtype
        text = b"Rows read the rows before them. " * 6
        ids = torch.tensor([[BOS_ID, *text]], device=self.embed_tokens.device)
        full = unchecked(ids, n_loops=n_loops).logits
        state = unchecked.decoding_state(n_loops=n_loops)
        steps = ids.tensor_split([*range(120, 144)], dim=1)  # two long steps, single bytes between
        stepped = torch.cat([unchecked.step(piece, state) for piece in steps], dim=1)
        if not torch.allclose(stepped, full, atol=0.01, equal_nan=True):
            raise UsageError(
                f"{type(self).__name__}'s logits in decoding differ from those of a full pass: a "
                f"layer that mixes tokens must keep the last tokens that it has seen, see "
                f"docs/guide/trying-an-idea.md#a-layer-that-mixes-tokens"
            )

    @torch.no_grad()
    def step(self, input_ids: Tensor, state: DecodingState) -> Tensor:
        """Feed input_ids int64 [B, T] and advance the state; return fp32 logits [B, T, V].

        The logits equal those of `forward` in evaluation mode over the whole text. The core runs
        once for all segments that end in a piece of the step, see split_pieces. Inside
        `cast_weights_once`, weights are cast once for many steps.

        Raise RuntimeError in training mode, where segments are random, and ValueError for bad
        input_ids. After another exception, the state is unusable."""
        check_ids("input_ids", input_ids, len(state.position))
        return self._step(np.array(input_ids.tolist()), state)

    def _step(self, ids_BT: np.ndarray, state: DecodingState) -> Tensor:
        """Feed bytes that the host holds; see `step`."""
        if self.training:
            raise RuntimeError("decoding needs evaluation mode: call model.eval() first")
        if ids_BT.min() < 0 or ids_BT.max() >= self.config.vocab_size:
            raise ValueError(f"input_ids must be 0 to {self.config.vocab_size - 1}")
        work = ids_BT.size * self.config.hidden_size**2
        with fewer_threads(work), torch.inference_mode():  # inference mode is 10% faster
            logits = [self._read_piece(piece, state) for piece in split_pieces(ids_BT)]
        return torch.cat(logits, dim=1)  # a normal tensor, not an inference tensor

    def _read_piece(self, ids_BT: np.ndarray, state: DecodingState) -> Tensor:
        """Feed a piece [B, T] and advance the state; return logits [B, T, V]."""
        c = self.config
        rows, length = ids_BT.shape
        device = state.summed.device
        reach = state.last_bytes.shape[1]
        known = np.concatenate((state.last_bytes, ids_BT), axis=1)
        # Whether the first byte starts a document depends on the byte before it.
        starts = document_starts(known[:, reach - 1 :])[:, 1]
        for row in starts.nonzero()[0].tolist():
            state.start_document(row, self.null_output())

        # Pack the piece as `_pack` packs a batch.
        position = state.position[:, None] + np.arange(-reach, length)
        index = np.arange(known.size).reshape(known.shape)[:, reach:]
        past = PastBytes(known.ravel(), position.ravel(), index.ravel())
        matches = None
        if self.engram_match is not None:
            found = self.engram_match.step(ids_BT, past, state.position, state.history)
            matches = Matches(*(to_device(part, device) for part in found))
        step = StepTokens(np.full(rows, length), state.position)
        packing = Packing.of_step(step, c, self.compute_dtype, device)
        packed = PackedBytes(to_device(ids_BT, device), packing, past, matches)

        cache = LatentCache(state.byte_latents, step, c.byte_window, state.kept)
        x_MD = self.before_core(packed, cache)
        if self.core is not None:
            x_MD = x_MD + self._read_segments(x_MD, packed, state)
        logits = self.after_core(x_MD, packed, cache)
        state.byte_latents = cache.buffer
        state.position = state.position + length
        state.last_bytes = known[:, length:]
        return logits.view(rows, length, -1)

    def _read_segments(self, x_MD: Tensor, packed: PackedBytes, state: DecodingState) -> Tensor:
        """Pool the segments that end in a piece, run the core on them, and unpool its output to
        bytes [M, D]."""
        device = x_MD.device
        ends = self._boundaries_inside(self.predict_boundaries(x_MD), packed, state.summed)
        if isinstance(ends, Tensor):
            ends = np.array(ends.tolist())  # host synchronisation
        ends_M = end_documents(ends, packed.past.ids[packed.past.index]) > 0
        rows, length = packed.input_ids.shape
        segments = StepSegments(ends_M.reshape(rows, length), state.open_bytes)

        # A row's first byte continues its open segment.
        segment = to_device(np.append(segments.segment, segments.segment[:, 0]), device)
        bytes_and_open = torch.cat((x_MD.to(self.wide_dtype), state.open_segment))
        sums = bytes_and_open.new_zeros(len(segments.bytes), x_MD.shape[1])
        sums.index_add_(0, segment, bytes_and_open)
        state.open_segment = sums[:rows]
        state.open_bytes = segments.bytes[:rows]

        outputs = state.unpooled
        if ends_M.any():
            n_bytes = to_device(segments.bytes[rows:], device)
            z_ND = sums[rows:] / n_bytes[:, None]
            past = packed.past.select(ends_M.nonzero()[0])
            output = self._decode_core(z_ND.to(x_MD.dtype), segments.ended, past, state)
            outputs = torch.cat((outputs, output))
            newest_B = to_device(segments.output[:, -1], device)
            state.unpooled = outputs.index_select(0, newest_B)
        offsets = self.config.segment_offsets
        index = segments.output * offsets + np.minimum(segments.offset, offsets - 1)
        return outputs.view(-1, x_MD.shape[1]).index_select(0, to_device(index.ravel(), device))

    def _decode_core(
        self, z_ND: Tensor, length_B: np.ndarray, past: PastBytes, state: DecodingState
    ) -> Tensor:
        """Run the core on the segments that end in a piece, length_B of each row, after those in
        the state's caches; return [N, O * D]."""
        assert self.core is not None
        step = StepTokens(length_B, state.segments)
        packing = Packing.of_step(step, self.config, self.compute_dtype, z_ND.device)
        latents = LatentCache(state.segment_latents, step)
        convolved = ConvolutionCache(state.convolved, step, self.config)
        segments = len(z_ND)
        segment_weight_N = z_ND.new_full((segments,), 1 / segments, dtype=self.wide_dtype)
        caches = (latents, convolved)
        core_inputs = CoreInputs(packing, past, segment_weight_N, state.n_loops, caches=caches)
        output = self.core(z_ND, core_inputs).output
        state.segment_latents = latents.buffer
        state.convolved = convolved.buffer
        state.segments = state.segments + length_B
        return output

    @torch.no_grad()
    def generate_batch(
        self,
        logits: Tensor,
        state: DecodingState,
        max_new_bytes: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        generator: torch.Generator | None = None,
        no_repeat_ngram_size: int = 0,
    ) -> Iterator[list[int | None]]:
        """Yield up to max_new_bytes lists with the next byte (0-255) of each row, or None after the
        row's EOS. Weights must not change meanwhile.

        logits [B, V]: for the last byte fed to the state. Requesting a byte advances the state.
        temperature, top_k, top_p, generator: see decode.draw. no_repeat_ngram_size: do not write an
        n-gram of this many bytes twice; 0: off.

        Raise FloatingPointError for a non-finite logit."""
        written = np.empty((len(logits), 0), dtype=np.int64)
        ended = np.zeros(len(logits), dtype=bool)
        with self.cast_weights_once():
            for count in range(max_new_bytes):
                if count > 0:
                    logits = self._step(written[:, -1:], state)[:, -1]
                is_finite = logits.isfinite().all(1)
                if no_repeat_ngram_size > 0:
                    logits = forbid_repeats(logits, written, no_repeat_ngram_size)
                drawn = draw(logits, temperature, top_k, top_p, generator)
                drawn = torch.where(is_finite, drawn, -1)
                drawn_B = np.array(drawn.tolist())  # host synchronisation
                if (drawn_B < 0).any():
                    raise FloatingPointError(
                        "the model's logits are not finite numbers: its weights are ruined"
                    )
                drawn_B[ended] = PAD_ID
                written = np.column_stack((written, drawn_B))
                ended |= drawn_B == EOS_ID
                if ended.all():
                    return
                yield [byte if byte < 256 else None for byte in drawn_B.tolist()]

    def generate(
        self,
        ids: list[int],
        max_new_bytes: int,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
        n_loops: int | None = None,
    ) -> Iterator[int]:
        """Yield up to max_new_bytes bytes (0-255) that continue the prefix `ids`, until EOS; see
        `generate_batch`."""
        state = self.decoding_state(n_loops=n_loops)
        with self.cast_weights_once():
            logits = self.step(torch.tensor([ids], device=self.embed_tokens.device), state)[:, -1]
        for (byte,) in self.generate_batch(
            logits, state, max_new_bytes, temperature, generator=generator
        ):
            assert byte is not None  # the only row's EOS ends the loop
            yield byte

    # ----------------------------------------------------------------------------------------------
    # Training

    def cast_weights_once(self) -> AbstractContextManager[None]:
        """Cast weights once for all passes of an optimizer step; see layers.cast_weights_once."""
        return cast_weights_once(self)

    def zero_grad(self, set_to_none: bool = True):
        """Clear all gradients, including those that Engram tables have gathered."""
        super().zero_grad(set_to_none)
        for table in tables_of(self):
            table.forget()

    @torch.no_grad()
    def update_expert_bias(self, tokens_per_expert: Tensor):
        """Move the experts' selection bias towards an even load, once per optimizer step.
        tokens_per_expert [L, E]: summed over loops, micro-steps and ranks."""
        if self.core is None:
            return
        for layer, tokens_E in zip(self.core.layers, tokens_per_expert, strict=True):
            direction_E = (tokens_E.mean() - tokens_E).sign()
            layer.moe.expert_bias += self.config.expert_bias_rate * direction_E

    def update_boundaries(self, counts: Tensor, nats_per_byte: float):
        """Update learned boundaries, once per optimizer step; see SurprisePredictor.update. counts:
        SpiderOutput.boundary_counts, summed over micro-steps and ranks. nats_per_byte: the step's
        mean loss."""
        if isinstance(self.boundary_predictor, SurprisePredictor):
            self.boundary_predictor.update(counts, nats_per_byte)

    # ----------------------------------------------------------------------------------------------
    # Compilation and backends

    def compile_layers(self, **settings: Any) -> str | None:
        """Compile each class of layer to one graph with torch.compile. Also compile the core's
        injection, and what its Engrams compute once for all loops.

        torch.compile gets the function `in_one_graph` of each class, not the modules, which have
        FSDP's hooks. The module's attribute `compiled` is the compiled function.

        Only passes with gradients are compiled; evaluation and decoding have other shapes and stay
        eager. The numbers of segments and documents are dynamic sizes. settings: for torch.compile.

        Return why the core's layers are left out (their graph would break), or None."""
        obstacle = None
        if self.compute_dtype != torch.bfloat16:
            obstacle = "torch.compile supports grouped products only in bf16"
        elif self.backend == "tile":
            obstacle = "torch.compile does not support TileKernels; use --moe_backend grouped"
        self.compiled = True
        # torch advises TF32 for fp32 products. Here only router, halting and boundary predictors
        # have any, and in TF32 their near-ties would flip.
        warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")
        # torch warns about recomputed in-place operations; ours only modify fresh tensors.
        logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
        compiled = {}  # one per class
        for module in self._compilable_modules(with_core=obstacle is None):
            function = type(module).in_one_graph
            if function not in compiled:
                compiled[function] = torch.compile(function, **settings)
            module.compiled = compiled[function]
        return obstacle

    def uncompile_layers(self):
        """Run all layers eagerly again."""
        self.compiled = False
        for module in self._compilable_modules():
            module.compiled = None

    def _compilable_modules(self, with_core: bool = True) -> list[Any]:
        """Return the modules that compile_layers compiles: the byte layers and, with_core, the
        modules of the core that have `in_one_graph`."""
        modules: list[nn.Module] = [*self.prelude, *self.coda]
        if self.core is not None and with_core:
            modules += self.core.modules()
        return [module for module in modules if hasattr(module, "in_one_graph")]

    def set_backend(self, backend: str):
        """Set the backend of the experts, one of config.BACKENDS; raise ValueError for other
        names."""
        if backend not in BACKENDS:
            raise ValueError(f"backend: {backend!r} is not one of {', '.join(BACKENDS)}")
        self.backend = backend
        for module in self.modules():
            if isinstance(module, MoE):
                module.backend = backend

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
    Engram, a memory of hashed contexts, at segment rate                           arXiv 2601.07372
    ... and at byte rate                                                      BLT, arXiv 2412.09871
    match memory: the byte after a context's last occurrence         PAQ's match model, Mahoney 2005

Everything runs on packed rows, [rows, hidden_size]; `cu_seqlens` marks where documents start.
Sequences are not padded, memory grows with the number of bytes, and documents do not see each
other. Parameters are fp32 (or another dtype, if converted). Products run in `Spider.compute_dtype`.
Sums over rows, logits and losses are at least fp32 (`wide_dtype`).

Names of tensors end with their shape. `h_nD` is [n, D], a state of each active row. These
letters mean the same in `spider/`, whose modules add their own:

    B  sequences                             T  bytes of a sequence
    M  packed bytes, B * T                   W  last bytes at each byte, the newest first
    N  segments, in the core with padding    n  active rows: segments that are still in the core
    D  hidden_size                           V  vocab_size
    O  segment_offsets                       L  core layers
    E  routed experts                        K  experts per token
    C  kv_lora_rank                          R  qk_rope_head_dim
"""

import logging
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple, cast

# isort: split
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from spider.config import BACKENDS, SpiderConfig
from spider.model.attention import MLA, LatentCache
from spider.model.boundaries import (
    PredictorTerms,
    SurprisePredictor,
    boundary_loss,
    flexitokens_boundaries,
    surprise_loss,
)
from spider.model.contexts import PastBytes
from spider.model.decode import decoding_state, generate, generate_batch, step
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
    check_ids,
    document_cu_seqlens,
    mark_tokens_dynamic,
    padding_multiple,
    round_up,
)
from spider.model.segments import (
    boundary_before_last,
    last_boundary,
    pool_segments,
    segment_ends,
    segment_offsets,
    unpool_segments,
)
from spider.vocabulary import EOS_ID, PAD_ID
from tile_moe import MoE, Routing, balance, resolve_backend

# Sites of dropout: each draws another mask from the same noise. Site 5 is boundaries.STRAY_SITE.
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
    """What later segments read of a core layer. Halted segments keep that of their last loop."""

    latents: Tensor | None = None  # [N, C + R], of attention
    convolved: Tensor | None = None  # what Engram's convolution reads, see SegmentEngram.forward


# The caches of a core layer in decoding: a LayerState's values, of earlier segments.
LayerCaches = tuple[LatentCache | None, ConvolutionCache | None]
NO_CACHES: LayerCaches = (None, None)


class LayerOutput(NamedTuple):
    """The result of one visit of a core layer."""

    x_nD: Tensor
    routing: Routing
    state: LayerState


class RecurrentBlock(nn.Module):
    """A layer of the core at segment rate: Engram in some layers, attention, experts."""

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
        caches: LayerCaches,
        reuse: Routing | None = None,
    ) -> LayerOutput:
        """Compute one visit of the active rows.

        retrieved: of this layer's Engram. state: of the loop before. reuse: a routing to reuse,
        see MoE."""
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

        Returns a flat tuple, since checkpoint returns no other from a graph: the output, the two
        tensors of LayerState, and score_nE and topk_idx_nK of Routing. Recomputation is part of the
        backward graph, and reuses the routing: the results of its sort are kept."""

        def compute(x_nD: Tensor) -> tuple[Tensor | None, ...]:
            y_nD, routing, (latents, convolved) = self(
                x_nD, packing, retrieved, active, state, NO_CACHES
            )
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
    """Run a core layer once: compiled, plainly, or with activation checkpointing.

    Recomputation reuses the routing, since a near-tie that falls the other way would corrupt the
    gradient."""
    if layer.compiled is not None and torch.is_grad_enabled():
        dynamic = [x_nD, *vars(active).values(), *state, *vars(packing).values()]
        if retrieved is not None:
            dynamic += retrieved
        mark_tokens_dynamic(*dynamic)
        y_nD, latents, convolved, score_nE, topk_idx_nK = layer.compiled(
            layer, x_nD, packing, retrieved, active, state, recompute
        )
        routing = Routing(score_nE, topk_idx_nK, None)
        return LayerOutput(y_nD, routing, LayerState(latents, convolved))
    if not recompute:
        return layer(x_nD, packing, retrieved, active, state, caches)

    reuse: Routing | None = None  # by the first call of `compute`, for the recomputation

    def compute(x_nD: Tensor) -> LayerOutput:
        nonlocal reuse
        output = layer(x_nD, packing, retrieved, active, state, caches, reuse)
        if reuse is None:
            # without the score, which would keep the first call's graph in memory
            reuse = Routing(None, output.routing.topk_idx, output.routing.slots)
        return output

    return checkpoint(compute, x_nD, use_reentrant=False, preserve_rng_state=False)


# --------------------------------------------------------------------------------------------------
# Halting


class Halting:
    """ACT over the loops of one pass (Graves, arXiv 1603.08983).

    The weight of a loop is p while the running sum is below the threshold. On the loop that reaches
    it, and on the last one, the weight is the remainder to 1, and the segment halts. It is computed
    once more, with weight 0, so that later segments can read its final state instead of the one
    before. Then it leaves the core.

    A segment that halts in its first loop has weight 1 there for any p, so there is no gradient to
    continue, nor for later loops. Therefore a warm-up scales p until all loops have learned.
    """

    def __init__(self, segment_weight_N: Tensor, threshold: float, drop_halted: bool):
        """Begin a pass.

        segment_weight_N: 1 / segments, and 0 for padding rows. drop_halted: compute only the rows that are
        still in the core, whose number the host has to wait for; else compute all rows."""
        self.threshold = threshold
        self.drop_halted = drop_halted
        self.active = ALL_TOKENS
        self.segment_weight_N = segment_weight_N  # 0 from the loop in which a segment halts
        self.running_N = segment_weight_N > 0
        self.remaining_N = torch.ones_like(segment_weight_N)  # 1 - weights so far; 0 once halted
        self.output_ND: Tensor | None = None  # sum of weight * state
        self.loops = segment_weight_N.new_zeros(())  # loops until halting, mean over segments
        self.ponder = segment_weight_N.new_zeros(
            ()
        )  # ACT's cost, loops + remainder, mean over segments

    def add(self, h_ND: Tensor, p_N: Tensor, last: bool):
        """Add the states after a loop with their halting probabilities (0 in rows that the loop did
        not compute), and choose the rows of the next loop."""
        if last:
            halts_N = torch.ones_like(self.running_N)
        else:
            halts_N = 1 - self.remaining_N + p_N >= self.threshold
        weight_N = torch.where(halts_N, self.remaining_N, p_N)
        weighted_ND = weight_N[:, None].to(h_ND.dtype) * h_ND
        self.output_ND = weighted_ND if self.output_ND is None else self.output_ND + weighted_ND

        share = self.segment_weight_N.sum()  # share of segments that were running
        remainder = self.segment_weight_N @ torch.where(halts_N, self.remaining_N, 0)
        self.loops = self.loops + share
        self.ponder = self.ponder + share + remainder

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
    """The inputs of a forward pass through the core, other than the pooled segments z [N, D]."""

    packing: Packing  # packing of the segments
    past: PastBytes  # of the last byte of each segment
    segment_weight_N: Tensor  # 1 / segments, 0 for padding rows
    n_loops: int
    recompute: bool = False  # activation checkpointing of every visit of a layer
    halting_warmup: float = 1.0  # factor on halting probabilities
    dropout: float = 0.0  # rate, at the core's input and output
    noise_N: Tensor | None = None  # int64, for dropout; None: no dropout
    # In decoding, of all layers and loops:
    latents: LatentCache | None = None
    convolved: ConvolutionCache | None = None

    @property
    def decoding(self) -> bool:
        return self.latents is not None

    def caches_of(self, layer: int, loop: int, engram_layers: tuple[int, ...]) -> LayerCaches:
        """Return the caches of a layer in a loop, none outside decoding."""
        if self.latents is None or self.convolved is None:
            return NO_CACHES
        convolved = None
        if layer in engram_layers:
            convolved = self.convolved.of(engram_layers.index(layer), loop)
        return self.latents.of(layer, loop), convolved


class CoreOutput(NamedTuple):  # FSDP looks for tensors with gradients in tuples, not in dataclasses
    """The result of a pass through the core. Losses are means over layer visits or segments."""

    output: Tensor | None  # [N, O * D], of each segment at all segment offsets; None without core
    aux_loss: Tensor  # f_e * P_e balance loss
    z_loss: Tensor  # router z-loss
    ponder: Tensor  # ACT's loops + remainder, per segment
    mean_loops: Tensor  # loops until halting, per segment
    tokens_per_expert: Tensor  # fp32, tokens per expert, summed over loops
    # Filled in by Spider._through_core:
    segments: int = 0
    boundary_loss: Tensor | None = None
    unpooled_MD: Tensor | None = None  # the output, unpooled to bytes
    predictor_terms: PredictorTerms | None = None  # with learned boundaries, in training


# The scores, topk_idx and `share` of the rows of one visit of a layer with routed experts; share is
# the weight of each row in the means: 1 / segments, and 0 for padding and halted rows.
RoutedVisit = tuple[Tensor, Tensor, Tensor]


class RecurrentCore(nn.Module):
    """The looped layers, with weights that all loops share:

        v   = A h + B e + loop_embedding[t]
        y   = layers(v)
        h'  = y + LoRA_t(y)

    e are the normed segments. The output is the sum of the states h' of all loops, weighted by
    ACT."""

    compiled: Callable | None = None  # form of the injection, see Spider.compile_layers
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
        layers = nn.ModuleList(
            block_class(config, i in config.engram_layers, attention_class)
            for i in range(config.n_recurrent_layers)
        )
        self.layers = cast(Sequence[RecurrentBlock], layers)
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
            # added to out_proj for each segment offset, [offsets, out, in]
            self.offset_proj = nn.Parameter(torch.empty(config.segment_offsets, width, width))
        # See Halting. None: on a CPU and in decoding; a GPU would wait in every loop of training.
        self.drop_halted: bool | None = None

    def forward(self, z_ND: Tensor, core_inputs: CoreInputs) -> CoreOutput:
        """Loop over the pooled segments. In decoding there are no balance losses and counts."""
        n_loops = core_inputs.n_loops
        trained_loops = self.config.n_loops
        drop_halted = self.drop_halted
        if drop_halted is None:
            drop_halted = core_inputs.decoding or not z_ND.is_cuda
        halting = Halting(core_inputs.segment_weight_N, self.config.act_threshold, drop_halted)
        e_ND = apply_dropout(rms_norm(z_ND), core_inputs.dropout, core_inputs.noise_N, CORE_INPUT)
        decay_D = self.decay()  # A, the same in every loop
        retrieved = self._retrieve(z_ND, core_inputs)
        states = [LayerState()] * len(self.layers)
        visits: list[RoutedVisit] = []
        h_nD: Tensor | None = None
        for t in range(n_loops):
            loop = min(t, trained_loops - 1)  # further loops use the last one's parameters
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
                if routing.score is not None and routing.topk_idx is not None:
                    score_NE = active.scatter(routing.score)
                    topk_idx_NK = active.scatter(routing.topk_idx)
                    visits.append((score_NE, topk_idx_NK, halting.segment_weight_N))
            # h' = y + LoRA_t(y)
            h_nD = self.apply_lora(y_nD, loop)
            h_ND = active.scatter(h_nD)
            p_n = core_inputs.halting_warmup * self.halt(h_nD)
            halting.add(h_ND, active.scatter(p_n), last=t == n_loops - 1)
            h_nD = halting.active.select(h_ND)
            # In decoding, later steps read the segments that halted in this loop: one more loop
            # computes them.
            are_computed = not core_inputs.decoding or len(h_nD) == 0
            if drop_halted and are_computed and not halting.running_N.any():
                break
        assert halting.output_ND is not None  # there is at least one loop
        normed_ND = rms_norm(halting.output_ND)
        normed_ND = apply_dropout(normed_ND, core_inputs.dropout, core_inputs.noise_N, CORE_OUTPUT)
        output = self._read_out(normed_ND)
        if core_inputs.decoding:
            visits = []
        return self._result(output, visits, halting, n_loops, decay_D)

    # ----------------------------------------------------------------------------------------------
    # The equations of a loop

    def decay(self) -> Tensor:
        """Return A [D] = exp(-softplus(dt) * exp(log_A)) (Parcae, arXiv 2604.12946).

        The limits keep it inside (0, 1) in fp32, for any parameters."""
        rate = F.softplus(wide(self.dt)) * wide(self.log_A).clamp(-15, 15).exp()
        return torch.exp(-rate.clamp(1e-4, 15))

    def inject(self, h_nD: Tensor | None, e_nD: Tensor, loop: int, decay_D: Tensor) -> Tensor:
        """Return A h + B e + loop_embedding, summed in fp32; h is None before the first loop."""
        embedding_D = self.loop_embedding[loop]
        if self.compiled is not None and torch.is_grad_enabled():
            mark_tokens_dynamic(h_nD, e_nD)
            return self.compiled(self, h_nD, e_nD, embedding_D, decay_D)
        return self.in_one_graph(h_nD, e_nD, embedding_D, decay_D)

    def in_one_graph(
        self, h_nD: Tensor | None, e_nD: Tensor, embedding_D: Tensor, decay_D: Tensor
    ) -> Tensor:
        """Compute `inject` with the loop's row of loop_embedding."""
        v_nD = torch.addcmul(wide(embedding_D), wide(self.B), e_nD)
        if h_nD is not None:
            v_nD = torch.addcmul(v_nD, decay_D, h_nD)
        return v_nD.to(e_nD.dtype)

    def apply_lora(self, y_nD: Tensor, loop: int) -> Tensor:
        """Return y + LoRA_t(y). The adapter reads the normed state, so that its output is bounded
        and cannot undo A < 1."""
        if not self.config.lora_rank:
            return y_nD
        down = self.lora_down[loop].to(y_nD.dtype)  # [D, lora_rank]
        up = self.lora_up[loop].to(y_nD.dtype)  # [lora_rank, D]
        return y_nD + rms_norm(y_nD) @ down @ up

    def halt(self, h_nD: Tensor) -> Tensor:
        """Return halting probabilities [n]; without ACT they are 0."""
        if self.halt_predictor is None:
            return self.loop_embedding.new_zeros(len(h_nD))
        return self.halt_predictor(rms_norm(h_nD)).sigmoid().squeeze(1)

    # ----------------------------------------------------------------------------------------------
    # Before and after the loops

    def _retrieve(self, z_ND: Tensor, core_inputs: CoreInputs) -> list[RetrievedMemory | None]:
        """Look up each layer's Engram, once for all loops."""
        position_N = core_inputs.packing.position
        retrieved: list[RetrievedMemory | None] = []
        for layer in self.layers:
            if layer.engram is None:
                retrieved.append(None)
            else:
                retrieved.append(layer.engram.retrieve(core_inputs.past, position_N, z_ND.dtype))
        return retrieved

    def _read_out(self, normed_ND: Tensor) -> Tensor:
        """Project states to outputs [N, O * D], one row per segment offset."""
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
        """Compute the balance losses and tokens per expert of all visits, which are in order: the
        layers of a loop side by side. Collect what training adds to the loss and logs.

        Without routed experts there are no visits, no losses and no counts."""
        layers = len(self.layers)
        aux_loss = halting.loops.new_zeros(())
        z_loss = aux_loss
        tokens_per_expert = aux_loss.new_zeros(layers, 0)
        if visits:
            score, topk_idx, share = map(torch.stack, zip(*visits, strict=True))
            sums = balance(score, topk_idx, share, self.layers[0].moe.backend)
            aux_loss = sums.aux_loss
            z_loss = sums.z_loss
            tokens_per_expert = sums.tokens_per_expert.unflatten(0, (-1, layers)).sum(
                0
            )  # over loops
        visited = layers * halting.loops.clamp_min(1e-9)  # 0 loops without segments
        ponder = halting.ponder
        if n_loops > 1:
            # Keeps `decay` in the graph, also where all segments halt in the first loop: FSDP
            # reduces every parameter on every rank.
            ponder = ponder + 0 * decay_D.sum()
        return CoreOutput(
            output, aux_loss / visited, z_loss / visited, ponder, halting.loops, tokens_per_expert
        )


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
    for tensor in _float_tensors(model).values():
        tensor.fill_(math.nan)  # what is never initialized stays NaN
    _init_layers(model)
    _scale_residual_outputs(model)
    model.embed_tokens.normal_()
    model.lm_head.weight.normal_(std=0.02)
    if model.core is not None:
        model.null_segment.zero_()
        _init_core(model.core)
    if isinstance(model.boundary_predictor, SurprisePredictor):
        model.boundary_predictor.init_weights()
    elif model.boundary_predictor is not None:
        prior = model.config.boundary_prior
        bias = model.boundary_predictor.get_parameter("2.bias")
        bias.fill_(math.log(prior / (1 - prior)))
    _init_added_modules(model)
    uninitialized = [name for name, t in _float_tensors(model).items() if t.isnan().any()]
    if uninitialized:
        raise RuntimeError(
            f"uninitialized: {', '.join(uninitialized)}: add a reset_parameters() to the module; "
            f"values from the constructor are lost when a model is built on the meta device"
        )


def _float_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of floating-point numbers, by name."""
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: t for name, t in named if t.is_floating_point() and not t.is_meta}


def _init_layers(model: "Spider"):
    """Initialize the layers, in the order of modules, in which random values are drawn."""
    c = model.config
    depth = _effective_depth(c)
    # Drawn by their own init_weights later, so that all other weights start as they do with words.
    excluded: set[nn.Module] = set()
    if isinstance(model.boundary_predictor, SurprisePredictor):
        excluded = set(model.boundary_predictor.modules())
    tables = 0
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


def _effective_depth(config: SpiderConfig) -> int:
    """Count the layers of a pass, those of the core once per loop."""
    looped = config.n_recurrent_layers * config.n_loops
    return config.n_prelude_layers + looped + config.n_coda_layers


def _scale_residual_outputs(model: "Spider"):
    """Scale the output projections of residual branches down with depth: every o_proj and
    down_proj, in any module. Those before the head add to the logits, and start at 0."""
    scale = (2 * _effective_depth(model.config)) ** -0.5
    for name, p in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            p.mul_(scale)
    before_head = model.engram_output
    if before_head is not None and before_head.logits is not None:
        before_head.logits.weight.zero_()
    if before_head is not None and before_head.votes is not None:
        before_head.votes.get_parameter("2.weight").zero_()


def _init_core(core: RecurrentCore):
    c = core.config
    core.loop_embedding.normal_(std=0.02)
    core.out_proj.weight.zero_()
    if c.segment_offsets > 1:
        core.offset_proj.zero_()
    core.log_A.zero_()
    core.dt.fill_(math.log(math.expm1(0.1)))  # softplus(dt) = 0.1, so that A = exp(-0.1)
    core.B.fill_(1)
    if c.lora_rank:
        core.lora_down.normal_(std=c.hidden_size**-0.5)
        core.lora_up.zero_()
    if core.halt_predictor is not None:
        core.halt_predictor.weight.normal_(std=0.02)
        core.halt_predictor.bias.fill_(-3)


def _init_added_modules(model: nn.Module):
    """Call reset_parameters of the modules that a subclass added: for each tensor that is still
    uninitialized, that of the innermost module that has one."""
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
# Losses


@dataclass
class SpiderOutput:
    """The result of a forward pass; tensors are scalars unless a shape is given."""

    logits: Tensor  # [B, T, V], at least fp32
    segments: Tensor  # number of segments in all sequences
    mean_loops: Tensor
    tokens_per_expert: Tensor  # [L, E] fp32, over all loops
    boundary_counts: Tensor  # see SurprisePredictor.count; empty without learned boundaries
    # None without labels:
    loss: Tensor | None = None  # to minimize
    nats_per_byte: Tensor | None = None  # cross-entropy alone, without labels of -100
    # the weighted terms of the loss beside nats_per_byte, detached
    loss_terms: dict[str, Tensor] | None = None
    # the part of the loss that is a mean over bytes: nats_per_byte, BYTE_TERMS
    byte_loss: Tensor | None = None
    BYTE_TERMS: ClassVar = ("core_loss", "surprise_loss")


def add_losses(
    model: "Spider", out: SpiderOutput, labels: Tensor, result: CoreOutput, halting_warmup: float
):
    """Fill in the loss and its terms."""
    c = model.config
    assert result.boundary_loss is not None
    predictor_terms = result.predictor_terms
    labels_M = labels.reshape(-1)
    logits_MV = out.logits.flatten(0, 1)
    has_label_M = labels_M != -100
    n_labels = has_label_M.sum().clamp_min(1)

    if predictor_terms is None:
        nats = F.cross_entropy(logits_MV, labels_M, ignore_index=-100, reduction="sum")
    else:  # the predictor of surprise learns from each byte's loss
        losses_M = F.cross_entropy(logits_MV, labels_M, ignore_index=-100, reduction="none")
        nats = torch.where(has_label_M, losses_M + predictor_terms.zero_nats_M, 0).sum()
    nats_per_byte = nats / n_labels
    out.nats_per_byte = nats_per_byte
    core_loss = torch.zeros_like(nats)
    if model.training and c.core_loss_weight and result.unpooled_MD is not None:
        # initially unpooled is 0: the gradient's norm exceeds 100, and is clipped
        core_logits_MV = model.lm_head(rms_norm(result.unpooled_MD)).to(logits_MV.dtype)
        core_nats = F.cross_entropy(core_logits_MV, labels_M, ignore_index=-100, reduction="sum")
        core_loss = core_nats / n_labels

    terms = dict(
        boundary_loss=c.boundary_loss_weight * result.boundary_loss,
        aux_loss=c.aux_loss_weight * result.aux_loss,
        z_loss=c.z_loss_weight * result.z_loss,
        ponder_loss=c.ponder_weight * halting_warmup * result.ponder,
        core_loss=c.core_loss_weight * core_loss,
    )
    if predictor_terms is not None:
        error = surprise_loss(predictor_terms.loss_M, losses_M.detach(), has_label_M)
        terms["surprise_loss"] = error / n_labels
    if model.training:
        terms |= model.extra_losses(out, labels)

    byte_terms = [terms[name] for name in out.BYTE_TERMS if name in terms]
    out.loss = sum(terms.values(), nats_per_byte)
    out.byte_loss = sum(byte_terms, nats_per_byte)
    out.loss_terms = {name: term.detach() for name, term in terms.items()}


# --------------------------------------------------------------------------------------------------
# The model


class Spider(nn.Module):
    """The model; see the module's docstring for its features.

    To try an idea (docs/guide/trying-an-idea.md), a subclass replaces classes of layers or
    overrides a method: block_class(config, attention_class), core_block_class(config, has_engram,
    attention_class), attention_class(config), and `extra_losses`."""

    attention_class: type[nn.Module] = MLA
    block_class: type[nn.Module] = Block
    core_block_class: type[nn.Module] = RecurrentBlock

    engram_match: MatchMemory | None
    engram_input: InputEngram | None
    prelude: Sequence[Block]  # a ModuleList, which has no types; so is the coda
    core: RecurrentCore | None
    boundary_predictor: nn.Sequential | SurprisePredictor | None  # flexitokens, learned, words
    coda: Sequence[Block]
    engram_output: OutputEngram | None

    def __init__(self, config: SpiderConfig):
        super().__init__()
        c = config
        self.config = config
        # restored below: a subclass's modules may draw random values here
        random_state = torch.get_rng_state()
        self.compute_dtype = torch.float32  # dtype of products and activations, not of parameters
        self.recompute = "nothing"  # one of RECOMPUTE: layers with activation checkpointing
        self.compiled = False  # see compile_layers
        self.backend = "grouped"  # backend of the experts, see set_backend
        self.casts_early = True  # False under FSDP, which casts in each group's forward
        # whether decoding is compared with a full pass, see decode.check_decoding
        self.checks_decoding = type(self) is not Spider

        match_contexts = len(c.engram_match_contexts)
        has_byte_memory = len(c.engram_byte_contexts) + match_contexts > 0
        has_core = c.n_recurrent_layers > 0
        self.embed_tokens = nn.Parameter(torch.empty(c.vocab_size, c.hidden_size))
        self.engram_match = None
        if match_contexts:
            self.engram_match = MatchMemory(c.engram_match_contexts, max(2, c.engram_votes))
        self.engram_input = InputEngram(c, match_contexts) if has_byte_memory else None
        self.prelude = self._new_byte_layers(c.n_prelude_layers)
        self.core = None
        if has_core:
            self.core = RecurrentCore(c, self.core_block_class, self.attention_class)
            self.null_segment = nn.Parameter(torch.empty(c.hidden_size))
        self.boundary_predictor = self._new_boundary_predictor()
        self.coda = self._new_byte_layers(c.n_coda_layers)
        self.engram_output = OutputEngram(c) if has_byte_memory else None
        self.lm_head = Linear(c.hidden_size, c.vocab_size)

        torch.set_rng_state(random_state)
        if not self.embed_tokens.is_meta:
            # where no tensor has values, and some operations import torch._dynamo
            self.init_weights()

    def _new_byte_layers(self, count: int) -> Sequence[Block]:
        layers = [self.block_class(self.config, self.attention_class) for _ in range(count)]
        return cast(Sequence[Block], nn.ModuleList(layers))

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
        """The dtype of sums, logits and losses: at least fp32."""
        dtype = torch.promote_types(self.embed_tokens.dtype, self.compute_dtype)
        return torch.promote_types(dtype, torch.float32)

    def _apply(self, fn, recurse: bool = True):
        """Apply `half()`, `to(dtype)` and the like to compute_dtype, too."""
        self.compute_dtype = fn(torch.empty(0, dtype=self.compute_dtype)).dtype
        return super()._apply(fn, recurse)

    init_weights = init_weights  # the function above

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
        defaults to the config's. Documents end at EOS and begin at BOS; every row begins one.

        cu_seqlens: document_cu_seqlens(input_ids), if computed on the host beforehand, which saves
        a wait for the device. max_seqlen: its max_seqlen_of, by default T.

        In training mode only:
        noise_seed: the noise of row i, for segments and dropout, is a function of noise_seed + i;
        without a seed, torch's default generator draws it. dropout: its rate at the core's input
        and output; bytes have a fifth of it. halting_warmup: factor on halting probabilities and
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
        predictor_terms = result.predictor_terms
        out = SpiderOutput(
            logits_MV.view(sequences, length, -1),
            segments=zero + result.segments,
            mean_loops=result.mean_loops.detach(),
            tokens_per_expert=result.tokens_per_expert,
            boundary_counts=zero.new_zeros(0)
            if predictor_terms is None
            else predictor_terms.counts,
        )
        if labels is not None:
            add_losses(self, out, labels, result, halting_warmup)
        return out

    def _pack(
        self,
        input_ids: Tensor,
        cu_seqlens: Tensor | None,
        max_seqlen: int | None,
        noise_M: Tensor | None,
    ) -> PackedBytes:
        """Find the documents of a batch, the last bytes before each byte, and matches."""
        c = self.config
        if cu_seqlens is None:
            cu_seqlens = document_cu_seqlens(input_ids)
        if max_seqlen is None:
            max_seqlen = input_ids.shape[1]
        ids_M = input_ids.reshape(-1)
        packing = Packing.build(
            cu_seqlens, len(ids_M), max_seqlen, c, self.compute_dtype, c.byte_window
        )
        if self.compiled:  # else each number of documents would need another graph, and each bound
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
        """Apply a byte layer, with activation checkpointing if `recompute` is "all". number: of the
        layer in the cache."""
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

        The core runs even without segments, because all ranks must run the same collectives."""
        assert self.core is not None
        packing = packed.packing
        predicted = self.predict_boundaries(x_MD)
        b_M = self.boundaries(predicted, packed)
        band_loss = boundary_loss(b_M, packed.input_ids, self.config)
        z_ND, segment_cu_seqlens = pool_segments(x_MD, b_M, packing.cu_seqlens)

        segments = len(z_ND)
        segment_packing = self._pack_segments(segments, segment_cu_seqlens, packed)
        rows = len(segment_packing.document)
        padding = rows - segments
        last_byte_N = segment_ends(b_M, rows)
        share = z_ND.new_full((segments,), 1 / max(1, segments), dtype=self.wide_dtype)
        noise_M = packed.noise_M
        core_inputs = CoreInputs(
            segment_packing,
            past=packed.past.select(last_byte_N),
            segment_weight_N=F.pad(share, (0, padding)),
            n_loops=n_loops,
            recompute=self.recompute != "nothing" and torch.is_grad_enabled(),
            halting_warmup=halting_warmup,
            dropout=dropout,
            noise_N=None if noise_M is None else noise_M.index_select(0, last_byte_N),
        )
        result = self.core(F.pad(z_ND, (0, 0, 0, padding)), core_inputs)
        output = result.output[:segments]

        null = self.null_output()
        unpooled_MD = self.unpool(output, null, b_M, packing, segment_cu_seqlens)
        predictor_terms = None
        predictor = self.boundary_predictor
        if self.training and isinstance(predictor, SurprisePredictor):
            assert predicted is not None
            earlier_MD = self.unpool(
                output.detach(), null.detach(), b_M, packing, segment_cu_seqlens, back=1
            )
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
        """Pack segments and padding: rows are padded to a few numbers (see padding_multiple). The padding
        is a separate document."""
        max_bytes = packed.packing.max_seqlen  # in bytes: no document has more segments
        step = padding_multiple(len(packed.ids_M), max_bytes)
        rows = round_up(max(1, segments), step)
        if rows > segments:
            segment_cu_seqlens = F.pad(segment_cu_seqlens, (0, 1), value=rows)
        max_seqlen = max(max_bytes, step)  # most segments in a document, most rows in the padding
        return Packing.build(segment_cu_seqlens, rows, max_seqlen, self.config, self.compute_dtype)

    def _without_core(self) -> CoreOutput:
        """Return the result of a model with byte layers alone: no segment, all losses zero."""
        zero = self.embed_tokens.new_zeros((), dtype=self.wide_dtype)
        no_tokens = zero.new_zeros(0, self.config.n_routed_experts)
        return CoreOutput(None, zero, zero, zero, zero, no_tokens, boundary_loss=zero)

    def extra_losses(self, out: SpiderOutput, labels: Tensor) -> dict[str, Tensor]:
        """Return further loss terms for training, scalars by name: a hook for subclasses. train.py
        averages them over micro-steps and ranks, and logs them to metrics.jsonl."""
        return {}

    def loops_of(self, n_loops: int | None) -> int:
        """Return a number of loops, by default the config's; raise ValueError if it is below 1."""
        n_loops = self.config.n_loops if n_loops is None else n_loops
        if n_loops < 1:
            raise ValueError(f"n_loops must be at least 1, not {n_loops}")
        return n_loops

    # ----------------------------------------------------------------------------------------------
    # Segments

    def predict_boundaries(self, x_MD: Tensor) -> Tensor | None:
        """Return what the boundary predictor makes of the bytes: logits [M, 1] of flexitokens,
        surprise and gain [M, 2] of learned boundaries, None for words."""
        if self.boundary_predictor is None:
            return None
        return self.boundary_predictor(rms_norm(x_MD))

    def boundaries(
        self,
        predicted: Tensor | None,
        packed: PackedBytes,
        summed: Tensor | None = None,
    ) -> Tensor:
        """Decide where segments end: b [M], 0 or 1. EOS always ends a segment, PAD never.

        predicted: see predict_boundaries. summed [documents]: in decoding, see
        boundaries.flexitokens_boundaries."""
        ids_M = packed.ids_M
        noise_M = packed.noise_M
        packing = packed.packing
        if predicted is None:
            b_M = packed.past.word_ends[packed.past.index].to(self.wide_dtype)
        elif isinstance(self.boundary_predictor, SurprisePredictor):
            ends_M = self.boundary_predictor.boundaries(predicted, ids_M, packing.position, noise_M)
            b_M = ends_M.to(self.wide_dtype)
        else:
            p_M = predicted.squeeze(1).sigmoid()
            b_M = flexitokens_boundaries(p_M, packing, self.wide_dtype, noise_M, summed)
        return torch.where(ids_M == EOS_ID, 1, torch.where(ids_M == PAD_ID, 0, b_M))

    def decode_core(
        self,
        z_ND: Tensor,
        packing: Packing,
        past: PastBytes,
        segment_weight_N: Tensor,
        n_loops: int,
        latents: LatentCache,
        convolved: ConvolutionCache,
    ) -> Tensor:
        """Run the core on the segments that a decoding step has finished, after those in the
        caches; see CoreInputs."""
        assert self.core is not None
        core_inputs = CoreInputs(
            packing, past, segment_weight_N, n_loops, latents=latents, convolved=convolved
        )
        return self.core(z_ND, core_inputs).output

    def null_output(self) -> Tensor:
        """Return the unpooled output for bytes before a document's first boundary, at all offsets:
        [O * D]."""
        return self.null_segment.repeat(self.config.segment_offsets)

    def unpool(
        self,
        z: Tensor,
        null: Tensor,
        b_M: Tensor,
        packing: Packing,
        segment_cu_seqlens: Tensor,
        open_bytes: Tensor | int = 0,
        back: int = 0,
    ) -> Tensor:
        """Unpool the core's output to bytes: z [N, O * D], null [O * D] or one per document, b [M]
        -> [M, D]. open_bytes: see segment_offsets. back: 0 for the last segment that has ended, 1
        for the one before."""
        offsets = self.config.segment_offsets
        offset_M = None
        if offsets > 1:
            z = z.unflatten(-1, (offsets, -1))
            null = null.unflatten(-1, (offsets, -1))
            start_M = packing.cu_seqlens.index_select(0, packing.document)
            boundary_M = boundary_before_last(b_M) if back else last_boundary(b_M)
            offset_M = segment_offsets(boundary_M, start_M, offsets, open_bytes)
        return unpool_segments(z, null, b_M, packing.cu_seqlens, segment_cu_seqlens, offset_M, back)

    # ----------------------------------------------------------------------------------------------
    # Decoding, see spider/model/decode.py

    decoding_state = decoding_state
    step = step
    generate_batch = generate_batch
    generate = generate

    # ----------------------------------------------------------------------------------------------
    # Training

    cast_weights_once = cast_weights_once  # a context for all passes of an optimizer step

    def zero_grad(self, set_to_none: bool = True):
        """Drop all gradients, including those gathered by Engram tables."""
        super().zero_grad(set_to_none)
        for table in tables_of(self):
            table.forget()

    @torch.no_grad()
    def update_expert_bias(self, tokens_per_expert: Tensor):
        """Adjust the experts' selection bias towards an even load, once per optimizer step.
        tokens_per_expert [L, E]: over all loops, micro-steps and ranks."""
        if self.core is None:
            return
        for layer, tokens_E in zip(self.core.layers, tokens_per_expert, strict=True):
            direction_E = (tokens_E.mean() - tokens_E).sign()
            layer.moe.expert_bias += self.config.expert_bias_rate * direction_E

    def update_boundaries(self, counts: Tensor, nats_per_byte: float):
        """Update learned boundaries once per optimizer step, from SpiderOutput.boundary_counts
        summed over micro-steps and ranks, and the step's mean loss; see SurprisePredictor."""
        if isinstance(self.boundary_predictor, SurprisePredictor):
            self.boundary_predictor.update(counts, nats_per_byte)

    # ----------------------------------------------------------------------------------------------
    # Compilation and backends

    def compile_layers(self, **settings: Any) -> str | None:
        """Compile each kind of layer to one graph by torch.compile. Also compile the core's
        injection, and what its Engrams compute once for all loops.

        Of each such module, the function `in_one_graph` of its class is compiled, and `compiled` is
        the compiled form. It is not the module itself, which has FSDP's hooks.

        Only passes with gradients are compiled: evaluation and decoding, with other shapes, stay
        eager. The numbers of segments and documents are dynamic sizes. `settings` go to
        torch.compile.

        Returns why the core's layers are not compiled, or None. They are left out if the graph
        would break."""
        obstacle = None
        if self.compute_dtype != torch.bfloat16:
            obstacle = "torch.compile supports grouped products only in bf16"
        elif self.backend == "tile":
            obstacle = "torch.compile does not support TileKernels; use --moe_backend grouped"
        self.compiled = True
        # torch advises TF32 for products of fp32. Here these are router, halting and boundaries,
        # whose near-ties TF32 would decide otherwise.
        warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")
        # torch warns of recomputed in-place operations; these only modify fresh tensors.
        logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
        compiled: dict[Callable, Callable] = {}  # one per kind of module
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

    def _compilable_modules(self, with_core: bool = True) -> list[Any]:
        """Return the modules that compile_layers compiles: byte layers, and what of the core can be
        compiled."""
        modules: list[nn.Module] = [*self.prelude, *self.coda]
        if self.core is not None and with_core:
            modules += self.core.modules()
        return [module for module in modules if hasattr(module, "in_one_graph")]

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
        device = self.embed_tokens.device
        backend, remark = resolve_backend(
            "auto", device, self.config, self.compute_dtype, compiled=True
        )
        self.set_backend(backend)
        return remark

"""Spider: a byte-level Recurrent-Depth Transformer.

    bytes -> embed_tokens -> prelude (byte rate) -> segments -> recurrent core (segment rate, looped)
          -> unpool + residual -> coda (byte rate) -> norm -> lm_head

What it is made of, and where each part comes from:
    MLA, latent attention with a decoupled rotary key                                     DeepSeek-V2, arXiv 2405.04434
    mixture of experts, balanced by a bias on the selection, without capacity             DeepSeek-V3, arXiv 2412.19437
    learned segments, mean pooling                           FlexiTokens, arXiv 2507.12720; Nawrot, arXiv 2211.09761
    segments that end with a word                                                          SpaceByte, arXiv 2404.14408
    recurrent depth with a stable linear injection (LTI)          Huginn, arXiv 2502.05171; Parcae, arXiv 2604.12946
    adaptive computation time (ACT)                                                             Graves, arXiv 1603.08983
    Engram, a memory of hashed n-grams, at segment rate and at byte rate     arXiv 2601.07372; BLT, arXiv 2412.09871
    what followed in the document where the last bytes stood before              the match model of PAQ, Mahoney 2005

Everything runs on packed rows, [rows, hidden_size], with `cu_seqlens` marking where a document starts: nothing is
padded to a longest row, memory grows with the number of bytes, and no document sees another. Shapes in comments:
B sequences of T bytes, M = B * T bytes, N segments of them, D hidden size, H heads, E experts, k experts per token,
L core layers.
Parameters are fp32, or the type that they were given; products run in `Spider.compute_dtype`; sums over rows, logits
and losses are fp32 at least (`wide_dtype`).
"""

import logging
import math
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from spider.model.attention import MLA
from spider.model.cache import Cache
from spider.model.casting import Linear, WideLinear, wide
from spider.model.config import BACKENDS, SpiderConfig
from spider.model.decoding import PIECE, DecodingState, Past, Seen, check_ids, draw
from spider.model.engram import ByteEngram, EngramTable, Recalled, SegmentEngram
from spider.model.initialization import UninitializedTensors
from spider.model.layers import Block, SwiGLU
from spider.model.match_memory import MatchMemory
from spider.model.ngrams import shifted_bytes, word_ends
from spider.model.noise import byte_noise, dropped, uniform
from spider.model.norm import rms_norm
from spider.model.packing import ALL_ROWS, ActiveRows, Packing, document_cu_seqlens, document_starts, round_up
from spider.model.parameters import component_of
from spider.model.segments import segment_offsets, pool_segments, sum_segments, unpool_segments
from tile_moe import Routing, balance, fp8_grouped_product, grouped_product, moe_forward, place, route
from tokenizer import EOS_ID, PAD_ID


class CoreStats(NamedTuple):              # a tuple: FSDP looks for the gradients' way back in those
    """What a run of the core reports beside its output. Losses are means over layer visits or segments."""
    aux_loss: Tensor                      # f_e * P_e balance loss
    z_loss: Tensor                        # router z-loss
    ponder: Tensor                        # ACT's loops + remainder, per segment
    mean_loops: Tensor                    # loops until halting, per segment
    load: Tensor                          # [L, E] fp32, tokens of an expert relative to an even share, sum over loops


@dataclass
class SpiderOutput:
    """Result of a forward pass; tensors are scalars unless a shape is given."""
    logits: Tensor                        # [B, T, vocab_size], fp32
    loss: Tensor | None                   # what is minimised; None without labels
    nats_per_byte: Tensor | None          # cross-entropy alone, over the labels that count
    segments: Tensor                      # number of segments, all sequences together
    mean_loops: Tensor
    tokens_per_expert: Tensor             # [L, E] fp32, over all loops
    loss_terms: dict[str, Tensor] | None = None  # what each term adds to nats_per_byte in the loss, detached
    by_byte: Tensor | None = None         # of the loss nats_per_byte and BYTE_TERMS, the means over bytes
    BYTE_TERMS: ClassVar = ("core_loss",)


# ---------------------------------------------------------------------------------------------------------------------
# Mixture of experts


class MoE(nn.Module):
    """Routed experts and a shared one, [N, D] -> [N, D]; no capacity, no token is dropped."""
    matrix_stacks = "w_gate", "w_up", "w_down"

    def __init__(self, config: SpiderConfig):
        super().__init__()
        self.config, self.backend, c = config, "grouped", config
        experts, width = c.n_routed_experts, c.moe_intermediate_size
        if experts:
            self.router = WideLinear(c.hidden_size, experts)
            self.w_gate = nn.Parameter(torch.empty(experts, c.hidden_size, width))
            self.w_up = nn.Parameter(torch.empty(experts, c.hidden_size, width))
            self.w_down = nn.Parameter(torch.empty(experts, width, c.hidden_size))
        self.register_buffer("expert_bias", torch.empty(experts))
        self.shared = SwiGLU(c.hidden_size, c.n_shared_experts * width) if c.n_shared_experts else None
        self.fp8 = False                  # whether the routed experts multiply in FP8 when training
        self.cast = None                  # of the routed experts' weights, while Spider.cast_weights_once lasts

    def weights(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None, Tensor]:
        """w_gate, w_up, w_down in the type of the products, the first two joined where a backend multiplies them as one
        (see moe_forward); for FP8 columns lie together, as its kernels want them."""
        w_gate, w_up, w_down = (w.to(dtype) for w in (self.w_gate, self.w_up, self.w_down))
        if self.backend != "loop":
            w_gate, w_up = torch.cat((w_gate, w_up), dim=-1), None
        return tuple(w.mT.contiguous().mT if self.fp8 and w is not None else w for w in (w_gate, w_up, w_down))

    def cast_weight(self, dtype: torch.dtype):
        self.cast = self.weights(dtype) if self.config.n_routed_experts else None

    def forward(self, x: Tensor, decided: Routing | None = None) -> tuple[Tensor, Routing]:
        """`decided` is the routing of an earlier pass over the same rows, which stays."""
        if not self.config.n_routed_experts:
            return self.shared(x), Routing(None, None, None)
        score = self.router(x)                                                               # [N, E]
        topk_idx, topk_weights = route(score, self.expert_bias, self.config.n_experts_per_tok, self.backend,
                                       decided and decided.topk_idx)
        places = decided and decided.places
        if places is None and torch.is_grad_enabled():
            places = place(topk_idx, len(self.expert_bias), self.backend)
        weights = self.weights(x.dtype) if self.cast is None else self.cast
        product = fp8_grouped_product if self.fp8 and self.training else grouped_product
        y = moe_forward(x, topk_idx, topk_weights, *weights, self.backend, product, places)
        return (y if self.shared is None else y + self.shared(x)), Routing(score, topk_idx, places)


class RecurrentBlock(nn.Module):
    """A layer of the core at segment rate: memory where it has one, attention, experts."""

    compiled: Callable | None = None      # of visit_in_one_graph, see Spider.compile_layers

    def __init__(self, config: SpiderConfig, has_engram: bool):
        super().__init__()
        self.engram = SegmentEngram(config) if has_engram else None
        self.attention = MLA(config)
        self.moe = MoE(config)

    def forward(self, x: Tensor, packing: Packing, recalled: Recalled | None, active: ActiveRows, seen: Seen,
                past: Past, decided: Routing | None = None) -> tuple[Tensor, Routing, Seen]:
        """x of the rows that are active, [n, D]; `seen` of the loop before, [N, ...]; `decided`, see MoE."""
        latent, read = seen
        if self.engram is not None:
            x, read = self.engram(x, recalled, active, read, past[1])
        y, latent = self.attention(rms_norm(x), packing, active, latent, past[0])
        x = x + y
        y, routing = self.moe(rms_norm(x), decided)
        return x + y, routing, (latent, read)


class RecurrentCore(nn.Module):
    """The looped layers: h <- y + LoRA_t(y), y = layers(A h + B e + loop_embedding[t]), read out by ACT."""
    matrix_stacks = "lora_down", "lora_up", "place_proj"

    def __init__(self, config: SpiderConfig):
        super().__init__()
        self.config, d, loops = config, config.hidden_size, config.n_loops
        self.layers = nn.ModuleList(RecurrentBlock(config, i in config.engram_layers)
                                    for i in range(config.n_recurrent_layers))
        self.loop_embedding = nn.Parameter(torch.empty(loops, d))
        if config.lti:
            self.log_A, self.dt, self.B = (nn.Parameter(torch.empty(d)) for _ in range(3))
        if config.lora_rank:
            self.lora_down = nn.Parameter(torch.empty(loops, d, config.lora_rank))
            self.lora_up = nn.Parameter(torch.empty(loops, config.lora_rank, d))
        self.halt_predictor = WideLinear(d, 1, bias=True) if config.act else None
        self.out_proj = Linear(d, d)
        if config.places > 1:                 # what each place has beside it, [places, out, in]
            self.place_proj = nn.Parameter(torch.empty(config.places, d, d))
        self.halted_leave: bool | None = None  # whether halted rows leave the products; None: on a CPU

    def decay(self) -> Tensor:
        """A [D] = exp(-dt * exp(log_A)), inside (0, 1) in fp32 whatever is learned."""
        rate = F.softplus(wide(self.dt)) * wide(self.log_A).clamp(-15, 15).exp()
        return torch.exp(-rate.clamp(1e-4, 15))

    def inject(self, h: Tensor | None, e: Tensor, loop: int, decay: Tensor | None) -> Tensor:
        """A h + B e + loop_embedding, in fp32; h is None before the first loop."""
        embedding = wide(self.loop_embedding[loop])
        if not self.config.lti:
            v = e + embedding
            return (v if h is None else v + h).to(e.dtype)
        v = torch.addcmul(embedding, wide(self.B), e)
        return (v if h is None else torch.addcmul(v, decay, h)).to(e.dtype)

    def adapt(self, y: Tensor, loop: int) -> Tensor:
        """The loop's adapter, on the normed state: what it adds is bounded, so that it cannot undo A < 1."""
        if not self.config.lora_rank:
            return y
        return y + rms_norm(y) @ self.lora_down[loop].to(y.dtype) @ self.lora_up[loop].to(y.dtype)

    def halt(self, h: Tensor) -> Tensor:
        """Halting probabilities [n] of states [n, D]; without ACT no segment halts before the last loop."""
        if self.halt_predictor is None:
            return self.loop_embedding.new_zeros(len(h))
        return self.halt_predictor(rms_norm(h)).sigmoid().squeeze(1)

    def forward(self, z: Tensor, packing: Packing, shifted: Tensor, n_loops: int, share: Tensor, recompute: bool,
                past: Past = (None, None), warmup: float = 1.0, dropout: float = 0.0,
                noise: Tensor | None = None) -> tuple[Tensor, CoreStats | None]:
        """z [N, D] pooled segments, shifted [K, N] their last bytes, share [N] 1 / segments, 0 for rows that fill up;
        past: when decoding, what layers hold of earlier segments; warmup: factor on halting probabilities; dropout: of
        z and of the output, with noise [N].

        Returns what the bytes receive of each segment, [N, places * D], and statistics, None when decoding."""
        e, h, visits = dropped(rms_norm(z), dropout, noise, 1), None, []
        recalled = [layer.engram and layer.engram.recall(shifted, packing.position, z.dtype) for layer in self.layers]
        seen: list[Seen] = [(None, None)] * len(self.layers)
        counted = past[0] is None
        leave = not (z.is_cuda and counted) if self.halted_leave is None else self.halted_leave
        halting = Halting(share, self.config.act_threshold, leave, ends=counted)
        decay = self.decay() if self.config.lti else None
        for t in range(n_loops):
            loop, active = min(t, self.config.n_loops - 1), halting.active
            y = self.inject(h, active.pick(e), loop, decay)
            for i, layer in enumerate(self.layers):
                earlier = past if past[0] is None else (
                    past[0].of(i, t), past[1].of(sum(j < i for j in self.config.engram_layers), t))
                y, routing, seen[i] = visit(layer, y, packing, recalled[i], active, seen[i], earlier, recompute)
                visits.append((routing.score, routing.topk_idx, halting.share))
            h = self.adapt(y, loop)
            h = halting.add(h, warmup * self.halt(h), last=t == n_loops - 1)
            if len(h) == 0:
                break
        normed = dropped(rms_norm(halting.output), dropout, noise, 2)
        output, places = self.out_proj(normed), self.config.places
        if places > 1:
            output = output.repeat(1, places) + F.linear(normed, self.place_proj.to(normed.dtype).flatten(0, 1))
        if not counted:
            return output, None
        aux_loss, z_loss, load = self.balance(visits)
        means = (loss / (len(self.layers) * halting.loops.clamp_min(1e-9)) for loss in (aux_loss, z_loss))
        ponder = halting.ponder
        if decay is not None and n_loops > 1:  # has a gradient on every rank, those too whose segments halt at once
            ponder = ponder + 0 * decay.sum()
        return output, CoreStats(*means, ponder, halting.loops, load.detach())                 # 0 without a segment

    def balance(self, visits: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
        """Sums over visits of their losses, see tile_moe.balance, and the load [L, E]; of (score, topk_idx, share) of
        each visit, those of as many rows together."""
        layers, none = len(self.layers), visits[0][2].new_zeros(())
        if not self.config.n_routed_experts:
            return none, none, none.new_zeros(layers, 0)
        parts = []
        for _, group in groupby(visits, key=lambda visited: len(visited[0])):
            parts.append(balance(*map(torch.stack, zip(*group)), self.layers[0].moe.backend))
        aux_loss, z_loss, load = map(list, zip(*parts))
        return sum(aux_loss), sum(z_loss), torch.cat(load).unflatten(0, (-1, layers)).sum(0)


def visit(layer: RecurrentBlock, x: Tensor, packing: Packing, recalled, active: ActiveRows, seen: Seen, past: Past,
          recompute: bool) -> tuple[Tensor, Routing, Seen]:
    """One pass through a core layer, its activations recomputed in the backward pass if asked: with the routing of the
    first time, since a near-tie that falls the other way would corrupt the gradient."""
    if layer.compiled is not None and torch.is_grad_enabled():
        for part in (x, active.mask, *(recalled or ()), *seen, *vars(packing).values()):
            if isinstance(part, Tensor):  # whose rows are of another number each time
                torch._dynamo.maybe_mark_dynamic(part, 0)
        y, latent, read, score, topk_idx = layer.compiled(layer, x, packing, recalled, active, seen, recompute)
        return y, Routing(score, topk_idx, None), (latent, read)
    if not recompute:
        return layer(x, packing, recalled, active, seen, past)
    decided = [None]

    def run(x):
        y, routing, later = layer(x, packing, recalled, active, seen, past, decided[-1])
        decided.append(Routing(None, routing.topk_idx, routing.places))
        return y, routing, later
    return checkpoint(run, x, use_reentrant=False, preserve_rng_state=False)


def visit_in_one_graph(layer: RecurrentBlock, x: Tensor, packing: Packing, recalled, active: ActiveRows, seen: Seen,
                       recompute: bool) -> tuple[Tensor | None, ...]:
    """What torch.compile takes as one graph, forward and backward: the same in a flat tuple. Recomputation is then part
    of the backward graph, fused with it, and takes routing as it was."""
    def run(x):
        y, routing, (latent, read) = layer(x, packing, recalled, active, seen, (None, None))
        return y, latent, read, routing.score, routing.topk_idx
    if not recompute:
        return run(x)
    return checkpoint(run, x, use_reentrant=False, preserve_rng_state=False, context_fn=keeping_routing)


def keeping_routing():
    """For checkpoint: of what a visit computes, the choice of experts alone is kept."""
    return create_selective_checkpoint_contexts([torch.ops.aten.sort.stable])


class Halting:
    """ACT over the loops: weighs each segment's states by its halting probabilities (Graves, arXiv 1603.08983).

    Weight of a loop: p while the running sum stays below the threshold; on the loop that reaches it, and on the last
    one, what remains to 1. Then the segment has halted. It is computed once more, with no weight, so that later
    segments read the state that it halted with, and leaves the core (without, half a hop is lost:
    docs/results/mechanisms.md).

    A segment that halts in its first loop has weight 1 there whatever its p: nothing teaches it to go on, nor later
    loops to be worth it. So p is scaled by a warm-up, and until it ends every loop learns.
    """

    def __init__(self, share: Tensor, threshold: float, leave: bool, ends: bool):
        """share [N], each segment's part of all, 0 for rows that fill up; leave: rows leave the products; ends: no segment
        comes later than these, and none reads those that halt when all others have."""
        self.threshold, self.leave, self.ends, self.active = threshold, leave, ends, ALL_ROWS
        self.share, self.remaining = share, torch.ones_like(share)  # [n] of the rows active: 1 - weights; both 0 once halted
        self.output: Tensor | None = None                           # [N, D]
        self.loops = self.ponder = 0                                # means over segments: loops; loops + remainder

    def add(self, h: Tensor, p: Tensor, last: bool) -> Tensor:
        """Takes the states after a loop, h [n, D], and their halting probabilities p [n]; returns the states of the
        segments that the next loop computes, none after the last."""
        stays = self.share > 0                                      # the others have halted in the loop before
        stops = torch.ones_like(stays) if last else 1 - self.remaining + p >= self.threshold
        weight = torch.where(stops, self.remaining, p)
        part = weight[:, None].to(h.dtype) * h
        index = self.active.index
        self.output = part if self.output is None else (
            self.output + part if index is None else self.output.index_add(0, index, part))
        share = self.share.sum()
        self.loops = self.loops + share
        self.ponder = self.ponder + share + self.share @ torch.where(stops, self.remaining, 0)
        self.share, self.remaining = self.share * ~stops, torch.where(stops, 0, self.remaining - weight)
        if last or not self.leave:
            self.active = ActiveRows(mask=stays)
            return h[:0] if last else h
        if self.ends and not self.share.any():
            return h[:0]
        stay = stays.nonzero().squeeze(1)
        if len(stay) < len(h):
            index = stay if index is None else index.index_select(0, stay)
            self.share, self.remaining = self.share.index_select(0, stay), self.remaining.index_select(0, stay)
            h = h.index_select(0, stay)
        self.active = ActiveRows(index, halted=self.share == 0)
        return h


class Spider(nn.Module):
    """The model; see the head of the file for its parts and `model.md`'s notation for its shapes."""

    def __init__(self, config: SpiderConfig):
        super().__init__()
        self.config, c = config, config
        random_state = torch.get_rng_state()     # modules of others may draw values here, which init_weights replaces
        self.compute_dtype = torch.float32       # type of products and activations; parameters keep theirs
        self.recompute = "nothing"               # one of RECOMPUTE: layers whose activations the backward pass redoes
        self.compiled = False                    # see compile_layers
        self.casts_early = True                  # False: weights are whole in their group's forward alone, cast there
        self.halting_warmup = 1.0                # in training on halting probabilities and ponder_weight
        self.dropout = 0.0                       # in training, at both ends of the core; of bytes a fifth of it
        self.embed_tokens = nn.Parameter(torch.empty(c.vocab_size, c.hidden_size))
        byte_memory = len(c.engram_byte_orders) + c.match_contexts > 0
        self.engram_match = MatchMemory(c.engram_match_orders, c.engram_match_words) if c.match_contexts else None
        self.engram_input = ByteEngram(c, gated=False) if byte_memory else None
        self.prelude = nn.ModuleList(Block(c) for _ in range(c.n_prelude_layers))
        self.core = RecurrentCore(c) if c.n_recurrent_layers else None
        if self.core is not None:
            self.null_segment = nn.Parameter(torch.empty(c.hidden_size))
        if self.core is not None and c.boundaries == "learned":
            width = c.hidden_size // 4
            self.boundary_predictor = nn.Sequential(WideLinear(c.hidden_size, width, bias=True), nn.GELU(),
                                                    Linear(width, 1, bias=True))
        self.coda = nn.ModuleList(Block(c) for _ in range(c.n_coda_layers))
        self.engram_output = ByteEngram(c, gated=True) if byte_memory else None
        self.lm_head = Linear(c.hidden_size, c.vocab_size)
        torch.set_rng_state(random_state)
        self.init_weights()

    @property
    def wide_dtype(self) -> torch.dtype:
        """That of sums, logits and losses: at least fp32, whatever parameters and products are."""
        return torch.promote_types(torch.promote_types(self.embed_tokens.dtype, self.compute_dtype), torch.float32)

    def _apply(self, fn, recurse: bool = True):
        """What `half()`, `to(dtype)` and the like do to parameters they do to the type of products."""
        self.compute_dtype = fn(torch.empty(0, dtype=self.compute_dtype)).dtype
        return super()._apply(fn, recurse)

    @torch.no_grad()
    def init_weights(self):
        """Every value of the model, buffers included:

            embed_tokens                        N(0, 1)
            Linear.weight, w_gate, w_up         N(0, 1 / fan_in); biases 0
            o_proj, down_proj, w_down           the same divided by sqrt(2 * layers, the core's counted once per loop)
            lm_head, halt_predictor             N(0, 0.02^2); the halting bias is -3: at 0 it would stick at one loop
            boundary_predictor's last bias      logit(boundary_prior)
            loop_embedding                      N(0, 0.02^2)
            log_A, dt, B                        such that A = 0.905 and B = 1: at (1 - A) / (1 - A^n_loops), which keeps
                                                the state at e's size, what layers add drowns e; see
                                                docs/results/mechanisms.md
            lora_down, lora_up                  N(0, 1 / fan_in), 0
            core.out_proj, core.place_proj      0: at the start the core adds nothing to the bytes
            null_segment, conv_weight           0
            Engram tables, followed             0; their hash constants from the table's place in the model
            expert_bias                         0
            what modules of others hold         by their reset_parameters, drawn behind all of these

        RuntimeError names what nobody initializes."""
        unwritten = UninitializedTensors(self)
        self._init_own()
        unwritten.reset()
        if names := unwritten.names():
            raise RuntimeError(f"nobody initializes {', '.join(names)}: give what holds it a reset_parameters() that "
                               f"does; a constructor's values are lost where a model is made on the meta device")

    def _init_own(self):
        c = self.config
        depth = c.n_prelude_layers + c.n_recurrent_layers * c.n_loops + c.n_coda_layers
        tables = 0
        for module in self.modules():
            if isinstance(module, Linear):
                module.weight.normal_(std=module.in_features ** -0.5)
                if module.bias is not None:
                    module.bias.zero_()
            elif isinstance(module, MoE):
                module.expert_bias.zero_()
                if c.n_routed_experts:
                    module.w_gate.normal_(std=c.hidden_size ** -0.5)
                    module.w_up.normal_(std=c.hidden_size ** -0.5)
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
        for module in self.modules():
            if isinstance(module, (MLA, SwiGLU)):
                (module.o_proj if isinstance(module, MLA) else module.down_proj).weight.mul_((2 * depth) ** -0.5)
        self.embed_tokens.normal_()
        self.lm_head.weight.normal_(std=0.02)
        if self.core is not None:
            self.null_segment.zero_()
            self._init_core(self.core)
        if self.core is not None and c.boundaries == "learned":
            self.boundary_predictor[2].bias.fill_(math.log(c.boundary_prior / (1 - c.boundary_prior)))

    def _init_core(self, core: RecurrentCore):
        c, rate = self.config, 0.1
        core.loop_embedding.normal_(std=0.02)
        core.out_proj.weight.zero_()
        if c.places > 1:
            core.place_proj.zero_()
        if c.lti:
            core.log_A.zero_()
            core.dt.fill_(math.log(math.expm1(rate)))
            core.B.fill_(1)
        if c.lora_rank:
            core.lora_down.normal_(std=c.hidden_size ** -0.5)
            core.lora_up.zero_()
        if c.act:
            core.halt_predictor.weight.normal_(std=0.02)
            core.halt_predictor.bias.fill_(-3)

    def boundaries(self, x: Tensor, input_ids: Tensor, shifted: Tensor, packing: Packing,
                   noise: Tensor | None, summed: Tensor | None = None) -> Tensor:
        """Where segments end: b [M] fp32 (0 or 1 in value). EOS always ends one, PAD never.

        Learned, a byte ends a segment where the sum of p over the document, plus an offset, passes a whole number:
        systematic sampling, in which each byte is cut with probability p as in independent draws, but segments are
        even. The offset is drawn once a document where there is noise [M], when training, 0.5 otherwise, so that
        evaluation cuts as often as training. The gradient goes straight through to p. summed [documents] float64: when
        decoding, the sum of p over earlier steps; it goes on.
        """
        c, ids, dtype = self.config, input_ids.reshape(-1), self.wide_dtype
        if c.boundaries == "learned":
            p = self.boundary_predictor(rms_norm(x)).squeeze(1).sigmoid()          # [M]
            total = p.detach().double()
            if summed is not None and packing.longest == 1:                                  # a byte of each document
                before, offset = 0, 0.5 + summed
                summed += total
            else:
                start = packing.cu_seqlens.index_select(0, packing.document)
                before = F.pad(total := total.cumsum(0), (1, -1))
                offset = 0.5 - before.index_select(0, start)
                if summed is not None:
                    offset = offset + summed.index_select(0, packing.document)
                    summed.index_add_(0, packing.document, p.double())
            if noise is not None:
                offset = offset - 0.5 + uniform(noise.index_select(0, start))
            b = ((total + offset).floor() > (before + offset).floor()).to(dtype)
            if p.requires_grad:
                b = b + (p - p.detach()).nan_to_num(0)  # a count, whatever diverges
        elif c.boundaries == "words":
            b = word_ends(shifted[:2]).squeeze(0).to(dtype)
        elif c.boundaries == "whitespace":
            b = torch.isin(ids, ids.new_tensor(list(b" \t\n\r"))).to(dtype)
        else:
            every = 3 if c.boundaries == "every_third" else 1
            b = (packing.position % every == every - 1).to(dtype)
        return torch.where(ids == EOS_ID, 1, torch.where(ids == PAD_ID, 0, b))

    def boundary_loss(self, b: Tensor, input_ids: Tensor) -> Tensor:
        """By how much each sequence's boundaries per byte miss the band between alpha - lambda * sigma and alpha."""
        c = self.config
        if c.boundaries != "learned":
            return b.new_zeros(())
        real = (input_ids != PAD_ID).sum(1).clamp_min(1)
        rate = b.view(input_ids.shape).sum(1) / real                                         # [B]
        low = c.boundary_alpha - c.boundary_lambda * c.boundary_sigma
        return ((rate - c.boundary_alpha).relu() + (low - rate).relu()).mean()

    def run_core(self, z: Tensor, b: Tensor, cu_seqlens: Tensor, shifted: Tensor, longest: int, n_loops: int,
              noise: Tensor | None = None, state: "DecodingState | None" = None) -> tuple[Tensor, CoreStats]:
        """Runs the core on pooled segments z [N, D] that end where b [M] is 1, no document longer than `longest`; noise
        [M], when training, is dropout's.

        Its rows are filled up to few sizes, since kernels are made once per size; the surplus is a document apart. It
        is never empty: every rank runs the same parts of the model, and none leaves the others waiting.
        When decoding there is none, and `state` goes on."""
        segments, device = len(z), z.device
        rows = segments if state is not None else round_up(max(1, segments), max(1, min(longest, len(b) // 64)))
        byte = torch.arange(len(b), device=device)
        own = torch.where(b.detach() > 0, b.detach().round().long().cumsum(0) - 1, rows)
        last_byte = byte.new_zeros(rows + 1).index_copy_(0, own, byte)[:rows]                # of each segment
        share = z.new_full((segments,), 1 / max(1, segments), dtype=self.wide_dtype)
        share = F.pad(share, (0, rows - segments))
        cu_seqlens = F.pad(cu_seqlens, (0, int(rows > segments)), value=rows)
        before = None if state is None else state.segments
        packing = Packing.build(cu_seqlens, rows, longest, self.config, self.compute_dtype, 0, before)
        past, taps = (None, None), SegmentEngram.taps(self.config)
        if state is not None:
            past = (Cache(state.segment_latents, packing, before),
                    Cache(state.convolved, packing, before, taps[-1] + 1).look_back(taps))
        z, stats = self.core(F.pad(z, (0, 0, 0, rows - segments)), packing, shifted.index_select(1, last_byte), n_loops,
                             share, self.recompute != "nothing" and torch.is_grad_enabled(), past,
                             self.halting_warmup if self.training else 1.0, self.dropout,
                             noise if noise is None else noise.index_select(0, last_byte))
        if state is not None:
            state.segment_latents, state.convolved = (cache.held for cache in past)
            state.segments = before + cu_seqlens.diff()
        return z[:segments], stats

    def null_rows(self) -> Tensor:
        """What bytes before a document's first boundary receive, for all places: [places * D]."""
        return self.null_segment.repeat(self.config.places)

    def unpool(self, z: Tensor, null: Tensor, b: Tensor, packing: Packing, segment_cu_seqlens: Tensor,
                  open_bytes: Tensor | int = 0) -> Tensor:
        """What bytes receive of the core's output: z [N, places * D], null [places * D] or one for each document, b [M]
        -> [M, D]; open_bytes: see segment_offsets."""
        places, cu_seqlens, place = self.config.places, packing.cu_seqlens, None
        if places > 1:
            z, null = z.unflatten(-1, (places, -1)), null.unflatten(-1, (places, -1))
            place = segment_offsets(b, cu_seqlens.index_select(0, packing.document), places, open_bytes)
        return unpool_segments(z, null, b, cu_seqlens, segment_cu_seqlens, place)

    def before_core(self, ids: Tensor, packing: Packing, shifted: Tensor, matched: Tensor | None,
                    cache: Cache | None = None) -> Tensor:
        """Embedding, byte memory and prelude: ids [M] -> [M, D]."""
        x = F.embedding(ids, self.embed_tokens).to(self.compute_dtype)
        if self.engram_input is not None:
            x = x + self.engram_input(x, shifted, matched)
        for i, block in enumerate(self.prelude):
            x = self.run(block, x, packing, cache and cache.of(i))
        return x

    def run(self, block: Block, x: Tensor, packing: Packing, cache: Cache | None) -> Tensor:
        """A byte layer, its activations recomputed in the backward pass where all are."""
        if self.recompute == "all" and torch.is_grad_enabled():
            return checkpoint(block, x, packing, use_reentrant=False, preserve_rng_state=False)
        return block(x, packing, cache)

    def after_core(self, x: Tensor, packing: Packing, shifted: Tensor, matched: Tensor | None,
                   cache: Cache | None = None) -> Tensor:
        """Coda, byte memory and head: [M, D] -> logits [M, vocab_size]."""
        for i, block in enumerate(self.coda, len(self.prelude)):
            x = self.run(block, x, packing, cache and cache.of(i))
        if self.engram_output is not None:
            x = x + self.engram_output(x, shifted, matched)
        return self.lm_head(rms_norm(x)).to(self.wide_dtype)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, n_loops: int | None = None,
                noise_seed: int | Tensor | None = None, cu_seqlens: Tensor | None = None) -> SpiderOutput:
        """input_ids [B, T] int64; labels [B, T], already shifted, -100 ignored; n_loops, or the config's.

        In training mode row i's noise, of segments and dropout, is a function of noise_seed + i, or comes from torch's
        default generator where that is None. Documents end at EOS and begin at BOS; every row begins one. cu_seqlens is
        document_cu_seqlens(input_ids): worked out beforehand on the host, it saves a wait for the device.

        ValueError for input_ids or labels of another form.
        """
        check_ids("input_ids", input_ids)
        c, (sequences, length) = self.config, input_ids.shape
        if labels is not None:
            check_ids("labels", labels, sequences, length)
        n_loops = c.n_loops if n_loops is None else n_loops
        ids = input_ids.reshape(-1)
        cu_seqlens = document_cu_seqlens(input_ids) if cu_seqlens is None else cu_seqlens
        if self.compiled:                 # else a graph is made anew for another number of documents
            torch._dynamo.maybe_mark_dynamic(cu_seqlens, 0)
        packing = Packing.build(cu_seqlens, len(ids), length, c, self.compute_dtype, c.byte_window)
        shifted = shifted_bytes(ids, packing.position, c.longest_order)
        matched = self.engram_match and self.engram_match(ids, shifted, packing.document)
        noise, of_bytes = None, self.dropout / 5
        if self.training and (self.dropout or c.boundaries == "learned"):
            noise = byte_noise(noise_seed, sequences, length, ids.device).flatten()
        x = dropped(self.before_core(ids, packing, shifted, matched), of_bytes, noise, 0)    # [M, D]
        none = self.embed_tokens.new_zeros((), dtype=self.wide_dtype)
        segments, boundary_loss, unpooled = 0, none, None
        stats = CoreStats(none, none, none, none, none.new_zeros(0, c.n_routed_experts))
        if self.core is not None:
            b = self.boundaries(x, input_ids, shifted, packing, noise)
            boundary_loss = self.boundary_loss(b, input_ids)
            z, segment_cu_seqlens = pool_segments(x, b, packing.cu_seqlens)
            segments = len(z)
            z, stats = self.run_core(z, b, segment_cu_seqlens, shifted, length, n_loops, noise)
            unpooled = self.unpool(z, self.null_rows(), b, packing, segment_cu_seqlens)
            x = x + unpooled
        x = dropped(x, of_bytes, noise, 3)
        logits = self.after_core(x, packing, shifted, matched)                               # [M, vocab_size]

        loss = nats = terms = by_byte = None
        if labels is not None:
            targets = labels.reshape(-1)
            counted = (targets != -100).sum().clamp_min(1)
            nats = F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum") / counted
            core_loss = none
            if self.training and c.scores_core:  # at first 0 is unpooled: the gradient's norm is above 100, and clipped
                said = self.lm_head(rms_norm(unpooled)).to(logits.dtype)
                core_loss = F.cross_entropy(said, targets, ignore_index=-100, reduction="sum") / counted
            terms = dict(boundary_loss=c.boundary_loss_weight * boundary_loss,
                         aux_loss=c.aux_loss_weight * stats.aux_loss, z_loss=c.z_loss_weight * stats.z_loss,
                         ponder_loss=c.ponder_weight * self.halting_warmup * stats.ponder,
                         core_loss=c.core_loss_weight * core_loss)
            loss, by_byte = sum(terms.values(), nats), nats + terms["core_loss"]
            terms = {name: term.detach() for name, term in terms.items()}
        tokens = (stats.load * (segments * c.n_experts_per_tok / max(1, c.n_routed_experts))).round()  # they are whole
        return SpiderOutput(logits.view(sequences, length, -1), loss, nats, none + segments,
                            stats.mean_loops.detach(), tokens, terms, by_byte)

    @contextmanager
    def cast_weights_once(self):
        """Inside, weights keep one cast to `compute_dtype`, and one gradient before it is cast back, for all loops,
        recomputations and micro-steps. Weights must not change meanwhile: it spans an optimizer step's passes."""
        modules = [module for module in self.modules() if hasattr(module, "cast_weight")]
        try:
            for module in modules if self.casts_early else ():
                module.cast_weight(self.compute_dtype)
            yield
        finally:
            for module in modules:
                module.cast = None

    def zero_grad(self, set_to_none: bool = True):
        """Drops all gradients, those too that Engram tables have gathered."""
        super().zero_grad(set_to_none)
        for module in self.modules():
            if isinstance(module, EngramTable):
                module.forget()

    def compile_layers(self, **settings) -> str | None:
        """Has torch.compile make one graph of each kind of layer, for passes with gradients: evaluation and decoding,
        whose shapes are others, go without. Numbers of segments and documents are sizes that may change; settings go
        to torch.compile. The functions are compiled, not the modules, whose hooks are those of FSDP.

        Returns why the core's layers are left out, or None: what would break their graph leaves nothing of it."""
        obstacle = None
        if self.compute_dtype != torch.bfloat16:
            obstacle = "torch.compile takes grouped products in bf16 alone"
        elif any(isinstance(module, MoE) and module.backend == "tile" for module in self.modules()):
            obstacle = "torch.compile does not know TileKernels' operations; --moe_backend grouped is compiled"
        self.compiled = True
        # It warns of operations in place that are recomputed: here they write to what was made just before.
        logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
        visits = torch.compile(visit_in_one_graph, **settings)
        blocks = torch.compile(Block.run, **settings)
        for module in self.modules():
            if isinstance(module, Block):
                module.compiled = blocks
            elif isinstance(module, RecurrentBlock) and not obstacle:
                module.compiled = visits
        return obstacle

    def set_backend(self, backend: str):
        """Which of BACKENDS computes the experts; ValueError for any other name."""
        if backend not in BACKENDS:
            raise ValueError(f"backend: {backend!r} is not one of {', '.join(BACKENDS)}")
        for module in self.modules():
            if isinstance(module, MoE):
                module.backend = backend

    @torch.no_grad()
    def update_expert_bias(self, tokens_per_expert: Tensor):
        """Once per optimizer step: moves each expert's bias towards balance by the tokens [L, E] that it received in
        all loops, micro-steps and ranks."""
        layers = () if self.core is None else self.core.layers
        for layer, tokens in zip(layers, tokens_per_expert):
            layer.moe.expert_bias += self.config.expert_bias_rate * (tokens.mean() - tokens).sign()

    def decoding_state(self, rows: int = 1, n_loops: int | None = None) -> DecodingState:
        """The state of `rows` rows that have read nothing yet; n_loops, or the config's."""
        c, weight = self.config, self.embed_tokens
        n_loops, latent = c.n_loops if n_loops is None else n_loops, c.kv_lora_rank + c.qk_rope_head_dim
        held, summed = (weight.new_zeros(0, dtype=dtype) for dtype in (self.compute_dtype, self.wide_dtype))
        count = torch.zeros(rows, dtype=torch.int64, device=weight.device)
        null = held.new_zeros(c.hidden_size) if self.core is None else self.null_rows().detach().to(held.dtype)
        return DecodingState(
            n_loops=n_loops, last_bytes=count.new_full((rows, c.longest_order), PAD_ID), position=count,
            segments=count.clone(), summed=count.double(), open_segment=summed.new_zeros(rows, c.hidden_size),
            open_bytes=summed.new_zeros(rows, 1), unpooled=null.repeat(rows, 1),
            matches=count.new_zeros(1 + 2 * c.match_contexts, rows, 1),
            byte_latents=held.new_zeros(c.n_prelude_layers + c.n_coda_layers, 1, rows, 1, latent),
            segment_latents=held.new_zeros(c.n_recurrent_layers, n_loops, rows, 1, latent),
            convolved=held.new_zeros(len(c.engram_layers), n_loops, rows, 1, c.hidden_size))

    @torch.no_grad()
    def step(self, input_ids: Tensor, state: DecodingState) -> Tensor:
        """Feeds input_ids [rows, n] int64 to a state, which goes on: logits [rows, n, vocab_size], fp32, those of
        `forward` in evaluation mode over all that the rows have read. The core runs where a segment ends, for all that
        end here together. Inside `cast_weights_once` weights are cast for many steps at once.

        RuntimeError in training mode, whose segments are drawn; ValueError for input_ids of another form."""
        if self.training:
            raise RuntimeError("a model decodes in evaluation mode: call its eval() first")
        check_ids("input_ids", input_ids, len(state.position), "n")
        rows, n = input_ids.shape
        known = torch.cat((state.last_bytes, input_ids), dim=1)
        starts = document_starts(known[:, -n - 1:])[:, 1:]
        ends = {*range(PIECE, n, PIECE), *(starts[:, 1:].any(0).nonzero().flatten() + 1).tolist()} if n > 1 else ()
        if ends:                          # a pass reads one document a row
            return torch.cat([self.step(part, state) for part in input_ids.tensor_split(sorted(ends), dim=1)], dim=1)
        with torch.inference_mode():      # a tenth faster
            if starts[:, 0].any():
                state.start_documents(starts[:, 0], None if self.core is None else self.null_rows())
                known = torch.cat((state.last_bytes, input_ids), dim=1)

            ids, kept = input_ids.reshape(-1), self.config.longest_order
            cu_seqlens = torch.arange(0, (rows + 1) * n, n, dtype=torch.int32, device=ids.device)
            packing = Packing.build(cu_seqlens, rows * n, n, self.config, self.compute_dtype, 0, state.position)
            shifted = known.unfold(1, n, 1)[:, 1:].flip(1).transpose(0, 1).flatten(1)        # as in shifted_bytes
            cache = Cache(state.byte_latents, packing, state.position, self.config.byte_window)
            matched = None
            if self.engram_match is not None:
                matched, state.matches = self.engram_match.step(
                    input_ids, shifted, packing.position.view(rows, n), state.matches)
            x = self.before_core(ids, packing, shifted, matched, cache)
            if self.core is not None:
                b = self.boundaries(x, input_ids, shifted, packing, None, state.summed)
            places = self.config.places
            if self.core is not None and n == 1 and not b.any():  # the open segment continues
                state.open_segment, state.open_bytes = state.open_segment + x, state.open_bytes + 1
                unpooled = state.unpooled
                if places > 1:
                    place = state.open_bytes.flatten().long().clamp_max(places - 1)
                    unpooled = unpooled.unflatten(1, (places, -1))[torch.arange(rows, device=ids.device), place]
                x = x + unpooled
            elif self.core is not None:
                open_bytes = state.open_bytes.long().expand(-1, n).flatten()
                z, total, segment_cu_seqlens = sum_segments(x, b, cu_seqlens, (state.open_segment, state.open_bytes))
                z, state.open_segment = z.tensor_split((-rows,))
                total, state.open_bytes = total.tensor_split((-rows,))
                z, before = (z / total).to(x.dtype), state.unpooled
                if len(z):
                    longest = int(segment_cu_seqlens.diff().max())
                    z, _ = self.run_core(z, b, segment_cu_seqlens, shifted, longest, state.n_loops, state=state)
                    newest = z.index_select(0, (segment_cu_seqlens[1:] - 1).clamp_min(0))    # of each row
                    state.unpooled = torch.where(segment_cu_seqlens.diff()[:, None] > 0, newest, before)
                else:
                    z = before[:0]
                x = x + self.unpool(z, before, b, packing, segment_cu_seqlens, open_bytes)
            logits = self.after_core(x, packing, shifted, matched, cache)
            state.byte_latents, state.position, state.last_bytes = cache.held, state.position + n, known[:, -kept:]
        return logits.view(rows, n, -1).clone()  # an ordinary tensor again

    @torch.no_grad()
    def generate_batch(self, logits: Tensor, state: DecodingState, max_new_bytes: int, temperature: float = 1.0,
              top_k: int | None = None, top_p: float | None = None, generator: torch.Generator | None = None):
        """Yields up to max_new_bytes times what each row writes next, a list of ids (0-255), None once it has ended.

        logits [rows, vocab_size] are those of the last byte that the state has read; what is yielded has been read as
        well when the next is asked for. See `draw` for the rest. Weights must not change before it ends.
        FloatingPointError where a logit is no finite number."""
        ended = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
        with self.cast_weights_once():
            for written in range(max_new_bytes):
                if written:
                    logits = self.step(chosen[:, None], state)[:, -1]
                if not logits.isfinite().all():
                    raise FloatingPointError("the model's logits are not finite numbers: its weights are ruined")
                chosen = torch.where(ended, PAD_ID, draw(logits, temperature, top_k, top_p, generator))
                ended |= chosen == EOS_ID
                if ended.all():
                    return
                yield [byte if byte < 256 else None for byte in chosen.tolist()]

    def generate(self, ids: list[int], max_new_bytes: int, temperature: float = 1.0, top_k: int | None = None,
                 generator: torch.Generator | None = None, n_loops: int | None = None, top_p: float | None = None):
        """Yields up to max_new_bytes ids (0-255) after the prefix `ids`, until EOS; see `generate_batch`."""
        state = self.decoding_state(n_loops=n_loops)
        with self.cast_weights_once():
            logits = self.step(torch.tensor([ids], device=self.embed_tokens.device), state)[:, -1]
        for (byte,) in self.generate_batch(logits, state, max_new_bytes, temperature, top_k, top_p, generator):
            yield byte

    # -----------------------------------------------------------------------------------------------------------------
    # Sizes and costs, from the config alone: FP8 conversion would hide Linears from a count of modules

    def parameter_table(self) -> dict[str, tuple[int, float]]:
        """Component -> (parameters, of these read per byte: core layers per visit, of experts the chosen ones)."""
        table = {}
        for name, p in self.named_parameters():
            component, share = component_of(name), 1.0
            if component == "routed experts":
                share = self.config.n_experts_per_tok / self.config.n_routed_experts
            elif component == "Engram tables":
                share = 0.0  # a few rows
            total, active = table.get(component, (0, 0.0))
            table[component] = (total + p.numel(), active + p.numel() * share)
        return table

    def products_per_byte(self, bytes_per_segment: float, n_loops: int) -> float:
        """Weights that a byte is multiplied with on its way to its logits, in each loop anew."""
        c, rate, products = self.config, 1 / bytes_per_segment, 0.0
        for name, p in self.named_parameters():
            if p.ndim < 2 or component_of(name) == "Engram tables" or name in ("embed_tokens", "core.loop_embedding"):
                continue
            size = p.numel()
            if component_of(name) == "routed experts":
                size *= c.n_experts_per_tok / c.n_routed_experts
            if name.startswith("core.lora"):
                size /= c.n_loops
            if name.startswith("core."):
                once = any(part in name for part in ("key_proj", "value_proj", "core.out_proj", "place_proj"))
                size *= rate * (1 if once else n_loops)
            products += size
        return products

    def flops_per_byte(self, bytes_per_segment: float, n_loops: int, seq_len: int) -> float:
        """Training FLOPs (forward and backward, no recomputation) per byte, causal attention included."""
        c, rate = self.config, 1 / bytes_per_segment
        products = self.products_per_byte(bytes_per_segment, n_loops) + c.scores_core * self.lm_head.weight.numel()
        window = min(c.byte_window or seq_len, seq_len)
        seen = window - window * window / (2 * seq_len)                                      # bytes, on average
        attention = 2 * c.n_heads * c.v_head_dim * (
            seen * (c.n_prelude_layers + c.n_coda_layers) + c.n_recurrent_layers * n_loops * rate * rate * seq_len / 2)
        return 6 * products + 3 * 2 * attention

"""Decode: feed bytes to a model step by step, carry its state from one step to the next, draw and
generate bytes.

DecodingState is the state. Four functions are methods of Spider: `decoding_state` makes a state,
`step` feeds bytes to it, with the logits of the full pass; `generate_batch` and `generate` write.

Shapes, as suffixes of names:
    B  rows of a state, each in its own document
    T  bytes of each row that a step reads
    M  these bytes, B * T
    N  segments that end in them
    D  hidden size
    O  segment offsets
    C  kv_lora_rank, and
    R  qk_rope_head_dim: a latent has C + R numbers
    X  contexts of the match memory
    S  slots, for bytes or segments of earlier steps; their number grows as they fill up
"""

import math
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from spider.errors import UsageError
from spider.model.attention import LatentCache
from spider.model.contexts import Past
from spider.model.memory import ConvolutionCache, MatchHistory, PackedBytes
from spider.model.packing import Packing, check_ids, document_starts
from spider.model.segments import add_open_segments, segment_ends, sum_segments
from spider.vocabulary import BOS_ID, EOS_ID, PAD_ID

PIECE = 256  # bytes of a row that one pass of decoding takes, which bounds its memory
# Up to this product of a step's bytes and hidden_size^2 a second thread gains nothing, and on busy
# cores it costs many times the step: docs/results/performance.md#threads
ONE_THREAD = 1 << 20

# --------------------------------------------------------------------------------------------------
# The state


@dataclass
class DecodingState:
    """The state of decoding. It has the device and compute_dtype of its model.

    It holds tensors and plain values. So vars(state.copy()) can be saved, and
    DecodingState(**saved) continues."""

    n_loops: int
    last_bytes: Tensor  # int64 [B, config.reach], PAD before the first
    position: Tensor  # int64 [B], bytes of the document so far
    segments: Tensor  # int64 [B], finished segments of it
    summed: Tensor  # float64 [B], boundary probabilities over it
    open_segment: Tensor  # [B, D], sum of the bytes since the last boundary
    open_bytes: Tensor  # [B, 1], number of these bytes
    unpooled: Tensor  # [B, O * D], last finished segment, one row per segment offset
    history_ids: Tensor  # int64 [B, S], see MatchHistory
    history_keys: Tensor  # int64 [X, B, S]
    history_previous: Tensor  # int64 [X, B, S]
    byte_latents: Tensor  # [prelude and coda layers, 1, B, S, C + R], normed and rotated
    segment_latents: Tensor  # [core layers, n_loops, B, S, C + R], of each segment's last loop
    convolved: Tensor  # [Engram layers of the core, n_loops, B, S, D], convolution inputs
    # by number of a byte layer that calls attention.tokens_before: its last rows, [B, count, D]
    kept: dict[int, Tensor] = field(default_factory=dict)

    def copy(self, rows: list[int] | None = None) -> "DecodingState":
        """Copy the state, or only the given rows, which may repeat."""
        if rows is None:
            rows = [*range(len(self.position))]
        chosen = torch.tensor(rows, device=self.position.device)
        copies = {}
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                value = value.index_select(ROW_DIMENSION.get(name, 0), chosen)
            elif isinstance(value, dict):
                value = {layer: kept.index_select(0, chosen) for layer, kept in value.items()}
            copies[name] = value
        return DecodingState(**copies)

    def start_documents(self, starts: Tensor, null: Tensor | None):
        """Reset the rows, bool [B], where a new document starts. null: see Spider.null_output.

        Bytes, latents and history of the document before remain, but with its position at 0, a row
        sees none of them."""
        self.position.masked_fill_(starts, 0)
        self.segments.masked_fill_(starts, 0)
        self.summed.masked_fill_(starts, 0)
        starts_B1 = starts[:, None]
        self.open_segment.masked_fill_(starts_B1, 0)
        self.open_bytes.masked_fill_(starts_B1, 0)
        if null is not None:
            self.unpooled = torch.where(starts_B1, null.to(self.unpooled.dtype), self.unpooled)


# The dimension of a state's tensor along which its rows lie, where it is not the first.
ROW_DIMENSION = {
    "history_keys": 1,
    "history_previous": 1,
    "byte_latents": 2,
    "segment_latents": 2,
    "convolved": 2,
}


# --------------------------------------------------------------------------------------------------
# Drawing a byte


def draw(
    logits: Tensor,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generator: torch.Generator | None,
) -> Tensor:
    """Sample a byte or EOS for each row of logits [B, vocab_size] -> int64 [B].

    temperature 0 is greedy. top_k keeps the k likeliest ids, top_p the likeliest ones with a total
    probability of p."""
    logits = logits.float().clone()
    logits[:, 256:EOS_ID] = -math.inf  # PAD, BOS
    logits[:, EOS_ID + 1 :] = -math.inf  # sentinels
    if temperature == 0:
        return logits.argmax(1)
    # With the largest at 0, and in fp64, no temperature above 0 overflows.
    logits = (logits - logits.amax(1, keepdim=True)).double() / temperature
    probability, ids = logits.softmax(1).float().sort(descending=True)
    if top_k is not None:
        probability[:, top_k:] = 0
    if top_p is not None:
        likelier = probability.cumsum(1) - probability  # sum over all that are likelier
        beyond = likelier / probability.sum(1, keepdim=True) >= top_p
        beyond[:, 0] = False  # a top_p of 1e-50 is 0 in fp32
        probability[beyond] = 0
    chosen = torch.multinomial(probability, 1, generator=generator)
    return ids.gather(1, chosen).squeeze(1)


def forbid_repeats(logits: Tensor, written: Tensor, size: int) -> Tensor:
    """Rule out ids that would write a sequence of `size` ids again: logits [B, vocab_size].

    written int64 [B, n]: all ids so far, PAD after a row's end. transformers'
    no_repeat_ngram_size does the same."""
    length = written.shape[1]
    if length < size:
        return logits
    if size == 1:
        return logits.scatter(1, written, -math.inf)
    # Only earlier sequences whose last id but one is the newest id: comparing all would take longer
    # than a decoding step.
    newest = written[:, -1:]
    candidate = (written[:, size - 2 : -1] == newest) & (newest != PAD_ID)
    row, first = candidate.nonzero(as_tuple=True)
    sequences = written.unfold(1, size, 1)[row, first]  # [candidates, size]
    written_last = written[row, length - size + 1 :]  # the size - 1 newest ids
    repeats = (sequences[:, :-1] == written_last).all(1)
    forbidden = (row[repeats], sequences[repeats, -1])
    return logits.index_put(forbidden, logits.new_tensor(-math.inf))


# --------------------------------------------------------------------------------------------------
# The methods of Spider, whose module imports this one


def decoding_state(model: Any, rows: int = 1, n_loops: int | None = None) -> DecodingState:
    """Make the state of `rows` empty rows; n_loops defaults to the config's. Raise UsageError if
    the model is a subclass's and decodes wrongly, see check_decoding."""
    c = model.config
    n_loops = model.loops_of(n_loops)
    if model.checks_decoding and not model.training:
        check_decoding(model, n_loops)
    latent_width = c.kv_lora_rank + c.qk_rope_head_dim
    byte_layers = c.n_prelude_layers + c.n_coda_layers

    def zeros(*shape: int, dtype: torch.dtype = model.compute_dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=model.embed_tokens.device)

    null = zeros(c.hidden_size) if model.core is None else model.null_output()
    return DecodingState(
        n_loops=n_loops,
        last_bytes=zeros(rows, c.reach, dtype=torch.int64).fill_(PAD_ID),
        position=zeros(rows, dtype=torch.int64),
        segments=zeros(rows, dtype=torch.int64),
        summed=zeros(rows, dtype=torch.float64),
        open_segment=zeros(rows, c.hidden_size, dtype=model.wide_dtype),
        open_bytes=zeros(rows, 1, dtype=model.wide_dtype),
        unpooled=null.detach().to(model.compute_dtype).repeat(rows, 1),
        history_ids=zeros(rows, 1, dtype=torch.int64),
        history_keys=zeros(len(c.engram_match_contexts), rows, 1, dtype=torch.int64),
        history_previous=zeros(len(c.engram_match_contexts), rows, 1, dtype=torch.int64),
        byte_latents=zeros(byte_layers, 1, rows, 1, latent_width),
        segment_latents=zeros(c.n_recurrent_layers, n_loops, rows, 1, latent_width),
        convolved=zeros(len(c.engram_layers), n_loops, rows, 1, c.hidden_size),
    )


CHECKED = b"Rows read the rows before them. " * 6


@torch.no_grad()
def check_decoding(model: Any, n_loops: int):
    """Raise UsageError unless bytes that are decoded in steps have the logits of a full pass.

    A subclass's layer that mixes rows sees only those of a step, unless it keeps earlier ones."""
    unchecked = copy(model)  # with the same weights
    unchecked.checks_decoding = False
    # in fp32, so that no near-tie of experts or boundaries falls the other way
    unchecked.compute_dtype = model.wide_dtype
    ids = torch.tensor([[BOS_ID, *CHECKED]], device=model.embed_tokens.device)
    full = unchecked(ids, n_loops=n_loops).logits
    state = unchecked.decoding_state(n_loops=n_loops)
    steps = ids.tensor_split([*range(120, 144)], dim=1)  # two long ones, between them single bytes
    stepped = torch.cat([unchecked.step(piece, state) for piece in steps], dim=1)
    if not torch.allclose(stepped, full, atol=0.01, equal_nan=True):
        raise UsageError(
            f"{type(model).__name__}'s logits in decoding differ from those of a full pass: a "
            f"layer that mixes rows must keep the last rows that it has seen, see "
            f"docs/guide/trying-an-idea.md#a-layer-that-mixes-rows"
        )


@torch.no_grad()
def step(model: Any, input_ids: Tensor, state: DecodingState) -> Tensor:
    """Feed input_ids int64 [B, T] and advance the state; return fp32 logits [B, T, vocab_size].

    They equal those of `forward` in evaluation mode over the whole text. The core runs once for all
    segments that end here. Call this inside `cast_weights_once` to cast weights once for many
    steps.

    Raise RuntimeError in training mode, where segments are random, and ValueError for bad
    input_ids."""
    if model.training:
        raise RuntimeError("decoding needs evaluation mode: call model.eval() first")
    check_ids("input_ids", input_ids, len(state.position))
    pieces = input_ids.tensor_split(_piece_starts(input_ids), dim=1)
    threads = torch.get_num_threads()
    # A Python thread that began during another one's step has 1, and must not put that back.
    is_few = threads > 1 and input_ids.numel() * model.config.hidden_size**2 <= ONE_THREAD
    if is_few:
        torch.set_num_threads(1)
    try:
        with torch.inference_mode():  # 10% faster
            logits = [_read_piece(model, piece, state) for piece in pieces]
    finally:
        if is_few:
            torch.set_num_threads(threads)
    return torch.cat(logits, dim=1)  # a normal tensor, not an inference tensor


@torch.no_grad()
def generate_batch(
    model: Any,
    logits: Tensor,
    state: DecodingState,
    max_new_bytes: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
    no_repeat_ngram_size: int = 0,
) -> Iterator[list[int | None]]:
    """Yield up to max_new_bytes lists with the next byte (0-255) of each row, or None after its
    EOS.

    logits [B, vocab_size]: of the last byte fed to the state, which is advanced as bytes are
    requested. See `draw` for the other arguments. no_repeat_ngram_size: write no sequence of so
    many bytes twice; 0: off. Weights must not change meanwhile.

    Raise FloatingPointError for a non-finite logit."""
    ended = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
    written = logits.new_empty(len(logits), 0, dtype=torch.int64)
    with model.cast_weights_once():
        for count in range(max_new_bytes):
            if count > 0:
                logits = model.step(written[:, -1:], state)[:, -1]
            if not logits.isfinite().all():
                raise FloatingPointError(
                    "the model's logits are not finite numbers: its weights are ruined"
                )
            if no_repeat_ngram_size > 0:
                logits = forbid_repeats(logits, written, no_repeat_ngram_size)
            drawn = draw(logits, temperature, top_k, top_p, generator)
            drawn = torch.where(ended, PAD_ID, drawn)
            written = torch.cat((written, drawn[:, None]), dim=1)
            ended |= drawn == EOS_ID
            if ended.all():
                return
            yield [byte if byte < 256 else None for byte in drawn.tolist()]


def generate(
    model: Any,
    ids: list[int],
    max_new_bytes: int,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
    n_loops: int | None = None,
) -> Iterator[int]:
    """Yield up to max_new_bytes ids (0-255) after the prefix `ids`, until EOS; see
    `generate_batch`."""
    state = model.decoding_state(n_loops=n_loops)
    with model.cast_weights_once():
        logits = model.step(torch.tensor([ids], device=model.embed_tokens.device), state)[:, -1]
    for (byte,) in model.generate_batch(
        logits, state, max_new_bytes, temperature, generator=generator
    ):
        assert byte is not None  # the only row's EOS ends the loop
        yield byte


# --------------------------------------------------------------------------------------------------
# One pass


def _piece_starts(input_ids: Tensor) -> list[int]:
    """Return where to split bytes [B, T]: each piece has at most PIECE bytes per row, of one
    document."""
    length = input_ids.shape[1]
    if length == 1:
        return []  # without waiting for the device
    starts_document = document_starts(input_ids)[:, 1:].any(0)
    new_documents = (starts_document.nonzero().flatten() + 1).tolist()
    return sorted({*range(PIECE, length, PIECE), *new_documents})


def _read_piece(model: Any, input_ids: Tensor, state: DecodingState) -> Tensor:
    """Feed bytes [B, T], of one document in each row, and advance the state; return logits [B, T,
    vocab_size]."""
    rows, length = input_ids.shape
    known = torch.cat((state.last_bytes, input_ids), dim=1)
    # Whether the first byte starts a document, as the byte before it decides.
    starts = document_starts(known[:, -length - 1 :])[:, 1]
    if starts.any():
        state.start_documents(starts, None if model.core is None else model.null_output())
    packed = _pack(model, input_ids, known, state)

    cache = LatentCache(
        state.byte_latents,
        packed.packing,
        state.position,
        model.config.byte_window,
        state.kept,
    )
    x_MD = model.before_core(packed, cache)
    if model.core is not None:
        predicted = model.predict_boundaries(x_MD)
        b_M = model.boundaries(predicted, packed, state.summed)
        if length == 1 and not b_M.any():
            x_MD = x_MD + _extend_segments(model, x_MD, state)
        else:
            x_MD = x_MD + _finish_segments(model, x_MD, b_M, packed, state)
    logits = model.after_core(x_MD, packed, cache)
    state.byte_latents = cache.buffer
    state.position = state.position + length
    state.last_bytes = known[:, -state.last_bytes.shape[1] :]
    return logits.view(rows, length, -1)


def _pack(model: Any, input_ids: Tensor, known: Tensor, state: DecodingState) -> PackedBytes:
    """Pack a step's bytes [B, T], as Spider.pack does those of a batch. known: with those before
    them."""
    rows, length = input_ids.shape
    cu_seqlens = torch.arange(rows + 1, dtype=torch.int32, device=input_ids.device) * length
    packing = Packing.build(
        cu_seqlens,
        rows * length,
        length,
        model.config,
        model.compute_dtype,
        before=state.position,
    )
    before = known.shape[1] - length
    column = torch.arange(known.shape[1], device=known.device)
    position = state.position[:, None] + column - before
    index = torch.arange(known.numel(), device=known.device).view_as(known)[:, before:]
    past = Past(known.flatten(), position.flatten(), index.flatten())
    matches = None
    if model.engram_match is not None:
        history = MatchHistory(state.history_ids, state.history_keys, state.history_previous)
        position_BT = packing.position.view(rows, length)
        matches, history = model.engram_match.step(input_ids, past, position_BT, history)
        state.history_ids, state.history_keys, state.history_previous = history
    return PackedBytes(input_ids, packing, past, matches)


def _extend_segments(model: Any, x_BD: Tensor, state: DecodingState) -> Tensor:
    """Add a byte to each row's open segment; return the last finished segment at its offset,
    [B, D]."""
    state.open_segment = state.open_segment + x_BD
    state.open_bytes = state.open_bytes + 1
    offsets = model.config.segment_offsets
    if offsets == 1:
        return state.unpooled
    offset_B = state.open_bytes.flatten().long().clamp_max(offsets - 1)
    row_B = torch.arange(len(x_BD), device=x_BD.device)
    return state.unpooled.unflatten(1, (offsets, -1))[row_B, offset_B]


def _finish_segments(
    model: Any, x_MD: Tensor, b_M: Tensor, packed: PackedBytes, state: DecodingState
) -> Tensor:
    """Pool the segments that end in a step's bytes, run the core on them, unpool to bytes [M, D].

    Bytes after a row's last boundary start its open segment."""
    rows = len(state.position)
    unpooled_before = state.unpooled
    open_before_M = state.open_bytes.long().expand(-1, len(x_MD) // rows).flatten()

    # Pool
    sums, weights, segment_cu_seqlens = sum_segments(x_MD, b_M, packed.packing.cu_seqlens)
    sums = add_open_segments(sums, segment_cu_seqlens, state.open_segment)
    weights = add_open_segments(weights, segment_cu_seqlens, state.open_bytes)
    segments = len(sums) - rows
    z_ND = (sums[:segments] / weights[:segments]).to(x_MD.dtype)
    state.open_segment = sums[segments:]
    state.open_bytes = weights[segments:]

    # Run the core
    unpooled_N = unpooled_before[:0]
    if segments:
        past = packed.past.select(segment_ends(b_M, segments))
        unpooled_N = _run_core(model, z_ND, segment_cu_seqlens, past, state)
        last_segment_B = (segment_cu_seqlens[1:] - 1).clamp_min(0)
        newest = unpooled_N.index_select(0, last_segment_B)
        has_new = segment_cu_seqlens.diff()[:, None] > 0
        state.unpooled = torch.where(has_new, newest, unpooled_before)

    # Unpool
    return model.unpool(
        unpooled_N, unpooled_before, b_M, packed.packing, segment_cu_seqlens, open_before_M
    )


def _run_core(
    model: Any,
    z_ND: Tensor,
    cu_seqlens: Tensor,
    past: Past,
    state: DecodingState,
) -> Tensor:
    """Run the core on finished segments, which follow those in the state; return [N, O * D]."""
    segments = len(z_ND)
    lengths_B = cu_seqlens.diff()
    packing = Packing.build(
        cu_seqlens,
        segments,
        int(lengths_B.max()),
        model.config,
        model.compute_dtype,
        before=state.segments,
    )
    latents = LatentCache(state.segment_latents, packing, state.segments)
    convolved = ConvolutionCache(state.convolved, packing, state.segments, model.config)
    share = z_ND.new_full((segments,), 1 / segments, dtype=model.wide_dtype)
    output = model.decode_core(z_ND, packing, past, share, state.n_loops, latents, convolved)
    state.segment_latents = latents.buffer
    state.convolved = convolved.buffer
    state.segments = state.segments + lengths_B
    return output

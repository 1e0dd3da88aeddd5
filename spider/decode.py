"""Decode: feed bytes to a model step by step, carry its state from one to the next, draw and
generate bytes.

DecodingState is the state; DecodingMixin gives Spider its methods: `step` feeds bytes to a state,
equal to the full pass; `generate_batch` and `generate` write.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spider.attention import Cache
from spider.memory import SegmentEngram
from spider.packing import Packing, document_starts
from spider.segments import last_byte_of, sum_segments
from tokenizer import EOS_ID, PAD_ID

PIECE = 256  # bytes a row that one pass of decoding takes, which bounds its memory


@dataclass
class DecodingState:
    """The state of decoding, per row: tensors and plain values, so that vars(state.copy()) can be
    saved and DecodingState(**saved) continues. It has the device and compute_dtype of its model. C
    is the width of a latent; the number of cache slots doubles as they fill up."""

    n_loops: int
    last_bytes: Tensor  # int64 [rows, longest_order], PAD before the document
    position: Tensor  # int64 [rows], bytes of the document so far
    segments: Tensor  # int64 [rows], finished segments of it
    summed: Tensor  # float64 [rows], boundary probabilities over it
    open_segment: Tensor  # [rows, D], sum of the bytes since the last boundary
    open_bytes: Tensor  # [rows, 1], number of these bytes
    unpooled: Tensor  # [rows, offsets * D], last finished segment, one row per segment offset
    matches: Tensor  # int64 [1 + 2 * match contexts, rows, slots]: see MatchMemory.step
    byte_latents: Tensor  # [prelude and coda layers, 1, rows, slots, C], normed and rotated
    segment_latents: Tensor  # [L, n_loops, rows, slots, C], of each segment's last loop
    convolved: Tensor  # [Engram layers of the core, n_loops, rows, slots, D], convolution inputs

    def copy(self, rows: list[int] | None = None) -> "DecodingState":
        """Copy the state, or only the given rows, which may repeat."""

        def pick(x):
            if not isinstance(x, Tensor) or rows is None:
                return x.clone() if isinstance(x, Tensor) else x
            return x.index_select({5: 2, 3: 1}.get(x.ndim, 0), torch.tensor(rows, device=x.device))

        return DecodingState(**{name: pick(x) for name, x in vars(self).items()})

    def start_documents(self, rows: Tensor, null: Tensor | None):
        """Reset the rows, bool [rows], where a new document starts."""
        for x in (
            self.position,
            self.segments,
            self.summed,
            self.open_segment,
            self.open_bytes,
            self.last_bytes,
        ):
            x.masked_fill_(
                rows.view(-1, *(1,) * (x.ndim - 1)), PAD_ID if x is self.last_bytes else 0
            )
        if null is not None:
            self.unpooled = torch.where(rows[:, None], null.to(self.unpooled.dtype), self.unpooled)


def check_ids(name: str, ids: Tensor, rows: int | str = "B", length: int | str = "T"):
    """Raise ValueError unless ids are int64 [rows, length]; an int is a required size, a letter any
    size above 0."""
    sizes = list(ids.shape)
    if (
        ids.dtype != torch.int64
        or len(sizes) != 2
        or any(
            size != wanted if isinstance(wanted, int) else size < 1
            for size, wanted in zip(sizes, (rows, length), strict=False)
        )
    ):
        raise ValueError(
            f"{name} must be int64 [{rows}, {length}], not empty; got "
            f"{str(ids.dtype).removeprefix('torch.')} {sizes}"
        )


def draw(
    logits: Tensor,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generator: torch.Generator | None,
) -> Tensor:
    """Sample a byte or EOS for each row of logits [rows, vocab_size] -> int64 [rows].
    temperature 0 is greedy; top_k keeps the k likeliest, top_p the likeliest ones with a total
    probability of p."""
    logits = logits.float().clone()
    logits[:, 256:EOS_ID] = -math.inf  # PAD, BOS
    logits[:, EOS_ID + 1 :] = -math.inf  # sentinels
    if temperature == 0:
        return logits.argmax(1)
    # any temperature above 0
    logits = (logits - logits.amax(1, keepdim=True)).double() / temperature
    ordered, order = logits.softmax(1).float().sort(descending=True)
    if top_k is not None:
        ordered[:, top_k:] = 0
    if top_p is not None:
        beyond = (ordered.cumsum(1) - ordered) / ordered.sum(1, keepdim=True) >= top_p
        beyond[:, 0] = False  # fp32 has no 1e-50
        ordered[beyond] = 0
    return order.gather(1, torch.multinomial(ordered, 1, generator=generator)).squeeze(1)


def forbid_repeats(logits: Tensor, written: Tensor, size: int) -> Tensor:
    """Rule out ids that would write a sequence of `size` ids of written [rows, n] int64 again, as
    transformers' no_repeat_ngram_size does: logits [rows, vocab_size]."""
    if written.shape[1] < size:
        return logits
    if size == 1:
        return logits.scatter(1, written, -math.inf)
    # Only sequences whose last id but one is the newest id: comparing all would take longer than a
    # step.
    newest = written[:, -1:]
    # PAD: row has ended
    row, gram = ((written[:, size - 2 : -1] == newest) & (newest != PAD_ID)).nonzero(as_tuple=True)
    grams = written.unfold(1, size, 1)[row, gram]  # [found, size]
    same = (grams[:, :-1] == written[row, written.shape[1] - size + 1 :]).all(1)
    return logits.index_put((row[same], grams[same, -1]), logits.new_tensor(-math.inf))


class DecodingMixin:
    """The decoding methods of Spider."""

    def decoding_state(self, rows: int = 1, n_loops: int | None = None) -> DecodingState:
        """Make the state of `rows` empty rows; n_loops defaults to the config's."""
        c, weight = self.config, self.embed_tokens
        n_loops, latent = self.loops_of(n_loops), c.kv_lora_rank + c.qk_rope_head_dim
        held, summed = (
            weight.new_zeros(0, dtype=dtype) for dtype in (self.compute_dtype, self.wide_dtype)
        )
        count = torch.zeros(rows, dtype=torch.int64, device=weight.device)
        null = (
            held.new_zeros(c.hidden_size)
            if self.core is None
            else self.null_rows().detach().to(held.dtype)
        )
        return DecodingState(
            n_loops=n_loops,
            last_bytes=count.new_full((rows, c.longest_order), PAD_ID),
            position=count,
            segments=count.clone(),
            summed=count.double(),
            open_segment=summed.new_zeros(rows, c.hidden_size),
            open_bytes=summed.new_zeros(rows, 1),
            unpooled=null.repeat(rows, 1),
            matches=count.new_zeros(1 + 2 * c.match_contexts, rows, 1),
            byte_latents=held.new_zeros(c.n_prelude_layers + c.n_coda_layers, 1, rows, 1, latent),
            segment_latents=held.new_zeros(c.n_recurrent_layers, n_loops, rows, 1, latent),
            convolved=held.new_zeros(len(c.engram_layers), n_loops, rows, 1, c.hidden_size),
        )

    @torch.no_grad()
    def step(self, input_ids: Tensor, state: DecodingState) -> Tensor:
        """Feed input_ids [rows, n] int64 and advance the state; return logits [rows, n,
        vocab_size], fp32.

        They equal those of `forward` in evaluation mode over the whole text. The core runs once for
        all segments that end here. Call this inside `cast_weights_once` to cast weights once for
        many steps. A pass has at most PIECE bytes, of one document in each row. Raise RuntimeError
        in training mode, where segments are random, and ValueError for bad input_ids."""
        if self.training:
            raise RuntimeError("decoding needs evaluation mode: call model.eval() first")
        check_ids("input_ids", input_ids, len(state.position), "n")
        n, ends = input_ids.shape[1], set()
        if n > 1:
            starts = document_starts(input_ids)
            ends = {
                *range(PIECE, n, PIECE),
                *(starts[:, 1:].any(0).nonzero().flatten() + 1).tolist(),
            }
        with torch.inference_mode():  # 10% faster
            logits = [
                _read(self, piece, state) for piece in input_ids.tensor_split(sorted(ends), dim=1)
            ]
        return torch.cat(logits, dim=1)  # a normal tensor, not an inference tensor

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
        """Yield up to max_new_bytes lists with the next byte (0-255) of each row, or None after its
        EOS.

        logits [rows, vocab_size]: of the last byte fed to the state, which is advanced as bytes are
        requested. See `draw` for the other arguments. no_repeat_ngram_size: write no sequence of so
        many bytes twice; 0: off. Weights must not change meanwhile. Raise FloatingPointError for a
        non-finite logit."""
        ended, drawn = torch.zeros(len(logits), dtype=torch.bool, device=logits.device), None
        written = logits.new_empty(len(logits), 0, dtype=torch.int64)
        with self.cast_weights_once():
            for _ in range(max_new_bytes):
                if drawn is not None:
                    logits = self.step(drawn[:, None], state)[:, -1]
                if not logits.isfinite().all():
                    raise FloatingPointError(
                        "the model's logits are not finite numbers: its weights are ruined"
                    )
                if no_repeat_ngram_size > 0:
                    logits = forbid_repeats(logits, written, no_repeat_ngram_size)
                drawn = torch.where(
                    ended, PAD_ID, draw(logits, temperature, top_k, top_p, generator)
                )
                written = torch.cat((written, drawn[:, None]), dim=1)
                ended |= drawn == EOS_ID
                if ended.all():
                    return
                yield [byte if byte < 256 else None for byte in drawn.tolist()]

    def generate(
        self,
        ids: list[int],
        max_new_bytes: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
        n_loops: int | None = None,
        top_p: float | None = None,
    ) -> Iterator[int]:
        """Yield up to max_new_bytes ids (0-255) after the prefix `ids`, until EOS; see
        `generate_batch`."""
        state = self.decoding_state(n_loops=n_loops)
        with self.cast_weights_once():
            logits = self.step(torch.tensor([ids], device=self.embed_tokens.device), state)[:, -1]
        for (byte,) in self.generate_batch(
            logits, state, max_new_bytes, temperature, top_k, top_p, generator
        ):
            yield byte


def _read(model: nn.Module, input_ids: Tensor, state: DecodingState) -> Tensor:
    """Feed bytes [rows, n], of one document in each row."""
    c, (rows, n) = model.config, input_ids.shape
    known = torch.cat((state.last_bytes, input_ids), dim=1)
    # whether the first byte starts one, as the byte before decides
    starts = document_starts(known[:, -n - 1 :])[:, 1]
    if starts.any():
        state.start_documents(starts, None if model.core is None else model.null_rows())
        known = torch.cat((state.last_bytes, input_ids), dim=1)
    ids = input_ids.reshape(-1)
    cu_seqlens = torch.arange(0, (rows + 1) * n, n, dtype=torch.int32, device=ids.device)
    packing = Packing.build(cu_seqlens, rows * n, n, c, model.compute_dtype, 0, state.position)
    shifted = known.unfold(1, n, 1)[:, 1:].flip(1).transpose(0, 1).flatten(1)  # as in shifted_bytes
    cache, matches = Cache(state.byte_latents, packing, state.position, c.byte_window), None
    if model.engram_match is not None:
        matches, state.matches = model.engram_match.step(
            input_ids, shifted, packing.position.view(rows, n), state.matches
        )
    x = model.before_core(ids, packing, shifted, matches, cache)
    if model.core is not None:
        b = model.boundaries(
            model.predict_boundaries(x), input_ids, shifted, packing, None, state.summed
        )
        if n == 1 and not b.any():
            x = x + _extend_segments(model, x, state)
        else:
            x = x + _finish_segments(model, x, b, packing, shifted, state)
    logits = model.after_core(x, packing, shifted, matches, cache)
    state.byte_latents, state.position = cache.held, state.position + n
    state.last_bytes = known[:, -c.longest_order :]
    return logits.view(rows, n, -1)


def _extend_segments(model: nn.Module, x: Tensor, state: DecodingState) -> Tensor:
    """Add a byte to each row's open segment, x [rows, D]; return the last finished segment at its
    offset."""
    state.open_segment, state.open_bytes = state.open_segment + x, state.open_bytes + 1
    offsets = model.config.segment_offsets
    if offsets == 1:
        return state.unpooled
    offset = state.open_bytes.flatten().long().clamp_max(offsets - 1)
    return state.unpooled.unflatten(1, (offsets, -1))[torch.arange(len(x), device=x.device), offset]


def _finish_segments(
    model: nn.Module, x: Tensor, b: Tensor, packing: Packing, shifted: Tensor, state: DecodingState
) -> Tensor:
    """Pool the segments that end in bytes x [rows * n, D], run the core on them and unpool; return
    this for each byte. Bytes after a row's last boundary start its open segment."""
    rows, before = len(state.position), state.unpooled
    open_bytes = state.open_bytes.long().expand(-1, len(x) // rows).flatten()
    z, total, segment_cu_seqlens = sum_segments(
        x, b, packing.cu_seqlens, (state.open_segment, state.open_bytes)
    )
    z, state.open_segment = z.tensor_split((-rows,))
    total, state.open_bytes = total.tensor_split((-rows,))
    z = (z / total).to(x.dtype)
    if len(z):
        z = _run_core(
            model, z, segment_cu_seqlens, shifted.index_select(1, last_byte_of(b, len(z))), state
        )
        newest = z.index_select(0, (segment_cu_seqlens[1:] - 1).clamp_min(0))  # of each row
        state.unpooled = torch.where(segment_cu_seqlens.diff()[:, None] > 0, newest, before)
    else:
        z = before[:0]
    return model.unpool(z, before, b, packing, segment_cu_seqlens, open_bytes)


def _run_core(
    model: nn.Module, z: Tensor, cu_seqlens: Tensor, last_bytes: Tensor, state: DecodingState
) -> Tensor:
    """Run the core on finished segments z [N, D], which follow those in the state."""
    lengths, taps = cu_seqlens.diff(), SegmentEngram.taps(model.config)
    packing = Packing.build(
        cu_seqlens, len(z), int(lengths.max()), model.config, model.compute_dtype, 0, state.segments
    )
    latents = Cache(state.segment_latents, packing, state.segments)
    convolved = Cache(state.convolved, packing, state.segments, taps[-1] + 1).look_back(taps)
    share = z.new_full((len(z),), 1 / len(z), dtype=model.wide_dtype)
    z = model.decode_core(z, packing, last_bytes, share, state.n_loops, latents, convolved)
    state.segment_latents, state.convolved = latents.held, convolved.held
    state.segments = state.segments + lengths
    return z

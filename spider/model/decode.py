"""Decoding: the state that Spider.step carries from one step to the next, and sampling of bytes.

A step reads T bytes of each row of a batch and returns the logits that a full pass would return.
The bytes after a row's last boundary form its open segment, which the next step continues.

Shapes, as suffixes of names:
    B  rows of the batch, each in its own document
    T  bytes of each row that a step reads
    M  bytes of a step, B * T
    N  segments that end in a step
    D  hidden_size
    O  segment offsets
    C  kv_lora_rank
    R  qk_rope_head_dim; a latent has C + R numbers
    X  contexts of the match memory
    S  slots for the bytes or segments of earlier steps; S grows as they fill up
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from spider.config import SpiderConfig
from spider.model.contexts import PastBytes
from spider.model.memory import MatchHistory, MatchMemory, PackedBytes
from spider.model.packing import Packing, document_starts
from spider.model.segments import add_open_segments, sum_segments
from spider.vocabulary import EOS_ID, PAD_ID

PIECE = 256  # maximum bytes per row in one pass of decoding, to limit memory
# If a step's bytes times hidden_size^2 are at most this, a second thread gains nothing. On busy
# cores a second thread makes the step many times slower: docs/results/performance.md#threads
ONE_THREAD = 1 << 20

# --------------------------------------------------------------------------------------------------
# The state


@dataclass
class DecodingState:
    """The state of decoding, on its model's device and in its compute_dtype.

    It holds tensors and plain values: save vars(state.copy()), and load DecodingState(**saved)."""

    n_loops: int
    last_bytes: Tensor  # int64 [B, config.reach], PAD before the first byte
    position: Tensor  # int64 [B], bytes of the document so far
    segments: Tensor  # int64 [B], finished segments of the document
    summed: Tensor  # float64 [B], sum of boundary probabilities over the document
    open_segment: Tensor  # [B, D], sum of the bytes since the last boundary
    open_bytes: Tensor  # [B, 1], number of these bytes
    unpooled: Tensor  # [B, O * D], the core's output for the last finished segment
    history_ids: Tensor  # int64 [B, S], see MatchHistory
    history_keys: Tensor  # int64 [X, B, S]
    history_previous: Tensor  # int64 [X, B, S]
    byte_latents: Tensor  # [prelude and coda layers, 1, B, S, C + R], normed and rotated
    segment_latents: Tensor  # [core layers, n_loops, B, S, C + R], of each segment's last loop
    convolved: Tensor  # [Engram layers of the core, n_loops, B, S, D], convolution inputs
    # The last tokens [B, count, D] of each byte layer that calls attention.tokens_before, by the
    # layer's number.
    kept: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def empty(
        cls,
        config: SpiderConfig,
        rows: int,
        n_loops: int,
        null: Tensor,
        wide_dtype: torch.dtype,
    ) -> "DecodingState":
        """Make the state of `rows` rows that have no bytes yet.

        null: [O * D], see Spider.null_output; its device and dtype are the state's."""
        c = config
        latent_width = c.kv_lora_rank + c.qk_rope_head_dim
        byte_layers = c.n_prelude_layers + c.n_coda_layers

        def zeros(*shape: int, dtype: torch.dtype = null.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=null.device)

        return cls(
            n_loops=n_loops,
            last_bytes=zeros(rows, c.reach, dtype=torch.int64).fill_(PAD_ID),
            position=zeros(rows, dtype=torch.int64),
            segments=zeros(rows, dtype=torch.int64),
            summed=zeros(rows, dtype=torch.float64),
            open_segment=zeros(rows, c.hidden_size, dtype=wide_dtype),
            open_bytes=zeros(rows, 1, dtype=wide_dtype),
            unpooled=null.repeat(rows, 1),
            history_ids=zeros(rows, 1, dtype=torch.int64),
            history_keys=zeros(len(c.engram_match_contexts), rows, 1, dtype=torch.int64),
            history_previous=zeros(len(c.engram_match_contexts), rows, 1, dtype=torch.int64),
            byte_latents=zeros(byte_layers, 1, rows, 1, latent_width),
            segment_latents=zeros(c.n_recurrent_layers, n_loops, rows, 1, latent_width),
            convolved=zeros(len(c.engram_layers), n_loops, rows, 1, c.hidden_size),
        )

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

    def start_documents(self, starts: Tensor, null: Tensor):
        """Reset the rows in which a new document starts. starts: bool [B]. null: see
        Spider.null_output.

        Bytes, latents and history of the previous document stay stored, but a row at position 0
        sees none of them."""
        self.position.masked_fill_(starts, 0)
        self.segments.masked_fill_(starts, 0)
        self.summed.masked_fill_(starts, 0)
        starts_B1 = starts[:, None]
        self.open_segment.masked_fill_(starts_B1, 0)
        self.open_bytes.masked_fill_(starts_B1, 0)
        self.unpooled = torch.where(starts_B1, null.to(self.unpooled.dtype), self.unpooled)

    def extend_segments(self, x_BD: Tensor) -> Tensor:
        """Add a byte to each row's open segment; return the output of the last finished segment at
        that byte's offset, [B, D]."""
        self.open_segment = self.open_segment + x_BD
        self.open_bytes = self.open_bytes + 1
        unpooled_BOD = self.unpooled.unflatten(1, (-1, x_BD.shape[1]))
        rows, offsets, _ = unpooled_BOD.shape
        if offsets == 1:
            return self.unpooled
        offset_B = self.open_bytes.flatten().long().clamp_max(offsets - 1)
        row_B = torch.arange(rows, device=x_BD.device)
        return unpooled_BOD[row_B, offset_B]

    def pool_segments(self, x_MD: Tensor, b_M: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
        """Pool the segments that end in a piece, as segments.pool_segments does. A row's first
        segment continues its open segment; the bytes after its last boundary become the new one."""
        sums, weights, segment_cu_seqlens = sum_segments(x_MD, b_M, cu_seqlens)
        sums = add_open_segments(sums, segment_cu_seqlens, self.open_segment)
        weights = add_open_segments(weights, segment_cu_seqlens, self.open_bytes)
        segments = len(sums) - len(self.position)
        self.open_segment = sums[segments:]
        self.open_bytes = weights[segments:]
        z_ND = (sums[:segments] / weights[:segments]).to(x_MD.dtype)
        return z_ND, segment_cu_seqlens

    def set_unpooled(self, output: Tensor, segment_cu_seqlens: Tensor):
        """Keep each row's newest segment from the core's output [N, O * D]."""
        last_segment_B = (segment_cu_seqlens[1:] - 1).clamp_min(0)
        newest = output.index_select(0, last_segment_B)
        has_new = segment_cu_seqlens.diff()[:, None] > 0
        self.unpooled = torch.where(has_new, newest, self.unpooled)


# The dimension of a state's rows, for tensors where it is not the first.
ROW_DIMENSION = {
    "history_keys": 1,
    "history_previous": 1,
    "byte_latents": 2,
    "segment_latents": 2,
    "convolved": 2,
}


# --------------------------------------------------------------------------------------------------
# The bytes of a step


def split_pieces(input_ids: Tensor) -> tuple[Tensor, ...]:
    """Split bytes [B, T] into pieces of at most PIECE bytes per row. In a piece, each row is inside
    one document."""
    length = input_ids.shape[1]
    if length == 1:
        return (input_ids,)  # without waiting for the device
    starts_document = document_starts(input_ids)[:, 1:].any(0)
    new_documents = (starts_document.nonzero().flatten() + 1).tolist()
    piece_starts = sorted({*range(PIECE, length, PIECE), *new_documents})
    return input_ids.tensor_split(piece_starts, dim=1)


def pack_piece(
    input_ids: Tensor,
    known: Tensor,
    state: DecodingState,
    config: SpiderConfig,
    match_memory: MatchMemory | None,
) -> PackedBytes:
    """Pack a piece [B, T] as Spider._pack packs a batch, and add it to the match history.

    known: the last bytes of each row and the piece."""
    rows, length = input_ids.shape
    cu_seqlens = torch.arange(rows + 1, dtype=torch.int32, device=input_ids.device) * length
    packing = Packing.build(
        cu_seqlens, rows * length, length, config, state.byte_latents.dtype, before=state.position
    )
    before = known.shape[1] - length
    position = state.position[:, None] + torch.arange(-before, length, device=known.device)
    index = torch.arange(known.numel(), device=known.device).view_as(known)[:, before:]
    past = PastBytes(known.flatten(), position.flatten(), index.flatten())
    matches = None
    if match_memory is not None:
        history = MatchHistory(state.history_ids, state.history_keys, state.history_previous)
        position_BT = packing.position.view(rows, length)
        matches, history = match_memory.step(input_ids, past, position_BT, history)
        state.history_ids, state.history_keys, state.history_previous = history
    return PackedBytes(input_ids, packing, past, matches)


@contextmanager
def fewer_threads(work: int) -> Iterator[None]:
    """Use one thread if `work`, bytes times hidden_size^2, is at most ONE_THREAD."""
    threads = torch.get_num_threads()
    # A Python thread that starts during another's step begins with 1 thread; it must not restore 1.
    is_few = threads > 1 and work <= ONE_THREAD
    if is_few:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if is_few:
            torch.set_num_threads(threads)


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

    temperature: 0 is greedy. top_k: sample only from the k most likely ids. top_p: sample only from
    the most likely ids whose total probability is p."""
    logits = logits.float().clone()
    logits[:, 256:EOS_ID] = -math.inf  # PAD, BOS
    logits[:, EOS_ID + 1 :] = -math.inf  # sentinels
    if temperature == 0:
        return logits.argmax(1)
    # The largest logit becomes 0. In fp64, no temperature above 0 then overflows.
    logits = (logits - logits.amax(1, keepdim=True)).double() / temperature
    probability, ids = logits.softmax(1).float().sort(descending=True)
    if top_k is not None:
        probability[:, top_k:] = 0
    if top_p is not None:
        likelier = probability.cumsum(1) - probability  # total probability of all likelier ids
        beyond = likelier / probability.sum(1, keepdim=True) >= top_p
        beyond[:, 0] = False  # a top_p of 1e-50 is 0 in fp32
        probability[beyond] = 0
    chosen = torch.multinomial(probability, 1, generator=generator)
    return ids.gather(1, chosen).squeeze(1)


def forbid_repeats(logits: Tensor, written: Tensor, size: int) -> Tensor:
    """Rule out ids that would repeat an n-gram of `size` written ids: logits [B, vocab_size].

    written int64 [B, n]: all ids so far, PAD after the end of a row. transformers'
    no_repeat_ngram_size does the same."""
    length = written.shape[1]
    if length < size:
        return logits
    if size == 1:
        return logits.scatter(1, written, -math.inf)
    # Compare only n-grams whose second-to-last id is the newest id. Comparing all would take
    # longer than a decoding step.
    newest = written[:, -1:]
    candidate = (written[:, size - 2 : -1] == newest) & (newest != PAD_ID)
    row, first = candidate.nonzero(as_tuple=True)
    ngrams = written.unfold(1, size, 1)[row, first]  # [candidates, size]
    written_last = written[row, length - size + 1 :]  # the size - 1 newest ids
    repeats = (ngrams[:, :-1] == written_last).all(1)
    forbidden = (row[repeats], ngrams[repeats, -1])
    return logits.index_put(forbidden, logits.new_tensor(-math.inf))

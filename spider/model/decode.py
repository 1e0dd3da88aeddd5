"""Decoding: the state that Spider.step carries from one step to the next, and sampling of bytes.

A step reads T bytes of each row of a batch and returns the logits that a full pass would return.
The bytes after a row's last boundary form its open segment, which the next step continues.

The host knows every byte. So it computes all integers with NumPy, such as positions, keys of
contexts and places in caches, and copies them to the device. A step waits for the device only to
learn where segments end, and the first step also to read the constants of hashes.

Shapes, as suffixes of names:
    B  rows of the batch, each in its own document
    T  bytes of each row that a step reads
    M  bytes of a step, B * T
    N  segments that end in a step
    D  hidden_size
    O  segment offsets
    C  kv_lora_rank
    R  qk_rope_head_dim; a latent has C + R numbers
    S  slots for the bytes or segments of earlier steps; S grows as they fill up
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor

from spider.config import SpiderConfig
from spider.model.contexts import to_device
from spider.model.memory import MatchHistory
from spider.model.packing import document_starts
from spider.vocabulary import EOS_ID, PAD_ID

PIECE = 256  # maximum bytes per row in one pass of decoding, to limit memory
# If a step's bytes times hidden_size^2 are at most this, a second thread gains nothing. On busy
# cores a second thread makes the step many times slower: docs/results/performance.md#threads
ONE_THREAD = 1 << 20

# --------------------------------------------------------------------------------------------------
# The state


class DecodingState:
    """The state of decoding, which can be pickled. Tensors are on the model's device, in its
    compute_dtype unless noted; NumPy arrays are on the host, int64."""

    def __init__(
        self, config: SpiderConfig, rows: int, n_loops: int, null: Tensor, wide_dtype: torch.dtype
    ):
        """Start `rows` rows that have no bytes yet.

        null: [O * D], see Spider.null_output; its device and dtype are the state's."""
        c = config
        latent_width = c.kv_lora_rank + c.qk_rope_head_dim
        byte_layers = c.n_prelude_layers + c.n_coda_layers
        zeros = null.new_zeros
        self.n_loops = n_loops
        self.last_bytes = np.full((rows, c.reach), PAD_ID)  # [B, reach], PAD before the first byte
        self.position = np.zeros(rows, dtype=int)  # [B], bytes of the document so far
        self.segments = np.zeros(rows, dtype=int)  # [B], finished segments of the document
        self.open_bytes = np.zeros(rows, dtype=int)  # [B], bytes since the last boundary
        self.history = MatchHistory(len(c.engram_match_contexts), rows)
        # float64 [B], sum of boundary probabilities over the document
        self.summed = zeros(rows, dtype=torch.float64)
        # [B, D], sum of the bytes since the last boundary, at least fp32
        self.open_segment = zeros(rows, c.hidden_size, dtype=wide_dtype)
        # [B, O * D], the core's output for the last finished segment
        self.unpooled = null.repeat(rows, 1)
        # Caches, see attention.Cache: normed and rotated latents of bytes; latents of segments, as
        # their last loop left them; inputs of the convolution in the core's Engram layers.
        self.byte_latents = zeros(byte_layers, 1, rows, 1, latent_width)
        self.segment_latents = zeros(c.n_recurrent_layers, n_loops, rows, 1, latent_width)
        self.convolved = zeros(len(c.engram_layers), n_loops, rows, 1, c.hidden_size)
        # The last tokens [B, count, D] of each byte layer that calls attention.tokens_before, by
        # the layer's number.
        self.kept: dict[int, Tensor] = {}

    def copy(self, rows: list[int] | None = None) -> "DecodingState":
        """Copy the state, or only the given rows, which may repeat."""
        if rows is None:
            rows = [*range(len(self.position))]
        state = copy(self)
        for name, value in vars(self).items():
            if isinstance(value, MatchHistory):
                setattr(state, name, value.copy(rows))
            elif isinstance(value, Tensor) and value.ndim == 5:  # a cache
                setattr(state, name, value[:, :, rows])
            elif isinstance(value, (Tensor, np.ndarray)):
                setattr(state, name, value[rows])
        state.kept = {layer: tokens[rows] for layer, tokens in self.kept.items()}
        return state

    def start_document(self, row: int, null: Tensor):
        """Reset a row in which a new document starts. null: see Spider.null_output.

        Bytes and latents of the previous document stay stored, but a row at position 0 sees none of
        them."""
        self.position[row] = 0
        self.segments[row] = 0
        self.open_bytes[row] = 0
        self.history.forget(row)
        self.summed[row] = 0
        self.open_segment[row] = 0
        self.unpooled[row] = null


# --------------------------------------------------------------------------------------------------
# The bytes of a step


def split_pieces(ids_BT: np.ndarray) -> list[np.ndarray]:
    """Split bytes [B, T] into pieces of at most PIECE bytes per row. In a piece, each row is inside
    one document."""
    starts_piece = document_starts(ids_BT).any(0)
    starts_piece[::PIECE] = True
    return np.split(ids_BT, starts_piece.nonzero()[0], axis=1)[1:]  # without the empty first part


class StepSegments:
    """The segments and outputs of a step's bytes: int64 NumPy arrays, on the host.

    Segment b < B stays open in row b; the others end in the step. Output b < B is that of the last
    segment of row b before the step; the others have the numbers of their segments.

        ends          0 0 1 0 1 0 | 0 1 0     two rows: b is 0 or 1
        segment       2 2 2 3 3 0 | 4 4 1
        output        0 0 2 2 3 3 | 1 4 4
    """

    def __init__(self, ends_BT: np.ndarray, open_bytes_B: np.ndarray):
        """ends: bool. open_bytes: bytes of each row's open segment before the step."""
        row_B1 = np.arange(len(ends_BT))[:, None]
        ended_BT = ends_BT.cumsum(1)  # at or before each byte
        self.ended = ended_BT[:, -1]  # [B], segments that end in each row
        first_B = len(ends_BT) + self.ended.cumsum() - self.ended
        next_BT = first_B[:, None] + ended_BT  # the first segment that ends after each byte
        is_open_BT = ended_BT - ends_BT == self.ended[:, None]
        self.segment = np.where(is_open_BT, row_B1, next_BT - ends_BT)  # of each byte, [B, T]
        self.output = np.where(ended_BT > 0, next_BT - 1, row_B1)  # for each byte, [B, T]
        # bytes of each segment, [B + N]
        self.bytes = np.bincount(self.segment.ravel(), minlength=len(row_B1) + self.ended.sum())
        self.bytes[self.segment[:, 0]] += open_bytes_B
        byte_T = np.arange(ends_BT.shape[1])
        boundary_BT = np.where(ends_BT, byte_T, -1 - open_bytes_B[:, None])
        # bytes since the last boundary, [B, T]
        self.offset = byte_T - np.maximum.accumulate(boundary_BT, axis=1)


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
    # torch.multinomial does the same, but also waits for the device to check the probabilities
    race = torch.empty_like(probability).exponential_(generator=generator)
    chosen = (probability / race).argmax(1, keepdim=True)
    return ids.gather(1, chosen).squeeze(1)


def forbid_repeats(logits: Tensor, written: np.ndarray, size: int) -> Tensor:
    """Rule out ids that would repeat an n-gram of `size` written ids: logits [B, vocab_size].

    written int64 [B, n]: all ids so far, PAD after the end of a row. transformers'
    no_repeat_ngram_size does the same."""
    if written.shape[1] < size:
        return logits
    ngrams = sliding_window_view(written, size, axis=1)  # [B, ngrams, size]
    last_ids = ngrams[:, :, -1]
    newest = written[:, None, written.shape[1] - size + 1 :]  # the size - 1 newest ids
    begins_alike = (ngrams[:, :, :-1] == newest).all(2)
    row, ngram = (begins_alike & (last_ids != PAD_ID)).nonzero()
    forbidden = last_ids[row, ngram]
    index = (to_device(row, logits.device), to_device(forbidden, logits.device))
    return logits.index_put(index, logits.new_full((), -math.inf))

"""Lookup memories, addressed by contexts of the last bytes (contexts.py): Engram and match memory.

Engram (arXiv 2601.07372) looks up learned rows of tables: at segment rate before core layers, at
byte rate (BLT, arXiv 2412.09871) before the prelude and before the head. The match memory (the
match model of PAQ, Mahoney 2005) finds the last occurrences of the current context in the document,
and the bytes that followed them.

Shapes, as suffixes of names:
    M  bytes of a text, or of a decoding step
    N  segments
    n  active segments, the part of N that a loop computes
    D  hidden_size
    X  contexts of a memory
    R  ranks: the M bytes in the order of their keys
    B  sequences; in a decoding step, each is part of one document
    T  bytes of a sequence
    S  slots: the bytes of a text, or in decoding of all documents so far
"""

import warnings
from collections.abc import Callable
from copy import copy
from typing import ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spider.config import MAX_CONTEXT_BYTES, SpiderConfig, primes_below
from spider.model.attention import Cache
from spider.model.contexts import Integers, PastBytes, library_of, take, to_device
from spider.model.layers import Linear, inverse_rms, rms_norm, wide
from spider.model.packing import (
    ActiveTokens,
    Packing,
    StepTokens,
    mark_tokens_dynamic,
    round_up,
)

# --------------------------------------------------------------------------------------------------
# Tables of learned rows


class HashedContexts(nn.Module):
    """The contexts of a memory, and the constants in their keys."""

    def __init__(self, contexts: tuple[str, ...]):
        super().__init__()
        self.contexts = contexts
        self.on_host: dict[str, np.ndarray] = {}  # copies of the buffers, for decoding
        longest = max(int(name) if name.isdecimal() else MAX_CONTEXT_BYTES for name in contexts)
        self.multiplier: Tensor = nn.Buffer(torch.empty(longest, dtype=torch.int64))

    def init_hash(self, seed: int):
        """Draw odd 64-bit multipliers from `seed`; the global random state stays as it is."""
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(
            -(2**62), 2**62, self.multiplier.shape, generator=generator, device="cpu"
        )
        self.multiplier.copy_(drawn * 2 + 1)

    def _load_from_state_dict(self, *args):
        super()._load_from_state_dict(*args)
        self.on_host = {}

    def constant(self, name: str, past: PastBytes) -> Integers:
        """Return a buffer: on the device, or on the host if past is there. Waits for the device in
        the first step."""
        if past.library is torch:
            return self.get_buffer(name)
        if not self.on_host:
            self.on_host = {name: np.array(t.tolist()) for name, t in self.named_buffers()}
        return self.on_host[name]

    def keys(self, past: PastBytes) -> Integers:
        """Return the keys of past's M bytes, int64 [X, M]."""
        return past.keys(self.contexts, self.constant("multiplier", past))


class LookupGradients(NamedTuple):
    """Gradients of lookups in a table."""

    row: Tensor  # int64 [lookups]
    gradient: Tensor  # [lookups, dim], at least fp32


class EngramTable(HashedContexts):
    """The rows of one memory, in several hash tables: one per context and hash head.

    A context's address in a table is its key modulo a prime of that table. All tables are
    concatenated in `weight`. Rows that were never looked up stay zero.

    Gradients are not in weight.grad. The table gathers them per lookup until `forget` is called.
    Only optim.RowwiseAdagrad reads them, with `summed_gradients`, and sets `claimed`."""

    claimed: bool = False
    warned: ClassVar[bool] = False  # warn once per process

    def __init__(self, contexts: tuple[str, ...], heads: int, rows: int, dim: int):
        super().__init__(contexts)
        self.width = len(contexts) * heads * dim
        self.primes = primes_below(rows, len(contexts) * heads)
        self.weight = nn.Parameter(torch.empty(sum(self.primes), dim))
        # number of rows of each table, and its first row
        prime = torch.empty(len(contexts), heads, dtype=torch.int64)
        self.prime: Tensor = nn.Buffer(prime, persistent=False)
        self.offset: Tensor = nn.Buffer(torch.empty_like(prime), persistent=False)
        self.lookups: list[LookupGradients] = []
        self.sums: Tensor | None = None  # gradients summed by row, [rows, dim]

    def init_hash(self, seed: int):
        """Draw the multipliers from `seed`; set primes and offsets from the sizes."""
        super().init_hash(seed)
        self.prime.copy_(torch.tensor(self.primes).view_as(self.prime))
        next_offset = self.prime.flatten().cumsum(0).view_as(self.prime)
        self.offset.copy_(next_offset - self.prime)

    def addresses(self, past: PastBytes) -> Tensor:
        """Return the rows of `weight` for the contexts of M bytes, int64 [M, X * heads]."""
        keys = self.keys(past).T[:, :, None]
        address = keys % self.constant("prime", past) + self.constant("offset", past)
        return to_device(address, self.weight.device).flatten(1)

    def forward(self, past: PastBytes) -> Tensor:
        """Look up the contexts of M bytes: [M, X * heads, dim]. Backward calls `gather`."""
        if not torch.is_grad_enabled():
            return F.embedding(self.addresses(past), self.weight)
        return _Lookup.apply(self.weight, self.addresses(past), self)

    def gather(self, row: Tensor, gradient: Tensor):
        """Record the rows [lookups] and gradients [lookups, dim] of lookups for the optimizer.

        Lookups are kept in a list: with 65,536 lookups in a table of `tiny`, gathering and stepping
        take 74 ms on a CPU, and 820 ms with sums over all rows. When the list has more than half as
        many lookups as the table has rows, it is summed by row. So the table's size limits memory,
        for any number of lookups and micro-steps."""
        if not (self.claimed or EngramTable.warned):
            EngramTable.warned = True
            warnings.warn(
                "Engram tables, which hold most of the parameters, are trained only by "
                "spider.training.optim.RowwiseAdagrad "
                "(see docs/guide/your-own-loop.md); other optimizers leave them unchanged",
                stacklevel=2,
            )
        self.lookups.append(LookupGradients(row, wide(gradient)))
        count = sum(len(lookup.row) for lookup in self.lookups)
        if 2 * count > len(self.weight):
            self.sum_up()

    def sum_up(self) -> Tensor:
        """Sum all gathered gradients by row: [rows, dim], for all rows of the table."""
        if self.sums is None:
            self.sums = torch.zeros_like(wide(self.weight))
        for row, gradient in self.lookups:
            self.sums.index_add_(0, row, gradient)
        self.lookups.clear()
        return self.sums

    def summed_gradients(self) -> LookupGradients | None:
        """Return each row's sum of gradients since `forget`, or None without lookups.

        A row may appear several times: once with its sum, the other times with zeros. So nothing is
        sorted, and no size depends on the data."""
        if self.sums is not None:
            sums = self.sum_up()
            return LookupGradients(torch.arange(len(sums), device=sums.device), sums)
        if not self.lookups:
            return None
        rows = torch.cat([row for row, _ in self.lookups])
        # A row's sum is stored with one of its lookups: whichever scatter_ writes last.
        holder = torch.empty(len(self.weight), dtype=torch.int64, device=rows.device)
        holder.scatter_(0, rows, torch.arange(len(rows), device=rows.device))
        sums = self.lookups[0].gradient.new_zeros(len(rows), self.weight.shape[1])
        for row, gradient in self.lookups:
            sums.index_add_(0, holder.index_select(0, row), gradient)
        return LookupGradients(rows, sums)

    def forget(self):
        """Drop all gathered lookups."""
        self.lookups = []
        self.sums = None


def tables_of(model: nn.Module) -> list[EngramTable]:
    """Return the Engram tables of a model, in the order of its modules."""
    return [module for module in model.modules() if isinstance(module, EngramTable)]


class _Lookup(torch.autograd.Function):
    """Look up rows of a table: addresses [M, tables] -> [M, tables, dim]. The table gathers the
    gradients."""

    @staticmethod
    def forward(ctx, weight, address, table):
        ctx.save_for_backward(address)
        ctx.table = table
        return F.embedding(address, weight)

    @staticmethod
    def backward(ctx, grad):
        (address,) = ctx.saved_tensors
        ctx.table.gather(address.flatten(), grad.flatten(0, 1))
        return None, None, None


# --------------------------------------------------------------------------------------------------
# The match memory


class Matches(NamedTuple):
    """The matches of M bytes' contexts, see MatchMemory."""

    row: Integers  # [M, X]
    next_ids: Integers  # [M, X, occurrences], the id after each, newest first; -1: none
    age: Integers  # [M, X], bytes since the newest occurrence; 0: none


class PackedBytes(NamedTuple):
    """The bytes of a pass, and what is computed from them before any layer."""

    input_ids: Tensor  # int64 [B, T]
    packing: Packing
    past: PastBytes
    matches: Matches | None  # None without a match memory
    noise_M: Tensor | None = None  # int64, in training; see byte_noise

    @property
    def ids_M(self) -> Tensor:
        return self.input_ids.reshape(-1)


class MatchHistory:
    """The bytes of each document so far, in decoding, on the host. The byte at position t is in
    slot t of its document."""

    def __init__(self, contexts: int, documents: int):
        self.ids = np.zeros((documents, 1), dtype=int)  # int64 [B, S]
        # int64 [X, B, S]: bytes since the previous occurrence of the context that ends in a slot;
        # 0: there is none
        self.back = np.zeros((contexts, documents, 1), dtype=int)
        # [B][X]: the slot of each key's newest occurrence
        self.newest: list[list[dict[int, int]]] = [
            [{} for _ in range(contexts)] for _ in range(documents)
        ]

    def copy(self, documents: list[int]) -> "MatchHistory":
        """Copy the given documents, which may repeat."""
        history = copy(self)
        history.ids = self.ids[documents]
        history.back = self.back[:, documents]
        history.newest = [[*map(dict, self.newest[document])] for document in documents]
        return history

    def forget(self, document: int):
        """Start a new document."""
        for newest in self.newest[document]:
            newest.clear()

    def add(self, ids_BT: np.ndarray, keys_XBT: np.ndarray, position_B: np.ndarray):
        """Add the bytes of a step with the keys of their contexts. position_B: of the first byte.

        If slots are missing, all are copied to twice as many as needed."""
        length = ids_BT.shape[1]
        needed = int(position_B.max()) + length
        slots = self.ids.shape[1]
        if needed > slots:
            more = (0, 2 * needed - slots)
            self.ids = np.pad(self.ids, ((0, 0), more))
            self.back = np.pad(self.back, ((0, 0), (0, 0), more))
        for document, start in enumerate(position_B.tolist()):
            self.ids[document, start : start + length] = ids_BT[document]
            for context, newest in enumerate(self.newest[document]):
                back = self.back[context, document]
                for slot, key in enumerate(keys_XBT[context, document].tolist(), start):
                    back[slot] = slot - newest.get(key, slot)
                    newest[key] = slot


class MatchMemory(HashedContexts):
    """A lookup in the document itself, like the match model of compressors. It has no parameters; a
    small transformer takes long to learn the same.

    An occurrence of a byte's context is an earlier byte of the document that ends the same context.
    The last `occurrences` (at least two) are found.

    A match's row is the byte after the newest occurrence, plus
          0  if there is no older occurrence
        256  if the same byte follows the older occurrence
        512  if another byte follows it
    or NOTHING, if there is no occurrence, or no byte (0-255) follows it.
    """

    NOTHING = 3 * 256

    def __init__(self, contexts: tuple[str, ...], occurrences: int):
        super().__init__(contexts)
        self.occurrences = occurrences

    def forward(self, past: PastBytes, document_M: Tensor) -> Matches:
        """Find the matches of all bytes of a text. document_M: int64, their documents, ascending.

            byte M    text order
            rank R    order of the keys; the sort is stable, so equal keys keep text order

        If the rank before has the same key and document, its byte is the previous occurrence."""
        key_XR, byte_XR = self.keys(past).sort(dim=1, stable=True)
        document_XR = document_M[byte_XR]
        same_key = key_XR[:, 1:] == key_XR[:, :-1]
        same_document = document_XR[:, 1:] == document_XR[:, :-1]
        back = torch.where(same_key & same_document, byte_XR.diff(), 0)  # from rank 1 on
        back_XM = torch.zeros_like(byte_XR).scatter_(1, byte_XR[:, 1:], back)
        return self._follow(past.ids, back_XM, past.index)

    def step(
        self, ids_BT: np.ndarray, past: PastBytes, position_B: np.ndarray, history: MatchHistory
    ) -> Matches:
        """Add a decoding step's bytes to the history, and return their matches, M = B * T.

        position_B: position of each document's first byte in the step."""
        documents, length = ids_BT.shape
        history.add(ids_BT, self.keys(past).reshape(-1, documents, length), position_B)
        document_M = np.arange(documents).repeat(length)
        here_M = document_M * history.ids.shape[1] + past.position_M
        return self._follow(history.ids.ravel(), history.back.reshape(-1, history.ids.size), here_M)

    def _follow(self, ids_S: Integers, back_XS: Integers, here_M: Integers) -> Matches:
        """Return matches by following the occurrences of contexts back.

        ids: byte in each slot. back: bytes since the previous occurrence of the context that ends
        in each slot; 0: none. here: the slots to match. Slots are those of a text, or in decoding
        of all documents, one document after another."""
        library = library_of(ids_S)
        ids_XS = library.broadcast_to(ids_S, back_XS.shape)
        slot_XM = library.broadcast_to(here_M, (len(back_XS), len(here_M)))
        age_XM = take(back_XS, slot_XM)
        back_XM = age_XM
        next_ids = []
        for _ in range(self.occurrences):
            slot_XM = slot_XM - back_XM
            after_XM = library.where(back_XM > 0, slot_XM + 1, 0)
            next_ids.append(library.where(back_XM > 0, take(ids_XS, after_XM), -1))
            back_XM = take(back_XS, slot_XM)
        newest_id, older_id = next_ids[:2]
        agreement = library.where(newest_id == older_id, 256, 512)
        row_XM = newest_id + library.where(older_id < 0, 0, agreement)
        is_byte = (newest_id >= 0) & (newest_id <= 255)
        row_XM = library.where(is_byte, row_XM, self.NOTHING)
        return Matches(row_XM.T, library.stack(next_ids, -1).swapaxes(0, 1), age_XM.T)


# --------------------------------------------------------------------------------------------------
# Engram at segment rate


class RetrievedMemory(NamedTuple):
    """What a segment Engram retrieves for N segments, once for all loops."""

    key: Tensor  # [N, D], normed
    value: Tensor  # [N, D]
    mean_square: Tensor  # [N, 1], of value, at least fp32
    # None in decoding:
    tap_segment: Tensor | None  # int64 [N * taps], what each segment's convolution reads
    tap_value: Tensor | None  # [N, taps, D], weight * value there, or 0 before the document's start


class ConvolutionCache(Cache):
    """The cache of the convolution in decoding: norm(u) of earlier segments."""

    def __init__(self, buffer: Tensor, step: StepTokens, config: SpiderConfig):
        distance = np.arange(SegmentEngram.kernel_size) * len(config.engram_contexts)  # [taps]
        super().__init__(buffer, step, window=distance[-1] + 1)
        position = step.position - distance[:, None]  # of each tap's segment, [taps, N]
        self.tap_slot = to_device(self.slot_of(position), buffer.device).flatten()
        self.in_document = to_device(position >= 0, buffer.device)[:, :, None]

    def put_and_look_back(self, x: Tensor) -> Tensor:
        """Store the step's segments [N, D]; return the segments that the convolution reads, [taps,
        N, D], which are zero before a document's start."""
        segment_of_tap = self.put(x).index_select(0, self.tap_slot).view(-1, *x.shape)
        return torch.where(self.in_document, segment_of_tap, 0)


class SegmentEngram(nn.Module):
    """The memory before a core layer: table rows for the last bytes of each segment, gated by the
    state, then convolved over segments.

    With m the rows that were looked up, a state h becomes

        u = gate * W_V m       gate = sigmoid(signed_sqrt(<norm(h), norm(W_K m)> / sqrt(D)))
        h + u + SiLU(conv(norm(u)))

    Only the gate depends on the loop. norm(u) is W_V m times a scale per segment, so

        conv(norm(u)) = sum over taps of scale * (weight * W_V m)

    and the products in parentheses are computed once for all loops.
    """

    kernel_size = 4
    compiled: Callable | None = None  # see Spider.compile_layers
    # For norms of table rows, which start at zero. With 1e-6, the first gradients would be a
    # thousand times as large, and Adagrad's accumulators would keep them.
    eps = 1e-3

    def __init__(self, config: SpiderConfig):
        super().__init__()
        self.table = EngramTable(
            config.engram_contexts, config.engram_heads, config.engram_rows, config.engram_dim
        )
        self.key_proj = Linear(self.table.width, config.hidden_size)
        self.value_proj = Linear(self.table.width, config.hidden_size)
        self.conv_weight = nn.Parameter(torch.empty(self.kernel_size, config.hidden_size))

    def retrieve(self, past: PastBytes, position_N: Tensor, dtype: torch.dtype) -> RetrievedMemory:
        """Look up what all loops use.

        past: its M bytes are the last bytes of the N segments. position_N: int64, the
        segments' positions in their documents."""
        rows = self.table(past).flatten(1).to(dtype)
        key_ND = rms_norm(self.key_proj(rows), self.eps)
        value_ND = self.value_proj(rows)
        at_least_fp32 = torch.promote_types(dtype, torch.float32)
        length = torch.linalg.vector_norm(value_ND, dim=1, keepdim=True, dtype=at_least_fp32)
        mean_square = length.square() / value_ND.shape[1]
        if past.library is np:  # in decoding, the taps read the cache
            return RetrievedMemory(key_ND, value_ND, mean_square, None, None)
        if self.compiled is not None and torch.is_grad_enabled():
            mark_tokens_dynamic(value_ND, position_N)
            tap_value, tap_segment = self.compiled(self, value_ND, position_N)
        else:  # cheap to recompute, and three times as large as its inputs
            tap_value, tap_segment = checkpoint(
                self.in_one_graph,
                value_ND,
                position_N,
                use_reentrant=False,
                preserve_rng_state=False,
            )
        return RetrievedMemory(key_ND, value_ND, mean_square, tap_segment, tap_value)

    def in_one_graph(self, value_ND: Tensor, position_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return tap_value and tap_segment of RetrievedMemory."""
        device = value_ND.device
        dilation = len(self.table.contexts)
        distance = torch.arange(self.kernel_size, device=device) * dilation  # [taps]
        segment_N = torch.arange(len(value_ND), device=device)
        segment_of_tap = (segment_N[:, None] - distance).clamp_min(0)  # [N, taps]
        tap_segment = segment_of_tap.flatten()
        value = value_ND.index_select(0, tap_segment).unflatten(0, segment_of_tap.shape)
        in_document = position_N[:, None] >= distance  # [N, taps]
        weight = in_document[:, :, None] * self.conv_weight.to(value_ND.dtype)
        return value * weight, tap_segment

    def forward(
        self,
        h: Tensor,
        retrieved: RetrievedMemory,
        active: ActiveTokens,
        before: Tensor | None,
        cache: ConvolutionCache | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Add the memory to the states h [n, D] of active segments; also return the convolution's
        input for all segments, which depends on the cache:

            full pass     [N, 1], scale: norm(u) = scale * value
            with cache    [N, D], norm(u) itself, since later steps do not have this step's values

        before: this input in the previous loop, which inactive segments keep; None in the first
        loop. cache: in decoding, holds norm(u) of earlier steps."""
        key = active.select(retrieved.key)
        value = active.select(retrieved.value)
        mean_square = active.select(retrieved.mean_square)
        gate = self.gate(h, key)
        # u = gate * value, so norm(u) = value * gate / sqrt(mean of u^2 + eps)
        scale = (gate * torch.rsqrt(gate * gate * mean_square + self.eps)).to(h.dtype)
        if cache is None:
            assert retrieved.tap_segment is not None and retrieved.tap_value is not None
            conv_input = active.merge(before, scale)
            tap_scale = conv_input.flatten().index_select(0, retrieved.tap_segment)
            tap_scale = tap_scale.view(len(conv_input), -1, 1)  # [N, taps, 1]
            # not bmm, which would not fuse with the operations that follow
            convolved = (active.select(tap_scale) * active.select(retrieved.tap_value)).sum(1)
        else:
            conv_input = active.merge(before, scale * value)
            weight = self.conv_weight.to(h.dtype)[:, None]  # [taps, 1, D]
            convolved = active.select((cache.put_and_look_back(conv_input) * weight).sum(0))
        return torch.addcmul(h, gate.to(h.dtype), value) + F.silu(convolved), conv_input

    def gate(self, h: Tensor, key: Tensor) -> Tensor:
        """Compute gates [n, 1] in (0, 1), at least fp32, from states and keys [n, D]."""
        similarity = _Similarity.apply(h, key)
        return torch.sigmoid(similarity.sign() * similarity.abs().clamp_min(1e-6).sqrt())


class _Similarity(torch.autograd.Function):
    """Compute <rms_norm(h), key> / sqrt(D) for h and key [n, D]: [n, 1], at least fp32. The normed
    h is not stored."""

    @staticmethod
    def forward(ctx, h, key):
        scale = inverse_rms(h, 1e-6)
        dot = (h * key).sum(1, keepdim=True, dtype=scale.dtype)
        similarity = dot * scale * h.shape[1] ** -0.5
        ctx.save_for_backward(h, key, scale, similarity)
        return similarity

    @staticmethod
    def backward(ctx, grad):
        h, key, scale, similarity = ctx.saved_tensors
        grad = grad * scale
        to_key = (grad * h.shape[1] ** -0.5).to(h.dtype)
        to_h = (grad * similarity * scale / h.shape[1]).to(h.dtype)
        return torch.addcmul(to_key * key, to_h, h, value=-1), to_key * h


# --------------------------------------------------------------------------------------------------
# Engram at byte rate

WHOLE_BLOCKS = 32  # sizes are multiples of this, so that shards have whole blocks of 8-bit AdamW


class ByteEngram(nn.Module):
    """A memory at byte rate: learned rows for contexts (tables) and for matches (`followed`)."""

    def __init__(self, config: SpiderConfig, match_contexts: int):
        """match_contexts: number of the match memory's contexts that have rows here."""
        super().__init__()
        contexts = config.engram_byte_contexts
        dim = config.engram_byte_dim
        self.table = EngramTable(contexts, 1, config.engram_byte_rows, dim) if contexts else None
        self.followed = None
        if match_contexts:
            rows = round_up(MatchMemory.NOTHING + 1, WHOLE_BLOCKS)
            self.followed = nn.Parameter(torch.empty(match_contexts, rows, dim))
        self.proj = Linear((len(contexts) + match_contexts) * dim, config.hidden_size)

    def rows(self, packed: PackedBytes, dtype: torch.dtype) -> Tensor:
        """Look up M bytes: [M, contexts of tables + contexts of matches, dim]."""
        parts = []
        if self.table is not None:
            parts.append(self.table(packed.past))
        if self.followed is not None:
            assert packed.matches is not None  # match_contexts > 0: there is a match memory
            contexts, rows, _ = self.followed.shape
            first_row = torch.arange(contexts, device=packed.input_ids.device) * rows
            parts.append(F.embedding(packed.matches.row + first_row, self.followed.flatten(0, 1)))
        return torch.cat([part.to(dtype) for part in parts], dim=1)


class InputEngram(ByteEngram):
    """The memory before the prelude."""

    def forward(self, x_MD: Tensor, packed: PackedBytes) -> Tensor:
        """Return the term to add to the embedded bytes x: [M, D]."""
        return self.proj(self.rows(packed, x_MD.dtype).flatten(1))


class OutputEngram(ByteEngram):
    """The memory before the head. Gates, computed from the state, weight its rows.

    It can also add to the logits directly, in two ways:

        engram_logits    a linear function of the rows
        engram_votes     votes for the bytes that followed the last occurrences of a context. A
                         small network of the state weights the votes, as PAQ's mixer weights
                         predictions (Mahoney 2005). With engram_vote_ages, its input also tells how
                         long ago each context occurred.

    With byte tables, votes replace the rows of matches."""

    def __init__(self, config: SpiderConfig):
        super().__init__(config, config.matches_before_head)
        self.config = config
        width = self.proj.in_features
        self.gate = Linear(config.hidden_size, width // config.engram_byte_dim)
        self.logits = Linear(width, config.vocab_size) if config.engram_logits else None
        self.votes = None
        contexts = len(config.engram_match_contexts)
        if config.engram_votes and contexts:
            self.ages = round_up(contexts, WHOLE_BLOCKS) if config.engram_vote_ages else 0
            self.votes = nn.Sequential(
                Linear(config.hidden_size + self.ages, config.hidden_size // 2),
                nn.GELU(),
                Linear(config.hidden_size // 2, config.engram_votes * contexts),
            )

    def forward(self, x_MD: Tensor, packed: PackedBytes) -> tuple[Tensor, Tensor | None]:
        """Return the terms to add to x [M, D] and to the logits [M, vocab_size] (None: no term)."""
        state = rms_norm(x_MD)
        rows = self.rows(packed, x_MD.dtype)
        rows = (rows * self.gate(state).sigmoid()[:, :, None]).flatten(1)
        logits = None if self.logits is None else self.logits(rows)
        if self.votes is not None:
            assert packed.matches is not None
            voted_id, weight = self.cast_votes(state, packed.matches)
            weight = wide(weight)
            if logits is None:
                logits = weight.new_zeros(len(x_MD), self.config.vocab_size)
            logits = logits.to(weight.dtype).scatter_add(1, voted_id.clamp_min(0), weight)
        return self.proj(rows), logits

    def cast_votes(self, state_MD: Tensor, matches: Matches) -> tuple[Tensor, Tensor]:
        """Return the ids that get votes (-1: none) and the weights of the votes, both [M, X *
        engram_votes].

        The votes of a context are adjacent, the newest occurrence first. A vote for an id that is
        not a byte has weight 0."""
        assert self.votes is not None
        # MatchMemory finds at least two occurrences, even for one vote
        voted_id = matches.next_ids[:, :, : self.config.engram_votes].flatten(1)
        is_byte = (voted_id >= 0) & (voted_id < 256)
        seen = state_MD
        if self.ages:
            ages_MX = (matches.age.log1p() / 4).to(seen.dtype)  # up to about 2
            padding = self.ages - ages_MX.shape[1]
            seen = torch.cat((seen, F.pad(ages_MX, (0, padding))), dim=1)
        return voted_id, torch.where(is_byte, self.votes(seen), 0)

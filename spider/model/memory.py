"""Lookup memories, addressed by contexts of the last bytes (contexts.py): Engram tables and the
match memory.

Engram (arXiv 2601.07372) looks up learned rows: at segment rate before core layers, at byte rate
(BLT, arXiv 2412.09871) before prelude and head. The match memory (the match model of PAQ, Mahoney
2005) finds the last occurrences of the current context in the document, and the bytes after them.

Shapes, as suffixes of names:
    M  bytes
    N  segments
    n  active segments: those of the N segments that a loop computes; of a table: lookups
    D  hidden size
    X  contexts of the match memory
    B  documents in decoding
    T  bytes of each that a decoding step reads
    S  slots for bytes of each that earlier steps have read
"""

import warnings
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spider.config import MAX_CONTEXT_BYTES, SpiderConfig, primes_below
from spider.model.attention import Cache
from spider.model.contexts import Past
from spider.model.layers import Linear, inverse_rms, rms_norm, wide
from spider.model.packing import ActiveTokens, Packing, mark_tokens_dynamic, round_up

# --------------------------------------------------------------------------------------------------
# Tables of learned rows


class HashedContexts(nn.Module):
    """The contexts of a memory, and the constants of their keys."""

    def __init__(self, contexts: tuple[str, ...]):
        super().__init__()
        self.contexts = contexts
        longest = max(int(name) if name.isdecimal() else MAX_CONTEXT_BYTES for name in contexts)
        self.multiplier: Tensor = nn.Buffer(torch.empty(longest, dtype=torch.int64))

    def init_hash(self, seed: int):
        """Draw odd 64-bit multipliers from `seed`, without changing any random state."""
        generator = torch.Generator().manual_seed(seed)
        shape = self.multiplier.shape
        drawn = torch.randint(-(2**62), 2**62, shape, generator=generator, device="cpu")
        self.multiplier.copy_(drawn * 2 + 1)

    def keys(self, past: Past) -> Tensor:
        """Return the key of each context of n bytes, int64 [X, n]."""
        return past.keys(self.contexts, self.multiplier)


class Lookups(NamedTuple):
    """Gradients of n lookups in a table."""

    row: Tensor  # int64 [n]
    gradient: Tensor  # [n, dim], at least fp32


class EngramTable(HashedContexts):
    """The rows of one memory, in several hash tables: one for each context and hash head.

    The address in a table is the context's key mod a prime of that table. All tables are
    concatenated in `weight`. Rows that were never looked up stay zero.

    Gradients of lookups are not in weight.grad but gathered here, until `forget`. Only
    optim.RowwiseAdagrad reads them, by `merged`, and sets `claimed`."""

    claimed: bool = False
    warned: ClassVar[bool] = False  # once per process, for any table

    def __init__(self, contexts: tuple[str, ...], heads: int, rows: int, dim: int):
        super().__init__(contexts)
        self.width = len(contexts) * heads * dim
        self.primes = primes_below(rows, len(contexts) * heads)
        self.weight = nn.Parameter(torch.empty(sum(self.primes), dim))
        # rows of each table, and its first row
        prime = torch.empty(len(contexts), heads, dtype=torch.int64)
        self.prime: Tensor = nn.Buffer(prime, persistent=False)
        self.offset: Tensor = nn.Buffer(torch.empty_like(prime), persistent=False)
        self.lookups: list[Lookups] = []
        self.sums: Tensor | None = None  # gradients summed by row, [rows, dim]

    def init_hash(self, seed: int):
        """Set the multipliers from `seed`, primes and offsets from the sizes."""
        super().init_hash(seed)
        self.prime.copy_(torch.tensor(self.primes).view_as(self.prime))
        next_offset = self.prime.flatten().cumsum(0).view_as(self.prime)
        self.offset.copy_(next_offset - self.prime)

    def addresses(self, past: Past) -> Tensor:
        """Return the rows of `weight` for n bytes' contexts, int64 [n, contexts * heads]."""
        keys = self.keys(past).T[:, :, None]
        return (keys.remainder(self.prime) + self.offset).flatten(1)

    def forward(self, past: Past) -> Tensor:
        """Look up n bytes' contexts: [n, contexts * heads, dim].

        The gradient goes to `gather`, weight.grad stays None."""
        return _Lookup.apply(self.weight, self.addresses(past), self)

    def gather(self, row: Tensor, gradient: Tensor):
        """Record n lookups for the optimizer: their rows [n] and gradients [n, dim].

        They are kept in a list: for 65,536 of them in a table of `tiny`, gathering and stepping
        take 74 ms on a CPU, and 820 ms with the sums of all rows. Once the list exceeds half the
        number of the table's rows, it is summed by row. So memory is bounded by the table's size,
        for any number of lookups and micro-steps."""
        if not (self.claimed or EngramTable.warned):
            EngramTable.warned = True
            warnings.warn(
                "Engram tables, which have most of the parameters, learn only by "
                "spider.training.optim.RowwiseAdagrad "
                "(see docs/guide/your-own-loop.md): other optimizers leave them unchanged",
                stacklevel=2,
            )
        self.lookups.append(Lookups(row, wide(gradient)))
        count = sum(len(lookup.row) for lookup in self.lookups)
        if 2 * count > len(self.weight):
            self.sum_up()

    def sum_up(self) -> Tensor:
        """Sum all gathered gradients by row: [rows, dim], of all rows of the table."""
        if self.sums is None:
            self.sums = torch.zeros_like(wide(self.weight))
        for row, gradient in self.lookups:
            self.sums.index_add_(0, row, gradient)
        self.lookups.clear()
        return self.sums

    def merged(self) -> Lookups | None:
        """Return the sum of the gradients of each row since `forget`; None without lookups.

        A row may come several times: once with its sum, else with zeros. So nothing is sorted, and
        no size depends on the data."""
        if self.sums is not None:
            sums = self.sum_up()
            return Lookups(torch.arange(len(sums), device=sums.device), sums)
        if not self.lookups:
            return None
        rows = torch.cat([row for row, _ in self.lookups])
        # One of the lookups of each row holds its sum: whichever is written last.
        holder = torch.empty(len(self.weight), dtype=torch.int64, device=rows.device)
        holder.scatter_(0, rows, torch.arange(len(rows), device=rows.device))
        sums = self.lookups[0].gradient.new_zeros(len(rows), self.weight.shape[1])
        for row, gradient in self.lookups:
            sums.index_add_(0, holder.index_select(0, row), gradient)
        return Lookups(rows, sums)

    def forget(self):
        """Drop all gathered lookups."""
        self.lookups = []
        self.sums = None


def tables_of(model: nn.Module) -> list[EngramTable]:
    """Return the Engram tables of a model, in the order of its modules."""
    return [module for module in model.modules() if isinstance(module, EngramTable)]


class _Lookup(torch.autograd.Function):
    """Look up rows of a table by address, [n, tables] -> [n, tables, dim]. The table gathers their
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
    """The matches of the contexts of M bytes, see MatchMemory."""

    row: Tensor  # int64 [M, X]
    next_ids: Tensor  # int64 [M, X, occurrences], the ids after them, newest first; -1: none
    age: Tensor  # int64 [M, X], bytes since the newest; 0: none


class PackedBytes(NamedTuple):
    """The bytes of a pass, and what follows from them before any layer."""

    input_ids: Tensor  # int64 [B, T]
    packing: Packing
    past: Past
    matches: Matches | None  # None without a match memory
    noise_M: Tensor | None = None  # int64, of training; see byte_noise

    @property
    def ids_M(self) -> Tensor:
        return self.input_ids.reshape(-1)


class MatchHistory(NamedTuple):
    """The bytes of documents so far, for the match memory in decoding. Byte t is in slot t."""

    ids: Tensor  # int64 [B, S]
    keys: Tensor  # int64 [X, B, S], hashes of the contexts that end with each byte
    previous: Tensor  # int64 [X, B, S], the byte of each context's occurrence before; -1: none


class MatchMemory(HashedContexts):
    """A lookup in the document itself, without parameters, like the match model of compressors: a
    small transformer takes long to learn this.

    An occurrence of a context ends with an earlier byte of the document. The last `occurrences` (at
    least two) of each are found.

    A match's row is the byte after the newest occurrence, plus
          0  if there is no older occurrence
        256  if the same byte follows the older one
        512  if another byte does
    or NOTHING, if there is no occurrence, or if no byte (0-255) follows it.
    """

    NOTHING = 3 * 256

    def __init__(self, contexts: tuple[str, ...], occurrences: int = 2):
        super().__init__(contexts)
        self.occurrences = occurrences

    def forward(self, past: Past, document_M: Tensor) -> Matches:
        """Find the matches of all bytes of a text. document int64 [M]: of each byte, ascending."""
        # Ranks R are the bytes in the order of their keys, and in the order of the text if their
        # keys are equal, since the sort is stable. So if the rank before has the same key and
        # document, its byte ends the occurrence before.
        key_XR, byte_XR = self.keys(past).sort(dim=1, stable=True)
        document_XR = document_M[byte_XR]
        same_key = key_XR[:, 1:] == key_XR[:, :-1]
        same_document = document_XR[:, 1:] == document_XR[:, :-1]
        occurrence = torch.where(same_key & same_document, byte_XR[:, :-1], -1)
        previous_XM = torch.full_like(byte_XR, -1).scatter_(1, byte_XR[:, 1:], occurrence)
        return self._follow(past.ids, previous_XM, past.index)

    def step(
        self, ids_BT: Tensor, past: Past, position_BT: Tensor, history: MatchHistory
    ) -> tuple[Matches, MatchHistory]:
        """Find the matches of a decoding step's bytes, M = B * T; also return the history with
        these bytes.

        The history is changed in place, but copied when it needs more slots, which then double.
        Waits for the device."""
        needed = int(position_BT[:, -1].max()) + 1  # host synchronisation
        slots = history.ids.shape[1]
        if needed > slots:
            more = (0, 2 * needed - slots)
            history = MatchHistory(*(F.pad(tensor, more) for tensor in history))
        keys_XBT = self.keys(past).view(-1, *ids_BT.shape)
        position_XBT = position_BT.expand_as(keys_XBT)
        history.ids.scatter_(1, position_BT, ids_BT)
        history.keys.scatter_(2, position_XBT, keys_XBT)
        newest_XBT = _newest_occurrence(keys_XBT, position_BT, history.keys[:, :, :needed])
        history.previous.scatter_(2, position_XBT, newest_XBT)
        return self._follow(history.ids, history.previous, position_BT), history

    def _follow(self, ids: Tensor, previous: Tensor, here: Tensor) -> Matches:
        """Return the matches of some bytes of documents by following the occurrences back.

        A byte is given by its slot, 0 to S - 1. ids [..., S]: the byte in each slot.
        previous [X, ..., S]: the slot of the last occurrence of the context that ends there; -1:
        none. here [..., n]: the slots of the bytes."""
        ids = ids.expand_as(previous)
        here = here.expand(len(previous), *here.shape)
        newest = previous.gather(-1, here)
        next_ids = []
        slot = newest
        for _ in range(self.occurrences):
            next_id = torch.where(slot < 0, -1, ids.gather(-1, slot + 1))
            next_ids.append(next_id.flatten(1).T)  # [M, X]
            slot = torch.where(slot < 0, -1, previous.gather(-1, slot.clamp_min(0)))
        newest_id, older_id = next_ids[:2]
        kind = torch.where(older_id < 0, 0, torch.where(newest_id == older_id, 256, 512))
        is_byte = (newest_id >= 0) & (newest_id <= 255)
        row_MX = torch.where(is_byte, newest_id + kind, self.NOTHING)
        age = torch.where(newest < 0, 0, here - newest)
        return Matches(row_MX, torch.stack(next_ids, dim=-1), age.flatten(1).T)


def _newest_occurrence(keys_XBT: Tensor, position_BT: Tensor, stored_XBS: Tensor) -> Tensor:
    """Return the position of the last byte before each whose context has the same key, int64
    [X, B, T]; -1: none.

    stored: the keys at all bytes of the documents, those of this step included."""
    # Positions count from 1 here: 0 stands for none.
    count_S = torch.arange(1, stored_XBS.shape[2] + 1, dtype=torch.int32, device=keys_XBT.device)
    bytes_at_once = max(1, (1 << 22) // stored_XBS.numel())  # bounds the memory of `is_match`
    newest = []
    for keys, position in zip(
        keys_XBT.split(bytes_at_once, -1), position_BT.split(bytes_at_once, -1), strict=True
    ):
        same_key = stored_XBS[:, :, None] == keys[..., None]
        is_match = same_key & (count_S <= position[..., None])  # [X, B, bytes at once, S]
        newest.append(is_match.mul(count_S).amax(-1))
    return torch.cat(newest, dim=-1).long() - 1


# --------------------------------------------------------------------------------------------------
# Engram at segment rate


class RetrievedMemory(NamedTuple):
    """The lookups of a segment Engram, shared by all loops."""

    key: Tensor  # [N, D], normed
    value: Tensor  # [N, D]
    mean_square: Tensor  # [N, 1], of value, at least fp32
    tap_segment: Tensor  # int64 [N * taps], the segments that a segment's convolution reads
    tap_value: Tensor  # [N, taps, D], values there times their weights, 0 before a document's start


class ConvolutionCache(Cache):
    """The cache of the convolution: norm(u) of earlier segments."""

    def __init__(self, buffer: Tensor, packing: Packing, before: Tensor, config: SpiderConfig):
        distances = SegmentEngram.tap_distances(config)
        super().__init__(buffer, packing, before, window=distances[-1] + 1)
        distance = torch.tensor(distances, device=buffer.device)[:, None]
        position = packing.position - distance  # position of earlier segments, [taps - 1, M]
        self.earlier_slot = self.slot_of(position).flatten()
        self.has_earlier = (position >= 0)[:, :, None]

    def put_and_look_back(self, x: Tensor) -> Tensor:
        """Store the step's segments [M, D]; return the earlier ones that the convolution reads,
        [taps - 1, M, D]. They are zero before a document's start."""
        earlier = self.put(x).index_select(0, self.earlier_slot).view(-1, *x.shape)
        return torch.where(self.has_earlier, earlier, 0)


class SegmentEngram(nn.Module):
    """The memory before a core layer: rows of the segment's last bytes, gated by the state, then
    convolved over segments.

    With m the rows that were looked up, a state h becomes

        u = gate * W_V m       gate = sigmoid(signed_sqrt(<norm(h), norm(W_K m)> / sqrt(D)))
        h + u + SiLU(conv(norm(u)))

    Only gates change between loops. norm(u) is W_V m times a scale per segment. So the convolution
    is the sum over its taps of scales times weighted values, and weighted values are computed once.
    """

    kernel_size = 4
    compiled: Callable | None = None  # see Spider.compile_layers
    # eps of norms over tables, which start at zero: 1e-6 would multiply the first gradients by a
    # thousand, and these would stay in Adagrad's accumulators
    eps = 1e-3

    def __init__(self, config: SpiderConfig):
        super().__init__()
        self.table = EngramTable(
            config.engram_contexts, config.engram_heads, config.engram_rows, config.engram_dim
        )
        self.key_proj = Linear(self.table.width, config.hidden_size)
        self.value_proj = Linear(self.table.width, config.hidden_size)
        self.conv_weight = nn.Parameter(torch.empty(self.kernel_size, config.hidden_size))

    @classmethod
    def tap_distances(cls, config: SpiderConfig) -> list[int]:
        """Return the distances, in segments, of the earlier taps of the convolution."""
        dilation = len(config.engram_contexts)
        return [tap * dilation for tap in range(1, cls.kernel_size)]

    def recall(self, past: Past, position_N: Tensor, dtype: torch.dtype) -> RetrievedMemory:
        """Compute what all loops share.

        past: of each segment's last byte. position int64 [N]: of the segments in their
        documents."""
        rows = self.table(past).flatten(1).to(dtype)
        key_ND = rms_norm(self.key_proj(rows), self.eps)
        value_ND = self.value_proj(rows)
        at_least_fp32 = torch.promote_types(dtype, torch.float32)
        length = torch.linalg.vector_norm(value_ND, dim=1, keepdim=True, dtype=at_least_fp32)
        mean_square = length.square() / value_ND.shape[1]
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
        """Return the weighted values of all taps, [N, taps, D], and the index of each tap's
        segment, [N * taps]."""
        device = value_ND.device
        dilation = len(self.table.contexts)
        distance = torch.arange(self.kernel_size, device=device) * dilation  # see tap_distances
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
        recalled: RetrievedMemory,
        active: ActiveTokens,
        before: Tensor | None,
        cache: ConvolutionCache | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Add the memory to the states of active segments h [n, D]; also return what the
        convolution reads of each segment, `conv_input`.

        In a full pass that is one number per segment, the scale that makes norm(u) of its value:
        [N, 1]. With a cache it is norm(u) itself, [N, D], since a later step does not have the
        values of earlier ones.

        before: the conv_input of the loop before, which inactive segments keep; None in the first
        loop. cache: in decoding, has norm(u) of earlier steps."""
        key = active.select(recalled.key)
        value = active.select(recalled.value)
        mean_square = active.select(recalled.mean_square)
        gate = self.gate(h, key)
        # u is gate * value, so norm(u) is value times this: gate / sqrt(mean of u^2 + eps)
        scale = (gate * torch.rsqrt(gate * gate * mean_square + self.eps)).to(h.dtype)
        if cache is None:
            conv_input = active.merge(before, scale)
            convolved = self._convolve(conv_input, recalled, active)
        else:
            conv_input = active.merge(before, scale * value)
            convolved = active.select(self._convolve_with_cache(conv_input, cache))
        return torch.addcmul(h, gate.to(h.dtype), value) + F.silu(convolved), conv_input

    def gate(self, h: Tensor, key: Tensor) -> Tensor:
        """Compute gates from states h [n, D] and keys [n, D]: [n, 1] in (0, 1), at least fp32."""
        similarity = _Similarity.apply(h, key)
        return torch.sigmoid(similarity.sign() * similarity.abs().clamp_min(1e-6).sqrt())

    def _convolve(
        self, scale_N1: Tensor, recalled: RetrievedMemory, active: ActiveTokens
    ) -> Tensor:
        """Convolve norm(u) over all segments of the pass; return active ones, [n, D]."""
        tap_scale = scale_N1.flatten().index_select(0, recalled.tap_segment)
        tap_scale = tap_scale.view(len(scale_N1), -1, 1)  # [N, taps, 1]
        # not bmm: a product per segment would not fuse with what follows
        return (active.select(tap_scale) * active.select(recalled.tap_value)).sum(1)

    def _convolve_with_cache(self, norm_u_ND: Tensor, cache: ConvolutionCache) -> Tensor:
        """Convolve norm(u) over a step's segments and those of earlier steps, [N, D]."""
        weight, *earlier_weights = self.conv_weight.to(norm_u_ND.dtype)
        convolved = norm_u_ND * weight
        earlier = cache.put_and_look_back(norm_u_ND)  # [taps - 1, N, D]
        for weight, norm_u in zip(earlier_weights, earlier, strict=True):
            convolved = convolved + norm_u * weight
        return convolved


class _Similarity(torch.autograd.Function):
    """Compute <rms_norm(h), key> / sqrt(D) of rows [n, D] -> [n, 1], at least fp32, without storing
    normed rows."""

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

WHOLE_BLOCKS = 32  # multiples of it, so that sharding does not split blocks of 8-bit AdamW


class ByteEngram(nn.Module):
    """A memory at byte rate: rows of contexts in tables, and of the match memory."""

    def __init__(self, config: SpiderConfig, match_contexts: int):
        """match_contexts: contexts of the match memory whose matches have rows here; 0: none."""
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
        """Look up the contexts of M bytes: [M, contexts of tables + of matches, dim]."""
        parts = []
        if self.table is not None:
            parts.append(self.table(packed.past))
        if self.followed is not None:
            assert packed.matches is not None  # the model has a match memory
            contexts, rows, _ = self.followed.shape
            first_row = torch.arange(contexts, device=packed.input_ids.device) * rows
            parts.append(F.embedding(packed.matches.row + first_row, self.followed.flatten(0, 1)))
        return torch.cat([part.to(dtype) for part in parts], dim=1)


class InputEngram(ByteEngram):
    """The memory before the prelude."""

    def forward(self, x_MD: Tensor, packed: PackedBytes) -> Tensor:
        """Return the term to add to the embedded bytes x, [M, D]."""
        return self.proj(self.rows(packed, x_MD.dtype).flatten(1))


class OutputEngram(ByteEngram):
    """The memory before the head, whose rows are weighted by gates of the state.

    It can also add to the logits directly, in two ways. `engram_logits`: linearly from its rows.
    `engram_votes`: by votes for the bytes that followed a context's last occurrences. A small
    network of the state weighs the votes, as the mixer of PAQ weighs predictions (Mahoney 2005).
    With `engram_vote_ages` it also sees how long ago each context occurred. With byte tables, votes
    replace the rows of matches."""

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
        """Return the terms to add to x [M, D] and to the logits [M, vocab_size]; None: nothing."""
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
        """Return the ids that are voted for (-1: none) and the weights of the votes, both [M,
        contexts * engram_votes].

        A context's votes are adjacent, the newest occurrence first. A vote for anything but a byte
        weighs 0."""
        assert self.votes is not None
        # MatchMemory finds at least two
        voted_id = matches.next_ids[:, :, : self.config.engram_votes].flatten(1)
        is_byte = (voted_id >= 0) & (voted_id < 256)
        seen = state_MD
        if self.ages:
            ages_MX = (matches.age.log1p() / 4).to(seen.dtype)  # up to about 2
            padding = self.ages - ages_MX.shape[1]
            seen = torch.cat((seen, F.pad(ages_MX, (0, padding))), dim=1)
        return voted_id, torch.where(is_byte, self.votes(seen), 0)

"""Lookup memories, addressed by the last bytes alone: Engram tables of hashed n-grams, and the
match memory.

Engram (arXiv 2601.07372) looks up learned rows: at segment rate before core layers, at byte rate
(BLT, arXiv 2412.09871) before prelude and head. The match memory (the match model of PAQ, Mahoney
2005) finds the last occurrences of the current context in the document, and the bytes after them.
Shapes: M bytes, N segments, D hidden size.
"""

import operator
import warnings
from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spider.attention import ActiveRows, Cache
from spider.config import WORD_BYTES, SpiderConfig, primes_below
from spider.layers import Linear, inverse_rms, rms_norm, wide
from spider.packing import mark_rows_dynamic, round_up
from tokenizer import PAD_ID

# --------------------------------------------------------------------------------------------------
# Hashes of n-grams, and ends of words


def gram_keys(shifted: Tensor, multiplier: Tensor, orders: tuple[int, ...]) -> list[Tensor]:
    """Hash the last n bytes of each row, for each order n: XOR over k < n of shifted[k] *
    multiplier[k]."""
    keys = list(
        accumulate((shifted[: len(multiplier)] * multiplier[:, None]).unbind(), operator.xor)
    )
    return [keys[order - 1] for order in orders]


def word_ends(shifted: Tensor) -> Tensor:
    """Mark bytes that end a word: those that are not word bytes, after one that is. shifted [K, M]
    (see shifted_bytes) -> bool [K - 1, M], for the byte k positions back.

    Word bytes are letters, digits, _, UTF-8 continuation bytes, and the lead bytes of two-byte
    letters (from 0xC3 on: Latin, Greek, Cyrillic, Hebrew, Arabic). A Chinese character is therefore
    a word. This is the rule of SpaceByte, arXiv 2404.14408, except that there _ and those lead
    bytes end a word."""
    of_words = (
        ((shifted | 32) >= ord("a")) & ((shifted | 32) <= ord("z"))
        | (shifted >= ord("0")) & (shifted <= ord("9"))
        | (shifted == ord("_"))
        | (shifted >= 0x80) & (shifted < 0xE0) & (shifted != 0xC2)
    )
    return of_words[1:] & ~of_words[:-1]


def init_multiplier(multiplier: Tensor, seed: int):
    """Draw odd 64-bit multipliers from `seed`, without changing any random state."""
    numbers = torch.Generator().manual_seed(seed)
    drawn = torch.randint(-(2**62), 2**62, multiplier.shape, generator=numbers, device="cpu")
    multiplier.copy_(drawn * 2 + 1)


def shifted_bytes(ids: Tensor, position: Tensor, longest: int) -> Tensor:
    """Return the byte k positions back for each of ids [M], k < longest, as [longest, M]; PAD
    before a document."""
    back = torch.arange(longest, device=ids.device)[:, None]
    row = torch.arange(len(ids), device=ids.device)
    return torch.where(position >= back, ids[(row - back).clamp_min(0)], PAD_ID)


# --------------------------------------------------------------------------------------------------
# Tables of learned rows


class EngramTable(nn.Module):
    """The rows of one memory. For each order n and head, the row is (XOR over k < n of byte_{t-k} *
    multiplier_k) mod a prime of that table. All tables are concatenated in `weight`; unused rows
    stay zero.

    Gradients of lookups are not in weight.grad but in `gathered`, until `forget`. Only
    optim.RowwiseAdagrad reads them there, and sets `claimed`."""

    claimed = warned = False  # warned: once per process, for any table

    def __init__(self, orders: tuple[int, ...], heads: int, rows: int, dim: int):
        super().__init__()
        self.orders, self.heads, self.width = orders, heads, len(orders) * heads * dim
        self.primes = primes_below(rows, len(orders) * heads)
        self.weight = nn.Parameter(torch.empty(sum(self.primes), dim))
        self.register_buffer("multiplier", torch.empty(max(orders), dtype=torch.int64))
        self.register_buffer(
            "prime", torch.empty(len(orders), heads, dtype=torch.int64), persistent=False
        )
        self.register_buffer(
            "offset", torch.empty(len(orders), heads, dtype=torch.int64), persistent=False
        )
        self.forget()

    def init_hash(self, seed: int):
        """Set the multipliers from `seed`, primes and offsets from the sizes."""
        init_multiplier(self.multiplier, seed)
        prime = torch.tensor(self.primes).view(self.prime.shape)
        self.prime.copy_(prime)
        self.offset.copy_(F.pad(prime.flatten().cumsum(0), (1, -1)).view(prime.shape))

    def addresses(self, shifted: Tensor) -> Tensor:
        """Hash shifted [at least max(orders), rows] -> rows of `weight` int64 [rows, orders *
        heads]."""
        key = torch.stack(gram_keys(shifted, self.multiplier, self.orders), dim=1)  # [rows, orders]
        return (key[:, :, None].remainder(self.prime) + self.offset).flatten(1)

    def forward(self, shifted: Tensor) -> Tensor:
        """Look up [rows, orders * heads, dim]; its gradient goes to `gather`, weight.grad stays
        None."""
        return _Lookup.apply(self.weight, self.addresses(shifted), self)

    def gather(self, row: Tensor, grad: Tensor):
        """Record lookups for the optimizer: their rows [n], gradients [n, dim] and the gradients'
        mean squares.

        They are collected in a list, and summed by row once they exceed half the number of the
        table's rows. So memory is bounded by the table's size, for any number of lookups and
        micro-steps. torch's sparse gradients would not
        do: they are merged by row before squaring."""
        if not (self.claimed or EngramTable.warned):
            EngramTable.warned = True
            warnings.warn(
                "Engram tables, which have most of the parameters, learn only by "
                "spider.optim.RowwiseAdagrad "
                "(see docs/guide/your-own-loop.md): other optimizers leave them unchanged",
                stacklevel=2,
            )
        grad = wide(grad)
        self.lookups.append(
            (row, grad, torch.linalg.vector_norm(grad, dim=1).square_().div_(grad.shape[1]))
        )
        if 2 * sum(len(row) for row, _, _ in self.lookups) > len(self.weight):
            self.sum_up()

    def sum_up(self) -> tuple[Tensor, Tensor, Tensor]:
        """Sum all gathered lookups by row; return all rows of the table, their gradients and mean
        squares."""
        if self.sums is None:
            rows = len(self.weight)
            zeros = torch.zeros_like(wide(self.weight))
            self.sums = torch.arange(rows, device=self.weight.device), zeros, zeros.new_zeros(rows)
        for row, grad, square in self.lookups:
            self.sums[1].index_add_(0, row, grad)
            self.sums[2].index_add_(0, row, square)
        self.lookups.clear()
        return self.sums

    def gathered(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return rows [n], gradients [n, dim] and mean squares [n] since `forget`; a row may come
        several times."""
        return list(self.lookups) if self.sums is None else [*self.lookups, self.sums]

    def forget(self):
        self.lookups, self.sums = [], None


class _Lookup(torch.autograd.Function):
    """Look up rows of a table by address, [rows, tables] -> [rows, tables, dim]; the table gathers
    their gradients."""

    @staticmethod
    def forward(ctx, weight, address, table):
        ctx.save_for_backward(address)
        ctx.table = table
        return F.embedding(address, weight)

    @staticmethod
    def backward(ctx, grad):
        ctx.table.gather(ctx.saved_tensors[0].flatten(), grad.flatten(0, 1))
        return None, None, None


# --------------------------------------------------------------------------------------------------
# The match memory


class Matches(NamedTuple):
    """Found by the match memory for C contexts of M bytes."""

    row: Tensor  # int64 [M, C], see MatchMemory
    followed: Tensor  # int64 [M, C, occurrences], the ids after them, newest first; -1: none


class MatchMemory(nn.Module):
    """A lookup in the document itself, without parameters, like the match model of compressors: a
    small transformer takes long to learn this.

    Contexts are the last n bytes for each n of `orders`, and the bytes since the n-th last end of a
    word for each n of `words` (at most WORD_BYTES - 1). For each context, find the last
    `occurrences` (at least two) in the document. A match's row is the byte after the last one: +
    256 if the byte after the one before is the same, + 512 if it differs, or NOTHING."""

    NOTHING = 3 * 256  # no earlier occurrence, or no byte after it

    def __init__(self, orders: tuple[int, ...], words: tuple[int, ...], occurrences: int = 2):
        super().__init__()
        self.orders, self.words, self.occurrences = orders, words, occurrences
        self.register_buffer(
            "multiplier", torch.empty(max((*orders, WORD_BYTES * bool(words))), dtype=torch.int64)
        )

    def init_hash(self, seed: int):
        init_multiplier(self.multiplier, seed)

    def forward(self, ids: Tensor, shifted: Tensor, document: Tensor) -> Matches:
        """Look up the contexts of all bytes, orders first: ids [M], shifted [longest context, M],
        document [M], ascending -> matches of [M, contexts]."""
        key, row = self.keys(shifted).sort(dim=1, stable=True)
        document = document[row]
        again = (key[:, 1:] == key[:, :-1]) & (document[:, 1:] == document[:, :-1])
        last = torch.full_like(row, -1).scatter_(1, row[:, 1:], torch.where(again, row[:, :-1], -1))
        return self.found(ids.expand_as(last), last, last)

    def keys(self, shifted: Tensor) -> Tensor:
        """Hash the bytes of each context, [contexts, M]."""
        orders, lengths = self.orders, tuple(range(1, WORD_BYTES)) if self.words else ()
        # + 1: zero bytes must change the hash, too
        keys = gram_keys(shifted + 1, self.multiplier, orders + lengths)
        if self.words:
            ended = word_ends(shifted[:WORD_BYTES]).cumsum(0)  # [WORD_BYTES - 1, M]
            by_length = torch.stack((torch.zeros_like(keys[0]), *keys[len(orders) :]))
            keys[len(orders) :] = [
                by_length.gather(0, (ended < n).sum(0, keepdim=True))[0] for n in self.words
            ]
        return torch.stack(keys)

    def step(
        self, ids: Tensor, shifted: Tensor, position: Tensor, held: Tensor
    ) -> tuple[Matches, Tensor]:
        """Look up the contexts of the next bytes in decoding: ids [rows, n], shifted [longest, rows
        * n], position [rows, n]. held int64 [1 + 2 * contexts, rows, slots] has for all earlier
        bytes of the documents the bytes, the keys of their contexts, and the previous occurrence of
        each. Returns the matches of [rows * n, contexts], and `held` with the new bytes; its slots
        double as they fill up."""
        if (need := int(position[:, -1].max()) + 1) > held.shape[2]:  # host synchronisation
            held = F.pad(held, (0, 2 * need - held.shape[2]))
        keys = self.keys(shifted).view(-1, *ids.shape)
        at, count = position.expand(1 + len(keys), -1, -1), 1 + len(keys)
        held[:count].scatter_(2, at, torch.cat((ids[None], keys)))
        known, behind = (
            held[1:count, :, None, :need],
            torch.arange(1, need + 1, dtype=torch.int32, device=ids.device),
        )
        width = max(1, (1 << 22) // known.numel())  # bytes at a time
        last = (
            torch.cat(
                [
                    ((known == key[..., None]) & (behind <= t[..., None])).mul(behind).amax(-1)
                    for key, t in zip(keys.split(width, -1), position.split(width, -1), strict=True)
                ],
                dim=-1,
            ).long()
            - 1
        )
        held[count:].scatter_(2, at[1:], last)
        return self.found(held[:1].expand(len(last), -1, -1), held[count:], last), held

    def found(self, ids: Tensor, before: Tensor, last: Tensor) -> Matches:
        """Return the matches of contexts with their last occurrence at `last` [C, ...] (-1: none).
        ids and `before` [C, ..., slots]: the bytes, and the previous occurrence of each context."""

        def at(x, slot):
            return torch.where(slot < 0, -1, x.gather(-1, slot.clamp(0, x.shape[-1] - 1)))

        followed = []
        for _ in range(self.occurrences):
            followed.append(at(ids, torch.where(last < 0, -1, last + 1)).flatten(1).T)
            last = at(before, last)
        newest, older = followed[:2]
        kind = torch.where(older < 0, 0, torch.where(newest == older, 256, 512))
        row = torch.where((newest < 0) | (newest > 255), self.NOTHING, newest + kind)
        return Matches(row, torch.stack(followed, dim=-1))


# --------------------------------------------------------------------------------------------------
# Engram at segment rate


class SegmentEngram(nn.Module):
    """The memory before a core layer: rows of the segment's last bytes, gated by the state, then
    convolved."""

    kernel_size = 4
    compiled: Callable | None = None  # of `in_one_graph`, see Spider.compile_layers
    # of norms over tables, which start at zero: 1e-6 would multiply the first gradients by a
    # thousand, and these would stay in Adagrad's accumulators
    eps = 1e-3

    def __init__(self, config: SpiderConfig):
        super().__init__()
        self.table = EngramTable(
            config.engram_orders, config.engram_heads, config.engram_rows, config.engram_dim
        )
        self.key_proj = Linear(self.table.width, config.hidden_size)
        self.value_proj = Linear(self.table.width, config.hidden_size)
        self.conv_weight = nn.Parameter(torch.empty(self.kernel_size, config.hidden_size))

    @classmethod
    def taps(cls, config: SpiderConfig) -> list[int]:
        """Return the distances, in segments, of the earlier taps of the convolution."""
        return [tap * len(config.engram_orders) for tap in range(1, cls.kernel_size)]

    def recall(self, shifted: Tensor, position: Tensor, dtype: torch.dtype) -> "Recalled":
        """Compute what all loops share, for segments at `position` [N] that end with bytes
        `shifted` [K, N]."""
        memory = self.table(shifted).flatten(1).to(dtype)
        key, value = rms_norm(self.key_proj(memory), self.eps), self.value_proj(memory)
        at_least_fp32 = torch.promote_types(dtype, torch.float32)
        power = (
            torch.linalg.vector_norm(value, dim=1, keepdim=True, dtype=at_least_fp32).square()
            / value.shape[1]
        )
        if not torch.is_grad_enabled():
            taps, row = self.in_one_graph(value, position)
        elif self.compiled is not None:
            mark_rows_dynamic(value, position)
            taps, row = self.compiled(self, value, position)
        else:  # cheap to recompute, and three times as large as its inputs
            taps, row = checkpoint(
                self.in_one_graph, value, position, use_reentrant=False, preserve_rng_state=False
            )
        return Recalled(key, value, power, row, taps)

    def in_one_graph(self, value: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weighted values of all taps, [N, taps, D], and the index of each tap's
        segment, [N * taps]."""
        back = torch.arange(self.kernel_size, device=value.device) * len(self.table.orders)
        there = position[:, None] >= back  # [N, taps]
        row = (torch.arange(len(value), device=value.device)[:, None] - back).clamp_min(0)
        taps = value.index_select(0, row.flatten()).unflatten(0, row.shape)
        return taps * (there[:, :, None] * self.conv_weight.to(value.dtype)), row.flatten()

    def forward(
        self,
        h: Tensor,
        recalled: "Recalled",
        active: ActiveRows,
        before: Tensor | None,
        cache: Cache | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Add the memory to the active rows h [n, D]; return them, and the scales that the
        convolution reads. `before`: the scales of the loop before, which inactive rows keep.

        Only the gates change between loops. The convolution reads u = gate * value, normed: that is
        value times a scale per segment, [N, 1], so it is the sum of scales times the weighted
        values of the taps. In decoding, a cache holds the inputs of earlier steps, [N, D]."""
        key, value, power = (active.select(tensor) for tensor in recalled[:3])
        gate = self.gate(h, key)
        scale = (gate * torch.rsqrt(gate * gate * power + self.eps)).to(h.dtype)
        if cache is None:
            read = active.merge(before, scale)
            # [N, taps, 1]
            number = read.flatten().index_select(0, recalled.row).view(len(read), -1, 1)
            # bmm of a row would not fuse
            convolved = (active.select(number) * active.select(recalled.taps)).sum(1)
        else:
            read = active.merge(before, scale * value)
            first, *weights = self.conv_weight.to(read.dtype)
            convolved = read * first
            for weight, x in zip(weights, cache.put_and_look_back(read), strict=True):
                convolved = convolved + x * weight
            convolved = active.select(convolved)
        return torch.addcmul(h, gate.to(h.dtype), value) + F.silu(convolved), read

    def gate(self, h: Tensor, key: Tensor) -> Tensor:
        """Compute gates from states h [n, D] and keys [n, D]: [n, 1] in (0, 1), at least fp32."""
        match = _Match.apply(h, key)
        return torch.sigmoid(match.sign() * match.abs().clamp_min(1e-6).sqrt())


class Recalled(NamedTuple):
    """The lookups of a segment Engram, shared by all loops."""

    key: Tensor  # [N, D], normed
    value: Tensor  # [N, D]
    power: Tensor  # [N, 1], mean square of value, at least fp32
    row: Tensor  # int64 [N * taps], the segments that a segment's convolution reads
    taps: Tensor  # [N, taps, D], values there times their weights, 0 before a document's start


class _Match(torch.autograd.Function):
    """Compute <rms_norm(h), key> / sqrt(D) of rows [n, D] -> [n, 1], at least fp32, without storing
    normed rows."""

    @staticmethod
    def forward(ctx, h, key):
        scale = inverse_rms(h, 1e-6)
        dot = (h * key).sum(1, keepdim=True, dtype=scale.dtype)
        match = dot * scale * h.shape[1] ** -0.5
        ctx.save_for_backward(h, key, scale, match)
        return match

    @staticmethod
    def backward(ctx, grad):
        h, key, scale, match = ctx.saved_tensors
        grad = grad * scale
        to_key = (grad * h.shape[1] ** -0.5).to(h.dtype)
        to_h = (grad * match * scale / h.shape[1]).to(h.dtype)
        return torch.addcmul(to_key * key, to_h, h, value=-1), to_key * h


# --------------------------------------------------------------------------------------------------
# Engram at byte rate


class ByteEngram(nn.Module):
    """The memory at byte rate: rows of every n-gram order and of the match memory."""

    def __init__(self, config: SpiderConfig, matches: int):
        super().__init__()
        orders, dim = config.engram_byte_orders, config.engram_byte_dim
        self.table = EngramTable(orders, 1, config.engram_byte_rows, dim) if orders else None
        # so that sharding does not split blocks of 8-bit AdamW
        rows = round_up(MatchMemory.NOTHING + 1, 32)
        self.followed = nn.Parameter(torch.empty(matches, rows, dim)) if matches else None
        self.proj = Linear((len(orders) + matches) * dim, config.hidden_size)

    def rows(self, shifted: Tensor, matches: Matches | None, dtype: torch.dtype) -> Tensor:
        """Look up shifted [K, M] and the matches of [M, match contexts]: [M, orders and contexts,
        dim]."""
        rows = [self.table(shifted)] if self.table is not None else []  # of [M, orders, dim]
        if self.followed is not None:
            first = torch.arange(len(self.followed), device=shifted.device) * self.followed.shape[1]
            rows.append(F.embedding(matches.row + first, self.followed.flatten(0, 1)))
        return torch.cat([tensor.to(dtype) for tensor in rows], dim=1)

    def forward(self, x: Tensor, shifted: Tensor, matches: Matches | None) -> Tensor:
        """Return the term to add to x [M, D]."""
        return self.proj(self.rows(shifted, matches, x.dtype).flatten(1))


class OutputEngram(ByteEngram):
    """The memory before the head, whose rows are weighted by gates of the state. It can also add to
    the logits directly: linearly from its rows (`engram_logits`), and by votes for the bytes that
    followed a context's last occurrences (`engram_votes`; beside tables they replace the rows of
    matches). A small network of the state weighs the votes, as the mixer of PAQ weighs predictions
    (Mahoney 2005)."""

    def __init__(self, config: SpiderConfig):
        super().__init__(config, config.matches_before_head)
        self.config, c, width = config, config, self.proj.in_features
        self.gate = Linear(c.hidden_size, width // c.engram_byte_dim)
        self.logits = Linear(width, c.vocab_size) if c.engram_logits else None
        votes = c.engram_votes * c.match_contexts
        self.votes = (
            nn.Sequential(
                Linear(c.hidden_size, c.hidden_size // 2),
                nn.GELU(),
                Linear(c.hidden_size // 2, votes),
            )
            if votes
            else None
        )

    def forward(
        self, x: Tensor, shifted: Tensor, matches: Matches | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the terms to add to x [M, D] and to the logits [M, vocab_size]."""
        state, logits = rms_norm(x), None
        rows = (
            self.rows(shifted, matches, x.dtype) * self.gate(state).sigmoid()[:, :, None]
        ).flatten(1)
        if self.logits is not None:
            logits = self.logits(rows)
        if self.votes is not None:
            followed, weight = self.cast_votes(state, matches)
            weight = wide(weight)
            logits = (
                weight.new_zeros(len(x), self.config.vocab_size)
                if logits is None
                else logits.to(weight.dtype)
            )
            logits = logits.scatter_add(1, followed.clamp_min(0), weight)
        return self.proj(rows), logits

    def cast_votes(self, state: Tensor, matches: Matches) -> tuple[Tensor, Tensor]:
        """Return the ids that are voted for (-1: none) and the weights of the votes, both [M,
        contexts * engram_votes]; a context's votes are adjacent, the newest occurrence first. A
        vote for anything but a byte weighs 0."""
        # MatchMemory finds at least two
        followed = matches.followed[:, :, : self.config.engram_votes].flatten(1)
        return followed, torch.where((followed >= 0) & (followed < 256), self.votes(state), 0)

"""What is remembered and not computed: tables of hashed n-grams, and what a document says of itself.

Engram (arXiv 2601.07372) recalls, of the last bytes, rows that training wrote: at segment rate before core layers, at byte
rate (BLT, arXiv 2412.09871) before prelude and head. The match memory (the match model of PAQ, Mahoney 2005) looks up
what followed in the document where the last bytes stood before. Shapes as in spider_model.py.
"""

import math
import operator
import warnings
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from layers import Cache, Left, Linear, inverse_rms_of, rms_norm, round_up, wide
from tokenizer import PAD_ID

if TYPE_CHECKING:
    from spider_model import SpiderConfig


WORD_BYTES = 32                           # that are looked at for the ends of words


def gram_keys(shifted: Tensor, multiplier: Tensor, orders: tuple[int, ...]) -> list[Tensor]:
    """The last n bytes of each row as one number, for each order n: XOR over k < n of shifted[k] * multiplier[k]."""
    keys = list(accumulate((shifted[:len(multiplier)] * multiplier[:, None]).unbind(), operator.xor))
    return [keys[order - 1] for order in orders]


def word_ends(shifted: Tensor) -> Tensor:
    """Whether a word has ended before a byte: it is not of a word, while the byte before is. Of words are letters,
    digits, _, what continues a character of UTF-8, and what begins one of two bytes that is a letter (from 0xC3 on:
    Latin, Greek, Cyrillic, Hebrew, Arabic). So a Chinese character is a word. The rule of SpaceByte, arXiv 2404.14408,
    but for _ and those letters, at each of which it ends a word.

    shifted [K, M], see shifted_bytes -> bool [K - 1, M], of the byte k places back."""
    of_words = (((shifted | 32) >= ord("a")) & ((shifted | 32) <= ord("z"))
                | (shifted >= ord("0")) & (shifted <= ord("9")) | (shifted == ord("_"))
                | (shifted >= 0x80) & (shifted < 0xE0) & (shifted != 0xC2))
    return of_words[1:] & ~of_words[:-1]


def init_multiplier(multiplier: Tensor, seed: int):
    """Odd 64-bit numbers from `seed`; no random state is touched."""
    numbers = torch.Generator().manual_seed(seed)
    multiplier.copy_(torch.randint(-2 ** 62, 2 ** 62, multiplier.shape, generator=numbers) * 2 + 1)


def shifted_bytes(ids: Tensor, position: Tensor, longest: int) -> Tensor:
    """ids [M] with their positions [M] in documents -> [longest, M]: the byte k places back, PAD before a start."""
    back = torch.arange(longest, device=ids.device)[:, None]
    row = torch.arange(len(ids), device=ids.device)
    return torch.where(position >= back, ids[(row - back).clamp_min(0)], PAD_ID)


@cache
def primes_below(limit: int, count: int) -> tuple[int, ...]:
    """The `count` largest primes not above `limit`, descending; all of them where there are fewer."""
    found = []
    for n in range(limit, 1, -1):
        if len(found) == count:
            break
        if n == 2 or n % 2 and all(n % d for d in range(3, math.isqrt(n) + 1, 2)):
            found.append(n)
    return tuple(found)


class EngramTable(nn.Module):
    """One memory's rows: for each order n and head, row (XOR over k < n of byte_{t-k} * multiplier_k) mod a prime of
    its own. The tables lie one after the other in `weight`; a row never used stays zero. Gradients of lookups are not
    in weight.grad but in `gathered`, until `forget`. An optimizer that takes them from there, as optim.RowwiseAdagrad
    does, sets `claimed`; the first other one that steps over the weight is warned of."""

    claimed = warned = False              # warned: in this process, of any table

    def __init__(self, orders: tuple[int, ...], heads: int, rows: int, dim: int):
        super().__init__()
        self.orders, self.heads, self.width = orders, heads, len(orders) * heads * dim
        self.primes = primes_below(rows, len(orders) * heads)
        self.weight = nn.Parameter(torch.empty(sum(self.primes), dim))
        self.register_buffer("multiplier", torch.empty(max(orders), dtype=torch.int64))
        self.register_buffer("prime", torch.empty(len(orders), heads, dtype=torch.int64), persistent=False)
        self.register_buffer("offset", torch.empty(len(orders), heads, dtype=torch.int64), persistent=False)
        self.forget()

    def init_hash(self, seed: int):
        """Multipliers from `seed`, primes and offsets from the sizes."""
        init_multiplier(self.multiplier, seed)
        prime = torch.tensor(self.primes).view(self.prime.shape)
        self.prime.copy_(prime)
        self.offset.copy_(F.pad(prime.flatten().cumsum(0), (1, -1)).view(prime.shape))

    def addresses(self, shifted: Tensor) -> Tensor:
        """shifted [at least max(orders), rows] -> rows of `weight` int64 [rows, orders * heads]."""
        key = torch.stack(gram_keys(shifted, self.multiplier, self.orders), dim=1)           # [rows, orders]
        return (key[:, :, None].remainder(self.prime) + self.offset).flatten(1)

    def forward(self, shifted: Tensor) -> Tensor:
        """-> [rows, orders * heads, dim]; its gradient goes to `gather`, weight.grad stays None."""
        return _Lookup.apply(self.weight, self.addresses(shifted), self)

    def gather(self, row: Tensor, grad: Tensor):
        """Keeps what the optimizer needs of lookups: their rows [n], gradients [n, dim] and mean squares of these.

        They are listed as they come and, once more than half as many as the table has rows, summed by row: a step's
        memory is bounded by the table's, whatever the number of lookups and micro-steps. Merging equal rows before
        their squares are taken, as torch does when it adds sparse gradients on a CPU, would lose the squares."""
        if not (self.claimed or EngramTable.warned):
            unclaimed.add(self)
            watch_optimizers()
        grad = wide(grad)
        self.lookups.append((row, grad, torch.linalg.vector_norm(grad, dim=1).square_().div_(grad.shape[1])))
        if 2 * sum(len(row) for row, _, _ in self.lookups) > len(self.weight):
            self.sum_up()

    def sum_up(self) -> tuple[Tensor, Tensor, Tensor]:
        """Sums by row all that was gathered: every row of the table, its gradients and mean squares."""
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
        """Rows [n], gradients [n, dim] and mean squares [n] since `forget`; a row may come several times."""
        return self.lookups + [self.sums] * (self.sums is not None)

    def forget(self):
        self.lookups, self.sums = [], None


unclaimed: WeakSet[EngramTable] = WeakSet()  # tables that have gathered gradients which nothing takes, so far


@cache
def watch_optimizers() -> RemovableHandle:
    """From the first call on every optimizer's step is looked at."""
    return register_optimizer_step_post_hook(warn_of_unclaimed)


def warn_of_unclaimed(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict):
    """Warns of an optimizer, once in a process, that it leaves Engram tables as they are."""
    if not unclaimed:
        return
    weights = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if any(id(table.weight) in weights and not table.claimed for table in unclaimed):
        EngramTable.warned = True
        unclaimed.clear()
        warnings.warn(f"{type(optimizer).__name__} moves no row of the Engram tables that it was given, where most "
                      f"parameters lie: their gradients are not in weight.grad. Take Spider's optim.Optimizers in its "
                      f"place, or optim.RowwiseAdagrad beside it: docs/your-own-loop.md", stacklevel=3)


class _Lookup(torch.autograd.Function):
    """Rows of a table by address, [rows, tables] -> [rows, tables, dim]; the table gathers their gradients itself."""

    @staticmethod
    def forward(ctx, weight, address, table):
        ctx.save_for_backward(address)
        ctx.table = table
        return F.embedding(address, weight)

    @staticmethod
    def backward(ctx, grad):
        ctx.table.gather(ctx.saved_tensors[0].flatten(), grad.flatten(0, 1))
        return None, None, None


class SegmentEngram(nn.Module):
    """The memory in front of a core layer: what the segment's last bytes recall, gated by the state, then convolved."""

    kernel_size = 4
    eps = 1e-3                            # of norms over what tables hold: at their zero start, 1e-6 would multiply
                                          # gradients by a thousand, and Adagrad would never forget it

    def __init__(self, config: "SpiderConfig"):
        super().__init__()
        self.table = EngramTable(config.engram_orders, config.engram_heads, config.engram_rows, config.engram_dim)
        self.key_proj = Linear(self.table.width, config.hidden_size)
        self.value_proj = Linear(self.table.width, config.hidden_size)
        self.conv_weight = nn.Parameter(torch.empty(self.kernel_size, config.hidden_size))

    @classmethod
    def taps(cls, config: "SpiderConfig") -> list[int]:
        """How many segments back the convolution looks, beside the segment itself."""
        return [tap * len(config.engram_orders) for tap in range(1, cls.kernel_size)]

    def recall(self, shifted: Tensor, position: Tensor, dtype: torch.dtype) -> "Recalled":
        """What all loops share, of segments at `position` [N] that end with the bytes `shifted` [K, N]."""
        memory = self.table(shifted).flatten(1).to(dtype)
        key, value = rms_norm(self.key_proj(memory), self.eps), self.value_proj(memory)
        wide = torch.promote_types(dtype, torch.float32)
        power = torch.linalg.vector_norm(value, dim=1, keepdim=True, dtype=wide).square() / value.shape[1]
        if torch.is_grad_enabled():       # cheap to do again, and three times as large as what it is made of
            taps, row = checkpoint(self.taps_of, value, position, use_reentrant=False, preserve_rng_state=False)
        else:
            taps, row = self.taps_of(value, position)
        return Recalled(key, value, power, row, taps)

    def taps_of(self, value: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """What each tap weighs of value, [N, taps, D], and the segments where it lies, [N * taps]."""
        back = torch.arange(self.kernel_size, device=value.device) * len(self.table.orders)
        there = position[:, None] >= back                                                    # [N, taps]
        row = (torch.arange(len(value), device=value.device)[:, None] - back).clamp_min(0)
        taps = value.index_select(0, row.flatten()).unflatten(0, row.shape)
        return taps * (there[:, :, None] * self.conv_weight.to(value.dtype)), row.flatten()

    def forward(self, h: Tensor, recalled: "Recalled", left: Left, before: Tensor | None,
                cache: Cache | None = None) -> tuple[Tensor, Tensor]:
        """h [n, D] of the rows that are left -> the same, and what the convolution reads; `before`: the loop before's,
        which stays for the others.

        Between loops nothing but gates changes. The convolution reads the normed u = gate * value, which is value times
        a number for each segment: these, [N, 1], times what each tap weighs of value. A cache holds what it read of
        earlier steps, [N, D]."""
        key, value, power = (left.pick(part) for part in recalled[:3])
        gate = self.gate(h, key)
        scale = (gate * torch.rsqrt(gate * gate * power + self.eps)).to(h.dtype)
        if cache is None:
            read = left.merge(before, scale)
            number = read.flatten().index_select(0, recalled.row).view(len(read), 1, -1)     # [N, 1, taps]
            convolved = torch.bmm(left.pick(number), left.pick(recalled.taps)).squeeze(1)
        else:
            read = left.merge(before, scale * value)
            convolved = left.pick(self.convolve(read, cache))
        return torch.addcmul(h, gate.to(h.dtype), value) + F.silu(convolved), read

    def gate(self, h: Tensor, key: Tensor) -> Tensor:
        """How far states h [n, D] let in what their keys [n, D] stand for: [n, 1] in (0, 1), at least fp32."""
        match = _Match.apply(h, key)
        return torch.sigmoid(match.sign() * match.abs().clamp_min(1e-6).sqrt())

    def convolve(self, read: Tensor, cache: Cache) -> Tensor:
        """Depthwise causal convolution over the segments of a document, of steps' rows [N, D] -> [N, D]."""
        first, *weights = self.conv_weight.to(read.dtype)
        out = read * first
        for weight, x in zip(weights, cache.put_and_look_back(read)):
            out = out + x * weight
        return out


class Recalled(NamedTuple):
    """What a segment Engram recalls, for all loops."""
    key: Tensor                           # [N, D], normed
    value: Tensor                         # [N, D]
    power: Tensor                         # [N, 1], mean square of value, at least fp32
    row: Tensor                           # int64 [N * taps], the segments that a segment's convolution reads
    taps: Tensor                          # [N, taps, D], values there times their weights, 0 before a document's start


class _Match(torch.autograd.Function):
    """<rms_norm(h), key> / sqrt(D) of rows [n, D] -> [n, 1], at least fp32, without the normed rows."""

    @staticmethod
    def forward(ctx, h, key):
        inverse_rms = inverse_rms_of(h, 1e-6)
        dot = torch.bmm(h[:, None], key[:, :, None]).squeeze(2).to(inverse_rms.dtype)
        match = dot * inverse_rms * h.shape[1] ** -0.5
        ctx.save_for_backward(h, key, inverse_rms, match)
        return match

    @staticmethod
    def backward(ctx, grad):
        h, key, inverse_rms, match = ctx.saved_tensors
        grad = grad * inverse_rms
        to_key = (grad * h.shape[1] ** -0.5).to(h.dtype)
        to_h = (grad * match * inverse_rms / h.shape[1]).to(h.dtype)
        return torch.addcmul(to_key * key, to_h, h, value=-1), to_key * h


class MatchMemory(nn.Module):
    """What a document says of itself: for each order n, the byte that followed where its last n bytes stood the last
    time before, and whether the same one had followed the time before that. `words` are such contexts too: for each n
    of them the bytes behind the one that ended the n-th last word, at most WORD_BYTES - 1 of them. A match model, as
    compressors have it, without parameters: a small transformer takes long to learn that it could look.

    What was found is a number: the byte, + 256 where the two agree, + 512 where they do not, or NOTHING."""

    NOTHING = 3 * 256                     # these bytes never stood there, or no byte followed them

    def __init__(self, orders: tuple[int, ...], words: tuple[int, ...]):
        super().__init__()
        self.orders, self.words = orders, words
        self.register_buffer("multiplier", torch.empty(max((*orders, WORD_BYTES * bool(words))), dtype=torch.int64))

    def init_hash(self, seed: int):
        init_multiplier(self.multiplier, seed)

    def forward(self, ids: Tensor, shifted: Tensor, document: Tensor) -> Tensor:
        """ids [M], shifted [all that contexts read, M], document [M], ascending -> what was found, int64 [M, contexts],
        orders first."""
        key, place = self.keys(shifted).sort(dim=1, stable=True)
        document = document[place]
        again = (key[:, 1:] == key[:, :-1]) & (document[:, 1:] == document[:, :-1])
        last = torch.full_like(place, -1).scatter_(1, place[:, 1:], torch.where(again, place[:, :-1], -1))
        return self.found(ids.expand_as(last), last, last).T

    def keys(self, shifted: Tensor) -> Tensor:
        """A number for the bytes of each context, [contexts, M]."""
        orders, lengths = self.orders, tuple(range(1, WORD_BYTES)) if self.words else ()
        keys = gram_keys(shifted + 1, self.multiplier, orders + lengths)  # a byte of 0 makes a context longer, too
        if self.words:
            ended = word_ends(shifted[:WORD_BYTES]).cumsum(0)                                # [WORD_BYTES - 1, M]
            by_length = torch.stack((torch.zeros_like(keys[0]), *keys[len(orders):]))
            keys[len(orders):] = [by_length.gather(0, (ended < n).sum(0, keepdim=True))[0] for n in self.words]
        return torch.stack(keys)

    def step(self, ids: Tensor, shifted: Tensor, position: Tensor, held: Tensor) -> tuple[Tensor, Tensor]:
        """The same of the next bytes of documents that go on: ids [rows, n], shifted [longest, rows * n], position
        [rows, n]; held int64 [1 + 2 * contexts, rows, places]: of the documents so far the bytes, the keys of their
        contexts, and where these stood before. Returns what was found, [rows * n, contexts], and `held` with these
        bytes, which doubles as it fills up."""
        if (need := int(position[:, -1].max()) + 1) > held.shape[2]:                         # host synchronisation
            held = F.pad(held, (0, 2 * need - held.shape[2]))
        keys = self.keys(shifted).view(-1, *ids.shape)
        at, count = position.expand(1 + len(keys), -1, -1), 1 + len(keys)
        held[:count].scatter_(2, at, torch.cat((ids[None], keys)))
        known, behind = held[1:count, :, None, :need], torch.arange(1, need + 1, dtype=torch.int32, device=ids.device)
        width = max(1, (1 << 22) // known.numel())                                           # bytes at a time
        last = torch.cat([((known == key[..., None]) & (behind <= t[..., None])).mul(behind).amax(-1)
                          for key, t in zip(keys.split(width, -1), position.split(width, -1))], dim=-1).long() - 1
        held[count:].scatter_(2, at[1:], last)
        return self.found(held[:1].expand(len(last), -1, -1), held[count:], last).flatten(1).T, held

    def found(self, ids: Tensor, before: Tensor, last: Tensor) -> Tensor:
        """For n-grams that stood at `last` [..., m] before (-1: nowhere) what followed there, [..., m]. ids and
        `before`, [..., places]: the bytes of places, and where their n-grams stood before."""
        def at(x, place):
            return x.gather(-1, place.clamp(0, x.shape[-1] - 1))
        second = torch.where(last < 0, -1, at(before, last))
        byte, agree = at(ids, last + 1), at(ids, last + 1) == at(ids, second + 1)
        kind = torch.where(second < 0, 0, torch.where(agree, 256, 512))
        return torch.where((last < 0) | (byte > 255), self.NOTHING, byte + kind)


class ByteEngram(nn.Module):
    """The memory at byte rate: rows of every order, and of what followed in the document, each weighed by a gate of the
    state where there is one."""

    def __init__(self, config: "SpiderConfig", gated: bool):
        super().__init__()
        orders, matches, dim = config.engram_byte_orders, config.match_contexts, config.engram_byte_dim
        self.table = EngramTable(orders, 1, config.engram_byte_rows, dim) if orders else None
        rows = round_up(MatchMemory.NOTHING + 1, 32)  # 8-bit AdamW's blocks are then whole where ranks cut it
        self.followed = nn.Parameter(torch.empty(matches, rows, dim)) if matches else None
        self.proj = Linear((len(orders) + matches) * dim, config.hidden_size)
        self.gate = Linear(config.hidden_size, len(orders) + matches) if gated else None

    def forward(self, x: Tensor, shifted: Tensor, matched: Tensor | None) -> Tensor:
        """x [M, D], shifted [K, M], matched [M, match contexts], see MatchMemory -> what is added to x, [M, D]."""
        rows = [self.table(shifted)] if self.table is not None else []                       # of [M, orders, dim]
        if matched is not None:
            first = torch.arange(len(self.followed), device=x.device) * self.followed.shape[1]
            rows.append(F.embedding(matched + first, self.followed.flatten(0, 1)))
        rows = torch.cat([part.to(x.dtype) for part in rows], dim=1)
        if self.gate is not None:
            rows = rows * self.gate(rms_norm(x)).sigmoid()[:, :, None]
        return self.proj(rows.flatten(1))

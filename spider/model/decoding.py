"""The state that decoding carries from byte to byte, and sampling."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from spider.model.cache import Cache
from tokenizer import EOS_ID, PAD_ID

Seen = tuple[Tensor | None, Tensor | None]  # of a core layer, [N, ...]: latents and what the convolution read
Past = tuple[Cache | None, Cache | None]    # the same of earlier steps, when decoding

PIECE = 256                               # bytes a row that one pass of decoding takes, which bounds its memory


@dataclass
class DecodingState:
    """What a model knows of what each row has read: tensors and plain values, so that vars(state.copy()) can be saved,
    and DecodingState(**saved) goes on. It is of the device and compute_dtype of the model that made it. C is the width
    of a latent; places double as they fill up."""
    n_loops: int
    last_bytes: Tensor                    # int64 [rows, longest_order], PAD before the document
    position: Tensor                      # int64 [rows], bytes of the document so far
    segments: Tensor                      # int64 [rows], finished segments of it
    summed: Tensor                        # float64 [rows], boundary probabilities over it
    open_segment: Tensor                         # [rows, D], sum of the bytes behind the last boundary
    open_bytes: Tensor                   # [rows, 1], their number
    unpooled: Tensor                        # [rows, places * D], what bytes receive of the last finished segment
    matches: Tensor                       # int64 [1 + 2 * match contexts, rows, places]: see MatchMemory.step
    byte_latents: Tensor                  # [prelude and coda layers, 1, rows, places, C], normed and rotated
    segment_latents: Tensor               # [L, n_loops, rows, places, C]: as each segment's last loop left them
    convolved: Tensor                     # [Engram layers of the core, n_loops, rows, places, D]: what they convolve

    def copy(self, rows: list[int] | None = None) -> "DecodingState":
        """A state of its own of all rows, or of the named ones, as often as they are named."""
        def pick(x):
            if not isinstance(x, Tensor) or rows is None:
                return x.clone() if isinstance(x, Tensor) else x
            return x.index_select({5: 2, 3: 1}.get(x.ndim, 0), torch.tensor(rows, device=x.device))
        return DecodingState(**{name: pick(x) for name, x in vars(self).items()})

    def start_documents(self, rows: Tensor, null: Tensor | None):
        """Forgets what the rows, bool [rows], have read: nothing looks behind a document's start."""
        for x in (self.position, self.segments, self.summed, self.open_segment, self.open_bytes, self.last_bytes):
            x.masked_fill_(rows.view(-1, *(1,) * (x.ndim - 1)), PAD_ID if x is self.last_bytes else 0)
        if null is not None:
            self.unpooled = torch.where(rows[:, None], null.to(self.unpooled.dtype), self.unpooled)


def check_ids(name: str, ids: Tensor, rows: int | str = "B", length: int | str = "T"):
    """ValueError unless ids are int64 [rows, length], where a number must be met and a letter is any from 1 on."""
    sizes = list(ids.shape)
    if ids.dtype != torch.int64 or len(sizes) != 2 or any(
            size != wanted if isinstance(wanted, int) else size < 1 for size, wanted in zip(sizes, (rows, length))):
        raise ValueError(f"{name} must be int64 [{rows}, {length}], at least a byte of each row, not "
                         f"{str(ids.dtype).removeprefix('torch.')} {sizes}")


def draw(logits: Tensor, temperature: float, top_k: int | None, top_p: float | None,
         generator: torch.Generator | None) -> Tensor:
    """Draws a byte or EOS for each row of logits [rows, vocab_size] -> int64 [rows]. temperature 0 takes the likeliest;
    top_k leaves the k likeliest, top_p the likeliest ones that together have the probability p."""
    logits = logits.float().clone()
    logits[:, 256:EOS_ID] = -math.inf                                                        # PAD, BOS
    logits[:, EOS_ID + 1:] = -math.inf                                                       # sentinels
    if temperature == 0:
        return logits.argmax(1)
    logits = (logits - logits.amax(1, keepdim=True)).double() / temperature                  # any temperature above 0
    ordered, order = logits.softmax(1).float().sort(descending=True)
    if top_k is not None:
        ordered[:, top_k:] = 0
    if top_p is not None:
        beyond = (ordered.cumsum(1) - ordered) / ordered.sum(1, keepdim=True) >= top_p
        beyond[:, 0] = False                                                                 # fp32 has no 1e-50
        ordered[beyond] = 0
    return order.gather(1, torch.multinomial(ordered, 1, generator=generator)).squeeze(1)

"""Continue texts and hold a dialogue: `complete` and `converse`, with the settings in `Sampling`.

Both use a decoding state, so the cost per byte does not grow with the text, and print bytes as they are sampled.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spider.console import print_bytes
from spider.inference.adaptation import CHUNK, Adaptation
from spider.model.decoding import DecodingState
from tokenizer import BOS_ID, EOS_ID


@dataclass(frozen=True)
class Sampling:
    """Settings of sampling and printing; see the flags of these names."""
    bytes: int
    temperature: float
    top_k: int | None
    top_p: float | None
    samples: int
    seed: int
    raw: bool


def sampler(model: nn.Module, sampling: Sampling) -> Callable:
    """Return generate(logits, state), which yields the next bytes of all rows, one column at a time."""
    generator = torch.Generator(model.embed_tokens.device).manual_seed(sampling.seed)

    def generate(logits: Tensor, state: DecodingState) -> Iterator[list[int | None]]:
        return model.generate_batch(logits, state, sampling.bytes, sampling.temperature, sampling.top_k, sampling.top_p,
                                    generator)
    return generate


def beginning(prompt: bytes) -> list[int]:
    """Return the ids of a prompt; an empty one becomes a line break, since BOS is rare in training."""
    return [BOS_ID, *prompt] if prompt else list(b"\n")


def read(model: nn.Module, state: DecodingState, ids: list[int]) -> Tensor:
    """Feed ids to a state with one row; return the logits of the next byte, [1, vocab_size]."""
    with model.cast_weights_once():
        return model.step(torch.tensor([ids], device=model.embed_tokens.device), state)[:, -1]


def learn(adaptation: Adaptation | None, ids: list[int], typed: int):
    """Let the model adapt to the last `typed` of the ids that it is about to read; the others are only context. Ctrl-C
    interrupts this between two steps."""
    if adaptation is None:
        return
    counted = torch.arange(len(ids)) >= len(ids) - typed
    with interrupts_that_wait() as asked:
        for piece in zip(torch.tensor(ids, dtype=torch.int64).split(CHUNK), counted.split(CHUNK)):
            adaptation.read(*piece)
            if asked:
                raise KeyboardInterrupt
        adaptation.flush()


def complete(model: nn.Module, state: DecodingState, prompt: bytes, generate: Callable, sampling: Sampling):
    """Print samples that continue a prompt, generated as a batch: the first while it is generated, then the others."""
    count = sampling.samples
    logits, texts = read(model, state, beginning(prompt)), [bytearray() for _ in range(count)]

    def first() -> Iterator[bytes]:
        yield prompt
        rows = state if count == 1 else state.copy([0] * count)
        for column in generate(logits.expand(count, -1), rows):
            for text, byte in zip(texts, column):
                text += bytes([byte] if byte is not None else ())
            yield bytes(column[:1] if column[0] is not None else ())
    for number, text in enumerate(texts, 1):
        if count > 1:
            print(f"--- {number} of {count}", flush=True)
        print_bytes(first() if number == 1 else [prompt, bytes(text)], sampling.raw)


def converse(model: nn.Module, state: DecodingState, generate: Callable, sampling: Sampling,
             adaptation: Adaptation | None = None):
    """Hold a dialogue: input from the terminal and the model's output form one text. Input starts a new line, or a new
    document after the model's EOS. With an adaptation, the model learns from the input before it answers, and never
    from its own output."""
    with suppress(ImportError):
        import readline  # noqa: F401     # lines can be edited then
    sys.stdin.reconfigure(errors="surrogateescape")
    unread = None                         # ids of the last turn that the state has not read
    while (typed := ask()) is not None:
        typed = os.fsencode(typed)
        if unread is None:
            ids = beginning(typed)
        else:
            in_line = typed and unread not in ([EOS_ID, BOS_ID], [ord("\n")])
            ids = unread + list(b"\n" if in_line else b"") + list(typed)
        learn(adaptation, ids, len(typed))
        logits, written = read(model, state, ids), []

        def turn() -> Iterator[bytes]:
            for byte, in generate(logits, state):
                written.append(byte)
                yield bytes([byte])
                if asked:
                    return
        with interrupts_that_wait() as asked:
            print_bytes(turn(), sampling.raw)
        ended = len(written) < sampling.bytes and not asked
        unread = [EOS_ID, BOS_ID] if ended else written[-1:]
        learn(adaptation, written if ended else written[:-1], 0)


def ask() -> str | None:
    """Read the lines of a turn, without the final line break; return None at the end of input."""
    try:
        text = input("> ")
        while text.endswith("\\"):
            text = text[:-1] + "\n" + input("  ")
        return text
    except EOFError:
        print()
    except KeyboardInterrupt:
        print()
        raise


@contextmanager
def interrupts_that_wait() -> Iterator[list]:
    """Record Ctrl-C in the yielded list instead of raising, so that it cannot leave the state inconsistent."""
    asked = []
    before = signal.signal(signal.SIGINT, lambda *_: asked.append(True))
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)

"""Talk to a checkpoint, evaluate it, look inside, export it.

    python sample.py  # a dialogue with the newest one in checkpoints/
    python sample.py checkpoints/play --prompt "ROMEO:"    # continue a text
    python sample.py checkpoints/spider-step750.pt --prompt "ROMEO:" --bytes 500 --samples 3
    head -c 2000 play.txt | python sample.py checkpoints/play --bytes 200
    python sample.py checkpoints/play --prompt "ROMEO:" --no_echo --stop $'\\n\\n'  # a paragraph
    python sample.py checkpoints/play --best --prompt O    # with the lowest validation loss
    python sample.py checkpoints/play --show play.txt      # segments, loops, surprise of a text
    python sample.py checkpoints/play --export DIR         # for Hugging Face's libraries
    python sample.py checkpoints/a checkpoints/b --eval data play.txt --json figures.json
    python sample.py checkpoints/play --eval play.txt --adapt    # learn from what was read

Without --prompt the model continues standard input. In a terminal this is a dialogue: the model
continues each line that you type, with the whole dialogue as context. An empty line lets it
continue its own text; a backslash at the end of a line continues the input on the next line. Ctrl-C
stops the model, Ctrl-D ends the dialogue.

Output is the prompt and its continuation as text, also to files and pipes: control characters as
escapes such as \\x1b, invalid UTF-8 as U+FFFD. --no_echo leaves out the prompt. --raw prints the
bytes unchanged, and a line break after each sample.

--stop ends a sample before a text, which is not printed. In a dialogue the text stays in the
context, and the next input follows it directly.

--eval prints bits per byte, and bits per character where these differ. For a directory of shards it
evaluates the validation data like training (val_bpb), in which BOS and EOS count. For a file it
predicts every byte, the first one of a document from BOS; only bytes count. Each record of .jsonl
and .json is a document, as is each document in a .bin shard; any other file is one. Windows of
--seq_len bytes advance by half, so each byte has at least half a window of context, or all of its
document so far.
"""

import argparse
import json
import math
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

from spider.common import (
    DataError,
    Parser,
    UsageError,
    check_flags_early,
    durable,
    integer,
    one_line,
    path_name,
    quoted,
    real,
    run_program,
    say,
)
from spider.config import MAX_LOOPS

# --------------------------------------------------------------------------------------------------
# The command line

# What a command does, by the flag that asks for it, and the flags that only it reads.
COMMANDS = {
    "talking": "prompt bytes temperature top_k top_p no_repeat_ngram_size samples seed raw stop "
    "no_echo".split(),
    "--eval": "json field seq_len batch precision adapt".split(),
    "--show": ["html"],
    "--export": [],
}


def loops(text: str) -> list[int]:
    return [integer(1, MAX_LOOPS)(part) for part in text.split(",")]


def stop_text(text: str) -> bytes:
    if not text:
        raise argparse.ArgumentTypeError("an empty text would end every sample at once")
    return os.fsencode(text)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line. Raise UsageError for a bad value, or a flag that the command would
    not read."""
    parser = Parser(prog="sample.py", description=__doc__)
    add = parser.add_argument
    add(
        "checkpoint",
        nargs="*",
        type=path_name,
        default=["checkpoints"],
        help="a file, an export or a directory",
    )
    add(
        "--best",
        action="store_true",
        help="use the checkpoint with the lowest validation loss of a directory",
    )
    add(
        "--n_loops",
        type=loops,
        metavar="N,...",
        help="loops of the core (as trained); several for --eval",
    )
    add("--device", default="auto", choices=("auto", "cpu", "cuda"))
    add = parser.add_argument_group("talking").add_argument
    add("--prompt", help="text to continue; default: standard input, or a dialogue in a terminal")
    add("--bytes", type=integer(1), default=500, help="maximum number of bytes to generate")
    add("--temperature", type=real(0), default=0.8, help="sampling temperature; 0 is greedy")
    add("--top_k", type=integer(1), help="sample only from the k likeliest bytes")
    add(
        "--top_p",
        type=real(0, 1, above=True),
        help="sample only from the likeliest bytes of total probability p",
    )
    add(
        "--no_repeat_ngram_size",
        type=integer(0),
        default=64,
        metavar="N",
        help="write no sequence of N bytes twice, which ends endless repetition; 0: off",
    )
    add("--samples", type=integer(1, 1 << 16), default=1, help="number of samples per prompt")
    add("--seed", type=integer(0), default=0, help="seed of the samples")
    add(
        "--stop",
        action="append",
        type=stop_text,
        metavar="TEXT",
        help="end a sample where TEXT would follow, which is not printed; may be repeated",
    )
    add("--no_echo", action="store_true", help="print only the continuation, not the prompt")
    add(
        "--raw",
        action="store_true",
        help="print bytes unchanged, including terminal control sequences",
    )
    add = parser.add_argument_group("evaluation").add_argument
    add(
        "--eval",
        nargs="+",
        type=path_name,
        metavar="FILE",
        help="evaluate on texts or directories of shards",
    )
    add("--json", type=path_name, metavar="OUT", help="also write the results to a file")
    add("--field", default="text", help="JSON field with the text")
    add("--seq_len", type=integer(2, 1 << 24), help="bytes per window (as trained)")
    add(
        "--batch",
        type=integer(1),
        help="sequences per batch (8,192 bytes); does not change the results",
    )
    add(
        "--precision",
        default="auto",
        choices=("auto", "bf16", "fp32"),
        help="auto: bf16 if the hardware has it",
    )
    add(
        "--adapt",
        action="store_true",
        help="let the model learn from each 1,024 bytes after they are scored",
    )
    add = parser.add_argument_group("looking inside").add_argument
    add(
        "--show",
        metavar="FILE|TEXT",
        help="analyze a text, in the terminal and as an HTML page: a file, - (stdin) or "
        "the text itself; at most 1 MB of it",
    )
    add(
        "--html",
        type=path_name,
        metavar="OUT",
        help="path of the page of --show (look.html beside the checkpoint)",
    )
    add = parser.add_argument_group("export").add_argument
    add(
        "--export",
        type=path_name,
        metavar="DIR",
        help="export to a new directory for Hugging Face's libraries",
    )
    args = parser.parse_args(argv)
    given = {name for name, value in vars(args).items() if value != parser.get_default(name)}
    asked = [name for name in COMMANDS if name.lstrip("-") in given] or ["talking"]
    unread = {
        name for command in COMMANDS.keys() - {asked[0]} for name in COMMANDS[command]
    } & given
    if asked[0] == "--export":
        unread |= {"n_loops", "device"} & given
    if asked == ["talking"] and unread:
        needed = [command for command in COMMANDS if unread & {*COMMANDS[command]}]
        parser.error(
            f"{' '.join(f'--{name}' for name in sorted(unread))} needs {' and '.join(needed)}"
        )
    if args.adapt:  # it reads in chunks of its own
        unread |= {"seq_len", "batch"} & given
    if unread or len(asked) > 1:
        others = asked[1:] + [f"--{name}" for name in sorted(unread)]
        parser.error(
            f"{' '.join(others)} cannot be used with {'--adapt' if args.adapt else asked[0]}"
        )
    if not args.eval and (len(args.checkpoint) > 1 or len(args.n_loops or ()) > 1):
        parser.error("only --eval takes several checkpoints or numbers of loops")
    return args


if __name__ == "__main__":
    check_flags_early(parse_args, "sample.py")

import numpy as np
import torch

from data import Shard, Stream, map_shard, open_data, validation_sets
from spider.distributed import World
from spider.export import write_export
from spider.inference import (
    CHUNK,
    Adaptation,
    Sampler,
    best_of,
    complete,
    converse,
    count_characters,
    decoder_of,
    model_of,
    read_checkpoint,
    score_windows,
    trained_loops,
)
from spider.inspect import show
from spider.machine import (
    keep_freed_memory,
    memory_advice,
    multiplies_bf16,
    resolve_device,
    start_log,
)
from spider.prepare import KINDS, Documents, Input
from spider_model import Spider
from tokenizer import BOS_ID, EOS_ID
from train import EVAL_BYTES, evaluate

# --------------------------------------------------------------------------------------------------
# Talking


def bytes_to_continue(prompt: str | None) -> bytes | None:
    """Return the bytes of --prompt or of standard input, which need not be UTF-8; None for a
    dialogue."""
    if prompt is not None:
        return os.fsencode(prompt)
    if os.isatty(0):
        return None if sys.stdout.isatty() else b""
    with open(0, "rb", closefd=False) as stdin:
        return stdin.read()


def talk(
    name: str,
    n_loops: int | None,
    prompt: str | None,
    device: torch.device,
    model_class: type[Spider],
    **settings,
):
    """Continue a prompt, or hold a dialogue if there is none and stdin and stdout are a terminal.
    settings: see Sampler."""
    text = bytes_to_continue(prompt)
    if text is None and settings["samples"] > 1:
        raise UsageError("--samples needs a --prompt: a dialogue has a single sample")
    path, content = read_checkpoint(name, model_class)
    sampler = Sampler(decoder_of(content, device, model_class), **settings)
    state = sampler.model.decoding_state(n_loops=n_loops or trained_loops(content))
    if text is not None:
        complete(sampler, state, text)
        return
    print(
        one_line(
            f"{path}, step {content.get('step', 0)}. Type a line for the model to continue, an "
            f"empty one for "
            f"more. Ctrl-C stops it, Ctrl-D quits."
        )
    )
    converse(sampler, state)


# --------------------------------------------------------------------------------------------------
# Evaluation

PIECE = 1 << 20  # ids of a text that are decoded at once, to count characters


def open_text(name: str, field: str) -> Stream | list:
    """Open a directory of shards as sources, any other file as a stream of ids."""
    if os.path.isdir(name):
        return open_data(name)
    if not name.endswith(".bin"):
        return Stream([Shard(name, read_ids(name, field))])
    stream = Stream([map_shard(name)])
    stream.check(0, len(stream))
    return stream


def read_ids(name: str, field: str) -> np.ndarray:
    """Return the ids of a text file, or of JSON with a document in each record."""
    kind = KINDS.get(Path(name).suffix.lower(), "document")
    if kind == "table" or name.lower().endswith((".gz", ".zst")):
        raise DataError(
            f"{name}: prepare it first, by python data.py prepare {quoted(name)} --val_fraction "
            f"0 --out "
            "DIR, then --eval DIR/train-00000.bin"
        )
    documents = Documents(field, val_fraction=0.0, endings=(), config=None, split="", strict=True)
    texts = [
        np.frombuffer(b"".join(text), np.uint8)
        for _, text in documents.read(Input(name, kind), Path())
    ]
    if not texts:
        raise DataError(f"{name}: no document in it")
    return np.concatenate([part for text in texts for part in ([BOS_ID], text, [EOS_ID])]).astype(
        np.uint16
    )


class Score(NamedTuple):
    """How well a model predicts a text. In prepared sources, BOS and EOS count as bytes and as
    characters."""

    bytes: int  # that were predicted
    characters: int  # in these bytes
    bits_per_byte: float


def score(
    model: Spider, state: dict, text, n_loops: int, seq_len: int, batch: int, adapt: bool
) -> Score:
    """Score a text; prepared sources are evaluated like the trainer's."""
    if not isinstance(text, list):
        pieces = (
            text.read(start, min(start + PIECE, len(text))) for start in range(1, len(text), PIECE)
        )
        characters = count_characters(pieces, special=False)
        if adapt:
            count, bits = Adaptation(model, state, n_loops).score([text], special=False)
        else:
            count, bits = score_windows(model, text, seq_len, batch, n_loops)
        return Score(count, characters, bits)
    eval_tokens = state.get("flags", {}).get("eval_tokens", 1 << 20)
    sets = validation_sets(text, CHUNK if adapt else seq_len, eval_tokens)
    targets = {name: labels[labels != -100].numpy() for name, (_, labels) in sets.items()}
    characters = sum(count_characters([ids], special=True) for ids in targets.values())
    if adapt:
        streams = [
            source.val.slice(0, len(targets[source.name]) + 1)
            for source in text
            if source.name in targets
        ]
        count, bits = Adaptation(model, state, n_loops).score(streams, special=True)
    else:
        world = World({})
        world.device = model.embed_tokens.device
        count, bits = (
            sum(map(len, targets.values())),
            evaluate(model, sets, batch, n_loops, world)["val_bpb"],
        )
    return Score(count, characters, bits)


def measure(
    names: list[str],
    texts: dict,
    n_loops: list[int] | None,
    seq_len: int | None,
    batch: int | None,
    precision: str,
    adapt: bool,
    device: torch.device,
    model_class: type[Spider],
) -> Iterator[dict]:
    """Yield the figures of each checkpoint, text and number of loops; None stands for the run's own
    setting."""
    bf16 = precision == "bf16" or precision == "auto" and multiplies_bf16(device)
    if device.type == "cpu":
        keep_freed_memory()
    for name in names:
        path, state = read_checkpoint(name, model_class)
        length = seq_len or state.get("flags", {}).get("seq_len", 2048)
        model = None
        for file, text in texts.items():
            for loops in n_loops or [trained_loops(state)]:
                if model is None or adapt:  # each figure is of the checkpoint's weights
                    model = None  # freed before the next one is built
                    model = model_of(
                        state, device, torch.bfloat16 if bf16 else torch.float32, model_class
                    )
                scored = score(
                    model, state, text, loops, length, batch or max(1, EVAL_BYTES // length), adapt
                )
                if not scored.bytes:
                    raise DataError(f"{file}: no byte to predict")
                if not math.isfinite(scored.bits_per_byte):
                    raise FloatingPointError(
                        f"{path}: the loss is not a finite number: its weights are ruined"
                    )
                yield dict(
                    checkpoint=str(path),
                    file=file,
                    n_loops=loops,
                    **scored._asdict(),
                    bits_per_character=scored.bits_per_byte * scored.bytes / scored.characters,
                    seq_len=None if adapt else length,
                    precision="bf16" if bf16 else "fp32",
                    adapt=adapt,
                )


def print_table(found: list[dict]):
    """Print a row per checkpoint and text, a column per number of loops: bits per byte after the
    number of bytes, and, where these differ, bits per character after the number of characters."""
    loops = list(dict.fromkeys(entry["n_loops"] for entry in found))
    units = [("bytes", "bits_per_byte")]
    if any(
        f"{entry['bits_per_character']:.4f}" != f"{entry['bits_per_byte']:.4f}" for entry in found
    ):
        units.append(("characters", "bits_per_character"))
    lines = [["checkpoint", "file"]]
    for unit, _ in units:
        lines[0] += [unit, *(f"n_loops={n}" for n in loops)]
    rows = {}  # entries by number of loops
    for entry in found:
        rows.setdefault((entry["checkpoint"], entry["file"]), {})[entry["n_loops"]] = entry
    for names, by_loops in rows.items():
        line = [one_line(name) for name in names]
        for unit, bits in units:
            line.append(f"{next(iter(by_loops.values()))[unit]:,}")
            line += [f"{by_loops[n][bits]:.4f}" if n in by_loops else "" for n in loops]
        lines.append(line)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        say(
            "  ".join(
                cell.ljust(width) if i < 2 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
        )


# --------------------------------------------------------------------------------------------------
# main


def main(argv: list[str] | None = None, model_class: type[Spider] = Spider) -> int:
    """Run sample.py, for models of a class. Exit status: 0; 2 with one line on stderr; 130 after
    Ctrl-C."""
    start_log()

    def command():
        args = parse_args(argv)
        names = [best_of(name) for name in args.checkpoint] if args.best else args.checkpoint
        advice = "use a machine with more memory"
        if args.samples > 1:
            advice = "lower --samples or --bytes"
        elif args.eval and not args.adapt:
            advice = "lower --batch or --seq_len"
        with memory_advice(advice):
            if args.export is not None:
                if model_class is not Spider:
                    raise UsageError(
                        f"--export writes Spider's own code, which cannot load a "
                        f"{model_class.__name__}"
                    )
                write_export(*read_checkpoint(names[0], model_class), args.export)
                return
            device, n_loops = resolve_device(args.device), args.n_loops and args.n_loops[0]
            if args.eval:
                with durable(Path(args.json)) if args.json else nullcontext() as out:
                    # an error comes before the work
                    texts, found = {name: open_text(name, args.field) for name in args.eval}, []
                    try:
                        for entry in measure(
                            names,
                            texts,
                            args.n_loops,
                            args.seq_len,
                            args.batch,
                            args.precision,
                            args.adapt,
                            device,
                            model_class,
                        ):
                            found.append(entry)  # noqa: PERF402 one at a time
                    finally:  # what was measured before an error, too
                        if found:
                            print_table(found)
                    if out:
                        out.write(json.dumps(found, indent=1, allow_nan=False) + "\n")
            elif args.show is not None:
                path, state = read_checkpoint(names[0], model_class)
                show(
                    decoder_of(state, device, model_class),
                    n_loops or trained_loops(state),
                    args.show,
                    path,
                    state,
                    args.html,
                )
            else:
                settings = {
                    name: getattr(args, name) for name in COMMANDS["talking"] if name != "prompt"
                }
                talk(names[0], n_loops, args.prompt, device, model_class, **settings)

    return run_program(command, "sample.py")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())

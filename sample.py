"""Talk to a checkpoint, measure it, look inside, hand it over.

    python sample.py                                            # the newest one in checkpoints/: a dialogue
    python sample.py checkpoints/shakespeare --prompt "ROMEO:"  # the newest good one of a directory
    python sample.py checkpoints/spider-step750.pt --prompt "ROMEO:" --bytes 500 --top_k 40 --samples 3
    head -c 2000 play.txt | python sample.py checkpoints/shakespeare --bytes 200
    python sample.py checkpoints/shakespeare --show play.txt    # what it makes of a text: segments, loops, surprise
    python sample.py checkpoints/shakespeare --best --prompt O  # its checkpoint of the lowest validation loss
    python sample.py checkpoints/spider-step750 --convert a.pt  # a sharded checkpoint as one file, or back
    python sample.py checkpoints/shakespeare --export DIR       # for Hugging Face's libraries
    python sample.py checkpoints/a checkpoints/b --eval data held-out.txt --n_loops 1,2,4 --json figures.json

Without --prompt the model continues standard input, byte for byte. In a terminal that is a dialogue: it continues each
line that is typed, with all that was typed and written before in context. An empty line lets it continue where it
stopped, a backslash at a line's end adds the line break and another line; Ctrl-C stops it, Ctrl-D ends the dialogue.

What the model writes is printed as text, whole characters as they come: control characters as escapes such as \\x1b,
bytes that are not UTF-8 as U+FFFD, into files and pipes too. --raw prints its bytes as they are.

--eval prints bits per byte. A directory of shards is evaluated as training does, on its validation part: the run's
val_bpb, in which EOS and BOS count. Of a file all bytes are predicted, the first one of a document from BOS, and bytes
alone count: JSON lines (.jsonl) and parquet rows are a document each, a .bin shard has those that are marked in it, any
other file is one, and .gz and .zst are unpacked. Each byte is predicted from the half of --seq_len bytes before it, or
more, or all that its document has there: windows of that length move on by half of it.
"""

import argparse
import codecs
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from loguru import logger
from torch import Tensor

from spider import console, errors, files
from spider.data import loader, readers, shards
from spider.errors import CheckpointError, UsageError
from spider.export.directory import write_export
from spider.flags import BadValue, Flag, Parser, in_words, integer, path_name, real
from spider.inspect import page, reading
from spider.model.config import MAX_LOOPS, SpiderConfig
from spider.model.decoding import DecodingState
from spider.model.foreign import foreign_classes
from spider.training.checkpoint import (best_checkpoint, check_classes, check_weights, find_checkpoints,
                                        load_checkpoint, with_whole_tensors)
from spider.training.checkpoint_files import is_sharded
from spider.training.convert import convert
from spider.training.evaluation import EVAL_BYTES, cross_entropy, evaluate
from spider.training.export_reading import is_export
from spider.training.machine import is_out_of_memory, keep_freed_memory, multiplies_bf16, resolve_device, start_log
from spider_model import Spider
from tokenizer import BOS_ID, EOS_ID
from train import FLAGS, RECIPES

# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints


def path_of(name: str, model_class: type[Spider] = Spider) -> tuple[Path, bool]:
    """Return the path of a checkpoint, or of the newest good one of a directory, which is logged, and whether it was
    found so; UsageError where there is none."""
    path, found = Path(name), None
    if not is_export(path) and not is_sharded(path) and (path.is_dir() or not path.exists()):
        found = find_checkpoints(path, model_class)
        if not found:
            raise UsageError(f"{name}: there is no checkpoint there that can be used; name another, or train first")
        path = found[-1].path
        logger.info(f"{path}: the newest checkpoint in {name}, step {found[-1].step}")
    return path, bool(found)


def read_checkpoint(name: str, model_class: type[Spider] = Spider) -> tuple[Path, dict]:
    """Read a checkpoint, or the newest good one of a directory: its path and content, tensors in the file. UsageError,
    CheckpointError where there is none that was made with the model class."""
    path, found = path_of(name, model_class)
    state = load_checkpoint(path, sealed=not found, mapped=True)
    config = SpiderConfig(**state["cfg"])
    with torch.device("meta"):
        check_classes(path, state, foreign_classes(model_class(config)))
    check_weights(path, state, config, model_class)
    state["model_state_dict"] = with_whole_tensors(state["model_state_dict"])
    return path, state


def best_of(name: str) -> str:
    """Return the path of the checkpoint with the lowest validation loss in a directory; UsageError where it is none."""
    if not Path(name).is_dir() or is_sharded(Path(name)) or is_export(Path(name)):
        raise UsageError(f"--best: {name} is no directory of checkpoints")
    best = best_checkpoint(Path(name), Spider)
    logger.info(f"{best.path}: the checkpoint of the lowest validation loss there, {best.val_loss:.4f} nats per byte")
    return str(best.path)


def model_of(state: dict, device: torch.device, dtype: torch.dtype, model_class: type[Spider] = Spider) -> Spider:
    """Build the model of a checkpoint's content in evaluation mode, with products of a type."""
    with torch.device("meta"):
        model = model_class(SpiderConfig(**state["cfg"]))
    model.to_empty(device=device).init_weights()
    model.load_state_dict(state["model_state_dict"])
    model.compute_dtype = dtype
    return model.eval()


def decoder_of(state: dict, device: torch.device, model_class: type[Spider] = Spider) -> Spider:
    """Build the same in the precision that is fast a byte at a time: bf16 on a GPU, fp32 on a CPU, where one row takes
    several times as long in bf16."""
    bf16 = device.type == "cuda" and multiplies_bf16(device)
    return model_of(state, device, torch.bfloat16 if bf16 else torch.float32, model_class)


def load_model(name: str, device: torch.device, model_class: type[Spider] = Spider) -> tuple[Spider, int]:
    """Load the model of a checkpoint to decode with, and the loops that it was trained with."""
    state = read_checkpoint(name, model_class)[1]
    return decoder_of(state, device, model_class), trained_loops(state)


def trained_loops(state: dict) -> int:
    return state.get("n_loops", SpiderConfig(**state["cfg"]).n_loops)


def flag_of(state: dict, name: str) -> int:
    """Return the value that a checkpoint's run had for a flag, or its recipe's where the checkpoint has none."""
    flag = next(flag for flag in FLAGS if flag.name == name)
    value = RECIPES[state.get("recipe", "1b")].get(name, flag.default)
    return checked_flag(flag, state.get("flags", {}).get(name, value))


def checked_flag(flag: Flag, value):
    """Parse the value of a checkpoint's run for a flag, as train.py does; CheckpointError where no run has it."""
    try:
        taken = flag.value(in_words(value))
        if taken != value:
            raise BadValue(str(value), f"a {type(taken).__name__}")
    except ValueError as fault:
        raise CheckpointError(f"{flag.name} of the checkpoint's run: {fault}") from None
    return taken


def export(path: Path, state: dict, directory: str):
    """--export: write the model, with the flags of its run once each is one that train.py takes."""
    known, flags = {flag.name: flag for flag in FLAGS}, state.get("flags", {})
    checked_flags = {name: checked_flag(known[name], value) for name, value in flags.items() if name in known}
    write_export(path, state | dict(flags=flags | checked_flags) if flags else state, directory, Spider)


def one_checkpoint(names: list[str]) -> str:
    """Return the only checkpoint that was named; UsageError for several."""
    if len(names) > 1:
        raise UsageError(f"{names[1]}: only --eval takes several checkpoints")
    return names[0]


def one_number(n_loops: list[int] | None, trained: int) -> int:
    """Return the loops to run: the only number of --n_loops, or those of the training; UsageError for several."""
    if n_loops and len(n_loops) > 1:
        raise UsageError("--n_loops: only --eval takes several numbers")
    return trained if n_loops is None else n_loops[0]


# ---------------------------------------------------------------------------------------------------------------------
# Talking


@dataclass(frozen=True)
class Sampling:
    """Settings of drawing and printing texts; see the flags of these names."""
    bytes: int
    temperature: float
    top_k: int | None
    top_p: float | None
    samples: int
    seed: int
    raw: bool


def bytes_to_continue(prompt: str | None) -> bytes | None:
    """Return the bytes of --prompt, or of standard input, also where they are not UTF-8; None: a dialogue."""
    if prompt is not None:
        return os.fsencode(prompt)
    if sys.stdin is None:                 # closed
        return b""
    if os.isatty(0):
        return None if sys.stdout.isatty() else b""
    with open(0, "rb", closefd=False) as stdin:
        return stdin.read()


def beginning(prompt: bytes) -> list[int]:
    """Return the ids of a prompt; of an empty one a line's end, since BOS stands once in a document."""
    return [BOS_ID, *prompt] if prompt else list(b"\n")


def read(model: Spider, state: DecodingState, ids: list[int]) -> Tensor:
    """Feed ids to the one row of a state; return the logits of what comes next, [1, vocab_size]."""
    with model.cast_weights_once():
        return model.step(torch.tensor([ids], device=model.embed_tokens.device), state)[:, -1]


def write(pieces: Iterable[bytes], raw: bool):
    """Print bytes as they come: as they are, or as text in which only line breaks and tabs are obeyed."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    sys.stdout.reconfigure(errors="backslashreplace")
    try:
        for piece in pieces:
            if raw:
                sys.stdout.buffer.write(piece)
            else:
                print(*(c if c in "\n\t" else console.one_line(c) for c in decoder.decode(piece)), sep="", end="")
            sys.stdout.flush()
    finally:
        print(decoder.decode(b"", final=True), flush=True)


def complete(model: Spider, state: DecodingState, prompt: bytes, generate: Callable, sampling: Sampling):
    """Print texts that continue a prompt, drawn together: the first as it comes, the others after it."""
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
        write(first() if number == 1 else [prompt, bytes(text)], sampling.raw)


def converse(model: Spider, state: DecodingState, generate: Callable, sampling: Sampling):
    """Hold a dialogue: lines from the terminal and what the model writes after them are one text for the state.
    What is typed begins on a line of its own; after the model's EOS it begins a document."""
    with suppress(ImportError):
        import readline  # noqa: F401     # lines can be edited then
    sys.stdin.reconfigure(errors="surrogateescape")
    unread = None                         # what the state has yet to read of the turn before
    while (typed := ask()) is not None:
        typed = os.fsencode(typed)
        if unread is None:
            ids = beginning(typed)
        else:
            in_line = typed and unread not in ([EOS_ID, BOS_ID], [ord("\n")])
            ids = unread + list(b"\n" if in_line else b"") + list(typed)
        logits, written = read(model, state, ids), []

        def turn() -> Iterator[bytes]:
            for byte, in generate(logits, state):
                written.append(byte)
                yield bytes([byte])
                if asked:
                    return
        with interrupts_that_wait() as asked:
            write(turn(), sampling.raw)
        ended = len(written) < sampling.bytes and not asked
        unread = [EOS_ID, BOS_ID] if ended else written[-1:]


def ask() -> str | None:
    """Read the lines of a turn, without the last one's break; None at the end of input."""
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
    """Let Ctrl-C inside only fill the list: a state of which half is a byte ahead would be of no use."""
    asked = []
    before = signal.signal(signal.SIGINT, lambda *_: asked.append(True))
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


def talk(name: str, n_loops: list[int] | None, prompt: str | None, sampling: Sampling, device: torch.device):
    """Continue a prompt, or hold a dialogue where there is none and both ends are a terminal."""
    text = bytes_to_continue(prompt)
    if text is None and sampling.samples > 1:
        raise UsageError("--samples: a dialogue has one voice; give a --prompt")
    path, content = read_checkpoint(name)
    loops = one_number(n_loops, trained_loops(content))
    model, generator = decoder_of(content, device), torch.Generator(device)
    state = model.decoding_state(n_loops=loops)
    generator.manual_seed(sampling.seed)

    def generate(logits: Tensor, state: DecodingState) -> Iterator[list[int | None]]:
        return model.generate_batch(logits, state, sampling.bytes, sampling.temperature, sampling.top_k, sampling.top_p,
                                    generator)
    if text is None:
        print(console.one_line(f"{path}, step {content.get('step', 0)}. Type a line for it to continue, an empty one "
                               f"for more. Ctrl-C stops it, Ctrl-D ends."))
        converse(model, state, generate, sampling)
    else:
        complete(model, state, text, generate, sampling)


# ---------------------------------------------------------------------------------------------------------------------
# Measuring


def windows(stream: shards.Stream, seq_len: int, batch: int) -> tuple[Iterator[tuple[Tensor, Tensor]], int]:
    """Cut a stream into batches (ids, labels) [n, seq_len] in which every byte but the first id is a label once; return
    them and the number of ids in all. Windows overlap by half, and what lies in two counts in the first."""
    last, stride = len(stream) - 1, max(1, seq_len // 2)
    starts = np.arange(0, max(1, last - seq_len + stride), stride)

    def batches():
        for start in np.split(starts, range(batch, len(starts), batch)):
            ids, labels = loader.cut_rows(stream, start, np.minimum(start + seq_len, last), seq_len)
            labels[torch.from_numpy(start > 0), :seq_len - stride] = -100
            yield ids, labels.masked_fill_(labels > 255, -100)
    return batches(), len(starts) * seq_len


def score(model: Spider, file: str, text: shards.Stream | list[shards.Source], seq_len: int, eval_tokens: int,
          batch: int, n_loops: int, device: torch.device) -> tuple[int, float]:
    """Return how many bytes were predicted and the bits for each; of prepared sources, the trainer's own figure.

    DataError where there is no byte to predict, FloatingPointError where a loss is no finite number."""
    if isinstance(text, list):
        sets = loader.validation_sets(text, seq_len, eval_tokens)
        count = sum(int((labels != -100).sum()) for _, labels in sets.values())
        bits = evaluate(model, sets, batch, n_loops, device)["val_bpb"]
    else:
        batches, size = windows(text, min(seq_len, max(2, len(text) - 1)), batch) if len(text) > 1 else ((), 0)
        nats, count, rate = cross_entropy(model, batches, size, n_loops, device)
        bits = nats / math.log(2)
        logger.info(f"{file}: {bits:.4f} bits per byte with --n_loops {n_loops}, {rate:.2f} bytes per segment")
    if not count:
        raise errors.DataError(f"{file}: no byte in there")
    if not math.isfinite(bits):
        raise FloatingPointError("the model's loss is not a finite number: its weights are ruined")
    return count, bits


def read_texts(names: list[str], field: str) -> dict[str, shards.Stream | list[shards.Source]]:
    """Open texts by name: a directory of shards as sources, any other file as a stream."""
    texts = {}
    for file in names:
        texts[file] = shards.open_data(file) if os.path.isdir(file) else readers.read_stream(file, field)
        if isinstance(texts[file], list):
            shards.check(texts[file])
    return texts


def measure(names: list[str], texts: dict, n_loops: list[int] | None, seq_len: int | None, batch: int | None,
            precision: str, device: torch.device) -> list[dict]:
    """Return the bits per byte of each text under each checkpoint and number of loops; None: as the run had it."""
    found, bf16 = [], precision == "bf16" or precision == "auto" and multiplies_bf16(device)
    if device.type == "cpu":
        keep_freed_memory()
    for name in names:
        path, state = read_checkpoint(name)
        model = model_of(state, device, torch.bfloat16 if bf16 else torch.float32)
        length = seq_len or flag_of(state, "seq_len")
        for file, text in texts.items():
            for loops in n_loops or [trained_loops(state)]:
                count, bits = score(model, file, text, length, flag_of(state, "eval_tokens"),
                                    batch or max(1, EVAL_BYTES // length), loops, device)
                found.append(dict(checkpoint=str(path), file=file, bytes=count, n_loops=loops, bits_per_byte=bits,
                                  seq_len=length, precision="bf16" if bf16 else "fp32"))
    return found


def check_json(path: str):
    """Raise UsageError where --json cannot be written: before minutes of work, not after them."""
    if not Path(path).parent.is_dir():
        raise UsageError(f"--json: {path}: No such file or directory: make its directory first")
    if not files.is_replaceable(Path(path)):
        raise UsageError(f"--json: {path}: no regular file: name another")


def write_json(path: str, found: list[dict]):
    with files.naming(path), files.durable(Path(path)) as out:
        out.write(json.dumps(found, indent=1, allow_nan=False) + "\n")


def print_table(found: list[dict]):
    """Print bits per byte, a line for each checkpoint and text, a column for each number of loops."""
    loops = list(dict.fromkeys(entry["n_loops"] for entry in found))
    lines = [["checkpoint", "file", "bytes", *(f"{n} loop{'s' * (n > 1)}" for n in loops)]]
    for checkpoint, file, count in dict.fromkeys(
            (entry["checkpoint"], entry["file"], entry["bytes"]) for entry in found):
        bits = {entry["n_loops"]: f"{entry['bits_per_byte']:.4f}" for entry in found
                if (entry["checkpoint"], entry["file"]) == (checkpoint, file)}
        lines.append([console.one_line(checkpoint), console.one_line(file), f"{count:,}",
                      *(bits.get(n, "") for n in loops)])
    widths = [max(map(len, column)) for column in zip(*lines)]
    with console.tolerate_closed_stdout():
        for line in lines:
            print("  ".join(part.ljust(width) if i < 2 else part.rjust(width)
                            for i, (part, width) in enumerate(zip(line, widths))))


# ---------------------------------------------------------------------------------------------------------------------
# The command line

# What reads which flags. One that is given and would not be read is refused.
READ_BY = {
    "talking": {"best", "n_loops", "device", "prompt", "bytes", "temperature", "top_k", "top_p", "samples", "seed",
                "raw"},
    "--eval": {"best", "n_loops", "device", "json", "field", "seq_len", "batch", "precision"},
    "--show": {"best", "n_loops", "device", "html"},
    "--export": {"best"},
    "--convert": {"best"},
}


def each(parse: Callable) -> Callable:
    return lambda text: [parse(part) for part in text.split(",")]


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="sample.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="*", type=path_name, help="a file, or a directory (checkpoints)")
    parser.add_argument("--best", action="store_true", help="of a directory not the newest checkpoint, but the one of "
                        "the lowest validation loss (train.py --keep_best)")
    parser.add_argument("--n_loops", type=each(integer(1, MAX_LOOPS)), metavar="N,...",
                        help="loops of the core (as trained); several for --eval")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    group = parser.add_argument_group("talking")
    group.add_argument("--prompt", help="text to continue; without it standard input, in a terminal a dialogue")
    group.add_argument("--bytes", type=integer(1), default=500, help="most bytes to write (500)")
    group.add_argument("--temperature", type=real(0), default=0.8, help="0: always the likeliest byte (0.8)")
    group.add_argument("--top_k", type=integer(1), help="draw from the k likeliest bytes only")
    group.add_argument("--top_p", type=real(0, 1, open_low=True),
                       help="draw from the likeliest bytes only that together have the probability p")
    group.add_argument("--samples", type=integer(1, 1 << 16), default=1, help="texts of one prompt (1)")
    group.add_argument("--seed", type=integer(0), default=0, help="of the draws (0)")
    group.add_argument("--raw", action="store_true", help="print bytes as they are, although a terminal may obey some")
    group = parser.add_argument_group("measuring")
    group.add_argument("--eval", nargs="+", type=path_name, metavar="FILE",
                       help="texts, or directories of shards; several CHECKPOINTs")
    group.add_argument("--json", type=path_name, metavar="OUT", help="the figures into a file, too")
    group.add_argument("--field", default="text", help="JSON field or parquet column with the text (text)")
    group.add_argument("--seq_len", type=integer(2, 1 << 24), help="bytes that the model sees (as trained)")
    group.add_argument("--batch", type=integer(1, 1 << 20),
                       help=f"sequences at a time ({EVAL_BYTES:,} bytes); changes no figure")
    group.add_argument("--precision", default="auto", choices=("auto", "bf16", "fp32"),
                       help="of the products; auto: bf16 where the hardware has it, as in training")
    group = parser.add_argument_group("looking inside")
    group.add_argument("--show", metavar="FILE|TEXT", help="show how the model reads a text, here and in a page: a "
                       f"file, - (stdin) or the text itself; of it the first {reading.LONGEST} bytes")
    group.add_argument("--html", type=path_name, metavar="OUT",
                       help="where --show writes the page (look.html beside the checkpoint)")
    group = parser.add_argument_group("exporting")
    group.add_argument("--export", type=path_name, metavar="DIR",
                       help="write what Hugging Face's libraries load into a new directory")
    group.add_argument("--convert", type=path_name, metavar="DST",
                       help="write the checkpoint in its other form: DST.pt is one "
                       "file, any other DST a sharded directory")
    defaults = vars(parser.parse_args([]))
    args = parser.parse_args(argv, argparse.Namespace(**dict.fromkeys(defaults)))
    given = [name for name, value in vars(args).items() if value is not None]
    refuse_unread(given)
    args = argparse.Namespace(**defaults | {name: getattr(args, name) for name in given})
    args.checkpoint = args.checkpoint or ["checkpoints"]
    if args.best:
        args.checkpoint = [best_of(name) for name in args.checkpoint]
    return args


def refuse_unread(given: Iterable[str]):
    """Raise UsageError for flags of which one would be ignored in silence."""
    acts = [f"--{name}" for name in given if f"--{name}" in READ_BY] or ["talking"]
    if len(acts) > 1:
        raise UsageError(f"{' and '.join(acts)}: one at a time")
    for name in given:
        readers = [act for act, flags in READ_BY.items() if name in flags]
        if readers and acts[0] not in readers:
            raise UsageError(f"--{name} goes with {' or '.join(readers)}, not with {acts[0]}")


def main(argv: list[str] | None = None) -> int:
    """Run one command; return its exit status: 0, also where nobody reads its output any more; 2 with one line on
    stderr; 130 when interrupted."""
    start_log()
    try:
        args = parse_args(argv)
        names = [best_of(name) for name in args.checkpoint] if args.best else args.checkpoint
        if args.convert is not None:
            source = path_of(one_checkpoint(names))[0]
            step = convert(source, Path(args.convert))
            print(console.one_line(f"{args.convert}: step {step}, as {source} has it"))
            return 0
        if args.export is not None:
            export(*read_checkpoint(one_checkpoint(names)), args.export)
            return 0
        device = resolve_device(args.device)
        if args.eval:
            if args.json:
                check_json(args.json)
            texts = read_texts(args.eval, args.field)
            found = measure(names, texts, args.n_loops, args.seq_len, args.batch, args.precision, device)
            print_table(found)
            if args.json:
                write_json(args.json, found)
        elif args.show is not None:
            model, trained = load_model(name := one_checkpoint(names), device)
            page.show(model, one_number(args.n_loops, trained), args.show, Path(name), args.html)
        else:
            sampling = Sampling(**{field.name: getattr(args, field.name) for field in fields(Sampling)})
            talk(one_checkpoint(names), args.n_loops, args.prompt, sampling, device)
    except KeyboardInterrupt:
        return 130
    except (CheckpointError, UsageError, errors.DataError, FloatingPointError, OSError) as fault:
        if isinstance(fault, OSError):    # of standard output: what is left to flush goes nowhere
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(fault, BrokenPipeError):
            print(f"sample.py: error: {console.one_line(fault)}", file=sys.stderr)
            return 2
    except (MemoryError, RuntimeError) as fault:
        if not is_out_of_memory(fault):
            raise
        remedy = "lower --batch or --seq_len" if args.eval else "it takes a machine with more of it" if (
            args.show or args.export) else f"lower --samples (now {args.samples}) or --bytes"
        print(f"sample.py: error: out of memory: {remedy}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Talk to a checkpoint, evaluate it, look inside, export it.

    python sample.py    # a dialogue with the newest run in checkpoints/ or below
    python sample.py checkpoints/play --prompt "ROMEO:"    # continue a text
    python sample.py checkpoints/spider-step750.pt --prompt "ROMEO:" --bytes 500 --samples 3
    head -c 2000 play.txt | python sample.py checkpoints/play --bytes 200
    python sample.py checkpoints/play --prompt "ROMEO:" --no_echo --stop $'\\n\\n'  # a paragraph
    python sample.py checkpoints/play --best --prompt O    # with the lowest validation loss
    python sample.py checkpoints/play --show play.txt      # segments, loops, surprise of a text
    python sample.py checkpoints/play --export DIR         # for Hugging Face's libraries
    python sample.py checkpoints/a checkpoints/b --eval data play.txt --json figures.json
    python sample.py checkpoints/play --eval play.txt --adapt    # learn from what was read

Without --prompt, the model continues standard input. In a terminal this is a dialogue: the model
continues each line that you type, with the whole dialogue as context. An empty line lets the model
continue its own text; a backslash at the end of a line continues your input on the next line.
Ctrl-C stops the model, Ctrl-D ends the dialogue.

The output is the prompt and its continuation as text, in files and pipes too: control characters
become escapes such as \\x1b, invalid UTF-8 becomes U+FFFD. --no_echo leaves out the prompt. --raw
prints the bytes unchanged, and a line break after each sample.

--stop ends a sample before a text, which is not printed. In a dialogue the text stays in the
context, and the next input follows it directly.

--eval prints bits per byte, and bits per character if these differ.

    directory of shards   the validation data as training evaluates it (val_bpb); BOS and EOS count
    file                  every byte, the first byte of a document from BOS; only bytes count

Each record of .jsonl, .json and a table is a document, as is each document in a .bin shard; any
other file is one document. Windows of --seq_len bytes advance by half a window, so each byte has at
least half a window of context, or all of its document so far.
"""

from spider.threads import start_script

if __name__ == "__main__":
    start_script("sample.py")  # before torch is imported

import argparse
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import torch

from data import Source, map_shard, open_source
from spider.config import RANGES, SEQ_LEN, SpiderConfig
from spider.data.inputs import uncompressed_name, with_filename
from spider.data.prepare import FORMATS, Documents, Input, ShardWriter
from spider.data.stream import Stream
from spider.errors import DataError, UsageError, one_line, print_line, raise_on_signals, run_command
from spider.files import atomic_write
from spider.flags import Parser, integer, path_name, real, refuse_url
from spider.inference import export, look, sampling
from spider.inference.adapt import DynamicEvaluation, count_characters, score_windows
from spider.inference.load import decoder_of, find_best, model_of, read_checkpoint
from spider.machine import (
    keep_freed_memory,
    memory_advice,
    resolve_device,
    resolve_precision,
    start_log,
)
from spider.training.scoring import EVAL_BYTES, Totals
from spider_model import Spider

# --------------------------------------------------------------------------------------------------
# The command line


def loop_counts(text: str) -> list[int]:
    return [integer(*RANGES["n_loops"])(part) for part in text.split(",")]


def stop_text(text: str) -> bytes:
    if not text:
        raise argparse.ArgumentTypeError("an empty text would end every sample at once")
    return os.fsencode(text)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line. Raise UsageError for a bad value, or a flag that the command would
    not read."""
    parser = Parser(prog="sample.py", description=__doc__)
    add_commands(parser)
    add_talking_flags(parser)
    add_eval_flags(parser)
    parser.add_argument_group("with --show").add_argument(
        "--html",
        type=path_name,
        metavar="OUT",
        help="path of the page (default: look.html next to the checkpoint)",
    )
    args = parser.parse_args(argv)
    refuse_unread_flags(parser, args)
    return args


def add_commands(parser: Parser):
    """Add the checkpoint, the flags that most commands read, and the commands."""
    add = parser.add_argument
    add(
        "checkpoint",
        nargs="*",
        type=path_name,
        default=[""],
        help="a file, an export or the directory of a run (default: the newest in checkpoints/)",
    )
    add(
        "--best",
        action="store_true",
        help="use the checkpoint of a directory that has the lowest validation loss",
    )
    add(
        "--n_loops",
        type=loop_counts,
        metavar="N,...",
        help="loops of the core (default: as trained); --eval takes several numbers",
    )
    add("--device", default="auto", choices=("auto", "cpu", "cuda"))
    commands = parser.add_argument_group("instead of talking").add_mutually_exclusive_group()
    add = commands.add_argument
    add(
        "--eval",
        nargs="+",
        type=path_name,
        metavar="FILE",
        help="evaluate on texts or directories of shards",
    )
    add(
        "--show",
        metavar="FILE|TEXT",
        help="analyze a text, in the terminal and as an HTML page: a file, - (stdin) or "
        "the text itself; at most its first 1 MB",
    )
    add(
        "--export",
        type=path_name,
        metavar="DIR",
        help="export to a new directory for Hugging Face's libraries",
    )


def add_talking_flags(parser: Parser):
    add = parser.add_argument_group("talking").add_argument
    add("--prompt", help="text to continue; default: standard input, or a dialogue in a terminal")
    add("--bytes", type=integer(1), default=500, help="maximum number of bytes to generate")
    add("--temperature", type=real(0), default=0.8, help="sampling temperature; 0 is greedy")
    add("--top_k", type=integer(1), help="sample only from the k most likely bytes")
    add(
        "--top_p",
        type=real(0, 1, above=True),
        help="sample only from the most likely bytes, of total probability p",
    )
    add(
        "--no_repeat_ngram_size",
        type=integer(0),
        default=64,
        metavar="N",
        help="never write a sequence of N bytes twice, which ends endless repetition; 0: off",
    )
    add("--samples", type=integer(1, 1 << 16), default=1, help="number of samples per prompt")
    add("--seed", type=integer(0), default=0, help="seed of the samples")
    add(
        "--stop",
        action="append",
        type=stop_text,
        default=[],
        metavar="TEXT",
        help="end a sample before TEXT, which is not printed; may be repeated",
    )
    add("--no_echo", action="store_true", help="print only the continuation, not the prompt")
    add(
        "--raw",
        action="store_true",
        help="print bytes unchanged, including terminal control sequences",
    )


def add_eval_flags(parser: Parser):
    add = parser.add_argument_group("with --eval").add_argument
    add("--json", type=path_name, metavar="OUT", help="also write the results to a file")
    add("--field", default="text", help="JSON field with the text")
    add(
        "--seq_len",
        type=integer(*SEQ_LEN),
        help="bytes per window (default: as trained; for files at least 32,768 if attention of "
        "bytes has a window, as in tiny and small)",
    )
    add(
        "--batch",
        type=integer(1),
        help="windows per batch (default: at least 8,192 bytes); does not change the results",
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


# The flags that each command reads, in addition to --best; "" is talking
FLAGS_OF_COMMAND = {
    "": "n_loops device prompt bytes temperature top_k top_p no_repeat_ngram_size samples seed "
    "stop no_echo raw",
    "eval": "n_loops device json field seq_len batch precision adapt",
    "show": "n_loops device html",
    "export": "",
}


def refuse_unread_flags(parser: Parser, args: argparse.Namespace):
    """Raise UsageError for a flag that the command would not read."""
    given = [name for name, value in vars(args).items() if value != parser.get_default(name)]
    command = next((name for name in given if name in FLAGS_OF_COMMAND), "")
    read = {"checkpoint", "best", command, *FLAGS_OF_COMMAND[command].split()}
    for name in given:
        if name in read:
            continue
        if command:
            parser.error(f"--{name} cannot be used with --{command}")
        reader = next(reader for reader, names in FLAGS_OF_COMMAND.items() if name in names.split())
        parser.error(f"--{name} needs --{reader}")
    if args.adapt and (args.seq_len or args.batch):
        parser.error("--seq_len and --batch cannot be used with --adapt, which reads in chunks")
    several = len(args.checkpoint) > 1 or len(args.n_loops or ()) > 1
    if several and command != "eval":
        parser.error(
            "only --eval takes several checkpoints or numbers of loops; use --prompt to give a text"
        )


# --------------------------------------------------------------------------------------------------
# Talking


def bytes_to_continue(prompt: str | None) -> bytes | None:
    """Return the bytes of --prompt or of standard input, which need not be UTF-8; None for a
    dialogue."""
    if prompt is not None:
        return os.fsencode(prompt)
    if sampling.in_notebook() and os.isatty(0):  # the terminal of a cell, where nobody can type
        raise UsageError("a notebook has no input for a dialogue: give --prompt")
    if os.isatty(0):
        return None if sys.stdout.isatty() else b""
    with open(0, "rb", closefd=False) as stdin:
        return stdin.read()


def talk(args: argparse.Namespace, name: str, model_class: type[Spider]):
    """Continue a prompt, or hold a dialogue if there is no prompt and stdin and stdout are a
    terminal."""
    prompt = bytes_to_continue(args.prompt)
    if prompt is None and args.samples > 1:
        raise UsageError("--samples needs a --prompt: a dialogue has a single sample")
    device = resolve_device(args.device)
    path, saved = read_checkpoint(name, model_class)
    sampler = sampling.Sampler(decoder_of(saved, device, model_class), args)
    state = sampler.model.decoding_state(n_loops=loops_of(args, saved)[0])
    if prompt is not None:
        sampling.complete(sampler, state, prompt)
        return
    print_line(
        f"{path}, step {saved['step']}. Type a line for the model to continue, or an empty line "
        f"for more text. Ctrl-C stops the model, Ctrl-D quits."
    )
    sampling.converse(sampler, state)


def loops_of(args: argparse.Namespace, saved: dict) -> list[int]:
    """Return the numbers of loops to run: --n_loops, or the number of loops in training."""
    return args.n_loops or [saved["n_loops"]]


# --------------------------------------------------------------------------------------------------
# Evaluation

Text = Stream | Source  # a file, or a prepared directory
LONG_WINDOW = 32_768  # bytes; measured in docs/results/learning.md, "Evaluation windows"


def window_length(text: Text, trained: int, config: SpiderConfig) -> int:
    """Return the default bytes of a window, for a model trained on sequences of `trained` bytes.

    A directory is evaluated as in training. In a file, longer windows find more matches; they take
    no more time if byte attention has a window."""
    if isinstance(text, Stream) and config.byte_window:
        return max(LONG_WINDOW, trained)
    return trained


def open_text(name: str, field: str) -> Text:
    """Open a directory of shards as a source, any other file as a stream of ids."""
    refuse_url(name)
    if os.path.isdir(name):
        return open_source(name, 1.0)
    if not name.endswith(".bin"):
        return read_ids(name, field)
    stream = Stream([map_shard(name)])
    stream.check(0, len(stream))
    return stream


def read_ids(name: str, field: str) -> Stream:
    """Return the ids of a text file, or of JSON or a table with a document in each record, mapped
    from a temporary file."""
    file_format = FORMATS.get(Path(uncompressed_name(name)).suffix, "document")
    documents = Documents(field, val_fraction=0.0, strict=True, binary=True)
    with tempfile.TemporaryDirectory() as directory, with_filename(directory):
        writer = ShardWriter(Path(directory), "text", sys.maxsize)
        for _, text in documents.read(Input(name, file_format), writer.folder):
            writer.write(text)
        writer.finish_shard()
        shards = [map_shard(os.path.join(directory, entry.name)) for entry in writer.entries]
    return Stream(shards)


def evaluations(
    args: argparse.Namespace, names: list[str], texts: dict[str, Text], model_class: type[Spider]
) -> Iterator[dict[str, Any]]:
    """Yield the result for each checkpoint, text and number of loops, as an entry of --json. In a
    prepared directory, BOS and EOS count as bytes and as characters. Raise DataError for a text
    without a byte to predict, and FloatingPointError for a loss that is not finite."""
    device = resolve_device(args.device)
    if device.type == "cpu":
        keep_freed_memory()
    precision = resolve_precision(args.precision, device)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    for name in names:
        path, saved = read_checkpoint(name, model_class)
        trained_seq_len = saved.get("flags", {}).get("seq_len", 2048)
        model = None
        for file, n_loops in product(texts, loops_of(args, saved)):
            if model is None or args.adapt:  # --adapt has changed the weights
                model = None  # free it before the next model is built
                model = model_of(saved, device, dtype, model_class)
            text = texts[file]
            seq_len = args.seq_len or window_length(text, trained_seq_len, model.config)
            score, characters = score_text(args, model, saved, text, seq_len, n_loops)
            if not score.targets:
                raise DataError(f"{file}: no byte to predict")
            if not math.isfinite(score.loss):
                raise FloatingPointError(
                    f"{path}: the loss is not a finite number: its weights are ruined"
                )
            yield dict(
                checkpoint=str(path),
                file=file,
                n_loops=n_loops,
                bytes=score.targets,  # predicted bytes
                characters=characters,  # in these bytes
                bits_per_byte=score.bits_per_byte,
                bits_per_character=score.bits_per_byte * score.targets / characters,
                seq_len=None if args.adapt else seq_len,
                precision=precision,
                adapt=args.adapt,
            )


def score_text(
    args: argparse.Namespace, model: Spider, saved: dict, text: Text, seq_len: int, n_loops: int
) -> tuple[Totals, int]:
    """Score the bytes of a file, or the validation rows of a prepared directory as training does.
    Also return the number of their characters."""
    batch = args.batch or max(1, EVAL_BYTES // seq_len)
    eval_tokens = saved.get("flags", {}).get("eval_tokens", 1 << 20)
    stream = text if isinstance(text, Stream) else text.val.slice(0, eval_tokens + 1)
    special = isinstance(text, Source)
    if args.adapt:
        totals = DynamicEvaluation(model, saved, n_loops).score(stream, special)
    else:
        totals = score_windows(model, stream, seq_len, batch, n_loops, special)
    return totals, count_characters(stream, special)


def evaluate_texts(args: argparse.Namespace, names: list[str], model_class: type[Spider]):
    """Print the results of checkpoints on the texts of --eval as a table, and write them to --json.
    After an error, print the results before it."""
    with atomic_write(Path(args.json)) if args.json else nullcontext() as out:
        # all texts first, so that their errors come early
        texts = {name: open_text(name, args.field) for name in args.eval}
        results = []
        try:
            for result in evaluations(args, names, texts, model_class):
                results.append(result)  # noqa: PERF402  # an error keeps those before it
        finally:
            if results:
                print_table(results)
        if out is not None:
            out.write(json.dumps(results, indent=1, allow_nan=False) + "\n")


def print_table(results: list[dict[str, Any]]):
    """Print a row per result. If characters and bytes differ, add columns for characters."""
    lines = [["checkpoint", "file", "n_loops", "bytes", "bits/byte"]]
    with_characters = any(entry["characters"] != entry["bytes"] for entry in results)
    if with_characters:
        lines[0] += ["characters", "bits/character"]
    for entry in results:
        line = [one_line(entry["checkpoint"]), one_line(entry["file"]), str(entry["n_loops"])]
        line += [f"{entry['bytes']:,}", f"{entry['bits_per_byte']:.4f}"]
        if with_characters:
            line += [f"{entry['characters']:,}", f"{entry['bits_per_character']:.4f}"]
        lines.append(line)
    widths = [len(max(column, key=len)) for column in zip(*lines, strict=True)]
    for line in lines:
        print_line("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))


# --------------------------------------------------------------------------------------------------
# main


def main(argv: list[str] | None = None, model_class: type[Spider] = Spider) -> int:
    """Run sample.py for models of a class. Return the exit status: 0, 2 after an error (one line on
    stderr), or 130 after Ctrl-C."""
    start_log()

    def command():
        args = parse_args(argv)
        names = args.checkpoint
        if args.best:
            names = [find_best(name) for name in names]
        with memory_advice(
            "lower --samples or --bytes (with --eval: --batch or --seq_len), or use a machine with "
            "more memory"
        ):
            if args.eval:
                evaluate_texts(args, names, model_class)
            elif args.export is not None:
                if model_class is not Spider:
                    raise UsageError(
                        f"--export writes Spider's own code, which cannot load a "
                        f"{model_class.__name__}"
                    )
                path, saved = read_checkpoint(names[0], model_class)
                export.write_export(path, saved, args.export)
            elif args.show is not None:
                device = resolve_device(args.device)
                path, saved = read_checkpoint(names[0], model_class)
                model = decoder_of(saved, device, model_class)
                look.show(model, loops_of(args, saved)[0], args.show, path, saved, args.html)
            else:
                talk(args, names[0], model_class)

    return run_command(command, "sample.py")


if __name__ == "__main__":
    raise_on_signals()
    sys.exit(main())

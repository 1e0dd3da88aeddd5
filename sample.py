"""Talk to a checkpoint, evaluate it, look inside, export it.

    python sample.py                                            # a dialogue with the newest one in checkpoints/
    python sample.py checkpoints/shakespeare --prompt "ROMEO:"  # continue a text with the newest one of a directory
    python sample.py checkpoints/spider-step750.pt --prompt "ROMEO:" --bytes 500 --top_k 40 --samples 3
    head -c 2000 play.txt | python sample.py checkpoints/shakespeare --bytes 200
    python sample.py checkpoints/shakespeare --show play.txt    # analyze a text: segments, loops, surprise
    python sample.py checkpoints/shakespeare --best --prompt O  # use the checkpoint with the lowest validation loss
    python sample.py checkpoints/spider-step750 --convert a.pt  # turn a sharded checkpoint into one file, or back
    python sample.py checkpoints/shakespeare --export DIR       # export for Hugging Face's libraries
    python sample.py checkpoints/a checkpoints/b --eval data held-out.txt --n_loops 1,2,4 --json figures.json
    python sample.py checkpoints/shakespeare --eval play.txt --adapt --save_adapted adapted.pt  # learn while reading

Without --prompt the model continues standard input. In a terminal this is a dialogue: the model continues each line
that you type, with the whole dialogue as context. An empty line lets it continue its own text; a backslash at the end
of a line continues the input on the next line. Ctrl-C stops the model, Ctrl-D ends the dialogue.

Output is printed as text, also to files and pipes: control characters as escapes such as \\x1b, invalid UTF-8 as
U+FFFD. --raw prints the bytes unchanged.

--eval prints bits per byte. For a directory of shards it evaluates the validation data like training (val_bpb), in
which BOS and EOS count. For a file it predicts every byte, the first one of a document from BOS; only bytes count. Each
row of .jsonl or .parquet is a document, as is each document in a .bin shard; any other file is one. .gz and .zst are
decompressed. Windows of --seq_len bytes advance by half, so each byte has at least half a window of context, or all of
its document so far.

With --adapt the model keeps learning. With --eval it learns from each chunk of the text after that was scored;
without, from the prompt or from what you type. The documents of a text share what was learned, or with --per_document
each starts with the checkpoint's weights. The checkpoint does not change; --save_adapted writes another one.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from loguru import logger

from spider import files
from spider.console import one_line, say
from spider.errors import CheckpointError, UsageError
from spider.export.directory import write_export
from spider.flags import BadValue, Parser, integer, path_name, real, run_program
from spider.inference.adaptation import Adaptation, adapted_state
from spider.inference.dialogue import Sampling, beginning, complete, converse, learn, sampler
from spider.inference.loading import (best_of, decoder_of, load_model, model_of, path_of, read_checkpoint,
                                      trained_loops)
from spider.inference.scoring import read_texts, score
from spider.inspect import page, reading
from spider.model.config import MAX_LOOPS
from spider.training.convert import check_target, convert, save
from spider.training.evaluation import EVAL_BYTES
from spider.training.machine import keep_freed_memory, memory_advice, multiplies_bf16, resolve_device, start_log
from spider_model import Spider
from train import FLAGS, RECIPES

# ---------------------------------------------------------------------------------------------------------------------
# Adapting


@dataclass(frozen=True)
class Adapting:
    """Settings of adaptation; see the flags of these names."""
    adapt: bool
    per_document: bool
    save_adapted: str | None

    def start(self, model: Spider, state: dict, n_loops: int) -> Adaptation | None:
        return Adaptation(model, state, n_loops, self.per_document) if self.adapt else None

    def save(self, state: dict, adaptation: Adaptation | None):
        if self.save_adapted:
            save(Path(self.save_adapted), adapted_state(state, adaptation))
            logger.info(f"saved {self.save_adapted}: adapted to {adaptation.count:,} bytes")


# ---------------------------------------------------------------------------------------------------------------------
# Talking


def bytes_to_continue(prompt: str | None) -> bytes | None:
    """Return the bytes of --prompt or of standard input, which need not be UTF-8; None for a dialogue."""
    if prompt is not None:
        return os.fsencode(prompt)
    if sys.stdin is None:                 # closed
        return b""
    if os.isatty(0):
        return None if sys.stdout.isatty() else b""
    with open(0, "rb", closefd=False) as stdin:
        return stdin.read()


def talk(name: str, n_loops: int | None, prompt: str | None, sampling: Sampling, adapting: Adapting,
         device: torch.device):
    """Continue a prompt, or hold a dialogue if there is none and stdin and stdout are a terminal."""
    text = bytes_to_continue(prompt)
    if text is None and sampling.samples > 1:
        raise UsageError("--samples needs a --prompt: a dialogue has a single sample")
    path, content = read_checkpoint(name, Spider)
    model = decoder_of(content, device, Spider)
    loops, generate = n_loops or trained_loops(content), sampler(model, sampling)
    state, adaptation = model.decoding_state(n_loops=loops), adapting.start(model, content, loops)
    if text is None:
        print(one_line(f"{path}, step {content.get('step', 0)}. Type a line for the model to continue, an empty one "
                       f"for more. Ctrl-C stops it, Ctrl-D quits."))
        try:
            converse(model, state, generate, sampling, adaptation)
        finally:                          # also at Ctrl-C
            adapting.save(content, adaptation)
    else:
        learn(adaptation, beginning(text), len(text))
        adapting.save(content, adaptation)
        complete(model, state, text, generate, sampling)


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation and export


def run_flag(state: dict, name: str):
    """Return the value of a flag in a checkpoint's run, by default its recipe's; raise CheckpointError for an invalid
    one."""
    flag = next(flag for flag in FLAGS if flag.name == name)
    recipe = RECIPES[state.get("recipe", "1b")]
    try:
        return flag.check(state.get("flags", {}).get(name, recipe.get(name, flag.default)))
    except BadValue as fault:
        raise CheckpointError(f"{name} of the checkpoint's run: {fault}") from None


def export(path: Path, state: dict, directory: str):
    """Export a model, after validating the flags of its run."""
    if flags := state.get("flags"):
        state = state | dict(flags=flags | {flag.name: run_flag(state, flag.name) for flag in FLAGS
                                            if flag.name in flags})
    write_export(path, state, directory, Spider)


def measure(names: list[str], texts: dict, n_loops: list[int] | None, seq_len: int | None, batch: int | None,
            precision: str, adapting: Adapting, device: torch.device) -> tuple[list[dict], Callable]:
    """Return bits per byte for each checkpoint, text and number of loops, and a function that saves what the last one
    adapted to; None stands for the run's own setting."""
    found, bf16 = [], precision == "bf16" or precision == "auto" and multiplies_bf16(device)
    if device.type == "cpu":
        keep_freed_memory()
    for name in names:
        path, state = read_checkpoint(name, Spider)
        model = adaptation = None
        length = seq_len or run_flag(state, "seq_len")
        for file, text in texts.items():
            for loops in n_loops or [trained_loops(state)]:
                if model is None or adapting.adapt:  # each figure is of the checkpoint's weights
                    model = adaptation = None
                    model = model_of(state, device, torch.bfloat16 if bf16 else torch.float32, Spider)
                adaptation = adapting.start(model, state, loops)
                count, bits = score(model, file, text, length, run_flag(state, "eval_tokens"),
                                    batch or max(1, EVAL_BYTES // length), loops, device, adaptation)
                found.append(dict(checkpoint=str(path), file=file, bytes=count, n_loops=loops, bits_per_byte=bits,
                                  seq_len=None if adapting.adapt else length, precision="bf16" if bf16 else "fp32",
                                  adapt=adapting.adapt, per_document=adapting.per_document))
    return found, lambda: adapting.save(state, adaptation)


def check_json(path: str | None):
    """Raise UsageError if --json cannot be written, before minutes of work."""
    if path and not Path(path).parent.is_dir():
        raise UsageError(f"--json: {path}: No such file or directory: create its directory first")
    if path and not files.is_replaceable(Path(path)):
        raise UsageError(f"--json: {path}: not a regular file: use another name")


def print_table(found: list[dict]):
    """Print bits per byte, a row per checkpoint and text, a column per number of loops."""
    loops = list(dict.fromkeys(entry["n_loops"] for entry in found))
    lines = [["checkpoint", "file", "bytes", *(f"{n} loop{'s' * (n > 1)}" for n in loops)]]
    for checkpoint, file, count in dict.fromkeys(
            (entry["checkpoint"], entry["file"], entry["bytes"]) for entry in found):
        bits = {entry["n_loops"]: f"{entry['bits_per_byte']:.4f}" for entry in found
                if (entry["checkpoint"], entry["file"]) == (checkpoint, file)}
        lines.append([one_line(checkpoint), one_line(file), f"{count:,}",
                      *(bits.get(n, "") for n in loops)])
    widths = [max(map(len, column)) for column in zip(*lines)]
    for line in lines:
        say("  ".join(cell.ljust(width) if i < 2 else cell.rjust(width)
                      for i, (cell, width) in enumerate(zip(line, widths))))


# ---------------------------------------------------------------------------------------------------------------------
# The command line

# The flags that each command uses; others are refused.
READ_BY = {
    "talking": {"best", "n_loops", "device", "prompt", "bytes", "temperature", "top_k", "top_p", "samples", "seed",
                "raw", "adapt", "save_adapted"},
    "--eval": {"best", "n_loops", "device", "json", "field", "seq_len", "batch", "precision", "adapt",
               "per_document", "save_adapted"},
    "--show": {"best", "n_loops", "device", "html"},
    "--export": {"best"},
    "--convert": {"best"},
}


def each(parse: Callable) -> Callable:
    return lambda text: [parse(item) for item in text.split(",")]


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="sample.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="*", type=path_name, help="a file, or a directory (checkpoints)")
    parser.add_argument("--best", action="store_true", help="use the checkpoint with the lowest validation loss of a "
                        "directory (train.py --keep_best), not the newest one")
    parser.add_argument("--n_loops", type=each(integer(1, MAX_LOOPS)), metavar="N,...",
                        help="loops of the core (as trained); several for --eval")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    group = parser.add_argument_group("talking")
    group.add_argument("--prompt", help="text to continue; default: standard input, or a dialogue in a terminal")
    group.add_argument("--bytes", type=integer(1), default=500, help="maximum number of bytes to generate (500)")
    group.add_argument("--temperature", type=real(0), default=0.8, help="sampling temperature; 0 is greedy (0.8)")
    group.add_argument("--top_k", type=integer(1), help="sample only from the k likeliest bytes")
    group.add_argument("--top_p", type=real(0, 1, open_low=True),
                       help="sample only from the likeliest bytes with total probability p")
    group.add_argument("--samples", type=integer(1, 1 << 16), default=1, help="number of samples per prompt (1)")
    group.add_argument("--seed", type=integer(0), default=0, help="seed of the samples (0)")
    group.add_argument("--raw", action="store_true", help="print bytes unchanged, including terminal control sequences")
    group = parser.add_argument_group("evaluation")
    group.add_argument("--eval", nargs="+", type=path_name, metavar="FILE",
                       help="evaluate on texts or directories of shards; allows several checkpoints")
    group.add_argument("--json", type=path_name, metavar="OUT", help="also write the results to a file")
    group.add_argument("--field", default="text", help="JSON field or parquet column with the text (text)")
    group.add_argument("--seq_len", type=integer(2, 1 << 24), help="bytes per window (as trained)")
    group.add_argument("--batch", type=integer(1, 1 << 20),
                       help=f"sequences per batch ({EVAL_BYTES:,} bytes); does not change the results")
    group.add_argument("--precision", default="auto", choices=("auto", "bf16", "fp32"),
                       help="auto: bf16 if the hardware has it, as in training")
    group = parser.add_argument_group("adaptation (with --eval, or talking)")
    group.add_argument("--adapt", action="store_true", help="let the model learn from what it reads")
    group.add_argument("--per_document", action="store_true",
                       help="with --eval: start each document with the checkpoint's weights")
    group.add_argument("--save_adapted", type=path_name, metavar="DST",
                       help="write a checkpoint of the adapted model: one file if DST ends in .pt, else sharded")
    group = parser.add_argument_group("looking inside")
    group.add_argument("--show", metavar="FILE|TEXT", help="analyze a text, in the terminal and as an HTML page: a "
                       f"file, - (stdin) or the text itself; only its first {reading.LONGEST} bytes")
    group.add_argument("--html", type=path_name, metavar="OUT",
                       help="path of the page of --show (look.html beside the checkpoint)")
    group = parser.add_argument_group("export")
    group.add_argument("--export", type=path_name, metavar="DIR",
                       help="export to a new directory for Hugging Face's libraries")
    group.add_argument("--convert", type=path_name, metavar="DST",
                       help="convert the checkpoint: to one file if DST ends in .pt, else to a sharded directory")
    defaults = vars(parser.parse_args([]))
    args = parser.parse_args(argv, argparse.Namespace(**dict.fromkeys(defaults)))
    given = [name for name, value in vars(args).items() if value is not None]
    refuse_unread(given)
    args = argparse.Namespace(**defaults | {name: getattr(args, name) for name in given})
    args.checkpoint = args.checkpoint or ["checkpoints"]
    if len(args.checkpoint) > 1 and not args.eval:
        raise UsageError(f"{args.checkpoint[1]}: only --eval allows several checkpoints")
    if args.n_loops and len(args.n_loops) > 1 and not args.eval:
        raise UsageError("--n_loops: only --eval allows several numbers")
    return args


def check_adapting(adapting: Adapting, json_path: str | None, figures: int):
    """Raise UsageError for flags of adaptation that would have no effect or no single meaning, where a command prints
    so many figures; CheckpointError if --save_adapted cannot be written, before minutes of work."""
    for name in ("per_document", "save_adapted"):
        if getattr(adapting, name) and not adapting.adapt:
            raise UsageError(f"--{name} needs --adapt")
    if adapting.save_adapted and (figures > 1 or adapting.per_document):
        raise UsageError("--save_adapted needs a single checkpoint, text and number of loops, and no --per_document")
    if adapting.save_adapted and json_path and Path(json_path).resolve() == Path(adapting.save_adapted).resolve():
        raise UsageError("--json and --save_adapted name the same file")
    if adapting.save_adapted:
        check_target(Path(adapting.save_adapted))


def refuse_unread(given: Iterable[str]):
    """Raise UsageError for a flag that the command would ignore."""
    acts = [f"--{name}" for name in given if f"--{name}" in READ_BY] or ["talking"]
    if len(acts) > 1:
        raise UsageError(f"{' and '.join(acts)}: one at a time")
    for name in {"seq_len", "batch"} & {*given} if "adapt" in given else ():
        raise UsageError(f"--{name} has no effect with --adapt, which reads in chunks of its own")
    for name in given:
        readers = [act for act, flags in READ_BY.items() if name in flags]
        if readers and acts[0] not in readers:
            raise UsageError(f"--{name} applies to {' or '.join(readers)}, not to {acts[0]}")


def main(argv: list[str] | None = None) -> int:
    """Run sample.py. Exit status: 0; 2 with one line on stderr; 130 after Ctrl-C."""
    start_log()

    def command():
        args = parse_args(argv)
        names = [best_of(name, Spider) for name in args.checkpoint] if args.best else args.checkpoint
        name, n_loops = names[0], args.n_loops and args.n_loops[0]
        adapting = Adapting(args.adapt, args.per_document, args.save_adapted)
        check_adapting(adapting, args.json, max(map(len, (names, args.eval or [""], args.n_loops or [0]))))
        advice = ("use a machine with more memory" if args.show or args.export or args.adapt else
                  "lower --batch or --seq_len" if args.eval else f"lower --samples (now {args.samples}) or --bytes")
        with memory_advice(advice):
            if args.convert is not None:
                source = path_of(name, Spider)[0]
                say(f"{args.convert}: step {convert(source, Path(args.convert))}, converted from {source}")
            elif args.export is not None:
                export(*read_checkpoint(name, Spider), args.export)
            elif args.eval:
                device = resolve_device(args.device)
                check_json(args.json)
                texts = read_texts(args.eval, args.field)
                found, save_adapted = measure(names, texts, args.n_loops, args.seq_len, args.batch, args.precision,
                                              adapting, device)
                print_table(found)
                if args.json:
                    with files.naming(args.json), files.durable(Path(args.json)) as out:
                        out.write(json.dumps(found, indent=1, allow_nan=False) + "\n")
                save_adapted()
            elif args.show is not None:
                model, trained = load_model(name, resolve_device(args.device), Spider)
                page.show(model, n_loops or trained, args.show, Path(name), args.html)
            else:
                sampling = Sampling(**{field.name: getattr(args, field.name) for field in fields(Sampling)})
                talk(name, n_loops, args.prompt, sampling, adapting, resolve_device(args.device))
    return run_program(command, "sample.py")


if __name__ == "__main__":
    sys.exit(main())

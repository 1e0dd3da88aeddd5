"""Talk to a checkpoint.

    python sample.py                                            # the newest checkpoint in checkpoints/ writes something
    python sample.py checkpoints/shakespeare --prompt "ROMEO:"  # the newest good one of a directory
    python sample.py checkpoints/spider-step750.pt --prompt "ROMEO:" --bytes 500 --temperature 0.8 --top_k 40

What the model writes is printed as text, whole characters as they come; control characters and bytes that are not UTF-8
are printed as escapes such as \\x1b, into files and pipes too. --raw prints its bytes as they are.
"""

import argparse
import codecs
import os
import sys
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import torch

import data
from checkpoint import CheckpointError, find_checkpoints, load_checkpoint
from spider_model import MAX_LOOPS, Spider, SpiderConfig
from tokenizer import BOS_ID
from train import Parser, UsageError, integer, multiplies_bf16, real, resolve_device, start_log


def load_model(name: str, device: torch.device) -> tuple[Spider, int]:
    """The model of a checkpoint, or of the newest good one in a directory, in evaluation mode and in the precision
    that is fast a byte at a time: bf16 on a GPU, fp32 on a CPU; and the loops that it was trained with."""
    path, found = Path(name), None
    if path.is_dir() or not path.exists():
        found = find_checkpoints(path)
        if not found:
            raise UsageError(f"{name}: there is no checkpoint there that can be used; name another, or train first")
        path = found[-1].path
    state = load_checkpoint(path, sealed=not found, mapped=True)
    with torch.device("meta"):
        model = Spider(SpiderConfig(**state["cfg"]))
    model.to_empty(device=device).init_weights()
    model.load_state_dict(state["model_state_dict"])
    on_gpu = device.type == "cuda"        # on a CPU a byte at a time is several times faster in fp32
    model.compute_dtype = torch.bfloat16 if on_gpu and multiplies_bf16(device) else torch.float32
    return model.eval(), state.get("n_loops", model.config.n_loops)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    def checked(parse):
        def convert(text):
            try:
                return parse(text)
            except ValueError as wanted:
                raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}") from None
        return convert
    parser = Parser(prog="sample.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", default="checkpoints", help="a file, or a directory (checkpoints)")
    parser.add_argument("--prompt", default="", help="text to go on from; without it, from a line's end")
    parser.add_argument("--bytes", type=checked(integer(1)), default=500, help="most bytes to write (500)")
    parser.add_argument("--temperature", type=checked(real(0)), default=0.8, help="0: always the likeliest byte (0.8)")
    parser.add_argument("--top_k", type=checked(integer(1)), help="draw from the k likeliest bytes only")
    parser.add_argument("--n_loops", type=checked(integer(1, MAX_LOOPS)), help="loops of the core (as trained)")
    parser.add_argument("--seed", type=checked(integer(0)), default=0, help="of the draws (0)")
    parser.add_argument("--raw", action="store_true", help="print bytes as they are, though a terminal may obey")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    return parser.parse_args(argv)


def write(parts: Iterable[bytes], raw: bool):
    """Bytes to standard output as they come: as they are, or as text in which only line breaks and tabs are obeyed."""
    decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
    sys.stdout.reconfigure(errors="backslashreplace")
    try:
        for part in parts:
            if raw:
                sys.stdout.buffer.write(part)
            else:
                print(*(c if c in "\n\t" else data.one_line(c) for c in decoder.decode(part)), sep="", end="")
            sys.stdout.flush()
    finally:
        print(decoder.decode(b"", final=True), flush=True)


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, also where nobody reads on; 2 with one line on stderr; 130 when interrupted."""
    start_log()
    try:
        args = parse_args(argv)
        device = resolve_device(args.device)
        model, n_loops = load_model(args.checkpoint, device)
        prompt = os.fsencode(args.prompt)  # the bytes that were given, also where they are not UTF-8
        generator = torch.Generator(device).manual_seed(args.seed)
        start = [BOS_ID, *prompt] if prompt else list(b"\n")  # BOS stands once in a text that is one document
        written = model.generate(start, args.bytes, args.temperature, args.top_k, generator,
                                 n_loops=n_loops if args.n_loops is None else args.n_loops)
        write(chain([prompt], (bytes([byte]) for byte in written)), args.raw)
    except KeyboardInterrupt:
        return 130
    except (CheckpointError, UsageError, FloatingPointError, OSError) as fault:
        if isinstance(fault, OSError):    # of standard output: what is left to flush goes nowhere
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(fault, BrokenPipeError):
            print(f"sample.py: error: {data.one_line(fault)}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

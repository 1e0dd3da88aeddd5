"""Talk to a checkpoint.

    python sample.py                                            # the newest checkpoint in checkpoints/ writes something
    python sample.py checkpoints/spider-step750.pt --prompt "ROMEO:" --bytes 500 --temperature 0.8 --top_k 40
"""

import argparse
import os
import sys
from pathlib import Path

import torch

from checkpoint import CheckpointError, find_checkpoints, load_checkpoint
from spider_model import Spider, SpiderConfig
from tokenizer import BOS_ID
from train import UsageError, integer, real, resolve_device, resolve_precision


def load_model(path: Path, device: torch.device) -> tuple[Spider, int]:
    """A checkpoint's model in evaluation mode, in the hardware's fast precision (FP8 apart: it is for training), and
    the loops that it was trained with."""
    state = load_checkpoint(path)
    with torch.device("meta"):
        model = Spider(SpiderConfig(**state["cfg"]))
    model.to_empty(device=device).init_weights()
    model.load_state_dict(state["model_state_dict"])
    precision = resolve_precision("auto", device)
    model.compute_dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    return model.eval(), state.get("n_loops", model.config.n_loops)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    def checked(parse):
        def convert(text):
            try:
                return parse(text)
            except ValueError as wanted:
                raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}") from None
        return convert
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", help="a file; without it the newest one in checkpoints/")
    parser.add_argument("--prompt", default="", help="text to go on from")
    parser.add_argument("--bytes", type=checked(integer(1)), default=500, help="most bytes to write (500)")
    parser.add_argument("--temperature", type=checked(real(0)), default=0.8, help="0: always the likeliest byte (0.8)")
    parser.add_argument("--top_k", type=checked(integer(1)), help="draw from the k likeliest bytes only")
    parser.add_argument("--n_loops", type=checked(integer(1)), help="loops of the core; without it as trained")
    parser.add_argument("--seed", type=checked(integer(0)), default=0, help="of the draws (0)")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        device = resolve_device(args.device)
        found = [] if args.checkpoint else find_checkpoints(Path("checkpoints"))
        if not args.checkpoint and not found:
            raise UsageError("there is no checkpoint in checkpoints/; name one, or train first")
        model, n_loops = load_model(Path(args.checkpoint) if args.checkpoint else found[-1].path, device)
    except (CheckpointError, UsageError) as fault:
        print(f"sample.py: error: {fault}", file=sys.stderr)
        return 2
    generator = torch.Generator(device).manual_seed(args.seed)
    prompt = os.fsencode(args.prompt)  # the bytes that were given, also where they are not UTF-8
    sys.stdout.buffer.write(prompt)
    try:
        for byte in model.generate([BOS_ID, *prompt], args.bytes, args.temperature, args.top_k, generator,
                                   n_loops=n_loops if args.n_loops is None else args.n_loops):
            sys.stdout.buffer.write(bytes([byte]))
            sys.stdout.buffer.flush()
    except FloatingPointError as fault:
        print(f"sample.py: error: {fault}", file=sys.stderr)
        return 2
    sys.stdout.buffer.write(b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

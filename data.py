"""Byte shards: what training reads, and the commands that make and check them.

    python data.py prepare books.txt web/ --out data      # .txt, .jsonl, .parquet, directories of them, or - for stdin
    python data.py prepare src/ --ext .py,.md --out code  # each file a document; --ext text: whatever is UTF-8
    python data.py verify data                            # sizes, checksums and ids
    python data.py show data --first 12544 --count 448    # what a run with --data_dir data read there

A shard is a headerless file of little-endian uint16 ids (tokenizer.py says which); `metadata.json` beside the shards
describes them. The shards of a split are read as one stream, in the order of their names. What sequence g of a run
holds is a pure function of (seed, g): any step, rank or restart works it out by itself, in O(1) memory. Each source
of a mixture is read to its end, in its own order, before it is read again.
"""

import argparse
import hashlib
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from spider.console import ProgressBar, one_line, say, tolerate_closed_stdout
from spider.data.loader import Loader
from spider.data.shards import MIB, Stream, check_ids, find_shards, map_shard, mock_source, open_data, printable
from spider.errors import DataError
from spider.files import naming
from spider.flags import Parser, integer, number, path_name, print_error, run_program
from tokenizer import PAD_ID

# ---------------------------------------------------------------------------------------------------------------------
# verify, show, and the command line


def verify_shard(path: str, entry: dict | None, progress: ProgressBar) -> str | None:
    """A shard's first fault, as a line."""
    try:
        stream, digest = Stream([map_shard(path, entry)]), hashlib.sha256()
        for start in range(0, len(stream), MIB):
            stop = min(start + MIB, len(stream))
            check_ids(stream, start, stop)
            if entry is not None:
                digest.update(stream.read(start, stop))
            progress.add(2 * (stop - start))
        if entry is not None and digest.hexdigest() != entry["sha256"]:
            return f"{path}: altered: its SHA-256 is not the one in metadata.json; copy or prepare it again"
    except DataError as fault:
        return str(fault)


def verify(args: argparse.Namespace) -> list[str]:
    """The faults of a directory's shards, a line each, found on all cores."""
    shards = find_shards(args.directory)
    progress = ProgressBar("verify", sum(os.path.getsize(path) for path, _, _ in shards))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        faults = [line for line in pool.map(lambda shard: verify_shard(shard[0], shard[2], progress), shards) if line]
    unlisted = sum(entry is None for _, _, entry in shards)
    if not faults:
        say(f"{args.directory}: {len(shards)} shards are sound"
            + f", {unlisted} of them by their format alone: no metadata.json lists them" * (unlisted > 0))
    return faults


def show(args: argparse.Namespace):
    """Prints sequences of a run: number, epoch of its source, source, place of the first id; that id and the labels."""
    if args.mock_data == (args.directory is not None):
        raise DataError("show takes either the run's --data_dir or its --mock_data")
    sources = [mock_source(args.seed)] if args.mock_data else open_data(args.directory)
    loader = Loader(sources, args.seq_len, args.seed)
    with tolerate_closed_stdout():
        for g in range(args.first, args.first + args.count):
            (k,), (index,) = loader._deal(np.array([g]))
            (start,), _ = loader._place(np.array([g]))
            (inputs,), (labels,) = loader.rows([g])
            print(one_line(f"{g}: epoch {index // loader.windows[k]}, {sources[k].name}, {loader.stream.where(start)}"))
            print("    " + printable([int(inputs[0]), *labels.masked_fill(labels < 0, PAD_ID).tolist()]))


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    from spider.data.prepare import FORMATS, endings, prepare  # here: only this command takes it
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="{prepare,verify,show}")
    command = commands.add_parser("prepare", help="make shards; the same command again goes on after a kill")
    command.add_argument("inputs", nargs="+", type=path_name, metavar="INPUT",
                         help="text, JSON-lines, parquet, directory, - (stdin)")
    command.add_argument("--ext", type=endings, metavar="ENDINGS", help="take the files that end so (.py,.md,.rst) or "
                         "whatever is UTF-8 (text), and no others, each as one document")
    command.add_argument("--format", choices=FORMATS, help="what standard input is (txt)")  # all else has a name
    command.add_argument("--out", dest="directory", required=True, type=path_name, metavar="DIR",
                         help="where the shards go")
    command.add_argument("--field", default="text", help="JSON field or parquet column with the text (text)")
    command.add_argument("--val_fraction", type=number, default=0.1,
                         help="part that validates, 0 <= fraction < 1 (0.1)")
    command.add_argument("--workers", type=integer(1, 1 << 10), default=os.cpu_count(), help="processes (one per core)")
    command.add_argument("--unit_mb", type=number, default=64,
                         help="MB of input per unit of work and shard (64)")
    command.set_defaults(run=prepare)
    command = commands.add_parser("verify", help="check shards against metadata.json, or else their format")
    command.add_argument("directory", type=path_name, metavar="DIR")
    command.set_defaults(run=verify)
    command = commands.add_parser("show", help="print what a run read: sequences by their number in its order")
    command.add_argument("directory", nargs="?", type=path_name, metavar="SPEC",
                         help="the run's --data_dir: a directory or a mixture")
    command.add_argument("--mock_data", action="store_true", help="the synthetic data in place of SPEC")
    command.add_argument("--seq_len", type=integer(1), default=2048, help="the run's (2048)")
    command.add_argument("--seed", type=integer(0), default=0, help="the run's (0)")
    command.add_argument("--first", type=integer(0), default=0, metavar="G", help="number of the first sequence (0)")
    command.add_argument("--count", type=integer(1), default=1, metavar="N", help="sequences to print (1)")
    command.set_defaults(run=show)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0; 2 with a line on stderr for each fault; 130 when interrupted."""
    def run() -> int:
        args = parse_args(argv)
        with naming(args.directory):
            faults = args.run(args) or []
        for fault in faults:
            print_error("data.py", f"error: {fault}")
        return 2 if faults else 0
    return run_program(run, "data.py", interrupted="error: interrupted; the same command again resumes")


if __name__ == "__main__":
    sys.exit(main())

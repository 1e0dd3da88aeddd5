"""Prepare, verify and print byte shards, the input of training.

    python data.py prepare books.txt web/ --out data      # .txt, .jsonl, .parquet, directories of them, or - for stdin
    python data.py prepare src/ --ext .py,.md --out code  # each file is a document; --ext text: all UTF-8 files
    python data.py verify data                            # check sizes, checksums and ids
    python data.py show data --first 12544 --count 448    # print sequences that a run with --data_dir data reads

A shard is a headerless file of little-endian uint16 ids (see tokenizer.py); `metadata.json` beside the shards describes
them. The shards of a split form one stream, in the order of their names. Sequence g of a run is a pure function of
(seed, g): any step, rank or restart computes it independently, in O(1) memory. Each source of a mixture is read to its
end, in its own order, before it repeats.
"""

import argparse
import hashlib
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from spider.console import ProgressBar, one_line, say, tolerate_closed_stdout
from spider.data.inputs import FORMATS, Options, endings
from spider.data.loader import Loader
from spider.data.prepare import prepare
from spider.data.shards import MIB, Stream, check_ids, find_shards, map_shard, mock_source, open_data, printable
from spider.errors import DataError
from spider.files import naming
from spider.flags import Parser, integer, path_name, print_error, real, run_program
from tokenizer import PAD_ID


def verify_shard(path: str, entry: dict | None, progress: ProgressBar) -> str | None:
    """Return a shard's first error as a line, or None."""
    try:
        stream, digest = Stream([map_shard(path, entry)]), hashlib.sha256()
        for start in range(0, len(stream), MIB):
            stop = min(start + MIB, len(stream))
            check_ids(stream, start, stop)
            if entry is not None:
                digest.update(stream.read(start, stop))
            progress.add(2 * (stop - start))
        if entry is not None and digest.hexdigest() != entry["sha256"]:
            return f"{path}: altered: its SHA-256 does not match metadata.json; copy or prepare it again"
    except DataError as fault:
        return str(fault)


def verify(directory: str) -> list[str]:
    """Check a directory's shards on all cores; return a line for each error."""
    shards = find_shards(directory)
    progress = ProgressBar("verify", sum(os.path.getsize(path) for path, _, _ in shards))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        faults = [line for line in pool.map(lambda shard: verify_shard(shard[0], shard[2], progress), shards) if line]
    unlisted = sum(entry is None for _, _, entry in shards)
    if not faults:
        say(f"{directory}: {len(shards)} shards are valid"
            + f"; {unlisted} of them are not in a metadata.json, so only their format was checked" * (unlisted > 0))
    return faults


def show(loader: Loader, names: list[str], first: int, count: int):
    """Print sequences of a run: number, epoch, source, file and byte offset of the first id, then the text."""
    with tolerate_closed_stdout():
        for g in range(first, first + count):
            k, epoch, offset = loader.describe(g)
            (inputs,), (labels,) = loader.rows([g])
            print(one_line(f"{g}: epoch {epoch}, {names[k]}, {offset}"))
            print("    " + printable([int(inputs[0]), *labels.masked_fill(labels < 0, PAD_ID).tolist()]))


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    commands = parser.add_subparsers(required=True, dest="command", metavar="{prepare,verify,show}")
    command = commands.add_parser("prepare", help="make shards from text; after a kill, the same command resumes")
    command.add_argument("inputs", nargs="+", type=path_name, metavar="INPUT",
                         help="text, JSON-lines or parquet file, directory, or - (stdin)")
    command.add_argument("--ext", type=endings, metavar="ENDINGS", help="only read files with these extensions "
                         "(.py,.md,.rst), or all UTF-8 files (text), each as one document")
    command.add_argument("--format", choices=FORMATS, help="format of standard input (txt)")
    command.add_argument("--out", dest="directory", required=True, type=path_name, metavar="DIR",
                         help="directory for the shards")
    command.add_argument("--field", default="text", metavar="NAME",
                         help="JSON field or parquet column with the text (text)")
    command.add_argument("--val_fraction", type=real(0, 1, open_high=True), default=0.1, metavar="FRACTION",
                         help="fraction for validation, of each text or of the documents (0.1)")
    command.add_argument("--workers", type=integer(1, 1 << 10), default=os.cpu_count(), metavar="N",
                         help="number of processes (one per core)")
    command.add_argument("--unit_mb", type=real(0, 1e6, open_low=True), default=64, metavar="MB",
                         help="MB of input per unit of work and shard (64)")
    command = commands.add_parser("verify", help="check shards against metadata.json, or only their format without it")
    command.add_argument("directory", type=path_name, metavar="DIR")
    command = commands.add_parser("show", help="print the sequences that a run reads, by number")
    command.add_argument("directory", nargs="?", type=path_name, metavar="SPEC",
                         help="the run's --data_dir: a directory or a mixture")
    command.add_argument("--mock_data", action="store_true", help="synthetic data instead of SPEC")
    command.add_argument("--seq_len", type=integer(1), default=2048, metavar="BYTES", help="the run's --seq_len (2048)")
    command.add_argument("--seed", type=integer(0), default=0, metavar="N", help="the run's --seed (0)")
    command.add_argument("--first", type=integer(0), default=0, metavar="G", help="number of the first sequence (0)")
    command.add_argument("--count", type=integer(1), default=1, metavar="N", help="sequences to print (1)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run a command. Exit status: 0; 2 with a line on stderr for each error; 130 after Ctrl-C."""
    def command() -> int:
        args = parse_args(argv)
        with naming(args.directory or "standard output"):
            if args.command == "prepare":
                unit_bytes = max(1, int(args.unit_mb * 1e6))
                prepare(args.inputs, Path(args.directory), args.workers,
                        Options(args.field, args.val_fraction, unit_bytes, args.ext, args.format))
            elif args.command == "show":
                if args.mock_data == (args.directory is not None):
                    raise DataError("show takes either the run's --data_dir or its --mock_data")
                sources = [mock_source(args.seed)] if args.mock_data else open_data(args.directory)
                names = [source.name for source in sources]
                show(Loader(sources, args.seq_len, args.seed), names, args.first, args.count)
            faults = verify(args.directory) if args.command == "verify" else []
        for fault in faults:
            print_error("data.py", f"error: {fault}")
        return 2 if faults else 0
    return run_program(command, "data.py", interrupted="error: interrupted; the same command again resumes")


if __name__ == "__main__":
    sys.exit(main())

"""Golden values: what five optimizer steps of small runs give, from the command line to the last
checkpoint.

    python tests/golden.py           # write what is missing or has changed (see CONTRIBUTING.md)
    python tests/golden.py --spread  # print how far this processor is from the file

Other processors are emulated by a variable before --spread: ATEN_CPU_CAPABILITY=avx2, the same with
default (no vector instructions), MKL_CBWR=COMPATIBLE (MKL's products for SSE2). ONE_UNIT_OFF=SEED
has every weight start one unit in the last place off, at random.

The rest of the suite compares the code with itself; these numbers stay when the code changes. A run
is fp32 on one thread. Its text is made here. The flags are those of table.py, and the defaults of
presets are in `recipes`.
"""

import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]  # for the script; pytest has done so

import conftest  # isort: skip  before torch is imported: one thread

import numpy as np
import pytest
import torch
from torch import Tensor

import spider_model
import train
from spider import machine
from spider.config import PRESETS
from spider.training import optim
from spider_model import Spider
from table import ROWS
from tokenizer import encode

FILE = ROOT / "tests" / "golden.json"

# --------------------------------------------------------------------------------------------------
# Runs


def words_of(column: str) -> str:
    """Return the flags of a column of the table as words of a command line."""
    values = {row.name: getattr(row, column) for row in ROWS}
    return " ".join(f"--{name} {value}" for name, value in values.items() if value != "-")


FLAGS = words_of("golden")

SMALL = ",".join(
    """
    hidden_size=32 n_prelude_layers=1 n_coda_layers=1 n_heads=2 q_lora_rank=16 kv_lora_rank=16
    qk_nope_head_dim=8 qk_rope_head_dim=8 v_head_dim=16 intermediate_size=48
    moe_intermediate_size=16 lora_rank=4 engram_heads=2 engram_rows=200 engram_dim=8
    engram_byte_rows=300 engram_byte_dim=8
    """.split()
)
TWO_LAYERS = f"{SMALL},n_recurrent_layers=2,engram_layers=1,n_routed_experts=8"

# Of `tiny` only the tables are smaller. The others have the structure of their preset in small.
TINY = "--model tiny --n_loops 1 --set engram_byte_rows=1000"
WORDS_AS_SEGMENTS = f"{TINY},boundaries=words"
SMALL_PRESET = f"--model small --n_loops 1 --set {SMALL},n_routed_experts=0"
BASE = f"--model base --n_loops 1 --set {SMALL},n_routed_experts=8"
ONE_BILLION = f"--model 1b --n_loops 2 --set {TWO_LAYERS}"
ORIGINAL = f"--model original --n_loops 2 --set {TWO_LAYERS}"

# Not adamw8bit: a rounding error that moves one of its states to the next of 256 values changes the
# update by percents.
MUON = "--optimizer muon --lr 0.01"
ADAMW = "--optimizer adamw --lr 0.004"
# Two sources, whose first epochs end after different steps; some steps are clipped, and segments
# halt in some loop.
EVERYTHING = f"--set {TWO_LAYERS},act_threshold=0.1 {words_of('everything')}"
CASES = {
    "tiny muon": f"{TINY} {MUON}",
    "words muon": f"{WORDS_AS_SEGMENTS} {MUON}",
    "1b muon": f"{ONE_BILLION} {MUON}",
    "original muon": f"{ORIGINAL} {MUON}",
    "tiny adamw": f"{TINY} {ADAMW}",
    "words adamw": f"{WORDS_AS_SEGMENTS} {ADAMW}",
    "1b adamw": f"{ONE_BILLION} {ADAMW}",
    "original adamw": f"{ORIGINAL} {ADAMW}",
    "small": f"{SMALL_PRESET} {MUON}",
    "base": f"{BASE} {ADAMW}",
    "everything": f"{EVERYTHING} {MUON}",
    # By AdamW: in a step with one segment per document, Muon makes an update of the noise in
    # attention's gradient.
    "boundaries from step 29": f"{ONE_BILLION} {ADAMW}",
    "boundaries from step 57": f"{TINY} {MUON}",
}


def class_of(case: str) -> type[Spider]:
    """Return the class of a case's model. Its learned boundaries may begin as after some steps:
    they trust their regression only from step 30 on, and fully after step 60."""
    _, _, steps = case.partition("from step ")

    class Later(Spider):
        def init_weights(self):
            super().init_weights()
            self.boundary_predictor.steps.fill_(int(steps))

    return Later if steps else Spider


WORDS = """
    the a of and in to is was it for on as with by at from his her an or which were been they you
    all one when there into can more if no out so what up said about time some could two them like
    then little river stone window morning garden letter música naïve
""".split()


def draws(seed: int) -> Iterator[int]:
    """Yield numbers of 15 bits from a linear congruential generator."""
    state = seed
    while True:
        state = (state * 1103515245 + 12345) % (1 << 31)
        yield state >> 16


def documents(count: int, seed: int) -> np.ndarray:
    """Write documents of 2 to 25 words: ids, uint16."""
    numbers = draws(seed)
    ids = []
    for _ in range(count):
        words = []
        for _ in range(2 + next(numbers) % 24):
            vocabulary = WORDS[: 1 + next(numbers) % len(WORDS)]  # the first words are frequent
            words.append(vocabulary[next(numbers) % len(vocabulary)])
        ids += encode(" ".join(words).capitalize() + ".")
    return np.array(ids, "<u2")


def write_data(directory: Path):
    """Write the shards of all runs: `data`, and the sources a and b of a mixture."""
    for name, count, seed in (("data", 30, 1), ("a", 4, 2), ("b", 2, 3)):
        (directory / name).mkdir()
        documents(count, seed).tofile(directory / name / "train-0.bin")
        documents(4, seed + 10).tofile(directory / name / "val-0.bin")


def observe(case: str, directory: Path) -> dict:
    """Run a case in an empty directory; return its `metrics`, a list over steps for each, and its
    `weights`."""
    write_data(directory)
    argv = f"{FLAGS} --data_dir data {CASES[case]} --ckpt_dir run".split()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)  # the names of a mixture's sources are among the metrics
        # Muon multiplies in fp32 everywhere.
        patch.setattr(optim, "has_bf16", lambda device: False)
        assert train.command_line(argv, class_of(case)) == 0
    state = torch.load(directory / "run" / "spider-step5.pt", weights_only=True)
    metrics = defaultdict(list)
    for line in conftest.metrics(directory / "run"):
        for name, value in line.items():
            metrics[name].append(rounded(value))
    return dict(metrics=metrics, weights=of_weights(state["model_state_dict"]))


def rounded(number: float) -> float:
    """Keep eight digits; fp32 has seven."""
    return float(f"{number:.8g}")


# --------------------------------------------------------------------------------------------------
# What is kept of weights

FAMILIES = {
    "embed_tokens": r"^embed_tokens$",
    "null_segment": r"^null_segment$",
    "prelude attention": r"^prelude\..*attention\.(q_a|q_b|kv_a|kv_b)_proj",
    "prelude o_proj": r"^prelude\..*o_proj",
    "prelude ffn": r"^prelude\..*ffn",
    "coda attention": r"^coda\..*attention",
    "coda ffn": r"^coda\..*ffn",
    "core attention": r"^core\..*attention",
    "routed experts": r"moe\.w_(gate|up|down)",
    "shared expert": r"moe\.shared",
    "router": r"router",
    "expert_bias": r"expert_bias",
    "core out_proj": r"^core\.out_proj",
    "core offset_proj": r"^core\.offset_proj",
    "loop adapters": r"^core\.lora",
    "loop_embedding": r"^core\.loop_embedding",
    "injection": r"^core\.(log_A|dt|B)$",
    "halt_predictor": r"^core\.halt_predictor",
    "segment tables": r"^core\..*engram\.table\.weight",
    "segment projections": r"^core\..*engram\.(key|value)_proj",
    "segment convolution": r"^core\..*conv_weight",
    "byte tables": r"^engram_(input|output)\.table\.weight",
    "match rows": r"^engram_(input|output)\.followed",
    "byte projections": r"^engram_(input|output)\.(proj|gate)",
    "direct logits": r"^engram_output\.logits",
    "votes": r"^engram_output\.votes",
    "boundary predictor": r"^boundary_predictor\.(regression\.)?\d",
    "pair counts": r"^boundary_predictor\.(pairs|entropy|mean_loss|steps)",
    "threshold": r"^boundary_predictor\.threshold",
    "lm_head": r"^lm_head",
}


def of_weights(state: dict[str, Tensor]) -> dict[str, list[float]]:
    """Return the norm of each family of weights, and a projection to a fixed direction, of about
    the same size."""
    kept = {}
    for family, pattern in FAMILIES.items():
        names = [name for name in sorted(state) if re.search(pattern, name)]
        if names:
            values = torch.cat([state[name].double().flatten() for name in names])
            number = torch.arange(1, len(values) + 1) * 2654435761 % (1 << 32)
            direction = number.double() / (1 << 31) - 1  # even in [-1, 1]
            kept[family] = [rounded(values.norm()), rounded(values @ direction)]
    return kept


# --------------------------------------------------------------------------------------------------
# Defaults

RECIPES = {model: f"--model {model}" for model in PRESETS} | {
    "tiny, 1,003,520 bytes": "--model tiny --target_tokens 1003520",
    "tiny, 20 steps": "--model tiny --target_tokens 81920",
}
# Flags that checkpoints record and that train nothing themselves: the runs have texts of their own,
# and the others set target_tokens and grad_accum.
UNTRAINED = {"data_dir", "mock_data", "minutes", "global_batch"}
TRAINED = [name for name in train.Flags().recorded() if name not in UNTRAINED]
TRAINED += "n_loops grad_accum max_steps max_skipped eval_every patience".split()


def observe_recipe(recipe: str) -> dict[str, dict]:
    """Return the flags and the configuration of a recipe, with memory for any micro-batch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "memory_of", lambda *_: math.inf)
        plan = conftest.resolved(*f"{RECIPES[recipe]} --recompute nothing".split())
    flags = {flag: getattr(plan.flags, flag) for flag in TRAINED}
    return dict(flags=flags, config=asdict(plan.config))


# --------------------------------------------------------------------------------------------------
# Comparison

# The largest differences between processors, by `python tests/golden.py --spread` (relative; of
# weights relative to their norm): an AMD EPYC with AVX512 (family 25, model 17), torch 2.13.0+cpu,
# against the same with AVX2 alone, with no vector instructions, with MKL's products for SSE2, and
# four times with every weight one unit in the last place off at the start.
MEASURED = {
    "losses": 2.5e-7,
    "grad_norm": 3.2e-7,
    "loss terms": 4.3e-6,
    "norms of weights": 2.5e-6,
    "projections of weights": 8.6e-5,
}
# Counts did not differ.
TOLERANCE = {kind: 4 * difference for kind, difference in MEASURED.items()} | {"counts": 1e-6}


def kind_of(metric: str) -> str:
    if re.match(r"(total_|core_|val_)?loss$|val_bpb", metric):
        return "losses"
    if metric.endswith("_loss"):
        return "loss terms"
    return "grad_norm" if metric == "grad_norm" else "counts"


def differences(expected: dict, observed: dict) -> Iterator[tuple[str, float, str]]:
    """Compare a case with what is expected; yield the kind, the difference and the place of each
    number."""
    for metric, values in expected["metrics"].items():
        observed_values = observed["metrics"].get(metric, [])
        if len(observed_values) != len(values):
            yield kind_of(metric), math.inf, metric
            continue
        for step, (a, b) in enumerate(zip(values, observed_values, strict=True), 1):
            yield kind_of(metric), abs(a - b) / max(abs(a), 1e-12), f"{metric}, step {step}"
    for family, (norm, projection) in expected["weights"].items():
        new_norm, new_projection = observed["weights"].get(family, (math.inf, math.inf))
        size = max(norm, 1e-12)
        yield "norms of weights", abs(norm - new_norm) / size, family
        yield "projections of weights", abs(projection - new_projection) / size, family


def too_large(expected: dict, observed: dict) -> list[str]:
    """Describe the differences above their tolerance, the largest first."""
    lines = []
    for kind, difference, place in differences(expected, observed):
        share = difference / TOLERANCE[kind]
        if not share <= 1:  # NaN is not
            lines.append((share, f"{place}: {difference:.1e}, tolerance {TOLERANCE[kind]:.1e}"))
    return [line for _, line in sorted(lines, reverse=True)]


# --------------------------------------------------------------------------------------------------
# The script


def product_changes(root: Path) -> list[str]:
    """Return the files outside of tests/ that differ from the last commit."""
    status = subprocess.run(
        ["git", "status", "--porcelain", "--no-renames"],
        cwd=root,
        text=True,
        capture_output=True,
        check=True,
    )
    return [line[3:] for line in status.stdout.splitlines() if not line[3:].startswith("tests/")]


def observe_all() -> Iterator[tuple[str, dict]]:
    """Yield each case and what it observes."""
    for case in CASES:
        with tempfile.TemporaryDirectory() as directory:
            yield case, observe(case, Path(directory))


def write():
    """Write the file. A case whose values are within tolerance keeps those that it has."""
    if changes := product_changes(ROOT):
        sys.exit(
            f"tests/golden.py: {', '.join(changes)} differ from the last commit: golden values "
            f"have a commit of their own, after the code that they judge (CONTRIBUTING.md)"
        )
    before = json.loads(FILE.read_text())["runs"]
    runs = {}
    for case, observed in observe_all():
        runs[case] = before.get(case, dict(metrics={}, weights={}))
        changes = too_large(runs[case], observed)
        same_names = all(
            runs[case][part].keys() == observed[part].keys() for part in ("metrics", "weights")
        )
        if changes or not same_names:
            print("; ".join([f"{case}: written", *changes[:3]]))
            runs[case] = observed
    recipes = {recipe: observe_recipe(recipe) for recipe in RECIPES}
    text = json.dumps(dict(runs=runs, recipes=recipes), indent=1)
    lists = re.compile(r"\[[^][{}]*\]")  # innermost ones, each on a line of its own
    FILE.write_text(lists.sub(lambda match: json.dumps(json.loads(match[0])), text) + "\n")


def print_spread():
    """Print the largest differences from the file by kind."""
    expected = json.loads(FILE.read_text())["runs"]
    largest = defaultdict(float)
    for case, observed in observe_all():
        for kind, difference, _ in differences(expected[case], observed):
            largest[kind] = max(largest[kind], difference)
    for kind, difference in largest.items():
        print(f"{kind}: {difference:.1e}")


def start_one_unit_off(seed: int):
    """Have initialization change every weight by -1, 0 or 1 units in the last place of fp32."""
    initialize = spider_model.init_weights

    @torch.no_grad()
    def init_weights(model: Spider):
        initialize(model)
        if not model.embed_tokens.is_meta:
            generator = torch.Generator().manual_seed(seed)
            for p in model.parameters():
                p.mul_(1 + (torch.randint(0, 3, p.shape, generator=generator) - 1) * 2.0**-23)

    spider_model.init_weights = init_weights


if __name__ == "__main__":
    conftest.do_nothing_slow()
    if "ONE_UNIT_OFF" in os.environ:
        start_one_unit_off(int(os.environ["ONE_UNIT_OFF"]))
    if "--spread" in sys.argv:
        print_spread()
    else:
        write()

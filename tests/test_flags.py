"""The flags of train.py: names, precedence of their sources, bad values."""

import math
import re
from collections import Counter
from contextlib import suppress
from dataclasses import fields
from itertools import count

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import train
from conftest import ROOT, make_shards, metrics, resolved, run
from spider.errors import UsageError
from table import ROWS
from train import Flags, parse_args

SPECS = {one.name: one.metadata for one in fields(Flags)}
CHOICES = {name: spec["choices"] for name, spec in SPECS.items() if "choices" in spec}


def parsed(*argv, **environ) -> train.CommandLine:
    return parse_args([*map(str, argv)], environ)


# --------------------------------------------------------------------------------------------------
# Names and precedence


def test_flags_of_the_original_keep_their_names_and_defaults():
    """The golden values have those of the flags that training reads."""
    defaults = dict(
        precision="auto",
        compile="auto",
        resume=None,
        reset_steps=False,
        data_dir="data",
        mock_data=False,
        ckpt_every=50,
    )
    flags = parsed().flags
    assert {name: getattr(flags, name) for name in defaults} == defaults


def test_variables_of_the_original_set_their_flags():
    names = "seq_len micro_batch grad_accum n_loops lr data_dir target_tokens ckpt_every"
    assert {*train.ENVIRONMENT} == {*names.split()}


@pytest.mark.parametrize(
    "word, flag, value",
    (
        ("--compile", "compile", "on"),
        ("--no_gradient_checkpointing", "recompute", "nothing"),
        ("--no-engram_reset", "engram_reset", False),
        ("--mock_data=false", "mock_data", False),
        ("--compile=true", "compile", "on"),
        ("--keep_best", "keep_best", True),
        ("--target_tokens=10e9", "target_tokens", 10**10),
        ("--max_steps=4611686018427387903", "max_steps", (1 << 62) - 1),
    ),
)
def test_a_short_form_sets_its_flag(word, flag, value):
    command = parsed(word)
    assert getattr(command.flags, flag) == value and command.given == {flag}


def test_precedence_is_flag_then_environment_then_config_file_then_default(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text("lr = 0.5\nmicro_batch = 3\n[optimizer]\nmin_lr_fraction = 0.3\n")
    environ = dict(SEQ_LEN="64", LR="9", MICRO_BATCH="5", N_LOOPS="")
    command = parsed("--config", file, "--lr", 0.1, **environ)
    flags = command.flags
    assert (flags.lr, flags.seq_len, flags.micro_batch, flags.min_lr_fraction) == (0.1, 64, 5, 0.3)
    assert flags.n_loops == Flags.n_loops  # an empty variable is not set
    assert command.inherited["environment"] == dict(seq_len=64, micro_batch=5)
    assert command.inherited["--config"] == dict(min_lr_fraction=0.3)


def test_an_alternative_flag_drops_those_of_lower_precedence(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text("target_tokens = 5\nglobal_batch = 64\nmock_data = true\n")
    command = parsed("--config", file, "--minutes", 7, "--grad_accum", 2, "--data_dir", "d")
    assert command.given == {"config", "minutes", "grad_accum", "data_dir"}
    assert not command.flags.mock_data
    command = parsed("--target_flops", 1, TARGET_TOKENS="5", LR="1", SEQ_LEN="7")
    assert command.given == {"target_flops", "lr", "seq_len"}
    command = parsed("--config", file, "--text", "a.txt", DATA_DIR="d")
    assert "data_dir" not in command.given and not command.flags.mock_data
    assert command.flags.data_dir == "data/a"
    file.write_text('data_dir = "d"\nkeep_best = true')
    flags = parsed("--config", file, "--mock_data=False", "--keep_best", "--keep_best=False").flags
    assert (flags.data_dir, flags.keep_best) == ("d", False)  # a switch that is off drops nothing
    with pytest.raises(UsageError, match="--target_flops: --target_tokens already sets"):
        parsed("--target_flops", 1, "--target_tokens", 5)
    for words in ("--data_dir d", "--mock_data", "--text -"):
        with pytest.raises(UsageError, match="--text: "):
            parsed("--text", "a.txt", *words.split())


@pytest.mark.parametrize(
    "argv, directory",
    (
        ("--resume a/run.pt", "checkpoints"),
        ("--mock_data --ckpt_dir mine", "mine"),
        ("--text a/.b.txt.gz", "checkpoints/b"),
        ("--text a/../b/", "checkpoints/b"),
        ("--text owner/b --reset_steps --resume c.pt", "checkpoints/b/from-c"),
        ("--reset_steps --resume checkpoints/run", "checkpoints/from-run"),
        ("--reset_steps --resume checkpoints/run.v2/", "checkpoints/from-run.v2"),
        ("--reset_steps --resume checkpoints/spider-step3.pt", "checkpoints/from-spider-step3"),
        ("--reset_steps --resume checkpoints/a/step2.pt", "checkpoints/from-a-step2"),
        ("--reset_steps --resume b/step2.pt", "checkpoints/from-b-step2"),
        ("--reset_steps --resume ../step2.pt --mock_data", "checkpoints/mock/from-step2"),
    ),
)
def test_default_directory_of_a_fine_tune_has_the_name_of_run_and_step(argv, directory):
    assert parsed(*argv.split()).flags.ckpt_dir == directory


# --------------------------------------------------------------------------------------------------
# Every flag is read


class Operations(TorchDispatchMode):
    """Count operations by name."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.counts[operation.__name__] += 1
        return operation(*args, **kwargs or {})


EFFECT = "--warmup_steps 0 --target_tokens 512 --eval_every 0"


@pytest.fixture(scope="module")
def filled_caches(tmp_path_factory):
    """Run once, since the first run of a process computes more than a later one."""
    root = tmp_path_factory.mktemp("first")
    run(root, make_shards(root / "data"), EFFECT, steps=3)


@pytest.fixture
def effect_of(argv_of, tmp_path, new_log, filled_caches):
    """Return what a run of three steps computes and logs with some flags, or how it is refused."""
    numbers = count()  # of the runs

    def effect_of(flags: str):
        ckpt = f"run{next(numbers)}"
        with Operations() as operations:
            status = train.command_line(argv_of(EFFECT, flags, steps=3, ckpt=ckpt))
        log = new_log()
        if status:
            return log.splitlines()[-1]
        steps = re.findall(r"step (\d+)/\d+  bpb ", log)
        deterministic = torch.are_deterministic_algorithms_enabled()
        return operations.counts, metrics(tmp_path / ckpt), steps, deterministic

    return effect_of


def test_every_flag_has_a_row_in_the_table():
    missing = SPECS.keys() - {row.name for row in ROWS}
    assert not missing, (
        f"{missing}: add a row to FLAGS of tests/table.py, such as `NAME - - --NAME VALUE` with a "
        f"value other than the default, or with the file of a test that fails if nothing reads it"
    )
    assert SPECS.keys() == {row.name for row in ROWS}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_flag_has_a_golden_value_or_a_file_that_tests_it(row):
    """The golden values of flags without a witness are compared with the defaults in
    test_golden.py."""
    if row.witness == "-":
        assert (row.golden, row.everything) != ("-", "-"), f"--{row.name} has no witness"
    elif not row.witness.startswith("--") and row.name not in CHOICES:
        (file,) = ROOT.glob(f"tests/**/{row.witness}.py")
        assert f"--{row.name}" in file.read_text()


BY_A_RUN = [row for row in ROWS if row.witness.startswith("--")]


@pytest.mark.parametrize("row", BY_A_RUN, ids=lambda row: row.name)
def test_a_flag_has_an_effect(row, effect_of):
    """If a flag fails here, nothing reads it, or another flag must be given for it."""
    others = re.sub(rf"--{row.name} \S+", "", row.witness)
    assert others != row.witness
    without = [effect_of(others) for _ in range(2)][-1]  # the first run fills caches
    assert effect_of(row.witness) != without


SLOW = {"compile": [pytest.mark.slow]}  # it tests the compiler


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW.get(name, ())) for name in CHOICES])
def test_each_choice_of_a_flag_has_an_effect_of_its_own(name, effect_of):
    """If a new choice fails here, nothing reads it. `auto` does what another choice does."""
    effects = {}
    for choice in CHOICES[name]:
        flag = f"--{name}={choice}"
        if choice == "auto":
            continue
        if name == "model":
            effect = resolved(flag).config
        elif name == "compile":
            effect = resolved(flag).flags.compile
        else:
            effect = effect_of(flag)
        others = [other for other in effects if effects[other] == effect]
        assert not others, f"{flag} does what {others} does"
        effects[choice] = effect


# --------------------------------------------------------------------------------------------------
# Bad values


@pytest.mark.parametrize(
    "text, fault",
    (
        ("lrr = 1", "unknown flag --lrr: the nearest is --lr"),
        ("[x]\nbatch_size = 1", "unknown flag --batch_size: use --micro_batch"),
        ("lr = 2000", "argument --lr: '2000' is not a number"),
        ('mock_data = "yes"', "--mock_data"),
        ("a = " + "[" * 100_000, ""),
        (b"\xff", ""),
        (None, "No such file"),
        ('config = "a"', "config is set already"),
        ("lr = 1\n[x]\nlr = 2", "lr is set already"),
    ),
)
def test_a_bad_config_file_is_one_line_with_its_name(tmp_path, text, fault):
    file = tmp_path / "a.toml"
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UsageError) as raised:
        parsed("--config", file)
    line = str(raised.value)
    assert line.startswith(f"--config: {file}: ") and "\n" not in line and fault in line


JUNK = ["", " ", "9" * 5000, "a\nb", "\x1b[2J", "\udcff"]
JUNK += "- -1 nan inf 1e400 0x10 2.5 \u00b2 \u0663 true 1,2 1.7e308 4e18 -- = --lr 5 0.5".split()


def test_any_value_of_any_flag_or_variable_is_taken_or_refused_by_name():
    taken = bad = 0
    for name in SPECS.keys() - {"config"}:
        for value in (*JUNK, *CHOICES.get(name, ())):
            sources = [([f"--{name}={value}"], {}, f"--{name}")]
            if name in train.ENVIRONMENT and value:
                sources.append(([], {name.upper(): value}, name.upper()))
            for argv, environ, source in sources:
                try:
                    flags = parse_args(argv, environ).flags
                except UsageError as fault:
                    bad += 1
                    assert source in str(fault), (argv, environ, str(fault))
                    continue
                taken += 1
                number = getattr(flags, name)
                assert not isinstance(number, float) or math.isfinite(number), (argv, environ)
    assert taken > 100 and bad > 500


@pytest.mark.parametrize(
    "word",
    "seq_len=1 seq_len=4e18 seq_len=2.5 micro_batch=0 lr=0 lr=nan lr=1e39 precision=fp16 model=2b "
    "keep_last=1 min_lr_fraction=1.5 beta1=1 seed=-1 n_loops=4097 minutes=0 minutes=1e10 schedule= "
    "engram_reset=yes data_dir= ckpt_dir= resume= config=".split(),
)
def test_values_out_of_range_are_refused(word):
    name = word.partition("=")[0]
    with pytest.raises(UsageError, match=f"--{name}"):
        parsed(f"--{word}")


EXTREMES = "1e300 1e18 4611686018427387903 1000 1 1e-46 5e-324 -0.0 0".split()
# or a large run
LONG = {"seq_len", "micro_batch", "grad_accum", "global_batch", "max_steps", "n_loops", "minutes"}
TEXTS = {"data_dir", "text", "ckpt_dir", "resume", "config", "set", "sample_prompt", "run"}
NUMBERS = {name for name, spec in SPECS.items() if spec["metavar"]} - LONG - TEXTS


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ("muon", "adamw"))
@pytest.mark.parametrize("name", sorted(NUMBERS))
def test_the_extremes_of_a_number_give_a_run_or_one_line(argv_of, new_log, name, optimizer):
    taken = []
    for text in EXTREMES:
        with suppress(Exception):
            taken.append((SPECS[name]["type"](text), text))
    for _, text in (min(taken), max(taken)):
        argv = argv_of(f"--optimizer {optimizer} --{name}={text}", steps=3, ckpt=text)
        status = train.command_line(argv)
        last = new_log().splitlines()[-1]
        assert status == 0 or (status == 2 and f"train.py: error: --{name}" in last), (text, last)

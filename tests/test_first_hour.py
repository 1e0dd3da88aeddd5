"""The first hour on a card: its order, what a second start runs, failures, time limits, and what it
leaves."""

import json
import os
import re
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

import bench
import sample
import train
from conftest import ROOT
from spider import first_hour
from spider.common import UsageError
from spider.first_hour import Failed, Item, Machine, Skipped, Trial

CARD = Machine("cuda", "a card", 1, "torch 2.13")


@pytest.fixture
def card(monkeypatch):
    """Pretend that there is a GPU; assign to `card.machine` what it is, or None where it is
    unusable."""

    class Card:
        machine = CARD

    def probe(device, environ):
        if Card.machine is None:
            raise UsageError("the GPU is unusable: CUDA error")
        return Card.machine

    monkeypatch.setattr(first_hour, "probe", probe)
    return Card


def start(directory: Path, *items: Item, only: str | None = None) -> int:
    return first_hour.run(directory, only, [], dict(os.environ), list(items))


def item(name: str, work=lambda trial: None, limit: float = 60.0) -> Item:
    return Item(name, f"what {name} is", limit, work)


def records(directory: Path) -> list[dict]:
    return [json.loads(line) for line in (directory / "results.jsonl").read_text().splitlines()]


def fails(trial: Trial):
    raise Failed("a reason")


def trial_in(directory: Path, machine: Machine = CARD) -> Trial:
    return Trial(directory, 60.0, machine, dict(os.environ))


# --------------------------------------------------------------------------------------------------
# Order, restart, failures


def test_files_of_tests_come_before_runs_and_measurements_come_last():
    names = [one.name for one in first_hour.plan_items(on_gpu=True)]
    assert len(names) == len(set(names))
    assert names == [one.name for one in first_hour.plan_items(on_gpu=False)]
    wanted = (
        "machine test_tile_moe test_grouped_triton test_tile_kernels test_compile eager compiled "
        "compiled_fp8 memcheck text sample short_documents two_gpus trace ceilings step step_2048 "
        "step_eager experts"
    ).split()
    assert [name for name in names if name in wanted] == wanted
    marked = {
        path.stem
        for path in ROOT.glob("tests/test_*.py")
        if re.search(r"^@pytest.mark.gpu$", path.read_text(), re.MULTILINE)
    }
    assert {name for name in names if name.startswith("test_")} == marked
    page = (ROOT / "docs/results/performance.md").read_text()
    assert [name for name in names if f"`{name}`" not in page] == []


def test_every_command_on_a_gpu_has_flags_that_its_script_takes(tmp_path, monkeypatch):
    """Those of two GPUs and of `data.py prepare` are the same on a CPU."""

    class Recorder(Trial):
        def run(self, *command, check=True, **environ):
            words = [str(word) for word in command]
            commands.append(words)
            if "--json" in words:
                Path(words[words.index("--json") + 1]).write_text('[{"bits_per_byte": 8.0}]')
            return (
                0,
                "1 passed\n### machine\n\n| what | value |\n|---|---|\n| torch.compile | passes "
                "a test |\n",
            )

        def train(self, name, *flags):
            (self.directory / name).mkdir()
            self.python("train.py", *flags, "--ckpt_dir", self.directory / name)
            trace = dict(traceEvents=[dict(cat="kernel", ts=0, dur=1)])
            (self.directory / name / "trace.json").write_text(json.dumps(trace))
            return [dict(loss=1.0, val_loss=1.0, tok_per_sec=1.0, memory=1.0)] * 300

    commands = []
    monkeypatch.setattr("shutil.which", lambda *_, **__: "/usr/bin/compute-sanitizer")
    for one in first_hour.plan_items(on_gpu=True):
        if one.name != "two_gpus":
            (tmp_path / one.name).mkdir()
            one.work(Recorder(tmp_path / one.name, one.limit, CARD, dict(os.environ)))
    scripts = set()
    for words in commands:
        position, script = next((i, word) for i, word in enumerate(words) if word.endswith(".py"))
        flags = words[position + 1 :]
        scripts.add(script)
        if script == "bench.py":
            assert {*flags[0].removeprefix("--only=").split(",")} <= bench.SECTIONS.keys()
            flags = flags[1:]
        if script in ("bench.py", "train.py"):
            assert train.parse_args(flags, {}).flags.device in ("cuda", "cpu")
        elif script == "sample.py":
            sample.parse_args(flags)
    assert {"bench.py", "train.py", "sample.py", "data.py"} <= scripts
    assert len(commands) > 25


def test_a_second_start_runs_what_has_not_passed_on_this_machine_with_these_versions(
    tmp_path, card, capsys
):
    ran = []

    def fails_once(trial):
        ran.append("b")
        if len(ran) < 3:
            raise Failed("a reason")

    def is_missing(trial):
        ran.append("c")
        raise Skipped("not installed")

    items = item("a", lambda trial: ran.append("a")), item("b", fails_once), item("c", is_missing)
    assert start(tmp_path / "new", *items) == 1 and ran == ["a", "b", "c"]
    assert start(tmp_path / "new", *items) == 0 and ran == ["a", "b", "c", "b", "c"]
    assert start(tmp_path / "new", *items, only="a") == 0 and ran[5:] == ["a"]
    card.machine = replace(CARD, versions="torch 2.14")
    assert start(tmp_path / "new", *items) == 0 and ran[6:] == ["a", "b", "c"]
    first = ["passed", "FAILED", "skipped"]
    second = ["passed", "skipped"]
    only_a = ["passed"]
    other_versions = ["passed", "passed", "skipped"]
    statuses = [record["status"] for record in records(tmp_path / "new")]
    assert statuses == [*first, *second, *only_a, *other_versions]
    capsys.readouterr()
    assert start(tmp_path / "new", items[0]) == 0
    assert "all items have passed" in capsys.readouterr().out


def test_a_failing_item_does_not_end_the_others_but_an_unusable_gpu_does(tmp_path, card, capsys):
    def breaks(trial):
        card.machine = None
        raise ValueError("two\nlines")

    ran = []
    items = item("a", fails), item("b", breaks), item("c", lambda trial: ran.append("c"))
    assert start(tmp_path / "new", *items) == 1 and not ran
    out = capsys.readouterr().out
    assert "[1/3] a: what a is; at most 1 min\n    FAILED after 0 s: a reason\n[2/3] b" in out
    assert "stopped: the GPU is unusable" in out and "| c | what c is | not run |" in out
    assert [record["reason"] for record in records(tmp_path / "new")] == [
        "a reason",
        "ValueError('two\\nlines')",
    ]
    with pytest.raises(UsageError, match="unusable"):
        start(tmp_path / "new", *items)
    card.machine = CARD
    assert start(tmp_path / "new", *items, only="c") == 1 and ran == ["c"]  # a and b still fail


def test_a_directory_of_something_else_and_unknown_items_are_refused(tmp_path, card):
    (tmp_path / "mine").write_text("x")
    with pytest.raises(UsageError, match="name a new directory"):
        start(tmp_path, item("mine"))
    with pytest.raises(UsageError, match="--only: b: not among a"):
        start(tmp_path / "new", item("a"), only="b")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.slow
def test_without_a_gpu_the_command_names_the_small_form(tmp_path, capsys):
    if bench.torch.cuda.is_available():
        pytest.skip("there is one")
    assert bench.main(["--first_hour", str(tmp_path / "new")]) == 2
    assert "--device cpu" in capsys.readouterr().err and not (tmp_path / "new").exists()


def test_variables_that_set_flags_do_not_reach_the_items(tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(first_hour, "run", lambda *arguments: given.append(arguments) or 0)
    monkeypatch.setenv("SEQ_LEN", "77")
    assert bench.main(["--first_hour", str(tmp_path), "--only=text", "--device=cpu"]) == 0
    ((directory, only, flags, environ),) = given
    assert (directory, only, flags) == (tmp_path, "text", ["--device=cpu"])
    assert "SEQ_LEN" not in environ and environ["PATH"] == os.environ["PATH"]


# --------------------------------------------------------------------------------------------------
# Processes


# It starts a child in a session of its own, as torchrun does, and both sleep.
SLEEPS = """
import pathlib, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
pathlib.Path(sys.argv[1]).touch()
time.sleep(3600)
"""


def sleep_in(trial: Trial):
    """Start both processes, and wait until they run."""
    ready = trial.directory / "ready"
    process = trial.start(sys.executable, "-c", SLEEPS, ready)
    trial.wait_until(process, ready.exists)
    assert len(trial.processes()) == 2
    return process


def test_an_item_beyond_its_limit_fails_with_stacks_in_its_log_and_leaves_no_process(
    tmp_path, card, monkeypatch, capsys
):
    trials = []

    def hangs(trial):
        process = sleep_in(trial)
        trials.append(trial)
        trial.deadline = time.monotonic() + 0.2
        trial.wait(process)

    monkeypatch.setattr(first_hour, "HEARTBEAT", 0.05)
    assert start(tmp_path / "new", item("hangs", hangs), item("works")) == 1
    assert [(record["status"], record["reason"][:8]) for record in records(tmp_path / "new")] == [
        ("FAILED", "not done"),
        ("passed", ""),
    ]
    log = (tmp_path / "new/hangs/log.txt").read_text()
    assert log.startswith("$ ") and "most recent call first" in log
    assert not trials[0].processes()
    assert re.search(r"\n    \d s: \$ /", capsys.readouterr().out)  # the log's last line


def test_a_signal_ends_the_processes_of_an_item_and_the_next_start_those_of_a_killed_one(
    tmp_path, card
):
    trials = []

    def interrupted(trial):
        trials.append(trial)
        sleep_in(trial)
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit):
        start(tmp_path / "new", item("hangs", interrupted))
    assert not trials[0].processes() and records(tmp_path / "new") == []
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    (tmp_path / "new/hangs").mkdir(exist_ok=True)
    left = trial_in(tmp_path / "new/hangs")
    sleep_in(left)
    found = []
    assert start(tmp_path / "new", item("hangs", lambda trial: found.append(left.processes()))) == 0
    assert found == [[]]


def test_a_command_that_fails_gives_its_status_and_the_line_with_the_error(tmp_path, card):
    program = "import sys; print('RuntimeError: CUDA error: x\\nhint'); sys.exit(int(sys.argv[1]))"

    def works_then_fails(trial):
        assert trial.python("-c", program, 0)[1].endswith("hint\n")
        assert trial.python("-c", program, 4, check=False)[0] == 4
        trial.figures["number"] = 12345.6
        trial.python("-c", program, 3)

    assert start(tmp_path / "new", item("a", works_then_fails)) == 1
    (record,) = records(tmp_path / "new")
    assert record["reason"] == "exit status 3: RuntimeError: CUDA error: x"
    assert len(record["commands"]) == 3
    assert "number: 12,346" in (tmp_path / "new/summary.md").read_text()


# --------------------------------------------------------------------------------------------------
# Results


def test_a_run_leaves_logs_figures_and_traces_and_no_model(tmp_path, card):
    def work(trial):
        assert [*trial.directory.iterdir()] == []  # a directory of its own, and empty
        trial.python("-c", "print('hello')")
        (trial.directory / "run").mkdir()
        for name in (
            "spider-step3.pt",
            "metrics.jsonl",
            "trace.json.gz",
            ".spider-step4.pt.ab12.tmp",
        ):
            (trial.directory / "run" / name).write_text("x")
        trial.figures |= {"loss": 1.23456, "a|b": "x"}

    for _ in range(2):
        assert start(tmp_path / "new", item("a", work), only="a") == 0
    files = {
        path.relative_to(tmp_path / "new").as_posix()
        for path in (tmp_path / "new").rglob("*")
        if path.is_file()
    }
    assert files == {
        "results.jsonl",
        "summary.md",
        "a/log.txt",
        "a/run/metrics.jsonl",
        "a/run/trace.json.gz",
    }
    assert (tmp_path / "new/a/log.txt").read_text().endswith("hello\n")
    summary = (tmp_path / "new/summary.md").read_text()
    assert "a card; torch 2.13; commit " in summary
    assert "| a | what a is | passed | 0 | loss: 1.235; a\\|b: x |" in summary
    record = records(tmp_path / "new")[-1]
    keys = "item status seconds reason figures commands machine versions commit time"
    assert record.keys() == set(keys.split())
    assert record["figures"]["loss"] == 1.23456
    assert sys.executable in record["commands"][0]


def test_tables_of_bench_are_read_back(capsys):
    bench.print_table("one", [{"what": "x", "ms": 1234.5}, {"what": "y", "error": "z"}])
    bench.print_table("two", [{"ms": 1.0}])
    print("the end")
    assert first_hour.read_tables(capsys.readouterr().out) == {
        "one": [
            {"what": "x", "ms": "1,234.500", "error": ""},
            {"what": "y", "ms": "", "error": "z"},
        ],
        "two": [{"ms": "1.000"}],
    }


class Recorded(Trial):
    """A trial whose runs of train.py have losses given by name."""

    losses = {}

    def train(self, name, *flags):
        steps = self.losses.get(name, [])
        return [
            dict(step=i + 1, loss=loss, val_loss=loss, tok_per_sec=1.0, memory=1.0)
            for i, loss in enumerate(steps)
        ]


def compared(directory: Path, here: list[float], there: list[float]) -> Trial:
    trial = Recorded(directory, 60.0, CARD, dict(os.environ), data_dir="data")
    trial.losses = dict(device=here, cpu=there)
    first_hour.compare_with_cpu(trial)
    return trial


def test_losses_on_the_gpu_must_be_those_of_the_cpu_but_for_rounding_and_a_spike(tmp_path):
    there = [3 - 0.005 * step for step in range(300)]
    noise = [(0.005 if step > 5 else 0.001) * (-1) ** step for step in range(300)]
    rounded = [loss + error for loss, error in zip(there, noise, strict=True)]
    spike = [*rounded[:100], 4.0, *rounded[101:]]
    assert compared(tmp_path, spike, there).figures["... largest"] > 1
    too_short = rounded[:299]
    wrong_second_step = [rounded[0], there[1] + 0.002, *rounded[2:]]
    shifted = [*rounded[:6], *(loss + 0.008 for loss in rounded[6:])]
    twice_the_noise = [*rounded[:6]]
    for loss, error in zip(there[6:], noise[6:], strict=True):
        twice_the_noise.append(loss + 2 * error)
    for wrong in (too_short, wrong_second_step, shifted, twice_the_noise):
        with pytest.raises(Failed):
            compared(tmp_path, wrong, there)


def test_losses_of_a_compiled_run_must_be_those_of_the_eager_one(tmp_path):
    (tmp_path / "eager/run").mkdir(parents=True)
    (tmp_path / "eager/run/metrics.jsonl").write_text('{"loss": 5.0}\n' * 3)
    for losses, passes in (([5.01] * 3, True), ([5.0, 5.0, 4.0], False)):
        trial = Recorded(tmp_path / "compiled", 60.0, CARD, dict(os.environ))
        trial.losses = dict(run=losses)
        if passes:
            first_hour.train_briefly(trial)
        else:
            with pytest.raises(Failed, match="eager"):
                first_hour.train_briefly(trial)


def test_fp8_is_skipped_on_a_gpu_that_has_none(tmp_path):
    with pytest.raises(Skipped, match="FP8"):
        first_hour.train_briefly(
            trial_in(tmp_path, replace(CARD, has_fp8=False)), "--precision=fp8"
        )


def test_a_step_without_a_finite_loss_fails_its_item(tmp_path):
    trial = trial_in(tmp_path)
    (tmp_path / "run").mkdir()
    line = dict(step=2, loss=1.0, skipped=True)
    (tmp_path / "run/metrics.jsonl").write_text(f"{json.dumps(line)}\n")
    trial.python = lambda *arguments: (0, "")
    with pytest.raises(Failed, match="step 2"):
        trial.train("run")


# --------------------------------------------------------------------------------------------------
# Everything, small


@pytest.mark.slow
def test_every_item_that_needs_no_gpu_passes_on_a_cpu(tmp_path, capfd):
    assert bench.main(["--first_hour", str(tmp_path / "new"), "--device", "cpu"]) == 0
    found = {record["item"]: record for record in records(tmp_path / "new")}
    skipped = {name for name, record in found.items() if record["status"] == "skipped"}
    assert {name for name in skipped if not name.startswith("test_")} == {"memcheck"}
    assert all(found[name]["reason"] == "needs CUDA" for name in skipped)
    assert {record["status"] for record in found.values()} == {"passed", "skipped"}
    assert found["text"]["figures"]["steps"] == 8
    assert "loss" in found["two_gpus"]["figures"]
    assert any("step of 2 x 64 bytes" in name for name in found["step"]["figures"])
    big = [
        path
        for path in (tmp_path / "new").rglob("*")
        if path.is_file() and path.stat().st_size > 20e6
    ]
    assert not big

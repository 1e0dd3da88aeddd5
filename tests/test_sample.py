"""What sample.py prints, and what it refuses, as those see it who read a terminal or a pipe."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, final_state, make_shards, run

import sample
from spider_model import Spider


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The directory of a run of three steps with a checkpoint of each."""
    root = tmp_path_factory.mktemp("trained")
    return run(root, make_shards(root / "data"), "--ckpt_every", "1", "--keep_last", "3", steps=3)


def writes(monkeypatch, content: bytes, between=lambda: None):
    """Has any model write these bytes; `between` is called before each."""
    def generate(*args, **kwargs):
        for byte in content:
            between()
            yield byte
    monkeypatch.setattr(Spider, "generate", generate)


def refusal(capsys, *argv) -> str:
    """The one line on stderr of a command that is refused with status 2 and prints nothing else."""
    assert sample.main([*map(str, argv)]) == 2
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if line.startswith("sample.py: error: ")]
    assert len(lines) == 1 and err.endswith(lines[0] + "\n") and all(line.isprintable() for line in err.splitlines())
    return lines[0]


def test_a_directory_stands_for_its_newest_checkpoint_that_is_intact(trained, tmp_path, monkeypatch, capsys):
    (tmp_path / "checkpoints").mkdir()
    for step in (1, 2, 3):
        (tmp_path / f"spider-step{step}.pt").write_bytes((trained / f"spider-step{step}.pt").read_bytes())

    def step_of(path):
        weight = sample.load_model(str(path), torch.device("cpu"))[0].lm_head.weight
        return [step for step in (1, 2, 3) if torch.equal(weight, heads[step])]
    heads = {step: torch.load(trained / f"spider-step{step}.pt")["model_state_dict"]["lm_head.weight"]
             for step in (1, 2, 3)}
    assert step_of(tmp_path / "spider-step2.pt") == [2] and step_of(tmp_path) == [3]
    os.truncate(tmp_path / "spider-step3.pt", 9000)
    assert step_of(tmp_path) == [2]
    (tmp_path / "spider-step2.pt").unlink()
    os.mkfifo(tmp_path / "spider-step2.pt")
    assert step_of(tmp_path) == [1]
    assert sample.main([str(tmp_path), "--bytes", "1"]) == 0
    assert "step2.pt is not a checkpoint that can be read safely: it is no regular" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spider-step1.pt").rename(tmp_path / "checkpoints" / "spider-step1.pt")
    assert sample.main(["--bytes", "1"]) == 0


def test_what_a_terminal_would_obey_is_escaped_unless_raw_is_asked_for(trained, monkeypatch, capsysbinary):
    content = "a\x1b]0;t\x07\r\b\x7f\x9b2J\u202e\u2028\x00 b\tc\nd é漢🕸".encode() + b"\xff\x9b\xf0\x9f"
    writes(monkeypatch, content)
    for raw in ((), ("--raw",)):
        assert sample.main([str(trained), "--prompt", "\x1b[31mp", *raw]) == 0
        out, err = capsysbinary.readouterr()
        if raw:
            assert out == b"\x1b[31mp" + content + b"\n"
        else:
            assert out.decode() == ("\\x1b[31mpa\\x1b]0;t\\x07\\r\\x08\\x7f\\x9b2J\\u202e\\u2028\\x00 b\tc\nd é漢🕸"
                                    "\\xff\\x9b\\xf0\\x9f\n")


def test_text_is_streamed_as_whole_characters(trained, monkeypatch, capsysbinary):
    seen = []
    writes(monkeypatch, "é漢🕸\n".encode() + b"\xc3x", lambda: seen.append(sys.stdout.buffer.getvalue().decode()))
    assert sample.main([str(trained)]) == 0
    assert seen == ["", "", *["é"] * 3, *["é漢"] * 4, "é漢🕸", "é漢🕸\n", "é漢🕸\n"]
    assert capsysbinary.readouterr().out.decode() == "é漢🕸\n\\xc3x\n"


def test_a_reader_that_leaves_ends_it_without_a_word_and_a_full_disk_is_a_line(trained):
    argv = [sys.executable, ROOT / "sample.py", trained, "--bytes", "100000", "--prompt", "x" * 10]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.read(1) == b"x"
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait() == 0
    with open("/dev/full", "wb") as full:
        done = subprocess.run([*argv, "--raw"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (2, "sample.py: error: [Errno 28] No space left on device\n")


def test_what_is_no_checkpoint_is_named_and_never_waited_for(trained, tmp_path, monkeypatch, capsys):
    os.mkfifo(tmp_path / "pipe.pt")
    (tmp_path / "text.pt").write_text("no checkpoint")
    (tmp_path / "empty").mkdir()
    for name, said in (("pipe.pt", "no regular file"), ("text.pt", "checksum"), ("empty", "there is no checkpoint"),
                       ("gone.pt", "there is no checkpoint"), ("a\x1b[2J\nb", "a\\x1b[2J\\nb")):
        line = refusal(capsys, tmp_path / name)
        assert said in line and (name in line or not name.isprintable())
    assert "/dev/zero" in refusal(capsys, "/dev/zero")
    assert "b\\x1b" in refusal(capsys, trained, "b\x1b")                  # argparse's own words
    assert "--n_loops" in refusal(capsys, trained, "--n_loops", "4097")
    assert "'x' is not a number" in refusal(capsys, trained, "--temperature", "x")
    monkeypatch.chdir(tmp_path)
    assert "checkpoints: there is no checkpoint there" in refusal(capsys)


@pytest.mark.parametrize("value", (math.inf, -math.inf, math.nan))
def test_one_number_that_is_not_finite_in_a_weight_is_said_or_does_no_harm(trained, tmp_path, capsys, value):
    model, _ = sample.load_model(str(trained), torch.device("cpu"))
    ruined = set()
    for name, weight in model.state_dict().items():
        if weight.is_floating_point():
            first = weight.view(-1)[0].clone()
            weight.view(-1)[0] = value
            try:
                list(model.generate([257, *b"abc def"], 3, 0.8))
            except FloatingPointError:
                ruined.add(name)
            weight.view(-1)[0] = first
    assert "lm_head.weight" in ruined and len(ruined) > 20
    state = final_state(trained)
    state["model_state_dict"]["lm_head.weight"][0, 0] = value
    torch.save(state, tmp_path / "ruined.pt")
    assert "its weights are ruined" in refusal(capsys, tmp_path / "ruined.pt")


def test_any_temperature_above_0_draws(trained):
    model, _ = sample.load_model(str(trained), torch.device("cpu"))
    for temperature in (5e-324, 1e-30, 1.0, 1e300):
        generator = torch.Generator().manual_seed(0)
        drawn = list(model.generate([257, 97], 5, temperature, generator=generator))
        assert len(drawn) <= 5 and all(0 <= byte < 256 for byte in drawn)
        if temperature < 1e-20:
            assert drawn == list(model.generate([257, 97], 5, 0))

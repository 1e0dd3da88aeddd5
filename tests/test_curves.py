"""Curves of runs: what is drawn of metrics.jsonl, at a run's end and as a command."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import train
from conftest import ROOT, make_shards, run_flags
from spider import curves
from spider.curves import draw_curves


def lines_of(steps: int, **values) -> list[dict]:
    """Lines of metrics.jsonl: a loss of 1.25 bits, an evaluation at each even step, and these
    values."""
    lines = []
    for step in range(1, steps + 1):
        line = dict(step=step, bytes_seen=100_000 * step, epoch=step // 4, loss=1.25 * math.log(2))
        if step % 2 == 0:
            line["val_bpb"] = 2 + abs(step - 6) / 10
        lines.append(line | values)
    return lines


# --------------------------------------------------------------------------------------------------
# What is drawn


def test_smoothing_does_not_shift_a_curve():
    x = np.arange(300)
    noisy = 5.0 - 0.01 * x + (-1.0) ** x
    middle, means = curves.average(x, noisy)
    assert len(middle) == len(means) == 285
    np.testing.assert_allclose(means, 5.0 - 0.01 * middle, atol=0.1)


# --------------------------------------------------------------------------------------------------
# Drawing


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draw runs; return the charts, which are not rendered."""
    figure = pytest.importorskip("matplotlib.figure").Figure

    def draw(**runs) -> list:
        figures = []
        with monkeypatch.context() as patch:
            patch.setattr(figure, "savefig", lambda figure, *_, **__: figures.append(figure))
            draw_curves(tmp_path / "out.png", [*runs.items()])
        return figures[0].axes

    return draw


def test_only_charts_with_data_are_drawn_and_one_for_each_source(drawn):
    def titles(**runs) -> list[str]:
        return [axes.get_title() for axes in drawn(**runs)]

    looped = lines_of(9, mean_loops=2.0, **{"val_bpb/a": 1.5})
    assert titles(a=lines_of(9)) == ["bits per byte"]
    assert titles(a=lines_of(9), b=looped) == [
        "bits per byte",
        "loops until halting",
        "validation of a, bits per byte",
    ]
    assert titles(a=[dict(bytes_seen=1)]) == []


def test_a_chart_marks_epochs_and_names_the_last_values_of_each_run(drawn):
    lines = lines_of(10, lr=0.125)
    loss, lr = drawn(first=lines, second=lines[:6])
    texts = [text.get_text() for text in loss.get_legend().texts]
    assert texts == [
        "first 1.25, validation 2.4, lowest 2",
        "second 1.25, validation 2, lowest 2",
    ]
    assert lr.get_legend().texts[0].get_text() == "first 0.125"
    for axes in (loss, lr):
        vertical = [line for line in axes.lines if [*line.get_ydata()] == [0, 1]]
        # after steps 3 and 7, in million bytes; in the second run after step 3
        starts = [line.get_xdata()[0] for line in vertical]
        assert starts == pytest.approx([0.3, 0.7, 0.3])


def test_an_axis_leaves_out_the_steep_beginning_of_a_loss_but_no_validation(drawn):
    lines = lines_of(100, val_bpb=1.0)
    lines[0]["loss"] = 9.0
    lines[50]["val_bpb"] = 4.0
    low, high = drawn(a=lines)[0].get_ylim()
    assert low < 1.25 and 4 < high < 5


# --------------------------------------------------------------------------------------------------
# At a run's end, and as a command


@pytest.fixture
def curves_are_drawn(monkeypatch):
    """Undo that conftest lets tests draw nothing."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(curves, "draw_curves", draw_curves)


def test_a_run_draws_its_curves_at_its_end_and_never_fails_for_them(
    tmp_path, monkeypatch, capsys, curves_are_drawn
):
    shards = make_shards(tmp_path / "data")
    directory = tmp_path / "run"
    picture = directory / "curves.png"

    def log_of_run(steps: int) -> str:
        assert train.command_line(run_flags(shards, directory, steps=steps)) == 0
        return capsys.readouterr().err

    assert "could not draw" not in log_of_run(2)
    assert picture.read_bytes().startswith(b"\x89PNG")
    picture.unlink()
    curves.write_curves(directory, signal.SIGTERM)
    assert not picture.exists()
    with monkeypatch.context() as patch:  # as if it were not installed
        for name in ("matplotlib", "matplotlib.figure"):
            patch.setitem(sys.modules, name, None)
        assert "could not draw" not in log_of_run(3)
    assert not picture.exists()
    picture.mkdir()
    assert "could not draw curves.png" in log_of_run(4)


@pytest.mark.parametrize(
    "argument, label, directory",
    (
        (".", "a", "."),
        ("../x=y", "x=y", "../x=y"),
        ("mine=../x=y", "mine", "../x=y"),
    ),
)
def test_a_directory_without_a_label_has_its_name_for_one(
    tmp_path, monkeypatch, argument, label, directory
):
    for name in ("a", "x=y"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "a")
    assert curves.labelled(argument) == (label, Path(directory))


@pytest.fixture
def metrics(tmp_path) -> Path:
    """A directory with the metrics of two steps."""
    values = {"loss": 2, "val_bpb": 1, "val_bpb/a": 1, "val_bpb/b": 2}
    lines = [dict(step=step, bytes_seen=step) | values for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_runs_that_cannot_be_drawn_are_refused_in_a_line(metrics, capsys, curves_are_drawn):
    out = metrics / "out.png"
    gone = metrics / "gone"
    for argv, error in (
        ([], "usage"),
        ([f"a={metrics}", f"b={gone}"], f"{gone}: there is no"),
    ):
        assert curves.main([str(out), *argv]) == 2 and not out.exists()
        assert capsys.readouterr().err.startswith(f"curves.py: error: {error}")
    assert curves.main([str(metrics), f"a={metrics}"]) == 2  # a directory


def test_several_runs_of_odd_names_are_drawn_without_a_warning(
    metrics, capsys, recwarn, curves_are_drawn
):
    out = metrics / "out.png"
    runs = [f"{label}={metrics}" for label in ("$\\frac$", "_", "a\x1b[2J", "漢")]
    assert curves.main([str(out), *runs]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().err == "" and not recwarn.list


@pytest.mark.slow
def test_the_backend_of_a_notebook_that_is_not_installed_does_not_matter(metrics):
    """matplotlib reads the variable when it is imported, so this needs a process of its own."""
    pytest.importorskip("matplotlib")
    out = metrics / "out.png"
    argv = [sys.executable, "-m", "spider.curves", out, metrics]
    environ = os.environ | dict(MPLBACKEND="module://matplotlib_inline.backend_inline")
    assert subprocess.run(argv, cwd=ROOT, env=environ).returncode == 0
    assert out.read_bytes().startswith(b"\x89PNG")

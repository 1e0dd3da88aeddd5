"""Curves of runs, drawn from metrics.jsonl at the end of a run and by the command."""

import json
import math
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

import train
from conftest import STOPPED, signal_in_step
from spider.errors import UsageError
from spider.training import curves
from spider.training.curves import draw_curves

figure = pytest.importorskip("matplotlib.figure")

# --------------------------------------------------------------------------------------------------
# Panels


def curves_of(**quantities) -> curves.Curves:
    """Return the curves of a run of 10,000 bytes a step."""
    return {
        key: np.array([10_000 * (1 + np.arange(len(values))), values])
        for key, values in quantities.items()
    }


@pytest.fixture
def panels(monkeypatch, tmp_path):
    """Draw runs without rendering; return the panels by title."""

    def draw(*runs: curves.Curves) -> dict:
        figures = []
        with monkeypatch.context() as patch:
            patch.setattr(figure.Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
            labels = [f"run {number}" for number in range(len(runs))]
            draw_curves(tmp_path / "out.png", labels, [*runs])
        legends = [text.get_text() for axes in figures[0].axes for text in axes.get_legend().texts]
        for label in labels:
            assert any(label in text for text in legends)
        return {axes.get_title(): axes for axes in figures[0].axes}

    return draw


def test_only_finite_metrics_are_drawn_and_losses_in_bits(tmp_path):
    assert curves.read_curves(tmp_path) == {}
    lines = [json.dumps(dict(step=n, bytes_seen=100 * n, loss=2 * n)) for n in (1, 2)]
    others = ["[1]", '{"step": 1', '{"step": 3, "bytes_seen": 300, "loss": null, "lr": null}']
    others += [f'{{"step": 4, "bytes_seen": 400, "loss": {n}}}' for n in ("NaN", "1e999", '"a"')]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines + others))
    found = curves.read_curves(tmp_path)
    assert found["bpb"].tolist() == [[100, 200], [2 / math.log(2), 4 / math.log(2)]]
    assert found.keys() == {"step", "bytes_seen", "loss", "bpb"}


def test_each_quantity_has_a_panel_scaled_without_the_first_tenth(panels):
    steps = np.arange(100)
    run = curves_of(
        bpb=np.where(steps < 10, 9.0, 2.0 + steps / 100),
        val_bpb=[2.0],
        memory=steps,
        **{"val_bpb/a": [3.0, 2.0]},
    )
    titles = ["bits per byte", "validation of a, bits per byte"]
    found = panels(run)
    assert list(found) == titles
    assert found[titles[0]].get_ylim()[1] < 3.5
    looped = curves_of(mean_loops=[2.0] * 9)
    assert list(panels(run, looped)) == [titles[0], "loops until halting", titles[1]]


def test_panel_has_a_moving_average_and_validation_as_circles(panels):
    steps = np.arange(199)
    noisy = 5.0 - 0.01 * steps + np.where(steps % 10 == 0, 1, 0)
    axes = panels(curves_of(bpb=noisy, val_bpb=[4.0, 3.0, 3.5]))["bits per byte"]
    average, circles = axes.lines
    x, y = average.get_data()
    np.testing.assert_allclose(y, 5.1 - 0.01 * (x / 10_000 - 1), atol=1e-9)  # not shifted
    assert circles.get_marker() == "o" and circles.get_ydata().tolist() == [4, 3, 3.5]


# --------------------------------------------------------------------------------------------------
# At a run's end, and as a command


@pytest.fixture
def curves_are_drawn(monkeypatch):
    """Undo the patch with which conftest skips drawing."""
    monkeypatch.setattr(curves, "draw_curves", draw_curves)


def test_run_draws_its_curves_and_never_fails_over_them(
    tmp_path, monkeypatch, train_small, new_log, curves_are_drawn
):
    """A run draws at its end and at some evaluations, here at step 2, but not after a signal."""
    monkeypatch.setattr(train, "REDRAW_SECONDS", 0.0)
    with signal_in_step(3):
        directory = train_small("--eval_every 2", status=STOPPED, steps=4)
    picture = directory / "curves.png"
    assert "curves: " not in new_log()
    assert picture.read_bytes().startswith(b"\x89PNG")
    train_small("--eval_every 9", steps=5)
    assert new_log().count(f"curves: {picture}") == 1
    picture.unlink()
    curves.write_curves(tmp_path, ends=True)  # no step to draw
    assert not (tmp_path / "curves.png").exists()
    with monkeypatch.context() as patch:  # matplotlib is not installed
        for name in ("matplotlib", "matplotlib.figure"):
            patch.setitem(sys.modules, name, None)
        train_small(steps=6)
    assert "could not draw" not in new_log()
    assert not picture.exists()
    picture.mkdir()
    train_small(steps=7)
    assert "could not draw curves.png" in new_log()


def test_runs_are_labelled_by_directory_or_by_the_command(trained, monkeypatch, in_tmp_path):
    """Characters missing from the font raise no warning."""
    for name in ("a", "x=y"):
        Path(name).symlink_to(trained)
    drawn = []

    def draw(out: Path, labels: list[str], runs: list):
        drawn.append(labels)
        draw_curves(out, labels, runs)

    monkeypatch.setattr(curves, "draw_curves", draw)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert curves.main(["out.png", "a", "x=y", "_漢=x=y"]) == 0
    assert drawn == [["a", "x=y", "_漢"]]


def test_command_without_runs_or_steps_is_refused(trained):
    for argv, error in (([], "usage"), ([str(trained), "a=gone"], "gone: there is no")):
        with pytest.raises(UsageError, match=error):
            curves.main(["out.png", *argv])

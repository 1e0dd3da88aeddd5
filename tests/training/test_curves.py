"""Curves of runs: drawn at a run's end, or several in one picture; nothing odd in metrics.jsonl stops them."""

import json
import os
import signal
import sys

import pytest
from conftest import make_shards, run, run_flags

import train
from spider import errors
from spider.inspect.page import charts
from spider.training import curves, stopping
from spider.training.curves import draw_curves


def test_lines_of_metrics_that_are_truncated_or_altered_are_skipped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert curves.read_metrics(path) == curves.read_metrics(tmp_path) == []
    good = [dict(step=step, bytes_seen=100 * step, loss=10.0 / step) for step in range(1, 1001)]
    bad = ("", "[1]", "7", '{"loss": 1}', '{"step": "<b>"}', '{"step": 1', "\xff\x00", "[" * 100_000, "1" * 5000)
    odd = '{"step": 1001, "bytes_seen": 100100, "loss": %s}'
    no_loss = (odd % value for value in ("1e999", "NaN", "null", "true", "9" * 400))
    path.write_text("\n".join([*map(json.dumps, good), *bad, *no_loss]))
    lines = curves.read_metrics(path)
    assert lines[:1000] == good and all(line == dict(step=1001, bytes_seen=100100) for line in lines[1000:])
    axis = curves.axis_of([lines])
    points = curves.curve(lines, axis, "loss", 2)
    assert axis[0] == "bytes_seen" and 200 < len(points) <= curves.POINTS
    assert points[0] == (pytest.approx(400e-6), pytest.approx(2 * (10 + 5 + 10 / 3 + 2.5) / 4))
    assert curves.axis_of([lines, [dict(step=1)]])[0] == "step"
    for values in ([1.0], [3.0] * 50, [0.0, 0.0], [-1e30, 1e30], [5.0, *[1.0] * 99]):
        low, high = curves.span([values])
        assert low < min(values) and high > sorted(values)[len(values) // 2]
        lines = [dict(step=step, lr=value) for step, value in enumerate(values)]
        [chart] = charts(lines)
        assert (chart["low"], chart["high"]) == (low, high) and "NaN" not in json.dumps(chart)


def test_one_run_off_the_scale_flattens_no_other_and_a_loss_is_smoothed_without_a_shift():
    calm = [[2.0 + 0.01 * n for n in range(100)], [2.2 + 0.01 * n for n in range(100)]]
    assert curves.span([*calm, [2.0, 500.0, 500.0]]) == curves.span(calm) == curves.span([*calm, []])
    assert curves.span([calm[0], [v * 1.5 for v in calm[0]]])[1] > 4          # which is no other scale
    points = [(n, 5.0 - 0.01 * n + (-1) ** n) for n in range(300)]
    found = curves.smoothed(points)
    assert [x for x, _ in found] == [x for x, _ in points] and found[0] == points[0]
    assert all(abs(y - (5.0 - 0.01 * x)) < 0.2 for x, y in found[8:])


def test_a_run_leaves_its_curves_however_it_ends_and_never_fails_for_them(tmp_path, monkeypatch, capsys):
    shards = make_shards(tmp_path / "data")
    picture = run(tmp_path, shards, steps=2) / "curves.png"
    assert not picture.exists()                                          # conftest's
    monkeypatch.setattr(curves, "draw_curves", draw_curves)

    def left(directory, status=0, steps=3) -> str:
        assert train.command_line(run_flags(shards, tmp_path / directory, steps=steps)) == status
        return capsys.readouterr().err
    with monkeypatch.context() as patch:                                 # as if it were not installed
        for name in ("matplotlib", "matplotlib.figure"):
            patch.setitem(sys.modules, name, None)
        assert "could not draw curves.png" not in left("without") and not (tmp_path / "without" / "curves.png").exists()
    pytest.importorskip("matplotlib")
    assert "could not draw curves.png" not in left("run") and picture.read_bytes().startswith(b"\x89PNG")
    before = picture.stat().st_mtime_ns
    with monkeypatch.context() as patch:
        def diverges(*_):
            raise errors.Diverged("as told")
        patch.setattr(stopping.Stopping, "report", diverges)
        assert "as told" in left("run", status=1, steps=4) and picture.stat().st_mtime_ns > before
    picture.unlink()
    curves.write_curves(picture.parent, signal.SIGTERM)
    assert not picture.exists()
    picture.mkdir()
    assert "could not draw curves.png" in left("run", steps=5)


def test_curves_of_several_runs_are_one_picture_and_what_is_missing_is_named(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(curves, "draw_curves", draw_curves)
    for name in "ab":
        (tmp_path / name).mkdir()
        lines = '{"step": 1, "loss": 2}\n{"step": 2, "loss": 1, "val_loss": 1}\n'
        (tmp_path / name / "metrics.jsonl").write_text(lines)
    out = tmp_path / "out.png"

    def refused(*argv):
        assert curves.main([str(out), *argv]) == 2 and not out.exists()
        return capsys.readouterr().err
    assert "LABEL=DIR" in refused() and "LABEL=DIR" in refused("a") and "LABEL=DIR" in refused("=x")
    assert "one: no metrics.jsonl, or no lines" in refused(f"two={tmp_path / 'a'}", f"one={tmp_path}")
    assert curves.main([str(out), f"a={tmp_path / 'a'}", f"b={tmp_path / 'b'}"]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")


def test_labels_are_drawn_as_they_are_and_none_is_left_out(tmp_path, monkeypatch, capsys, recwarn):
    figure = pytest.importorskip("matplotlib.figure")
    monkeypatch.setattr(curves, "draw_curves", draw_curves)
    drawn = {}

    def save(self, *args, real=figure.Figure.savefig, **kwargs):
        drawn["texts"] = [text.get_text() for text in self.axes[0].get_legend().get_texts()]
        real(self, *args, **kwargs)
    monkeypatch.setattr(figure.Figure, "savefig", save)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2, "val_bpb": 1}\n{"step": 2, "loss": 1}\n')
    labels = ["$\\frac$", "$$", "$x^{$", "$x$", "_hidden", "_", "%s {}", "\\",
              "a\nb\x1b[2J", "\udcff\u202e", "漢🕸", " "]
    assert curves.main([str(tmp_path / "o.png"), *(f"{label}={tmp_path}" for label in labels)]) == 0
    assert drawn["texts"][:1] + drawn["texts"][2:] == [*labels[:8], "a\\nb\\x1b[2J", "\\udcff\\u202e", "漢🕸", " "]
    assert drawn["texts"][1] == "validation" and capsys.readouterr().err == "" and not recwarn.list


@pytest.mark.parametrize("out", ("", ".", "/", "folder", "pipe", "x" * 300, "gone/x.png"))
def test_a_picture_that_could_go_nowhere_is_one_line(tmp_path, monkeypatch, capsys, out):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(curves, "draw_curves", draw_curves)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2}\n')
    assert curves.main([out, f"a={tmp_path}"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.startswith("curves.py: error: ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "metrics.jsonl", "pipe"]
    assert (tmp_path / "pipe").is_fifo()


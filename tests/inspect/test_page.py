"""A page shows what the model computes, and nothing in it is obeyed."""

import json
import math
import re
import shutil
import subprocess
from bisect import bisect
from pathlib import Path

import pytest
import torch
from conftest import final_state, make_shards, run
from looking import ODD, Page, data_of, model_of, show

import sample
from spider.inspect import page, reading
from spider.inspect.page import TEMPLATE
from spider.training import curves


@pytest.mark.parametrize("changes", (
    {}, dict(n_recurrent_layers=0, engram_layers=()), dict(n_routed_experts=0), dict(act=False), dict(engram_layers=()),
    dict(engram_byte_orders=()), dict(boundaries="whitespace"), dict(boundaries="every_byte"), dict(n_coda_layers=0),
    dict(engram_match_words=(1, 2))),
    ids=str)
def test_whatever_a_model_is_made_of_it_shows_what_it_has(changes, tmp_path, capsys):
    printed, content = show(model_of(**changes), ODD * 4, tmp_path, capsys)
    shown = data_of(content)
    gates = {row["name"]: row["values"] for row in shown["gates"]}
    has_core = changes.get("n_recurrent_layers") != 0
    assert ("segments end" in printed) == bool(shown["loops"]) == has_core
    assert bool(shown["load"]) == (has_core and changes.get("n_routed_experts") != 0)
    assert ("layer 2, loop 1" in gates) == (changes.get("engram_layers") is None)
    assert ("last 1 byte" in gates) == (changes.get("engram_byte_orders") is None)
    assert "last 24, in the text" in gates and "last n, in the text" in dict(shown["meanings"])
    words = changes.get("engram_match_words", ())
    assert ("word 2, in the text" in gates) == ("word n, in the text" in dict(shown["meanings"])) == bool(words)
    assert {len(values) for values in gates.values()} == {len(ODD) * 4} and shown["bytes"] == [*ODD * 4]
    assert "bits per byte" in printed and not shown["charts"]


@pytest.mark.parametrize("tables", ((), (1, 2)), ids=str)
def test_votes_are_shown_in_nats_where_they_are_cast_and_gates_of_matches_where_these_have_rows(
        tables, tmp_path, capsys):
    model = model_of(engram_votes=2, engram_match_words=(1,), engram_byte_orders=tables)
    shown = data_of(show(model, b"abcd abcd abce", tmp_path, capsys)[1])
    rows = {row["name"]: row for row in shown["gates"]}
    votes = rows["last 3, its vote"]["values"]
    assert [value is not None for value in votes] == [False] * 7 + [True] * 6 + [False]
    assert min(votes[7:13]) < 0 and "word 1, its vote" in rows                          # no gate is negative
    assert {name for name, row in rows.items() if row["shades"] == "votes"} == {name for name in rows if "vote" in name}
    assert ("last 3, in the text" in rows) == (tables == ())


def test_a_page_holds_what_it_shows_as_text_and_loads_nothing(tmp_path, capsys):
    home = tmp_path / "<img src=x onerror=alert(2)>&\x1b"
    home.mkdir()
    lines = [json.dumps({"step": step, "loss": 5 / step, "val_bpb": 1.0, "lr": "<b>alert(3)",
                         "val_bpb/</script><b>\u2028": 1.0}) for step in (1, 2, 3)]
    odd = ODD + b"{{policy}} {{data}}"
    _, content = show(model_of(), odd, home, capsys, lines)
    found, data, template = Page(content), data_of(content), TEMPLATE.read_text()
    tags, names = [tag for tag, _ in found.elements], {name for _, attrs in found.elements for name in attrs}
    assert tags == [tag for tag, _ in Page(template).elements] and tags.count("script") == 2 and "img" not in tags
    assert not [name for name in names if name.startswith("on") or name in ("src", "href", "style")]
    assert "alert(3)" not in content and "://" not in content
    assert all(c.isprintable() or c == "\n" for c in content)
    block = re.search('id="data">(.*?)</script>', content)[1]
    assert block.isascii() and not re.search("[<>&]", block)
    kept = "".join(glyph for glyph, _, _ in data["characters"])
    assert kept.startswith("<script>alert(1)</script> \\x1b]0;t") and kept.endswith("{{policy}} {{data}}")
    assert "&amp;\\xff" in kept and "漢🕸" in kept
    assert "<img src=x onerror=alert(2)>&\\x1b reads" in found.within["title"]
    [policy] = [attrs["content"] for tag, attrs in found.elements if attrs.get("http-equiv")]
    script = re.search("<script>(.*?)</script>", template, re.DOTALL)[1]
    assert policy.startswith(f"default-src 'none'; script-src '{page.hash_of(script)}'; style-src 'sha256-")
    assert script in content
    assert not re.search("innerHTML|outerHTML|insertAdjacent|document.write|eval|Function", script)
    titles = [chart["title"] for chart in data["charts"]]
    assert titles == ["bits per byte", curves.BY_SOURCE] and "prefers-color-scheme: dark" in content
    assert [curve["label"] for curve in data["charts"][1]["curves"]] == ["</script><b>\\u2028"]


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium")
def test_a_browser_draws_the_page_and_runs_nothing_that_a_text_holds(tmp_path, capsys):
    text = "a<img src=x onerror=document.title='pwned'>".encode() + ODD
    lines = [json.dumps(dict(step=step, loss=5 / step, val_bpb=1.0)) for step in (1, 2, 3)]
    _, content = show(model_of(), text, tmp_path, capsys, lines)
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000", "--dump-dom")
    dom = subprocess.run(["chromium", *flags, (tmp_path / "look.html").as_uri()], text=True, capture_output=True,
                         timeout=120).stdout
    drawn, data = Page(dom), data_of(content)
    classes = [attrs.get("class") for _, attrs in drawn.elements]
    assert "pwned" not in drawn.within["title"] and "img" not in [tag for tag, _ in drawn.elements]
    glyphs = "".join(glyph for glyph, _, _ in data["characters"])
    assert drawn.within["b"].replace("\n", "").replace("↵", "\\n") == glyphs
    bits = {f"s{bisect(reading.BITS, sum(data['bits'][start:stop]))}" for _, start, stop in data["characters"]}
    assert bits == {attrs["class"] for tag, attrs in drawn.elements if tag == "b"}
    assert classes.count("tape") == -(-len(text) // 64) and "dot" in classes and "line" in classes
    assert [tag for tag, _ in drawn.elements].count("tr") == 1 + len(data["load"])


def test_sample_shows_a_text_and_writes_the_page_where_it_is_asked_to(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    directory = run(tmp_path, make_shards(tmp_path / "data"), steps=3)
    capsys.readouterr()

    def refused(*argv):
        assert sample.main([str(directory), *argv]) == 2
        out, err = capsys.readouterr()
        assert err.splitlines()[-1].startswith("sample.py: error: ") and err.count("\n") == 1 + ("the newest" in err)
        return err
    assert sample.main([str(directory), "--show", "abc def", "--n_loops", "1"]) == 0
    out, err = capsys.readouterr()
    assert "7 bytes, " in out and "loops: 1 (" in out and str(directory / "look.html") in out
    assert "the newest" in err and err.count("\n") == 1
    assert '"title":"bits per byte"' in (directory / "look.html").read_text()
    assert sample.main([str(directory / "spider-step3.pt"), "--show", "abc", "--html", "out.html"]) == 0
    assert '"title":"bits per byte"' in Path("out.html").read_text()            # the checkpoint's directory has metrics
    (tmp_path / "shut").write_text("a file")
    assert "applies to --show" in refused("--html", "x.html")
    assert "/dev/null is not a regular file" in refused("--show", "a", "--html", "/dev/null")
    assert "use --html to write" in refused("--show", "a", "--html", "gone/x.html")
    assert "is empty" in refused("--show", "")
    assert "directory" in refused("--show", str(tmp_path))
    state = final_state(directory)
    state["model_state_dict"]["lm_head.weight"][0, 0] = math.nan
    torch.save(state, directory / "spider-step9.pt")
    assert sample.main([str(directory / "spider-step9.pt"), "--show", "abc"]) == 2
    assert "its weights are ruined" in capsys.readouterr().err


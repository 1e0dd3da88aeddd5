"""--show records the model's values; no terminal or browser executes any part of the text."""

import base64
import hashlib
import html
import io
import json
import math
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

import sample
from conftest import awake, metrics, small_config
from spider.errors import DataError
from spider.inference import look
from spider_model import Spider
from tokenizer import BOS_ID

# markup, control characters, invisible characters, bytes that are not UTF-8
ODD = (
    "<script>alert(1)</script> \x1b]0;t\x07\x9b2J \u202e\u2028\x00\t\r\n é漢🕸 "
    "</title></style>\"'&amp;".encode()
    + b"\xff\xf0\x9f \\n"
)
NO_CORE = dict(n_recurrent_layers=0, engram_layers=())


def model_of(**changes) -> Spider:
    """Return a model whose segments are words and halt after 1 to 3 loops."""
    config = small_config(**(dict(boundaries="words") | changes))
    model = awake(config, dtype=torch.float64).eval()
    if model.core is not None and model.core.halt_predictor is not None:
        model.core.halt_predictor.weight.data.normal_(std=1.0)
    return model


def text_of(length: int) -> bytes:
    """Return words of random letters."""
    letters = torch.tensor(list(b"abcdefgh   "))
    generator = torch.Generator().manual_seed(0)
    return bytes(letters[torch.randint(len(letters), (length,), generator=generator)].tolist())


@pytest.fixture
def show(tmp_path, capsys):
    """Return the output of --show for a text, and the page look.html."""

    def show(model: Spider, text: bytes, directory: Path = tmp_path) -> tuple[str, str]:
        (tmp_path / "text").write_bytes(text)
        look.show(model, 3, str(tmp_path / "text"), directory, dict(step=3), None)
        return capsys.readouterr().out, (directory / "look.html").read_text()

    return show


def data_of(page: str) -> dict:
    """Return the data in a page."""
    return json.loads(re.search('id="data">(.*?)</script>', page)[1])


class Page(HTMLParser):
    """A page's elements with their attributes."""

    def __init__(self, page: str):
        super().__init__()
        self.elements = []
        self.feed(page)
        self.close()

    @property
    def tags(self) -> list[str]:
        return [tag for tag, _ in self.elements]

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))


# --------------------------------------------------------------------------------------------------
# Reading


@pytest.mark.parametrize("boundaries", ("words", "flexitokens"))
@pytest.mark.parametrize("length", (1, 560))
def test_recorded_values_equal_the_full_pass(length, boundaries):
    model = model_of(boundaries=boundaries)
    text = text_of(length)
    analysis = look.analyze(model, text, 3)
    record = analysis.record
    out = model(torch.tensor([[BOS_ID, *text]]), torch.tensor([[*text, -100]]), n_loops=3)
    assert len(analysis.bits) == length
    mean = sum(analysis.bits) / length
    assert mean * math.log(2) == pytest.approx(out.nats_per_byte.item(), rel=1e-9)
    assert len(record.loops) == int(out.segments)
    assert sum(record.loops) == pytest.approx(float(out.mean_loops) * len(record.loops))
    for layer, tokens in enumerate(out.tokens_per_expert):
        loads = [load for visit, load in record.load.items() if visit[0] == layer]
        assert torch.equal(sum(loads, torch.zeros(4)), tokens.float())
    probability, likeliest = out.logits[0, :-1].softmax(-1).topk(3)
    assert analysis.likeliest == likeliest.flatten().tolist()
    assert analysis.percent == pytest.approx((100 * probability).flatten().tolist(), abs=0.51)


@pytest.mark.parametrize("changes", ({}, NO_CORE), ids=("core", "no core"))
def test_long_text_is_read_in_windows_overlapping_by_half(monkeypatch, changes):
    monkeypatch.setattr(look, "WINDOW", 64)
    model = model_of(**changes)
    text = text_of(300)
    ids = [BOS_ID, *text]
    analysis = look.analyze(model, text, 3)
    bits = []
    for begin in (0, *range(64, 301, 32)):
        start = max(0, begin - 32)  # half a window of context
        window = torch.tensor([ids[start : start + 64]])
        log_p = model(window, n_loops=3).logits[0].log_softmax(-1) / math.log(2)
        bits += [-log_p[i - start, ids[i + 1]].item() for i in range(begin, min(start + 64, 300))]
    assert analysis.bits == pytest.approx(bits, rel=1e-9)
    record = analysis.record
    assert sum(map(len, record.rows["1, learned"])) == 301
    words = re.findall(b"[a-h]+(?= )", text)
    assert len(record.loops) == sum(record.ends) == (0 if changes else len(words))
    gates = [torch.cat(passes) for passes in record.gates.values()]
    assert sum(int((~gate.isnan()).sum()) for gate in gates) == sum(record.loops)


def test_recorded_gates_equal_the_applied_gates(monkeypatch):
    model = model_of()
    engram = type(model.core.layers[1].engram)
    monkeypatch.setattr(engram, "gate", lambda self, h, key: h.new_full((len(h), 1), 0.25))
    model.engram_output.gate.weight.data.zero_()
    rows = look.gate_rows(look.analyze(model, text_of(40), 2))
    levels = {row["name"]: row["levels"] for row in rows if row["shades"] == "gates"}
    for loop in (1, 2):
        assert {*levels.pop(f"layer 2, loop {loop}")} == {"2", " "}  # blank: the last segment
    assert {*"".join(levels.values())} == {"4"}


def test_inspection_leaves_the_model_unchanged_even_after_an_error(monkeypatch):
    model = model_of()
    look.analyze(model, b"abc", 2)
    monkeypatch.setattr(model, "after_core", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        look.analyze(model, b"abc", 2)
    assert "boundaries" not in vars(model) and model.core.drop_halted is None
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks


def test_show_takes_a_file_stdin_or_a_literal_text(tmp_path, monkeypatch):
    path = tmp_path / "text"
    path.write_bytes(b"from a file")
    assert look.read_text_argument(str(path)) == (b"from a file", "text")
    assert look.read_text_argument("no file, \udcff") == (b"no file, \xff", "a text")
    for text in ("pi is 3.14", "either this and/or that", "a.b\nc.d\n", "e.g."):
        assert look.read_text_argument(text)[1] == "a text"
    path.write_bytes(b"")
    with pytest.raises(DataError, match="empty"):
        look.read_text_argument(str(path))
    monkeypatch.setattr(look, "MAX_TEXT_BYTES", 1024)
    path.write_bytes(b"x" * 1024)
    assert look.read_text_argument(str(path)) == (b"x" * 1024, "text")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"x" * 1025)))
    assert look.read_text_argument("-") == (b"x" * 1024, "the first 1,024 bytes of standard input")


# --------------------------------------------------------------------------------------------------
# In a terminal and as a page


def test_control_characters_in_a_text_never_reach_the_terminal(show, monkeypatch):
    model = model_of()
    plain, _ = show(model, ODD)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    colored, _ = show(model, ODD)
    assert colored.count("\x1b") > 20
    monkeypatch.setenv("NO_COLOR", "1")
    assert show(model, ODD)[0] == plain
    for printed in (plain, re.sub(r"\x1b\[0[0-9;]*m", "", colored)):
        assert all(c.isprintable() or c == "\n" for c in printed)
        text = re.sub("[│⁰¹²³⁴-⁹]", "", printed)
        assert text.startswith(
            "<script>alert(1)</script> \\x1b]0;t\\x07\\x9b2J \\u202e\\u2028\\x00\\t\\r↵\n é漢🕸 </ti"
        )
        assert "&amp;\\xff\\xf0\\x9f \\n" in text


def test_multibyte_characters_are_kept_whole_even_where_text_is_cut(monkeypatch):
    text = "a漢\xe9".encode() + b"\xe6\xbc!"  # each byte costs one bit
    record = look.Recorder(model_of())
    record.loops = [1, 1, 2, 3, 1, 2]  # the first segment is BOS alone
    is_end = [i in (0, 1, 4, 6, 8) for i in range(9)]
    segment = [1, 2, 3, 3, 3, 4, 4, 5, 5]
    analysis = look.Analysis(text, [1.0] * 9, [], [], segment, is_end, record)
    assert look.text_facts(analysis) == [
        "9 bytes, 1.000 bits per byte",
        "5 segments, 1.80 bytes each",
        "loops: 1 (2 segments), 2 (2 segments), 3 (1 segments)",
    ]
    printed = "".join(look.render_terminal(analysis, color=False))
    assert printed.startswith("a¹漢²é³\\xe6¹\\xbc!²\n")
    data = look.page_data(analysis, model_of(), [])
    assert data["glyphs"] == ["a", "漢", "é", "\\xe6", "\\xbc", "!"]
    assert data["lengths"] == "132111" and data["ends"] == "110010101"
    monkeypatch.setattr(look, "MAX_PRINTED_BYTES", 6)
    printed = "".join(look.render_terminal(analysis, color=False))
    assert printed.startswith("a¹漢²é³ ... (all 9 bytes are on the page)\n\n")


@pytest.mark.parametrize(
    "changes",
    (
        {},
        NO_CORE,
        dict(n_routed_experts=0, act=False),
        dict(engram_layers=(), engram_match_contexts=("24", "word2", "above")),
    ),
    ids=str,
)
def test_page_shows_every_component_of_the_model(changes, show):
    text = ODD * 4
    model = model_of(**changes)
    printed, page = show(model, text)
    data = data_of(page)
    rows = {row["name"]: row["levels"] for row in data["rows"]}
    has_core = model.core is not None
    assert ("segments, " in printed) == bool(data["loops"]) == has_core
    assert bool(data["load"]) == (has_core and model.config.n_routed_experts > 0)
    assert ("layer 2, loop 1" in rows) == bool(model.config.engram_layers)
    assert "24, in the text" in rows
    assert {len(levels) for levels in rows.values()} == {len(text)} == {len(data["ends"])}


def test_page_shows_votes_and_match_gates_without_tables(show):
    model = model_of(engram_votes=2, engram_match_contexts=("3", "word1"), engram_byte_contexts=())
    model.engram_output.votes[2].weight.data[1::2] = 0  # the votes of older occurrences
    _, page = show(model, b"abcd abcd abce")
    rows = {row["name"]: row for row in data_of(page)["rows"]}
    has_vote = [level != " " for level in rows["3, its vote"]["levels"]]
    assert has_vote == [False] * 7 + [True] * 6 + [False]
    shades = {name: row["shades"] for name, row in rows.items()}
    assert shades["3, its vote"] == shades["word1, its vote"] == "votes"
    assert shades["layer 2, loop 1"] == shades["3, in the text"] == "gates"


def test_page_holds_all_data_as_text_and_loads_nothing(tmp_path, show):
    home = tmp_path / "<img src=x onerror=alert(2)>&\x1b"
    home.mkdir()
    _, page = show(model_of(), ODD + b"{{script}} {{data}}", home)
    parsed = Page(page)
    template = look.TEMPLATE.read_text()
    assert parsed.tags == Page(template).tags and parsed.tags.count("script") == 2
    assert "://" not in page
    assert str(tmp_path) not in page  # paths are private
    assert all(c.isprintable() or c == "\n" for c in page)
    assert "<title>&lt;img src=x onerror=alert(2)&gt;&amp;\\x1b reads text</title>" in page

    block = re.search('id="data">(.*?)</script>', page)[1]
    assert block.isascii() and not re.search("[<>&]", block)
    text = "".join(data_of(page)["glyphs"])
    assert text.startswith("<script>alert(1)</script> \\x1b]0;t")
    assert text.endswith("{{script}} {{data}}")

    (policy,) = [attrs["content"] for _, attrs in parsed.elements if "http-equiv" in attrs]
    script = re.search("<script>(.*?)</script>", page, re.DOTALL)[1]
    assert f"<script>{script}</script>" in template
    source = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy.startswith(f"default-src 'none'; script-src 'sha256-{source}'; ")
    assert not re.search("innerHTML|outerHTML|insertAdjacent|document.write|eval|Function", script)


KEY = "by('text').dispatchEvent(new KeyboardEvent('keydown', { key: 'ArrowRight' }));"


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium")
def test_page_script_draws_the_text_and_executes_none_of_it(tmp_path, show, monkeypatch):
    template = look.TEMPLATE.read_text().replace("</script></body>", f"{KEY}</script></body>")
    (tmp_path / "page.html").write_text(template)
    monkeypatch.setattr(look, "TEMPLATE", tmp_path / "page.html")
    text = "é<img src=x onerror=document.title='pwned'>".encode() + ODD + text_of(5000)
    _, page = show(model_of(), text)
    data = data_of(page)
    flags = (
        "--headless --no-sandbox --disable-gpu --virtual-time-budget=3000 --enable-logging=stderr "
        "--dump-dom"
    )
    argv = ["chromium", *flags.split(), (tmp_path / "look.html").as_uri()]
    done = subprocess.run(argv, text=True, capture_output=True, timeout=120)
    assert "CONSOLE" not in done.stderr, done.stderr
    assert " reads text</title>" in done.stdout and "img" not in Page(done.stdout).tags
    shown = re.search('id="text".*?>(.*?)</section>', done.stdout, re.DOTALL)[1]
    shown = html.unescape(re.sub("<sub>.*?</sub>|<[^>]*>", "", shown))
    assert shown.replace("\n", "").replace("↵", "\\n") == "".join(data["glyphs"])
    # three candidates for each of the two bytes of the first character
    percent = [f"{number}%" for number in data["percent"][:6]]
    assert re.findall("<td>([0-9]+%)</td>", done.stdout) == percent
    # one <tr> per layer and loop of the experts; gates and votes follow the surprise
    assert done.stdout.count("<tr") == 2 * 3 + 1 + len(data["load"]) + 1 + len(data["rows"])


# --------------------------------------------------------------------------------------------------
# sample.py --show


def test_show_prints_the_text_and_writes_the_page_to_the_run(
    trained, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    directory = shutil.copytree(trained, tmp_path / "run")
    argv = [str(directory), "--show", "abc def", "--n_loops", "1"]
    assert sample.main(argv) == 0
    out = capsys.readouterr().out
    assert "7 bytes, " in out and "loops: 1 (" in out and str(directory / "look.html") in out
    page = (directory / "look.html").read_text()
    model, *facts = data_of(page)["run"]
    assert model.startswith("tiny, ")
    assert facts == [
        "step 3",
        "trained on 192 bytes",
        "data: data",
        f"validation at step 3: {metrics(directory)[-1]['val_bpb']:.3f} bits per byte",
    ]
    assert sample.main([*argv, "--html", "out.html"]) == 0
    assert Path("out.html").read_text() == page
    assert sample.main([*argv, "--html", "run"]) == 2
    assert "use --html to write the page elsewhere" in capsys.readouterr().err

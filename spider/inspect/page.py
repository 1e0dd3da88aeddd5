"""Show a text as a page, and how its model was trained: `show`, behind `sample.py --show`.

page.html is the page: its script draws the data, JSON that stands in it. It is one file that loads nothing; its policy
lets no script run but its own, and what comes from a text, a checkpoint, a file or a name is drawn as text alone.
"""

import base64
import hashlib
import html
import json
import os
import re
import sys
from pathlib import Path

from torch import nn

from spider import console, errors, files
from spider.inspect.reading import BITS, Shown, characters, facts, read, take_text
from spider.inspect.terminal import in_terminal
from spider.training.checkpoint_files import is_sharded
from spider.training.curves import (BY_SOURCE, PANELS, SOURCE, axis_of, curve, read_metrics, smoothed, sources_of,
                                    span)

TEMPLATE = Path(__file__).with_name("page.html")
LOADS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)    # where the next of eight shades begins: of an expert's load,
GATES = tuple(part / 8 for part in range(1, 8))  # of a gate


def write_page(shown: Shown, title: str, model: nn.Module, lines: list[dict]) -> str:
    """Fill the template: return the page as HTML."""
    text, title = TEMPLATE.read_text(encoding="utf-8"), html.escape(console.one_line(title))
    style, script = (hash_of(re.search(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)[1]) for tag in ("style", "script"))
    data = json.dumps(page_data(shown, model, lines), allow_nan=False, separators=(",", ":"))     # in ASCII
    fields = dict(title=title, policy=f"default-src 'none'; script-src '{script}'; style-src '{style}'",
                  data=re.sub("[<>&]", lambda sign: f"\\u{ord(sign[0]):04x}", data))
    return re.sub("{{([a-z]+)}}", lambda field: fields[field[1]], text)


def hash_of(text: str) -> str:
    """Name a script or style by its hash, as a content security policy does."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def page_data(shown: Shown, model: nn.Module, lines: list[dict]) -> dict:
    """Return what page.html draws, as plain values; of the text and its segments numbers begin at 0."""
    record, gates = shown.record, gate_rows(shown, model)
    load = [dict(name=f"{layer + 1}, {loop + 1}", tokens=[int(tokens) for tokens in load])
            for (layer, loop), load in sorted(record.load.items())]
    return dict(
        facts=[f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters", *facts(shown)],
        shades=dict(bits=BITS, loads=LOADS, gates=GATES), characters=list(characters(shown.text)),
        bytes=list(shown.text), bits=[round(bits, 4) for bits in shown.bits], likeliest=shown.likeliest,
        segment=shown.segment, ends=[int(end) for end in shown.ends], loops=record.loops, load=load,
        gates=[dict(name=name, values=values) for name, values, _ in gates],
        meanings=list(dict(meaning for _, _, meaning in gates).items()),
        axis=axis_of([lines])[2], charts=charts(lines))


def gate_rows(shown: Shown, model: nn.Module) -> list[tuple[str, list, tuple[str, str]]]:
    """Return Engram's gates: name, value of each byte (None: its segment was not computed), which rows are meant and
    what they weigh."""
    c, record = model.config, shown.record
    memory = "last n bytes", "what training stored in the Engram tables behind these bytes"
    match = "last n, in the text", "what followed earlier in this text, where its last n bytes had stood before"
    words = "word n, in the text", (
        "the same for all bytes behind the end of the n-th last word: word 1 for those of the word that is being read, "
        "word 2 for it and the word before it, all that stands behind the last word but one")
    segment = "layer, loop", "what a layer of the core recalls from its Engram tables at a segment's end, in each loop"
    rows = [(f"last {n} byte{'s' * (n > 1)}", memory) for n in c.engram_byte_orders]
    rows += [(f"last {n}, in the text", match) for n in c.engram_match_orders]
    rows += [(f"word {n}, in the text", words) for n in c.engram_match_words]
    found = [(name, [round(gate, 3) for gate in gates], meaning)
             for (name, meaning), gates in zip(rows, zip(*record.byte_gates[1:]))]
    for (layer, loop), gates in sorted(record.gates.items()):
        values = [round(gates[number], 3) if number in gates else None for number in shown.segment]
        found.append((f"layer {layer + 1}, loop {loop + 1}", values, segment))
    return found


def charts(lines: list[dict]) -> list[dict]:
    """Return the curves of a run, a chart of each panel that has any: a smoothed line, dots of validation; and one of
    validation by source."""
    axis, drawn = axis_of([lines]), []
    for panel in PANELS:
        line, dots = curve(lines, axis, panel.name, panel.factor), curve(lines, axis, panel.val)
        drawn.append((panel.title, [
            dict(kind="raw", points=line if panel.smooth else []), dict(kind="dot", name="validation", points=dots),
            dict(kind="line", name="training", points=smoothed(line) if panel.smooth else line)]))
    sources = [(name.removeprefix(SOURCE), curve(lines, axis, name)) for name in sources_of([lines])]
    drawn.append((BY_SOURCE, [dict(kind="line", label=console.one_line(name), points=points)
                              for name, points in sources]))
    found = []
    for title, curves in drawn:
        if curves := [one for one in curves if one["points"]]:
            low, high = span([[y for one in curves for _, y in one["points"]]])
            found.append(dict(title=title, low=low, high=high, curves=curves))
    return found


def show(model: nn.Module, n_loops: int, argument: str, checkpoint: Path, page: str | None):
    """Print the text that --show names as the model reads it, and write the page: to `page`, or beside the checkpoint,
    a file or a directory with metrics.jsonl."""
    text, name = take_text(argument)
    directory = checkpoint if checkpoint.is_dir() and not is_sharded(checkpoint) else checkpoint.parent
    out = directory / "look.html" if page is None else Path(page)
    if not files.is_replaceable(out):
        raise errors.DataError(f"--html: {out} is not a regular file: name another")
    shown = read(model, text, n_loops)
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    print("".join(in_terminal(shown, colour)), flush=True)
    content = write_page(shown, f"{checkpoint} reads {name}", model, read_metrics(directory / "metrics.jsonl"))
    try:
        with files.durable(out, "wb") as file:
            file.write(content.encode())
    except OSError as fault:
        raise errors.DataError(f"{out}: {fault.strerror}: --html names another place for the page") from None
    print(console.one_line(f"the page: {out}"))

"""Show what a model does as it reads a text: segments, loops, surprise, routing, gates and votes
(`sample.py --show`).

    analyze          run a model over a text and record what it does
    render_terminal  show the text with its segments in a terminal
    render_page      show all of it as an HTML page

page.html is the template of the page. Its script draws the embedded JSON data. The page is one file
that loads nothing: its content security policy allows only its own script, and all data (text,
checkpoint, names) is inserted as text. The page can be shared: it has names of files, but no paths.
"""

import base64
import hashlib
import html
import json
import math
import os
import re
import sys
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from torch import Tensor, nn

from spider.errors import DataError, one_line, printable
from spider.files import atomic_write
from spider.inference import adapt, export
from spider.model.layers import rms_norm
from spider.model.memory import OutputEngram
from spider.vocabulary import BOS_ID
from spider_model import LayerOutput, RecurrentBlock, Spider

TEMPLATE = Path(__file__).with_name("page.html")
MAX_TEXT_BYTES = 1 << 20  # so that a browser can open the page
MAX_PRINTED_BYTES = 4096  # in a terminal
WINDOW = 8192  # bytes that the model reads at once, half of them context
LIKELIEST = 3  # number of likeliest bytes that the page shows

# Limits between eight shades
BITS = (0.5, 1, 2, 3, 4, 6, 8)  # of surprise
VOTES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)  # of votes, in nats
GATES = tuple(step / 8 for step in range(1, 8))  # of gates
SHADES_OF = {"bits": BITS, "gates": GATES, "votes": VOTES}

# --------------------------------------------------------------------------------------------------
# Recording


Visit = tuple[int, int]  # (layer of the core, loop), both from 0


class Recorder:
    """Record what a model computes inside the context, with hooks on forward passes over one row.

    A text may take several passes. Each pass records its ids after the first `context` ids, which
    an earlier pass has recorded, and the segments that end in these ids. Segments are numbered
    through the text, including the segment of BOS."""

    def __init__(self, model: Spider):
        self.model = model
        self.hooks = ExitStack()
        self.context = 0
        self.ends: list[bool] = []  # [ids] whether the id ends a segment
        self.loops: list[int] = []  # [finished segments]
        self.load: dict[Visit, Tensor] = {}  # [experts] tokens per expert
        # gates of Engram in the core; each pass [segments], NaN for a halted segment
        self.gates: dict[Visit, list[Tensor]] = defaultdict(list)
        # by name: gates and votes of the Engram before the head; each pass [ids], NaN for no vote
        self.rows: dict[str, list[Tensor]] = defaultdict(list)
        self.new_segments = slice(0)  # the segments of this pass that it records
        self.loop = -1

    def __enter__(self) -> "Recorder":
        engram = self.model.engram_output
        if engram is not None:
            self.hooks.callback(engram.register_forward_hook(self._record_bytes).remove)
        core = self.model.core
        if core is not None:
            self.model.boundaries = self._record_boundaries  # type: ignore[assignment]
            core.drop_halted = False  # so that a segment keeps its index in every loop
            for i, layer in enumerate(core.layers):
                hook = partial(self._record_visit, i)
                self.hooks.callback(layer.register_forward_hook(hook).remove)
        return self

    def __exit__(self, *_):
        self.hooks.close()
        if self.model.core is not None:
            del self.model.boundaries  # uncovers the method of the class
            self.model.core.drop_halted = None

    def _record_bytes(self, engram: OutputEngram, args: tuple, output: Any):
        """Record gates and votes: a hook after the Engram before the head."""
        x, packed = args
        state = rms_norm(x)
        config = self.model.config
        names = [f"{context}, learned" for context in config.engram_byte_contexts]
        if config.matches_before_head:
            names += [f"{context}, in the text" for context in config.engram_match_contexts]
        values = engram.gate(state).sigmoid()
        if engram.votes is not None:
            names += [f"{context}, its vote" for context in config.engram_match_contexts]
            _, weights = engram.cast_votes(state, packed.matches)
            # the votes of a context are adjacent, the newest first; weight 0 means no vote
            newest = weights[:, :: config.engram_votes]
            values = torch.cat((values, newest.masked_fill(newest == 0, math.nan)), dim=1)
        new = values[self.context :].float().cpu()
        for name, row in zip(names, new.T, strict=True):
            self.rows[name].append(row)

    def _record_boundaries(self, *args) -> Tensor:
        """Compute and record segment boundaries, in place of the model's `boundaries`."""
        b = type(self.model).boundaries(self.model, *args)
        ends = (b > 0).tolist()
        new_ends = ends[self.context :]
        self.new_segments = slice(sum(ends) - sum(new_ends), sum(ends))
        self.loop = -1
        self.ends += new_ends
        self.loops += [0] * sum(new_ends)
        return b

    def _record_visit(self, i: int, layer: RecurrentBlock, args: tuple, output: LayerOutput):
        """Record loops, load and gates: a hook after layer i of the core."""
        x, _, retrieved, active = args[:4]
        is_running = torch.ones(len(x), dtype=torch.bool)
        if active.running is not None:
            is_running = active.running.cpu()
        is_running = is_running[self.new_segments]
        if i == 0:
            self.loop += 1
            first_segment = len(self.loops) - len(is_running)
            for segment, runs in enumerate(is_running.tolist(), first_segment):
                self.loops[segment] += runs
        visit = (i, self.loop)
        topk_idx = output.routing.topk_idx
        if topk_idx is not None and is_running.any():
            chosen = topk_idx.cpu()[self.new_segments][is_running].flatten()
            tokens = chosen.bincount(minlength=self.model.config.n_routed_experts)
            self.load[visit] = self.load.get(visit, 0) + tokens
        if layer.engram is not None:
            gate = layer.engram.gate(x, retrieved.key).flatten().float().cpu()
            self.gates[visit].append(gate[self.new_segments].masked_fill(~is_running, math.nan))


# --------------------------------------------------------------------------------------------------
# Reading


@dataclass
class Analysis:
    """A text, and what a model computed as it read the text."""

    text: bytes
    bits: list[float]  # [bytes] surprise: -log2 of the byte's probability
    likeliest: list[int]  # [bytes * LIKELIEST] ids
    percent: list[int]  # [bytes * LIKELIEST] their probabilities
    segment: list[int]  # [bytes] number of the byte's segment
    ends: list[bool]  # [bytes] whether the byte ends its segment
    record: Recorder


@torch.no_grad()
def analyze(model: Spider, text: bytes, n_loops: int) -> Analysis:
    """Run a model in evaluation mode over a text of at least one byte, in windows that overlap by
    half.

    Raise FloatingPointError for a non-finite logit."""
    ids = torch.tensor([BOS_ID, *text], device=model.embed_tokens.device)
    progress = adapt.progress_bar("reading", len(ids))
    bits = []
    likeliest = []
    percent = []
    done = 0  # ids that are recorded
    with Recorder(model) as record, model.cast_weights_once():
        while done < len(ids):
            first = max(0, done - WINDOW // 2)
            record.context = done - first
            window = ids[first : first + WINDOW]
            logits = model(window[None], n_loops=n_loops).logits[0, record.context :]
            labels = ids[done + 1 : done + 1 + len(logits)]
            # the last id of the text has logits but no label
            labeled = logits[: len(labels)]  # [bytes, vocab_size]
            nats = nn.functional.cross_entropy(labeled, labels, reduction="none")
            if not nats.isfinite().all():
                raise FloatingPointError(
                    "the model's logits are not finite numbers: its weights are ruined"
                )
            bits += (nats / math.log(2)).tolist()
            top = labeled.softmax(-1).topk(LIKELIEST)
            likeliest += top.indices.flatten().tolist()
            percent += (100 * top.values).round().int().flatten().tolist()
            done += len(logits)
            if progress is not None:
                progress.add(len(logits))
    ends = record.ends or [False] * len(ids)  # a model without a core has no segments
    segments_before = list(accumulate(ends, initial=0))
    segment = segments_before[1:-1]  # without BOS
    return Analysis(text, bits, likeliest, percent, segment, ends[1:], record)


def read_text_argument(argument: str) -> tuple[bytes, str]:
    """Return the first MAX_TEXT_BYTES of the text that --show names, and a name without a path.
    Raise DataError if the text is empty, or looks like a path to no file."""
    if argument == "-":
        name = "standard input"
        text = sys.stdin.buffer.read(MAX_TEXT_BYTES + 1)
    elif os.path.exists(argument):
        name = Path(argument).name
        with open(argument, "rb") as file:
            text = file.read(MAX_TEXT_BYTES + 1)
    elif re.fullmatch(r"\S*/\S*|.*\.[A-Za-z]\w*", argument):
        raise DataError(
            f"--show: {argument}: no such file; to show a text that looks like a file name, pipe "
            f"it to --show -"
        )
    else:
        name = "a text"
        text = os.fsencode(argument)
        logger.info(f"--show: there is no file {argument!r}, so it is taken as the text")
    if not text:
        raise DataError(f"--show: {name} is empty")
    if len(text) > MAX_TEXT_BYTES:
        name = f"the first {MAX_TEXT_BYTES:,} bytes of {name}"
        text = text[:MAX_TEXT_BYTES]
        logger.warning(f"--show: only {name}")
    return text, name


def characters(text: bytes) -> Iterator[tuple[str, int, int]]:
    """Yield each UTF-8 character of a text, and the indices of its first byte and of the byte after
    it. Control characters, invisible characters and bytes that are not UTF-8 become escapes."""
    start = 0
    for c in text.decode("utf-8", "surrogateescape"):
        raw = c.encode("utf-8", "surrogateescape")
        not_utf8 = "\udc80" <= c <= "\udcff"
        glyph = f"\\x{raw[0]:02x}" if not_utf8 else one_line(c)
        yield glyph, start, start + len(raw)
        start += len(raw)


def text_facts(analysis: Analysis) -> list[str]:
    """Summarize a text in lines: bits per byte and, if the model has a core, segments and loops."""
    n_bytes = len(analysis.text)
    segments = sum(analysis.ends)
    lines = [f"{n_bytes:,} bytes, {sum(analysis.bits) / n_bytes:.3f} bits per byte"]
    if segments:
        loops = Counter(analysis.record.loops[analysis.segment[0] :])  # without a segment of BOS
        counts = [f"{n_loops} ({count:,} segments)" for n_loops, count in sorted(loops.items())]
        lines.append(f"{segments:,} segments, {n_bytes / segments:.2f} bytes each")
        lines.append(f"loops: {', '.join(counts)}")
    return lines


# --------------------------------------------------------------------------------------------------
# In a terminal

# backgrounds from the 256 colors, like the color map "inferno", for any terminal theme
SHADES = (234, 53, 89, 125, 166, 208, 220, 229)
SMALL_DIGITS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def paint(text: str, style: str, color: bool) -> str:
    """Return text in an ANSI style, or plain."""
    return f"\x1b[0{style}m{text}\x1b[0m" if color else text


def shade(bits: float) -> str:
    """Return the style of a character, given its surprise."""
    level = bisect(BITS, bits)
    text = 255 if level < 4 else 16  # white on dark shades, black on bright ones
    return f";38;5;{text};48;5;{SHADES[level]}"


def render_terminal(analysis: Analysis, color: bool) -> Iterator[str]:
    """Yield the first MAX_PRINTED_BYTES of the text with its segments, a legend and the facts,
    plain or with ANSI colors."""
    loops = analysis.record.loops
    loops_vary = len(set(loops)) > 1
    for glyph, start, stop in characters(analysis.text):
        if start >= MAX_PRINTED_BYTES:
            yield f" ... (all {len(analysis.text):,} bytes are on the page)"
            break
        style = shade(sum(analysis.bits[start:stop]))
        yield paint(glyph.replace("\\n", "↵"), style, color)
        for byte in range(start, stop):
            if analysis.ends[byte]:
                n_loops = str(loops[analysis.segment[byte]])
                mark = n_loops.translate(SMALL_DIGITS) if loops_vary else "│"
                yield paint(mark, ";2", color)
        if glyph == "\\n":
            yield "\n"
    yield "\n\n"

    if color:
        shades = [paint(f" {limit:g} ", shade(limit), color) for limit in (0, *BITS)]
        yield f"bits: {''.join(shades)} and more\n"
    if loops_vary:
        yield "the small number after a segment is its number of loops\n"
    elif loops:
        yield "segments end at │\n"
    yield "\n".join(text_facts(analysis))


# --------------------------------------------------------------------------------------------------
# As a page


def render_page(analysis: Analysis, title: str, model: Spider, run: list[str]) -> str:
    """Fill the template and return the page as HTML. run: facts of the training run."""
    template = TEMPLATE.read_text(encoding="utf-8")
    _, _, rest = template.partition("<script>")
    script, _, _ = rest.partition("</script>")
    digest = hashlib.sha256(script.encode()).digest()
    data = json.dumps(page_data(analysis, model, run), allow_nan=False, separators=(",", ":"))
    fields = {
        "title": html.escape(one_line(title)),
        "script": f"sha256-{base64.b64encode(digest).decode()}",
        # ASCII, without the characters that could end an element
        "data": re.sub("[<>&]", lambda sign: f"\\u{ord(sign[0]):04x}", data),
    }
    # all in one pass, because a text may contain {{...}}
    return re.sub("{{([a-z]+)}}", lambda name: fields[name[1]], template)


def run_facts(path: Path, saved: dict, model: nn.Module) -> list[str]:
    """Summarize a model and its training run in lines without paths, given its checkpoint's path
    and content."""
    facts = export.training_facts(path, {"flags": {}} | saved)
    size = f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters"
    if "recipe" in facts:
        size = f"{facts['recipe']}, {size}"
    lines = [size, f"step {facts.get('step', 0):,}"]
    if "bytes_seen" in facts:
        lines.append(f"trained on {facts['bytes_seen']:,} bytes")
    if "data_dir" in facts["flags"]:
        lines.append(f"data: {one_line(facts['flags']['data_dir'])}")
    if "val_bpb" in facts:
        lines.append(
            f"validation at step {facts['val_bpb_at_step']:,}: {facts['val_bpb']:.3f} bits per byte"
        )
    return lines


def page_data(analysis: Analysis, model: Spider, run: list[str]) -> dict[str, Any]:
    """Return the data that page.html draws, as plain values. Bytes and segments count from 0.

    To keep the page small, a list with a digit for each byte is a string."""
    drawn = list(characters(analysis.text))
    load = analysis.record.load
    return {
        "run": run,
        "facts": text_facts(analysis),
        "shades": SHADES_OF,
        "names": [printable([i]) for i in range(model.config.vocab_size)],
        "glyphs": [glyph for glyph, _, _ in drawn],
        "lengths": "".join(str(stop - start) for _, start, stop in drawn),
        "bytes": analysis.text.hex(),
        "bits": [round(bits, 2) for bits in analysis.bits],
        "likeliest": analysis.likeliest,
        "percent": analysis.percent,
        "ends": "".join("1" if end else "0" for end in analysis.ends),
        "first_segment": analysis.segment[0],
        "loops": analysis.record.loops,
        "load": [(*visit, tokens.int().tolist()) for visit, tokens in sorted(load.items())],
        "rows": gate_rows(analysis),
    }


def gate_rows(analysis: Analysis) -> list[dict[str, str]]:
    """Return a row for each gate and vote of Engram: name, shades (key of SHADES_OF), and the level
    of each byte, or a space if there is no gate or vote."""
    record = analysis.record
    values = {name: torch.cat(passes)[1:] for name, passes in record.rows.items()}  # without BOS
    unfinished = torch.tensor([math.nan])  # for bytes after the last finished segment
    for (layer, loop), passes in sorted(record.gates.items()):
        by_segment = torch.cat([*passes, unfinished])
        if not by_segment.isnan().all():
            values[f"layer {layer + 1}, loop {loop + 1}"] = by_segment[analysis.segment]
    rows = []
    for name, row in values.items():
        shades = "votes" if name.endswith("vote") else "gates"
        limits = SHADES_OF[shades]
        levels = ""
        for value in row.tolist():
            levels += " " if math.isnan(value) else str(bisect(limits, value))
        rows.append({"name": name, "shades": shades, "levels": levels})
    return rows


# --------------------------------------------------------------------------------------------------
# The command


def show(
    model: Spider, n_loops: int, argument: str, checkpoint: Path, saved: dict, page: str | None
):
    """Print the analysis of the text that --show names. Write the page to `page`, or next to the
    checkpoint. saved: the content of the checkpoint."""
    text, name = read_text_argument(argument)
    directory = checkpoint if checkpoint.is_dir() else checkpoint.parent
    out = directory / "look.html" if page is None else Path(page)
    analysis = analyze(model, text, n_loops)
    print("".join(render_terminal(analysis, wants_color())), flush=True)
    run = run_facts(directory / checkpoint.name, saved, model)
    content = render_page(analysis, f"{checkpoint.absolute().name} reads {name}", model, run)
    try:
        with atomic_write(out, "wb") as file:
            file.write(content.encode())
    except OSError as fault:
        raise DataError(
            f"{out}: {fault.strerror}: use --html to write the page elsewhere"
        ) from None
    print(one_line(f"the page: {out}"))


def wants_color() -> bool:
    """Return whether stdout is a terminal whose user wants colors."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return sys.stdout.isatty()

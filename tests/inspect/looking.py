"""Models, texts and pages for the tests of spider/inspect."""

import json
import re
from html.parser import HTMLParser

import torch
from conftest import awake, small_config

from spider.inspect import page

ODD = ("<script>alert(1)</script> \x1b]0;t\x07\x9b2J \u202e\u2028\x00\t\r\n é漢🕸 </title></style>\"'&amp;"
       .encode() + b"\xff\xf0\x9f \\n")


def model_of(**changes):
    model = awake(small_config(**changes), dtype=torch.float64).eval()
    if changes.get("n_recurrent_layers") != 0 and changes.get("act") is not False:
        model.core.halt_predictor.weight.data.normal_(std=1.0)           # so that segments take 1 to 3 loops
    model.set_backend("loop")                                            # grouped products take no float64
    return model


def text_of(length: int) -> bytes:
    return bytes(torch.randint(32, 127, (length,), generator=torch.Generator().manual_seed(0)).tolist())


def show(model, text: bytes, tmp_path, capsys, lines=()) -> tuple[str, str]:
    """Return what show prints and the page that it writes, with these lines in metrics.jsonl."""
    (tmp_path / "text").write_bytes(text)
    (tmp_path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    page.show(model, 3, str(tmp_path / "text"), tmp_path, None)
    return capsys.readouterr().out, (tmp_path / "look.html").read_text()


def data_of(content: str) -> dict:
    """Return the data that a page draws."""
    return json.loads(re.search('<script type="application/json" id="data">(.*?)</script>', content)[1])


class Page(HTMLParser):
    """Elements of a page with their attributes, and its text by element."""

    def __init__(self, content: str):
        super().__init__()
        self.elements, self.within, self.inside = [], {}, []
        self.feed(content)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.inside.append(tag)

    def handle_data(self, content):
        if self.inside:
            self.within[self.inside[-1]] = self.within.get(self.inside[-1], "") + content


"""Write the model card (README.md) of an export: `facts_of` collects the facts of a checkpoint, `model_card` formats
them."""

import json
import math
import re
from pathlib import Path

from torch import nn

from spider.model.engram_table import EngramTable
from spider.training.checkpoint_contents import is_number
from spider.training.metrics import read_lines
from spider.version import commit


def as_json(value) -> str:
    return json.dumps(value, indent=2, allow_nan=False) + "\n"


def facts_of(path: Path, state: dict) -> dict:
    """Return the facts of a model's training as plain values, from its checkpoint and its run's metrics.jsonl."""
    facts = {name: state[name] for name in ("step", "bytes_seen", "recipe", "adapted") if name in state}
    facts["flags"] = dict(state["flags"])
    if type(where := facts["flags"].get("data_dir")) is str:
        facts["flags"] |= dict(data_dir=re.sub("[^,]*/", "", where.rstrip("/")))  # only names: paths are private
    evaluated = [line for line in lines_of(path.parent / "metrics.jsonl", state)
                 if is_number(line.get("val_bpb")) and line["val_bpb"] >= 0]
    if evaluated:
        facts |= dict(val_bpb=evaluated[-1]["val_bpb"], val_bpb_at_step=evaluated[-1]["step"])
    if is_number(state.get("best_loss")):
        facts["best_val_bpb"] = state["best_loss"] / math.log(2)
    return facts


def lines_of(path: Path, state: dict) -> list[dict]:
    """Read the lines of metrics.jsonl up to a checkpoint; return none if they are missing or of another run."""
    lines = [numbers for numbers in read_lines(path) if numbers["step"] <= state["step"]]
    own = lines and (lines[-1]["step"], lines[-1].get("bytes_seen")) == (state["step"], state.get("bytes_seen"))
    return lines if own else []


def model_card(path: Path, model: nn.Module, n_loops: int, facts: dict) -> str:
    """Write the card of a checkpoint's model, which may be on the meta device. Untrusted text is only inserted as JSON,
    on lines of its own."""
    config, parameters = model.config, sum(p.numel() for p in model.parameters())
    rows = sum(module.weight.numel() for module in model.modules() if isinstance(module, EngramTable))
    lines = [f"{parameters:,} parameters, {rows:,} of them rows of Engram tables",
             f"{config.hidden_size} wide; {config.n_prelude_layers} + {config.n_recurrent_layers} + "
             f"{config.n_coda_layers} layers, the middle ones {n_loops} times"]
    if "bytes_seen" in facts:
        lines.append(f"trained on {facts['bytes_seen']:,} bytes in {facts['step']:,} steps, "
                     f"{facts['flags'].get('seq_len', '?')} bytes a sequence")
    if "adapted" in facts:
        lines.append(f"adapted to {facts['adapted']:,} bytes since; the figures are of the weights before")
    if "val_bpb" in facts:
        lines.append(f"{facts['val_bpb']:.4f} bits per byte of its run's held-out text at step "
                     f"{facts['val_bpb_at_step']:,}")
    if "best_val_bpb" in facts:
        lines.append(f"{facts['best_val_bpb']:.4f} bits per byte there at best")
    if revision := commit():
        lines.append(f"code of commit {revision}")
    return CARD.format(facts="".join(f"- {line}\n" for line in lines), name=json.dumps(path.name),
                       flags=as_json(dict(recipe=facts.get("recipe")) | facts["flags"]).rstrip())


CARD = '''---
library_name: transformers
license: apache-2.0
pipeline_tag: text-generation
tags: [spider, byte-level, recurrent-depth]
---

# A Spider model

A byte-level Recurrent-Depth Transformer. Its tokens are bytes; 256 is padding, 257 begins a document, 258 ends one.

{facts}
The checkpoint and its training flags:

```json
{name}
{flags}
```

## Use

This directory includes the model's code (Apache-2.0, see LICENSE). `trust_remote_code` runs it, so read it first. It
needs torch and transformers 5.24 or later.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("DIR", trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained("DIR", trust_remote_code=True)
inputs = tokenizer(["ROMEO:", "To be, or"], return_tensors="pt", padding=True)
print(tokenizer.batch_decode(model.generate(**inputs, max_new_tokens=200), skip_special_tokens=True))
```

- Padding, on the left (as the tokenizer pads) or on the right, does not change a row's logits or loss.
- `generate(n_loops=...)` and `model(..., n_loops=...)` run more or fewer loops than in training.
- `loss` is the training loss; `nats_per_byte` is the cross-entropy alone.
- `dtype=torch.bfloat16` sets the dtype of products; parameters stay fp32. `model.bfloat16()` and the like cast both.
- Invalid UTF-8 is decoded as U+FFFD; `AutoTokenizer.from_pretrained(..., errors="surrogateescape")` preserves the
  bytes.
- To fine-tune it, run the project's `python train.py --resume DIR --reset_steps --data_dir ...`, which updates the
  Engram tables too. It reads only config.json and the weights, and runs no code of this directory.
'''

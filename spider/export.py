"""Export a checkpoint as a directory for Hugging Face's libraries: `write_export`.

    python sample.py checkpoints/shakespeare --export exported
    python train.py --resume exported --reset_steps --data_dir data

It has the weights (safetensors), config.json, a model card, LICENSE, and the code:
modeling_spider.py, the adapter, and the modules that it imports, flattened. So the export works
without installing Spider, and its code does not change. The code runs only with trust_remote_code.
checkpoint.py reads weights and config.json back without executing code.
"""

import ast
import json
import math
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from loguru import logger

from spider.checkpoint import PREFIX, is_export, safetensors
from spider.common import ROOT, CheckpointError, locked, sync
from spider.config import SpiderConfig
from spider.run import read_lines
from tokenizer import BOS_ID, EOS_ID, PAD_ID

ADAPTER = "modeling_spider"
UNFINISHED = ".unfinished-export"  # ends the names of temporary directories
# packages and modules that it may import
PROJECT = "spider", "spider_model", "tile_moe", "tokenizer"


def write_export(path: Path, state: dict, directory: str):
    """Write the model of a checkpoint, given its path and content, atomically to a new or empty
    directory.

    It is written to a hidden directory beside it, and renamed. What a killed export to this name
    left there is deleted; one that still runs is not disturbed. Raise CheckpointError if the
    directory is not empty or cannot be written, and UsageError if another process exports to it."""
    if "flags" not in state or is_export(path):
        raise CheckpointError(f"{path}: --export needs a checkpoint of a training run")
    if state.get("exploded"):
        logger.warning(f"{path}: the loss had exploded by then")
    library, target = safetensors(), Path(os.path.realpath(directory))
    texts = texts_of(path, state)
    try:
        if os.path.lexists(target) and not (target.is_dir() and not any(target.iterdir())):
            raise CheckpointError(
                f"--export: {directory} exists and is not an empty directory: use another name"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        with unfinished_directory(target) as temporary:
            new = temporary / "export"
            new.mkdir()
            for name, text in texts.items():
                (new / name).write_text(text, encoding="utf-8")
            weights = {
                PREFIX + name: weight.contiguous()
                for name, weight in state["model_state_dict"].items()
            }
            library.torch.save_file(weights, new / "model.safetensors", metadata={"format": "pt"})
            for file in new.iterdir():
                # safetensors makes files that only the owner can read
                file.chmod((new / "README.md").stat().st_mode)
                sync(file)
            sync(new)
            size = sum(file.stat().st_size for file in new.iterdir())
            os.rename(new, target)
        sync(target.parent)
    except (OSError, library.SafetensorError) as fault:
        reason = getattr(fault, "strerror", None) or fault
        raise CheckpointError(f"--export: {directory} cannot be written: {reason}") from None
    logger.info(
        f"exported step {state['step']} of {path} to {directory}: {size:,} bytes; see its "
        f"README.md for usage"
    )


@contextmanager
def unfinished_directory(target: Path) -> Iterator[Path]:
    """Make a temporary directory beside an export's, and delete it in the end, also after SIGTERM
    and SIGHUP; delete those of killed exports to the same name."""
    unfinished = re.compile(rf"[.]{re.escape(target.name)}[.]\w{{8}}{re.escape(UNFINISHED)}")
    with exit_on_signals(), locked(target, target.with_name(f".{target.name}.lock")):
        for entry in os.scandir(target.parent):
            if unfinished.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
        with tempfile.TemporaryDirectory(
            UNFINISHED, f".{target.name}.", target.parent
        ) as temporary:
            yield Path(temporary)


@contextmanager
def exit_on_signals():
    """Raise SystemExit at the first SIGTERM or SIGHUP inside, so that temporary files are deleted.
    Ignored ones, as under nohup, stay ignored, as are later ones."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    heeded = [number for number, handler in before.items() if handler != signal.SIG_IGN]

    def stop(number: int, _):
        for other in heeded:
            signal.signal(other, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for number in heeded:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in heeded:
            signal.signal(number, before[number])


def as_json(value) -> str:
    return json.dumps(value, indent=2, allow_nan=False) + "\n"


# --------------------------------------------------------------------------------------------------
# Texts


def texts_of(path: Path, state: dict) -> dict[str, str]:
    """Return the texts of all files of an export except the weights, by name."""
    config, facts = SpiderConfig.from_saved(state["cfg"]), facts_of(path, state)
    ids = dict(pad_token_id=PAD_ID, bos_token_id=BOS_ID, eos_token_id=EOS_ID)
    return flat_modules(f"spider.{ADAPTER}") | {
        "LICENSE": license_text(),
        "config.json": as_json(
            dict(
                architectures=["SpiderForCausalLM"],
                model_type="spider",
                **ids,
                dtype=str(state["model_state_dict"]["embed_tokens"].dtype).removeprefix("torch."),
                auto_map=dict(
                    AutoConfig=f"{ADAPTER}.SpiderHFConfig",
                    AutoModelForCausalLM=f"{ADAPTER}.SpiderForCausalLM",
                ),
                max_position_embeddings=state["flags"].get("seq_len", 2048),
                n_loops=state.get("n_loops", config.n_loops),
                spider=asdict(config),
                training=facts,
            )
        ),
        "generation_config.json": as_json(
            dict(
                ids,
                do_sample=True,
                temperature=0.8,
                top_k=0,
                suppress_tokens=[PAD_ID, BOS_ID, *range(EOS_ID + 1, config.vocab_size)],
            )
        ),
        "tokenizer_config.json": as_json(
            dict(
                tokenizer_class="SpiderTokenizer",
                auto_map=dict(AutoTokenizer=[f"{ADAPTER}.SpiderTokenizer", None]),
                errors="replace",
                padding_side="left",
            )
        ),
        "README.md": CARD.format(facts=as_json(dict(checkpoint=path.name) | facts)),
    }


def license_text() -> str:
    """Return the text of LICENSE, which is beside the code in a checkout, and among the metadata of
    a wheel."""
    if (ROOT / "pyproject.toml").exists():
        return (ROOT / "LICENSE").read_text(encoding="utf-8")
    return metadata.distribution("spider-trainer").read_text("licenses/LICENSE")


def facts_of(path: Path, state: dict) -> dict:
    """Return the facts of a model's training as plain values, from its checkpoint and its run's
    metrics.jsonl."""
    facts = {name: state[name] for name in ("step", "bytes_seen", "recipe") if name in state}
    facts["flags"] = dict(state["flags"])
    if "data_dir" in facts["flags"]:  # only names: paths are private
        parts = facts["flags"]["data_dir"].rstrip("/").split(",")
        facts["flags"]["data_dir"] = ",".join(part.rpartition("/")[2] for part in parts)
    for line in read_lines(path.parent / "metrics.jsonl"):
        if line["step"] <= state["step"] and line.get("val_bpb") is not None:
            facts |= dict(val_bpb=line["val_bpb"], val_bpb_at_step=line["step"])
    if math.isfinite(best := state.get("best_loss", math.inf)):
        facts["best_val_bpb"] = best / math.log(2)
    return facts


# The facts are inserted as JSON alone, since names and flags are text that others wrote.
CARD = """---
library_name: transformers
license: apache-2.0
pipeline_tag: text-generation
tags: [spider, byte-level, recurrent-depth]
---

# A Spider model

A byte-level Recurrent-Depth Transformer. Its tokens are bytes; 256 is padding, 257 begins a
document, 258 ends one. Its checkpoint, training and bits per byte of its run's held-out text:

```json
{facts}```

## Use

This directory includes the model's code (Apache-2.0, see LICENSE). `trust_remote_code` runs it, so
read it first. It needs torch and transformers 5.24 or later.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("DIR", trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained("DIR", trust_remote_code=True)
inputs = tokenizer(["ROMEO:", "To be, or"], return_tensors="pt", padding=True)
ids = model.generate(**inputs, max_new_tokens=200)
print(tokenizer.batch_decode(ids, skip_special_tokens=True))
```

`n_loops=` of `generate` and of the model runs more or fewer loops than in training. `loss` is the
cross-entropy in nats per byte, and in training mode the loss to minimize. `dtype=torch.bfloat16`
sets the dtype of products; parameters stay fp32. To fine-tune all of it, run the project's
`python train.py --resume DIR --reset_steps --data_dir ...`.
"""

# --------------------------------------------------------------------------------------------------
# Code: transformers only loads code beside a model if its imports are `from .name import ...`. So
# imports of project modules are rewritten, `from spider.config import X` to `from .config import
# X`; all other text is kept.


def flat_modules(name: str) -> dict[str, str]:
    """Return the texts of a module, given by its dotted name, and of all project modules that it
    imports, by file name.

    Imports are followed recursively, including those in functions and for type checkers. Raise
    ValueError if two modules have the same file name, or an import is not `from module import
    name`."""
    texts, modules = {}, [name]
    for module in modules:  # grows in the loop
        file = f"{module.rpartition('.')[2]}.py"
        if file in texts:
            raise ValueError(f"{module}: another module is also named {file}")
        texts[file], imported = with_relative_imports(
            (ROOT / module.replace(".", "/")).with_suffix(".py")
        )
        modules += [other for other in imported if other not in modules]
    return texts


def with_relative_imports(path: Path) -> tuple[str, list[str]]:
    """Return a module's text with relative imports of project modules, and the unique names of
    these."""
    lines, imported = path.read_text(encoding="utf-8").splitlines(keepends=True), {}
    for node in ast.walk(ast.parse("".join(lines))):
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        level = getattr(node, "level", 0)
        absolute = isinstance(node, ast.ImportFrom) and level == 0
        for name in [node.module] if absolute else [alias.name for alias in node.names]:
            source = ROOT / name.replace(".", "/")
            if level == 0 and name.split(".")[0] not in PROJECT:
                continue
            if not absolute or not source.with_suffix(".py").is_file():
                raise ValueError(
                    f"{path}:{node.lineno}: exported modules must import project modules by "
                    f"`from module import name`"
                )
            line, pattern = lines[node.lineno - 1], rf"\bfrom {re.escape(name)} import\b"
            lines[node.lineno - 1] = re.sub(pattern, f"from .{source.name} import", line, count=1)
            imported[name] = None
    return "".join(lines), [*imported]

"""Export a checkpoint as a directory for Hugging Face's libraries: `write_export`.

    python sample.py checkpoints/shakespeare --export exported
    python train.py --resume exported --reset_steps --data_dir data

The directory has the weights (safetensors), config.json, a tokenizer, a model card, LICENSE, and
the code: modeling_spider.py (the adapter) and the modules that it imports, in one flat folder. So
an export works without installing Spider, and its code never changes. The code runs only with
trust_remote_code. checkpoint.py reads weights and config.json back without executing code.
"""

import json
import math
import os
import re
import shutil
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from loguru import logger

from spider.config import SpiderConfig
from spider.errors import CheckpointError
from spider.files import ROOT, locked, sync
from spider.training import checkpoint, run
from spider.vocabulary import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE

ADAPTER = "modeling_spider"


def write_export(path: Path, saved: dict, directory: str):
    """Write the model of a checkpoint, given its path and content, to a new or empty directory.

    The directory is written under a hidden name next to it, then renamed, so it is complete or does
    not exist. Leftovers of a killed export to this name are deleted. Raise CheckpointError if the
    directory is not empty or cannot be written, and UsageError if another process exports to it."""
    if "flags" not in saved or checkpoint.is_export(path):
        raise CheckpointError(f"{path}: --export needs a checkpoint of a training run")
    if saved.get("exploded"):
        logger.warning(f"{path}: the loss had exploded before this checkpoint")
    library = checkpoint.safetensors()
    target = Path(os.path.realpath(directory))
    unfinished = target.with_name(f".{target.name}.unfinished-export")
    texts = export_texts(path, saved)
    weights = {
        checkpoint.PREFIX + name: weight.contiguous()
        for name, weight in saved["model_state_dict"].items()
    }
    try:
        if target.exists() and not (target.is_dir() and not any(target.iterdir())):
            raise CheckpointError(
                f"--export: {directory} exists and is not an empty directory: use another name"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        with locked(target, target.with_name(f".{target.name}.lock")):
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            try:
                for name, text in texts.items():
                    (unfinished / name).write_text(text, encoding="utf-8")
                file = unfinished / "model.safetensors"
                library.torch.save_file(weights, file, metadata={"format": "pt"})
                # safetensors makes files that only the owner can read
                file.chmod((unfinished / "README.md").stat().st_mode)
                for written in (*unfinished.iterdir(), unfinished):
                    sync(written)
                os.rename(unfinished, target)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
        sync(target.parent)
    except (OSError, RuntimeError, library.SafetensorError) as fault:
        reason = getattr(fault, "strerror", None) or fault
        raise CheckpointError(f"--export: {directory} cannot be written: {reason}") from None
    size = sum(file.stat().st_size for file in target.iterdir())
    logger.info(
        f"exported step {saved['step']} of {path} to {directory}: {size:,} bytes; see its "
        f"README.md for usage"
    )


def as_json(value) -> str:
    return json.dumps(value, indent=2, allow_nan=False) + "\n"


# --------------------------------------------------------------------------------------------------
# Texts


def export_texts(path: Path, saved: dict) -> dict[str, str]:
    """Return the text of each file of an export, except the weights, by name."""
    facts = training_facts(path, saved)
    texts = flat_modules(f"spider.inference.{ADAPTER}")
    texts["LICENSE"] = license_text()
    dtype = saved["model_state_dict"]["embed_tokens"].dtype
    model_settings = {
        "architectures": ["SpiderForCausalLM"],
        "model_type": "spider",
        **SPECIAL_IDS,
        "dtype": str(dtype).removeprefix("torch."),
        "auto_map": {
            "AutoConfig": f"{ADAPTER}.SpiderHFConfig",
            "AutoModelForCausalLM": f"{ADAPTER}.SpiderForCausalLM",
        },
        "max_position_embeddings": saved["flags"].get("seq_len", 2048),
        "n_loops": saved["n_loops"],
        "spider": asdict(SpiderConfig.from_saved(saved["cfg"])),
        "training": facts,
    }
    texts["config.json"] = as_json(model_settings)
    texts["generation_config.json"] = as_json(GENERATION_SETTINGS)
    texts["tokenizer.json"] = byte_tokenizer()
    texts["tokenizer_config.json"] = as_json(TOKENIZER_SETTINGS)
    texts["README.md"] = CARD.format(facts=as_json({"checkpoint": path.name} | facts))
    return texts


SPECIAL_IDS = {"pad_token_id": PAD_ID, "bos_token_id": BOS_ID, "eos_token_id": EOS_ID}
SPECIAL_TOKENS = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}  # 256 to 258
TOKENIZER_SETTINGS = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    **SPECIAL_TOKENS,
    "padding_side": "left",
}
GENERATION_SETTINGS = {
    **SPECIAL_IDS,
    "do_sample": True,
    "temperature": 0.8,
    "top_k": 0,
    # never targets; nor are the reserved ids, unless fine-tuning gives them a meaning
    "suppress_tokens": [PAD_ID, BOS_ID, *range(EOS_ID + 1, VOCAB_SIZE)],
}


def byte_tokenizer() -> str:
    """Return tokenizer.json: a byte-level BPE without merges, so that the ids of a text are its
    UTF-8 bytes. Tokens that a user adds get the reserved ids, from 259 on."""
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    except ModuleNotFoundError:
        raise CheckpointError('tokenizers is not installed: pip install -e ".[hf]"') from None
    # A byte is written as chr(byte) if the alphabet has this character. The other bytes are
    # written, in order, as the remaining characters of the alphabet.
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    substitutes = iter(sorted(character for character in alphabet if ord(character) > 255))
    vocabulary = {}
    for byte in range(256):
        character = chr(byte)
        if character not in alphabet:
            character = next(substitutes)
        vocabulary[character] = byte
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*SPECIAL_TOKENS.values()])
    return tokenizer.to_str()


def license_text() -> str:
    """Return the text of LICENSE, from a checkout or from the metadata of an installed wheel. Raise
    CheckpointError if neither has it."""
    if (ROOT / "pyproject.toml").exists():
        return (ROOT / "LICENSE").read_text(encoding="utf-8")
    text = metadata.distribution("spider-trainer").read_text("licenses/LICENSE")
    if text is None:
        raise CheckpointError("--export: the installation has no LICENSE: install Spider again")
    return text


def training_facts(path: Path, saved: dict) -> dict:
    """Return facts about a model's training as plain values, from its checkpoint and from
    metrics.jsonl of its run."""
    facts = {name: saved[name] for name in ("step", "bytes_seen", "recipe") if name in saved}
    flags = dict(saved["flags"])
    if "data_dir" in flags:
        # only the names of directories, because paths are private
        sources = flags["data_dir"].rstrip("/").split(",")
        flags["data_dir"] = ",".join(source.rpartition("/")[2] for source in sources)
    facts["flags"] = flags
    for line in run.read_metrics(path.parent / "metrics.jsonl"):  # the last evaluation counts
        if line["step"] <= saved["step"] and line.get("val_bpb") is not None:
            facts["val_bpb"] = line["val_bpb"]
            facts["val_bpb_at_step"] = line["step"]
    best_loss = saved.get("best_loss", math.inf)
    if math.isfinite(best_loss):
        facts["best_val_bpb"] = best_loss / math.log(2)
    return facts


# Facts are inserted only as JSON, because names and flags are text that others wrote.
CARD = """---
library_name: transformers
license: apache-2.0
pipeline_tag: text-generation
tags: [spider, byte-level, recurrent-depth]
---

# A Spider model

A byte-level Recurrent-Depth Transformer. Its tokens are bytes; 256 is padding, 257 begins a
document, 258 ends a document. Checkpoint, training, and bits per byte of the held-out text:

```json
{facts}```

## Use

This directory includes the model's code (Apache-2.0, see LICENSE). `trust_remote_code` runs it, so
read it first. It needs torch and transformers 5.24 or later.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("DIR", trust_remote_code=False)
model = AutoModelForCausalLM.from_pretrained("DIR", trust_remote_code=True)
inputs = tokenizer(["ROMEO:", "To be, or"], return_tensors="pt", padding=True)
ids = model.generate(**inputs, max_new_tokens=200)
print(tokenizer.batch_decode(ids, skip_special_tokens=True))
```

Pass `n_loops=` to `generate` or to the model to run more or fewer loops than in training. `loss` is
the cross-entropy in nats per byte; in training mode, the loss to minimize. `dtype=torch.bfloat16`
sets the dtype of products; parameters stay fp32. The Trainer, TRL and PEFT train all parameters
except the Engram tables, which are most of them. To train the tables too, run the project's
`python train.py --resume DIR --reset_steps --data_dir ...`.
"""

# --------------------------------------------------------------------------------------------------
# Code: transformers loads code next to a model only if its imports are `from .name import ...`. So
# imports of project modules are rewritten: `from spider.model.layers import X` becomes
# `from .layers import X`. All other text stays the same.

PROJECT_IMPORT = re.compile(
    r"^( *)from (spider(?:\.\w+)+|spider_model|tile_moe) import\b", re.MULTILINE
)


def flat_modules(name: str) -> dict[str, str]:
    """Return the texts of a module and of all project modules that it imports, directly or not, by
    file name. Imports in functions and for type checkers count, too. name: the dotted name of the
    module."""

    def relative(statement: re.Match) -> str:
        indentation, module = statement.groups()
        return f"{indentation}from .{module.rpartition('.')[2]} import"

    texts = {}
    modules = [name]
    for module in modules:  # the list grows in the loop
        path = (ROOT / module.replace(".", "/")).with_suffix(".py")
        text = path.read_text(encoding="utf-8")
        imported = [other for _, other in PROJECT_IMPORT.findall(text)]
        modules += sorted(set(imported) - set(modules))
        assert path.name not in texts, f"two modules of an export are named {path.name}"
        texts[path.name] = PROJECT_IMPORT.sub(relative, text)
    return texts

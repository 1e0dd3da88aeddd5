"""Hand a model over: a directory that Hugging Face's libraries load, and that train.py and sample.py read back.

    python sample.py checkpoints/shakespeare --export handed-over
    python train.py --resume handed-over --reset_steps --data_dir data

Beside weights (safetensors), config.json and a model card lie modeling_spider.py, the adapter, and the files of the
model that it imports, as they are here but for the imports among them, which become relative. So the directory works
where Spider is not installed, no name is looked up in a package index, and the code stays the one that the model was
handed over with. It is run only by who loads it with trust_remote_code; what is read back here is config.json and the
safetensors, and nothing is executed.
"""

import json
import math
import os
import re
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import torch
from loguru import logger
from torch import Tensor

from spider.errors import CheckpointError
from spider.files import sync
from spider.model.config import SpiderConfig
from spider.model.engram import EngramTable
from spider.training.checkpoint import check_regular, check_state, is_count, is_number, reading
from spider.training.run_log import numbers_of
from spider_model import Spider
from tokenizer import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE

ROOT = Path(__file__).resolve().parent
ADAPTER = "modeling_spider"
MODULES = (ADAPTER, "spider_model", "layers", "engram", "tile_moe", "tokenizer")
PREFIX = "spider."                        # of the weights' names, since the adapter holds the model under this name
SHARD_BYTES = 5_000_000_000               # weights above so many lie in several files
LARGEST_JSON = 1 << 24                    # bytes


def safetensors():
    """The library; CheckpointError with the remedy where it is not installed."""
    try:
        import safetensors.torch
    except ImportError:
        raise CheckpointError('safetensors is not installed: pip install -e ".[hf]"') from None
    return safetensors


# ---------------------------------------------------------------------------------------------------------------------
# There


def export(path: Path, state: dict, directory: str):
    """Writes the model of a checkpoint, its path and content, to a new or empty directory, which is whole or not there.

    CheckpointError where there is something in it already, or where it cannot be written."""
    if "flags" not in state or is_export(path):
        raise CheckpointError(f"{path}: --export takes a checkpoint of a run, which says how it was trained")
    if state.get("exploded"):
        logger.warning(f"{path}: the loss had exploded before it")
    library, target = safetensors(), Path(os.path.realpath(directory))
    texts = texts_of(path, state, facts_of(path, state))
    try:
        if os.path.lexists(target) and not (target.is_dir() and not any(target.iterdir())):
            raise CheckpointError(f"--export: {directory} is there already and not an empty directory: name another")
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as temporary:
            new = Path(temporary) / "export"
            new.mkdir()
            for name, text in texts.items():
                (new / name).write_text(text, encoding="utf-8")
            write_weights(library, new, state["model_state_dict"])
            for file in new.iterdir():
                file.chmod((new / "README.md").stat().st_mode)  # safetensors' own are for their owner alone
                sync(file)
            sync(new)
            size = sum(file.stat().st_size for file in new.iterdir())
            os.rename(new, target)
        sync(target.parent)
    except (OSError, library.SafetensorError) as fault:
        reason = getattr(fault, "strerror", None) or fault
        raise CheckpointError(f"--export: {directory} cannot be written: {reason}") from None
    logger.info(f"step {state['step']} of {path} is handed over in {directory}: {size:,} bytes; its README.md says how "
                f"it is used")


def write_weights(library, directory: Path, weights: dict[str, Tensor]):
    """model.safetensors, or several files and the index that transformers expects of them."""
    shards, size = [{}], 0
    for name, weight in weights.items():
        if shards[-1] and size + weight.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][PREFIX + name] = weight.contiguous()
        size += weight.nbytes
    names = ["model.safetensors"] if len(shards) == 1 else [
        f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards):
        library.torch.save_file(shard, directory / name, metadata={"format": "pt"})
    if len(shards) > 1:
        index = dict(metadata=dict(total_size=sum(weight.nbytes for weight in weights.values())),
                     weight_map={weight: name for name, shard in zip(names, shards) for weight in shard})
        (directory / INDEX).write_text(as_json(index))


INDEX = "model.safetensors.index.json"


def as_json(value) -> str:
    return json.dumps(value, indent=2, allow_nan=False) + "\n"


def facts_of(path: Path, state: dict) -> dict:
    """What is known of a model's training, as plain values: from its checkpoint, and its run's metrics.jsonl."""
    facts = {name: state[name] for name in ("step", "bytes_seen", "recipe") if name in state}
    facts["flags"] = dict(state["flags"])
    if type(where := facts["flags"].get("data_dir")) is str:
        facts["flags"] |= dict(data_dir=re.sub("[^,]*/", "", where.rstrip("/")))  # names: where they lie is private
    evaluated = [line for line in lines_of(path.parent / "metrics.jsonl", state)
                 if is_number(line.get("val_bpb")) and line["val_bpb"] >= 0]
    if evaluated:
        facts |= dict(val_bpb=evaluated[-1]["val_bpb"], val_bpb_at_step=evaluated[-1]["step"])
    if is_number(state.get("best_loss")):
        facts["best_val_bpb"] = state["best_loss"] / math.log(2)
    return facts


def lines_of(path: Path, state: dict) -> list[dict]:
    """The lines of metrics.jsonl up to a checkpoint; none where they are missing, or of another run."""
    lines = []
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else ():
        with suppress(ValueError):        # cut off or altered
            if (numbers := numbers_of(line))["step"] <= state["step"]:
                lines.append(numbers)
    own = lines and (lines[-1]["step"], lines[-1].get("bytes_seen")) == (state["step"], state.get("bytes_seen"))
    return lines if own else []


def commit() -> str | None:
    """The commit of the code that exports, with `-dirty` where it was changed since; None: it is not known."""
    if not (ROOT / ".git").exists():
        return None
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def texts_of(path: Path, state: dict, facts: dict) -> dict[str, str]:
    """All files of an export but the weights, by name."""
    config = SpiderConfig(**state["cfg"])
    n_loops, ids = state.get("n_loops", config.n_loops), dict(
        pad_token_id=PAD_ID, bos_token_id=BOS_ID, eos_token_id=EOS_ID)
    dtype = str(state["model_state_dict"]["embed_tokens"].dtype).removeprefix("torch.")
    return dict(
        {f"{name}.py": module_text(name) for name in MODULES},
        **{"config.json": as_json(dict(
            architectures=["SpiderForCausalLM"], model_type="spider", dtype=dtype, **ids,
            auto_map=dict(AutoConfig=f"{ADAPTER}.SpiderHFConfig", AutoModelForCausalLM=f"{ADAPTER}.SpiderForCausalLM"),
            max_position_embeddings=state["flags"].get("seq_len", 2048),
            n_loops=n_loops, spider=asdict(config), training=facts)),
           "generation_config.json": as_json(dict(
               ids, do_sample=True, temperature=0.8, top_k=0,
               suppress_tokens=[PAD_ID, BOS_ID, *range(EOS_ID + 1, VOCAB_SIZE)])),
           "tokenizer_config.json": as_json(dict(
               tokenizer_class="SpiderTokenizer", auto_map=dict(AutoTokenizer=[f"{ADAPTER}.SpiderTokenizer", None]),
               errors="replace", padding_side="left")),
           "README.md": card(path, config, n_loops, facts)})


def module_text(name: str) -> str:
    """One of the project's files whose imports of the others are relative, as they have to be beside each other."""
    text = (ROOT / f"{name}.py").read_text(encoding="utf-8")
    return re.sub(rf"^(\s*)from ({'|'.join(MODULES)}) import ", r"\1from .\2 import ", text, flags=re.MULTILINE)


def card(path: Path, config: SpiderConfig, n_loops: int, facts: dict) -> str:
    """The model card. What others wrote is in it as JSON on lines of its own only."""
    with torch.device("meta"):
        model = Spider(config)
    parameters = sum(p.numel() for p in model.parameters())
    rows = sum(m.weight.numel() for m in model.modules() if isinstance(m, EngramTable))
    lines = [f"{parameters:,} parameters, {rows:,} of them rows of Engram tables",
             f"{config.hidden_size} wide; {config.n_prelude_layers} + {config.n_recurrent_layers} + "
             f"{config.n_coda_layers} layers, the middle ones {n_loops} times"]
    if "bytes_seen" in facts:
        lines.append(f"trained on {facts['bytes_seen']:,} bytes in {facts['step']:,} steps, "
                     f"{facts['flags'].get('seq_len', '?')} bytes a sequence")
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
pipeline_tag: text-generation
tags: [spider, byte-level, recurrent-depth]
---

# A Spider model

A byte-level Recurrent-Depth Transformer: bytes are its tokens, 256 pads, 257 begins a document, 258 ends one.

{facts}
The checkpoint and the flags that it was trained with:

```json
{name}
{flags}
```

## Use

The model's code lies beside this file; `trust_remote_code` runs it, so read it first. What it needs: torch and
transformers.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("DIR", trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained("DIR", trust_remote_code=True)
inputs = tokenizer(["ROMEO:", "To be, or"], return_tensors="pt", padding=True)
print(tokenizer.batch_decode(model.generate(**inputs, max_new_tokens=200), skip_special_tokens=True))
```

- Padding, in front (as the tokenizer does it) or behind, changes nothing that the model says about a row.
- `generate(n_loops=...)` and `model(..., n_loops=...)` take more or fewer loops than it was trained with.
- `loss` is what training minimised; `nats_per_byte` beside it is the cross-entropy alone.
- `dtype=torch.bfloat16` is the type of products; parameters stay fp32. `model.bfloat16()` and the like cast both.
- Bytes that are not UTF-8 are decoded as U+FFFD; `AutoTokenizer.from_pretrained(..., errors="surrogateescape")` keeps
  them.
- Fine-tuning: `python train.py --resume DIR --reset_steps --data_dir ...` of the project, which moves the Engram tables
  too; it reads config.json and the weights and runs nothing of this directory.
'''


# ---------------------------------------------------------------------------------------------------------------------
# And back


def is_export(path: Path) -> bool:
    """Whether a path is that of an export, or of its weights."""
    return path.suffix == ".safetensors" or (path / "config.json").exists()


def read_export(path: Path) -> dict:
    """What an export, a directory or its only safetensors file, has of a checkpoint: weights, what they are read by,
    and what they were measured by. Nothing of it is executed. CheckpointError where a file is none that `export`
    writes."""
    library, directory = safetensors(), path.parent if path.suffix == ".safetensors" else path
    with reading(directory / "config.json"):
        config = read_json(directory / "config.json")
        training = config.get("training", {})
        state = dict(model_state_dict={}, cfg=config["spider"], n_loops=config["n_loops"], step=training.get("step", 0))
        state |= {"recipe": training["recipe"]} if "recipe" in training else {}
        flags = dict(training.get("flags", {}))  # of which these two are what a model is measured by
        state["flags"] = {name: flags[name] for name in ("seq_len", "eval_tokens") if name in flags}
        for name, value in state["flags"].items():
            if not is_count(value):
                raise ValueError(f"training.flags.{name}: {value!r} is no whole number")
    for file in [path] if path is not directory else weight_files(directory):
        with reading(file):
            state["model_state_dict"] |= read_weights(library, file)
    check_state(path, state, {"model_state_dict", "cfg"})
    return state


def read_json(path: Path) -> dict:
    """A file's JSON object; ValueError where it is none."""
    check_regular(path)
    if path.stat().st_size > LARGEST_JSON:
        raise ValueError(f"more than {LARGEST_JSON} bytes")
    value = json.loads(path.read_bytes())
    if not isinstance(value, dict):
        raise ValueError("no JSON object")
    return value


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a directory: the only one, or those of the index."""
    if not (directory / INDEX).exists():
        return [directory / "model.safetensors"]
    with reading(directory / INDEX):
        names = sorted(set(read_json(directory / INDEX)["weight_map"].values()))
        odd = [name for name in names if Path(name).name != name]
        if odd:
            raise ValueError(f"{odd[0]!r} is no file beside it")
    return [directory / name for name in names]


# The types that weights are trained or handed on in, in the words of the format.
DTYPES = {"F64", "F32", "F16", "BF16", "I64"}


def read_weights(library, path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file by name, which stay in it; ValueError for one of a type that no model has."""
    check_regular(path)
    with library.safe_open(path, framework="pt") as file:
        for name in file.keys():
            if (dtype := file.get_slice(name).get_dtype()) not in DTYPES:
                raise ValueError(f"{name} is of type {dtype}")
        return {name.removeprefix(PREFIX): file.get_tensor(name) for name in file.keys()}

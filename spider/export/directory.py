"""Export a checkpoint as a directory for Hugging Face's libraries: `write_export`.

    python sample.py checkpoints/shakespeare --export exported
    python train.py --resume exported --reset_steps --data_dir data

It has the weights (safetensors), config.json, a model card, LICENSE, and the code: modeling_spider.py, the adapter,
and the modules that it imports, flattened (flatten.py). So the export works without installing Spider, and its code
does not change. The code runs only with trust_remote_code. spider/training/export_reading.py reads weights and
config.json back without executing code.
"""

import os
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch
from loguru import logger
from torch import Tensor, nn

from spider.errors import CheckpointError
from spider.export.card import as_json, facts_of, model_card
from spider.export.flatten import ROOT, flat_modules
from spider.training.export_reading import INDEX, PREFIX, is_export, safetensors
from spider.files import sync
from spider.model.config import SpiderConfig
from tokenizer import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE

ADAPTER = "modeling_spider"
SHARD_BYTES = 5_000_000_000               # maximum size of a weights file


def write_export(path: Path, state: dict, directory: str, model_class: type[nn.Module]):
    """Write the model of a checkpoint, given its path and content, atomically to a new or empty directory.

    Raise CheckpointError if the directory is not empty or cannot be written."""
    if "flags" not in state or is_export(path):
        raise CheckpointError(f"{path}: --export needs a checkpoint of a training run")
    if state.get("exploded"):
        logger.warning(f"{path}: the loss had exploded by then")
    library, target = safetensors(), Path(os.path.realpath(directory))
    texts = texts_of(path, state, model_class)
    try:
        if os.path.lexists(target) and not (target.is_dir() and not any(target.iterdir())):
            raise CheckpointError(f"--export: {directory} exists and is not an empty directory: use another name")
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as temporary:
            new = Path(temporary) / "export"
            new.mkdir()
            for name, text in texts.items():
                (new / name).write_text(text, encoding="utf-8")
            write_weights(library, new, state["model_state_dict"])
            for file in new.iterdir():
                file.chmod((new / "README.md").stat().st_mode)  # safetensors makes files that only the owner can read
                sync(file)
            sync(new)
            size = sum(file.stat().st_size for file in new.iterdir())
            os.rename(new, target)
        sync(target.parent)
    except (OSError, library.SafetensorError) as fault:
        reason = getattr(fault, "strerror", None) or fault
        raise CheckpointError(f"--export: {directory} cannot be written: {reason}") from None
    logger.info(f"exported step {state['step']} of {path} to {directory}: {size:,} bytes; see its README.md for usage")


def write_weights(library, directory: Path, weights: dict[str, Tensor]):
    """Write model.safetensors, or several files and transformers' index of them."""
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


def texts_of(path: Path, state: dict, model_class: type[nn.Module]) -> dict[str, str]:
    """Return the texts of all files of an export except the weights, by name."""
    config, facts = SpiderConfig.from_saved(state["cfg"]), facts_of(path, state)
    n_loops, ids = state.get("n_loops", config.n_loops), dict(
        pad_token_id=PAD_ID, bos_token_id=BOS_ID, eos_token_id=EOS_ID)
    dtype = str(state["model_state_dict"]["embed_tokens"].dtype).removeprefix("torch.")
    with torch.device("meta"):
        card = model_card(path, model_class(config), n_loops, facts)
    return flat_modules(f"spider.export.{ADAPTER}") | {
        "LICENSE": (ROOT / "LICENSE").read_text(encoding="utf-8"),
        "config.json": as_json(dict(
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
        "README.md": card}

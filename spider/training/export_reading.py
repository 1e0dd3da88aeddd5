"""Read an export (spider/export) back for --resume and sample.py: `is_export`, `read_export`.

Reads only config.json and the safetensors and executes no code. Exports of earlier versions, and those saved again by
transformers, work too.
"""

import json
from pathlib import Path

from torch import Tensor

from spider.errors import CheckpointError
from spider.files import is_count
from spider.training.checkpoint_format import check_regular, reading

PREFIX = "spider."                        # of the weights' names: the adapter's attribute for the model
INDEX = "model.safetensors.index.json"
LARGEST_JSON = 1 << 24                    # bytes
DTYPES = {"F64", "F32", "F16", "BF16", "I64"}    # of weights, as safetensors names them


def safetensors():
    """Return the library; raise CheckpointError with the remedy if it is not installed."""
    try:
        import safetensors.torch
    except ImportError:
        raise CheckpointError('safetensors is not installed: pip install -e ".[hf]"') from None
    return safetensors


def is_export(path: Path) -> bool:
    """Return whether a path is an export, or its weights."""
    return path.suffix == ".safetensors" or (path / "config.json").exists()


def read_export(path: Path) -> dict:
    """Read an export, a directory or its only safetensors file, as the state of a checkpoint: weights, config, and the
    settings of evaluation. Raise CheckpointError for a bad file."""
    library, directory = safetensors(), path.parent if path.suffix == ".safetensors" else path
    with reading(directory / "config.json"):
        config = read_json(directory / "config.json")
        training = config.get("training", {})
        state = dict(model_state_dict={}, cfg=config["spider"], n_loops=config["n_loops"], step=training.get("step", 0))
        state |= {"recipe": training["recipe"]} if "recipe" in training else {}
        flags = dict(training.get("flags", {}))
        state["flags"] = {name: flags[name] for name in ("seq_len", "eval_tokens") if name in flags}
        for name, value in state["flags"].items():
            if not is_count(value):
                raise ValueError(f"training.flags.{name}: {value!r} is not a whole number")
    for file in [path] if path is not directory else weight_files(directory):
        with reading(file):
            state["model_state_dict"] |= read_weights(library, file)
    return state


def read_json(path: Path) -> dict:
    """Read a file's JSON object; raise ValueError if it is something else."""
    check_regular(path)
    if path.stat().st_size > LARGEST_JSON:
        raise ValueError(f"more than {LARGEST_JSON} bytes")
    value = json.loads(path.read_bytes())
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def weight_files(directory: Path) -> list[Path]:
    """List the safetensors files of a directory: model.safetensors, or those in the index."""
    if not (directory / INDEX).exists():
        return [directory / "model.safetensors"]
    with reading(directory / INDEX):
        names = sorted(set(read_json(directory / INDEX)["weight_map"].values()))
        odd = [name for name in names if Path(name).name != name]
        if odd:
            raise ValueError(f"{odd[0]!r} is not a file beside it")
    return [directory / name for name in names]


def read_weights(library, path: Path) -> dict[str, Tensor]:
    """Map the tensors of a safetensors file by name, without copying; raise ValueError for a dtype that no model
    has."""
    check_regular(path)
    with library.safe_open(path, framework="pt") as file:
        for name in file.keys():
            if (dtype := file.get_slice(name).get_dtype()) not in DTYPES:
                raise ValueError(f"{name} is of type {dtype}")
        return {name.removeprefix(PREFIX): file.get_tensor(name) for name in file.keys()}

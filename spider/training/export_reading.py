"""Read an export (spider/export) back, as --resume and sample.py do: `is_export`, `read_export`.

Only config.json and the safetensors are read, of any export, also of one that an earlier version wrote or that
transformers saved again. Nothing of it is executed.
"""

import json
from pathlib import Path

from torch import Tensor

from spider.errors import CheckpointError
from spider.files import is_count
from spider.training.checkpoint_format import check_regular, reading

PREFIX = "spider."                        # of the weights' names, since the adapter holds the model under this name
INDEX = "model.safetensors.index.json"
LARGEST_JSON = 1 << 24                    # bytes
DTYPES = {"F64", "F32", "F16", "BF16", "I64"}    # of weights, in the words of the format


def safetensors():
    """Return the library; CheckpointError with the remedy where it is not installed."""
    try:
        import safetensors.torch
    except ImportError:
        raise CheckpointError('safetensors is not installed: pip install -e ".[hf]"') from None
    return safetensors


def is_export(path: Path) -> bool:
    """Tell whether a path is that of an export, or of its weights."""
    return path.suffix == ".safetensors" or (path / "config.json").exists()


def read_export(path: Path) -> dict:
    """Read what an export, a directory or its only safetensors file, has of a checkpoint: weights, config, and the
    settings that the model is evaluated with. CheckpointError where a file is none that an export has."""
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
                raise ValueError(f"training.flags.{name}: {value!r} is no whole number")
    for file in [path] if path is not directory else weight_files(directory):
        with reading(file):
            state["model_state_dict"] |= read_weights(library, file)
    return state


def read_json(path: Path) -> dict:
    """Read a file's JSON object; ValueError where it is none."""
    check_regular(path)
    if path.stat().st_size > LARGEST_JSON:
        raise ValueError(f"more than {LARGEST_JSON} bytes")
    value = json.loads(path.read_bytes())
    if not isinstance(value, dict):
        raise ValueError("no JSON object")
    return value


def weight_files(directory: Path) -> list[Path]:
    """List the safetensors files of a directory: the only one, or those of the index."""
    if not (directory / INDEX).exists():
        return [directory / "model.safetensors"]
    with reading(directory / INDEX):
        names = sorted(set(read_json(directory / INDEX)["weight_map"].values()))
        odd = [name for name in names if Path(name).name != name]
        if odd:
            raise ValueError(f"{odd[0]!r} is no file beside it")
    return [directory / name for name in names]


def read_weights(library, path: Path) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file by name, which stay in it; ValueError for a type that no model has."""
    check_regular(path)
    with library.safe_open(path, framework="pt") as file:
        for name in file.keys():
            if (dtype := file.get_slice(name).get_dtype()) not in DTYPES:
                raise ValueError(f"{name} is of type {dtype}")
        return {name.removeprefix(PREFIX): file.get_tensor(name) for name in file.keys()}

"""What each kind of parameter is: its component, its optimizer, its precision."""

import torch
from torch import nn

from spider.model.casting import Linear

# Modules with one of these in their name stay in high precision.
NEVER_FP8 = ("boundary_predictor", "loop_embedding", "engram", "layernorm", "norm", "embed_tokens", "lm_head",
             "halt_predictor", "router")


def takes_fp8(module: nn.Module, name: str) -> bool:
    """Whether a module is one that FP8 converts."""
    return isinstance(module, nn.Linear) and not any(word in name for word in NEVER_FP8)


def halved_weights(model: nn.Module) -> list[nn.Parameter]:
    """Weights that all products take as bf16; those of FP8 are cast from fp32."""
    if model.compute_dtype != torch.bfloat16:
        return []
    linears = [m.weight for name, m in model.named_modules() if type(m) is Linear and takes_fp8(m, name)]
    return linears + [w for m in model.modules() if hasattr(m, "backend") and m.config.n_routed_experts
                      for w in (m.w_gate, m.w_up, m.w_down)]


# Linears that do not lie between hidden spaces.
APART = {"lm_head", "router", "boundary_predictor", "halt_predictor", "gate"}


def matrices_of(model: nn.Module) -> set[str]:
    """Names of the parameters that are matrices between hidden spaces, or stacks of them: what Muon is for. What else
    has two dimensions or more, a convolution's kernel or what the model does not know, is AdamW's."""
    names = set()
    for path, module in model.named_modules():
        own = ("weight",) if isinstance(module, nn.Linear) and APART.isdisjoint(path.split(".")) else ()
        own += getattr(module, "matrix_stacks", ())
        names |= {f"{path}.{name}" for name in own if module._parameters.get(name) is not None}
    return names


def component_of(name: str) -> str:
    """The line of the parameter table that a parameter belongs to."""
    parts = name.split(".")
    for part, component in (("table", "Engram tables"), ("followed", "Engram tables"), ("engram", "Engram projections"),
                            ("engram_input", "Engram projections"), ("engram_output", "Engram projections"),
                            ("prelude", "prelude"), ("coda", "coda"), ("boundary_predictor", "boundary predictor"),
                            ("attention", "core attention"), ("router", "router"), ("shared", "shared experts"),
                            ("moe", "routed experts"), ("out_proj", "handing back"), ("place_proj", "handing back"),
                            ("core", "loop adapters, injection, halting")):
        if part in parts:
            return component
    return "embedding and head"

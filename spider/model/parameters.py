"""One table of all kinds of parameters: component, optimizer, weight decay, precision, and how often products use them.

The first row of KINDS that matches a parameter applies. A row matches the class of its module, its name there, and a
word of its path. Parameters of new modules match the last rows: weights of Linears go to Muon and FP8, all others to
AdamW and fp32. `kinds_of(model)` returns the kind of every parameter.
"""

from dataclasses import dataclass
from enum import Enum

import torch
from torch import nn

from spider.model.casting import Linear

# Modules with one of these in their name stay in high precision, regardless of their row.
NEVER_FP8 = ("boundary_predictor", "loop_embedding", "engram", "layernorm", "norm", "embed_tokens", "lm_head",
             "halt_predictor", "router")
ENGRAM_TABLES = "Engram tables"


class Optimizer(Enum):
    """The optimizer of a parameter."""
    MUON = "muon"                         # matrices between hidden spaces, and stacks of them
    ADAMW = "adamw"
    ADAGRAD = "row-wise Adagrad"          # see optimizers.RowwiseAdagrad


class Precision(Enum):
    """The dtype in which products use a parameter; all are stored in fp32."""
    FP8 = "fp8"                           # under --precision fp8; else like BF16
    BF16 = "bf16"                         # only ever in bf16, so ranks gather half the bytes; FP8 with --fp8_experts
    FP32 = "fp32"                         # or cast on the fly


class Read(Enum):
    """Frequency with which the forward pass of a byte multiplies by a parameter."""
    BYTE = "once a byte"
    SEGMENT = "once a segment"
    LOOP = "in each loop of a segment"
    ONE_LOOP = "in its own loop of a segment"
    CHOSEN = "in each loop, the chosen experts of all"
    LOOKUP = "looked up, not multiplied"


@dataclass(frozen=True)
class Kind:
    """A row of the table."""
    owner: str                            # class of its module, or a base class
    names: str                            # its names there, separated by spaces; *: any
    within: str                           # words of its path; "": anywhere
    component: str
    optimizer: Optimizer
    decay: bool                           # weight decay; vectors and scalars never have it
    precision: Precision
    read: Read
    rate: float = 1.0                     # AdamW's learning rate, relative to that of others

    def fits(self, module: nn.Module, path: str, name: str) -> bool:
        return (self.names == "*" or name in self.names.split()) and (
            not self.within or f".{self.within}." in f".{path}.") and any(
            base.__name__ == self.owner for base in type(module).__mro__)


def kind_of(module: nn.Module, path: str, name: str) -> Kind:
    """Return the first row of the table that matches a module's parameter."""
    return next(kind for kind in KINDS if kind.fits(module, path, name))


_M, _A, _T = Optimizer.MUON, Optimizer.ADAMW, Optimizer.ADAGRAD
_8, _16, _32 = Precision
_BYTE, _SEGMENT, _LOOP, _ONE, _CHOSEN, _LOOKUP = Read
_ADAPTERS = "loop adapters, injection, halting"
KINDS = (
    #    held by          names                 on the path           component              optimizer, decay, precision
    Kind("EngramTable",   "weight",             "",                   ENGRAM_TABLES,         _T, False, _32, _LOOKUP),
    Kind("ByteEngram",    "followed",           "",                   ENGRAM_TABLES,         _M, True,  _32, _LOOKUP),
    Kind("SegmentEngram", "conv_weight",        "",                   "Engram projections",  _A, True,  _32, _LOOP),
    Kind("Linear",        "weight",             "engram_output.gate", "Engram projections",  _A, True,  _32, _BYTE),
    Kind("Linear",        "weight",             "engram_output.votes", "Engram projections", _A, True,  _32, _BYTE),
    Kind("Linear",        "weight",             "engram_output.logits", "Engram projections", _A, True, _32, _BYTE),
    Kind("Linear",        "weight",             "engram",             "Engram projections",  _M, True,  _32, _SEGMENT),
    Kind("Linear",        "weight",             "engram_input",       "Engram projections",  _M, True,  _32, _BYTE),
    Kind("Linear",        "weight",             "engram_output",      "Engram projections",  _M, True,  _32, _BYTE),
    Kind("Linear",        "weight",             "lm_head",            "embedding and head",  _A, True,  _32, _BYTE),
    Kind("Linear",        "weight bias",        "boundary_predictor.regression", "boundary predictor",
         _A, True, _32, _BYTE, 1 / 8),    # at the whole rate it is unstable
    Kind("Linear",        "weight bias",        "boundary_predictor", "boundary predictor",  _A, True,  _32, _BYTE),
    Kind("Linear",        "weight bias",        "halt_predictor",     _ADAPTERS,             _A, True,  _32, _LOOP),
    Kind("Linear",        "weight",             "router",             "router",              _A, True,  _32, _LOOP),
    Kind("MoE",           "w_gate w_up w_down", "",                   "routed experts",      _M, True,  _16, _CHOSEN),
    Kind("RecurrentCore", "lora_down lora_up",  "",                   _ADAPTERS,             _M, True,  _32, _ONE),
    Kind("RecurrentCore", "place_proj",         "",                   "unpooling",           _M, True,  _32, _SEGMENT),
    Kind("RecurrentCore", "loop_embedding",     "",                   _ADAPTERS,             _A, True,  _32, _LOOKUP),
    Kind("RecurrentCore", "log_A dt B",         "",                   _ADAPTERS,             _A, False, _32, _LOOP),
    Kind("Spider",        "embed_tokens",       "",                   "embedding and head",  _A, True,  _32, _LOOKUP),
    Kind("Spider",        "null_segment",       "",                   "embedding and head",  _A, False, _32, _LOOKUP),
    Kind("Linear",        "weight",             "prelude",            "prelude",             _M, True,  _8,  _BYTE),
    Kind("Linear",        "weight",             "coda",               "coda",                _M, True,  _8,  _BYTE),
    Kind("Linear",        "weight",             "attention",          "core attention",      _M, True,  _8,  _LOOP),
    Kind("Linear",        "weight",             "shared",             "shared experts",      _M, True,  _8,  _LOOP),
    Kind("Linear",        "weight",             "out_proj",           "unpooling",           _M, True,  _8,  _SEGMENT),
    # whatever a researcher adds
    Kind("Linear",        "weight",             "core",               _ADAPTERS,             _M, True,  _8,  _LOOP),
    Kind("Linear",        "weight",             "",                   "embedding and head",  _M, True,  _8,  _BYTE),
    Kind("Module",        "*",                  "prelude",            "prelude",             _A, True,  _32, _BYTE),
    Kind("Module",        "*",                  "coda",               "coda",                _A, True,  _32, _BYTE),
    Kind("Module",        "*",                  "core",               _ADAPTERS,             _A, True,  _32, _LOOP),
    Kind("Module",        "*",                  "",                   "embedding and head",  _A, True,  _32, _BYTE),
)


def kinds_of(model: nn.Module) -> dict[str, Kind]:
    """Return the kind of every parameter by name."""
    kinds, seen = {}, set()
    for path, module in model.named_modules():
        for name, p in module.named_parameters(recurse=False):
            if p not in seen:             # tied weights have one name
                kinds[f"{path}.{name}".lstrip(".")] = kind_of(module, path, name)
                seen.add(p)
    names = [name for name, _ in model.named_parameters()]
    assert kinds.keys() == set(names), "a parameter without a kind"
    return {name: kinds[name] for name in names}


def matrices_of(model: nn.Module) -> set[str]:
    """Return the names of the parameters that Muon steps: matrices between hidden spaces, or stacks of them."""
    return {name for name, kind in kinds_of(model).items() if kind.optimizer is Optimizer.MUON}


def takes_fp8(module: nn.Module, name: str) -> bool:
    """Return whether FP8 converts the module of this name."""
    if not isinstance(module, nn.Linear) or any(word in name for word in NEVER_FP8):
        return False
    return kind_of(module, name, "weight").precision is Precision.FP8


def halved_weights(model: nn.Module) -> list[nn.Parameter]:
    """Return the weights that products only use in bf16; those of FP8 are cast from fp32."""
    if model.compute_dtype != torch.bfloat16:
        return []
    linears = [m.weight for name, m in model.named_modules() if type(m) is Linear and takes_fp8(m, name)]
    kinds = kinds_of(model)
    return linears + [p for name, p in model.named_parameters() if kinds[name].precision is Precision.BF16]


def moe_layers(model: nn.Module) -> list[nn.Module]:
    """Return the MoE modules, which have attributes `backend` and `fp8`."""
    return [module for module in model.modules() if any(base.__name__ == "MoE" for base in type(module).__mro__)]

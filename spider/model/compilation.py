"""Compile each kind of layer to one graph by torch.compile."""

import logging

import torch
from torch import nn


def compile_layers(model: nn.Module, **settings) -> str | None:
    """Compile the layers of a Spider for passes with gradients; evaluation and decoding, with other shapes, stay eager.
    `settings` go to torch.compile; the numbers of segments and documents are dynamic sizes. The compiled function is
    `in_one_graph` of the layer's class, not the module, which has FSDP's hooks.

    Returns why the core's layers are not compiled, or None. They are left out if the graph would break."""
    obstacle, of_core = None, [] if model.core is None else list(model.core.layers)
    if model.compute_dtype != torch.bfloat16:
        obstacle = "torch.compile supports grouped products only in bf16"
    elif any(getattr(module, "backend", None) == "tile" for module in model.modules()):
        obstacle = "torch.compile does not support TileKernels; use --moe_backend grouped"
    model.compiled = True
    # torch warns of recomputed in-place operations; these only modify fresh tensors.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    compiled = {}                         # one per kind of layer
    for layer in (*model.prelude, *model.coda, *(() if obstacle else of_core)):
        function = type(layer).in_one_graph
        if function not in compiled:
            compiled[function] = torch.compile(function, **settings)
        layer.compiled = compiled[function]
    return obstacle


def uncompile_layers(model: nn.Module):
    """Run all layers uncompiled again."""
    model.compiled = False
    for layer in (*model.prelude, *model.coda, *(() if model.core is None else model.core.layers)):
        layer.compiled = None

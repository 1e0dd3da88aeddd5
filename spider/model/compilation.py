"""Have torch.compile make one graph of each kind of layer."""

import logging

import torch
from torch import nn


def compile_layers(model: nn.Module, **settings) -> str | None:
    """Compile the layers of a Spider for passes with gradients: evaluation and decoding, whose shapes differ, go
    without. Numbers of segments and documents are dynamic sizes; settings go to torch.compile. Of each layer the
    function that its class names in `in_one_graph` is compiled, not the module, whose hooks are those of FSDP.

    Returns why the core's layers are left out, or None: what would break their graph leaves nothing of it."""
    obstacle, of_core = None, [] if model.core is None else list(model.core.layers)
    if model.compute_dtype != torch.bfloat16:
        obstacle = "torch.compile takes grouped products in bf16 alone"
    elif any(getattr(module, "backend", None) == "tile" for module in model.modules()):
        obstacle = "torch.compile does not know TileKernels' operations; --moe_backend grouped is compiled"
    model.compiled = True
    # It warns of operations in place that are recomputed: here they write to what was made just before.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    compiled = {}                         # one for each kind of layer
    for layer in (*model.prelude, *model.coda, *(() if obstacle else of_core)):
        function = type(layer).in_one_graph
        if function not in compiled:
            compiled[function] = torch.compile(function, **settings)
        layer.compiled = compiled[function]
    return obstacle

"""Initialize every parameter and buffer of a model; find those that were left out."""

import math

import torch
from torch import Tensor, nn

from spider.model.attention import MLA
from spider.model.casting import Linear
from spider.model.engram import ByteEngram, OutputEngram, SegmentEngram
from spider.model.engram_table import EngramTable
from spider.model.layers import SwiGLU
from spider.model.match_memory import MatchMemory


class UninitializedTensors:
    """Detect tensors of a module that are never written: floats still have the NaN that they are filled with here,
    other tensors still have the same version. Tensors on the meta device are ignored."""

    def __init__(self, module: nn.Module):
        self.module = module
        for tensor in self._tensors().values():
            if tensor.is_floating_point():
                tensor.fill_(math.nan)
        self.before = {name: (tensor, tensor._version) for name, tensor in self._tensors().items()
                       if not tensor.is_floating_point()}

    def _tensors(self) -> dict[str, Tensor]:
        tensors = [*self.module.named_parameters(), *self.module.named_buffers()]
        return {name: tensor for name, tensor in tensors if not (tensor.is_meta or tensor.is_inference())}

    def names(self) -> list[str]:
        """Return the names of tensors that have not been written yet."""
        tensors = self._tensors()
        unwritten = {name: tensor is tensors.get(name) and tensor._version == version
                     for name, (tensor, version) in self.before.items()}
        return [name for name, tensor in tensors.items() if unwritten.get(name) or (
            tensor.is_floating_point() and bool(tensor.isnan().any()))]

    def reset(self):
        """Call reset_parameters of the modules with such tensors, or of the nearest parents that have it."""
        holders = []
        for name in self.names():
            path = name.split(".")[:-1]
            around = (self.module.get_submodule(".".join(path[:depth])) for depth in range(len(path), -1, -1))
            holders += [module for module in around if hasattr(module, "reset_parameters")][:1]
        for module in dict.fromkeys(holders):
            module.reset_parameters()


@torch.no_grad()
def init_weights(model: nn.Module):
    """Initialize every value of a Spider, buffers included:

        embed_tokens                        N(0, 1)
        Linear.weight, w_gate, w_up         N(0, 1 / fan_in); biases 0
        o_proj, down_proj, w_down           the same divided by sqrt(2 * layers, the core's counted once per loop)
        lm_head, halt_predictor             N(0, 0.02^2); the halting bias is -3: at 0 it would stick at one loop
        boundary_predictor                  the last bias is logit(boundary_prior); the gain of learned boundaries 0
        loop_embedding                      N(0, 0.02^2)
        log_A, dt, B                        such that A = 0.905 and B = 1. B = (1 - A) / (1 - A^n_loops) would keep the
                                            state at e's size, but then the layers' output drowns e; see
                                            docs/results/mechanisms.md
        lora_down, lora_up                  N(0, 1 / fan_in), 0
        core.out_proj, core.place_proj      0: at the start the core adds nothing to the bytes
        null_segment, conv_weight           0
        engram_output.logits, .votes        0, of votes the last Linear
        Engram tables, followed             0; their hash constants from the table's order in the model
        expert_bias                         0
        modules that a subclass adds        their reset_parameters, after all of these

    Raise RuntimeError with the names of uninitialized tensors."""
    uninitialized = UninitializedTensors(model)
    _init_layers(model)
    _init_byte_rate(model)
    if model.core is not None:
        _init_core(model.core)
    if model.config.learns_boundaries:
        model.boundary_predictor.init_weights()
    if model.config.boundaries == "flexitokens" and model.core is not None:
        prior = model.config.boundary_prior
        model.boundary_predictor[2].bias.fill_(math.log(prior / (1 - prior)))
    uninitialized.reset()
    if names := uninitialized.names():
        raise RuntimeError(f"uninitialized: {', '.join(names)}: add a reset_parameters() to the module; values from "
                           f"the constructor are lost when a model is built on the meta device")


def _init_layers(model: nn.Module):
    """Initialize the layers, in the order of modules; output projections of residual branches shrink with depth."""
    c = model.config
    depth = c.n_prelude_layers + c.n_recurrent_layers * c.n_loops + c.n_coda_layers
    tables = 0
    apart = {*model.boundary_predictor.modules()} if c.learns_boundaries else {}  # all else starts as with a rule
    for module in model.modules():
        if isinstance(module, Linear) and module not in apart:
            module.weight.normal_(std=module.in_features ** -0.5)
            if module.bias is not None:
                module.bias.zero_()
        elif hasattr(module, "expert_bias"):
            module.expert_bias.zero_()
            if c.n_routed_experts:
                module.w_gate.normal_(std=c.hidden_size ** -0.5)
                module.w_up.normal_(std=c.hidden_size ** -0.5)
                module.w_down.normal_(std=(2 * depth * c.moe_intermediate_size) ** -0.5)
        elif isinstance(module, EngramTable):
            module.weight.zero_()
            module.forget()
            module.init_hash(tables)
            tables += 1
        elif isinstance(module, SegmentEngram):
            module.conv_weight.zero_()
        elif isinstance(module, MatchMemory):
            module.init_hash(0)
        elif isinstance(module, ByteEngram) and module.followed is not None:
            module.followed.zero_()
    for module in model.modules():
        if isinstance(module, (MLA, SwiGLU)):
            (module.o_proj if isinstance(module, MLA) else module.down_proj).weight.mul_((2 * depth) ** -0.5)
        elif isinstance(module, OutputEngram):
            for linear in (module.logits, module.votes and module.votes[2]):
                if linear is not None:
                    linear.weight.zero_()


def _init_byte_rate(model: nn.Module):
    model.embed_tokens.normal_()
    model.lm_head.weight.normal_(std=0.02)
    if model.core is not None:
        model.null_segment.zero_()


def _init_core(core: nn.Module):
    c, rate = core.config, 0.1
    core.loop_embedding.normal_(std=0.02)
    core.out_proj.weight.zero_()
    if c.places > 1:
        core.place_proj.zero_()
    if c.lti:
        core.log_A.zero_()
        core.dt.fill_(math.log(math.expm1(rate)))
        core.B.fill_(1)
    if c.lora_rank:
        core.lora_down.normal_(std=c.hidden_size ** -0.5)
        core.lora_up.zero_()
    if c.act:
        core.halt_predictor.weight.normal_(std=0.02)
        core.halt_predictor.bias.fill_(-3)

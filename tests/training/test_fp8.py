"""FP8 emulated on a CPU: converted layers, scales, steps."""

import math
from dataclasses import replace

import pytest
import torch

import train
from conftest import SMALL, awake, resolved, small_config, text, world_of
from data import Batch
from spider.model.layers import Linear, rms_norm
from spider.training.fp8 import convert_to_fp8, input_scale, takes_fp8
from spider.training.optim import Optimizers
from spider_model import Spider
from train import StepSettings, train_step


def convert(model: Spider, experts: bool = False, step_bytes: int = 64):
    convert_to_fp8(model, torch.device("cpu"), experts, step_bytes)


def test_fp8_converts_the_right_linears_and_keeps_the_state():
    model = awake(small_config())
    names = {name for name, module in model.named_modules() if takes_fp8(module, name)}
    assert {"prelude.0.attention.q_a_proj", "core.layers.0.moe.shared.down_proj"} <= names
    for word in ("engram", "lm_head", "router", "boundary_predictor", "halt_predictor"):
        assert not any(word in name for name in names)
    keys = [*model.state_dict()]
    convert(model, experts=True)
    assert [*model.state_dict()] == keys


@pytest.mark.parametrize("width, scale", ((4096, 4), (2048, 8), (768, 16), (320, 16), (128, 32)))
def test_scale_of_normed_inputs_is_the_largest_safe_power_of_two(width, scale):
    """The largest possible output of rms_norm, sqrt(width), comes from a token with one nonzero
    number; scaled, it must stay within float8_e4m3's 448."""
    token = torch.zeros(1, width)
    token[0, 3] = 5
    largest = float(rms_norm(token, eps=0).amax())
    assert input_scale(Linear(width, 16, normed_input=True)) == scale
    assert largest * scale <= 448 < 2 * largest * scale
    assert input_scale(Linear(width, 16)) is None


@pytest.mark.parametrize("ranks", (1, 2))
@pytest.mark.parametrize("grad_accum, scale", ((1, 2**15), (7, 2**18)))
def test_scale_of_gradients_is_near_256_times_the_bytes_per_rank_and_step(grad_accum, scale, ranks):
    flags = f"--precision=fp8 --micro_batch=2 --seq_len=64 --set={SMALL} --grad_accum={grad_accum}"
    plan = replace(resolved(*flags.split()), ranks=ranks)
    model = train.build_model(plan.model, plan, world_of())
    scales = [float(m.scale_of_grad) for m in model.modules() if hasattr(m, "scale_of_grad")]
    assert {*scales} == {scale}


@pytest.mark.parametrize(
    "name", ("prelude.0.attention.q_a_proj", "coda.0.ffn.down_proj", "core.out_proj")
)
def test_infinite_gradient_in_fp8_skips_the_step(name):
    """Saturation must not make the gradient finite."""
    model = awake(small_config())
    ids = text(2, 64)
    model.compute_dtype = torch.bfloat16
    convert(model, step_bytes=ids.numel())

    def overflow(grad):
        grad = grad.clone()
        grad[0, 0] = math.inf
        return grad

    def overflow_in_backward(module, args, y):
        y.register_hook(overflow)

    model.get_submodule(name).register_forward_hook(overflow_in_backward)
    optimizers = Optimizers(model, "adamw")
    metrics, _ = train_step(model, optimizers, [Batch.of(ids, ids, 0)], StepSettings(2))
    assert metrics["skipped"]


def test_fp8_linear_adds_its_bias_in_training_and_evaluation():
    model = awake(small_config())
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    model.extra = Linear(32, 32, bias=True)
    with torch.no_grad():
        model.extra.weight.zero_()
        model.extra.bias.fill_(5)
    convert(model)
    assert all((model.train(mode).extra(x) == 5).all() for mode in (True, False))


def test_fp8_product_pads_inner_dimensions_to_multiples_of_16():
    """The inner dimensions are the input's width (output), the output's width (gradient of the
    input) and the number of tokens (gradient of the weight)."""
    model = awake(small_config())
    model.extra = Linear(32, 24)
    convert(model)
    for tokens, name, other in ((16, "aligned", "ragged"), (17, "ragged", "aligned")):
        products = getattr(model.extra, f"mm_config_{name}")
        assert [p.pad_inner_dim for p in products] == [False, True, tokens == 17]
        kept = getattr(model.extra, f"mm_config_{other}")
        delattr(model.extra, f"mm_config_{other}")  # not read for this many tokens
        assert model.extra(torch.ones(tokens, 32)).shape == (tokens, 24)
        setattr(model.extra, f"mm_config_{other}", kept)


@pytest.mark.parametrize("device", ("cpu", "meta"))
def test_only_a_cpu_emulates_fp8(device):
    with torch.device(device):
        model = Spider(small_config())
    convert_to_fp8(model, torch.device(device), experts=False, step_bytes=64)
    configs = [m.mm_config_ragged for m in model.modules() if hasattr(m, "mm_config_ragged")]
    assert {config.output.emulate for config in configs} == {device == "cpu"}


def test_fp8_tokens_are_independent_if_the_scale_is_constant():
    """A scale from the maximum over all tokens would round a token differently next to a larger
    one."""
    model = awake(small_config())
    convert(model)
    attention = model.prelude[0].attention
    generator = torch.Generator().manual_seed(0)
    for linear, is_independent in ((attention.q_a_proj, True), (attention.o_proj, False)):
        x = torch.randn(2, linear.in_features, generator=generator)
        upstream = torch.randn(2, linear.out_features, generator=generator) / 64
        results = []
        for factor in (1.0, 3.7):  # scales the second token's values and gradients
            factors = torch.tensor([[1.0], [factor]])
            tokens = (x * factors).requires_grad_()
            y = linear(tokens)
            y.backward(upstream * factors)
            results.append((y[0].detach(), tokens.grad[0]))
        (y, grad), (other_y, other_grad) = results
        assert torch.equal(y, other_y) == is_independent
        assert torch.equal(grad, other_grad)


def test_evaluation_does_not_use_fp8():
    model = awake(small_config())
    model.compute_dtype = torch.bfloat16
    ids = text(2, 64)

    def logits(training: bool) -> torch.Tensor:
        return model.train(training)(ids, noise_seed=0).logits

    trained = logits(training=True)
    evaluated = logits(training=False)
    convert(model, experts=True, step_bytes=ids.numel())
    assert not torch.equal(logits(training=True), trained)
    assert torch.equal(logits(training=False), evaluated)

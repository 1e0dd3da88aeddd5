"""Count how often the host waits for the GPU, which then idles. A CPU that stands in for the GPU
records the calls."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import train
from conftest import awake, small_config, text, world_of
from data import Batch
from spider.config import PRESETS, SpiderConfig
from spider.training.optim import Optimizers
from stand_in_gpu import stand_in_gpu


def small_1b():
    model = awake(small_config(**PRESETS["1b"]))
    model.compute_dtype = torch.bfloat16
    return model


def test_step_waits_once_per_micro_step_and_once_before_the_update(monkeypatch):
    monkeypatch.setattr("spider.training.optim.has_bf16", lambda device: False)
    model = small_1b()
    optimizers = Optimizers(model)
    batches = [Batch.of(ids, ids, 0) for ids in text(4, 64).split(1)]
    with stand_in_gpu() as gpu:
        train.train_step(model, optimizers, batches, train.StepSettings(2, dropout=0.1))
    assert len(gpu.waits) == 4 + 1, gpu.waits


def test_evaluation_waits_four_times_per_batch_and_once_at_the_end():
    """Waits per batch: copying ids, copying labels, finding documents, finding segments."""
    model = small_1b()
    ids = text(6, 64)
    with stand_in_gpu() as gpu:
        train.evaluate(model, {"": (ids, ids)}, 2, 2, world_of("cuda"))
    assert len(gpu.waits) == 3 * 4 + 1, gpu.waits


class Kernels(TorchDispatchMode):
    """Count the operations that compute something, which a GPU needs a kernel for: not views, and
    not memory without values."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        is_new = storages(out) - storages((args, kwargs))
        if func._schema.is_mutable or (is_new and "empty" not in func._schema.name):
            self.count += 1
        return out


def storages(values) -> set[int]:
    """Return the addresses of the storages of all tensors in nested values."""
    tensors = [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def test_decoded_byte_of_1b_needs_few_kernels_and_waits_for_its_id_and_its_boundary():
    """The number of kernels depends on the numbers of layers, loops and contexts, which are those
    of `1b`, and not on their sizes."""
    fields = "n_prelude_layers n_recurrent_layers n_coda_layers n_loops engram_layers".split()
    layers = {name: getattr(SpiderConfig(), name) for name in fields}
    model = awake(small_config(**PRESETS["1b"] | layers)).eval()
    model.compute_dtype = torch.bfloat16
    most = {0: 450, 1: 3500}  # kernels by the number of segments that end
    seen = set()
    with stand_in_gpu() as gpu, model.cast_weights_once():
        state = model.decoding_state()
        model.step(text(1, 1), state)  # reads the constants of hashes, too
        for ids in text(1, 20).split(1, dim=1):
            before = state.segments
            gpu.waits.clear()
            with Kernels() as kernels:
                model.step(ids, state)
            ended = int((state.segments - before).sum())
            assert 100 < kernels.count < most[ended]
            assert len(gpu.waits) == 2, gpu.waits
            seen.add(ended)
    assert seen == {0, 1}


def test_generation_waits_for_each_drawn_byte_and_its_boundary():
    model = small_1b().eval()
    generator = torch.Generator().manual_seed(1)
    with stand_in_gpu() as gpu:
        state = model.decoding_state()
        logits = model.step(text(1, 1), state)[:, -1]
        gpu.waits.clear()
        written = [*model.generate_batch(logits, state, 20, generator=generator)]
    assert len(written) == 20
    assert 0 < state.segments < 20
    assert len(gpu.waits) == 20 + 19, gpu.waits

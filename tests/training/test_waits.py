"""Count how often the host waits for the GPU, which then idles. A CPU that stands in for the GPU
records the calls."""

import torch

import train
from conftest import awake, small_config, text, world_of
from data import Batch
from spider.config import PRESETS
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


def test_decoding_waits_eight_times_per_byte_and_seven_per_segment():
    """Reading the previous byte waits four times, and so does sampling."""
    model = small_1b().eval()
    generator = torch.Generator().manual_seed(0)
    with stand_in_gpu() as gpu:
        state = model.decoding_state()
        logits = model.step(text(1, 1), state)[:, -1]
        written = [*model.generate_batch(logits, state, 20, generator=generator)]
    segments = int(state.segments)
    assert len(written) == 20
    assert 0 < segments < 20
    assert len(gpu.waits) == 20 * (4 + 4) + segments * 7, gpu.waits

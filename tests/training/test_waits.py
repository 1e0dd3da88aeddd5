"""Where the host waits for a GPU, which then has nothing to do. A CPU that stands in for it records
the calls."""

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


def test_a_step_waits_once_in_a_micro_step_and_once_before_the_update(monkeypatch):
    monkeypatch.setattr("spider.training.optim.has_bf16", lambda device: False)
    model = small_1b()
    optimizers = Optimizers(model)
    batches = [Batch.of(ids, ids, 0) for ids in text(4, 64).split(1)]
    with stand_in_gpu() as gpu:
        train.train_step(model, optimizers, batches, train.StepSettings(2, dropout=0.1))
    assert len(gpu.waits) == 4 + 1, gpu.waits


def test_an_evaluation_waits_four_times_a_batch_and_once_at_the_end():
    """To copy ids and labels, and to find documents and segments."""
    model = small_1b()
    ids = text(6, 64)
    with stand_in_gpu() as gpu:
        train.evaluate(model, {"": (ids, ids)}, 2, 2, world_of("cuda"))
    assert len(gpu.waits) == 3 * 4 + 1, gpu.waits


def test_a_decoded_byte_waits_eight_times_and_seven_times_more_where_a_segment_ends():
    """Of the eight, four belong to the step that reads the byte before, and four to the draw."""
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

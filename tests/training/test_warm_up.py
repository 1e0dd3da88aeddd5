"""The warm-up proves that a step fits into a GPU's memory. Here a CPU stands in for the GPU."""

import weakref

import pytest
import torch

import train
from conftest import (
    SMALL,
    final_state,
    metrics,
    resolved,
    text,
    world_of,
)
from data import Batch, Loader, mock_source
from spider_model import Spider


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch):
    monkeypatch.setattr(train, "can_test_memory", lambda world: True)
    monkeypatch.setattr(train.machine, "memory_of", lambda *_: 1e12)  # enough by the estimate
    monkeypatch.setattr(train.machine, "peak_memory", lambda device: 0.5)  # GB


def model_that_fits(most: int) -> type[Spider]:
    """Return a class of models that run out of memory with more than `most` sequences, and that
    check at the start of a pass that the activations of earlier passes are gone."""
    kept = []

    class Filling(Spider):
        def predict_boundaries(self, x):
            assert not any(reference() is not None for reference in kept)
            kept.append(weakref.ref(x))
            if self.training and len(x) > 32 * most:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB.")
            return super().predict_boundaries(x)

    return Filling


def log_of(new_log, argv, most: int) -> list[str]:
    """Run train.py; return the log lines, without their time, on micro-batches that do not fit."""
    assert train.command_line(argv, model_that_fits(most)) == 0
    return [line.partition(" ")[2] for line in new_log().splitlines() if "needs at least" in line]


@pytest.mark.parametrize(
    "batch, most, expected",
    (
        ("--global_batch 256", 3, [(4, 2), (2, 4)]),
        ("--micro_batch 6 --grad_accum 2", 5, [(3, 4)]),
        ("--micro_batch 9", 8, [(3, 3)]),  # not 4, which does not divide 9
    ),
)
def test_micro_batch_is_halved_until_it_fits_at_equal_bytes_per_step(
    batch, most, expected, tmp_path, argv_of, new_log
):
    argv = argv_of("--eval_every 0 --ckpt_every 2", batch, steps=4)
    if "micro_batch" not in batch:
        index = argv.index("--micro_batch")
        del argv[index : index + 2]
    lines = log_of(new_log, argv, most)
    assert len(lines) == len(expected)
    for line, (micro_batch, grad_accum) in zip(lines, expected, strict=True):
        assert f"using --micro_batch {micro_batch} --grad_accum {grad_accum}" in line
    sequences = micro_batch * grad_accum
    state = final_state(tmp_path / "run")
    assert state["bytes_seen"] == 4 * 32 * sequences
    assert state["flags"]["micro_batch"] == micro_batch
    assert state["flags"]["global_batch"] == 32 * sequences

    # The resumed run keeps a micro-batch that was chosen, and retries one that was given.
    argv += ["--max_steps", "6"]
    assert log_of(new_log, argv, most) == ([] if "global" in batch else lines)
    assert final_state(tmp_path / "run")["flags"] == state["flags"]
    assert len(metrics(tmp_path / "run")) == 6


def test_run_ends_with_a_remedy_if_one_sequence_does_not_fit(tmp_path, error_of):
    line = error_of("--micro_batch 2", model=model_that_fits(0))
    assert "out of memory (2.50 GiB requested): halve --micro_batch and double" in line
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_fitting_leaves_a_tenth_of_memory_plus_the_optimizers_state(monkeypatch):
    """AdamW takes 8 bytes per parameter; a table's optimizer takes 4 bytes per row."""
    flags = f"--model tiny --set {SMALL} --optimizer adamw --seq_len 32 --micro_batch 8"
    plan = resolved(*flags.split())
    loader = Loader([mock_source(0)], 32, 0)
    model = train.build_model(plan.model, plan, world_of())
    optimizers = train.optimizers_of(plan.flags, model)
    tables = [p for name, p in model.named_parameters() if name.endswith("table.weight")]
    others = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in tables)
    to_come = 8 * others + 4 * sum(map(len, tables))
    tried = []
    monkeypatch.setattr(train.machine, "memory_of", lambda *_: 1e9)
    monkeypatch.setattr(train, "warm_up", lambda _, plan, batch: tried.append(len(batch.ids)))

    def micro_batches_tried(bytes_left: float) -> list[int]:
        """Fake a peak, proportional to the micro-batch, that leaves `bytes_left` with 8."""
        tried.clear()
        taken = 1e9 - bytes_left
        monkeypatch.setattr(train.machine, "peak_memory", lambda _: taken * tried[-1] / 8e9)
        fitted = train.fit_micro_batch(model, optimizers, plan, loader, world_of())
        assert fitted.flags.micro_batch == tried[-1]
        return tried

    assert micro_batches_tried(1.001e8 + to_come) == [8]
    assert micro_batches_tried(0.999e8 + to_come) == [8, 4]
    assert micro_batches_tried(1.001e8) == [8, 4]
    ids = text(2, 32)
    train.train_step(model, optimizers, [Batch.of(ids, ids, 0)], train.StepSettings(1))
    assert micro_batches_tried(1.001e8) == [8]  # the state is part of the peak now
    assert micro_batches_tried(0.999e8) == [8, 4]
    assert micro_batches_tried(-8e9) == [8, 4, 2, 1]  # one sequence is always accepted


def test_memory_is_proved_only_on_a_single_gpu(monkeypatch):
    """Several ranks, which would have to agree, run out of memory in a step, with a remedy."""
    monkeypatch.undo()
    world = world_of("cuda")
    assert train.can_test_memory(world)
    world.ranks = 2
    assert not train.can_test_memory(world)
    assert not train.can_test_memory(world_of())

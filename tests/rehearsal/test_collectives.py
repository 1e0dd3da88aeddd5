"""Several GPUs in one process: each rank in turn runs on fake CUDA tensors, under torch's "fake"
process group. NCCL accepts every collective, and the ranks' collectives match."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pprint import pformat

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

# lets collectives take fake tensors
from torch.distributed._tools import fake_collectives  # noqa: F401
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

import train
from collectives import Collective, CollectiveRecorder, disagreements
from rehearsal import gpu
from rehearsal.refusals import Watch, tensors
from spider.training import resolve, run, state
from spider.training.distributed import World

pytestmark = pytest.mark.rehearsal


class AbsentStream:
    """A stream or event without a GPU: all methods do nothing."""

    def __init__(self, *_, **__):
        pass

    def __getattr__(self, _):
        return gpu.always(self)


class WatchFake(Watch):
    """Watch only fake tensors, since the mesh of ranks is real."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        operands = tensors((args, kwargs))
        if operands and not any(isinstance(t, FakeTensor) for t in operands):
            return func(*args, **kwargs or {})
        return super().__torch_dispatch__(func, types, args, kwargs)


def stand_in():
    """Let torch report GPUs, and start a fake process group instead of NCCL's."""
    gpu.stand_in()
    torch.cuda.Stream = torch.cuda.Event = AbsentStream
    torch.cuda.current_stream = gpu.always(AbsentStream())
    torch.cuda.stream = gpu.always(nullcontext())
    start_group = dist.init_process_group
    make_mesh = dist.init_device_mesh

    def start_fake_group(backend, store, device_id, **settings):
        assert backend == "nccl"
        start_group("fake", store=FakeStore(), **settings)

    def make_real_mesh(*args, **settings):
        with _disable_current_modes():
            return make_mesh(*args, **settings)

    dist.init_process_group = start_fake_group
    dist.init_device_mesh = make_real_mesh
    dist.rendezvous = lambda *_, **__: iter([(dist.HashStore(), None, None)])
    World._require_own_gpu = gpu.always(None)  # it reads other ranks' GPUs


@contextmanager
def joined(rank: int, ranks: int, shards: int) -> Iterator[tuple[World, list[Collective]]]:
    """Join as a rank; yield its world and the list that collects its collectives."""
    environ = dict(
        RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks)
    )
    world = World(environ)
    calls = []
    with CollectiveRecorder(calls.append):
        world.join(gpu.DEVICE, shards, 60.0)
        yield world, calls
    world.leave()


def faults_of(calls: list[Collective]) -> list[str]:
    return [fault for one in calls for fault in one.faults("cuda")]


@pytest.mark.parametrize(
    "ranks, shards, flags",
    (
        (4, 2, "--precision=bf16"),
        (2, 2, "--precision=fp8 --optimizer=adamw"),
        pytest.param(16, 16, "--precision=bf16", marks=pytest.mark.slow),
    ),
)
def test_nccl_accepts_the_collectives_of_all_ranks(ranks, shards, flags):
    """A step, a save, a load and an evaluation. Some of 16 shards orthogonalize no matrix."""
    stand_in()
    words = (
        f"--model=tiny --seq_len=256 --micro_batch=4 --grad_accum=2 --compile=off "
        f"--moe_backend=grouped --shards={shards} {flags}"
    ).split()
    calls_by_rank = []
    saved = None  # the first rank's checkpoint
    with FakeTensorMode(), WatchFake(700) as watch:
        with joined(0, ranks, shards) as (gpu.WORLD, calls):
            plan = resolve.resolve_plan(
                train.parse_args(words, environ={}), train.RECIPES, gpu.WORLD
            )
            gpu.WORLD.on_rank0(lambda: "result")
        assert not faults_of(calls)
        for rank in range(ranks):
            with joined(rank, ranks, shards) as (gpu.WORLD, calls):
                model, optimizers = gpu.build(plan)
                batches = [gpu.batch_of(plan, documents=20) for _ in range(plan.flags.grad_accum)]
                watch.waits.clear()
                now = train.StepSettings(plan.flags.n_loops)
                train.train_step(model, optimizers, batches, now, stop=run.StopSignals(ranks))
                assert len(watch.waits) == plan.flags.grad_accum + 1, watch.waits
                whole = dict(model=state.model_state(model), optimizers=optimizers.state_dict())
                copied = state.copy_to_host(whole, None, gpu.WORLD.is_rank0)
                saved = saved or copied
                # the fake group sends no objects, so every rank reads the checkpoint
                World.on_rank0 = lambda world, work, for_others=None: work()
                state.load_model(model, saved["model"])
                optimizers.load_state_dict(saved["optimizers"])
                train.evaluate(
                    model, {"": (batches[0].ids, batches[0].ids)}, 3, plan.flags.n_loops, gpu.WORLD
                )
            calls_by_rank.append(calls)
    assert not watch.refused, pformat(watch.refused, width=200)
    assert not faults_of(sum(calls_by_rank, []))
    assert not disagreements(calls_by_rank)
    names = {one.name for one in calls_by_rank[0]}
    assert names >= {"allgather_base", "reduce_scatter_base", "allreduce", "broadcast", "recv"}, (
        names
    )

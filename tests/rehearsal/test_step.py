"""A GPU accepts every operation of a step (eager and compiled), an evaluation, decoding and an
export; the host waits once per micro-step and once per step; graphs serve all sizes; kernels
compile to machine code."""

import inspect
import mmap
import os
import re
from pathlib import Path
from pprint import pformat

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.codecache import PyCodeCache
from torch._subclasses.fake_tensor import FakeTensorMode

import train
from cubins import spills
from rehearsal import gpu
from rehearsal.refusals import REFUSALS, UNCHECKED, Watch, of
from spider.model.decode import draw
from spider.training.plan import Plan
from spider.vocabulary import EOS_ID

pytestmark = pytest.mark.rehearsal
# sequences x bytes
BATCH = "16x256"
RAGGED = "3x200"  # 600 tokens, no multiple of 16
# Models on an H100; on sm_120 `auto` multiplies experts with spider/model/grouped_triton.py
STEPS = [
    *(
        (model, precision, 90, "grouped", BATCH)
        for model in gpu.MODELS
        for precision in ("bf16", "fp8")
    ),
    ("1b", "bf16", 120, "auto", BATCH),
    ("1b", "fp8", 90, "grouped", RAGGED),
]
# the architectures that TileKernels supports
TILE = [("1b", "bf16", architecture, "tile", BATCH) for architecture in (90, 100, 120)]
# Documents, segments, bound of document lengths
SIZES = {
    BATCH: (
        (16, 800, 256),
        (21, 700, 256),
        (30, 1000, 64),
        (17, 640, 256),
        (64, 913, 128),
        (40, 3000, 256),
    ),
    RAGGED: (
        (3, 150, 200),
        (5, 140, 128),
        (9, 201, 64),
        (3, 288, 200),
        (40, 430, 64),
        (4, 599, 200),
    ),
}
KERNEL = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str='cuda'\)", re.S)
CUBINS = [("bf16", architecture) for architecture in (80, 89, 90, 100, 120)] + [
    ("fp8", architecture) for architecture in (89, 90, 100, 120)
]  # FP8 needs sm_89


def test_every_row_of_refusals_catches_its_example():
    gpu.stand_in()
    with FakeTensorMode():
        for row in REFUSALS:
            with Watch() as watch:
                row.example()
            assert row.message in {reason for _, _, reason in watch.refused}, row
        with Watch() as watch:
            of(torch.int64, 4, 4) @ of(torch.int64, 4, 4)
        with torch.inference_mode(), Watch() as in_inference:
            # `linear` arrives undecomposed, as from torchao
            F.linear(of(torch.bfloat16, 4, 4), of(torch.float32, 4, 4))
    assert "not implemented for torch.int64" in str(watch.refused)
    assert "expected mat1 and mat2 to have the same dtype" in str(in_inference.refused)


WAITING = (
    lambda x, mask: x.tolist(),
    lambda x, mask: x.cpu(),
    lambda x, mask: bool(mask.any()),
    lambda x, mask: x.copy_(torch.ones(4)),
    lambda x, mask: x[[0, 2]],
    lambda x, mask: mask.nonzero(),
    lambda x, mask: torch.tensor([1.0, 2.0], device=gpu.DEVICE),
    lambda x, mask: x.masked_fill_(mask, x.max()),
    lambda x, mask: x.__setitem__(mask, x[:2]),
)
AT_ONCE = (
    lambda x, mask: torch.ones(4).to(gpu.DEVICE, non_blocking=True),
    lambda x, mask: x.masked_fill_(mask, 0.0),
    lambda x, mask: torch.full((4,), 1.0, device=gpu.DEVICE),
    lambda x, mask: torch.where(mask, x, 0.0),
)


def test_watch_counts_waits_for_the_gpu():
    gpu.stand_in()
    for examples, waits in ((WAITING, 1), (AT_ONCE, 0)):
        for example in examples:
            with FakeTensorMode(), Watch(2) as watch:
                example(of(torch.float32, 4), of(torch.bool, 4))
            assert len(watch.waits) == waits, inspect.getsource(example)


def test_torchs_libraries_contain_the_messages_of_refusals():
    missing = {row.message for row in REFUSALS} - {*UNCHECKED}
    for name in ("libtorch_cuda.so", "libtorch_cpu.so"):
        file = os.open(Path(torch.__file__).parent / "lib" / name, os.O_RDONLY)
        library = mmap.mmap(file, 0, prot=mmap.PROT_READ)
        missing = {message for message in missing if library.find(message.encode()) < 0}
    assert not missing


def resolve_plan(model: str, precision: str, architecture: int, backend: str, batch: str) -> Plan:
    """Return the plan of one of STEPS, with two micro-steps, on a GPU of its architecture."""
    gpu.stand_in(architecture)
    micro_batch, seq_len = batch.split("x")
    return gpu.resolve_plan(
        model,
        f"--precision={precision}",
        f"--moe_backend={backend}",
        "--grad_accum=2",
        f"--micro_batch={micro_batch}",
        f"--seq_len={seq_len}",
    )


def check_call(kernel, *args):
    """Check the tensors of a call to a kernel of TileKernels without running it."""
    for parameter, given in zip(kernel.params, args, strict=True):
        if isinstance(given, torch.Tensor):
            assert (
                given.is_cuda and given.is_contiguous() and given.dtype == parameter.torch_dtype()
            )


@pytest.mark.parametrize("model, precision, architecture, backend, batch", STEPS + TILE)
def test_gpu_kernels_accept_all_operations_of_spider(
    model, precision, architecture, backend, batch
):
    if backend == "tile":  # compile each kernel of TileKernels that is called, without running it
        os.environ |= dict(
            TILELANG_TARGET=f"cuda -arch=sm_{architecture}", TILELANG_DISABLE_CACHE="1"
        )
        tilelang = pytest.importorskip("tilelang", reason="needs TileKernels: see conftest.py")
        tilelang.JITKernel.__call__ = check_call
    plan = resolve_plan(model, precision, architecture, backend, batch)
    documents, segments, max_seqlen = SIZES[batch][0]
    with FakeTensorMode(), Watch(segments) as watch:
        spider, optimizers = gpu.build(plan)
        watch.waits.clear()  # initialization waits, too
        gpu.step(plan, spider, optimizers, documents, max_seqlen, dropout=0.1)
        assert len(watch.waits) == plan.flags.grad_accum + 1, watch.waits
        # two layers, two products per visit
        weight_grads = 2 * 2 * plan.flags.n_loops * plan.flags.grad_accum
        assert watch.count["grouped_weight_grad"] == (weight_grads if backend == "auto" else 0)
        ids = torch.empty(3, 64, dtype=torch.int64, device=gpu.DEVICE)
        watch.number = 4
        train.evaluate(spider, {"": (ids, ids)}, 3, 2, gpu.WORLD)
        watch.number = EOS_ID  # all samples end after one byte
        train.log_sample(spider, 1, plan.flags, {"": (ids, ids)})
        assert watch.count["exponential"] == 1
        watch.number = 65  # each byte that is read
        spider.eval()
        with torch.no_grad(), spider.cast_weights_once():
            for n in (1, 3):
                state = spider.decoding_state(n, n_loops=2)
                # truth: whether a segment ends
                for length, watch.truth in ((8, False), (1, False), (1, True)):
                    logits = spider.step(ids[:n, :length], state)[:, -1]
                draw(logits, 0, None, None, None)
                draw(logits, 0.8, 50, 0.9, None)
        from spider.inference import modeling_spider as adapter  # imports transformers

        adapter.Spider = gpu.always(spider)
        watch.truth = False
        export = adapter.SpiderForCausalLM(
            adapter.SpiderHFConfig(vars(spider.config), dtype=torch.bfloat16)
        ).eval()
        export(ids, attention_mask=torch.ones_like(ids), labels=ids)
        export(ids[:, :8], use_cache=True)
    assert not watch.refused, pformat(watch.refused, width=200)


@pytest.mark.parametrize("model, precision, architecture, backend, batch", STEPS)
def test_compiled_steps_of_any_size_and_settings_add_no_graph(
    model, precision, architecture, backend, batch
):
    plan = resolve_plan(model, precision, architecture, backend, batch)
    graphs = gpu.generating()
    made = []  # number of graphs after each step
    with FakeTensorMode(), Watch() as watch:
        spider, optimizers = gpu.build(plan, compiled=True)
        for documents, watch.number, max_seqlen in SIZES[batch]:
            watch.waits.clear()
            part = len(made) / 10
            optimizers.set_lr(plan.flags.lr, 1 - part)
            gpu.step(
                plan,
                spider,
                optimizers,
                documents,
                max_seqlen,
                dropout=part,
                halting_warmup=1 - part,
            )
            made.append(len(graphs))
            assert len(watch.waits) == plan.flags.grad_accum + 1, watch.waits
    assert not watch.refused, pformat(watch.refused, width=200)
    assert made[0] > 0 and made == made[:1] * len(SIZES[batch])
    assert not torch._dynamo.utils.counters["graph_break"]
    assert (architecture == 120) == any(
        "spider.grouped_product" in graph.source for graph in graphs
    )


@pytest.mark.slow
@pytest.mark.parametrize("precision, architecture", CUBINS)
def test_generated_kernels_compile_in_every_configuration(precision, architecture):
    gpu.stand_in(architecture)
    plan = gpu.resolve_plan("1b", f"--precision={precision}")
    graphs = gpu.generating()
    with FakeTensorMode(), Watch(800):
        gpu.step(plan, *gpu.build(plan, compiled=True), documents=16)
    names = {}  # kernels by source, since graphs share kernels
    for graph in graphs:
        names |= {source: name for name, source in KERNEL.findall(graph.source)}
    made = []  # configurations of each kernel
    for source, name in names.items():
        kernel = getattr(PyCodeCache.load(source), name)
        kernel.precompile(warm_cache_only=True)
        made.append([result.kernel for result in kernel.compile_results])
        assert {one.metadata.target.arch for one in made[-1]} == {architecture}, name
        assert not all(spills(one) for one in made[-1]), name
    print(
        f"sm_{architecture}, {precision}: {len(made)} kernels, {sum(map(len, made))} configurations"
    )
    assert len(made) > 50

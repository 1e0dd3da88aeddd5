"""The traffic between ranks: `Traffic` counts the bytes of collectives, `expected` calculates them.

bench.py --only traffic compares the two; `paper_rows` calculates layouts of many ranks."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from spider.model import engram, parameters
from spider.model.surprise import BINS

NEAR, FAR, LATENCY = 450e9, 50e9, 5e-6   # bytes/s of a rank within a node and beyond it, s of a message: assumptions
PAPER_STEP = 4 * 112 * 256               # bytes of text per rank and step, as in the original


class Traffic(TorchDispatchMode):
    """Count the collectives inside this context, and the bytes that this rank sends in ring algorithms: an all-reduce
    sends 2 * (ranks - 1) / ranks of the message."""

    def __init__(self):
        super().__init__()
        self.sent, self.calls = 0.0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            self._count(function._opname, args)
        return function(*args, **(kwargs or {}))

    def _count(self, name: str, args):
        sent = args[int(name in ("_allgather_base_", "allgather_", "_reduce_scatter_base_", "alltoall_base_"))]
        group = next(dist.ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject))
        size = sum(t.nbytes for t in ([sent] if isinstance(sent, Tensor) else sent))
        ranks = group.size()
        if name == "alltoall_base_":
            size -= args[4][group.rank()] * sent.element_size()
        else:
            size *= {"allreduce_": 2 * (ranks - 1) / ranks, "_reduce_scatter_base_": (ranks - 1) / ranks}.get(
                name, ranks - 1)          # in a gather each rank also forwards the others' data
        self.sent, self.calls = self.sent + size, self.calls + 1


def expected(model: nn.Module, replicas: int, shards: int, grad_accum: int, width: int) -> tuple[float, float, int]:
    """Return the bytes that a rank sends per step under Muon within its replica and beyond it, and the number of
    sequential messages. width: bytes per number in Muon's products. `compute_dtype` of the model is the dtype of
    gathered weights."""
    ranks, near, far, hops = replicas * shards, 0.0, 0.0, 0
    tables = {f"{name}.weight" for name, m in model.named_modules() if isinstance(m, engram.EngramTable)}
    halved = {id(p) for p in parameters.halved_weights(model) if len(p) % shards == 0}
    matrices = parameters.matrices_of(model)
    groups = len(model.prelude) + len(model.coda) + (model.core is not None) + 1
    for name, p in model.named_parameters():
        if name in tables:
            far += 2 * (ranks - 1) / ranks * 4 * (p.numel() + len(p))
            hops += 2 * 2 * (ranks - 1)
            continue
        gathers = 2 if grad_accum == 1 and name.split(".")[0] in ("prelude", "core", "coda") else 1
        own = -(-len(p) // shards) * (p.numel() // len(p))  # elements of a shard, padded
        near += own * (shards - 1) * ((2 if id(p) in halved else 4) * gathers + 4)
        far += 2 * (replicas - 1) / replicas * 4 * own
        if name in matrices:
            near += (p.ndim == 2) * 2 * width * p.numel() / ranks * (shards - 1) / shards
            far += (replicas - 1) * width * p.numel() / ranks
    if model.config.learns_boundaries:    # counts of scores and of pairs of bytes, with the sums of the step
        far += 2 * (ranks - 1) / ranks * 8 * (BINS + model.config.vocab_size ** 2)
    hops += (shards - 1) * (groups * (3 if grad_accum == 1 else 2) + 2) + (replicas - 1) * (2 * groups + 1)
    return near, far, hops + 2 * (ranks - 1)


def paper_rows(model: nn.Module) -> list[dict]:
    """Return a row for each of several layouts of ranks, in bf16."""
    model.compute_dtype = torch.bfloat16
    rows = []
    for ranks, shards in ((8, 1), (8, 8), (64, 1), (64, 8), (64, 64), (1024, 8), (1024, 64)):
        near, far, hops = expected(model, ranks // shards, shards, 4, 2)
        if ranks <= 8:                    # all in one node
            near, far = near + far, 0.0
        elif shards > 8:
            near, far = 0.0, near + far
        seconds = near / NEAR + far / FAR + hops * LATENCY
        rows.append({"ranks": ranks, "shards": shards, "GB near": near / 1e9, "GB far": far / 1e9, "messages": hops,
                     "ms": 1e3 * seconds, "break-even, bytes/s of a rank": PAPER_STEP / seconds})
    return rows

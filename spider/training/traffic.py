"""Count the bytes that collectives move."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Traffic(TorchDispatchMode):
    """A context that counts the collectives inside it, and the bytes that this rank sends by them, as rings send them:
    in an all-reduce all of a message twice, but for 1 / ranks of it."""

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
                name, ranks - 1)          # of a gather each rank passes on the others' parts as well
        self.sent, self.calls = self.sent + size, self.calls + 1

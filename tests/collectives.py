"""Record the collectives of a rank, and compare those of all ranks by the rules of NCCL. gloo does
not need them; where they are broken, NCCL hangs, fails or computes garbage."""

import json
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Of torch's ProcessGroupNCCL; FP8 is among them, but reductions of it are not.
DTYPES = {"uint8", "int8", "int32", "int64", "float16", "float32", "float64", "bfloat16", "bool"}
POINT_TO_POINT = {"send", "recv"}


class Collective(NamedTuple):
    """A collective as one rank calls it."""

    name: str  # of torch's operation, without its _
    group: tuple[int, ...]  # its ranks
    dtypes: tuple[str, ...]  # of its tensors, as are the next three
    sizes: tuple[int, ...]
    devices: tuple[str, ...]
    contiguous: tuple[bool, ...]
    settings: dict  # its other arguments by name: reduction, root, peer, split sizes

    def faults(self, device: str) -> list[str]:
        """Return what NCCL would refuse of this call alone. `device`: the type of device of all its
        tensors."""
        found = [f"a tensor of {dtype}" for dtype in self.dtypes if dtype not in DTYPES]
        found += [f"a tensor on the {where}" for where in self.devices if where != device]
        if False in self.contiguous:
            found.append("a tensor that is not contiguous")
        if self.name in POINT_TO_POINT and not self.settings["batched"]:
            found.append("not in a batch, of which torch warns")
        return [f"{self.name}: {fault}" for fault in found]


class CollectiveRecorder(TorchDispatchMode):
    """Pass each collective that this thread calls inside a `with` block to `keep`."""

    def __init__(self, keep: Callable[[Collective], None]):
        super().__init__()
        self.keep = keep

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            self.keep(collective_of(func, args, kwargs))
        return func(*args, **kwargs)


def collective_of(func, args: Sequence, kwargs: dict) -> Collective:
    """Describe a call of an operation of torch.ops.c10d."""
    named = (
        dict(zip((argument.name for argument in func._schema.arguments), args, strict=True))
        | kwargs
    )
    group = dist.get_process_group_ranks(dist.ProcessGroup.unbox(named.pop("process_group")))
    tensors = [leaf for leaf in tree_leaves(named) if isinstance(leaf, torch.Tensor)]
    settings = {
        name: value
        for name, value in named.items()
        if name not in ("timeout", "async_op") and not {*map(type, tree_leaves(value))} - {int}
    }
    if "reduce_op" in named:
        settings["reduce_op"] = named["reduce_op"].op()
    name = func._schema.name.split("::")[1].strip("_")
    if name in POINT_TO_POINT:
        callers = {frame.f_code.co_name for frame, _ in traceback.walk_stack(None)}
        settings["batched"] = dist.batch_isend_irecv.__name__ in callers
    return Collective(
        name,
        tuple(group),
        tuple(str(t.dtype).split(".")[1] for t in tensors),
        tuple(t.numel() for t in tensors),
        tuple(t.device.type for t in tensors),
        tuple(t.is_contiguous() for t in tensors),
        settings,
    )


def record_to_file(path: str):
    """Record the collectives of this process from now on, a line each."""
    file = open(path, "w", buffering=1)
    CollectiveRecorder(lambda one: file.write(json.dumps(one) + "\n")).__enter__()


def recorded(path: Path) -> list[Collective]:
    """Return what `record_to_file` wrote."""
    found = []
    for line in path.read_text().splitlines():
        *lists, settings = json.loads(line)
        found.append(
            Collective(*(tuple(one) if isinstance(one, list) else one for one in lists), settings)
        )
    return found


# --------------------------------------------------------------------------------------------------
# All ranks


def disagreements(ranks: Sequence[Sequence[Collective]]) -> list[str]:
    """Return how the collectives of all ranks, by rank, break the rules of NCCL with one
    another."""
    ordered = [[one for one in calls if one.name not in POINT_TO_POINT] for calls in ranks]
    found = []
    for i, calls in enumerate(zip_longest(*ordered)):
        if len({one and (one.name, shape_of(one.group)) for one in calls}) > 1:
            names = ", ".join(one.name if one else "none" for one in calls)
            # nor are those after it
            return [f"collective {i} is not the same on all ranks: {names}"]
        by_group = defaultdict(dict)
        for rank, one in enumerate(calls):
            by_group[one.group][rank] = one
        for group, by_rank in by_group.items():
            found += [
                f"collective {i}, {calls[0].name}: {fault}"
                for fault in faults_in_group(group, by_rank)
            ]
    return found + faults_between_pairs(ranks)


def shape_of(group: Sequence[int]) -> tuple[int, int]:
    """Return size and stride of a group, which all groups of a dimension of the mesh have in
    common."""
    return len(group), group[-1] - group[-2] if len(group) > 1 else 0


def faults_in_group(group: tuple[int, ...], by_rank: dict[int, Collective]) -> list[str]:
    """Compare a collective on the ranks of its group."""
    if set(group) != set(by_rank):
        return [f"ranks {list(by_rank)} call it in the group {list(group)}"]
    dtypes = {one.dtypes for one in by_rank.values()}
    if len({dtype for of_rank in dtypes for dtype in of_rank}) > 1:
        return [f"dtypes {sorted(dtypes)}"]
    if "input_split_sizes" in by_rank[group[0]].settings:  # an all-to-all
        sent = [by_rank[rank].settings["input_split_sizes"] for rank in group]
        received = [by_rank[rank].settings["output_split_sizes"] for rank in group]
        return (
            []
            if sent == [list(column) for column in zip(*received, strict=True)]
            else [f"{sent} sent, {received} received"]
        )
    sizes = {one.sizes for one in by_rank.values()}
    settings = {str(one.settings) for one in by_rank.values()}
    return [
        f"{what} {sorted(values)}"
        for what, values in (("sizes", sizes), ("settings", settings))
        if len(values) > 1
    ]


def faults_between_pairs(ranks: Sequence[Sequence[Collective]]) -> list[str]:
    """Compare what each rank sends another with what that receives: dtype, size, and after which
    collective."""
    sent, received = defaultdict(list), defaultdict(list)  # by pair of ranks
    for rank, calls in enumerate(ranks):
        before = 0  # collectives so far
        for one in calls:
            message = one.dtypes, one.sizes, before
            if one.name == "send":
                sent[rank, one.group[one.settings["dst"]]].append(message)
            elif one.name == "recv":
                received[one.group[one.settings["src"]], rank].append(message)
            else:
                before += 1
    return [
        f"rank {pair[0]} sends {sent[pair]}, rank {pair[1]} receives {received[pair]}"
        for pair in sorted(sent.keys() | received.keys())
        if sent[pair] != received[pair]
    ]

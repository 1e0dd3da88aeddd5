"""Record the collectives of a rank, and compare those of all ranks by the rules of NCCL. gloo does
not need them; where they are broken, NCCL hangs, fails or computes garbage."""

import json
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
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

    name: str  # torch's name of the operation, without its _
    group: tuple[int, ...]  # its ranks
    # its tensors
    dtypes: tuple[str, ...]
    sizes: tuple[int, ...]
    devices: tuple[str, ...]
    contiguous: tuple[bool, ...]
    settings: dict  # its other arguments by name: reduction, root, peer, split sizes

    def faults(self, device: str) -> list[str]:
        """Return what NCCL would refuse of this call alone. `device`: the type of device of all its
        tensors."""
        found = [f"a tensor of {dtype}" for dtype in self.dtypes if dtype not in DTYPES]
        found += [f"a tensor on the {other}" for other in self.devices if other != device]
        if False in self.contiguous:
            found.append("a tensor that is not contiguous")
        if self.name in POINT_TO_POINT and not self.settings["batched"]:
            found.append("not in a batch, of which torch warns")
        return [f"{self.name}: {fault}" for fault in found]


class Message(NamedTuple):
    """A point-to-point operation as its two ranks must agree on it."""

    dtypes: tuple[str, ...]
    sizes: tuple[int, ...]
    after: int  # number of collectives before it


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
    names = [argument.name for argument in func._schema.arguments]
    named = dict(zip(names, args, strict=False)) | kwargs  # those at their defaults may be absent
    group = dist.get_process_group_ranks(dist.ProcessGroup.unbox(named.pop("process_group")))
    tensors = [leaf for leaf in tree_leaves(named) if isinstance(leaf, torch.Tensor)]
    settings = {}
    for name, value in named.items():
        is_whole = all(type(leaf) is int for leaf in tree_leaves(value))
        if is_whole and name not in ("timeout", "async_op"):
            settings[name] = value
    if "reduce_op" in named:
        settings["reduce_op"] = named["reduce_op"].op()
    operation = func._schema.name.split("::")[1].strip("_")
    if operation in POINT_TO_POINT:
        callers = {frame.f_code.co_name for frame, _ in traceback.walk_stack(None)}
        settings["batched"] = dist.batch_isend_irecv.__name__ in callers
    return Collective(
        operation,
        tuple(group),
        dtypes=tuple(str(t.dtype).split(".")[1] for t in tensors),
        sizes=tuple(t.numel() for t in tensors),
        devices=tuple(t.device.type for t in tensors),
        contiguous=tuple(t.is_contiguous() for t in tensors),
        settings=settings,
    )


def record_to_file(path: str):
    """Record the collectives of this process from now on, a line each."""
    file = open(path, "w", buffering=1)
    CollectiveRecorder(lambda one: file.write(json.dumps(one) + "\n")).__enter__()


def recorded(path: Path) -> list[Collective]:
    """Return what `record_to_file` wrote."""
    found = []
    for line in path.read_text().splitlines():
        name, *lists, settings = json.loads(line)
        found.append(Collective(name, *map(tuple, lists), settings))
    return found


# --------------------------------------------------------------------------------------------------
# All ranks


def disagreements(ranks: Sequence[Sequence[Collective]]) -> list[str]:
    """Return how the collectives of all ranks, by rank, break the rules of NCCL with one
    another."""
    found = []
    for i, calls in enumerate(zip_longest(*map(without_messages, ranks))):
        if None in calls or not have_one_kind(calls):
            names = ", ".join(one.name if one else "none" for one in calls)
            # nor are those after it
            return [f"collective {i} is not the same on all ranks: {names}"]
        by_group = defaultdict(dict)
        for rank, one in enumerate(calls):
            by_group[one.group][rank] = one
        for group, by_rank in by_group.items():
            where = f"collective {i}, {calls[0].name}"
            found += [f"{where}: {fault}" for fault in faults_in_group(group, by_rank)]
    return found + faults_between_pairs(ranks)


def without_messages(calls: Iterable[Collective]) -> list[Collective]:
    return [one for one in calls if one.name not in POINT_TO_POINT]


def have_one_kind(calls: Iterable[Collective]) -> bool:
    """Return whether calls are of the same operation, in groups of the same size and stride. All
    groups of a dimension of the mesh have these in common."""
    kinds = set()
    for one in calls:
        stride = one.group[-1] - one.group[-2] if len(one.group) > 1 else 0
        kinds.add((one.name, len(one.group), stride))
    return len(kinds) == 1


def faults_in_group(group: tuple[int, ...], by_rank: dict[int, Collective]) -> list[str]:
    """Compare a collective on the ranks of its group."""
    if set(group) != set(by_rank):
        return [f"ranks {list(by_rank)} call it in the group {list(group)}"]
    dtypes = {one.dtypes for one in by_rank.values()}
    if len(set().union(*dtypes)) > 1:
        return [f"dtypes {sorted(dtypes)}"]
    if "input_split_sizes" in by_rank[group[0]].settings:  # an all-to-all
        sent = [by_rank[rank].settings["input_split_sizes"] for rank in group]
        received = [by_rank[rank].settings["output_split_sizes"] for rank in group]
        if sent != [list(column) for column in zip(*received, strict=True)]:
            return [f"{sent} sent, {received} received"]
        return []
    found = []
    sizes = {one.sizes for one in by_rank.values()}
    if len(sizes) > 1:
        found.append(f"sizes {sorted(sizes)}")
    settings = {str(one.settings) for one in by_rank.values()}
    if len(settings) > 1:
        found.append(f"settings {sorted(settings)}")
    return found


def faults_between_pairs(ranks: Sequence[Sequence[Collective]]) -> list[str]:
    """Compare what each rank sends another with what that receives: dtype, size, and after which
    collective."""
    sent = defaultdict(list)  # messages by pair of ranks
    received = defaultdict(list)
    for rank, calls in enumerate(ranks):
        collectives = 0
        for one in calls:
            message = Message(one.dtypes, one.sizes, collectives)
            if one.name == "send":
                sent[rank, one.group[one.settings["dst"]]].append(message)
            elif one.name == "recv":
                received[one.group[one.settings["src"]], rank].append(message)
            else:
                collectives += 1
    found = []
    for pair in sorted(sent.keys() | received.keys()):
        if sent[pair] != received[pair]:
            sender, receiver = pair
            found.append(
                f"rank {sender} sends {sent[pair]}, rank {receiver} receives {received[pair]}"
            )
    return found

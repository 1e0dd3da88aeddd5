"""Record the collectives of each rank, and check them against NCCL's rules. gloo does not need
these rules; if they are broken, NCCL hangs, fails or computes garbage."""

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

# The dtypes of torch's ProcessGroupNCCL, without FP8, which NCCL transfers but does not reduce.
DTYPES = {"uint8", "int8", "int32", "int64", "float16", "float32", "float64", "bfloat16", "bool"}
POINT_TO_POINT = {"send", "recv"}


class Collective(NamedTuple):
    """A call of a collective on one rank."""

    name: str  # torch's name of the operation, without underscores around it
    group: tuple[int, ...]  # ranks
    # by tensor
    dtypes: tuple[str, ...]
    sizes: tuple[int, ...]
    devices: tuple[str, ...]
    contiguous: tuple[bool, ...]
    settings: dict  # other arguments by name: reduction, root, peer, split sizes

    def faults(self, device: str) -> list[str]:
        """Return what NCCL would refuse in this call alone, if all tensors must be on this type of
        device."""
        found = [f"a tensor of {dtype}" for dtype in self.dtypes if dtype not in DTYPES]
        found += [f"a tensor on the {other}" for other in self.devices if other != device]
        if False in self.contiguous:
            found.append("a tensor that is not contiguous")
        if self.name in POINT_TO_POINT and not self.settings["batched"]:
            found.append("not in a batch, of which torch warns")
        return [f"{self.name}: {fault}" for fault in found]


class Message(NamedTuple):
    """The properties of a point-to-point operation on which its two ranks must agree."""

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
    named = dict(zip(names, args, strict=False)) | kwargs  # arguments with defaults may be absent
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
    """Record the collectives of this process from now on, one line per call."""
    file = open(path, "w", buffering=1)
    CollectiveRecorder(lambda call: file.write(json.dumps(call) + "\n")).__enter__()


def recorded(path: Path) -> list[Collective]:
    """Return the collectives that `record_to_file` wrote."""
    found = []
    for line in path.read_text().splitlines():
        name, *lists, settings = json.loads(line)
        found.append(Collective(name, *map(tuple, lists), settings))
    return found


# --------------------------------------------------------------------------------------------------
# All ranks


def disagreements(ranks: Sequence[Sequence[Collective]]) -> list[str]:
    """Return how the calls of all ranks, given by rank, break NCCL's rules."""
    found = []
    for i, calls in enumerate(zip_longest(*map(without_messages, ranks))):
        if None in calls or not are_same_operation(calls):
            names = ", ".join(call.name if call else "none" for call in calls)
            # later calls would differ too
            return [f"collective {i} is not the same on all ranks: {names}"]
        by_group = defaultdict(dict)
        for rank, call in enumerate(calls):
            by_group[call.group][rank] = call
        for group, by_rank in by_group.items():
            where = f"collective {i}, {calls[0].name}"
            found += [f"{where}: {fault}" for fault in faults_in_group(group, by_rank)]
    return found + faults_between_pairs(ranks)


def without_messages(calls: Iterable[Collective]) -> list[Collective]:
    return [call for call in calls if call.name not in POINT_TO_POINT]


def are_same_operation(calls: Iterable[Collective]) -> bool:
    """Return whether all calls have the same operation and groups of the same size and stride, as
    the groups along one mesh dimension do."""
    operations = set()
    for call in calls:
        stride = call.group[-1] - call.group[-2] if len(call.group) > 1 else 0
        operations.add((call.name, len(call.group), stride))
    return len(operations) == 1


def faults_in_group(group: tuple[int, ...], by_rank: dict[int, Collective]) -> list[str]:
    """Compare a collective on the ranks of its group."""
    if set(group) != set(by_rank):
        return [f"ranks {list(by_rank)} call it in the group {list(group)}"]
    dtypes = {call.dtypes for call in by_rank.values()}
    if len(set().union(*dtypes)) > 1:
        return [f"dtypes {sorted(dtypes)}"]
    if "input_split_sizes" in by_rank[group[0]].settings:  # an all-to-all
        sent = [by_rank[rank].settings["input_split_sizes"] for rank in group]
        received = [by_rank[rank].settings["output_split_sizes"] for rank in group]
        if sent != [list(column) for column in zip(*received, strict=True)]:
            return [f"{sent} sent, {received} received"]
        return []
    found = []
    sizes = {call.sizes for call in by_rank.values()}
    if len(sizes) > 1:
        found.append(f"sizes {sorted(sizes)}")
    settings = {str(call.settings) for call in by_rank.values()}
    if len(settings) > 1:
        found.append(f"settings {sorted(settings)}")
    return found


def faults_between_pairs(ranks: Sequence[Sequence[Collective]]) -> list[str]:
    """Check that every send has a matching receive: dtypes, sizes, number of collectives before."""
    sent = defaultdict(list)  # messages by pair of ranks
    received = defaultdict(list)
    for rank, calls in enumerate(ranks):
        collectives = 0
        for call in calls:
            message = Message(call.dtypes, call.sizes, collectives)
            if call.name == "send":
                sent[rank, call.group[call.settings["dst"]]].append(message)
            elif call.name == "recv":
                received[call.group[call.settings["src"]], rank].append(message)
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

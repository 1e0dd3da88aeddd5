"""Adapt a model to the text that it reads, while it reads (dynamic evaluation, Krause et al., arXiv 1709.07432).

`Adaptation` reads a text in chunks. It scores a chunk; then all weights take one step on the chunk's gradient: the
Engram tables by the optimizer of training, the others by AdamW at a low rate. So every byte is scored before anything
learns from it. The accumulators of the tables are those of training, so this needs a checkpoint of a run.
`adapted_state` is the checkpoint of an adapted model. Measurements of rates, chunk and context:
docs/results/learning.md, "Adaptation".
"""

import math
from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spider.errors import CheckpointError
from spider.model.engram_table import EngramTable
from spider.training.checkpoint_loading import with_whole_tensors
from spider.training.optimizers import RowwiseAdagrad, check_optimizer_state
from tokenizer import BOS_ID, EOS_ID

RATE = 0.4                                # the tables' learning rate; in training 0.25
DENSE_RATE = 1.5e-4                       # of AdamW, for all other weights
CHUNK = 1024                              # bytes between two steps
CONTEXT = 1024                            # bytes before a chunk that the model sees, at most


class Adaptation:
    """A model that learns from what it reads. nats: the loss of all ids that counted; count: their number."""

    def __init__(self, model: nn.Module, state: dict, n_loops: int, per_document: bool = False):
        """state: the content of the model's checkpoint. per_document: start each document with the checkpoint's
        weights. Raise CheckpointError if the model has no tables, or the checkpoint no accumulators of them."""
        self.model, self.n_loops, self.per_document = model, n_loops, per_document
        self.device = model.embed_tokens.device
        self.nats, self.count = 0.0, 0
        self.adagrad, self.undo = table_optimizer(model, state), []
        self.saved = {weight: torch.zeros(len(weight), dtype=torch.bool, device=self.device)
                      for weight in self.adagrad.tables} if per_document else {}  # rows that `undo` has
        dense = [p for p in model.parameters() if p not in self.adagrad.tables]
        self.adamw = torch.optim.AdamW(dense, DENSE_RATE, weight_decay=0, fused=True)
        load_state(self.adamw, "adamw", state.get("adaptation", dict(state={})))
        self.unadapted = None
        if per_document:
            self.unadapted = [p.detach().clone() for p in dense], deepcopy(self.adamw.state_dict())
        self.bytes_per_step = state["bytes_seen"] / state["step"]  # over which the loss of training is a mean
        self.start()

    def start(self, *context: int):
        """Start a text, with nothing in context but these ids."""
        self.ids, self.counted = torch.tensor(context, dtype=torch.int64), torch.zeros(len(context), dtype=torch.bool)
        self.done = 0                     # index of the newest id that was scored, or that is only context

    def read(self, ids: Tensor, counted: Tensor):
        """Read the next ids, int64 [n]. Those that are counted, bool [n], are predicted, scored and learned from; never
        the first id of a text. The result does not depend on how a text is split into calls, on a CPU to the bit."""
        while len(ids):
            if self.per_document and len(self.ids) and ids[0] == BOS_ID and self.ids[-1] != EOS_ID:
                self._start_document()
            elif self.per_document and len(self.ids) > 1 and self.ids[-1] == EOS_ID:
                self._start_document(EOS_ID)
            end = min(len(ids), self.done + CHUNK + 1 - len(self.ids))
            if self.per_document:
                ends = torch.cat(((ids[:end] == EOS_ID).nonzero(), (ids[1:end] == BOS_ID).nonzero())) + 1
                end = min([end, *ends.flatten().tolist()])
            self.ids, self.counted = torch.cat((self.ids, ids[:end])), torch.cat((self.counted, counted[:end]))
            ids, counted = ids[end:], counted[end:]
            if len(self.ids) == self.done + CHUNK + 1:
                self.flush()

    def _start_document(self, *context: int):
        """Start a document with the checkpoint's weights."""
        self.flush()
        self.rewind()
        self.start(*context)

    def flush(self):
        """Score the ids read since the last step, and learn from them."""
        first = max(0, self.done - CONTEXT)
        ids, labels = self.ids[first:-1], self.ids[first + 1:].clone()
        labels[~self.counted[first + 1:]] = -100
        labels[:self.done - first] = -100
        if (labels != -100).any():
            self._learn(ids[None].to(self.device), labels[None].to(self.device))
        self.ids, self.counted = self.ids[first:], self.counted[first:]
        self.done = max(0, len(self.ids) - 1)

    def _learn(self, ids: Tensor, labels: Tensor):
        """Score a window, ids and labels [1, n], then step the weights."""
        with torch.enable_grad(), self.model.cast_weights_once():
            out = self.model(ids, n_loops=self.n_loops)
            nats = F.cross_entropy(out.logits[0], labels[0], ignore_index=-100, reduction="sum")
            (nats / self.bytes_per_step).backward()
        nats = nats.item()                                                                   # host synchronisation
        if not math.isfinite(nats):
            raise FloatingPointError("the model's loss is not a finite number: its weights are ruined")
        if self.per_document:
            self._remember()
        for optimizer in (self.adagrad, self.adamw):
            optimizer.step()
            optimizer.zero_grad()
        self.nats, self.count = self.nats + nats, self.count + int((labels != -100).sum())

    @torch.no_grad()
    def _remember(self):
        """Save the rows that the next step changes for the first time, and their accumulators."""
        for weight, table in self.adagrad.tables.items():
            for row, _, _ in table.gathered():
                row = row[~self.saved[weight][row]].unique()
                self.saved[weight][row] = True
                self.undo += [(weight, row, part, part.index_select(0, row))
                              for part in (weight, self.accumulator(weight))]

    @torch.no_grad()
    def rewind(self):
        """Undo all steps since the last call (per_document only)."""
        if not self.undo:
            return
        for weight, row, part, before in self.undo:
            part.index_copy_(0, row, before)
            self.saved[weight][row] = False
        self.undo.clear()
        weights, moments = self.unadapted
        torch._foreach_copy_(self.adamw.param_groups[0]["params"], weights)
        self.adamw.load_state_dict(deepcopy(moments))

    def accumulator(self, weight: Tensor) -> Tensor:
        """Return the accumulators of a table's rows, [rows]."""
        return self.adagrad.state[weight]["sum"]


def table_optimizer(model: nn.Module, state: dict) -> RowwiseAdagrad:
    """Make the optimizer of a model's tables, with the accumulators of its checkpoint; raise CheckpointError if there
    are none."""
    tables = [module for module in model.modules() if isinstance(module, EngramTable)]
    if not tables:
        raise CheckpointError("adaptation needs Engram tables, which the model lacks")
    if not state.get("step") or not state.get("bytes_seen") or "engram" not in state.get("optimizer_state_dict", {}):
        raise CheckpointError("the checkpoint has no optimizer state of the Engram tables (an export has none): use "
                              "one that train.py wrote")
    optimizer = RowwiseAdagrad(tables, RATE)
    load_state(optimizer, "engram", state["optimizer_state_dict"]["engram"])
    for weight in optimizer.tables:
        optimizer.state[weight].setdefault("sum", weight.new_zeros(len(weight)))
    return optimizer


def load_state(optimizer: torch.optim.Optimizer, name: str, saved: dict):
    """Load a checkpoint's state of the optimizer `name`, but keep this one's settings. The tensors are copied, since
    they may be mapped from the checkpoint's file. Raise CheckpointError if it does not fit."""
    own = optimizer.state_dict()
    try:
        optimizer.load_state_dict(own | dict(state=deepcopy(with_whole_tensors(saved["state"]))))
        check_optimizer_state(name, optimizer)
    except Exception as fault:            # whatever a foreign state provokes
        raise CheckpointError(f"the checkpoint's state of {name} does not fit its model ({fault})") from None


def adapted_state(state: dict, adaptation: Adaptation) -> dict:
    """Return the content of a checkpoint with the weights, accumulators and moments of its adapted model, not copied;
    `adapted` counts the ids that they have learned since training. The validation loss was that of other weights. Raise
    FloatingPointError if a weight is not finite."""
    learned = {name: p.detach().cpu() for name, p in adaptation.model.named_parameters()}
    if not all(weight.isfinite().all() for weight in learned.values()):
        raise FloatingPointError("adaptation has ruined the model: weights are not finite")
    engram = adaptation.adagrad.state_dict()
    engram["param_groups"] = state["optimizer_state_dict"]["engram"]["param_groups"]
    return state | dict(model_state_dict=state["model_state_dict"] | learned, val_loss=None,
                        adapted=state.get("adapted", 0) + adaptation.count,
                        adaptation=adaptation.adamw.state_dict(),
                        optimizer_state_dict=state["optimizer_state_dict"] | dict(engram=engram))

"""Spider with Hugging Face's interfaces: the configuration, and the model with its decoding cache.

`sample.py CHECKPOINT --export DIR` copies this adapter together with the modules that it imports.
AutoModelForCausalLM.from_pretrained(DIR, trust_remote_code=True) then works without the rest of the
project. It reads only config.json and the safetensors.

Shapes in names: B rows, T bytes of a row.
"""

import logging
from copy import copy
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# transformers imports torchao, which warns of each kernel that it cannot load
level = logging.root.manager.disable
logging.disable(logging.WARNING)
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput
from transformers.utils.versions import require_version

logging.disable(level)

from spider.config import SpiderConfig
from spider.model.decode import DecodingState
from spider.model.memory import EngramTable
from spider.model.packing import check_ids, document_cu_seqlens
from spider.vocabulary import BOS_ID, EOS_ID, PAD_ID
from spider_model import Spider

require_version(
    "transformers>=5.24",
    "Earlier releases pass the decoding cache by another name, `past_key_values`.",
)


class SpiderHFConfig(PreTrainedConfig):
    """The content of config.json.

    `spider` has the fields of SpiderConfig, `n_loops` is the number of loops in training, and
    `training` has the facts of the model card. The other fields are for other libraries."""

    model_type = "spider"
    keys_to_ignore_at_inference = ["cache", "nats_per_byte"]  # compute_metrics gets logits alone

    def __init__(self, spider: dict | None = None, n_loops: int | None = None, **others):
        config = SpiderConfig.from_saved(spider or {})  # validates every field
        self.spider = asdict(config)
        self.n_loops = config.n_loops if n_loops is None else n_loops
        self.vocab_size = config.vocab_size
        self.hidden_size = config.hidden_size
        self.num_hidden_layers = (
            config.n_prelude_layers + config.n_recurrent_layers + config.n_coda_layers
        )
        self.num_attention_heads = config.n_heads
        settings: dict[str, Any] = {
            "pad_token_id": PAD_ID,
            "bos_token_id": BOS_ID,
            "eos_token_id": EOS_ID,
            "tie_word_embeddings": False,
        }
        # what follows from `spider` is not read from the file
        settings |= {name: value for name, value in others.items() if name not in vars(self)}
        super().__init__(**settings)


class SpiderCache:
    """The decoding state as transformers' cache; each step updates it in place."""

    is_compileable = False
    is_croppable = False
    is_linear = (False,)  # per layer, whether it is linear attention

    def __init__(self, state: DecodingState):
        self.state = state
        self.ids = state.position.new_empty(len(state.position), 0)  # [B, bytes so far], with PAD
        self.right_padded = False  # whether a row ended with padding: then none can continue

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.ids.shape[1]

    def reorder_cache(self, beam_idx: Tensor):
        """Continue row i from row beam_idx[i]."""
        self.state = self.state.copy(beam_idx.tolist())
        self.ids = self.ids.index_select(0, beam_idx)


@dataclass
class SpiderCausalLMOutput(ModelOutput):
    """The output of SpiderForCausalLM.forward."""

    loss: Tensor | None = None  # in training mode to minimize, in evaluation mode the cross-entropy
    logits: Tensor | None = None  # [B, T, vocab_size]
    cache: SpiderCache | None = None
    nats_per_byte: Tensor | None = None  # the cross-entropy of this pass

    @property
    def last_hidden_state(self) -> Tensor | None:
        """Return the logits, see SpiderForCausalLM.get_output_embeddings."""
        return self.logits


class SpiderForCausalLM(PreTrainedModel, GenerationMixin):
    """Spider as a causal language model.

    `dtype` sets the dtype of products; parameters stay fp32, as in training. `half()`, `to(dtype)`
    and the like cast both. Use float16 only for inference, since gradients are often too small for
    it.

    generate() decodes byte by byte with a DecodingState. That cannot be rolled back, so assisted
    generation is refused. Train with Spider's train.py. Other optimizers do not update the Engram
    tables, because their gradients are not in weight.grad (see docs/guide/your-own-loop.md in the
    project)."""

    config_class = SpiderHFConfig
    _no_split_modules = ["Spider"]  # on one device: it reads weights outside of their modules
    _is_stateful = True
    supports_gradient_checkpointing = True

    def __init__(self, config: SpiderHFConfig):
        if getattr(config, "quantization_config", None) is not None:
            raise ValueError(
                "quantization_config is not available in Spider: model.to(torch.bfloat16) halves "
                "its size"
            )
        super().__init__(config)
        # fp32: transformers casts loaded weights to the dtypes of these parameters
        self.spider = Spider(SpiderConfig.from_saved(config.spider)).float()
        if isinstance(config.dtype, torch.dtype):
            self.spider.compute_dtype = config.dtype
        self.identity = nn.Module()  # see get_output_embeddings
        self.identity.register_parameter("bias", None)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module):
        """Set the constants that are not in the files; Spider or the files set all other values."""
        if isinstance(module, EngramTable):
            multiplier = module.multiplier.clone()  # this one is in the files
            module.init_hash(0)
            module.multiplier.copy_(multiplier)

    @property
    def base_model(self) -> "SpiderForCausalLM":
        """Return the model itself. Where another library has replaced its `forward`, as TRL does,
        which calls base_model inside, return a view of it with its own `forward`: accelerate's
        autocast must not be entered twice, or it stays on."""
        if "forward" not in vars(self):
            return self
        view = copy(self)
        del view.forward
        return view

    def get_input_embeddings(self) -> SimpleNamespace:  # type: ignore[override]  # not a module
        """Return the embeddings of bytes as a weight alone, whose size PEFT reads. Bytes are
        embedded with n-grams, by no module that could be replaced."""
        return SimpleNamespace(weight=self.spider.embed_tokens)

    def get_output_embeddings(self) -> nn.Module:
        """Return the identity: TRL's trainers multiply last_hidden_state by this module's weight.

        Spider's logits are no product of a hidden state and lm_head, since its memories vote on
        them. So last_hidden_state is the logits already."""
        self.identity.weight = torch.eye(self.config.vocab_size, device=self.device)
        return self.identity

    @property
    def gradient_checkpointing(self) -> bool:
        """Tell whether layers are recomputed in backward; gradient_checkpointing_enable() and
        _disable() set it."""
        return self.spider.recompute != "nothing"

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, enable: bool):
        self.spider.recompute = "all" if enable else "nothing"

    def enable_input_require_grads(self):
        """Do nothing: only reentrant checkpointing, which this model does not use, needs inputs
        with gradients."""

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def zero_grad(self, set_to_none: bool = True):
        self.spider.zero_grad(set_to_none)

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        cache: SpiderCache | None = None,
        attention_mask: Tensor | None = None,
        use_cache: bool | None = None,
        n_loops: int | None = None,
        **_,
    ) -> dict:
        """Return the inputs of the next step: the part of input_ids [B, T] that is not in the
        cache. Raise ValueError if there is none, or the cache is of other ids."""
        seen = 0
        if isinstance(cache, SpiderCache):
            seen = cache.get_seq_length()
            if input_ids.shape[1] <= seen or not torch.equal(input_ids[:, :seen], cache.ids):
                raise ValueError(
                    "cache: input_ids must continue the ids that it has read; start another text "
                    "without"
                )
        return dict(
            input_ids=input_ids[:, seen:],
            attention_mask=attention_mask,
            cache=cache,
            use_cache=use_cache,
            n_loops=n_loops,
        )

    def generate(self, inputs: Tensor | None = None, **kwargs):
        """Generate as transformers does; an empty prompt, like none, is the beginning of a
        document."""
        inputs = kwargs.pop("input_ids", inputs)
        if inputs is not None and inputs.shape[-1] == 0:
            inputs = inputs.new_full((len(inputs), 1), BOS_ID, dtype=torch.int64)
            kwargs.pop("attention_mask", None)
        was_training = self.training
        self.eval()  # after or in a trainer's run it is not
        try:
            with self.spider.cast_weights_once():
                return super().generate(inputs, **kwargs)
        finally:
            self.train(was_training)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        cache: SpiderCache | None = None,
        use_cache: bool | None = None,
        n_loops: int | None = None,
        return_dict: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **others,
    ) -> SpiderCausalLMOutput | tuple:
        """Compute logits and, given labels, the loss; padding affects neither.

        input_ids [B, T] int64. attention_mask [B, bytes so far]: 0 only at the ends of rows. labels
        [B, T]: shifted here, as everywhere in transformers, so pass input_ids; labels of -100, PAD
        and padding are ignored. n_loops: defaults to that of training. Padding is where the mask is
        0, and PAD at the ends of rows.

        Without a cache this is the full pass. `loss` is then the loss to minimize, a mean over
        bytes and passes, and in evaluation mode the cross-entropy alone, `nats_per_byte`. The
        Trainer passes num_items_in_batch, the number of labels in all passes of an optimizer step,
        and adds up the passes' losses: `loss` is then weighted by this pass's share of the labels.

        With use_cache, which does not allow labels, a SpiderCache is created or continued; the
        logits are the same. The mask of a continued cache is not read.

        others: what other models take, such as inputs_embeds, as None or False. Raise ValueError
        for any other value, and for a mask with holes."""
        for name, value in others.items():
            if value is not None and value is not False:
                raise ValueError(f"{name} is not available in Spider")
        if input_ids is None:
            raise ValueError("input_ids is missing")
        check_ids("input_ids", input_ids)
        if labels is not None:
            check_ids("labels", labels, *input_ids.shape)
        if n_loops is None:
            n_loops = self.config.n_loops
        if cache is not None or use_cache:
            if labels is not None:
                raise ValueError("labels: the loss needs a full pass, without cache and use_cache")
            output = self._step(input_ids, attention_mask, cache, n_loops)
        else:
            output = self._full_pass(input_ids, attention_mask, labels, n_loops, num_items_in_batch)
        return output.to_tuple() if return_dict is False else output

    def _full_pass(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        labels: Tensor | None,
        n_loops: int,
        num_items_in_batch: Tensor | int | None,
    ) -> SpiderCausalLMOutput:
        """Compute all rows from their beginning."""
        ids, kept = without_padding(input_ids, attention_mask)
        shifted = None
        if labels is not None:
            has_context = F.pad(kept[:, :-1], (1, 0))  # the first byte has none
            ignored = ~(kept & has_context) | (labels == PAD_ID)
            shifted = F.pad(labels.masked_fill(ignored, -100)[:, 1:], (0, 1), value=-100)
        out = self.spider(
            ids.where(kept, PAD_ID),
            shifted,
            n_loops,
            cu_seqlens=document_cu_seqlens(ids),
            # without labels the loss is another library's, which compares passes in both modes
            segment_noise=labels is not None,
        )
        loss = out.loss if self.training else out.nats_per_byte
        if labels is not None and num_items_in_batch is not None:
            loss = loss * (labels[:, 1:] != -100).sum() / num_items_in_batch
        return SpiderCausalLMOutput(loss, out.logits, None, out.nats_per_byte)

    def _step(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        cache: SpiderCache | None,
        n_loops: int,
    ) -> SpiderCausalLMOutput:
        """Start a cache with rows, or continue its rows."""
        if cache is None:
            cache = SpiderCache(self.spider.decoding_state(len(input_ids), n_loops))
        elif not isinstance(cache, SpiderCache):
            raise ValueError(
                "cache must be the cache that an earlier call returned; leave it out to start a "
                "text"
            )
        if cache.right_padded:
            raise ValueError(
                "attention_mask: to continue a text, pad on the left (padding_side='left')"
            )
        fed = input_ids
        if cache.get_seq_length() == 0:
            fed, kept = without_padding(input_ids, attention_mask)
            ends_with_padding = kept.any(1) & ~kept[:, -1]
            cache.right_padded = bool(ends_with_padding.any())
        # accelerate leaves its autocast on after training, and states have the model's own dtypes
        with torch.autocast(input_ids.device.type, enabled=False):
            logits = self.spider.step(fed, cache.state)
        cache.ids = torch.cat((cache.ids, input_ids), dim=1)
        return SpiderCausalLMOutput(None, logits, cache)


def without_padding(input_ids: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Tell text from padding, which is where the mask [B, T] is 0, and PAD at the ends of rows.

    Returns ids [B, T] whose padding does not affect the text, and what is not padding, bool [B, T].
    Left padding becomes a document of its own, PAD ... EOS, after which the text starts another
    one. A row without any text ends with BOS, as an empty prompt does. Right padding stays, since
    causal layers never see it. Raise ValueError for a mask with holes."""
    if attention_mask is not None:
        check_mask(attention_mask, input_ids)
        input_ids = input_ids.where(attention_mask != 0, PAD_ID)
    is_text = (input_ids != PAD_ID).int()
    in_front = is_text.cumsum(1) == 0
    behind = is_text.flip(1).cumsum(1).flip(1) == 0
    last_in_front = in_front & ~F.pad(in_front[:, 1:], (0, 1))
    empty = ~is_text.any(1)  # [B]

    kept = ~(in_front | behind)
    kept[:, -1] |= empty
    ids = input_ids.masked_fill(last_in_front, EOS_ID)
    ids[:, -1].masked_fill_(empty, BOS_ID)
    return ids, kept


def check_mask(attention_mask: Tensor, input_ids: Tensor):
    """Raise ValueError unless the mask has the shape of input_ids, and contiguous ones."""
    starts = F.pad(attention_mask != 0, (1, 1)).int().diff(dim=-1) > 0
    if attention_mask.shape != input_ids.shape or (starts.sum(-1) > 1).any():
        raise ValueError(
            "attention_mask must have the shape of input_ids, with contiguous ones in each row"
        )

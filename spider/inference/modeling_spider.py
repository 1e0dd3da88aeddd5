"""Adapt Spider to Hugging Face's interfaces: the configuration, and the model with its decoding
cache.

`sample.py CHECKPOINT --export DIR` copies this adapter together with the modules that it imports.
AutoModelForCausalLM.from_pretrained(DIR, trust_remote_code=True) then works without the rest of the
project. It reads only config.json and the safetensors file.

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

# transformers imports torchao, which warns about each kernel that it cannot load
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
    `training` has the facts of the model card. All other fields are for other libraries."""

    model_type = "spider"
    keys_to_ignore_at_inference = ["cache", "nats_per_byte"]  # compute_metrics gets only logits

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
        # fields that follow from `spider` are not read from the file
        settings |= {name: value for name, value in others.items() if name not in vars(self)}
        super().__init__(**settings)


class SpiderCache:
    """The decoding state as a cache for transformers. Each step updates it in place."""

    is_compileable = False
    is_croppable = False
    is_linear = (False,)  # per layer, whether it is linear attention

    def __init__(self, state: DecodingState, ids: Tensor):
        """ids: int64 [B, 0], on the model's device."""
        self.state = state
        self.ids = ids  # [B, bytes so far], with PAD
        self.right_padded = False  # whether a row ended with padding; then no row can continue

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.ids.shape[1]

    def reorder_cache(self, beam_idx: Tensor):
        """Continue row i from row beam_idx[i]."""
        self.state = self.state.copy(beam_idx.tolist())
        self.ids = self.ids.index_select(0, beam_idx)


@dataclass
class SpiderCausalLMOutput(ModelOutput):
    """The output of SpiderForCausalLM.forward."""

    loss: Tensor | None = None  # training mode: to minimize; evaluation mode: the cross-entropy
    logits: Tensor | None = None  # [B, T, vocab_size]
    cache: SpiderCache | None = None
    nats_per_byte: Tensor | None = None  # the cross-entropy of this pass

    @property
    def last_hidden_state(self) -> Tensor | None:
        """The logits, see SpiderForCausalLM.get_output_embeddings."""
        return self.logits


class SpiderForCausalLM(PreTrainedModel, GenerationMixin):
    """Spider as a causal language model.

    `dtype` sets the dtype of products; parameters stay fp32, as in training. `half()`, `to(dtype)`
    and similar methods cast both. Use float16 only for inference, because gradients are often too
    small for float16.

    generate() decodes byte by byte with a DecodingState, which cannot be rolled back, so assisted
    generation is refused. Train with Spider's train.py. Other optimizers do not update the Engram
    tables, because the gradients of the tables are not in weight.grad (see
    docs/guide/your-own-loop.md in the project)."""

    config_class = SpiderHFConfig
    _no_split_modules = ["Spider"]  # keep on one device: it reads weights outside their modules
    _is_stateful = True
    supports_gradient_checkpointing = True

    def __init__(self, config: SpiderHFConfig):
        if getattr(config, "quantization_config", None) is not None:
            raise ValueError(
                "quantization_config is not available in Spider: model.to(torch.bfloat16) halves "
                "its size"
            )
        super().__init__(config)
        # fp32, because transformers casts loaded weights to the dtypes of these parameters
        self.spider = Spider(SpiderConfig.from_saved(config.spider)).float()
        if isinstance(config.dtype, torch.dtype):
            self.spider.compute_dtype = config.dtype
        self.identity = nn.Module()  # see get_output_embeddings
        self.identity.register_parameter("bias", None)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module):
        """Set the constants that are not in the files. Spider or the files set all other values."""
        if isinstance(module, EngramTable):
            multiplier = module.multiplier.clone()  # the multiplier is in the files
            module.init_hash(0)
            module.multiplier.copy_(multiplier)

    @property
    def base_model(self) -> "SpiderForCausalLM":
        """The model itself, or, if another library has replaced its `forward`, a view of the model
        with the original `forward`.

        TRL replaces `forward` with a function that calls base_model. Accelerate's autocast would
        then be entered twice, and stay on."""
        if "forward" not in vars(self):
            return self
        view = copy(self)
        del view.forward
        return view

    def get_input_embeddings(self) -> SimpleNamespace:  # type: ignore[override]  # not a module
        """Return only the weight of the byte embeddings, because PEFT reads its size. No module
        embeds bytes, so none can be replaced: bytes are embedded together with n-grams."""
        return SimpleNamespace(weight=self.spider.embed_tokens)

    def get_output_embeddings(self) -> nn.Module:
        """Return the identity: TRL's trainers multiply last_hidden_state by this module's weight.

        Spider's logits are not a product of a hidden state and lm_head, because its memories add
        votes to the logits. So last_hidden_state is already the logits."""
        self.identity.weight = torch.eye(self.config.vocab_size, device=self.device)
        return self.identity

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether layers are recomputed in backward. gradient_checkpointing_enable() and _disable()
        set it."""
        return self.spider.recompute != "nothing"

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, enable: bool):
        self.spider.recompute = "all" if enable else "nothing"

    def enable_input_require_grads(self):
        """Do nothing, because only reentrant checkpointing needs inputs with gradients, and this
        model does not use reentrant checkpointing."""

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
        cache. Raise ValueError if nothing is left, or if the cache has read other ids."""
        seen = 0
        if isinstance(cache, SpiderCache):
            seen = cache.get_seq_length()
            if input_ids.shape[1] <= seen or not torch.equal(input_ids[:, :seen], cache.ids):
                raise ValueError(
                    "cache: input_ids must continue the ids that the cache has read; to start "
                    "another text, leave out the cache"
                )
        return dict(
            input_ids=input_ids[:, seen:],
            attention_mask=attention_mask,
            cache=cache,
            use_cache=use_cache,
            n_loops=n_loops,
        )

    def generate(self, inputs: Tensor | None = None, **kwargs):
        """Generate as transformers does. An empty prompt, or no prompt, is the beginning of a
        document."""
        inputs = kwargs.pop("input_ids", inputs)
        if inputs is not None and inputs.shape[-1] == 0:
            inputs = inputs.new_full((len(inputs), 1), BOS_ID, dtype=torch.int64)
            kwargs.pop("attention_mask", None)
        was_training = self.training
        self.eval()  # a trainer leaves the model in training mode
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

        input_ids: [B, T] int64.
        attention_mask: [B, bytes so far], 0 only at the ends of rows. An id is padding if its mask
            is 0, or if it is a PAD at an end of its row.
        labels: [B, T], shifted here, as everywhere in transformers, so pass input_ids. Labels that
            are -100, PAD or padding are ignored.
        n_loops: default as in training.
        num_items_in_batch: the Trainer passes the number of labels in all passes of an optimizer
            step, and adds up the losses of the passes. `loss` is then weighted by this pass's
            fraction of the labels.
        others: arguments of other models, such as inputs_embeds, only as None or False.

        Without a cache this is the full pass. In training mode `loss` is the loss to minimize, a
        mean over bytes and passes; in evaluation mode it is the cross-entropy, `nats_per_byte`.

        With use_cache, which does not allow labels, a SpiderCache is created or continued. The
        logits are the same. A continued cache does not read the mask.

        Raise ValueError for an unavailable argument and for a mask with holes."""
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
        """Compute all rows from the beginning."""
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
            # without labels, another library computes the loss, and compares passes in both modes
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
        """Start a cache with new rows, or continue the rows of a cache."""
        if cache is None:
            state = self.spider.decoding_state(len(input_ids), n_loops)
            cache = SpiderCache(state, input_ids[:, :0])
        elif not isinstance(cache, SpiderCache):
            raise ValueError(
                "cache must be the cache that an earlier call returned; to start a text, leave it "
                "out"
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
        # accelerate leaves its autocast on after training, but states have the model's own dtypes
        with torch.autocast(input_ids.device.type, enabled=False):
            logits = self.spider.step(fed, cache.state)
        cache.ids = torch.cat((cache.ids, input_ids), dim=1)
        return SpiderCausalLMOutput(None, logits, cache)


def without_padding(input_ids: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Tell text from padding: positions where the mask [B, T] is 0, and PAD at the ends of rows.

    Return ids [B, T] whose padding does not affect the text, and bool [B, T], False for padding.

        left padding    becomes a document of its own, PAD ... EOS; the text starts a new document
        right padding   stays the same, because causal layers never see it
        no text         the row ends with BOS, like an empty prompt

    Raise ValueError for a mask with holes."""
    if attention_mask is not None:
        check_mask(attention_mask, input_ids)
        input_ids = input_ids.where(attention_mask != 0, PAD_ID)
    is_text = (input_ids != PAD_ID).int()
    leading = is_text.cumsum(1) == 0
    trailing = is_text.flip(1).cumsum(1).flip(1) == 0
    last_leading = leading & ~F.pad(leading[:, 1:], (0, 1))
    empty = ~is_text.any(1)  # [B]

    kept = ~(leading | trailing)
    kept[:, -1] |= empty
    ids = input_ids.masked_fill(last_leading, EOS_ID)
    ids[:, -1].masked_fill_(empty, BOS_ID)
    return ids, kept


def check_mask(attention_mask: Tensor, input_ids: Tensor):
    """Raise ValueError unless the mask has the shape of input_ids and contiguous ones."""
    starts = F.pad(attention_mask != 0, (1, 1)).int().diff(dim=-1) > 0
    if attention_mask.shape != input_ids.shape or (starts.sum(-1) > 1).any():
        raise ValueError(
            "attention_mask must have the shape of input_ids, with contiguous ones in each row"
        )

"""Spider with Hugging Face's interfaces: configuration, model with its decoding cache, byte
tokenizer.

`sample.py CHECKPOINT --export DIR` copies this adapter together with the modules that it imports.
AutoModelForCausalLM.from_pretrained(DIR, trust_remote_code=True) then works without the rest of the
project. It reads only config.json and the safetensors.

Shapes in names: B rows, T bytes of a row.
"""

import logging
import re
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
from transformers import (
    AddedToken,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizer,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import ModelOutput
from transformers.utils.versions import require_version

logging.disable(level)

from spider.config import SpiderConfig
from spider.decode import DecodingState, check_ids
from spider.memory import EngramTable
from spider.packing import document_cu_seqlens
from spider.vocabulary import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE
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
        """Return the logits, see LogitsLayer."""
        return self.logits


class LogitsLayer(nn.Module):
    """The identity, for libraries that multiply last_hidden_state by the weight of the output
    embeddings, as TRL's trainers do.

    Spider's logits are no such product, since its memories vote on them and PEFT may adapt
    lm_head. So last_hidden_state is the logits already."""

    bias = None
    weight: Tensor  # [vocab_size, vocab_size]

    def __init__(self, vocab_size: int):
        super().__init__()
        identity = torch.eye(vocab_size, dtype=torch.float32)  # as logits, whatever the default
        self.register_buffer("weight", identity, persistent=False)


class StopTexts(StoppingCriteria):
    """Stop each row that ends with one of some texts. The criterion of transformers compares
    characters with the names of ids, and a character may take several ids."""

    def __init__(self, texts: str | list[str]):
        texts = [texts] if isinstance(texts, str) else texts
        self.stops = [torch.tensor(list(text.encode())) for text in texts if text]

    def __call__(self, input_ids: Tensor, scores: Tensor, **_) -> Tensor:
        done = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        for stop in self.stops:
            if input_ids.shape[1] >= len(stop):
                done |= (input_ids[:, -len(stop) :] == stop.to(input_ids.device)).all(-1)
        return done


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
    _is_stateful = True
    accepts_loss_kwargs = True  # the Trainer reads it: forward takes num_items_in_batch
    supports_gradient_checkpointing = True

    def __init__(self, config: SpiderHFConfig):
        if getattr(config, "quantization_config", None) is not None:
            raise ValueError(
                "quantization_config is not available in Spider: model.to(torch.bfloat16) halves "
                "its size"
            )
        super().__init__(config)
        # The Trainer's label smoothing shifts labels only for classes of this list. Otherwise it
        # would train a model that copies.
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[type(self).__name__] = type(self).__name__
        # fp32: transformers casts loaded weights to the dtypes of these parameters
        self.spider = Spider(SpiderConfig.from_saved(config.spider)).float()
        if isinstance(config.dtype, torch.dtype):
            self.spider.compute_dtype = config.dtype
        self.logits_layer = LogitsLayer(config.vocab_size)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module):
        """Set the constants that are not in the files; Spider or the files set all other values."""
        if isinstance(module, EngramTable):
            multiplier = module.multiplier.clone()  # this one is in the files
            module.init_hash(0)
            module.multiplier.copy_(multiplier)
        elif isinstance(module, LogitsLayer):
            module.weight.copy_(torch.eye(len(module.weight)))

    @property
    def base_model(self) -> "SpiderForCausalLM":
        """Return the model itself. Where another library has replaced its `forward`, as TRL does,
        which calls base_model inside, return a view of it with its own `forward`: under autocast
        the other one must not be entered twice."""
        if "forward" not in vars(self):
            return self
        view = copy(self)
        del view.forward
        return view

    def get_input_embeddings(self) -> SimpleNamespace:  # type: ignore[override]  # not a module
        """Return the embeddings of bytes as a weight alone, whose size PEFT reads. Bytes are
        embedded with n-grams, by no module that could be replaced."""
        return SimpleNamespace(weight=self.spider.embed_tokens)

    def get_output_embeddings(self) -> LogitsLayer:
        return self.logits_layer

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

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *_, **__):
        """Accept the present size alone, which fine-tuning scripts ask for; raise ValueError for
        any other."""
        size = self.spider.config.vocab_size
        if new_num_tokens not in (None, size):
            raise ValueError(
                f"resize_token_embeddings: the vocabulary has {size} ids, of which the tokenizer "
                f"gives {size - EOS_ID - 1} to added tokens; pass len(tokenizer)"
            )
        self.vocab_size = size

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
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
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
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
        )

    def generate(
        self, inputs: Tensor | None = None, stop_strings: str | list[str] | None = None, **kwargs
    ):
        """Generate as transformers does; an empty prompt, like none, is the beginning of a
        document."""
        inputs = kwargs.pop("input_ids", inputs)
        if stop_strings:
            others = kwargs.get("stopping_criteria") or ()
            kwargs["stopping_criteria"] = StoppingCriteriaList([*others, StopTexts(stop_strings)])
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
        Trainer passes num_items_in_batch, the labels of all passes of an optimizer step: `loss` is
        then this pass's share of the step's loss, see share_of_step.

        With use_cache, which does not allow labels, a SpiderCache is created or continued; the
        logits are the same. The mask of a continued cache is not read.

        others: what other models take, such as inputs_embeds, as None or False. Raise ValueError
        for any other value, and for a mask with holes."""
        for name in ("output_attentions", "output_hidden_states"):
            others[name] = others.get(name) or getattr(self.config, name, None)
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
        share: Tensor | float = 1.0
        if labels is not None:
            share = share_of_step(labels, kept, num_items_in_batch)
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
        if loss is not None:
            loss = loss * share
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
        if len(cache.ids) != len(input_ids):
            raise ValueError(
                f"cache: it continues {len(cache.ids)} rows, but input_ids has {len(input_ids)}"
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
    if attention_mask.shape == input_ids.shape:
        starts = F.pad(attention_mask != 0, (1, 1)).int().diff(dim=1) > 0
        has_holes = (starts.sum(1) > 1).any()
        if not has_holes:
            return
    raise ValueError(
        "attention_mask must have the shape of input_ids, with contiguous ones in each row"
    )


def share_of_step(
    labels: Tensor, kept: Tensor, num_items_in_batch: Tensor | int | None
) -> Tensor | float:
    """Return the share of a pass's labels [B, T], not shifted, in num_items_in_batch, those of all
    passes of an optimizer step; 1 if the Trainer does not give it. kept: see without_padding.

    The Trainer adds up the losses of the passes, so each is weighted by its share. Labels are
    counted as the Trainer counts them: then the shares add up to 1. So the terms that are means
    over bytes equal those of one large pass. The other terms (balance, halting, segments) are means
    over a pass, and are averaged. Raise ValueError where labels of padding would distort the
    shares."""
    if num_items_in_batch is None:
        return 1.0
    counted = labels[:, 1:] != -100
    share = counted.sum() / max(1, num_items_in_batch)
    if (counted & ~kept[:, 1:]).any() and share != 1:
        raise ValueError(
            "labels: with gradient accumulation, those of padding must be -100, since the Trainer "
            "counts all others"
        )
    return share


SPECIAL = {PAD_ID: "<pad>", BOS_ID: "<bos>", EOS_ID: "<eos>"}
RESERVED = {i: f"<reserved_{i}>" for i in range(EOS_ID + 1, VOCAB_SIZE)}


class SpiderTokenizer(PreTrainedTokenizer):
    """The byte tokenizer: ids 0-255 are the UTF-8 bytes of a text, see tokenizer.py.

    Special tokens that are spelled in a text are special, as everywhere in transformers; with
    split_special_tokens=True they are bytes, as in `data.py prepare`. Added tokens take the
    reserved ids.

    A pair of texts is two documents. BOS is only added with add_bos_token and EOS with
    add_eos_token, since most texts are excerpts of a document, and lm-evaluation-harness adds BOS
    itself.

    `errors` is that of bytes.decode for decoding. With "surrogateescape" any bytes survive the
    round trip."""

    vocab_files_names: dict[str, str] = {}
    model_input_names = ["input_ids", "attention_mask"]
    padding_side = "left"

    def __init__(
        self,
        errors: str = "replace",
        add_bos_token: bool = False,
        add_eos_token: bool = False,
        **others,
    ):
        self.errors = errors
        self.add_bos_token = add_bos_token
        self.add_eos_token = add_eos_token
        settings = {
            "add_bos_token": add_bos_token,
            "add_eos_token": add_eos_token,
            "pad_token": SPECIAL[PAD_ID],
            "bos_token": SPECIAL[BOS_ID],
            "eos_token": SPECIAL[EOS_ID],
        }
        super().__init__(errors=errors, **(settings | others))

    @property
    def vocab_size(self) -> int:
        return VOCAB_SIZE

    @property
    def vocab(self) -> dict[str, int]:
        return self.get_vocab()

    def get_vocab(self) -> dict[str, int]:
        added = {i: token.content for i, token in self._added_tokens_decoder.items()}
        names = SPECIAL | RESERVED | added
        return {chr(i): i for i in range(256)} | {name: i for i, name in names.items()}

    def _add_tokens(self, new_tokens, special_tokens: bool = False) -> int:
        """Give reserved ids, in order, to tokens that have no id; return the number of these. Raise
        ValueError if there are too few, or a token is a character that stands for a byte."""
        vocabulary = self.get_vocab()
        names = dict.fromkeys(str(token) for token in new_tokens)  # an ordered set
        new = [name for name in names if name and name not in vocabulary]
        free = [i for i in RESERVED if i not in self._added_tokens_decoder]
        if len(new) > len(free):
            raise ValueError(
                f"{len(new)} tokens to add, but {len(free)} of {len(RESERVED)} reserved ids are "
                f"free: add fewer; a marker that is not added is spelled in bytes"
            )
        for name in names:
            if len(name) == 1 and "\x80" <= name <= "\xff":
                raise ValueError(f"{name!r} cannot be added: use two characters or more")
        for i, name in zip(free, new, strict=False):
            self._added_tokens_decoder[i] = AddedToken(name)
        super()._add_tokens(new_tokens, special_tokens)  # finds the ids in get_vocab
        return len(new)

    def _encode_plus(self, *args, return_offsets_mapping: bool = False, **others):
        if return_offsets_mapping:
            raise NotImplementedError(
                "return_offsets_mapping is not available in Spider: ids are the bytes of "
                "text.encode(), in order"
            )
        return super()._encode_plus(*args, **others)

    def apply_chat_template(self, *args, return_assistant_tokens_mask: bool = False, **others):
        if return_assistant_tokens_mask:
            raise NotImplementedError(
                "return_assistant_tokens_mask is not available in Spider; for TRL, instead of "
                "assistant_only_loss, split records into prompt and completion"
            )
        return super().apply_chat_template(*args, **others)

    def _tokenize(self, text: str, **_) -> list[str]:
        # U+DC80 to U+DCFF stand for bytes that are not UTF-8; other surrogates stand for no byte
        text = re.sub("[\ud800-\udc7f\udd00-\udfff]", "\ufffd", text)
        return [chr(byte) for byte in text.encode("utf-8", "surrogateescape")]

    def _convert_token_to_id(self, token: str) -> int | None:
        if len(token) == 1 and ord(token) < 256:
            return ord(token)
        return self.get_vocab().get(token)

    def _convert_id_to_token(self, index: int) -> str:
        names = SPECIAL | RESERVED
        if index in names:
            return names[index]
        return bytes([index]).decode("latin-1")  # an error for ids that do not exist

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        text = b""
        for token in tokens:
            is_byte = len(token) == 1 and ord(token) < 256
            text += token.encode("latin-1" if is_byte else "utf-8")
        return text.decode("utf-8", self.errors)

    def _is_special(self, index: int) -> bool:
        token = self._added_tokens_decoder.get(index)
        return index > 255 if token is None else token.special

    def _decode(
        self,
        token_ids,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
        **_,
    ) -> str:
        """Decode ids: special and reserved ones are dropped with skip_special_tokens, else written
        by name."""
        ids = [token_ids] if isinstance(token_ids, int) else [int(i) for i in token_ids]
        if skip_special_tokens:
            ids = [i for i in ids if not self._is_special(i)]
        return self.convert_tokens_to_string(self.convert_ids_to_tokens(ids))

    def build_inputs_with_special_tokens(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        ids = [BOS_ID] if self.add_bos_token else []
        ids += token_ids_0
        if token_ids_1 is not None:
            ids += [EOS_ID, BOS_ID, *token_ids_1]
        if self.add_eos_token:
            ids.append(EOS_ID)
        return ids

    def get_special_tokens_mask(
        self, token_ids_0, token_ids_1=None, already_has_special_tokens: bool = False
    ) -> list[int]:
        ids = token_ids_0
        if not already_has_special_tokens:
            ids = self.build_inputs_with_special_tokens(token_ids_0, token_ids_1)
        return [int(self._is_special(i)) for i in ids]

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple:
        return ()

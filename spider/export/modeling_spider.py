"""Spider behind Hugging Face's interfaces: configuration, model with the decoding cache, byte tokenizer.

An adapter, and no second copy of the model: `sample.py CHECKPOINT --export DIR` (export.py) lays it beside the files of
the model that it imports, so that AutoModelForCausalLM.from_pretrained(DIR, trust_remote_code=True) works without
anything else of this project. transformers shows this file what config.json and the safetensors hold, and nothing more.
"""

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizer
from transformers.utils import ModelOutput

from spider.model.config import SpiderConfig
from spider.model.decoding import DecodingState, check_ids
from spider.model.engram_table import EngramTable
from spider.model.packing import document_cu_seqlens
from spider_model import Spider
from tokenizer import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE


class SpiderHFConfig(PreTrainedConfig):
    """config.json: `spider` holds the fields of SpiderConfig, `n_loops` the loops that the model was trained with, and
    `training` what the model card says; the rest is what other libraries look for."""
    model_type = "spider"

    def __init__(self, spider: dict | None = None, n_loops: int | None = None, **others):
        config = SpiderConfig(**(spider or {}))                                              # checks every field
        self.spider = asdict(config)
        self.n_loops = config.n_loops if n_loops is None else n_loops
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self.num_hidden_layers = config.n_prelude_layers + config.n_recurrent_layers + config.n_coda_layers
        self.num_attention_heads = config.n_heads
        ids = dict(pad_token_id=PAD_ID, bos_token_id=BOS_ID, eos_token_id=EOS_ID, tie_word_embeddings=False)
        super().__init__(**(ids | {name: value for name, value in others.items() if name not in vars(self)}))


class SpiderCache:
    """The decoding state of each row, in the place of a cache of keys and values; steps change it."""
    is_compileable = False

    def __init__(self, state: DecodingState):
        self.state, self.seen = state, 0  # bytes of a row that it has read, its padding included

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.seen

    def reorder_cache(self, beam_idx: Tensor):
        """Row i goes on as row beam_idx[i] did."""
        self.state = self.state.copy(beam_idx.tolist())


@dataclass
class SpiderCausalLMOutput(ModelOutput):
    """See SpiderForCausalLM.forward."""
    loss: Tensor | None = None
    logits: Tensor | None = None          # [B, T, vocab_size]
    past_key_values: SpiderCache | None = None
    nats_per_byte: Tensor | None = None


class SpiderForCausalLM(PreTrainedModel, GenerationMixin):
    """Spider as a causal language model. Parameters stay fp32 whatever the `dtype` that it is loaded with, which is
    that of products, as in training; `half()`, `to(dtype)` and the like cast both. float16 is for reading and writing:
    gradients of a byte's loss are often too small for it.

    generate() decodes a byte at a time from a DecodingState. Drafts cannot be taken back from it, so that assisted
    generation is refused. For training there is Spider's own train.py: an optimizer from elsewhere does not move the
    Engram tables, whose gradients are not in weight.grad; the project's docs/guide/your-own-loop.md has what does."""
    config_class = SpiderHFConfig
    _is_stateful = True

    def __init__(self, config: SpiderHFConfig):
        super().__init__(config)
        self.spider = Spider(SpiderConfig(**config.spider)).float()  # transformers loads weights as they are here
        self.spider.compute_dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module):
        """Constants of the tables that no file holds; all other values are Spider's own, or the file's."""
        if isinstance(module, EngramTable):
            multiplier = module.multiplier.clone()
            module.init_hash(0)
            module.multiplier.copy_(multiplier)

    def get_input_embeddings(self):
        raise NotImplementedError("bytes are embedded together with their n-grams: there is no module to be exchanged")

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def zero_grad(self, set_to_none: bool = True):
        self.spider.zero_grad(set_to_none)

    def prepare_inputs_for_generation(self, input_ids: Tensor, past_key_values: SpiderCache | None = None,
                                      attention_mask: Tensor | None = None, use_cache: bool | None = None,
                                      n_loops: int | None = None, **_) -> dict:
        """Return the inputs of the next step: of input_ids [B, T] those that the cache has not seen."""
        seen = 0 if past_key_values is None else past_key_values.get_seq_length()
        return dict(input_ids=input_ids[:, seen:], attention_mask=attention_mask, past_key_values=past_key_values,
                    use_cache=use_cache, n_loops=n_loops)

    def generate(self, *args, **kwargs):
        with self.spider.cast_weights_once():
            return super().generate(*args, **kwargs)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None,
                past_key_values: SpiderCache | None = None, use_cache: bool | None = None,
                n_loops: int | None = None, return_dict: bool | None = None) -> SpiderCausalLMOutput | tuple:
        """input_ids [B, T] int64; attention_mask [B, bytes so far], 0 at a row's ends alone; labels [B, T], which are
        shifted here, as everywhere in transformers: input_ids serve; n_loops, or as many as trained. A label does not
        count where it is -100 or PAD, nor in padding: where the mask is 0, or PAD stands at a row's ends.

        Without cache it is the full pass, and `loss` what training minimises (in evaluation mode without the core's
        own prediction), `nats_per_byte` the cross-entropy alone; no part of either knows of padding.
        With use_cache, which labels exclude, a SpiderCache is made or goes on; both give the same logits, a row's
        padding or not. ValueError for a mask with holes."""
        n_loops, cu_seqlens = self.config.n_loops if n_loops is None else n_loops, None
        check_ids("input_ids", input_ids)
        if labels is not None:
            check_ids("labels", labels, *input_ids.shape)
        if past_key_values is None or not past_key_values.seen:
            kept, input_ids = without_padding(input_ids, attention_mask)
            cu_seqlens = document_cu_seqlens(input_ids)
            if labels is not None:        # the first byte's is told from nothing
                labels = labels.masked_fill(~(kept & F.pad(kept[:, :-1], (1, 0))) | (labels == PAD_ID), -100)
        if use_cache or past_key_values is not None:
            if labels is not None:
                raise ValueError("labels: a loss is that of a full pass; leave past_key_values and use_cache out")
            if past_key_values is None:
                past_key_values = SpiderCache(self.spider.decoding_state(len(input_ids), n_loops))
            output = SpiderCausalLMOutput(None, self.spider.step(input_ids, past_key_values.state), past_key_values)
            past_key_values.seen += input_ids.shape[1]
        else:
            shifted = None if labels is None else F.pad(labels[:, 1:], (0, 1), value=-100)
            full = self.spider(input_ids.where(kept, PAD_ID), shifted, n_loops, cu_seqlens=cu_seqlens)
            output = SpiderCausalLMOutput(full.loss, full.logits, None, full.nats_per_byte)
        return output.to_tuple() if return_dict is False else output


def without_padding(input_ids: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Which bytes are no padding, bool [B, T], and rows whose bytes see nothing of theirs, input_ids [B, T]; of
    attention_mask [B, T], 0 or 1. Padding is what the mask leaves out, and PAD at a row's ends.

    Padding in front becomes a document of its own, PAD ... EOS, behind which another begins; that behind the bytes is
    seen by none."""
    if attention_mask is not None and (attention_mask.shape != input_ids.shape or (
            F.pad(attention_mask != 0, (1, 1)).int().diff(dim=1) > 0).sum(1).ne(1).any()):
        raise ValueError("attention_mask: of the form of input_ids, with ones in a row and zeros only around them")
    input_ids = input_ids if attention_mask is None else input_ids.where(attention_mask != 0, PAD_ID)
    real = (input_ids != PAD_ID).int()
    in_front, behind = real.cumsum(1) == 0, real.flip(1).cumsum(1).flip(1) == 0
    ends = in_front & ~F.pad(in_front[:, 1:], (0, 1))
    return ~(in_front | behind), input_ids.masked_fill(ends, EOS_ID)


SPECIAL = {PAD_ID: "<pad>", BOS_ID: "<bos>", EOS_ID: "<eos>"} | {
    i: f"<reserved_{i}>" for i in range(EOS_ID + 1, VOCAB_SIZE)}
SPECIAL_IDS = {name: i for i, name in SPECIAL.items()}


class SpiderTokenizer(PreTrainedTokenizer):
    """Bytes as ids 0-255, as the model's own tokenizer.py has them. A text becomes its UTF-8 bytes, with add_bos_token
    behind BOS: a text is mostly somewhere in a document, and lm-evaluation-harness puts BOS where it wants one. A pair
    is two documents. Nothing in a text is read as an id above 255, not even where it spells one.

    `errors` says what bytes that are not UTF-8 become when decoded, as in bytes.decode. With "surrogateescape" any
    bytes survive: those of bytes.decode("utf-8", "surrogateescape") are encoded as the bytes that they were."""
    vocab_files_names = {}
    model_input_names = ["input_ids", "attention_mask"]
    padding_side = "left"

    def __init__(self, errors: str = "replace", add_bos_token: bool = False, **others):
        self.errors, self.add_bos_token = errors, add_bos_token
        special = dict(pad_token=SPECIAL[PAD_ID], bos_token=SPECIAL[BOS_ID], eos_token=SPECIAL[EOS_ID],
                       split_special_tokens=True, padding_side="left")
        super().__init__(errors=errors, add_bos_token=add_bos_token, **(special | others))

    @property
    def vocab_size(self) -> int:
        return VOCAB_SIZE

    def get_vocab(self) -> dict[str, int]:
        return {chr(i): i for i in range(256)} | SPECIAL_IDS

    def _tokenize(self, text: str, **_) -> list[str]:
        return [chr(byte) for byte in text.encode("utf-8", "surrogateescape")]

    def _convert_token_to_id(self, token: str) -> int:
        return SPECIAL_IDS[token] if token in SPECIAL_IDS else ord(token)

    def _convert_id_to_token(self, index: int) -> str:
        return SPECIAL[index] if index in SPECIAL else bytes([index]).decode("latin-1")

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        parts = (token.encode("latin-1" if len(token) == 1 else "ascii") for token in tokens)
        return b"".join(parts).decode("utf-8", self.errors)

    def _decode(self, token_ids, skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool | None = None,
                **_) -> str:
        """Ids above 255 are dropped with skip_special_tokens, as in tokenizer.py, and else named."""
        ids = [token_ids] if isinstance(token_ids, int) else [int(i) for i in token_ids]
        return self.convert_tokens_to_string(
            [self._convert_id_to_token(i) for i in ids if i < 256 or not skip_special_tokens])

    def build_inputs_with_special_tokens(self, token_ids_0: list[int], token_ids_1: list[int] | None = None):
        pair = [] if token_ids_1 is None else [EOS_ID, BOS_ID, *token_ids_1]
        return [BOS_ID] * self.add_bos_token + [*token_ids_0, *pair]

    def get_special_tokens_mask(self, token_ids_0, token_ids_1=None, already_has_special_tokens: bool = False):
        ids = token_ids_0 if already_has_special_tokens else self.build_inputs_with_special_tokens(
            token_ids_0, token_ids_1)
        return [int(i > 255) for i in ids]

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple:
        return ()

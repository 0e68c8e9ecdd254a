"""Checks that each key of `config.json` is read or is known to have no effect.

A family reads its `config.json` through `Keys`, which records the keys that it reads. A
key that is not read must be listed with the reason why it has no effect, or be null or
empty. Any other key raises an error, because it may change the model.
"""

from collections.abc import Iterator, Mapping
import re
import reprlib
from types import MappingProxyType
from typing import Any

_GENERATION = """
  bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id mask_token_id
  decoder_start_token_id use_cache cache_implementation max_length max_new_tokens
  min_length min_new_tokens do_sample early_stopping num_beams num_beam_groups
  diversity_penalty temperature top_k top_p min_p typical_p repetition_penalty
  length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
  num_return_sequences forced_bos_token_id forced_eos_token_id
  remove_invalid_values exponential_decay_length_penalty suppress_tokens
  begin_suppress_tokens prefix task_specific_params tokenizer_class
"""
_TRAINING = """
  attention_dropout attention_probs_dropout_prob attn_pdrop embd_pdrop resid_pdrop
  hidden_dropout hidden_dropout_prob dropout_rate classifier_dropout
  initializer_range initializer_factor gradient_checkpointing problem_type
  finetuning_task router_aux_loss_coef tf_legacy_loss
"""
_RETURNED = """
  _num_labels output_attentions output_hidden_states output_scores output_past return_dict
  return_dict_in_generate tie_last_hidden_states id2label label2id
"""
_COMPUTING = """
  dtype torch_dtype torchscript use_bfloat16 chunk_size_feed_forward pretraining_tp
  _attn_implementation attn_implementation _attn_implementation_autoset
"""
_FILES = """
  _name_or_path name_or_path _commit_hash transformers_version auto_map
  transformers.js_config unsloth_fixed unsloth_version
"""


def no_effect(why: str, keys: str) -> dict[str, str]:
  """Maps keys, separated by spaces, to the reason why they have no effect."""
  return dict.fromkeys(keys.split(), why)


WITHOUT_EFFECT: Mapping[str, str] = MappingProxyType(
  {
    **no_effect("affects only generation", _GENERATION),
    **no_effect("affects only training", _TRAINING),
    **no_effect("selects outputs other than logits", _RETURNED),
    **no_effect("selects an implementation of the same function", _COMPUTING),
    **no_effect("describes the origin of the files", _FILES),
  }
)
"""Keys that affect no logits in any family -> the reason. A family may read them."""


_FALSE = {"is_decoder", "is_encoder_decoder", "add_cross_attention"}
_FALSE |= {"tie_encoder_decoder"}
"""Keys that no family reads; in any file, they may be false."""


_FIELDS: Mapping[str, str] = MappingProxyType(
  {
    "features": "hidden_size n_embd d_model dim",
    "num_heads": "num_attention_heads n_head n_heads num_heads",
    "num_kv_heads": "num_key_value_heads",
    "shared_key_dim": "qk_rope_head_dim",
    "position": "rope_parameters",
    "rotary_fraction": "partial_rotary_factor rotary_pct",
    "out_groups": "o_groups",
    "encoder_attention": "attention_window",
    "max_distance": "max_relative_positions relative_attention_max_distance",
    "num_buckets": "position_buckets relative_attention_num_buckets",
    "index_dim": "index_head_dim",
    "index_rotary_dim": "qk_rope_head_dim",
    "relative_distance": "relative_attention_max_distance",
    "relative_buckets": "relative_attention_num_buckets",
    "num_experts": "n_routed_experts num_local_experts num_experts",
    "experts_per_token": "num_experts_per_tok num_experts_per_token",
    "expert_groups": "n_group num_expert_group",
    "groups_per_token": "topk_group",
  }
)
"""Config fields in messages -> the keys from which families read them."""


class Keys(Mapping[str, Any]):
  """The content of `config.json`, and which of its keys were read.

  Attributes:
    read: the keys that were read.
  """

  def __init__(self, content: Mapping[str, Any]):
    self._content = content
    self.read: set[str] = set()

  def __getitem__(self, key: str) -> Any:
    self.read.add(key)
    return self._content[key]

  def __contains__(self, key: object) -> bool:
    return key in self._content

  def __iter__(self) -> Iterator[str]:
    return iter(self._content)

  def __len__(self) -> int:
    return len(self._content)

  def translate(self, message: str) -> str:
    """Replaces config fields in a message with the keys of the file.

    A message that starts with a key is returned as it is.
    """
    field, colon, _ = message.partition(":")
    if not colon or field in self.read:
      return message
    name = field.rpartition(".")[2]  # Of 'decoder_around[0].num_kv_heads'.
    if name in _FIELDS:
      message = message.removeprefix(field.removesuffix(name))
    return re.sub(r"\w+", lambda word: self._key(word[0]), message)

  def _key(self, field: str) -> str:
    """A key of a config field: in the file, else read, else the first; or the field."""
    keys = _FIELDS.get(field, field).split()
    return max(keys, key=lambda key: (key in self, key in self.read))

  def check(self, family: str, without_effect: Mapping[str, str]) -> None:
    """Raises ValueError for the first key that was not read and is not listed.

    Args:
      family: name of the family, for the message.
      without_effect: keys that have no effect in it -> the reason.
    """
    known = self.read | {*without_effect, *WITHOUT_EFFECT}
    for key, value in self._content.items():
      if key in known or value in (None, {}, []):
        continue
      if key not in _FALSE or value is not False:
        raise ValueError(
          f"{key}: not supported for {family}; expected a config without it, "
          f"got {reprlib.repr(value)}"
        )

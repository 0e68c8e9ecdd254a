"""What a model is made of, as frozen dataclasses that check themselves.

Every fault is a ValueError that starts with the name of the field, raised when
the config is made: before data is read and before anything compiles.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import functools
import types
from typing import Any

from attention import ATTENTIONS, Attention, plug, registry
from settings.checks import check
from settings.suggest import one_of

KINDS = ("encoder_decoder", "decoder", "encoder")
POSITIONS = (
  "sinusoidal",
  "learned",
  "rotary",
  "t5",
  "alibi",
  "shaw",
  "none",
)
NORMS = ("pre", "post")
ACTIVATIONS = ("relu", "gelu")
DTYPES = ("float32", "bfloat16", "float16")

# What each slot asks of a mechanism, and how its absence reads.
NEEDS = {
  "encoder_attention": {
    "bidirectional": "attend in both directions",
    "mask": "honour a key mask",
  },
  "decoder_attention": {"causal": "be causal"},
  "cross_attention": {
    "cross": "attend to another sequence",
    "rowwise": "attend from one position at a time",
    "mask": "honour a key mask",
  },
}
"""Choice of a model -> what its mechanism must support, and that in words."""

GENERATING = {
  "decoder_attention": {"decode": "decode token by token"},
}
"""Likewise, where a task generates."""

_SLOTS = {
  "encoder_decoder": tuple(NEEDS),
  "decoder": ("decoder_attention",),
  "encoder": ("encoder_attention",),
}


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
  """One mechanism by name, with its own options.

  Attributes:
    name: a key of `attention.ATTENTIONS`, or 'package.module:factory'.
    options: keyword arguments of that factory; lists become tuples.

  Raises:
    ValueError: an unknown name or option, a missing one, or a value that the
      factory refuses. The message starts with `name` or the option.
  """

  name: str
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    options = {key: _frozen(value) for key, value in self.options.items()}
    for key, value in options.items():
      if isinstance(value, Mapping):
        raise ValueError(
          f"{key}: expected a number, text, true, false or a list, got {value!r}"
        )
    object.__setattr__(self, "options", types.MappingProxyType(options))
    self.build()

  def __hash__(self):
    return hash((self.name, tuple(sorted(self.options.items()))))

  def build(self) -> Attention:
    """Returns the mechanism; equal configs give the same object."""
    return _build(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
  """An encoder-decoder, decoder or encoder Transformer.

  Attributes:
    kind: 'encoder_decoder', 'decoder' or 'encoder'.
    num_layers: layers of the encoder, and of the decoder.
    num_heads: N, query heads.
    num_kv_heads: K, key/value heads that groups of N/K query heads share;
      None is N.
    features: width of the residual stream; the head dimension is features / N.
    mlp_features: width inside the feed-forward layers.
    activation: of the feed-forward layers, 'relu' (Vaswani) or 'gelu' (GPT).
    dropout_rate: of sub-layer outputs and of embedding sums, as in the paper.
    attention_dropout_rate: of attention weights.
    position: 'sinusoidal' (Vaswani) or 'learned', added to the embeddings;
      'rotary' (Su), 't5', 'alibi' or 'shaw' within self-attention; or 'none'.
    norm: 'post' as in the paper, or 'pre' with one more norm at the end.
    tie_embeddings: the softmax shares the target's embedding table, and the
      source's too where the vocabulary is shared.
    dtype: of activations; logits and softmax are always float32.
    param_dtype: of parameters.
    encoder_attention: mechanism of the encoder; None is dense.
    decoder_attention: mechanism of the decoder's self-attention; None is dense.
    cross_attention: from decoder to encoder; None is dense.

  Raises:
    ValueError: a value or a pair that cannot work; the message starts with the
      field.
  """

  kind: str
  num_layers: int
  num_heads: int
  features: int
  mlp_features: int
  num_kv_heads: int | None = None
  activation: str = "relu"
  dropout_rate: float = 0.0
  attention_dropout_rate: float = 0.0
  position: str = "sinusoidal"
  norm: str = "pre"
  tie_embeddings: bool = True
  dtype: str = "float32"
  param_dtype: str = "float32"
  encoder_attention: AttentionConfig | None = None
  decoder_attention: AttentionConfig | None = None
  cross_attention: AttentionConfig | None = None

  def __post_init__(self):
    check_choices(
      self,
      kind=KINDS,
      activation=ACTIVATIONS,
      position=POSITIONS,
      norm=NORMS,
      dtype=DTYPES,
      param_dtype=DTYPES,
    )
    check_ranges(
      self,
      counts=("num_layers", "num_heads", "features", "mlp_features"),
      rates=("dropout_rate", "attention_dropout_rate"),
    )
    self._check_heads()
    self._check_attentions()

  @property
  def head_dim(self) -> int:
    """H."""
    return self.features // self.num_heads

  @property
  def kv_heads(self) -> int:
    """K."""
    return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

  @property
  def attentions(self) -> dict[str, AttentionConfig]:
    """The mechanisms that this kind has, by field."""
    return {field: getattr(self, field) for field in _SLOTS[self.kind]}

  def _check_heads(self):
    if self.features % self.num_heads:
      raise ValueError(
        f"features: {self.features} is not divisible by num_heads "
        f"{self.num_heads}"
      )
    if self.kv_heads < 1 or self.num_heads % self.kv_heads:
      raise ValueError(
        f"num_kv_heads: expected a divisor of num_heads {self.num_heads}, got "
        f"{self.num_kv_heads}"
      )
    if self.position == "rotary" and self.head_dim % 2:
      raise ValueError(
        "position: rotary turns pairs and needs an even head dimension, got "
        f"features / num_heads = {self.head_dim}"
      )
    if self.position == "sinusoidal" and self.features % 2:
      raise ValueError(
        "features: sinusoidal positions pair sines and cosines and need an "
        f"even width, got {self.features}"
      )

  def _check_attentions(self):
    for field in NEEDS:
      config = getattr(self, field)
      if field not in _SLOTS[self.kind]:
        if config is not None:
          raise ValueError(
            f"{field}: kind '{self.kind}' has no such layer; expected a config "
            f"without this choice, got {config.name}"
          )
        continue
      if config is None:
        config = AttentionConfig("dense")
        object.__setattr__(self, field, config)
      needs = dict(NEEDS[field])
      if self.position in ("t5", "alibi", "shaw") and "cross" not in needs:
        needs["relative"] = (
          f"carry relative positions (position '{self.position}')"
        )
      if self.attention_dropout_rate:
        needs["dropout"] = "drop attention weights (attention_dropout_rate)"
      check_supports(field, config, needs)


def slots(config: Any) -> str:
  """Which mechanism fills which slot: 'linformer · dense · linformer'.

  Read from what the model is made of, not from the name that was asked for. The
  order is encoder, decoder, cross-attention; a model with one has one name.

  Args:
    config: a `ModelConfig` or `Seq2SeqConfig`.
  """
  return " · ".join(one.name for one in config.attentions.values())


def check_supports(
  field: str, config: AttentionConfig, needs: Mapping[str, str]
) -> None:
  """Raises ValueError where a mechanism lacks what its slot needs."""
  for capability in missing(config.build(), needs):
    able = ", ".join(plug.supporting(ATTENTIONS, capability))
    raise ValueError(
      f"{field}: {config.name} cannot {needs[capability]}; one of {able} can"
    )


def missing(attention: Attention, needs: Iterable[str]) -> list[str]:
  """The capabilities among `needs` that a mechanism does not have."""
  return [need for need in needs if not plug.can(attention, need)]


def check_choices(config: Any, **choices: Sequence[str]) -> None:
  """Raises ValueError where a field is none of its choices."""
  for field, known in choices.items():
    if getattr(config, field) not in known:
      raise ValueError(f"{field}: {one_of(getattr(config, field), known)}")


def check_ranges(
  config: Any, *, counts: Sequence[str], rates: Sequence[str]
) -> None:
  """Raises ValueError for a count below 1 or a rate outside [0, 1)."""
  for field in counts:
    check(config, field, getattr(config, field) >= 1, "at least 1")
  for field in rates:
    check(config, field, 0.0 <= getattr(config, field) < 1.0, "[0, 1)")


@functools.cache
def _build(config: AttentionConfig) -> Attention:
  return registry.build(config.name, config.options)


def _frozen(value: Any) -> Any:
  if isinstance(value, list | tuple):
    return tuple(_frozen(item) for item in value)
  return value

"""Configs refuse what cannot work, naming the field first."""

import dataclasses

import pytest

from attention import ATTENTIONS
from models import (
  AroundConfig,
  AttentionConfig,
  ModelConfig,
  RotaryScaling,
  create,
)
from models.nested import make
from settings.build import build, to_mapping

SIZES = {"num_layers": 1, "num_heads": 4, "features": 16, "mlp_features": 32}
LINFORMER = AttentionConfig("linformer", {"rank": 4})
PERFORMER = AttentionConfig("performer", {})
WINDOW = AttentionConfig("sliding_window", {"window": 2})
SAME = AroundConfig()


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"kind": "decodr"}, "kind: .*did you mean 'decoder'"),
    ({"features": 130}, "features: 130 is not divisible by num_heads 4"),
    ({"num_layers": 0}, "num_layers: expected at least 1, got 0"),
    ({"num_kv_heads": 3}, "num_kv_heads: expected a divisor of num_heads 4"),
    ({"num_kv_heads": 0}, "num_kv_heads: "),
    ({"num_qk_heads": 3}, "num_qk_heads: expected a divisor of num_heads 4"),
    ({"num_qk_heads": 2, "num_kv_heads": 2}, "num_qk_heads: .* without num_kv"),
    ({"mlp_features": -1}, "mlp_features: expected at least 0"),
    ({"short_convolution_bias": True}, "short_convolution_bias: expected"),
    ({"features": 12, "position": "rotary"}, "position: rotary .* even head"),
    (
      {"rotary_scaling": RotaryScaling("linear", {"factor": 2.0})},
      "rotary_scaling: expected None without position 'rotary'",
    ),
    ({"features": 9, "num_heads": 3}, "features: sinusoidal .* even width"),
    ({"dropout_rate": 1.0}, "dropout_rate: expected .*got 1.0"),
    ({"dropout_rate": float("nan")}, "dropout_rate: expected .*got nan"),
    ({"attention_dropout_rate": -0.1}, "attention_dropout_rate: "),
    ({"activation": "tanh"}, "activation: "),
    ({"norm": "prenorm"}, "norm: .*did you mean 'pre'"),
    ({"position": "rotory"}, "position: .*did you mean 'rotary'"),
    ({"dtype": "float8"}, "dtype: "),
    ({"encoder_attention": WINDOW}, "encoder_attention: .*without this choice"),
    ({"decoder_attention": LINFORMER}, "decoder_attention: linformer cannot"),
    (
      {"kind": "encoder_decoder", "cross_attention": WINDOW},
      "cross_attention: sliding_window cannot attend from one position",
    ),
    (
      {"decoder_attention": AttentionConfig("latent"), "num_kv_heads": 2},
      "num_kv_heads: latent makes a key and a value for every head",
    ),
    (
      {"decoder_attention": PERFORMER, "attention_dropout_rate": 0.1},
      "decoder_attention: performer cannot drop .*; one of dense, .* can",
    ),
    ({"decoder_around": ()}, "decoder_around: expected at least one"),
    (
      {"kind": "encoder", "decoder_around": (AroundConfig(),)},
      "decoder_around: expected none where kind is",
    ),
    (
      {"num_layers": 2, "decoder_around": (SAME, AroundConfig(num_heads=3))},
      r"decoder_around\[1\].features: 16 is not divisible by num_heads 3",
    ),
    (
      {"decoder_around": (AroundConfig(num_qk_heads=3),)},
      r"decoder_around\[0\].num_qk_heads: expected a divisor",
    ),
    (
      {"decoder_around": (AroundConfig(position="none"),)},
      r"decoder_around\[0\].position: .*'sinusoidal' of the model",
    ),
    (
      {"decoder_around": (AroundConfig(num_heads=2),), "position": "alibi"},
      r"decoder_around\[0\].num_heads: .*whose table all layers share",
    ),
  ],
)
def test_model_config_refuses(changes, message):
  with pytest.raises(ValueError, match=f"^{message}"):
    make(ModelConfig, **{"kind": "decoder", **SIZES, **changes})


@pytest.mark.parametrize(
  ("name", "options", "message"),
  [
    ("performr", {}, "name: unknown 'performr'; did you mean 'performer'"),
    ("sliding_window", {"windw": 3}, "windw: .*did you mean 'window'"),
    ("sliding_window", {"window": -1}, "window: "),
    ("linformer", {"rank": 0}, "rank: "),
    ("dense", {"window": 3}, "window: dense has no such option"),
  ],
)
def test_attention_config_refuses(name, options, message):
  with pytest.raises(ValueError, match=f"^{message}"):
    AttentionConfig(name, options)


def test_sizes_are_checked_when_the_model_is_made():
  config = ModelConfig(
    kind="encoder",
    encoder_attention=AttentionConfig("linformer", {"rank": 64}),
    **SIZES,
  )
  sizes = dict.fromkeys(("source_vocab_size", "target_vocab_size"), 8)
  sizes |= {"max_source_length": 32, "max_target_length": None}
  with pytest.raises(ValueError, match=r"^encoder_attention: rank"):
    create(config, shared_vocabulary=True, **sizes)
  with pytest.raises(ValueError, match=r"^tie_embeddings: "):
    create(config, **sizes)
  with pytest.raises(ValueError, match=r"^shared_vocabulary: "):
    create(config, shared_vocabulary=True, **{**sizes, "source_vocab_size": 9})
  with pytest.raises(ValueError, match=r"^max_source_length: .*needs it"):
    create(config, **{**sizes, "max_source_length": None})


def test_configs_are_values():
  one = AttentionConfig("sliding_window", {"window": [4, 0], "dilation": 1})
  two = AttentionConfig("sliding_window", {"dilation": 1, "window": (4, 0)})
  assert one == two
  assert hash(one) == hash(two)
  assert one.build() is two.build()
  with pytest.raises(TypeError):
    one.options["window"] = 3
  configs = {
    ModelConfig(kind="decoder", decoder_attention=attention, **SIZES)
    for attention in (one, two)
  }
  assert len(configs) == 1
  with pytest.raises(dataclasses.FrozenInstanceError):
    configs.pop().features = 3


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"output_gate": "tanh"}, "output_gate: expected 'none'"),
    ({"position": "learned"}, "position: expected 'rotary' or 'none', got"),
  ],
)
def test_what_is_around_layers_is_of_some_kinds(changes, message):
  with pytest.raises(ValueError, match=f"^{message}"):
    AroundConfig(**changes)


def test_what_is_around_layers_is_written_and_read():
  """As a config file has it, and as a run keeps it."""
  typed = {
    "kind": "decoder",
    **SIZES,
    "decoder_around": [{"num_heads": 2, "output_norm": "rms"}, {}],
  }
  config = build(ModelConfig, typed)
  assert config.decoder_around == (
    AroundConfig(num_heads=2, output_norm="rms"),
    SAME,
  )
  assert build(ModelConfig, to_mapping(config)) == config
  assert {config: 1}[build(ModelConfig, typed)]
  with pytest.raises(
    ValueError, match=r"decoder_around\[0\].features: unknown"
  ):
    build(ModelConfig, {**typed, "decoder_around": [{"features": 2}]})


def test_absent_mechanisms_are_dense():
  config = ModelConfig(kind="encoder_decoder", **SIZES)
  assert {a.name for [a] in config.attentions.values()} == {"dense"}
  assert ModelConfig(kind="decoder", **SIZES).encoder_attention is None
  assert "dense" in ATTENTIONS

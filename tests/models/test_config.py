"""Configs refuse what cannot work, naming the field first."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from attention import ATTENTIONS
from models import (
  AroundConfig,
  AttentionConfig,
  ModelConfig,
  RotaryScaling,
  create,
)
from models.attention_module_config import DisentangledConfig
from models.nested import make
from settings.build import build, to_mapping
from tests.refusals import assert_refused

SIZES = {"num_layers": 1, "num_heads": 4, "features": 16, "mlp_features": 32}
LINFORMER = AttentionConfig("linformer", {"rank": 4})
PERFORMER = AttentionConfig("performer", {})
WINDOW = AttentionConfig("sliding_window", {"window": 2})
SAME = AroundConfig()


def test_model_config_refuses():
  def around(**choices):
    return {"decoder_around": (AroundConfig(**choices),)}

  scaling = RotaryScaling("linear", {"factor": 2.0})
  latent = AttentionConfig("latent")
  assert_refused(
    lambda **changes: make(
      ModelConfig, **{"kind": "decoder", **SIZES, **changes}
    ),
    *({"features": 130}, {"num_layers": 0}, {"mlp_features": -1}),
    *({"num_kv_heads": x} for x in (3, 0)),
    {"num_kv_heads": 2, "decoder_attention": latent},
    *({"num_qk_heads": 3}, {"num_qk_heads": 2, "num_kv_heads": 2}),
    {"shared_key_dim": 2},
    {"shared_key_dim": 4, "latent_rank": 3, "position": "rotary"},
    *(("shared_key_dim", {"latent_rank": 3}), {"out_rank": 2}),
    {"position": "rotary", "rotary_fraction": 0.1},
    ("position", {"shared_key_dim": 3, "latent_rank": 3, "position": "rotary"}),
    *({"short_convolution_bias": True}, {"shared_norm": True}),
    {"shared_norm": True, "parallel": True, "norm": "output"},
    {"position_skips_masked": True, "position": "learned"},
    # Few for the buckets of a causal call; too few buckets for both directions.
    {"relative_distance": 16, "position": "t5"},
    (
      "relative_distance",
      {"kind": "encoder", "position": "t5", "relative_buckets": 3},
    ),
    {"projected": "tokens"},
    {"disentangled": DisentangledConfig(norm=False)},
    {"query_rank": 3, "position": "disentangled"},
    (
      "latent_rank",
      {"position": "disentangled", "latent_rank": 3, "shared_key_dim": 2},
    ),
    *({"position": "rotary", "features": 12}, {"rotary_scaling": scaling}),
    {"features": 9, "num_heads": 3},
    *({"dropout_rate": x} for x in (1.0, float("nan"))),
    *({"attention_dropout_rate": -0.1}, {"activation": "tanh"}),
    *({"dtype": "float8"}, {"encoder_attention": WINDOW}),
    {"decoder_attention": LINFORMER},
    {"decoder_attention": (WINDOW, WINDOW)},
    (
      "encoder_attention",
      ENCODER | {"encoder_attention": PERFORMER, "global_projections": True},
    ),
    {"decoder_attention": PERFORMER, "attention_dropout_rate": 0.1},
    {"cross_attention": WINDOW, "kind": "encoder_decoder"},
    {"decoder_around": ()},
    {"decoder_around": (AroundConfig(),), "kind": "encoder"},
    (
      "decoder_around[1].features",
      {"num_layers": 2, "decoder_around": (SAME, AroundConfig(num_heads=3))},
    ),
    ("decoder_around[0].num_qk_heads", around(num_qk_heads=3)),
    ("decoder_around[0].position", around(position="none")),
    # All layers share its table.
    *(
      ("decoder_around[0].num_heads", around(num_heads=2) | {"position": x})
      for x in ("alibi", "t5")
    ),
  )
  assert_refused(DisentangledConfig, {"terms": ("c2p", "c2p")})
  assert_refused(AroundConfig, {"output_gate": "tanh"}, {"position": "learned"})


ENCODER = {"kind": "encoder", "head": "hidden"}
LEARNED = {"position": "learned", "position_offset": 2}
EXPERTS = {"num_experts": 2}
FACTORS = (1.0, 0.5)


@pytest.mark.parametrize(
  ("given", "fields"),
  [
    (
      {},
      {
        **{"num_decoder_layers": 2, "head": "class", "token_types": 2},
        **{"global_projections": True, "encoder_around": (SAME,)},
        **{"relative_buckets": 8, "relative_distance": 64},
        **{"position_offset": 2, "shared_norm": True},
        **{"gate_factor": 2.0, "gate_slope": 2.0, "gate_limit": 1.0},
        **{"gate_offset": 1.0, "mean_pooling": True, "pooler": True},
        **{"pooler_activation": "relu", "transform_bias": False},
        **{"transform_activation": "relu", "stream_steps": 3},
        **{"stream_epsilon": 0.1, "short_convolution_activation": "none"},
      },
    ),
    (LEARNED, {"position_padding": 1}),
    ({"position": "learned"}, {"position_skips_masked": True}),
    (
      ENCODER,
      {
        **{"num_decoder_layers": 2, "decoder_around": (SAME,), "streams": 2},
        **{"mean_pooling": True, "head_transform": True},
        **{"logit_scale": 2.0, "logit_soft_cap": 3.0},
        **{"short_convolution": True, "query_temperature": "log"},
        **{"self_attention": False},
      },
    ),
    (ENCODER | {"position": "learned"}, {"position_padding": 1}),
    (ENCODER | LEARNED, {"position_skips_masked": True}),
    (ENCODER | EXPERTS, {"router_table": 5}),
    (ENCODER | {"head": "class"}, {"logit_scale": 2.0, "logit_soft_cap": 3.0}),
    (ENCODER | {"position": "disentangled"}, {"global_projections": True}),
    (
      {"parallel": True},
      {
        **{"residual_factors": FACTORS, "mlp_residual_factors": FACTORS},
        "norm": "residual",
      },
    ),
    (
      {"streams": 2},
      {"residual_factors": FACTORS, "mlp_residual_factors": FACTORS},
    ),
    ({"mlp_features": 0}, EXPERTS),
    ({"self_attention": False, "parallel": True}, {"shared_norm": True}),
    ({"norm": "post"}, {"input_norm": False}),
  ],
)
def test_a_field_that_a_model_does_not_read_is_refused(given, fields):
  make(ModelConfig, **{"kind": "decoder", **SIZES, **given})
  for name, value in fields.items():
    with pytest.raises(ValueError, match=f"^{name}: expected "):
      make(ModelConfig, **{"kind": "decoder", **SIZES, **given, name: value})


@pytest.mark.parametrize(
  ("name", "wrong", "meant"),
  [
    ("kind", "decodr", "decoder"),
    ("norm", "prenorm", "pre"),
    ("position", "rotory", "rotary"),
  ],
)
def test_a_misspelt_word_is_told_what_was_meant(name, wrong, meant):
  with pytest.raises(ValueError, match=f"^{name}: .*did you mean '{meant}'"):
    make(ModelConfig, **{"kind": "decoder", **SIZES, name: wrong})


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
  both = ModelConfig(kind="encoder_decoder", **SIZES)
  sizes["max_target_length"] = 32
  create(both, **{**sizes, "max_source_length": np.int64(32)})
  for name in sizes:
    for wrong in (None, 0, True, 8.0):
      with pytest.raises(ValueError, match=f"^{name}: .*needs an int"):
        create(both, **{**sizes, name: wrong})


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


def test_numbers_may_be_those_of_numpy():
  plain = ModelConfig(kind="decoder", dropout_rate=0.5, gated=True, **SIZES)
  numbers = {name: np.int64(x) for name, x in SIZES.items()}
  numbers |= {"dropout_rate": np.float32(0.5), "gated": np.bool_(True)}
  made = ModelConfig(kind="decoder", **numbers)
  assert made == plain
  assert type(made.features) is int
  numbers["features"] = jnp.array(SIZES["features"])
  assert ModelConfig(kind="decoder", **numbers) == plain
  for window in (np.array([4, 2]), jnp.array([4, 2]), [np.int64(4), 2]):
    config = AttentionConfig("sliding_window", {"window": window})
    assert config.options == {"window": (4, 2)}


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
  with pytest.raises(ValueError, match=r"decoder_around\[0\].features"):
    build(ModelConfig, {**typed, "decoder_around": [{"features": 2}]})


def test_absent_mechanisms_are_dense():
  config = ModelConfig(kind="encoder_decoder", **SIZES)
  assert {a.name for [a] in config.attentions.values()} == {"dense"}
  assert ModelConfig(kind="decoder", **SIZES).encoder_attention is None
  assert "dense" in ATTENTIONS

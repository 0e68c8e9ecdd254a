"""What a decoder keeps of a sequence, against what its model really makes."""

import jax
import jax.numpy as jnp
import pytest

from comparison import costs
import models
from models import nested
from models.attention_config import AttentionConfig
from models.config import ModelConfig

LENGTH = 12


@pytest.mark.parametrize(
  ("mechanism", "fields"),
  [
    ("dense", {}),
    ("flash", {"num_kv_heads": 2, "short_convolution": True}),
    ("mamba2", {"num_qk_heads": 1, "value_dim": 6, "short_convolution": True}),
    ("latent", {"position": "none", "short_convolution": True}),
    ("gated_delta", {"num_layers": 3, "short_convolution": True}),
  ],
)
def test_cache_bytes_are_those_of_the_cache_that_the_model_makes(
  mechanism, fields
):
  config = nested.make(
    ModelConfig,
    **{
      "kind": "decoder",
      "num_layers": 2,
      "num_heads": 4,
      "features": 16,
      "mlp_features": 8,
      "position": "rotary",
      "decoder_attention": AttentionConfig(mechanism),
      **fields,
    },
  )
  model = models.create(
    config,
    source_vocab_size=None,
    target_vocab_size=5,
    max_source_length=None,
    max_target_length=LENGTH,
  )

  def start(key):
    ids = jnp.zeros((1, LENGTH), "int32")
    variables = models.initialize(model, key, {"inputs": ids})
    _, state = model.apply(
      variables, None, 1, LENGTH, method="start", mutable=["cache", "memory"]
    )
    return state["cache"]

  cache = dict(jax.eval_shape(start, jax.random.key(0)))
  del cache["index"]
  made = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
  assert costs.cache_bytes(config, LENGTH) == made

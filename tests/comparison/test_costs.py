"""What a decoder keeps of a sequence, against numbers that are made by hand."""

import pytest

from comparison.measurement import costs
from models import nested
from models.attention_config import AttentionConfig
from models.config import ModelConfig

LENGTH, INDEX = 12, 1


def convolved(features):
  """Inputs of a short convolution of four places."""
  return 3 * features


@pytest.mark.parametrize("kind", ["decoder", "encoder_decoder"])
@pytest.mark.parametrize(
  ("mechanism", "fields", "numbers"),
  [
    # Keys and values of four heads of width 4.
    ("dense", {}, 2 * LENGTH * 16 + INDEX),
    (
      "flash",
      {"num_kv_heads": 2, "short_convolution": True},
      2 * LENGTH * 8 + INDEX + convolved(16 + 8 + 8),
    ),
    # A state of 4 × 6 a head; the heads share queries and keys.
    (
      "mamba2",
      {"num_qk_heads": 1, "value_dim": 6, "short_convolution": True},
      4 * 4 * 6 + convolved(4 + 4 + 24),
    ),
    (
      "gated_delta",
      {"num_layers": 3, "short_convolution": True},
      4 * 4 * 4 + convolved(3 * 16),
    ),
  ],
)
def test_bytes_of_a_cache(kind, mechanism, fields, numbers):
  config = nested.make(
    ModelConfig,
    **{
      "kind": kind,
      "num_layers": 2,
      "num_heads": 4,
      "features": 16,
      "mlp_features": 8,
      "position": "rotary",
      "decoder_attention": AttentionConfig(mechanism),
      **fields,
    },
  )
  expected = 4 * fields.get("num_layers", 2) * numbers
  assert costs.cache_bytes(config, LENGTH) == expected

"""Makes small Perceivers, which answer for every position that there may be.

python -m projects.perceiver.tests.published.make_fixtures
"""

import pathlib

import numpy as np

from tests.models.published.make_fixtures import VOCAB, case, tokens_of

HERE = pathlib.Path(__file__).parent
SIZES = {
  "vocab_size": VOCAB,
  "max_position_embeddings": 40,
  "num_latents": 6,
  "d_latents": 24,
  "d_model": 16,
  "num_blocks": 2,
  "num_self_attends_per_block": 2,
  "num_self_attention_heads": 4,
  "num_cross_attention_heads": 2,
  "self_attention_widening_factor": 2,
  "cross_attention_shape_for_attention": "q",
  # Is not read: every norm has 1e-5.
  "layer_norm_eps": 0.1,
}
WIDTHS = {
  "qk_channels": 12,
  "v_channels": 24,
  "use_query_residual": False,
  "cross_attention_widening_factor": 3,
  "hidden_act": "relu",
}


def main():
  """Makes both of them."""
  kind = "PerceiverForMaskedLM"
  inputs = tokens_of(np.random.default_rng(19), 3, 40, 0, (40, 23, 1))
  case(HERE / "perceiver", kind, SIZES, inputs, float64=True)
  case(HERE / "perceiver_widths", kind, SIZES | WIDTHS, inputs)


if __name__ == "__main__":
  main()

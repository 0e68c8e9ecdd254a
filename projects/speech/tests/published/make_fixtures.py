"""Makes small models of speech, with padding and without.

python -m projects.speech.tests.published.make_fixtures
"""

import pathlib

import numpy as np

from tests.models.published.make_fixtures import case

HERE = pathlib.Path(__file__).parent
SHAPE = {
  "vocab_size": 13,
  "hidden_size": 24,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "intermediate_size": 37,
  "conv_dim": (8, 12, 10),
  "conv_kernel": (10, 3, 2),
  "conv_stride": (5, 2, 2),
  "num_conv_pos_embeddings": 6,
  "num_conv_pos_embedding_groups": 4,
  "conv_depthwise_kernel_size": 7,
}
# As in the published folders.
RELATIVE = {
  "position_embeddings_type": "relative",
  "feat_extract_norm": "layer",
  "conv_bias": True,
  "hidden_act": "swish",
}
ROTARY = {
  "position_embeddings_type": "rotary",
  "rotary_embedding_base": 500,
  "feat_extract_activation": "relu",
}
NO_POSITIONS = {"position_embeddings_type": None, "mask_time_prob": 0.0}


def main():
  """Makes all of them."""
  rng = np.random.default_rng(23)
  audio = {"input_values": rng.standard_normal((3, 611), np.float32)}
  mask = np.ones((3, 611), np.int64)
  mask[1, 397:], mask[2, 61:] = 0, 0
  padded = audio | {"attention_mask": mask}
  for name, choices, inputs in (
    ("relative", RELATIVE, padded),
    ("rotary", ROTARY, padded),
    ("no_positions", NO_POSITIONS, audio),
  ):
    path = HERE / f"wav2vec2_conformer_{name}"
    case(path, "Wav2Vec2ConformerForCTC", SHAPE | choices, inputs)


if __name__ == "__main__":
  main()

"""State tracking: the product of all permutations of three letters so far.

    python train.py --config=configs/state_tracking.py:gated_delta
    python train.py --config=configs/state_tracking.py:delta --config.task.letters=5

The model is trained at length 32; the splits 'length_…' have the accuracy at 64, 128
and 256. docs/results.md has results for two, three and five letters.

Merrill et al., arXiv:2404.08819.
"""

import ml_collections

from configs import attentions, experiments


def get_config(attention: str = "gated_delta") -> ml_collections.ConfigDict:
  """A two-layer decoder that reads 32 permutations."""
  return experiments.training(
    num_steps=2000,
    eval_every=500,
    task={
      "name": "state_tracking",
      "letters": 3,
      "length": 32,
      "eval_lengths": (64, 128, 256),
      "eval_size": 500,
    },
    model={
      "kind": "decoder",
      "num_layers": 2,
      "num_heads": 4,
      "features": 64,
      "mlp_features": 128,
      "position": "none",
      "short_convolution": False,
      "decoder_attention": attentions.layers(attention),
    },
    optimizer={"learning_rate": 4e-3, "schedule": "constant", "b2": 0.98},
  )

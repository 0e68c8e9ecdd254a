"""A character model with three recurrent layers per layer of exact attention.

    python train.py --config=configs/hybrid.py --config.task.path=input.txt
    python train.py --config=configs/hybrid.py:kimi_delta --config.task.path=input.txt

On tiny Shakespeare, the validation loss is 1.653 nats (1.670 for configs/text.py, with
exact attention in all layers) after 7.6 minutes on one CPU core of a machine with other
jobs. This was one seed, when weight decay still applied to the biases and decay rates
of Gated DeltaNet.

The size and the optimiser are those of configs/text.py. The layers use the mechanisms
of a list in turn: Gated DeltaNet three times, then flash. Each layer has a short
convolution, an output norm and an output gate. There are no position encodings, because
recurrences depend on the order of tokens.

Qwen3-Next and Kimi Linear (arXiv:2510.26692) also mix layers three to one.
"""

import itertools

import ml_collections

from configs import attentions, text
from settings.typed import split


def get_config(attention: str = "gated_delta") -> ml_collections.ConfigDict:
  """The model of configs/text.py with different mechanisms in its layers."""
  config = text.get_config()
  config.model.update(
    {
      "position": "none",
      "short_convolution": True,
      "output_norm": "rms",
      "output_gate": "silu",
    }
  )
  with config.ignore_type():
    # Several mechanisms take turns in the three layers before the exact one.
    mechanisms = itertools.islice(itertools.cycle(split(attention)), 3)
    config.model.decoder_attention = attentions.layers(
      ",".join([*mechanisms, "flash"])
    )
  return config

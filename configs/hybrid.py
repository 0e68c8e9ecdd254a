"""A character model with three recurrent layers per layer of exact attention.

    python train.py --config=configs/hybrid.py --config.task.path=input.txt
    python train.py --config=configs/hybrid.py:kimi_delta --config.task.path=input.txt

On tiny Shakespeare the validation loss is 1.653 nats (configs/text.py, with exact
attention in all layers, reaches 1.670) after 7.6 minutes on one CPU core of a machine
that did other work as well; one seed, when weight decay took the biases and rates of
decay of Gated DeltaNet too.

The size and the optimiser are those of configs/text.py. Layers take the mechanisms
of a list in turn: Gated DeltaNet three times, then flash; around all of them a short
convolution, a norm and a gate of each result. The recurrences know where they are,
so nothing else has positions.

Qwen3-Next and Kimi Linear (arXiv:2510.26692) mix layers three to one.
"""

import itertools

import ml_collections

from configs import attentions, text
from settings.typed import split


def get_config(attention: str = "gated_delta") -> ml_collections.ConfigDict:
  """The model of configs/text.py with layers that differ."""
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
    # Several take turns in the three layers before the exact one.
    chosen = itertools.islice(itertools.cycle(split(attention)), 3)
    config.model.decoder_attention = attentions.layers(
      ",".join([*chosen, "flash"])
    )
  return config

"""Character-level language modelling at the size of nanoGPT's CPU setting.

    python train.py --config=configs/text.py --config.task.path=input.txt

`input.txt` is any text file. On tiny Shakespeare, nanoGPT's dataset, the
validation loss is 1.670 nats after 4 minutes on 2 CPU cores shared with other jobs, at
11 steps per second; an idle machine now reaches 31 to 34. The optimiser is that of
nanoGPT's `train_shakespeare_char.py`. Positions are rotary; nanoGPT's are learned.
"""

import ml_collections

from configs import attentions, experiments


def get_config(attention: str = "dense") -> ml_collections.ConfigDict:
  """A four-layer decoder with a context of 64 characters."""
  return experiments.training(
    num_steps=2000,
    batch_size=12,
    eval_every=500,
    task={"name": "text", "context": 64},
    model={
      "kind": "decoder",
      "num_layers": 4,
      "num_heads": 4,
      "features": 128,
      "mlp_features": 512,
      "activation": "gelu_tanh",
      "position": "rotary",
      "decoder_attention": attentions.layers(attention),
    },
    optimizer={"final_fraction": 0.1, "b2": 0.99, "weight_decay": 0.1},
  )

"""Masked language modelling of the bytes of a text (Perceiver IO).

    python train.py --config=configs/perceiver_bytes.py --config.task.path=input.txt

`input.txt` is any text file. 64 latents attend to pieces of 2,048 bytes; a step of 8
rows takes 0.3 to 0.6 seconds on 2 CPU cores shared with other jobs. On tiny Shakespeare
the 1,000 steps take 10 minutes, after which the model has learned little more than the
frequencies of bytes: the held-out loss is 3.339 nats per masked byte (steps 250, 500
and 750: 3.352, 3.347, 3.341), with a unigram loss of 3.345 and a bigram loss of 2.480.

With fewer bytes for the same number of latents, the model learns to use the context
within minutes:

    python train.py --config=configs/perceiver_bytes.py --config.task.path=input.txt \
      --config.task.context=128 --config.batch_size=32 --config.num_steps=3000

The loss is 2.157 nats after 17 minutes (steps 500, 1,000, 1,500 and 2,000: 3.197,
2.874, 2.521, 2.285; unigram loss 3.341, bigram loss 2.483), and 38 % of the masked
bytes are predicted correctly.
"""

import ml_collections

from configs import attentions, experiments


def get_config(attention: str = "dense") -> ml_collections.ConfigDict:
  """2,048 bytes through 64 latents, at a size for a CPU."""
  return experiments.training(
    num_steps=1000,
    batch_size=8,
    eval_every=250,
    checkpoint_every=500,
    task={
      "name": "text",
      "path": "",
      "context": 2048,
      "vocabulary": "bytes",
      "mask_rate": 0.15,
    },
    model={
      "kind": "perceiver",
      "num_latents": 64,
      "num_layers": 4,
      "num_blocks": 1,
      "num_heads": 4,
      "features": 128,
      "mlp_features": 256,
      "input_features": 64,
      "input_heads": 4,
      "output_heads": 4,
      "output_residual": False,
      "head": "tokens",
      "encoder_attention": attentions.layers(attention),
      "cross_attention": attentions.choose(attention)["cross_attention"],
    },
    optimizer={"learning_rate": 2e-3, "b2": 0.98, "weight_decay": 0.01},
  )

"""Classification of images in patches (ViT).

    python train.py --config=configs/vit.py
    python train.py --config=configs/vit.py:performer

The model classifies 98.1 % of the held-out digits correctly after 3.8 minutes on 2 CPU
cores shared with other jobs.

By default the images are the 1,797 scanned digits of scikit-learn, 8 × 8, of
which a fixed fifth of every class is held out.
`--config.task.source=folder --config.task.path=FOLDER` reads a folder that has a
folder of PNG or JPEG files for each class; `--config.task.source=cifar10` reads a TFDS
dataset. Both need `--config.model.patch_size=4` or larger.
"""

import ml_collections

from configs import attentions, experiments


def get_config(attention: str = "dense") -> ml_collections.ConfigDict:
  """A pre-norm encoder over patches, with [CLS] and learned positions."""
  return experiments.training(
    num_steps=5000,
    eval_every=500,
    log_every=100,
    task={
      "name": "image",
      "source": "digits",
      "path": "",
      "held_out": 0.2,
      "shift": 1,
      "flip": False,
    },
    model={
      "kind": "vit",
      "num_layers": 4,
      "num_heads": 4,
      "features": 64,
      "mlp_features": 128,
      "activation": "gelu",
      "attention_bias": True,
      "position": "learned",
      "norm": "pre",
      "norm_epsilon": 1e-12,
      "dropout_rate": 0.1,
      "patch_size": 2,
      "head": "class",
      "head_bias": True,
      "encoder_attention": attentions.layers(attention),
    },
    optimizer={"learning_rate": 2e-3, "weight_decay": 0.05},
  )

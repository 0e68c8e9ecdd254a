"""Masked language modelling of a text, as BERT is trained.

    python train.py --config=configs/bert.py --config.task.path=input.txt

`input.txt` is any text file. On tiny Shakespeare, the loss on held-out masked
tokens is 2.414 nats, and 45 % of them are predicted correctly, after 5.5 minutes on
2 CPU cores shared with other jobs (unigram loss 5.165, bigram loss 3.630). For the
first 800 steps, the model predicts little more than token frequencies (loss 4.7);
it then learns to use the context within a few hundred steps. With half the learning
rate, this takes longer.
"""

import ml_collections

from configs import attentions, experiments


def get_config(attention: str = "dense") -> ml_collections.ConfigDict:
  """A post-norm encoder with learned positions, sized for a CPU."""
  return experiments.training(
    num_steps=4000,
    batch_size=32,
    eval_every=500,
    checkpoint_every=2000,
    log_every=100,
    task={
      "name": "text",
      "path": "",
      "context": 64,
      "vocabulary": "subwords",
      "vocab_size": 512,
      "mask_rate": 0.15,
    },
    model={
      "kind": "encoder",
      "num_layers": 2,
      "num_heads": 4,
      "features": 128,
      "mlp_features": 512,
      "activation": "gelu",
      "position": "learned",
      "norm": "post",
      "norm_epsilon": 1e-12,
      "attention_bias": True,
      "embedding_norm": True,
      "embedding_scale": 1.0,
      "token_types": 2,
      "head_transform": True,
      "head_bias": True,
      "encoder_attention": attentions.layers(attention),
    },
    optimizer={
      "learning_rate": 2e-3,
      "warmup_steps": 500,
      "b2": 0.98,
      "weight_decay": 0.01,
    },
  )

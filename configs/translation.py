"""Translates number words, English to German, or any aligned sentences.

    python train.py --config=configs/translation.py
    python train.py --config=configs/translation.py:bahdanau
    python train.py --config=configs/translation.py --config.num_steps=5000 \
      --config.task.source=files --config.task.path=FOLDER

The first command needs no data. German swaps units and tens, so the task needs
reordering, not only substitution. 99.9 % of 1,000 held-out numbers are translated
exactly after 5.6 minutes on 2 CPU cores.

FOLDER has `train.en`, `train.de` and so on. On Multi30K, greedy decoding reaches 34.9
BLEU on test 2016 after 47 minutes on 2 CPU cores shared with other jobs.
`configs/multi30k.py` is sized for a GPU.

`:bahdanau` and `:luong` replace the Transformer by the recurrent models of these
papers. After `--config.num_steps=1200 --config.optimizer.warmup_steps=200`
`:luong` translates 100 % of the held-out numbers; `attention.png` shows the alignment.
"""

from typing import Any

import ml_collections

from configs import attentions, experiments

RECURRENT = {
  "bahdanau": {
    "cell": "gru",
    "decoder": "bahdanau",
    "cross_attention": {"name": "additive", "width": 128},
  },
  "luong": {
    "cell": "lstm",
    "decoder": "luong",
    "cross_attention": {"name": "multiplicative", "general": True},
  },
}
"""Maps the names of recurrent models, from their papers, to config fields.

A user types the name of a model instead of the name of a mechanism.
"""


def get_config(attention: str = "dense") -> ml_collections.ConfigDict:
  """A model with one or two layers, trained for a few minutes on a CPU."""
  return experiments.training(
    num_steps=3000,
    eval_every=1000,
    task={
      "name": "translation",
      "source": "numbers",
      "path": "",
      "source_language": "en",
      "target_language": "de",
    },
    model=_model(attention),
    optimizer={
      "learning_rate": 2e-3,
      "warmup_steps": 500,
      "b2": 0.98,
      "label_smoothing": 0.1,
    },
  )


def _model(name: str) -> dict[str, Any]:
  if name in RECURRENT:
    return {
      "kind": "seq2seq",
      "num_layers": 1,
      "num_heads": 1,
      "features": 128,
      "dropout_rate": 0.1,
      **RECURRENT[name],
    }
  return {
    "kind": "encoder_decoder",
    "num_layers": 2,
    "num_heads": 4,
    "features": 128,
    "mlp_features": 512,
    "dropout_rate": 0.1,
    **attentions.choose(name, also=RECURRENT),
  }

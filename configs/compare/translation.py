"""Compares encoders on Multi30K, captions from English to German, by BLEU.

    python compare.py --config=configs/compare/translation.py \
      --config.task.path=FOLDER --workdir=/tmp/translation

FOLDER has `train.en`, `train.de`, `val.…` and `test_2016_flickr.…`, plain or .gz. Every
run is `configs/translation.py` with 1,000 steps. Rows differ only in the encoder's
attention. Decoder self-attention and cross-attention are dense in all rows, because
linformer and nystrom do not support them. The report has BLEU with an interval over
seeds, and paired over sentences. A run took 3 to 5 minutes on one CPU core;
docs/results.md has the results.
"""

import ml_collections

from configs import experiments


def get_config() -> ml_collections.ConfigDict:
  """Two forms of exact attention, a window, three approximations; three seeds."""
  return experiments.comparison(
    "translation",
    "dense,flash,sliding_window,performer,linformer,nystrom",
    num_steps=1000,
    task={"source": "files", "path": ""},
    model={"decoder_attention": "dense", "cross_attention": "dense"},
  )

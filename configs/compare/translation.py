"""Compares encoders on Multi30K, captions from English to German, by BLEU.

    python compare.py --config=configs/compare/translation.py \
      --config.task.path=FOLDER --workdir=/tmp/translation

FOLDER holds `train.en`, `train.de`, `val.…` and `test_2016_flickr.…`, plain or .gz.
Every run is `configs/translation.py` for 1,000 steps. Rows differ in the encoder's
attention alone: that of the decoder and the cross-attention are dense in all of
them, as linformer and nystrom cannot serve there. The report has BLEU with an
interval over seeds, and paired over sentences. A run took 3 to 5 minutes on one CPU
core; what came out is in docs/results.md.
"""

import ml_collections

from configs import experiments


def get_config() -> ml_collections.ConfigDict:
  """Exact attention by two programs, a window, three approximations; three seeds."""
  return experiments.comparison(
    "translation",
    "dense,flash,sliding_window,performer,linformer,nystrom",
    num_steps=1000,
    task={"source": "files", "path": ""},
    model={"decoder_attention": "dense", "cross_attention": "dense"},
  )

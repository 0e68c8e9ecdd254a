"""Multi30K, English to German, from a folder of aligned files.

    python train.py --config=configs/multi30k.py --config.task.path=FOLDER

FOLDER holds `train.en`, `train.de`, `val.…` and `test_2016_flickr.…` as
Multi30K names them. The result has BLEU of the test split, with its sacrebleu
signature.
"""

import ml_collections

from configs import translation


def get_config(attention: str = "dense") -> ml_collections.ConfigDict:
  """`configs/translation.py`, larger, and kept from learning 29,000 by heart."""
  config = translation.get_config(attention)
  config.task.source = "files"
  config.num_steps = 8000
  config.batch_size = 128
  config.eval_every = 1000
  config.checkpoint_every = 1000
  config.decode_method = "beam"
  config.model.num_layers = 3
  config.model.features = 256
  config.model.dropout_rate = 0.3
  config.optimizer.schedule = "inverse_sqrt"
  config.optimizer.warmup_steps = 2000
  config.optimizer.label_smoothing = 0.1
  return config

"""Multi30K, sized for a GPU: English to German captions.

    python train.py --config=configs/multi30k.py --config.task.path=FOLDER

FOLDER has `train.en`, `train.de`, `val.…` and `test_2016_flickr.…`, plain or .gz, as
Multi30K names them. The goal is 38 BLEU on test 2016; the config has not been run at
full length yet. `configs/translation.py` is a size that two CPU cores train in an hour,
with its result.

Small datasets need a small vocabulary and strong dropout; Wu et al. (2021),
arXiv:2105.14462, find the same for Transformers on Multi30K.
"""

import ml_collections

from configs import translation


def get_config(attention: str = "dense") -> ml_collections.ConfigDict:
  """`configs/translation.py` with a wider model, more steps and beam search."""
  config = translation.get_config(attention)
  config.task.source = "files"
  config.num_steps = 15_000
  config.batch_size = 128
  config.decode_method = "beam"
  config.model.num_layers = 4
  config.model.features = 256
  config.model.dropout_rate = 0.3
  config.optimizer.learning_rate = 1e-3
  config.optimizer.warmup_steps = 2000
  return config

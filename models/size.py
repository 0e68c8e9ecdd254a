"""The size of a model from its config alone, before a module is made."""

from models.config import ModelConfig
from models.seq2seq_config import Seq2SeqConfig


def least_parameters(config: ModelConfig | Seq2SeqConfig, symbols: int) -> int:
  """Parameters that a model has at least; takes no time for any size.

  Counted are one table of embeddings and of each layer two square matrices, the
  query's and the output's projection or a part of a recurrent cell, and the two
  matrices of a feed-forward layer.

  Args:
    config: of the model.
    symbols: of the larger vocabulary.
  """
  features = config.features
  layer = 2 * features * features
  if isinstance(config, ModelConfig):
    layer += 2 * features * config.mlp_features
  return config.num_layers * layer + symbols * features

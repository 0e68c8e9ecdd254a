"""Configs of small comparisons."""

from comparison import config as config_lib
from configs.compare import copy

SMALL = {
  "model.num_layers": 1,
  "model.features": 16,
  "model.mlp_features": 512,
  "num_steps": 12,
}


def comparison(**changes):
  mapping = copy.get_config().to_dict()
  for field, value in {**SMALL, **changes}.items():
    section, _, name = field.rpartition(".")
    (mapping[section] if section else mapping)[name] = value
  return config_lib.parse(mapping)


def budgeted(**changes):
  """Returns a comparison whose runs have a budget instead of a number of steps."""
  mapping = copy.get_config().to_dict()
  for field in ("num_steps", "eval_every"):
    del mapping[field]
  model = {"num_layers": 1, "features": 16, "mlp_features": 32}
  return config_lib.parse({**mapping, "model": model, **changes})

"""Every generated task goes through the loop's own evaluation, smaller."""

import importlib

import jax
import numpy as np
import pytest

from tests.here import here
from tests.training.tiny import Parts
from training import evaluate, experiment, experiment_config

METRICS = {
  "recall": {"loss", "accuracy", "sequence_accuracy"},
  "induction": {"loss", "accuracy"},
  "selective_copy": {"loss", "accuracy", "sequence_accuracy"},
  "state_tracking": {
    *{"loss", "accuracy", "sequence_accuracy", "last_accuracy"}
  },
  "listops": {"loss", "accuracy"},
  "pathfinder": {"loss", "accuracy"},
  "needle": {
    "loss",
    "accuracy",
    *(f"accuracy_depth_{depth}" for depth in (0, 25, 50, 75, 100)),
  },
}


@pytest.mark.parametrize("name", here(METRICS))
def test_every_split_is_evaluated(name):
  config = importlib.import_module(f"configs.{name}").get_config()
  config.batch_size = 8
  config.task.eval_size = 12
  if "eval_lengths" in config.task:
    config.task.eval_lengths = config.task.eval_lengths[:1]
  if name == "pathfinder":
    config.task.update(size=20, num_dashes=4, num_distractors=1)
  config.model.num_layers = config.model.num_heads = 1
  config.model.features = config.model.mlp_features = 16
  run = experiment.create(experiment_config.parse(config))
  programs = Parts.of(run).on()
  # Of a model whose numbers are all alike.
  variables = jax.tree.map(lambda x: np.full(x.shape, 0.1, x.dtype), run.shapes)
  for split in run.task.eval_splits:
    values = evaluate.evaluate(
      programs.eval_step, programs.mesh, variables.variables, run.task, split
    )
    assert values.keys() == METRICS[name]
    assert np.isfinite(values["loss"])

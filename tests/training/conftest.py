"""Runs the training loop on a fake task and a small model."""

import dataclasses
import types

import numpy as np
import pytest

from tests.training.tiny import make_parts
from training import loop
from training.config import TrainConfig
from training.devices import parallel


@pytest.fixture
def run(tmp_path, monkeypatch):
  """Returns a function that runs the loop on a task and keeps the experiment."""
  monkeypatch.setattr(
    loop.attention_maps, "draw_attention", lambda *unused: None
  )

  def run(task, stop_at=None, **fields):
    config = TrainConfig(
      **{
        "num_steps": 7,
        "batch_size": 16,
        "seed": 1,
        "log_every": 2,
        "eval_every": 3,
        "checkpoint_every": 3,
        **fields,
      }
    )
    typed = {
      field.name: getattr(config.optimizer, field.name)
      for field in dataclasses.fields(config.optimizer)
      if getattr(config.optimizer, field.name) != field.default
      and field.name != "options"
    }
    parts, state = make_parts(dropout=True, **typed)
    state = state._replace(seed=np.int32(config.seed))
    run.experiment = types.SimpleNamespace(
      config=types.SimpleNamespace(train=config, weights=None),
      task=task,
      model=parts.model,
      init=lambda mesh: parallel.place_state(mesh, state),
      shapes=state,
      generate=lambda variables, inputs, **unused: types.SimpleNamespace(
        tokens=np.ones((2, 3), np.int32)
      ),
    )
    return loop.run(run.experiment, tmp_path, stop_at)

  return run

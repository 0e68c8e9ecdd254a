"""The loop, on a task and a model that do nothing but obey."""

import dataclasses
import types

import numpy as np
import pytest

from tests.training.tiny import make_functions, numbers
from training import loop
from training.config import TrainConfig


@pytest.fixture
def run(tmp_path, monkeypatch):
  """Runs the loop on a fake task and returns its results; keeps the experiment."""
  monkeypatch.setattr(
    loop.attention_maps, "draw_attention", lambda *unused: None
  )

  def run(task, stop_at=None, **leaves):
    config = TrainConfig(
      **{
        "num_steps": 7,
        "batch_size": 16,
        "log_every": 2,
        "eval_every": 3,
        "checkpoint_every": 3,
        **leaves,
      }
    )
    typed = {
      field.name: getattr(config.optimizer, field.name)
      for field in dataclasses.fields(config.optimizer)
      if getattr(config.optimizer, field.name) != field.default
      and field.name != "options"
    }
    functions, state = make_functions(dropout=True, **typed)
    run.experiment = types.SimpleNamespace(
      config=types.SimpleNamespace(train=config),
      task=task,
      model=None,
      functions=functions,
      numbers=numbers(**typed),
      init=lambda: state,
      draw=None,
      shapes=state,
      generate=lambda variables, inputs, **unused: types.SimpleNamespace(
        tokens=np.ones((2, 3), np.int32)
      ),
    )
    return loop.run(run.experiment, tmp_path, stop_at)

  return run

"""A run traces its steps and its decoding once, however long it is."""

import functools

import chex

from models import decoding
from tests.training import tiny
from training import experiment, loop, step


def test_a_run_traces_each_step_once(tmp_path, monkeypatch):
  chex.clear_trace_counter()
  once = functools.partial(chex.assert_max_traces, n=1)
  # One for the gradient, one for evaluation, one for the decoding of samples.
  for module, name in (
    (step, "mean_gradient"),
    (step, "metric_sums"),
    (decoding, "_extend"),
  ):
    monkeypatch.setattr(module, name, once(getattr(module, name)))
  config = tiny.config(
    "encoder_decoder",
    {"name": "copy", "min_length": 2, "max_length": 5},
    num_steps=6,
    eval_every=2,
    checkpoint_every=2,
    log_every=1,
  )
  run = experiment.begin(config, tmp_path)
  results = loop.run(run, tmp_path)
  assert results is not None

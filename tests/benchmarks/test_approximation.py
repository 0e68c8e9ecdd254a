"""Errors against the number that buys exactness: right, falling, told in tables."""

import json
import types

import jax.numpy as jnp
import numpy as np
import pytest

from attention import flash, sliding_window
from benchmarks import approximation
from settings.errors import ConfigError
from training import experiment, experiment_config, loop, workdir

SHAPE = (2, 24, 2, 8)
SMALL = tuple(
  sweep._replace(values=sweep.values[:1], options={"chunk_size": 4})
  if sweep.mechanism == "lsh"
  else sweep._replace(values=sweep.values[:1])
  for sweep in approximation.SWEEPS
)


def test_the_error_is_the_distance_from_softmax_attention():
  calls = approximation.random_calls([SHAPE, SHAPE])
  deviation = size = 0.0
  for query, key, value, _ in calls:
    q, k, v = (np.float64(x) for x in (query, key, value))
    logits = np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(8)
    weights = np.exp(logits)
    near = np.abs(np.subtract.outer(np.arange(24), np.arange(24))) <= 3
    outs = [
      np.einsum("bnts,bsnh->btnh", w / w.sum(-1, keepdims=True), v)
      for w in (weights * near, weights)
    ]
    deviation += ((outs[0] - outs[1]) ** 2).sum()
    size += (outs[1] ** 2).sum()
  expected = np.sqrt(deviation / size)
  error = approximation.relative_error(sliding_window(window=3), calls)({})
  assert error == pytest.approx(expected, rel=1e-5)
  assert approximation.relative_error(flash(), calls)({}) < 1e-5


def test_a_mask_of_the_model_is_obeyed():
  [(query, key, value, _)] = approximation.random_calls([SHAPE])
  mask = (jnp.arange(24) < 20)[None, None, None]
  garbage = key.at[:, 20:].set(50.0), value.at[:, 20:].set(50.0)
  errors = [
    approximation.relative_error(
      sliding_window(window=3), [(query, *arrays, {"mask": mask})]
    )({})
    for arrays in ((key, value), garbage)
  ]
  assert errors[0] == pytest.approx(errors[1], rel=1e-5)


def test_the_slope_of_a_power_law_is_its_power():
  found = [
    {"value": x, "errors": [2 * x**-0.5 * r for r in (0.9, 1.1)]}
    for x in (4, 16, 64)
  ]
  assert approximation.slope(found) == pytest.approx(-0.5)
  # What is exact has no logarithm.
  assert approximation.slope([*found, {"value": 99, "errors": [0.0]}]) == (
    pytest.approx(-0.5)
  )
  assert approximation.slope(found[:1]) is None


def test_more_features_are_closer_by_the_square_root_for_small_logits():
  [performer, *_] = approximation.SWEEPS
  calls = approximation.random_calls([SHAPE], 0.3)
  sweep = performer._replace(values=(32, 128, 512))
  found = approximation.points(sweep, calls)
  assert [len(point["errors"]) for point in found] == [5, 5, 5]
  assert approximation.slope(found) == pytest.approx(-0.5, abs=0.12)


def test_options_beyond_the_length_are_left_out():
  by_name = {sweep.mechanism: sweep for sweep in approximation.SWEEPS}
  calls = approximation.random_calls([SHAPE])
  sweep = by_name["sliding_window"]._replace(values=(8, 23, 24, 64))
  assert [p["value"] for p in approximation.points(sweep, calls)] == [8, 23]


@pytest.mark.thorough
def test_everything_is_written(monkeypatch, tmp_path, capsys):
  monkeypatch.setattr(approximation, "SWEEPS", SMALL)
  folder = tmp_path / "run"
  config = experiment_config.parse(
    {
      "num_steps": 1,
      "batch_size": 8,
      "task": {
        "name": "pathfinder",
        "size": 16,
        "num_dashes": 4,
        "num_distractors": 0,
        "eval_size": 8,
      },
      "model": {
        "kind": "encoder",
        "num_layers": 2,
        "num_heads": 2,
        "features": 16,
        "mlp_features": 16,
        "position": "learned",
        "encoder_attention": {"name": "dense"},
      },
      "optimizer": {},
    }
  )
  folder.mkdir()
  workdir.write_config(folder, config)
  run = experiment.create(config, folder)
  run.task.save(folder)
  loop.run(run, folder)
  flags = {
    "_WORKDIR": str(folder),
    "_OUT": str(tmp_path / "out"),
    "_LENGTH": 64,
  }
  for name, value in flags.items():
    typed = types.SimpleNamespace(value=value)
    monkeypatch.setattr(approximation, name, typed)
  approximation.main()
  out = capsys.readouterr().out
  found = json.loads((tmp_path / "out" / "approximation.json").read_text())
  assert set(found) == {"random", "random, halved", "trained"}
  for points in found.values():
    assert len(points) == 5
    assert all(np.isfinite(p["errors"]).all() for p in points)
  assert "num_features = 16" in out
  text = (tmp_path / "out" / "approximation.md").read_text()
  assert "theorem 2" in text
  assert (tmp_path / "out" / "approximation.png").stat().st_size > 1e4


def test_only_an_encoder_with_dense_attention_is_taken(tmp_path):
  with pytest.raises(ConfigError):
    approximation.trained_calls(tmp_path / "none")

"""What a run costs, against numbers that are made by hand."""

import dataclasses
import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

from comparison.analysis import remarks
from comparison.measurement import costs, measurements, usage
import models
from models import nested
from models.attention_config import AttentionConfig
from models.config import ModelConfig
from tests.training import tiny
from training import metrics
from training.devices import flops

LENGTH, INDEX = 12, 1


def convolved(features):
  """Inputs of a short convolution of four places."""
  return 3 * features


def _model(max_length, **fields):
  lengths = {f"max_{side}_length": max_length for side in ("source", "target")}
  sizes = {f"{side}_vocab_size": 5 for side in ("source", "target")}
  return models.create(nested.make(ModelConfig, **fields), **lengths, **sizes)


@pytest.mark.parametrize("kind", ["decoder", "encoder_decoder"])
@pytest.mark.parametrize(
  ("mechanism", "fields", "numbers"),
  [
    # Keys and values of four heads of width 4.
    ("dense", {"short_convolution": False}, 2 * LENGTH * 16 + INDEX),
    ("flash", {"num_kv_heads": 2}, 2 * LENGTH * 8 + INDEX + convolved(32)),
    # A state of 4 × 6 a head; the heads share queries and keys.
    ("mamba2", {"num_qk_heads": 1, "value_dim": 6}, 96 + convolved(4 + 4 + 24)),
    ("gated_delta", {"num_layers": 3}, 4 * 4 * 4 + convolved(3 * 16)),
  ],
)
def test_bytes_of_a_cache(kind, mechanism, fields, numbers):
  sizes = {"num_layers": 2, "num_heads": 4, "features": 16, "mlp_features": 8}
  choices = {"position": "rotary", "short_convolution": True, "kind": kind}
  choices["decoder_attention"] = AttentionConfig(mechanism)
  model = _model(LENGTH, **sizes | choices | fields)
  expected = 4 * fields.get("num_layers", 2) * numbers
  assert costs.cache_bytes(model, LENGTH) == expected


@pytest.mark.parametrize(("length", "kept"), [(5, 5), (9, 9), (12, 10)])
def test_a_window_may_cover_a_cache_that_is_shorter_than_the_model(
  length, kept
):
  """Of a model of 40 positions; a query sees itself and nine keys before it."""
  window = AttentionConfig("sliding_window", {"window": (9, 0)})
  sizes = {"num_layers": 2, "num_heads": 4, "features": 16, "mlp_features": 8}
  model = _model(40, **sizes, kind="decoder", decoder_attention=window)
  found = costs.cache_bytes(model, length)
  assert found == 4 * 2 * (2 * kept * 16 + INDEX)


@pytest.fixture
def clock(monkeypatch):
  """Sets how many seconds each timed span takes, in turn; gives those not timed."""

  def set_spans(spans):
    spans = iter(spans)
    ticks = itertools.chain.from_iterable((0.0, span) for span in spans)
    timer = types.SimpleNamespace(perf_counter=lambda: next(ticks))
    monkeypatch.setattr(costs, "time", timer)
    return spans

  return set_spans


@pytest.mark.parametrize(
  ("spans", "left", "seconds"),
  [
    # The first step, after the compilation, is not counted.
    ([3.0, 9.0, 0.1, 0.7, 0.3, 8.0], [8.0], 0.3),
    ([3.0, 1.0, 0.1, 0.7, 0.3, 8.0, 8.0], [8.0], 0.5),  # Until 10 seconds.
    ([3.0, 0.1] + 50 * [0.1] + [8.0], [8.0], 0.1),  # Or 50 steps.
  ],
)
def test_a_step_takes_the_median_of_several(clock, spans, left, seconds):
  parts, state = tiny.make_parts()
  not_timed = clock(spans)
  found = costs.step_cost(*parts, state, tiny.make_batch())
  assert list(not_timed) == left
  assert found["compile_seconds"] == 3.0
  assert found["step_seconds"] == pytest.approx(seconds)
  assert found["temp_bytes"] > 0
  assert found["device_peak_bytes"] is None  # A CPU does not report it.


@pytest.mark.parametrize("source", [None, [[3, 4], [5, 6], [7, 8]]])
def test_decoding_goes_on_to_the_maximal_length(clock, monkeypatch, source):
  calls = []

  def generate(model, variables, **options):
    calls.append((model, variables, options))
    return jnp.zeros(())

  monkeypatch.setattr(costs.models, "generate", generate, raising=False)
  clock([2.0, 8.0, 4.0])
  run = types.SimpleNamespace(
    model="model",
    task=types.SimpleNamespace(max_target_length=5, bos_id=1, pad_id=2),
  )
  batch = {"inputs": np.zeros((3, 2))}
  if source:
    batch["source"] = np.array(source)
  found = costs.decode_cost(run, "variables", batch)
  # The median of three, after a first that is not timed.
  assert found == {"decode_tokens_per_second": 16 * 5 / 4, "cache_bytes": None}
  assert len(calls) == 4
  for model, variables, options in calls:
    assert (model, variables) == ("model", "variables")
    given = options.pop("source" if source else "prompt")
    expected = np.resize(source, (16, 2)) if source else np.ones((16, 1))
    np.testing.assert_array_equal(given, expected)
    # No token ends a row.
    assert options == {"max_length": 5, "bos_id": 1, "eos_id": -1, "pad_id": 2}


def test_operations_are_counted_for_any_way_of_training():
  parts, state = tiny.make_parts()
  shapes = jax.eval_shape(lambda: state)
  batch = tiny.make_batch()

  def run(**fields):
    config = dataclasses.replace(parts.config, **fields)
    return types.SimpleNamespace(
      model=parts.model,
      task=parts.task,
      config=types.SimpleNamespace(train=config),
      shapes=shapes,
    )

  forward = costs.forward_flops(run(), batch)
  assert forward == flops.count(
    functools.partial(tiny.forward, rng=None), shapes.variables, batch
  )
  step = costs.step_flops(run(), batch)
  assert step == costs.step_flops(run(parallel="pmap"), batch)
  # Forward, and backward by inputs and by the kernel, but not by the constants.
  products = 2 * tiny.ROWS * tiny.LENGTH * np.array([4 * 4, 4 * tiny.CLASSES])
  assert products @ [1, 1] <= forward.flops < 1.4 * products @ [1, 1]
  assert products @ [2, 3] <= step.flops < 1.6 * products @ [2, 3]


def test_rows_are_those_with_a_target_of_the_last_split():
  batches = {
    "validation": [{"weights": np.ones((9, 2))}],
    "test": [
      {"weights": np.array([[0.0, 0.5], [0, 0], [1, 1]])},
      {"weights": np.array([1.0, 0.0, 0.0])},
      {"inputs": np.zeros((4, 2))},
    ],
  }
  task = types.SimpleNamespace(
    eval_splits=tuple(batches), eval_batches=lambda split: iter(batches[split])
  )
  assert measurements._num_rows(task) == 2 + 1 + 4


def test_what_is_measured_of_a_trained_run(monkeypatch, tmp_path):
  """What cannot be measured is None, with the reason."""

  def decode_cost(run, variables, batch):
    raise ValueError("no\ndecoder")

  def eval_batches(split):
    return iter([{"weights": np.ones((3, 2)), "split": split}])

  task = types.SimpleNamespace(
    eval_splits=("validation", "test"),
    eval_batches=eval_batches,
    train_batch=lambda step: {"step": step},
  )
  run = types.SimpleNamespace(task=task, model="model")
  for target, name, value in (
    (measurements.workdir, "read_config", lambda folder: {}),
    (measurements.experiment_config, "parse", lambda config, restore: config),
    (measurements.experiment, "create", lambda config, folder: run),
    (measurements.generation, "restore_variables", lambda run, folder: "v"),
    (measurements, "step_cost", lambda run: {"step_seconds": 0.5}),
    (costs, "step_flops", lambda *x: flops.FlopCount(30, ("sort", "top"))),
    (costs, "forward_flops", lambda *x: flops.FlopCount(10, ())),
    (costs, "decode_cost", decode_cost),
    (usage.Meter, "others_cores", lambda meter: 0.25),
    (measurements.approximation, "error", lambda model, v, batch: None),
    (measurements.attention_maps, "sketch", lambda *x: x),
  ):
    monkeypatch.setattr(target, name, value)
  lines = [{"tokens_per_second": x} for x in (5.0, 9.0, 7.0, 3.0)] + [{}]
  writer = metrics.MetricsWriter(tmp_path, 0)
  for step, line in enumerate(lines):
    writer.write(step, {"train": line}, 1.0)
  writer.close()
  found = measurements.measure_trained(tmp_path, with_map=True)
  assert {"jax", "device"} < found.keys()
  del found["jax"], found["device"]
  assert found == {
    "step_seconds": 0.5,
    "train_flops": 30,
    "forward_flops": 10,
    "decode_tokens_per_second": None,
    "cache_bytes": None,
    "measured_others_cores": 0.25,
    "test_rows": 3,
    "tokens_per_second": 7.0,
    "approximation_error": None,
    "map": ("model", "v", task),
    "notes": {
      "train_flops": "at least; not counted: sort; top",
      "decode_tokens_per_second": "no decoder",
      "approximation_error": "this mechanism is not an approximation",
    },
  }
  # Costs of a run of the same shapes are taken over, and stay as they are.
  shape = {"step_seconds": 9.0, "notes": {"cache_bytes": "none"}}
  monkeypatch.setattr(
    measurements.approximation, "error", lambda model, v, batch: 0.5
  )
  again = measurements.measure_trained(tmp_path, with_map=False, shape=shape)
  assert (again["step_seconds"], again["map"]) == (9.0, None)
  assert again["approximation_error"] == 0.5
  assert again["notes"] == shape["notes"] == {"cache_bytes": "none"}
  assert again["notes"] is not shape["notes"]


def test_models_of_other_sizes_have_a_note():
  """By more than 2 % of the parameters, or with less than half the width."""
  rows = [
    ("dense", "dense", 50.0, 1000, ""),
    ("a", "matched", 49.0, 1019, ""),
    ("b", "matched", 51.0, 1030, "as drawn"),
    ("c", "matched", 50.0, 970, "as drawn\nslow"),
    ("d", "dense", 20.0, 1500, ""),
  ]
  columns = ["name", "width", "feed_forward", "parameters", "notes"]
  summary = pd.DataFrame(rows, columns=columns)
  summary["dense_feed_forward"], summary["dense_parameters"] = 100.0, 1000
  assert remarks.notes(types.SimpleNamespace(summary=summary)) == [
    "`a`: a feed-forward layer of 49, dense has 100",
    "`b`, `c`: as drawn",
    "`b`: +3 % parameters",
    "`c`: slow",
    "`c`: -3 % parameters",
  ]

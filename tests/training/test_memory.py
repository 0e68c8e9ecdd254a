"""What surely does not fit is told in one line before a run; nothing else is.

Bytes of the cases are computed by hand, of 2 layers of width 8 with 16 hidden.
"""

import dataclasses
import types
from typing import Any

import pytest

from configs import copy
from settings.errors import ConfigError
from tests.training import tiny
from training import experiment, experiment_config

GB = 10**9


def config(**leaves):
  made = copy.get_config("performer")
  model = {"num_layers": 2, "num_heads": 2, "features": 8, "mlp_features": 16}
  made.update({"batch_size": 12, "model": model})
  made.update_from_flattened_dict(leaves)
  return experiment_config.parse(made)


@pytest.fixture(autouse=True)
def one_gigabyte(monkeypatch):
  """The same machine everywhere."""
  told = types.SimpleNamespace(total=GB)
  monkeypatch.setattr(experiment.psutil, "virtual_memory", lambda: told)


@pytest.mark.parametrize(
  ("leaves", "sizes", "leaf", "gigabytes"),
  [
    # 12 rows of tokens: 2 · 8 · 2 bytes of inputs, and of targets 3 · 4 of logits.
    ({}, (3, 10, 2 * 10**6), "batch_size", 2),
    ({}, (3, 10**7, 10), "batch_size", 4),
    ({"optimizer.accumulate_steps": 2}, (3, 10**7, 10), "batch_size", 2),
    # A table with two moments: 3 · 8 · 2 bytes a symbol.
    ({}, (10**8, 0, 0), "model", 5),
    # 2 layers with two matrices of 8 · 10⁸ each.
    ({"model.mlp_features": 10**8}, (3,), "model", 20),
    ({}, (3, 10, 10, 5 * GB), "model", 6),
    ({}, (3, 10, 10, GB - 10**5), "", 0),
    ({}, (3, 10**6, 10), "", 0),
  ],
)
def test_what_does_not_fit_is_told(leaves, sizes, leaf, gigabytes):
  made = config(**leaves)
  if not leaf:
    experiment.check_size(made, *sizes)
    return
  with pytest.raises(ConfigError, match=rf"^config\.{leaf}: ") as told:
    experiment.check_size(made, *sizes)
  expected = f" at least {gigabytes} GB, more than the 1 GB of memory here"
  assert str(told.value).endswith(expected)
  assert "\n" not in str(told.value)


@pytest.mark.parametrize(("latents", "gigabytes"), [(20, 2), (10, 2), (4, 0)])
def test_a_layer_of_latents_holds_no_more_of_them_than_there_are(
  latents, gigabytes
):
  """By hand: 12 rows of 2 · 10⁶ · 8 · (10 or 4) bytes; 10 symbols cost nothing."""
  sizes = {"num_layers": 10**6, "features": 8, "mlp_features": 0}
  model: Any = types.SimpleNamespace(**sizes, num_latents=latents)
  made = dataclasses.replace(config(), model=model)
  if not gigabytes:
    experiment.check_size(made, 10, 10, 1)
    return
  with pytest.raises(ConfigError, match=f"batch_size: .* least {gigabytes} GB"):
    experiment.check_size(made, 10, 10, 1)


def test_arrays_may_lie_on_devices_and_several_hosts_share_a_run(monkeypatch):
  device = types.SimpleNamespace(memory_stats=lambda: {"bytes_limit": 4 * GB})
  for name, found, fits in (
    ("local_devices", [device] * 2, 9),
    ("process_count", 16, 16),
  ):
    with monkeypatch.context() as patch:
      patch.setattr(experiment.jax, name, lambda found=found: found)
      experiment.check_size(config(), 3, state=(fits - 1) * GB)
      told = f"more than the {fits} GB of memory here"
      with pytest.raises(ConfigError, match=told):
        experiment.check_size(config(), 3, state=(fits + 1) * GB)


@pytest.mark.parametrize(
  ("task", "leaf"),
  [
    ("copy", "vocab_size"),
    ("needle", "num_keys"),
    ("needle", "num_values"),
    ("needle", "num_fillers"),
  ],
)
def test_symbols_of_a_task_are_counted_before_it_makes_data(
  monkeypatch, task, leaf
):
  made = tiny.config("decoder", {"name": task, leaf: 10**9})
  monkeypatch.setattr(experiment, "_make_task", None)
  with pytest.raises(ConfigError, match=r"^config\.model: .* 1,000,000,000"):
    experiment.create(made)


@pytest.mark.parametrize(
  "attention",
  [
    {"name": "performer", "num_features": 10**9},
    {"name": "additive", "width": 10**9},
    {"name": "lsh", "num_buckets": 10**9},
    {"name": "nystrom", "conv_kernel_size": 10**9 + 1},
  ],
)
def test_variables_of_a_mechanism_are_counted(attention):
  made = config(**{"model.encoder_attention": attention})
  with pytest.raises(ConfigError, match=r"^config\.model: parameters"):
    experiment.create(made)

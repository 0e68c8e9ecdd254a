"""Variants whose layers take mechanisms in turn."""

import pytest

from comparison import plan
from settings.errors import ConfigError
from tests.comparison.plans import comparison

HYBRID = {
  "hybrid": {"name": "gated_delta", "layers": "gated_delta, flash"},
}


def test_layers_take_mechanisms_in_turn_at_equal_parameters():
  runs = plan.plan(
    comparison(
      tasks="duplicate",
      attention="dense,hybrid",
      variants=HYBRID,
      **{"model.num_layers": 3},
    )
  )
  dense, hybrid = runs
  assert not hybrid.obstacle
  assert hybrid.slots == "gated_delta + flash"
  assert "--config.model.decoder_attention=[gated_delta,flash]" in (
    hybrid.arguments
  )
  assert abs(hybrid.parameters - dense.parameters) < 0.01 * dense.parameters
  assert hybrid.unmatched_parameters != dense.parameters


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (
      {"layers": "gated_delta,flsh"},
      "config.variants.x.layers: unknown 'flsh'; did you mean 'flash'?",
    ),
    ({"layers": ""}, "config.variants.x.layers: expected mechanisms with com"),
    ({"layers": 3}, "config.variants.x.layers: expected mechanisms with comma"),
    (
      {"layers": "flash,delta", "max_rate": 2.0},
      "config.variants.x.max_rate: layers take mechanisms as they are",
    ),
  ],
)
def test_faults_are_told_before_anything_runs(changes, message):
  variants = {"x": {"name": "gated_delta", **changes}}
  with pytest.raises(ConfigError) as info:
    plan.plan(comparison(variants=variants, attention="x"))
  assert str(info.value).startswith(message)

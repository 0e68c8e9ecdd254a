"""Folders of a model with a mechanism in some of its layers."""

import jax
import numpy as np

import models
from models.attention_config import AttentionConfig
from projects.swap import substitution, variant
from projects.swap.tests import swap_cases as cases


def test_a_layer_that_is_kept_keeps_its_own_variables(tmp_path):
  """Both mechanisms have a `step_kernel` of the same shape in every layer."""
  _, model = cases.read("mamba2", tmp_path)
  config = AttentionConfig("gated_delta")
  described = variant.describe(model, config, model.places)
  _, variables = variant.make(model, described, 0)
  paths = [place.path for place in model.places]
  mechanisms = substitution.drawn(variables, paths)
  target = tmp_path / "kept"
  variant.write(model, config, model.places[1:], mechanisms, target)
  p = models.load_pretrained(target)
  found = substitution.drawn(p.variables, paths)
  own = substitution.drawn(model.variables, paths)
  for place, wanted in (
    (paths[0], own),
    (paths[1], mechanisms),
    (paths[2], mechanisms),
  ):
    jax.tree.map(
      np.testing.assert_array_equal, found[place], dict(wanted[place])
    )

"""ε of norms, by values that are as small; expected numbers are written out.

Those of layers and powers are in test_values.py.
"""

import jax
import jax.numpy as jnp
import numpy as np

from models.batch_norm import BatchNorm
from models.head_projections import orthogonal_part


def test_epsilon_of_a_batch_norm_is_inside_of_the_root():
  """0.01 / √(3e-5 + 1e-5), and ±0.01 / √(1e-4 + 1e-5) of a batch."""
  x = jnp.asarray([[[0.01], [-0.01]]])
  norm = BatchNorm()
  variables = norm.init(jax.random.key(0), x, deterministic=True)
  runs = {"mean": jnp.zeros(1), "var": jnp.full(1, 3e-5)}
  variables = {**variables, "batch_stats": runs}
  out = norm.apply(variables, x, deterministic=True)
  np.testing.assert_allclose(out[0, :, 0], [1.58113883, -1.58113883], rtol=1e-5)
  out = norm.apply(variables, x, deterministic=False)
  np.testing.assert_allclose(out[0, :, 0], [0.95346259, -0.95346259], rtol=1e-5)


def test_epsilon_of_a_direction_is_inside_of_the_root():
  """Of the value (3e-4, 4e-4) it is (0.26832816, 0.35777088)."""
  out = jnp.asarray([1.0, 0.0]).reshape(1, 1, 1, 2)
  value = jnp.asarray([3e-4, 4e-4]).reshape(1, 1, 1, 2)
  found = orthogonal_part(out, value)[0, 0, 0]
  np.testing.assert_allclose(found, [0.928, -0.096], rtol=1e-5)

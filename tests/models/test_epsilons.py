"""ε of a direction, by values that are as small; expected numbers are written out.

Those of layers and powers are in test_values.py.
"""

import jax.numpy as jnp
import numpy as np

from models.head_projections import orthogonal_part


def test_epsilon_of_a_direction_is_inside_of_the_root():
  """Of the value (3e-4, 4e-4) it is (0.26832816, 0.35777088)."""
  out = jnp.asarray([1.0, 0.0]).reshape(1, 1, 1, 2)
  value = jnp.asarray([3e-4, 4e-4]).reshape(1, 1, 1, 2)
  found = orthogonal_part(out, value)[0, 0, 0]
  np.testing.assert_allclose(found, [0.928, -0.096], rtol=1e-5)

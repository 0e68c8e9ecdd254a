"""What stands where a key mask hides changes nothing, in every public function.

The contract asks it of records, whose gates are zero there before a function gets
them. Here functions are called with gates of their own.
"""

import inspect
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention
from attention.testing.calls import assert_same_bits

_SIZES = {"B": 2, "T": 13, "S": 13, "N": 4, "K": 2, "H": 8, "V": 8, "L": 5}
_SIZES |= {"Q": 4, "U": 2, "M": 6, "C": 4, "R": 2, "I": 2, "D": 4}

_PAIRED = ("query", "index_query", "index_weight", "branch_gates")
"""Arrays of which a position changes its own result alone."""

_GIVEN = {
  "bigbird": {"block_size": 2, "random_blocks": np.zeros((4, 5, 1), int)},
  "compressed": {"window": 3, "stride": 2},
  "delta_rule": {
    "beta": (2, 13, 4),
    "log_decay": (2, 13, 4),
    "erase_key": (2, 13, 2, 8),
  },
  "differential": {"weight": 0.3},
  "dsa": {"top_k": 3, "index_key": (2, 13, 4)},
  "gated_linear": {"log_decay": (2, 13, 4, 8)},
  # With a large λ the system of drawn weights below 0 is definite, too.
  "gka": {"ridge_ratio": 100.0},
  "latent": {"key_kernel": (2, 4, 4), "shared_key": (2, 13, 4)},
  "linformer": {"key_projection": (13, 5)},
  "lsh": {"rotations": (1, 8, 2), "chunk_size": 4},
  "moba": {"block_size": 3, "top_k": 2},
  "nsa": {"stride": 2, "block_size": 4, "num_blocks": 3, "window": 3},
  "nystrom": {"num_landmarks": 4},
  # Drawn rates may be below 0, and a large ε keeps the logarithm defined.
  "precond_delta": {"log_decay": (2, 13, 4), "epsilon": 100.0},
  "selected": {"block_size": 4, "block_indices": np.zeros((2, 13, 2, 1), int)},
  "sliding_window": {"window": 3},
  "strided_2d": {"grid": None, "stride": 2},
  "window_2d": {"grid": None, "window": 2},
  "window_linear": {
    "query_kernel": (4, 8, 8),
    "key_kernel": (2, 8, 8),
    "window": 3,
    "is_causal": True,
  },
}
"""Arguments that the annotations do not say; a tuple is the shape of an array."""


def drawn(name, parameters):
  """The arrays of a call, and its other arguments."""
  rng = np.random.default_rng(zlib.crc32(name.encode()))
  given = {
    option: tuple(_SIZES.get(x, 3) for x in p.annotation.dim_str.split())
    for option, p in parameters.items()
    if p.default is p.empty and hasattr(p.annotation, "dim_str")
    if "..." not in p.annotation.dim_str
  }
  given |= _GIVEN.get(name.removesuffix("_attention"), {})
  arrays = {}
  for option, shape in given.items():
    if isinstance(shape, tuple):
      x = 0.3 * rng.standard_normal(shape, np.float32)
      is_decay = option in ("log_decay", "removal")
      arrays[option] = -np.abs(x) if is_decay else x
  others = {
    k: jnp.asarray(x) if isinstance(x, np.ndarray) else x
    for k, x in given.items()
    if k not in arrays
  }
  return arrays, others


@pytest.mark.parametrize(
  "name",
  [
    name for name in attention.__all__ if name.endswith(("_attention", "_loss"))
  ],
)
def test_what_is_hidden_changes_nothing(name):
  function = getattr(attention, name)
  parameters = inspect.signature(function.__wrapped__).parameters
  arrays, others = drawn(name, parameters)
  keep = np.random.default_rng(0).random((2, 1, 1, 13)) < 0.6
  others["mask"] = jnp.asarray(keep)
  if getattr(parameters.get("is_causal"), "default", True) is not False:
    others["is_causal"] = True

  def call(arrays):
    return function(**arrays, **others)

  @jax.jit
  def run(arrays):
    out, pull = jax.vjp(call, arrays)
    return out, *pull(jnp.ones_like(out))

  expected = run(arrays)
  for content in (np.nan, np.inf):
    filled = {k: x.copy() for k, x in arrays.items()}
    for option, x in filled.items():
      if x.shape[:2] == (2, 13) and option not in _PAIRED:
        x[~keep[:, 0, 0]] = content
    got = run(filled)
    paths = jax.tree_util.tree_leaves_with_path(got)
    for (path, x), y in zip(paths, jax.tree.leaves(expected), strict=True):
      place = jax.tree_util.keystr(path)
      assert_same_bits(x, y, f"{content} changes {place}")

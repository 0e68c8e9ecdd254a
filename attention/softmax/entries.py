"""Entries of compressed attention: one vector for each closed window of positions."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention.decorators import attention_function
from attention.platform import layout
from attention.recurrent.gates import kernel, rms_norm
from attention.softmax import cache as caches
from attention.softmax.block_selection import compact

EPSILON = 1e-6
"""ε of the norms of queries, keys and entries."""

NO_WEIGHT = -1e30
"""A gate with a softmax weight of 0."""


@attention_function
def compressed_entries(
  rows: Float[Array, "B T A *F"],
  gates: Float[Array, "B T A *G"],
  position_bias: Float[Array, "C A *G"],
  *,
  keep: Bool[Array, "B T"] | None = None,
) -> Float[Array, "B M *F"]:
  """Pools each closed window of positions by a softmax of gates, for each feature.

    c_i = Σ_{a, j} softmax_{a, j}(gates[t, a] + b[j, a]) ∘ rows[t, a]
    t = (i + a + 1 − A)·m + j,  j < m

  with b = `position_bias`. The softmax is over all A·m terms of a feature. With A = 1,
  entry i pools window i (HCA). With A = 2, it pools the first series of window i − 1
  and the second of window i (CSA); entry 0 pools only the second.

  Args:
    rows: A series of features for each position.
    gates: one for each feature of `rows`; features may share a gate, on an axis of 1.
    position_bias: added to the gates at each of the m positions of a window.
    keep: `[B, T]`, the unmasked positions; windows contain only these, in order.

  Returns:
    `[B, M, *F]` with M = T // m, in the dtype of `rows`. No query may attend to an
    entry whose window has fewer than m unmasked positions.

  Raises:
    ValueError: shapes do not fit.

  Cost: time and memory T·A·F.

  Papers: DeepSeek-V4, equations 9 to 12 and 20 to 23, as in transformers 5.24.0.
  """
  if keep is not None:
    rows, gates = compact(keep, rows, gates)
  values = _windows(rows.astype(jnp.float32), len(position_bias), 0.0)
  weights = pool_weights(gates, position_bias)
  return jnp.sum(weights * values, axis=2).astype(rows.dtype)


def pool_weights(
  gates: Float[Array, "B T A *G"], bias: Float[Array, "C A *G"]
) -> Float[Array, "B M L *G"]:
  """The softmax weights of the L = A·m terms of each entry, in the order of `_windows`."""
  size, length = len(bias), gates.shape[1]
  bias = jnp.tile(bias, (-(-length // size), *[1] * (bias.ndim - 1)))
  logits = gates.astype(jnp.float32) + bias[None, :length]
  return jax.nn.softmax(_windows(logits, size, -jnp.inf), axis=2)


def _windows(x, size, fill):
  """The terms `[B, M, A·m, …]` of each entry, with `fill` before the first window."""
  count, series = x.shape[1] // size, x.shape[2]
  x = x[:, : count * size]
  x = x.reshape(x.shape[0], count, size, *x.shape[2:])

  def shifted_series(a):
    """Series a of window i + a + 1 − A."""
    shift = min(series - 1 - a, count)
    padding = (0, 0), (shift, 0), *[(0, 0)] * (x.ndim - 3)
    own = jnp.take(x, a, axis=3)[:, : count - shift]
    return jnp.pad(own, padding[: own.ndim], constant_values=fill)

  return jnp.concatenate([shifted_series(a) for a in range(series)], axis=2)


def mean_values(
  value: Float[Array, "B T K V"],
  gates: Float[Array, "B T A H"],
  bias: Float[Array, "C A H"],
  keep: Bool[Array, "B T"] | None,
) -> Float[Array, "B M K V"]:
  """Pools values with weights averaged over the features of an entry."""
  if keep is not None:
    value, gates = compact(keep, value, gates)
  weights = jnp.mean(pool_weights(gates, bias), axis=-1)
  series = jnp.repeat(value[:, :, None], bias.shape[1], axis=2)
  terms = _windows(series, len(bias), 0.0)
  return layout.dot("bmj,bmjkv->bmkv", weights, terms).astype(value.dtype)


def init(
  key: Array, name: str, features: int, stride: int, series: int, width: int
) -> dict[str, Array]:
  """Initialises the parameters that compute entries of width H from F features."""
  kernel_key, gate_key = jax.random.split(key)
  shape = features, series, width
  return {
    f"{name}_kernel": kernel(kernel_key, *shape),
    f"{name}_gate_kernel": kernel(gate_key, *shape),
    f"{name}_bias": jnp.zeros((stride, series, width)),
    f"{name}_scale": jnp.ones(width),
  }


def pool(
  params: Mapping[str, Array],
  arrays: Mapping[str, Array],
  name: str,
  keep: Bool[Array, "B T"] | None = None,
) -> Float[Array, "B M H"]:
  """Computes entries, normalises them, and rotates each by its window's first position.

  Args:
    params: the parameters of `init` with this name.
    arrays: the rows and gates `[B, T, A, H]` of this name, and
      `rotation [B, T, 1, P]`.
    name: the name of the entries.
    keep: `[B, T]`, the unmasked positions.
  """
  bias, rotation = params[f"{name}_bias"], arrays["rotation"]
  rows, gates = arrays[f"{name}_rows"], arrays[f"{name}_gates"]
  x = compressed_entries(rows.astype(jnp.float32), gates, bias, keep=keep)
  if keep is not None:
    (rotation,) = compact(keep, rotation)
  first = rotation[:, : x.shape[1] * len(bias) : len(bias)]
  x = norm(x, params[f"{name}_scale"])
  return rotate(x[:, :, None], first)[:, :, 0]


class CompressedCache(NamedTuple):
  """The state of decoding after the positions seen so far.

  Attributes:
    entries: `[B, M, H]`, M = ⌈max_length / m⌉; those of open windows are unset.
    index_key: `[B, M, D]`, the index keys of entries; None without an indexer.
    window: `[B, W, H]`, the last keys; position p is in row p mod W.
    rows: the inputs of the next entry, `[B, A·m, …]` each; position p is in row
      p mod A·m.
    index: `[B]`, the number of positions seen.
    grows: as in `DenseCache`.
  """

  entries: Float[Array, "B M H"]
  index_key: Float[Array, "B M D"] | None
  window: Float[Array, "B W H"]
  rows: dict[str, Array]
  index: Int[Array, "B"]

  @property
  def grows(self) -> int:
    """m, the number of positions per entry; 0 without entries."""
    if not self.rows:
      return 0
    rows = self.rows["entry_rows"]
    return rows.shape[1] // rows.shape[2]


PoolRows = Callable[[Mapping[str, Array]], tuple[Array, Array | None]]
"""Maps rows `[B, T, …]` to the entries and index keys of their windows."""


def append(
  cache: CompressedCache,
  key: Float[Array, "B 1 H"],
  rows: Mapping[str, Float[Array, "B 1 *F"]],
  pool_rows: PoolRows,
) -> CompressedCache:
  """Appends one position to the cache, and an entry if it closes a window."""
  position, stride = cache.index[:, None], cache.grows

  def write_row(ring, row):
    index = jnp.arange(ring.shape[1])[None]
    return layout.write(ring, row, index == position % ring.shape[1])

  window = write_row(cache.window, key)
  buffers = {name: write_row(x, rows[name]) for name, x in cache.rows.items()}
  entries, index_key = cache.entries, cache.index_key
  if stride:
    size = buffers["rotation"].shape[1]
    order = position + 1 - size + jnp.arange(size)[None]
    last = {
      name: layout.rows_at(x, order % size) for name, x in buffers.items()
    }
    for name in sorted({"entry_gates", "index_gates"} & last.keys()):
      # Positions before the first window have no weight.
      is_set = (order >= 0)[..., None, None]
      last[name] = jnp.where(is_set, last[name], NO_WEIGHT)
    is_closed = (position + 1) % stride == 0
    here = jnp.arange(entries.shape[1])[None] == position // stride
    new, new_key = pool_rows(last)
    entries = layout.write(entries, new[:, -1:], here & is_closed)
    if index_key is not None and new_key is not None:
      index_key = layout.write(index_key, new_key[:, -1:], here & is_closed)
  return CompressedCache(entries, index_key, window, buffers, cache.index + 1)


def prefill(
  cache: CompressedCache,
  key: Float[Array, "B P H"],
  rows: Mapping[str, Float[Array, "B P *F"]],
  lengths: Int[Array, "B"],
  pool_rows: PoolRows,
) -> CompressedCache:
  """Writes the first `lengths` of P positions to the cache."""
  rows = {name: caches.prompt_rows(x, lengths) for name, x in rows.items()}
  entries, index_key = cache.entries, cache.index_key
  if rows:
    # Entries of open windows are replaced before any query sees them.
    new, new_key = pool_rows(rows)
    entries = layout.put(entries, new, 0)
    if index_key is not None and new_key is not None:
      index_key = layout.put(index_key, new_key, 0)
  buffers = {
    name: caches.ring(x, rows[name], lengths) for name, x in cache.rows.items()
  }
  window = caches.ring(cache.window, key, lengths)
  return CompressedCache(entries, index_key, window, buffers, lengths)


def norm(
  x: Float[Array, "*A H"], scale: Float[Array, "H"] | None = None
) -> Float[Array, "*A H"]:
  """Returns x / RMS(x) times an optional scale, in the dtype of x."""
  out = rms_norm(x.astype(jnp.float32), EPSILON)
  if scale is not None:
    out *= scale.reshape(*[1] * (x.ndim - 1), -1)
  return out.astype(x.dtype)


def rotate(
  x: Float[Array, "B T N H"],
  rotation: Float[Array, "B T 1 P"],
  sign: float = 1.0,
) -> Float[Array, "B T N H"]:
  """Rotates the last P features of x by (cos, sin); a sign of −1 rotates them back."""
  cos, sin = jnp.split(rotation, 2, axis=-1)
  fixed, rest = jnp.split(x, [x.shape[-1] - rotation.shape[-1]], axis=-1)
  left, right = jnp.split(rest.astype(rotation.dtype), 2, axis=-1)
  sin *= sign
  halves = left * cos - right * sin, right * cos + left * sin
  return jnp.concatenate([fixed, *(y.astype(x.dtype) for y in halves)], axis=-1)

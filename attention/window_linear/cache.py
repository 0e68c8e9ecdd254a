"""The decode cache: a ring of the last W keys, and a state of those before."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from attention import arguments, plug
from attention import window_cache as ring
from attention.core import layout, tile, visibility
from attention.core.relative import Relative
from attention.linear import hedgehog, state
from attention.linear.state import LinearState
from attention.window_cache import SlidingWindowCache
from attention.window_linear import joint


class WindowLinearCache(NamedTuple):
  """The near keys as they are, and the sums over the far ones.

  Attributes:
    near: the last R = min(W, max_length) keys and values.
    far: Σ φ(k) (v, 1) over the keys before them.
  """

  near: SlidingWindowCache
  far: LinearState


def init_cache(
  window: int, batch: int, max_length: int, dims: plug.Dims, dtype: Any
) -> WindowLinearCache:
  """An empty ring in `dtype`, and B·K·2H·(V+1) zeros in float32."""
  return WindowLinearCache(
    ring.init_cache(window - 1, batch, max_length, dims, dtype),
    state.empty(
      batch, dims.num_kv_heads, 2 * dims.head_dim, dims.values, is_log=False
    ),
  )


def prefill(
  cache: WindowLinearCache,
  key: Float[Array, "B P K H"],
  value: Float[Array, "B P K V"],
  lengths: Int[Array, "B"],
  *,
  key_kernel: Float[Array, "K H H"],
) -> WindowLinearCache:
  """The cache after the first `lengths` of P positions; time P·K·H².

  The last R of them are in the ring, and the others in the state.
  """
  near, far = cache
  slots, kv_heads = near.key.shape[1], key.shape[2]
  rows, values = (
    layout.heads_first(x, kv_heads).astype(jnp.float32)
    for x in (hedgehog.through(key_kernel, key), value)
  )
  has_left = jnp.arange(key.shape[1])[None, :] < lengths[:, None] - slots
  features = hedgehog.hedgehog_features(rows)
  return WindowLinearCache(
    ring.prefill(near, key, value, lengths),
    state.update(far, features, values, has_left[:, None, :, None]),
  )


def decode(
  cache: WindowLinearCache,
  query: Float[Array, "B 1 N H"],
  key: Float[Array, "B 1 K H"],
  value: Float[Array, "B 1 K V"],
  *,
  query_kernel: Float[Array, "N H H"],
  key_kernel: Float[Array, "K H H"],
  share: Float[Array, "N"],
  scale: float | None = None,
) -> tuple[Float[Array, "B 1 N V"], WindowLinearCache]:
  """One position of the causal call; time N·H·(R+H) at every position.

  The key that the new one displaces leaves the window and joins the state.

  Args:
    cache: the keys and values before this position.
    query: the query of this position.
    key: the key of this position, which its query sees too.
    value: the value of this position.
    query_kernel: of the feature map.
    key_kernel: of the feature map.
    share: γ of every query head.
    scale: factor of the near logits; None is 1/√H.

  Returns:
    The result `[B, 1, N, H]` and the cache with this position in it.
  """
  near, far = cache
  kv_heads, slots = key.shape[2], near.key.shape[1]

  def rows(x):
    return layout.heads_first(x, kv_heads)

  def features(kernel, x):
    return hedgehog.hedgehog_features(rows(hedgehog.through(kernel, x)))

  place = (near.index % slots)[:, None]
  left_key, left_value = (
    visibility.by_example(x, place) for x in (near.key, near.value)
  )
  far = state.update(
    far,
    features(key_kernel, left_key),
    rows(left_value).astype(jnp.float32),
    (near.index >= slots)[:, None, None, None],
  )
  after, age = ring.write(near, key, value)
  sums = tile.forward(
    tile.Product(float(arguments.softmax_scale(scale, query.shape[-1]))),
    rows(query),
    tile.Keys(
      rows(after.key),
      rows(after.value),
      visible=(age <= near.index[:, None])[:, None, None, None, :],
    ),
    Relative(),
    rows=1,
    by_data=True,
  )
  read, _ = state.read_out(far, features(query_kernel, query))
  out = joint.average(
    share.reshape(1, kv_heads, -1, 1), sums.out, sums.total, read
  )
  out = layout.heads_last(out, 1).astype(query.dtype)
  return out, WindowLinearCache(after, far)

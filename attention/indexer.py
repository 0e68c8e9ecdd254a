"""The lightning indexer: which keys a query attends to, and what it learns from.

    I[t, s] = Σ_i index_weight[t, i] · relu(index_query[t, i] · index_key[s])

It selects for `dsa_attention` (DeepSeek-V3.2, arXiv:2512.02556).
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention import arguments, gates, layout, platform, plug
from attention.positions import rotary
from attention.signature import attention_function
from attention.softmax import chunk_map, softmax_and_lse

INSTEAD = "the indexer says which keys a query sees"


class Rows(NamedTuple):
  """What is known of queries `[B, T, …]`."""

  index: Any
  weight: Any
  ids: Any
  query: Any = None
  place: Any = None


class Keys(NamedTuple):
  """What is known of keys `[B, S, …]`."""

  index: Any
  shown: Any
  ids: Any


def init(
  key: Array, dims: plug.Dims, num_heads: int, dim: int
) -> dict[str, Array]:
  """What the indexer reads its arrays with, of I = `num_heads` heads of width D."""
  if dims.features < 1:
    raise ValueError(
      "features: an indexer reads inputs of Dims.features numbers; expected at "
      f"least 1, got {dims.features}"
    )
  shapes = {"query": (num_heads, dim), "key": (dim,), "weight": (num_heads,)}
  keys = jax.random.split(key, len(shapes))
  return {
    f"index_{name}_kernel": gates.kernel(key, dims.features, *shape)
    for key, (name, shape) in zip(keys, shapes.items(), strict=True)
  }


def read(
  params: gates.Params, inputs: Float[Array, "B T F"]
) -> dict[str, Array]:
  """`index_query`, `index_key` and `index_weight`; inputs have no gradient."""
  inputs = jax.lax.stop_gradient(inputs)
  arrays = {
    name.removesuffix("_kernel"): gates.project(inputs, kernel)
    for name, kernel in params.items()
  }
  numbers = arrays["index_query"].shape[2:]
  arrays["index_weight"] /= math.sqrt(math.prod(numbers))
  return arrays


def turned(
  arrays: dict[str, Any], positions: Int[Array, "#B T"]
) -> dict[str, Any]:
  """The same with half of each index query and key turned by its position."""
  turns = {}
  for name in arrays.keys() & {"index_query", "index_key"}:
    x = arrays[name]
    heads = x if x.ndim == 4 else x[:, :, None]
    heads = rotary(heads, positions, fraction=0.5)
    turns[name] = heads if x.ndim == 4 else heads[:, :, 0]
  return {**arrays, **turns}


def selected_keys(
  rows: Rows, keys: Keys, top_k: int, is_causal: bool, size: int | None = None
) -> Int[Array, "B T M"]:
  """The M = `top_k` visible keys of largest I, earlier ones first where they are equal.

  -1 stands for what a query does not see. They have no gradient. `size` queries are
  scored at once.
  """
  rows, keys = jax.lax.stop_gradient((rows, keys))

  def select(rows):
    scores, indices = jax.lax.top_k(_scores(rows, keys, is_causal), top_k)
    return jnp.where(scores > -jnp.inf, indices, -1)

  numbers = keys.index.shape[1] * rows.index.shape[2]
  return _by_chunk(select, rows, numbers, size)


@attention_function()
def dsa_indexer_loss(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  *,
  index_query: Float[Array, "B T I D"],
  index_key: Float[Array, "B S D"],
  index_weight: Float[Array, "B T I"],
  top_k: int | None = None,
  mask: Bool[Array, "..."] | None = None,
  is_causal: bool = True,
  scale: float | Float[Array, ""] | None = None,
  query_segment_ids: Int[Array, "B T"] | None = None,
  key_segment_ids: Int[Array, "B S"] | None = None,
) -> Float[Array, "B T"]:
  """What the indexer of `dsa_attention` learns: to score keys as attention does.

    loss[t] = KL(p[t] ‖ softmax over s in A(t) of I[t, s])
    p[t, s] = mean over heads of softmax over s in A(t) of (scale · q[t] · k[s])

  Gradients reach `index_query`, `index_key` and `index_weight`, and nothing else.

  Args:
    top_k: A(t) is what `dsa_attention` selects, as in the sparse stage of the paper's
      training. None is all visible keys, as in its dense warm-up.

  Other arguments: as `dsa_attention`.

  Returns:
    `[B, T]` float32, in nats; 0 for a query that sees nothing.

  Raises:
    ValueError: as `dsa_attention`.

  Cost: time T·S·I·D, and T·S·N·H or with `top_k` T·top_k·N·H; memory, for C queries at
  once, B·C·S·(I+N), or B·C·(S·I + top_k·K·H). Nothing is T×S.

  Paper: DeepSeek-V3.2, arXiv:2512.02556, equations 3 and 4.
  """
  keep = arguments.key_mask(mask, query, key, INSTEAD)
  scale = arguments.softmax_scale(scale, query.shape[-1])
  query, key, scale = jax.lax.stop_gradient((query, key, scale))
  if keep is not None:
    key = jnp.where(keep[..., None, None], key, 0)
  kv_heads, keys = key.shape[2], Keys(index_key, keep, key_segment_ids)

  def loss(rows):
    scores = _scores(rows, keys, is_causal)
    near, spec = key, "bckjh,bskh->bckjs"
    if top_k is not None and top_k < key.shape[1]:
      scores, indices = jax.lax.top_k(scores, top_k)
      near = layout.rows_at(key, indices.reshape(len(indices), -1))
      near = near.reshape(*indices.shape, *key.shape[2:])
      spec = "bckjh,bcskh->bckjs"
    seen = scores > -jnp.inf
    queries = rows.query.reshape(*seen.shape[:2], kv_heads, -1, query.shape[-1])
    logits = scale * layout.dot(spec, queries, near)
    weights, _ = softmax_and_lse(logits, seen[:, :, None, None])
    p = jnp.mean(weights, axis=(2, 3))
    log_q = scores - softmax_and_lse(scores, seen)[1][..., None]
    log_q = jnp.where(seen & (p > 0.0), log_q, 0.0)
    return jnp.sum(jax.scipy.special.xlogy(p, p) - p * log_q, axis=-1)

  rows = Rows(index_query, index_weight, query_segment_ids, query)
  heads = index_query.shape[2] + query.shape[2]
  return _by_chunk(loss, rows, key.shape[1] * heads)


def _scores(rows: Rows, keys: Keys, is_causal: bool) -> Float[Array, "B C S"]:
  """I of C queries, −∞ where a key is not visible."""
  index, seen = keys.index, jnp.bool_(True).reshape(1, 1, 1)
  if keys.shown is not None:
    seen = keys.shown[:, None]
    index = jnp.where(keys.shown[..., None], index, 0)
  if is_causal:
    places = jnp.arange(index.shape[1])[None, None]
    seen &= places <= rows.place[..., None]
  if keys.ids is not None:
    seen &= rows.ids[..., None] == keys.ids[:, None]
  products = jax.nn.relu(layout.dot("bcid,bsd->bcis", rows.index, index))
  scores = layout.dot("bci,bcis->bcs", rows.weight, products)
  # -0.0 is equal to 0.0, but comes after it in a sort.
  scores = jnp.where(scores == 0.0, 0.0, scores)
  return jnp.where(seen, scores, -jnp.inf)


def _by_chunk(
  function: Any, rows: Rows, numbers: int, size: int | None = None
) -> Array:
  """`function` of C = `size` queries at a time, with so many `numbers` for each."""
  batch, length = rows.index.shape[:2]
  if size is None:
    size = platform.rows_at_once(4 * batch * numbers, length, least=64)
  places = jnp.broadcast_to(jnp.arange(length)[None], (batch, length))
  rows = rows._replace(place=places)
  return chunk_map(function, size, rows)

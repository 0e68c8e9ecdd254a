"""Linformer: keys and values projected to R rows (Wang et al., 2020)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attention import arguments, plug
from attention.core import few_keys, layout


def linformer_attention(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
  *,
  key_projection: Float[Array, "..."],
  value_projection: Float[Array, "..."] | None = None,
  mask: Bool[Array, "..."] | None = None,
  is_causal: bool = False,
  scale: float | Float[Array, ""] | None = None,
  block_size: int | None = None,
) -> Float[Array, "B T N V"]:
  """Softmax over R learned mixtures of the keys: softmax(Q (EᵀK)ᵀ) (FᵀV).

  Row s of E (and F) says what position s gives to each of R rows, so a shorter
  input uses the first S rows. Masked keys and values are zeroed before the
  projection: they then give nothing, as if the input ended before them.

  Args:
    query: `[B, T, N, H]`.
    key: `[B, S, K, H]`, N a multiple of K.
    value: `[B, S, K, V]`.
    key_projection: E, `[S', R]` common to all heads or `[K, S', R]` one a key
      head, S' ≥ S.
    value_projection: F, of the same form; None shares E with the values.
    mask: key mask `[B, 1, 1, S]`, True = attend.
    is_causal: must be False: each of the R rows mixes all positions.
    scale: factor of the logits; None is 1/√H.
    block_size: C, queries of a tile; None is the platform's choice.

  Returns:
    `[B, T, N, V]` in the dtype of `query`. An example whose keys are all masked
    gets zeros.

  Raises:
    ValueError: arguments do not fit, the input is longer than the projection,
      the mask varies along queries, or a causal call.

  Cost: time (S·K + T·N)·R·(H+V); memory beside the arguments B·N·R·(H+V+C)
  float32 for tiles of C queries, one copy of key or value, and the gradients of
  E and F.

  Where it departs from the paper: masks and inputs shorter than the projection,
  which the paper leaves open.

  Paper: Linformer, section 4, arXiv:2006.04768.
  """
  arguments.check_qkv(query, key, value)
  if is_causal:
    raise ValueError(
      "is_causal: Linformer mixes all positions in each of its R rows, so it "
      "has no causal form; use dense, sliding_window or performer attention"
    )
  source_length, num_kv_heads = key.shape[1:3]
  if value_projection is None:
    value_projection = key_projection
  for name, projection in (
    ("key_projection", key_projection),
    ("value_projection", value_projection),
  ):
    _check_projection(name, projection, source_length, num_kv_heads)
  if key_projection.shape[-1] != value_projection.shape[-1]:
    raise ValueError(
      "value_projection: expected the rank of key_projection, "
      f"{key_projection.shape[-1]}, got {value_projection.shape[-1]}"
    )
  if block_size is not None:
    arguments.check_at_least("block_size", block_size, 1)
  keep = arguments.key_mask(
    mask,
    query,
    key,
    instead="projected keys no longer have positions; use dense attention for "
    "such a mask",
  )

  if keep is not None:
    kept = keep[:, :, None, None]
    key, value = jnp.where(kept, key, 0), jnp.where(kept, value, 0)
  query, scale = arguments.scaled_query(query, scale)
  # The rows of an example without any key are zeros, and so are its results.
  return few_keys.attend(
    query,
    _project(key_projection, key).astype(query.dtype),
    _project(value_projection, value),
    scale=scale,
    block_size=block_size,
  )


def _project(
  projection: Float[Array, "..."], x: Float[Array, "B S K D"]
) -> Float[Array, "B K R D"]:
  """Σ_s E[s, r] x_s of every head, accumulated in float32."""
  length = x.shape[1]
  rows = projection[..., :length, :].astype(x.dtype)
  spec = "sr,bskd->bkrd" if rows.ndim == 2 else "ksr,bskd->bkrd"
  return layout.dot(spec, rows, x).astype(x.dtype)


def _check_projection(
  name: str, projection: Array, source_length: int, num_kv_heads: int
) -> None:
  shape = projection.shape
  if projection.ndim not in (2, 3) or (
    projection.ndim == 3 and shape[0] != num_kv_heads
  ):
    raise ValueError(
      f"{name}: expected [S, R] or [K, S, R] with K = {num_kv_heads}, got "
      f"{shape}"
    )
  if shape[-2] < source_length:
    raise ValueError(
      f"{name}: it has rows for {shape[-2]} positions, but the keys have "
      f"{source_length}; make it with S ≥ {source_length}"
    )


def linformer(
  rank: int = 64, shared: bool = False, per_head: bool = False
) -> plug.Attention:
  """The plug of `linformer_attention`.

  Args:
    rank: R.
    shared: keys and values share one projection (the paper's "key-value
      sharing").
    per_head: one projection a key/value head; else common to all heads of the
      layer (the paper's "headwise sharing").

  Returns:
    An `Attention` whose projections are trained: N(0, 1/R), as in the paper's
    theorem, so that projected logits start at the scale of plain ones.

  Raises:
    ValueError: `rank` < 1, or larger than the sequence when `init` is called.
  """
  if rank < 1:
    raise ValueError(f"rank: expected at least 1, got {rank}")
  names = (
    ("key_projection",)
    if shared
    else (
      "key_projection",
      "value_projection",
    )
  )

  def init(key, dims):
    if rank > dims.max_length:
      raise ValueError(
        f"rank: {rank} rows for at most {dims.max_length} positions save "
        f"nothing; choose rank ≤ {dims.max_length} or dense attention"
      )
    shape = (dims.max_length, rank)
    if per_head:
      shape = (dims.num_kv_heads, *shape)
    keys = jax.random.split(key, len(names))
    return {
      "params": {
        name: jax.random.normal(k, shape) / jnp.sqrt(jnp.float32(rank))
        for name, k in zip(names, keys, strict=True)
      }
    }

  def apply(variables, query, key, value, **call):
    call = arguments.accepted_options("linformer", linformer_attention, call)
    return linformer_attention(query, key, value, **variables["params"], **call)

  return plug.Attention(
    init=init,
    apply=apply,
    init_cache=None,
    decode=None,
    supports=frozenset({"cross", "rowwise", "mask"}),
    approximates="dense",
    cost="linear",
    sizes=plug.Sizes(
      short={"rank": 16},
      long={"rank": 64},
      timed=lambda length: {"rank": min(256, length)},
    ),
  )

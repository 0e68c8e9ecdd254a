"""Linformer: keys and values projected to R rows (Wang et al., 2020)."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attention import arguments, platform, plug
from attention.logits import Logits
from attention.loop import attend


@arguments.attention_function(
  rank="give the array, key_projection=[S, R], or make the mechanism, "
  "linformer(rank=…)",
  shared="leave value_projection out, which shares key_projection",
  per_head="give key_projection with an axis for each key head, [K, S, R]",
)
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

  Row s of E (and F) holds the share of position s in each of the R mixtures, so
  a shorter input uses the first S rows. Masked keys and values are set to zero
  before the projection, so they contribute nothing to any mixture.

  Args:
    query: `[B, T, N, H]`.
    key: `[B, S, K, H]`, N a multiple of K.
    value: `[B, S, K, V]`.
    key_projection: E, `[S', R]` for all heads, or `[K, S', R]` with one for
      each key head; S' ≥ S.
    value_projection: F, of the same form; None uses E for the values too.
    mask: key mask `[B, 1, 1, S]`, True = attend.
    is_causal: must be False, because each of the R rows mixes all positions.
    scale: factor of the logits; None is 1/√H.
    block_size: C, queries of a tile; None is the platform's choice.

  Returns:
    `[B, T, N, V]` in the dtype of `query`. An example whose keys are all masked
    gets zeros.

  Raises:
    ValueError: arguments do not fit, the input is longer than the projection,
      the mask varies along queries, or the call is causal.

  Cost: time (S·K + T·N)·R·(H+V); memory in addition to the arguments
  B·N·R·(H+V+C) float32 for tiles of C queries, B copies of E and F and their
  gradients, and with one for each key head a copy of key and value.

  Departs from its paper in masks and in inputs shorter than the projection,
  which the paper does not discuss.

  Paper: Linformer, section 4, arXiv:2006.04768.
  """
  return _attend(
    query,
    key,
    value,
    key_projection,
    value_projection,
    mask=mask,
    is_causal=is_causal,
    scale=scale,
    block_size=block_size,
  )


def _attend(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
  key_projection: Float[Array, "..."],
  value_projection: Float[Array, "..."] | None = None,
  *,
  mask: Bool[Array, "..."] | None = None,
  is_causal: bool = False,
  scale: float | Float[Array, ""] | None = None,
  block_size: int | None = None,
  axis_name: str | None = None,
) -> Float[Array, "B T N V"]:
  """`linformer_attention`, or with an axis that of the whole.

  Each device then mixes its own positions, by their rows of the projections, and
  the R mixtures of all devices are added up: what crosses is R rows of each key
  head, at any length.
  """
  arguments.check_qkv(query, key, value)
  if is_causal:
    raise ValueError(
      "is_causal: Linformer mixes all positions in each of its R rows, so it "
      "has no causal form; use dense, sliding_window or performer attention"
    )
  batch, source_length, num_kv_heads, _ = key.shape
  if value_projection is None:
    value_projection = key_projection
  for name, projection in (
    ("key_projection", key_projection),
    ("value_projection", value_projection),
  ):
    size = 1 if axis_name is None else jax.lax.axis_size(axis_name)
    # Up to D − 1 positions fill a whole up that does not split.
    least = size * source_length - (size - 1)
    _check_projection(name, projection, least, num_kv_heads)
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
    key, value = (jnp.where(keep[..., None, None], x, 0) for x in (key, value))

  def projected(projection, x):
    if axis_name is not None:
      projection = _own_rows(projection, source_length, axis_name)
    rows = projection[..., :source_length, :].astype(x.dtype)
    if projection.ndim == 2:
      out = _mixed(rows, x)
    else:
      out = jax.vmap(_mixed, (0, 2), 2)(rows, x)
    if axis_name is not None:
      out = jax.lax.psum(out, axis_name)
    return out.astype(x.dtype)

  key = projected(key_projection, key).astype(query.dtype)
  value = projected(value_projection, value)
  rank = key.shape[1]
  rows = block_size or platform.rows_at_once(
    4 * batch * query.shape[2] * rank, query.shape[1]
  )
  # An example without visible keys has zeros for values, and so for results.
  out, _ = attend(
    query, key, value, logits=Logits(scale=scale), block=(rows, rank)
  )
  return out


def _mixed(
  projection: Float[Array, "S R"], x: Float[Array, "B S *F"]
) -> Float[Array, "B R *F"]:
  """Σ_s E[s, r] x_s in float32."""
  # With one E for each example, both gradients are plain products as well.
  each = jnp.broadcast_to(projection[None], (len(x), *projection.shape))
  out = jnp.einsum(
    "bsr,bsf->brf",
    each,
    x.reshape(*x.shape[:2], -1),
    preferred_element_type=jnp.float32,
  )
  return out.reshape(*out.shape[:2], *x.shape[2:])


def _own_rows(
  projection: Float[Array, "*K P R"], length: int, axis_name: str
) -> Float[Array, "*K S R"]:
  """The rows of this device's positions; 0 for positions behind the last."""
  size, rank = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
  missing = max(0, size * length - projection.shape[-2])
  pads = [(0, 0)] * (projection.ndim - 2) + [(0, missing), (0, 0)]
  whole = jnp.pad(projection, pads)
  return jax.lax.dynamic_slice_in_dim(whole, rank * length, length, axis=-2)


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
    per_head: one projection for each key/value head; else one for all heads of
      the layer (the paper's "headwise sharing").

  Returns:
    An `Attention` whose projections are trained. They are drawn from N(0, 1/R),
    as in the paper's theorem, so that projected logits start at the scale of
    plain ones.

  Raises:
    ValueError: `rank` < 1, or a flag that is neither True nor False; by `init`,
      a rank larger than the sequence, or projections that take more than
      `arguments.MOST_BYTES`.
  """
  arguments.check_at_least("rank", rank, 1)
  arguments.check_flag("shared", shared)
  arguments.check_flag("per_head", per_head)
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
    arguments.check_memory("rank", rank, len(names) * math.prod(shape))
    keys = jax.random.split(key, len(names))
    return {
      "params": {
        name: jax.random.normal(k, shape) / jnp.sqrt(jnp.float32(rank))
        for name, k in zip(names, keys, strict=True)
      }
    }

  def apply(variables, query, key, value, **call):
    call = arguments.accepted_options(
      "linformer",
      linformer_attention,
      call,
      own=("key_projection", "value_projection"),
    )
    return linformer_attention(query, key, value, **variables["params"], **call)

  def apply_sharded(variables, query, key, value, *, axis_name, **call):
    params = variables["params"]
    return _attend(query, key, value, **params, axis_name=axis_name, **call)

  return plug.Attention(
    init=init,
    apply=apply,
    init_cache=None,
    decode=None,
    supports=frozenset({"cross", "rowwise", "mask", "sequence"}),
    apply_sharded=apply_sharded,
    approximates="dense",
    cost="linear",
    sizes=plug.Sizes(
      short={"rank": 16},
      long={"rank": 64},
      timed=lambda length: {"rank": min(256, length)},
    ),
  )

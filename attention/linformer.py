"""Linformer: keys and values projected to R rows (Wang et al., 2020)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attention import checks
from attention.decorators import (
  attention_factory,
  attention_function,
  make_apply,
)
from attention.mechanism import Attention, Hyperparameters
from attention.platform.layout import zero_masked
from attention.softmax.logits import Logits
from attention.softmax.tiles import attend
from attention.softmax.visible import Visible, key_mask


@attention_function
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
  axis_name: str | None = None,
  return_lse: bool = False,
) -> Float[Array, "B T N V"] | tuple[Array, Array]:
  """Attends to R learned projections of keys and values: softmax(Q (EᵀK)ᵀ) (FᵀV).

    out = linformer_attention(q, k, v, key_projection=e, value_projection=f)

  Row s of E (and F) has the weights of position s in the R projected keys (values), so
  a shorter input uses the first S rows. Masked keys and values are set to zero before
  the projection, so they do not contribute.

  Args:
    query: `[B, T, N, H]`.
    key: `[B, S, K, H]`.
    value: `[B, S, K, V]`.
    key_projection: E, `[S', R]` for all heads, or `[K, S', R]`, one for each key head;
      S' ≥ S.
    value_projection: F, of the same shape; None uses E for the values as well.
    mask: key mask, `[B, 1, 1, S]`.
    is_causal: must be False, because each of the R rows mixes all positions.
    block_size: C, the number of queries in a block; None means the platform's choice.
    scale: factor of the logits; None means 1/√H.
    axis_name: mesh axis of a sequence-sharded call, inside `jax.shard_map`.
    return_lse: whether to return the log-sum-exp of the logits as well.

  Returns:
    `[B, T, N, V]`, with `return_lse` also the log-sum-exp `[B, T, N]` of the R logits.
    For an example whose keys are all masked they are zeros and −∞.

  Raises:
    ValueError: the input is longer than the projection, the mask varies along queries,
      or the call is causal.

  Cost: time (S·K + T·N)·R·(H+V); memory in addition to the arguments
  B·N·R·(H+V+C) float32 for blocks of C queries, B copies of E and F and their
  gradients, and, with one for each key head, a copy of key and value.

  Extends the paper to masks and to inputs shorter than the projection.

  Paper: Linformer, section 4, arXiv:2006.04768.
  """
  if is_causal:
    raise ValueError(
      "is_causal: expected False, got True; each of Linformer's R rows mixes all "
      "positions; use dense, sliding_window or performer attention"
    )
  if value_projection is None:
    value_projection = key_projection
  devices, length = 1, key.shape[1]
  if axis_name is not None:
    devices = jax.lax.axis_size(axis_name)
  # A sequence that D devices do not divide is padded by up to D − 1 positions.
  min_rows = devices * length - (devices - 1)
  _check_projection("key_projection", key_projection, key, min_rows)
  _check_projection("value_projection", value_projection, key, min_rows)
  rank = key_projection.shape[-1]
  if rank != value_projection.shape[-1]:
    raise ValueError(
      f"value_projection: expected the rank of key_projection, {rank}, got "
      f"{value_projection.shape[-1]}"
    )
  keep = checks.key_mask(mask, query, key, _INSTEAD)

  def project(projection, x):
    if axis_name is None:
      return _project(projection, x, keep)
    # Each device projects its own positions, with zeros after the last row of the
    # projection. All devices then attend to the sums, R rows per key head.
    positions = jax.lax.axis_index(axis_name) * length + jnp.arange(length)
    own = projection.at[..., positions, :].get(mode="fill", fill_value=0)
    return jax.lax.psum(_project(own, x, keep), axis_name)

  keys, values = (
    project(projection, x).astype(dtype)
    for projection, x, dtype in (
      (key_projection, key, query.dtype),
      (value_projection, value, value.dtype),
    )
  )
  # Every projected key is visible, unless all keys are masked.
  visible = Visible()
  if keep is not None:
    has_keys = jnp.any(keep, axis=1, keepdims=True)
    if axis_name is not None:
      has_keys = jax.lax.psum(has_keys.astype(jnp.int32), axis_name) > 0
    visible = key_mask(jnp.broadcast_to(has_keys, keys.shape[:2]))
  out, lse = attend(
    query,
    keys,
    values,
    visible,
    Logits(scale=scale),
    block=(block_size, rank),
  )
  return (out, lse) if return_lse else out


_INSTEAD = (
  "projected keys have no positions; use dense attention for such a mask"
)


def _project(
  projection: Float[Array, "*K P R"],
  x: Float[Array, "B S K F"],
  keep: Bool[Array, "B S"] | None,
) -> Float[Array, "B R K F"]:
  """Σ_s E[s, r] x_s in float32, over the positions that `keep` selects."""
  x = zero_masked(x, keep)

  def mix(rows, x):
    # With one E per example, both gradients are also plain products.
    rows = jnp.broadcast_to(rows, (x.shape[0], *rows.shape))
    return jnp.einsum(
      "bsr,bsf->brf", rows, x, preferred_element_type=jnp.float32
    )

  rows = projection[..., : x.shape[1], :].astype(x.dtype)
  if rows.ndim == 3:
    return jax.vmap(mix, (0, 2), 2)(rows, x)
  flat = mix(rows, x.reshape(*x.shape[:2], -1))
  return flat.reshape(*flat.shape[:2], *x.shape[2:])


def _check_projection(
  name: str, projection: Array, key: Array, source_length: int
) -> None:
  shape, kv_heads = projection.shape, key.shape[2]
  if len(shape) not in (2, 3) or (len(shape) == 3 and shape[0] != kv_heads):
    raise ValueError(
      f"{name}: expected [S, R] or [K, S, R] with K = {kv_heads}, got {shape}"
    )
  if shape[-2] < source_length:
    raise ValueError(
      f"{name}: expected rows for at least {source_length} positions, the length of "
      f"key, got {shape[-2]}"
    )


@attention_factory
def linformer(
  rank: int = 64, shared: bool = False, per_head: bool = False
) -> Attention:
  """The mechanism of `linformer_attention`.

  Args:
    rank: R.
    shared: whether keys and values share one projection (the paper's "key-value
      sharing").
    per_head: whether each key/value head has its own projection; otherwise all heads of
      the layer share one (the paper's "headwise sharing").

  Returns:
    An `Attention` whose projections are trained. They are drawn from N(0, 1/R), as in
    the paper's theorem, so that initial logits have the scale of unprojected ones.

  Raises:
    ValueError: `rank` < 1, or a flag is neither True nor False; by `init`, the rank is
      larger than the sequence.
  """
  names = (
    ["key_projection"] if shared else ["key_projection", "value_projection"]
  )

  def init(key, dims):
    if rank > dims.max_length:
      raise ValueError(
        f"rank: expected at most {dims.max_length}, the largest number of "
        f"positions, got {rank}, which saves nothing; use dense attention"
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

  return Attention(
    init=init,
    apply=make_apply(
      "linformer", linformer_attention, lambda variables: variables["params"]
    ),
    init_cache=None,
    decode=None,
    supports=frozenset({"cross", "rowwise", "mask", "sequence"}),
    approximates="dense",
    cost="linear",
    sizes=Hyperparameters(
      short={"rank": 16},
      long={"rank": 64},
      timed=lambda length: {"rank": min(256, length)},
    ),
  )

"""The lightning indexer, which selects keys for each query, and its loss.

    I[t, s] = Σ_i index_weight[t, i] · relu(index_query[t, i] · index_key[s])

It selects keys for `dsa_attention` (DeepSeek-V3.2, arXiv:2512.02556), and blocks of
keys for `moba_attention` (MiniMax-M3).
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from attention import checks
from attention.decorators import attention_function
from attention.mechanism import Dims
from attention.platform import backend, layout
from attention.platform.blocks import chunk_map
from attention.positions import rotary
from attention.recurrent import gates
from attention.softmax import cache as caches
from attention.softmax.rows import softmax_and_lse

INSTEAD = "the indexer selects the keys of a query"
KEY_EPSILON = 1e-6
"""ε of the layer norm of index keys."""


class Rows(NamedTuple):
  """Arrays `[B, T, …]`: index queries and weights, segments, queries, and positions."""

  index: Any
  weight: Any
  ids: Any
  query: Any = None
  place: Any = None


class Keys(NamedTuple):
  """Arrays of keys, `[B, S, …]`: index keys, unmasked keys, and segments."""

  index: Any
  keep: Any
  ids: Any


class Options(NamedTuple):
  """The sizes of an indexer, and its differences from that of DeepSeek-V3.2.

  Attributes:
    num_heads: I.
    dim: D.
    query_rank: the width of the latent queries from which index queries are projected;
      None projects them from the inputs.
    norm: 'layer', a layer norm of index keys; 'rms_from_one', an RMS norm of index
      queries and keys, whose scales are stored minus 1 (MiniMax-M3); or None.
    epsilon: ε of the norms.
    rotary_dim: the number of leading features of index queries and keys that the model
      rotates; None rotates half of the features here.
    has_weights: whether scores are weighted sums over the index heads.
  """

  num_heads: int
  dim: int
  query_rank: int | None = None
  norm: str | None = None
  epsilon: float = KEY_EPSILON
  rotary_dim: int | None = None
  has_weights: bool = True


def check_defaults(needed: str, **options: tuple[Any, Any]) -> None:
  """Raises ValueError unless options that need another option have their defaults.

  Args:
    needed: the option without which the others have no effect.
    **options: the value and the default of each option.
  """
  for name, (value, default) in options.items():
    if value != default:
      raise ValueError(
        f"{name}: expected {default} without {needed}, got {value}"
      )


def check_rotation(dim: int, rotary_dim: int | None) -> None:
  """Raises ValueError unless the rotated features divide into pairs."""
  if rotary_dim is None and dim % 4:
    raise ValueError(
      "index_dim: expected a multiple of 4, as half of the features rotate in pairs, "
      f"got {dim}"
    )
  if rotary_dim is not None and (rotary_dim % 2 or rotary_dim > dim):
    raise ValueError(
      f"index_rotary_dim: expected an even number up to index_dim {dim}, got "
      f"{rotary_dim}"
    )


def init(key: Array, dims: Dims, options: Options) -> dict[str, Array]:
  """Initialises the parameters of an indexer."""
  num_heads, dim = options[:2]
  checks.check_features("an indexer", dims.features)
  shapes = {"query": (num_heads, dim), "key": (dim,), "weight": (num_heads,)}
  keys = jax.random.split(key, len(shapes))
  fan_in = {"query": options.query_rank or dims.features}
  params = {
    f"index_{name}_kernel": gates.kernel(
      key, fan_in.get(name, dims.features), *shape
    )
    for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    if name != "weight" or options.has_weights
  }
  if options.norm == "layer":
    norm = {"key_scale": jnp.ones(dim), "key_bias": jnp.zeros(dim)}
  elif options.norm == "rms_from_one":
    norm = dict.fromkeys(("query_scale", "key_scale"), jnp.zeros(dim))
  else:
    norm = {}
  return params | {f"index_{name}": x for name, x in norm.items()}


def project(
  params: gates.Params,
  options: Options,
  inputs: Float[Array, "B T F"],
  query_inputs: Float[Array, "B T R"] | None = None,
) -> dict[str, Array]:
  """Projects inputs to `index_query`, `index_key` and `index_weight`.

  No gradient flows to the inputs. With `rotary_dim`, the features that the model
  rotates are `index_query_rotary` and `index_key_rotary` `[B, T, 1, P]`.
  """
  sources = {} if query_inputs is None else {"index_query": query_inputs}
  arrays = {}
  names = "index_query", "index_key", "index_weight"
  for name in names if options.has_weights else names[:2]:
    source = jax.lax.stop_gradient(sources.get(name, inputs))
    arrays[name] = gates.project(source, params[f"{name}_kernel"])

  def normalize(name, x):
    x = gates.rms_norm(x, options.epsilon)
    scale = params[f"{name}_scale"].reshape(*[1] * (x.ndim - 1), -1)
    if options.norm == "rms_from_one":
      return x * (1.0 + scale)
    return x * scale + params[f"{name}_bias"][None, None]

  if options.norm == "layer":
    key = arrays["index_key"]
    key -= jnp.mean(key, axis=2, keepdims=True)
    arrays["index_key"] = normalize("index_key", key)
  elif options.norm == "rms_from_one":
    for name in names[:2]:
      arrays[name] = normalize(name, arrays[name])
  if options.has_weights:
    arrays["index_weight"] /= math.sqrt(options.num_heads * options.dim)
  if options.rotary_dim is None:
    return arrays
  for name, x in (
    ("index_query", arrays["index_query"]),
    ("index_key", arrays["index_key"][:, :, None]),
  ):
    arrays[f"{name}_rotary"], arrays[name] = jnp.split(
      x, [options.rotary_dim], axis=3
    )
  return arrays


def index_arrays(
  name: str,
  options: Options,
  query: Float[Array, "B T N H"],
  key: Float[Array, "B T K H"],
  mask: Bool[Array, "..."] | None,
  call: dict[str, Any],
) -> dict[str, Any]:
  """Rotates the index arrays of a call, and zeros masked positions.

  Raises:
    ValueError: an array of `project` is missing, or the mask is not a key mask.
  """
  names = ["index_query", "index_key"]
  rotary_names = [f"{x}_rotary" for x in names if options.rotary_dim]
  weights = ["index_weight"] * options.has_weights
  gates.check_gates(name, call, *names, *rotary_names, *weights)
  keep = checks.key_mask(mask, query, key, INSTEAD)
  call = rotate(call, jnp.arange(query.shape[1])[None])
  return zero_masked(call, keep)


def rotate(
  arrays: dict[str, Any], positions: Int[Array, "#B T"]
) -> dict[str, Any]:
  """Rotates half of each index query and key by its position.

  If the model has rotated them, it only joins the rotated features to the others.
  """
  if "index_key_rotary" in arrays:
    arrays = dict(arrays)
    for name in ("index_query", "index_key"):
      rotated = arrays.pop(f"{name}_rotary")
      arrays[name] = jnp.concatenate([rotated, arrays[name]], axis=3)
    return {**arrays, "index_key": arrays["index_key"][:, :, 0]}
  results = {}
  for name in sorted(arrays.keys() & {"index_query", "index_key"}):
    x = arrays[name]
    heads = x if x.ndim == 4 else x[:, :, None]
    heads = rotary(heads, positions, fraction=0.5)
    results[name] = heads if x.ndim == 4 else heads[:, :, 0]
  return {**arrays, **results}


def prefill(
  variables: Any,
  cache: caches.IndexedCache,
  query: Array,
  key: Array,
  value: Array,
  lengths: Array,
  **call: Any,
) -> caches.IndexedCache:
  """Implements `Attention.prefill`: caches keys, values and index keys of a prompt."""
  del variables, query
  positions = jnp.arange(key.shape[1])[None]
  index_key = rotate(call, positions)["index_key"]
  return caches.prefill_indexed(cache, key, value, index_key, lengths)


def zero_masked(
  arrays: dict[str, Any], keep: Bool[Array, "B T"] | None
) -> dict[str, Any]:
  """Zeros the index arrays at masked positions, where projections may be NaN."""
  names = arrays.keys() & {"index_query", "index_key", "index_weight"}
  zeroed = {x: layout.zero_masked(arrays[x], keep) for x in sorted(names)}
  return arrays | zeroed


def select(
  scores: Float[Array, "B C S"], top_k: int | None
) -> Bool[Array, "B C S"]:
  """Selects the `top_k` keys of largest score; of equal scores, the earlier keys.

  None selects all. A score of −∞ is never selected.

  It does not sort: it finds the k-th largest score digit by digit, by counting larger
  ones, and then the last position among the scores equal to it.
  """
  visible = scores > -jnp.inf
  source_length = scores.shape[2]
  if top_k is None or top_k >= source_length:
    return visible
  scores = jnp.where(scores == 0.0, 0.0, scores)  # The bits of -0.0 differ.
  bits = jax.lax.bitcast_convert_type(scores, jnp.uint32)
  # Unsigned integers in the order of the floats.
  sign = jnp.uint32(1 << 31)
  ranks = jnp.where(bits >= sign, ~bits, bits | sign)
  threshold = _nth_largest(ranks, jnp.full((*scores.shape[:2], 1), top_k), 32)
  is_above = ranks > threshold
  ties = top_k - jnp.sum(is_above, axis=2, keepdims=True, dtype=jnp.int32)
  places = source_length - jnp.arange(source_length, dtype=jnp.uint32)
  places = jnp.where(ranks == threshold, places[None, None], 0)
  last = _nth_largest(places, ties, source_length.bit_length())
  return visible & (is_above | (places >= last))


def _nth_largest(
  x: UInt[Array, "B C S"], n: Int[Array, "B C 1"], bits: int
) -> UInt[Array, "B C 1"]:
  """The largest number of `bits` bits that n of x are not below; 0 for n = 0."""
  digits = -(-bits // 2)  # Each pass over x finds two bits.

  def add_digit(i, low):
    shift = (2 * (digits - 1 - i)).astype(jnp.uint32)
    digit = jnp.zeros_like(low)
    for candidate in (1, 2, 3):
      is_reached = x >= low + (jnp.uint32(candidate) << shift)
      count = jnp.sum(is_reached, axis=2, keepdims=True, dtype=jnp.int32)
      digit += (count >= n).astype(jnp.uint32)
    return low + (digit << shift)

  low = jnp.zeros_like(x, shape=n.shape)
  return jax.lax.fori_loop(0, digits, add_digit, low)


@attention_function
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
  """The loss that trains the indexer of `dsa_attention` to score keys as attention
  does.

    loss[t] = KL(p[t] ‖ softmax over s in A(t) of I[t, s])
    p[t, s] = mean over heads of softmax over s in A(t) of (scale · q[t] · k[s])

  Gradients reach only `index_query`, `index_key` and `index_weight`.

  Args:
    top_k: the number of keys that `dsa_attention` selects as A(t), as in the sparse
      stage of the paper's training. None means all visible keys, as in its dense
      warm-up.

  Other arguments are those of `dsa_attention`.

  Returns:
    `[B, T]` float32, in nats; 0 for a query that sees no key.

  Raises:
    ValueError: as in `dsa_attention`.

  Cost: time T·S·(I·D + N·H); memory B·C·S·(I+N), for C queries at a time. No array is
  T×S.

  Paper: DeepSeek-V3.2, arXiv:2512.02556, equations 3 and 4.
  """
  keep = checks.key_mask(mask, query, key, INSTEAD)
  key = layout.zero_masked(key, keep)
  return row_losses(
    Rows(index_query, index_weight, query_segment_ids, query),
    Keys(index_key, keep, key_segment_ids),
    key,
    top_k=top_k,
    scale=scale,
    is_causal=is_causal,
  )


def mean_loss(
  losses: Float[Array, "B T"], keep: Bool[Array, "B T"] | None
) -> Float[Array, ""]:
  """The mean over the queries that are not masked."""
  if keep is None:
    return jnp.mean(losses)
  losses = jnp.where(keep, losses, 0.0)
  return jnp.sum(losses) / jnp.maximum(jnp.sum(keep), 1)


def row_losses(
  rows: Rows,
  keys: Keys,
  key: Float[Array, "B S K H"],
  *,
  top_k: int | None,
  scale: float | Float[Array, ""] | None,
  is_causal: bool = True,
) -> Float[Array, "B T"]:
  """The losses of `dsa_indexer_loss`; a causal row sees keys up to its position."""
  head_dim, heads = rows.query.shape[-1], rows.query.shape[2]
  scale = checks.softmax_scale(scale, head_dim)
  query, key, scale = jax.lax.stop_gradient((rows.query, key, scale))
  kv_heads = key.shape[2]

  def loss(rows):
    scores = index_scores(rows, keys, is_causal)
    selected = select(jax.lax.stop_gradient(scores), top_k)
    queries = rows.query.reshape(*selected.shape[:2], kv_heads, -1, head_dim)
    logits = scale * layout.dot("bckjh,bskh->bckjs", queries, key)
    weights, _ = softmax_and_lse(logits, selected[:, :, None, None])
    p = jnp.mean(weights, axis=(2, 3))
    log_q = scores - softmax_and_lse(scores, selected)[1][..., None]
    log_q = jnp.where(selected & (p > 0.0), log_q, 0.0)
    return jnp.sum(jax.scipy.special.xlogy(p, p) - p * log_q, axis=-1)

  rows = rows._replace(query=query)
  return map_query_chunks(
    loss, rows, key.shape[1] * (rows.index.shape[2] + heads)
  )


def index_scores(
  rows: Rows, keys: Keys, is_causal: bool
) -> Float[Array, "B C S"]:
  """The scores I of C queries; −∞ for keys that are not visible."""
  index, visible = keys.index, jnp.bool_(True).reshape(1, 1, 1)
  if keys.keep is not None:
    visible = keys.keep[:, None]
    index = jnp.where(keys.keep[..., None], index, 0)
  if is_causal:
    positions = jnp.arange(index.shape[1])[None, None]
    visible &= positions <= rows.place[..., None]
  if keys.ids is not None:
    visible &= rows.ids[..., None] == keys.ids[:, None]
  products = jax.nn.relu(layout.dot("bcid,bsd->bcis", rows.index, index))
  scores = layout.dot("bci,bcis->bcs", rows.weight, products)
  return jnp.where(visible, scores, -jnp.inf)


def map_query_chunks(
  function: Any,
  rows: Rows,
  numbers: int,
  size: int | None = None,
  start: int = 0,
) -> Any:
  """Applies `function` to C = `size` queries at a time.

  Args:
    function: maps C rows to their results.
    rows: all rows. Without a `place`, they get consecutive positions from `start` on.
    numbers: the number of floats that `function` needs per row, which determines C.
    size: C; None chooses it.
    start: the position of the first query.
  """
  batch, length = rows.index.shape[:2]
  if size is None:
    size = backend.rows_per_tile(4 * batch * numbers, length, least=64)
  if rows.place is None:
    positions = jnp.arange(start, start + length)[None]
    rows = rows._replace(place=jnp.broadcast_to(positions, (batch, length)))
  return chunk_map(function, size, rows)

"""Performer: linear attention through positive random features (FAVOR+).

Choromanski et al., Rethinking attention with Performers, arXiv:2009.14794.

The softmax kernel is an expectation over Gaussian ω of a product of positive
features, so with x̃ = √scale · x and M drawn rows ω_m

  exp(scale · q·k) ≈ Σ_m φ_m(q) φ_m(k),  φ_m(x) = exp(ω_m·x̃ − |x̃|²/2) / √M

and attention becomes a product with one M×V state instead of a T×S matrix:

  out_t = Σ_m φ_m(q_t) U_m / Σ_m φ_m(q_t) Z_m,
  U_m = Σ_s φ_m(k_s) v_s,  Z_m = Σ_s φ_m(k_s)

Stability without a leak. The features overflow, so they live as logarithms
ℓ_m(x) = log φ_m(x). The paper's code divides by one maximum over all keys and
adds an epsilon; in the causal form both let a future key change the past. Here
the state of every feature carries a log-scale c_m = max_s ℓ_m(k_s) over the
keys *seen so far* and is rescaled when it grows, as in online softmax:

  c'_m = max(c_m, max_s ℓ_m(k_s))
  U'_m = e^(c_m − c'_m) U_m + Σ_s e^(ℓ_m(k_s) − c'_m) v_s      (Z alike)

A query reads with b_t = max_m (ℓ_m(q_t) + c_m), so that the largest term of its
normaliser is at least 1; c and b cancel in the ratio, which therefore needs no
epsilon and no gradient through either.

The causal form walks chunks of C positions. Keys of earlier chunks are read
from the state; inside a chunk, key s has its own log-scale
κ_s = max_m ℓ_m(k_s), the scores

  A_ts = Σ_m e^(ℓ_m(q_t) − γ_t) e^(ℓ_m(k_s) − κ_s),  γ_t = max_m ℓ_m(q_t)

have the log-weights log A_ts + γ_t + κ_s, s ≤ t, and the two parts are joined
at the largest log-scale of both, so that here too the largest term of the
normaliser is 1. Nothing at t reads a key after t.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

from attention import arguments, plug

_CHUNK = 128
"""C: positions in cache at a time; the state is stored once per chunk for the
backward pass, so memory is T/C · M·V beside the arguments."""

_EMPTY = -1e30
"""Log-scale of a state that has seen nothing: finite, so that differences are
numbers, and so low that e^(_EMPTY - anything real) is 0."""

_NEGLIGIBLE = 1e-30
"""Scores A_ts below it count as 0: their share is out of float32's reach and
the gradient of their logarithm would overflow."""

_RELU_EPSILON = 1e-3
"""Added to ReLU features, as in the paper's code: keeps them positive."""

Kernel = Literal["softmax", "relu"]


def performer_attention(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
  *,
  projection: Float[Array, "M H"],
  kernel: Kernel = "softmax",
  mask: Bool[Array, "..."] | None = None,
  is_causal: bool = False,
  scale: float | None = None,
) -> Float[Array, "B T N V"]:
  """Softmax attention approximated by M random features, linear in length.

  out_t = Σ_s φ(q_t)·φ(k_s) v_s / Σ_s φ(q_t)·φ(k_s); see the head of the file.

  Args:
    query: `[B, T, N, H]`.
    key: `[B, S, K, H]`, N a multiple of K.
    value: `[B, S, K, V]`.
    projection: `[M, H]`, rows ω_m, as `orthogonal_features` draws them.
    kernel: 'softmax' for φ_m(x) = exp(ω_m·x̃ − |x̃|²/2)/√M, 'relu' for
      φ_m(x) = max(ω_m·x̃/√M, 0) + 0.001 (a kernel of its own, no approximation
      of softmax), x̃ = √scale · x.
    mask: key mask `[B, 1, 1, S]`, True = attend.
    is_causal: query t sees keys s ≤ t.
    scale: of the approximated logits, > 0; None is 1/√H.

  Returns:
    `[B, T, N, V]` in the dtype of `query`; features and state are float32.
    A query that sees no key gets zeros.

  Raises:
    ValueError: arguments do not fit, or the mask varies along queries.

  Cost: time (T·N + S·K)·M·(H+V), causal T·N·(M·(H+V) + C·(M+V)) with C = 128;
  memory beside the arguments M·(C+V) per head forward, T/C·M·V per head with
  gradients. Error against softmax falls as 1/√M and grows with exp(|q||k|).

  Where it departs from the paper's code: no epsilon in the softmax kernel and a
  running log-scale instead of a maximum over all keys.

  Paper: arXiv:2009.14794, sections 2.2–2.4.
  """
  arguments.check_qkv(query, key, value)
  head_dim = query.shape[-1]
  if projection.ndim != 2 or projection.shape[1] != head_dim:
    raise ValueError(
      f"projection: expected [M, {head_dim}] to go with query {query.shape}, "
      f"got {projection.shape}"
    )
  if kernel not in ("softmax", "relu"):
    raise ValueError(f"kernel: expected 'softmax' or 'relu', got {kernel!r}")
  scale = arguments.softmax_scale(scale, head_dim)
  if not isinstance(scale, jax.Array) and scale <= 0.0:
    raise ValueError(
      f"scale: expected > 0, for its root scales query and key, got {scale}"
    )
  keep = arguments.key_mask(
    mask,
    query,
    key,
    instead="random features never form the T×S matrix; use dense attention "
    "for such a mask, or is_causal=True for a causal one",
  )

  def log_features(x: Float[Array, "*A H"]) -> Float[Array, "*A M"]:
    return _log_features(x, projection, kernel, scale)

  walk = _causal if is_causal else _bidirectional
  return walk(query, key, value, keep, log_features).astype(query.dtype)


def orthogonal_features(
  key: Array, num_features: int, head_dim: int
) -> Float[Array, "M H"]:
  """Draws M random features whose directions are orthogonal in blocks of H.

  Rows of each block of H are orthogonal, uniformly rotated, and as long as
  independent Gaussian rows would be, so each row alone is N(0, 1): the estimate
  stays unbiased and its variance falls (paper, section 2.4 and appendix B.2).

  Args:
    key: a JAX random key.
    num_features: M ≥ 1.
    head_dim: H ≥ 1.

  Returns:
    `[M, H]` float32.

  Raises:
    ValueError: a size is below 1.
  """
  if num_features < 1 or head_dim < 1:
    raise ValueError(
      "num_features, head_dim: expected at least 1, got "
      f"{num_features} and {head_dim}"
    )
  directions_key, lengths_key = jax.random.split(key)
  num_blocks = -(-num_features // head_dim)
  blocks = jax.random.orthogonal(
    directions_key, head_dim, shape=(num_blocks,)
  ).reshape(num_blocks * head_dim, head_dim)[:num_features]
  gaussian = jax.random.normal(lengths_key, (num_features, head_dim))
  return blocks * jnp.linalg.norm(gaussian, axis=-1, keepdims=True)


def _log_features(
  x: Float[Array, "*A H"],
  projection: Float[Array, "M H"],
  kernel: Kernel,
  scale: float,
) -> Float[Array, "*A M"]:
  """ℓ(x) in float32, up to the factor 1/√M of the softmax kernel.

  That factor is common to numerator and normaliser, so it cancels.
  """
  x = x.astype(jnp.float32) * jnp.sqrt(jnp.float32(scale))
  projected = jnp.einsum("...H,MH->...M", x, projection.astype(jnp.float32))
  if kernel == "relu":
    projected = projected / jnp.sqrt(jnp.float32(projection.shape[0]))
    # Not `jax.nn.relu`: XLA's maximum may turn nan into 0 and so hide it.
    positive = jnp.where(projected < 0.0, 0.0, projected)
    return jnp.log(positive + _RELU_EPSILON)
  return projected - 0.5 * jnp.sum(x * x, axis=-1, keepdims=True)


class PerformerState(NamedTuple):
  """What all keys seen so far leave behind; also the decode cache.

  Attributes:
    log_scale: c `[B, K, M]`, the largest log-feature seen.
    value: U `[B, K, M, V]`, Σ_s e^(ℓ_m(k_s) − c_m) v_s.
    total: Z `[B, K, M]`, Σ_s e^(ℓ_m(k_s) − c_m).
  """

  log_scale: Float[Array, "B K M"]
  value: Float[Array, "B K M V"]
  total: Float[Array, "B K M"]


def _empty_state(
  batch: int, num_kv_heads: int, num_features: int, value_dim: int
) -> PerformerState:
  shape = (batch, num_kv_heads, num_features)
  return PerformerState(
    log_scale=jnp.full(shape, _EMPTY, jnp.float32),
    value=jnp.zeros((*shape, value_dim), jnp.float32),
    total=jnp.zeros(shape, jnp.float32),
  )


def _absorb(
  state: PerformerState,
  log_key: Float[Array, "B K C M"],
  value: Float[Array, "B K C V"],
  keep: Bool[Array, "#B 1 C 1"],
) -> PerformerState:
  """Adds C keys to the state."""
  log_key = jnp.where(keep, log_key, _EMPTY)
  log_scale = jax.lax.stop_gradient(
    jnp.maximum(state.log_scale, jnp.max(log_key, axis=2))
  )
  features = jnp.where(keep, jnp.exp(log_key - log_scale[:, :, None]), 0.0)
  decay = jnp.exp(state.log_scale - log_scale)
  return PerformerState(
    log_scale=log_scale,
    value=state.value * decay[..., None]
    + jnp.einsum("BKCM,BKCV->BKMV", features, value),
    total=state.total * decay + jnp.sum(features, axis=2),
  )


def _read(
  state: PerformerState, log_query: Float[Array, "B K Q M"]
) -> tuple[
  Float[Array, "B K Q V"], Float[Array, "B K Q"], Float[Array, "B K Q"]
]:
  """Reads the state: numerator and normaliser, both up to e^b, and b."""
  log_terms = log_query + state.log_scale[:, :, None]
  log_scale = jax.lax.stop_gradient(jnp.max(log_terms, axis=-1))
  terms = jnp.exp(log_terms - log_scale[..., None])
  numerator = jnp.einsum("BKQM,BKMV->BKQV", terms, state.value)
  normaliser = jnp.einsum("BKQM,BKM->BKQ", terms, state.total)
  return numerator, normaliser, log_scale


def _ratio(
  numerator: Float[Array, "B K Q V"], normaliser: Float[Array, "B K Q"]
) -> Float[Array, "B K Q V"]:
  """Numerator / normaliser, zeros where a query saw nothing."""
  safe = jnp.where(normaliser == 0.0, 1.0, normaliser)
  return numerator / safe[..., None]


def _in_chunks(x: Shaped[Array, "B L ..."], length: int) -> Array:
  """`[B, L, …]` cut or padded to `length` in chunks: `[length/C, B, C, …]`."""
  x = x[:, :length]
  widths = [(0, 0)] * x.ndim
  widths[1] = (0, length - x.shape[1])
  x = jnp.pad(x, widths)
  x = x.reshape(x.shape[0], length // _CHUNK, _CHUNK, *x.shape[2:])
  return jnp.moveaxis(x, 1, 0)


def _padded(length: int) -> int:
  return -(-length // _CHUNK) * _CHUNK


def _key_chunks(key, value, keep, length):
  """Keys, values and which of them count, in chunks; contents of others 0.

  Zeroing keeps whatever stands in padding (inf, nan) out of the products.
  """
  if keep is None:
    keep = jnp.ones(key.shape[:2], bool)
  key = jnp.where(keep[:, :, None, None], key, 0)
  value = jnp.where(keep[:, :, None, None], value, 0)
  return tuple(_in_chunks(x, length) for x in (key, value, keep))


def _rows(
  chunk: Float[Array, "B C N H"], num_kv_heads: int
) -> Float[Array, "B K Q H"]:
  return arguments.rows_by_key_head(chunk, num_kv_heads).astype(jnp.float32)


def _heads_first(x: Float[Array, "B C K D"]) -> Float[Array, "B K C D"]:
  return jnp.swapaxes(x, 1, 2).astype(jnp.float32)


def _ungroup(
  chunks: Float[Array, "I B K Q V"], query: Float[Array, "B T N H"]
) -> Float[Array, "B T N V"]:
  """Puts chunks of results back in the order of `query`."""
  batch, length, num_heads, _ = query.shape
  chunks = chunks.reshape(len(chunks), batch, num_heads, _CHUNK, -1)
  out = jnp.einsum("IBNCV->BICNV", chunks)
  return out.reshape(batch, len(chunks) * _CHUNK, num_heads, -1)[:, :length]


def _bidirectional(query, key, value, keep, log_features):
  """One pass over the keys fills the state, one over the queries reads it."""
  num_kv_heads = key.shape[2]

  @jax.checkpoint
  def absorb(state, chunk):
    key, value, keep = chunk
    return _absorb(
      state,
      log_features(_heads_first(key)),
      _heads_first(value),
      keep[:, None, :, None],
    ), None

  @jax.checkpoint
  def read(chunk):
    log_query = log_features(_rows(chunk, num_kv_heads))
    numerator, normaliser, _ = _read(state, log_query)
    return _ratio(numerator, normaliser)

  num_features = jax.eval_shape(log_features, key).shape[-1]
  state, _ = jax.lax.scan(
    absorb,
    _empty_state(key.shape[0], num_kv_heads, num_features, value.shape[-1]),
    _key_chunks(key, value, keep, _padded(key.shape[1])),
  )
  chunks = _in_chunks(query, _padded(query.shape[1]))
  return _ungroup(jax.lax.map(read, chunks), query)


def _causal(query, key, value, keep, log_features):
  """Walks chunks: reads the state of earlier ones, then adds its own keys."""
  num_kv_heads = key.shape[2]

  @jax.checkpoint
  def step(state, chunk):
    query, key, value, keep = chunk
    log_query = log_features(_rows(query, num_kv_heads))
    log_key = log_features(_heads_first(key))
    value = _heads_first(value)
    keep = keep[:, None, :, None]
    out = _read_causally(state, log_query, log_key, value, keep)
    return _absorb(state, log_key, value, keep), out

  num_features = jax.eval_shape(log_features, key).shape[-1]
  length = _padded(query.shape[1])
  _, out = jax.lax.scan(
    step,
    _empty_state(key.shape[0], num_kv_heads, num_features, value.shape[-1]),
    # Keys past the last query are never seen, missing ones count as masked.
    (_in_chunks(query, length), *_key_chunks(key, value, keep, length)),
  )
  return _ungroup(out, query)


def _read_causally(
  state: PerformerState,
  log_query: Float[Array, "B K Q M"],
  log_key: Float[Array, "B K C M"],
  value: Float[Array, "B K C V"],
  keep: Bool[Array, "#B 1 C 1"],
) -> Float[Array, "B K Q V"]:
  """Joins the state of earlier chunks with the keys s ≤ t of this one."""
  earlier, earlier_total, earlier_scale = _read(state, log_query)

  key_scale = jax.lax.stop_gradient(
    jnp.max(jnp.where(keep, log_key, _EMPTY), axis=-1)
  )
  query_scale = jax.lax.stop_gradient(jnp.max(log_query, axis=-1))
  scores = jnp.einsum(
    "BKQM,BKCM->BKQC",
    jnp.exp(log_query - query_scale[..., None]),
    jnp.exp(jnp.where(keep, log_key - key_scale[..., None], _EMPTY)),
  )
  # Query row j·C + t of the Q = J·C rows stands at position t of the chunk.
  past = jnp.tri(_CHUNK, dtype=bool)
  past = jnp.tile(past, (log_query.shape[2] // _CHUNK, 1))
  # Not `scores > …`: a nan must not be hidden.
  seen = past[None, None] & ~(scores <= _NEGLIGIBLE)
  log_weights = jnp.where(
    seen,
    jnp.log(jnp.where(seen, scores, 1.0))
    + (query_scale[..., None] + key_scale[:, :, None]),
    _EMPTY,
  )
  joint_scale = jax.lax.stop_gradient(
    jnp.maximum(earlier_scale, jnp.max(log_weights, axis=-1))
  )
  weights = jnp.where(seen, jnp.exp(log_weights - joint_scale[..., None]), 0.0)
  decay = jnp.exp(earlier_scale - joint_scale)
  return _ratio(
    earlier * decay[..., None] + jnp.einsum("BKQC,BKCV->BKQV", weights, value),
    earlier_total * decay + jnp.sum(weights, axis=-1),
  )


def init_performer_cache(
  variables: plug.Variables,
  batch: int,
  max_length: int,
  dims: plug.Dims,
  dtype: Any,
) -> PerformerState:
  """An empty state: B·K·M·(H+2) float32 numbers whatever `max_length` is."""
  # Sums over a whole sequence are kept in float32 whatever the activations are.
  del max_length, dtype
  num_features = variables["constants"]["projection"].shape[0]
  return _empty_state(batch, dims.num_kv_heads, num_features, dims.head_dim)


def performer(
  num_features: int = 256, kernel: Kernel = "softmax"
) -> plug.Attention:
  """The plug of `performer_attention`.

  Args:
    num_features: M.
    kernel: 'softmax' or 'relu'.

  Returns:
    An `Attention` whose features stand in `constants`, drawn by `init`.

  Raises:
    ValueError: `num_features` < 1 or an unknown kernel.
  """
  if num_features < 1:
    raise ValueError(f"num_features: expected at least 1, got {num_features}")
  if kernel not in ("softmax", "relu"):
    raise ValueError(f"kernel: expected 'softmax' or 'relu', got {kernel!r}")

  def init(key, dims):
    projection = orthogonal_features(key, num_features, dims.head_dim)
    return {"constants": {"projection": projection}}

  def apply(variables, query, key, value, **call):
    call = arguments.accepted_options("performer", performer_attention, call)
    return performer_attention(
      query,
      key,
      value,
      projection=variables["constants"]["projection"],
      kernel=kernel,
      **call,
    )

  def decode(variables, cache, query, key, value):
    """One position: M·(H+V) operations a head whatever the position."""
    projection = variables["constants"]["projection"]
    scale = arguments.softmax_scale(None, query.shape[-1])
    log_query, log_key = (
      _log_features(x, projection, kernel, scale)
      for x in (_rows(query, key.shape[2]), _heads_first(key))
    )
    state = _absorb(
      cache, log_key, _heads_first(value), jnp.ones((1, 1, 1, 1), bool)
    )
    numerator, normaliser, _ = _read(state, log_query)
    out = _ratio(numerator, normaliser)
    out = arguments.from_rows(out, query.shape[2]).astype(query.dtype)
    return out, state

  return plug.Attention(
    init=init,
    apply=apply,
    init_cache=init_performer_cache,
    decode=decode,
    supports=frozenset({"causal", "cross", "rowwise", "mask", "decode"}),
  )

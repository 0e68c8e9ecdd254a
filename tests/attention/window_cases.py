"""Sliding-window attention from its definition, in float64, and random calls."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from attention import attention_weights, sliding_window_attention
from attention.definitions.sliding_window import attended_pairs

# The reference: who sees whom by the definition, then dense softmax and its
# derivative in float64.


def attend_densely(qkv, visible, cotangent, scale=None, factor=1.0):
  """Output and gradients of masked softmax attention, `[B, N, T, S]` whole.

  `factor` multiplies the weights, as dropout does.
  """
  query, key, value = (np.asarray(x, np.float64) for x in qkv)
  group = query.shape[2] // key.shape[2]
  keys, values = (np.repeat(x, group, axis=2) for x in (key, value))
  scale = query.shape[-1] ** -0.5 if scale is None else scale
  logits = np.einsum("btnh,bsnh->bnts", query, keys) * scale
  logits = np.where(visible, logits, -np.inf)
  top = np.max(logits, axis=-1, keepdims=True, initial=-1e300)
  weights = np.exp(logits - top)
  weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-300)
  dropped = weights * factor
  out = np.einsum("bnts,bsnv->btnv", dropped, values)
  d_weights = np.einsum("btnv,bsnv->bnts", cotangent, values) * factor
  mean = (weights * d_weights).sum(-1, keepdims=True)
  d_logits = weights * (d_weights - mean) * scale

  def per_key_head(x):
    return x.reshape(*key.shape[:3], group, -1).sum(3)

  return out, (
    np.einsum("bnts,bsnh->btnh", d_logits, keys),
    per_key_head(np.einsum("bnts,btnh->bsnh", d_logits, query)),
    per_key_head(np.einsum("bnts,btnv->bsnv", dropped, cotangent)),
  )


def reference(qkv, cotangent, *, global_qkv=None, scale=None, **options):
  """Output and gradients with respect to qkv and global_qkv."""
  shape = (*np.shape(qkv[0])[:3:2], *np.shape(qkv[0])[1:2], qkv[1].shape[1])
  visible = attended_pairs(*qkv[:2], **options)
  cotangent = np.asarray(cotangent, np.float64)
  if global_qkv is None:
    return attend_densely(qkv, visible, cotangent, scale)
  is_token = np.zeros(shape[::2], bool)
  for b, tokens in enumerate(options["global_indices"]):
    is_token[b, tokens[tokens >= 0]] = True
  rows = is_token[:, :, None, None]
  out, grads = attend_densely(qkv, visible, np.where(rows, 0, cotangent), scale)
  out_g, grads_g = attend_densely(
    global_qkv, visible, np.where(rows, cotangent, 0), scale
  )
  return np.where(rows, out_g, out), grads + grads_g


def draw_inputs(
  length, source=None, heads=4, kv_heads=2, batch=2, dtype=np.float32, seed=0
):
  """Query, key, value and a cotangent; values are wider than keys."""
  rng = np.random.default_rng(seed)
  source = length if source is None else source
  shapes = (
    (batch, length, heads, 4),
    (batch, source, kv_heads, 4),
    (batch, source, kv_heads, 5),
    (batch, length, heads, 5),
  )
  return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def draw_options(names, length, source, seed=1):
  """The options that are named, as NumPy arrays for the reference."""
  rng = np.random.default_rng(seed)
  options = {}
  for name in names.split():
    if name == "causal":
      options["is_causal"] = True
    elif name == "mask":
      options["mask"] = rng.random((2, 1, 1, source)) < 0.6
    elif name == "segments":
      longest = np.sort(rng.integers(3, size=(2, max(length, source))), axis=1)
      options["query_segment_ids"] = longest[:, :length]
      options["key_segment_ids"] = longest[:, :source]
    elif name == "global":
      indices = rng.integers(-1, length, size=(2, 5))
      indices[:, 1] = indices[:, 0]  # twice the same
      indices[:, 2] = -1
      options["global_indices"] = indices
    elif name == "scale":
      options["scale"] = 0.3
  return options


def to_jax(options):
  return {
    name: jnp.asarray(x) if isinstance(x, np.ndarray) else x
    for name, x in options.items()
  }


@functools.partial(jax.jit, static_argnames="static")
def _pulled(qkv, global_qkv, cotangent, arrays, static):
  def attend(qkv, global_qkv):
    options = {**arrays, **dict(static), "global_qkv": global_qkv}
    return sliding_window_attention(*qkv, **options)

  out, pull = jax.vjp(attend, qkv, global_qkv)
  return out, pull(cotangent)


def forward_and_gradients(qkv, cotangent, global_qkv=None, **options):
  """Output and gradients, as `reference`; compiled once for shapes and sizes."""
  is_array = {n: isinstance(x, np.ndarray) for n, x in options.items()}
  arrays = {n: x for n, x in options.items() if is_array[n]}
  static = tuple((n, x) for n, x in options.items() if not is_array[n])
  out, (grads, grads_g) = _pulled(
    tuple(qkv), global_qkv, cotangent, arrays, static
  )
  return out, tuple(grads) + tuple(grads_g or ())


def largest(*arrays):
  """The largest number of all, at least 1e-3."""
  return max(1e-3, *(np.max(np.abs(x), initial=0.0) for x in arrays))


def assert_close(got, want, tolerance, scale=None):
  """Relative to `scale`, or to the largest number of the array."""
  assert got.shape == want.shape
  scale = largest(want) if scale is None else scale
  error = np.max(np.abs(np.asarray(got, np.float64) - want), initial=0.0)
  assert error <= tolerance * scale


def check_definition(qkv, cotangent, tolerance=1e-5, **options):
  got, got_grads = forward_and_gradients(qkv, cotangent, **options)
  want, want_grads = reference(qkv, cotangent, **options)
  assert_close(got, want, tolerance)
  assert len(got_grads) == len(want_grads)
  # All by one scale: where a query sees one key alone, the gradients to query
  # and key are 0 as differences of numbers that are not.
  scale = largest(*want_grads)
  for got_grad, want_grad in zip(got_grads, want_grads, strict=True):
    assert_close(got_grad, want_grad, tolerance, scale)


def check_dropout(attend, qkv, cotangent, scale=None, rate=0.25):
  """Weights are 0 or 1/(1 - rate) of `attend`'s; gradients agree on which.

  Returns the kept ones, `[B, N, T, S]`.
  """
  query, key, _ = qkv
  rng = jax.random.key(3)
  dropping = functools.partial(attend, dropout_rate=rate, dropout_rng=rng)
  weights, exact = map(
    np.asarray,
    jax.jit(
      lambda *qk: [attention_weights(f, *qk) for f in (dropping, attend)]
    )(query, key),
  )
  kept, seen = weights != 0, exact != 0
  np.testing.assert_allclose(weights[kept], exact[kept] / (1 - rate), rtol=2e-5)
  spread = np.sqrt(rate * (1 - rate) / seen.sum())
  assert abs(kept[seen].mean() - (1 - rate)) < 4 * spread

  @jax.jit
  def forward_and_gradients(*qkv):
    out, pull = jax.vjp(dropping, *qkv)
    return out, *pull(cotangent)

  want, want_grads = attend_densely(
    qkv,
    seen,
    np.asarray(cotangent, np.float64),
    scale,
    factor=kept / (1 - rate),
  )
  got = forward_and_gradients(*qkv)
  for x, y in zip(got, (want, *want_grads), strict=True):
    assert_close(x, y, 1e-5)

  none = functools.partial(attend, dropout_rate=0.0, dropout_rng=rng)
  assert "random_" in str(jax.make_jaxpr(dropping)(*qkv))
  assert "random_" not in str(jax.make_jaxpr(none)(*qkv))
  return kept


ALL = "mask segments global scale"

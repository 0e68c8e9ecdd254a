"""What only dense attention has: bias as mask, blocks of rows, its log-sum-exp."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import (
  attention_weights,
  definitions,
  dense_attention,
  differential_attention,
  flash_attention,
  latent_attention,
  multiplicative_attention,
)
from attention.softmax.logits import Logits
from attention.softmax.visible import (
  causal,
  key_mask,
  mask_mod,
  pair_mask,
  window,
)
from attention.testing import Case, assert_close
from tests.attention.calls import (
  assert_dropout,
  assert_equal,
  draw,
  normal,
  pulled,
  random_mask,
)
from tests.refusals import assert_refused


def pair_mask_with_an_empty_row():
  mask = np.array(random_mask(2, 4, 13, 13, share=0.5))
  mask[0, 0, 2] = False
  return jnp.asarray(mask)


def test_a_bias_of_minus_infinity_is_a_mask():
  qkv, mask = draw(13), pair_mask_with_an_empty_row()
  bias = jnp.asarray(np.where(mask, 0.0, -np.inf), jnp.float32)
  got, gradients = pulled(functools.partial(dense_attention, bias=bias), *qkv)
  assert not got[0, 2, 0].any()
  assert_close(got, definitions.dense_attention(*qkv, mask=mask), 1e-6)
  assert all(np.isfinite(x).all() for x in gradients)


def test_a_nan_is_not_hidden():
  """Training stops at what is not finite, so it has to come through."""
  attend = jax.jit(dense_attention, static_argnames="is_causal")
  for is_causal in (False, True):
    for i in range(3):
      arrays = [np.array(x) for x in draw(13)]
      arrays[i][1, 5] = np.nan
      out = np.asarray(attend(*arrays, is_causal=is_causal))
      assert np.isnan(out[1, 5]).all()
      assert np.isfinite(out[0]).all()


def test_dropout_drops_a_share_of_the_weights_and_rescales_the_others():
  kept = assert_dropout(dense_attention, *draw(13, batch=8))
  # Each example, head and query draws its own.
  assert len(np.unique(kept.reshape(-1, 13), axis=0)) > 300


def test_what_does_not_fit_is_refused():
  (x,) = draw(13)[:1]
  attend = functools.partial(dense_attention, x, x, x)
  unused = jax.eval_shape(lambda: attend(dropout_rng=jax.random.key(0)))
  assert unused.shape == x.shape
  assert_refused(
    attend,
    ("dropout_rng", {"dropout_rate": 0.1}),
    *({"dropout_rate": rate} for rate in (-0.1, 1.0, float("nan"))),
    {"bias": jnp.zeros((2, 3, 13, 13))},
  )


@pytest.mark.parametrize(
  "names",
  [
    ("full_mask",),
    ("mask", "bias"),
    ("bias", "causal"),
    ("segments", "full_mask", "relative"),
  ],
  ids="-".join,
)
def test_blocks_of_rows_change_no_value_and_no_gradient(names):
  """With a bias of heads and keys, and a mask of queries, in the last two."""
  qkv, options = Case(names, source_length=11, value_dim=5).draw()
  if "causal" in names:
    options["bias"] = options["bias"][:, :, :1]
  if "segments" in names:
    options["mask"] = options["mask"][:, :1, :, :1]
  tables = "bias", "relative_bias", "relative_keys", "relative_queries"
  trained = {x: options.pop(x) for x in tables if x in options}

  def attend(qkv, trained, block_size):
    call = {**trained, **options, "block_size": block_size}
    out, lse = dense_attention(*qkv, **call, return_lse=True)
    return out, jnp.exp(lse)

  got, expected = (
    pulled(functools.partial(attend, block_size=x), qkv, trained)
    for x in (4, None)
  )
  assert_equal(got, expected, 1e-6)


def test_blocks_of_rows_keep_higher_derivatives():
  query, key, value = draw(13)

  @functools.partial(jax.jit, static_argnums=1)
  def curvature(query, block_size):
    def total(x):
      out = dense_attention(x, key, value, block_size=block_size)
      return (out**2).sum()

    slope = jax.grad(total)
    forward = jax.jvp(slope, (query,), (jnp.ones_like(query),))[1]
    return forward, jax.grad(lambda x: (slope(x) ** 2).sum())(query)

  assert_equal(curvature(query, 4), curvature(query, None), 1e-5)


def test_blocks_of_rows_keep_dropout():
  """Each block has a draw of its own, and the backward draws it again."""
  query, key, value = draw(13)
  dropout = {"dropout_rate": 0.5, "dropout_rng": jax.random.key(0)}
  attend = functools.partial(dense_attention, block_size=4, **dropout)
  weights = jax.jit(functools.partial(attention_weights, attend))
  kept = np.asarray(weights(0 * query, 0 * key)) > 0.0
  assert 0.4 < kept.mean() < 0.6
  assert not (kept[:, :, :4] == kept[:, :, 4:8]).all()

  run = jax.jit(jax.value_and_grad(lambda x: attend(x, key, value).sum()))
  (tangent,) = map(np.asarray, normal(query.shape, seed=1))
  _, slope = run(query)
  step = np.float32(1e-2)
  ahead, behind = (run(query + s * tangent)[0] for s in (step, -step))
  expected = (ahead - behind) / (2 * step)
  np.testing.assert_allclose(np.sum(slope * tangent), expected, rtol=2e-2)


@pytest.mark.parametrize("shape", [None, (4,), (2, 13, 4)])
def test_the_log_sum_exp_and_its_gradient_are_those_of_flash(shape):
  """Also of a row that sees nothing."""
  qkv, mask = draw(13), pair_mask_with_an_empty_row()
  with_sinks = shape is not None
  sinks = ()
  if shape is not None:
    sinks = (np.arange(np.prod(shape), dtype=np.float32) % 7 - 3,)
  qkv = *qkv, *(jnp.asarray(x.reshape(shape)) for x in sinks)

  def run(attend, query, key, value, sinks=None):
    call = {"mask": mask, "sinks": sinks, "return_lse": True, "block_size": 4}
    out, lse = attend(query, key, value, **call)
    assert lse.dtype == jnp.float32
    return out, jnp.where(lse > -jnp.inf, lse, 0.0), (lse == -jnp.inf) * 1.0

  got, expected = (
    pulled(functools.partial(run, f), *qkv)
    for f in (dense_attention, flash_attention)
  )
  assert with_sinks or got[0][2][0, 2, 0]
  for one, other in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
    np.testing.assert_allclose(one, other, atol=1e-5)


def test_third_derivatives_of_the_log_sum_exp_agree():
  query, key, value = draw(13)

  def loss(x):
    call = {"block_size": 4, "return_lse": True}
    return jnp.sum(dense_attention(x, key, value, **call)[1] ** 2)

  def along(function):
    return lambda x: jax.jvp(function, (x,), (query,))[1]

  forward = jax.jit(along(along(along(loss))))(query)
  reverse = jax.jit(jax.grad(along(along(loss))))(query)
  np.testing.assert_allclose(forward, np.sum(reverse * query), rtol=1e-4)


def test_visible_and_logits_say_what_options_say():
  qkv, keep = draw(13), np.arange(26).reshape(2, 13) % 5 > 0
  got = jax.jit(
    functools.partial(
      dense_attention,
      visible=causal() & window(4, None) & key_mask(jnp.asarray(keep)),
      logits=Logits(scale=0.3, soft_cap=3.0),
    )
  )(*qkv)
  near = np.tri(13, k=0, dtype=bool) & ~np.tri(13, k=-5, dtype=bool)
  mask = near[None, None] & keep[:, None, None]
  call = {"mask": mask, "scale": 0.3, "logits_soft_cap": 3.0}
  assert_close(got, definitions.dense_attention(*qkv, **call), 1e-6)


@pytest.mark.parametrize("name", ["differential", "latent", "multiplicative"])
def test_mechanisms_made_of_it_return_their_log_sum_exp(name):
  """What one Visible says, a mask says too, and the sums are those of dense."""
  query, key, value = draw(13)
  mask = random_mask(2, 4, 13, 13, share=0.5)

  def of_head(b, n, t, s):
    del b
    return s <= t + n

  n, t, s = np.ogrid[:4, :13, :13]
  whole = mask & (s <= t + n)[None]
  arrays, options, halves = (query, key, value), {}, [(query, key)]
  if name == "differential":
    options, function = {"weight": 1.0}, differential_attention
    halves = zip(*(np.split(x, 2, 3) for x in (query, key)), strict=True)
  elif name == "latent":
    kernel = np.tile(np.eye(8, dtype=np.float32)[:, None], (1, 4, 1))
    options = {"key_kernel": kernel, "value_kernel": kernel}
    function, arrays = latent_attention, (query, key[:, :, 0])
    halves = [(query, key[:, :, :1])]
  else:
    options, function = {"scale": 8**-0.5}, multiplicative_attention
  attend = jax.jit(functools.partial(function, **options))
  see = pair_mask(mask) & mask_mod(of_head)
  out, lse = jax.jit(
    lambda *x: function(*x, **options, visible=see, return_lse=True)
  )(*arrays)
  assert_close(out, attend(*arrays, mask=whole), 1e-6)
  lses = lse if isinstance(lse, tuple) else (lse,)
  for got, (q, k) in zip(lses, halves, strict=True):
    k = np.repeat(k, 4 // k.shape[2], axis=2)
    logits = np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(q.shape[-1])
    expected = np.logaddexp.reduce(np.where(whole, logits, -np.inf), axis=-1)
    np.testing.assert_allclose(got, np.moveaxis(expected, 1, 2), atol=1e-5)

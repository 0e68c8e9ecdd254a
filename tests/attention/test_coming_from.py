"""Every row of docs/howto/coming_from.md about a library that is installed here."""

import pathlib
import re

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import (
  as_attention_fn,
  attention_weights,
  causal,
  dense_attention,
  flash_attention,
  lengths,
  sliding_window_attention,
)
from attention.testing import assert_close
from tests.attention.calls import draw, random_mask

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs/howto/coming_from.md").read_text("utf-8")
Q, K, V = draw(9, batch=3)
ALL = draw(9, batch=3, kv_heads=4)
"""Of as many heads everywhere, which Flax wants."""
BIAS = draw(9, 9, batch=1, dim=9)[0].transpose(0, 2, 1, 3)
THEIRS, FLAX = jax.nn.dot_product_attention, nn.dot_product_attention
T, S = jnp.array([9, 4, 1]), jnp.array([3, 9, 7])
# One query sees nothing, and has a mean there.
MASK = random_mask(3, 4, 9, 9).at[:, :, 5].set(False)
SEES = np.asarray(MASK).any(-1).transpose(0, 2, 1)
KEYS = jnp.arange(9)[None] < S[:, None]


def seen(x):
  return np.asarray(x)[SEES]


def shared(x, kv_heads):
  """A mean of all values for each head, of the query that sees nothing."""
  value = jnp.repeat(x, 4 // kv_heads, axis=2)
  return jnp.mean(value, axis=1)


def row_of_nothing():
  both = THEIRS(Q, K, V, mask=MASK), flash_attention(Q, K, V, mask=MASK)
  assert_close(both[0][:, 5], shared(V, 2), 1e-5)
  assert not np.any(both[1][:, 5])
  return seen(both[0]), seen(both[1])


def log_sum_exp():
  def total(function, **options):
    return lambda q: function(q, K, V, **options)[1].sum()

  theirs = total(THEIRS, return_residual=True)
  ours = total(flash_attention, return_lse=True)
  assert not np.any(jax.grad(theirs)(Q))
  assert np.any(jax.grad(ours)(Q))
  return theirs(Q), ours(Q)


def two_dtypes():
  half = V.astype(jnp.bfloat16)
  with pytest.raises(Exception, match="dtype"):
    THEIRS(Q, K, half)
  return THEIRS(Q, K, half.astype("float32")), flash_attention(Q, K, half)


def flax_mask():
  mask = nn.make_attention_mask(jnp.arange(9)[None] < T[:, None], KEYS)
  theirs = FLAX(*ALL, mask=mask)
  assert_close(theirs[1, 5], shared(ALL[2], 4)[1], 1e-5)
  counts = np.arange(9) < np.asarray(T)[:, None]
  ours = flash_attention(*ALL, visible=lengths(T, S))
  assert mask.dtype == jnp.float32
  assert not np.any(ours[1, 5])
  by_mask = flash_attention(*ALL, mask=mask.astype(bool))
  assert_close(by_mask, ours, 1e-6)
  return np.asarray(theirs)[counts], np.asarray(ours)[counts]


def flax_module():
  def run(**options):
    module = nn.MultiHeadDotProductAttention(num_heads=4, **options)
    x = Q.reshape(3, 9, -1)
    return module.apply(module.init(jax.random.key(0), x), x)

  return run(), run(attention_fn=as_attention_fn(flash_attention))


def flax_dropout():
  """Examples and heads that are alike stay alike where they drop the same pairs."""
  qkv = [jnp.broadcast_to(x[:1, :, :1], x.shape) for x in ALL]
  key = jax.random.key(1)
  theirs = FLAX(*qkv, dropout_rate=0.5, dropout_rng=key)
  options = {"dropout_rate": 0.5}
  ours = dense_attention(*qkv, dropout_rng=jnp.reshape(key, (1, 1)), **options)
  apart = dense_attention(*qkv, dropout_rng=key, **options)
  for x, is_shared in ((theirs, True), (ours, True), (apart, False)):
    assert np.allclose(x, x[:1, :, :1], atol=1e-6) == is_shared
  return 0.0, 0.0


def flax_weights():
  theirs = nn.dot_product_attention_weights(*ALL[:2])
  return theirs, attention_weights(dense_attention, *ALL[:2])


NN = {
  "is_causal=True": lambda: (
    THEIRS(Q, K, V, is_causal=True),
    flash_attention(Q, K, V, is_causal=True),
  ),
  "bias=b": lambda: (
    THEIRS(Q, K, V, bias=BIAS, scale=0.3),
    flash_attention(Q, K, V, bias=BIAS, scale=0.3),
  ),
  "mask=m": row_of_nothing,
  "local_window_size=(l, r)": lambda: (
    THEIRS(Q, K, V, local_window_size=(2, 1)),
    sliding_window_attention(Q, K, V, window=(2, 1)),
  ),
  "query_seq_lengths=t, key_value_seq_lengths=s": lambda: (
    THEIRS(Q, K, V, query_seq_lengths=T, key_value_seq_lengths=S),
    flash_attention(Q, K, V, visible=lengths(T, S)),
  ),
  "return_residual=True": log_sum_exp,
  "arrays [T, N, H]": lambda: (
    THEIRS(Q[0], K[0], V[0]),
    as_attention_fn(flash_attention)(Q[0], K[0], V[0]),
  ),
  "arrays of two dtypes": two_dtypes,
}
LINEN = {
  "dot_product_attention(q, k, v)": lambda: (FLAX(*ALL), dense_attention(*ALL)),
  "mask=make_causal_mask(x)": lambda: (
    FLAX(*ALL, mask=nn.make_causal_mask(jnp.ones((3, 9)))),
    flash_attention(*ALL, visible=causal()),
  ),
  "mask=make_attention_mask(t, s)": flax_mask,
  "bias=b": lambda: (FLAX(*ALL, bias=BIAS), flash_attention(*ALL, bias=BIAS)),
  "attention_fn=… of a module": flax_module,
  "broadcast_dropout=True": flax_dropout,
  "sow_weights=True": flax_weights,
}


def rows(heading):
  """The first cells of the table below a heading."""
  text = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
  cells = re.findall(r"^\| (.+?) \|", text, re.M)[2:]
  return [cell.replace("`", "") for cell in cells]


@pytest.mark.parametrize(
  ("heading", "cases"), [("jax.nn", NN), ("Flax", LINEN)]
)
def test_every_row_is_a_case(heading, cases):
  assert rows(heading) == [*cases]


@pytest.mark.parametrize(
  "case",
  [
    pytest.param(case, id=f"{name}-{row}")
    for name, cases in (("jax", NN), ("flax", LINEN))
    for row, case in cases.items()
  ],
)
def test_a_row(case):
  theirs, ours = case()
  np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=1e-5)

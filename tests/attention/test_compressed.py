"""Compressed attention: its definition, transformers' layers, padding, the future."""

from functools import partial
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import (
  compressed,
  compressed_attention,
  compressed_entries,
  definitions,
)
from attention.mechanism import Dims
from tests.attention.calls import assert_defined
from tests.refusals import assert_refused

LENGTH, STRIDE, COUNT = 17, 3, 5
SIZES = {"window": 4, "stride": STRIDE}


def normal(rng, *shape):
  return rng.standard_normal(shape, np.float32)


def draw(seed=0):
  """Query, key and value, entries and their values, and the index arrays."""
  shapes = {
    "query": (LENGTH, 4, 6),
    "key": (LENGTH, 2, 6),
    "value": (LENGTH, 2, 5),
    "entries": (COUNT, 2, 6),
    "entry_values": (COUNT, 2, 5),
    "index_query": (LENGTH, 3, 8),
    "index_key": (COUNT, 8),
    "index_weight": (LENGTH, 3),
  }
  rng = np.random.default_rng(seed)
  x = {name: normal(rng, 2, *shape) for name, shape in shapes.items()}
  qkv = [x.pop(name) for name in ("query", "key", "value")]
  index = {name: x.pop(name) for name in [*x] if name.startswith("index")}
  return qkv, x, index


def mask_of(lengths, on_the_left=False):
  places = np.arange(LENGTH)[None]
  lengths = np.array(lengths)[:, None]
  shown = places >= LENGTH - lengths if on_the_left else places < lengths
  return shown[:, None, None]


@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize("left", [None, False, True])
def test_it_is_its_definition(is_sparse, left):
  """With and without a selection, sinks and padding."""
  qkv, entries, index = draw()
  call = {**index, "top_k": 2} if is_sparse else {}
  if left is not None:
    call["mask"] = mask_of((11, 17), left)

  def run(function):
    return lambda tree: function(*tree[0], **tree[1], **call, **SIZES)

  entries["sinks"] = normal(np.random.default_rng(1), 4)
  functions = compressed_attention, definitions.compressed_attention
  assert_defined(*map(run, functions), (qkv, entries))


@pytest.mark.parametrize("series", [1, 2, 3])
@pytest.mark.parametrize("left", [None, False, True])
def test_entries_are_their_definition(series, left):
  rng = np.random.default_rng(series)
  rows = normal(rng, 2, LENGTH, series, 2, 5)
  gates = 2 * normal(rng, 2, LENGTH, series, 2, 1)
  bias = normal(rng, STRIDE, series, 2, 1)
  keep = None if left is None else mask_of((11, 17), left)[:, 0, 0]
  expected = definitions.compressed_entries(rows, gates, bias, keep=keep)
  out = np.array(jax.jit(compressed_entries)(rows, gates, bias, keep=keep))
  if keep is not None:
    assert not expected[0, 3:].any()
    out[0, 3:] = 0.0  # Fewer positions than a window has are for no query.
  np.testing.assert_allclose(out, expected, atol=1e-6)


def witness(layer):
  """The vectors of a layer of transformers."""
  with np.load(pathlib.Path(__file__).with_name("compressed.npz")) as arrays:
    return {
      name.partition(".")[2]: arrays[name]
      for name in arrays
      if name.startswith(layer)
    }


@pytest.mark.parametrize(
  ("layer", "part", "series"),
  [("hca", "entries", 1), ("csa", "entries", 2), ("csa", "index", 2)],
)
def test_entries_of_transformers(layer, part, series):
  x = witness(layer)
  rows, gates, bias = (
    array.reshape(*array.shape[:-1], series, -1)
    for array in (x[f"{part}.{name}"] for name in ("rows", "gates", "bias"))
  )
  out = jax.jit(compressed_entries)(rows, gates, bias)
  np.testing.assert_allclose(out, x[f"{part}.pooled"], atol=1e-5)


@pytest.mark.parametrize("layer", ["hca", "csa"])
def test_attention_of_transformers(layer):
  x = witness(layer)
  length, stride = x["query"].shape[1], len(x["entries.bias"])
  key, entries = np.split(x["key"], [length], axis=1)
  call = {"entries": entries, "sinks": x["sinks"]}
  call |= {name: y for name, y in x.items() if name.startswith("index_")}
  sizes = {"window": 4, "stride": stride}
  sizes |= {"top_k": 2} if layer == "csa" else {}
  run = jax.jit(partial(compressed_attention, **sizes))
  out = run(x["query"], key, key, **call)
  np.testing.assert_allclose(out, x["out"], atol=1e-5)
  if layer == "csa":  # The selection matters.
    more = compressed_attention(
      x["query"], key, key, **call, **sizes | {"top_k": 3}
    )
    assert np.abs(more - x["out"]).max() > 0.01


@pytest.mark.parametrize("is_sparse", [False, True])
def test_padding_on_either_side(is_sparse):
  """From rows to results; masked positions may hold anything."""
  rng = np.random.default_rng(3)
  qkv, _, index = draw()
  rows, gates = normal(rng, 2, LENGTH, 2, 6), normal(rng, 2, LENGTH, 2, 6)
  bias = normal(rng, STRIDE, 2, 6)
  places = {"top_k": 2} if is_sparse else {}

  @jax.jit
  def run(qkv, rows, gates, index, mask):
    entries = compressed_entries(rows, gates, bias, keep=mask[:, 0, 0])
    entries = jnp.broadcast_to(entries[:, :, None], (2, COUNT, 2, 6))
    call = {}
    if is_sparse:
      call = {**index, "index_key": jnp.tile(entries[:, :, 0], 2)[..., :8]}
    query, key, _ = qkv
    return compressed_attention(
      query, key, key, entries=entries, mask=mask, **call, **places, **SIZES
    )

  arrays = *qkv, rows, gates, index["index_query"], index["index_weight"]

  def call(arrays, mask):
    *qkv, rows, gates, a, w = arrays
    index = {"index_query": a, "index_weight": w}
    return np.asarray(run(qkv, rows, gates, index, mask))

  assert_padded_alike(call, arrays)


def assert_padded_alike(call, arrays):
  """Padding of the second row on the left, of any content, is as on the right."""
  lengths = 17, 11
  pad = LENGTH - lengths[1]
  right = call(arrays, mask_of(lengths))
  for fill in (0.0, np.nan):
    moved = [np.array(x) for x in arrays]
    for x in moved:
      x[1] = np.roll(x[1], pad, axis=0)
      x[1, :pad] = fill
    out = call(moved, mask_of(lengths, on_the_left=True))
    np.testing.assert_allclose(out[0], right[0], atol=1e-6)
    np.testing.assert_allclose(out[1, pad:], right[1, :-pad], atol=1e-6)


def test_an_entry_counts_once_it_is_closed():
  qkv, call, _ = draw()
  run = jax.jit(partial(compressed_attention, **SIZES))
  before = run(*qkv, **call)
  entries = call["entries"].copy()
  entries[:, 2] += 1.0
  changed = np.abs(run(*qkv, **call | {"entries": entries}) - before) > 1e-6
  changed = changed.any(axis=(0, 2, 3))
  assert not changed[: 3 * STRIDE - 1].any()
  assert changed[3 * STRIDE - 1 :].all()


def test_fewer_positions_than_a_window():
  """No entries: a window, and a log-sum-exp with sinks."""
  qkv, _, _ = draw()
  short = [x[:, :2] for x in qkv]
  none = np.zeros((2, 0, 2, 6), np.float32)
  sinks = normal(np.random.default_rng(2), 4)
  call = {"entries": none, "entry_values": none[..., :5], "sinks": sinks}
  call |= SIZES
  out, lse = compressed_attention(*short, **call, return_lse=True)
  assert lse.shape == (2, 2, 4)
  expected = definitions.compressed_attention(*short, **call)
  np.testing.assert_allclose(out, expected, atol=1e-6)


def test_what_does_not_fit_is_told(unchecked):
  qkv, call, index = draw()
  assert_refused(
    lambda **changes: compressed_attention(*qkv, **call | SIZES | changes),
    {"is_causal": False},
    ("entries", {"stride": 4}),
    ("index_query", {"index_query": index["index_query"]}),
    ("index_query", {"top_k": 2}),
    ("mask", {"mask": np.ones((2, 1, LENGTH, LENGTH), bool)}),
  )


def sparse():
  """A mechanism with an indexer, variables, inputs, queries and gates."""
  mechanism = compressed(4, 3, top_k=2, num_index_heads=3, index_dim=6)
  variables = mechanism.init(jax.random.key(0), Dims(4, 4, 8, LENGTH, 10))
  rng = np.random.default_rng(4)
  inputs = normal(rng, 2, LENGTH, 10)
  query = normal(rng, 2, LENGTH, 4, 8)
  return mechanism, variables, inputs, query


def test_the_loss_is_that_of_entries():
  """A divergence of weights of entries, whose gradients reach the indexer alone."""
  mechanism, variables, inputs, query = sparse()
  mask = mask_of((11, 17), on_the_left=True)

  def loss(params, inputs, query):
    gates = mechanism.gates({"params": params}, inputs)
    call = {"is_causal": True, "mask": mask, **gates}
    return mechanism.loss({"params": params}, query, None, **call)

  gradients = jax.jit(jax.grad(loss, (0, 1, 2)))(
    variables["params"], inputs, query
  )
  reached = {name for name, x in gradients[0].items() if np.any(x)}
  assert reached == {x for x in variables["params"] if x.startswith("index")}
  assert not any(np.any(x) for x in gradients[1:])

  rows = np.arange(LENGTH)[None] - np.array([[6], [0]])
  p = {x: np.float64(y) for x, y in variables["params"].items()}

  def normed(x, scale=1.0):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale

  def entries(name):
    x, z = (
      np.tensordot(inputs, p[f"{name}{kind}_kernel"], 1)
      for kind in ("", "_gate")
    )
    bias, keep = p[f"{name}_bias"], mask[:, 0, 0]
    x = definitions.compressed_entries(x, z, bias, keep=keep)
    return normed(x, p[f"{name}_scale"])

  keys, index_key = entries("entry"), entries("index")
  index = (
    np.tensordot(inputs, p[f"index_{x}_kernel"], 1) for x in ("query", "weight")
  )
  a, w = index
  total = 0.0
  for b, t in zip(*np.nonzero(rows >= 0), strict=True):
    closed = (rows[b, t] + 1) // STRIDE
    scores = np.maximum(a[b, t] @ index_key[b, :closed].T, 0.0)
    scores = w[b, t] @ scores / np.sqrt(18)
    best = np.argsort(-scores, kind="stable")[:2]
    if len(best):
      logits = normed(query[b, t]) @ keys[b, best].T / np.sqrt(8)
      weights = np.exp(logits - logits.max(-1, keepdims=True))
      weights = (weights / weights.sum(-1, keepdims=True)).mean(0)
      log_q = scores[best] - np.log(np.exp(scores[best]).sum())
      total += (weights * (np.log(weights) - log_q)).sum()
  got = loss(variables["params"], inputs, query)
  np.testing.assert_allclose(got, total / 28, rtol=1e-5)


def test_positions_are_relative():
  """Rotations of queries, keys, entries and results by any first position."""
  mechanism, variables, inputs, query = sparse()
  gates = mechanism.gates(variables, inputs)
  run = jax.jit(partial(mechanism.apply, is_causal=True))

  def result(first):
    angle = (np.arange(LENGTH) + first)[None, :, None, None] * 0.3
    cos, sin = np.cos(angle), np.sin(angle)

    def turned(x):
      left, right = x[..., :1], x[..., 1:]
      return np.concatenate(
        [left * cos - right * sin, right * cos + left * sin], -1
      ).astype(np.float32)

    own = np.concatenate([query[..., :6], turned(query[..., 6:])], axis=-1)
    shared = turned(np.asarray(gates["shared_key"])[:, :, None])[:, :, 0]
    rotation = turned(np.asarray(gates["rotation"]))
    call = {**gates, "shared_key": shared, "rotation": rotation}
    return run(variables, own, None, None, **call)

  np.testing.assert_allclose(result(0), result(5), atol=1e-5)
  plain = run(variables, query, None, None, **gates)
  assert np.abs(result(0) - plain).max() > 0.01


def test_sizes_of_the_cache():
  mechanism, variables, *_ = sparse()
  dims = Dims(4, 4, 8, 100, 10)
  cache = mechanism.init_cache(variables, 2, 100, dims, jnp.bfloat16)
  assert cache.entries.shape == (2, 34, 8)
  assert cache.entries.dtype == jnp.bfloat16
  assert cache.index_key.shape == (2, 34, 6)
  assert cache.window.shape == (2, 4, 8)
  assert {x.shape[1] for x in cache.rows.values()} == {6}


def test_hyperparameters_that_do_not_fit_are_told(unchecked):
  assert_refused(
    compressed,
    ("top_k", {"stride": 0, "top_k": 3}),
    ("query_rank", {"query_rank": 3}),
    ("index_dim", {"index_dim": 16}),
    ("num_index_heads", {"num_index_heads": 2}),
    ("rotary_dim", {"rotary_dim": 3}),
  )
  for options, dims in (
    ({"rotary_dim": 10}, Dims(2, 2, 8, 9, 10)),
    ({"rotary_dim": 6, "top_k": 2, "index_dim": 4}, Dims(2, 2, 8, 9, 10)),
  ):
    with pytest.raises(ValueError, match="rotary_dim: expected at most"):
      compressed(**options).init(jax.random.key(0), dims)

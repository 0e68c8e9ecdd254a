"""Latent attention: both of its forms, its own values, its cache and its slot."""

import functools
from functools import partial
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import ATTENTIONS, Dims, definitions, latent, latent_attention
from models.attention_module_config import SlotConfig
from models.multi_head_attention import MultiHeadAttention
from tests.attention.calls import assert_defined
from tests.refusals import assert_refused

BATCH, HEADS, OWN, SHARED, RANK, VALUE = 2, 3, 4, 2, 7, 5


def arrays(length, seed=0):
  rng = np.random.default_rng(seed)

  def normal(*shape):
    return rng.standard_normal(shape, np.float32)

  return {
    "query": normal(BATCH, length, HEADS, OWN + SHARED),
    "latent": normal(BATCH, length, RANK),
    "key_kernel": normal(RANK, HEADS, OWN),
    "value_kernel": normal(RANK, HEADS, VALUE),
    "shared_key": normal(BATCH, length, SHARED),
  }


def options(length, seed=1):
  """A key mask that empties rows, and segments."""
  rng = np.random.default_rng(seed)
  ids = np.sort(rng.integers(0, 3, (BATCH, length)))
  mask = rng.random((BATCH, 1, 1, length)) < 0.7
  mask[..., 0] = False
  return {
    "is_causal": True,
    "mask": mask,
    "query_segment_ids": ids,
    "key_segment_ids": ids,
  }


@pytest.mark.parametrize("absorbed", [False, True])
@pytest.mark.parametrize(
  ("length", "more"),
  [
    (131, {}),
    (65, {"is_causal": True, "scale": 0.3}),
    (65, options(65)),
    (1, {"value": 1}),
    (13, {"value": HEADS}),
    (13, {"value": 1}),
  ],
)
def test_both_forms_are_the_definition(absorbed, length, more):
  """With values of the caller, of some key heads, and without a shared key."""
  given, more = arrays(length), dict(more)
  if kv_heads := more.pop("value", 0):
    shape = BATCH, length, kv_heads, 6
    given["value"] = np.random.default_rng(3).standard_normal(shape, np.float32)
    given.pop("shared_key")
    given["query"] = given["query"][..., :OWN]
  assert_defined(
    lambda given: latent_attention(**given, **more, absorbed=absorbed),
    lambda given: definitions.latent_attention(**given, **more),
    given,
    tolerance=2e-5,
  )


def test_what_does_not_fit_is_told(unchecked):
  given = arrays(5)

  def call(**axes):
    ((name, axis),) = axes.items()
    x = np.take(given[name], [0], axis=axis)
    latent_attention(**given | {name: x[0] if axis == 0 else x})

  assert_refused(
    call,
    {"query": 0},
    {"latent": 0},
    {"key_kernel": 0},
    {"value_kernel": 1},
    {"shared_key": 1},
    ("key_kernel", {"shared_key": 2}),
  )


def record(features=24, **hyperparameters):
  mechanism = latent(**hyperparameters)
  dims = Dims(HEADS, HEADS, 12, 16, features)
  init = jax.jit(lambda key: mechanism.init(key, dims))
  return mechanism, dims, init(jax.random.key(0))


def test_sizes_are_the_papers():
  """R = 4·C and P = H / 3; the paper has H = 192, C = 128, P = 64, R = 512."""
  mechanism = latent()
  dims = Dims(2, 2, 192, 16, 10)
  shapes = jax.eval_shape(lambda: mechanism.init(jax.random.key(0), dims))
  found = {name: x.shape for name, x in shapes["params"].items()}
  assert found == {
    "down_kernel": (10, 512 + 64),
    "norm_scale": (512,),
    "key_kernel": (512, 2, 128),
    "value_kernel": (512, 2, 192),
  }


def test_the_cache_has_the_latent_numbers_alone():
  mechanism, dims, variables = record(rank=6, shared_dim=4)
  cache = mechanism.init_cache(variables, 2, 10, dims, jnp.float32)
  assert cache.latent.shape == (2, 10, 6)
  assert cache.shared_key.shape == (2, 10, 4)
  assert sum(x.size for x in jax.tree.leaves(cache)) == 2 * 10 * (6 + 4) + 2


def test_the_record_makes_its_own_keys():
  mechanism, dims, variables = record(rank=6, shared_dim=4)
  query = jnp.ones((2, 9, HEADS, 12))
  gates = mechanism.gates(variables, jnp.ones((2, 9, dims.features)))
  apply = functools.partial(mechanism.apply, variables, query, value=None)
  assert_refused(lambda key: apply(key=key, **gates), {"key": query})


@functools.cache
def slot(**choices):
  dims = Dims(HEADS, HEADS, 12, 16, 24)
  module = MultiHeadAttention(
    latent(rank=6, shared_dim=4),
    dims,
    features=24,
    rotary=True,
    config=SlotConfig(**choices),
  )
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.standard_normal((2, 11, 24), np.float32))
  positions = np.arange(11)[None]
  variables = jax.jit(module.init)(jax.random.key(0), x, positions=positions)
  return module, variables, x, positions


def test_the_slot_projects_queries_alone():
  _, variables, _, _ = slot()
  assert set(variables["params"]) == {"query", "out", "attention"}


def test_the_slot_decodes_what_it_computes():
  module, variables, x, positions = slot(
    query_key_norm="rms", short_convolution=True
  )

  @partial(jax.jit, static_argnames="method")
  def run(variables, *arrays, method):
    return module.apply(variables, *arrays, method=method, mutable=["cache"])

  call = {"positions": positions, "is_causal": True}
  expected = np.asarray(
    jax.jit(lambda x: module.apply(variables, x, **call))(x)
  )
  _, state = module.apply(variables, 2, 16, method="start", mutable=["cache"])
  prompt = x[:, :6], positions[:, :6], np.array([6, 4])
  out, state = run({**variables, **state}, *prompt, method="prefill")
  np.testing.assert_allclose(out[0], expected[0, :6], atol=1e-5)
  for step in range(5):
    at = np.array([6, 4]) + step
    now = np.take_along_axis(np.asarray(x), at[:, None, None], axis=1)
    out, state = run({**variables, **state}, now, at[:, None], method="decode")
    wanted = expected[np.arange(2), at]
    np.testing.assert_allclose(out[:, 0], wanted, atol=1e-5)


def test_only_distances_count_with_rotary_positions():
  module, variables, x, positions = slot()
  apply = jax.jit(partial(module.apply, is_causal=True))
  one, other, turned = (
    apply(variables, x, positions=at)
    for at in (positions, positions + 5, 2 * positions)
  )
  np.testing.assert_allclose(one, other, atol=1e-4)
  assert np.abs(one - turned).max() > 1e-2


def test_rotary_positions_need_pairs():
  module, _, x, positions = slot()
  module = module.clone(attention=ATTENTIONS["latent"](shared_dim=3))
  with pytest.raises(
    ValueError, match=r"position: rotary rotates pairs.* got 3"
  ):
    jax.eval_shape(
      partial(module.init, positions=positions), jax.random.key(0), x
    )


def test_it_is_deepseeks_layer():
  """Values and gradients of transformers' code, expanded there and here."""
  found = np.load(pathlib.Path(__file__).parent / "latent" / "deepseek.npz")
  module, _, _, positions = slot()
  names = ("down_kernel", "norm_scale", "key_kernel", "value_kernel")
  variables = {
    "params": {
      "query": {"kernel": found["query"]},
      "out": {"kernel": found["output"]},
      "attention": {name: found[name] for name in names},
    }
  }
  variables = jax.tree.map(np.float32, variables)

  apply = partial(module.apply, positions=positions, is_causal=True)

  @jax.jit
  def pulled(inputs, cotangent):
    out, pullback = jax.vjp(partial(apply, variables), inputs)
    return out, pullback(cotangent)[0]

  arrays = np.float32(found["inputs"]), np.float32(found["cotangent"])
  out, gradient = pulled(*arrays)
  np.testing.assert_allclose(out, found["out"], atol=5e-6)
  np.testing.assert_allclose(gradient, found["gradient"], atol=1e-5)

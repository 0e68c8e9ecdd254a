"""Latent attention: both of its forms, its own values, its cache and its slot."""

import functools
from functools import partial
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import (
  ATTENTIONS,
  Dims,
  attention_weights,
  definitions,
  latent,
  latent_attention,
)
from models.attention_module_config import SlotConfig
from models.multi_head_attention import MultiHeadAttention
from tests.attention.calls import assert_refused, in_float64

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


call = jax.jit(latent_attention, static_argnames=("is_causal", "absorbed"))
both_forms = pytest.mark.parametrize("absorbed", [False, True])


@both_forms
def test_both_forms_are_the_definition(absorbed):
  given = arrays(131)
  for more in ({}, {"is_causal": True, "scale": 0.3}, options(131)):
    found = call(**given, absorbed=absorbed, **more)
    expected = definitions.latent_attention(**given, **more)
    np.testing.assert_allclose(found, expected, atol=2e-5)


@both_forms
def test_values_of_the_caller_and_no_shared_key(absorbed):
  """Of one position, which is the shortest sequence, as well."""
  for length in (1, 13):
    given = arrays(length)
    rng = np.random.default_rng(3)
    for kv_heads in (1, HEADS) if length > 1 else ():
      value = rng.standard_normal((BATCH, length, kv_heads, 6), np.float32)
      found = call(**given, value=value, absorbed=absorbed)
      expected = definitions.latent_attention(**given, value=value)
      np.testing.assert_allclose(found, expected, atol=2e-5)
    given.pop("shared_key")
    given["query"] = given["query"][..., :OWN]
    found = call(**given, absorbed=absorbed)
    expected = definitions.latent_attention(**given)
    np.testing.assert_allclose(found, expected, atol=2e-5)


def naive(given, mask):
  """Differentiable in float64."""
  key = jnp.einsum("bsr,rnc->bsnc", given["latent"], given["key_kernel"])
  shape = (*key.shape[:3], SHARED)
  shared = jnp.broadcast_to(given["shared_key"][:, :, None], shape)
  key = jnp.concatenate([key, shared], axis=3)
  value = jnp.einsum("bsr,rnv->bsnv", given["latent"], given["value_kernel"])
  logits = jnp.einsum("btnh,bsnh->bnts", given["query"], key)
  logits = jnp.where(mask, logits * (OWN + SHARED) ** -0.5, -1e30)
  weights = jnp.where(mask, jax.nn.softmax(logits, axis=-1), 0.0)
  return jnp.einsum("bnts,bsnv->btnv", weights, value)


def test_all_gradients():
  length = 65
  given, more = arrays(length), options(length)
  ids = more["query_segment_ids"]
  mask = more["mask"] & np.tri(length, dtype=bool)[None, None]
  mask = mask & (ids[:, :, None] == ids[:, None, :])[:, None]
  of_out = np.random.default_rng(2).normal(size=(BATCH, length, HEADS, VALUE))

  def gradient(run):
    return jax.jit(jax.grad(lambda given: jnp.sum(run(given) * of_out)))

  expected = in_float64(gradient(partial(naive, mask=mask)), given)
  for absorbed in (False, True):
    run = partial(latent_attention, absorbed=absorbed, **more)
    found = gradient(lambda given, run=run: run(**given))(given)
    for name, other in expected.items():
      bound = 2e-5 * max(1.0, np.abs(other).max())
      np.testing.assert_allclose(found[name], other, atol=bound, err_msg=name)


@both_forms
def test_huge_logits_and_bfloat16(absorbed):
  given = arrays(131)
  huge = given | {"query": 1e4 * given["query"]}
  assert np.isfinite(call(**huge, absorbed=absorbed)).all()
  given = {name: x.astype(jnp.bfloat16) for name, x in arrays(33).items()}
  expected = definitions.latent_attention(**given, is_causal=True)
  found = call(**given, is_causal=True, absorbed=absorbed)
  assert found.dtype == jnp.bfloat16
  # Products with the kernels are rounded to bfloat16, too.
  error = np.abs(np.asarray(found, np.float64) - expected).max()
  assert error < 0.04 * np.abs(expected).max()


def test_the_absorbed_form_is_attention_of_one_key_head():
  given = arrays(131)
  own, shared = given["query"][..., :OWN], given["query"][..., OWN:]
  own = np.einsum("btnc,rnc->btnr", own, given["key_kernel"])
  key = np.concatenate([given["latent"], given["shared_key"]], axis=2)
  out = definitions.dense_attention(
    np.concatenate([own, shared], axis=3),
    key[:, :, None],
    given["latent"][:, :, None],
    scale=(OWN + SHARED) ** -0.5,
  )
  out = np.einsum("btnr,rnv->btnv", out, given["value_kernel"])
  np.testing.assert_allclose(call(**given, absorbed=True), out, atol=2e-5)


def test_what_does_not_fit_is_told(unchecked):
  def cut(**change):
    ((name, axis),) = change.items()
    x = np.take(arrays(5)[name], [0], axis=axis)
    call(**arrays(5) | {name: x[0] if axis == 0 else x})

  assert_refused(
    cut,
    (
      ("query: expected", {"query": 0}),
      ("latent: expected", {"latent": 0}),
      ("key_kernel: expected", {"key_kernel": 0}),
      ("value_kernel: expected", {"value_kernel": 1}),
      ("shared_key: expected", {"shared_key": 1}),
      ("key_kernel: expected C = H - P = 5", {"shared_key": 2}),
    ),
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


def test_the_record_makes_its_keys_and_values_of_the_inputs():
  mechanism, dims, variables = record(rank=6, shared_dim=4)
  rng = np.random.default_rng(0)
  inputs = rng.standard_normal((2, 9, dims.features), np.float32)
  query = rng.standard_normal((2, 9, HEADS, 12), np.float32)
  apply = partial(mechanism.apply, variables)

  @jax.jit
  def found(inputs, query):
    gates = mechanism.gates(variables, inputs)
    call = {"is_causal": True, **gates}
    weights = attention_weights(apply, query, None, **call)
    return gates, apply(query, None, None, **call), weights

  gates, out, weights = jax.device_get(found(inputs, query))
  kernels = {
    name: variables["params"][name] for name in ("key_kernel", "value_kernel")
  }
  read, shared = gates["latent"], gates["shared_key"]
  expected = definitions.latent_attention(
    query, read, shared_key=shared, is_causal=True, **kernels
  )
  np.testing.assert_allclose(out, expected, atol=1e-5)
  # ‖c‖² / R = 1 before the scale, which is 1 at first.
  np.testing.assert_allclose(np.mean(read**2, axis=2), 1.0, atol=1e-3)
  values = np.einsum("bsr,rnv->bsnv", read, kernels["value_kernel"])
  shown = np.einsum("bnts,bsnv->btnv", weights, values)
  np.testing.assert_allclose(out, shown, atol=1e-5)
  query, gates = jax.tree.map(jnp.asarray, (query, gates))
  with pytest.raises(ValueError, match=r"key: .*expected None"):
    apply(query, query, None, **gates)
  with pytest.raises(ValueError, match="give the call"):
    apply(query, None, None)


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

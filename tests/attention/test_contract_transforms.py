"""Every mechanism under JAX's transformations, and what it must refuse."""

from functools import partial
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import ATTENTIONS, attention_weights
from attention.capabilities import CAPABILITIES
from tests.attention.cases import Case, assert_close, split
from tests.attention.mechanisms import MECHANISMS, ONE_EACH

pytestmark = pytest.mark.optimised

mechanisms = pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
one_each = pytest.mark.parametrize("mechanism", ONE_EACH, ids=str)
CASE = Case(("mask",), batch=8, length=7)


def prepare(mechanism, case):
  attention = mechanism.build()
  variables = attention.init(jax.random.key(0), case.dims)
  arrays, rebuild = split(mechanism.draw(case))
  qkv, call = rebuild(map(jnp.asarray, arrays))
  return partial(attention.apply, variables), qkv, call


@one_each
def test_jit_vmap_and_checkpoint(mechanism):
  apply, qkv, call = prepare(mechanism, CASE)

  def loss(qkv, call):
    return (apply(*qkv, **call) ** 2).sum()

  with jax.checking_leaks():
    value, gradient = jax.jit(jax.value_and_grad(loss))(qkv, call)

  again = jax.jit(jax.grad(jax.checkpoint(loss)))(qkv, call)
  for got, expected in zip(again, gradient, strict=True):
    assert_close(got, expected, 1e-6)

  one_by_one = jax.jit(
    jax.vmap(lambda *xs: loss(*jax.tree.map(lambda x: x[None], xs)))
  )
  assert_close(one_by_one(qkv, call).sum(), value, 1e-6)


@one_each
def test_a_scan_over_layers_is_the_layers(mechanism):
  apply, qkv, call = prepare(mechanism, CASE)
  factors = jnp.array([0.5, 1.5])

  def layer(total, factor, qkv):
    scaled = [None if x is None else factor * x for x in qkv]
    return total + (apply(*scaled, **call) ** 2).sum()

  def scanned(qkv):
    def step(total, factor):
      return layer(total, factor, qkv), None

    return jax.lax.scan(step, 0.0, factors)[0]

  def unrolled(qkv):
    return sum(layer(0.0, factor, qkv) for factor in factors)

  got, expected = (
    jax.jit(jax.value_and_grad(f))(qkv) for f in (scanned, unrolled)
  )
  jax.tree.map(lambda x, y: assert_close(x, y, 1e-5), got, expected)


@one_each
def test_eager_equals_jit_without_retracing(mechanism):
  apply, qkv, call = prepare(mechanism, CASE)
  jitted = jax.jit(lambda qkv, call: apply(*qkv, **call))
  first = jitted(qkv, call)
  jitted([x + 1.0 for x in qkv], call)
  assert jitted._cache_size() == 1
  assert_close(apply(*qkv, **call), first, 1e-6)


@one_each
def test_sharded_inputs_give_the_same_numbers(mechanism):
  apply, qkv, call = prepare(mechanism, CASE)
  mesh = jax.make_mesh((8,), ("batch",), (jax.sharding.AxisType.Auto,))
  sharding = jax.sharding.NamedSharding(mesh, jax.P("batch"))

  @jax.jit
  def run(qkv, call):
    out, vjp = jax.vjp(lambda *qkv: apply(*qkv, **call), *qkv)
    return out, *vjp(jnp.ones_like(out))

  sharded = run(*jax.device_put((qkv, call), sharding))
  assert sharded[0].sharding.is_equivalent_to(sharding, 4)
  for got, expected in zip(sharded, run(qkv, call), strict=True):
    assert_close(got, expected, 1e-6)


@mechanisms
def test_the_attention_matrix(mechanism):
  options = {"causal", "mask"} & mechanism.build().supports
  case = Case(tuple(sorted(options)), num_kv_heads=2)
  apply, (query, *key, value), call = prepare(mechanism, case)
  plugged = ATTENTIONS[mechanism.name](**mechanism.options).apply
  variables = apply.args[0]
  weights = attention_weights(
    partial(plugged, variables), query, key[0] if key else None, **call
  )
  assert weights.shape == (2, 4, 13, 13)
  out = apply(query, *key, value, **call)
  values = np.repeat(value, 2, axis=2)
  assert_close(jnp.einsum("BNTS,BSNV->BTNV", weights, values), out, 1e-5)
  visible = np.broadcast_to(call["mask"], weights.shape)
  if "causal" in options:
    visible = visible & np.tri(13, dtype=bool)
  assert not np.asarray(weights)[~visible].any()
  if mechanism.normalised:
    rows = np.asarray(weights.sum(axis=-1))
    empty = ~np.asarray(weights).any(axis=-1)
    np.testing.assert_allclose(rows[~empty], 1.0, rtol=1e-5)
    assert mechanism.sparse or not (visible.any(axis=-1) & empty).any()


@mechanisms
def test_supports_names_known_features(mechanism):
  assert mechanism.build().supports <= CAPABILITIES.keys()


def asking_for(feature):
  """A call that asks for `feature`, and the arguments an error may name."""
  if feature == "dropout":
    call = {"dropout_rate": 0.1, "dropout_rng": jax.random.key(0)}
    return Case(), call, "dropout_rate|dropout_rng"
  case = (
    Case(length=7, source_length=13) if feature == "cross" else Case((feature,))
  )
  name = {
    "causal": "is_causal",
    "cross": "key|query|value",
    "full_mask": "mask",
    "segments": "query_segment_ids|key_segment_ids",
    "relative": "relative_bias|relative_keys",
    "global": "global_indices",
  }.get(feature, feature)
  return case, {}, name


REFUSED = [
  pytest.param(mechanism, feature, id=f"{mechanism}-{feature}")
  for mechanism in ONE_EACH
  for feature in (
    *("causal", "cross", "mask", "full_mask"),
    *("segments", "bias", "relative", "dropout", "global"),
  )
  if feature not in mechanism.build().supports
]


@pytest.mark.parametrize(("mechanism", "feature"), REFUSED)
def test_what_is_not_supported_raises(mechanism, feature):
  case, more, name = asking_for(feature)
  apply, qkv, call = prepare(mechanism, case)
  with pytest.raises(ValueError) as error:
    apply(*qkv, **call, **more)
  # "argument: what was expected and what came; what to do instead"
  assert re.fullmatch(f"({name}): .+; .+", str(error.value), re.DOTALL)


@pytest.mark.parametrize("value", [3, None, False, 0.0])
@one_each
def test_an_unknown_option_raises(mechanism, value):
  apply, qkv, _ = prepare(mechanism, Case())
  with pytest.raises((TypeError, ValueError), match="widnow"):
    apply(*qkv, widnow=value)


@one_each
def test_wrong_shapes_raise(mechanism, unchecked):
  apply, (query, *key, value), _ = prepare(mechanism, Case())
  wrong = {
    "query": (query[0], *key, value),
    "value": (query, *key, value[:, :5]),
  }
  if key:
    wrong["key"] = (query, key[0][..., :4], value)
  for name, qkv in wrong.items():
    with pytest.raises(ValueError, match=f"^{name}: expected .+ got"):
      apply(*qkv)
  with pytest.raises(ValueError, match=r"^query: .*heads"):
    apply(query[:, :, :3], *key, value)
  for mask in (
    jnp.ones((2, 13), bool),
    jnp.ones((2, 1, 1, 12), bool),
    jnp.ones((2, 1, 1, 13), jnp.float32),
  ):
    with pytest.raises(ValueError, match=r"^mask: expected"):
      apply(query, *key, value, mask=mask)
  with pytest.raises(ValueError, match=r"^scale: expected"):
    apply(query, *key, value, scale=float("nan"))
  with pytest.raises(ValueError, match=r"^(query|key|value): expected .* one"):
    apply(*(x[:, :0] for x in (query, *key, value)))

"""A mechanism under JAX's transformations, and its attention matrix."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention.testing.calls import (
  Case,
  as_jax,
  assert_close,
  require,
  split,
)
from attention.testing.check import Check
from attention.testing.mechanism import Mechanism, shared
from attention.weights import attention_weights

_CASE = Case(("mask",), batch=8, length=7)
# One chunk of a recurrence, which XLA compiles into one program with its state.
_CHUNK = _CASE._replace(length=64, num_heads=2, num_kv_heads=2, head_dim=16)


def _drawn(
  mechanism: Mechanism, case: Case = _CASE
) -> tuple[list, dict[str, Any]]:
  """Arrays and options, without those that the mechanism does not support."""
  options = tuple(x for x in case.options if x in mechanism.supports)
  return mechanism.draw(case._replace(options=options))


def _apply(mechanism, *qkv, **call):
  return mechanism.attention.apply(
    mechanism.variables(_CASE.dims), *qkv, **call
  )


def _loss(mechanism, qkv, call):
  out = _apply(mechanism, *qkv, **call)
  return (out**2).sum(), out


@shared
def _differentiated(mechanism):
  """The jitted `(qkv, call) -> (loss, out), gradients`, and its traces."""
  traces = []
  mechanism.variables(_CASE.dims)  # Drawn here, they are no tracers.

  @jax.jit
  def run(qkv, call):
    traces.append(None)
    loss = partial(_loss, mechanism)
    return jax.value_and_grad(loss, has_aux=True)(qkv, call)

  return run, traces


def _same_gradients(got, expected):
  for i, (x, y) in enumerate(zip(got, expected, strict=True)):
    assert_close(x, y, 1e-5, f"the gradient of array {i}")


def _leaks(mechanism: Mechanism) -> None:
  """JAX finds tracers that outlive the trace that made them."""
  loss = partial(_loss, mechanism)
  with jax.checking_leaks():
    jax.eval_shape(jax.grad(loss, has_aux=True), *_drawn(mechanism))


def _checkpoint(mechanism: Mechanism) -> None:
  qkv, call = _drawn(mechanism)
  _, expected = _differentiated(mechanism)[0](qkv, call)
  loss = jax.checkpoint(partial(_loss, mechanism))
  got, _ = jax.jit(jax.grad(loss, has_aux=True))(qkv, call)
  _same_gradients(got, expected)


def _vmap(mechanism: Mechanism) -> None:
  qkv, call = _drawn(mechanism)
  (_, expected), _ = _differentiated(mechanism)[0](qkv, call)

  @jax.jit
  @jax.vmap
  def one_by_one(qkv, call):
    qkv, call = jax.tree.map(lambda x: x[None], (qkv, call))
    return _apply(mechanism, *qkv, **call)[0]

  assert_close(one_by_one(qkv, call), expected, 1e-6)


def _scan_over_layers(mechanism: Mechanism) -> None:
  qkv, call = as_jax(_drawn(mechanism))
  factors = (0.5, 1.5)

  @jax.jit
  @jax.value_and_grad
  def scanned(qkv):
    def layer(total, factor):
      scaled = [factor * x for x in qkv]
      return total + _loss(mechanism, scaled, call)[0], None

    return jax.lax.scan(layer, 0.0, jnp.array(factors))[0]

  value, gradient = 0.0, [0.0] * len(qkv)
  for factor in factors:
    scaled = [factor * x for x in qkv]
    (loss, _), grads = _differentiated(mechanism)[0](scaled, call)
    value += loss
    gradient = [x + factor * y for x, y in zip(gradient, grads, strict=True)]
  got, got_gradient = scanned(qkv)
  assert_close(got, value, 1e-5)
  _same_gradients(got_gradient, gradient)


def _eager(mechanism: Mechanism) -> None:
  qkv, call = _drawn(mechanism)
  run, traces = _differentiated(mechanism)
  (_, expected), _ = run(qkv, call)
  before = len(traces)
  run([x + 1.0 for x in qkv], call)
  require(len(traces) == before, "other values are traced again")
  qkv, call = as_jax((qkv, call))
  assert_close(_apply(mechanism, *qkv, **call), expected, 1e-6)
  qkv, call = as_jax(_drawn(mechanism, _CHUNK))
  apply = partial(mechanism.attention.apply, mechanism.variables(_CHUNK.dims))
  compiled = jax.jit(lambda qkv, call: apply(*qkv, **call))
  assert_close(compiled(qkv, call), apply(*qkv, **call), 1e-5)


def _sharded(mechanism: Mechanism) -> None:
  qkv, call = _drawn(mechanism)
  count = max(n for n in (1, 2, 4, 8) if n <= jax.device_count())
  auto = (jax.sharding.AxisType.Auto,)
  mesh = jax.make_mesh(
    (count,), ("batch",), auto, devices=jax.devices()[:count]
  )
  sharding = jax.sharding.NamedSharding(mesh, jax.P("batch"))
  run, _ = _differentiated(mechanism)
  (_, expected), expected_gradient = run(qkv, call)
  (_, out), gradient = run(*jax.device_put((qkv, call), sharding))
  require(
    out.sharding.is_equivalent_to(sharding, 4),
    f"the result of arrays that are sharded along B has {out.sharding}",
  )
  assert_close(out, expected, 1e-6)
  _same_gradients(gradient, expected_gradient)


def _attention_matrix(mechanism: Mechanism) -> None:
  case = Case(("causal", "mask"))
  (query, *key, value), call = _drawn(mechanism, case)
  variables = mechanism.variables(case.dims)
  arrays, rebuild = split(call)

  @jax.jit
  def run(query, key, value, arrays):
    call = rebuild(arrays)
    apply = partial(mechanism.record.apply, variables)
    weights = attention_weights(apply, query, key[0] if key else None, **call)
    return weights, _apply(mechanism, query, *key, value, **call)

  weights, out = map(np.asarray, run(query, key, value, arrays))
  B, T, N = query.shape[:3]
  require(
    weights.shape == (B, N, T, T),
    f"attention_weights has shape {weights.shape}, expected {(B, N, T, T)}",
  )
  values = np.repeat(value, N // value.shape[2], axis=2)
  product = np.einsum("BNTS,BSNV->BTNV", weights, values)
  assert_close(product, out, 1e-5, "the product of weights and values")
  visible = np.broadcast_to(call.get("mask", True), weights.shape)
  if call.get("is_causal"):
    visible = visible & np.tri(T, dtype=bool)
  require(
    not weights[~visible].any(), "a pair that the call hides has a weight"
  )
  if not mechanism.normalised:
    return
  empty = ~weights.any(axis=-1)
  worst = np.abs(weights.sum(axis=-1)[~empty] - 1).max(initial=0)
  require(worst <= 1e-5, f"the weights of a query sum to 1 ± {worst:.1e}")
  require(
    mechanism.sparse or not (visible.any(axis=-1) & empty).any(),
    "a query has no weights although it may see keys",
  )


def _transforms(name, law, advice):
  return Check(name, law, advice, every_setting=False)


_PURE = (
  "Every transformation of JAX must give the same numbers. Frequent causes: "
  "NumPy on arrays that are traced, Python `if` on their values, a tracer kept "
  "in a global or in a cache, a result that depends on the batch."
)

CHECKS = (
  _transforms("no_leaked_tracers", _leaks, _PURE),
  _transforms("checkpoint", _checkpoint, _PURE),
  _transforms("vmap", _vmap, _PURE),
  _transforms("scan_over_layers", _scan_over_layers, _PURE),
  _transforms("eager_equals_jit_without_retracing", _eager, _PURE),
  _transforms("sharded_batch", _sharded, _PURE),
  Check(
    "attention_matrix",
    _attention_matrix,
    "The result must be linear in `value`, with weights only where the call "
    "lets a query see a key. Rows must sum to 1 unless normalised=False is "
    "said, and be zero only where nothing may be seen unless sparse=True is.",
  ),
)

"""A mechanism under JAX's transformations, and its attention matrix."""

from collections.abc import Iterator
import contextlib
from functools import partial
import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention.platform.derivative import match_varying
from attention.testing.calls import Case, assert_close, require
from attention.testing.mechanism import Mechanism, backward, law
from attention.weights import attention_weights


def _drawn(mechanism: Mechanism, length: int = 13) -> tuple[Any, list, dict]:
  """`(qkv, **call) -> out` in the first direction, arrays, options."""
  variables = mechanism.variables(Case(length=length).dims)
  is_causal = mechanism.directions[0]
  apply = partial(mechanism.apply, variables, is_causal=is_causal)
  return apply, *mechanism.draw_masked(length)


def _expected(mechanism: Mechanism, *arrays: Any) -> Any:
  """The result and the gradients of the compiled call."""
  return backward(mechanism, mechanism.directions[0], *arrays)


def _same_gradients(got, expected):
  for i, (x, y) in enumerate(zip(got, expected, strict=True)):
    assert_close(x, y, 1e-5, f"the gradient of array {i}")


def mesh_of_rows(
  kind: jax.sharding.AxisType = jax.sharding.AxisType.Auto,
) -> jax.sharding.Mesh:
  """As many devices as divide a batch of 8."""
  count = max(n for n in (1, 2, 4, 8) if n <= jax.device_count())
  return jax.make_mesh(
    (count,), ("batch",), (kind,), devices=jax.devices()[:count]
  )


@law(every_setting=False)
def no_leaked_tracers(mechanism: Mechanism) -> None:
  """No tracer may outlive the trace that made it.

  Keep none in a global or in a cache.
  """
  apply, qkv, call = _drawn(mechanism)
  call = jax.tree.map(jnp.asarray, call)
  # JAX asks the garbage collector for each trace: it shall see these alone.
  gc.freeze()
  try:
    with jax.checking_leaks():
      jax.eval_shape(jax.grad(lambda qkv: apply(qkv, **call).sum()), qkv)
  finally:
    gc.unfreeze()


@law(every_setting=False)
def vmap_of_scanned_checkpoints(mechanism: Mechanism) -> None:
  """`jax.vmap` of `jax.lax.scan` over `jax.checkpoint` must give the same.

  In values and gradients, inside of `jax.shard_map`. Frequent causes: NumPy on arrays
  that are traced, Python `if` on their values, and zeros that start a loop and do not
  vary over the devices as its results do (`attention.platform.layout.alike` makes them).
  """
  apply, qkv, call = _drawn(mechanism)
  factors = np.array([0.5, 1.5], np.float32)
  rows = jax.P("batch")

  @jax.jit
  @partial(
    jax.shard_map,
    mesh=mesh_of_rows(),
    in_specs=(rows, rows, jax.P()),
    out_specs=(rows, rows),
  )
  @partial(jax.vmap, in_axes=(0, 0, None))
  def one_by_one(qkv, call, factors):
    qkv, call = jax.tree.map(lambda x: x[None], (qkv, call))
    start = match_varying(jnp.float32(0), qkv)

    def total(qkv):
      @jax.checkpoint
      def layer(total, factor):
        out = apply([factor * x for x in qkv], **call)
        return total + out.sum(), out[0]

      return jax.lax.scan(layer, start, factors)

    gradient, outs = jax.grad(total, has_aux=True)(qkv)
    return outs, [x[0] for x in gradient]

  outs, gradient = one_by_one(qkv, call, factors)
  expected = [0.0] * len(qkv)
  for i, factor in enumerate(factors):
    out, grads = _expected(mechanism, [factor * x for x in qkv], call)
    assert_close(outs[:, i], out, 1e-6)
    expected = [x + factor * y for x, y in zip(expected, grads, strict=True)]
  _same_gradients(gradient, expected)


@law(every_setting=False)
def forward_mode(mechanism: Mechanism) -> None:
  """`jax.jvp` must give the derivative that `jax.vjp` gives.

  A `jax.custom_vjp` has none; let JAX differentiate, or say how with
  `jax.custom_jvp`.
  """
  apply, qkv, call = _drawn(mechanism)
  rng = np.random.default_rng(2)
  tangents = [rng.standard_normal(x.shape, np.float32) for x in qkv]
  cotangent = rng.standard_normal(qkv[0].shape, np.float32)

  @jax.jit
  def derivative(qkv, tangents, call):
    return jax.jvp(lambda qkv: apply(qkv, **call), [qkv], [tangents])[1]

  tangent = np.asarray(derivative(qkv, tangents, call))
  _, gradient = _expected(mechanism, qkv, call, cotangent)
  expected = sum((g * t).sum() for g, t in zip(gradient, tangents, strict=True))
  norm = np.sqrt(sum((np.asarray(g) ** 2).sum() for g in gradient))
  got = (tangent * cotangent).sum()
  require(
    abs(got - expected) <= 1e-5 * norm,
    f"the derivative along a random direction is {got:.6g} by `jax.jvp` and "
    f"{expected:.6g} by `jax.vjp`",
  )


@law(every_setting=False)
def eager_equals_jit(mechanism: Mechanism) -> None:
  """A call outside of `jax.jit` must give what the compiled one gives.

  It is compared with the definition, as the compiled one is.
  """
  # A chunk of a recurrence, one program with its state.
  apply, qkv, call = _drawn(mechanism, 64)
  variables = mechanism.variables(Case(length=64).dims)
  is_causal = {"is_causal": True} if mechanism.directions[0] else {}
  expected = mechanism.define(variables, qkv, **is_causal, **call)
  qkv, call = jax.device_put((qkv, call))
  assert_close(apply(qkv, **call), expected, 1e-5)


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
  """A list of one entry for each program that is compiled inside."""
  found: list[str] = []

  def listen(event: str, *_: Any, **__: Any) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
      found.append(event)

  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    yield found
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)


@law(every_setting=False)
def eager_compiles_once(mechanism: Mechanism) -> None:
  """An eager call must compile nothing that an earlier one has compiled.

  A loop of JAX compiles anew for each new Python function. Define the functions of a
  loop outside of the call, or keep one `jax.jit` of the whole for each set of options.
  """
  apply, qkv, call = _drawn(mechanism, 64)
  call = jax.device_put(call)

  def gradient(*qkv):
    return jax.grad(lambda qkv: apply(qkv, **call).sum())(qkv)

  def run(*qkv):
    return apply(qkv, **call)

  for name, function in (("call", run), ("gradient", gradient)):
    jax.block_until_ready(function(*jax.device_put(qkv)))
    other = jax.device_put([2 * x for x in qkv])
    with compilations() as found:
      jax.block_until_ready(function(*other))
    require(not found, f"a second eager {name} compiles {len(found)} programs")


@law(every_setting=False)
def sharded_batch(mechanism: Mechanism) -> None:
  """Arrays that are sharded along B must give the same, sharded likewise."""
  _, qkv, call = _drawn(mechanism)
  sharding = jax.sharding.NamedSharding(mesh_of_rows(), jax.P("batch"))
  expected, expected_gradient = _expected(mechanism, qkv, call)
  out, gradient = _expected(mechanism, *jax.device_put((qkv, call), sharding))
  require(
    out.sharding.is_equivalent_to(sharding, 4),
    f"the result of arrays that are sharded along B has {out.sharding}",
  )
  assert_close(out, expected, 1e-6)
  _same_gradients(gradient, expected_gradient)


@law()
def attention_matrix(mechanism: Mechanism) -> None:
  """The result must be linear in `value`, with weights only where a query sees a key.

  It need not be one matrix times the values where one_matrix=False is said.
  Rows must sum to 1 unless normalised=False is said, and be zero only where nothing
  may be seen unless sparse=True is.
  """
  is_causal = mechanism.directions[-1]
  qkv, call = mechanism.draw_masked()
  query, key, value = mechanism.three(qkv)
  variables = mechanism.variables(Case().dims)

  @jax.jit
  def matrix(variables, query, key, call):
    apply = partial(mechanism.record.apply, variables)
    return attention_weights(apply, query, key, is_causal=is_causal, **call)

  weights = np.asarray(matrix(variables, query, key, call))
  out, _ = backward(mechanism, is_causal, qkv, call)
  B, T, N = query.shape[:3]
  told = f"attention_weights has shape {weights.shape}, expected {(B, N, T, T)}"
  require(weights.shape == (B, N, T, T), told)
  if mechanism.one_matrix:
    values = np.repeat(value, N // value.shape[2], axis=2)
    product = np.einsum("BNTS,BSNV->BTNV", weights, values)
    assert_close(product, out, 1e-5, "the product of weights and values")
  visible = np.broadcast_to(call.get("mask", True), weights.shape)
  if is_causal:
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

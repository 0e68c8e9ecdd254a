"""Laws of JAX's transformations, and of the attention matrix."""

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


def _draw(mechanism: Mechanism, length: int = 13) -> tuple[Any, list, dict]:
  """Returns `(qkv, **call) -> out` in the first direction, arrays and options."""
  variables = mechanism.variables(Case(length=length).dims)
  is_causal = mechanism.directions[0]
  apply = partial(mechanism.apply, variables, is_causal=is_causal)
  return apply, *mechanism.draw_masked(length)


def _reference(mechanism: Mechanism, *arrays: Any) -> Any:
  """The result and the gradients of the compiled call."""
  return backward(mechanism, mechanism.directions[0], *arrays)


def _same_gradients(got, expected):
  for i, (x, y) in enumerate(zip(got, expected, strict=True)):
    assert_close(x, y, 1e-5, f"the gradient of array {i}")


def mesh_of_rows(
  kind: jax.sharding.AxisType = jax.sharding.AxisType.Auto,
) -> jax.sharding.Mesh:
  """A mesh with the axis 'batch', of the largest number of devices that divides 8."""
  count = max(n for n in (1, 2, 4, 8) if n <= jax.device_count())
  return jax.make_mesh(
    (count,), ("batch",), (kind,), devices=jax.devices()[:count]
  )


@law(every_setting=False)
def no_leaked_tracers(mechanism: Mechanism) -> None:
  """Tracers must not outlive their trace.

  Do not store tracers in globals or caches.
  """
  apply, qkv, call = _draw(mechanism)
  call = jax.tree.map(jnp.asarray, call)
  # JAX searches all objects for leaked traces; freezing excludes older objects.
  gc.freeze()
  try:
    with jax.checking_leaks():
      jax.eval_shape(jax.grad(lambda qkv: apply(qkv, **call).sum()), qkv)
  finally:
    gc.unfreeze()


@law(every_setting=False)
def vmap_of_scanned_checkpoints(mechanism: Mechanism) -> None:
  """`jax.vmap` of `jax.lax.scan` over `jax.checkpoint` must give equal results.

  This holds for values and gradients, inside `jax.shard_map`. Frequent causes: NumPy
  functions on traced arrays, Python `if` on their values, and initial zeros of a loop
  that do not vary over the devices as its results do
  (`attention.platform.derivative.match_varying` casts them).
  """
  apply, qkv, call = _draw(mechanism)
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
  def example_gradients(qkv, call, factors):
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

  outs, gradient = example_gradients(qkv, call, factors)
  expected = [0.0] * len(qkv)
  for i, factor in enumerate(factors):
    out, grads = _reference(mechanism, [factor * x for x in qkv], call)
    assert_close(outs[:, i], out, 1e-6)
    expected = [x + factor * y for x, y in zip(expected, grads, strict=True)]
  _same_gradients(gradient, expected)


@law(every_setting=False)
def forward_mode(mechanism: Mechanism) -> None:
  """`jax.jvp` must give the same derivative as `jax.vjp`.

  A `jax.custom_vjp` does not support forward mode; let JAX differentiate, or use
  `jax.custom_jvp`.
  """
  apply, qkv, call = _draw(mechanism)
  rng = np.random.default_rng(2)
  tangents = [rng.standard_normal(x.shape, np.float32) for x in qkv]
  cotangent = rng.standard_normal(qkv[0].shape, np.float32)

  @jax.jit
  def derivative(qkv, tangents, call):
    return jax.jvp(lambda qkv: apply(qkv, **call), [qkv], [tangents])[1]

  tangent = np.asarray(derivative(qkv, tangents, call))
  _, gradient = _reference(mechanism, qkv, call, cotangent)
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
  """A call outside `jax.jit` must equal the compiled call.

  Both are compared with the definition.
  """
  # One chunk of a recurrence, so that there is one program for its state.
  apply, qkv, call = _draw(mechanism, 64)
  variables = mechanism.variables(Case(length=64).dims)
  is_causal = {"is_causal": True} if mechanism.directions[0] else {}
  expected = mechanism.define(variables, qkv, **is_causal, **call)
  qkv, call = jax.device_put((qkv, call))
  assert_close(apply(qkv, **call), expected, 1e-5)


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
  """A context that records compilations: a list with one entry per program."""
  events: list[str] = []

  def listen(event: str, *_: Any, **__: Any) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
      events.append(event)

  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    yield events
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)


@law(every_setting=False)
def eager_compiles_once(mechanism: Mechanism) -> None:
  """A second eager call must not compile programs again.

  JAX compiles a loop again for each new Python function. Define the functions of a loop
  outside the call, or cache one `jax.jit` of the whole call per set of options.
  """
  apply, qkv, call = _draw(mechanism, 64)
  call = jax.device_put(call)

  def gradient(*qkv):
    return jax.grad(lambda qkv: apply(qkv, **call).sum())(qkv)

  def run(*qkv):
    return apply(qkv, **call)

  for name, function in (("call", run), ("gradient", gradient)):
    jax.block_until_ready(function(*jax.device_put(qkv)))
    other = jax.device_put([2 * x for x in qkv])
    with compilations() as events:
      jax.block_until_ready(function(*other))
    message = f"a second eager {name} compiles {len(events)} programs"
    require(not events, message)


@law(every_setting=False)
def sharded_batch(mechanism: Mechanism) -> None:
  """Arrays that are sharded along B must give equal results, also sharded along B."""
  _, qkv, call = _draw(mechanism)
  sharding = jax.sharding.NamedSharding(mesh_of_rows(), jax.P("batch"))
  expected, expected_gradient = _reference(mechanism, qkv, call)
  out, gradient = _reference(mechanism, *jax.device_put((qkv, call), sharding))
  require(
    out.sharding.is_equivalent_to(sharding, 4),
    f"the result of arrays that are sharded along B has {out.sharding}",
  )
  assert_close(out, expected, 1e-6)
  _same_gradients(gradient, expected_gradient)


@law("sequence", every_setting=False)
def sequence_shards(mechanism: Mechanism) -> None:
  """Shards of a sequence, with axis_name, must give the results of the whole.

  This holds for values and gradients. With one device there is only one shard; set
  XLA_FLAGS=--xla_force_host_platform_device_count=8.
  """
  length, is_causal = 64, mechanism.directions[-1]
  qkv, call = mechanism.draw_masked(length)
  variables = mechanism.variables(Case(length=length).dims)
  rows, by_option = jax.P(None, "batch"), {"mask": jax.P(*[None] * 3, "batch")}
  specs = {name: by_option.get(name, rows) for name in call}

  def shard(variables, qkv, call):
    call = {"is_causal": is_causal, "axis_name": "batch", **call}
    return mechanism.apply(variables, qkv, **call)

  run = jax.shard_map(
    shard,
    mesh=mesh_of_rows(),
    in_specs=(jax.P(), rows, specs),
    out_specs=rows,
  )

  @jax.jit
  def results(variables, qkv, call):
    out, vjp = jax.vjp(lambda qkv: run(variables, qkv, call), qkv)
    return out, vjp(jnp.ones_like(out))[0]

  out, gradient = results(variables, qkv, call)
  expected, expected_gradient = backward(
    mechanism, is_causal, qkv, call, dims=Case(length=length).dims
  )
  assert_close(out, expected, 1e-5)
  _same_gradients(gradient, expected_gradient)


@law()
def attention_matrix(mechanism: Mechanism) -> None:
  """The result must be linear in `value`, with weights only for visible keys.

  Otherwise the record has `linear_in_values=False`, and the matrix is a derivative. It
  must be one matrix times the values unless one_matrix=False. Rows must sum to 1 unless
  normalised=False, and may be zero only without visible keys unless sparse=True.
  """
  is_causal = mechanism.directions[-1]
  qkv, call = mechanism.draw_masked()
  query, key, value = mechanism.three(qkv)
  variables = mechanism.variables(Case().dims)
  point = None if mechanism.record.linear_in_values else value

  @jax.jit
  def matrix(variables, query, key, point, call):
    apply = partial(mechanism.record.apply, variables)
    call = {"is_causal": is_causal, **call}
    return attention_weights(apply, query, key, point, **call)

  weights = np.asarray(matrix(variables, query, key, point, call))
  out, _ = backward(mechanism, is_causal, qkv, call)
  B, T, N = query.shape[:3]
  require(
    weights.shape == (B, N, T, T),
    f"attention_weights has shape {weights.shape}, expected {(B, N, T, T)}",
  )
  if mechanism.one_matrix and point is None:
    values = np.repeat(value, N // value.shape[2], axis=2)
    product = np.einsum("BNTS,BSNV->BTNV", weights, values)
    assert_close(product, out, 1e-5, "the product of weights and values")
  visible = np.broadcast_to(call.get("mask", True), weights.shape)
  if is_causal:
    visible = visible & np.tri(T, dtype=bool)
  require(
    not weights[~visible].any(), "a pair that the call masks has a weight"
  )
  if not mechanism.normalised:
    return
  is_empty = ~weights.any(axis=-1)
  error = np.abs(weights.sum(axis=-1)[~is_empty] - 1).max(initial=0)
  require(error <= 1e-5, f"the weights of a query sum to 1 ± {error:.1e}")
  require(
    mechanism.sparse or not (visible.any(axis=-1) & is_empty).any(),
    "a query has no weights although it may see keys",
  )

"""Laws of attention functions.

A law gets a function `f(q, k, v, **options)` and arrays `[B, T, N, H]` that it may
change, and returns two results that must agree. The options are those of
`Function.options`. The report prints the lines of a broken law as its reproduction, so
a law uses only NumPy, JAX, `f` and its arrays.
"""

from collections.abc import Callable
import dataclasses
import inspect
import textwrap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Results = tuple[Any, Any]


@dataclasses.dataclass(frozen=True)
class Law:
  """A law of attention functions.

  Attributes:
    run: `(f, q, k, v) -> (result, expected)`; its docstring states the law.
    needs: options of `f` that the law uses.
    causal: whether the law applies only to causal calls.
    tolerance: the largest difference, relative to the largest expected value.
    differs: whether the two results must differ instead.
    heads: whether the law needs several heads.
    may_refuse: whether an error of `f` means that the law does not apply.
    devices: devices that the law needs.
  """

  run: Callable[..., Results]
  needs: tuple[str, ...] = ()
  causal: bool = False
  tolerance: float = 2e-5
  differs: bool = False
  heads: bool = False
  may_refuse: bool = False
  devices: int = 1

  @property
  def name(self) -> str:
    """The name of the function."""
    return self.run.__name__

  @property
  def statement(self) -> str:
    """The law in words."""
    return " ".join(str(self.run.__doc__).split())

  @property
  def lines(self) -> list[str]:
    """The lines of the law, the last of which assigns `got` and `expected`."""
    source = textwrap.dedent(inspect.getsource(self.run))
    _, _, body = source.rpartition('"""\n')
    body, _, result = textwrap.dedent(body).rstrip().rpartition("return ")
    return [*body.splitlines(), f"got, expected = {result}"]


FUNCTION_LAWS: dict[str, Law] = {}
"""Maps names to laws, in the order of the report."""


def _law(*needs: str, **facts: Any) -> Callable[..., Any]:
  def register(run):
    FUNCTION_LAWS[run.__name__] = Law(run, needs, **facts)
    return run

  return register


@_law(causal=True)
def future(f, q, k, v) -> Results:
  """Keys and values after a query do not affect its result."""
  t, out = q.shape[1] // 2, f(q, k, v)
  k[:, t:], v[:, t:] = 0.5 * k[:, t:], 0.5 * v[:, t:]
  return f(q, k, v)[:, :t], out[:, :t]


@_law(causal=True)
def prefixes(f, q, k, v) -> Results:
  """A causal call of the first positions has the first results of the whole call."""
  t = q.shape[1] // 2
  return f(q[:, :t], k[:, :t], v[:, :t]), f(q, k, v)[:, :t]


@_law("mask", may_refuse=True)
def padding_on_the_right(f, q, k, v) -> Results:
  """Masked padding at the end of a sequence does not change its results."""
  t = q.shape[1] // 2
  mask = np.broadcast_to(np.arange(q.shape[1]) < t, (len(q), 1, 1, q.shape[1]))
  short = f(q[:, :t], k[:, :t], v[:, :t], mask=mask[..., :t])
  return f(q, k, v, mask=mask)[:, :t], short


@_law("mask", may_refuse=True)
def padding_on_the_left(f, q, k, v) -> Results:
  """Masked padding before a sequence does not change its results."""
  t = q.shape[1] // 2
  mask = np.broadcast_to(np.arange(q.shape[1]) >= t, (len(q), 1, 1, q.shape[1]))
  short = f(q[:, t:], k[:, t:], v[:, t:], mask=mask[..., t:])
  return f(q, k, v, mask=mask)[:, t:], short


@_law("mask", may_refuse=True)
def padding_of_one_example(f, q, k, v) -> Results:
  """Masked padding before a sequence changes nothing in a batch of one either."""
  q, k, v, t = q[:1], k[:1], v[:1], q.shape[1] // 2
  mask = (np.arange(q.shape[1]) >= t)[None, None, None]
  short = f(q[:, t:], k[:, t:], v[:, t:], mask=mask[..., t:])
  return f(q, k, v, mask=mask)[:, t:], short


@_law("mask", may_refuse=True)
def content_of_masked_positions(f, q, k, v) -> Results:
  """Masked keys and values inside a sequence do not affect the other results."""
  t = q.shape[1] // 2
  kept = np.arange(q.shape[1]) != t
  mask = np.broadcast_to(kept, (len(q), 1, 1, q.shape[1]))
  out = f(q, k, v, mask=mask)
  k[:, t], v[:, t] = 3.0 * k[:, t] + 1.0, 2.0 - v[:, t]
  return f(q, k, v, mask=mask)[:, kept], out[:, kept]


@_law("mask", "initial_state", "return_state", causal=True, may_refuse=True)
def content_of_masked_positions_after_a_state(f, q, k, v) -> Results:
  """Masked positions of a call that continues a state do not affect its results."""
  t = q.shape[1] // 2
  _, state = f(q[:, :t], k[:, :t], v[:, :t], return_state=True)
  mask = np.ones((len(q), 1, 1, q.shape[1] - t), bool)
  mask[..., 0] = False
  options = {"mask": mask, "initial_state": state, "return_state": True}
  out, end = f(q[:, t:], k[:, t:], v[:, t:], **options)
  k[:, t], v[:, t] = 3.0 * k[:, t] + 1.0, 2.0 - v[:, t]
  again, final = f(q[:, t:], k[:, t:], v[:, t:], **options)
  return (again[:, 1:], final), (out[:, 1:], end)


@_law("segment_ids", may_refuse=True)
def packing(f, q, k, v) -> Results:
  """Each packed example has the results that it has alone."""
  t = q.shape[1] // 2
  ids = np.ones(q.shape[:2], np.int32)
  ids[:, t:] = 2
  first = f(q[:, :t], k[:, :t], v[:, :t])
  second = f(q[:, t:], k[:, t:], v[:, t:])
  return f(q, k, v, segment_ids=ids), np.concatenate([first, second], axis=1)


@_law("segment_ids", may_refuse=True)
def packing_of_nan(f, q, k, v) -> Results:
  """NaN in a packed example does not reach the next one."""
  t = q.shape[1] // 2
  ids = np.ones(q.shape[:2], np.int32)
  ids[:, t:] = 2
  out = f(q, k, v, segment_ids=ids)
  k[:, :t], v[:, :t] = np.nan, np.nan
  return f(q, k, v, segment_ids=ids)[:, t:], out[:, t:]


@_law("cu_seqlens", may_refuse=True)
def packing_by_lengths(f, q, k, v) -> Results:
  """Each example of a row that `cu_seqlens` divides has the results it has alone."""
  q, k, v, t = q[:1], k[:1], v[:1], q.shape[1] // 2
  first = f(q[:, :t], k[:, :t], v[:, :t])
  second = f(q[:, t:], k[:, t:], v[:, t:])
  ends = np.array([0, t, q.shape[1]], np.int32)
  return f(q, k, v, cu_seqlens=ends), np.concatenate([first, second], axis=1)


@_law()
def examples_apart(f, q, k, v) -> Results:
  """The other examples of a batch do not affect an example."""
  out = f(q, k, v)
  q[1:], k[1:], v[1:] = 2.0 * q[1:], 0.5 * k[1:], -v[1:]
  return f(q, k, v)[:1], out[:1]


@_law()
def order_of_examples(f, q, k, v) -> Results:
  """The examples of a batch in another order have the same results in that order."""
  return f(q[::-1], k[::-1], v[::-1]), f(q, k, v)[::-1]


@_law(heads=True)
def order_of_heads(f, q, k, v) -> Results:
  """Heads in another order have the same results in that order."""
  backwards = f(q[:, :, ::-1], k[:, :, ::-1], v[:, :, ::-1])
  return backwards, f(q, k, v)[:, :, ::-1]


@_law(heads=True, may_refuse=True)
def grouped_heads(f, q, k, v) -> Results:
  """Fewer key heads equal key heads that are repeated for their queries."""
  k, v = k[:, :, ::2], v[:, :, ::2]
  return f(q, k, v), f(q, np.repeat(k, 2, axis=2), np.repeat(v, 2, axis=2))


@_law("mask", may_refuse=True)
def empty_rows(f, q, k, v) -> Results:
  """A query whose keys are all masked gets zeros."""
  mask = np.ones((len(q), 1, 1, q.shape[1]), bool)
  mask[1] = False
  return f(q, k, v, mask=mask)[1], np.zeros(v.shape[1:], np.float32)


@_law("mask", may_refuse=True)
def gradients_at_empty_rows(f, q, k, v) -> Results:
  """A query whose keys are all masked has zero gradients, and so have these keys."""
  mask = np.ones((len(q), 1, 1, q.shape[1]), bool)
  mask[1] = False

  def loss(*x):
    return jnp.sum(jnp.sin(f(*x, mask=mask)))

  grads = jax.grad(loss, argnums=(0, 1, 2))(*map(jnp.asarray, (q, k, v)))
  return [x[1] for x in grads], [0.0 * x[1] for x in (q, k, v)]


@_law("mask", may_refuse=True)
def nan_in_masked_positions(f, q, k, v) -> Results:
  """NaN in masked keys and values does not affect any result."""
  t = q.shape[1] // 2
  mask = np.broadcast_to(np.arange(q.shape[1]) >= t, (len(q), 1, 1, q.shape[1]))
  out = f(q, k, v, mask=mask)
  k[:, :t], v[:, :t] = np.nan, np.nan
  return f(q, k, v, mask=mask)[:, t:], out[:, t:]


@_law("mask", may_refuse=True)
def infinity_in_masked_positions(f, q, k, v) -> Results:
  """Infinite masked keys and values do not affect any result."""
  t = q.shape[1] // 2
  mask = np.broadcast_to(np.arange(q.shape[1]) >= t, (len(q), 1, 1, q.shape[1]))
  out = f(q, k, v, mask=mask)
  k[:, :t], v[:, :t] = np.inf, np.inf
  return f(q, k, v, mask=mask)[:, t:], out[:, t:]


@_law("mask", may_refuse=True)
def gradients_beside_nan(f, q, k, v) -> Results:
  """NaN in masked keys and values does not affect the gradients of queries."""
  t = q.shape[1] // 2
  mask = np.broadcast_to(np.arange(q.shape[1]) >= t, (len(q), 1, 1, q.shape[1]))

  def loss(q):
    return jnp.sum(jnp.sin(f(q, k, v, mask=mask)[:, t:]))

  grad = np.array(jax.grad(loss)(jnp.asarray(q)))
  k[:, :t], v[:, :t] = np.nan, np.nan
  return jax.grad(loss)(jnp.asarray(q)), grad


@_law("window", may_refuse=True)
def window(f, q, k, v) -> Results:
  """Keys beyond the window of a query do not affect its result."""
  out = f(q, k, v, window=2)
  k[:, :-3], v[:, :-3] = 0.5 * k[:, :-3], 0.5 * v[:, :-3]
  return f(q, k, v, window=2)[:, -1], out[:, -1]


@_law("scale", may_refuse=True)
def scale(f, q, k, v) -> Results:
  """Half the scale and twice the query give the same result."""
  return f(2.0 * q, k, v, scale=0.25), f(q, k, v, scale=0.5)


@_law("initial_state", "return_state", causal=True, may_refuse=True)
def tokens(f, q, k, v) -> Results:
  """Decoding token by token, each from the last state, equals the whole call."""
  outs, state = [], None
  for t in range(q.shape[1]):
    part = (x[:, t : t + 1] for x in (q, k, v))
    out, state = f(*part, initial_state=state, return_state=True)
    outs.append(out)
  return np.concatenate(outs, axis=1), f(q, k, v)


@_law("initial_state", "return_state", causal=True, may_refuse=True)
def states(f, q, k, v) -> Results:
  """A call from the state of the first positions continues the whole call."""
  got, length = [], q.shape[1]
  for t in sorted({1, length // 3, length - 1} - {0}):
    out, state = f(q[:, :t], k[:, :t], v[:, :t], return_state=True)
    rest = q[:, t:], k[:, t:], v[:, t:]
    end, state = f(*rest, initial_state=state, return_state=True)
    got.append((np.concatenate([out, end], axis=1), state))
  return got, [f(q, k, v, return_state=True)] * len(got)


@_law(tolerance=2**-7)
def bfloat16(f, q, k, v) -> Results:
  """In bfloat16, results differ by a few rounding errors."""
  low = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)]
  return f(*low).astype(jnp.float32), f(*(x.astype(jnp.float32) for x in low))


@_law()
def huge_logits(f, q, k, v) -> Results:
  """Logits of ±10,000 give finite results."""
  out = np.asarray(f(1e4 * q, k, v))
  return np.isfinite(out), np.ones(out.shape, bool)


@_law()
def jit(f, q, k, v) -> Results:
  """A compiled call equals the eager call."""
  return jax.jit(f)(q, k, v), f(q, k, v)


@_law()
def vmap(f, q, k, v) -> Results:
  """A call in `jax.vmap` equals separate calls."""
  q, k, v = (np.stack([x, x[::-1]]) for x in (q, k, v))
  return jax.vmap(f)(q, k, v), np.stack([f(q[i], k[i], v[i]) for i in (0, 1)])


@_law()
def scan(f, q, k, v) -> Results:
  """A call in `jax.lax.scan` equals the call outside."""
  q, k, v = (np.stack([x, x[::-1]]) for x in (q, k, v))
  _, outs = jax.lax.scan(lambda c, x: (c, f(*x)), 0, (q, k, v))
  return outs, np.stack([f(q[i], k[i], v[i]) for i in (0, 1)])


@_law(tolerance=2e-3)
def grad(f, q, k, v) -> Results:
  """Gradients equal fourth-order differences of results, for each array."""
  arrays, got, expected = (q, k, v), [], []

  def loss(*x):
    return jnp.sum(jnp.sin(f(*x)))

  grads = jax.grad(loss, argnums=(0, 1, 2))(*map(jnp.asarray, arrays))
  for i, x in enumerate(arrays):
    step = 0.01 * np.cos(np.arange(x.size, dtype=np.float32)).reshape(x.shape)
    moved = (x + n * step for n in (-2, -1, 1, 2))
    outs = [f(*arrays[:i], y, *arrays[i + 1 :]) for y in moved]
    a, b, c, d = (np.sum(np.sin(np.float64(out))) for out in outs)
    expected.append((a - 8 * b + 8 * c - d) / 12)
    got.append(np.vdot(np.float64(step), np.float64(grads[i])))
  return np.array(got), np.array(expected)


@_law(tolerance=1e-4)
def jvp(f, q, k, v) -> Results:
  """Forward and reverse derivatives agree."""
  x = tuple(map(jnp.asarray, (q, k, v)))
  steps = tuple(jnp.sin(3.0 * y) for y in x)
  out, tangent = jax.jvp(f, x, steps)
  cotangent = jnp.cos(out)
  grads = jax.vjp(f, *x)[1](cotangent)
  pairs = zip(grads, steps, strict=True)
  return sum(jnp.vdot(a, b) for a, b in pairs), jnp.vdot(tangent, cotangent)


@_law()
def checkpoint(f, q, k, v) -> Results:
  """Gradients of `jax.checkpoint(f)` are those of `f`."""
  x = tuple(map(jnp.asarray, (q, k, v)))

  def loss(f, *x):
    return jnp.sum(jnp.sin(f(*x)))

  grads = jax.grad(loss, argnums=(1, 2, 3))
  return grads(jax.checkpoint(f), *x), grads(f, *x)


@_law(devices=2)
def shard_map(f, q, k, v) -> Results:
  """A batch that is sharded over devices has the same results."""
  mesh, spec = jax.make_mesh((2,), ("data",)), jax.P("data")
  shards = jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec)
  placed = jax.device_put([q, k, v], jax.NamedSharding(mesh, spec))
  return jax.jit(shards)(*placed), f(q, k, v)


@_law("mask", may_refuse=True)
def lengths_by_mask(f, q, k, v) -> Results:
  """Short sequences, and those about as long as a block, equal padded sequences."""
  got, expected, mask = [], [], np.zeros((len(q), 1, 1, q.shape[1]), bool)
  for n in (n for n in (1, 2, 3, 7, 63, 64, 65, 127) if n < q.shape[1]):
    mask[...] = np.arange(q.shape[1]) < n
    got.append(f(q[:, :n], k[:, :n], v[:, :n]))
    expected.append(f(q, k, v, mask=mask.copy())[:, :n])
  return got, expected


@_law(causal=True)
def lengths(f, q, k, v) -> Results:
  """Causal calls of short lengths, and of about a block, equal the longest call."""
  sizes = [n for n in (1, 2, 3, 7, 63, 64, 65, 127) if n < q.shape[1]]
  got = [f(q[:, :n], k[:, :n], v[:, :n]) for n in sizes]
  return got, [f(q, k, v)[:, :n] for n in sizes]


@_law("mask", differs=True, may_refuse=True)
def mask_is_honoured(f, q, k, v) -> Results:
  """A mask changes the result, or is refused."""
  mask = np.broadcast_to(np.arange(q.shape[1]) > 0, (len(q), 1, 1, q.shape[1]))
  return f(q, k, v, mask=mask), f(q, k, v)


@_law("is_causal", differs=True, may_refuse=True)
def causality_is_honoured(f, q, k, v) -> Results:
  """Causality changes the result, or is refused."""
  return f(q, k, v, is_causal=True), f(q, k, v, is_causal=False)


@_law("bias", differs=True, may_refuse=True)
def bias_is_honoured(f, q, k, v) -> Results:
  """A bias changes the result, or is refused."""
  shape = len(q), q.shape[2], q.shape[1], q.shape[1]
  bias = np.random.default_rng(1).standard_normal(shape, np.float32)
  return f(q, k, v, bias=bias), f(q, k, v)


@_law("segment_ids", differs=True, may_refuse=True)
def segments_are_honoured(f, q, k, v) -> Results:
  """Segment ids change the result, or are refused."""
  ids = np.ones(q.shape[:2], np.int32)
  ids[:, 1:] = 2
  return f(q, k, v, segment_ids=ids), f(q, k, v)


@_law("window", differs=True, may_refuse=True)
def window_is_honoured(f, q, k, v) -> Results:
  """A window changes the result, or is refused."""
  return f(q, k, v, window=1), f(q, k, v)


@_law("scale", differs=True, may_refuse=True)
def scale_is_honoured(f, q, k, v) -> Results:
  """A scale changes the result, or is refused."""
  return f(q, k, v, scale=0.01), f(q, k, v)


@_law("initial_state", "return_state", differs=True, may_refuse=True)
def state_is_honoured(f, q, k, v) -> Results:
  """An initial state changes the result, or is refused."""
  _, state = f(q, k, v, return_state=True)
  return f(q, k, v, initial_state=state), f(q, k, v)

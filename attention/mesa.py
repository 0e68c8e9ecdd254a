"""MesaNet: each query solves a least-squares problem over the past.

A state has two parts, S_kk and S_kv, in one array: it is the state of gated linear
attention with values [k, v]. `gates` builds the mechanism and its gates.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention import checks
from attention.decorators import attention_factory, attention_function
from attention.mechanism import Attention
from attention.recurrent import gates, packing, recurrence
from attention.recurrent.scan import (
  chunk_prefixes,
  chunk_size,
  chunks_per_step,
  is_sequence_sharded,
  scan,
)
from attention.recurrent.triangular import decay_to_end, pair_decays


@attention_function
def mesa_attention(
  query: Float[Array, "B T Q H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T U V"],
  *,
  log_decay: Float[Array, "B T N"],
  beta: Float[Array, "B T N"],
  regularizer: Float[Array, "N H"],
  num_iterations: int = 30,
  normalize_keys: bool = False,
  mask: Bool[Array, "..."] | None = None,
  is_causal: bool = True,
  scale: float | Float[Array, ""] | None = None,
  initial_state: Float[Array, "B *G N H X"] | None = None,
  segment_ids: Int[Array, "B T"] | None = None,
  num_segments: int | None = None,
  return_state: bool = False,
) -> (
  Float[Array, "B T N V"]
  | tuple[Float[Array, "B T N V"], Float[Array, "B *G N H X"]]
):
  """Each query applies the linear map that best predicts past values from their keys.

    out = mesa_attention(q, k, v, log_decay=g, beta=b, regularizer=r)

    S_kk ← e^g_t S_kk + β_t k_t k_tᵀ        S_kv ← e^g_t S_kv + β_t k_t v_tᵀ
    out_t = scale · S_kvᵀ (S_kk + diag(λ))⁻¹ q_t

  for each head: the prediction for q_t by ridge regression from k_s to v_s, s ≤ t, with
  weights β_s e^(Σ g). Conjugate gradients solve the system. Queries and keys should
  have length 1, as in the paper; `normalize_keys=True` ensures it. Everything is
  float32 for inputs of any dtype.

  Args:
    query: `[B, T, N, H]`.
    key: `[B, T, K, H]`.
    value: `[B, T, K, V]`.
    log_decay: g, at most 0.
    beta: β, at least 0.
    regularizer: λ, above 0.
    num_iterations: the number of conjugate-gradient iterations. H suffice up to
      rounding, and each multiplies the error by (√c − 1)/(√c + 1) or less, where c is
      the condition number of the system. Where keys are similar and there is no decay,
      30 may be too few.
    normalize_keys: as in `delta_rule_attention`.
    scale: factor of the queries; None is 1.
    initial_state: [S_kk, S_kv] before the first position, X = H+V, with symmetric
      S_kk; None is 0.
    mask: key mask `[B, 1, 1, T]`; at masked positions the state does not change.
    is_causal: must be True, because a state holds only the past.
    segment_ids: `[B, T]`; where they change, the state restarts at 0.
    num_segments: G, to give and get one state per segment.
    return_state: whether to return the last state as well.

  Results and errors: as `gated_linear_attention`; the state is
  `[B, N, H, H+V]`, or with `num_segments` `[B, G, N, H, H+V]`.

  Gradients are those of the exact solution: the iterations are not differentiated.
  Instead, conjugate gradients solve the system again with another right-hand side. The
  iterations start at 0; the authors' start at q / diag(S_kk + λ), so the two differ until
  they converge.

  Cost, with I iterations and C = `scan.CHUNK`: time T·N·(H+C)·(I·H + V), with
  gradients about four times that; memory B·T·N·(H+V), with gradients also one state
  for each chunk.

  Paper: MesaNet: sequence modeling by locally optimal test-time training,
  arXiv:2506.05233.
  """
  return _recurrence(**locals())


def _recurrence(
  query,
  key,
  value,
  *,
  beta,
  initial_state,
  num_segments=None,
  normalize_keys=False,
  **options,
) -> Any:
  """`mesa_attention`, also where each device has a shard of the sequence."""
  query = recurrence.repeat_heads(query, key, value)
  batch, length, num_heads, head_dim = query.shape
  names = "num_iterations", "regularizer", "scale"
  num_iterations, regularizer, scale = (options.pop(name) for name in names)
  return_state = options.pop("return_state", True)
  packed = None
  if num_segments is not None:
    packed = packing.packing_of(query, num_segments, options)
  arrays, log_decay, _ = recurrence.by_head(
    query, (key, value, beta[..., None]), **options
  )
  key, value, beta = arrays
  dtype, query = query.dtype, query.astype(jnp.float32)
  if normalize_keys:
    query, key = map(recurrence.unit_length, (query, key))
  value, written = jnp.concatenate([key, value], axis=3), beta * key
  shape = num_heads, head_dim, value.shape[3]
  state = packing.first_state(
    initial_state, value, shape, "N, H, H+V", num_segments
  )
  axis_name = options.get("axis_name")
  is_part = is_sequence_sharded(axis_name)
  if is_sequence_sharded(axis_name):
    state = recurrence.state_before(written, value, log_decay, axis_name)
  query *= checks.softmax_scale(1.0 if scale is None else scale, head_dim)
  size = chunk_size(length) if packed is None else packed.size
  numbers = 2 * size + 6 * head_dim + value.shape[3]

  def attend(inputs, state, resets=None):
    count = chunks_per_step(inputs[0], size, numbers)
    return scan(
      functools.partial(_step, count, num_iterations),
      regularizer.astype(jnp.float32),
      state,
      (*inputs, resets and packing.whole_steps(resets, count)),
      size=size * count,
      is_empty=initial_state is None and not is_part and resets is None,
    )

  inputs = query, written, value, log_decay
  if packed is None:
    state, out = attend(inputs, state)
  else:
    none = jnp.zeros_like(value, shape=(batch, *shape))
    out, state = packed.run(
      lambda inputs, resets: attend(inputs, none, resets)[1], inputs, state
    )
  out = out.astype(dtype)
  return (out, state) if return_state else out


def _step(count, num_iterations, regularizer, state, inputs):
  """`count` chunks `[B, N, count, C, ·]`; each begins with the state of the one before."""
  *arrays, resets = inputs
  query, key, value, log_decay = recurrence.chunks(arrays, count)
  from_start = jnp.exp(jnp.cumsum(log_decay, axis=3))
  made = jnp.swapaxes(key * jnp.exp(decay_to_end(log_decay)), -2, -1) @ value
  after, before = made, None
  if state is not None:
    own = from_start[..., -1:, :], made
    first = jnp.zeros_like(own[0][:, :, :1]), state[:, :, None]
    resets = packing.head_resets(resets, own[0])
    _, before = chunk_prefixes(recurrence.joined, first, own, resets)
    after += own[0] * before
  decays = jnp.tril(pair_decays(log_decay))
  head_dim = query.shape[-1]

  def times(x):
    """(S_kk + diag(λ)) x for each row of x."""
    scores = decays * _product("...cj,...sj->...cs", x, value[..., :head_dim])
    out = _product("...cs,...si->...ci", scores, key)
    if before is not None:
      old = before[..., :head_dim]
      out += from_start * _product("...ij,...cj->...ci", old, x)
    return out + regularizer[None, :, None, None, :] * x

  solve = functools.partial(_conjugate_gradients, num_iterations)
  x = jax.lax.custom_linear_solve(times, query, solve, symmetric=True)
  scores = decays * (x @ jnp.swapaxes(key, -2, -1))
  out = scores @ value[..., head_dim:]
  if before is not None:
    out += (from_start * x) @ before[..., head_dim:]
  out = recurrence.unchunked(out)
  if resets is not None:
    out = packing.with_states(out, after)
  return after[:, :, -1], out


# The residual is only as exact as its products, which a GPU rounds below float32.
_product = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def _conjugate_gradients(num_iterations, times, target):
  """Solves times(x) = target for x. Rows that have converged no longer change."""

  def square(x):
    return jnp.sum(x * x, axis=-1, keepdims=True)

  # Squares of an unscaled row, such as a small gradient, may leave float32's range.
  largest = jnp.max(jnp.abs(target), axis=-1, keepdims=True)
  largest = jnp.where(largest > 0.0, largest, 1.0)
  target = target / largest
  least = 1e-15 * square(target)

  def iteration(_, now):
    x, residual, direction, error = now
    ahead = times(direction)
    curvature = jnp.sum(direction * ahead, axis=-1, keepdims=True)
    goes_on = error > least
    step = jnp.where(goes_on, error / jnp.where(goes_on, curvature, 1.0), 0.0)
    x, residual = x + step * direction, residual - step * ahead
    before, error = jnp.where(goes_on, error, 1.0), square(residual)
    direction = residual + error / before * direction
    return x, residual, direction, error

  now = jnp.zeros_like(target), target, target, square(target)
  return largest * jax.lax.fori_loop(0, num_iterations, iteration, now)[0]


@attention_factory
def mesa(num_iterations: int = 30, min_regularizer: float = 0.25) -> Attention:
  """MesaNet's mixer: `mesa_attention` with decays and β computed from the inputs.

    k_t, q_t ← k_t / |k_t|, q_t / |q_t|        λ = λ₀ + softplus(w)
    g_t = log sigmoid(x_t · W_g + b_g)         β_t = sigmoid(x_t · W_β + b_β)

  Args:
    num_iterations: the number of conjugate-gradient iterations.
    min_regularizer: λ₀.

  Returns:
    An `Attention` with `gates`, causal only, whose cache is N·H·2H numbers for each
    example. Its parameters are `decay_kernel [F, N]`, `decay_bias [N]`, `rate_kernel
    [F, N]`, `rate_bias [N]` and `regularizer [N, H]` (w, where λ is initially 1).

  Raises:
    ValueError: `num_iterations` is below 1, or `min_regularizer` not in [0, 1).

  Its model also has `short_convolution`, whose SiLU is the paper's, and
  `output_norm='rms'`. Departs from the paper in two points: `short_convolution`
  convolves values, too, and e^g is not multiplied by 1 − (1 − 0.9975) β², as in the
  paper's experiments. Paper: arXiv:2506.05233, section 2, equations 4 to 8.
  """
  if not 0.0 <= min_regularizer < 1.0:
    raise ValueError(
      f"min_regularizer: expected at least 0 and below 1, got {min_regularizer!r}"
    )

  def init(key, dims):
    decay, rate = jax.random.split(key)
    heads = dims.num_heads
    start = jnp.log(jnp.expm1(1.0 - min_regularizer))
    return {
      "decay_kernel": gates.kernel(decay, dims.features, heads),
      "decay_bias": jnp.zeros(heads),
      "rate_kernel": gates.kernel(rate, dims.features, heads),
      "rate_bias": jnp.zeros(heads),
      "regularizer": jnp.full((heads, dims.head_dim), start),
    }

  def gate(name, activation):
    def read(params, inputs):
      x = gates.project(inputs, params[f"{name}_kernel"])
      return activation(x + params[f"{name}_bias"][None, None])

    return read

  def mixed(params, query, key, value, **options):
    ridge = min_regularizer + jax.nn.softplus(params["regularizer"])
    options |= {"num_iterations": num_iterations, "regularizer": ridge}
    return _recurrence(query, key, value, normalize_keys=True, **options)

  def init_state(batch, dims):
    width = dims.head_dim + dims.values
    shape = batch, dims.num_heads, dims.head_dim, width
    return jnp.zeros(shape, jnp.float32)

  read = {
    "log_decay": gate("decay", jax.nn.log_sigmoid),
    "beta": gate("rate", jax.nn.sigmoid),
  }
  return gates.recurrent_mechanism(
    "mesa", mixed, init=init, gates=read, init_state=init_state
  )

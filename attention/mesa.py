"""MesaNet: each query solves a least-squares problem over the past."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention.decorators import attention_factory, attention_function
from attention.mechanism import Attention
from attention.recurrent import gates
from attention.recurrent.regression import regression_attention


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
  """Each query applies the linear map that best predicts past values from past keys.

    out = mesa_attention(q, k, v, log_decay=g, beta=b, regularizer=r)

    S_kk ← e^g_t S_kk + β_t k_t k_tᵀ        S_kv ← e^g_t S_kv + β_t k_t v_tᵀ
    out_t = scale · S_kvᵀ (S_kk + diag(λ))⁻¹ q_t

  for each head: the prediction for q_t by ridge regression from k_s to v_s, s ≤ t, with
  weights β_s e^(Σ g). Conjugate gradients solve the system. Queries and keys should
  have length 1, as in the paper; `normalize_keys=True` ensures it. All computation is
  in float32.

  Args:
    query: `[B, T, N, H]`.
    key: `[B, T, K, H]`.
    value: `[B, T, K, V]`.
    log_decay: g, at most 0.
    beta: β, at least 0.
    regularizer: λ, above 0.
    num_iterations: the number of conjugate-gradient iterations. H suffice, up to
      rounding. Each reduces the error at least by the factor (√c − 1)/(√c + 1), where c
      is the condition number of the system. For similar keys without decay, 30 may be
      too few.
    normalize_keys: as in `delta_rule_attention`.
    scale: factor of the queries; None means 1.
    initial_state: [S_kk, S_kv] before the first position, X = H+V, with symmetric
      S_kk; None means 0.
    mask: key mask `[B, 1, 1, T]`; at masked positions the state does not change.
    is_causal: must be True, because the recurrence runs forward.
    segment_ids: `[B, T]`; where they change, the state restarts at 0.
    num_segments: G, for one initial and one final state per segment.
    return_state: whether to return the last state as well.

  Results and errors: as in `gated_linear_attention`; the state is
  `[B, N, H, H+V]`, or with `num_segments` `[B, G, N, H, H+V]`.

  Gradients are those of the exact solution: the backward pass does not differentiate
  the iterations, but solves the system with another right-hand side. The iterations
  start at 0 and the authors' at q / diag(S_kk + λ), so the two differ until they
  converge.

  Cost, with I iterations and C = `scan.CHUNK`: time T·N·(H+C)·(I·H + V), with
  gradients about four times that; memory B·T·N·(H+V), with gradients also one state
  for each chunk.

  Paper: MesaNet: sequence modeling by locally optimal test-time training,
  arXiv:2506.05233.
  """
  return _recurrence(**locals())


def _recurrence(
  query, key, value, *, regularizer, num_iterations, scale, **options
) -> Any:
  """`mesa_attention`, for sequence-sharded inputs as well."""
  return regression_attention(
    functools.partial(_solve, num_iterations),
    regularizer.astype(jnp.float32),
    query,
    key,
    value,
    scale=1.0 if scale is None else scale,
    **options,
  )


def _solve(num_iterations, regularizer, gram, query):
  """(S_kk + diag(λ))⁻¹ q."""

  def matvec(x):
    return gram.times(x) + regularizer[None, :, None, None, :] * x

  solve = functools.partial(_conjugate_gradients, num_iterations)
  return jax.lax.custom_linear_solve(matvec, query, solve, symmetric=True)


def _conjugate_gradients(num_iterations, matvec, target):
  """Solves matvec(x) = target for x; rows that have converged no longer change."""

  def square(x):
    return jnp.sum(x * x, axis=-1, keepdims=True)

  # Without scaling, the squares of small rows, such as gradients, would underflow.
  row_max = jnp.max(jnp.abs(target), axis=-1, keepdims=True)
  row_max = jnp.where(row_max > 0.0, row_max, 1.0)
  target = target / row_max
  tolerance = 1e-15 * square(target)

  def iteration(_, carry):
    x, residual, direction, error = carry
    product = matvec(direction)
    curvature = jnp.sum(direction * product, axis=-1, keepdims=True)
    is_active = error > tolerance
    step = error / jnp.where(is_active, curvature, 1.0)
    step = jnp.where(is_active, step, 0.0)
    x, residual = x + step * direction, residual - step * product
    previous, error = jnp.where(is_active, error, 1.0), square(residual)
    direction = residual + error / previous * direction
    return x, residual, direction, error

  first = jnp.zeros_like(target), target, target, square(target)
  return row_max * jax.lax.fori_loop(0, num_iterations, iteration, first)[0]


@attention_factory
def mesa(num_iterations: int = 30, min_regularizer: float = 0.25) -> Attention:
  """MesaNet's mixer: `mesa_attention` with decays and β computed from the inputs.

    k_t, q_t ← k_t / |k_t|, q_t / |q_t|        λ = λ₀ + softplus(w)
    g_t = log sigmoid(x_t · W_g + b_g)         β_t = sigmoid(x_t · W_β + b_β)

  Args:
    num_iterations: the number of conjugate-gradient iterations.
    min_regularizer: λ₀.

  Returns:
    A causal `Attention` with `gates`, whose cache is N·H·2H numbers per example. Its
    parameters are `decay_kernel [F, N]`, `decay_bias [N]`, `rate_kernel [F, N]`,
    `rate_bias [N]` and `regularizer [N, H]` (w, where λ is initially 1).

  Raises:
    ValueError: `num_iterations` is below 1, or `min_regularizer` not in [0, 1).

  The paper's model also has `short_convolution`, whose SiLU is the paper's, and
  `output_norm='rms'`. Differs from the paper in two points: `short_convolution`
  also convolves values, and e^g is not multiplied by 1 − (1 − 0.9975) β², as in the
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

  def recurrence(params, query, key, value, **options):
    ridge = min_regularizer + jax.nn.softplus(params["regularizer"])
    options |= {"num_iterations": num_iterations, "regularizer": ridge}
    return _recurrence(query, key, value, normalize_keys=True, **options)

  def init_state(batch, dims):
    width = dims.head_dim + dims.values
    shape = batch, dims.num_heads, dims.head_dim, width
    return jnp.zeros(shape, jnp.float32)

  gate_fns = {
    "log_decay": gates.affine_gate("decay", jax.nn.log_sigmoid),
    "beta": gates.affine_gate("rate", jax.nn.sigmoid),
  }
  return gates.recurrent_mechanism(
    "mesa", recurrence, init=init, gates=gate_fns, init_state=init_state
  )

"""Gated KalmaNet: ridge regression over the past, with an adaptive ridge."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention import checks
from attention.decorators import attention_factory, attention_function
from attention.mechanism import Attention
from attention.recurrent import gates
from attention.recurrent.regression import regression_attention


@attention_function
def gka_attention(
  query: Float[Array, "B T Q H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T U V"],
  *,
  log_decay: Float[Array, "B T N"],
  beta: Float[Array, "B T N"],
  alpha: Float[Array, "B T N"],
  ridge_ratio: float = 0.02,
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
  """Each query is mixed with its solution of a regression, and reads a state.

    out = gka_attention(q, k, v, log_decay=g, beta=b, alpha=a)

    S_kk ← e^g_t S_kk + β_t k_t k_tᵀ        S_kv ← e^g_t S_kv + β_t k_t v_tᵀ
    x_t = (S_kk + λ_t I)⁻¹ q_t              λ_t = r ‖S_kk‖_F
    out_t = scale · S_kvᵀ (q_t + α_t (x_t − q_t))

  for each head. With α = 1 it is the prediction for q_t by ridge regression from k_s to
  v_s, s ≤ t, as in `mesa_attention`; with α = 0 it is gated linear attention. λ bounds
  the condition number of the system by (1 + r) / r. All computation is in float32.

  Args:
    query: `[B, T, Q, H]`.
    key: `[B, T, K, H]`.
    value: `[B, T, U, V]`.
    log_decay: g, at most 0.
    beta: β, at least 0.
    alpha: α, from 0 to 1.
    ridge_ratio: r, above 0.
    num_iterations: I, the number of iterations. Each reduces the error at least by the
      factor (√c − 1)/(√c + 1), c = (1 + r) / r: after 30, it is at most 4·10⁻⁴ of x.
    normalize_keys: as in `delta_rule_attention`.
    scale: factor of the queries; None means 1/√H.
    initial_state: [S_kk, S_kv] before the first position, X = H+V, with symmetric
      S_kk; None means 0.
    mask: key mask `[B, 1, 1, T]`; at masked positions the state does not change, and α
      is 0.
    is_causal: must be True, because the recurrence runs forward.
    segment_ids: `[B, T]`; where they change, the state restarts at 0.
    num_segments: G, for one initial and one final state per segment.
    return_state: whether to return the last state as well.

  Results and errors: as in `gated_linear_attention`; the state is
  `[B, N, H, H+V]`, or with `num_segments` `[B, G, N, H, H+V]`.

  Chebyshev iteration solves the system, as in algorithm 1 of the paper. As in the
  paper's code, gradients are those of the exact solution: the backward pass does not
  differentiate the iterations, but solves the system with another right-hand side.

  Cost: time T·N·(H+C)·(I·H + C + V), where C = `scan.CHUNK`, with gradients about four
  times that; memory B·T·N·(H+V), with gradients also one state for each chunk.

  Paper: Gated KalmaNet: a fading memory layer through test-time ridge regression,
  arXiv:2511.21016, section 4.
  """
  return _recurrence(**locals())


def _recurrence(
  query, key, value, *, alpha, ridge_ratio, num_iterations, scale, **options
) -> Any:
  """`gka_attention`, for sequence-sharded inputs as well."""
  _check_ridge(ridge_ratio)
  return regression_attention(
    functools.partial(_mix_query, ridge_ratio, num_iterations),
    (),
    query,
    key,
    value,
    rows=(alpha,),
    is_sequential=True,
    scale=checks.softmax_scale(scale, query.shape[3]),
    **options,
  )


def _check_ridge(ridge_ratio):
  if not ridge_ratio > 0.0:
    raise ValueError(f"ridge_ratio: expected above 0, got {ridge_ratio!r}")


def _mix_query(ridge_ratio, num_iterations, params, gram, query, alpha):
  """The query mixed with x = (S_kk + λ I)⁻¹ q."""
  del params
  square = gram.square_norm()
  # An empty state has no values, so its solution does not matter.
  has_keys = square > jnp.finfo(square.dtype).tiny
  norm = jnp.sqrt(jnp.where(has_keys, square, 1.0))

  def matvec(x):
    return gram.times(x) + ridge_ratio * norm * x

  def solve(matvec, target):
    return _chebyshev(num_iterations, ridge_ratio, norm, matvec, target)

  x = jax.lax.custom_linear_solve(matvec, query, solve, symmetric=True)
  return query + alpha * (x - query)


def _chebyshev(num_iterations, ridge_ratio, norm, matvec, target):
  """Solves matvec(x) = target, whose eigenvalues are between λ and λ + `norm`."""
  ratio = 1.0 / (1.0 + 2.0 * ridge_ratio)
  weights = [2.0]
  for _ in range(num_iterations):
    weights.append(4.0 / (4.0 - ratio**2 * weights[-1]))
  step = 2.0 * ratio / norm

  def iteration(carry, weight):
    x, previous = carry
    residual = matvec(x) - target
    new = x - step * weight * residual + (weight - 1.0) * (x - previous)
    return (new, x), None

  start = step * target, jnp.zeros_like(target)
  weights = jnp.asarray(weights[1:], target.dtype)
  return jax.lax.scan(iteration, start, weights)[0][0]


@attention_factory
def gka(ridge_ratio: float = 0.02, num_iterations: int = 30) -> Attention:
  """Gated KalmaNet's mixer: `gka_attention` with gates computed from the inputs.

    k_t, q_t ← k_t / |k_t|, q_t / |q_t|        g_t = −e^A softplus(x_t · W_a + b)
    α_t = sigmoid(x_t · W_α + b_α)             β_t = sigmoid(x_t · W_β + b_β)²

  β is a square because its gate multiplies both keys and values.

  Args:
    ridge_ratio: r.
    num_iterations: I.

  Returns:
    A causal `Attention` with `gates`, whose cache is N·H·2H numbers per example. Its
    parameters are `rate_kernel [F, N]`, `rate_bias [N]`, `alpha_kernel [F, N]`,
    `alpha_bias [N]`, and those of the decays of `mamba2`: `step_kernel [F, N]`,
    `step_bias [N]` and `log_rate [N]`.

  Raises:
    ValueError: `ridge_ratio` is not above 0, or `num_iterations` is below 1.

  The paper's model also has `short_convolution`, `output_norm='rms'` and
  `output_gate='silu'`. β is that of the authors' code; the paper's experiments have
  β = 1. Paper: arXiv:2511.21016, section 4.
  """
  _check_ridge(ridge_ratio)

  def init(key, dims):
    rate, alpha, *steps = jax.random.split(key, 5)
    heads = dims.num_heads
    return {
      "rate_kernel": gates.kernel(rate, dims.features, heads),
      "rate_bias": jnp.zeros(heads),
      "alpha_kernel": gates.kernel(alpha, dims.features, heads),
      "alpha_bias": jnp.zeros(heads),
      **gates.step_params(steps, dims),
    }

  def squared_sigmoid(x):
    # With the authors' ε, the system is solvable even if the gate is 0.
    return jnp.square(jax.nn.sigmoid(x) + 1e-6)

  def recurrence(params, query, key, value, **options):
    del params
    options |= {"num_iterations": num_iterations, "ridge_ratio": ridge_ratio}
    return _recurrence(query, key, value, normalize_keys=True, **options)

  def init_state(batch, dims):
    width = dims.head_dim + dims.values
    shape = batch, dims.num_heads, dims.head_dim, width
    return jnp.zeros(shape, jnp.float32)

  return gates.recurrent_mechanism(
    "gka",
    recurrence,
    init=init,
    gates={
      "log_decay": gates.step_decay,
      "beta": gates.affine_gate("rate", squared_sigmoid),
      "alpha": gates.affine_gate("alpha", jax.nn.sigmoid),
    },
    arrays={"alpha": Float[Array, "B T N"]},
    init_state=init_state,
  )

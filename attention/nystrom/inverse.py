"""The pseudo-inverse between the two softmaxes of `nystrom_attention`."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def pseudo_inverse(
  matrix: Float[Array, "B N L L"], iterations: int, shared_start: bool = False
) -> Float[Array, "B N L L"]:
  """The pseudo-inverse of stochastic matrices, by the paper's iteration.

  A singular value σ ≪ 1 of A starts as σ/‖A‖₁ in Z and grows by 13/4 in each
  step until it reaches 1/σ. Where σ is 0, the rounding error of float32 grows
  in the same way, so that it shows in singular matrices after about ten steps.

  Args:
    matrix: `[B, N, L, L]`; each row sums to 1, or is zeros.
    iterations: the number of steps, each of four products.
    shared_start: start all matrices by the largest ‖A‖₁ among them.

  Returns:
    Z `[B, N, L, L]`, which converges to the pseudo-inverse with order three.

  Cost: time iterations·B·N·L³, memory B·N·L² forward.

  Paper: Nyströmformer, section 3.3, arXiv:2102.03902.
  """

  def dot(a, b):
    return jnp.einsum(
      "BNIJ,BNJK->BNIK", a, b, precision=jax.lax.Precision.HIGHEST
    )

  eye = jnp.eye(matrix.shape[-1], dtype=matrix.dtype)[None, None]

  def step(z, _):
    az = dot(matrix, z)
    inner = 15.0 * eye - dot(az, 7.0 * eye - az)
    return 0.25 * dot(z, 13.0 * eye - dot(az, inner)), None

  # ‖A‖∞, the largest sum of a row, is 1.
  norm = jnp.max(jnp.sum(matrix, axis=-2), axis=-1)[..., None, None]
  if shared_start:
    norm = jnp.max(norm, keepdims=True)
  first = jnp.swapaxes(matrix, -1, -2) / jnp.where(norm > 0.0, norm, 1.0)
  return jax.lax.scan(step, first, length=iterations)[0]

"""What the mechanisms of this folder read from their inputs, all in float32."""

from collections.abc import Mapping
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attention.plug import Dims

_RATES = (1.0, 16.0)
"""Between which e^A is drawn at first, as in Mamba-2."""

_STEPS = (0.001, 0.1)
"""Between which Δ begins, for inputs of 0."""

_TINY = 1e-6
"""ε of `unit_length`."""


def unit_length(x: Float[Array, "*A H"]) -> Float[Array, "*A H"]:
  """X / √(Σ x² + 10⁻⁶) along the last axis, in float32."""
  x = x.astype(jnp.float32)
  squares = jnp.sum(jnp.square(x), axis=-1, keepdims=True)
  return x * jax.lax.rsqrt(squares + _TINY)


def width(name: str, dims: Dims) -> int:
  """F, the width of the inputs.

  Raises:
    ValueError: it is not known.
  """
  if dims.features < 1:
    raise ValueError(
      f"features: {name} reads gates from inputs of Dims.features numbers; "
      f"expected at least 1, got {dims.features}"
    )
  return dims.features


def kernel(key: Array, *shape: int) -> Float[Array, "..."]:
  """A matrix from the first axis to the others, N(0, 1/F)."""
  return jax.random.normal(key, shape) / math.sqrt(shape[0])


def project(
  inputs: Float[Array, "B T F"], weights: Float[Array, "F *A"]
) -> Float[Array, "B T *A"]:
  """Inputs · weights, in float32."""
  return jnp.tensordot(inputs.astype(jnp.float32), weights, axes=1)


def rates(key: Array, num_heads: int) -> Float[Array, "N"]:
  """A of each head, where e^A is uniform between 1 and 16."""
  low, high = _RATES
  return jnp.log(jax.random.uniform(key, (num_heads,), minval=low, maxval=high))


def step_bias(key: Array, *shape: int) -> Float[Array, "..."]:
  """B where softplus(b) = Δ is 0.001 to 0.1, uniform in its logarithm."""
  low, high = map(math.log, _STEPS)
  step = jnp.exp(jax.random.uniform(key, shape, minval=low, maxval=high))
  return step + jnp.log(-jnp.expm1(-step))


def steps(
  params: Mapping[str, Array], inputs: Float[Array, "B T F"]
) -> tuple[Float[Array, "B T N"], Float[Array, "B T N"]]:
  """Δ = softplus(x · W + b) of each head, and the logarithm −Δ e^A of its decay."""
  step = project(inputs, params["step_kernel"])
  step = jax.nn.softplus(step + params["step_bias"][None, None])
  return step, -step * jnp.exp(params["log_rate"])[None, None]


def rate(
  params: Mapping[str, Array], inputs: Float[Array, "B T F"], most: float
) -> Float[Array, "B T N"]:
  """β = most · sigmoid(x · W_β), how much of a value replaces what is there."""
  return most * jax.nn.sigmoid(project(inputs, params["rate_kernel"]))


def check_max_rate(max_rate: float) -> None:
  """Checks the largest β of keys of length 1.

  Raises:
    ValueError: it is not above 0 and at most 2, beyond which states grow.
  """
  if not 0.0 < max_rate <= 2.0:
    raise ValueError(
      f"max_rate: expected above 0 and at most 2, got {max_rate!r}"
    )

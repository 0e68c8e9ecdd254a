"""The joint average over near keys and far ones.

With the near keys' sums o = Σ e^(x − m) v and l = Σ e^(x − m), and the far
keys' sums U = Σ φ(q)·φ(k) v and Z = Σ φ(q)·φ(k),

  out = (γ o + U) / (γ l + Z)
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

_NOTHING = 1e-30
"""Lower normalisers count as 0, as in `linear.state`."""


def average(
  share: Float[Array, "*#A 1"],
  near: Float[Array, "*A V"],
  total: Float[Array, "*A 1"],
  far: Float[Array, "*A X"] | None,
) -> Float[Array, "*A V"]:
  """The result; zeros where no key is seen.

  Args:
    share: γ.
    near: o.
    total: l.
    far: U and, in the last column, Z, X = V+1; None where no key is far.
  """
  numerator, normaliser = share * near, share * total
  if far is not None:
    numerator += far[..., :-1]
    normaliser += far[..., -1:]
  return _divided(numerator, normaliser)


@jax.custom_jvp
def _divided(
  numerator: Float[Array, "*A V"], normaliser: Float[Array, "*A 1"]
) -> Float[Array, "*A V"]:
  """Numerator / normaliser, or 0 where that is nothing."""
  return numerator * _inverse(normaliser)


def _inverse(normaliser):
  nothing = normaliser <= _NOTHING  # False for nan, which must show.
  return jnp.where(nothing, 0.0, 1.0 / jnp.where(nothing, 1.0, normaliser))


@_divided.defjvp
def _divided_jvp(primals, tangents):
  # The rule of JAX squares the normaliser, which leaves float32's range.
  out = _divided(*primals)
  of_numerator, of_normaliser = tangents
  change = of_numerator - out * of_normaliser
  return out, change * _inverse(primals[1])

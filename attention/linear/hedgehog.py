"""Hedgehog's feature map, which is trained (Zhang et al., 2024).

  φ(x) = [softmax(W x), softmax(−W x)]

has 2H features. W is one H×H matrix for each query head, and another for each
key head. It is multiplied before the loops, so that these have one map for all
heads, from H numbers to 2H, `hedgehog_features`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attention import plug


def hedgehog_features(x: Float[Array, "*A H"]) -> Float[Array, "*A M"]:
  """[softmax(x), softmax(−x)] of vectors that W was multiplied into; M = 2H."""
  return jnp.concatenate([jax.nn.softmax(x), jax.nn.softmax(-x)], axis=-1)


def through(
  kernel: Float[Array, "N H H"], x: Float[Array, "B T N H"]
) -> Float[Array, "B T N H"]:
  """Every head of `x` times its matrix, features of `x` first, in float32."""
  return jnp.einsum(
    "BTNH,NHI->BTNI", x.astype(jnp.float32), kernel.astype(jnp.float32)
  )


def identity_kernels(dims: plug.Dims) -> dict[str, Array]:
  """The kernels of queries and keys before training."""
  eye = jnp.eye(dims.head_dim)
  return {
    name: jnp.tile(eye, (heads, 1, 1))
    for name, heads in (
      ("query_kernel", dims.num_heads),
      ("key_kernel", dims.num_kv_heads),
    )
  }

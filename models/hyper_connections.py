"""Hyper-connections: several residual streams, which each sub-layer reads and mixes."""

from collections.abc import Callable

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from models.config import ModelConfig


class HyperConnection(nn.Module):
  """Weights with which a sub-layer f reads, mixes and updates n residual streams.

    h = Σ_i a_i x_i        x'_j = b_j f(h) + Σ_i M_ij x_i
    [α; β; μ] = norm(x) · W        a = σ(s_1 α + α') + ε        b = 2 σ(s_2 β + β')
    M = Sinkhorn(softmax over j of (s_3 μ_ij + μ'_ij) + ε)

  with x the features of all streams and a norm without a scale. Sinkhorn iterations
  divide the columns of M by their sums, and then alternately its rows and its columns,
  so that M is almost doubly stochastic and no stream grows.

  Attributes:
    config: the config of the model, whose `streams` is n.

  Papers: Hyper-connections, arXiv:2409.19606; mHC: manifold-constrained
  hyper-connections, arXiv:2512.24880; as in DeepSeek-V4 of transformers 5.24.0.
  """

  config: ModelConfig

  @nn.compact
  def __call__(
    self, streams: Float[Array, "B T n F"]
  ) -> tuple[Float[Array, "B T F"], Callable[[Array], Array]]:
    """Returns h, and a function that maps f(h) to the updated streams."""
    slot, count = self.config.slot, self.config.slot.streams
    weights = _weights(self, self.config, streams, (count, count, count**2))
    epsilon, dtype = slot.stream_epsilon, streams.dtype
    input_weights = jax.nn.sigmoid(weights[0]) + epsilon
    output_weights = 2.0 * jax.nn.sigmoid(weights[1])
    mixing = weights[2].reshape(*weights[2].shape[:2], count, count)
    mixing = jax.nn.softmax(mixing, axis=-1) + epsilon

    def normalize(x, axis):
      return x / (jnp.sum(x, axis=axis, keepdims=True) + epsilon)

    def step(_, x):
      return normalize(normalize(x, -1), -2)

    mixing = normalize(mixing, -2)
    mixing = jax.lax.fori_loop(0, slot.stream_steps - 1, step, mixing)
    inputs = jnp.einsum("btn,btnf->btf", input_weights, streams).astype(dtype)

    def merge(out):
      mixed = jnp.einsum("btij,btif->btjf", mixing.astype(dtype), streams)
      return output_weights.astype(dtype)[..., None] * out[:, :, None] + mixed

    return inputs, merge


class StreamHead(nn.Module):
  """Joins residual streams after the last layer, as for a sub-layer: h = Σ_i a_i x_i."""

  config: ModelConfig

  @nn.compact
  def __call__(self, streams: Float[Array, "B T n F"]) -> Float[Array, "B T F"]:
    """Joins the streams of each position."""
    slot = self.config.slot
    (weights,) = _weights(self, self.config, streams, (slot.streams,))
    weights = jax.nn.sigmoid(weights) + slot.stream_epsilon
    return jnp.einsum("btn,btnf->btf", weights, streams).astype(streams.dtype)


def _weights(module, config, streams, sizes):
  """Projects all streams to features of these sizes, with a scale and bias for each."""
  dtype = jnp.promote_types(streams.dtype, jnp.float32)
  x = streams.reshape(*streams.shape[:2], -1).astype(dtype)
  square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
  x = x * jax.lax.rsqrt(square + config.norm_epsilon)

  def param(name, init, *shape):
    value = module.param(name, init, shape, config.param_dtype)
    return value.astype(dtype)

  total = sum(sizes)
  kernel = param("kernel", nn.initializers.normal(0.02), x.shape[-1], total)
  bias = param("bias", nn.initializers.zeros, total)
  scale = param("scale", nn.initializers.ones, len(sizes))
  ends = [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)]
  parts = jnp.split(x @ kernel, ends, axis=-1), jnp.split(bias, ends)
  return [
    x * scale[i] + b[None, None]
    for i, (x, b) in enumerate(zip(*parts, strict=True))
  ]

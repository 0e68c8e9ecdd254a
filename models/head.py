"""The head of a model: from features of the last layer to logits."""

import functools

from flax import linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attention.names import resolve
from models import embeddings
from models.config import ACTIVATIONS, ModelConfig


class Head(nn.Module):
  """Computes logits of tokens, logits of classes, or returns the features.

    'tokens'  c · transform(x) · Eᵀ + b, transform(x) = norm(activation(x·W + b))
    'class'   transform(pooler(x₀)) · C + b, pooler(x) = activation(x·W + b)
    'hidden'  x

  Transform, pooler and biases are optional. If the table is narrower than x, the
  transform maps to its width; without a transform, a linear layer without a bias does.
  c is the config's `logit_scale`. `logit_soft_cap` caps the logits of tokens; with
  `mean_pooling`, x₀ is the mean of all tokens.

  Attributes:
    config: the config of the model.
    size: V, of the vocabulary or of the classes.

  Paper: BERT, arXiv:1810.04805, for transform and pooler.
  """

  config: ModelConfig
  size: int

  def setup(self) -> None:
    """Creates the layers and variables of the config."""
    config, output = self.config, self.config.output
    dense = functools.partial(
      nn.Dense, dtype=config.dtype, param_dtype=config.param_dtype
    )
    # Logits of tokens are products with a table of this width.
    is_tokens = config.head == "tokens"
    width = config.embedding_dim if is_tokens else config.features
    if output.head_transform:
      self.transform = dense(width, use_bias=output.transform_bias)
      self.norm = config.make_norm()
    elif width != config.features:
      self.projection = dense(width, use_bias=False)
    if output.pooler:
      self.pooler = dense(config.features)
    if config.head == "class":
      self.classes = dense(self.size, use_bias=output.head_bias)
    elif output.head_bias:
      self.bias = self.param(
        "bias", nn.initializers.zeros, (self.size,), config.param_dtype
      )

  def __call__(
    self,
    x: Float[Array, "B T F"],
    table: nn.Embed | None,
    mask: Bool[Array, "B T"] | None = None,
  ) -> Float[Array, "B T V"]:
    """Computes the logits, or returns the features.

    Args:
      x: `[B, T, F]`, features of the last layer.
      table: E, for head 'tokens'.
      mask: `[B, T]`, the positions that `mean_pooling` averages; None is all.
    """
    config, output = self.config, self.config.output
    if config.head == "hidden":
      if output.pooler and self.is_initializing():
        self.pooler(x[:, :1])  # Creates its variables for published weights.
      return x
    if config.head == "class":
      pooled = x[:, :1]
      if output.mean_pooling:
        if mask is not None:
          # The mean of a padding row, which fills the last batch, must not be NaN.
          mask = mask | ~jnp.any(mask, axis=1, keepdims=True)
        where = None if mask is None else mask[:, :, None]
        pooled = jnp.mean(x, axis=1, keepdims=True, where=where)
      if output.pooler:
        pooled = self._pool(self.pooler(pooled))
      if output.head_transform:
        pooled = self._transform(pooled)
      logits = self.classes(pooled)
      return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    assert table is not None  # Head 'tokens' has one.
    if output.head_transform:
      x = self._transform(x)
    elif config.embedding_dim != config.features:
      x = self.projection(x)
    if output.logit_scale != 1.0:
      x = x * output.logit_scale
    logits = embeddings.logits(x, table)
    if output.head_bias:
      logits += self.bias.reshape(*[1] * (logits.ndim - 1), -1)
    cap = output.logit_soft_cap
    return logits if cap is None else cap * jnp.tanh(logits / cap)

  def _pool(self, x):
    name = self.config.output.pooler_activation
    return jnp.tanh(x) if name == "tanh" else ACTIVATIONS[name](x)

  def _transform(self, x):
    config = self.config
    name = config.output.transform_activation or config.activation
    activation = resolve(name, ACTIVATIONS, "function")
    return self.norm(activation(self.transform(x)))

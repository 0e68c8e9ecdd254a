"""A feed-forward layer of experts; a router chooses some of them for each token."""

from collections.abc import Callable
import math
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from models.config import ModelConfig
from models.mlp import Mlp, gated_product
from models.mlp_config import MlpConfig


class Experts(nn.Module):
  """y = Σ_{e ∈ top k} w_e(x) · FFN_e(x) + FFN_shared(x), without dropped tokens.

  A router computes scores s = softmax(x·Wr) or sigmoid(x·Wr) in float32 or more. It
  chooses k experts by s + b, within the best groups of experts. Their weights w are
  their scores s without b, divided by their sum if the config says so, times a factor.
  An expert has no limit on its number of tokens, so the output for a token depends on
  no other token. If the config has a shared network, all tokens pass through it.

  With `balance_loss` α and 'losses' mutable, a call sows α times the loss of
  `load_balance`.

  Attributes:
    config: the config of the model.
    out_scale: factor of the last kernels' initial values.

  Cost: on a GPU or TPU, time k·B·T·F·I for experts of width I, and memory
  k·B·T·(F + I), by `jax.lax.ragged_dot`. On a CPU, JAX computes it as E masked
  products: time E·k·B·T·F·I.

  `jax.vmap` over only the inputs raises NotImplementedError in JAX 0.10, which lacks
  it for `ragged_dot`; use a larger batch instead.

  Departures: b is a variable in 'constants', so training does not change it; the
  paper of DeepSeek-V3 updates it by counts of tokens.

  Papers: Outrageously large neural networks, arXiv:1701.06538; Switch Transformers,
  arXiv:2101.03961; DeepSeekMoE, arXiv:2401.06066; DeepSeek-V3, section 2.1.2,
  arXiv:2412.19437.
  """

  config: ModelConfig
  out_scale: float

  @nn.compact
  def __call__(
    self,
    inputs: Float[Array, "B T F"],
    mask: Bool[Array, "B 1 1 T"] | None = None,
    ids: Int[Array, "B T"] | None = None,
  ) -> Float[Array, "B T F"]:
    """Applies the layer to each position.

    Args:
      inputs: `[B, T, F]`.
      ids: `[B, T]`, for `router_table`.
      mask: `[B, 1, 1, T]`; masked positions do not count in the load-balance loss, and
        never affect other positions. Masks of other shapes apply only to attention.
    """
    config, mlp = self.config, self.config.mlp
    dtype = jnp.promote_types(config.dtype, jnp.float32)
    tokens = inputs.reshape(-1, inputs.shape[-1])
    router = nn.Dense(
      mlp.num_experts,
      use_bias=mlp.router_bias,
      dtype=dtype,
      param_dtype=config.param_dtype,
      name="router",
    )
    bias = None
    if mlp.selection_bias and not mlp.router_table:
      shape = (mlp.num_experts,), config.param_dtype
      bias = self.variable(
        "constants", "selection_bias", jnp.zeros, *shape
      ).value
    scores = _SCORES[mlp.router_scores](router(tokens))
    if mlp.router_table:
      shape = mlp.router_table, mlp.experts_per_token
      table = self.variable(
        "constants", "router_table", _experts_in_turn, shape, mlp.num_experts
      ).value
      # A module is initialized without ids.
      rows = jnp.zeros(len(tokens), int) if ids is None else ids.reshape(-1)
      experts = table[rows]
    else:
      experts = choose(scores, mlp, bias)
    weights = jnp.take_along_axis(scores, experts, axis=1)
    if mlp.normalize_weights:
      # A sum of sigmoids can be 0 in float32.
      total = weights.sum(axis=1, keepdims=True)
      weights = weights / jnp.maximum(total, jnp.finfo(dtype).tiny)
    weights = weights * mlp.routed_scale
    is_token = None
    if mask is not None and mask.shape[1:3] == (1, 1):
      is_token = mask.reshape(-1)
      # Masked tokens come last, so that they do not change the order of the others,
      # and with it their rounding.
      experts = jnp.where(is_token[:, None], experts, mlp.num_experts)
    self._sow(scores, experts, is_token)
    if mlp.expert_latent_features:
      tokens = self._dense(mlp.expert_latent_features, "latent_down")(tokens)
    out = apply_experts(
      tokens.astype(config.dtype),
      experts,
      weights,
      mlp.num_experts,
      self._network(),
    )
    if mlp.expert_latent_features:
      out = self._dense(config.features, "latent_up")(out)
    out = out.reshape(inputs.shape)
    if not mlp.shared_features:
      return out
    shared = Mlp(config, self.out_scale, mlp.shared_features, name="shared")
    shared = shared(inputs)
    if mlp.shared_gate:
      gate = self._dense(1, "shared_gate")
      shared = jax.nn.sigmoid(gate(inputs)) * shared
    return out + shared

  def _dense(self, features: int, name: str) -> nn.Dense:
    """Creates a projection without a bias."""
    config = self.config
    return nn.Dense(
      features,
      use_bias=False,
      dtype=config.dtype,
      param_dtype=config.param_dtype,
      name=name,
    )

  def _network(self) -> Callable[..., Array]:
    """Creates the networks of all experts; returns a function that applies them."""
    config, mlp = self.config, self.config.mlp
    width = mlp.expert_features or config.mlp_features
    features = mlp.expert_latent_features or config.features
    shapes = {
      "hidden": (features, width),
      "gate": (features, width),
      "out": (width, features),
    }
    kernels, biases = {}, {}
    for name in shapes if config.gated else ("hidden", "out"):
      scale = self.out_scale if name == "out" else 1.0
      init = nn.initializers.variance_scaling(
        scale**2, "fan_in", "truncated_normal", batch_axis=(0,)
      )
      shape, dtype = (mlp.num_experts, *shapes[name]), config.param_dtype
      kernels[name] = self.param(f"{name}_kernel", init, shape, dtype)
      if mlp.mlp_bias:
        zeros, shape = nn.initializers.zeros, (mlp.num_experts, shape[-1])
        biases[name] = self.param(f"{name}_bias", zeros, shape, dtype)

    def project(name, rows, experts, counts):
      kernel = kernels[name].astype(config.dtype)
      out = jax.lax.ragged_dot(rows, kernel, counts)
      if name in biases:
        out = out + biases[name].astype(config.dtype)[experts]
      return out

    def network(rows, *sizes):
      hidden = project("hidden", rows, *sizes)
      if config.gated:
        hidden = gated_product(config, project("gate", rows, *sizes), hidden)
      else:
        hidden = config.activation_function(hidden)
      return project("out", hidden, *sizes)

    return network

  def _sow(self, scores: Array, experts: Array, is_token: Any) -> None:
    """Sows the load-balance loss if 'losses' is mutable."""
    factor = self.config.mlp.balance_loss
    is_mutable = self.is_mutable_collection("losses")
    if not factor or not is_mutable or self.is_initializing():
      return
    loss = load_balance(scores, experts, is_token)
    self.sow("losses", "experts", factor * loss)


def _sqrt_softplus(x):
  return jnp.sqrt(jax.nn.softplus(x))


_SCORES = {
  "softmax": jax.nn.softmax,
  "sigmoid": jax.nn.sigmoid,
  "sqrt_softplus": _sqrt_softplus,
}
"""Maps `router_scores` to its function."""


def _experts_in_turn(shape, num_experts):
  """Returns a table that has the experts in turn."""
  return jnp.arange(math.prod(shape)).reshape(shape) % num_experts


def choose(
  scores: Float[Array, "M E"],
  config: MlpConfig,
  bias: Float[Array, "E"] | None = None,
) -> Int[Array, "M k"]:
  """Returns the k experts of each token with the largest sums of score and bias.

  With groups, only experts of the best groups are chosen: those with the largest sums
  of their two largest values (DeepSeek-V3, section 2.1.2).

  Args:
    scores: `[M, E]`, of M tokens.
    config: has the numbers of experts and of groups.
    bias: `[E]`.
  """
  values = scores
  if bias is not None:
    values = values + bias.astype(values.dtype)[None]
  groups, limit = config.expert_groups, config.groups_per_token
  if limit < groups:
    grouped = values.reshape(len(values), groups, -1)
    totals = jax.lax.top_k(grouped, min(2, grouped.shape[-1]))[0].sum(axis=-1)
    best = jax.lax.top_k(totals, limit)[1]
    is_best = (best[:, :, None] == jnp.arange(groups)[None, None]).any(1)
    values = jnp.where(is_best[:, :, None], grouped, -jnp.inf)
    values = values.reshape(scores.shape)
  return jax.lax.top_k(values, config.experts_per_token)[1]


def apply_experts(
  tokens: Float[Array, "M F"],
  experts: Int[Array, "M k"],
  weights: Float[Array, "M k"],
  num_experts: int,
  network: Callable[..., Array],
) -> Float[Array, "M F"]:
  """Returns Σ_j weights_j · network of experts_j for each token.

  Args:
    tokens: `[M, F]`.
    experts: `[M, k]`, the experts of each token; tokens with E go to the last expert,
      after all others.
    weights: `[M, k]`, the factors of the experts' outputs.
    num_experts: E.
    network: `(rows [R, F], experts [R], counts [E]) -> [R, F]`, for rows that are
      sorted by expert.
  """
  flat = experts.reshape(-1)
  order = jnp.argsort(flat)
  flat = jnp.minimum(flat, num_experts - 1)
  counts = jnp.bincount(flat, length=num_experts)
  rows = tokens[order // experts.shape[1]]
  rows = network(rows, flat[order], counts)
  results = rows[jnp.argsort(order)].reshape(*experts.shape, -1)
  return jnp.sum(results * weights[..., None], axis=1).astype(tokens.dtype)


def load_balance(
  scores: Float[Array, "M E"],
  experts: Int[Array, "M k"],
  mask: Bool[Array, "M"] | None = None,
) -> Float[Array, ""]:
  """Returns E · Σ_e f_e · P_e, which is 1 if all experts are chosen equally often.

  f_e is the share of expert e in all choices, which has no gradient, and P_e the mean
  of its score divided by the sum of a token's scores.

  Args:
    scores: `[M, E]`, of M tokens.
    experts: `[M, k]`, the experts of each token.
    mask: `[M]`, the tokens that count; None is all.

  Papers: Switch Transformers, equations 4 to 6, arXiv:2101.03961, for k = 1;
  DeepSeek-V3, equations 17 to 20, arXiv:2412.19437, for any k and sigmoid scores.
  """
  num_experts = scores.shape[1]
  token_weights = jnp.ones(len(scores), scores.dtype) if mask is None else mask
  token_weights = token_weights.astype(scores.dtype) / jnp.maximum(
    token_weights.sum(), 1
  )
  is_chosen = jax.nn.one_hot(experts, num_experts, dtype=scores.dtype)
  share = token_weights @ is_chosen.mean(axis=1)
  mean = token_weights @ (scores / scores.sum(axis=1, keepdims=True))
  return num_experts * jnp.sum(share * mean)

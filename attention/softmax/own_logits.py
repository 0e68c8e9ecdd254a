"""Trained sinks and forget gates, and the soft cap, of an exact mechanism."""

from collections.abc import Callable
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from attention import checks
from attention.mechanism import Dims, Variables

SUPPORTS = frozenset({"sinks", "logits_soft_cap", "log_forget", "mods"})
"""The options of a call that every exact mechanism takes."""


class OwnLogits(NamedTuple):
  """The arguments of a factory; see `attention.dense.dense`."""

  sinks: bool
  logits_soft_cap: float | None
  forget: bool

  @property
  def given(self) -> tuple[str, ...]:
    """The options that the mechanism sets, so that a call may not."""
    has_cap = self.logits_soft_cap is not None
    return ("sinks",) * self.sinks + ("logits_soft_cap",) * has_cap

  @property
  def is_plain(self) -> bool:
    """Whether the mechanism sets none of them."""
    return not (self.given or self.forget)

  def supports(self, exact: set[str]) -> frozenset[str]:
    """The capabilities of a mechanism with them, given those without.

    Forget gates need self-attention over positions in order; sequence shards support
    none of the three.
    """
    lost = set(self.given)
    if self.forget:
      lost |= {"cross", "rowwise", "global"}
    if not self.is_plain:
      lost.add("sequence")
    return (SUPPORTS | exact) - lost

  def init(self, key: Array, dims: Dims) -> Variables:
    """Initial parameters: sinks of 0, and the projection of the forget gates."""
    params = {}
    if self.sinks:
      params["sinks"] = jnp.zeros(dims.num_heads)
    if self.forget:
      checks.check_features("a forget gate", dims.features)
      shape = (dims.features, dims.num_heads)
      kernel = jax.random.normal(key, shape) / math.sqrt(dims.features)
      params["forget_kernel"] = kernel
      params["forget_bias"] = jnp.zeros(dims.num_heads)
    return {"params": params} if params else {}

  def options(self, variables: Variables) -> dict[str, Any]:
    """The options that the mechanism adds to a call."""
    values = {"logits_soft_cap": self.logits_soft_cap}
    if self.sinks:
      values["sinks"] = variables["params"]["sinks"]
    return {name: values[name] for name in self.given}

  @property
  def gates(self) -> Callable[..., dict[str, Array]] | None:
    """`(variables, inputs) -> {'log_forget': [B, T, N]}`, or None."""
    return _forget_gates if self.forget else None


def _forget_gates(variables, inputs):
  params = variables["params"]
  kernel, bias = params["forget_kernel"], params["forget_bias"]
  x = jnp.tensordot(inputs.astype(jnp.float32), kernel, axes=1)
  return {"log_forget": jax.nn.log_sigmoid(x + bias[None, None])}

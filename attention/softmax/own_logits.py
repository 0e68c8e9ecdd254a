"""Trained sinks, forget gates and the soft cap of an exact mechanism."""

from collections.abc import Callable
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from attention import checks
from attention.decorators import make_apply
from attention.mechanism import Dims, Variables
from attention.recurrent.gates import check_gates

SUPPORTS = frozenset({"sinks", "logits_soft_cap", "log_forget", "mods"})
"""The options of a call that every exact mechanism takes."""


class OwnLogits(NamedTuple):
  """The hyperparameters of a factory for logits; see `attention.dense.dense`."""

  sinks: bool | Literal["inputs"]
  logits_soft_cap: float | None
  forget: bool

  @property
  def fixed_options(self) -> tuple[str, ...]:
    """The options that the mechanism sets, which a call must not set."""
    has_cap = self.logits_soft_cap is not None
    return ("sinks",) * (self.sinks is True) + ("logits_soft_cap",) * has_cap

  @property
  def is_plain(self) -> bool:
    """Whether the mechanism sets none of them."""
    return not (self.fixed_options or self.forget or self.sinks)

  def supports(self, exact: set[str]) -> frozenset[str]:
    """The capabilities of a mechanism, given those of the plain mechanism.

    Sinks and gates that are computed from inputs need self-attention, forget gates also
    need consecutive positions, and sequence shards support neither them nor a soft cap.
    """
    unsupported = set(self.fixed_options)
    if self.sinks == "inputs":
      unsupported |= {"sinks", "cross", "rowwise"}
    if self.forget:
      unsupported |= {"cross", "rowwise", "global"}
    if not self.is_plain:
      unsupported.add("sequence")
    return (SUPPORTS | exact) - unsupported

  def init(self, key: Array, dims: Dims) -> Variables:
    """Initialises parameters: sinks of 0, and the projections of gates and sinks."""
    params = {}
    if self.sinks is True:
      params["sinks"] = jnp.zeros(dims.num_heads)
    if self.forget:
      params["forget_kernel"] = _kernel("a forget gate", key, dims)
      params["forget_bias"] = jnp.zeros(dims.num_heads)
    if self.sinks == "inputs":
      # A separate key, so that forget gates do not depend on `sinks`.
      key = jax.random.fold_in(key, 1)
      params["sink_kernel"] = _kernel("a sink", key, dims)
    return {"params": params} if params else {}

  def options(self, variables: Variables) -> dict[str, Any]:
    """The options that the mechanism adds to a call."""
    values = {"logits_soft_cap": self.logits_soft_cap}
    if self.sinks is True:
      values["sinks"] = variables["params"]["sinks"]
    return {name: values[name] for name in self.fixed_options}

  def make_apply(
    self, name: str, function: Callable[..., Any]
  ) -> Callable[..., Any]:
    """The `apply` of the mechanism; see `attention.decorators.make_apply`.

    Sinks that are computed from inputs are 0 at positions that a key mask excludes, so
    that padding never affects the output.
    """
    if self.gates is None:
      return make_apply(name, function, self.options)
    computed = ("log_forget",) * self.forget
    computed += ("sinks",) * (self.sinks == "inputs")

    def with_gates(query, key, value, **call):
      check_gates(name, call, *computed)
      if self.sinks != "inputs":
        return function(query, key, value, **call)
      lengths = [x.shape[1] for x in (query, key) if jnp.ndim(x) == 4]
      if len({*lengths}) > 1:
        raise ValueError(
          f"key: expected the {lengths[0]} positions of the query, got "
          f"{lengths[1]}; sinks that are computed from inputs are for self-attention"
        )
      mask = call.get("mask")
      shape = getattr(mask, "shape", ())
      if mask is not None and shape[2:] in ((1, 1), (1, query.shape[1])):
        keep = jnp.swapaxes(mask[:, :, 0], 1, 2)
        call["sinks"] = jnp.where(keep, call["sinks"], 0.0)
      return function(query, key, value, **call)

    return make_apply(name, with_gates, self.options)

  @property
  def gates(self) -> Callable[..., dict[str, Array]] | None:
    """`(variables, inputs) -> {'log_forget': [B, T, N], 'sinks': [B, T, N]}`.

    It returns those that the mechanism computes from inputs. None if there are none.
    """
    if not self.forget and self.sinks != "inputs":
      return None
    return self._gates

  def _gates(self, variables: Variables, inputs: Array) -> dict[str, Array]:
    params, inputs = variables["params"], inputs.astype(jnp.float32)
    gates = {}
    if self.forget:
      x = jnp.tensordot(inputs, params["forget_kernel"], axes=1)
      x += params["forget_bias"][None, None]
      gates["log_forget"] = jax.nn.log_sigmoid(x)
    if self.sinks == "inputs":
      gates["sinks"] = jnp.tensordot(inputs, params["sink_kernel"], axes=1)
    return gates


def _kernel(name, key, dims):
  """Draws a projection of the inputs to one number per head."""
  checks.check_features(name, dims.features)
  shape = dims.features, dims.num_heads
  return jax.random.normal(key, shape) / math.sqrt(dims.features)

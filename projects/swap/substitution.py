"""Pure functions that substitute a mechanism in the layers of a model.

The same compiled program is used for each choice of layers: an argument selects the
model's own mechanism or the other one for each attention module.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from flax import traverse_util
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attention import Attention
import models
from models.transformer import Transformer

Batch = Mapping[str, Any]
Mechanisms = Mapping[str, Mapping[str, Any]]
"""Maps each module to the variables of its mechanism."""


def logits(
  model: Transformer,
  variables: Mapping[str, Any],
  batch: Batch,
  attention: Attention,
  mechanisms: Mechanisms,
  swapped: Mapping[str, Bool[Array, ""]],
) -> Float[Array, "B T V"]:
  """Computes logits with a mechanism in some layers.

  Args:
    model: the model with its own mechanisms.
    variables: variables of the model.
    batch: a batch for `models.forward`.
    attention: the other mechanism.
    mechanisms: its variables in each module.
    swapped: for each module, whether the other mechanism is used.

  Returns:
    `[B, T, V]` float32.

  Raises:
    ValueError: the mechanism does not support the options of its call.
  """

  def replacement(module, original, apply, query, key, value, **call):
    del original
    if module not in mechanisms:  # Cross-attention is not replaced.
      return apply(query, key, value, **call)
    return jax.lax.cond(
      swapped[module],
      lambda: _call(attention, mechanisms[module], query, key, value, **call),
      lambda: apply(query, key, value, **call),
    )

  return models.replace_attention(model, variables, batch, replacement)


def check(attention: Attention) -> None:
  """Checks that a mechanism can be substituted in a model.

  Raises:
    ValueError: the mechanism cannot use the keys and values of the model.
  """
  if "own_keys" in attention.supports:
    raise ValueError(
      "it computes its own keys and values and cannot use the model's"
    )


def squares(
  model: Transformer,
  variables: Mapping[str, Any],
  batch: Batch,
  valid: Mapping[str, Bool[Array, "B T"]],
  attention: Attention,
  mechanisms: Mechanisms,
) -> dict[str, Float[Array, "2"]]:
  """Computes squared differences between a mechanism's outputs and the model's own.

      (‖out − own‖², ‖own‖²), for the same query, key and value

  These are from the original model, so errors do not accumulate over layers.

  Args:
    model: the model with its own mechanisms.
    variables: variables of the model.
    batch: a batch for `models.forward`.
    valid: masks of positions without padding, for 'encoder' and 'decoder'.
    attention: the other mechanism.
    mechanisms: its variables in each module.

  Returns:
    For each module, squared Frobenius norms over rows, positions, heads and features.
  """
  norms = {}

  def replacement(module, original, apply, query, key, value, **call):
    del original
    out = apply(query, key, value, **call)
    if module in mechanisms:
      other = _call(attention, mechanisms[module], query, key, value, **call)
      counts = valid[module.partition("_")[0]][:, :, None, None]
      norms[module] = jnp.stack(
        [_square(other - out, counts), _square(out, counts)]
      )
    return out

  models.replace_attention(model, variables, batch, replacement)
  return norms


def extract(
  variables: Mapping[str, Any], modules: Sequence[str]
) -> dict[str, dict[str, Any]]:
  """Extracts the variables of the mechanism in each module from those of a model."""
  flat = traverse_util.flatten_dict(dict(variables), sep="/")
  arrays: dict[str, dict[str, Any]] = {module: {} for module in modules}
  for path, array in flat.items():
    collection, _, rest = path.partition("/")
    module, separator, name = rest.partition("/attention/")
    if separator and module in arrays:
      arrays[module][f"{collection}/{name}"] = array
  return {
    module: traverse_util.unflatten_dict(flat_variables, sep="/")
    for module, flat_variables in arrays.items()
  }


def insert(
  variables: Mapping[str, Any], mechanisms: Mechanisms
) -> dict[str, Any]:
  """Inserts the variables of a mechanism into those of a model; inverts `extract`.

  Args:
    variables: variables of a model.
    mechanisms: variables of the mechanism in each module; variables that the model
      does not have are ignored.
  """
  flat = traverse_util.flatten_dict(
    dict(variables), sep="/", keep_empty_nodes=True
  )
  for module, tree in mechanisms.items():
    for name, array in traverse_util.flatten_dict(dict(tree), sep="/").items():
      collection, _, rest = name.partition("/")
      path = f"{collection}/{module}/attention/{rest}"
      if path in flat:
        flat[path] = array
  return traverse_util.unflatten_dict(flat, sep="/")


def valid_positions(batch: Batch, pad_id: int) -> dict[str, Any]:
  """Returns masks of positions without padding, for 'encoder' and 'decoder'."""
  masks = {}
  if "source" in batch:
    masks["encoder"] = batch.get("source_mask", batch["source"] != pad_id)
  if "inputs" in batch:
    masks["decoder"] = batch["weights"] > 0
  return masks


def _call(
  attention: Attention,
  variables: Mapping[str, Any],
  query: Array,
  key: Array | None,
  value: Array | None,
  *,
  inputs: Array,
  gates: Mapping[str, Array],
  **call: Any,
) -> Array:
  """Calls a mechanism with the arguments of another one, except its gates.

  Gates are computed from the inputs with the mechanism's own variables.
  """
  del gates
  check(attention)
  if value is None:
    raise ValueError(
      "the model's mechanism computes its own values, which another mechanism cannot use"
    )
  if "shared_qk" in attention.supports:
    key = None
  elif key is None:
    raise ValueError("the model has no keys of its own, only queries")
  if attention.gates is not None:
    call |= attention.gates(variables, inputs)
  out = attention.apply(variables, query, key, value, **call)
  return out.astype(query.dtype)


def _square(x: Array, counts: Array) -> Array:
  return jnp.sum(jnp.square(x.astype(jnp.float32)) * counts)

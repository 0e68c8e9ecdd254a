"""A mechanism in the layers of a model, as pure functions.

One program serves every choice of layers: at each attention it computes the
model's own mechanism or the other one, as an argument says.
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
"""Place -> variables of the mechanism that is put there."""


def logits(
  model: Transformer,
  variables: Mapping[str, Any],
  batch: Batch,
  attention: Attention,
  mechanisms: Mechanisms,
  swapped: Mapping[str, Bool[Array, ""]],
) -> Float[Array, "B T V"]:
  """Logits with a mechanism in some layers; traceable, one program for all.

  Args:
    model: with its own mechanisms.
    variables: of the model.
    batch: as `models.forward` reads it.
    attention: the other mechanism.
    mechanisms: its variables at every place.
    swapped: place -> whether it is used there.

  Returns:
    `[B, T, V]` float32.

  Raises:
    ValueError: the mechanism cannot honour what it is called with.
  """

  def replacement(place, record, own, query, key, value, **call):
    del record
    if place not in mechanisms:  # Cross-attention stays.
      return own(query, key, value, **call)
    return jax.lax.cond(
      swapped[place],
      lambda: _called(attention, mechanisms[place], query, key, value, **call),
      lambda: own(query, key, value, **call),
    )

  return models.replace_attention(model, variables, batch, replacement)


def check(attention: Attention) -> None:
  """Checks that a mechanism can be put into a model.

  Raises:
    ValueError: it cannot use the keys and values of the model.
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
  """Squared differences between a mechanism's outputs and the model's own.

      (‖out − own‖², ‖own‖²), of the same query, key and value

  which are those of the model as it is, so that layers do not add up.

  Args:
    model: with its own mechanisms.
    variables: of the model.
    batch: as `models.forward` reads it.
    valid: 'encoder' and 'decoder' -> positions that are not padding.
    attention: the other mechanism.
    mechanisms: its variables at every place.

  Returns:
    Place -> squared Frobenius norms over rows, positions, heads and features.
  """
  norms = {}

  def replacement(place, record, own, query, key, value, **call):
    del record
    out = own(query, key, value, **call)
    if place in mechanisms:
      other = _called(attention, mechanisms[place], query, key, value, **call)
      counts = valid[place.partition("_")[0]][:, :, None, None]
      norms[place] = jnp.stack(
        [_square(other - out, counts), _square(out, counts)]
      )
    return out

  models.replace_attention(model, variables, batch, replacement)
  return norms


def drawn(
  variables: Mapping[str, Any], places: Sequence[str]
) -> dict[str, dict[str, Any]]:
  """The mechanism's variables in a model that contains it: place -> variables."""
  flat = traverse_util.flatten_dict(dict(variables), sep="/")
  arrays: dict[str, dict[str, Any]] = {place: {} for place in places}
  for path, array in flat.items():
    collection, _, rest = path.partition("/")
    place, inside, name = rest.partition("/attention/")
    if inside and place in arrays:
      arrays[place][f"{collection}/{name}"] = array
  return {
    place: traverse_util.unflatten_dict(own, sep="/")
    for place, own in arrays.items()
  }


def filled(
  variables: Mapping[str, Any], mechanisms: Mechanisms
) -> dict[str, Any]:
  """Inserts the variables of a mechanism into those of a model; inverts `drawn`.

  Args:
    variables: of a model.
    mechanisms: its variables at the places where the model has it; those that
      the model has not are left out.
  """
  flat = traverse_util.flatten_dict(
    dict(variables), sep="/", keep_empty_nodes=True
  )
  for place, own in mechanisms.items():
    for name, array in traverse_util.flatten_dict(dict(own), sep="/").items():
      collection, _, rest = name.partition("/")
      path = f"{collection}/{place}/attention/{rest}"
      if path in flat:
        flat[path] = array
  return traverse_util.unflatten_dict(flat, sep="/")


def valid_positions(batch: Batch, pad_id: int) -> dict[str, Any]:
  """'encoder' and 'decoder' -> positions of a text batch that are tokens."""
  masks = {}
  if "source" in batch:
    masks["encoder"] = batch.get("source_mask", batch["source"] != pad_id)
  if "inputs" in batch:
    masks["decoder"] = batch["weights"] > 0
  return masks


def _called(
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

  It has gates of its own, made of the inputs with its own variables.
  """
  del gates
  check(attention)
  if value is None:
    raise ValueError("the model has no values of its own, only queries")
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

"""Converts a model that was trained here to a published family."""

from collections.abc import Mapping
import math
from typing import Any

from flax import traverse_util
import jax.numpy as jnp
import numpy as np

from models import nested
from models.kind import Model
from models.published.catalog import FAMILIES
from models.published.family import Description
from models.published.load import Pretrained, make_model
from models.transformer import Transformer
from settings.build import to_mapping
from settings.field_values import flatten


def as_pretrained(model: Model, variables: Mapping[str, Any]) -> Pretrained:
  """Converts a trained model to an equal one that `save_pretrained` can write.

  Published families do not scale embeddings by √F and have fewer options than
  `ModelConfig`. The missing ones are folded into weights: the scale into the tables
  (the softmax then has a separate one), sines into a table of positions, and missing
  biases become zeros. Logits are equal within rounding.

  Args:
    model: a Transformer, or a model with `as_published`, which returns its
      description and variables.
    variables: variables of the model.

  Returns:
    The model in the first family that can express it.

  Raises:
    ValueError: no family can; the message has the fields that prevent each.
  """
  if hasattr(model, "as_published"):
    description, folded = model.as_published(variables)
  elif type(model) is Transformer:
    description, folded = _fold(model, variables)
  else:
    raise ValueError(
      f"no published family fits this model: none has kind '{model.config.kind}'"
    )
  config, reasons = description.config, []
  for family in FAMILIES.values():
    if family.config_type is not type(config):
      continue
    for architecture, head in family.architectures.items():
      if family.to_json is None or head != config.head:
        continue
      tied = getattr(config, "tie_embeddings", True)
      names = [] if tied else ["lm_head.weight"]
      try:
        hf_config = family.to_json(description) | {
          "architectures": [architecture]
        }
        published = family.describe(hf_config, names, head).config
      except ValueError as error:
        reasons.append(f"{family.name} does not fit: {error}")
        continue
      if published.kind != config.kind:
        continue
      differences = _differences(config, published)
      if not differences:
        folded_model = make_model(description)
        return Pretrained(
          family.name, architecture, folded_model, folded, hf_config
        )
      more = f" and {len(differences) - 3} more" if len(differences) > 3 else ""
      others = ", ".join(differences[:3]) + more
      reasons.append(f"{family.name} differs in {others}")
  if not reasons:
    raise ValueError(
      "no published family fits this model: no family for export has kind "
      f"'{config.kind}' with head '{config.head}'"
    )
  raise ValueError(f"no published family fits this model: {'; '.join(reasons)}")


def _differences(ours: Any, theirs: Any) -> list[str]:
  """The fields in which two models differ, except mechanisms and dtypes."""
  free = {"dtype", "param_dtype", "attention_dropout_rate"}
  free |= {*ours.attentions, *theirs.attentions}
  own, published = (flatten(to_mapping(config)) for config in (ours, theirs))
  return [
    f"{name.rpartition('.')[2]} ({published.get(name)})"
    for name, value in own.items()
    if name.partition(".")[0] not in free and value != published.get(name)
  ]


def _fold(
  model: Transformer, variables: Mapping[str, Any]
) -> tuple[Description, Mapping[str, Any]]:
  """An equal model with unscaled embeddings, learned positions and biases."""
  config = model.config
  changes: dict[str, Any] = {}
  arrays: dict[str, Any] = traverse_util.flatten_dict(dict(variables), sep="/")
  length = max(model.max_source_length, model.max_target_length)
  side = "source" if config.kind == "encoder" else "target"
  scale = config.embedding.embedding_scale
  scale = math.sqrt(config.features) if scale is None else scale
  if scale != 1.0:
    if config.tie_embeddings and config.head == "tokens":
      table = arrays.pop("params/target_embedding/embedding")
      arrays["params/output_embedding/embedding"] = table
      arrays[f"params/{side}_embedding/embedding"] = table
    for path in arrays:
      if path.endswith((f"{side}_embedding/embedding", "_positions/embedding")):
        arrays[path] = arrays[path] * scale
    changes |= {"embedding_scale": 1.0, "tie_embeddings": False}
  if added := config.added_position:
    encodings = added(np.arange(length)[None], config.features)[0]
    dtype = config.param_dtype
    arrays[f"params/{side}_positions/embedding"] = encodings.astype(dtype)
    changes["position"] = "learned"
  # The sizes of the task are those of the model now.
  changes |= {"vocab_size": None, "max_length": None}
  changes |= with_biases(config, arrays)
  description = Description(
    nested.replace(config, **changes),
    model.source_vocab_size or model.target_vocab_size,
    model.target_vocab_size,
    length,
  )
  tree = traverse_util.unflatten_dict(arrays, sep="/")
  return description, {"params": {}, "constants": {}, **tree}


def with_biases(config: Any, arrays: dict[str, Any]) -> dict[str, Any]:
  """Adds biases of zeros to a Transformer without them.

  Args:
    config: config of the model.
    arrays: variables of the model by path, to which biases are added.

  Returns:
    The config fields that change, without those that follow from others.
  """
  for path, array in list(arrays.items()):
    module = path.removesuffix("/kernel")
    if module.endswith(("/query", "/key", "/value", "/out", "/hidden")):
      bias = jnp.zeros(array.shape[-1:], array.dtype)
      arrays.setdefault(f"{module}/bias", bias)
  biases = {"attention_bias": True, "out_bias": None, "mlp_bias": True}
  changes: dict[str, Any] = biases
  if config.query_dim * config.num_heads == config.features:
    changes["head_dim"] = None
  if config.kv_heads == config.num_heads:
    changes["num_kv_heads"] = None
  return changes

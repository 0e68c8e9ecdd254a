"""Loads and saves published models."""

from collections.abc import Collection, Mapping, Sequence
import dataclasses
import os
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import jax
from jaxtyping import Array, Float
import numpy as np

from attention.names import no_imports
from models import nested
from models.api import create, forward
from models.attention_config import NEEDS, AttentionConfig, Layers
from models.published import files, texts, weights
from models.published.catalog import FAMILIES, READERS, find
from models.published.family import Description, Family
from models.published.inputs import to_batch
from models.published.keys import Keys
from models.published.rotary import both_versions
from models.published.weights import MECHANISMS

Attention = str | Mapping[str, Any] | Layers | Sequence[Any] | None
"""The name of a mechanism, a name with options, or a list that layers take in turn."""


class Pretrained(NamedTuple):
  """A model with its weights.

  Attributes:
    family: `model_type` of transformers, such as 'bert'.
    architecture: class of transformers, such as 'BertForMaskedLM'.
    model: model from `models.create`.
    variables: `{'params': …, 'constants': …}`.
    config: the content of `config.json`.
    kept: tensors of the folder that affect no output, see `Family.kept`.
  """

  family: str
  architecture: str
  model: Any
  variables: Mapping[str, Any]
  config: Mapping[str, Any]
  kept: Mapping[str, np.ndarray] = MappingProxyType({})

  def logits(
    self, variables: Mapping[str, Any], **inputs: Any
  ) -> Float[Array, "..."]:
    """Computes the output of the architecture; pure and traceable.

    Args:
      variables: `self.variables`, or others of the same shapes.
      **inputs: named as in transformers: `input_ids [B, T]`, `attention_mask
        [B, T]` of 0 and 1, `token_type_ids [B, T]`, `global_attention_mask
        [B, T]`, `decoder_input_ids [B, T]`, `decoder_attention_mask [B, T]`,
        `pixel_values [B, H, W, C]`, `input_values [B, samples]`. A traced
        `global_attention_mask` costs as if all tokens were global; close over a
        concrete array if only a few are. Masked ids may be any number. A traced id
        cannot be checked: outside the vocabulary, the outputs that depend on it are
        NaN.

    Returns:
      Logits of tokens `[B, T, V]` or of classes `[B, V]`, or the last hidden
      state `[B, T, F]`.

    Raises:
      ValueError: an input is unknown, missing, or differs from the ids in shape, or
        an id is outside the vocabulary.
    """
    family = FAMILIES[self.family]
    batch = to_batch(
      self.model, family.inputs, inputs, self.config, family.needs_first_token
    )
    out = forward(self.model, variables, batch)
    # The mean of DeiT's two heads.
    return out.mean(1) if self.model.config.head == "class" else out


def load_pretrained(
  folder: str | os.PathLike[str],
  attention: Attention = None,
  dtype: str = "float32",
  *,
  key: Array | None = None,
) -> Pretrained:
  """Loads a published model.

  Args:
    folder: a folder in the format of Hugging Face: `config.json` and
      `model.safetensors`, or `model.safetensors.index.json` with its shards; or the
      workdir of a run. The folder is data: an import path in it raises an error.
    attention: replaces the mechanism of every self-attention: a name ('performer'), a
      name with options ({'name': 'performer', 'num_features': 64}), or a list of
      these that layers take in turn; None keeps the model's. An import path is
      allowed here.
    dtype: dtype of activations and variables; 'float64' needs `jax_enable_x64`.
    key: initializes a mechanism's own variables that the folder does not have; None
      is `jax.random.key(0)`.

  Returns:
    The model, its variables and `logits`. There is no dropout of attention weights,
    which many mechanisms do not have.

  Raises:
    FileNotFoundError: a file is missing.
    ValueError: an architecture is unknown; a tensor is missing, unknown, of another
      shape, or of integers; a file is corrupt; or a mechanism lacks a capability. The
      message names the file and the key.
  """
  folder = Path(folder)
  if dtype == "float64" and not jax.config.read("jax_enable_x64"):
    raise ValueError(
      "dtype: float64 needs jax.config.update('jax_enable_x64', True)"
    )
  replaced = () if attention is None else tuple(NEEDS)
  opened = open_folder(folder, replaced)
  model = make_model(with_attention(opened.description, attention, dtype))
  return opened.pretrained(model, read_variables(opened, model, key))


class Opened(NamedTuple):
  """A folder that was read, before its variables are made.

  Attributes:
    folder: its path.
    family: family of the model.
    architecture: its class in transformers.
    hf_config: content of `config.json`.
    description: the model with its own mechanisms.
    tensors: tensors by their names in the family's table.
    kept: tensors that affect no output.
    published: the model with the mechanisms of its family.
    left_out: whether a mechanism of the folder is missing in `description`.
  """

  folder: Path
  family: Family
  architecture: str
  hf_config: Mapping[str, Any]
  description: Description
  tensors: files.Tensors
  kept: Mapping[str, np.ndarray]
  published: Description
  left_out: bool = False

  def pretrained(self, model: Any, variables: Any) -> Pretrained:
    """Combines a model and its variables with the other content of the folder."""
    # Transformers needs the tensors of a mechanism that was replaced.
    names = weights.spare_names(self.family, make_model(self.published), model)
    spare = {x: self.tensors[x].read() for x in names if x in self.tensors}
    weights.split_joined(self.family, spare)
    if self.family.architectures[self.architecture] == "hidden":
      spare = {n.removeprefix(self.family.prefix): x for n, x in spare.items()}
    return Pretrained(
      self.family.name,
      self.architecture,
      model,
      variables,
      self.hf_config,
      {**self.kept, **spare},
    )


def open_folder(folder: Path, replaced: Collection[str] = ()) -> Opened:
  """Reads a folder, or a run, and describes its model.

  The folder is data: nothing that it names is imported. `training.inference.published`,
  `lab.load_run` and `generate.py --workdir` open a run as a program.

  Args:
    folder: folder of weights, or the workdir of a run.
    replaced: fields whose mechanisms the caller replaces. Import paths in these fields
      are ignored; in other fields of a folder of weights, they raise an error.

  Raises:
    FileNotFoundError: a file is missing.
    ValueError: as in `load_pretrained`.
  """
  with no_imports():
    return _open_folder(folder, replaced)


def _open_folder(folder: Path, replaced: Collection[str]) -> Opened:
  arrays = None
  if files.has_tensors(folder) or not (folder / "checkpoints").is_dir():
    hf_config = files.read_config(folder)
  else:
    hf_config, arrays = _to_published(READERS["run"](folder))
  text = texts.find(hf_config)
  if text is not None:
    try:
      hf_config = texts.text_config(hf_config, text)
    except ValueError as error:
      raise ValueError(f"{folder / files.CONFIG}: {error}") from None
  keys = Keys(hf_config)
  family, architecture = _architecture(folder, keys)
  raw = (
    files.read_tensors(folder)
    if arrays is None
    else {
      name: files.Tensor(lambda x=x: x, folder) for name, x in arrays.items()
    }
  )
  if text is not None:
    raw = texts.text_tensors(raw, text)
  tensors = weights.by_table_name(family, raw)
  head = family.architectures[architecture]
  try:
    description = family.describe(
      keys, weights.without_copies(family, tensors), head
    )
    make_model(description)  # It checks the sizes of mechanisms.
    own = keys.get(MECHANISMS)
    published = description
    description, left_out = _with_mechanisms(description, own, replaced)
    shapes = {} if family.kept is None else family.kept(keys)
    keys.check(family.name, family.without_effect)
  except ValueError as error:
    message = keys.translate(str(error))
    raise ValueError(f"{folder / files.CONFIG}: {message}") from None
  kept = {}
  for name, shape in shapes.items():
    if name not in tensors:
      raise ValueError(f"{folder}: {name}: missing; config.json requires it")
    tensor = tensors.pop(name)
    kept[name], file = tensor.read(), tensor.file
    if kept[name].shape != shape:
      raise ValueError(
        f"{file}: {name}: expected shape {shape}, got {kept[name].shape}"
      )
  return Opened(
    folder,
    family,
    architecture,
    hf_config,
    description,
    tensors,
    kept,
    published,
    left_out,
  )


def read_variables(
  opened: Opened, model: Any, key: Array | None = None
) -> dict[str, Any]:
  """Makes the variables of a model from a folder that may have other mechanisms.

  Args:
    opened: the folder.
    model: the model of the folder, except for its mechanisms.
    key: initializes a mechanism's own variables that the folder does not have; None
      is `jax.random.key(0)`.

  Raises:
    ValueError: as in `load_pretrained`.
  """
  key = jax.random.key(0) if key is None else key
  published = make_model(opened.description)
  original = make_model(opened.published)
  tensors = opened.tensors
  if opened.left_out:
    names = {*weights.own_names(model)}
    tensors = {
      name: tensor
      for name, tensor in tensors.items()
      if name in names or not name.startswith(f"{MECHANISMS}/")
    }
  return weights.read(
    opened.folder, opened.family, model, published, original, tensors, key
  )


def save_pretrained(folder: str | os.PathLike[str], p: Pretrained) -> None:
  """Writes a model as a folder that `load_pretrained` and transformers read.

  If a mechanism is not the published one, `config.json` names it and its variables are
  tensors whose names begin with 'attention_lab/'; transformers then reads the folder as
  the model with its own attention.

  Args:
    folder: the folder, which is created if it does not exist.
    p: the model; `p._replace(variables=…)` has other variables.

  Raises:
    ValueError: the variables are not those of the model, or not finite. Nothing is
      written.
  """
  files.write(Path(folder), *_to_published(p))


def _to_published(
  p: Pretrained,
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  """`config.json` and the tensors of a model."""
  family, ours = FAMILIES[p.family], p.model.config
  arrays = weights.write(family, p.model, p.variables)
  weights.split_joined(family, arrays)
  head = family.architectures[p.architecture]
  if head == "hidden":  # A base model's names have no prefix.
    arrays = {n.removeprefix(family.prefix): x for n, x in arrays.items()}
  arrays |= {**family.buffers(ours), **p.kept}
  config = {key: value for key, value in p.config.items() if key != MECHANISMS}
  config["architectures"] = [p.architecture]
  config |= dict.fromkeys(("dtype", "torch_dtype"), ours.param_dtype)
  if family.rotary is not None:
    config |= both_versions(config, family.rotary)
  published = family.describe(config, arrays, head).config
  if any(ours.layers(x) != published.layers(x) for x in ours.attentions):
    config[MECHANISMS] = {
      field: [{"name": one.name, **one.options} for one in mechanisms]
      for field, mechanisms in ours.attentions.items()
    }
  return config, arrays


def make_model(description: Description) -> Any:
  """Creates the module of a description; computes nothing."""
  config, length = description.config, description.max_length
  has_ids = not description.input_shapes
  has_source = has_ids and config.layout != "decoder"
  return create(
    config,
    source_vocab_size=description.vocab_size if has_source else None,
    target_vocab_size=description.outputs,
    max_source_length=length if has_source else None,
    max_target_length=length if has_ids else None,
    shared_vocabulary=has_ids and description.outputs == description.vocab_size,
    input_shapes=description.input_shapes,
  )


def with_attention(
  description: Description, attention: Attention, dtype: str
) -> Description:
  """Replaces the mechanisms and the dtype of a description.

  Raises:
    ValueError: a mechanism is unknown, or lacks a capability.
  """
  config = dataclasses.replace(
    description.config, dtype=dtype, param_dtype=dtype
  )
  description = description._replace(config=config)
  if attention is None:
    return description
  chosen = _parse_attention(attention)
  fields = (one for one in config.attentions if one != "cross_attention")
  return with_layers(description, dict.fromkeys(fields, chosen))


def with_layers(
  description: Description, chosen: Mapping[str, Layers]
) -> Description:
  """Replaces the mechanisms of a description.

  Args:
    description: description of the model.
    chosen: 'encoder_attention' or 'decoder_attention' -> mechanisms.

  Raises:
    ValueError: a mechanism lacks a capability.
  """
  config, changes = description.config, dict[str, Any](chosen)
  for layers in chosen.values():
    layers = layers if isinstance(layers, tuple) else (layers,)
    has_global = hasattr(config, "slot") and config.slot.global_projections
    if has_global and any("global" not in x.build().supports for x in layers):
      changes["global_projections"] = False
  return description._replace(config=nested.replace(config, **changes))


def _parse_attention(attention: Any) -> Layers:
  if isinstance(attention, AttentionConfig):
    return attention
  if isinstance(attention, str):
    return AttentionConfig(attention)
  if hasattr(attention, "items"):
    options = dict(attention.items())
    if "name" not in options:
      raise ValueError(f"attention: expected a 'name', got {options}")
    return AttentionConfig(options.pop("name"), options)
  return tuple(
    cast(AttentionConfig, _parse_attention(one)) for one in attention
  )


def _with_mechanisms(
  description: Description, own: Any, replaced: Collection[str]
) -> tuple[Description, bool]:
  """The description with the mechanisms that `save_pretrained` wrote.

  Also returns whether a mechanism was ignored because the caller replaces it.
  """
  if own is None:
    return description, False
  try:
    foreign = [field for field in own if _import_path(own[field])]
    for field in foreign:
      if field not in replaced:
        raise ValueError(
          f"{MECHANISMS}: {field} is {_import_path(own[field])!r}, an import "
          "path, which a folder of weights may not have; pass the mechanism as "
          "`attention=`, or set it in config.model"
        )
    kept = {field: own[field] for field in own if field not in foreign}
    chosen: dict[str, Any] = {
      f: _parse_attention(layers) for f, layers in kept.items()
    }
    config = dataclasses.replace(description.config, **chosen)
  except (AttributeError, TypeError) as error:
    raise ValueError(
      f"{MECHANISMS}: expected mechanisms by config field, got {own!r}"
    ) from error
  return description._replace(config=config), bool(foreign)


def _import_path(layers: Any) -> str:
  """Returns the first import path of a mechanism; empty if there is none."""
  for one in layers if isinstance(layers, list) else [layers]:
    name = one.get("name") if isinstance(one, dict) else one
    if isinstance(name, str) and ":" in name:
      return name
  return ""


def _architecture(
  folder: Path, hf_config: Mapping[str, Any]
) -> tuple[Family, str]:
  names, kind = hf_config.get("architectures"), hf_config.get("model_type")
  one = names[0] if isinstance(names, list) and len(names) == 1 else None
  family = find(kind, one) if isinstance(one, str) else None
  if family is not None and kind in (None, family.name):
    return family, cast(str, one)
  if family is not None:
    fault = f"model_type: expected {family.name!r}, that of {one}, got {kind!r}"
  elif names is None:
    fault = "architectures: missing; expected a list of one class"
  elif one is None:
    fault = f"architectures: expected a list of one class, got {names!r:.80}"
  else:
    fault = (
      f"architectures: {one!r} is not supported; docs/weights.md lists the "
      "supported ones"
    )
  raise ValueError(f"{folder / files.CONFIG}: {fault}")

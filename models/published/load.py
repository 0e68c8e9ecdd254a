"""A published model in memory: from its folder, and back into one."""

from collections.abc import Mapping, Sequence
import dataclasses
import importlib
import os
from pathlib import Path
import re
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from flax import traverse_util
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
import numpy as np

from models import nested
from models.api import create, forward, initialize
from models.attention_config import AttentionConfig, Layers
from models.published import files
from models.published.catalog import FAMILIES, find
from models.published.family import SAME, Described, Family, Layout, active
from models.transformer import Transformer

MECHANISMS = "attention_lab"
"""Where `config.json` says which mechanisms are not the published ones."""

Attention = str | Mapping[str, Any] | Layers | Sequence[Any] | None
"""A name, a name with options, or several of these, which layers take in turn."""


class Pretrained(NamedTuple):
  """A model with weights.

  Attributes:
    family: `model_type` of transformers, such as 'bert'.
    architecture: its class there, such as 'BertForMaskedLM'.
    model: from `models.create`.
    variables: `{'params': …, 'constants': …}`.
    config: its `config.json`.
    kept: tensors of its folder that no output depends on, see `Family.kept`.
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
    """What the architecture returns; pure and traceable.

    Args:
      variables: `self.variables`, or others like them.
      **inputs: named as in transformers: `input_ids [B, T]`, `attention_mask
        [B, T]` of 0 and 1, `token_type_ids [B, T]`, `global_attention_mask
        [B, T]`, `decoder_input_ids [B, T]`, `decoder_attention_mask [B, T]`,
        `pixel_values [B, H, W, C]`, `input_values [B, samples]`.

    Returns:
      Logits of tokens `[B, T, V]` or of classes `[B, V]`, or the last hidden
      state `[B, T, F]`.

    Raises:
      ValueError: an input that the model does not read, or one that is missing.
    """
    names = FAMILIES[self.family].inputs
    batch = _batch(self.model.config, names, inputs)
    out = forward(self.model, variables, batch)
    # Of DeiT's two heads, the mean.
    return out.mean(1) if self.model.config.head == "class" else out


def load_pretrained(
  folder: str | os.PathLike[str],
  attention: Attention = None,
  dtype: str = "float32",
  *,
  key: Array | None = None,
) -> Pretrained:
  """Reads a published model.

  Args:
    folder: as Hugging Face writes it: `config.json` and `model.safetensors`, or
      `model.safetensors.index.json` with its shards; or the workdir of a run.
    attention: what replaces the mechanism of every self-attention: a name
      ('performer'), a name with options ({'name': 'performer', 'num_features':
      64}), or a list of these that layers take in turn; None keeps the model's.
    dtype: of activations and variables; 'float64' needs `jax_enable_x64`.
    key: draws the variables that a mechanism has of its own where the folder
      has none; None is `jax.random.key(0)`.

  Returns:
    The model, its variables and `logits`. Dropout of attention weights, which
    many mechanisms do not have, is left out.

  Raises:
    FileNotFoundError: a file is missing.
    ValueError: an unknown architecture, a tensor that is missing, unknown, of
      another shape or of integers, a file that is broken, or a mechanism that
      cannot serve; names the file and the key.
  """
  folder = Path(folder)
  if dtype == "float64" and not jax.config.read("jax_enable_x64"):
    raise ValueError(
      "dtype: float64 needs jax.config.update('jax_enable_x64', True)"
    )
  opened = open_folder(folder)
  model = make_model(with_attention(opened.described, attention, dtype))
  variables = read_variables(opened, model, key)
  return Pretrained(
    opened.family.name,
    opened.architecture,
    model,
    variables,
    opened.theirs,
    opened.kept,
  )


class Opened(NamedTuple):
  """A folder that was read and whose variables are not made yet.

  Attributes:
    family: of the model.
    architecture: its class in transformers.
    theirs: `config.json`.
    described: the model with its own mechanisms.
    tensors: by the names in the family's table.
    kept: those that no output depends on.
  """

  family: Family
  architecture: str
  theirs: Mapping[str, Any]
  described: Described
  tensors: files.Tensors
  kept: Mapping[str, np.ndarray]


def open_folder(folder: Path) -> Opened:
  """Reads a folder, or a run, and says what model is in it.

  Raises:
    FileNotFoundError: a file is missing.
    ValueError: as `load_pretrained`.
  """
  if (folder / "checkpoints").is_dir():
    # A run is read by `training`, which imports this package.
    published = importlib.import_module("training.published")
    theirs, arrays = _written(published.of_run(folder))
    tensors = files.Tensors(folder, arrays, dict.fromkeys(arrays, folder))
  else:
    theirs, tensors = files.read_config(folder), None
  family, architecture = _architecture(folder, theirs)
  if tensors is None:
    tensors = files.read_tensors(folder)
  tensors = _tidied(family, tensors)
  try:
    described = family.describe(
      theirs, tensors, family.architectures[architecture]
    )
    described = _with_mechanisms(described, theirs.get(MECHANISMS))
    shapes = {} if family.kept is None else family.kept(theirs)
  except ValueError as error:
    raise ValueError(f"{folder / files.CONFIG}: {error}") from None
  kept = {name: _kept(tensors, name, shape) for name, shape in shapes.items()}
  tensors = tensors.without(kept)
  return Opened(family, architecture, theirs, described, tensors, kept)


def _kept(
  tensors: files.Tensors, name: str, shape: tuple[int, ...]
) -> np.ndarray:
  """A tensor that no output depends on.

  Raises:
    ValueError: it is missing or has another shape.
  """
  path = tensors.where(name)
  if name not in tensors:
    raise ValueError(f"{path}: {name}: missing; config.json asks for it")
  array = tensors[name]
  if array.shape != shape:
    raise ValueError(
      f"{path}: {name}: expected shape {shape}, got {array.shape}"
    )
  return array


def read_variables(
  opened: Opened, model: Transformer, key: Array | None = None
) -> dict[str, Any]:
  """The variables of a model from a folder that may have other mechanisms.

  Args:
    opened: the folder.
    model: as described there, its mechanisms aside.
    key: draws what a mechanism has of its own and the folder has not; None is
      `jax.random.key(0)`.

  Raises:
    ValueError: as `load_pretrained`.
  """
  key = jax.random.key(0) if key is None else key
  published = make_model(opened.described)
  return _filled(opened.family, model, published, opened.tensors, key)


def save_pretrained(folder: str | os.PathLike[str], p: Pretrained) -> None:
  """Writes a model as a folder that `load_pretrained` and transformers read.

  A mechanism that is not the published one is named in `config.json`, and its
  variables are tensors that begin with 'attention_lab/'; transformers reads the
  folder then as the model with its own attention.

  Args:
    folder: is made where it is not there.
    p: the model; `p._replace(variables=…)` for others.
  """
  files.write(Path(folder), *_written(p))


def _written(
  p: Pretrained,
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  """`config.json` and the tensors of a model."""
  family = FAMILIES[p.family]
  paths = {path: np.asarray(x) for path, x in _flat(p.variables).items()}
  shapes = _shapes(p.model)
  whole = _with_keys(p.model)
  arrays = {}
  for theirs, ours, layout in active(family.rows(p.model.config), shapes):
    # A mechanism without keys leaves a part of a tensor of queries and keys.
    zeros = {
      path: np.zeros(whole[path].shape, whole[path].dtype)
      for path in ours
      if path not in shapes
    }
    parts = [zeros[x] if x in zeros else paths.pop(x) for x in ours]
    arrays[theirs] = layout.write(parts)
  head = family.architectures[p.architecture]
  if head == "hidden":  # A base model's names have no prefix.
    arrays = {n.removeprefix(family.prefix): x for n, x in arrays.items()}
  arrays |= family.buffers(p.model.config)
  arrays |= {f"{MECHANISMS}/{path}": array for path, array in paths.items()}
  arrays |= p.kept
  config = {key: value for key, value in p.config.items() if key != MECHANISMS}
  config["architectures"] = [p.architecture]
  config["torch_dtype"] = p.model.config.param_dtype
  published = family.describe(config, arrays, head).config
  chosen = p.model.config.attentions
  if any(
    p.model.config.layers(slot) != published.layers(slot) for slot in chosen
  ):
    config[MECHANISMS] = {
      slot: [{"name": one.name, **one.options} for one in mechanisms]
      for slot, mechanisms in chosen.items()
    }
  return config, arrays


def make_model(described: Described) -> Any:
  """The module of a description, of any kind; computes nothing."""
  config, length = described.config, described.max_length
  shapes, reads_ids = described.input_shapes, not described.input_shapes
  has_source = reads_ids and config.layout != "decoder"
  return create(
    config,
    source_vocab_size=described.vocab_size if has_source else None,
    target_vocab_size=described.outputs,
    max_source_length=length if has_source else None,
    max_target_length=length if reads_ids else None,
    shared_vocabulary=reads_ids and described.outputs == described.vocab_size,
    input_shapes=shapes,
  )


def with_attention(
  described: Described, attention: Attention, dtype: str
) -> Described:
  """The description with other mechanisms and another dtype.

  Raises:
    ValueError: an unknown mechanism, or one that cannot serve here.
  """
  config = dataclasses.replace(described.config, dtype=dtype, param_dtype=dtype)
  described = described._replace(config=config)
  if attention is None:
    return described
  chosen = _chosen(attention)
  fields = (one for one in config.attentions if one != "cross_attention")
  return with_layers(described, dict.fromkeys(fields, chosen))


def with_layers(
  described: Described, chosen: Mapping[str, Layers]
) -> Described:
  """The description with other mechanisms.

  Args:
    described: of a model.
    chosen: 'encoder_attention' or 'decoder_attention' -> mechanisms.

  Raises:
    ValueError: one that cannot serve there.
  """
  changes: dict[str, Any] = dict(chosen)
  for layers in chosen.values():
    layers = layers if isinstance(layers, tuple) else (layers,)
    has_global = _has_global(described.config)
    if has_global and any(
      "global" not in one.build().supports for one in layers
    ):
      changes["global_projections"] = False
  config = nested.replace(described.config, **changes)
  return described._replace(config=config)


def _chosen(attention: Any) -> Layers:
  if isinstance(attention, AttentionConfig):
    return attention
  if isinstance(attention, str):
    return AttentionConfig(attention)
  if hasattr(attention, "items"):
    options = dict(attention.items())
    if "name" not in options:
      raise ValueError(f"attention: expected a 'name', got {options}")
    return AttentionConfig(options.pop("name"), options)
  return tuple(cast(AttentionConfig, _chosen(one)) for one in attention)


def _with_mechanisms(described: Described, own: Any) -> Described:
  """The description with what `save_pretrained` wrote of mechanisms."""
  if own is None:
    return described
  try:
    chosen: dict[str, Any] = {f: _chosen(layers) for f, layers in own.items()}
    config = dataclasses.replace(described.config, **chosen)
  except (AttributeError, TypeError) as error:
    raise ValueError(
      f"{MECHANISMS}: expected mechanisms by slot, got {own!r}"
    ) from error
  return described._replace(config=config)


def _architecture(
  folder: Path, theirs: Mapping[str, Any]
) -> tuple[Family, str]:
  names = theirs.get("architectures")
  one = names[0] if isinstance(names, list) and names else None
  if isinstance(one, str):
    family = find(theirs.get("model_type"), one)
    if family is not None:
      return family, one
  known = ", ".join(x for f in FAMILIES.values() for x in f.architectures)
  got = f"missing; expected one of {known}"
  if one is not None:
    got = f"expected one of {known}, got {one!r}"
  raise ValueError(f"{folder / files.CONFIG}: architectures: {got}")


def _tidied(family: Family, tensors: files.Tensors) -> files.Tensors:
  """The tensors by the names in the family's table, without copies."""
  names = {}
  for name in tensors:
    new = name
    if not name.startswith(f"{MECHANISMS}/"):
      for old_ending, ending in family.renamed:
        if new.endswith(old_ending):
          new = new.removesuffix(old_ending) + ending
      if new.partition(".")[0] in family.parts:
        new = family.prefix + new
    names[name] = new
  tensors = tensors.renamed(names)
  return tensors.without(
    name
    for name, of in family.copies
    if {name, of} <= set(tensors) and np.array_equal(tensors[name], tensors[of])
  )


def _filled(
  family: Family,
  model: Transformer,
  published: Transformer,
  tensors: files.Tensors,
  key: Array,
) -> dict[str, Any]:
  """The variables of a model, each from its tensor.

  Raises:
    ValueError: a tensor is missing, left over, or does not fit.
  """
  wanted = _shapes(model)
  found: dict[str, np.ndarray] = {}
  whole = _with_keys(model)
  for theirs, ours, layout in active(family.rows(model.config), wanted):
    found |= _read(
      tensors, theirs, {path: whole[path] for path in ours}, layout
    )
  for path in wanted:
    name = f"{MECHANISMS}/{path}"
    if name in tensors:
      found |= _read(tensors, name, {path: wanted[path]}, SAME)
  known = {
    name
    # What a mechanism that was replaced had of its own is not wanted.
    for one, shapes in ((model, wanted), (published, _shapes(published)))
    for name in (
      *(row.theirs for row in active(family.rows(one.config), shapes)),
      *(f"{MECHANISMS}/{path}" for path in shapes),
    )
  }
  known |= {*family.buffers(published.config)}
  for name in tensors:
    unread = any(re.fullmatch(unread, name) for unread in family.unread)
    if name not in known and not unread:
      raise ValueError(
        f"{tensors.where(name)}: {name}: no variable of this model takes it"
      )
  missing = [path for path in wanted if path not in found]
  if missing:
    for path in missing:
      # What a mechanism has of its own is drawn where it replaces another.
      if "/attention/" not in path or model == published:
        raise ValueError(f"{tensors.folder}: no tensor fills {path}")
    drawn = _flat(initialize(model, key, model.example()))
    found |= {path: drawn[path] for path in missing}
  arrays = {
    path: jnp.asarray(found[path], leaf.dtype) for path, leaf in wanted.items()
  }
  tree = traverse_util.unflatten_dict(arrays, sep="/")
  return {"params": {}, "constants": {}, **tree}


def _read(
  tensors: files.Tensors,
  theirs: str,
  ours: Mapping[str, jax.ShapeDtypeStruct],
  layout: Layout,
) -> dict[str, np.ndarray]:
  """Variables by their paths from one tensor.

  Raises:
    ValueError: it is missing or does not fit.
  """
  path = tensors.where(theirs)
  if theirs not in tensors:
    raise ValueError(f"{path}: {theirs}: missing; it fills {', '.join(ours)}")
  array = tensors[theirs]
  # A mechanism's constants may be integers, such as the key of random blocks.
  integers = {leaf.dtype for leaf in ours.values()} == {array.dtype}
  if not jnp.issubdtype(array.dtype, jnp.floating) and not integers:
    raise ValueError(
      f"{path}: {theirs}: expected floating point numbers, got {array.dtype}"
    )
  zeros = [np.zeros(leaf.shape, np.int8) for leaf in ours.values()]
  expected = layout.write(zeros).shape
  if array.shape != expected:
    raise ValueError(
      f"{path}: {theirs}: expected shape {expected}, got {array.shape}"
    )
  return dict(zip(ours, layout.read(array, len(ours)), strict=True))


def _shapes(model: Transformer) -> dict[str, jax.ShapeDtypeStruct]:
  """Shapes of all variables by their paths; computes nothing."""
  key, batch = jax.random.key(0), model.example()
  return _flat(jax.eval_shape(lambda: initialize(model, key, batch)))


def _with_keys(model: Transformer) -> dict[str, jax.ShapeDtypeStruct]:
  """Likewise, and where a mechanism takes no keys or values, those of dense."""
  shapes, slots = _shapes(model), model.config.attentions
  keyless = [
    slot
    for slot, layers in slots.items()
    if any({"shared_qk", "own_keys"} & one.build().supports for one in layers)
  ]
  if not keyless:
    return shapes
  dense: dict[str, Any] = dict.fromkeys(keyless, AttentionConfig("dense"))
  config = dataclasses.replace(model.config, **dense)
  return _shapes(model.clone(config=config)) | shapes


def _flat(variables: Mapping[str, Any]) -> dict[str, Any]:
  """'params/encoder_0/mlp/out/kernel' -> the array there."""
  return traverse_util.flatten_dict(variables, sep="/")


_TEXT_INPUTS: Mapping[str, Mapping[str, str]] = MappingProxyType(
  {
    "encoder": {
      "input_ids": "source",
      "attention_mask": "source_mask",
      "token_type_ids": "source_types",
      "global_attention_mask": "global_indices",
    },
    "decoder": {"input_ids": "inputs", "attention_mask": "inputs_mask"},
    "encoder_decoder": {
      "input_ids": "source",
      "attention_mask": "source_mask",
      "decoder_input_ids": "inputs",
      "decoder_attention_mask": "inputs_mask",
    },
  }
)
"""Kind of a model -> the inputs of transformers -> their names in a batch."""


def _batch(
  config: Any, names: Mapping[str, str] | None, inputs: Mapping[str, Any]
) -> dict[str, Any]:
  """The batch that `models.forward` reads, from names of transformers.

  Args:
    config: of the model.
    names: of the inputs, if not those of texts -> names in a batch; the first
      has to be given.
    inputs: by the names of transformers.

  Raises:
    ValueError: an input that this kind of model does not read, or one that is
      missing.
  """
  needed = list(names or ())[:1]
  names = dict(names or _TEXT_INPUTS[config.layout])
  needed = needed or [name for name in names if name.endswith("input_ids")]
  embedding = getattr(config, "embedding", None)
  if embedding is None or not embedding.token_types:
    names.pop("token_type_ids", None)
  if not _has_global(config):
    names.pop("global_attention_mask", None)
  batch = {}
  for name, value in inputs.items():
    if name not in names:
      raise ValueError(
        f"{name}: this model does not read it; expected {', '.join(names)}"
      )
    if name == "global_attention_mask" and value is not None:
      batch[names[name]] = _indices(value)
    elif value is not None:
      batch[names[name]] = jnp.asarray(value)
  for name in needed:
    if names[name] not in batch:
      raise ValueError(f"{name}: missing")
  if "source" in batch:
    # Any id may be a token: only the mask says what is padding.
    everything = jnp.ones(batch["source"].shape, bool)
    batch["source_mask"] = batch.get("source_mask", everything) != 0
  if "inputs_mask" in batch:
    batch["inputs_mask"] = batch["inputs_mask"] != 0
  return batch


def _has_global(config: Any) -> bool:
  """Whether tokens have projections of their own, in a model of any kind."""
  return hasattr(config, "slot") and config.slot.global_projections


def _indices(mask: Any) -> Array:
  """The positions where a mask is not 0, -1 after them.

  Raises:
    ValueError: the mask is traced; how many are global decides shapes.
  """
  if isinstance(mask, jax.core.Tracer):
    raise ValueError(
      "global_attention_mask: expected an array of numbers, got one that is "
      "traced: how many tokens are global decides shapes; close over it"
    )
  chosen = np.asarray(mask) != 0
  most = max(int(chosen.sum(1).max()), 1)
  order = np.argsort(~chosen, axis=1, kind="stable")[:, :most]
  return jnp.asarray(
    np.where(np.arange(most) < chosen.sum(1)[:, None], order, -1)
  )

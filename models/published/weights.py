"""Converts tensors to the variables of a model and back, by the table of its family."""

from collections.abc import Iterator, Mapping
import dataclasses
import functools
from pathlib import Path
import re
from typing import Any

from flax import traverse_util
import jax
import jax.numpy as jnp
from jaxtyping import Array
import numpy as np

from models.api import initialize
from models.attention_config import AttentionConfig
from models.published import files
from models.published.family import SAME, Family, Layout, Row, active

MECHANISMS = "attention_lab"
"""Prefix of the names of a mechanism's own tensors.

In `config.json` it is the key of the mechanisms that are not the published ones.
"""

_UNREAD = (
  r"(.*\.)?rotary_emb(_local)?\.\w*(inv_freq|cos_cached|sin_cached)",
  r".*\.(position_ids|masked_bias)",
)
"""Regular expressions of buffers that no model needs."""


def by_table_name(
  family: Family, tensors: files.Tensors
) -> dict[str, files.Tensor]:
  """Returns the tensors of a folder by their names in the family's table.

  Raises:
    ValueError: two tensors get the same name.
  """
  tidied = {}
  for name, tensor in tensors.items():
    new = name
    if not name.startswith(f"{MECHANISMS}/"):
      for old_ending, ending in family.renamed:
        if new.endswith(old_ending):
          new = new.removesuffix(old_ending) + ending
      if new.partition(".")[0] in family.parts:
        new = family.prefix + new
    if new in tidied:
      raise ValueError(f"{tensor.file}: {name} appears twice, under two names")
    tidied[new] = tensor
  for joined_suffix, suffixes in family.joined:
    for first in [name for name in tidied if name.endswith(suffixes[0])]:
      prefix = first.removesuffix(suffixes[0])
      parts = [prefix + suffix for suffix in suffixes]
      if all(part in tidied for part in parts):
        file, joined = tidied[first].file, {x: tidied.pop(x) for x in parts}
        read = functools.partial(files.concatenate, joined)
        tidied[prefix + joined_suffix] = files.Tensor(read, file)
  return tidied


def read(
  folder: Path,
  family: Family,
  model: Any,
  published: Any,
  original: Any,
  tensors: files.Tensors,
  key: Array,
) -> dict[str, Any]:
  """Converts tensors to the variables of a model.

  Args:
    folder: folder of the tensors, for messages.
    family: family of the model.
    model: the model, whose mechanisms may differ from those of the tensors.
    published: the same model with the mechanisms of the tensors.
    original: the same model with the mechanisms of its family.
    tensors: tensors by their names in the family's table.
    key: initializes a mechanism's own variables that the tensors do not have.

  Raises:
    ValueError: a tensor is missing, is unused, or has another shape; or a size of the
      model needs more than 32 bits.
  """
  try:
    variable_shapes, full_shapes = _shapes(model), _with_keys(model)
  except OverflowError:
    raise ValueError(
      f"{folder / files.CONFIG}: expected sizes below 2³¹, got a larger one"
    ) from None
  # Tensors of a replaced mechanism are known but not needed.
  known = {row.theirs for row in _rows(family, published)}
  known |= names(family, original) | {*family.buffers(published.config)}
  copies, kept = dict(family.copies), without_copies(family, tensors)
  arrays: dict[str, Array] = {}
  stacks: dict[str, np.ndarray] = {}
  for theirs, ours, layout, index, is_start in _rows(family, model):
    known.add(theirs)
    if theirs.startswith(MECHANISMS) and theirs not in tensors:
      continue
    if theirs not in tensors:
      raise ValueError(
        f"{folder}: {theirs}: missing; it fills {', '.join(ours)}"
      )
    shapes = {
      x: full_shapes[x] if index is None else _element(full_shapes[x])
      for x in ours
    }
    # One tensor at a time: the file's arrays and ours are never all in memory.
    tensor = tensors[theirs]
    for path, x in _read(tensor, theirs, shapes, layout, is_start).items():
      if path not in variable_shapes:
        continue
      dtype = variable_shapes[path].dtype
      if index is None:
        arrays[path] = jnp.asarray(x, dtype)
        continue
      if path not in stacks:
        stacks[path] = np.empty(variable_shapes[path].shape, dtype)
      stacks[path][index] = x
  while stacks:
    path, x = stacks.popitem()
    arrays[path] = jnp.asarray(x)
  for name, tensor in tensors.items():
    unread = any(re.fullmatch(x, name) for x in (*_UNREAD, *family.unread))
    if name in known or unread or name not in kept:
      continue
    if copies.get(name) in tensors:
      raise ValueError(
        f"{tensor.file}: {name}: differs from {copies[name]}, and config.json "
        "ties them; expected equal tensors, or tie_word_embeddings false"
      )
    raise ValueError(
      f"{tensor.file}: {name}: no variable of this model uses it"
    )
  missing = [path for path in variable_shapes if path not in arrays]
  for path in missing:
    # Variables of a mechanism that replaces another one are initialised.
    if "/attention/" not in path or model == published:
      raise ValueError(f"{folder}: no tensor fills {path}")
  if missing:
    arrays |= _initial(model, key, tuple(missing))
  tree = traverse_util.unflatten_dict(
    {path: arrays[path] for path in variable_shapes}, sep="/"
  )
  return {"params": {}, "constants": {}, **tree}


@functools.partial(jax.jit, static_argnums=(0, 2))
def _initial(
  model: Any, key: Array, paths: tuple[str, ...]
) -> dict[str, Array]:
  """Initializes some variables of a model; the compiler removes all others."""
  variables = _flat(initialize(model, key, model.example()))
  return {path: variables[path] for path in paths}


def without_copies(family: Family, tensors: files.Tensors) -> set[str]:
  """Returns the tensors that are not copies of others."""
  return {*tensors} - {
    name
    for name, original in family.copies
    if {name, original} <= {*tensors}
    and np.array_equal(tensors[name].read(), tensors[original].read())
  }


def write(
  family: Family, model: Any, variables: Mapping[str, Any]
) -> dict[str, np.ndarray]:
  """Converts a model to tensors with the names of the family's table.

  Raises:
    ValueError: the variables are not those of the model, or not finite.
  """
  paths = {path: np.asarray(x) for path, x in _flat(variables).items()}
  shapes, full_shapes = _shapes(model), _with_keys(model)
  for path in sorted({*shapes, *paths}):
    expected, got = (
      f"shape {x[path].shape}" if path in x else "none" for x in (shapes, paths)
    )
    if expected != got:
      raise ValueError(f"variables: {path}: expected {expected}, got {got}")
    is_float = jnp.issubdtype(paths[path].dtype, jnp.floating)
    if is_float and not np.isfinite(paths[path]).all():
      raise ValueError(
        f"variables: {path}: expected finite numbers, got NaN or infinity"
      )
  arrays, written = {}, set()
  rows = active(family.rows(model.config), shapes)
  for theirs, ours, layout, index, is_start in rows:
    # A mechanism without keys leaves a part of a tensor of queries and keys.
    xs = [
      paths[x]
      if x in shapes
      else np.zeros(full_shapes[x].shape, full_shapes[x].dtype)
      for x in ours
    ]
    arrays[theirs] = layout.write(
      xs if index is None else [x[index] for x in xs]
    )
    written |= {*ours} if not is_start else set()
  return arrays | {
    f"{MECHANISMS}/{path}": x
    for path, x in paths.items()
    if path not in written
  }


def split_joined(family: Family, arrays: dict[str, np.ndarray]) -> None:
  """Splits joined tensors into the tensors that files store, as transformers does."""
  for joined_suffix, suffixes in family.joined:
    for name in [name for name in arrays if name.endswith(joined_suffix)]:
      array, count = arrays.pop(name), len(suffixes)
      size = -(-len(array) // count)
      parts = np.split(array, [size * i for i in range(1, count)])
      for suffix, part in zip(suffixes, parts, strict=True):
        arrays[name.removesuffix(joined_suffix) + suffix] = part


def _rows(family: Family, model: Any) -> Iterator[Row]:
  """The rows of the family, and one for every variable by our own name."""
  shapes = _shapes(model)
  yield from active(family.rows(model.config), shapes)
  for path, name in zip(shapes, own_names(model), strict=True):
    yield Row(name, (path,), SAME)


def names(family: Family, model: Any) -> set[str]:
  """Returns the names of a model's tensors in the family's table."""
  return {
    row.theirs for row in active(family.rows(model.config), _shapes(model))
  }


def spare_names(family: Family, published: Any, model: Any) -> list[str]:
  """Returns the names of a published model's tensors that a model does not have.

  If the model has only a part of one of the tensors, there are none, because the others
  are of no use without it.
  """
  full, shapes = _shapes(published), _shapes(model)
  kept = names(family, model)
  rows = [*active(family.rows(published.config), full)]
  has_part = any(
    row.theirs in kept and x in full and x not in shapes
    for row in rows
    for x in row.ours
  )
  return [row.theirs for row in rows if not (has_part or row.theirs in kept)]


def own_names(model: Any) -> list[str]:
  """Returns our own name of the tensor of each variable of a model."""
  return [f"{MECHANISMS}/{path}" for path in _shapes(model)]


def _read(
  tensor: files.Tensor,
  theirs: str,
  ours: Mapping[str, jax.ShapeDtypeStruct],
  layout: Layout,
  is_start: bool = False,
) -> dict[str, np.ndarray]:
  """The variables of one tensor by their paths."""
  array, file = tensor.read(), tensor.file
  # A mechanism's constants may be integers, such as the key of random blocks.
  integers = {x.dtype.kind for x in ours.values()} == {array.dtype.kind}
  integers &= array.dtype.kind in "iu"
  if not jnp.issubdtype(array.dtype, jnp.floating) and not integers:
    raise ValueError(
      f"{file}: {theirs}: expected floating point numbers, got {array.dtype}"
    )
  if not (integers or np.isfinite(array).all()):
    raise ValueError(
      f"{file}: {theirs}: expected finite numbers, got NaN or infinity"
    )
  count = sum(x.size for x in ours.values())
  # A config of another size.
  if count > 8 * max(array.size, 1) and not is_start:
    raise ValueError(
      f"{file}: {theirs}: expected {count:,} numbers, got shape {array.shape}"
    )
  zeros = [np.zeros(x.shape, np.int8) for x in ours.values()]
  expected = layout.write(zeros).shape
  if array.shape != expected:
    raise ValueError(
      f"{file}: {theirs}: expected shape {expected}, got {array.shape}"
    )
  return dict(zip(ours, layout.read(array, len(ours)), strict=True))


def _element(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
  """The shape of an element along the first axis."""
  return jax.ShapeDtypeStruct(x.shape[1:], x.dtype)


def _shapes(model: Any) -> dict[str, jax.ShapeDtypeStruct]:
  """Shapes of all variables by their paths; computes nothing."""
  key, batch = jax.random.key(0), model.example()
  return _flat(jax.eval_shape(lambda: initialize(model, key, batch)))


def _with_keys(model: Any) -> dict[str, jax.ShapeDtypeStruct]:
  """As `_shapes`, with the keys and values of `dense` for mechanisms without them."""
  keyless = [
    module
    for module, layers in model.config.attentions.items()
    if any({"shared_qk", "own_keys"} & one.build().supports for one in layers)
  ]
  if not keyless:
    return _shapes(model)
  dense: dict[str, Any] = dict.fromkeys(keyless, AttentionConfig("dense"))
  config = dataclasses.replace(model.config, **dense)
  return _shapes(model.clone(config=config)) | _shapes(model)


def _flat(variables: Mapping[str, Any]) -> dict[str, Any]:
  """Maps paths such as 'params/encoder_0/mlp/out/kernel' to arrays."""
  return traverse_util.flatten_dict(variables, sep="/")

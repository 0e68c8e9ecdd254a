"""What a published family is made of, and its weights as a table.

A family is one file here: how its `config.json` becomes choices of
a config, and a table that pairs each of its tensors with variables of the
Transformer. The table is read in both directions.
"""

from collections.abc import (
  Callable,
  Collection,
  Iterable,
  Iterator,
  Mapping,
  Sequence,
)
import functools
import reprlib
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

from annotated_types import Ge
import numpy as np
from pydantic import TypeAdapter, ValidationError

from models.config import Activation, ModelConfig
from models.kind import NOTHING
from settings.fields import STRICT, Count, fault


class Layout(NamedTuple):
  """How a tensor of theirs lies as variables of ours.

  Attributes:
    read: `(theirs, number of ours) -> ours`, arrays in the order of the row.
    write: `ours -> theirs`.
  """

  read: Callable[[np.ndarray, int], list[np.ndarray]]
  write: Callable[[list[np.ndarray]], np.ndarray]


SAME = Layout(lambda x, n: [x] * n, lambda xs: xs[0])
"""As it is."""

TURNED = Layout(lambda x, n: [x.T], lambda xs: xs[0].T)
"""PyTorch's Linear is `[out, in]`; a kernel of Flax is `[in, out]`."""

BESIDE = Layout(
  lambda x, n: np.split(x, n, axis=-1), lambda xs: np.concatenate(xs, axis=-1)
)
"""Several of ours side by side along the last axis."""


class Row(NamedTuple):
  """A tensor of theirs and what it is here.

  Attributes:
    theirs: its name; `{i}` is the number of a layer.
    ours: paths of variables, such as 'params/encoder_{i}/mlp/out/kernel'.
    layout: how one becomes the other.
  """

  theirs: str
  ours: tuple[str, ...]
  layout: Layout = SAME


def linear(theirs: str, ours: str) -> list[Row]:
  """The rows of PyTorch's Linear and of our Dense, with bias or without."""
  return [
    Row(f"{theirs}.weight", (f"params/{ours}/kernel",), TURNED),
    Row(f"{theirs}.bias", (f"params/{ours}/bias",)),
  ]


def norm(theirs: str, ours: str) -> list[Row]:
  """The rows of a norm, with bias or without."""
  return [
    Row(f"{theirs}.weight", (f"params/{ours}/scale",)),
    Row(f"{theirs}.bias", (f"params/{ours}/bias",)),
  ]


def batch_norm(theirs: str, ours: str) -> list[Row]:
  """The rows of a batch norm and of its running statistics."""
  return [
    *norm(theirs, ours),
    Row(f"{theirs}.running_mean", (f"batch_stats/{ours}/mean",)),
    Row(f"{theirs}.running_var", (f"batch_stats/{ours}/var",)),
  ]


def table(theirs: str, ours: str) -> list[Row]:
  """The row of a table of embeddings."""
  return [Row(f"{theirs}.weight", (f"params/{ours}/embedding",))]


class Described(NamedTuple):
  """A model as `config.json` describes it.

  Attributes:
    config: its choices: a `ModelConfig`, or the config of a kind that is not a
      Transformer's.
    vocab_size: ids that it reads.
    outputs: V of its logits: the vocabulary, or the classes.
    max_length: the longest sequence.
    input_shapes: what it reads in place of ids, such as 'image' -> a row's shape.
  """

  config: Any
  vocab_size: int
  outputs: int
  max_length: int
  input_shapes: Mapping[str, Any] = NOTHING


class Family(NamedTuple):
  """A published family of models.

  Attributes:
    name: `model_type` in `config.json`.
    architectures: class of transformers -> head here.
    describe: `(theirs, names, head) -> Described`, of `config.json` and the
      names of the tensors. Raises ValueError for what the model cannot be.
    rows: `config -> table`; a row counts where the model has its variables.
    prefix: what a file of the base model leaves out of names.
    parts: first words of the names that it leaves it out of.
    renamed: `(old, new)` endings of names in old files.
    copies: `(name, of)`: a tensor that files may have, equal to another one.
    unread: expressions for tensors that files may have and the model does not
      need, such as buffers.
    buffers: `config -> tensors` that follow from the config: they are written
      for transformers, and not read.
    to_json: `Described -> config.json`, as far as the family can say it; None
      for a family that nothing trained here becomes.
    inputs: what the models read in place of tokens, by its names in
      transformers -> names in a batch, the one that is needed first.
    config_type: of `Described.config`.
    rotary: type of layer -> how files name its rotary positions; None has none.
    without_effect: keys of `config.json` that change no logits -> why, beside
      those of `keys.WITHOUT_EFFECT`. Any other key has to be read.
    kept: `config.json -> {name: shape}` of tensors that files have and no
      output depends on; `save_pretrained` writes them back.
  """

  name: str
  architectures: Mapping[str, str]
  describe: Callable[[Mapping[str, Any], Collection[str], str], Described]
  rows: Callable[[Any], Iterable[Row]]
  prefix: str = ""
  parts: tuple[str, ...] = ()
  renamed: tuple[tuple[str, str], ...] = ()
  copies: tuple[tuple[str, str], ...] = ()
  unread: tuple[str, ...] = ()
  buffers: Callable[[Any], Mapping[str, np.ndarray]] = lambda config: {}
  to_json: Callable[[Described], dict[str, Any]] | None = None
  inputs: Mapping[str, str] | None = None
  config_type: type = ModelConfig
  rotary: Mapping[str | None, Any] | None = None
  without_effect: Mapping[str, str] = MappingProxyType({})
  kept: Callable[[Mapping[str, Any]], Mapping[str, tuple[int, ...]]] | None = (
    None
  )


def active(rows: Iterable[Row], paths: Collection[str]) -> Iterator[Row]:
  """The rows of the variables that a model has, one for every layer.

  Args:
    rows: of a family.
    paths: of all variables of a model.

  Yields:
    Rows with names and paths filled in.
  """
  for row in rows:
    if "{i}" not in row.theirs:
      if row.ours[0] in paths:
        yield row
      continue
    i = 0
    while any(path.startswith(_layer(row.ours[0], i)) for path in paths):
      ours = tuple(path.format(i=i) for path in row.ours)
      if ours[0] in paths:
        yield Row(row.theirs.format(i=i), ours, row.layout)
      i += 1


def _layer(path: str, i: int) -> str:
  """'params/encoder_{i}/mlp/out/kernel' as 'params/encoder_3/'."""
  return "/".join(path.split("/")[:2]).format(i=i) + "/"


def value(
  theirs: Mapping[str, Any], name: str, kind: Any, default: Any = None
) -> Any:
  """A value of `config.json`, or its default; None as a default is none.

  A null is no value: it is refused unless the family says what it means.

  Args:
    theirs: `config.json`.
    name: of the value.
    kind: its type, as pydantic checks it.
    default: where there is none.

  Raises:
    ValueError: it is missing, or not of its type. So do the functions below.
  """
  given = theirs.get(name)
  if given is None:
    if default is None:
      raise ValueError(f"{name}: missing")
    if name in theirs:
      raise ValueError(f"{name}: expected a value like {default!r}, got null")
    return default
  try:
    return _adapter(kind).validate_python(given)
  except ValidationError as error:
    raise ValueError(fault(error, name)) from None


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
  return TypeAdapter(kind, config=STRICT)


def flag(theirs: Mapping[str, Any], name: str, default: bool) -> bool:
  """True or false."""
  return value(theirs, name, bool, default)


def size(
  theirs: Mapping[str, Any], name: str, default: int | None = None
) -> int:
  """A whole number of at least 1."""
  return value(theirs, name, Count, default)


def optional_size(
  theirs: Mapping[str, Any], name: str, default: int | None = None
) -> int | None:
  """Likewise, or null."""
  if name in theirs and theirs[name] is None:
    return None
  return size(theirs, name, default) if name in theirs else default


def sizes(
  theirs: Mapping[str, Any], name: str, default: Sequence[int], least: int = 1
) -> tuple[int, ...]:
  """Whole numbers, one for each stage."""
  return tuple(value(theirs, name, list[Annotated[int, Ge(least)]], default))


def number(
  theirs: Mapping[str, Any], name: str, default: float | None
) -> float:
  """A number."""
  return value(theirs, name, float, default)


def choice(
  theirs: Mapping[str, Any], name: str, known: Collection[str], default: str
) -> Any:
  """A word that is known."""
  word = value(theirs, name, str, default)
  if word not in known:
    # A file is no typing error: it has another function, and not one like it.
    known = ", ".join(known)
    raise ValueError(f"{name}: expected one of {known}, got {word!r}")
  return word


def only(theirs: Mapping[str, Any], **expected: Any) -> None:
  """Refuses a model that differs from what is implemented.

  Args:
    theirs: `config.json`.
    **expected: the values that are, where they are given at all.
  """
  for name, value in expected.items():
    given = theirs.get(name, value)
    if given is not None and (given != value or type(given) is not type(value)):
      got = reprlib.repr(given)
      raise ValueError(f"{name}: expected {value!r}, got {got}")


ACTIVATIONS: dict[str, Activation] = {
  "relu": "relu",
  "gelu": "gelu",
  "gelu_new": "gelu_tanh",
  "gelu_pytorch_tanh": "gelu_tanh",
  "silu": "silu",
  "swish": "silu",
}
"""Their names of activations -> ours."""


def activation(
  theirs: Mapping[str, Any], name: str, default: str
) -> Activation:
  """Our name of an activation that `config.json` names."""
  return ACTIVATIONS[choice(theirs, name, ACTIVATIONS, default)]


def their_activation(name: str) -> str:
  """Their name of one of our activations, the first that means it."""
  for theirs, ours in ACTIVATIONS.items():
    if ours == name:
      return theirs
  raise ValueError(f"activation: no published model has {name!r}")

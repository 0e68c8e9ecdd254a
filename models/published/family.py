"""The interface of a published family, and the table that pairs its weights with ours.

Each family is one file: it converts its `config.json` to fields of a config, and has a
table that pairs each of its tensors with variables of the Transformer. The table
serves both directions.
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
  """How a tensor of the published model is laid out in our variables.

  Attributes:
    read: `(theirs, number of ours) -> ours`, arrays in the order of the row.
    write: `ours -> theirs`.
  """

  read: Callable[[np.ndarray, int], list[np.ndarray]]
  write: Callable[[list[np.ndarray]], np.ndarray]


SAME = Layout(lambda x, n: [x] * n, lambda xs: xs[0])
"""The same layout."""

TRANSPOSED = Layout(lambda x, n: [x.T], lambda xs: xs[0].T)
"""PyTorch's Linear is `[out, in]`; a kernel of Flax is `[in, out]`."""

CONCATENATED = Layout(
  lambda x, n: np.split(x, n, axis=-1), lambda xs: np.concatenate(xs, axis=-1)
)
"""Several of our variables, concatenated along the last axis."""


def segments(sizes: tuple[int, ...]) -> Layout:
  """Returns the layout that concatenates variables of these sizes along the first axis.

  Where ours are fewer than the sizes, those at the end are read by nothing and
  written as zeros.
  """
  ends = np.cumsum(sizes)[:-1]

  def write(xs):
    like = xs[0]
    missing = sum(sizes[len(xs) :])
    return np.concatenate(
      [*xs, np.zeros((missing, *like.shape[1:]), like.dtype)]
    )

  return Layout(lambda x, n: np.split(x, ends)[:n], write)


def linear_segments(sizes: tuple[int, ...]) -> Layout:
  """Returns the same for a Linear of PyTorch."""
  one = segments(sizes)
  return Layout(
    lambda x, n: [part.T for part in one.read(x, n)],
    lambda xs: one.write([x.T for x in xs]),
  )


class Row(NamedTuple):
  """Pairs a tensor of the published model with our variables.

  Attributes:
    theirs: the name of the tensor; `{i}` is the number of a layer.
    ours: paths of variables, such as 'params/encoder_{i}/mlp/out/kernel'.
    layout: how the tensor is laid out in the variables.
    index: along the first axis of the variables, of which the tensor is one element,
      such as the kernel of one expert; None is the whole.
    is_start: whether the variables only start as the tensor says and have more
      numbers, so that files that are written have them by our own names too.
  """

  theirs: str
  ours: tuple[str, ...]
  layout: Layout = SAME
  index: int | None = None
  is_start: bool = False

  def of_layer(self, i: int) -> "Row":
    """Returns the row of layer i."""
    ours = tuple(path.format(i=i) for path in self.ours)
    return self._replace(theirs=self.theirs.format(i=i), ours=ours)


def linear(theirs: str, ours: str) -> list[Row]:
  """Returns the rows of a Linear of PyTorch and our Dense, with or without bias."""
  return [
    Row(f"{theirs}.weight", (f"params/{ours}/kernel",), TRANSPOSED),
    Row(f"{theirs}.bias", (f"params/{ours}/bias",)),
  ]


def norm(theirs: str, ours: str) -> list[Row]:
  """Returns the rows of a norm, with or without bias."""
  return [
    Row(f"{theirs}.weight", (f"params/{ours}/scale",)),
    Row(f"{theirs}.bias", (f"params/{ours}/bias",)),
  ]


def batch_norm(theirs: str, ours: str) -> list[Row]:
  """Returns the rows of a batch norm and of its running statistics."""
  return [
    *norm(theirs, ours),
    Row(f"{theirs}.running_mean", (f"batch_stats/{ours}/mean",)),
    Row(f"{theirs}.running_var", (f"batch_stats/{ours}/var",)),
  ]


def table(theirs: str, ours: str) -> list[Row]:
  """Returns the row of an embedding table."""
  return [Row(f"{theirs}.weight", (f"params/{ours}/embedding",))]


class Described(NamedTuple):
  """A model as described by `config.json`.

  Attributes:
    config: a `ModelConfig`, or the config of another kind.
    vocab_size: size of the vocabulary of its inputs.
    outputs: V of its logits: the size of the vocabulary, or the number of classes.
    max_length: length of the longest sequence.
    input_shapes: inputs that are not ids, such as 'image' -> the shape of an example.
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
    architectures: class of transformers -> our head.
    describe: `(theirs, names, head) -> Described`, from `config.json` and the names
      of the tensors. Raises ValueError for a model that is not implemented.
    rows: `config -> table`; rows without variables in the model are ignored.
    prefix: prefix of names that files of the base model omit.
    parts: first words of the names that omit it.
    renamed: `(old, new)` suffixes of names in old files.
    joined: `(suffix, suffixes)` of a tensor that files have as several, concatenated
      along the first axis; they are written in chunks of equal size.
    copies: `(name, original)` of tensors that files may have as well.
    unread: regular expressions of tensors that the model does not need, such as
      buffers.
    buffers: `config -> tensors` that follow from the config, which are written for
      transformers and never read.
    to_json: `Described -> config.json`, as far as the family can express it; None if
      no trained model can be converted to the family.
    inputs: inputs that are not ids, by names in transformers -> names in a batch; the
      first is required.
    config_type: type of `Described.config`.
    rotary: type of layer -> its keys of rotary positions; None means no such positions.
    without_effect: keys of `config.json` that change no logits -> why, in addition to
      `keys.WITHOUT_EFFECT`. Any other key must be read.
    kept: `config.json -> {name: shape}` of tensors in files that affect no output;
      `save_pretrained` writes them back.
  """

  name: str
  architectures: Mapping[str, str]
  describe: Callable[[Mapping[str, Any], Collection[str], str], Described]
  rows: Callable[[Any], Iterable[Row]]
  prefix: str = ""
  parts: tuple[str, ...] = ()
  renamed: tuple[tuple[str, str], ...] = ()
  joined: tuple[tuple[str, tuple[str, ...]], ...] = ()
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
  """Returns the rows of the variables that a model has, one for every layer.

  Args:
    rows: of a family.
    paths: of all variables of a model.

  Yields:
    Rows with the number of the layer in names and paths.
  """
  layers = {_layer(path) for path in paths}
  for row in rows:
    if "{i}" not in row.theirs:
      if row.ours[0] in paths:
        yield row
      continue
    i = 0
    while _layer(row.ours[0]).format(i=i) in layers:
      if row.of_layer(i).ours[0] in paths:
        yield row.of_layer(i)
      i += 1


def _layer(path: str) -> str:
  """'params/encoder_3/mlp/out/kernel' as 'params/encoder_3'."""
  return "/".join(path.split("/")[:2])


def value(
  theirs: Mapping[str, Any], name: str, kind: Any, default: Any = None
) -> Any:
  """Returns a value of `config.json`, or its default; with None it is required.

  A null is refused unless the family gives it a meaning.

  Args:
    theirs: `config.json`.
    name: of the value.
    kind: its type, which pydantic checks.
    default: the value if the key is missing.

  Raises:
    ValueError: the value is missing or has another type. The functions below raise it
      as well.
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


def per_layer(
  theirs: Mapping[str, Any], name: str, choices: tuple[Any, ...]
) -> Sequence[Any] | None:
  """Returns a list with one of a few values for each layer; None if the file has none.

  Raises:
    ValueError: it has something else, or not one for each layer.
  """
  if theirs.get(name) is None:
    return None
  kind = list[str] if isinstance(choices[0], str) else list[int]
  given = value(theirs, name, kind)
  count = size(theirs, "num_hidden_layers")
  unknown = [x for x in given if x not in choices]
  if len(given) != count or unknown:
    known = " and ".join(map(str, choices))
    got = repr(unknown[0]) if unknown else str(len(given))
    raise ValueError(f"{name}: expected {count} of {known}, got {got}")
  return given


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
  return TypeAdapter(kind, config=STRICT)


def flag(theirs: Mapping[str, Any], name: str, default: bool) -> bool:
  """Returns a value that is true or false."""
  return value(theirs, name, bool, default)


def size(
  theirs: Mapping[str, Any], name: str, default: int | None = None
) -> int:
  """Returns an integer of at least 1."""
  return value(theirs, name, Count, default)


def optional(
  theirs: Mapping[str, Any], name: str, kind: Any, default: Any
) -> Any:
  """As `value`, but null means the default, too."""
  return default if theirs.get(name) is None else value(theirs, name, kind)


def optional_size(
  theirs: Mapping[str, Any], name: str, default: int | None = None
) -> int | None:
  """Returns an integer of at least 1, or None for null."""
  if name in theirs and theirs[name] is None:
    return None
  return size(theirs, name, default) if name in theirs else default


def sizes(
  theirs: Mapping[str, Any], name: str, default: Sequence[int], least: int = 1
) -> tuple[int, ...]:
  """Returns a list of integers, one for each stage."""
  return tuple(value(theirs, name, list[Annotated[int, Ge(least)]], default))


def number(
  theirs: Mapping[str, Any], name: str, default: float | None
) -> float:
  """Returns a number."""
  return value(theirs, name, float, default)


def choice(
  theirs: Mapping[str, Any], name: str, known: Collection[str], default: str
) -> Any:
  """Returns one of the known words."""
  word = value(theirs, name, str, default)
  if word not in known:
    # No "did you mean": the file was not typed, and has another function.
    known = ", ".join(known)
    raise ValueError(f"{name}: expected one of {known}, got {word!r}")
  return word


def only(theirs: Mapping[str, Any], **expected: Any) -> None:
  """Raises ValueError if a key has a value that is not implemented.

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
  "relu2": "relu2",
}
"""Names of activations in `config.json` -> ours."""


def activation(
  theirs: Mapping[str, Any], name: str, default: str
) -> Activation:
  """Returns our name of an activation in `config.json`."""
  return ACTIVATIONS[choice(theirs, name, ACTIVATIONS, default)]


def their_activation(name: str) -> str:
  """Returns the first name in `config.json` of one of our activations."""
  for theirs, ours in ACTIVATIONS.items():
    if ours == name:
      return theirs
  raise ValueError(f"activation: no published model has {name!r}")

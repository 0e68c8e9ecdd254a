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
from settings.fields import STRICT, Count, Positive, error_line


class Layout(NamedTuple):
  """How the variables of our model are stored in a tensor of the published model.

  Attributes:
    read: `(tensor, number of variables) -> variables`, in the order of the row.
    write: `variables -> tensor`.
  """

  read: Callable[[np.ndarray, int], list[np.ndarray]]
  write: Callable[[list[np.ndarray]], np.ndarray]


SAME = Layout(lambda x, n: [x] * n, lambda xs: xs[0])
"""One variable with the layout of the tensor."""

TRANSPOSED = Layout(lambda x, n: [x.T], lambda xs: xs[0].T)
"""A PyTorch Linear is `[out, in]`; a Flax kernel is `[in, out]`."""

CONCATENATED = Layout(
  lambda x, n: np.split(x, n, axis=-1), lambda xs: np.concatenate(xs, axis=-1)
)
"""Several variables, concatenated along the last axis."""


def segments(sizes: tuple[int, ...]) -> Layout:
  """Returns the layout that concatenates variables of these sizes along the first axis.

  If there are fewer variables than sizes, the rest of the tensor is not read, and is
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
  """Returns the layout of `segments` for a PyTorch Linear."""
  one = segments(sizes)
  return Layout(
    lambda x, n: [part.T for part in one.read(x, n)],
    lambda xs: one.write([x.T for x in xs]),
  )


class Row(NamedTuple):
  """Pairs a tensor of the published model with our variables.

  Attributes:
    theirs: name of the tensor; `{i}` is the number of a layer.
    ours: paths of variables, such as 'params/encoder_{i}/mlp/out/kernel'.
    layout: how the variables are stored in the tensor.
    index: the element along the first axis of the variables that the tensor is, such as
      the number of an expert; None if the tensor is all of the variables.
    is_start: whether the tensor only initialises the variables, which have more
      elements; written files also have the variables under our own names.
  """

  theirs: str
  ours: tuple[str, ...]
  layout: Layout = SAME
  index: int | None = None
  is_start: bool = False

  def for_layer(self, i: int) -> "Row":
    """Returns the row of layer i."""
    ours = tuple(path.format(i=i) for path in self.ours)
    return self._replace(theirs=self.theirs.format(i=i), ours=ours)


def linear(theirs: str, ours: str) -> list[Row]:
  """Returns the rows of a PyTorch Linear and a Flax Dense, with or without bias."""
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


class Description(NamedTuple):
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
    describe: `(hf_config, names, head) -> Description`, from `config.json` and the names
      of the tensors. Raises ValueError for a model that is not implemented.
    rows: `config -> table`; rows without variables in the model are ignored.
    prefix: prefix of names that files of the base model omit.
    parts: first components of the names that omit the prefix.
    renamed: `(old, new)` suffixes of names in old files.
    joined: `(suffix, suffixes)` of a tensor that files store as several tensors, which
      are concatenated along the first axis and written in chunks of equal size.
    copies: `(name, original)` of tensors that files may store twice.
    unread: regular expressions of tensors that the model does not need, such as
      buffers.
    buffers: `config -> tensors` that follow from the config, which are written for
      transformers and never read.
    to_json: `Description -> config.json`, as far as the family can express it; None if
      no trained model can be converted to the family.
    inputs: inputs that are not ids, by names in transformers -> names in a batch; the
      first is required.
    needs_first_token: whether a masked first token, which a classifier reads, attends
      to other positions in transformers than here.
    config_type: type of `Description.config`.
    rotary: type of layer -> its keys of rotary positions; None means no such positions.
    without_effect: keys of `config.json` that affect no logits -> the reason, in addition
      to `keys.WITHOUT_EFFECT`. Any other key must be read.
    kept: `config.json -> {name: shape}` of tensors in files that affect no output;
      `save_pretrained` writes them back.
  """

  name: str
  architectures: Mapping[str, str]
  describe: Callable[[Mapping[str, Any], Collection[str], str], Description]
  rows: Callable[[Any], Iterable[Row]]
  prefix: str = ""
  parts: tuple[str, ...] = ()
  renamed: tuple[tuple[str, str], ...] = ()
  joined: tuple[tuple[str, tuple[str, ...]], ...] = ()
  copies: tuple[tuple[str, str], ...] = ()
  unread: tuple[str, ...] = ()
  buffers: Callable[[Any], Mapping[str, np.ndarray]] = lambda config: {}
  to_json: Callable[[Description], dict[str, Any]] | None = None
  inputs: Mapping[str, str] | None = None
  needs_first_token: bool = False
  config_type: type = ModelConfig
  rotary: Mapping[str | None, Any] | None = None
  without_effect: Mapping[str, str] = MappingProxyType({})
  kept: Callable[[Mapping[str, Any]], Mapping[str, tuple[int, ...]]] | None = (
    None
  )


def active(rows: Iterable[Row], paths: Collection[str]) -> Iterator[Row]:
  """Yields the rows whose variables a model has, with one row per layer.

  Args:
    rows: table of a family.
    paths: paths of all variables of the model.

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
      if row.for_layer(i).ours[0] in paths:
        yield row.for_layer(i)
      i += 1


def _layer(path: str) -> str:
  """The part of a path that names the layer: 'params/encoder_3'."""
  return "/".join(path.split("/")[:2])


def value(
  hf_config: Mapping[str, Any], name: str, kind: Any, default: Any = None
) -> Any:
  """Returns a value of `config.json`, or its default; without a default it is required.

  Null raises an error unless the family accepts it.

  Args:
    hf_config: `config.json`.
    name: key of the value.
    kind: its type, which pydantic checks.
    default: the value if the key is missing.

  Raises:
    ValueError: the value is missing or has another type. The functions below raise it
      as well.
  """
  given = hf_config.get(name)
  if given is None:
    if default is None:
      raise ValueError(f"{name}: missing")
    if name in hf_config:
      raise ValueError(f"{name}: expected a value like {default!r}, got null")
    return default
  try:
    return _adapter(kind).validate_python(given)
  except ValidationError as error:
    raise ValueError(error_line(error, name)) from None


def per_layer(
  hf_config: Mapping[str, Any], name: str, choices: tuple[Any, ...]
) -> Sequence[Any] | None:
  """Returns a list with one of `choices` for each layer; None if the file has none.

  Raises:
    ValueError: an entry is not in `choices`, or the list does not have one per layer.
  """
  if hf_config.get(name) is None:
    return None
  kind = list[str] if isinstance(choices[0], str) else list[int]
  given = value(hf_config, name, kind)
  count = size(hf_config, "num_hidden_layers")
  unknown = [x for x in given if x not in choices]
  if len(given) != count or unknown:
    known = " and ".join(map(str, choices))
    wrong_count = f"{len(given)}; num_hidden_layers is {count}"
    got = repr(unknown[0]) if unknown else wrong_count
    raise ValueError(f"{name}: expected {count} of {known}, got {got}")
  return given


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
  return TypeAdapter(kind, config=STRICT)


def flag(hf_config: Mapping[str, Any], name: str, default: bool) -> bool:
  """Returns a boolean."""
  return value(hf_config, name, bool, default)


def size(
  hf_config: Mapping[str, Any], name: str, default: int | None = None
) -> int:
  """Returns an integer of at least 1."""
  return value(hf_config, name, Count, default)


def optional(
  hf_config: Mapping[str, Any], name: str, kind: Any, default: Any
) -> Any:
  """Returns `value`, but null also means the default."""
  return (
    default if hf_config.get(name) is None else value(hf_config, name, kind)
  )


def optional_size(
  hf_config: Mapping[str, Any], name: str, default: int | None = None
) -> int | None:
  """Returns an integer of at least 1, or None for null."""
  if name in hf_config and hf_config[name] is None:
    return None
  return size(hf_config, name, default) if name in hf_config else default


def sizes(
  hf_config: Mapping[str, Any],
  name: str,
  default: Sequence[int],
  least: int = 1,
) -> tuple[int, ...]:
  """Returns a list of integers, one for each stage."""
  return tuple(value(hf_config, name, list[Annotated[int, Ge(least)]], default))


def number(
  hf_config: Mapping[str, Any], name: str, default: float | None
) -> float:
  """Returns a number."""
  return value(hf_config, name, float, default)


def positive(
  hf_config: Mapping[str, Any], name: str, default: float | None
) -> float:
  """Returns a number above 0."""
  return value(hf_config, name, Positive, default)


def check_divisor(name: str, number: int, source: str, whole: int) -> None:
  """Raises ValueError if the value of a key does not divide that of another key."""
  if whole % number:
    raise ValueError(
      f"{name}: expected a divisor of {source} {whole}, got {number}"
    )


def choice(
  hf_config: Mapping[str, Any], name: str, known: Collection[str], default: str
) -> Any:
  """Returns a word, which must be one of `known`."""
  word = value(hf_config, name, str, default)
  if word not in known:
    # No suggestion: a program wrote the file, so the word is not a typing error.
    known = ", ".join(known)
    raise ValueError(f"{name}: expected one of {known}, got {word!r}")
  return word


def only(
  hf_config: Mapping[str, Any], source: str = "", /, **expected: Any
) -> None:
  """Raises ValueError if a key has a value that is not implemented.

  Args:
    hf_config: `config.json`.
    source: the keys from which the implemented values follow, for the message.
    **expected: key -> the implemented value; a missing key is accepted, and so is
      null, except for true, because transformers treats null as false.
  """
  for name, value in expected.items():
    given = hf_config.get(name, value)
    if given is None and value is not True:
      continue
    if given != value or type(given) is not type(value):
      got = "null" if given is None else reprlib.repr(given)
      origin = f" ({source})" if source else ""
      raise ValueError(f"{name}: expected {value!r}{origin}, got {got}")


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
  hf_config: Mapping[str, Any], name: str, default: str
) -> Activation:
  """Returns our name of an activation in `config.json`."""
  return ACTIVATIONS[choice(hf_config, name, ACTIVATIONS, default)]


def their_activation(name: str) -> str:
  """Returns the first name in `config.json` of one of our activations."""
  for theirs, ours in ACTIVATIONS.items():
    if ours == name:
      return theirs
  raise ValueError(f"activation: no published model has {name!r}")

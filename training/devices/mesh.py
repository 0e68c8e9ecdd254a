"""The mesh of a run: how many devices lie along each axis, and what lies where.

Nothing here asks for devices; `training.devices.parallel` does.
"""

from collections.abc import Callable, Mapping
import dataclasses
import math
import re
from typing import Any

import jax
from pydantic.dataclasses import dataclass

import models
from settings.fields import STRICT, check

DATA, FSDP, TENSOR, SEQUENCE = "data", "fsdp", "tensor", "sequence"
AXES = (DATA, FSDP, TENSOR, SEQUENCE)

ROWS = (DATA, FSDP)
"""The axes that the rows of a batch are split along."""

RULES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
  # Heads: of queries, keys and values, and of what is made of them.
  (r"attention/(global_)?(query|key|value|position)/kernel", (None, TENSOR)),
  (r"attention/(global_)?(query|key|value)/bias", (TENSOR,)),
  (r"attention/(query|key|value)_short_convolution/kernel", (None, TENSOR)),
  (r"attention/(query|key|value)_short_convolution/bias", (TENSOR,)),
  (r"attention/out/kernel", (TENSOR, None)),
  (r"attention/(\w+_up|(erase|write|level)_kernel)", (None, TENSOR, None)),
  (r"attention/other_(key|value)_kernel", (None, None, TENSOR, None)),
  # Features inside a feed-forward layer.
  (r"/(hidden|gate)/kernel", (None, TENSOR)),
  (r"/(hidden|gate)/bias", (TENSOR,)),
  (r"mlp\w*/out/kernel", (TENSOR, None)),
  # Ids of a vocabulary.
  (r"(source|target|output)_embedding/embedding", (TENSOR, None)),
)
"""End of a variable's path -> the mesh axis of each of its axes, first match.

What no rule names is not split by 'tensor'; 'fsdp' splits every variable.
"""


@dataclass(frozen=True, config=STRICT)
class MeshConfig:
  """How many devices lie along each axis; their product is all of them.

  Attributes:
    data: devices of which each has other rows of a batch, and all parameters.
    fsdp: devices of which each has other rows too, and a part of every parameter, of its gradient
      and of its optimiser state (as in ZeRO, stage 3); a step gathers parameters, and keeps
      them until its backward pass.
    tensor: devices of which each has some of the heads, of the features inside a feed-forward
      layer, and of the vocabulary.
    sequence: devices of which each has a stretch of the positions of every row.

  One of them may be −1, which is the devices that the others leave.

  Raises:
    ValueError: a number that is none of these, or two −1.

  Papers: ZeRO, arXiv:1910.02054; Megatron-LM, arXiv:1909.08053; GSPMD,
  arXiv:2105.04663.
  """

  data: int = -1
  fsdp: int = 1
  tensor: int = 1
  sequence: int = 1

  def __post_init__(self):
    for name, size in self.named.items():
      check(self, name, size == -1 or size >= 1, "at least 1, or -1")
    if [*self.named.values()].count(-1) > 1:
      raise ValueError(
        "data: expected -1 of one axis at most, got "
        + ", ".join(f"{name}={size}" for name, size in self.named.items())
      )

  @property
  def named(self) -> dict[str, int]:
    """Name of each axis -> its size, in the order of `AXES`."""
    return {axis: getattr(self, axis) for axis in AXES}


def resolve(config: MeshConfig, count: int) -> MeshConfig:
  """The mesh on `count` devices, with a number in place of −1.

  Raises:
    ValueError: it has another number of devices; the message says what fits.
  """
  sizes = config.named
  free = [name for name, size in sizes.items() if size == -1]
  given = math.prod(size for size in sizes.values() if size != -1)
  shown = ", ".join(f"{name}={size}" for name, size in sizes.items())
  if free and count % given == 0:
    return dataclasses.replace(config, **{free[0]: count // given})
  if not free and given == count:
    return config
  hint = f"a divisor of {count}" if free else str(count)
  raise ValueError(
    f"data: expected axes whose product is {hint}, the number of devices, got "
    f"{shown}; -1 takes the devices that the others leave"
  )


def check_model(config: MeshConfig, model: Any) -> None:
  """Checks that a resolved mesh can split the model of a config.

  Raises:
    ValueError: 'tensor' does not divide its heads or the features inside its
      feed-forward layers, or a mechanism has no form for a sequence in parts.
  """
  # The layers of a decoder may differ in heads.
  for layer in getattr(model, "cycle", (model,)):
    for field in ("num_heads", "kv_heads", "mlp_features"):
      value = getattr(layer, field, None) or ()
      numbers = value if isinstance(value, tuple) else (value,)
      if any(number % config.tensor for number in numbers):
        raise ValueError(
          f"tensor: expected a divisor of model.{field} {value}, got "
          f"{config.tensor}"
        )
  if config.sequence > 1:
    needs = {SEQUENCE: f"attend to a sequence in parts (mesh.{SEQUENCE})"}
    for slot, chosen in model.attentions.items():
      for one in chosen:
        try:
          models.check_supports(f"model.{slot}", one, needs)
        except ValueError as error:
          raise ValueError(f"{SEQUENCE}: {error}") from error


def spec(path: str, shape: tuple[int, ...], sizes: Mapping[str, int]) -> jax.P:
  """How a variable lies on the mesh, by `RULES` and its shape.

  'tensor' splits the axis that the first matching rule names, where it divides
  it; 'fsdp' the first of the other axes that it divides: a TPU's compiler gives
  each device its part of a sum of gradients along the first axis alone, and
  along another the whole.

  Args:
    path: names between slashes, such as 'params/decoder_0/mlp/out/kernel'; it
      may begin in any way, as that of an optimiser's moments does.
    shape: of the variable.
    sizes: name of a mesh axis -> devices along it.

  Returns:
    A `PartitionSpec` with an entry for each axis.
  """
  entries: list[str | None] = [None] * len(shape)
  if sizes.get(TENSOR, 1) > 1:
    for pattern, names in RULES:
      if len(names) == len(shape) and re.search(pattern + "$", path):
        for axis, name in enumerate(names):
          if name is not None and shape[axis] % sizes[name] == 0:
            entries[axis] = name
        break
  if (fsdp := sizes.get(FSDP, 1)) > 1:
    fitting = (
      axis
      for axis, size in enumerate(shape)
      if entries[axis] is None and size and size % fsdp == 0
    )
    if (axis := next(fitting, None)) is not None:
      entries[axis] = FSDP
  return jax.P(*entries)


def gathered(one: jax.P) -> jax.P:
  """As a layer computes with it: gathered along 'fsdp'."""
  return jax.P(*(None if name == FSDP else name for name in one))


def shardings(
  mesh: jax.sharding.Mesh,
  tree: Any,
  change: Callable[[jax.P], jax.P] = lambda one: one,
) -> Any:
  """Where every leaf of a tree of arrays or shapes lies, its spec changed."""

  def sharding(path, leaf):
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    one = spec(name, tuple(leaf.shape), mesh.shape)
    return jax.NamedSharding(mesh, change(one))

  return jax.tree_util.tree_map_with_path(sharding, tree)

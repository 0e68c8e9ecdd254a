"""The mesh of a run: the size of each axis, and how each variable is sharded.

This module does not use devices; `training.devices.parallel` does.
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
"""The axes along which the rows of a batch are split."""

RULES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
  # Heads of queries, keys and values, and of arrays computed from them.
  (r"attention/(global_)?(query|key|value|position)/kernel", (None, TENSOR)),
  (r"attention/(global_)?(query|key|value)/bias", (TENSOR,)),
  (r"attention/(query|key|value)_short_convolution/kernel", (None, TENSOR)),
  (r"attention/(query|key|value)_short_convolution/bias", (TENSOR,)),
  (r"attention/out/kernel", (TENSOR, None)),
  (r"attention/out_down", (TENSOR, None, None)),
  (r"attention/(\w+_up|(erase|write|level|gate)_kernel)", (None, TENSOR, None)),
  (r"attention/other_(key|value)_kernel", (None, None, TENSOR, None)),
  # Features inside a feed-forward layer.
  (r"/(hidden|gate)/kernel", (None, TENSOR)),
  (r"/(hidden|gate)/bias", (TENSOR,)),
  (r"mlp\w*/(shared/)?out/kernel", (TENSOR, None)),
  # Experts.
  (r"mlp/(hidden|gate|out)_kernel", (TENSOR, None, None)),
  (r"mlp/(hidden|gate|out)_bias", (TENSOR, None)),
  # Ids of a vocabulary.
  (r"(source|target|output)_embedding/embedding", (TENSOR, None)),
)
"""Maps ends of variables' paths to the mesh axis of each of their axes.

The first match counts. Variables without a match are not split by 'tensor'; 'fsdp'
splits every variable.
"""


@dataclass(frozen=True, config=STRICT)
class MeshConfig:
  """The number of devices along each axis of a mesh; the product is all devices.

  Attributes:
    data: number of devices that split the rows of a batch; each has all parameters.
    fsdp: number of devices that split the rows, and also every parameter, its gradient
      and its optimiser state (as in ZeRO, stage 3); a step gathers parameters, and
      keeps them until its backward pass.
    tensor: number of devices that split the heads, the features inside the feed-forward
      layers or their experts, and the vocabulary.
    sequence: number of devices that split the positions of every row into shards.

  One of them may be −1, which means all remaining devices.

  Raises:
    ValueError: a number is neither −1 nor at least 1, or two numbers are −1.

  Papers: ZeRO, arXiv:1910.02054; Megatron-LM, arXiv:1909.08053; GSPMD,
  arXiv:2105.04663.
  """

  data: int = -1
  fsdp: int = 1
  tensor: int = 1
  sequence: int = 1

  def __post_init__(self):
    for name, size in self.axis_sizes.items():
      check(self, name, size == -1 or size >= 1, "at least 1, or -1")
    if [*self.axis_sizes.values()].count(-1) > 1:
      raise ValueError(
        "data: expected -1 of one axis at most, got "
        + ", ".join(f"{name}={size}" for name, size in self.axis_sizes.items())
      )

  @property
  def axis_sizes(self) -> dict[str, int]:
    """Maps the names of axes to their sizes, in the order of `AXES`."""
    return {axis: getattr(self, axis) for axis in AXES}


def resolve(config: MeshConfig, count: int) -> MeshConfig:
  """Replaces −1 by the number of remaining devices out of `count`.

  Raises:
    ValueError: the mesh does not have `count` devices.
  """
  sizes = config.axis_sizes
  free = [name for name, size in sizes.items() if size == -1]
  product = math.prod(size for size in sizes.values() if size != -1)
  axes = ", ".join(f"{name}={size}" for name, size in sizes.items())
  if free and count % product == 0:
    return dataclasses.replace(config, **{free[0]: count // product})
  if not free and product == count:
    return config
  hint = f"a divisor of {count}" if free else str(count)
  raise ValueError(
    f"data: expected axes whose product is {hint}, the number of devices, got "
    f"{axes}; -1 means all remaining devices"
  )


def check_model(config: MeshConfig, model: Any) -> None:
  """Checks that a resolved mesh can split the model of a config.

  Raises:
    ValueError: 'tensor' does not divide its heads or the features inside its
      feed-forward layers, or a mechanism does not support sequence-sharded inputs.
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
    needs = {SEQUENCE: f"attend to a sharded sequence (mesh.{SEQUENCE})"}
    for module, attentions in model.attentions.items():
      for attention in attentions:
        try:
          models.check_supports(f"model.{module}", attention, needs)
        except ValueError as error:
          raise ValueError(f"{SEQUENCE}: {error}") from error


def spec(path: str, shape: tuple[int, ...], sizes: Mapping[str, int]) -> jax.P:
  """Returns the sharding of a variable, from `RULES` and its shape.

  'tensor' splits the axis in the first matching rule, if it divides that axis. 'fsdp'
  splits the first of the other axes that it divides: a TPU's compiler gives each device
  only its shard of a sum of gradients along the first axis, but the whole sum along any
  other axis.

  Args:
    path: names separated by slashes, such as 'params/decoder_0/mlp/out/kernel'; it may
      have any prefix, such as that of an optimiser's moments.
    shape: the shape of the variable.
    sizes: maps mesh axes to the numbers of devices along them.

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


def without_fsdp(spec: jax.P) -> jax.P:
  """Returns the spec of a variable that is gathered along 'fsdp', for computation."""
  return jax.P(*(None if name == FSDP else name for name in spec))


def shardings(
  mesh: jax.sharding.Mesh,
  tree: Any,
  change: Callable[[jax.P], jax.P] = lambda spec: spec,
) -> Any:
  """Returns the sharding of every leaf of a tree, with `change` applied to its spec."""

  def sharding(path, leaf):
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    leaf_spec = spec(name, tuple(leaf.shape), mesh.shape)
    return jax.NamedSharding(mesh, change(leaf_spec))

  return jax.tree_util.tree_map_with_path(sharding, tree)

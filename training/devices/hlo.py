"""Loops, communication and slow operations of a compiled program, from its HLO text.

The text of a program for D devices describes the work of one device. For an operation
whose result has n bytes, each device sends

  collective-permute          n
  all-gather, all-to-all      n · (D − 1)/D
  reduce-scatter              n · (D − 1)
  all-reduce                  2 · n · (D − 1)/D

where D is the number of devices in a group, as in a ring (Patarasuk and Yuan 2009). The
body of a loop counts once per iteration, and a conditional counts the branch that sends
the most. A loop whose length is computed at run time counts once.
"""

import collections
from collections.abc import Iterator, Mapping, Sequence
import functools
import math
import re
from typing import NamedTuple

import numpy as np

_DEVICES = re.compile(r"\b(?:num_partitions|replica_count)=(\d+)")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$", re.MULTILINE)
_OPERATION = re.compile(
  r"= (.*?) (collective-permute|all-gather|all-to-all|reduce-scatter|all-reduce)"
  r"(-start)?\((.*)$"
)
_ARRAY = re.compile(r"\b(?:pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")
_LISTED = re.compile(
  r"(?:replica_groups|source_target_pairs)=\{(\{[\d,]+\}(?:,\{[\d,]+\})*)\}"
)
_COUNTED = re.compile(r"replica_groups=\[([\d,]+)\]<=(\[[\d,]+\]\S*)")
_NAMED = re.compile(
  r"replica_groups=mesh\[(.*?)\](?:, device_ids=\((\S+)\))? \{(.*?)\}"
)
_ORDER = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?")
_AXIS = re.compile(r"'(\w+)'(?::\((\d+)\)(\d+))?")
# The TPU compiler splits one operation into several fusions; the first one starts it.
_CONTINUED = re.compile(r'"async_collective_fusion_config":\{"flag_start":"\d')
_LOOP = re.compile(r" while\(.*condition=%?([\w.\-]+), body=%?([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CONSTANT = re.compile(r"%?([\w.\-]+) = [su]32\[\]\S* constant\((\d+)\)")
_BOUND = re.compile(
  r"ROOT .* compare\(%?([\w.\-]+), %?([\w.\-]+)\), direction=LT"
)
_RESULTS = re.compile(r"ROOT .* tuple\((.*?)\)")
_CALLED = re.compile(r"(?:body|to_apply|calls)=%?([\w.\-]+)")
_BRANCHES = re.compile(
  r"(?:branch_computations=\{([^}]*)\}"
  r"|true_computation=%?([\w.\-]+), false_computation=%?([\w.\-]+))"
)


class Collective(NamedTuple):
  """An operation in which devices exchange arrays.

  Attributes:
    kind: its name in XLA.
    size: the bytes that each device sends per execution.
    times: the number of executions.
    groups: the groups of devices that exchange arrays, by their positions in the mesh,
      or pairs of sender and receiver.
  """

  kind: str
  size: float
  times: int
  groups: Sequence[Sequence[int]]


def bytes_sent(text: str) -> dict[str, float]:
  """Returns the bytes that each device sends in one call of a program, by kind."""
  total = collections.defaultdict(float)
  for operation in collectives(text):
    total[operation.kind] += operation.times * operation.size
  return dict(total)


def sent_along(
  text: str, sizes: Mapping[str, int]
) -> dict[tuple[str, str], tuple[int, float]]:
  """Returns the operations and bytes that each device sends, by mesh axes and kind.

  Args:
    text: HLO text of a program.
    sizes: maps the axes of its mesh, in order, to the devices along them.

  Returns:
    Maps (axes, separated by commas; kind) to the number of executions and the bytes.
  """
  totals: dict[tuple[str, str], tuple[int, float]] = {}
  for operation in collectives(text):
    axes = ", ".join(_crossed_axes(operation.groups, sizes))
    if axes:  # Groups of one device send nothing.
      count, size = totals.get((axes, operation.kind), (0, 0.0))
      totals[axes, operation.kind] = (
        count + operation.times,
        size + operation.times * operation.size,
      )
  return dict(sorted(totals.items()))


def _crossed_axes(
  groups: Sequence[Sequence[int]], sizes: Mapping[str, int]
) -> list[str]:
  """Returns the axes along which the devices of a group differ."""
  shape = tuple(sizes.values())
  crossed = np.zeros(len(shape), bool)
  for group in groups:
    positions = np.stack(np.unravel_index(list(group), shape))
    crossed |= (positions != positions[:, :1]).any(1)
  return [
    axis for axis, is_crossed in zip(sizes, crossed, strict=True) if is_crossed
  ]


def trips(text: str) -> list[int]:
  """Returns the numbers of iterations of all loops of known length."""
  lines, _ = _computations(text)
  numbers = (_trips(x, lines) for body in lines.values() for x in body)
  return [x for x in numbers if x is not None]


def counts(text: str) -> dict[str, int]:
  """Returns the numbers of slow operations by name; see `benchmarks.compiled`."""
  lines = text.splitlines()

  def lines_with(operation):
    return [x for x in lines if re.search(rf"[\s)]{operation}\(", x)]

  windows = re.findall(r"reduce-window\(.*?window=\{size=([0-9x]+)", text)
  scatters = lines_with("scatter")
  repeated = [
    x for x in scatters if "bf16[" in x and "unique_indices=true" not in x
  ]
  sorts = lines_with("sort") + [
    x for x in lines if '"__cub$DeviceRadixSort' in x
  ]
  return {
    "trips": max(trips(text), default=0),
    "conditionals": len(lines_with("conditional")),
    "scatters": len(scatters),
    "repeated": len(repeated),
    "sorts": len(sorts),
    "window": max((max(map(int, x.split("x"))) for x in windows), default=0),
  }


def collectives(text: str) -> list[Collective]:
  """Returns the collective operations of one call of a program."""
  lines, entry = _computations(text)
  devices = max(map(int, _DEVICES.findall(text.partition("\n")[0])), default=1)

  @functools.cache
  def operations(name: str) -> list[Collective]:
    """Returns the collective operations of a computation."""
    results = []
    # The TPU compiler has no operation for reduce-scatter.
    is_scatter = name.startswith("all-reduce-scatter")
    for line in lines.get(name, ()):
      if match := _OPERATION.search(line):
        operation = _collective(match, devices)
        if is_scatter:
          operation = operation._replace(
            kind="reduce-scatter", size=operation.size / 2
          )
        results += [] if _CONTINUED.search(line) else [operation]
        continue
      if "-done(" in line or "-update(" in line:
        continue
      times = _trips(line, lines) or 1
      for callee in _callees(line):
        inner = operations(callee)
        results += (x._replace(times=times * x.times) for x in inner)
    return results

  def _callees(line: str) -> Iterator[str]:
    yield from _CALLED.findall(line)
    if branches := _BRANCHES.search(line):
      several, *two = branches.groups()
      names = several.replace("%", "").split(", ") if several else two
      yield max(
        names, key=lambda x: sum(c.times * c.size for c in operations(x))
      )

  return operations(entry)


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
  """Returns the lines of each computation, and the name of the entry computation."""
  _, *parts = _HEAD.split(text)
  marks, names, bodies = parts[::3], parts[1::3], parts[2::3]
  lines = dict(zip(names, map(str.splitlines, bodies), strict=True))
  return lines, dict(zip(marks, names, strict=True)).get("ENTRY ", "")


def _trips(line: str, lines: Mapping[str, Sequence[str]]) -> int | None:
  """Returns the iterations of a loop; None if unknown or if the line is not a loop.

  The TPU compiler does not print it. Loops of JAX count from 0 up to a constant, as do
  those of XLA that interleave a product with communication, whose steps may be larger
  than 1.
  """
  loop = _LOOP.search(line)
  if loop is None:
    return None
  if known := _TRIPS.search(line):
    return int(known[1])
  condition, body = ("\n".join(lines.get(x, ())) for x in loop.groups())
  bound = _BOUND.search(condition)
  constants = dict(_CONSTANT.findall(condition))
  if bound is None or bound[2] not in constants:
    return None
  index = re.search(rf"%{re.escape(bound[1])} = .*, index=(\d+)", condition)
  step = _step(body, int(index[1])) if index else 1
  return -(-int(constants[bound[2]]) // step)


def _step(body: str, index: int) -> int:
  """Returns the step by which a loop increments element `index` of its carry."""
  if results := _RESULTS.search(body):
    names = re.findall(r"%([\w.\-]+)", results[1])
    added = re.search(
      rf"%{re.escape(names[index])} = \S+ add\(%?([\w.\-]+), %?([\w.\-]+)\)",
      body,
    )
    constants = dict(_CONSTANT.findall(body))
    for name in added.groups() if added else ():
      if name in constants:
        return int(constants[name])
  return 1


def _collective(operation: re.Match[str], devices: int) -> Collective:
  """Parses a collective operation of a program for `devices` devices."""
  result, kind, start, options = operation.groups()
  if start:  # The type lists operands first: (operands, results, …).
    result = _result(result, kind)
  size = sum(
    int(bits or 8) / 8 * math.prod(map(int, filter(None, shape.split(","))))
    for bits, shape in _ARRAY.findall(result)
  )
  groups = _groups(options) or [range(devices)]
  if kind == "collective-permute":
    return Collective(kind, size, 1, groups)
  devices = len(groups[0])
  factor = {"reduce-scatter": devices, "all-reduce": 2}.get(kind, 1)
  return Collective(kind, factor * size * (devices - 1) / devices, 1, groups)


def _result(types: str, kind: str) -> str:
  """Returns the result type of an asynchronous operation from its start's types."""
  depth, elements = 0, [""]
  for character in types.removeprefix("("):
    depth += (character in "([{") - (character in ")]}")
    if character == "," and depth == 0:
      elements.append("")
    else:
      elements[-1] += character
  # The start of a reduction lists operands only if they are a tuple.
  if kind == "all-reduce" and not elements[0].startswith("("):
    return types
  return elements[1]


def _groups(options: str) -> Sequence[Sequence[int]]:
  """Parses groups of devices: listed, as an iota, or along mesh axes; [] means all."""
  if listed := _LISTED.search(options):
    groups = listed[1].strip("{}").split("},{")
    return [_numbers(group) for group in groups]
  if counted := _COUNTED.search(options):
    return _device_order(counted[2]).reshape(_numbers(counted[1])).tolist()
  if named := _NAMED.search(options):
    return _axis_groups(*named.groups())
  if "replica_groups={}" in options or "replica_groups" not in options:
    return []
  raise ValueError(f"groups of devices in an unknown format: {options}")


def _device_order(text: str) -> np.ndarray:
  """Parses device numbers: '7,6,5', or '[2,4]T(1,0)', an iota with transposed axes."""
  counted = _ORDER.match(text)
  if counted is None:
    return np.array(_numbers(text))
  shape = _numbers(counted[1])
  devices = np.arange(math.prod(shape)).reshape(shape)
  return devices.transpose(_numbers(counted[2])) if counted[2] else devices


def _axis_groups(
  mesh: str, devices: str | None, axes: str
) -> Sequence[Sequence[int]]:
  """Groups along mesh axes; 'x':(2)4 is a factor 4 of an axis, after a factor 2."""
  sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh)}
  selected = {name: factors for name, *factors in _AXIS.findall(axes)}
  shape, group_axes = [], []
  for name, size in sizes.items():
    before, count = (int(x or 0) for x in selected.get(name, ("", "")))
    factors = [before, count, size // (before * count)] if count else [size]
    if name in selected:
      group_axes.append(len(shape) + (count > 0))
    shape += factors
  array = _device_order(devices or f"[{math.prod(shape)}]").reshape(shape)
  last = [*range(-len(group_axes), 0)]
  group = math.prod(shape[i] for i in group_axes)
  return np.moveaxis(array, group_axes, last).reshape(-1, group).tolist()


def _numbers(text: str) -> list[int]:
  return [int(x) for x in text.split(",")]

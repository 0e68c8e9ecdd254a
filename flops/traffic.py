"""Bytes that a compiled program sends between devices, its loops counted in full.

XLA's text of a program for D devices has what one device does. Of an operation
whose result has n bytes, each device sends

  collective-permute          n
  all-gather, all-to-all      n · (D − 1)/D
  reduce-scatter              n · (D − 1)
  all-reduce                  2 · n · (D − 1)/D

with D the devices of its groups: what a ring needs (Patarasuk and Yuan 2009). The
body of a loop counts as often as XLA knows it runs, and of branches the one that
sends most.
"""

from collections.abc import Iterator
import math
import re

_BYTES = {
  "pred": 1,
  "s8": 1,
  "u8": 1,
  "bf16": 2,
  "f16": 2,
  "s16": 2,
  "u16": 2,
  "f32": 4,
  "s32": 4,
  "u32": 4,
  "f64": 8,
  "s64": 8,
  "u64": 8,
}
_KINDS = (
  "collective-permute",
  "all-gather",
  "all-to-all",
  "reduce-scatter",
  "all-reduce",
)
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_OPERATION = re.compile(
  r"= (.*?) (" + "|".join(_KINDS) + r")(?:-start)?\((.*)$"
)
_ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
_GROUPS = re.compile(r"replica_groups=(?:\{\{([\d,]*)\}|\[(\d+),(\d+)\])")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CALLED = re.compile(r"(?:body|to_apply|calls)=%?([\w.\-]+)")
_BRANCHES = re.compile(
  r"(?:branch_computations=\{([^}]*)\}"
  r"|true_computation=%?([\w.\-]+), false_computation=%?([\w.\-]+))"
)


def sent(text: str) -> dict[str, float]:
  """Bytes that each device sends in one call of a program.

  Args:
    text: of it, `jax.jit(f).lower(…).compile().as_text()`.

  Returns:
    kind of operation → bytes; those that do not occur are left out.
  """
  computations, entry = _computations(text)
  return _of(entry, computations, {})


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
  """Name of each computation → its lines, and which is the program."""
  found: dict[str, list[str]] = {}
  entry = name = ""
  for line in text.splitlines():
    if head := _HEAD.match(line):
      name = head[2]
      found[name] = []
      entry = name if head[1] else entry
    elif name:
      found[name].append(line)
  return found, entry


def _of(
  name: str,
  computations: dict[str, list[str]],
  known: dict[str, dict[str, float]],
) -> dict[str, float]:
  """What a computation sends, with all that it calls."""
  if name in known:
    return known[name]
  total: dict[str, float] = {}

  def add(found: dict[str, float], times: int = 1) -> None:
    for kind, count in found.items():
      total[kind] = total.get(kind, 0.0) + times * count

  for line in computations.get(name, ()):
    if operation := _OPERATION.search(line):
      add({operation[2]: _bytes(operation[1], operation[2], line)})
      continue
    trips = _TRIPS.search(line)
    for called in _CALLED.findall(line):
      add(_of(called, computations, known), int(trips[1]) if trips else 1)
    branches = [_of(one, computations, known) for one in _branches(line)]
    if branches:
      add(max(branches, key=lambda found: sum(found.values())))
  known[name] = total
  return total


def _branches(line: str) -> Iterator[str]:
  if found := _BRANCHES.search(line):
    several, *two = found.groups()
    names = several.split(",") if several else two
    yield from (one.strip().lstrip("%") for one in names)


def _bytes(result: str, kind: str, line: str) -> float:
  """What a device sends in one operation with this type of result."""
  size = sum(
    _BYTES[dtype] * math.prod(map(int, filter(None, shape.split(","))))
    for dtype, shape in _ARRAY.findall(result)
  )
  if kind == "collective-permute":
    return size
  groups = _GROUPS.search(line)
  if groups is None:
    return size
  devices = len(groups[1].split(",")) if groups[1] else int(groups[3])
  if kind == "reduce-scatter":
    return size * (devices - 1)
  factor = 2 if kind == "all-reduce" else 1
  return factor * size * (devices - 1) / devices

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

import collections
import functools
import math
import re

_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$", re.MULTILINE)
_OPERATION = re.compile(
  r"= (.*?) (collective-permute|all-gather|all-to-all|reduce-scatter|all-reduce)"
  r"(?:-start)?\((.*)$"
)
_ARRAY = re.compile(r"\b(?:pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")
_GROUPS = re.compile(
  r"replica_groups=(?:\{\{([\d,]*)\}|\[\d+,(\d+)\]|mesh\[(.*?)\].*?\{(.*?)\})"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CALLED = re.compile(r"(?:body|to_apply|calls)=%?([\w.\-]+)")
_BRANCHES = re.compile(
  r"(?:branch_computations=\{([^}]*)\}"
  r"|true_computation=%?([\w.\-]+), false_computation=%?([\w.\-]+))"
)


def sent(text: str) -> dict[str, float]:
  """Bytes that each device sends in one call of a program, by XLA's text of it.

  Returns:
    kind of operation → bytes; those that do not occur are left out.
  """
  _, *parts = _HEAD.split(text)
  marks, names, bodies = parts[::3], parts[1::3], parts[2::3]
  lines = dict(zip(names, map(str.splitlines, bodies), strict=True))

  @functools.cache
  def sent_by(name: str) -> dict[str, float]:
    total = collections.defaultdict(float)
    for line in lines.get(name, ()):
      if operation := _OPERATION.search(line):
        total[operation[2]] += _bytes(*operation.groups())
        continue
      trips = _TRIPS.search(line)
      parts = [
        (x, int(trips[1] if trips else 1)) for x in _CALLED.findall(line)
      ]
      if branches := _BRANCHES.search(line):
        several, *two = branches.groups()
        chosen = several.replace("%", "").split(", ") if several else two
        parts += [(max(chosen, key=lambda x: sum(sent_by(x).values())), 1)]
      for called, times in parts:
        for kind, size in sent_by(called).items():
          total[kind] += times * size
    return total

  return dict(sent_by(dict(zip(marks, names, strict=True)).get("ENTRY ", "")))


def _bytes(result: str, kind: str, options: str) -> float:
  """What a device sends in one operation with this type of result."""
  size = sum(
    int(bits or 8) // 8 * math.prod(map(int, filter(None, shape.split(","))))
    for bits, shape in _ARRAY.findall(result)
  )
  groups = _GROUPS.search(options)
  if kind == "collective-permute" or groups is None:
    return size
  devices = _devices(groups)
  if kind == "reduce-scatter":
    return size * (devices - 1)
  factor = 2 if kind == "all-reduce" else 1
  return factor * size * (devices - 1) / devices


def _devices(groups: re.Match[str]) -> int:
  """How many devices a group has: those listed, counted, or along axes of a mesh."""
  members, count, mesh, axes = groups.groups()
  if members is not None:
    return len(members.split(","))
  if count is not None:
    return int(count)
  sizes = dict(axis.split("=") for axis in mesh.split(","))
  # An axis is whole, as 'x', or a part of it, as 'x':(2)4, which has 4.
  parts = (sizes.get(x) or x.rpartition(")")[2] for x in axes.split(","))
  return math.prod(map(int, parts))

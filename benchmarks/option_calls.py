"""Calls of a mechanism with each of its options, and their table."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention import Dims, plug
from benchmarks import scaling_tables, timing
from benchmarks.programs import FORWARD, TRAINING, Program, Size, make

LIMIT = 1.3
"""Most that an option may cost, as a ratio to the plain call."""

_PLAIN = "plain"
_GLOBALS = 16


class Option(NamedTuple):
  """One call next to the plain one.

  Attributes:
    call: what the mechanism is given by name.
    trained: likewise, with a gradient.
    own: hyperparameters of the mechanism.
    queries: T; None is S.
    keys: S; None is the length asked for.
    kv_heads: K; None is N.
  """

  call: Mapping[str, Any] = {}
  trained: Mapping[str, Any] = {}
  own: Mapping[str, Any] = {}
  queries: int | None = None
  keys: int | None = None
  kv_heads: int | None = None


def programs(name: str, length: int) -> Iterator[Program]:
  """The plain call of a mechanism and one with each option, two parts each.

  A row's 'mechanism' is the name and, behind a colon, the option.
  """
  size = Size()
  for label, option in options(name, length).items():
    keys = option.keys or length
    queries, kv_heads = option.queries or keys, option.kv_heads or size.heads
    mechanism = make(name, keys, **option.own)
    is_causal = plug.directions(mechanism)[0]
    features = kv_heads * size.head_dim
    dims = Dims(size.heads, kv_heads, size.head_dim, keys, features)
    shapes = [(queries, size.heads), (keys, kv_heads), (keys, kv_heads)]
    arrays: list[Any] = [
      jax.random.normal(
        jax.random.key(i), (size.batch, *shape, size.head_dim), size.dtype
      )
      for i, shape in enumerate(shapes)
    ]
    if "shared_qk" in mechanism.supports:
      arrays[1] = None

    apply = partial(mechanism.apply, is_causal=is_causal)

    def forward(arrays, trained, variables, call, apply=apply):
      return apply(variables, *arrays, **trained, **call)

    def both(arrays, trained, variables, call, forward=forward):
      out, pullback = jax.vjp(
        lambda *x: forward(x[0], x[1], variables, call), arrays, trained
      )
      return out, pullback(out)

    variables = mechanism.init(jax.random.key(3), dims)
    arguments = (arrays, dict(option.trained), variables, dict(option.call))
    for part, function in ((FORWARD, forward), (TRAINING, both)):
      label_of = f"{name}: {label}"
      yield Program(label_of, is_causal, part, length, function, arguments)


def options(name: str, length: int) -> dict[str, Option]:
  """What a mechanism is timed with, as its `supports` says; plain first."""
  heads = Size().heads
  supports = make(name, length).supports
  keep = jax.random.bernoulli(jax.random.key(2), 0.9, (1, 1, 1, length))
  found = {
    _PLAIN: Option(),
    "key mask": Option({"mask": keep}),
    f"T = S = {length - 3:,}": Option(keys=length - 3),
    f"N/K = {heads // 2}": Option(kv_heads=2),
  }
  if "cross" in supports:
    found["T = 3S/4"] = Option(queries=3 * length // 4)
  if "segments" in supports:
    ids = (jnp.arange(length) * 4 // length)[None]
    found["four segments"] = Option(
      {"query_segment_ids": ids, "key_segment_ids": ids}
    )
  if "relative" in supports:
    table = jnp.zeros((heads, 2 * (length // 16) + 1))
    found["bias by distance"] = Option(trained={"relative_bias": table})
  if "global" in supports:
    places = jnp.arange(_GLOBALS)[None] * (length // _GLOBALS)
    found[f"{_GLOBALS} global tokens"] = Option({"global_indices": places})
    if length > 1024:  # Else the window reaches over everything.
      found["dilation 2"] = Option(own={"dilation": 2})
  return found


def markdown(rows: Sequence[timing.Row]) -> str:
  """A row an option: both ratios, whether they keep `LIMIT`, temporaries."""
  by_name: dict[str, dict[str, Any]] = {}
  for row in rows:
    by_name.setdefault(row["mechanism"], {})[row["part"]] = row
  lines = [
    ["mechanism", "option", "forward", "", "forward+backward", "", "MiB"],
    ["---", "---", "--:", "---", "--:", "---", "--:"],
  ]
  for label, parts in by_name.items():
    name, option = label.split(": ")
    base = by_name[f"{name}: {_PLAIN}"]
    cells = [f"`{name}`", option]
    for part in (FORWARD, TRAINING):
      ours, plain = parts[part]["seconds"], base[part]["seconds"]
      if ours is None or plain is None:
        cells += ["not run", ""]
      elif option == _PLAIN:
        cells += [f"{1e3 * ours:.3g} ms", ""]
      else:
        ratio = ours / plain
        cells += [f"{ratio:.2f}", "" if ratio <= LIMIT else "**over**"]
    memory = [parts[part]["temp_bytes"] / 2**20 for part in (FORWARD, TRAINING)]
    cells.append(" / ".join(f"{x:.1f}" for x in memory))
    lines.append(cells)
  return scaling_tables.table(lines)

"""A walk through a jaxpr that adds up operations, loops in full; see `flops`.

Only what decides how often something runs is computed: of every jaxpr, the
equations that make the integers which a `while`, a `cond` or a loop around one
of them reads. All other equations are added up once, for any values.
"""

from collections.abc import Iterable, Sequence
import math
from typing import Any, NamedTuple

import jax
from jax.extend import source_info_util
from jax.extend.core import (
  ClosedJaxpr,
  Jaxpr,
  JaxprEqn,
  Literal,
  Var,
  jaxprs_in_params,
)
import numpy as np

from flops import rules

_MOST_ROUNDS = 2**20

Known = np.ndarray | None
"""A value, None where it is not known."""


class _Plan(NamedTuple):
  """A jaxpr, cut down to what its cost depends on.

  Attributes:
    flops: of all equations that cost the same for any values.
    steps: the others, and those that compute integers for them.
    reads: which arguments the steps read.
  """

  flops: float
  steps: list[JaxprEqn]
  reads: frozenset[int]


class _Loop(NamedTuple):
  """A `while` or a `scan`.

  Operands are constants of the test, constants of the body, what is carried,
  and the rows of a scan.

  Attributes:
    test: if there is another round; None of a scan.
    body: of constants, carried and rows; carried comes first in its results.
    test_consts: how many.
    consts: of the body.
    carry: how many are carried.
  """

  test: ClosedJaxpr | Jaxpr | None
  body: ClosedJaxpr | Jaxpr
  test_consts: int
  consts: int
  carry: int


class Walk:
  """One walk. Parts go by identity: whoever makes it keeps the jaxpr alive.

  Attributes:
    uncounted: what could not be counted, in order; see `flops.Account`.
  """

  def __init__(self):
    self.uncounted: dict[str, None] = {}
    self._plans: dict[tuple[int, frozenset[int]], _Plan] = {}
    self._varies: dict[int, bool] = {}
    self._loops: dict[tuple, float] = {}

  def run(
    self,
    inner: ClosedJaxpr | Jaxpr,
    known: Sequence[Known],
    wanted: Iterable[int] = (),
  ) -> tuple[float, list[Known]]:
    """Operations, and the results with an index in `wanted` where known."""
    jaxpr, consts = _opened(inner)
    plan = self._plan(jaxpr, frozenset(wanted))
    values: dict[Var, np.ndarray] = {}
    constants = [_constant(x) for x in consts]

    def keep(variables, found):
      for variable, value in zip(variables, found, strict=True):
        if value is not None:
          values[variable] = value

    def read(x):
      return _constant(x.val) if isinstance(x, Literal) else values.get(x)

    keep(jaxpr.constvars, constants)
    keep(jaxpr.invars, known)
    flops = plan.flops
    for eqn in plan.steps:
      more, found = self._step(eqn, [read(x) for x in eqn.invars])
      flops += more
      keep(eqn.outvars, found)
    return flops, [read(x) for x in jaxpr.outvars]

  def _plan(self, jaxpr: Jaxpr, wanted: frozenset[int]) -> _Plan:
    key = id(jaxpr), wanted
    if key not in self._plans:
      outputs = [jaxpr.outvars[i] for i in wanted]
      needed = {x for x in outputs if isinstance(x, Var)}
      flops, steps = 0.0, []
      for eqn in reversed(jaxpr.eqns):
        is_step = self._eqn_varies(eqn) or (
          _is_integral(eqn) and not needed.isdisjoint(eqn.outvars)
        )
        if is_step:
          steps.append(eqn)
          needed.update(x for x in eqn.invars if isinstance(x, Var))
        else:
          flops += self._fixed(eqn)
      reads = (i for i, x in enumerate(jaxpr.invars) if x in needed)
      self._plans[key] = _Plan(flops, steps[::-1], frozenset(reads))
    return self._plans[key]

  def _eqn_varies(self, eqn: JaxprEqn) -> bool:
    """If its cost may depend on values."""
    if eqn.primitive.name in ("while", "cond"):
      return True
    if _body(eqn) is None:
      return False
    return any(map(self._jaxpr_varies, jaxprs_in_params(eqn.params)))

  def _jaxpr_varies(self, jaxpr: Jaxpr) -> bool:
    if id(jaxpr) not in self._varies:
      self._varies[id(jaxpr)] = any(map(self._eqn_varies, jaxpr.eqns))
    return self._varies[id(jaxpr)]

  def _fixed(self, eqn: JaxprEqn) -> float:
    """Operations of an equation that costs the same for any values."""
    body = _body(eqn)
    if body is not None:
      return _copies(eqn) * self._plan(_opened(body)[0], frozenset()).flops
    cost = rules.cost(eqn)
    if cost is None:
      self._report(eqn, "no rule for it, counted as 0")
      return 0.0
    return cost

  def _report(self, eqn: JaxprEqn, what: str) -> None:
    where = source_info_util.summarize(eqn.source_info) or "a place unknown"
    where = where.rpartition("/")[2]
    self.uncounted[f"{eqn.primitive.name} at {where}: {what}"] = None

  def _step(
    self, eqn: JaxprEqn, known: list[Known]
  ) -> tuple[float, list[Known]]:
    unknown: list[Known] = [None] * len(eqn.outvars)
    name = eqn.primitive.name
    if name == "cond":
      return self._cond(eqn, known), unknown
    if name in ("while", "scan"):
      return self._loop(eqn, known), unknown
    body = _body(eqn)
    if name == "shard_map" and body is not None:
      # Inside, arrays are parts of what they are here; numbers are the same.
      known = [x if x is not None and x.ndim == 0 else None for x in known]
      return _copies(eqn) * self.run(body, known)[0], unknown
    if body is not None:
      return self.run(body, known, range(len(unknown)))
    # Integers, so nothing is added.
    arrays = [x for x in known if x is not None]
    if len(arrays) < len(known):
      return 0.0, unknown
    return 0.0, [rules.evaluate(eqn, arrays)]

  def _cond(self, eqn: JaxprEqn, known: list[Known]) -> float:
    index, *rest = known
    branches = eqn.params["branches"]
    if index is not None:
      chosen = min(max(int(index), 0), len(branches) - 1)
      branches = branches[chosen : chosen + 1]
    return max(self.run(branch, rest)[0] for branch in branches)

  def _loop(self, eqn: JaxprEqn, known: list[Known]) -> float:
    loop = _loop_of(eqn)
    controls, matters = self._controls(loop)
    known = [x if i in matters else None for i, x in enumerate(known)]
    # Many rows of blocks enter the same loop with the same bounds.
    key = id(eqn), *(None if x is None else x.tobytes() for x in known)
    if key not in self._loops:
      walk = self._scan if loop.test is None else self._while
      self._loops[key] = walk(eqn, loop, controls, known)
    return self._loops[key]

  def _scan(
    self,
    eqn: JaxprEqn,
    loop: _Loop,
    controls: frozenset[int],
    known: list[Known],
  ) -> float:
    length, last = eqn.params["length"], loop.consts + loop.carry
    consts, xs = known[: loop.consts], known[last:]
    carry = known[loop.consts : last]
    if all(x is None for x in (*carry, *xs)):
      return length * self.run(loop.body, known)[0]
    flops = 0.0
    steps = range(length)
    for t in reversed(steps) if eqn.params["reverse"] else steps:
      row = [None if x is None else x[t] for x in xs]
      more, found = self.run(loop.body, [*consts, *carry, *row], controls)
      flops += more
      carry = found[: loop.carry]
    return flops

  def _while(
    self,
    eqn: JaxprEqn,
    loop: _Loop,
    controls: frozenset[int],
    known: list[Known],
  ) -> float:
    assert loop.test is not None
    first = loop.test_consts + loop.consts
    test_consts, carry = known[: loop.test_consts], known[first:]
    consts = known[loop.test_consts : first]
    flops = 0.0
    for rounds in range(_MOST_ROUNDS):
      again = self.run(loop.test, [*test_consts, *carry], [0])[1][0]
      if again is None:
        self._report(
          eqn, f"it ends where the data say, counted as {rounds} rounds"
        )
        return flops
      if not again:
        return flops
      more, carry = self.run(loop.body, [*consts, *carry], controls)
      flops += more
    self._report(eqn, f"only its first {_MOST_ROUNDS:,} rounds are counted")
    return flops

  def _controls(self, loop: _Loop) -> tuple[frozenset[int], frozenset[int]]:
    """What decides about the rounds, or about the cost of one.

    Returns:
      The indices among what is carried, and among the operands.
    """
    first = loop.test_consts + loop.consts
    matters, carried = set[int](), set[int]()
    if loop.test is not None:
      reads = self._plan(_opened(loop.test)[0], frozenset([0])).reads
      matters = {i if i < loop.test_consts else i + loop.consts for i in reads}
    while True:
      # What a round needs of the next one's needs, until nothing is new.
      reads = self._plan(_opened(loop.body)[0], frozenset(carried)).reads
      matters |= {i + loop.test_consts for i in reads}
      more = {i - first for i in matters if 0 <= i - first < loop.carry}
      if more == carried:
        return frozenset(carried), frozenset(matters)
      carried = more


def _loop_of(eqn: JaxprEqn) -> _Loop:
  params = eqn.params
  if eqn.primitive.name == "scan":
    # By shape, which every version of JAX tells: rows and stacked results have
    # an axis more outside than inside.
    body = _opened(params["jaxpr"])[0]
    rows = sum(map(_is_longer, eqn.invars, body.invars))
    carry = len(eqn.outvars) - sum(map(_is_longer, eqn.outvars, body.outvars))
    consts = len(eqn.invars) - carry - rows
    return _Loop(None, params["jaxpr"], 0, consts, carry)
  consts = params["cond_nconsts"], params["body_nconsts"]
  body = params["body_jaxpr"]
  results = len(_opened(body)[0].outvars)
  return _Loop(params["cond_jaxpr"], body, *consts, results)


def _is_longer(outside: Any, inside: Any) -> bool:
  return outside.aval.ndim > inside.aval.ndim


def _opened(inner: ClosedJaxpr | Jaxpr) -> tuple[Jaxpr, Sequence[Any]]:
  if isinstance(inner, ClosedJaxpr):
    return inner.jaxpr, inner.consts
  return inner, ()


# fmt: off
_CALLS = {
  "checkpoint", "closed_call", "core_call", "custom_jvp_call",
  "custom_vjp_call", "custom_vjp_call_jaxpr", "jit", "pjit", "remat", "remat2",
  "scan", "shard_map",
}
# fmt: on


def _body(eqn: JaxprEqn) -> ClosedJaxpr | Jaxpr | None:
  """What runs inside of a call or a scan; None of anything else."""
  if eqn.primitive.name not in _CALLS:
    return None
  params = eqn.params
  return params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]


def _copies(eqn: JaxprEqn) -> int:
  """How often the body of a call or scan runs."""
  if eqn.primitive.name == "scan":
    return eqn.params["length"]
  if eqn.primitive.name == "shard_map":
    sizes = eqn.params["mesh"].shape
    return math.prod(sizes[axis] for axis in eqn.params["newly_manual_axes"])
  return 1


def _is_integral(eqn: JaxprEqn) -> bool:
  """If its results may be integers that `_step` can find."""
  if eqn.primitive.name in ("scan", "shard_map"):
    return False
  if _body(eqn) is not None:
    return any(rules.is_small(x.aval) for x in eqn.outvars)
  return rules.can_evaluate(eqn)


def _constant(x: Any) -> Known:
  """An array of the program as a known value, if it is small."""
  if isinstance(x, jax.core.Tracer):
    return None
  return np.asarray(x) if rules.is_small(jax.typeof(x)) else None

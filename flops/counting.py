"""Floating-point operations of a JAX function, its loops counted in full.

Why not what XLA says of a compiled program: it counts the body of a loop once.
jax 0.10.2 on a CPU, `cost_analysis()['flops']` of a scan whose body is a product
of two 64×64 matrices (2·64³ = 524,288 operations) and a sum:

  length    1         2         10        100
  XLA       528,384   528,386   528,386   528,386
  here      528,384   1,056,768 5,283,840 52,838,400

and the mechanisms here are loops over blocks. So the jaxpr is walked instead.

Rules, per operation:

  dot_general           2·B·M·N·K
  convolution           2 for each output and term of its window, holes included
  elementwise           1 for each output, exp, log, tanh and others like them
                        too: XLA counts those apart, as 'transcendentals'
  x^n                   its multiplications by repeated squaring
  reduction             1 for each input; a scatter that adds, 1 for each update
  sort, top_k           n log₂ n for each row of n, of any type
  qr                    4·(m·n·min − min³/3), factors and Q
  no floating point     0: integers, comparisons, selections, conversions,
                        random bits, and data that only move

Without loops that is XLA's 'flops' + 'transcendentals' but for what it counts of
the last line, one an element, and what it fuses, simplifies or drops.

Control:

  scan                  length × body, or step by step where a bound inside
                        depends on its counter
  while, fori_loop      rounds × body
  cond, switch          the branch taken; the largest where that is unknown
  shard_map             body × devices
  jit, remat, custom derivatives   what is inside

Rounds and branches are found by computing with integers, in rows of at most 2¹⁶,
that follow from constants, iotas and the counters of loops around: causal block
loops end where their row ends. Of a loop that ends where the data say only the
rounds that are sure are counted, mostly none: the number is then a lower bound,
and `account` says which loop. Performer's causal form has such a loop, for rows
that float32 cannot hold; it normally runs no round, and the number is right.
An operation without a rule (a GPU's kernel, an eigenvalue) is named likewise.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from flops.walk import Walk


class Account(NamedTuple):
  """What a function costs.

  Attributes:
    flops: floating-point operations of one call.
    uncounted: what is not in them, one line each; empty where all is.
  """

  flops: float
  uncounted: tuple[str, ...]


def count(function: Callable[..., Any], *args: Any) -> float:
  """Floating-point operations of one call.

  Args:
    function: anything that `jax.jit` takes.
    args: its arguments; only shapes and dtypes matter, so a
      `jax.ShapeDtypeStruct` will do for an array.

  Returns:
    `account(…).flops`: a lower bound where that has something `uncounted`.
  """
  return account(function, *args).flops


def account(function: Callable[..., Any], *args: Any) -> Account:
  """As `count`, and what could not be counted.

  Cost: one trace of `function`, and a walk that grows with its equations and
  with the rounds of those loops that hold other loops of unequal length.
  """
  closed = jax.make_jaxpr(function)(*args)
  walk = Walk()
  flops, _ = walk.run(closed, [None] * len(closed.jaxpr.invars))
  return Account(flops, tuple(walk.uncounted))

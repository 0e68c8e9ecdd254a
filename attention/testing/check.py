"""One check of the contract: a law, and the mechanisms that it applies to."""

from collections.abc import Callable
import dataclasses

import jax

from attention.testing.mechanism import Mechanism


def _all(mechanism: Mechanism) -> bool:
  del mechanism
  return True


@dataclasses.dataclass(frozen=True, eq=False)
class Check:
  """A law of the contract.

  Attributes:
    name: the law, and in brackets the call that it is checked on.
    law: `(mechanism) -> None`, raises AssertionError where it does not hold.
    advice: what must hold, and what to do where it does not.
    needs: capabilities of the mechanisms that the law is about.
    where: a further condition.
    every_setting: whether it depends on the hyperparameters of a mechanism, so
      that a suite with several settings of one checks each of them.
    bits: whether the law is about bits, and so needs the optimisation by XLA
      that users have.
  """

  name: str
  law: Callable[[Mechanism], None]
  advice: str
  needs: frozenset[str] = frozenset()
  where: Callable[[Mechanism], bool] = _all
  every_setting: bool = True
  bits: bool = False

  def __str__(self) -> str:
    return self.name

  def applies(self, mechanism: Mechanism) -> bool:
    """Whether the law is about `mechanism`."""
    return self.needs <= mechanism.supports and self.where(mechanism)

  def __call__(self, mechanism: Mechanism) -> None:
    """Checks a mechanism, without silent broadcasting of ranks.

    Raises:
      AssertionError: the law does not hold.
    """
    with jax.numpy_rank_promotion("raise"):
      self.law(mechanism)


def directions(make: Callable[[bool], Check]) -> list[Check]:
  """A check of the call in both directions and of the causal call.

  Args:
    make: `is_causal -> check`, whose name gets ' causal' where it is.
  """
  both, causal = make(False), make(True)

  def applies(mechanism: Mechanism) -> bool:
    return both.where(mechanism) and not mechanism.record.causal_only

  return [
    dataclasses.replace(both, where=applies),
    dataclasses.replace(
      causal, name=f"{causal.name}[causal]", needs=causal.needs | {"causal"}
    ),
  ]

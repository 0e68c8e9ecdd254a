"""What tasks share whose answers are judged where they are, not decoded."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tasks import base
from tasks.base import DecodeBatch


class AnswersInPlace:
  """Accuracy over answers at known positions; nothing is generated.

  For tasks in which no answer follows from another, so that one pass over a
  batch asks for all of them.
  """

  baselines = base.NO_BASELINES

  def metric_sums(
    self, logits: Any, batch: Mapping[str, Any]
  ) -> dict[str, Any]:
    """Share of right answers."""
    arguments = (logits, batch["targets"], batch["weights"])
    return {"accuracy": base.token_accuracy(*arguments)}

  def summarize(
    self, sums: Mapping[str, tuple[float, float]]
  ) -> dict[str, float]:
    """Divides once."""
    return base.divide(sums)

  def decode_batches(self, split: str) -> Iterator[DecodeBatch]:
    """None."""
    del split
    return iter(())

  def score(
    self, hypotheses: Sequence[str], references: Sequence[str]
  ) -> dict[str, float | str]:
    """Nothing, as nothing is decoded."""
    del hypotheses, references
    return {}

"""How often rules that read little of a ListOps expression answer it correctly.

    python -m benchmarks.listops_rules --config=configs/paper/listops.py     # 20 seconds
    python -m benchmarks.listops_rules --config=configs/listops.py --config.task.max_length=128

A model that is right no more often than such a rule gives no evidence of having read
the nesting. Each rule gives the answer that is most frequent after what it sees:
nothing; the operator at the root; that operator and its value on those of its
arguments that are digits. Frequencies are counted on one half of --examples, and the
rules are tried on the other.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
import dataclasses
from typing import NamedTuple

from absl import flags
import numpy as np

from process import config_flag, entry
from process.errors import ConfigError
from settings.build import to_mapping
from tasks import listops

_CONFIG = config_flag.define("as for train.py; of the task listops")
_EXAMPLES = flags.DEFINE_integer(
  "examples", 20_000, "half of them to count, half to try", lower_bound=2
)


class Seen(NamedTuple):
  """What rules may see of an expression.

  Attributes:
    root: the operator at the root; empty where the expression is a digit.
    shallow: its value on those of its arguments that are digits; None without any.
  """

  root: str
  shallow: int | None


RULES: dict[str, Callable[[Seen], object]] = {
  "nothing": lambda seen: None,
  "the operator at the root": lambda seen: seen.root,
  "that operator on its digits": lambda seen: seen,
}
"""Name -> what the rule sees."""


def seen(symbols: Sequence[str]) -> Seen:
  """What there is at the root of an expression, as `[MAX 4 [MIN 2 3 ] 1 ]`."""
  root = symbols[0]
  if root not in listops.OPERATORS:
    return Seen("", int(root))
  depth, digits = 0, []
  for symbol in symbols:
    if symbol in listops.OPERATORS:
      depth += 1
    elif symbol == "]":
      depth -= 1
    elif depth == 1:
      digits.append(int(symbol))
  return Seen(root, listops.OPERATORS[root](digits) if digits else None)


def accuracies(
  counted: Sequence[tuple[Seen, int]], tried: Sequence[tuple[Seen, int]]
) -> dict[str, float]:
  """Share of right answers of each rule.

  Args:
    counted: expressions and answers that the rules are made of.
    tried: those that they answer; what was never counted is answered wrongly.
  """
  found = {}
  for name, sees in RULES.items():
    counts: dict[object, Counter[int]] = {}
    for what, answer in counted:
      counts.setdefault(sees(what), Counter())[answer] += 1
    best = {key: of.most_common(1)[0][0] for key, of in counts.items()}
    right = [best.get(sees(what)) == answer for what, answer in tried]
    found[name] = sum(right) / len(right)
  return found


def main() -> None:
  """Prints the share of each rule."""
  # Imports JAX, for which --help does not wait.
  from training import experiment_config

  file, mapping = entry.load_config(_CONFIG, "configs/listops.py")
  config = experiment_config.parse(mapping)
  if not isinstance(config.task, listops.ListopsConfig):
    raise ConfigError(
      f"--config: {file} has the task {config.task_name!r}; expected listops"
    )
  examples = list(_examples(config.task, _EXAMPLES.value))
  half = len(examples) // 2
  told = ", ".join(f"{k}={v}" for k, v in to_mapping(config.task).items())
  print(f"{file}: {told}")
  for name, share in accuracies(examples[:half], examples[half:]).items():
    print(f"{name:<28} {share:6.1%}")


def _examples(
  config: listops.ListopsConfig, count: int
) -> Iterator[tuple[Seen, int]]:
  """Training expressions and their answers."""
  # A finite training set would repeat examples in a batch of this size.
  endless = dataclasses.replace(config, train_size=0)
  task = listops.ListopsTask(endless, batch_size=count, seed=0)
  batch = task.train_batch(0)
  for source, targets in zip(batch["source"], batch["targets"], strict=True):
    symbols = task.labels(source[1 : np.count_nonzero(source)])
    yield seen(symbols), int(task.labels(targets[:1])[0])


if __name__ == "__main__":
  entry.run(main)

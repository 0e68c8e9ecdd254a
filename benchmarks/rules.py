"""How often rules that read little of an example answer it correctly.

    python -m benchmarks.rules --config=configs/listops.py          # 10 seconds
    python -m benchmarks.rules --config=configs/paper/listops.py    # 20 seconds

A model that is right no more often than such a rule gives no evidence of having read
more than the rule does. A rule gives the answer that is most frequent after what it
sees: frequencies are counted on one half of --examples, and the rules are tried on the
other. A project registers the rules of its tasks in `RULES` of its `__init__`.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import itertools
from typing import Any, NamedTuple

from absl import flags
import numpy as np

from settings.build import to_mapping
from settings.errors import ConfigError
from settings.import_paths import load, registered
from tasks import TASKS, listops
from tasks.base import Batch, Task
from training import config_flag, entry

_CONFIG = config_flag.define(
  "as for train.py; of a task that has rules, as listops"
)
_EXAMPLES = flags.DEFINE_integer(
  "examples", 20_000, "half of them to count, half to try", lower_bound=2
)

Rules = Mapping[str, Callable[[Any], object]]
"""Name -> what the rule sees of an example; hashable."""

Example = tuple[Any, object]
"""What all rules may see, and the answer."""

_BATCH = 100


class Seen(NamedTuple):
  """What rules may see of a ListOps expression.

  Attributes:
    root: the operator at the root; empty where the expression is a digit.
    shallow: its value on those of its arguments that are digits; None without any.
  """

  root: str
  shallow: int | None


LISTOPS_RULES: dict[str, Callable[[Seen], object]] = {
  "nothing": lambda view: None,
  "the operator at the root": lambda view: view.root,
  "that operator on its digits": lambda view: view,
}
"""Name -> what the rule sees."""


def listops_seen(symbols: Sequence[str]) -> Seen:
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


def listops_examples(task: Task, batch: Batch) -> Iterator[tuple[Seen, int]]:
  """ListOps expressions and their answers."""
  for source, targets in zip(batch["source"], batch["targets"], strict=True):
    symbols = task.labels(source[1 : np.count_nonzero(source)])
    yield listops_seen(symbols), int(task.labels(targets[:1])[0])


def accuracies(
  rules: Rules, counted: Sequence[Example], tried: Sequence[Example]
) -> dict[str, float]:
  """Share of right answers of each rule.

  Args:
    rules: by name.
    counted: examples that the rules are made of.
    tried: those that they answer; what was never counted is answered wrongly.
  """
  shares = {}
  for name, rule in rules.items():
    counts: dict[object, Counter[object]] = {}
    for view, answer in counted:
      counts.setdefault(rule(view), Counter())[answer] += 1
    best = {
      key: counter.most_common(1)[0][0] for key, counter in counts.items()
    }
    right = [best.get(rule(view)) == answer for view, answer in tried]
    shares[name] = sum(right) / len(right)
  return shares


def main() -> None:
  """Prints the share of each rule."""
  # Imports JAX, for which --help does not wait.
  from training import experiment_config

  file, mapping = entry.load_config(_CONFIG, "configs/listops.py")
  config = experiment_config.parse(mapping)
  name, count = config.task_name, _EXAMPLES.value
  paths = registered("RULES")
  if name != "listops" and name not in paths:
    known = " or ".join(["listops", *paths])
    raise ConfigError(
      f"--config: {file} has the task {name!r}; expected {known}"
    )
  rules, examples = LISTOPS_RULES, listops_examples
  if name in paths:
    rules = load(paths[name])
    examples = load(paths[name].partition(":")[0] + ":examples")
  # A finite training set would repeat examples.
  endless = dataclasses.replace(config.task, train_size=0)
  task = TASKS[name].make(endless, kind="encoder", batch_size=_BATCH, seed=0)
  batches = (task.train_batch(step) for step in itertools.count())
  sample = list(
    itertools.islice((e for b in batches for e in examples(task, b)), count)
  )
  fields = ", ".join(f"{k}={v}" for k, v in to_mapping(config.task).items())
  print(f"{file}: {fields}")
  half = count // 2
  width = max(map(len, rules)) + 1
  for rule, share in accuracies(rules, sample[:half], sample[half:]).items():
    print(f"{rule:<{width}} {share:6.1%}")


if __name__ == "__main__":
  entry.run(main)

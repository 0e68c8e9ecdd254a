"""Records type and default of every config field, so that tests notice changes.

python -m tests.training.defaults > tests/training/defaults.txt
"""

from comparison.config import Comparison
import models
from projects.swap.settings import Settings
import tasks
from training.commands import config_help
from training.config import TrainConfig


def rows():
  """Class, field, type and default: 'TrainConfig | seed | int ≥ 0 | 0'."""
  kinds = [TrainConfig, Comparison, Settings]
  kinds += [entry.config_type for entry in tasks.TASKS.values()]
  kinds += models.CONFIGS.values()
  return [
    " | ".join(
      [kind.__name__, name, config_help._describe_type(type_), str(default)]
    )
    for kind in dict.fromkeys(kinds)
    for name, type_, default, _ in config_help._fields(kind, "")
  ]


if __name__ == "__main__":
  print(*rows(), sep="\n")

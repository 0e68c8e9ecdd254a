r"""What a device holds of a run, before it is started.

    python -m training.describe --config=configs/gpt.py --config.task.path=input.txt
    python -m training.describe --config=configs/copy.py --devices=8 \
      --config.mesh.fsdp=4 --config.mesh.tensor=2
    python -m training.describe --config=configs/copy.py --config.model.remat=block

Compiles a step and prints bytes a device, as a table: the parameters and the
optimiser's state by what lies where, the batch, and what XLA reserves for
activations, gradients and temporaries. A second table has the bytes that a device
sends in a step. Nothing is trained or written. --devices simulates that many
devices on a CPU.
"""

import math
from typing import Any

from absl import flags
import jax
import numpy as np

from settings.errors import ConfigError
from training import (
  config_flag,
  entry,
  experiment,
  experiment_config,
  parallel,
  traffic,
)

_CONFIG = config_flag.define("FILE.py or FILE.py:MECHANISM, as for train.py")
_DEVICES = flags.DEFINE_integer(
  "devices", None, "devices to simulate on a CPU", lower_bound=1
)


def main() -> None:
  """From the config to the table."""
  _, mapping = entry.load_config(_CONFIG)
  if _DEVICES.value is not None:
    try:
      jax.config.update("jax_platforms", "cpu")
      jax.config.update("jax_num_cpu_devices", _DEVICES.value)
    except RuntimeError as error:
      raise ConfigError(f"--devices: {error}") from error
  config = experiment_config.parse(mapping)
  train = config.train
  mesh = parallel.check_mesh(train, config.model)
  run = experiment.create(config)
  print(experiment.describe(run))
  sizes = " × ".join(f"{name} {size}" for name, size in mesh.named.items())
  print(f"mesh: {sizes}\n")

  made = parallel.make(run.functions, train.parallel, train.mesh)
  batch = made.place_batch(run.task.train_batch(0))
  state = made.placed_shapes(run.shapes)
  compiled = made.train.lower(run.numbers, state, batch, np.int32(0)).compile()
  parts = {
    "parameters": state.params,
    "optimiser's state": state.opt_state,
    **state.collections,
    "batch": batch,
  }
  temporaries = compiled.memory_analysis().temp_size_in_bytes
  print("| | a device | the whole |\n| --- | --: | --: |")
  for name, tree in parts.items():
    if local := _bytes(tree, local=True):
      print(f"| {name} | {_readable(local)} | {_readable(_bytes(tree))} |")
  if temporaries:
    name = "activations, gradients, temporaries"
    print(f"| {name} | {_readable(temporaries)} | – |")
  held = sum(_bytes(tree, local=True) for tree in parts.values())
  print(f"| together | {_readable(held + temporaries)} | |")
  print("\n| in a step, a device sends by | |\n| --- | --: |")
  sent = traffic.sent(compiled.as_text()) or {"nothing": 0.0}
  for kind, count in sent.items():
    print(f"| {kind} | {_readable(count)} |")


def _bytes(tree: Any, local: bool = False) -> int:
  """Of the arrays or placed shapes of a tree, or of one device's parts of them."""
  return sum(
    leaf.dtype.itemsize
    * math.prod(leaf.sharding.shard_shape(leaf.shape) if local else leaf.shape)
    for leaf in jax.tree.leaves(tree)
  )


def _readable(count: float) -> str:
  for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
    if count >= size:
      return f"{count / size:.2f} {unit}"
  return f"{count:.0f} B"


if __name__ == "__main__":
  entry.run(main)

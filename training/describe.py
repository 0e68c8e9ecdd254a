r"""What a device holds of a run, before it is started.

    python -m training.describe --config=configs/gpt.py --config.task.path=input.txt
    python -m training.describe --config=configs/copy.py --devices=8 \
      --config.mesh.fsdp=4 --config.mesh.tensor=2
    python -m training.describe --config=configs/copy.py --config.model.remat=block

Compiles a step and prints bytes a device, as a table: the parameters and the
optimiser's state by what lies where, the batch, and what XLA reserves for
activations, gradients and temporaries. A second table has the bytes that a device
sends in a step. Nothing is trained or written. --devices simulates that many devices on a CPU.
"""

from typing import Any

from absl import flags

from settings.errors import ConfigError
from training import config_flag, entry

_CONFIG = config_flag.define("FILE.py or FILE.py:MECHANISM, as for train.py")
_DEVICES = flags.DEFINE_integer(
  "devices", None, "devices to simulate on a CPU", lower_bound=1
)

_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def main() -> None:
  """From the config to the table."""
  _, mapping = entry.load_config(_CONFIG)
  import jax

  if _DEVICES.value is not None:
    try:
      jax.config.update("jax_platforms", "cpu")
      jax.config.update("jax_num_cpu_devices", _DEVICES.value)
    except RuntimeError as error:
      raise ConfigError(f"--devices: {error}") from error
  from training import experiment, experiment_config, parallel, traffic

  config = experiment_config.parse(mapping)
  mesh = parallel.check_mesh(config.train, config.model)
  run = experiment.create(config)
  print(experiment.describe(run))
  sizes = " × ".join(f"{name} {size}" for name, size in mesh.named.items())
  print(f"mesh: {sizes}\n")
  held, text = compiled_step(run)
  for line in table(held):
    print(line)
  crossing = traffic.sent(text)
  print("\n| in a step, a device sends by | |\n| --- | --: |")
  for kind, count in (crossing or {"nothing": 0.0}).items():
    print(f"| {kind} | {_told(count)} |")


def compiled_step(run: Any) -> tuple[dict[str, tuple[int, int]], str]:
  """What one device holds in a step, and XLA's text of it.

  Args:
    run: an `Experiment`.

  Returns:
    name → (bytes on the first device, bytes of the whole array), the whole being
    0 where there is none, as of temporaries; and the text of the program.
  """
  import jax
  import numpy as np

  from training import parallel

  train = run.config.train
  made = parallel.make(run.functions, train.parallel, mesh=train.mesh)
  batch = made.place_batch(run.task.train_batch(0))
  compiled = made.lower_train(run.shapes, batch).compile()

  def held(tree):
    leaves = jax.tree.leaves(tree)
    sizes = [leaf.dtype.itemsize for leaf in leaves]
    local = [
      int(np.prod(leaf.sharding.shard_shape(leaf.shape))) for leaf in leaves
    ]
    whole = [int(np.prod(leaf.shape)) for leaf in leaves]
    return (
      sum(size * count for size, count in zip(sizes, local, strict=True)),
      sum(size * count for size, count in zip(sizes, whole, strict=True)),
    )

  state = made.placed_shapes(run.shapes)
  temporaries = compiled.memory_analysis().temp_size_in_bytes
  found = {
    "parameters": held(state.params),
    "optimiser's state": held(state.opt_state),
    **{name: held(tree) for name, tree in state.collections.items()},
    "batch": held(batch),
    "activations, gradients, temporaries": (temporaries, 0),
  }
  return found, compiled.as_text()


def table(found: dict[str, tuple[int, int]]) -> list[str]:
  """Lines of Markdown; what takes no bytes is left out."""
  lines = ["| | a device | the whole |", "| --- | --: | --: |"]
  for name, (local, whole) in found.items():
    if local:
      lines.append(
        f"| {name} | {_told(local)} | {_told(whole) if whole else '–'} |"
      )
  total = sum(local for local, _ in found.values())
  return [*lines, f"| together | {_told(total)} | |"]


def _told(count: float) -> str:
  for unit, size in _UNITS:
    if count >= size:
      return f"{count / size:.2f} {unit}"
  return f"{count:.0f} B"


if __name__ == "__main__":
  entry.run(main)

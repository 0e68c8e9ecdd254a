r"""What a device holds of a run, before it is started.

    python -m training.commands.describe --config=configs/gpt.py --config.task.path=input.txt
    python -m training.commands.describe --config=configs/copy.py --devices=8 \
      --config.mesh.fsdp=4 --config.mesh.tensor=2
    make describe DESCRIBE="--config=configs/copy.py --target=h100:8 --config.mesh.fsdp=8"

Compiles the run's own training step and prints bytes a device, as a table: the
parameters and the optimiser's state by what lies where, the batch, and what XLA
reserves for activations, gradients and temporaries. A second table has the bytes
that a device sends in a step, by axes of the mesh, each loop counted as often as it
runs; below stands how often the longest loop does. Nothing is trained or written.

--devices simulates that many devices on a CPU. --target compiles for GPUs or TPUs
that are not here, and says whether they have the memory: h100:8 is eight H100,
h100:16 two hosts of eight, v5e:4x4 sixteen TPUs. It wants packages that
`make describe` installs. cuDNN's kernel is not in such a program: the library asks
a GPU for it, and there is none.
"""

from absl import flags
import jax

from settings.errors import ConfigError
from training import experiment, experiment_config
from training.commands import config_flag, entry
from training.devices import compiled_step
from training.devices import target as target_lib

_CONFIG = config_flag.define("FILE.py or FILE.py:MECHANISM, as for train.py")
_DEVICES = flags.DEFINE_integer(
  "devices", None, "devices to simulate on a CPU", lower_bound=1
)
_TARGET = flags.DEFINE_string(
  "target", None, f"devices that are not here: {target_lib.EXPECTED}"
)


def main() -> None:
  """From the config to the table."""
  _, mapping = entry.load_config(_CONFIG)
  target = None
  if _TARGET.value is not None:
    if _DEVICES.value is not None:
      raise ConfigError(
        "--devices: expected none with --target, which has its own"
      )
    target = target_lib.find(_TARGET.value)
  if _DEVICES.value is not None:
    try:
      jax.config.update("jax_platforms", "cpu")
      jax.config.update("jax_num_cpu_devices", _DEVICES.value)
    except RuntimeError as error:
      raise ConfigError(f"--devices: {error}") from error
  step = compiled_step.compiled(experiment_config.parse(mapping), target)
  print(experiment.describe(step.run, target.devices if target else ()))
  sizes = " × ".join(f"{name} {size}" for name, size in step.mesh.items())
  print(f"mesh: {sizes}\n")
  print("| | a device | the whole |\n| --- | --: | --: |")
  for name, (local, whole) in step.held.items():
    print(f"| {name} | {_readable(local)} | {_readable(whole)} |")
  for name, size in (
    ("padding of layouts", step.padding),
    ("activations, gradients, temporaries", step.temporaries),
    ("the program", step.code),
  ):
    if size:
      print(f"| {name} | {_readable(size)} | – |")
  print(f"| together | {_readable(step.together)} | |")
  if target:
    print(f"\n{compiled_step.fits(step, target)}")
  if step.refusal:
    return
  print("\n| in a step, a device sends by | along | operations | |")
  print("| --- | --- | --: | --: |")
  for (axes, kind), (count, size) in step.sent.items():
    print(f"| {kind} | {axes} | {count:,} | {_readable(size)} |")
  if not step.sent:
    print("| nothing | | | |")
  longest = f"{step.longest_loop:,} steps" if step.longest_loop else "–"
  print(f"\nlongest loop of a known length: {longest}")


def _readable(count: float) -> str:
  for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
    if count >= size:
      return f"{count / size:.2f} {unit}"
  return f"{count:.0f} B"


if __name__ == "__main__":
  entry.run(main)

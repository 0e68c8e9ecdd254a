r"""Prints the memory per device and the communication of a run, before it starts.

    python -m training.commands.describe --config=configs/gpt.py \
      --config.task.path=input.txt
    python -m training.commands.describe --config=configs/copy.py --devices=8 \
      --config.mesh.fsdp=4 --config.mesh.tensor=2
    make describe DESCRIBE="--config=configs/copy.py --target=h100:8 \
      --config.mesh.fsdp=8"

It compiles the run's training step and prints a table of the bytes per device: the
sharded parameters and optimiser's state, the batch, and the memory that XLA reserves
for activations, gradients and temporaries. A second table shows the bytes that a device
sends in a step, by axes of the mesh; operations in a loop count once per iteration. The
last line has the number of iterations of the longest loop. Nothing is trained or
written.

--devices simulates this number of devices on a CPU. --target compiles for GPUs or TPUs
that this machine does not have, and says whether they have enough memory: h100:8 means
eight H100, h100:16 two hosts of eight, and v5e:4x4 sixteen TPUs. It needs packages that
`make describe` installs. Such a program does not use cuDNN's kernel, for which the
library would have to query a GPU.
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
  "target", None, f"devices to compile for: {target_lib.EXPECTED}"
)


def main() -> None:
  """Prints the tables of a config."""
  _, mapping = entry.load_config(_CONFIG)
  target = None
  if _TARGET.value is not None:
    if _DEVICES.value is not None:
      raise ConfigError(
        "--devices: expected none with --target, which sets the devices"
      )
    target = target_lib.find(_TARGET.value)
  if _DEVICES.value is not None:
    try:
      jax.config.update("jax_platforms", "cpu")
      jax.config.update("jax_num_cpu_devices", _DEVICES.value)
    except RuntimeError as error:
      raise ConfigError(f"--devices: {error}") from error
  step = compiled_step.compile_step(experiment_config.parse(mapping), target)
  print(experiment.describe(step.run, target.devices if target else ()))
  sizes = " × ".join(f"{name} {size}" for name, size in step.mesh.items())
  print(f"mesh: {sizes}\n")
  print("| | per device | total |\n| --- | --: | --: |")
  for name, (local, total) in step.held.items():
    print(f"| {name} | {_format_bytes(local)} | {_format_bytes(total)} |")
  for name, size in (
    ("padding of layouts", step.padding),
    ("activations, gradients, temporaries", step.temporaries),
    ("the program", step.code),
  ):
    if size:
      print(f"| {name} | {_format_bytes(size)} | – |")
  print(f"| sum | {_format_bytes(step.total)} | |")
  if target:
    print(f"\n{compiled_step.fits(step, target)}")
  if step.refusal:
    return
  print("\n| sent per device and step by | along | operations | bytes |")
  print("| --- | --- | --: | --: |")
  for (axes, kind), (count, size) in step.sent.items():
    print(f"| {kind} | {axes} | {count:,} | {_format_bytes(size)} |")
  if not step.sent:
    print("| nothing | | | |")
  longest = f"{step.longest_loop:,} iterations" if step.longest_loop else "–"
  print(f"\nlongest loop of known length: {longest}")


def _format_bytes(count: float) -> str:
  for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
    if count >= size:
      return f"{count / size:.2f} {unit}"
  return f"{count:.0f} B"


if __name__ == "__main__":
  entry.run(main)

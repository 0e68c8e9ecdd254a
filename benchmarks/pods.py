"""Measures memory and communication on eight H100 or sixteen TPUs.

    .venv-devices/bin/python -m benchmarks.pods --target=h100:8
    .venv-devices/bin/python -m benchmarks.pods --target=v5e:4x4

It compiles training steps of configs/text.py, with bfloat16 activations, float32
parameters, `remat=block` and a window of 1,024, and prints one row of the table in
docs/scaling.md per step. `make describe` sets up .venv-devices.
"""

import pathlib
import tempfile
from typing import Any

from absl import flags

from training.commands import entry

_TARGET = flags.DEFINE_string(
  "target", "h100:8", "as for training.commands.describe"
)
_PARAMETERS = flags.DEFINE_list("parameters", "85M,1.2B", "sizes of SIZES")
_ATTENTION = flags.DEFINE_list(
  "attention", "flash,sliding_window,gated_delta", "mechanisms"
)

SIZES = {
  "85M": {"num_layers": 12, "num_heads": 12, "features": 768},
  "1.2B": {"num_layers": 24, "num_heads": 16, "features": 2048},
}
"""Title -> config fields of the model."""

SHORT, LONG, WINDOW = 8192, 131072, 1024


def meshes(devices: int) -> list[tuple[int, int, dict[str, int]]]:
  """Returns the length, batch size and mesh axes of each row of the table."""
  return [
    (SHORT, devices, {"data": devices}),
    (SHORT, devices, {"fsdp": devices}),
    (SHORT, devices, {"fsdp": devices // 4, "tensor": 4}),
    (LONG, 1, {"sequence": devices}),
    (LONG, 4, {"fsdp": 4, "sequence": devices // 4}),
  ]


def main() -> None:
  """Compiles every training step and prints the table."""
  import jax

  from benchmarks import scaling_tables
  from training.devices import target as target_lib

  target = target_lib.find(_TARGET.value)
  print(f"{_TARGET.value}, jax {jax.__version__}\n")
  head = "parameters", "mechanism", "T", "rows", "mesh", "state, GB"
  head += "temporaries, GB", "together", "sent, GB", "longest loop", "s"
  rule = "---", "---", "--:", "--:", "---", *["--:"] * 3, "---", "--:", "--:"
  print(scaling_tables.table([head, rule]), flush=True)
  with tempfile.TemporaryDirectory() as folder:
    text = pathlib.Path(folder, "input.txt")
    text.write_text(
      "the quick brown fox jumps over the lazy dog\n" * 50_000, "utf-8"
    )
    for size in _PARAMETERS.value:
      for length, rows, mesh in meshes(len(target.devices)):
        for attention in _ATTENTION.value:
          sizes = SIZES[size], length, rows, mesh
          cells = _cells(str(text), attention, *sizes, target)
          axes = ", ".join(f"{axis} {count}" for axis, count in mesh.items())
          row = size, f"`{attention}`", f"{length:,}", str(rows), axes, *cells
          print(scaling_tables.table([row]), flush=True)
          jax.clear_caches()


def _cells(
  text: str,
  attention: str,
  size: dict[str, int],
  length: int,
  rows: int,
  mesh: dict[str, int],
  target: Any,
) -> list[str]:
  """Returns the measurements of one training step."""
  from benchmarks.programs import first_line
  from configs import text as config_file
  from training import experiment_config
  from training.devices import compiled_step

  config = config_file.get_config(attention).to_dict()
  config |= {"batch_size": rows, "mesh": mesh}
  config["task"] |= {"path": text, "context": length}
  if attention == "sliding_window":
    config["model"]["decoder_attention"]["window"] = WINDOW
  config["model"] |= {
    **size,
    "mlp_features": 4 * size["features"],
    "dtype": "bfloat16",
    "remat": "block",
  }
  try:
    step = compiled_step.compile_step(experiment_config.parse(config), target)
  except Exception as error:  # An error fills one row of the table.
    return [first_line(error), *[""] * 5]
  state = (step.held_bytes + step.padding) / 1e9
  if step.refusal:
    return [f"{state:.2f}", "", f"no: {step.refusal}", *[""] * 3]
  sent: dict[str, float] = {}
  for (axes, _), (_, count) in step.sent.items():
    sent[axes] = sent.get(axes, 0.0) + count / 1e9
  return [
    f"{state:.2f}",
    f"{(step.temporaries + step.code) / 1e9:.2f}",
    f"{step.total / target.memory:.0%}",
    "; ".join(f"{axes} {x:.2f}" for axes, x in sent.items() if x >= 0.005),
    f"{step.longest_loop:,}" if step.longest_loop else "–",
    f"{step.seconds:.0f}",
  ]


if __name__ == "__main__":
  entry.run(main)

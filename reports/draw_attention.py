"""Draws what every layer of a trained run attends to in words of your own.

    python -m reports.draw_attention --workdir=/tmp/run --text="3 1 4 1 5"
    python -m reports.draw_attention --workdir=/tmp/run --text="3 1" --target="3 1"
    python -m reports.draw_attention --workdir=/tmp/run --text="3 1" --out=/tmp/maps

One picture a layer, a panel a head: encoder_1_self_attention.png and so on, in
WORKDIR/attention. The text is what the model reads: a source, or the prompt of
a decoder-only model, of which the prompt alone is shown unless --target goes on
after it. A source's target is what the model generates greedily, or --target.
Axes of more than 64 tokens have positions in place of words.
"""

from pathlib import Path

from absl import flags

from process import entry
from process.errors import ConfigError

_WORKDIR = flags.DEFINE_string("workdir", None, "folder of a trained run")
_TEXT = flags.DEFINE_string("text", None, "what the model reads")
_TARGET = flags.DEFINE_string(
  "target", None, "what it writes; default what it generates for a source"
)
_OUT = flags.DEFINE_string(
  "out", None, "folder of the pictures; default WORKDIR/attention"
)


def main() -> None:
  """From a line to pictures."""
  if _WORKDIR.value is None:
    raise ConfigError("--workdir: missing; the folder of a trained run")
  if _TEXT.value is None:
    raise ConfigError("--text: missing; what the model reads")
  workdir = Path(_WORKDIR.value)
  folder = Path(_OUT.value) if _OUT.value else workdir / "attention"
  if folder.suffix.lower() in (".png", ".svg", ".pdf"):
    raise ConfigError(
      f"--out: expected a folder, for a picture of each layer, got {folder}"
    )
  # JAX and the libraries on it take a second to import: --help and a faulty flag
  # do not wait for them.
  from process import cache
  from reports.example import make_example
  from training import attention_maps, experiment, experiment_config, inference
  from training import workdir as workdir_lib

  config = experiment_config.parse(
    workdir_lib.read_config(workdir), restore=True
  )
  workdir_lib.check_writable("--out", folder)
  cache.keep_programs()
  run = experiment.create(config, workdir, restore=True)
  variables = inference.restore_variables(run, workdir)
  example = make_example(run, variables, _TEXT.value, _TARGET.value)
  if "targets" in example and _TARGET.value is None:
    print(f"output: {run.task.decode(example['targets'][0])}")
  maps = attention_maps.named_maps(run.model, variables, run.task, example)
  try:
    folder.mkdir(parents=True, exist_ok=True)
    for name, shown in maps.items():
      path = folder / f"{name}.png"
      attention_maps.draw_maps(path, [shown])
      print(path)
  except OSError as error:
    raise ConfigError(f"--out: {error}") from error
  longest = max(max(shown.weights.shape[1:]) for shown in maps.values())
  if longest > attention_maps.MAX_LABELS:
    print(
      f"more than {attention_maps.MAX_LABELS} tokens: by position, not by word"
    )


if __name__ == "__main__":
  entry.run(main)

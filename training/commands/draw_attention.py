r"""Draws the attention weights of every layer of a trained run for a given input.

    python -m training.commands.draw_attention --workdir=/tmp/run \
        --text="3 1" --target="3 1"
    python -m training.commands.draw_attention --workdir=/tmp/vit \
        --image=cat.png --query=2,5
    python -m training.commands.draw_attention --workdir=/tmp/speech \
        --audio=string.wav

It writes one picture per layer, with one panel per head, to WORKDIR/attention:
encoder_1_self_attention.png and so on. --text is the input of the model: a source, or
the prompt of a decoder-only model, which --target continues. The target of a source is
--target, by default the model's greedy output. Axes of more than 64 tokens are labelled
by position instead of by token.

An image model reads a PNG or JPEG file. attention.png then shows, over the image, the
attention of [CLS] in every layer and its rollout through all layers, or with --query
the attention of the patch in that row and column, both counted from 0. For a Perceiver,
it shows the attention of the latents.

Gato writes the caption of an image whose size is that of its training images;
attention.png shows how much its words attend to words and to the image.

A speech model reads an audio file: attention.png shows, below the spectrogram, the
attention of every recognised symbol in every layer.
"""

from pathlib import Path
from typing import Any

from absl import flags

from settings.errors import ConfigError, DataError
from training import experiment, experiment_config
from training import workdir as workdir_lib
from training.commands import entry
from training.devices import process
from training.inference import generation
from training.pictures import attention_maps
from training.pictures.example import make_example

_WORKDIR = flags.DEFINE_string("workdir", None, "folder of a trained run")
_TEXT = flags.DEFINE_string("text", None, "text that the model reads")
_TARGET = flags.DEFINE_string(
  "target", None, "text that the decoder writes; default its greedy output"
)
_IMAGE = flags.DEFINE_string(
  "image", None, "PNG or JPEG file that the model reads"
)
_QUERY = flags.DEFINE_list(
  "query", None, "row and column of the query patch; default [CLS]"
)
_AUDIO = flags.DEFINE_string("audio", None, "recording that the model reads")
_OUT = flags.DEFINE_string(
  "out", None, "folder of the pictures; default WORKDIR/attention"
)


def main() -> None:
  """Draws the pictures of one input."""
  if _WORKDIR.value is None:
    raise ConfigError("--workdir: missing; the folder of a trained run")
  inputs = [x for x in (_TEXT, _IMAGE, _AUDIO) if x.value is not None]
  if len(inputs) != 1:
    raise ConfigError(
      "--text: expected the text that the model reads, or --image=FILE for an "
      "image model, or --audio=FILE for a speech model"
    )
  if _QUERY.value is not None and _IMAGE.value is None:
    raise ConfigError("--query: needs --image=FILE")
  if _TARGET.value is not None and _TEXT.value is None:
    raise ConfigError("--target: needs --text=TEXT")
  workdir = Path(_WORKDIR.value)
  folder = Path(_OUT.value) if _OUT.value else workdir / "attention"
  if folder.suffix.lower() in (".png", ".svg", ".pdf"):
    raise ConfigError(
      f"--out: expected a folder, for one picture per layer, got {folder}"
    )
  config = experiment_config.parse(
    workdir_lib.read_config(workdir), restore=True
  )
  workdir_lib.check_writable("--out", folder)
  process.cache_programs()
  run = experiment.create(config, workdir, restore=True)
  variables = generation.restore_variables(run, workdir)
  for flag in (_IMAGE, _AUDIO):
    if flag.value is not None:
      return _draw_file(run, variables, flag.name, flag.value, folder)
  assert _TEXT.value is not None  # Exactly one of the three is given.
  example = make_example(run, variables, _TEXT.value, _TARGET.value)
  if "targets" in example and _TARGET.value is None:
    print(f"output: {run.task.decode(example['targets'][0])}")
  maps = attention_maps.named_maps(run.model, variables, run.task, example)
  try:
    folder.mkdir(parents=True, exist_ok=True)
    for name, attention in maps.items():
      path = folder / f"{name}.png"
      attention_maps.draw_maps(path, [attention])
      print(path)
  except OSError as error:
    raise ConfigError(f"--out: {error}") from error
  longest = max(max(x.weights.shape[1:]) for x in maps.values())
  if longest > attention_maps.MAX_LABELS:
    print(f"more than {attention_maps.MAX_LABELS} tokens: labels are positions")


def _draw_file(
  run: Any, variables: Any, flag: str, file: str, folder: Path
) -> None:
  """Draws what a model attends to in an image file or audio file."""
  if getattr(run.model, "input_file", None) != flag or not hasattr(
    run.task, "read"
  ):
    inputs = {"image": "images", "audio": "recordings"}[flag]
    raise ConfigError(f"--{flag}: this run reads no {inputs}; expected --text")
  path = folder / "attention.png"
  try:
    folder.mkdir(parents=True, exist_ok=True)
    output = run.model.draw_input(path, run, variables, file, _QUERY.value)
  except DataError as error:
    raise ConfigError(f"--{flag}: {error}") from error
  except ConfigError:
    raise
  except ValueError as error:
    raise ConfigError(f"--{error}") from error
  except OSError as error:
    raise ConfigError(f"--out: {error}") from error
  if output is not None:
    print(f"output: {output}")
  print(path)


if __name__ == "__main__":
  entry.run(main)

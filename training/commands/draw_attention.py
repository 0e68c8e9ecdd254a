"""Draws what every layer of a trained run attends to in words of your own.

    python -m training.commands.draw_attention --workdir=/tmp/run --text="3 1" --target="3 1"
    python -m training.commands.draw_attention --workdir=/tmp/vit --image=cat.png --query=2,5
    python -m training.commands.draw_attention --workdir=/tmp/speech --audio=string.wav

One picture a layer, a panel a head: encoder_1_self_attention.png and so on, in
WORKDIR/attention. The text is what the model reads: a source, or the prompt of
a decoder-only model, of which the prompt alone is shown unless --target goes on
after it. A source's target is what the model generates greedily, or --target.
Axes of more than 64 tokens have positions in place of words.

A model of images reads a PNG or JPEG file. attention.png then shows, over the
image, what [CLS] looks at in every layer and rolled out through all of them, or
with --query what the patch in that row and column looks at, both from 0; of a
Perceiver it shows what the latents look at.

Gato writes the caption of an image of the size that it was trained on;
attention.png shows how far its words look at words and at the image.

A model of speech reads an audio file: attention.png shows, below its spectrogram,
where every symbol looks that is recognised, in every layer.
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
_TEXT = flags.DEFINE_string("text", None, "what the model reads")
_TARGET = flags.DEFINE_string(
  "target", None, "what it writes; default what it generates for a source"
)
_IMAGE = flags.DEFINE_string("image", None, "PNG or JPEG that a model reads")
_QUERY = flags.DEFINE_list(
  "query", None, "row and column of the patch that looks; default [CLS]"
)
_AUDIO = flags.DEFINE_string("audio", None, "recording that a model reads")
_OUT = flags.DEFINE_string(
  "out", None, "folder of the pictures; default WORKDIR/attention"
)


def main() -> None:
  """From a line to pictures."""
  if _WORKDIR.value is None:
    raise ConfigError("--workdir: missing; the folder of a trained run")
  given = [x for x in (_TEXT, _IMAGE, _AUDIO) if x.value is not None]
  if len(given) != 1:
    raise ConfigError(
      "--text: expected what the model reads, or --image=FILE for a model of "
      "images, or --audio=FILE for one of speech"
    )
  if _QUERY.value is not None and _IMAGE.value is None:
    raise ConfigError("--query: belongs to --image=FILE")
  workdir = Path(_WORKDIR.value)
  folder = Path(_OUT.value) if _OUT.value else workdir / "attention"
  if folder.suffix.lower() in (".png", ".svg", ".pdf"):
    raise ConfigError(
      f"--out: expected a folder, for a picture of each layer, got {folder}"
    )
  config = experiment_config.parse(
    workdir_lib.read_config(workdir), restore=True
  )
  workdir_lib.check_writable("--out", folder)
  process.keep_programs()
  run = experiment.create(config, workdir, restore=True)
  variables = generation.restore_variables(run, workdir)
  for flag in (_IMAGE, _AUDIO):
    if flag.value is not None:
      return _draw_file(run, variables, flag.name, flag.value, folder)
  assert _TEXT.value is not None  # One of the three is there.
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


def _draw_file(
  run: Any, variables: Any, flag: str, file: str, folder: Path
) -> None:
  """What a model attends to in the image or recording of a file."""
  if getattr(run.model, "input_file", None) != flag or not hasattr(
    run.task, "read"
  ):
    read = {"image": "images", "audio": "recordings"}[flag]
    raise ConfigError(f"--{flag}: this run reads no {read}; expected --text")
  path = folder / "attention.png"
  try:
    folder.mkdir(parents=True, exist_ok=True)
    written = run.model.draw_input(path, run, variables, file, _QUERY.value)
  except DataError as error:
    raise ConfigError(f"--{flag}: {error}") from error
  except ConfigError:
    raise
  except ValueError as error:
    raise ConfigError(f"--{error}") from error
  except OSError as error:
    raise ConfigError(f"--out: {error}") from error
  if written is not None:
    print(f"output: {written}")
  print(path)


if __name__ == "__main__":
  entry.run(main)

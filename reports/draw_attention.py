"""Draws what every layer of a trained run attends to in words of your own.

    python -m reports.draw_attention --workdir=/tmp/run --text="3 1" --target="3 1"
    python -m reports.draw_attention --workdir=/tmp/vit --image=cat.png --query=2,5
    python -m reports.draw_attention --workdir=/tmp/speech --audio=string.wav

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

from process import entry
from process.errors import ConfigError

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
  if _IMAGE.value is not None:
    return _over_image(run, variables, _IMAGE.value, folder)
  if _AUDIO.value is not None:
    return _below_spectrogram(run, variables, _AUDIO.value, folder)
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


def _below_spectrogram(
  run: Any, variables: Any, file: str, folder: Path
) -> None:
  """What every symbol looks at that a model hears in a recording."""
  from tasks import DataError, SpeechTask
  from training import speech_maps

  if not isinstance(run.task, SpeechTask):
    raise ConfigError("--audio: this run reads no recordings; expected --text")
  try:
    example = run.task.read(file)
  except DataError as error:
    raise ConfigError(f"--audio: {error}") from error
  path = folder / "attention.png"
  try:
    folder.mkdir(parents=True, exist_ok=True)
    heard = speech_maps.draw_below_spectrogram(
      path, run.model, variables, run.task, example
    )
  except OSError as error:
    raise ConfigError(f"--out: {error}") from error
  print(f"output: {heard}")
  print(path)


def _over_image(run: Any, variables: Any, file: str, folder: Path) -> None:
  """What one token of an image looks at, over that image."""
  from tasks import DataError, ImageTask, MixedTask
  from training import image_maps, latent_maps

  if isinstance(run.task, MixedTask):
    return _captioned(run, variables, file, folder)
  if not isinstance(run.task, ImageTask):
    raise ConfigError("--image: this run reads no images; expected --text")
  has_latents = run.config.model.kind == "perceiver"
  query = None
  if has_latents and _QUERY.value is not None:
    raise ConfigError(
      "--query: belongs to a model of patches; of a Perceiver the latents look"
    )
  try:
    example = {"image": run.task.read(file)[None]}
    if has_latents:
      latent_maps.check_size(run.model, example["image"].shape)
    else:
      query = image_maps.place(run.model, example["image"].shape, _QUERY.value)
  except DataError as error:
    raise ConfigError(f"--image: {error}") from error
  except ValueError as error:
    raise ConfigError(f"--{error}") from error
  path = folder / "attention.png"
  try:
    folder.mkdir(parents=True, exist_ok=True)
    if has_latents:
      latent_maps.draw_on_image(path, run.model, variables, example)
    else:
      image_maps.draw_on_image(path, run.model, variables, example, query)
  except OSError as error:
    raise ConfigError(f"--out: {error}") from error
  print(path)


def _captioned(run: Any, variables: Any, file: str, folder: Path) -> None:
  """The caption of an image, and which modality looked at which for it."""
  import numpy as np

  from tasks import DataError
  from training import modality_maps

  if _QUERY.value is not None:
    raise ConfigError("--query: belongs to a model of images alone")
  try:
    prompt = run.task.read(file)
  except DataError as error:
    raise ConfigError(f"--image: {error}") from error
  ids, length = prompt["prompt"], run.task.max_target_length
  written = run.generate(
    variables, prompt, max_length=length - ids.shape[1] + 1
  )
  words = np.asarray(written.tokens)[0].tolist()
  if run.task.eos_id in words:
    words = words[: words.index(run.task.eos_id)]
  example = {
    "inputs": np.array([[*ids[0], *words]], np.int32)[:, :length],
    "patches": prompt["patches"],
  }
  shares = modality_maps.shares(run.model, variables, run.task, example)
  mechanisms = run.config.model.layers("decoder_attention")
  path = folder / "attention.png"
  try:
    folder.mkdir(parents=True, exist_ok=True)
    modality_maps.draw_shares(path, [shares], [one.name for one in mechanisms])
  except OSError as error:
    raise ConfigError(f"--out: {error}") from error
  print(f"output: {run.task.decode(words)}")
  print(path)


if __name__ == "__main__":
  entry.run(main)

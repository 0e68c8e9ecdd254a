r"""Decodes lines from standard input with a trained run.

    python generate.py --workdir=/tmp/run < source.txt > output.txt
    python generate.py --workdir=/tmp/run --method=sample --top_k=5 < prompts.txt
    python generate.py --workdir=/tmp/run --export=/tmp/published

--export writes the model as a folder that `models.load_pretrained` and
transformers read, and generates nothing. Otherwise there is one output line per input
line, in the same order; an empty line stays empty, and a line break in the output is
written as \n. If the model cannot read a line, the output line is empty, standard error
has its number and the reason, and the exit code is 2. A language model generates
--max_length tokens, even if its context is shorter.

On a terminal, each line is answered immediately, and a language model continues the
conversation; Ctrl-D ends it. A terminal shows control characters as \x1b.
"""

import contextlib
import math
from pathlib import Path
import shutil
import sys
from typing import Any

# Imported first, because it reports missing packages.
import training  # noqa: F401  # isort: skip

from absl import flags

import lab
import models
from models.published import files
from settings.errors import ConfigError, escape, one_line
import tasks
from training.commands import entry
from training.devices import process
from training.inference import generation, published
from training.inference.conversation import Conversation
from training.workdir import check_writable

_WORKDIR = flags.DEFINE_string(
  "workdir",
  None,
  "folder of a trained run, or of a published decoder with its tokenizer.json",
)
_METHOD = flags.DEFINE_enum(
  "method", "greedy", ["greedy", "beam", "sample"], "how tokens are chosen"
)
_BEAM_SIZE = flags.DEFINE_integer(
  "beam_size", 4, "hypotheses kept; beam", lower_bound=1
)
_LENGTH_PENALTY = flags.DEFINE_float(
  "length_penalty", 0.6, "0 prefers short outputs; beam", lower_bound=0
)
_TEMPERATURE = flags.DEFINE_float(
  "temperature",
  1.0,
  "below 1 favours likely tokens, above 1 gives more variety; sample",
)
_TOP_K = flags.DEFINE_integer(
  "top_k", None, "sample among the k most likely; sample", lower_bound=1
)
_MAX_LENGTH = flags.DEFINE_integer(
  "max_length",
  None,
  "maximum number of tokens of an output; may exceed the context of a decoder",
  lower_bound=1,
)
_EXPORT = flags.DEFINE_string(
  "export", None, "folder to write the model to, as a published family"
)
_SEED = flags.DEFINE_integer(
  "seed", 0, "seed of sampling", lower_bound=0, upper_bound=2**31 - 1
)


def main() -> int | None:
  """Reads lines and writes one output for each."""
  if _WORKDIR.value is None:
    raise ConfigError("--workdir: missing; the folder of a trained run")
  if not 0 < _TEMPERATURE.value < math.inf:
    raise ConfigError(
      "--temperature: expected a finite value above 0, got "
      f"{_TEMPERATURE.value}"
    )
  options: dict[str, Any] = {
    "method": _METHOD.value,
    "beam_size": _BEAM_SIZE.value,
    "length_penalty": _LENGTH_PENALTY.value,
    "temperature": _TEMPERATURE.value,
    "top_k": _TOP_K.value,
    "max_length": _MAX_LENGTH.value,
    "seed": _SEED.value,
  }
  folder = Path(_WORKDIR.value)
  process.cache_programs()
  # A folder of weights is data and is never opened as a run.
  if files.has_tensors(folder):
    if _EXPORT.value is not None:
      raise ConfigError(
        f"--export: {folder} already has published weights; expected the "
        "folder of a run"
      )
    experiment, variables = published.open_weights(folder)
  else:
    if _EXPORT.value is not None:
      for name in options:
        if flags.FLAGS[name].present:
          raise ConfigError(f"--{name}: not supported with --export")
    run = lab.load_run(folder)
    if _EXPORT.value is not None:
      _export(run.experiment, folder, Path(_EXPORT.value))
      return 0
    experiment, variables = run.experiment, run.variables()
  if flags.FLAGS["seed"].present and _METHOD.value != "sample":
    raise ConfigError(
      f"--seed: method '{_METHOD.value}' draws nothing; expected --method=sample"
    )
  if sys.stdin.isatty() and sys.stdout.isatty():
    _converse(Conversation(experiment, variables, **options))
    return 0
  lines = generation.read_lines(sys.stdin.buffer)
  # Lines that the model cannot read become empty lines.
  reasons = generation.unreadable(experiment, lines)
  for number, reason in reasons.items():
    print(f"line {number}: {reason}", file=sys.stderr, flush=True)
    lines[number - 1] = ""
  to_text = escape if sys.stdout.isatty() else str
  for output in generation.generate_lines(
    experiment, variables, lines, **options
  ):
    sys.stdout.write(to_text(output) + "\n")
  return 2 if reasons else 0


def _converse(conversation: Conversation) -> None:
  """Answers each line that a user types, until Ctrl-D; reports errors and continues."""
  with contextlib.suppress(ImportError):  # Not on Windows.
    import readline  # noqa: F401  # Arrow keys edit lines and recall earlier ones.
  while True:
    try:
      line = input("> ")
    except EOFError:
      print()
      return
    except UnicodeDecodeError as error:
      print(f"not {error.encoding}: {error.reason}", file=sys.stderr)
      continue
    if not line.strip():
      continue
    try:
      print(escape(conversation.answer(line)), flush=True)
    except ConfigError as error:
      print(one_line(error), file=sys.stderr, flush=True)


def _export(run: Any, workdir: Path, folder: Path) -> None:
  """Writes the model as a published family, and prints its architecture."""
  check_writable("--export", folder)
  if folder.exists() and any(folder.iterdir()):
    raise ConfigError(f"--export: {folder} is not empty; choose a new folder")
  p = published.from_experiment(run, workdir)
  models.save_pretrained(folder, p)
  if vocabulary := tasks.find_vocabulary(workdir):
    shutil.copy(vocabulary, folder)
  print(f"{folder}: {p.architecture}")


if __name__ == "__main__":
  entry.run(main)

"""Text, captions and control in one batch, each as a token sequence."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import itertools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from projects.gato import captions, control
from projects.gato.config import PATCH_ID as PATCH
from projects.gato.control import BINS, NUM_ACTIONS, STEP_TOKENS, Episodes
from projects.gato.task_config import MixedConfig
from tasks import base, draws, pixels
from tasks.base import Batch, DataError, DecodeBatch
from tasks.files import read_bytes, typed_path
from tasks.text import TextConfig
from tasks.text import make as make_text
from tasks.text.task import TextTask

MODALITIES = ("text", "image", "value", "separator", "action")

_NUM_PATCHES = captions.GRID**2
_ACTION_NAMES = ("left", "right")
_CAPTIONS_IN_VOCABULARY = 2000
"""Number of captions for the vocabulary, so that each word becomes a subword."""
_HELD_OUT_EPISODES = 50


class MixedTask(base.Task):
  """Rows of text, of images with captions, and of an expert's episodes.

  The vocabulary has the ids of the text, 1,024 bins of real numbers, two actions, and a
  separator between observation and action. In the paper, actions share the ids of text;
  here they have separate ids. A row has T tokens:

      text       t₁ … t_T
      caption    16 patches, each with the id `PATCH`, the words, EOS
      control    (o₁ o₂ o₃ o₄ | a) of consecutive time steps

  A batch has 'inputs' and 'targets' [B, T], with targets one token later. 'weights'
  [B, T] are 1 at text and at actions of the expert, and 0 elsewhere. 'local' [B, T] is
  the position of an input in its time step, from 1, or 0 for an action; a text or a
  caption is one time step. 'patches' [B, 4, 4, 8, 8, 3], in [0, 1], are those of the
  row's image.

  Attributes:
    input_shapes: {'patches': …}.

  Paper: A generalist agent, section 2, arXiv:2205.06175.
  """

  def __init__(
    self,
    config: MixedConfig,
    text: TextTask,
    episodes: Mapping[str, Episodes],
    *,
    batch_size: int,
    seed: int,
  ):
    """Creates the task; `episodes` is empty without control rows."""
    self._config = config
    self._text = text
    self._episodes = episodes
    self._batch_size = batch_size
    self._seed = seed
    self._first_bin = text.target_vocab_size
    self._first_action = self._first_bin + BINS
    self._separator = self._first_action + NUM_ACTIONS
    self.target_vocab_size = self._separator + 1
    self.max_target_length = config.context
    self.pad_id, self.bos_id = text.pad_id, text.bos_id
    self.eos_id = text.eos_id
    self.eval_splits = text.eval_splits
    self.input_shapes = {"patches": captions.PATCHES_SHAPE}

  @property
  def baselines(self) -> Mapping[str, float]:
    """Unigram and bigram losses on the held-out text."""
    return {f"text_{name}": x for name, x in self._text.baselines.items()}

  def train_batch(self, step: int, rows: np.ndarray | None = None) -> Batch:
    """Text, captions and control, each a pure function of (seed, step)."""
    config = self._config
    text = self._batch_size - config.caption_rows - config.control_rows
    texts = jax.tree.map(lambda x: x[:text], self._text.train_batch(step))
    parts = [self._text_rows(texts)]
    indices = np.arange(config.caption_rows) + step * config.caption_rows
    if config.caption_rows:
      parts.append(self._caption_batch("train", indices)[0])
    if config.control_rows:
      rng = np.random.default_rng((self._seed, step, 2))
      parts.append(self._control_batch("train", rng, config.control_rows))
    return base.select_rows(_concatenate(parts), rows)

  def eval_batches(self, split: str) -> Iterator[Batch]:
    """Yields the held-out text, then held-out captions, then windows of episodes."""
    for batch in self._text.eval_batches(split):
      yield self._text_rows(batch)
    config = self._config
    if config.caption_rows:
      for indices in self._held_out():
        batch, _ = self._caption_batch(split, indices)
        yield base.pad_rows(batch, self._batch_size)
    if config.control_rows:
      rng = np.random.default_rng((self._seed, 3))
      for indices in self._held_out():
        batch = self._control_batch(split, rng, len(indices))
        yield base.pad_rows(batch, self._batch_size)

  def metric_sums(
    self, logits: Any, batch: Mapping[str, Any]
  ) -> dict[str, Any]:
    """Sums for the loss of text, and the accuracy of captions and actions."""
    names = "inputs", "targets", "weights"
    inputs, targets, weights = (batch[name] for name in names)
    is_caption = jnp.any(inputs == PATCH, axis=1)[:, None]
    is_control = jnp.any(inputs == self._separator, axis=1)[:, None]
    text_weights = weights * ~(is_caption | is_control)
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    log_p = jnp.take_along_axis(log_probs, targets[..., None], axis=-1)[..., 0]
    return {
      "text_loss": jnp.stack(
        [-jnp.sum(text_weights * log_p), jnp.sum(text_weights)]
      ),
      "caption_accuracy": base.sequence_accuracy(
        logits, targets, weights * is_caption
      ),
      "action_accuracy": base.token_accuracy(
        logits, targets, weights * is_control
      ),
    }

  def decode_batches(self, split: str) -> Iterator[DecodeBatch]:
    """Yields held-out images as prompts for captions."""
    if split not in self.eval_splits:
      raise KeyError(split)
    if not self._config.caption_rows:
      return
    for indices in self._held_out():
      batch, references = self._caption_batch(split, indices)
      rows = base.repeat_rows(len(indices), self._batch_size)
      inputs = {
        "prompt": np.full((self._batch_size, _NUM_PATCHES), PATCH, np.int32),
        "prompt_length": np.full(self._batch_size, _NUM_PATCHES, np.int32),
        "patches": batch["patches"][rows],
      }
      # The last generated token is not an input.
      longest = self._config.context - _NUM_PATCHES + 1
      yield DecodeBatch(inputs, references, longest)

  def score(
    self, hypotheses: Sequence[str], references: Sequence[str]
  ) -> dict[str, float | str]:
    """The share of captions that are correct word for word."""
    right = sum(map(str.__eq__, hypotheses, references))
    return {"caption_exact": right / max(1, len(references))}

  def play(
    self, predict: Callable[[Batch], np.ndarray], split: str
  ) -> dict[str, float]:
    """Plays episodes, with the more probable action at each step.

    The model sees as many of the last time steps as fit into its context, and predicts
    only actions.

    Args:
      predict: `batch -> logits [B, T, V]`.
      split: a held-out split.

    Returns:
      'return', the mean over the episodes, at most 500; empty without control rows.
    """
    if split not in self.eval_splits:
      raise KeyError(split)
    if not self._config.control_rows:
      return {}
    count, window = self._config.play_episodes, self._window
    values = np.zeros((count, control.LONGEST, control.NUM_VALUES), np.float32)
    actions = np.zeros((count, control.LONGEST), np.int32)
    local = np.tile(self._local_positions(window), (count, 1))

    def act(step, observation):
      values[:, step] = observation
      first = max(0, step + 1 - window)
      # One length for all steps; positions after the current step are ignored.
      steps = np.arange(first, first + window)
      tokens = self._steps(values[:, steps], actions[:, steps])[:, :-1]
      batch = {"inputs": tokens, "local": local[:, :-1]}
      last = STEP_TOKENS * (step - first + 1) - 2
      action_ids = slice(self._first_action, self._first_action + NUM_ACTIONS)
      scores = predict(batch)[:, last, action_ids]
      actions[:, step] = scores.argmax(-1)
      return actions[:, step]

    # Initial states differ from those of the expert's episodes.
    _, _, lengths = control.play(count, self._seed + 2, act)
    return {"return": float(lengths.mean())}

  def read(self, path: str) -> Batch:
    """Reads an image as a prompt for a caption.

    Raises:
      DataError: the file does not exist, is not an image, or is not a colour image of
        the size of this task's images.
    """
    file = typed_path(path)
    if not file.is_file():
      raise DataError(f"{file}: no such file")
    image = pixels.decode(read_bytes(file), str(file))
    shape = (captions.SIDE, captions.SIDE, 3)
    if image.shape != shape:
      raise DataError(
        f"{file}: expected an image of height, width and channels {shape}, as in "
        f"this run, got {image.shape}"
      )
    return {
      "prompt": np.full((1, _NUM_PATCHES), PATCH, np.int32),
      "patches": captions.patches(image[None]),
    }

  def encode(self, line: str) -> list[int]:
    """Prompt ids of a line of text."""
    return self._text.encode(line)

  def encode_target(self, line: str) -> list[int]:
    """Ids of a line of text."""
    return self._text.encode_target(line)

  def decode(self, ids: Sequence[int] | np.ndarray) -> str:
    """Text of ids, up to EOS; other modalities are in brackets."""
    ids = [int(i) for i in ids]
    if self.eos_id in ids:
      ids = ids[: ids.index(self.eos_id)]
    parts = []
    for modality, group in itertools.groupby(ids, self._modality):
      tokens = list(group)
      if modality == "text":
        parts.append(self._text.decode(tokens))
      elif modality == "image":
        parts.append("[image]")
      else:
        parts.append(f"[{' '.join(self.labels(tokens))}]")
    return "".join(parts)

  def labels(self, ids: Sequence[int] | np.ndarray) -> list[str]:
    """A subword, a number, an action, '|' or 'patch' for each id."""
    return [self._label(int(i)) for i in ids]

  def modalities(self, ids: Sequence[int] | np.ndarray) -> list[str]:
    """The modality of each id, one of `MODALITIES`."""
    return [self._modality(int(i)) for i in ids]

  def save(self, directory: pathlib.Path) -> None:
    """Writes the vocabulary of the text."""
    self._text.save(directory)

  def _modality(self, token: int) -> str:
    if token == PATCH:
      return "image"
    starts = (self._first_bin, self._first_action, self._separator)
    names = ("text", "value", "action", "separator")
    return names[sum(token >= start for start in starts)]

  def _label(self, token: int) -> str:
    match self._modality(token):
      case "image":
        return "patch"
      case "text":
        return self._text.labels([token])[0]
      case "value":
        return f"{control.bin_value(np.array(token - self._first_bin)):.2g}"
      case "action":
        return _ACTION_NAMES[token - self._first_action]
      case _:
        return "|"

  @property
  def _window(self) -> int:
    """The number of consecutive time steps; the last token is only a target."""
    return (self._config.context + 1) // STEP_TOKENS

  def _held_out(self) -> Iterator[np.ndarray]:
    """Yields the numbers of held-out examples, one batch at a time."""
    return base.chunks(self._config.eval_size, self._batch_size)

  def _text_rows(self, rows: Batch) -> Batch:
    """Adds local positions to rows of text."""
    return {**rows, "local": self._row_positions(rows["inputs"])}

  def _row_positions(self, inputs: np.ndarray) -> np.ndarray:
    """The local positions of rows that are one time step."""
    positions = np.arange(1, inputs.shape[1] + 1, dtype=np.int32)
    return np.tile(positions, (len(inputs), 1))

  def _caption_batch(
    self, split: str, indices: np.ndarray
  ) -> tuple[Batch, list[str]]:
    """Images with captions, and the captions."""
    config = self._config
    key = draws.split_key(self._seed, f"{split} captions")
    examples = captions.draw(key, indices, config.max_shapes)
    shape = (len(indices), config.context)
    inputs = np.zeros(shape, np.int32)
    targets, weights = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    inputs[:, :_NUM_PATCHES] = PATCH
    first = _NUM_PATCHES - 1
    for row, caption in enumerate(examples.captions):
      ids = [*self._text.encode_target(caption), self.eos_id]
      stop = first + len(ids)
      inputs[row, first + 1 : stop] = ids[:-1]
      targets[row, first:stop] = ids
      weights[row, first:stop] = 1
    batch = {
      "inputs": inputs,
      "targets": targets,
      "weights": weights,
      "local": self._row_positions(inputs),
      "patches": captions.patches(examples.images),
    }
    return batch, examples.captions

  def _control_batch(
    self, split: str, rng: np.random.Generator, count: int
  ) -> Batch:
    """Windows of episodes from random positions."""
    episodes, window = self._episodes[split], self._window
    numbers = rng.integers(len(episodes.lengths), size=count)
    # The window of a shorter episode starts at its beginning.
    last = np.maximum(0, episodes.lengths[numbers] - window)
    starts = rng.integers(last + 1)
    steps = starts[:, None] + np.arange(window)
    rows = numbers[:, None]
    is_played = steps < episodes.lengths[rows]
    is_target = is_played & episodes.is_expert[rows, steps]
    chosen = rows, steps
    tokens = self._steps(episodes.values[chosen], episodes.actions[chosen])
    weights = np.zeros(tokens.shape, np.float32)
    weights[:, STEP_TOKENS - 1 :: STEP_TOKENS] = is_target
    tokens *= np.repeat(is_played, STEP_TOKENS, axis=1)
    length = tokens.shape[1] - 1
    padding = [(0, 0), (0, self._config.context - length)]
    return {
      "inputs": np.pad(tokens[:, :-1], padding),
      "targets": np.pad(tokens[:, 1:] * (weights[:, 1:] > 0), padding),
      "weights": np.pad(weights[:, 1:], padding),
      "local": np.pad(
        np.tile(self._local_positions(window)[:-1], (count, 1)), padding
      ),
    }

  def _local_positions(self, steps: int) -> np.ndarray:
    """The position of each token within its time step, [steps · 6]."""
    positions = np.arange(1, STEP_TOKENS + 1, dtype=np.int32)
    positions[-1] = 0
    return np.tile(positions, steps)

  def _steps(self, values: np.ndarray, actions: np.ndarray) -> np.ndarray:
    """Observations [B, n, 4] and actions [B, n] as tokens [B, n · 6]."""
    tokens = np.empty((*actions.shape, STEP_TOKENS), np.int32)
    tokens[..., : control.NUM_VALUES] = self._first_bin + control.mu_law(values)
    tokens[..., control.NUM_VALUES] = self._separator
    tokens[..., control.NUM_VALUES + 1] = self._first_action + actions
    return tokens.reshape(len(actions), -1)

  def check_captions(self) -> None:
    """Raises ValueError if the longest caption does not fit a row."""

    def length(part: str) -> int:
      return len(self._text.encode_target(part))

    shapes = list(itertools.product(captions.COLOURS, captions.SHAPES))
    longest = [
      max((f"{c} {s} {quarter}" for c, s in shapes), key=length)
      for quarter in captions.QUARTERS
    ]
    longest.sort(key=length)
    caption = ", ".join(longest[-self._config.max_shapes :])
    minimum = _NUM_PATCHES + length(caption)
    if self._config.context < minimum:
      raise ValueError(
        f"task.context: expected at least {minimum}, {_NUM_PATCHES} patches and a "
        f"caption such as {caption!r}, got {self._config.context}"
      )


def _concatenate(parts: Sequence[Batch]) -> Batch:
  """Concatenates rows of several kinds; rows without an image get a black one."""
  shapes = {name: part[name].shape[1:] for part in parts for name in part}

  def rows(part, name):
    shape = len(part["inputs"]), *shapes[name]
    return part[name] if name in part else np.zeros(shape, np.float32)

  return {
    name: np.concatenate([rows(part, name) for part in parts])
    for name in shapes
  }


def make(
  config: MixedConfig,
  *,
  kind: str,
  batch_size: int,
  seed: int,
  workdir: pathlib.Path | None = None,
  restore: bool = False,
) -> MixedTask:
  """Reads the text and plays the expert's episodes; see `TaskEntry`."""
  base.layout("mixed", kind, ("decoder",))
  num_others = config.caption_rows + config.control_rows
  if batch_size < num_others:
    raise ValueError(
      f"batch_size: expected at least {num_others} rows, task.caption_rows + "
      f"task.control_rows, got {batch_size}"
    )
  key = draws.split_key(seed, "vocabulary captions")
  examples = np.arange(_CAPTIONS_IN_VOCABULARY)
  sentences = captions.draw(key, examples, len(captions.QUARTERS)).captions
  text = make_text(
    TextConfig(
      path=config.path,
      context=config.context,
      eval_batches=config.eval_batches,
      vocabulary=config.vocabulary,
      vocab_size=config.vocab_size,
      tokenizer=config.tokenizer,
    ),
    kind=kind,
    batch_size=batch_size,
    seed=seed,
    workdir=workdir,
    restore=restore,
    also="".join(f"\n{sentence}" for sentence in sentences),
  )
  episodes: dict[str, Episodes] = {}
  if config.control_rows and not restore:
    episodes = {
      "train": control.record(config.expert_episodes, seed),
      "validation": control.record(_HELD_OUT_EPISODES, seed + 1),
    }
  task = MixedTask(config, text, episodes, batch_size=batch_size, seed=seed)
  if config.caption_rows and not restore:
    task.check_captions()
  return task

"""Lines in, lines out, beyond what a decoder reads at a time."""

import jax
import numpy as np
import pytest

import models
from settings.errors import ConfigError
from tests.training.tiny import config
from training import experiment
from training.inference import generation

CONTEXT = 8


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """A language model of a few characters, untrained."""
  path = tmp_path_factory.mktemp("text") / "text.txt"
  path.write_text("the cat sat on the mat. " * 20)
  task = {"name": "text", "path": str(path), "context": CONTEXT}
  return experiment.create(config("decoder", task, {"position": "learned"}))


@pytest.fixture(scope="module")
def variables(run):
  # Wide, so that what is written depends on what was read.
  return jax.tree.map(lambda leaf: 5 * leaf, run.init().variables)


def written(run, variables, line, length):
  """What greedy decoding writes, one whole forward pass a character."""
  forward = jax.jit(
    lambda ids: models.forward(run.model, variables, {"inputs": ids})
  )
  text = run.task.encode(line)
  read, start = list(text), len(text)
  while len(text) < start + length:
    padded = np.zeros((1, CONTEXT), np.int32)
    padded[0, : len(read)] = read
    text.append(int(forward(padded)[0, len(read) - 1].argmax()))
    read.append(text[-1])
    if len(read) > CONTEXT:
      read = text[-(CONTEXT // 2) :]
  return run.task.decode(text[start:])


def test_text_goes_on_beyond_the_context(run, variables, capsys):
  lines = ["the", "", "a cat", "sat"]
  found = generation.generate_lines(run, variables, lines, max_length=31)
  assert found[1] == ""
  for line, output in zip(lines, found, strict=True):
    if line:
      assert output == written(run, variables, line, 31)
  out, error = capsys.readouterr()
  assert not out
  assert error == (
    "max_length=31: the model reads 8 tokens at a time; when they were full "
    "it read the last 4 again and continued\n"
  )


def test_a_full_prompt_goes_on_too(run, variables):
  line = "on the m"
  assert len(line) == CONTEXT
  [found] = generation.generate_lines(run, variables, [line], max_length=6)
  assert found == written(run, variables, line, 6)
  with pytest.raises(
    ConfigError, match=r"^line 1: expected at most 8 .*, got 9"
  ):
    generation.generate_lines(run, variables, ["on the ma"], max_length=6)


def test_lines_are_too_long_even_if_a_task_accepts_them(run, monkeypatch):
  monkeypatch.setattr(run.task, "encode", lambda line: [4] * len(line))
  assert generation.unreadable(run, ["on the m", "", "on the ma"]) == {
    3: "9 tokens are too long; the model reads 8"
  }


def test_what_fits_the_context_says_nothing(run, variables, capsys):
  [found] = generation.generate_lines(run, variables, ["the"], max_length=6)
  assert found == written(run, variables, "the", 6)
  assert capsys.readouterr().err == ""


def test_every_stretch_draws_anew(run, variables):
  [found] = generation.generate_lines(
    run,
    variables,
    ["the"],
    max_length=60,
    method="sample",
    temperature=9.0,
    seed=1,
  )
  halves = [found[i : i + 5] for i in range(6, 60, 5)]
  assert len(set(halves)) > 1


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_line_has_the_same_beams_beside_a_full_one(run, variables, length):
  options = {"method": "beam", "beam_size": 3, "max_length": length}
  lines = ["the", "on", "c", "t m", "sa"]
  alone = generation.generate_lines(run, variables, lines, **options)
  beside = generation.generate_lines(
    run, variables, [*lines, "on the m"], **options
  )
  assert beside[:-1] == alone


def test_a_row_ends_where_it_ends(run, variables):
  """A model that writes nothing but the end is asked once."""
  asked = []

  def generate(variables, inputs, *, max_length, **unused):
    asked.append(max_length)
    tokens = np.zeros((len(inputs["prompt"]), max_length), np.int32)
    tokens[:, 0] = run.task.eos_id
    return models.Generated(tokens, np.zeros(len(tokens)))

  ending = run._replace(generate=generate)
  found = generation.generate_lines(ending, variables, ["the"], max_length=99)
  assert (found, asked) == ([""], [CONTEXT - 2])


@pytest.mark.parametrize(
  ("options", "message"),
  [
    *(
      ({x: 0.5}, f"{x}: expected a whole number, got 0.5")
      for x in ("max_length", "seed", "batch_size", "top_k", "beam_size")
    ),
    *(
      ({x: True}, f"{x}: expected a number, got True")
      for x in ("temperature", "length_penalty")
    ),
    ({"max_length": 0}, "max_length: expected at least 1, got 0"),
    ({"seed": -1}, "seed: expected 0 to 2³¹ - 1, got -1"),
    ({"seed": 2**31}, "seed: expected 0 to 2³¹ - 1, got 2147483648"),
    ({"seed": None}, "seed: expected 0 to 2³¹ - 1, got None"),
    ({"batch_size": 0}, "batch_size: expected 1 to 2³¹ - 1, got 0"),
    ({"beamsize": 2}, "beamsize: unknown; did you mean 'beam_size'?"),
  ],
)
def test_options_that_are_none(run, options, message):
  with pytest.raises(ConfigError) as info:
    generation.generate_lines(run, {}, ["the"], **options)
  assert str(info.value) == message


def test_the_smallest_and_the_largest_options_are_some(run):
  whole = {"max_length": 1, "seed": 2**31 - 1, "batch_size": 1, "top_k": None}
  assert generation.generate_lines(run, {}, [""], **whole) == [""]
  real = {"temperature": 1, "length_penalty": 0.5, "method": "greedy"}
  assert generation.generate_lines(run, {}, [""], seed=0, **real) == [""]


def test_a_byte_order_mark_is_not_read():
  lines = [b"\xef\xbb\xbf3 1\r\n", "\ufeff2".encode()]
  assert generation.read_lines(lines) == ["3 1", "\ufeff2"]

"""Lines that are answered one by one, by a text that goes on or each by itself."""

import jax
import numpy as np
import pytest

import models
from settings.errors import ConfigError
from tests.refusals import assert_refused
from tests.training.tiny import config
from training import experiment
from training.inference import generation
from training.inference.conversation import Conversation

CONTEXT = 16


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """A language model of a few characters, untrained."""
  path = tmp_path_factory.mktemp("text") / "text.txt"
  path.write_text("the cat sat\non the mat. " * 20)
  task = {"name": "text", "path": str(path), "context": CONTEXT}
  return experiment.create(config("decoder", task, {"position": "learned"}))


@pytest.fixture(scope="module")
def variables(run):
  # Wide, so that what is written depends on what was read.
  return jax.tree.map(lambda leaf: 5 * leaf, run.init().variables)


def written(run, variables, text, length):
  """What greedy decoding writes behind ids, one whole forward pass a character."""
  forward = jax.jit(
    lambda ids: models.forward(run.model, variables, {"inputs": ids})
  )
  half, answer = CONTEXT // 2, []
  while len(answer) < length:
    read = [*text, *answer][-half:]
    for _ in range(CONTEXT - half + 1):
      padded = np.zeros((1, CONTEXT), np.int32)
      padded[0, : len(read)] = read
      read.append(int(forward(padded)[0, len(read) - 1].argmax()))
      answer.append(read[-1])
  return answer[:length]


@pytest.mark.parametrize("max_length", [None, 1, 20])
def test_a_text_goes_on_from_all_before(run, variables, max_length):
  found = Conversation(run, variables, max_length=max_length)
  task, text = run.task, []
  for line in ("the", "a cat", "m"):
    text += [*(task.encode("\n") if text else ()), *task.encode(line)]
    answer = written(run, variables, text, max_length or CONTEXT // 2 + 1)
    if task.eos_id in answer:
      answer = answer[: answer.index(task.eos_id)]
    assert found.answer(line) == task.decode(answer)
    text += answer


def test_a_line_that_cannot_be_read_is_told_and_forgotten(run, variables):
  found = Conversation(run, variables)
  first = found.answer("the")
  with pytest.raises(ConfigError, match="'Z' does not occur"):
    found.answer("Z")
  again = Conversation(run, variables)
  assert again.answer("the") == first
  assert again.answer("sat") == found.answer("sat")


def test_a_draw_follows_from_the_seed_and_the_turn(run, variables):
  options = {"method": "sample", "temperature": 9.0, "max_length": 30}
  answers = [
    [talk.answer("the"), talk.answer("the")]
    for talk in (
      Conversation(run, variables, seed=seed, **options) for seed in (1, 1, 2)
    )
  ]
  assert answers[0] == answers[1] != answers[2]
  assert answers[0][0] != answers[0][1]


def test_options_of_a_conversation(run, variables):
  assert_refused(
    lambda **options: Conversation(run, variables, **options),
    *({"max_length": 0}, {"seed": -1}, {"batch_size": 2.5}),
  )


def test_an_end_is_where_an_answer_ends(run, variables):
  def generate(variables, inputs, *, max_length, **unused):
    tokens = np.full((1, max_length), run.task.encode("a")[0], np.int32)
    tokens[0, 2] = run.task.eos_id
    return models.Generated(tokens, np.zeros(1))

  ending = run._replace(generate=generate)
  found = Conversation(ending, variables, max_length=99)
  assert found.answer("the") == "aa"


def test_each_line_of_another_task_has_a_seed(run, monkeypatch):
  asked = []

  def generate_lines(run, variables, lines, **options):
    asked.append((lines, options))
    return ["answer"]

  monkeypatch.setattr(run.task, "continues", False)
  monkeypatch.setattr(generation, "generate_lines", generate_lines)
  talk = Conversation(run, {}, max_length=4, seed=7, method="sample")
  assert [talk.answer(x) for x in ("a", "b", "c")] == ["answer"] * 3
  expected = {"max_length": 4, "batch_size": 1, "method": "sample"}
  assert asked == [
    ([line], expected | {"seed": seed})
    for line, seed in (("a", 7), ("b", 8), ("c", 9))
  ]


def test_an_encoder_does_not_answer(run):
  mapping = {"name": "listops", "max_length": 20, "min_length": 5}
  encoder = experiment.create(config("encoder", mapping))
  with pytest.raises(ConfigError, match="an encoder-only model"):
    Conversation(encoder, {})

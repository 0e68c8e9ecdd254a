"""The mixed task: text, captions of drawn shapes, and control of a pole."""

import functools
import itertools
import sys

import jax
import numpy as np
import PIL.Image
import pytest

from projects.gato import captions, control
from projects.gato.config import PATCH_ID
from projects.gato.task import PATCH
from projects.gato.task_config import MixedConfig
import tasks
from tasks import draws
from tests.refusals import assert_refused
from tests.tasks import generated_cases
from tests.tasks.text_cases import HELD_OUT


def make(text, **leaves):
  small = {"context": 40, "vocab_size": 320, "caption_rows": 3}
  small |= {"control_rows": 4, "expert_episodes": 5}
  small |= {"eval_size": 17, "play_episodes": 3}
  leaves = {"batch_size": 12, "path": str(text)} | small | leaves
  return generated_cases.make("mixed", "decoder", **leaves)


@pytest.fixture(scope="module")
def task(text):
  return make(text)


def rows_of(task, batch):
  """Numbers of the rows of text, of captions and of control."""
  kinds = [set(task.modalities(row)) for row in batch["inputs"]]
  return (
    [i for i, kind in enumerate(kinds) if kind == {"text"}],
    [i for i, kind in enumerate(kinds) if "image" in kind],
    [i for i, kind in enumerate(kinds) if "action" in kind],
  )


# Captions.


def drawn(indices, max_shapes=3, split="train"):
  key = draws.split_key(0, split)
  return captions.draw(key, np.asarray(indices), max_shapes)


def test_a_sentence_says_what_is_where():
  """A shape of the colour fills its quarter as its form does, and no other."""
  share = {"square": 1.0, "circle": np.pi / 4, "triangle": 0.5}
  found = drawn(range(60))
  seen, forms = set(), set()
  for image, sentence in zip(found.images, found.captions, strict=True):
    left = image.astype(int)
    background = np.ones(image.shape[:2], bool)
    for part in sentence.split(", "):
      colour, shape, *place = part.split()
      seen |= {colour, shape, " ".join(place)}
      forms.add((colour, shape))
      rgb = np.array(captions.COLOURS[colour])
      near = np.abs(left - rgb).max(-1) < 60
      half = captions.SIDE // 2
      quarter = np.zeros_like(near)
      top, side = 0 if "top" in place else half, 0 if "left" in place else half
      quarter[top : top + half, side : side + half] = True
      inside = near & quarter
      y, x = np.nonzero(inside)
      height, width = np.ptp(y) + 1, np.ptp(x) + 1
      assert 2 * captions._RADIUS[0] - 1 <= height <= 2 * captions._RADIUS[1]
      filled = inside.sum() / (height * width)
      assert abs(filled - share[shape]) < 0.15, (part, filled)
      background &= ~quarter
    # Quarters that are not told of are grey.
    assert np.ptp(left[background].mean(0)) < 5
    assert left[background].max() < 150
  everything = {*captions.COLOURS, *captions.SHAPES, *captions.QUARTERS}
  assert seen == everything
  # Every colour has every shape.
  assert len(forms) == len(captions.COLOURS) * len(captions.SHAPES)


_FORMS = {
  "circle": """
    ..####..
    .######.
    ########
    ########
    ########
    ########
    .######.
    ..####..
  """,
  "triangle": """
    ........
    ...##...
    ...##...
    ..####..
    ..####..
    .######.
    .######.
    ########
  """,
  "square": "########" * 8,
}


@pytest.mark.parametrize("shape", captions.SHAPES)
def test_forms_are_by_the_middles_of_pixels(shape):
  found = captions._coverage(shape, np.array([3, 20]), 4)
  expected = np.zeros_like(found)
  form = "".join(_FORMS[shape].split())
  expected[3:11, 20:28] = np.reshape([x == "#" for x in form], (8, 8))
  np.testing.assert_array_equal(found, expected)


def test_sizes_shades_and_noise():
  """Squares of 8, 10 and 12 pixels, on grey of up to 59, with a deviation of 12."""
  found = drawn(range(300), max_shapes=1)
  sides, shades, deviations, places = set(), [], [], []
  for image, sentence in zip(found.images, found.captions, strict=True):
    colour, shape, *place = sentence.split()
    half = captions.SIDE // 2
    top, left = half * ("bottom" in place), half * ("right" in place)
    quarter = image[top : top + half, left : left + half].astype(int)
    near = np.abs(quarter - captions.COLOURS[colour]).max(-1) < 60
    if shape == "square":
      y, x = np.nonzero(near)
      sides.add((np.ptp(y) + 1, np.ptp(x) + 1))
      places.append((y.min(), x.min(), half - 1 - y.max(), half - 1 - x.max()))
    plain = np.roll(image, (-top, -left), (0, 1))[half:, half:]
    shades.append(np.median(plain))
    if shades[-1] > 40:
      deviations.append(plain.std())
  assert sides == {(8, 8), (10, 10), (12, 12)}
  # A square may touch any side of its quarter.
  assert np.min(places, axis=0).tolist() == [0, 0, 0, 0]
  assert 0 <= min(shades) < 4
  assert 56 < max(shades) < 62
  np.testing.assert_allclose(np.mean(deviations), 12, atol=0.2)


def test_places_are_told_in_order_and_once():
  for sentence in drawn(range(50), max_shapes=4).captions:
    places = [" ".join(part.split()[2:]) for part in sentence.split(", ")]
    order = [captions.QUARTERS.index(place) for place in places]
    assert order == sorted(set(order))
  counts = [s.count(",") + 1 for s in drawn(range(300)).captions]
  assert min(counts.count(n) for n in (1, 2, 3)) > 60
  assert max(counts) == 3


def test_patches_are_in_raster_order():
  image = np.arange(captions.SIDE**2 * 3).reshape(1, captions.SIDE, -1, 3)
  image = (image % 251).astype(np.uint8)
  found = captions.patches(image)
  assert found.shape == (1, *captions.PATCHES_SHAPE)
  size = captions.PATCH_SIZE
  for row, column in itertools.product(range(captions.GRID), repeat=2):
    places = (slice(size * i, size * (i + 1)) for i in (row, column))
    patch = found[0, row, column] * 255
    np.testing.assert_allclose(patch, image[0][*places], rtol=1e-6)


# Control.


def test_mu_law_is_the_papers():
  """Against its formula in float64, number by number."""
  rng = np.random.default_rng(0)
  numbers = [*(10 ** rng.uniform(-5, 3, 200) * rng.choice([-1, 1], 200)), 0.0]
  for x in numbers:
    y = np.sign(x) * np.log(abs(x) * 100 + 1) / np.log(256 * 100 + 1)
    y = min(max(y, -1), 1)
    expected = min(int(np.floor((y + 1) / (2 / 1024))), 1023)
    assert control.mu_law(np.array(x)) == expected
  assert control.mu_law(np.array([-1e9, 0.0, 1e9])).tolist() == [0, 512, 1023]
  # The other way it is right within a bin.
  bins = np.arange(1024)
  np.testing.assert_array_equal(control.mu_law(control.bin_value(bins)), bins)
  assert (np.diff(control.bin_value(bins)) > 0).all()


def test_the_expert_balances_the_pole():
  _, _, lengths = control.play(30, 9, lambda _, values: control.expert(values))
  assert lengths.min() == control.LONGEST
  _, _, lengths = control.play(30, 9, lambda _, v: 1 - control.expert(v))
  assert lengths.max() < 30


def test_episodes_are_gymnasiums():
  """Played one at a time, with the actions that were recorded."""
  import gymnasium

  episodes = control.record(4, 3)
  pole = gymnasium.make(control.ENVIRONMENT).unwrapped
  pole.reset(seed=0)
  for values, actions, length in zip(
    episodes.values, episodes.actions, episodes.lengths, strict=True
  ):
    pole.state = values[0].astype(float)
    pole.steps_beyond_terminated = None
    fell = False
    for step in range(length):
      assert not fell
      np.testing.assert_allclose(pole.state, values[step], atol=1e-4)
      _, _, fell, _, _ = pole.step(int(actions[step]))
      if step + 1 < length:
        pole.state = values[step + 1].astype(float)
    assert fell or length == control.LONGEST
  right = control.expert(episodes.values) == episodes.actions
  assert right[episodes.is_expert].all()
  assert 0.15 < 1 - episodes.is_expert.mean() < 0.25
  assert abs(right[~episodes.is_expert].mean() - 0.5) < 0.1


def test_without_gymnasium(text, monkeypatch):
  monkeypatch.setitem(sys.modules, "gymnasium", None)
  with pytest.raises(tasks.DataError, match=r"^task.control_rows:"):
    make(text)
  assert make(text, control_rows=0).play(None, "validation") == {}


# Batches.


def test_rows_are_of_three_kinds(task):
  batch = task.train_batch(3)
  of_text, of_captions, of_control = rows_of(task, batch)
  assert (len(of_text), len(of_captions), len(of_control)) == (5, 3, 4)
  assert batch["patches"].shape == (12, *captions.PATCHES_SHAPE)
  has_image = batch["patches"].any((1, 2, 3, 4, 5))
  assert np.flatnonzero(has_image).tolist() == of_captions
  assert batch["inputs"].max() < task.target_vocab_size
  # Rows of text are those of the task 'text', with the same seed.
  alone = make(text_of(task), batch_size=5, caption_rows=0, control_rows=0)
  for name, array in alone.train_batch(3).items():
    np.testing.assert_array_equal(array, batch[name][of_text])


def test_each_step_has_captions_of_its_own(task):
  batch = task.train_batch(2)
  _, rows, _ = rows_of(task, batch)
  key = draws.split_key(0, "train captions")
  expected = captions.draw(key, np.arange(6, 9), 3)
  np.testing.assert_array_equal(
    batch["patches"][rows], captions.patches(expected.images)
  )


def text_of(task):
  return task._config.path


def test_captions_are_learned_and_images_are_not(task):
  batch = task.train_batch(0)
  _, rows, _ = rows_of(task, batch)
  key = draws.split_key(0, "train captions")
  expected = captions.draw(key, np.arange(3), 3)
  for row, caption in zip(rows, expected.captions, strict=True):
    inputs, weights = batch["inputs"][row], batch["weights"][row]
    assert (inputs[:16] == PATCH).all()
    assert (inputs[16:] != PATCH).all()
    targets = batch["targets"][row][weights > 0]
    assert targets[-1] == task.eos_id
    assert task.decode(targets) == caption
    # The last patch says the first word.
    assert np.flatnonzero(weights)[0] == 15
    assert task.decode(inputs).startswith("[image]" + caption)
    assert batch["local"][row].tolist() == list(range(1, 41))


def test_actions_of_the_expert_are_learned_and_nothing_else(task):
  batch = task.train_batch(0)
  _, _, rows = rows_of(task, batch)
  values = []
  for row in rows:
    names = task.modalities(batch["inputs"][row])
    # 41 tokens are 6 time steps of 6 tokens.
    step = ["value"] * 4 + ["separator", "action"]
    assert names[:35] == (step * 6)[:35]
    assert batch["local"][row][:35].tolist() == ([1, 2, 3, 4, 5, 0] * 6)[:35]
    weighted = np.flatnonzero(batch["weights"][row])
    assert (weighted % 6 == 4).all()  # A separator is before every action.
    assert (batch["inputs"][row][weighted] == task._separator).all()
    for at in weighted:
      bins = batch["inputs"][row][at - 4 : at] - task._first_bin
      action = batch["targets"][row][at] - task._first_action
      values.append((control.bin_value(bins) @ control._EXPERT, action))
      # And it is what the model reads next.
      if at + 1 < 35:
        assert batch["inputs"][row][at + 1] == batch["targets"][row][at]
  assert len(values) >= 12
  # Bins are coarse: near the border the expert may have seen it otherwise.
  for score, action in values:
    assert action == (score > 0) or abs(score) < 0.02


def test_short_episodes_are_padded(text, monkeypatch):
  """Of an episode that ended, nothing is shown or learned."""
  recorded = control.record

  def short(count, seed):
    episodes = recorded(count, seed)
    return episodes._replace(lengths=np.full(count, 3))

  monkeypatch.setattr(control, "record", short)
  task = make(text)
  batch = task.train_batch(0)
  _, _, rows = rows_of(task, batch)
  for row in rows:
    assert (batch["inputs"][row][:18] != task.pad_id).all()
    assert (batch["inputs"][row][18:] == task.pad_id).all()
    assert not batch["weights"][row][17:].any()


def test_windows_are_from_any_step_that_has_room(text, monkeypatch):
  """Six of the seven steps of an episode, from the first or from the second."""
  recorded, seeds = control.record, []

  def numbered(count, seed):
    seeds.append(seed)
    episodes = recorded(count, seed)
    values = np.zeros_like(episodes.values)
    values[:, :, 0] = np.arange(control.LONGEST)
    lengths = np.full(count, 7)
    return episodes._replace(lengths=lengths, values=values)

  monkeypatch.setattr(control, "record", numbered)
  task = make(text, control_rows=8)
  first = set()
  for step in range(3):
    batch = task.train_batch(step)
    for row in rows_of(task, batch)[2]:
      bins = batch["inputs"][row][0:35:6] - task._first_bin
      steps = np.rint(control.bin_value(bins)).astype(int)
      assert (steps - steps[0]).tolist() == list(range(6))
      first.add(int(steps[0]))
  assert first == {0, 1}
  # Held-out episodes are others.
  assert seeds == [0, 1]


def test_held_out_examples_come_once(task):
  batches = list(task.eval_batches("validation"))
  counts = np.zeros(3, int)
  for batch in batches:
    assert len(batch["inputs"]) == 12
    real = batch["weights"].any(1)
    kinds = rows_of(task, batch)
    counts += [sum(real[rows]) for rows in kinds]
  assert counts[1] == 17
  assert 0 < counts[2] <= 17
  # All of the text but its first token.
  ids = task._text._vocabulary.encode_text(HELD_OUT)
  assert counts[0] == -(-(len(ids) - 1) // 40)
  with pytest.raises(KeyError):
    next(task.eval_batches("test"))


def test_metrics_are_of_each_kind(task):
  """Right logits are right, and one wrong word spoils a caption."""
  batch = task.train_batch(1)
  _, of_captions, of_control = rows_of(task, batch)
  logits = 20.0 * np.eye(task.target_vocab_size)[batch["targets"]]
  wrong = logits.copy()
  last = np.flatnonzero(batch["weights"][of_captions[0]])[-2]
  wrong[of_captions[0], last] = 0
  sums = jax.jit(task.metric_sums)(wrong.astype(np.float32), batch)
  values = task.summarize({n: tuple(map(float, x)) for n, x in sums.items()})
  assert values["caption_accuracy"] == pytest.approx(2 / 3)
  assert values["action_accuracy"] == 1.0
  assert values["text_loss"] < 1e-5
  counts = {name: float(pair[1]) for name, pair in sums.items()}
  assert counts["text_loss"] == 5 * 40
  assert counts["action_accuracy"] == batch["weights"][of_control].sum()


def test_captions_are_decoded_from_images(task):
  batches = list(task.decode_batches("validation"))
  assert sum(len(batch.references) for batch in batches) == 17
  for batch in batches:
    assert batch.inputs["patches"].shape == (12, *captions.PATCHES_SHAPE)
    assert (batch.inputs["prompt"] == PATCH).all()
    assert batch.inputs["prompt"].shape == (12, 16)
    assert batch.inputs["prompt_length"].tolist() == [16] * 12
    # With the 16 patches, all but the last word fill the 40 tokens of a row.
    assert batch.max_length == 25
    assert task.decode(batch.inputs["prompt"][0]) == "[image]"
  first = batches[0].references
  key = draws.split_key(0, "validation captions")
  expected = captions.draw(key, np.arange(17), 3)
  assert [*first, *batches[1].references] == expected.captions
  shown = [batch.inputs["patches"] for batch in batches]
  np.testing.assert_array_equal(
    np.concatenate(shown)[:17], captions.patches(expected.images)
  )
  assert task.score([], []) == {"caption_exact": 0.0}
  with pytest.raises(KeyError):
    next(task.decode_batches("test"))
  assert task.score(first, first) == {"caption_exact": 1.0}
  assert task.score([*first[:-3], "", "", ""], first)["caption_exact"] == 0.75


def test_play_reads_what_it_did_and_sees_now(task):
  """A player that computes the expert's action from the tokens balances."""
  lengths = set()

  def predict(batch):
    inputs = batch["inputs"]
    lengths.add(inputs.shape[1])
    assert inputs.shape == batch["local"].shape
    assert len(inputs) == 3
    logits = np.zeros((*inputs.shape, task.target_vocab_size))
    for at in range(4, inputs.shape[1], 6):
      assert (inputs[:, at] == task._separator).all()
      values = control.bin_value(inputs[:, at - 4 : at] - task._first_bin)
      chosen = task._first_action + control.expert(values.astype(np.float32))
      logits[np.arange(len(inputs)), at, chosen] = 1
      # An action that was taken is there to be read.
    logits[..., 0] = 2  # The likeliest of all ids is no action.
    return logits

  assert task.play(predict, "validation") == {"return": 500.0}
  assert lengths == {35}
  fell = task.play(lambda batch: -predict(batch), "validation")["return"]
  assert fell < 30


# What a user sees.


def test_ids_have_names(task):
  text = task.encode("the party")
  first_bin, first_action = task._first_bin, task._first_action
  ids = [PATCH, PATCH, *text, first_bin + 512, first_action, task._separator]
  kinds = ["image"] * 2 + ["text"] * len(text)
  assert task.modalities(ids) == [*kinds, "value", "action", "separator"]
  # (25601^(1/1024) − 1) / 100, the middle of the first bin above 0.
  assert task.labels(ids)[-3:] == ["0.0001", "left", "|"]
  assert task.labels([first_action + 1]) == ["right"]
  assert task.decode(ids).startswith("[image]the party[")
  assert PATCH == PATCH_ID


def test_a_file_is_read_as_a_prompt(task, tmp_path):
  file = tmp_path / "shapes.png"
  image = drawn([0]).images[0]
  PIL.Image.fromarray(image).save(file)
  prompt = task.read(str(file))
  np.testing.assert_array_equal(
    prompt["patches"], captions.patches(image[None])
  )
  PIL.Image.fromarray(image[:20]).save(file)
  with pytest.raises(tasks.DataError, match=r"expected an image of .*\(32,"):
    task.read(str(file))
  with pytest.raises(tasks.DataError, match="no such file"):
    task.read(str(tmp_path / "none.png"))


def test_a_restored_task_has_no_data(task, text, tmp_path, monkeypatch):
  task.save(tmp_path)
  monkeypatch.setitem(sys.modules, "gymnasium", None)
  restored = make("gone.txt", workdir=tmp_path, restore=True)
  assert restored.eval_splits == ()
  assert restored.target_vocab_size == task.target_vocab_size
  ids = task.encode("all good men")
  assert restored.encode("all good men") == ids
  assert restored.decode(ids) == "all good men"


def test_every_vocabulary_spells_captions(text):
  for leaves in (
    {"vocabulary": "bytes", "max_shapes": 1, "context": 64},
    {"vocabulary": "characters", "max_shapes": 1, "context": 64},
  ):
    task = make(text, **leaves)
    batch = task.train_batch(0)
    row = rows_of(task, batch)[1][0]
    targets = batch["targets"][row][batch["weights"][row] > 0]
    key = draws.split_key(0, "train captions")
    assert task.decode(targets) == captions.draw(key, [0], 1).captions[0]


def test_faults_name_a_leaf(text):
  with pytest.raises(ValueError, match=r"^batch_size: expected at least 7"):
    make(text, batch_size=6)
  assert_refused(
    functools.partial(make, text),
    *({"context": 20}, {"caption_rows": -1}, {"max_shapes": 5}, {"context": 5}),
    *({"eval_size": 0}, {"max_shapes": 0}, {"control_rows": -1}),
    prefix="task.",
  )
  make(text, batch_size=7)
  # A window is at least one step of six tokens, and other rows have two.
  MixedConfig("x", 6)
  MixedConfig("x", 2, control_rows=0)


@pytest.mark.parametrize(("shapes", "least"), [(1, 44), (2, 73)])
def test_the_longest_caption_fits(text, shapes, least):
  """16 patches, 'yellow triangle bottom left, yellow triangle bottom right'."""
  leaves = {"vocabulary": "bytes", "max_shapes": shapes}
  make(text, **leaves, context=least)
  with pytest.raises(ValueError, match=rf"^task\.context: .* least {least}, "):
    make(text, **leaves, context=least - 1)

"""Which configs continue the run of a folder."""

import pytest

from configs import copy
from process.errors import ConfigError
from settings.leaves import put
from training import experiment_config, workdir


def config(schedule="constant", **leaves):
  mapping = copy.get_config().to_dict()
  for leaf, value in {"optimizer.schedule": schedule, **leaves}.items():
    put(mapping, leaf, value)
  return experiment_config.parse(mapping)


def fault(folder, **leaves):
  with pytest.raises(ConfigError) as info:
    workdir.check(folder, config(**leaves))
  assert "\n" not in str(info.value)
  return str(info.value)


@pytest.mark.parametrize("schedule", ["constant", "inverse_sqrt"])
def test_a_run_is_continued_where_the_schedule_allows(tmp_path, schedule):
  workdir.write_config(tmp_path, config(schedule, num_steps=2))
  workdir.check(tmp_path, config(schedule, num_steps=4))
  workdir.check(
    tmp_path,
    config(
      schedule, num_steps=4, log_every=1, eval_every=3, checkpoint_every=2
    ),
  )


def test_a_cosine_ends_where_it_was_said_to(tmp_path):
  workdir.write_config(tmp_path, config("cosine", num_steps=2))
  workdir.check(tmp_path, config("cosine", num_steps=2, log_every=1))
  line = fault(tmp_path, schedule="cosine", num_steps=4)
  assert line.startswith("config.num_steps: ")
  assert "ends at step 2 (optimizer.schedule='cosine')" in line
  assert "--config.optimizer.schedule=constant" in line
  # The schedule is part of what was trained already.
  line = fault(tmp_path, schedule="constant", num_steps=4)
  assert "config.optimizer.schedule is 'cosine' there" in line


def test_a_run_is_not_shortened(tmp_path):
  workdir.write_config(tmp_path, config(num_steps=4))
  line = fault(tmp_path, num_steps=2)
  assert "holds a run of 4 steps, which can be continued but not sh" in line


@pytest.mark.parametrize("text", ["[]", "3", "{", '{"num_steps": "x"}', "{}"])
def test_a_damaged_config_is_told(tmp_path, text):
  (tmp_path / workdir.CONFIG).write_text(text)
  assert fault(tmp_path).startswith("workdir: ")

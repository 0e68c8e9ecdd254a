"""The Python interface for notebooks: train, load and draw runs and comparisons."""

import os

import jax
from ml_collections import ConfigDict
import numpy as np
import pytest

import lab
from tests.comparison import made_up
from tests.refusals import assert_refused

TINY = {
  **{"num_steps": 4, "batch_size": 8, "eval_every": 2, "log_every": 2},
  **{"checkpoint_every": 2, "model.num_layers": 1, "model.features": 16},
  **{"model.mlp_features": 16, "task.eval_size": 8, "task.max_length": 6},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  folder = tmp_path_factory.mktemp("lab") / "run"
  return lab.train("configs/duplicate.py:performer", folder, **TINY)


def test_a_run_is_trained_and_looked_at(run):
  assert run.config.train.num_steps == 4
  frame = run.metrics()
  assert list(frame[frame["split"] == "train"]["step"]) == [2, 4]
  assert run.metrics()["loss"].notna().all()
  (line,) = run.generate(["3 1 4"], max_length=4)
  assert isinstance(line, str)
  assert repr(run) == f"Run(folder={run.folder!r})"


def test_variables_are_those_of_a_step(run):
  newest, same, before = (
    np.concatenate([np.ravel(x) for x in jax.tree.leaves(found["params"])])
    for found in (run.variables(), run.variables(4), run.variables(2))
  )
  np.testing.assert_array_equal(newest, same)
  assert (newest != before).any()
  assert_refused(
    lambda step: run.variables(step), *({"step": x} for x in (3, 4.0))
  )
  jax.tree.map(
    np.testing.assert_array_equal, run.variables(np.int64(4)), run.variables()
  )


def test_attention_is_a_figure_of_matplotlib(run):
  figure = run.attention_maps("3 1 4 1", "3 1 4 1")
  assert len(figure.subfigs) == 1  # The decoder's.
  width, height = figure.get_size_inches()
  assert width <= 9
  assert height <= 3


@pytest.mark.parametrize(
  ("call", "message"),
  [
    (lambda run: run.attention_maps(""), "text: expected a text, got ''"),
    (lambda run: run.attention_maps(3), "text: expected a text, got 3"),
    (lambda run: run.attention_maps("3", 3), "target: expected a text, got 3"),
    (lambda run: run.attention_maps("3", "x"), "target: expected symbols 0 to"),
    (lambda run: run.generate("3 1 4"), "lines: expected a list of texts"),
    (lambda run: run.generate(3), "lines: expected a list of texts, got 3"),
    (lambda run: run.generate([3]), "line 1: expected a text, got 3"),
    (lambda run: run.generate(["", None]), "line 2: expected a text, got None"),
    (lambda run: run.generate([b"3"]), "line 1: expected a text, got b'3'"),
    (lambda run: run.generate(["3"], temp=0.5), "temp: unknown; did you mean"),
    (lambda run: run.generate(["3"], rng=1), "rng: unknown; known: max_length"),
    (lambda run: run.generate(["3"], eos_id=5), "eos_id: unknown; known: "),
  ],
)
def test_a_fault_of_a_call_names_its_argument(run, call, message):
  with pytest.raises(lab.ConfigError, match=f"^{message}"):
    call(run)


def test_options_of_generate_that_cannot_be(run):
  assert_refused(
    lambda **options: run.generate(["3"], **options),
    *({"max_length": x} for x in ("4", 4.0, 0)),
    *({"seed": x} for x in (-1, None)),
    *({"batch_size": 0}, {"temperature": "hot", "method": "sample"}),
    {"top_k": True, "method": "sample"},
    {"beam_size": [2], "method": "beam"},
  )


def test_options_of_generate_may_be_of_numpy(run):
  options = {"max_length": 4, "top_k": 3, "seed": 2, "temperature": 0.5}
  arrays = {name: np.asarray(x)[()] for name, x in options.items()}
  assert all(isinstance(x, np.generic) for x in arrays.values())
  assert run.generate(["3 1"], method="sample", **arrays) == run.generate(
    ["3 1"], method="sample", **options
  )


def test_fields_may_be_what_notebooks_compute_with(run, capsys):
  """Then the config is the same: the run has finished."""
  leaves = {n: np.asarray(x)[()] for n, x in TINY.items()}
  assert isinstance(leaves["num_steps"], np.integer)
  lab.train("configs/duplicate.py:performer", run.folder, **leaves)
  assert "had finished at step 4 before" in capsys.readouterr().out


def test_the_same_call_trains_nothing_again(run, capsys):
  again = lab.train("configs/duplicate.py:performer", run.folder, **TINY)
  told = f"{run.folder}: had finished at step 4 before; nothing is left"
  assert capsys.readouterr().out.startswith(told)
  assert again.metrics().equals(run.metrics())
  assert lab.load_run(run.folder).config == run.config


def test_a_run_that_was_stopped_goes_on(tmp_path, run):
  which = ("configs/duplicate.py:performer", tmp_path / "run")
  stopped = lab.train(*which, stop_at=2, **TINY)
  assert stopped.metrics()["step"].max() == 2
  gone_on = lab.train(*which, **TINY)
  columns = ["step", "split", "loss"]
  assert gone_on.metrics()[columns].equals(run.metrics()[columns])


@pytest.mark.parametrize(
  ("call", "message"),
  [
    (lambda: lab.train("configs/none.py"), "no such file: 'configs/none.py'"),
    (lambda: lab.train("configs/copy.py", num_stepz=3), "did you mean"),
    (lambda: lab.load_run("none"), "no run in none"),
    (lambda: lab.load_comparison("none"), "no comparison in none"),
    (lambda: lab.compare("configs/compare/recall.py:dense"), "got 'dense'"),
    (lambda: lab.train(None), "expected FILE.py, .* got None"),
    (lambda: lab.train("configs/copy.py", stop_at=0), "at least 1, got 0"),
    (lambda: lab.train("configs/copy.py", stop_at=1.5), "number .* got 1.5"),
    (lambda: lab.train("README.md"), "config: README.md: "),
    (lambda: lab.compare("configs/compare/recall.py", seed=3), "config.seed: "),
    (lambda: lab.sweep("recall.py:delta", {"x": [1]}), "got 'recall.py'"),
  ],
)
def test_a_fault_is_one_line(call, message):
  with pytest.raises(lab.ConfigError, match=message) as fault:
    call()
  assert "\n" not in str(fault.value)


@pytest.mark.parametrize("section", [dict, ConfigDict])
def test_fields_of_a_call_do_not_change_the_config_of_the_caller(section):
  config = {"task": {"name": "copy"}, "model": section({"num_layers": 3})}
  with pytest.raises(lab.ConfigError, match="num_steps: missing"):
    lab.train(config, **{"model.num_layers": 1})
  assert config["model"]["num_layers"] == 3


def test_a_comparison_is_loaded(tmp_path):
  (tmp_path / "comparison.json").write_text("{}")
  made_up.write(tmp_path, made_up.records())
  results = lab.load_comparison(tmp_path)
  assert len(results.frame()) == 10
  of_copy = results.summary().query("task == 'copy'")
  assert list(of_copy["row"]) == ["dense", "linear", "performer"]
  figure = results.curves("copy", "token_accuracy")
  (axes,) = figure.axes
  assert axes.get_ylabel() == "token_accuracy"
  with pytest.raises(ValueError, match="expected one of copy, paper/recall"):
    results.curves("copi")
  with pytest.raises(ValueError, match="token_accuracy, got 'accurac'"):
    results.curves("copy", "accurac")


@pytest.mark.parametrize(
  "seeds", [3, np.int64(3), range(3), [0, 1, 2], (0, 1, 2), np.arange(3)]
)
def test_seeds_of_a_comparison_are_a_number_or_a_sequence(
  seeds, tmp_path, monkeypatch
):
  def run(comparison, *_, **__):
    assert comparison.seed_numbers == [0, 1, 2]
    rates = [
      leaves["optimizer.learning_rate"] for leaves in comparison.across_points()
    ]
    assert rates == [0.01, 0.1]
    raise lab.RunError("began")

  monkeypatch.setattr(lab.run_lib, "run", run)
  grid = {"optimizer.learning_rate": np.logspace(-2, -1, 2)}
  config = f"{os.path.abspath('configs/recall.py')}:delta"
  monkeypatch.chdir(tmp_path)  # The file need not be below the current folder.
  with pytest.raises(lab.RunError, match="began"):
    lab.sweep(config, grid, seeds, tmp_path)


@pytest.mark.parametrize(
  ("typed", "label", "variants"),
  [
    ("", "dense", {}),
    (":delta", "delta", {}),
    (":delta,dense", "delta+dense", {"delta+dense": "delta,dense"}),
  ],
)
def test_layers_of_a_sweep_take_turns(
  typed, label, variants, tmp_path, monkeypatch
):
  def run(comparison, *_, **__):
    assert comparison.attention == label
    found = comparison.variants.items()
    assert {name: fields["layers"] for name, fields in found} == variants
    assert not comparison.match_parameters
    raise lab.RunError("began")

  monkeypatch.setattr(lab.run_lib, "run", run)
  with pytest.raises(lab.RunError, match="began"):
    lab.sweep(f"configs/recall.py{typed}", {"batch_size": [8]}, 1, tmp_path)


@pytest.mark.thorough
def test_a_sweep_is_a_comparison_without_a_file(tmp_path):
  leaves = {
    **{"batch_size": 8, "num_steps": 4, "eval_every": 4, "model.features": 16},
    **{"task.length": 16, "task.num_pairs": 2, "task.eval_size": 16},
  }
  grid = {"optimizer.learning_rate": [1e-3, 3e-3]}
  results = lab.sweep("configs/recall.py:delta", grid, 2, tmp_path, **leaves)
  summary = results.summary()
  rates = [f"learning_rate={x}" for x in (0.001, 0.003)]
  assert sorted(summary["across"]) == rates
  assert list(summary["seeds"]) == [2, 2]
  assert (tmp_path / "report.html").is_file()

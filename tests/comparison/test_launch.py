"""Which processes a comparison starts, and what is kept of them."""

import concurrent.futures
import json
import pathlib
import signal
import time

import pytest

from comparison import folder as folder_lib
from comparison import plan, process, records, run, train_run, worker
from comparison.launch import launch
from comparison.measurement import measurements
from comparison.planned_run import Run
from settings.errors import ConfigError, RunError
from tests.comparison.plans import budgeted, comparison
from training import ownership


def small(seeds="0,1", **changes):
  changes = {"tasks": "duplicate", "attention": "dense", **changes}
  return comparison(seeds=seeds, **changes)


def launched(one, folder, **options):
  """All runs of a comparison, launched."""
  runs = plan.plan(one)
  launch(runs, folder, one, **options)
  return runs


def ended_as(record):
  return record["status"], record["reason"]


def by_seed(folder):
  return {r["seed"]: r for r in records.by_identity(folder).values()}


def test_runs_are_kept_and_not_made_again(folder, trainer, capsys):
  one = small(attention="dense,linformer")
  runs = launched(one, folder)
  out = capsys.readouterr().out
  assert "loss 1.0000" in out
  assert "step 500.0 ms" in out
  found, damaged = records.read(folder)
  statuses = [record["status"] for record in found]
  assert sorted(statuses) == [records.DONE] * 2 + [records.UNSUPPORTED] * 2
  assert not damaged
  done = next(r for r in found if r["status"] == records.DONE)
  assert done["peak_bytes"] > 1e6
  assert done["measured"]["step_seconds"] == 0.5
  assert len(done["history"]) == 2
  assert "sentences" not in done
  assert {"commit", "cpu", "cores", "jax", "device"} == done["machine"].keys()
  assert (done["width"], done["choosing"]) == ("matched", False)
  assert done["at_edge"] == []
  assert done["feed_forward"] == done["dense_feed_forward"] == 512
  assert done["dense_parameters"] == done["parameters"]
  assert done["solved_at"] == 0.95
  # Only what was damaged is made again.
  launched(one, folder)
  assert len(trainer.calls) == 2
  path = folder / records.RECORDS / f"{runs[0].identity}.json"
  path.write_text(path.read_text()[:50])
  assert records.read(folder)[1] == [path.name]
  assert records.status(folder, runs[0]) is None


def test_a_folder_goes_on_when_its_config_evaluates_oftener(folder, trainer):
  per_task = {"recall": {"eval_every": 6}}
  old = small("0", tasks="duplicate,recall", eval_every=12, per_task=per_task)
  run.run(old, folder)
  made = len(trainer.calls)
  new = small("0", tasks="duplicate,recall", eval_every=3)
  recorded = records.shared_settings(folder)
  with pytest.raises(ConfigError, match=r"config\.eval_every is 12 there"):
    run.run(
      folder_lib.with_recorded_eval_every(new, recorded, ["eval_every"]), folder
    )
  new = small("0,1", tasks="duplicate,recall", eval_every=3, per_task=per_task)
  run.run(folder_lib.with_recorded_eval_every(new, recorded), folder)
  assert {one.seed for one, _ in trainer.calls[made:]} == {1}
  every = {one.task: one.fields["eval_every"] for one, _ in trainer.calls}
  assert every == {"duplicate": 12, "recall": 6}
  assert folder_lib.with_recorded_eval_every(new, {}) is new


def test_a_row_has_one_mechanism(folder, trainer):
  def made(*others, **options):
    wide = {"wide": {"name": "performer", **options}}
    rows = ",".join([*others, "wide"])
    one = small(seeds="0,1", attention=rows, variants=wide)
    run.run(one, folder)
    found = records.read(folder)[0]
    return [r["status"] for r in found if r["attention"] == "wide"]

  def refuse(config):
    if "performer" in str(config):
      raise ConfigError("config.model: not yet")
    return 1

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(plan, "_count", refuse)
    assert made("linear", num_features=2) == [records.UNSUPPORTED] * 2
  # What could not be is forgotten where it can be, with other options too.
  assert made(num_features=4) == [records.DONE] * 2
  assert len(records.planned_runs(folder)) == 4
  with pytest.raises(ConfigError, match=r"wide with .*num_features=4.*, got "):
    made(num_features=8)


def test_seeds_and_rates_are_measured_together_and_nothing_else_is(
  folder, trainer
):
  rates = {"optimizer": {"learning_rate": "1e-3,3e-3"}}
  told = []
  launched(
    small("0,5", across=rates), folder, after=lambda: told.append(len(told))
  )
  launched(small("0", num_steps=13), folder)
  assert trainer.processes == [4, 1]
  assert told == [0]
  found = records.read(folder)[0]
  for record in found:
    has_map = record["measured"]["map"] is not None
    assert has_map == (record["seed"] == 0)
  launched(small("0,5", together="apart", num_steps=14), folder)
  assert trainer.processes[2:] == [1, 1]


def test_what_sentences_are_scored_by_is_in_the_record(folder, trainer):
  one = small()
  home = records.run_workdir(folder, plan.plan(one)[1])
  home.mkdir(parents=True)
  (home / "sentences.json").write_text('{"statistics": [[1, 2], [3, 4]]}')
  launched(one, folder)
  found = by_seed(folder)
  assert found[1]["sentences"] == [[1, 2], [3, 4]]
  assert "sentences" not in found[0]


def test_what_could_not_be_measured_is_measured_again_not_trained(
  folder, trainer, monkeypatch, capsys
):
  def refused(home, **options):
    raise ValueError("no measure")

  with monkeypatch.context() as patch:
    patch.setattr(measurements, "measure_trained", refused)
    launched(small(), folder)
  assert capsys.readouterr().out.count("not measured: no measure") == 2
  for record in records.read(folder)[0]:
    assert ended_as(record) == (records.TRAINED, "measuring: no measure")
  before = by_seed(folder)[1]["seconds"]
  launched(small(), folder)
  assert len(trainer.calls) == 2
  for record in records.read(folder)[0]:
    assert ended_as(record) == (records.DONE, "")
  assert by_seed(folder)[1]["seconds"] == before


def test_what_fails_is_tried_once_more_apart_and_its_time_counts(
  folder, trainer, capsys
):
  def loss(run, step):
    if run.seed == 1:
      time.sleep(0.05)
      raise RunError("it diverged")
    if run.seed == 2:
      raise ConfigError("no such data")
    return 1.0

  trainer.loss = loss
  launched(small("0,1,2,5"), folder)
  assert [run.seed for run, _ in trainer.calls] == [0, 1, 1, 2, 5]
  assert trainer.processes == [2]
  found = by_seed(folder)
  assert found[0]["status"] == found[5]["status"] == records.DONE
  assert ended_as(found[1]) == (records.FAILED, "it diverged")
  assert found[1]["seconds"] > 0.1
  assert ended_as(found[2]) == (records.FAILED, "no such data")
  out = capsys.readouterr().out
  assert out.count("failed: it diverged") == 2
  assert out.count("failed: no such data") == out.count("trying again") == 1
  # With the next call, again.
  trainer.loss = lambda run, step: 1.0
  launched(small("0,1,2,5"), folder)
  assert {r["status"] for r in records.read(folder)[0]} == {records.DONE}


def test_what_a_process_that_measures_leaves_is_measured_apart(
  folder, trainer, monkeypatch, capsys
):
  def ended(command, request=None, watch=None):
    found = trainer.process(command, request, watch)
    return found._replace(code=-9, error="no message") if request else found

  def measured(request):
    """Ends after the first, and never comes to what has seed 3."""
    identities = [x for x in request["trained"] if "-3-" not in x]
    chosen = {x: request["trained"][x] for x in identities[:1]}
    work(request | {"trained": chosen})

  work = worker.work
  monkeypatch.setattr(worker, "work", measured)
  monkeypatch.setattr(process, "run", ended)
  launched(small("0,3,5"), folder)
  found = by_seed(folder)
  assert found[0]["status"] == found[5]["status"] == records.DONE
  reason = "measuring: exit code -9: no message"
  assert ended_as(found[3]) == (records.TRAINED, reason)
  assert reason in capsys.readouterr().out
  # In the group, and those that are left by themselves.
  assert trainer.processes == [3, 1, 1]


def test_a_stopped_run_is_a_record_and_its_time_counts(
  folder, trainer, monkeypatch
):
  def stopped(command, request=None, watch=None):
    time.sleep(0.05)
    used = {"seconds": 0.05, "cpu_seconds": 0.01, "others_cores": 0.0}
    return process.ProcessResult(0, "", used, signal.SIGTERM)

  with monkeypatch.context() as patch:
    patch.setattr(process, "run", stopped)
    with pytest.raises(SystemExit) as info:
      launched(small("0,1"), folder)
  assert info.value.code == 128 + signal.SIGTERM
  (record,) = records.read(folder)[0]
  assert (record["status"], record["seed"]) == (records.STOPPED, 0)
  assert "the same command continues it" in record["reason"]
  launched(small("0,1"), folder)
  assert {r["status"] for r in records.read(folder)[0]} == {records.DONE}
  assert by_seed(folder)[0]["seconds"] >= 0.05 > by_seed(folder)[1]["seconds"]


def test_a_full_disk_is_one_line(folder, trainer, monkeypatch):
  def full(*args, **found):
    raise OSError(28, "No space left on device", "records/x.json.tmp")

  monkeypatch.setattr(records, "write", full)
  with pytest.raises(RunError, match=r"No space left .* continues the compar"):
    launched(small("0"), folder)


def test_what_another_process_makes_has_not_failed(folder, trainer):
  runs = plan.plan(small())
  home = records.run_workdir(folder, runs[1])
  home.mkdir(parents=True)
  with (
    ownership.lock(home),
    pytest.raises(RunError, match="another process writes in"),
  ):
    launch(runs, folder, small())
  assert not trainer.calls
  launch(runs, folder, small())
  assert {r["status"] for r in records.read(folder)[0]} == {records.DONE}


def test_a_variant_of_other_layers_is_another_row(folder, trainer):
  """`run` in a folder whose runs of that name were made with other settings."""

  def hybrid(layers, **changes):
    variants = {"hybrid": {"layers": layers}}
    changes = {"model.num_layers": 2, "model.features": 8, **changes}
    return small("0", attention="hybrid", variants=variants, **changes)

  run.run(hybrid("delta,dense"), folder)
  run.run(hybrid("delta,dense"), folder)
  assert len(trainer.calls) == 1
  with pytest.raises(ConfigError, match=r"\[delta,dense\].*\[delta,linear\]"):
    run.run(hybrid("delta,linear"), folder)
  with pytest.raises(ConfigError, match=r"config\.optimizer\.clip_norm is"):
    run.run(hybrid("delta,dense", **{"optimizer.clip_norm": None}), folder)
  assert len(trainer.calls) == 1


def test_a_budget_of_seconds_is_timed_once_for_all_seeds(
  folder, trainer, monkeypatch
):
  timed = []

  def cost(run):
    timed.append(run)
    return {"step_seconds": 0.25}

  monkeypatch.setattr(measurements, "step_cost", cost)
  launched(
    budgeted(attention="dense", seeds="0,3", budget_seconds=10.0), folder
  )
  for record in records.read(folder)[0]:
    assert "--config.num_steps=40" in record["arguments"]
    assert record["final"]["step"] == 40
  assert len(timed) == 1
  assert len(list((folder / "budgets").iterdir())) == 1


def test_a_process_is_stopped_with_this_one(tmp_path, capsys):
  """It saves itself before this one ends."""
  script = tmp_path / "script.py"
  script.write_text("""
import json, os, pathlib, signal, sys
asked = json.load(sys.stdin)
if asked['end'] == 'broken': sys.exit('it\\nbroke')
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
os.kill(os.getppid(), signal.SIGTERM)
signal.sigwait({signal.SIGTERM})
pathlib.Path(asked['path']).touch()
if asked['end'] == 'abandoned':
  print('stopped before a step', file=sys.stderr, flush=True)
  os._exit(143)
""")
  ended = process.run([str(script)], {"end": "broken"})
  assert ended.fault == "exit code 1: broke"
  assert ended.stop is None
  assert ended.used["peak_bytes"] > 1e6
  handler = signal.getsignal(signal.SIGTERM)
  saved = tmp_path / "saved"
  for word, code, error in (
    ("saved", 0, "no message"),
    ("abandoned", 143, "stopped before a step"),
  ):
    ended = process.run([str(script)], {"end": word, "path": str(saved)})
    assert (ended.code, ended.error) == (code, error)
    assert saved.exists()
    assert signal.getsignal(signal.SIGTERM) == handler
    with pytest.raises(SystemExit) as info:
      ended.end_with_signal()
    assert info.value.code == 128 + signal.SIGTERM
  assert capsys.readouterr().out.splitlines() == [process._STOPPING] * 2


def test_a_run_says_now_and_then_where_it_is(tmp_path, monkeypatch, capsys):
  """By its metrics.jsonl, however its own output is written."""
  now = 0.0
  monkeypatch.setattr(train_run.time, "monotonic", lambda: now)
  [run] = plan.plan(small("0"))
  progress = train_run.Progress(run, tmp_path, 1000)
  told = []
  for step in (0, 100, 200, 300):
    now += 5.0
    line = {"step": step, "split": "train", "seconds": 0.5 * step, "loss": 2.5}
    if step:
      with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n" + '{"step": 1, "spl')
    progress()
    told.append(capsys.readouterr().out)
    text = (tmp_path / "metrics.jsonl").read_text() if step else ""
    if step:
      (tmp_path / "metrics.jsonl").write_text(text.rpartition("\n")[0] + "\n")
  # The first is due after ten seconds, the next ten seconds after it.
  start = f"  {run.identity}: step "
  assert told == [
    "",
    f"{start}100/1000  loss 2.5000  0:07:30 left\n",
    "",
    f"{start}300/1000  loss 2.5000  0:05:50 left\n",
  ]


def test_a_row_is_what_a_person_would_run(tmp_path, monkeypatch):
  [run] = plan.plan(small("3", **{"model.num_layers": 1}))
  script, *rest = train_run.command(run, tmp_path, None, 10)
  root = pathlib.Path(__file__).parents[2]
  assert script == str(root / "train.py")
  assert rest == [*run.arguments, f"--workdir={tmp_path}"]
  assert train_run.command(run, tmp_path, 0.5, 10)[-1] == "--stop_at=5"
  monkeypatch.chdir(tmp_path)
  config = train_run.command(run, tmp_path, None, 10)[1]
  assert config == f"--config={root}/configs/duplicate.py:dense"


@pytest.mark.thorough
def test_a_run_that_diverges_stops_no_other(tmp_path):
  """Real ones: the second diverges, and the third is trained."""
  leaves = {"num_steps": 4, "batch_size": 8, "log_every": 1}
  leaves |= {"task.vocab_size": 16, "task.length": 8, "task.num_pairs": 2}
  leaves |= {"task.eval_size": 8, "model.num_layers": 1}
  leaves |= {"model.features": 16, "model.mlp_features": 16}
  chosen = [
    {"seed": 0},
    {"seed": 1, "optimizer.learning_rate": 1e38},
    {"seed": 2, "optimizer.learning_rate": 3e-3},
    {"seed": 3, "batch_size": 0},
  ]
  runs = [
    Run("recall", "dense", "dense", own["seed"], leaves | own, {}, steps=4)
    for own in chosen
  ]
  one = small("0,1,2,3", tasks="recall")
  launch(runs, tmp_path, one)
  found = by_seed(tmp_path)
  statuses = [found[seed]["status"] for seed in range(4)]
  assert statuses == [records.DONE, records.FAILED] * 2
  assert "not finite" in found[1]["reason"]
  # Of one shape, one is measured.
  first, last = (found[seed]["measured"]["step_seconds"] for seed in (0, 2))
  assert first == last
  assert found[0]["machine"]["device"] == found[0]["measured"]["device"]


def test_shards_that_plan_at_the_same_time_lose_no_run(folder):
  run, *_ = plan.plan(comparison(attention="dense"))
  shards = [
    [run.with_seed(seed) for seed in range(start, 30, 3)] for start in range(3)
  ]

  def add(runs):
    for run in runs:
      records.plan(folder, [run])

  with concurrent.futures.ThreadPoolExecutor(3) as executor:
    list(executor.map(add, shards))
  planned = records.planned_runs(folder).values()
  assert {entry["seed"] for entry in planned} == set(range(30))


def test_the_folder_of_many_layers_has_a_name_that_file_systems_allow():
  label = "+".join(["sliding_window:window=8"] * 20)
  one, other = (
    Run("copy", label, "dense", 0, {"num_steps": steps}, {}) for steps in (1, 2)
  )
  # With ".json" and the ending of a temporary file, at most 255.
  assert len(one.identity) + len(".0123456789abcdef.tmp") <= 255
  assert one.identity != other.identity

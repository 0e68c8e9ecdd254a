"""A running mean of the parameters: what it is, where it lies, who reads it."""

import jax
import numpy as np

from tests.training.fake_task import FakeTask
from tests.training.tiny import Parts, config, make_batch, make_parts
from training import evaluate, experiment, optimizer
from training.checkpoint import digests
from training.devices import mesh, parallel
from training.state import TrainState

DECAY = 0.75


def after(count, **options):
  """The states after each of some steps."""
  parts, state = make_parts(**options)
  states, programs = [state], parts.on()
  for number in range(count):
    state, _ = programs.update(state, make_batch(number))
    states.append(state)
  return states


def test_the_mean_is_that_of_the_parameters_so_far():
  """m ← d m + (1 − d) p by hand, from m = p; the parameters stay what they are."""
  states, others = after(3, ema_decay=DECAY), after(3)
  assert [*map(digests, (x.params for x in states))] == [
    *map(digests, (x.params for x in others))
  ]
  assert others[-1].ema is None
  mean = np.asarray(states[0].params["kernel"], np.float64)
  for state in states[1:]:
    new = np.asarray(state.params["kernel"], np.float64)
    mean = DECAY * mean + (1 - DECAY) * new
    np.testing.assert_allclose(state.ema["kernel"], mean, rtol=1e-6)
  assert abs(mean - new).max() > 1e-4
  assert digests(states[-1].variables["params"]) == digests(states[-1].ema)


def test_evaluation_reads_the_mean():
  parts, _ = make_parts(ema_decay=DECAY)
  state = after(2, ema_decay=DECAY)[-1]
  run = parts.on()

  def loss(params):
    variables = {**state.variables, "params": params}
    steps = run.eval_step, run.mesh
    return evaluate.evaluate(*steps, variables, FakeTask(), "test")["loss"]

  assert loss(state.variables["params"]) == loss(state.ema)
  assert loss(state.ema) != loss(state.params)


def test_the_mean_lies_as_the_parameters_do():
  """Also that of parameters in bfloat16, in float32."""
  task, narrow = {"name": "recall"}, {"param_dtype": "bfloat16"}
  optimizer = {"ema_decay": DECAY}
  run = experiment.create(config("decoder", task, narrow, optimizer=optimizer))
  sizes = mesh.MeshConfig(data=2, fsdp=2, tensor=2)
  devices = Parts.of(run, mesh=sizes).on(8).mesh
  laid = parallel.shardings(devices, run.shapes)
  specs = [
    [leaf.spec for leaf in jax.tree.leaves(tree)]
    for tree in (laid.ema, laid.params)
  ]
  assert specs[0] == specs[1]
  assert {name for spec in specs[0] for name in spec} >= {"fsdp", "tensor"}
  dtypes = [
    {x.dtype.name for x in jax.tree.leaves(tree)}
    for tree in (run.shapes.params, run.shapes.ema)
  ]
  assert dtypes == [{"bfloat16"}, {"float32"}]


def test_the_mean_of_bfloat16_parameters_is_float32():
  """It moves by less than a bfloat16 does; the model is given its own dtype."""
  parts, state = make_parts(ema_decay=0.999)
  params = jax.tree.map(lambda x: x.astype("bfloat16"), state.params)
  state = TrainState.first(
    {"params": params, **state.collections},
    optimizer.make_optimizer(parts.config.optimizer, 10),
    has_ema=True,
  )
  mean = np.asarray(state.params["kernel"], np.float64)
  programs = parts.on()
  for number in range(3):
    state, _ = programs.update(state, make_batch(number))
    new = np.asarray(state.params["kernel"], np.float64)
    mean = 0.999 * mean + 0.001 * new
  assert state.ema["kernel"].dtype == "float32"
  np.testing.assert_allclose(state.ema["kernel"], mean, rtol=1e-6)
  evaluated = state.variables["params"]["kernel"]
  assert evaluated.dtype == "bfloat16"
  np.testing.assert_array_equal(evaluated, mean.astype("bfloat16"))

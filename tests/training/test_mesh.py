"""Meshes of every shape give the numbers of one device, and hold their parts."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import ATTENTIONS
from configs import copy, gpt
import models
from settings.build import build
from settings.errors import ConfigError
from tests import commands
from tests.models import tiny
from tests.tasks.text_cases import TEXT
from training import experiment, experiment_config, mesh, parallel, traffic
from training.checkpoint import Checkpoints
from training.config import TrainConfig
from training.mesh import MeshConfig

MESHES = {
  "data 8": MeshConfig(data=8),
  "data 2, fsdp 4": MeshConfig(data=2, fsdp=4),
  "data 2, fsdp 2, tensor 2": MeshConfig(data=2, fsdp=2, tensor=2),
  "data 2, sequence 4": MeshConfig(data=2, sequence=4),
  "fsdp 2, tensor 2, sequence 2": MeshConfig(fsdp=2, tensor=2, sequence=2),
}
SMALL = {
  "num_layers": 1,
  "num_heads": 4,
  "features": 16,
  "mlp_features": 32,
  "dropout_rate": 0.1,
}


def config_of(attention="dense", **model):
  config = copy.get_config(attention).to_dict()
  for slot in ("encoder_attention", "decoder_attention", "cross_attention"):
    name = config["model"][slot]["name"]
    config["model"][slot] |= tiny.OPTIONS.get(name, {})
  config["model"] |= SMALL | model
  config["task"] |= {"max_length": 10, "vocab_size": 13, "eval_size": 16}
  config["optimizer"] |= {"warmup_steps": 1, "clip_norm": 1.0}
  return config | {"batch_size": 16}


@functools.cache
def made(attention="dense", longest=10):
  config = config_of(attention)
  config["task"]["max_length"] = longest
  return experiment.create(experiment_config.parse(config))


def steps(run, kind, count, chosen, first=None, numbers=range(3)):
  """Losses and gradient norms of some steps, and the state after them."""
  functions = parallel.make(run.functions, kind, jax.devices()[:count], chosen)
  state = functions.place_state(run.init() if first is None else first)
  found = []
  for step in numbers:
    batch = functions.place_batch(run.task.train_batch(step))
    state, metrics = functions.train(state, batch, np.int32(step))
    total, counted = metrics["loss"]
    found.append((float(total / counted), float(metrics["grad_norm"])))
  return np.array(found), state


@functools.cache
def on_one(attention="dense"):
  return steps(made(attention), "jit", 1, MeshConfig())


def usual(names, *chosen):
  """All names, those that are not chosen marked `thorough`."""
  return [
    pytest.param(name, marks=() if name in chosen else pytest.mark.thorough)
    for name in names
  ]


@pytest.mark.parametrize("name", usual(MESHES, *list(MESHES)[-1:]))
def test_losses_and_gradients_are_those_of_one_device(name):
  """With dropout, whose masks are the same; norms are those before clipping."""
  found, state = steps(made(), "jit", 8, MESHES[name])
  expected, one = on_one()
  np.testing.assert_allclose(found, expected, rtol=2e-5)
  for leaf, other in zip(
    jax.tree.leaves(state.params), jax.tree.leaves(one.params), strict=True
  ):
    np.testing.assert_allclose(leaf, other, atol=2e-4)


@pytest.mark.parametrize(
  "attention", usual((name for name in ATTENTIONS if name != "dense"), "lsh")
)
def test_every_mechanism_lies_on_a_mesh(attention):
  chosen = MESHES["data 2, fsdp 2, tensor 2"]
  found, _ = steps(made(attention), "jit", 8, chosen, numbers=range(2))
  expected, _ = steps(made(attention), "jit", 1, MeshConfig(), numbers=range(2))
  np.testing.assert_allclose(found, expected, rtol=2e-4)


@pytest.mark.parametrize(
  "attention",
  usual(
    (name for name in tiny.names("sequence") if name != "dense"), "performer"
  ),
)
def test_every_mechanism_with_a_form_in_parts(attention):
  """Encoder, decoder and across, of lengths that do not split."""
  chosen = MESHES["fsdp 2, tensor 2, sequence 2"]
  # BigBird's blocks lie on one device each: 12 positions, blocks of 2.
  longest = 11 if attention == "bigbird" else 10
  run = made(attention, longest)
  found, _ = steps(run, "jit", 8, chosen, numbers=range(2))
  expected, _ = steps(run, "jit", 1, MeshConfig(), numbers=range(2))
  np.testing.assert_allclose(found, expected, rtol=2e-4)


@pytest.mark.thorough
@pytest.mark.parametrize("name", list(MESHES)[2:])
@pytest.mark.parametrize(
  ("attention", "others"),
  [
    ("gated_delta", {"output_norm": "rms"}),
    (
      "mamba2",
      {
        "output_norm": "rms_joint",
        "short_convolution_bias": True,
        "num_qk_heads": 1,
        "value_dim": 6,
        "mlp_features": 0,
      },
    ),
    ("latent", {"output_norm": "rms", "position": "rotary"}),
  ],
)
def test_what_is_around_recurrences_lies_on_a_mesh(attention, others, name):
  around = {"short_convolution": True, "output_gate": "silu", **others}
  config = experiment_config.parse(config_of(attention, **around))
  run = experiment.create(config)
  found, _ = steps(run, "jit", 8, MESHES[name], numbers=range(2))
  expected, _ = steps(run, "jit", 1, MeshConfig(), numbers=range(2))
  np.testing.assert_allclose(found, expected, rtol=2e-5)


def test_a_length_that_a_mechanism_cannot_split_is_told_first(tmp_path):
  code, out, error = commands.run(
    "train.py",
    "--config=configs/copy.py:bigbird",
    "--config.task.max_length=8",
    "--config.mesh.sequence=2",
    f"--workdir={tmp_path / 'run'}",
    devices=2,
  )
  assert code == 2
  assert "step" not in out.splitlines()[-1]
  assert error.startswith(
    "config.mesh.sequence: attention: the mechanism needs a"
  )
  assert error.count("\n") == 1


def test_attention_is_computed_in_parts(tmp_path):
  """Of a length that splits: keys go round the ring, and nothing is gathered."""
  file = tmp_path / "text.txt"
  file.write_text(TEXT, encoding="utf-8")
  config = gpt.get_config().to_dict()
  config["task"] |= {"path": str(file), "context": 16, "vocab_size": 300}
  config["model"] |= SMALL
  run = experiment.create(experiment_config.parse(config))
  chosen = MeshConfig(data=2, sequence=4)
  made_on = parallel.make(run.functions, "jit", None, chosen)
  lowered = made_on.lower_train(
    run.shapes, made_on.place_batch(run.task.train_batch(0))
  )
  sent = traffic.sent(lowered.compile().as_text())
  assert sent.keys() == {"collective-permute", "all-reduce"}
  expected, _ = steps(run, "jit", 1, MeshConfig(), numbers=range(2))
  found, _ = steps(run, "jit", 8, chosen, numbers=range(2))
  np.testing.assert_allclose(found, expected, rtol=2e-5)


def test_a_device_holds_its_part():
  """Of parameters and of both moments; nothing is copied that can be split."""
  run = made()
  whole = sum(x.size for x in jax.tree.leaves(run.shapes.params))
  for sizes, least in (
    (MeshConfig(data=1, fsdp=8), 8),
    (MeshConfig(data=2, fsdp=4), 4),
    (MeshConfig(data=1, fsdp=4, tensor=2), 5),
    (MeshConfig(data=8), 1),
  ):
    made_on = parallel.make(run.functions, "jit", None, sizes)
    state = made_on.place_state(run.init())
    for tree in (state.params, *_moments(state)):
      held = sum(
        leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves(tree)
      )
      assert whole / 8 <= held <= whole / least * 1.1
    if sizes.tensor == 1:
      continue
    # And so it stays after a step.
    batch = made_on.place_batch(run.task.train_batch(0))
    before = jax.tree.map(lambda leaf: leaf.sharding, state)
    after, _ = made_on.train(state, batch, np.int32(0))
    same = jax.tree.map(
      lambda leaf, sharding: leaf.sharding.is_equivalent_to(
        sharding, leaf.ndim
      ),
      after,
      before,
    )
    assert all(jax.tree.leaves(same))


def _moments(state):
  """The two trees of Adam that are as large as the parameters."""
  shapes = jax.tree.structure(state.params)

  def like(x):
    return jax.tree.structure(x) == shapes

  found = [x for x in jax.tree.leaves(state.opt_state, is_leaf=like) if like(x)]
  assert len(found) == 2
  return found


def gathered(chosen):
  """Shapes of what is gathered in a compiled step, and of the parameters."""
  run = made()
  made_on = parallel.make(run.functions, "jit", None, chosen)
  lowered = made_on.lower_train(
    run.shapes, made_on.place_batch(run.task.train_batch(0))
  )
  text = lowered.compile().as_text()
  found = re.findall(r"= \w+\[([\d,]*)\]\S* all-gather(?:-start)?\(", text)
  shapes = {x.shape for x in jax.tree.leaves(run.shapes.params)}
  return [tuple(map(int, one.split(","))) for one in found if one], shapes


@pytest.mark.parametrize(
  "chosen",
  [
    pytest.param(MeshConfig(data=8), marks=pytest.mark.thorough),
    MeshConfig(data=4, tensor=2),
  ],
)
def test_nothing_is_gathered_along_data_and_tensor(chosen):
  assert gathered(chosen)[0] == []


def test_nothing_is_gathered_but_parameters_along_fsdp():
  """XLA may gather a kernel with its axes in another order."""
  found, shapes = gathered(MeshConfig(data=2, fsdp=4))
  either = shapes | {shape[::-1] for shape in shapes}
  assert found
  assert set(found) <= either


@pytest.mark.parametrize(
  ("chosen", "count"),
  [
    (MESHES["data 8"], 8),
    pytest.param(MeshConfig(fsdp=4), 4, marks=pytest.mark.thorough),
  ],
)
def test_a_run_moves_to_another_mesh(chosen, count, tmp_path):
  """From a checkpoint it goes on as it would have where it began."""
  run = made()
  _, state = steps(run, "jit", 8, MESHES[list(MESHES)[-1]], numbers=range(2))
  checkpoints = Checkpoints(tmp_path)
  checkpoints.save(state, {})
  restored, _ = checkpoints.restore(run.shapes)
  checkpoints.close()
  found, _ = steps(run, "jit", count, chosen, restored, numbers=[2])
  np.testing.assert_allclose(found[0], on_one()[0][2], rtol=2e-5)


def test_rules_split_heads_features_and_ids():
  sizes = {"data": 2, "fsdp": 2, "tensor": 4}
  for path, shape, expected in (
    (
      "params/decoder_0/self_attention/query/kernel",
      (6, 8),
      ("fsdp", "tensor"),
    ),
    ("params/decoder_0/self_attention/out/kernel", (8, 6), ("tensor", "fsdp")),
    (
      "opt_state/1/0/mu/encoder_0/mlp/hidden/kernel",
      (6, 8),
      ("fsdp", "tensor"),
    ),
    ("params/encoder_0/mlp/out/kernel", (8, 6), ("tensor", "fsdp")),
    ("params/encoder_0/mlp/out/bias", (6,), ("fsdp",)),
    ("params/target_embedding/embedding", (12, 6), ("tensor", "fsdp")),
    # What 'tensor' does not divide, and what no rule names.
    ("params/target_embedding/embedding", (13, 6), (None, "fsdp")),
    ("params/target_positions/embedding", (12, 6), ("fsdp", None)),
    ("params/front/kernel", (3, 3, 4, 6), (None, None, None, "fsdp")),
    ("params/encoder_norm/scale", (7,), (None,)),
    ("step", (), ()),
  ):
    assert tuple(mesh.spec(path, shape, sizes)) == expected
  one = mesh.spec("params/encoder_0/mlp/out/kernel", (8, 6), sizes)
  assert tuple(mesh.without_fsdp(one)) == ("tensor", None)


def test_every_large_parameter_has_a_rule():
  """Of a Transformer, all but norms, biases and positions."""
  sizes = {"tensor": 2}
  for kind in ("encoder_decoder", "decoder", "encoder"):
    model = tiny.create(kind, gated=True, position="learned", vocab_size=8)
    variables = jax.eval_shape(
      lambda model=model: models.initialize(
        model, jax.random.key(0), model.example()
      )
    )
    leaves = jax.tree_util.tree_leaves_with_path(variables["params"])
    for path, leaf in leaves:
      name = jax.tree_util.keystr(path, simple=True, separator="/")
      is_split = "tensor" in mesh.spec(name, leaf.shape, sizes)
      is_small = leaf.ndim == 1 or "positions" in name
      odd = "embedding" in name and leaf.shape[0] % 2
      assert is_split or is_small or odd, name


@pytest.mark.parametrize(
  ("sizes", "message"),
  [
    ({"data": 3}, r"^config.mesh.data: expected axes whose product is 8"),
    ({"fsdp": 3}, r"whose product is a divisor of 8, .* data=-1, fsdp=3"),
    ({"data": 2, "fsdp": 2}, r"-1 takes the devices that the others leave"),
    (
      {"tensor": 8},
      r"^config.mesh.tensor: expected a divisor of model.num_heads",
    ),
    ({"data": 8}, r"^config.batch_size: 12 rows do not split over 8 devices"),
    (
      {"data": 2, "fsdp": 4},
      r"over 8 devices × 1 micro-batches; expected a multiple of 8",
    ),
    (
      {"sequence": 2},
      r"^config.mesh.sequence: model.decoder_attention: lsh cannot attend to a",
    ),
  ],
)
def test_meshes_that_do_not_fit(sizes, message):
  model = models.ModelConfig(
    kind="decoder",
    num_layers=1,
    num_heads=4,
    features=16,
    mlp_features=32,
    decoder_attention=models.AttentionConfig("lsh", {}),
  )
  config = TrainConfig(num_steps=1, batch_size=12, mesh=MeshConfig(**sizes))
  with pytest.raises(ConfigError, match=message):
    parallel.check_mesh(config, model)


def test_what_cannot_be_said():
  for leaves, message in (
    ({"mesh": {"data": 0}}, r"^config.mesh.data: expected at least 1, or -1, "),
    ({"mesh": {"fsdp": -1}}, r"^config.mesh.data: expected -1 of one axis at "),
    (
      {"mesh": {"fsdp": 2}, "parallel": "pmap"},
      r"^config.mesh.fsdp: parallel='pmap' splits",
    ),
  ):
    with pytest.raises(ConfigError, match=message):
      build(TrainConfig, {"num_steps": 1, "batch_size": 8, **leaves})


@pytest.mark.thorough
def test_a_command_on_a_mesh(tmp_path):
  """A run on eight devices is continued on four."""
  arguments = [*commands.TINY, f"--workdir={tmp_path / 'run'}"]
  code, out, error = commands.run(
    "train.py",
    *arguments,
    "--config.mesh.fsdp=2",
    "--config.mesh.tensor=2",
    "--config.num_steps=4",
    "--config.optimizer.schedule=constant",
    devices=8,
  )
  assert (code, error) == (0, "")
  assert "8 × cpu" in out
  code, out, error = commands.run(
    "train.py",
    *arguments,
    "--config.mesh.fsdp=4",
    "--config.num_steps=8",
    "--config.optimizer.schedule=constant",
    devices=4,
  )
  assert (code, error) == (0, "")
  assert "continues from the checkpoint of step 4" in out


def test_a_command_tells_faults_of_a_mesh_and_describes_one():
  code, _, error = commands.run(
    "train.py", *commands.TINY, "--config.mesh.tensor=4", devices=4
  )
  assert code == 2
  assert error.startswith("config.mesh.tensor: expected a divisor of")
  assert error.count("\n") == 1
  code, out, error = commands.run_module(
    "training.describe", *commands.TINY, "--devices=8", "--config.mesh.fsdp=8"
  )
  assert (code, error) == (0, "")
  assert "mesh: data 1 × fsdp 8 × tensor 1 × sequence 1" in out
  parts = dict(re.findall(r"^\| ([\w' ,]+) \| ([\d.]+) \w+ \|", out, re.M))
  assert {"parameters", "optimiser's state", "together"} <= set(parts)


def test_remat_keeps_the_input_of_a_layer_alone():
  """The same loss and gradient; what is kept for the backward pass is counted."""
  kept, found = {}, {}
  for remat in ("none", "block"):
    model = tiny.create("decoder", num_layers=4, remat=remat)
    ids = np.ones((2, tiny.MAX_LENGTH), np.int32)
    batch = {"inputs": ids * np.arange(1, 3)[:, None]}
    variables = tiny.initialized(model)

    def loss(params, model=model, batch=batch):
      logits = models.forward(
        model, {"params": params}, batch, dropout_rng=jax.random.key(1)
      )
      return jnp.sum(logits**2)

    # What the linear part of a derivative has as constants.
    linear = jax.eval_shape(
      lambda params, loss=loss: jax.linearize(loss, params)[1],
      variables["params"],
    )
    kept[remat] = sum(
      x.size for x in jax.tree.leaves(linear) if hasattr(x, "shape")
    )
    found[remat] = jax.jit(jax.value_and_grad(loss))(variables["params"])
  assert kept["block"] < 0.5 * kept["none"], kept
  for one, other in zip(
    *(jax.tree.leaves(found[remat]) for remat in found), strict=True
  ):
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)

"""Meshes of every shape give the numbers of one device, and hold their parts."""

import functools
import math
import re
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import ATTENTIONS, Dims
from attention import mechanism as mechanisms
from configs import copy
import models
from models.mechanism_variables import variable_shapes
from settings.build import build
from settings.errors import ConfigError
from tests import commands
from tests.attention.forms import thorough
from tests.models import tiny
from tests.training.tiny import Parts, drawn
from training import experiment, experiment_config, loop
from training.checkpoint import Checkpoints
from training.config import OptimizerConfig, TrainConfig
from training.devices import hlo, mesh, parallel
from training.devices.mesh import MeshConfig

MESHES = {
  "one": MeshConfig(),
  "data 8": MeshConfig(data=8),
  "data 4, tensor 2": MeshConfig(data=4, tensor=2),
  "data 2, fsdp 4": MeshConfig(data=2, fsdp=4),
  "data 2, fsdp 2, tensor 2": MeshConfig(data=2, fsdp=2, tensor=2),
  "data 2, sequence 4": MeshConfig(data=2, sequence=4),
  "fsdp 2, tensor 2, sequence 2": MeshConfig(fsdp=2, tensor=2, sequence=2),
}
ALL = list(MESHES)[-1]
TASKS = {
  # Lengths that do not split; 'recall' has one that does.
  "encoder_decoder": {"name": "copy", "max_length": 10, "vocab_size": 13},
  "decoder": {"name": "copy", "max_length": 10, "vocab_size": 13},
  # BigBird's blocks lie on one device each: 12 positions, blocks of 2.
  "encoder": {"name": "copy", "max_length": 12, "vocab_size": 13},
  "recall": {"name": "recall", "length": 16, "num_pairs": 2, "vocab_size": 16},
}


@functools.cache
def made(attention="dense", kind="encoder_decoder", around=()):
  """A small run; `around` has (field of the model, value)."""
  slots = ["encoder_attention", "decoder_attention", "cross_attention"]
  model_kind = "decoder" if kind == "recall" else kind
  if model_kind != "encoder_decoder":
    slots = [f"{model_kind}_attention"]
  option = {"name": attention, **tiny.OPTIONS.get(attention, {})}
  model = {
    **{"kind": model_kind, "num_layers": 1, "num_heads": 4, "features": 16},
    **{"mlp_features": 32, "dropout_rate": 0.1, **dict.fromkeys(slots, option)},
  }
  config = {
    **{"num_steps": 3, "batch_size": 16, "model": model | dict(around)},
    "task": TASKS[kind] | {"eval_size": 16},
    "optimizer": {"warmup_steps": 1, "clip_norm": 1.0},
  }
  return experiment.create(experiment_config.parse(config))


@functools.cache
def compiled(mesh_name, *run):
  """The steps of a run on a mesh; each is compiled once for all tests."""
  parts = Parts.of(made(*run), mesh=MESHES[mesh_name])
  return parts.on(1 if mesh_name == "one" else 8)


def take(programs, run, state, numbers):
  """Losses and gradient norms of some steps, and the state after them."""
  found = []
  for step in numbers:
    state, metrics = programs.train(state, run.task.train_batch(step))
    total, counted = metrics["loss"]
    found.append((float(total / counted), float(metrics["grad_norm"])))
  return np.array(found), state


@functools.cache
def steps(mesh_name, *run, count=2):
  """The same of the first steps of a run."""
  programs, run = compiled(mesh_name, *run), made(*run)
  return take(programs, run, programs.place(drawn(run)), range(count))


def assert_as_on_one(mesh_name, *run, rtol):
  found, expected = steps(mesh_name, *run)[0], steps("one", *run)[0]
  np.testing.assert_allclose(found, expected, rtol=rtol)


@pytest.mark.parametrize(
  "name", [*thorough(*((name,) for name in list(MESHES)[1:-1])), ALL]
)
def test_losses_and_gradients_are_those_of_one_device(name):
  """With dropout, whose masks are the same; norms are those before clipping."""
  assert_as_on_one(name, rtol=2e-5)
  params = steps(name)[1].params, steps("one")[1].params
  chex.assert_trees_all_close(*params, rtol=1e-7, atol=2e-4)


AROUND = {"short_convolution": True, "output_gate": "silu"}
CASES = {
  "gated_delta": {"output_norm": "rms"},
  "mamba2": {
    **{"output_norm": "rms_joint", "short_convolution_bias": True},
    **{"num_qk_heads": 1, "value_dim": 6, "mlp_features": 0},
  },
  "latent": {"output_norm": "rms", "position": "rotary"},
}
"""What a model may have around a mechanism."""


@pytest.mark.parametrize(
  ("attention", "around"),
  [
    ("performer", {}),
    *thorough(
      *((x, {}) for x in ATTENTIONS if x not in ("dense", "performer")),
      *((name, AROUND | own) for name, own in CASES.items()),
    ),
  ],
)
def test_every_mechanism_lies_on_a_mesh(attention, around):
  """In parts of a length that does not split, where it has such a form."""
  supports = tiny.attention(attention).build().supports
  kind = "decoder" if "causal" in supports else "encoder"
  mesh_name = ALL if "sequence" in supports else "data 2, fsdp 2, tensor 2"
  assert_as_on_one(mesh_name, attention, kind, tuple(around.items()), rtol=2e-4)


def test_a_length_that_a_mechanism_cannot_split_is_told_first(tmp_path):
  config = copy.get_config("bigbird").to_dict()
  config["task"]["max_length"] = 8
  config["mesh"] = {"sequence": 2}
  config["model"] |= {"num_layers": 1, "features": 16, "mlp_features": 32}
  run = experiment.create(experiment_config.parse(config))
  with pytest.raises(ConfigError, match=r"^config.mesh.sequence: attention"):
    loop.run(run, tmp_path)


def lowered(*run):
  """A compiled step, as text."""
  programs, run = compiled(*run), made(*run[1:])
  batch = parallel.place_batch(programs.mesh, run.task.train_batch(0))
  shapes = laid_out(programs.mesh, run.shapes)
  return programs.step.lower(shapes, batch).compile().as_text()


def laid_out(mesh, shapes):
  """Shapes with their shardings on a mesh."""
  return parallel.with_shardings(shapes, parallel.shardings(mesh, shapes))


def test_attention_is_computed_in_parts():
  """Of a length that splits: keys go round the ring, and nothing is gathered."""
  case = ("data 2, sequence 4", "dense", "recall")
  sent = hlo.bytes_sent(lowered(*case))
  assert sent.keys() == {"collective-permute", "all-reduce"}
  assert_as_on_one(*case, rtol=2e-5)


@pytest.mark.parametrize(
  ("sizes", "least"),
  [
    (MeshConfig(data=1, fsdp=8), 8),
    (MeshConfig(data=2, fsdp=4), 4),
    (MeshConfig(data=1, fsdp=4, tensor=2), 5),
    (MeshConfig(data=8), 1),
  ],
)
def test_a_device_holds_its_part(sizes, least):
  """Of parameters and of both moments; nothing is copied that can be split."""
  run = made()
  whole = sum(x.size for x in jax.tree.leaves(run.shapes.params))
  state = laid_out(Parts.of(run, mesh=sizes).on(8).mesh, run.shapes)
  shapes = jax.tree.structure(state.params)

  def like(x):
    return jax.tree.structure(x) == shapes

  moments = [
    x for x in jax.tree.leaves(state.opt_state, is_leaf=like) if like(x)
  ]
  assert len(moments) == 2
  for tree in (state.params, *moments):
    held = sum(
      math.prod(leaf.sharding.shard_shape(leaf.shape))
      for leaf in jax.tree.leaves(tree)
    )
    assert whole / 8 <= held <= whole / least * 1.1


def test_a_state_lies_where_it_is_placed_and_stays_there():
  programs = compiled(ALL)
  run = made()
  for state in (programs.place(drawn(run)), steps(ALL)[1]):
    same = jax.tree.map(
      lambda leaf, placed: leaf.sharding.is_equivalent_to(
        placed.sharding, leaf.ndim
      ),
      state,
      laid_out(programs.mesh, run.shapes),
    )
    assert all(jax.tree.leaves(same))


def gathered(*run):
  """Shapes of what is gathered in a compiled step."""
  found = re.findall(
    r"= \w+\[([\d,]*)\]\S* all-gather(?:-start)?\(", lowered(*run)
  )
  return [tuple(map(int, one.split(","))) for one in found if one]


@pytest.mark.parametrize("name", [*thorough(("data 8",)), "data 4, tensor 2"])
def test_nothing_is_gathered_along_data_and_tensor(name):
  assert gathered(name, "dense", "decoder") == []


def test_nothing_is_gathered_but_parameters_along_fsdp():
  """XLA may gather a kernel with its axes in another order."""
  found = gathered("data 2, fsdp 4")
  shapes = {x.shape for x in jax.tree.leaves(made().shapes.params)}
  assert found
  assert set(found) <= shapes | {shape[::-1] for shape in shapes}


def test_a_run_moves_to_another_mesh(tmp_path):
  """From a checkpoint it goes on as it would have where it began."""
  run = made()
  checkpoints = Checkpoints(tmp_path, run.config.train)
  checkpoints.save(steps(ALL)[1], {})
  restored, _ = checkpoints.restore(run.shapes)
  checkpoints.close()
  other = compiled("data 2, fsdp 4")
  found, _ = take(other, run, other.place(restored), [2])
  expected, _ = steps("one", count=3)
  np.testing.assert_allclose(found[0], expected[2], rtol=2e-5)


def test_rules_split_heads_features_and_ids():
  sizes = {"data": 2, "fsdp": 2, "tensor": 4}
  attention, mlp = "decoder_0/self_attention", "encoder_0/mlp"
  for path, shape, expected in (
    (f"params/{attention}/query/kernel", (6, 8), ("fsdp", "tensor")),
    (f"params/{attention}/out/kernel", (8, 6), ("tensor", "fsdp")),
    (f"opt_state/1/0/mu/{mlp}/hidden/kernel", (6, 8), ("fsdp", "tensor")),
    (f"params/{mlp}/out/kernel", (8, 6), ("tensor", "fsdp")),
    (f"params/{mlp}/out/bias", (6,), ("fsdp",)),
    ("params/target_embedding/embedding", (12, 6), ("tensor", "fsdp")),
    # What 'tensor' does not divide, and what no rule names.
    ("params/target_embedding/embedding", (13, 6), (None, "fsdp")),
    ("params/target_positions/embedding", (12, 6), ("fsdp", None)),
    ("params/front/kernel", (3, 3, 4, 6), (None, None, "fsdp", None)),
    ("params/encoder_norm/scale", (7,), (None,)),
    ("params/front/kernel", (0, 6), (None, "fsdp")),
    ("step", (), ()),
  ):
    assert tuple(mesh.spec(path, shape, sizes)) == expected
  one = mesh.spec(f"params/{mlp}/out/kernel", (8, 6), sizes)
  assert tuple(mesh.without_fsdp(one)) == ("tensor", None)


def test_each_rule_splits_its_axis():
  """What reads heads or hidden features has them last, what writes them first."""
  attention, mlp = "decoder_0/self_attention/attention", "decoder_0/mlp"
  heads = ("query", "key", "value")
  for names, ndim, axis in (
    ([f"{attention}/{x}/kernel" for x in (*heads, "position")], 2, 1),
    ([f"{attention}/global_{x}/kernel" for x in (*heads, "position")], 2, 1),
    ([f"{attention}/{x}/bias" for x in heads], 1, 0),
    ([f"{attention}/global_{x}/bias" for x in heads], 1, 0),
    ([f"{attention}/{x}_short_convolution/kernel" for x in heads], 2, 1),
    ([f"{attention}/{x}_short_convolution/bias" for x in heads], 1, 0),
    ([f"{attention}/out/kernel"], 2, 0),
    ([f"{attention}/out_down"], 3, 0),
    ([f"{attention}/{x}_up" for x in ("query", "key_value")], 3, 1),
    (
      [f"{attention}/{x}_kernel" for x in ("erase", "write", "level", "gate")],
      *(3, 1),
    ),
    ([f"{attention}/other_{x}_kernel" for x in ("key", "value")], 4, 2),
    ([f"{mlp}/{x}/kernel" for x in ("hidden", "gate")], 2, 1),
    ([f"{mlp}/{x}/bias" for x in ("hidden", "gate")], 1, 0),
    ([f"{mlp}{x}/out/kernel" for x in ("", "_2", "/shared")], 2, 0),
    ([f"{mlp}/{x}_kernel" for x in ("hidden", "gate", "out")], 3, 0),
    ([f"{mlp}/{x}_bias" for x in ("hidden", "gate", "out")], 2, 0),
    (
      [f"{x}_embedding/embedding" for x in ("source", "target", "output")],
      *(2, 0),
    ),
  ):
    expected = ["tensor" if i == axis else None for i in range(ndim)]
    for name in names:
      found = mesh.spec(f"params/{name}", (2,) * ndim, {"tensor": 2})
      assert [*found] == expected, name


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


@pytest.mark.parametrize("name", ATTENTIONS)
def test_what_a_mechanism_makes_for_each_head_lies_with_it(name):
  """All that is as large as a projection; of it, the axis that grows with the heads."""
  heads = 16

  def variables(num_heads):
    dims = Dims(num_heads, num_heads, 64, 2048, 1024, 64)
    shapes = variable_shapes(mechanisms.example(name), dims)
    leaves = jax.tree_util.tree_leaves_with_path(shapes.get("params", {}))
    return {
      jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape
      for path, leaf in leaves
    }

  more = variables(2 * heads)
  for leaf, shape in variables(heads).items():
    path = f"params/decoder_0/self_attention/attention/{leaf}"
    entries = mesh.spec(path, shape, {"tensor": 2})
    grows = [x != y for x, y in zip(shape, more[leaf], strict=True)]
    is_large = any(grows) and math.prod(shape) >= 1024 * heads * 64 // 4
    split = [x == "tensor" for x in entries]
    if any(split) or is_large:
      assert split == grows, path


@pytest.mark.parametrize(
  ("sizes", "message"),
  [
    ({"data": 3}, r"^config.mesh.data: expected axes whose product is 8"),
    ({"fsdp": 3}, r"whose product is a divisor of 8, .* data=-1, fsdp=3"),
    ({"data": 2, "fsdp": 2}, r"-1 means all remaining devices"),
    ({"tensor": 8}, "^config.mesh.tensor: expected a divisor"),
    ({"data": 8}, r"^config.batch_size: 12 rows do not split over 8 devices"),
    (
      {"data": 2, "fsdp": 4, "accumulate_steps": 2},
      "over 8 devices × 2 micro-batches; expected a multiple of 16",
    ),
    (
      {"tensor": 2, "accumulate_steps": 2},
      r"over 4 devices \(mesh.data=4 × mesh.fsdp=1\) × 2 micro-batches; expected a "
      "multiple of 8",
    ),
    ({"sequence": 2}, "^config.mesh.sequence: model.decoder_attention: lsh"),
  ],
)
def test_meshes_that_do_not_fit(sizes, message):
  widths = {"num_layers": 1, "num_heads": 4, "features": 16, "mlp_features": 32}
  lsh = models.AttentionConfig("lsh", {})
  model = models.ModelConfig(kind="decoder", decoder_attention=lsh, **widths)
  steps = {"accumulate_steps": sizes.pop("accumulate_steps", 1)}
  config = TrainConfig(
    num_steps=1,
    batch_size=12,
    mesh=MeshConfig(**sizes),
    optimizer=OptimizerConfig(**steps),
  )
  with pytest.raises(ConfigError, match=message):
    parallel.check_mesh(config, model)


@pytest.mark.parametrize(
  ("field", "value"),
  [
    *(("num_heads", 6), ("kv_heads", 2), ("mlp_features", 10)),
    ("mlp_features", (8, 10)),
  ],
)
def test_each_number_of_a_model_that_tensor_splits(field, value):
  """Also of a layer that differs from the first."""
  sizes = {"num_heads": 8, "kv_heads": None, "mlp_features": (8, 0)}
  layers = [types.SimpleNamespace(**sizes) for _ in range(2)]
  model = types.SimpleNamespace(cycle=layers)
  mesh.check_model(MeshConfig(tensor=4), model)
  setattr(layers[1], field, value)
  told = re.escape(f"expected a divisor of model.{field} {value}, got 4")
  with pytest.raises(ValueError, match=f"^tensor: {told}$"):
    mesh.check_model(MeshConfig(tensor=4), model)


def test_what_cannot_be_said():
  for leaves, message in (
    ({"mesh": {"data": 0}}, r"^config.mesh.data: expected at least 1, or -1, "),
    ({"mesh": {"fsdp": -1}}, r"^config.mesh.data: expected -1 of one axis at "),
    ({"mesh": {"fsdp": 2}, "parallel": "pmap"}, "^config.mesh.fsdp"),
  ):
    with pytest.raises(ConfigError, match=message):
      build(TrainConfig, {"num_steps": 1, "batch_size": 8, **leaves})


def test_a_command_describes_a_mesh():
  code, out, error = commands.run_module(
    "training.commands.describe",
    *commands.TINY,
    "--devices=8",
    "--config.mesh.fsdp=8",
  )
  assert (code, error) == (0, "")
  assert "mesh: data 1 × fsdp 8 × tensor 1 × sequence 1" in out
  rows = dict(re.findall(r"^\| ([\w' ,]+) \| (.* \w+) \|", out, re.M))
  assert {"parameters", "optimiser's state", "sum"} <= set(rows)
  units = {"B": 1, "KiB": 2**10, "MiB": 2**20}
  held, whole = (
    float(size) * units[unit]
    for size, unit in map(str.split, rows["parameters"].split(" | "))
  )
  assert 1.0 <= 8 * held / whole < 1.5
  # Adam's two moments, and three numbers of the schedule.
  moments, _ = rows["optimiser's state"].split(" | ")
  size, unit = moments.split()
  assert float(size) * units[unit] == pytest.approx(2 * held, rel=0.02)


def test_remat_keeps_the_input_of_a_layer_alone():
  """The same gradient; what is kept for the backward pass is counted."""
  kept, found = {}, {}
  batch = {"inputs": np.ones((2, tiny.MAX_LENGTH), np.int32)}
  for remat in ("none", "block"):
    model = tiny.create("decoder", num_layers=2, remat=remat)
    params = tiny.initialized(model)["params"]

    def loss(params, model=model):
      logits = models.forward(
        model, {"params": params}, batch, dropout_rng=jax.random.key(1)
      )
      return jnp.sum(logits**2)

    # What the linear part of a derivative has as constants.
    linear = jax.eval_shape(lambda x: jax.linearize(loss, x)[1], params)
    kept[remat] = sum(
      x.size for x in jax.tree.leaves(linear) if hasattr(x, "shape")
    )
    found[remat] = jax.jit(jax.grad(loss))(params)
  assert kept["block"] < 0.5 * kept["none"], kept
  chex.assert_trees_all_close(*found.values(), rtol=1e-5, atol=1e-5)

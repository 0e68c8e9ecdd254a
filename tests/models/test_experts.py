"""Experts: the sum over all of them, transformers' layers, training, decoding."""

import functools
import pathlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from models import nested
from models.config import ModelConfig
from models.experts import Experts, load_balance
from models.mlp_config import MlpConfig
from tests.models import tiny
from tests.refusals import assert_refused
from training.devices import parallel
from training.devices.mesh import MeshConfig, shardings

VECTORS = pathlib.Path(__file__).parent / "experts.npz"
FEATURES, WIDTH = 10, 7
GATED = {"gated": True, "activation": "silu", "mlp_bias": False}
ROUTED = {"experts_per_token": 3, "groups_per_token": 2, "selection_bias": True}
ROUTED |= {"router_scores": "sigmoid", "routed_scale": 2.5}
SLOPED = {"gate_limit": 0.8, "gate_offset": 1.0}
CASES = {
  "softmax": {**GATED, "num_experts": 5, "experts_per_token": 2},
  "one": {"num_experts": 4, "normalize_weights": False, "router_bias": True},
  # More experts than choices: some get no token.
  "groups": {
    **{**GATED, **ROUTED, "num_experts": 28, "expert_groups": 7},
    "shared_features": 6,
  },
  "square_roots": {
    **{**GATED, "num_experts": 6, "experts_per_token": 2},
    **{"router_scores": "sqrt_softplus", "selection_bias": True},
  },
  "biases": {
    **{"gated": True, "activation": "silu", **SLOPED, "gate_slope": 1.7},
    **{"num_experts": 3, "experts_per_token": 3},
    **{"shared_features": 4, "shared_gate": True},
  },
}
# Of transformers: experts by groups with a bias of the choice and a shared network;
# weights that do not sum to 1 and a gate of the shared network; biases, limits and
# a gate of another slope. Routers of the first two compute in float32.
LAYERS = {
  "deepseek": (
    {**ROUTED, "num_experts": 12, "expert_groups": 4, "shared_features": 14},
    2e-6,
  ),
  "qwen": (
    {
      **{"num_experts": 6, "experts_per_token": 2, "normalize_weights": False},
      **{"shared_features": 5, "shared_gate": True},
    },
    2e-6,
  ),
  "gpt_oss": (
    {
      **{"num_experts": 5, "experts_per_token": 3, "expert_features": 9},
      **{"router_bias": True, "mlp_bias": True, "gate_slope": 1.3, **SLOPED},
    },
    1e-12,
  ),
}


def make(dtype="float32", **fields):
  config = nested.make(
    ModelConfig,
    kind="decoder",
    num_layers=1,
    num_heads=2,
    features=FEATURES,
    mlp_features=3,
    dtype=dtype,
    param_dtype=dtype,
    **{"expert_features": WIDTH, **fields},
  )
  return Experts(config, 1.0)


@functools.partial(jax.jit, static_argnums=0)
def apply(layer, variables, x):
  return layer.apply(variables, x)


def drawn(layer, shape=(2, 7), dtype="float32"):
  """Variables away from 0, and inputs."""
  rng = np.random.default_rng(0)
  x = rng.standard_normal((*shape, FEATURES))
  variables = jax.eval_shape(layer.init, jax.random.key(0), x)

  def draw(path, leaf):
    fan_in = leaf.shape[-2] if "kernel" in path[-1].key else 9.0
    return jnp.asarray(
      1.5 * rng.standard_normal(leaf.shape) / fan_in**0.5, dtype
    )

  variables = jax.tree_util.tree_map_with_path(draw, variables)
  return variables, jnp.asarray(x, dtype)


def network(config, params, x, expert=None):
  """One network; of all experts by number, or by Dense."""
  own = config.mlp

  def project(name, x):
    if expert is None:
      kernel, bias = params[name]["kernel"], params[name].get("bias")
    else:
      kernel = params[f"{name}_kernel"][expert]
      bias = params.get(f"{name}_bias")
      bias = bias if bias is None else bias[expert]
    return x @ kernel + (0.0 if bias is None else bias[None, None])

  hidden = project("hidden", x)
  if not config.gated:
    return project("out", jax.nn.relu(hidden))
  gate, limit = project("gate", x), own.gate_limit or jnp.inf
  gate = jnp.minimum(gate, limit)
  hidden = jnp.maximum(jnp.minimum(hidden, limit), -limit) + own.gate_offset
  gate = gate * jax.nn.sigmoid(own.gate_slope * gate)
  return project("out", gate * hidden)


def router_scores(config, variables, x):
  params = variables["params"]["router"]
  logits = x @ params["kernel"]
  if config.mlp.router_bias:
    logits = logits + params["bias"][None, None]
  if config.mlp.router_scores == "softmax":
    return jnp.exp(logits) / jnp.exp(logits).sum(-1, keepdims=True)
  if config.mlp.router_scores == "sqrt_softplus":
    return jnp.sqrt(jnp.log1p(jnp.exp(logits)))
  return 1 / (1 + jnp.exp(-logits))


def chosen_experts(config, variables, x):
  """1 for the experts of each token, 0 for all others."""
  own = config.mlp
  scores = np.array(router_scores(config, variables, x))
  if own.selection_bias:
    scores = scores + np.array(variables["constants"]["selection_bias"])
  chosen = np.zeros(scores.shape)
  for place in np.ndindex(*x.shape[:2]):
    values = scores[place].reshape(own.expert_groups, -1)
    sums = np.sort(values, axis=1)[:, -2:].sum(axis=1)
    values[np.argsort(sums)[: own.expert_groups - own.groups_per_token]] = -9
    best = np.argsort(values.reshape(-1))[-own.experts_per_token :]
    chosen[place][best] = 1
  return chosen


def definition(config, variables, x, chosen):
  """Every expert computes every token, with a weight of 0 if it is not chosen."""
  own, params = config.mlp, variables["params"]
  weights = router_scores(config, variables, x) * chosen
  if own.normalize_weights:
    weights = weights / weights.sum(-1, keepdims=True)
  out = sum(
    own.routed_scale
    * weights[..., expert, None]
    * network(config, params, x, expert)
    for expert in range(own.num_experts)
  )
  if own.shared_features:
    shared = network(config, params["shared"], x)
    if own.shared_gate:
      shared *= jax.nn.sigmoid(x @ params["shared_gate"]["kernel"])
    out += shared
  return out


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_the_sum_over_all(case):
  with jax.enable_x64(True):
    layer = make("float64", **CASES[case])
    variables, x = drawn(layer, dtype="float64")
    chosen = chosen_experts(layer.config, variables, x)
    expected = definition(layer.config, variables, x, chosen)
    np.testing.assert_allclose(apply(layer, variables, x), expected, atol=1e-12)
    if case == "groups":
      assert not chosen.any(axis=(0, 1)).all()  # Some experts have no tokens.

    def loss(out):
      return jnp.sum(jnp.sin(out))

    def gradients(function):
      return jax.grad(lambda v, x: loss(function(v, x)), (0, 1))(variables, x)

    got = jax.jit(lambda: gradients(layer.apply))()
    wanted = gradients(lambda v, x: definition(layer.config, v, x, chosen))
    chex.assert_trees_all_close(got, wanted, rtol=1e-7, atol=1e-11)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_dtypes(dtype):
  layer = make(dtype, **CASES["groups"])
  variables, x = drawn(layer, (3, 11), dtype)
  out = apply(layer, variables, x)
  assert out.dtype == dtype
  np.testing.assert_allclose(
    out.astype("float32"),
    layer.apply(variables, x).astype("float32"),
    atol=0.0 if dtype == "float32" else 0.05,
    rtol=1e-5,
  )
  with jax.enable_x64(True):
    exact = make("float64", **CASES["groups"])
    variables, x = jax.tree.map(
      lambda leaf: leaf.astype("float64"), (variables, x)
    )
    chosen = chosen_experts(exact.config, variables, x)
    expected = definition(exact.config, variables, x, chosen)
  tolerance = 1e-5 if dtype == "float32" else 0.05
  scale = np.abs(expected).max()
  np.testing.assert_allclose(
    np.asarray(out, np.float64), expected, atol=tolerance * scale
  )


def test_a_token_has_no_effect_on_others():
  layer = make(**CASES["groups"])
  variables, x = drawn(layer)
  out = apply(layer, variables, x)
  changed = apply(layer, variables, x.at[1, 3].set(jnp.nan))
  np.testing.assert_array_equal(changed[0], out[0])
  assert np.isnan(changed[1, 3]).all()
  np.testing.assert_array_equal(
    np.delete(changed[1], 3, 0), np.delete(out[1], 3, 0)
  )
  alone = [apply(layer, variables, x[:1, i : i + 1]) for i in range(x.shape[1])]
  np.testing.assert_allclose(np.concatenate(alone, 1), out[:1], atol=1e-6)


def kernels(x):
  """PyTorch's gate and up projections, concatenated, as ours."""
  gate, hidden = np.split(np.swapaxes(x, -1, -2), 2, axis=-1)
  return gate, hidden


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_of_transformers(name):
  """Its output, with its weights."""
  fields, tolerance = LAYERS[name]
  with np.load(VECTORS) as arrays:
    theirs = {
      path.removeprefix(f"{name}."): arrays[path]
      for path in arrays
      if path.startswith(f"{name}.")
    }
    x, expected = arrays[f"{name}/inputs"], arrays[f"{name}/out"]
  params, constants = {}, {}
  both = theirs.pop("experts.gate_up_proj")
  down = theirs.pop("experts.down_proj")
  if name == "gpt_oss":
    params |= {"gate_kernel": both[..., ::2], "hidden_kernel": both[..., 1::2]}
    params["out_kernel"] = down
    biases = theirs.pop("experts.gate_up_proj_bias")
    params |= {"gate_bias": biases[:, ::2], "hidden_bias": biases[:, 1::2]}
    params["out_bias"] = theirs.pop("experts.down_proj_bias")
    params["router"] = {
      "kernel": theirs.pop("router.weight").T,
      "bias": theirs.pop("router.bias"),
    }
  else:
    params["gate_kernel"], params["hidden_kernel"] = kernels(both)
    params["out_kernel"] = np.swapaxes(down, 1, 2)
    params["router"] = {"kernel": theirs.pop("gate.weight").T}
    if name == "deepseek":
      bias = theirs.pop("gate.e_score_correction_bias")
      constants["selection_bias"] = bias
    else:
      gate = theirs.pop("shared_expert_gate.weight")
      params["shared_gate"] = {"kernel": gate.T}
    shared = "shared_expert" + "s" * (name == "deepseek")
    params["shared"] = {
      ours: {"kernel": theirs.pop(f"{shared}.{one}_proj.weight").T}
      for one, ours in (("gate", "gate"), ("up", "hidden"), ("down", "out"))
    }
  assert not theirs
  with jax.enable_x64(True):
    layer = make("float64", **{**GATED, **fields})
    out = apply(layer, {"params": params, "constants": constants}, x)
  np.testing.assert_allclose(
    out, expected, atol=tolerance * np.abs(expected).max()
  )


@pytest.mark.parametrize("case", ["all", "masked"])
def test_the_loss_is_that_of_transformers_over_k(case):
  """Over k, so that it is 1 where all experts are chosen equally often."""
  with np.load(VECTORS) as arrays:
    logits, mask = arrays["loss/logits"], arrays["loss/mask"].reshape(-1)
    expected = arrays[f"loss/{case}"] / 2
  scores = jax.nn.softmax(jnp.asarray(logits, jnp.float32))
  experts = jax.lax.top_k(scores, 2)[1]
  got = load_balance(scores, experts, mask if case == "masked" else None)
  np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_the_loss_of_even_choices_is_one():
  scores = jnp.full((6, 3), 0.2)
  experts = jnp.asarray([[0], [1], [2]] * 2)
  assert load_balance(scores, experts) == pytest.approx(1.0)
  assert load_balance(scores, 0 * experts) == pytest.approx(1.0)
  uneven = jnp.asarray([[0.8, 0.1, 0.1]] * 6)
  assert load_balance(uneven, 0 * experts) == pytest.approx(2.4)


def decoder(**fields):
  fields = {"num_heads": 2, "features": FEATURES, "num_layers": 2} | fields
  return tiny.create("decoder", **fields)


def test_decoding_token_by_token():
  layers = {"decoder_around": (models.AroundConfig(num_experts=0),) * 1}
  for others in ({}, layers):
    model = decoder(**CASES["groups"], **others)
    own, batch = variables(model), tiny.batch()
    assert ("router" in str(jax.tree.structure(own))) != bool(others)
    expected = tiny.forward(model, own, batch)
    got = tiny.step_by_step(model, own, {"inputs": batch["inputs"]})
    np.testing.assert_allclose(got, expected, atol=1e-5)


def variables(model):
  return tiny.initialize(model, jax.random.key(0), tiny.batch())


def test_training_sows_the_loss_of_every_layer_without_padding():
  model = decoder(**CASES["softmax"], balance_loss=0.3)
  own, batch = variables(model), tiny.batch()
  mask = np.arange(8)[None] < np.array([[8], [5], [2]])

  def losses(batch):
    _, new = models.forward_and_state(model, own, batch, dropout_rng=None)
    return jax.tree.leaves(new["losses"])

  got = losses({**batch, "inputs_mask": mask})
  assert len(got) == 2
  assert all(0.3 * 0.9 < loss < 0.3 * 5 for loss in got)
  # What is masked is as if it were not there.
  other = np.where(mask, batch["inputs"], 3)
  again = losses({"inputs": other, "inputs_mask": mask})
  np.testing.assert_allclose(got, again, rtol=1e-6)
  assert np.abs(np.subtract(losses(batch), got)).max() > 1e-3
  quiet = decoder(**CASES["softmax"])
  _, new = models.forward_and_state(quiet, own, batch, dropout_rng=None)
  assert not new.get("losses")


@pytest.mark.parametrize("case", ["softmax", "biases"])
def test_sharded_experts_give_the_same_numbers(case):
  fields = {**CASES[case], "num_experts": 4}
  model = decoder(**fields, mlp_features=32, balance_loss=0.1)
  own, batch = variables(model), tiny.batch(batch_size=4)

  def loss(params):
    out, new = models.forward_and_state(
      model, {**own, "params": params}, batch, dropout_rng=None
    )
    return jnp.square(out).mean() + sum(jax.tree.leaves(new["losses"]))

  step = jax.jit(jax.value_and_grad(loss))
  config = parallel.TrainConfig(
    num_steps=1, batch_size=4, mesh=MeshConfig(data=2, fsdp=2, tensor=2)
  )
  mesh = parallel.make_mesh(config)
  specs = shardings(mesh, own["params"])
  kernel = specs["decoder_0"]["mlp"]["hidden_kernel"].spec
  assert kernel[0] == "tensor"
  got = step(jax.device_put(own["params"], specs))
  expected = step(own["params"])
  chex.assert_trees_all_close(got, expected, rtol=1e-7, atol=1e-6)


def test_configs_that_do_not_fit():
  some = {"num_experts": 6}
  assert_refused(
    MlpConfig,
    *({"experts_per_token": 2}, {"shared_gate": True}, {"balance_loss": 0.1}),
    ("experts_per_token", {**some, "experts_per_token": 7}),
    ("expert_groups", {**some, "expert_groups": 4}),
    ("groups_per_token", {**some, "groups_per_token": 2}),
    ("experts_per_token", {"expert_groups": 3, "experts_per_token": 3, **some}),
    ("shared_gate", {**some, "shared_gate": True}),
    ("router_scores", {**some, "router_scores": "relu"}),
    ("balance_loss", {**some, "balance_loss": -1.0}),
  )
  few = {**some, "experts_per_token": 3}
  few["decoder_around"] = (models.AroundConfig(num_experts=2),)
  other = (models.AroundConfig(norm="pre"),)
  assert_refused(
    decoder,
    ("decoder_around[0].norm", {"norm": "post", "decoder_around": other}),
    {"gate_limit": 1.0},
    ("num_experts", {**some, "mlp_features": 0}),
    ("decoder_around[0].experts_per_token", few),
  )

"""Each name of a table is the function that its documentation says, in values."""

import math

from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import Dims, dense
import models
from models.attention_module_variants import SHAW_DISTANCE, ShawAttention
from models.config import ACTIVATIONS
from models.depthwise import Depthwise
from models.multi_head_attention import MultiHeadAttention
from models.norms import NORM_KINDS
from models.published import family
from tests.models import tiny

FORMULAS = {
  "relu": lambda x: max(x, 0.0),
  "relu2": lambda x: max(x, 0.0) ** 2,
  "gelu": lambda x: x * (1.0 + math.erf(x / math.sqrt(2.0))) / 2.0,
  "gelu_tanh": lambda x: (
    x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2
  ),
  "silu": lambda x: x / (1.0 + math.exp(-x)),
}


def test_activations_are_their_formulas():
  points = np.linspace(-4.0, 4.0, 33)
  assert set(ACTIVATIONS) == set(FORMULAS)
  with jax.enable_x64(True):
    for name, formula in FORMULAS.items():
      expected = [formula(x) for x in points]
      got = jax.jit(ACTIVATIONS[name])(points)
      np.testing.assert_allclose(got, expected, atol=1e-12, err_msg=name)


def test_activations_of_files_are_their_formulas():
  """As `ACT2FN` of transformers has them."""
  theirs = {"gelu": "gelu", "gelu_new": "gelu_tanh", "relu": "relu"}
  theirs |= {"gelu_pytorch_tanh": "gelu_tanh", "silu": "silu", "swish": "silu"}
  theirs["relu2"] = "relu2"
  assert theirs == family.ACTIVATIONS


def test_norms_are_their_formulas():
  """With an ε that is as large as the variance."""
  x = np.random.default_rng(0).normal(0.5, 0.6, (2, 3, 5)).astype(np.float32)
  mean, power = x.mean(-1, keepdims=True), (x**2).mean(-1, keepdims=True)
  scale = np.array([0.5, 2.0, -1.0, 3.0, 0.1], np.float32)
  bias = np.array([1.0, -2.0, 0.0, 0.3, 5.0], np.float32)
  centred = (x - mean) / np.sqrt(x.var(-1, keepdims=True) + 0.4)
  by_power = x / np.sqrt(power + 0.4)
  formulas = {
    "layer": ({"scale": scale, "bias": bias}, centred * scale + bias),
    "layer_without_bias": ({"scale": scale}, centred * scale),
    "rms": ({"scale": scale}, by_power * scale),
    "rms_from_one": ({"scale": scale}, by_power * (1 + scale)),
  }
  assert set(NORM_KINDS) == set(formulas)
  for name, (params, expected) in formulas.items():
    norm = NORM_KINDS[name](epsilon=0.4, dtype="float32", param_dtype="float32")
    got = jax.jit(norm.apply)({"params": params}, x)
    np.testing.assert_allclose(got, expected, atol=1e-5, err_msg=name)


def module_outputs(kind, length, relative_keys=None, **choices):
  """The result of an attention module with exact attention, and its formula.

  In the formula, queries and keys are `(x @ kernel)`, changed by `normed`.
  """
  normed = choices.pop("normed", lambda x: x)
  dims = Dims(num_heads=2, num_kv_heads=2, head_dim=4, max_length=length)
  config = models.SlotConfig(**choices)
  module = kind(dense(), dims, features=8, config=config, dtype="float32")
  rng = np.random.default_rng(0)
  x = rng.normal(size=(1, length, 8)).astype(np.float32)
  shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), x))
  params = jax.tree.map(
    lambda leaf: rng.normal(0, 0.7, leaf.shape).astype(leaf.dtype), shapes
  )
  got = jax.jit(module.apply)(params, x)
  own = params["params"]
  query, key, value = (
    (x @ own[name]["kernel"]).reshape(length, 2, 4)
    for name in ("query", "key", "value")
  )
  query, key = normed(query), normed(key)
  keys = np.repeat(key[None], length, axis=0)
  if relative_keys is not None:
    keys = keys + relative_keys(own["relative_keys"])
  weights = np.exp(np.einsum("tnh,tsnh->nts", query, keys) / 2)
  weights /= weights.sum(-1, keepdims=True)
  out = np.einsum("nts,snh->tnh", weights, value)
  return got[0], out.reshape(length, 8) @ own["out"]["kernel"]


def test_keys_of_a_distance_are_shaws():
  """a of s − t, which is clipped at both ends (equation 4)."""
  length = SHAW_DISTANCE + 5

  def relative_keys(table):
    places = np.arange(length)
    distance = places[None, :] - places[:, None]
    clipped = np.clip(distance, -SHAW_DISTANCE, SHAW_DISTANCE)
    return table[clipped + SHAW_DISTANCE][:, :, None]

  got, expected = module_outputs(ShawAttention, length, relative_keys)
  np.testing.assert_allclose(got, expected, atol=2e-5)


def test_queries_and_keys_of_length_one():
  def unit(x):
    return x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6)

  got, expected = module_outputs(
    MultiHeadAttention, 5, query_key_norm="l2", normed=unit
  )
  np.testing.assert_allclose(got, expected, atol=2e-5)


def test_attention_of_alibi_falls_with_distance():
  """Where queries are zero, weights are e^(−2^(−4(n+1)) · |t − s|) of two heads."""
  model = tiny.create(position="alibi")
  variables, batch = tiny.initialized(model), tiny.batch()
  zeros = jax.tree_util.tree_map_with_path(
    lambda path, x: 0 * x if "query" in str(path) else x, variables
  )
  maps = tiny.attention_maps(model, zeros, batch)
  slopes = np.array([2.0**-4, 2.0**-8])[:, None, None]
  for stack, length in (("encoder", 6), ("decoder", 8)):
    places = np.arange(length)
    distance = places[:, None] - places[None, :]
    weights = np.exp(-slopes * abs(distance))[None].repeat(3, 0)
    if stack == "decoder":
      weights = weights * (distance >= 0)
    else:
      weights = weights * (batch["source"] != 0)[:, None, None, :]
    weights /= weights.sum(-1, keepdims=True)
    got = maps[f"{stack}_0/self_attention"]
    np.testing.assert_allclose(got, weights, atol=1e-5)


@pytest.mark.parametrize("position", ["learned", "sinusoidal"])
@pytest.mark.parametrize("scale", [None, 1.0, 0.3])
def test_positions_beside_a_scale_of_embeddings(position, scale):
  """√F or another factor is of ids and of a trained table, and not of sines."""
  model = tiny.create("decoder", position=position, embedding_scale=scale)
  variables = tiny.initialized(model)
  ids = tiny.batch()["inputs"]
  places = np.arange(8)[None]
  got = model.apply(variables, ids, places, method="embed_inputs")
  factor = 4.0 if scale is None else scale
  expected = factor * variables["params"]["target_embedding"]["embedding"][ids]
  if position == "learned":
    table = variables["params"]["target_positions"]["embedding"]
    expected = expected + factor * table[None, :8]
  else:
    angles = np.arange(8)[:, None] / 10000.0 ** (np.arange(0, 16, 2) / 16)
    sines = np.stack([np.sin(angles), np.cos(angles)], -1).reshape(8, 16)
    expected = expected + sines[None]
  np.testing.assert_allclose(got, expected, atol=1e-5)


_OUT = 2**-0.5  # Of two sub-layers in one layer.


@pytest.mark.parametrize(
  ("choices", "spreads"),
  [
    (
      {"position": "learned"},
      {"target_embedding/embedding": 0.02, "target_positions/embedding": 0.02},
    ),
    ({"position": "t5"}, {"decoder_relative_bias": 0.02}),
    ({"position": "shaw"}, {"decoder_0/self_attention/relative_keys": 0.02}),
    (
      {"position": "disentangled"},
      {"decoder_relative_embeddings/embedding": 0.02},
    ),
    (
      {"streams": 3},
      {
        "decoder_0/self_attention_streams/kernel": 0.02,
        "decoder_streams/kernel": 0.02,
      },
    ),
    (
      {"short_convolution": True, "out_groups": 2, "out_rank": 24},
      {
        "decoder_0/self_attention/key_short_convolution/kernel": 0.5,
        "decoder_0/self_attention/out_down": 32**-0.5,
        "decoder_0/self_attention/out/kernel": _OUT * 48**-0.5,
      },
    ),
    (
      {"num_experts": 8, "gated": True, "shared_features": 40},
      {
        "decoder_0/mlp/router/kernel": 1 / 8,
        "decoder_0/mlp/hidden_kernel": 1 / 8,
        "decoder_0/mlp/gate_kernel": 1 / 8,
        "decoder_0/mlp/out_kernel": _OUT * 96**-0.5,
        "decoder_0/mlp/shared/hidden/kernel": 1 / 8,
        "decoder_0/mlp/shared/out/kernel": _OUT * 40**-0.5,
      },
    ),
  ],
)
def test_first_tables_and_kernels_have_their_spread(choices, spreads):
  sizes = {"features": 64, "mlp_features": 96, "num_heads": 8}
  model = tiny.create("decoder", num_layers=1, **sizes | choices)
  batch = {"inputs": tiny.batch()["inputs"]}
  variables = tiny.initialize(model, jax.random.key(0), batch)
  params = traverse_util.flatten_dict(variables["params"], sep="/")
  for name, spread in spreads.items():
    found = np.sqrt(np.mean(np.square(params[name])))
    # Five standard errors of a normal distribution.
    assert abs(found / spread - 1) < 5 / np.sqrt(2 * params[name].size), name


@pytest.mark.parametrize("sides", [(15,), (3, 5)])
def test_first_filters_have_the_spread_of_their_taps(sides):
  x = jnp.zeros((1, *[8] * len(sides), 200))
  kernel = Depthwise(sides, "float32", "float32").init(jax.random.key(0), x)
  found = np.std(kernel["params"]["kernel"])
  assert found == pytest.approx(15**-0.5, rel=0.06)

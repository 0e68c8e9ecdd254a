"""Queries that are multiplied by a factor of their position."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import Dims, definitions, dense
from models.attention_module_config import SlotConfig
from models.multi_head_attention import MultiHeadAttention
from tests.models import tiny
from tests.refusals import assert_refused

LENGTH, HEADS, WIDTH = 8, 4, 6
STEPS = {"temperature_rate": 0.7, "temperature_length": 3}
CASES = pytest.mark.parametrize(
  ("kind", "fields"), [("steps", STEPS), ("log", {})], ids=["steps", "log"]
)


@CASES
def test_the_definition(kind, fields):
  """Equation 2 of arXiv:2501.19399 for t + 1 visible keys; Llama 4's code."""
  rng = np.random.default_rng(0)
  x = rng.standard_normal((2, LENGTH, 10), np.float32)
  config = SlotConfig(query_temperature=kind, **fields)
  dims = Dims(HEADS, 2, WIDTH, LENGTH)
  module = MultiHeadAttention(dense(), dims, 5, config)
  positions = np.arange(LENGTH)[None]
  call = {"positions": positions, "is_causal": True}
  variables = module.init(jax.random.key(0), x, **call)
  params, scale = variables["params"], np.ones(HEADS)
  if kind == "log":
    np.testing.assert_array_equal(params["temperature_scale"], scale)
    scale = rng.uniform(0.5, 3.0, HEADS).astype(np.float32)
    params["temperature_scale"] = jnp.asarray(scale)

  def heads(name):
    out = np.asarray(x, np.float64) @ np.asarray(params[name]["kernel"])
    return out.reshape(2, LENGTH, -1, WIDTH)

  time = positions[:, :, None, None]
  factor = scale[None, None, :, None] * np.log(time + 1)
  if kind == "steps":
    factor = 1 + 0.7 * np.log(1 + time // 3)
  wanted = definitions.dense_attention(
    heads("query") * factor, heads("key"), heads("value"), is_causal=True
  )
  wanted = wanted.reshape(2, LENGTH, -1) @ np.asarray(params["out"]["kernel"])
  out = module.apply(variables, x, **call)
  np.testing.assert_allclose(out, wanted, atol=1e-5)


@CASES
def test_decoding_token_by_token(kind, fields):
  model = tiny.create("decoder", query_temperature=kind, **fields)
  batch = {"inputs": tiny.batch()["inputs"]}
  variables = tiny.initialized(model)
  np.testing.assert_allclose(
    tiny.step_by_step(model, variables, batch),
    tiny.forward(model, variables, batch),
    atol=1e-5,
  )


def test_configs_that_do_not_fit():
  assert_refused(
    SlotConfig,
    *({"temperature_rate": 0.1}, {"temperature_length": 3}),
    ("temperature_length", {"query_temperature": "steps"}),
    ("temperature_length", {"query_temperature": "log", **STEPS}),
  )
  assert_refused(
    tiny.create,
    ("query_temperature", {"kind": "encoder", "query_temperature": "log"}),
  )

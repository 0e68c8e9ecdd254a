"""Residual streams: their equations in float64, their sums, models that have them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import nested
from models.config import ModelConfig
from models.hyper_connections import HyperConnection, StreamHead
from tests.models import tiny
from tests.refusals import assert_refused

COUNT, FEATURES = 3, 5
FIELDS = {
  **{"kind": "decoder", "num_layers": 2, "num_heads": 2, "features": 12},
  **{"mlp_features": 7, "position": "rotary", "streams": COUNT},
}


def make(**fields):
  return nested.make(ModelConfig, **FIELDS | fields)


def drawn(module, seed=0):
  """Streams, and variables away from their first values."""
  rng = np.random.default_rng(seed)
  x = rng.standard_normal((2, 4, COUNT, FEATURES))
  shapes = jax.eval_shape(module.init, jax.random.key(0), x)
  draw = jax.tree.map(lambda y: rng.standard_normal(y.shape), shapes)
  return x, draw


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def weights(x, p, sizes):
  """Projections of normalized streams with their scales and biases."""
  flat = x.reshape(*x.shape[:2], -1)
  flat = flat / np.sqrt((flat**2).mean(-1, keepdims=True) + 1e-3)
  ends = np.cumsum(sizes)[:-1]
  made = np.split(flat @ p["kernel"], ends, -1)
  bias = np.split(p["bias"], ends)
  return [x * s + b for x, s, b in zip(made, p["scale"], bias, strict=True)]


@pytest.mark.parametrize("steps", [1, 3, 40])
def test_the_equations(steps):
  config = make(
    stream_steps=steps, stream_epsilon=1e-2, norm_epsilon=1e-3, dtype="float64"
  )
  with jax.enable_x64(True):
    module = HyperConnection(config)
    x, variables = drawn(module)

    @jax.jit
    def run(variables, x):
      own, merged = module.apply(variables, x)
      return own, merged(jnp.sin(own))

    own, after = run(variables, x)
    (pre, post, mix), e = weights(x, variables["params"], (3, 3, 9)), 1e-2
    read = np.einsum("btn,btnf->btf", sigmoid(pre) + e, x)
    np.testing.assert_allclose(own, read, atol=1e-12)
    for b, t in np.ndindex(x.shape[:2]):
      m = mix[b, t].reshape(COUNT, COUNT)
      m = np.exp(m) / np.exp(m).sum(1, keepdims=True) + e
      m /= m.sum(0) + e
      for _ in range(steps - 1):
        m /= m.sum(1, keepdims=True) + e
        m /= m.sum(0) + e
      for j in range(COUNT):
        wanted = 2 * sigmoid(post[b, t, j]) * np.sin(read[b, t])
        wanted = wanted + sum(m[i, j] * x[b, t, i] for i in range(COUNT))
        np.testing.assert_allclose(after[b, t, j], wanted, atol=1e-12)


def test_the_sum_of_streams_stays_where_a_sub_layer_gives_nothing():
  """With many iterations the mixing matrix is doubly stochastic."""

  def largest(steps):
    """The largest difference of a sum, and of a stream."""
    module = HyperConnection(make(stream_steps=steps, stream_epsilon=0.0))
    x, variables = drawn(module)
    _, merged = module.apply(variables, x.astype(np.float32))
    after = np.asarray(merged(jnp.zeros((2, 4, FEATURES))))
    return [np.abs(y).max() for y in (after.sum(2) - x.sum(2), after - x)]

  assert largest(1)[0] > 0.5
  total, stream = largest(1000)
  assert total < 2e-3
  assert stream > 0.1


def test_the_streams_are_joined_as_they_are_read():
  module = StreamHead(make(norm_epsilon=1e-3))
  x, variables = drawn(module)
  (pre,) = weights(x, variables["params"], (3,))
  wanted = np.einsum("btn,btnf->btf", sigmoid(pre) + 1e-6, x)
  got = module.apply(variables, x.astype(np.float32))
  np.testing.assert_allclose(got, wanted, atol=1e-5)


def test_a_model_decodes_as_it_is_called():
  """Also with experts by id, and with outputs projected by groups of heads."""
  experts = {"num_experts": 3, "experts_per_token": 2}
  experts |= {"router_table": tiny.VOCAB_SIZE, "router_scores": "sqrt_softplus"}
  streams = {
    "streams": COUNT,
    "stream_steps": 4,
    "out_groups": 2,
    "out_rank": 3,
  }
  model = tiny.create("decoder", position="rotary", **streams, **experts)
  rng = np.random.default_rng(0)
  batch = {"inputs": jnp.asarray(rng.integers(1, 7, (2, 9)))}
  variables = tiny.initialize(model, jax.random.key(0), batch)
  table = variables["constants"]["decoder_0"]["mlp"]["router_table"]
  assert table.shape == (tiny.VOCAB_SIZE, 2)
  assert (np.diff(table, axis=1) != 0).all()
  out = tiny.forward(model, variables, batch)
  steps = tiny.step_by_step(model, variables, batch)
  np.testing.assert_allclose(steps, out, atol=1e-5)
  # The table decides.
  other = jax.tree_util.tree_map_with_path(
    lambda path, x: (x + 1) % 3 if "router_table" in str(path) else x, variables
  )
  assert np.abs(tiny.forward(model, other, batch) - out).max() > 1e-3
  # And so do all streams.
  gradients = tiny.gradients(model, variables, batch)
  for name in ("self_attention_streams", "mlp_streams"):
    for x in jax.tree.leaves(gradients["decoder_0"][name]):
      assert np.any(x)


def test_what_does_not_fit_is_told():
  assert_refused(
    make,
    *({"norm": "post"}, {"parallel": True}, {"residual_factors": (1.0, 0.5)}),
    {"stream_steps": 3, "streams": 1},
    ("streams", {"kind": "encoder"}),
    {"out_groups": 3, "out_rank": 2},
    ("out_rank", {"out_groups": 2}),
  )

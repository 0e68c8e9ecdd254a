"""Whole models, compiled anew, against the same operations one by one.

XLA's passes change what a program does only inside of a program, so a fault of
theirs is seen where forward pass, gradient, training step and decoding of a model are
compiled as they are in a run, and nowhere in the parts alone. Every program is compiled
anew, since a fault may come with one compile and not with the next.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import models
from tests import compiling
from tests.models import tiny

COMPILES = 2
# (layers, heads, length, batch)
SETTINGS = [
  # One chunk of a recurrence, whose first state is then a constant of the program.
  (1, 1, 64, 64),
  (2, 2, 32, 8),
  (1, 4, 128, 8),
  (2, 1, 256, 8),
]
CASES = [*itertools.product(tiny.names(), SETTINGS)]


@pytest.mark.parametrize(
  ("name", "setting"),
  [
    pytest.param(*x, marks=[pytest.mark.thorough] * (x != usual))
    for usual in [("gated_delta", SETTINGS[0])]
    for x in CASES
  ],
)
def test_a_compiled_model_gives_what_its_operations_give(name, setting):
  layers, heads, length, batch = setting
  kind = "decoder" if name in tiny.names("causal") else "encoder"
  config = models.ModelConfig(
    **{"kind": kind, "num_layers": layers, "num_heads": heads, "features": 32},
    **{"mlp_features": 64, "tie_embeddings": False},
    **{f"{kind}_attention": tiny.attention(name)},
  )
  names = ("source_vocab_size", "target_vocab_size")
  sizes = dict.fromkeys(names, tiny.VOCAB_SIZE)
  sizes |= {"max_source_length": length, "max_target_length": length}
  model = models.create(config, **sizes)
  ids = np.random.default_rng(0).integers(1, tiny.VOCAB_SIZE, (batch, length))
  ids = ids.astype(np.int32)
  # The target of an encoder is one class of a whole sequence.
  data = {"inputs": ids} if kind == "decoder" else {"source": ids}
  targets = np.roll(ids, -1, 1) if kind == "decoder" else ids[:, :1]
  variables = models.initialize(model, jax.random.key(0), data)
  rest = {name: x for name, x in variables.items() if name != "params"}
  optimizer = optax.sgd(1.0)

  def forward(params):
    return models.forward(model, {"params": params, **rest}, data)

  def loss(params):
    logits = forward(params)
    logits = logits.reshape(batch, -1, logits.shape[-1])
    each = optax.softmax_cross_entropy_with_integer_labels(
      logits.astype(jnp.float32), jnp.asarray(targets)
    )
    return each.mean()

  def train_step(params):
    value, gradient = jax.value_and_grad(loss)(params)
    updates, _ = optimizer.update(gradient, optimizer.init(params), params)
    return value, gradient, optax.apply_updates(params, updates)

  params = variables["params"]
  logits, trained = forward(params), train_step(params)
  for _ in range(COMPILES):
    _close(_compiled(forward, params), logits)
    _close(_compiled(train_step, params), trained)
  if kind == "decoder" and name in tiny.names("decode"):
    _close(tiny.step_by_step(model, variables, data), logits)


def _compiled(function, *args):
  """The result of a program that is compiled now, as users have it."""
  jax.config.update("jax_enable_compilation_cache", False)
  try:
    lowered = jax.jit(lambda *args: function(*args)).lower(*args)
    return lowered.compile(compiler_options=compiling.AS_USERS)(*args)
  finally:
    jax.config.update("jax_enable_compilation_cache", True)


def _close(got, expected):
  """Every array equal, but for a hundredth of its norm.

  A fault of the compiler is as large as the array or larger. Rounding is smaller,
  also where it moves a number across the kink of a ReLU or into another bucket.
  """

  def check(x, y):
    error, norm = jnp.linalg.norm(jnp.ravel(x - y)), jnp.linalg.norm(y.ravel())
    assert error <= 1e-2 * norm, (error, norm)

  jax.tree.map(check, got, expected)


def test_no_fusion_of_this_version_returns_garbage():
  """What benchmarks/README.md shows without the flag."""
  x = np.random.default_rng(0).normal(size=(512, 32)).astype(np.float32)

  def summed(x):
    return (x @ jnp.full((32, 32), 3.0)).sum(-1)

  for _ in range(12):
    np.testing.assert_allclose(
      _compiled(summed, x), 96 * x.sum(-1), rtol=1e-4, atol=1e-3
    )

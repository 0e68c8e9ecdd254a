"""Programs of `jax.export` whose batch is a symbol, of every public function.

T stays a number. Functions are those that the package exports, and their calls the
first lines of their docstrings with all masks, ids and states that they take.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention
from attention import Dims, gates_from_keys
from attention.platform import backend
from attention.testing import assert_close
from tests.attention import test_examples
from tests.attention.forms import DERIVED, SIZES
from tests.attention.forms import OWN as FACTORIES
from tests.attention.test_examples import FUNCTIONS, H, N, T

BATCHES = 3, 5


def symbolic(tree, constraints=()):
  """Shapes of arrays whose first axis, of `BATCHES[-1]`, is a symbol."""
  (batch,) = jax.export.symbolic_shape("b", constraints=constraints)

  def shape(x):
    is_batched = x.ndim and x.shape[0] == BATCHES[-1]
    sizes = (batch, *x.shape[1:]) if is_batched else x.shape
    return jax.ShapeDtypeStruct(sizes, x.dtype)

  return jax.tree.map(shape, tree)


def rows(tree, batch):
  return jax.tree.map(
    lambda x: x[:batch] if x.ndim and x.shape[0] == BATCHES[-1] else x, tree
  )


def example(name):
  """As of `test_examples`, with arrays for a batch."""
  code, arrays = test_examples.example(name)
  rng = np.random.default_rng(0)

  def for_batch(x):
    if x.shape[0] != 1:
      return x
    x = np.repeat(x, BATCHES[-1], axis=0)
    if not np.issubdtype(x.dtype, np.floating):
      return x
    return np.asarray(x * rng.uniform(0.5, 1.0, x.shape), np.float32)

  return code, {n: for_batch(np.asarray(x)) for n, x in arrays.items()}


def options(name):
  """All that the function takes of masks, ids and states."""
  parameters = inspect.signature(getattr(attention, name)).parameters
  batch = BATCHES[-1]
  keep = np.arange(T)[None] < T - 3 * np.arange(batch)[:, None]
  ids = np.arange(T)[None] // (20 + np.arange(batch)[:, None])
  made = {
    "mask": keep[:, None, None, :],
    "segment_ids": ids,
    "query_segment_ids": ids,
    "key_segment_ids": ids,
    "initial_state": np.full((batch, N, H, H), 0.1, np.float32),
  }
  if name in (
    *("mesa_attention", "gsa_attention", "log_linear_attention"),
    *("gka_attention", "momentum_delta_attention"),
    *("rg_lru_attention", "mlstm_attention", "precond_delta_attention"),
    *("titans_attention", "ttt_linear_attention"),
  ):
    made.pop("initial_state")  # Theirs have other forms.
  return {n: x for n, x in made.items() if n in parameters}


def call(name):
  """`(arrays, options) -> results, gradients` of a function, and what to give it."""
  code, arrays = example(name)
  function = getattr(attention, name)
  flags = {}
  if "return_state" in inspect.signature(function).parameters:
    flags = {"return_state": True}

  def run(arrays, options):
    def loss(arrays):
      given = functools.partial(function, **options, **flags)
      out = eval(code, {name: given} | arrays)
      return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(out)), out

    gradients, out = jax.grad(loss, has_aux=True, allow_int=True)(arrays)
    return out, {n: x for n, x in gradients.items() if x.dtype == "float32"}

  return run, (arrays, options(name))


_COMPUTED = ("dense", "sliding_window", "linear", "lsh", "delta_rule")
"""Of each kind of code one."""


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_is_exported_with_gradients(name):
  """As for a GPU and the largest batch that the symbol may be."""
  run, given = call(name)
  with backend.tracing_for("gpu"):
    exported = jax.export.export(jax.jit(run), platforms=("cuda",))
    program = exported(*symbolic(given, ["b <= 8"])).mlir_module()
  assert "?x" in program


@pytest.mark.parametrize(
  "name",
  [
    pytest.param(name, marks=[] if is_kept else pytest.mark.thorough)
    for name in FUNCTIONS
    for is_kept in [name.removesuffix("_attention") in _COMPUTED]
  ],
)
def test_a_program_gives_what_a_call_does(name):
  """Results and gradients, at two sizes of the batch."""
  run, given = call(name)
  exported = jax.export.export(jax.jit(run))(*symbolic(given))
  out, gradients = jax.jit(run)(*given)
  for batch in BATCHES:
    found = exported.call(*rows(given, batch))
    expected = rows(out, batch), rows(gradients, batch)
    by_name = jax.tree_util.tree_leaves_with_path(found)
    for (path, x), y in zip(by_name, jax.tree.leaves(expected), strict=True):
      # A gradient of what all examples share is their sum.
      if x.shape[0] == batch or batch == BATCHES[-1]:
        assert_close(x, y, 1e-5, jax.tree_util.keystr(path))


@pytest.mark.parametrize(
  "name",
  [
    pytest.param(name, marks=[pytest.mark.thorough] * (name in DERIVED))
    for name in FACTORIES
  ],
)
def test_every_mechanism_is_exported(name):
  """Its record, whole and token by token."""
  dims, batch, length = Dims(4, 2, 8, 32, 16), BATCHES[-1], 21
  record = gates_from_keys(FACTORIES[name](**SIZES[name]))
  variables = jax.eval_shape(
    lambda key: record.init(key, dims), jax.random.key(0)
  )
  shapes = [(batch, length, heads, 8) for heads in (4, 2, 2)]
  query, key, value = symbolic(
    [jax.ShapeDtypeStruct(x, "float32") for x in shapes]
  )
  key = None if "shared_qk" in record.supports else key
  value = None if name in ("latent", "compressed") else value

  def whole(variables, query, key, value):
    is_causal = "causal" in record.supports
    value = query[:, :, :2] if value is None else value
    return record.apply(variables, query, key, value, is_causal=is_causal)

  def decoded(variables, *qkv):
    cache = record.init_cache(variables, qkv[0].shape[0], 32, dims, "float32")
    first = (None if x is None else x[:, :1] for x in qkv)
    return record.decode(variables, cache, *first)

  arrays = variables, query, key, value
  for run in (whole, decoded)[: 1 + ("decode" in record.supports)]:
    assert jax.export.export(jax.jit(run))(*arrays).in_avals


def test_a_length_is_a_number():
  (batch, length) = jax.export.symbolic_shape("b, t")
  shape = jax.ShapeDtypeStruct((batch, length, 2, 8), jnp.float32)
  export = jax.export.export(jax.jit(attention.dense_attention))
  with pytest.raises(
    ValueError, match=r"^query: expected a number for T, got t; o"
  ):
    export(shape, shape, shape)


def test_the_largest_batch_is_planned_for():
  (batch,) = jax.export.symbolic_shape("b", constraints=["b <= 48"])
  (any_batch,) = jax.export.symbolic_shape("c")
  with backend.tracing_for("gpu"):
    for size, as_number in (batch, 64), (any_batch, 2**64), (3, 3):
      found = backend.tiles_per_step(2**20 * size, 999)
      assert found == backend.tiles_per_step(2**20 * as_number, 999)

"""Counted operations: exact where a formula is, XLA's own where it can count."""

from flax import linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

from attention import ATTENTIONS, Dims, gates_from_keys
from attention import mechanism as mechanisms
from tests.attention.forms import kinds_first
from training.devices import flops

SIDE = 8
PRODUCT = 2 * SIDE**3
MATRIX = jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float32)
OPTIONS = {
  "sliding_window": {"window": 64},
  "performer": {"num_features": 32},
  "linformer": {"rank": 32},
  "lsh": {"num_buckets": 8},
}


def with_gradient(function):
  def call(*args):
    out, pullback = jax.vjp(function, *args)
    return pullback(out)

  return call


def attend(name, length, *, is_causal=False, heads=2, head_dim=32):
  """A call of a mechanism, and its arguments."""
  mechanism = gates_from_keys(ATTENTIONS[name](**OPTIONS.get(name, {})))
  dims = Dims(heads, heads, head_dim, length, heads * head_dim)
  variables = mechanism.init(jax.random.key(0), dims)

  def call(query, key, value):
    key = None if "shared_qk" in mechanism.supports else key
    return mechanism.apply(variables, query, key, value, is_causal=is_causal)

  shape = (1, length, heads, head_dim)
  return call, [jax.ShapeDtypeStruct(shape, jnp.float32)] * 3


def forward(name, length, **options):
  call, qkv = attend(name, length, **options)
  return flops.count(call, *qkv).flops


def product(x, *_):
  return x @ x


ONE_OPERATION = {
  "product": (lambda x: x[:3] @ x[:, :5], 2 * 3 * 8 * 5),
  "tanh": (jnp.tanh, 64),
  "sum of two": (lambda x: x + 1.0, 64),
  "power": (lambda x: x**5, 3 * 64),
  "sum": (lambda x: jnp.sum(x, 0), 64),
  "maximum": (jnp.max, 64),
  "sort": (lambda x: jnp.sort(x, 0), 64 * 3),
  "sort of a part": (lambda x: jnp.sort(x[:, :3], 0), 24 * 3),
  "sort of nothing": (lambda x: jnp.sort(x[:0], 0), 0),
  "largest": (lambda x: jax.lax.top_k(x[:3], 2)[0], 24 * 3),
  "no power": (lambda x: jax.lax.integer_pow(x, 0), 0),
  "negative power": (lambda x: jax.lax.integer_pow(x, -6), 3 * 64),
  "windows": (
    lambda x: jax.lax.reduce_window(
      x, 0.0, jax.lax.add, (2, 3), (1, 1), "VALID"
    ),
    (7 * 6) * (2 * 3),
  ),
  "qr": (
    lambda x: jax.lax.linalg.qr(x[None, :, :3], full_matrices=False)[0],
    4 * (8 * 3 * 3 - 3**3 / 3),
  ),
  "scatter": (lambda x: x.at[jnp.array([1, 1])].add(1.0), 16),
  "moves": (lambda x: jnp.where(x > 0.0, x.T, x)[::2].astype(jnp.bfloat16), 0),
  "integers": (lambda x: jnp.sum(x.astype(jnp.int32) * 2 + 1), 0),
  "random bits": (lambda x: jax.random.bits(jax.random.key(0), x.shape), 0),
  "convolution": (
    lambda x: jax.lax.conv(
      x[None, None], jnp.ones((5, 1, 3, 2)), (1, 1), "VALID"
    ),
    2 * (5 * 6 * 7) * (3 * 2),
  ),
}


@pytest.mark.parametrize("name", ONE_OPERATION)
def test_one_operation(name):
  function, expected = ONE_OPERATION[name]
  assert flops.count(function, MATRIX) == (expected, ())


def scan_of(length):
  return lambda x: jax.lax.scan(lambda x, _: (x @ x, None), x, length=length)[0]


def triangle(x):
  """Row i has i + 1 rounds."""

  def row(i, x):
    return jax.lax.fori_loop(0, i + 1, lambda j, x: x @ x, x)

  return jax.lax.fori_loop(0, 7, row, x)


def blocks(x):
  """Causal blocks of 3 queries and 2 keys among 10, the last moved back."""

  def row(i, x):
    seen = jnp.minimum(jnp.minimum(i * 3, 10 - 3) + 3, 10)
    return jax.lax.fori_loop(0, (seen + 1) // 2, lambda j, x: x @ x, x)

  return jax.lax.fori_loop(0, 4, row, x)


def backwards(x):
  """The same from the last block to the first, bounds from a table."""
  table = jnp.array([2, 3, 5, 5])

  def row(x, i):
    return jax.lax.fori_loop(0, table[i], lambda j, x: x @ x, x), None

  return jax.lax.scan(row, x, jnp.arange(4), reverse=True)[0]


def halving(x):
  """Rounds for n = 12, 6, 3, 1."""
  state = jax.lax.while_loop(
    lambda state: state[0] > 0,
    lambda state: (state[0] // 2, state[1] @ state[1]),
    (12, x),
  )
  return state[1]


def three_deep(x):
  """Σ_{i<4} Σ_{j≤i} j rounds: 0, 1, 3, 6."""

  def row(i, x):
    def column(j, x):
      return jax.lax.fori_loop(0, j, lambda k, x: x @ x, x)

    return jax.lax.fori_loop(0, i + 1, column, x)

  return jax.lax.fori_loop(0, 4, row, x)


LOOPS = {
  "scan": (scan_of(10), 10),
  "scan in scan": (
    lambda x: jax.lax.fori_loop(0, 3, lambda i, x: scan_of(4)(x), x),
    12,
  ),
  "triangle": (triangle, 28),
  "blocks": (blocks, 2 + 3 + 5 + 5),
  "backwards": (backwards, 2 + 3 + 5 + 5),
  "halving": (halving, 4),
  "three deep": (three_deep, 10),
  "map": (
    lambda x: jax.lax.map(
      lambda i: jax.lax.fori_loop(i, 5, lambda j, x: x @ x, x), jnp.arange(5)
    ),
    15,
  ),
}


@pytest.mark.parametrize("name", LOOPS)
def test_rounds_are_counted_exactly(name):
  function, rounds = LOOPS[name]
  assert flops.count(function, MATRIX) == (rounds * PRODUCT, ())


def test_a_loop_is_counted_inside_of_everything():
  @jax.custom_vjp
  def custom(x):
    return triangle(x)

  custom.defvjp(lambda x: (triangle(x), x), lambda x, g: (halving(g) + x,))
  assert flops.count(custom, MATRIX).flops == 28 * PRODUCT
  assert (
    flops.count(jax.jit(jax.checkpoint(custom)), MATRIX).flops == 28 * PRODUCT
  )
  gradient = flops.count(with_gradient(custom), MATRIX)
  assert gradient == ((28 + 4) * PRODUCT + SIDE**2, ())
  many = jax.ShapeDtypeStruct((5, SIDE, SIDE), jnp.float32)
  assert flops.count(jax.vmap(custom), many).flops == 5 * 28 * PRODUCT


@pytest.mark.parametrize("wrap", [jax.pmap, "shard_map"])
def test_devices_add_up(wrap):
  if wrap == "shard_map":
    mesh = jax.make_mesh((4,), ("rows",), (jax.sharding.AxisType.Auto,))
    specs = {"in_specs": jax.P("rows"), "out_specs": jax.P("rows")}

    def wrap(function):
      def local(x):
        return function(x[0])[None]

      return jax.shard_map(local, mesh=mesh, **specs, check_vma=False)

  many = jnp.ones((4, SIDE, SIDE))
  assert flops.count(wrap(triangle), many).flops == 4 * 28 * PRODUCT


def test_a_loop_that_ends_where_the_data_say_is_named():
  def settle(x):
    return jax.lax.while_loop(lambda x: jnp.sum(x) < 9.0, product, x @ x)

  found = flops.count(settle, MATRIX)
  assert found.flops == PRODUCT
  (line,) = found.uncounted
  assert "test_flops.py" in line
  assert "0 iterations" in line


def test_an_operation_without_a_rule_is_named():
  found = flops.count(lambda x: jnp.linalg.cholesky(x) @ x, MATRIX)
  assert found.flops >= PRODUCT
  (line,) = found.uncounted
  assert line.startswith("cholesky")


def test_a_branch():
  branches = [product, lambda x: x @ x @ x, lambda x: x]

  def known(x):
    def step(i, x):
      return jax.lax.switch(i, branches, x)

    return jax.lax.fori_loop(0, 3, step, x)

  def unknown(x, i):
    return jax.lax.switch(i, branches, x)

  assert flops.count(known, MATRIX).flops == 3 * PRODUCT
  assert flops.count(unknown, MATRIX, jnp.int32(0)).flops == 2 * PRODUCT


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("wrap", [lambda f: f, with_gradient])
def test_xla_counts_the_same_without_loops(wrap, is_causal):
  call, qkv = attend("dense", 256, is_causal=is_causal, head_dim=64)
  costs = jax.jit(wrap(call)).lower(*qkv).compile().cost_analysis()
  expected = costs["flops"] + costs["transcendentals"]
  assert flops.count(wrap(call), *qkv).flops == pytest.approx(
    expected, rel=0.02
  )


def test_xla_still_counts_a_loop_once():
  """Why this module is there; if it fails, it may go."""
  costs = jax.jit(scan_of(10)).lower(MATRIX).compile().cost_analysis()
  assert costs["flops"] < 2 * PRODUCT


@pytest.mark.parametrize("name", kinds_first(ATTENTIONS, "delta"))
def test_every_mechanism(name):
  """Causal, where it can be."""
  is_causal = mechanisms.directions(ATTENTIONS[name]())[-1]
  call, qkv = attend(name, 512, is_causal=is_causal)
  # The forward that a gradient has: alone, recurrences go position by position.
  once = flops.count(lambda *qkv: jax.vjp(call, *qkv)[0], *qkv)
  both = flops.count(with_gradient(call), *qkv)
  # Two products backward for each forward; some compute scores once more, `moba`
  # twice: a chunk of rows, and a step of its tiles.
  assert 1.9 * once.flops < both.flops < 5 * once.flops
  assert not once.uncounted
  assert not both.uncounted


def test_causal_blocks_are_half_of_all():
  causal, full = (
    forward("flash", 8192, is_causal=is_causal) for is_causal in (True, False)
  )
  # A window's operations grow with the length.
  window = forward("sliding_window", 8192) / forward("sliding_window", 4096)
  assert window == pytest.approx(2, rel=0.02)
  # Blocks on the diagonal are computed whole.
  assert causal / full == pytest.approx(0.5, abs=0.05)


def test_a_train_step():
  rows, width, classes = 64, 32, 16
  model, optimizer = nn.Dense(classes), optax.adam(1e-3)
  x = jnp.ones((rows, width))

  def step(params, state):
    def loss(params):
      return jnp.mean(jnp.square(model.apply(params, x)))

    updates, state = optimizer.update(jax.grad(loss)(params), state, params)
    return optax.apply_updates(params, updates), state

  params = jax.eval_shape(model.init, jax.random.key(0), x)
  state = jax.eval_shape(optimizer.init, params)
  found = flops.count(step, params, state)
  products = 2 * (2 * rows * width * classes)
  # A dozen or two for each parameter in Adam, and a few for each output.
  assert products + 10 * width * classes < found.flops
  assert found.flops < products + 25 * width * classes + 10 * rows * classes
  assert not found.uncounted

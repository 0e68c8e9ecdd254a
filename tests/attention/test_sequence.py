"""A sequence in parts, one a device, is attended to as the whole is."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import ATTENTIONS, Dims
from attention.plug import directions
from tests.attention.forms import RECURRENT, thorough
from tests.attention.mechanisms import MECHANISMS, ONE_EACH
from training import traffic

AXIS = "sequence"
BATCH, HEADS, KV_HEADS, DIM = 2, 4, 2, 8

SEQUENCE = [m for m in MECHANISMS if "sequence" in m.supports]


# A ring of keys, states, factors of states.
_KINDS = ("flash", "performer", "kimi_delta")


_ALIKE = {"dense", "multiplicative", "linear", *RECURRENT} - {
  *("gated_linear", "kimi_delta", "mamba3", "mesa", "log_linear"),
}
"""Mechanisms whose parts meet by the code of another: that of flash, of performer,
of gated_linear, of kimi_delta."""


def supporting(*needs, kept=(), left=(), where=lambda mechanism: True):
  """Parameters of a test: one setting of each mechanism, others `thorough`.

  `kept` are hyperparameters whose settings are other programs here, and `left`
  mechanisms that are `thorough` as well.
  """
  return pytest.mark.parametrize(
    "mechanism",
    [
      pytest.param(m, marks=[] if is_kept else pytest.mark.thorough)
      for m in SEQUENCE
      if set(needs) <= m.supports and where(m)
      for is_one in [m in ONE_EACH and m.name not in left]
      for is_kept in [is_one or not {*kept}.isdisjoint(m.options)]
    ],
    ids=str,
  )


def arrays_of(mechanism, length, source=None, seed=0):
  """Query, key and value, and the variables."""
  rng = np.random.default_rng(seed)
  source = length if source is None else source
  dims = Dims(HEADS, KV_HEADS, DIM, source, KV_HEADS * DIM)
  variables = mechanism.record.init(jax.random.key(seed), dims)

  def draw(size, heads):
    return jnp.asarray(rng.normal(size=(BATCH, size, heads, DIM)), jnp.float32)

  query, value = draw(length, HEADS), draw(source, KV_HEADS)
  return variables, query, draw(source, KV_HEADS), value


def block(mechanism):
  """What has to divide the positions of a device."""
  return mechanism.options["block_size"] if mechanism.name == "bigbird" else 1


def by_position(name, array):
  """How an argument lies on the axis."""
  if name == "mask" and array.shape[2] == 1:
    return jax.P(None, None, None, AXIS)
  if name in ("query_segment_ids", "key_segment_ids", "global_qkv"):
    return jax.P(None, AXIS)
  return jax.P()


def sharded(mechanism, devices, **call):
  """`apply_sharded` as a function of whole arrays."""
  mesh = jax.make_mesh(
    (devices,),
    (AXIS,),
    axis_types=(jax.sharding.AxisType.Auto,),
    devices=jax.devices()[:devices],
  )
  parts = {
    n: x for n, x in call.items() if hasattr(x, "shape") or n == "global_qkv"
  }
  rest = {n: x for n, x in call.items() if n not in parts}
  rows = jax.P(None, AXIS)

  def local(variables, query, key, value, parts):
    return mechanism.record.apply_sharded(
      variables, query, key, value, axis_name=AXIS, **parts, **rest
    )

  function = jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(
      jax.P(),
      *(rows,) * 3,
      {name: by_position(name, x) for name, x in parts.items()},
    ),
    out_specs=rows,
  )
  return lambda *arguments: function(*arguments, parts)


def check(
  mechanism,
  devices,
  length,
  source=None,
  in_parts=None,
  gradients=True,
  **call,
):
  """Values and, unless `gradients` is False, gradients against the whole's.

  `in_parts` are options of the parts alone.
  """
  arguments = arrays_of(mechanism, length, source)
  if "mask" in call and mechanism.factory(**mechanism.options).gates is None:
    # Not so where gates are read from keys, before a mask is known.
    keep = call["mask"][:, 0, 0, :, None, None]
    *others, key, value = arguments
    hidden = (jnp.where(keep, x, jnp.nan) for x in (key, value))
    arguments = *others, *hidden
  whole = functools.partial(mechanism.record.apply, **call)
  weights = jnp.asarray(
    np.random.default_rng(1).normal(size=(BATCH, length, HEADS, DIM)),
    jnp.float32,
  )

  def run(function):
    if not gradients:
      return jax.jit(function)(*arguments), ()

    def loss(*arguments):
      out = function(*arguments)
      return jnp.sum(out * weights), out

    step = jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True, allow_int=True)
    (_, out), grads = jax.jit(step)(*arguments)
    return out, grads

  parts = sharded(mechanism, devices, **call, **(in_parts or {}))
  expected, found = run(whole), run(parts)
  np.testing.assert_allclose(found[0], expected[0], atol=2e-5, rtol=2e-5)
  for one, other in zip(
    jax.tree.leaves(found[1]), jax.tree.leaves(expected[1]), strict=True
  ):
    if one.dtype == jax.dtypes.float0:  # Constants of whole numbers.
      continue
    scale = max(1.0, float(jnp.abs(other).max()))
    np.testing.assert_allclose(one, other, atol=2e-4 * scale)


@functools.cache
def padding(length, source):
  """The last parts are padding in one row, and a few keys in the other."""
  mask = np.ones((BATCH, 1, 1, source), bool)
  mask[0, ..., source // 2 - 1 :] = False
  mask[1, ..., 3] = False
  return jnp.asarray(mask)


def segments(length):
  """Three examples in a row, whose bounds are not those of the parts."""
  ids = np.repeat([[1, 2, 3]], BATCH, 0)
  cuts = sorted({length // 5, 2 * length // 3})
  counts = np.diff([0, *cuts, length])
  return jnp.asarray(np.stack([np.repeat(row, counts) for row in ids]))


def check_parts(mechanism, devices, **call):
  """Segments cross the parts, padding fills some.

  Terms by distance know where a part stands.
  """
  length = 24 * block(mechanism)
  call["mask"] = padding(length, length)
  if "segments" in mechanism.supports:
    ids = segments(length)
    call |= {"query_segment_ids": ids, "key_segment_ids": ids}
  if "relative" in mechanism.supports:
    rng = np.random.default_rng(2)
    bias, keys = rng.normal(size=(HEADS, 11)), rng.normal(size=(11, DIM))
    call["relative_bias"] = jnp.asarray(bias, jnp.float32)
    call["relative_keys"] = jnp.asarray(keys, jnp.float32)
  check(mechanism, devices, length, **call)


# Dense, multiplicative and linear attention cross to another length below.
@supporting(left=_ALIKE, kept=("dilation", "conv_kernel_size"))
def test_parts_are_the_whole(mechanism):
  is_causal = directions(mechanism.record)[-1]
  check_parts(mechanism, 8 if is_causal else 4, is_causal=is_causal)


@supporting(
  # They cross to another length of the memory, with gradients, in a test below.
  left=[
    m.name
    for m in SEQUENCE
    if "cross" in m.supports and m.name not in ("flash", "sliding_window")
  ],
  where=lambda m: len(directions(m.record)) == 2,
)
def test_parts_are_the_whole_in_the_other_direction(mechanism):
  check_parts(mechanism, 4, is_causal=False, gradients=False)


@supporting(
  "dropout",
  left=("dense", "multiplicative", "latent", "additive"),
  where=lambda m: m.record.cost != "linear",
)
def test_dropout_drops_what_it_drops_in_the_whole(mechanism):
  call = {
    "mask": padding(24, 24),
    "dropout_rate": 0.4,
    "dropout_rng": jax.random.key(5),
  }
  check(mechanism, 4, 24, is_causal=True, **call)
  if mechanism.name == "flash":
    in_parts = {"implementation": "balanced"}
    check(mechanism, 4, 24, in_parts=in_parts, **call)


@pytest.mark.parametrize("has_own", [False, True])
@supporting("global")
def test_global_tokens_are_on_all_devices(mechanism, has_own):
  """Two that one device has, one twice, one of no device, one that is padding."""
  ids = segments(24)
  call = {"global_indices": jnp.asarray([[7, 8, 22, 7], [-1, 3, 0, 14]])}
  if has_own:
    _, *own = arrays_of(mechanism, 24, seed=3)
    call["global_qkv"] = tuple(own)
    call |= {"query_segment_ids": ids, "key_segment_ids": ids}
    check(mechanism, 8, 24, is_causal=True, **call)
  else:
    check(mechanism, 4, 24, mask=padding(24, 24), **call)


@pytest.mark.parametrize("mechanism", SEQUENCE, ids=str)
def test_what_has_no_form_in_parts_is_refused(mechanism):
  pairs = jnp.ones((1, 1, 12, 12), bool)  # Of a pair of parts.
  with pytest.raises(ValueError, match=r"^mask: expected a key mask"):
    check_refused(mechanism, mask=pairs)
  if "bias" in mechanism.supports:
    with pytest.raises(ValueError, match=r"^bias: expected none where"):
      check_refused(mechanism, bias=jnp.zeros((1, 1, 1, 1)))
  if "dropout" in mechanism.supports and mechanism.record.cost == "linear":
    with pytest.raises(ValueError, match=r"^dropout_rate: expected none"):
      check_refused(mechanism, dropout_rate=0.5, dropout_rng=jax.random.key(0))


def check_refused(mechanism, **call):
  """The call on two devices; masks of pairs are whole on each."""
  call["is_causal"] = mechanism.record.causal_only
  arguments = arrays_of(mechanism, 24)
  jax.eval_shape(sharded(mechanism, 2, **call), *arguments)


def flash():
  return next(m for m in MECHANISMS if m.name == "flash")


@pytest.mark.parametrize(
  ("implementation", "devices", "is_causal", "options"),
  [
    ("balanced", 3, False, "by_head"),
    ("balanced", 3, True, "segments"),
    ("balanced", 4, True, "tables"),
    ("all_to_all", 2, True, "mask"),
    ("all_to_all", 2, False, "segments"),
    ("all_to_all", 2, True, "by_head"),
    *thorough(
      ("balanced", 1, True, "mask"),
      ("balanced", 4, False, "mask"),
      ("all_to_all", 2, False, "tables"),
    ),
  ],
)
def test_other_ways_of_exact_attention(
  implementation, devices, is_causal, options
):
  length, in_parts = 24, {"implementation": implementation}
  rng = np.random.default_rng(2)
  bias = jnp.asarray(rng.normal(size=(HEADS, 11)), jnp.float32)
  keys = jnp.asarray(rng.normal(size=(HEADS, 11, DIM)), jnp.float32)
  ids = segments(length)
  call = {
    "mask": {"mask": padding(length, length)},
    "segments": {"query_segment_ids": ids, "key_segment_ids": ids},
    "tables": {"relative_bias": bias, "relative_keys": keys[0]},
    "by_head": {"relative_keys": keys, "scale": 0.7},
  }[options]
  check(
    flash(), devices, length, in_parts=in_parts, is_causal=is_causal, **call
  )


def test_heads_cross_at_once_and_work_is_balanced():
  """Bytes of heads against positions, and half the operations of the ring."""
  length, devices = 64, 2
  found = crossing(flash(), devices, length, implementation="all_to_all")
  of_position = 2 * BATCH * (HEADS + KV_HEADS) * DIM
  most = 4 * length / devices * of_position * (devices - 1) / devices
  assert 0.5 * most < found <= 1.2 * most
  ring, balanced = (
    crossing(flash(), 4, length, is_causal=True, implementation=name)
    for name in ("ring", "balanced")
  )
  # Halves of queries, keys, values and results go there and back.
  more = 4 * length / 4 * (of_position + BATCH * KV_HEADS * DIM * 2)
  assert ring < balanced <= ring + 1.2 * more


def test_what_an_implementation_cannot_serve_is_told():
  with pytest.raises(ValueError, match="even number of positions on a device"):
    check(
      flash(), 4, 12, in_parts={"implementation": "balanced"}, is_causal=True
    )
  with pytest.raises(ValueError, match="gives each of 4 devices a share of"):
    check(flash(), 4, 24, in_parts={"implementation": "all_to_all"})
  with pytest.raises(
    ValueError, match=r"^dropout_rate: expected 0.0 with 'all"
  ):
    check(
      flash(),
      2,
      24,
      in_parts={"implementation": "all_to_all"},
      dropout_rate=0.4,
      dropout_rng=jax.random.key(5),
    )
  with pytest.raises(ValueError, match=r"^in_parts: expected one of ring, bal"):
    ATTENTIONS["flash"](in_parts="ulysses")


@supporting("cross", where=lambda m: not m.record.causal_only)
def test_memory_may_have_another_length(mechanism):
  if mechanism.name == "sliding_window":
    # Positions are aligned at the start, which parts of two lengths are not.
    with pytest.raises(ValueError, match=r"^key: expected the positions of"):
      check(mechanism, 4, 8, 20)
    return
  check(mechanism, 4, 8, 20, mask=padding(8, 20))


@pytest.mark.parametrize(
  "mechanism",
  [
    pytest.param(m, marks=[] if is_kept else pytest.mark.thorough)
    for m in SEQUENCE
    for is_kept in [m in ONE_EACH and m.name in _KINDS]
  ],
  ids=str,
)
def test_one_device_is_the_whole(mechanism):
  check(mechanism, 1, 7, is_causal=directions(mechanism.record)[-1])


def test_what_is_claimed_is_there():
  for mechanism in MECHANISMS:
    # With nothing to compute, one that works fails otherwise.
    with pytest.raises((ValueError, TypeError)) as error:
      mechanism.factory(**mechanism.options).apply_sharded()
    refuses = "`supports` has 'sequence'" in str(error.value)
    assert refuses == ("sequence" not in mechanism.supports)


@functools.cache
def crossing(mechanism, devices, length, **call):
  """Bytes that a device sends in a forward call, from the compiled program."""
  arguments = arrays_of(mechanism, length)
  function = jax.jit(sharded(mechanism, devices, **call))
  return sum(
    traffic.sent(function.lower(*arguments).compile().as_text()).values()
  )


def promised(mechanism, devices, length, is_causal):
  """What docs/scaling.md says of it, in bytes of float32."""
  of_position = BATCH * KV_HEADS * (DIM + DIM)
  options = mechanism.options
  match mechanism.name:
    case "dense" | "flash" | "multiplicative":
      numbers = length * of_position * (devices - 1) / devices
    case "additive":
      of_position = BATCH * (HEADS * options["width"] + KV_HEADS * DIM)
      numbers = length * of_position * (devices - 1) / devices
    case "sliding_window":
      sides = options["window"]
      left, right = sides if isinstance(sides, tuple) else (sides, sides)
      dilation = options.get("dilation", 1)
      farthest = max(dilation) if isinstance(dilation, tuple) else dilation
      reach = left + (0 if is_causal else right)
      # A mask of a byte for each position goes with them.
      numbers = reach * farthest * (of_position + BATCH / 4)
    case "linear" | "performer":
      features = options.get("num_features", DIM)
      features = 2 * DIM if "hedgehog" in options.values() else features
      rows = DIM + 1 + (mechanism.name == "performer")
      state = BATCH * KV_HEADS * features * rows
      rounds = math.log2(devices) + 1
      numbers = state * (rounds if is_causal else 2 * (devices - 1) / devices)
    case "window_linear":
      state = BATCH * KV_HEADS * 2 * DIM * (DIM + 1)
      numbers = options["window"] * (of_position + BATCH / 4)
      numbers += state * (math.log2(devices) + 1)
    case "linformer":
      rows = 2 * BATCH * KV_HEADS * options["rank"] * DIM
      numbers = rows * 2 * (devices - 1) / devices
    case "bigbird":
      block = options["block_size"]
      numbers = length * of_position * (devices - 1) / devices
      # Queries of global blocks; results, sums and largest logits.
      ends = BATCH * HEADS * (DIM + DIM + 2)
      numbers += 2 * block * ends * 2 * (devices - 1) / devices
      # The mask: bytes round the ring, and a few whole numbers of the globals.
      numbers += length * BATCH / 4
    case "nystrom":
      # Means of queries and keys; results, their sums and the largest logits.
      of_landmark = HEADS * DIM + KV_HEADS * DIM + HEADS * (DIM + 2)
      rows = BATCH * options["num_landmarks"] * of_landmark
      numbers = rows * 2 * (devices - 1) / devices + BATCH * devices
      filtered = options.get("conv_kernel_size", 1) - 1
      numbers += filtered * BATCH * KV_HEADS * DIM
    case "differential":
      of_position = 2 * BATCH * KV_HEADS * (DIM // 2 + DIM)
      numbers = length * of_position * (devices - 1) / devices
    case "latent":
      of_position = 2 * BATCH * HEADS * DIM
      numbers = length * of_position * (devices - 1) / devices
    case "retention" | "lightning" | "gated_linear" | "mamba2" | "mamba3":
      channels = DIM if mechanism.name == "gated_linear" else 1
      numbers = carried(devices, channels)
      if mechanism.name == "mamba3":
        # The last key and value, whether there are any, and the sum of angles.
        rows = BATCH * HEADS * (2 * DIM + DIM // 4) + BATCH / 4
        numbers += rows * (math.log2(devices) + 1)
    case "mesa":
      numbers = carried(devices, 1, 2 * DIM * DIM)
    case "log_linear":
      levels = options["num_levels"] - 1
      numbers = carried(devices, 1, levels * DIM * DIM)
    case name if name in RECURRENT:
      numbers = carried(devices, DIM * DIM)
  return 4 * numbers


def carried(devices, factors, state=DIM * DIM):
  """Numbers of the states, and of their factors in all rounds but the last."""
  rounds = math.log2(devices)
  return BATCH * HEADS * (state * (rounds + 1) + factors * (rounds - 1))


@supporting(left=_ALIKE)
def test_no_more_crosses_than_promised(mechanism):
  for is_causal in directions(mechanism.record):
    found = crossing(mechanism, 4, 64, is_causal=is_causal)
    most = promised(mechanism, 4, 64, is_causal)
    assert 0.5 * most < found <= 1.2 * most, (is_causal, found, most)


# BigBird asks for blocks from everywhere, and all keys pass by.
@supporting(
  left=_ALIKE,
  where=lambda m: m.record.cost == "linear" and m.name != "bigbird",
)
def test_what_crosses_does_not_grow_with_the_length(mechanism):
  is_causal = directions(mechanism.record)[-1]
  short, long = (
    crossing(mechanism, 4, length, is_causal=is_causal) for length in (64, 256)
  )
  assert long <= short


@supporting(left=_ALIKE)
def test_no_device_has_an_array_of_all_positions(mechanism):
  """Forward and backward; no other size here has the factors 7 and 23."""
  length = 7 * 23 * block(mechanism)
  is_causal = directions(mechanism.record)[-1]
  variables, *arrays = arrays_of(mechanism, length)
  function = sharded(mechanism, 7, is_causal=is_causal)

  def loss(query, key, value):
    return jnp.sum(function(variables, query, key, value) ** 2)

  program = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*arrays).compile()
  shapes = re.findall(r"\w\[([\d,]+)\]", program.as_text())
  sizes = {int(n) for shape in shapes for n in shape.split(",")}
  assert length // 7 in sizes
  if mechanism.name == "linformer":  # Its rows of projections are whole.
    sizes.discard(length)
  assert not {n for n in sizes if n and n % length == 0}, sizes

"""A sequence in parts, one a device, is attended to as the whole is."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention
from attention import ATTENTIONS, Dims
from attention.mechanism import directions
from tests.attention.calls import normal
from tests.attention.forms import RECURRENT
from tests.attention.mechanisms import MECHANISMS, ONE_EACH
from training.devices import hlo

AXIS = "sequence"
BATCH, HEADS, KV_HEADS, DIM = 2, 4, 2, 8
SEQUENCE = [m for m in MECHANISMS if "sequence" in m.supports]
_ALIKE = {"dense", "multiplicative", "linear", *RECURRENT} - {
  *(
    "gated_linear",
    "kimi_delta",
    "mamba3",
    "rwkv6",
    "mesa",
    "gsa",
    "log_linear",
    "momentum_delta",
    "precond_delta",
  )
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
  """Variables, query, key and value."""
  source = length if source is None else source
  dims = Dims(HEADS, KV_HEADS, DIM, source, KV_HEADS * DIM)
  shapes = (length, HEADS), (source, KV_HEADS), (source, KV_HEADS)
  qkv = normal(*((BATCH, *shape, DIM) for shape in shapes), seed=seed)
  return mechanism.variables(dims), *qkv


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
  """`apply` of shards of whole arrays, `(variables, query, key, value, options)`."""
  auto = (jax.sharding.AxisType.Auto,)
  mesh = jax.make_mesh(
    (devices,), (AXIS,), auto, devices=jax.devices()[:devices]
  )
  parts = {
    n: x for n, x in call.items() if hasattr(x, "shape") or n == "global_qkv"
  }
  rest = {n: x for n, x in call.items() if n not in parts}
  rows = jax.P(None, AXIS)

  def local(variables, query, key, value, parts):
    return mechanism.record.apply(
      variables, query, key, value, axis_name=AXIS, **parts, **rest
    )

  options = {name: by_position(name, x) for name, x in parts.items()}
  specs = (jax.P(), rows, rows, rows, options)
  return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=rows), parts


def check(
  mechanism, devices, length, source=None, in_parts=None, gradients=True, **call
):
  """Values and, unless `gradients` is False, gradients against the whole's.

  `in_parts` are options of the parts alone. Returns the compiled program's text.
  """
  arguments = arrays_of(mechanism, length, source)
  if "mask" in call and mechanism.factory(**mechanism.options).gates is None:
    # Not so where gates are read from keys, before a mask is known.
    keep = call["mask"][:, 0, 0, :, None, None]
    *others, key, value = arguments
    arguments = *others, *(np.where(keep, x, np.nan) for x in (key, value))
  function, parts = sharded(mechanism, devices, **call, **(in_parts or {}))

  def whole(variables, query, key, value, parts):
    return mechanism.record.apply(
      variables, query, key, value, **{**call, **parts}
    )

  def results(function):
    """The compiled program, called with the values of its arguments."""

    def loss(arguments, parts):
      out = function(*arguments, parts)
      return jnp.sum(jnp.sin(3.0 * out)), out

    run = jax.grad(loss, has_aux=True, allow_int=True)
    if not gradients:
      run = lambda arguments, parts: function(*arguments, parts)  # noqa: E731
    program = jax.jit(run).lower(arguments, parts).compile()
    return program(arguments, parts), program

  (expected, _), (found, program) = results(whole), results(function)
  named = jax.tree_util.tree_leaves_with_path(found)
  for (path, one), other in zip(named, jax.tree.leaves(expected), strict=True):
    if one.dtype == jax.dtypes.float0:  # Constants of whole numbers.
      continue
    is_out = not gradients or path[0].idx == 1
    scale = max(1.0, np.abs(other).max())
    bound = 2e-5 if is_out else 2e-4 * scale
    np.testing.assert_allclose(
      one, other, atol=bound, rtol=2e-5 if is_out else 1e-7
    )
  return program.as_text()


def padding(source):
  """The last parts are padding in one row, and a few keys in the other."""
  mask = np.ones((BATCH, 1, 1, source), bool)
  mask[0, ..., source // 2 - 1 :] = False
  mask[1, ..., 3] = False
  return jnp.asarray(mask)


def segments(length):
  """Three examples in a row, whose bounds are not those of the parts."""
  cuts = np.array([[length // 5, 2 * length // 3]])
  ids = (np.arange(length)[:, None] >= cuts).sum(1)
  ids = jnp.asarray(np.tile(ids, (BATCH, 1)))
  return {"query_segment_ids": ids, "key_segment_ids": ids}


def tables(*lead):
  """Of distances: biases, and keys and queries for all heads or, with `lead`, each."""
  bias, keys, queries = normal(
    (HEADS, 11), (*lead, 11, DIM), (*lead, 9, DIM), seed=2
  )
  by_distance = {"relative_keys": keys, "relative_queries": queries}
  return {"relative_bias": bias, **by_distance}


def check_parts(mechanism, devices, length, **call):
  """Segments cross the parts, padding fills some.

  Terms by distance know where a part stands.
  """
  length *= block(mechanism)
  call["mask"] = padding(length)
  call |= segments(length) if "segments" in mechanism.supports else {}
  call |= tables() if "relative" in mechanism.supports else {}
  return check(mechanism, devices, length, **call)


def test_which_mechanisms_take_no_shards():
  """Of the claims of most recurrences, only thorough tests see that they are true."""
  others = {m.name for m in MECHANISMS} - {m.name for m in SEQUENCE}
  assert others == {
    *("lsh", "moba", "nsa", "dsa", "compressed", "path", "stick_breaking"),
    *("strided_2d", "window_2d"),
    *("mamba", "mlstm", "rg_lru", "titans", "ttt_linear"),
  }


# Dense, multiplicative and linear attention cross to another length below.
@supporting(left=_ALIKE, kept=("conv_kernel_size",))
def test_parts_are_the_whole(mechanism):
  """And no device has an array of all positions, forward or backward."""
  is_causal = directions(mechanism.record)[-1]
  # No other size has these factors; BigBird has three blocks in a window.
  devices, part = 5 if mechanism.name == "bigbird" else 3, 31
  text = check_parts(mechanism, devices, devices * part, is_causal=is_causal)
  shapes = re.findall(r"\w\[([\d,]+)\]", text)
  sizes = {int(n) for shape in shapes for n in shape.split(",")}
  length = devices * part * block(mechanism)
  assert length // devices in sizes
  if mechanism.name == "linformer":  # Its rows of projections are whole.
    sizes.discard(length)
  assert not {n for n in sizes if n and n % length == 0}, sizes


# Three positions a device, of which a window reaches more.
@supporting(kept=("dilation",), where=lambda m: "dilation" in m.options)
def test_a_window_reaches_beyond_the_next_device(mechanism):
  check_parts(mechanism, 8, 24, is_causal=mechanism.options["dilation"] != 2)


@supporting(
  # They cross to another length of the memory in a test below.
  left=[
    m.name
    for m in SEQUENCE
    if "cross" in m.supports and m.name not in ("flash", "sliding_window")
  ],
  where=lambda m: len(directions(m.record)) == 2,
)
def test_parts_are_the_whole_in_the_other_direction(mechanism):
  check_parts(mechanism, 4, 24, is_causal=False, gradients=False)


@supporting(
  "dropout",
  left=("dense", "multiplicative", "latent", "additive"),
  where=lambda m: m.record.cost != "linear",
)
def test_dropout_drops_what_it_drops_in_the_whole(mechanism):
  key = jax.random.key(5)
  call = {"mask": padding(24), "dropout_rate": 0.4, "dropout_rng": key}
  check(mechanism, 4, 24, is_causal=True, **call)
  if mechanism.name == "flash":
    balanced = {"in_parts": "balanced"}
    check(mechanism, 4, 24, in_parts=balanced, gradients=False, **call)


@pytest.mark.parametrize("has_own", [False, True])
@supporting("global")
def test_global_tokens_are_on_all_devices(mechanism, has_own):
  """Two that one device has, one twice, one of no device, one that is padding."""
  call = {"global_indices": jnp.asarray([[7, 8, 22, 7], [-1, 3, 0, 14]])}
  if has_own:
    _, *own = arrays_of(mechanism, 24, seed=3)
    call |= {"global_qkv": tuple(own), **segments(24)}
    check(mechanism, 8, 24, is_causal=True, **call)
  else:
    check(mechanism, 4, 24, mask=padding(24), **call)


@supporting()
def test_what_has_no_form_in_parts_is_refused(mechanism):
  refused = {"mask": jnp.ones((1, 1, 12, 12), bool)}  # Of a pair of parts.
  if "bias" in mechanism.supports:
    refused["bias"] = jnp.zeros((1, 1, 1, 1))
  if "dropout" in mechanism.supports and mechanism.record.cost == "linear":
    refused["dropout_rate"] = 0.5
  for name, option in refused.items():
    rng = {"dropout_rng": jax.random.key(0)} if name == "dropout_rate" else {}
    with pytest.raises(ValueError, match=f"^{name}: expected"):
      trace(mechanism, 2, 24, **{name: option}, **rng)


def trace(mechanism, devices, length, source=None, **call):
  """The call without its numbers; masks of pairs are whole on each device."""
  call = {"is_causal": mechanism.record.causal_only, **call}
  function, parts = sharded(mechanism, devices, **call)
  jax.eval_shape(function, *arrays_of(mechanism, length, source), parts)


FLASH = next(m for m in MECHANISMS if m.name == "flash")
LENGTHS = attention.lengths(np.array([24, 15]), np.array([24, 14]))


@pytest.mark.parametrize(
  ("implementation", "devices", "is_causal", "options"),
  [
    ("balanced", 3, False, {"mask": padding(24), **tables(HEADS)}),
    ("balanced", 4, True, {**segments(24), **tables()}),
    ("all_to_all", 2, True, {"mask": padding(24), "scale": 0.7, **tables(HEADS)}),
    ("all_to_all", 2, False, {**segments(24), **tables()}),
  ],
)  # fmt: skip
def test_other_ways_of_exact_attention(
  implementation, devices, is_causal, options
):
  in_parts = {"in_parts": implementation}
  options = {"in_parts": in_parts, "is_causal": is_causal, **options}
  check(FLASH, devices, 24, **options)


@pytest.mark.parametrize(
  ("name", "options"),
  [
    ("dense", {"is_causal": True, "visible": LENGTHS}),
    ("flash", {"in_parts": "balanced", "is_causal": True, "visible": LENGTHS}),
    ("flash", {"in_parts": "all_to_all"}),
    ("sliding_window", {"window": 3, "visible": LENGTHS}),
    ("sliding_window", {"window": (10, 7), "dilation": 2}),
    ("differential", {"weight": 0.3}),
    ("linformer", {"key_projection": normal((24, 5))[0]}),
    ("bigbird", {"block_size": 3, "random_blocks": np.zeros((HEADS, 6, 1), int)}),
  ],
)  # fmt: skip
def test_functions_return_the_log_sum_exp_of_shards(name, options):
  """Of all positions, also where one row of the batch has no keys."""
  function = getattr(attention, f"{name}_attention")
  mask = padding(24).at[0].set(False)
  auto = (jax.sharding.AxisType.Auto,)
  mesh = jax.make_mesh((2,), (AXIS,), auto, devices=jax.devices()[:2])
  rows = jax.P(None, AXIS)

  def local(query, key, value, mask):
    call = {"axis_name": AXIS, "mask": mask, "return_lse": True, **options}
    return function(query, key, value, **call)

  attend = jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(rows, rows, rows, jax.P(None, None, None, AXIS)),
    out_specs=rows,
  )
  qkv = arrays_of(FLASH, 24)[1:]
  whole = function(*qkv, mask=mask, return_lse=True, **options)
  found = jax.jit(attend)(*qkv, mask)
  for one, other in zip(*map(jax.tree.leaves, (found, whole)), strict=True):
    np.testing.assert_allclose(one, other, atol=2e-5, rtol=2e-5)


def test_heads_cross_at_once_and_work_is_balanced():
  """Bytes of heads against positions, and half the operations of the ring."""
  length, devices = 64, 2
  found = crossing(FLASH, devices, length, in_parts="all_to_all")
  of_position = 2 * BATCH * (HEADS + KV_HEADS) * DIM
  most = 4 * length / devices * of_position * (devices - 1) / devices
  assert 0.5 * most < found <= 1.2 * most
  ring, balanced = (
    crossing(FLASH, 4, length, is_causal=True, in_parts=name)
    for name in ("ring", "balanced")
  )
  # Halves of queries, keys, values and results go there and back.
  more = 4 * length / 4 * (of_position + BATCH * KV_HEADS * DIM * 2)
  assert ring < balanced <= ring + 1.2 * more


def test_what_an_implementation_cannot_serve_is_told():
  dropout = {"dropout_rate": 0.4, "dropout_rng": jax.random.key(5)}
  for implementation, devices, length, call, message in (
    (
      "balanced",
      4,
      12,
      {"is_causal": True},
      "even number of positions on a device",
    ),
    (
      "ring",
      2,
      24,
      {"visible": attention.window(None, 3)},
      "^window: expected",
    ),
    ("all_to_all", 4, 24, {}, "gives each of 4 devices a share of"),
    ("all_to_all", 2, 24, dropout, "^dropout_rate: expected 0.0 with 'all"),
  ):
    with pytest.raises(ValueError, match=message):
      trace(FLASH, devices, length, in_parts=implementation, **call)
  with pytest.raises(ValueError, match=r"^in_parts: expected one of ring, bal"):
    ATTENTIONS["flash"](in_parts="ulysses")


@supporting("cross", where=lambda m: not m.record.causal_only)
def test_memory_may_have_another_length(mechanism):
  if mechanism.name == "sliding_window":
    # Positions are aligned at the start, which parts of two lengths are not.
    with pytest.raises(ValueError, match=r"^key: expected the positions of"):
      trace(mechanism, 4, 8, 20)
    return
  # Those alike have the derivatives of what they are made of.
  gradients = mechanism.name not in _ALIKE
  check(mechanism, 4, 8, 20, mask=padding(20), gradients=gradients)


# A ring of keys, states, factors of states.
@supporting(where=lambda m: m.name in ("flash", "performer", "kimi_delta"))
def test_one_device_is_the_whole(mechanism):
  is_causal = directions(mechanism.record)[-1]
  check(mechanism, 1, 7, is_causal=is_causal, gradients=False)


@pytest.mark.parametrize("mechanism", ONE_EACH, ids=str)
def test_an_axis_is_refused_outside_of_shard_map_or_without_the_claim(
  mechanism,
):
  variables, query, key, value = arrays_of(mechanism, 12)
  key = None if "shared_qk" in mechanism.supports else key
  call = {"is_causal": mechanism.record.causal_only, "axis_name": AXIS}
  refusal = "^axis_name: (.* has no such option; |expected a mesh axis, inside)"
  with pytest.raises(ValueError, match=refusal):
    mechanism.record.apply(variables, query, key, value, **call)


def crossing(mechanism, devices, length, **call):
  """Bytes that a device sends in a forward call, from the compiled program."""
  function, parts = sharded(mechanism, devices, **call)
  arguments = *arrays_of(mechanism, length), parts
  program = jax.jit(function).lower(*arguments).compile()
  return sum(hlo.bytes_sent(program.as_text()).values())


def promised(mechanism, devices, length, is_causal):
  """What docs/scaling.md says of it, in bytes of float32."""
  of_position = BATCH * KV_HEADS * (DIM + DIM)
  options, share = mechanism.options, (devices - 1) / devices
  match mechanism.name:
    case "dense" | "flash" | "multiplicative":
      numbers = length * of_position * share
    case "additive":
      of_position = BATCH * (HEADS * options["width"] + KV_HEADS * DIM)
      numbers = length * of_position * share
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
      if "taylor" in options.values():
        features = 1 + DIM + DIM * (DIM + 1) // 2
      rows = DIM + 1 + (mechanism.name == "performer")
      state = BATCH * KV_HEADS * features * rows
      rounds = math.log2(devices) + 1
      numbers = state * (rounds if is_causal else 2 * share)
    case "window_linear":
      state = BATCH * KV_HEADS * 2 * DIM * (DIM + 1)
      numbers = options["window"] * (of_position + BATCH / 4)
      numbers += state * (math.log2(devices) + 1)
    case "linformer":
      numbers = 4 * BATCH * KV_HEADS * options["rank"] * DIM * share
    case "bigbird":
      block = options["block_size"]
      numbers = length * of_position * share
      # Queries of global blocks; results, sums and largest logits.
      ends = BATCH * HEADS * (DIM + DIM + 2)
      numbers += 2 * block * ends * 2 * share
      # The mask: bytes round the ring, and a few whole numbers of the globals.
      numbers += length * BATCH / 4
    case "nystrom":
      # Means of queries and keys; results, their sums and the largest logits.
      of_landmark = HEADS * DIM + KV_HEADS * DIM + HEADS * (DIM + 2)
      rows = BATCH * options["num_landmarks"] * of_landmark
      numbers = rows * 2 * share + BATCH * devices
      filtered = options.get("conv_kernel_size", 1) - 1
      numbers += filtered * BATCH * KV_HEADS * DIM
    case "differential":
      numbers = length * 2 * BATCH * KV_HEADS * (DIM // 2 + DIM) * share
    case "latent":
      numbers = length * 2 * BATCH * HEADS * DIM * share
    case "gated_linear" | "hgrn2" | "rwkv6":
      numbers = carried(devices, DIM)
    case "retention" | "lightning" | "mamba2" | "mamba3":
      numbers = carried(devices, 1)
      if mechanism.name == "mamba3":
        # The last key and value, whether there are any, and the sum of angles.
        rows = BATCH * HEADS * (2 * DIM + DIM // 4) + BATCH / 4
        numbers += rows * (math.log2(devices) + 1)
    case "gsa":
      slots = options["num_slots"]
      numbers = carried(devices, slots, slots * 2 * DIM)
    case "mesa" | "gka":
      numbers = carried(devices, 1, 2 * DIM * DIM)
    case "momentum_delta":
      numbers = carried(devices, 4 * DIM * DIM, 2 * DIM * DIM)
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


# Of what is linear in the length, no promise has it: what crosses does not grow.
@supporting(left=_ALIKE)
def test_no_more_crosses_than_promised(mechanism):
  for is_causal in directions(mechanism.record):
    found = crossing(mechanism, 4, 256, is_causal=is_causal)
    most = promised(mechanism, 4, 256, is_causal)
    assert 0.5 * most < found <= 1.2 * most, (is_causal, found, most)


def loops(jaxpr):
  """All scans of a program, those inside of others as well."""
  for equation in jaxpr.eqns:
    if equation.primitive.name == "scan":
      yield equation
    inner = jax.tree.leaves(
      list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
    )
    for one in inner:
      one = getattr(one, "jaxpr", one)
      if hasattr(one, "eqns"):
        yield from loops(one)


@pytest.mark.parametrize(
  "mechanism", [m for m in ONE_EACH if m.name in ("flash", "additive")], ids=str
)
def test_a_ring_keeps_no_tiles_for_its_rounds(mechanism):
  """JAX computes what is alike in all rounds of a loop ahead, for every tile."""
  arguments = arrays_of(mechanism, 32)
  function, parts = sharded(mechanism, 2, is_causal=True)

  def loss(arguments):
    return jnp.sum(function(*arguments, parts))

  gradient = jax.grad(loss, allow_int=True)
  found = list(loops(jax.make_jaxpr(gradient)(arguments).jaxpr))
  assert len(found) >= 4
  for loop in found:
    for x in loop.outvars:
      # Arrays are [B, T, N, H]; tiles, one after another, have one axis more.
      is_float = jnp.issubdtype(x.aval.dtype, jnp.floating)
      assert x.aval.ndim <= 4 or not is_float, x.aval

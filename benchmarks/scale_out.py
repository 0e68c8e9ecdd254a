"""What each mechanism costs on more devices, at the same work for each of them.

    python -m benchmarks.scale_out
    python -m benchmarks.scale_out --attention=performer --positions=4096

A sequence of D · `--positions` positions lies on D = 1, 2, 4 and 8 simulated
devices, B 1, N 8, H 64, float32. Programs are compiled and not run: on a few cores
their time would say nothing. For the call alone and with gradients, the table has
operations of one device, temporaries of one device, and bytes that it sends, beside
what docs/scaling.md promises. A second table has the longest sequence whose query,
key, value, result, their gradients and the temporaries fit into devices of 16 and
of 141 GB, on 1 and on 1,024 of them: on paper, by the temporaries of two lengths.
"""

import functools
import math
from typing import Any

from absl import flags

from settings.errors import ConfigError
from training import entry

_POSITIONS = flags.DEFINE_integer(
  "positions", 1024, "of each device", lower_bound=64
)
_ATTENTION = flags.DEFINE_list(
  "attention",
  [],
  "mechanisms; default all with a form in parts; flash:balanced and "
  "flash:all_to_all are other ways of flash",
)

BATCH, HEADS, DIM = 1, 8, 64
DEVICES = (1, 2, 4, 8)
MEMORY = (16e9, 141e9)
MANY = 1024

_AXIS = "sequence"


def main() -> None:
  """Compiles everything and prints two tables."""
  import jax

  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", max(DEVICES))
  from attention import ATTENTIONS, plug

  mechanisms = plug.supporting(ATTENTIONS, _AXIS)
  names = _ATTENTION.value or [
    *mechanisms,
    *(f"flash:{way}" for way in ("balanced", "all_to_all")),
  ]
  if unknown := [
    name for name in names if name.split(":")[0] not in mechanisms
  ]:
    raise ConfigError(
      "--attention: expected mechanisms with a form in parts, "
      f"{', '.join(mechanisms)}, got {', '.join(unknown)}"
    )
  positions = _POSITIONS.value
  print(
    f"B {BATCH}, N {HEADS}, H {DIM}, float32, {positions:,} positions a device; "
    f"jax {jax.__version__}\n"
  )
  print(
    "| mechanism | causal | part | devices | GFLOP | MiB | MB sent | promised |"
  )
  print("| --- | :-: | --- | --: | --: | --: | --: | --: |")
  longest = []
  for name in names:
    mechanism = _mechanism(name, positions)
    for is_causal in plug.directions(mechanism):
      for with_gradients in (False, True):
        for devices in DEVICES:
          row = measure(
            mechanism, devices, positions, is_causal, with_gradients
          )
          promised = sent_on_paper(
            name, mechanism, devices, positions, is_causal
          )
          part = "with gradients" if with_gradients else "forward"
          promise = "" if with_gradients else f"{promised / 1e6:.3f}"
          print(
            f"| `{name}` | {'✓' if is_causal else ''} | {part} | {devices} | "
            f"{row['flops'] / 1e9:.2f} | {row['temporaries'] / 2**20:.1f} | "
            f"{row['sent'] / 1e6:.3f} | {promise} |",
            flush=True,
          )
    longest.append((name, *_longest(name, positions)))
  print(
    "\n| mechanism | 1 × 16 GB | 1 × 141 GB | 1,024 × 16 GB | 1,024 × 141 GB |"
  )
  print("| --- | --: | --: | --: | --: |")
  for name, *lengths in longest:
    cells = " | ".join(f"{length:,.0f}" for length in lengths)
    print(f"| `{name}` | {cells} |")


def _mechanism(name: str, positions: int) -> Any:
  """With hyperparameters that do not grow with the number of devices."""
  from attention import ATTENTIONS, gates_from_keys, plug

  name, _, in_parts = name.partition(":")
  factory = ATTENTIONS[name]
  options = dict(plug.example(factory).sizes.timed(positions))
  if in_parts:
    options["in_parts"] = in_parts
  return gates_from_keys(factory(**options))


def measure(
  mechanism: Any,
  devices: int,
  positions: int,
  is_causal: bool,
  with_gradients: bool,
) -> dict[str, float]:
  """Operations, bytes of temporaries and bytes sent, of one device."""
  import jax
  import jax.numpy as jnp

  from attention import Dims
  from training import flops, traffic

  mesh = jax.make_mesh(
    (devices,),
    (_AXIS,),
    axis_types=(jax.sharding.AxisType.Auto,),
    devices=jax.devices()[:devices],
  )
  length = devices * positions
  dims = Dims(HEADS, HEADS, DIM, length, HEADS * DIM)
  variables = jax.eval_shape(lambda: mechanism.init(jax.random.key(0), dims))
  everywhere = jax.NamedSharding(mesh, jax.P())
  rows = jax.NamedSharding(mesh, jax.P(None, _AXIS))
  variables = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere),
    variables,
  )
  arrays = [
    jax.ShapeDtypeStruct(
      (BATCH, length, HEADS, DIM), jnp.float32, sharding=rows
    )
  ] * 3
  local = functools.partial(
    mechanism.apply_sharded, axis_name=_AXIS, is_causal=is_causal
  )
  attend = jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(jax.P(), *(jax.P(None, _AXIS),) * 3),
    out_specs=jax.P(None, _AXIS),
    check_vma=False,
  )
  function: Any = attend
  if with_gradients:

    def function(variables, query, key, value):
      out, pull = jax.vjp(
        functools.partial(attend, variables), query, key, value
      )
      return out, pull(out)

  compiled: Any = jax.jit(function).lower(variables, *arrays).compile()
  return {
    "flops": flops.count(function, variables, *arrays).flops / devices,
    "temporaries": compiled.memory_analysis().temp_size_in_bytes,
    "sent": sum(traffic.sent(compiled.as_text()).values()),
  }


def sent_on_paper(
  name: str, mechanism: Any, devices: int, positions: int, is_causal: bool
) -> float:
  """Bytes that a device sends forward, by the formulas of docs/scaling.md."""
  length, others = devices * positions, (devices - 1) / devices
  options = dict(mechanism.sizes.timed(positions))
  heads = BATCH * HEADS
  match name:
    case "sliding_window":
      sides = 1 if is_causal else 2
      reach = min(options["window"], positions * (devices - 1)) * sides
      numbers = reach * heads * 2 * DIM if devices > 1 else 0
    case "linear" | "performer":
      features = options.get("num_features", DIM)
      state = heads * features * (DIM + 1 + (name == "performer"))
      rounds = math.ceil(math.log2(devices)) + (devices > 1)
      numbers = state * (rounds if is_causal else 2 * others)
    case "window_linear":
      reach = min(options["window"], positions * (devices - 1))
      rounds = math.ceil(math.log2(devices)) + (devices > 1)
      numbers = heads * 2 * DIM * (reach + rounds * (DIM + 1))
    case "differential":
      numbers = 2 * length * heads * (DIM // 2 + DIM) * others
    case "retention" | "lightning" | "gated_linear" | "mamba2":
      numbers = _carried(devices, DIM if name == "gated_linear" else 1)
    case "mamba3":
      # The last key and value and the sum of angles, beside the state.
      rounds = math.ceil(math.log2(devices)) + (devices > 1)
      rows = heads * (2 * DIM + DIM // 4) * rounds
      numbers = _carried(devices, 1) + rows
    case "mesa":
      numbers = _carried(devices, 1, 2 * DIM * DIM)
    case "log_linear":
      levels = options.get("num_levels", 16) - 1
      numbers = _carried(devices, 1, levels * DIM * DIM)
    case (
      "delta"
      | "gated_delta"
      | "kimi_delta"
      | "comba"
      | "gated_delta_2"
      | "delta_product"
      | "rwkv7"
    ):
      numbers = _carried(devices, DIM * DIM)
    case "nystrom":
      # Means of queries and keys; results, their sums and the largest logits.
      rows = heads * options.get("num_landmarks", 64)
      numbers = rows * (3 * DIM + 2) * 2 * others
    case "bigbird":
      block = options.get("block_size", 64)
      ends = 2 * block * heads * (2 * DIM + 2) * 2 * others
      numbers = length * heads * 2 * DIM * others + ends
    case "linformer":
      numbers = 2 * heads * options["rank"] * DIM * 2 * others
    case "flash:balanced" if is_causal:
      # Halves of queries, keys, values and results go there and back.
      exchanges = positions * heads * 4 * DIM * (devices > 1)
      numbers = length * heads * 2 * DIM * others + exchanges
    case "flash:all_to_all":
      numbers = positions * heads * 4 * DIM * others
    case "additive":
      numbers = length * heads * (options["width"] + DIM) * others
    case _:
      numbers = length * heads * 2 * DIM * others
  return 4.0 * numbers


def _carried(devices: int, factors: int, state: int = DIM * DIM) -> float:
  """Numbers of states, and of their factors, in a scan over devices."""
  rounds = math.ceil(math.log2(devices))
  if not rounds:
    return 0.0
  return BATCH * HEADS * (state * (rounds + 1) + factors * (rounds - 1))


def _longest(name: str, positions: int) -> list[float]:
  """Positions that fit: 1 device with each memory, then `MANY` of them."""
  mechanism = _mechanism(name, positions)
  from attention import plug

  is_causal = plug.directions(mechanism)[-1]
  # Two devices, so that what a ring holds is among the temporaries.
  lengths = (positions, 2 * positions)
  temporaries = [
    measure(mechanism, 2, length, is_causal, True)["temporaries"]
    for length in lengths
  ]
  slope = (temporaries[1] - temporaries[0]) / positions
  base = temporaries[0] - slope * positions
  # Query, key, value and result, and the gradient of each.
  position_bytes = max(slope, 0.0) + 8 * BATCH * HEADS * DIM * 4
  fitting = [(memory - max(base, 0.0)) / position_bytes for memory in MEMORY]
  return [*fitting, *(MANY * count for count in fitting)]


if __name__ == "__main__":
  entry.run(main)

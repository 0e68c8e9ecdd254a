"""What the options of a mechanism cost, relative to its plain call.

    python -m benchmarks.options
    python -m benchmarks.options --attention=flash,bigbird --length=1024
    python -m benchmarks.options --attention=sliding_window --minutes=1

Each option of each mechanism but dense attention, the reference: a key mask (a
tenth of the keys hidden), segments (four), grouped heads (N/K = 4), unequal
lengths (T = 3S/4), a length that is a multiple of nothing, a bias by distance,
and what only the window has: global tokens (16) and dilation (2). Forward, and
forward with gradients to everything that the option brings; one process, calls
in turn. Prints a Markdown table of ratios to the plain call, with the
temporaries; T×S would show there as 512 MiB at length 4,096.
"""

import sys

from absl import flags

from settings.errors import ConfigError
from training import entry

_LENGTH = flags.DEFINE_integer("length", 4096, "T = S", lower_bound=64)
_ATTENTION = flags.DEFINE_list("attention", "all", "mechanisms, or all")
_MINUTES = flags.DEFINE_float("minutes", 10.0, "for everything, roughly")


def main() -> None:
  """Times every option of every mechanism and prints one table."""
  # JAX takes a second to import: --help and a faulty flag do not wait for it.
  import jax

  from attention import ATTENTIONS, registry
  from benchmarks import option_calls, timing
  from benchmarks.programs import DENSE

  known = [name for name in ATTENTIONS if name != DENSE]
  names = known if _ATTENTION.value == ["all"] else _ATTENTION.value
  for name in names:
    if name not in known and ":" not in name:
      raise ConfigError(
        f"--attention: expected some of {', '.join(known)}, or all, got {name!r}"
      )
    try:
      registry.find(name)
    except ValueError as error:
      raise ConfigError(f"--attention: {error}") from error
  length = _LENGTH.value
  rows = []
  for name in names:
    budget = timing.Budget(60 * _MINUTES.value / len(names), [length])
    rows += timing.time_length(
      option_calls.programs(name, length), budget, 2**33
    )
    print(f"{name}: done", file=sys.stderr, flush=True)
  device = jax.devices()[0].device_kind
  print(f"T = S = {length:,}, float32, {device}, jax {jax.__version__}\n")
  print(option_calls.markdown(rows))


if __name__ == "__main__":
  entry.run(main)

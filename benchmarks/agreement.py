"""Compares the results of this GPU or TPU with those of its CPU.

    python -m benchmarks.agreement
    python -m benchmarks.agreement --attention=flash/xla,linear

It compares, for every mechanism at the sizes of `benchmarks.scaling`, full and causal,
the output and the gradients of query, key, value and trainable variables. The
arguments are exact in bfloat16. The CPU computes in float32; the device computes in
float32 with products of full precision, in float32 with the default precision, and in
bfloat16. Each number is the largest difference over the largest value on the CPU, both
over all gradients together. Mechanisms that select keys may select other keys when
scores are rounded.

A second table has one row per kind of call and kernel of `implementation`, in bfloat16.
`--attention=` prints only this table.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from absl import flags

from settings.errors import ConfigError
from training.commands import entry

_ATTENTION = flags.DEFINE_list("attention", "all", "as for benchmarks.scaling")
_LENGTH = 257
"""T = S; kernels treat odd lengths differently."""

_PRECISIONS = (
  ("float32", "highest"),
  ("float32", None),
  ("bfloat16", None),
)


def main() -> None:
  """Prints one row per mechanism and form, and one per kernel call."""
  import jax

  from benchmarks import programs

  if jax.default_backend() == "cpu":
    raise ConfigError("JAX found no GPU or TPU to compare with the CPU")
  size = programs.Size(batch=2, heads=4, head_dim=64, dtype="bfloat16")
  print(
    f"{jax.devices()[0].device_kind}, jax {jax.__version__}, T = {_LENGTH}\n"
  )
  print("| mechanism | causal | of | float32, exact | float32 | bfloat16 |")
  print("| --- | :-: | --- | --: | --: | --: |")
  for name in programs.select(_ATTENTION.value):
    candidates, references = (
      programs.programs([x], size, _LENGTH) for x in (name, name.split("/")[0])
    )
    for program, reference in zip(candidates, references, strict=True):
      if program.part != programs.DECODE:
        quantity = "output" if program.part == programs.FORWARD else "gradients"
        functions = program.function, reference.function
        cells = _cells(*functions, program.arguments, _PRECISIONS)
        print(
          f"| `{name}` | {'✓' * program.causal} | {quantity} | {cells} |",
          flush=True,
        )
  if set(_ATTENTION.value) <= {"all"}:
    _print_calls(size)


def _print_calls(size: Any) -> None:
  """Prints the table of kernels."""
  from benchmarks import programs

  print(
    "\n| call | implementation | output | gradients |\n| --- | --- | --: | --: |"
  )
  for name, (attend, arrays) in _calls(size, _LENGTH).items():
    reference = partial(attend, implementation="xla")
    for kernel in ("xla", "cudnn", "tokamax"):
      call = partial(attend, implementation=kernel)
      output = _cells(call, reference, arrays, _PRECISIONS[-1:])
      functions = programs.gradients(call), programs.gradients(reference)
      cells = f"{output} | {_cells(*functions, arrays, _PRECISIONS[-1:])}"
      print(f"| {name} | {kernel} | {cells} |", flush=True)


def _calls(
  size, length: int
) -> dict[str, tuple[Callable[..., Any], list[Any]]]:
  """Returns the calls of kernels by name: a function, and its arrays."""
  import jax
  import jax.numpy as jnp

  from attention import flash_attention, sliding_window_attention

  shape = (size.batch, length, size.heads, size.head_dim)
  keys = jax.random.split(jax.random.key(0), 5)
  qkv = [jax.random.normal(key, shape, jnp.bfloat16) for key in keys[:3]]
  grouped = [qkv[0], *(x[:, :, : size.heads // 2] for x in qkv[1:])]
  # The first example has a third of its keys, the second has none.
  padding = jnp.arange(length)[None] < jnp.array([[length // 3], [0]])
  pairs = jax.random.bernoulli(keys[3], 0.5, (1, 1, length, length))
  bias = jax.random.normal(
    keys[4], (1, size.heads, length, length), jnp.bfloat16
  )
  flash, window = flash_attention, sliding_window_attention

  def flash_with_bias(query, key, value, bias, **options):
    return flash(query, key, value, bias=bias, **options)

  padding_mask = {"mask": padding[:, None, None]}
  return {
    "full": (flash, qkv),
    "causal": (partial(flash, is_causal=True), qkv),
    "causal, grouped heads": (partial(flash, is_causal=True), grouped),
    "masked keys": (partial(flash, **padding_mask), qkv),
    "masked keys, causal": (
      partial(flash, **padding_mask, is_causal=True),
      qkv,
    ),
    "masked pairs": (partial(flash, mask=pairs), qkv),
    "bias": (flash_with_bias, [*qkv, bias]),
    "window to the left": (partial(window, window=(63, 0)), qkv),
    "window to both sides": (partial(window, window=31), qkv),
  }


def _cells(
  function: Callable[..., Any],
  reference: Callable[..., Any],
  arguments: Any,
  precisions: Any,
) -> str:
  """Returns, for each precision, the difference or the device's error."""
  import jax
  import jax.numpy as jnp

  from attention.platform import backend
  from benchmarks.programs import first_line

  def cast(dtype):
    return jax.tree.map(
      lambda x: x.astype(dtype) if x.dtype == jnp.bfloat16 else x, arguments
    )

  cpu = jax.devices("cpu")[0]
  with backend.tracing_for("cpu"), jax.default_device(cpu):
    arrays = jax.device_put(cast(jnp.float32), cpu)
    expected = jax.jit(_wrapper(reference))(*arrays)
  cells = []
  for dtype, precision in precisions:
    try:
      with jax.default_matmul_precision(precision):
        outputs = jax.jit(_wrapper(function))(*cast(dtype))
      cells.append(f"{_difference(outputs, expected):.1e}")
    except Exception as error:  # An error fills one cell of the table.
      cells.append(first_line(error))
  return " | ".join(cells)


def _wrapper(function):
  """Returns a new function, since `jax.jit` reuses traces across devices."""
  return lambda *arguments: function(*arguments)


def _difference(outputs: Any, expected: Any) -> float:
  import jax
  import numpy as np

  outputs, expected = (
    [np.asarray(x, np.float64) for x in jax.tree.leaves(arrays)]
    for arrays in (outputs, expected)
  )
  pairs = zip(outputs, expected, strict=True)
  # Python's `max` would ignore NaN.
  largest = np.max([np.abs(x - y).max() for x, y in pairs])
  return float(largest / np.max([np.abs(x).max() for x in expected]))


if __name__ == "__main__":
  entry.run(main)

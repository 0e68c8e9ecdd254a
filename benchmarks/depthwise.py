"""How long a depth-wise convolution takes, and the grouped one of XLA.

    python -m benchmarks.depthwise

`models.depthwise` is a sum of shifted copies. Both are timed in turn at the
shapes of `configs/cvt.py`, of a published CvT and of `configs/conformer.py`,
float32, forward and with gradients. Medians.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np

from models.depthwise import depthwise
from training import entry

_SHAPES = (
  ((64, 8, 8, 32), (3, 3)),
  ((64, 4, 4, 64), (3, 3)),
  ((16, 56, 56, 64), (3, 3)),
  ((32, 64, 64), (15,)),
)
_REPEATS = 7


def main() -> None:
  """Prints a line for each shape and part."""
  print(
    f"{'input':>18} {'part':>9} {'grouped':>10} {'shifted':>10} {'ratio':>6}"
  )
  for shape, sides in _SHAPES:
    of_x, of_kernel = jax.random.split(jax.random.key(0))
    x = jax.random.normal(of_x, shape)
    kernel = jax.random.normal(of_kernel, (*sides, shape[-1]))
    for part, wrap in (("forward", jax.jit), ("gradients", _gradients)):
      grouped, shifted = _medians([wrap(_grouped), wrap(depthwise)], x, kernel)
      print(
        f"{'×'.join(map(str, shape)):>18} {part:>9} {1e3 * grouped:7.2f} ms "
        f"{1e3 * shifted:7.2f} ms {shifted / grouped:6.2f}"
      )


def _grouped(x: jax.Array, kernel: jax.Array) -> jax.Array:
  """The convolution of XLA with as many groups as features."""
  letters = "HW"[: kernel.ndim - 1]
  return jax.lax.conv_general_dilated(
    x,
    kernel[..., None, :],
    (1,) * len(letters),
    "SAME",
    dimension_numbers=(f"N{letters}C", f"{letters}IO", f"N{letters}C"),
    feature_group_count=x.shape[-1],
  )


def _gradients(convolve):
  def loss(x, kernel):
    return jnp.sum(jnp.square(convolve(x, kernel)))

  return jax.jit(jax.grad(loss, (0, 1)))


def _medians(functions, *arguments) -> list[float]:
  """Seconds of each, called in turn after a call that compiles."""
  seconds = [[] for _ in functions]
  for function in functions:
    jax.block_until_ready(function(*arguments))
  for _ in range(_REPEATS):
    for function, found in zip(functions, seconds, strict=True):
      start = time.perf_counter()
      jax.block_until_ready(function(*arguments))
      found.append(time.perf_counter() - start)
  return [float(np.median(found)) for found in seconds]


if __name__ == "__main__":
  entry.run(main)

"""Time and memory of every mechanism beside `jax.nn.dot_product_attention`.

    python -m benchmarks.attention_cost --length=4096 --repeats=5

One process, repeats interleaved, medians as ratios to the baseline of the same
run (causal forms to the causal baseline): machines are noisy, ratios less so.
Memory is what XLA reserves for temporaries beside arguments and results.
"""

from collections.abc import Callable, Iterator
import time

from absl import app, flags
import jax
import jax.numpy as jnp
import numpy as np

import attention

_BATCH = flags.DEFINE_integer("batch", 1, "B")
_LENGTH = flags.DEFINE_integer("length", 4096, "T = S")
_HEADS = flags.DEFINE_integer("heads", 8, "N = K")
_HEAD_DIM = flags.DEFINE_integer("head_dim", 64, "H")
_REPEATS = flags.DEFINE_integer("repeats", 5, "timed calls of each program")
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "")

_OPTIONS = {
  "sliding_window": {"window": 256},
  "performer": {"num_features": 256},
  "linformer": {"rank": 256},
  "additive": {"width": 16},
}
_BASELINE = "jax.nn.dot_product_attention"


def _forms(dims: attention.Dims) -> Iterator[tuple[str, bool, Callable]]:
  """Name, causal or not, and the function of query, key and value."""

  def bind(apply, variables, is_causal, *, shared_qk=False):
    def call(query, key, value):
      key = None if shared_qk else key
      return apply(variables, query, key, value, is_causal=is_causal)

    return call

  for is_causal in (False, True):
    yield (
      _BASELINE,
      is_causal,
      bind(
        lambda _, *qkv, is_causal: jax.nn.dot_product_attention(
          *qkv, is_causal=is_causal
        ),
        {},
        is_causal,
      ),
    )
    for name, make in attention.ATTENTIONS.items():
      mechanism = make(**_OPTIONS.get(name, {}))
      if not is_causal or "causal" in mechanism.supports:
        variables = mechanism.init(jax.random.key(0), dims)
        yield (
          name,
          is_causal,
          bind(
            mechanism.apply,
            variables,
            is_causal,
            shared_qk="shared_qk" in mechanism.supports,
          ),
        )


def _programs(function: Callable) -> dict[str, Callable]:
  """Forward, and forward with the gradients to query, key and value."""

  def forward_backward(*qkv):
    out, pullback = jax.vjp(function, *qkv)
    return pullback(out)

  return {"forward": function, "forward+backward": forward_backward}


def main(argv: list[str]) -> None:
  """Compiles everything, then times it in turn, then prints a table."""
  del argv
  shape = (_BATCH.value, _LENGTH.value, _HEADS.value, _HEAD_DIM.value)
  keys = jax.random.split(jax.random.key(0), 3)
  qkv = [jax.random.normal(k, shape, jnp.dtype(_DTYPE.value)) for k in keys]
  dims = attention.Dims(shape[2], shape[2], shape[3], shape[1])

  compiled, compile_seconds = {}, {}
  for name, is_causal, function in _forms(dims):
    for part, program in _programs(function).items():
      start = time.perf_counter()
      compiled[name, is_causal, part] = jax.jit(program).lower(*qkv).compile()
      compile_seconds[name, is_causal, part] = time.perf_counter() - start

  seconds = {which: [] for which in compiled}
  for repeat in range(_REPEATS.value + 1):
    for which, program in compiled.items():
      start = time.perf_counter()
      jax.block_until_ready(program(*qkv))
      if repeat:  # The first is a warm-up.
        seconds[which].append(time.perf_counter() - start)

  device = jax.devices()[0]
  print(
    f"B, T, N, H = {shape}, {_DTYPE.value}, {device.device_kind}, "
    f"jax {jax.__version__}, {_REPEATS.value} repeats\n\n"
    "| mechanism | causal | part | ms | × baseline | temp MiB | compile s |\n"
    "| --- | :-: | --- | --: | --: | --: | --: |"
  )
  for which, times in seconds.items():
    name, is_causal, part = which
    median = np.median(times)
    ratio = median / np.median(seconds[_BASELINE, is_causal, part])
    temp = compiled[which].memory_analysis().temp_size_in_bytes / 2**20
    print(
      f"| `{name}` | {'✓' if is_causal else ''} | {part} | "
      f"{median * 1e3:.1f} | {ratio:.3f} | {temp:.1f} | "
      f"{compile_seconds[which]:.1f} |"
    )


if __name__ == "__main__":
  app.run(main)

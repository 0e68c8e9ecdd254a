"""Cost of elementwise recurrences relative to a plain scan of the same formula.

    python -m benchmarks.elementwise
    python -m benchmarks.elementwise --lengths=2048 --rounds=9

B 1, 256 channels, 16 entries of state for each channel of `mamba`, float32. Four forms
are compiled and called in turn in one process: `mamba_attention` or
`rg_lru_attention`, the formula as one `jax.lax.scan` over positions, the formula by
`jax.lax.associative_scan` over all of them, and the scan in whose step outer products
are `jnp.einsum`. Prints the median of the ratios to the plain scan in the same round,
forward and with gradients, and the temporaries of the gradients in MiB.
"""

from collections.abc import Callable
import functools
import statistics
import time
from typing import Any

from absl import flags
import jax
import jax.numpy as jnp
import numpy as np

from attention import mamba_attention, rg_lru_attention
from training.commands import entry
from training.devices import process

_LENGTHS = flags.DEFINE_list("lengths", ["2048"], "of T")
_ROUNDS = flags.DEFINE_integer("rounds", 7, "calls of each", lower_bound=1)

CHANNELS, STATE = 256, 16


def _scanned(step, state, *arrays):
  in_time = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), arrays)
  return jnp.moveaxis(jax.lax.scan(step, state, in_time)[1], 0, 1)


def _by_pairs(decay, write):
  def join(one, two):
    return one[0] * two[0], two[0] * one[1] + two[1]

  return jax.lax.associative_scan(join, (decay, write), axis=1)[1]


def _mamba_own(c, b, x, delta, rate):
  c, b, x, delta = (y[:, :, None] for y in (c, b, x, delta))
  log_rate = jnp.log(rate).T[None]
  out: Any = mamba_attention(c, b, x, step=delta, log_rate=log_rate)
  return out[:, :, 0]


def _mamba_plain(c, b, x, delta, rate):
  def step(state, now):
    c, b, x, delta = now
    decay = jnp.exp(-delta[..., None] * rate[None])
    state = decay * state + (delta * x)[..., None] * b[:, None]
    return state, jnp.einsum("bds,bs->bd", state, c)

  state = jnp.zeros((x.shape[0], *rate.shape))
  return _scanned(step, state, c, b, x, delta)


def _mamba_products(c, b, x, delta, rate):
  def step(state, now):
    c, b, x, delta = now
    decay = jnp.exp(jnp.einsum("bd,ds->bds", -delta, rate))
    state = decay * state + jnp.einsum("bd,bs->bds", delta * x, b)
    return state, jnp.einsum("bds,bs->bd", state, c)

  state = jnp.zeros((x.shape[0], *rate.shape))
  return _scanned(step, state, c, b, x, delta)


def _mamba_pairs(c, b, x, delta, rate):
  decay = jnp.exp(-delta[..., None] * rate[None, None])
  states = _by_pairs(decay, (delta * x)[..., None] * b[:, :, None])
  return jnp.einsum("btds,bts->btd", states, c)


def _rg_lru_own(x, log_decay, gate):
  x, log_decay, gate = (y[:, :, None] for y in (x, log_decay, gate))
  out: Any = rg_lru_attention(x, log_decay=log_decay, input_gate=gate)
  return out[:, :, 0]


def _weighted(x, log_decay, gate):
  weight = jnp.sqrt(jnp.maximum(-jnp.expm1(2.0 * log_decay), 1e-12))
  return weight.at[:, 0].set(1.0) * gate * x


def _rg_lru_plain(x, log_decay, gate):
  def step(state, now):
    decay, write = now
    state = jnp.exp(decay) * state + write
    return state, state

  write = _weighted(x, log_decay, gate)
  return _scanned(step, jnp.zeros_like(x[:, 0]), log_decay, write)


def _rg_lru_pairs(x, log_decay, gate):
  return _by_pairs(jnp.exp(log_decay), _weighted(x, log_decay, gate))


FORMS = {
  "mamba": {
    "plain scan": _mamba_plain,
    "ours": _mamba_own,
    "scan of einsum": _mamba_products,
    "associative scan": _mamba_pairs,
  },
  "rg_lru": {
    "plain scan": _rg_lru_plain,
    "ours": _rg_lru_own,
    "associative scan": _rg_lru_pairs,
  },
}


def _arguments(name: str, length: int) -> tuple[jax.Array, ...]:
  rng = np.random.default_rng(0)

  def normal(*shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)

  x = normal(1, length, CHANNELS)
  if name == "rg_lru":
    decay = -jax.nn.softplus(normal(*x.shape) - 3.0)
    return x, decay, jax.nn.sigmoid(normal(*x.shape))
  delta = jax.nn.softplus(normal(*x.shape) - 2.0)
  rate = jnp.exp(0.5 * normal(CHANNELS, STATE))
  b, c = normal(1, length, STATE), normal(1, length, STATE)
  return c, b, x, delta, rate


def _programs(form: Callable[..., jax.Array], arguments: tuple) -> list:
  """The compiled form, forward and with gradients of Σ sin."""

  def total(*arguments):
    return jnp.sum(jnp.sin(form(*arguments)))

  gradient = jax.grad(total, argnums=tuple(range(len(arguments))))
  return [jax.jit(f).lower(*arguments).compile() for f in (form, gradient)]


def _seconds(program, arguments) -> float:
  start = time.perf_counter()
  jax.block_until_ready(program(*arguments))
  return time.perf_counter() - start


def main() -> None:
  """Prints one line per form and length."""
  process.keep_freed()
  for length in map(int, _LENGTHS.value):
    for name, forms in FORMS.items():
      arguments = _arguments(name, length)
      make = functools.partial(_programs, arguments=arguments)
      programs = {form: make(function) for form, function in forms.items()}
      times = {form: ([], []) for form in forms}
      for i in range(_ROUNDS.value + 1):
        for form, pair in programs.items():
          for kept, program in zip(times[form], pair, strict=True):
            took = _seconds(program, arguments)
            if i:  # The first call of each is not counted.
              kept.append(took)
      for form, pair in times.items():
        ratios = [
          statistics.median(x / y for x, y in zip(*both, strict=True))
          for both in zip(pair, times["plain scan"], strict=True)
        ]
        memory = programs[form][1].memory_analysis().temp_size_in_bytes
        print(
          f"{name:8} T {length:6} {form:17} forward {ratios[0]:5.2f}  gradients "
          f"{ratios[1]:5.2f}  {memory / 2**20:7.1f} MiB"
        )


if __name__ == "__main__":
  entry.run(main)

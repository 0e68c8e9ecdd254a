"""Compares the cost of recurrences with a plain scan of the same formula.

    python -m benchmarks.recurrences
    python -m benchmarks.recurrences --lengths=2048 --rounds=9

Arrays are float32 with B 1 and 256 channels, or 4 heads of 64. The state of `mamba` has
16 entries per channel, and `gsa` has 64 slots. One process compiles the forms and calls
them in turn: the function, the formula as a `jax.lax.scan` over positions, and for
elementwise recurrences also the formula as a `jax.lax.associative_scan`, and a scan
whose steps compute outer products with `jnp.einsum`. It prints the median of the ratios
to the plain scan in the same round, forward and with gradients, and the temporaries of
the gradients in MiB.
"""

from collections.abc import Callable
import statistics
import time
from typing import Any

from absl import flags
import jax
import jax.numpy as jnp
import numpy as np

from attention import (
  gka_attention,
  gsa_attention,
  hgrn2,
  mamba_attention,
  momentum_delta_attention,
  precond_delta_attention,
  rg_lru_attention,
  rwkv6_attention,
  titans_attention,
  ttt_linear_attention,
)
from training.commands import entry
from training.devices import process

_LENGTHS = flags.DEFINE_list("lengths", ["2048"], "values of T")
_ROUNDS = flags.DEFINE_integer("rounds", 7, "calls per program", lower_bound=1)

CHANNELS, STATE = 256, 16
HEADS, WIDTH = 4, 64


def _scan(step, state, *arrays):
  xs = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), arrays)
  return jnp.moveaxis(jax.lax.scan(step, state, xs)[1], 0, 1)


def _associative_scan(decay, write):
  def combine(first, second):
    return first[0] * second[0], second[0] * first[1] + second[1]

  return jax.lax.associative_scan(combine, (decay, write), axis=1)[1]


def _mamba_ours(c, b, x, delta, rate):
  c, b, x, delta = (y[:, :, None] for y in (c, b, x, delta))
  log_rate = jnp.log(rate).T[None]
  out: Any = mamba_attention(c, b, x, step=delta, log_rate=log_rate)
  return out[:, :, 0]


def _mamba_plain(c, b, x, delta, rate):
  def step(state, xs):
    c, b, x, delta = xs
    decay = jnp.exp(-delta[..., None] * rate[None])
    state = decay * state + (delta * x)[..., None] * b[:, None]
    return state, jnp.einsum("bds,bs->bd", state, c)

  state = jnp.zeros((x.shape[0], *rate.shape))
  return _scan(step, state, c, b, x, delta)


def _mamba_products(c, b, x, delta, rate):
  def step(state, xs):
    c, b, x, delta = xs
    decay = jnp.exp(jnp.einsum("bd,ds->bds", -delta, rate))
    state = decay * state + jnp.einsum("bd,bs->bds", delta * x, b)
    return state, jnp.einsum("bds,bs->bd", state, c)

  state = jnp.zeros((x.shape[0], *rate.shape))
  return _scan(step, state, c, b, x, delta)


def _mamba_pairs(c, b, x, delta, rate):
  decay = jnp.exp(-delta[..., None] * rate[None, None])
  states = _associative_scan(decay, (delta * x)[..., None] * b[:, :, None])
  return jnp.einsum("btds,bts->btd", states, c)


def _rg_lru_ours(x, log_decay, gate):
  x, log_decay, gate = (y[:, :, None] for y in (x, log_decay, gate))
  out: Any = rg_lru_attention(x, log_decay=log_decay, input_gate=gate)
  return out[:, :, 0]


def _write(x, log_decay, gate):
  weight = jnp.sqrt(jnp.maximum(-jnp.expm1(2.0 * log_decay), 1e-12))
  return weight.at[:, 0].set(1.0) * gate * x


def _rg_lru_plain(x, log_decay, gate):
  def step(state, xs):
    decay, write = xs
    state = jnp.exp(decay) * state + write
    return state, state

  write = _write(x, log_decay, gate)
  return _scan(step, jnp.zeros_like(x[:, 0]), log_decay, write)


def _rg_lru_pairs(x, log_decay, gate):
  return _associative_scan(jnp.exp(log_decay), _write(x, log_decay, gate))


def _outer(key, value):
  return key[..., None] * value[..., None, :]


def _read(state, query):
  return jnp.einsum("bnhv,bnh->bnv", state, query)


def _zero_state(x):
  return jnp.zeros((*x[:, 0].shape, WIDTH))


def _hgrn2_ours(q, k, v):
  return hgrn2().apply({}, q, k, v, is_causal=True)


def _hgrn2_plain(q, k, v):
  def step(state, xs):
    q, k, v = xs
    forget = jax.nn.sigmoid(k)
    state = forget[..., None] * state + _outer(1.0 - forget, v)
    return state, _read(state, jax.nn.silu(q))

  return _scan(step, _zero_state(q), q, k, v)


def _rwkv6_ours(q, k, v, decay, bonus):
  return rwkv6_attention(q, k, v, log_decay=decay, bonus=bonus, scale=1.0)


def _rwkv6_plain(q, k, v, decay, bonus):
  def step(state, xs):
    q, k, v, decay = xs
    write = _outer(k, v)
    out = _read(state + bonus[None, ..., None] * write, q)
    return jnp.exp(decay)[..., None] * state + write, out

  return _scan(step, _zero_state(q), q, k, v, decay)


def _gsa_ours(q, k, v, decay, slots):
  gates = {"log_decay": decay, "slot_weights": slots}
  return gsa_attention(q, k, v, **gates, scale=1.0)


def _gsa_plain(q, k, v, decay, slots):
  def step(state, xs):
    q, k, v, decay, slots = xs
    decay = jnp.exp(decay)[..., None]
    keys = decay * state[0] + _outer(slots, k)
    values = decay * state[1] + _outer(slots, v)
    weights = jax.nn.softmax(jnp.einsum("bnmh,bnh->bnm", keys, q))
    return (keys, values), _read(values, weights)

  return _scan(step, (_zero_state(q), _zero_state(q)), q, k, v, decay, slots)


def _precond_ours(q, k, v, beta, decay, rate, center):
  gates = {"beta": beta, "log_decay": decay, "square_decay": decay}
  gates |= {"square_rate": rate, "center": center, "scale": 1.0}
  return precond_delta_attention(q, k, v, **gates)


def _precond_plain(q, k, v, beta, decay, rate, center):
  def step(state, xs):
    q, k, v, beta, decay, rate = xs
    decay = jnp.exp(decay)[..., None]
    squares = decay * state[1] + rate[..., None] * k**2
    offset = jnp.log(squares + 1e-6) - center[None, :, None]
    write_key = k * 1.5 ** (-offset / (1.0 + jnp.abs(offset)))
    memory = decay[..., None] * state[0]
    memory += _outer(write_key, beta[..., None] * (v - _read(memory, k)))
    return (memory, squares), _read(memory, q)

  first = _zero_state(q), jnp.zeros_like(q[:, 0])
  return _scan(step, first, q, k, v, beta, decay, rate)


def _ttt_ours(q, k, v, rate, weights, bias, gamma, beta):
  options = {"initial_weights": weights, "initial_bias": bias}
  options |= {"norm_scale": gamma, "norm_bias": beta, "learning_rate": rate}
  return ttt_linear_attention(q, k, v, **options)


def _ttt_plain(q, k, v, rate, weights, bias, gamma, beta):
  def norm(z):
    z -= jnp.mean(z, axis=-1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.mean(z * z, axis=-1, keepdims=True) + 1e-6)
    return gamma[None] * z * inverse + beta[None]

  def step(state, xs):
    model, gradient = state
    q, k, v, rate, index = xs
    index = index[:, None, None]
    out, pullback = jax.vjp(norm, _read(model[0], k) + model[1])
    error = rate[..., None] * pullback(out + k - v)[0]
    gradient = gradient[0] + _outer(k, error), gradient[1] + error
    new_weights = model[0] - gradient[0] / (index[..., None] + 1.0)
    new_bias = model[1] - gradient[1] / (index + 1.0)
    out = q + norm(_read(new_weights, q) + new_bias)
    is_last = index == 15
    model = (
      jnp.where(is_last[..., None], new_weights, model[0]),
      jnp.where(is_last, new_bias, model[1]),
    )
    gradient = (
      jnp.where(is_last[..., None], 0.0, gradient[0]),
      jnp.where(is_last, 0.0, gradient[1]),
    )
    return (model, gradient), out

  model = weights[None] + _zero_state(q), bias[None] + jnp.zeros_like(q[:, 0])
  state = model, jax.tree.map(jnp.zeros_like, model)
  indices = jnp.broadcast_to(jnp.arange(q.shape[1]) % 16, q.shape[:2])
  return _scan(step, state, q, k, v, rate, indices)


def _titans_ours(q, k, v, rate, momentum, decay):
  gates = {"learning_rate": rate, "log_momentum": momentum}
  gates |= {"log_decay": decay, "scale": 1.0}
  return titans_attention(q, k, v, **gates)


def _titans_plain(q, k, v, rate, momentum, decay):
  def step(state, xs):
    memory, moment, start = state
    q, k, v, rate, momentum, decay, is_last = xs
    error = 2.0 * rate[..., None] * (v - _read(start, k))
    moment = jnp.exp(momentum)[..., None, None] * moment + _outer(k, error)
    memory = jnp.exp(decay)[..., None, None] * memory + moment
    start = jnp.where(is_last[:, None, None, None], memory, start)
    return (memory, moment, start), _read(memory, q)

  is_last = jnp.broadcast_to(jnp.arange(q.shape[1]) % 16 == 15, q.shape[:2])
  arrays = q, k, v, rate, momentum, decay, is_last
  return _scan(step, (_zero_state(q),) * 3, *arrays)


def _gka_ours(q, k, v, decay, beta, alpha):
  gates = {"log_decay": decay, "beta": beta, "alpha": alpha, "scale": 1.0}
  return gka_attention(q, k, v, **gates)


def _gka_plain(q, k, v, decay, beta, alpha):
  """Solves with 30 Chebyshev iterations at the fixed ridge ratio 0.02."""
  ratio, weights = 1.0 / 1.04, [2.0]
  for _ in range(30):
    weights.append(4.0 / (4.0 - ratio**2 * weights[-1]))

  def step(state, xs):
    q, k, v, decay, beta, alpha = xs
    decay, beta = jnp.exp(decay)[..., None, None], beta[..., None]
    gram = decay * state[0] + _outer(beta * k, k)
    memory = decay * state[1] + _outer(beta * k, v)
    norm = jnp.sqrt(jnp.sum(jnp.square(gram), axis=(-2, -1)))[..., None]

    def iteration(carry, weight):
      x, previous = carry
      residual = _read(gram, x) + 0.02 * norm * x - q
      step = 2.0 * ratio / norm * weight
      return (x - step * residual + (weight - 1.0) * (x - previous), x), None

    first = 2.0 * ratio / norm * q, jnp.zeros_like(q)
    (x, _), _ = jax.lax.scan(iteration, first, jnp.asarray(weights[1:]))
    return (gram, memory), _read(memory, q + alpha[..., None] * (x - q))

  return _scan(
    step, (_zero_state(q), _zero_state(q)), q, k, v, decay, beta, alpha
  )


def _momentum_ours(q, k, v, decay, momentum_decay, beta, eta):
  gates = {"log_decay": decay, "momentum_decay": momentum_decay, "beta": beta}
  return momentum_delta_attention(q, k, v, eta=eta, scale=1.0, **gates)


def _momentum_plain(q, k, v, decay, momentum_decay, beta, eta):
  def step(state, xs):
    q, k, v, *decays, beta, eta = xs
    decay, momentum_decay = (jnp.exp(x)[..., None, None] for x in decays)
    memory = decay * state[0]
    write = _outer(eta[..., None] * k, v - _read(memory, k))
    momentum = momentum_decay * state[1] + write
    memory += beta[..., None, None] * momentum
    return (memory, momentum), _read(memory, q)

  arrays = q, k, v, decay, momentum_decay, beta, eta
  return _scan(step, (_zero_state(q), _zero_state(q)), *arrays)


FORMS: dict[str, dict[str, Callable[..., Any]]] = {
  "hgrn2": {"plain scan": _hgrn2_plain, "ours": _hgrn2_ours},
  "rwkv6": {"plain scan": _rwkv6_plain, "ours": _rwkv6_ours},
  "gsa": {"plain scan": _gsa_plain, "ours": _gsa_ours},
  "gka": {"plain scan": _gka_plain, "ours": _gka_ours},
  "precond_delta": {"plain scan": _precond_plain, "ours": _precond_ours},
  "titans": {"plain scan": _titans_plain, "ours": _titans_ours},
  "ttt_linear": {"plain scan": _ttt_plain, "ours": _ttt_ours},
  "momentum_delta": {"plain scan": _momentum_plain, "ours": _momentum_ours},
  "mamba": {
    "plain scan": _mamba_plain,
    "ours": _mamba_ours,
    "scan of einsum": _mamba_products,
    "associative scan": _mamba_pairs,
  },
  "rg_lru": {
    "plain scan": _rg_lru_plain,
    "ours": _rg_lru_ours,
    "associative scan": _rg_lru_pairs,
  },
}


def _arguments(name: str, length: int) -> tuple[jax.Array, ...]:
  rng = np.random.default_rng(0)

  def normal(*shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)

  if name not in ("mamba", "rg_lru"):
    shape = 1, length, HEADS, WIDTH
    q, k, v = (normal(*shape) for _ in range(3))
    q, k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    decay = -jax.nn.softplus(normal(*shape) - 3.0)
    beta, rate = jax.nn.sigmoid(normal(2, *shape[:3]))
    heads = normal(HEADS, WIDTH)
    model = 0.02 * normal(HEADS, WIDTH, WIDTH), 0.1 * heads
    return {
      "hgrn2": (q, k, v),
      "rwkv6": (q, k, v, decay, normal(HEADS, WIDTH)),
      "gsa": (q, k, v, decay, -jnp.expm1(decay)),
      "gka": (q, k, v, decay[..., 0], beta, rate),
      "momentum_delta": (q, k, v, decay[..., 0], decay[..., 1], beta, rate),
      "precond_delta": (q, k, v, beta, decay[..., 0], rate, normal(HEADS)),
      "titans": (q, k, v, 0.1 * beta, jnp.log(rate), decay[..., 0]),
      "ttt_linear": (
        q,
        k,
        v,
        beta / 64,
        *model,
        1.0 + 0.1 * heads,
        0.1 * heads,
      ),
    }[name]
  x = normal(1, length, CHANNELS)
  if name == "rg_lru":
    decay = -jax.nn.softplus(normal(*x.shape) - 3.0)
    return x, decay, jax.nn.sigmoid(normal(*x.shape))
  delta = jax.nn.softplus(normal(*x.shape) - 2.0)
  rate = jnp.exp(0.5 * normal(CHANNELS, STATE))
  b, c = normal(1, length, STATE), normal(1, length, STATE)
  return c, b, x, delta, rate


def _programs(form: Callable[..., jax.Array], arguments: tuple) -> list:
  """Compiles a form and the gradients of the sum of its sines."""

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
  process.keep_freed_memory()
  for length in map(int, _LENGTHS.value):
    for name, forms in FORMS.items():
      arguments = _arguments(name, length)
      programs = {
        form: _programs(function, arguments) for form, function in forms.items()
      }
      times = {form: ([], []) for form in forms}
      for i in range(_ROUNDS.value + 1):
        for form, pair in programs.items():
          for seconds, program in zip(times[form], pair, strict=True):
            elapsed = _seconds(program, arguments)
            if i:  # The first call of each is not counted.
              seconds.append(elapsed)
      for form, pair in times.items():
        ratios = [
          statistics.median(x / y for x, y in zip(*both, strict=True))
          for both in zip(pair, times["plain scan"], strict=True)
        ]
        memory = programs[form][1].memory_analysis().temp_size_in_bytes
        print(
          f"{name:13} T {length:6} {form:17} forward {ratios[0]:5.2f}  gradients "
          f"{ratios[1]:5.2f}  {memory / 2**20:7.1f} MiB"
        )


if __name__ == "__main__":
  entry.run(main)

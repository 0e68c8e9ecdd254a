"""Compares the cost of functions with the same functions of other JAX packages.

    VENV/bin/python -m benchmarks.peers --peer=jax.nn|jla|ejkernel|tokamax

VENV is an environment of the peer; `tests/verification/peers/make_jla.py` and
`make_ejkernel.py` have the commands that create it. The library needs only `jaxtyping`
in addition. One process compiles both functions of a row and calls them in turn,
forward and with gradients of query, key and value; the shortest time counts. Ratios are
ours / theirs. *difference* is the largest difference of the outputs over the largest
value.

fla's plain PyTorch is not here: it loops over positions in Python.
"""

import argparse
from collections.abc import Callable
import importlib
import importlib.metadata
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import attention

WINDOW = 256
PACKAGES = {
  "jax.nn": "jax",
  "jla": "jax-linear-attention",
  "ejkernel": "ejkernel",
  "tokamax": "tokamax",
}

Arrays = dict[str, jax.Array]


class Row(NamedTuple):
  """One function of this library and the same function of a peer.

  Attributes:
    mechanism: the mechanism of this library.
    peer: the function of the peer.
    ours: `(query, key, value, x=arrays) -> output`.
    theirs: the peer's function, with the same signature.
  """

  mechanism: str
  peer: str
  ours: Callable[..., Any]
  theirs: Callable[..., Any]


def draw_arrays(batch: int, length: int, heads: int, width: int) -> Arrays:
  """Draws queries, unit keys, values and gates."""
  keys = iter(jax.random.split(jax.random.key(0), 8))

  def normal(*shape):
    return jax.random.normal(next(keys), (batch, length, heads, *shape))

  def unit():
    x = normal(width)
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

  erase_key = unit()
  return {
    "query": normal(width),
    "key": unit(),
    "value": normal(width),
    "head_decay": -0.5 * jnp.abs(normal()),
    "channel_decay": -0.5 * jnp.abs(normal(width)),
    "beta": jax.nn.sigmoid(normal()),
    "removal": -erase_key,
    "replacement": erase_key * jax.nn.sigmoid(normal(1)),
  }


def _recurrences() -> dict[str, Callable[..., Any]]:
  """Returns the recurrences of this library, by mechanism."""
  gated, delta = (
    attention.gated_linear_attention,
    attention.delta_rule_attention,
  )
  return {
    "mamba2": lambda *qkv, x: gated(*qkv, log_decay=x["head_decay"]),
    "gated_linear": lambda *qkv, x: gated(*qkv, log_decay=x["channel_decay"]),
    "delta": lambda *qkv, x: delta(*qkv, beta=x["beta"]),
    "gated_delta": lambda *qkv, x: delta(
      *qkv, beta=x["beta"], log_decay=x["head_decay"]
    ),
    "kimi_delta": lambda *qkv, x: delta(
      *qkv, beta=x["beta"], log_decay=x["channel_decay"]
    ),
    "rwkv7": lambda *qkv, x: attention.rwkv7_attention(
      *qkv,
      log_decay=x["channel_decay"],
      removal=x["removal"],
      replacement=x["replacement"],
      scale=1.0,
    ),
  }


def _softmax() -> dict[str, Callable[..., Any]]:
  window = (WINDOW, 0)
  return {
    "dense": lambda *qkv, x: attention.dense_attention(*qkv),
    "flash": lambda *qkv, x: attention.flash_attention(*qkv, is_causal=True),
    "sliding_window": lambda *qkv, x: attention.sliding_window_attention(
      *qkv, window=window
    ),
  }


def jax_nn() -> list[Row]:
  """Returns the rows of `jax.nn.dot_product_attention`."""
  attend, ours = jax.nn.dot_product_attention, _softmax()
  name = "dot_product_attention"
  window = {"local_window_size": (WINDOW, 0)}
  return [
    Row("dense", name, ours["dense"], lambda *qkv, x: attend(*qkv)),
    Row(
      "flash",
      f"{name}, is_causal",
      ours["flash"],
      lambda *qkv, x: attend(*qkv, is_causal=True),
    ),
    Row(
      "sliding_window",
      f"{name}, local_window_size",
      ours["sliding_window"],
      lambda *qkv, x: attend(*qkv, **window),
    ),
  ]


def jla() -> list[Row]:
  """Returns the rows of jax-linear-attention's chunked forms, which run on CPUs."""
  linear_attention = importlib.import_module("jla.ops").linear_attention

  kinds = {
    "mamba2": ("simple_gla", {"g": "head_decay"}),
    "gated_linear": ("gla", {"g": "channel_decay"}),
    "delta": ("deltanet", {"beta": "beta"}),
    "gated_delta": ("gated_deltanet", {"g": "head_decay", "beta": "beta"}),
    "kimi_delta": ("kda", {"g": "channel_decay", "beta": "beta"}),
    "rwkv7": (
      "rwkv7",
      {"w": "channel_decay", "a": "removal", "b": "replacement"},
    ),
  }

  def row(name, ours):
    kind, names = kinds[name]

    def theirs(*qkv, x):
      gates = {peer_name: x[name] for peer_name, name in names.items()}
      scale = 1.0 if kind == "rwkv7" else qkv[0].shape[-1] ** -0.5
      return linear_attention(kind, *qkv, **gates, scale=scale, impl="chunked")[
        0
      ]

    return Row(name, f"{kind}, chunked", ours, theirs)

  return [row(*pair) for pair in _recurrences().items()]


def ejkernel() -> list[Row]:
  """Returns the rows of ejkernel's XLA forms."""
  xla = importlib.import_module("ejkernel.kernels._xla")

  ours = _recurrences() | _softmax()

  def delta(chunked):
    return lambda *qkv, x: xla.gated_delta_rule(
      *(*qkv, x["beta"], x["head_decay"]),
      use_qk_l2norm=False,
      use_chunked=chunked,
    )[0]

  def rwkv7(query, key, value, *, x):
    erase = x["replacement"], x["removal"]
    arrays = query, x["channel_decay"], key, value, *erase
    return xla.rwkv7(*arrays, softmax_scale=1.0)[0]

  theirs = {
    ("gated_linear", "recurrent_gla"): lambda *qkv, x: xla.recurrent_gla(
      *qkv, g=x["channel_decay"]
    )[0],
    ("gated_delta", "gated_delta_rule, chunked"): delta(True),
    ("gated_delta", "gated_delta_rule, recurrent"): delta(False),
    ("rwkv7", "rwkv7"): rwkv7,
    ("flash", "flash_attention, causal"): lambda *qkv, x: xla.flash_attention(
      *qkv, causal=True
    ),
    ("sliding_window", "flash_attention, sliding_window"): (
      lambda *qkv, x: xla.flash_attention(
        *qkv, causal=True, sliding_window=(WINDOW, 0)
      )
    ),
  }
  return [
    Row(name, peer, ours[name], call) for (name, peer), call in theirs.items()
  ]


def tokamax() -> list[Row]:
  """Returns the row of tokamax's Kimi Delta Attention, in chunks of plain XLA.

  It computes decays as −5 · sigmoid(gate); the gates below give our decays.
  """
  api = importlib.import_module("tokamax._src.ops.kda.api")

  def kda(query, key, value, *, x):
    share = x["channel_decay"] / -5.0
    gate = jnp.log(share) - jnp.log1p(-share)
    # tokamax has heads before the batch.
    arrays = (
      jnp.moveaxis(y, 2, 0) for y in (query, key, value, gate, x["beta"])
    )
    heads, width = query.shape[2:]
    out, _ = api.kimi_delta_attention(
      *arrays,
      a_log=jnp.zeros(heads),
      delta_time_bias=jnp.zeros(heads * width),
      lower_bound=-5.0,
      use_gate_in_kernel=True,
      scale=width**-0.5,
      implementation="xla_chunked",
    )
    return jnp.moveaxis(out, 0, 2)

  ours = _recurrences()["kimi_delta"]
  return [Row("kimi_delta", "kimi_delta_attention, xla_chunked", ours, kda)]


PEERS = {
  "jax.nn": jax_nn,
  "jla": jla,
  "ejkernel": ejkernel,
  "tokamax": tokamax,
}


def compare(row: Row, arrays: Arrays, rounds: int) -> list[str]:
  """Returns ratios of seconds and temporaries, and the difference of outputs."""
  # XLA would fold constants during compilation, so these are arguments.
  arguments = *(arrays[name] for name in ("query", "key", "value")), arrays

  def forward(function):
    return lambda query, key, value, x: function(query, key, value, x=x)

  def gradients(function):
    call = forward(function)
    return jax.grad(lambda *x: jnp.sum(call(*x) ** 2), (0, 1, 2))

  functions, cells, difference = (row.ours, row.theirs), [], "–"
  for part in (forward, gradients):
    try:
      ours, theirs = (
        jax.jit(part(function)).lower(*arguments).compile()
        for function in functions
      )
      outputs = [
        jax.block_until_ready(program(*arguments)) for program in (ours, theirs)
      ]
    except Exception as error:  # An error fills two cells of the table.
      cells += [type(error).__name__, "–"]
      continue
    if part is forward:
      out, expected = outputs
      error = jnp.max(jnp.abs(out - expected))
      difference = f"{error / jnp.max(jnp.abs(expected)):.0e}"
    seconds = least_seconds((ours, theirs), arguments, rounds)
    cells.append(f"{seconds[0] / seconds[1]:.2f}")
    memory: Any = [program.memory_analysis() for program in (ours, theirs)]
    temporaries = [x.temp_size_in_bytes for x in memory]
    cells.append(f"{temporaries[0] / max(temporaries[1], 1):.2f}")
  return [*cells, difference]


def least_seconds(
  programs: tuple[Any, ...], arguments: tuple[Any, ...], rounds: int
) -> list[float]:
  """Returns the shortest time per program, over calls in turn."""
  least = [float("inf")] * len(programs)
  for _ in range(rounds):
    for i, program in enumerate(programs):
      start = time.perf_counter()
      jax.block_until_ready(program(*arguments))
      least[i] = min(least[i], time.perf_counter() - start)
  return least


def main() -> None:
  """Prints the table of a peer."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--peer", choices=PEERS, required=True)
  sizes = {"batch": 1, "length": 4096, "heads": 8, "width": 64, "rounds": 7}
  for name, default in sizes.items():
    parser.add_argument(f"--{name}", type=int, default=default)
  options = parser.parse_args()
  try:
    version = importlib.metadata.version(PACKAGES[options.peer])
    rows = PEERS[options.peer]()
  except ImportError as error:
    parser.error(
      f"--peer={options.peer}: {error}; see the docstring of this file"
    )
  batch, length, heads, width, rounds = (getattr(options, x) for x in sizes)
  print(
    f"{PACKAGES[options.peer]} {version}, jax {jax.__version__}, "
    f"{jax.default_backend()}, float32; B, T, N, H = {batch}, {length:,}, "
    f"{heads}, {width}\n"
  )
  names = ["ours", "theirs", "forward", "MiB", "with gradients", "MiB"]
  print("| " + " | ".join([*names, "difference"]) + " |")
  print("| --- | --- | --: | --: | --: | --: | --: |", flush=True)
  arrays = draw_arrays(batch, length, heads, width)
  for row in rows:
    cells = compare(row, arrays, rounds)
    line = [f"`{row.mechanism}`", f"`{row.peer}`", *cells]
    print("| " + " | ".join(line) + " |", flush=True)


if __name__ == "__main__":
  main()

"""How long a decoder takes to read a prompt: in one call, and id by id.

    python -m benchmarks.prompt
    python -m benchmarks.prompt --length=2048 --attention=dense,performer

A decoder of four layers (8 heads of 64, float32, drawn weights) reads a prompt
and generates one token, with `prefill` of the mechanism's record and without it.
Medians of alternating runs.
"""

import functools
import time

from absl import flags
import jax
import numpy as np

from attention import ATTENTIONS
from configs import attentions
import models
from settings.errors import ConfigError
from training import entry

_LENGTH = flags.DEFINE_integer(
  "length", 512, "ids of the prompt", lower_bound=2
)
_ATTENTION = flags.DEFINE_list(
  "attention",
  ["dense", "sliding_window", "linear", "performer", "window_linear", "lsh"],
  "mechanisms that decode",
)
_REPEATS = flags.DEFINE_integer("repeats", 3, "runs of each", lower_bound=1)


def main() -> None:
  """Prints a line for each mechanism."""
  length = _LENGTH.value
  for name in _ATTENTION.value:
    if name not in ATTENTIONS:
      raise ConfigError(
        f"--attention: expected some of {', '.join(ATTENTIONS)}, got {name!r}"
      )
  print(
    f"{'mechanism':16} {'one call, ms':>14} {'id by id, ms':>14} {'ratio':>7}"
  )
  for name in _ATTENTION.value:
    config = models.ModelConfig(
      kind="decoder",
      num_layers=4,
      num_heads=8,
      features=512,
      mlp_features=2048,
      position="rotary",
      decoder_attention=models.AttentionConfig(
        name, attentions.options(name, long=True)
      ),
    )
    at_once, in_turn = _seconds(config, length)
    ratio = in_turn / at_once
    print(
      f"{name:16} {1e3 * at_once:14.1f} {1e3 * in_turn:14.1f} {ratio:7.1f}",
      flush=True,
    )


def _seconds(config: models.ModelConfig, length: int) -> tuple[float, float]:
  """Median seconds of a prompt in one call, and of its ids in turn."""
  model = models.create(
    config,
    source_vocab_size=None,
    target_vocab_size=256,
    max_source_length=None,
    max_target_length=length + 1,
  )
  prompt = np.random.default_rng(0).integers(3, 256, (1, length))
  variables = models.initialize(model, jax.random.key(0), {"inputs": prompt})

  @functools.partial(jax.jit, static_argnames="at_once")
  def read(variables, prompt, at_once):
    _, state = model.apply(
      variables, None, 1, length + 1, method="start", mutable=["cache"]
    )

    def call(cache, method, *arguments):
      return model.apply(
        {**variables, "cache": cache},
        *arguments,
        method=method,
        mutable=["cache"],
      )

    if at_once:
      lengths = np.full(1, length)
      return call(state["cache"], "prefill", prompt, lengths)[0]

    def step(cache, ids):
      logits, new = call(cache, "decode", ids)
      return new["cache"], logits

    return jax.lax.scan(step, state["cache"], prompt.T)[1][-1]

  def run(at_once):
    start = time.perf_counter()
    out = jax.block_until_ready(read(variables, prompt, at_once=at_once))
    return time.perf_counter() - start, out

  (_, first), (_, second) = run(True), run(False)
  np.testing.assert_allclose(first, second, rtol=2e-3, atol=2e-3)
  pairs = [(run(True)[0], run(False)[0]) for _ in range(_REPEATS.value)]
  at_once, in_turn = np.median(np.array(pairs), axis=0)
  return float(at_once), float(in_turn)


if __name__ == "__main__":
  entry.run(main)

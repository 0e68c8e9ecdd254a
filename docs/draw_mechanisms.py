"""Draws the pictures of `docs/mechanisms.md` with the functions themselves.

`python -m docs.draw_mechanisms` writes `docs/mechanisms/<name>.png`, one for
every entry of `ATTENTIONS` and one for positions, in about a minute on a CPU.
Arguments select pictures by name.

Every panel shows `attention_weights` for the same 64 tokens: eight runs of 5 to
11 tokens, each a noisy copy of one of four vectors, in the order
A B C D B A D C. Query and key are the same array. Attention by content appears
as blocks where two runs have the same letter, attention by position as stripes
along the diagonal. Variables have their initial values.
"""

from collections.abc import Callable, Mapping
from functools import cache, partial
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
import numpy as np

from attention import (
  ATTENTIONS,
  Dims,
  alibi_bias,
  attention_weights,
  dense_attention,
  gates_from_keys,
  linformer_attention,
  log_linear_attention,
  mesa_attention,
  rotary,
  t5_bias,
)
from attention import mechanism as mechanisms
from attention.recurrent.arrays import unit_length
import training  # noqa: F401 - switches off a faulty fusion of XLA

FOLDER = pathlib.Path(__file__).parent / "mechanisms"

_LETTERS = (0, 1, 2, 3, 1, 0, 3, 2)
_RUN_LENGTHS = (7, 9, 5, 11, 8, 6, 10, 8)
_LENGTH = sum(_RUN_LENGTHS)
_HEAD_DIM = 16

Panels = Mapping[str, Array]
"""Title -> `[T, S]`."""


@cache
def tokens(num_heads: int = 1) -> Float[Array, "1 T N H"]:
  """Returns the input of all panels, the same for every head."""
  letter_rng, noise_rng = jax.random.split(jax.random.key(0))
  letters = jax.random.normal(letter_rng, (4, _HEAD_DIM))
  noise = jax.random.normal(noise_rng, (_LENGTH, _HEAD_DIM))
  x = letters[np.repeat(_LETTERS, _RUN_LENGTHS)] + 0.4 * noise
  return jnp.repeat(x[None, :, None], num_heads, axis=2)


def _apply(
  name: str, num_heads: int = 1, **hyperparameters
) -> Callable[..., Array]:
  """Returns the `apply` of a mechanism with its initial variables."""
  mechanism = gates_from_keys(ATTENTIONS[name](**hyperparameters))
  features = num_heads * _HEAD_DIM
  dims = Dims(num_heads, num_heads, _HEAD_DIM, _LENGTH, features)
  return partial(mechanism.apply, mechanism.init(jax.random.key(1), dims))


def _matrix(fn: Callable[..., Any], **options) -> Float[Array, "T S"]:
  """Returns the matrix of one head for the common input."""
  return attention_weights(fn, tokens(), tokens(), **options)[0, 0]


def _flash() -> Panels:
  fn = _apply("flash", block_size=16)
  segments = (jnp.arange(_LENGTH) >= 32).astype(jnp.int32)[None]
  packed = _matrix(
    fn, query_segment_ids=segments, key_segment_ids=segments, is_causal=True
  )
  return {"bidirectional": _matrix(fn), "causal, two packed examples": packed}


def _sliding_window() -> Panels:
  near = _apply("sliding_window", window=6)
  dilated = _apply("sliding_window", window=6, dilation=2)
  return {
    "window 6, global 0 and 40": _matrix(
      near, global_indices=jnp.array([[0, 40]])
    ),
    "causal, window 6, dilation 2": _matrix(dilated, is_causal=True),
  }


def _bigbird() -> Panels:
  fn = _apply("bigbird", num_heads=2, block_size=4, num_random=1)
  first, second = attention_weights(fn, tokens(2), tokens(2))[0]
  return {"head 1, blocks of 4": first, "head 2": second}


def _performer() -> Panels:
  return {
    f"causal, {n} features": _matrix(
      _apply("performer", num_features=n), is_causal=True
    )
    for n in (16, 256)
  }


def _window_linear() -> Panels:
  fn = _apply("window_linear", window=6)
  return {"causal, window 6": _matrix(fn, is_causal=True)}


def _linformer() -> Panels:
  means = jnp.repeat(jnp.eye(8), 8, axis=0) / 8
  return {
    "rank 8, E and F as drawn": _matrix(_apply("linformer", rank=8)),
    "rank 8, E = F = means of 8": _matrix(
      partial(linformer_attention, key_projection=means)
    ),
  }


def _lsh() -> Panels:
  def matrix(rounds, **options):
    fn = _apply("lsh", num_rounds=rounds, num_buckets=8, chunk_size=16)
    return attention_weights(fn, tokens(), None, **options)[0, 0]

  return {
    "1 round, 8 buckets": matrix(1),
    "causal, 4 rounds": matrix(4, is_causal=True),
  }


def _nystrom() -> Panels:
  return {
    f"{n} landmarks": _matrix(_apply("nystrom", num_landmarks=n))
    for n in (4, 16)
  }


def _multiplicative() -> Panels:
  return {
    "dot": _matrix(_apply("multiplicative", general=False)),
    "general, W as drawn": _matrix(_apply("multiplicative")),
  }


def _window_2d() -> Panels:
  return {
    f"grid 8 × 8, window 4, shift {shift}": _matrix(
      _apply("window_2d", grid=(8, 8), window=4, shift=shift)
    )
    for shift in (0, 2)
  }


def _strided_2d() -> Panels:
  return {
    f"grid 8 × 8, stride {stride}": _matrix(
      _apply("strided_2d", grid=(8, 8), stride=stride)
    )
    for stride in (2, 4)
  }


def _retention() -> Panels:
  fn = _apply("retention", num_heads=4)
  heads = attention_weights(fn, tokens(4), tokens(4), is_causal=True)[0]
  return {"head 1": heads[0], "head 4": heads[3]}


def _lightning() -> Panels:
  panels = {}
  for title, depth in {"first layer": 0.0, "in the middle": 0.5}.items():
    fn = _apply("lightning", num_heads=4, depth=depth)
    heads = attention_weights(fn, tokens(4), tokens(4), is_causal=True)[0]
    panels[f"head 2, {title}"] = heads[1]
  return panels


def _latent() -> Panels:
  return {
    f"causal, R = {n}": _matrix(_apply("latent", rank=n), is_causal=True)
    for n in (2, 40)
  }


def _query_only(name: str) -> Panels:
  """Draws a mechanism that has neither keys nor values."""
  weights = attention_weights(_apply(name), tokens(), None, is_causal=True)
  return {"causal, mean of 16 channels": weights[0, 0]}


def _short(name: str) -> Panels:
  """Draws a mechanism with its hyperparameters for short sequences."""
  sizes = mechanisms.example(ATTENTIONS[name]).sizes.short
  return {"causal": _matrix(_apply(name, **sizes), is_causal=True)}


def _stick_breaking() -> Panels:
  fn = _apply("stick_breaking")
  return {
    f"causal, scale 1/{n}": _matrix(fn, scale=1 / n, is_causal=True)
    for n in (4, 64)
  }


def _path() -> Panels:
  return {
    title: _matrix(_apply("path", forget=forget), is_causal=True)
    for title, forget in (("causal", False), ("causal, forget gates", True))
  }


def _dsa() -> Panels:
  return {
    f"causal, {n} keys per query": _matrix(
      _apply("dsa", top_k=n), is_causal=True
    )
    for n in (8, 24)
  }


def _compressed() -> Panels:
  sizes = {"window": 8, "stride": 4}
  return {
    "every entry": _matrix(_apply("compressed", **sizes), is_causal=True),
    "two entries": _matrix(
      _apply("compressed", top_k=2, **sizes), is_causal=True
    ),
  }


def _mesa() -> Panels:
  """Draws Mesa without decay, so that early keys are visible too."""
  x = unit_length(tokens())
  heads = jnp.zeros(x.shape[:3])
  gates = {"log_decay": heads, "beta": heads + 1.0}

  def matrix(ridge):
    ridge = jnp.full((1, _HEAD_DIM), ridge)
    fn = partial(mesa_attention, regularizer=ridge, **gates)
    return attention_weights(fn, x, x)[0, 0]

  return {f"no decay, λ = {ridge:g}": matrix(ridge) for ridge in (1.0, 8.0)}


def _ttt_linear() -> Panels:
  """Draws the derivative by the values, where they equal the keys."""
  x = tokens()
  fn = _apply("ttt_linear")
  return {"causal": attention_weights(fn, x, x, x, is_causal=True)[0, 0]}


def _log_linear() -> Panels:
  """Draws 64 equal tokens, whose weights depend only on the level."""
  x = jnp.broadcast_to(unit_length(tokens()[:, :1]), tokens().shape)
  scales = 0.6 ** jnp.arange(7)
  fn = partial(
    log_linear_attention,
    log_decay=jnp.zeros(x.shape[:3]),
    level_scales=jnp.broadcast_to(scales, (*x.shape[:3], 7)),
  )
  weights = attention_weights(fn, x, x)[0, 0]
  return {"same token, λ = 0.6^level": weights}


def _positions() -> Panels:
  """Draws dense attention among 64 equal tokens at different positions."""
  x = jnp.broadcast_to(tokens()[:, :1], tokens().shape)
  # With this seed distance 0 has the largest weight in every row, so that equal
  # weights have equal colours.
  t5_rng, shaw_rng = jax.random.split(jax.random.key(178))
  embedding = jax.random.normal(t5_rng, (16, 1))
  relative_keys = jax.random.normal(shaw_rng, (2 * 8 + 1, _HEAD_DIM))
  positions: Int[Array, "1 T"] = jnp.arange(_LENGTH)[None]

  def matrix(x, **options):
    return attention_weights(dense_attention, x, x, **options)[0, 0]

  return {
    "T5, 16 buckets": matrix(x, relative_bias=t5_bias(embedding, 64)),
    "ALiBi, slope 1/16": matrix(x, relative_bias=alibi_bias(2, _LENGTH)[:1]),
    "Shaw, L = 8": matrix(x, relative_keys=relative_keys),
    "rotary": matrix(rotary(x, positions)),
  }


def _plain(name: str) -> Panels:
  """Draws a mechanism with its default hyperparameters."""
  attend = _apply(name)
  directions = mechanisms.directions(mechanisms.example(ATTENTIONS[name]))
  return {
    "causal" if is_causal else "bidirectional": _matrix(
      attend, is_causal=is_causal
    )
    for is_causal in directions
  }


_SPECIAL: Mapping[str, Callable[[], Panels]] = {
  "flash": _flash,
  "sliding_window": _sliding_window,
  "bigbird": _bigbird,
  "performer": _performer,
  "window_linear": _window_linear,
  "linformer": _linformer,
  "lsh": _lsh,
  "nystrom": _nystrom,
  "multiplicative": _multiplicative,
  "window_2d": _window_2d,
  "strided_2d": _strided_2d,
  "retention": _retention,
  "lightning": _lightning,
  "mamba": partial(_query_only, "mamba"),
  "rg_lru": partial(_query_only, "rg_lru"),
  "mesa": _mesa,
  "ttt_linear": _ttt_linear,
  "log_linear": _log_linear,
  "latent": _latent,
  "moba": partial(_short, "moba"),
  "nsa": partial(_short, "nsa"),
  "stick_breaking": _stick_breaking,
  "path": _path,
  "dsa": _dsa,
  "compressed": _compressed,
}
"""Mechanisms whose picture shows the effect of a hyperparameter."""

PICTURES: Mapping[str, Callable[[], Panels]] = {
  **{name: _SPECIAL.get(name, partial(_plain, name)) for name in ATTENTIONS},
  "positions": _positions,
}
"""Name -> a function that returns the panels of its picture."""


def draw(path: pathlib.Path, panels: Panels) -> None:
  """Draws the panels side by side, with 4 × 4 pixels per weight.

  Blue is positive and red is negative. Darkness shows the size of a weight
  relative to the largest in its row. Grey is exactly 0.
  """
  # The import takes a second, which tests of this module do not need.
  from matplotlib import colormaps
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure

  # Few colours keep the file small.
  colours = colormaps["RdBu"].resampled(41)
  colours.set_bad("0.8")
  side, left, bottom, gap = 4 * _LENGTH, 54, 46, 24
  width = left + len(panels) * (side + gap)
  height = bottom + side + 28
  figure = Figure(figsize=(width / 100, height / 100), dpi=100)
  FigureCanvasAgg(figure)
  for i, (title, weights) in enumerate(panels.items()):
    corner = (left + i * (side + gap)) / width, bottom / height
    axes = figure.add_axes((*corner, side / width, side / height))
    weights = np.asarray(weights)
    largest = np.abs(weights).max(axis=1, keepdims=True)
    relative = weights / np.where(largest == 0, 1, largest)
    axes.imshow(
      np.ma.masked_equal(relative, 0),
      cmap=colours,
      vmin=-1,
      vmax=1,
      interpolation="nearest",
    )
    axes.set_title(title, fontsize=10)
    axes.set_xticks(range(0, _LENGTH, 16))
    axes.set_yticks(range(0, _LENGTH, 16), labels=None if i == 0 else [""] * 4)
    axes.set_xlabel("key")
    if i == 0:
      axes.set_ylabel("query")
  # Without the version of matplotlib, the same picture is the same file.
  figure.savefig(path, metadata={"Software": None})


def main(names: list[str]) -> None:
  """Draws the named pictures, or all."""
  FOLDER.mkdir(exist_ok=True)
  for name in names or PICTURES:
    draw(FOLDER / f"{name}.png", PICTURES[name]())
    print(FOLDER / f"{name}.png")


if __name__ == "__main__":
  main(sys.argv[1:])

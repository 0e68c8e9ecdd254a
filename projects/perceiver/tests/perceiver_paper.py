"""Perceiver IO in NumPy, one query and one head at a time."""

import math

import numpy as np


def norm(x, p):
  """(x − mean) / √(variance + 1e-5) · γ + β."""
  centred = x - x.mean(-1, keepdims=True)
  scaled = centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + 1e-5)
  return scaled * p["scale"] + p["bias"]


def dense(x, p):
  return x @ p["kernel"] + p["bias"]


def gelu(x):
  return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def attend(x, y, p, num_heads, present):
  """Softmax of scaled products, over the keys that are present."""
  query, key, value = (
    dense(rows, p[name]).reshape(len(rows), num_heads, -1)
    for rows, name in ((x, "query"), (y, "key"), (y, "value"))
  )
  out = np.zeros((len(x), num_heads, value.shape[-1]))
  for t in range(len(x)):
    for head in range(num_heads):
      logits = key[:, head] @ query[t, head] / math.sqrt(query.shape[-1])
      weights = np.where(present, np.exp(logits - logits.max()), 0.0)
      if present.any():
        out[t, head] = weights / weights.sum() @ value[:, head]
  return dense(out.reshape(len(x), -1), p["out"])


def layer(x, y, p, num_heads, present, residual=True):
  """One layer; y is None among latents."""
  slot = "self_attention" if y is None else "cross_attention"
  normed = norm(x, p[f"{slot}_norm"])
  keys = normed if y is None else norm(y, p["memory_norm"])
  out = attend(normed, keys, p[slot], num_heads, present)
  x = x + out if residual else out
  hidden = gelu(dense(norm(x, p["mlp_norm"]), p["mlp"]["hidden"]))
  return x + dense(hidden, p["mlp"]["out"])


def outputs(config, p, inputs, present):
  """What the decoder gives for the inputs `[S, C]` of one row."""
  z = layer(
    p["latents"],
    inputs,
    p["encoder"],
    config.input_heads,
    present,
    config.input_residual,
  )
  everyone = np.ones(len(z), bool)
  for _ in range(config.num_blocks):
    for i in range(config.num_layers):
      z = layer(z, None, p[f"encoder_{i}"], config.num_heads, everyone)
  return layer(
    p["queries"],
    z,
    p["decoder"],
    config.output_heads,
    everyone,
    config.output_residual,
  )


def places(height, width, num_bands):
  """Fourier features of every pixel, one number at a time."""
  rows = []
  for place in np.ndindex(height, width):
    row = []
    for i, size in zip(place, (height, width), strict=True):
      x = -1 + 2 * i / (size - 1)
      top = size / 2
      f = [1 + (top - 1) * k / (num_bands - 1) for k in range(num_bands)]
      row += [x, *(math.sin(math.pi * one * x) for one in f)]
      row += [math.cos(math.pi * one * x) for one in f]
    rows.append(row)
  return np.array(rows)


def of_image(config, p, image):
  """Logits `[1, V]` of one image `[H, W, C]`."""
  height, width, channels = image.shape
  pixels = image.reshape(-1, channels)
  found = places(height, width, config.fourier_bands)
  inputs = dense(np.hstack([pixels, found]), p["pixels"]["projection"])
  present = np.ones(len(inputs), bool)
  return dense(outputs(config, p, inputs, present), p["head"]["classes"])

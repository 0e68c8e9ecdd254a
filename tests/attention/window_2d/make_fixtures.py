"""Writes results of transformers' Swin layers, for window_2d attention.

    pip install torch==2.13.0 transformers==4.57.6
    python tests/attention/window_2d/make_fixtures.py

Writes `<case>.npz` in this folder: query, key and value of a layer, its table,
what its attention returns in float64, and the gradient of Σ out · cotangent by
the table. The layer itself rolls, cuts and masks; everything around its
attention is the identity. The tests need neither of the two libraries.
"""

import pathlib

import numpy as np
import torch
import transformers
from transformers.models.swin.modeling_swin import SwinLayer

HERE = pathlib.Path(__file__).parent
HEADS, WIDTH = 2, 4
# Grid, window, shift, and a factor of the queries. Sharp queries outweigh some
# of the -100 that the code adds to pairs that only the roll joins.
CASES = {
  "plain": ((6, 9), 3, 0, 1.0),
  "shifted": ((6, 9), 3, 1, 1.0),
  "sharp": ((6, 9), 3, 2, 60.0),
  "one_window": ((3, 6), 3, 1, 1.0),
}


def layer(window: int, shift: int, gain: float) -> SwinLayer:
  """Returns a layer that only adds its attention to its inputs."""
  config = transformers.SwinConfig(
    window_size=window, qkv_bias=False, attn_implementation="eager"
  )
  made = SwinLayer(config, HEADS * WIDTH, None, HEADS, shift_size=shift)
  made = made.eval().double()
  made.layernorm_before = torch.nn.Identity()
  attention = made.attention.self
  with torch.no_grad():
    for weight in made.parameters():
      weight.zero_()
    for name, factor in (("query", gain), ("key", 1.0), ("value", 1.0)):
      weight = getattr(attention, name).weight
      weight.copy_(factor * torch.randint(-8, 9, weight.shape) / 16)
    made.attention.output.dense.weight.copy_(torch.eye(HEADS * WIDTH))
    attention.relative_position_bias_table.normal_()
    for weight in made.parameters():
      weight.copy_(weight.float())
  return made


def main() -> None:
  """Writes every case."""
  for seed, (case, (grid, window, shift, gain)) in enumerate(CASES.items()):
    torch.manual_seed(seed)
    made = layer(window, shift, gain)
    attention = made.attention.self
    shape = (1, grid[0] * grid[1], HEADS * WIDTH)
    # Few digits, as in the weights: the projections are exact in float32.
    inputs = torch.randint(-8, 9, shape).double() / 4
    cotangent = torch.randn(shape).float().double()
    out = made(inputs, grid)[0] - inputs
    table = attention.relative_position_bias_table
    (gradient,) = torch.autograd.grad((out * cotangent).sum(), table)

    def by_head(x, dtype=np.float32):
      return x.detach().numpy().astype(dtype).reshape(1, -1, HEADS, WIDTH)

    np.savez_compressed(
      HERE / f"{case}.npz",
      query=by_head(attention.query(inputs)),
      key=by_head(attention.key(inputs)),
      value=by_head(attention.value(inputs)),
      relative_bias=table.detach().numpy().astype(np.float32),
      out=by_head(out, np.float64),
      cotangent=by_head(cotangent),
      table_gradient=gradient.numpy(),
      grid=grid,
      window=window,
      shift=shift,
    )


if __name__ == "__main__":
  main()

"""Adds cases for make_transformers.py: sparse attention and Nyströmformer."""

import importlib
from typing import Any

from modules import ConstantModule
import numpy as np
import torch
from torch import nn
import transformers
from vectors import Draw, Vectors

N, H = 2, 4


def modeling(name: str) -> Any:
  """Imports transformers.models.`name`.modeling_`name`."""
  path = f"transformers.models.{name}.modeling_{name}"
  return importlib.import_module(path)


def sparse(file: Vectors) -> None:
  """Adds Longformer, BigBird, Nyströmformer, Swin and CvT."""
  longformer = modeling("longformer")
  length, window = 30, 5
  config = transformers.LongformerConfig(
    hidden_size=N * H,
    num_attention_heads=N,
    attention_window=[2 * window],
    attention_probs_dropout_prob=0.0,
  )
  names = "query", "key", "value"

  def call(query, key, value, global_indices=None, **global_qkv):
    module = longformer.LongformerSelfAttention(config, 0).eval()

    def flat(x):
      return ConstantModule(x.flatten(2).transpose(0, 1))

    for name, x in zip(names, (query, key, value), strict=True):
      setattr(module, name, flat(x))
    mask = query.new_zeros(1, length)
    if global_indices is not None:
      places = global_indices[0].long()
      mask[:, places] = 10000.0
      # Without projections of their own, global tokens have those of all.
      for i, x in enumerate((query, key, value)):
        x = global_qkv.get(f"global_qkv/{i}", x)
        x = x[:, places] if i == 0 else x
        setattr(module, f"{names[i]}_global", flat(x))
    out = module(
      query.new_zeros(1, length, N * H),
      attention_mask=mask,
      is_index_masked=mask < 0,
      is_index_global_attn=mask > 0,
      is_global_attn=global_indices is not None,
    )[0]
    return {"out": out.unflatten(2, (N, H))}

  draw = Draw("hf longformer")
  given = draw.qkv(length=length, value=H)
  ids = {"global_indices": np.array([[2, 17]], np.int32)}
  others = draw.qkv(length=length, value=H).values()
  both = given | {f"global_qkv/{i}": x for i, x in enumerate(others)}
  for name, arrays, fixed in (
    ("hf_window", given, {}),
    ("hf_global", given, ids),
    ("hf_global_projections", both, ids),
  ):
    file.add(
      name,
      call,
      witness="LongformerSelfAttention",
      mechanism="sliding_window",
      given=arrays,
      fixed=fixed,
      options={"window": window},
    )
  bigbird(file)
  nystrom(file)
  grids(file)
  strides(file)


def bigbird(file: Vectors) -> None:
  """Adds BigBird, with the random blocks that it draws."""
  module = modeling("big_bird")
  size, blocks = 3, 11
  config = transformers.BigBirdConfig(
    hidden_size=N * H,
    num_attention_heads=N,
    block_size=size,
    num_random_blocks=2,
    attention_probs_dropout_prob=0.0,
  )
  # In evaluation mode all random blocks are block 0.
  attention = module.BigBirdBlockSparseAttention(config, seed=3).train()
  draw_blocks = attention._bigbird_block_rand_mask_with_head
  drawn = []

  def kept(*args, **options):
    drawn.append(draw_blocks(*args, **options))
    return drawn[-1]

  attention._bigbird_block_rand_mask_with_head = kept

  def call(query, key, value, random_blocks=None):
    del random_blocks
    for name, x in (("query", query), ("key", key), ("value", value)):
      setattr(attention, name, ConstantModule(x.flatten(2)))
    ones = torch.ones(1, size * blocks)
    make = module.BigBirdModel.create_masks_for_block_sparse_attn
    blocked, band, rows, columns = make(ones, size)
    hidden = query.new_zeros(1, size * blocks, N * H)
    masks = band, rows, columns, blocked, blocked
    return {"out": attention(hidden, *masks)[0].unflatten(2, (N, H))}

  given = Draw("hf bigbird").qkv(length=size * blocks, value=H)
  call(**{name: torch.tensor(x) for name, x in given.items()})
  random_blocks = np.stack(drawn[0]).astype(np.int32)
  print("random blocks", random_blocks[0].tolist())
  file.add(
    "hf_bigbird",
    call,
    witness="BigBirdBlockSparseAttention, training",
    mechanism="bigbird",
    given=given,
    fixed={"random_blocks": random_blocks},
    options={"block_size": size},
  )


def nystrom(file: Vectors) -> None:
  """Adds Nyströmformer, with its two initial values and its convolution."""
  module = modeling("nystromformer")
  length, landmarks = 35, 7

  def run(query, key, value, start, kernel=None):
    config = transformers.NystromformerConfig(
      hidden_size=N * H,
      num_attention_heads=N,
      num_landmarks=landmarks,
      segment_means_seq_len=length,
      conv_kernel_size=5,
    )
    attention = module.NystromformerSelfAttention(config).eval()
    attention.init_option = start
    for name, x in (("query", query), ("key", key), ("value", value)):
      setattr(attention, name, ConstantModule(x.flatten(2)))
    if kernel is None:
      attention.conv_kernel_size = None
    else:
      del attention.conv.weight
      attention.conv.weight = kernel.T[:, None, :, None]
    out = attention(query.new_zeros(1, length, N * H))[0]
    return {"out": out.unflatten(2, (N, H))}

  draw = Draw("hf nystrom")
  given = draw.qkv(length=length, value=H)
  witness = "NystromformerSelfAttention"
  for shared in (False, True):
    start = "original" if shared else "exact"
    file.add(
      f"hf_nystrom_{start}",
      lambda query, key, value, start=start: run(query, key, value, start),
      witness=f"{witness}, the {start} start",
      mechanism="nystrom",
      given=given,
      options={"num_landmarks": landmarks, "shared_start": shared},
    )
  options = {"num_landmarks": landmarks, "shared_start": True}
  file.add(
    "hf_nystrom_convolution",
    lambda query, key, value, **params: run(
      query, key, value, "original", params["params/conv_kernel"]
    ),
    witness=f"{witness}, with its convolution",
    mechanism="nystrom",
    function="nystrom",
    given=given | {"params/conv_kernel": draw.normal(5, N)},
    options=options | {"conv_kernel_size": 5},
    call={"is_causal": False},
    definition=False,
  )


def grids(file: Vectors) -> None:
  """Adds Swin's windows, shifted and not."""
  swin = modeling("swin")
  size, grid = 3, (6, 6)
  config = transformers.SwinConfig(
    window_size=size, attn_implementation="eager"
  )

  def call(query, key, value, relative_bias, shift):
    layer = swin.SwinLayer(config, N * H, grid, N, shift_size=shift)
    attention = layer.attention.eval()

    def windows(x):
      x = layer.cyclic_shift(x.reshape(1, *grid, N * H))
      return swin.window_partition(x, size).flatten(1, 2)

    names = "q_proj", "k_proj", "v_proj"
    for name, x in zip(names, (query, key, value), strict=True):
      setattr(attention, name, ConstantModule(windows(x)))
    attention.o_proj = nn.Identity()
    table = attention.relative_position_bias
    del table.relative_position_bias_table
    table.relative_position_bias_table = relative_bias
    mask = layer.get_attn_mask(*grid, torch.float32, "cpu")
    out = attention(windows(torch.zeros_like(query)), mask)[0]
    out = out.unflatten(1, (size, size))
    out = swin.window_reverse(out, size, *grid)
    out = layer.cyclic_shift(out, reverse=True)
    return {"out": out.reshape(1, -1, N, H)}

  draw = Draw("hf swin")
  given = draw.qkv(length=grid[0] * grid[1], value=H)
  given["relative_bias"] = draw.normal((2 * size - 1) ** 2, N)
  for shift in (0, 1):
    file.add(
      f"hf_swin_{shift}",
      lambda shift=shift, **given: call(shift=shift, **given),
      witness=f"SwinAttention, shifted by {shift}",
      mechanism="window_2d",
      given=given,
      options={
        "grid": grid,
        "window": size,
        "shift": shift,
        "hidden_logit": -100.0,
      },
    )


def strides(file: Vectors) -> None:
  """Adds CvT, with every second row and column of keys and values."""
  cvt = modeling("cvt")
  rows, columns = 4, 7

  def call(query, key, value):
    width = N * H
    attention = cvt.CvtSelfAttention(
      *(N, 3 * width, 1, 0, 0, 1, 2, "dw_bn", False, 0.0)
    ).eval()
    for name in ("query", "key", "value"):
      projection = getattr(attention, f"convolution_projection_{name}")
      nn.init.ones_(projection.convolution_projection.convolution.weight)
      projection.convolution_projection.normalization = nn.Identity()

    class Part(nn.Module):
      def __init__(self, first):
        super().__init__()
        self.first = first

      def forward(self, x):
        return x[..., self.first * width : (self.first + 1) * width]

    attention.projection_query = Part(0)
    attention.projection_key, attention.projection_value = Part(1), Part(2)
    # CvT divides by the square root of the whole width.
    attention.embed_dim, attention.scale = width, H**-0.5
    joined = torch.cat([x.flatten(2) for x in (query, key, value)], -1)
    out = attention(joined, rows, columns)
    return {"out": out.unflatten(2, (N, H))}

  file.add(
    "hf_cvt",
    call,
    witness="CvtSelfAttention, with a class token",
    mechanism="strided_2d",
    given=Draw("hf cvt").qkv(length=1 + rows * columns, value=H),
    options={"grid": (rows, columns), "stride": 2},
  )

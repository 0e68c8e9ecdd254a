"""Makes small models of images; `pixel_values` are stored as `[B, H, W, C]`.

python -m projects.vision.tests.published.make_fixtures
"""

import pathlib

import numpy as np

from tests.models.published.make_fixtures import case

HERE = pathlib.Path(__file__).parent
CHANNELS = {"num_channels": 3, "num_labels": 5}
PATCHES = CHANNELS | {
  "hidden_size": 24,
  "num_hidden_layers": 3,
  "num_attention_heads": 4,
  "intermediate_size": 37,
  "image_size": 15,
  "patch_size": 4,
  "hidden_act": "gelu_new",
  "layer_norm_eps": 1e-3,
}
SWIN = CHANNELS | {
  "image_size": 24,
  "patch_size": 2,
  "embed_dim": 8,
  "depths": [2, 2],
  "num_heads": [2, 4],
  "window_size": 3,
  "mlp_ratio": 2.0,
  "hidden_act": "silu",
}
CVT = CHANNELS | {
  "embed_dim": [8, 12, 16],
  "num_heads": [1, 3, 2],
  "depth": [1, 2, 3],
  "mlp_ratio": [2.0, 2.0, 2.0],
  "patch_sizes": [5, 3, 2],
  "patch_stride": [3, 2, 2],
  "patch_padding": [1, 1, 0],
  "kernel_qkv": [5, 5, 5],
  "padding_q": [2, 2, 2],
  "padding_kv": [2, 2, 2],
  "stride_kv": [3, 3, 3],
}


def pictures(rng, *shape):
  return {"pixel_values": rng.standard_normal((*shape, 3), np.float32)}


def main():
  """Makes all of them."""
  rng = np.random.default_rng(17)
  images = pictures(rng, 3, 15, 15)
  # Of another size, where positions are interpolated: grown and shrunk.
  others = rng.standard_normal((2, 23, 8, 3), np.float32)
  for name, kind in (
    ("vit", "ViTForImageClassification"),
    ("deit", "DeiTForImageClassificationWithTeacher"),
  ):
    case(HERE / name, kind, PATCHES, images, others=others)
  # Their tokens get fewer from stage to stage.
  rng = np.random.default_rng(19)
  images = pictures(rng, 2, 24, 24)
  case(HERE / "swin", "SwinForImageClassification", SWIN, images)
  # Grids of 10 × 12, 5 × 6 and 2 × 3: sides that the stride does not divide.
  images = pictures(rng, 3, 31, 38)
  case(HERE / "cvt", "CvtForImageClassification", CVT, images)


if __name__ == "__main__":
  main()

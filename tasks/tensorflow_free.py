"""Prepares datasets of the TFDS catalogue without TensorFlow.

TFDS reads text and images without TensorFlow, but encodes pixels, decodes audio and
computes audio features with it, and has no option to avoid this. This module imports
TFDS (0.7 s), so import it late.
"""

from collections.abc import Callable, Iterator
import contextlib
import functools
import glob
import importlib.util
import io
import os
import sys
import types
from typing import Any
from unittest import mock

import numpy as np
import PIL.Image
import tensorflow_datasets as tfds

_JPEG_QUALITY = 95
"""TensorFlow's default."""

_FILES = types.SimpleNamespace(
  io=types.SimpleNamespace(
    gfile=types.SimpleNamespace(GFile=open, walk=os.walk, glob=glob.glob)
  )
)
"""Replaces the functions of TensorFlow by which builders read downloads."""


@contextlib.contextmanager
def without_tensorflow(builder: tfds.core.DatasetBuilder) -> Iterator[None]:
  """Writes images with Pillow and reads files with `open` during preparation.

  TFDS encodes arrays of pixels with TensorFlow, and the builders of datasets such as
  mnist and cifar10 open downloads with it. Neither step needs it. If TensorFlow is
  installed, nothing changes.

  Args:
    builder: builder of the dataset; its features are changed permanently.
  """
  if importlib.util.find_spec("tensorflow") is not None:
    yield
    return
  for feature in (builder.info.features or {}).values():
    if isinstance(feature, tfds.features.Image):
      feature.encode_example = functools.partial(
        _encode, feature.encode_example, feature.encoding_format or "png"
      )
  module = sys.modules[type(builder).__module__]
  with contextlib.ExitStack() as stack:
    if "tf" in vars(module):
      stack.enter_context(mock.patch.object(module, "tf", _FILES))
    yield


def decode_audio_with(read: Callable[[Any], np.ndarray]) -> None:
  """Makes TFDS decode audio with `read` instead of TensorFlow and pydub.

  TFDS can then find, prepare and read datasets with audio features. If TensorFlow is
  installed, nothing changes.

  Args:
    read: `file -> samples`, integers [S].
  """
  if importlib.util.find_spec("tensorflow") is not None:
    return
  from tensorflow_datasets.core.features import audio_feature

  def load(file: Any, file_format: str | None, channels: int) -> np.ndarray:
    del file_format
    samples = read(file)
    count = 1 if samples.ndim == 1 else samples.shape[1]
    if count != channels:
      raise ValueError(f"expected {channels} channels, got {count}")
    return samples

  names = vars(audio_feature)
  names["tf"] = types.SimpleNamespace(
    dtypes=types.SimpleNamespace(as_dtype=np.dtype), io=_FILES.io
  )
  names["_pydub_load_audio"] = load
  # As for images; the dtype of audio is otherwise a TensorFlow type.
  feature: Any = audio_feature.Audio
  feature.dtype = property(lambda self: self.np_dtype)


def _encode(
  encode_default: Callable[[Any], bytes], encoding: str, image: Any
) -> bytes:
  """Encodes 8-bit pixels [H, W, C] as an image file."""
  if not isinstance(image, np.ndarray) or image.dtype != np.uint8:
    return encode_default(image)
  file = io.BytesIO()
  pixels = image[..., 0] if image.shape[-1] == 1 else image
  PIL.Image.fromarray(np.ascontiguousarray(pixels)).save(
    file, encoding, quality=_JPEG_QUALITY
  )
  return file.getvalue()

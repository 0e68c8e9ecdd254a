"""Sets of the TFDS catalogue are prepared where TensorFlow is not installed.

This module imports TFDS (0.7 s), so it is imported where it is needed.
"""

from collections.abc import Callable, Iterator
import contextlib
import functools
import importlib.util
import io
import sys
import types
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

_JPEG_QUALITY = 95  # As TensorFlow has it.


@contextlib.contextmanager
def without_tensorflow(builder: tfds.core.DatasetBuilder) -> Iterator[None]:
  """Has Pillow write images, and `open` read files, while a set is prepared.

  TFDS encodes arrays of pixels with TensorFlow, and the builders of sets such
  as mnist and cifar10 use it to open what was downloaded. Neither step needs
  it. Where TensorFlow is installed, nothing is changed.

  Args:
    builder: prepares the set; its features are changed for good.
  """
  if importlib.util.find_spec("tensorflow") is not None:
    yield
    return
  for feature in (builder.info.features or {}).values():
    if isinstance(feature, tfds.features.Image):
      feature.encode_example = functools.partial(
        _encode, feature.encode_example, feature.encoding_format or "png"
      )
  names = vars(sys.modules[type(builder).__module__])
  before = names.get("tf")
  if before is None:
    yield
    return
  gfile = types.SimpleNamespace(GFile=open)
  files = types.SimpleNamespace(io=types.SimpleNamespace(gfile=gfile))
  names["tf"] = files
  try:
    yield
  finally:
    names["tf"] = before


def _encode(
  otherwise: Callable[[Any], bytes], encoding: str, image: Any
) -> bytes:
  """Writes pixels [H, W, C] of 8 bits as a file; the rest is TFDS's."""
  if not isinstance(image, np.ndarray) or image.dtype != np.uint8:
    return otherwise(image)
  import PIL.Image

  file = io.BytesIO()
  pixels = image[..., 0] if image.shape[-1] == 1 else image
  PIL.Image.fromarray(np.ascontiguousarray(pixels)).save(
    file, encoding, quality=_JPEG_QUALITY
  )
  return file.getvalue()

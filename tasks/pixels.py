"""The pixels of a PNG or JPEG file, and checks of image arrays.

Pillow reads them; import this module late.
"""

import io

import numpy as np
import PIL.Image

from settings.errors import DataError

_PNG = b"\x89PNG\r\n\x1a\n"
_PNG_DEPTH = 24
"""Position of the byte of a PNG file that has the bits per channel."""

_GREY, _COLOUR = ("1", "L"), ("P", "RGB")
"""Pillow's modes that are read as one channel, and as three."""


def decode(data: bytes, where: str) -> np.ndarray:
  """Reads an image as stored, without the rotation in its EXIF data.

  Images with an alpha channel raise an error: dropping alpha would reveal hidden
  colours, and no background suits all images.

  Args:
    data: content of a PNG or JPEG file.
    where: name of the image, for messages.

  Returns:
    [H, W, C] uint8; C is 1 for grey, 3 for colour and for a palette.

  Raises:
    DataError: the file is neither PNG nor JPEG, is damaged, or has alpha, 16 bits
      per channel or CMYK colours.
  """
  if data.startswith(_PNG) and data[_PNG_DEPTH : _PNG_DEPTH + 1] == b"\x10":
    raise DataError(f"{where}: expected 8 bits per channel, got a 16-bit PNG")
  try:
    image = PIL.Image.open(io.BytesIO(data), formats=("PNG", "JPEG"))
  except PIL.UnidentifiedImageError:
    raise DataError(f"{where}: not a PNG or JPEG image") from None
  except Exception as error:  # Pillow's readers raise many types of errors.
    raise DataError(f"{where}: cannot be read ({_line(error)})") from error
  if image.has_transparency_data:
    raise DataError(
      f"{where}: expected an image without alpha, got mode {image.mode}; "
      "put it on a background"
    )
  if image.mode not in _GREY + _COLOUR:
    raise DataError(f"{where}: expected grey or RGB, got mode {image.mode}")
  try:
    image = image.convert("L" if image.mode in _GREY else "RGB")
  except Exception as error:  # As above.
    raise DataError(f"{where}: damaged image ({_line(error)})") from error
  pixels = np.asarray(image)
  return pixels.reshape(*pixels.shape[:2], -1)


def check_images(
  shape: tuple[int, ...], patch_size: int, channels: int
) -> None:
  """Raises ValueError for arrays that are not valid images."""
  expected = f"[B, H, W, {channels}] with sides of at least {patch_size}"
  if len(shape) != 4 or shape[3] != channels or min(shape[1:3]) < patch_size:
    raise ValueError(f"image: expected {expected}, got {list(shape)}")


def _line(error: BaseException) -> str:
  lines = str(error).strip().splitlines()
  return lines[0] if lines else type(error).__name__

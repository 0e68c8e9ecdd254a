"""The config of an image task: the images and their augmentation."""

import re

from pydantic.dataclasses import dataclass

from settings.fields import STRICT, Share, Whole, check, check_unread

DIGITS, FOLDER = "digits", "folder"

_ASYMMETRIC = (DIGITS, "mnist")


@dataclass(frozen=True, config=STRICT)
class ImageConfig:
  """The source of images and labels, and the augmentation in training.

  Attributes:
    source: 'digits', the 1,797 scanned digits of scikit-learn; 'folder', a folder with
      one folder of PNG or JPEG files for each class; or a name in the TFDS catalogue,
      such as 'mnist' or 'cifar10', of a dataset with the features 'image' and 'label'.
    path: the folder of folders; for a name in the catalogue, a TFDS data folder with
      the prepared dataset, or '' to download it.
    held_out: share of the images of each class that is held out if the source has no
      held-out split. At least one image of a class is held out, and at least one is for
      training.
    shift: training images are shifted by up to this number of pixels vertically and
      horizontally, and filled with background, a pixel value of 0.
    flip: whether half of the training images are mirrored left to right.
  """

  source: str = DIGITS
  path: str = ""
  held_out: Share = 0.2
  shift: Whole = 0
  flip: bool = False

  def __post_init__(self):
    check(self, "source", bool(self.source), "digits, folder or a TFDS set")
    if self.source == FOLDER:
      check(self, "path", bool(self.path), "a folder of class folders")
    if self.source == DIGITS:
      check_unread(self, ("path",), f"source={DIGITS!r}")
    is_asymmetric = re.split("[:/]", self.source)[0] in _ASYMMETRIC
    check(
      self,
      "flip",
      not (self.flip and is_asymmetric),
      f"False where source={self.source!r}, as a mirrored digit is another "
      "sign or none",
    )

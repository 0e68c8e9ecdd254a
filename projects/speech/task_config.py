"""The config of a speech task: the recordings and their features."""

from typing import Annotated

from annotated_types import Ge, Interval
from pydantic.dataclasses import dataclass

from settings.fields import STRICT, Count, Share, check, check_unread

TONES, FOLDER = "tones", "folder"

_TONE_FIELDS = ("min_digits", "max_digits", "snr", "eval_size")
_CATALOGUE_FIELDS = ("audio_feature", "text_feature")


@dataclass(frozen=True, config=STRICT)
class SpeechConfig:
  """The source of recordings and transcripts.

  Attributes:
    source: 'tones', strings of digits dialled as DTMF tones, which are computed and
      never stored; 'folder', a folder of audio files with `transcripts.tsv`; or a name
      in the TFDS catalogue, such as 'librispeech'.
    path: the folder; for a name in the catalogue, a TFDS data folder with the prepared
      dataset, or '' to download it.
    audio_feature: feature with the recording, for a dataset of the catalogue.
    text_feature: feature with the transcript, for a dataset of the catalogue.
    sample_rate: samples per second; recordings with another rate raise an error.
    bands: number of mel bands of a frame.
    min_digits: smallest number of digits of a dialled string.
    max_digits: largest number of digits of a dialled string.
    snr: signal-to-noise ratio of dialled strings, in decibels.
    eval_size: number of held-out dialled strings.
    held_out: share of the recordings, at least one, that is held out if the source has
      no held-out split.
  """

  source: str = TONES
  path: str = ""
  audio_feature: str = "speech"
  text_feature: str = "text"
  # With 100 or fewer, the Hann window of 25 ms has only zeros.
  sample_rate: Annotated[int, Ge(101)] = 8000
  bands: Annotated[int, Interval(ge=2, le=256)] = 40
  min_digits: Count = 1
  max_digits: int = 8
  snr: Annotated[float, Interval(ge=-100, le=1000)] = 10.0
  eval_size: Count = 500
  held_out: Share = 0.1

  def __post_init__(self):
    check(self, "source", bool(self.source), "tones, folder or a TFDS set")
    if self.source == FOLDER:
      check(self, "path", bool(self.path), "a folder of recordings")
    if self.source == TONES:
      # The highest tone has a frequency of 1,477 Hz.
      check(self, "sample_rate", self.sample_rate >= 4000, "at least 4000")
    check(
      self,
      "max_digits",
      self.max_digits >= self.min_digits,
      f"at least min_digits={self.min_digits}",
    )
    unread = {
      TONES: ("path", "held_out", *_CATALOGUE_FIELDS),
      FOLDER: (*_TONE_FIELDS, *_CATALOGUE_FIELDS),
    }
    check_unread(
      self, unread.get(self.source, _TONE_FIELDS), f"source={self.source!r}"
    )

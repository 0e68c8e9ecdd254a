"""Log-mel frames of a recording."""

import functools

import numpy as np

WINDOW_SECONDS, HOP_SECONDS = 0.025, 0.010

REDUCTION = 4
"""Number of frames per position of the logits of a Conformer."""

_FLOOR = 1e-10


def num_frames(num_samples: int, sample_rate: int) -> int:
  """The number of whole windows in a recording."""
  window, hop = _sizes(sample_rate)
  return max(0, 1 + (num_samples - window) // hop)


def log_mel(samples: np.ndarray, sample_rate: int, bands: int) -> np.ndarray:
  """Computes the frames of recordings of one length, with mean 0 and deviation 1.

    x[t, m] = log Σ_f filter[f, m] · |DFT(Hann · window t)|²[f]

  Windows have 25 ms and start every 10 ms. Mean and standard deviation are over all
  frames and bands of a recording, so its level has no effect.

  Args:
    samples: [..., S].
    sample_rate: samples per second.
    bands: M.

  Returns:
    [..., T, M] float32.
  """
  window, hop = _sizes(sample_rate)
  windows = np.lib.stride_tricks.sliding_window_view(samples, window, axis=-1)
  windows = windows[..., ::hop, :] * np.hanning(window).astype(np.float32)
  spectrum = np.fft.rfft(windows, _fft_size(window))
  power = np.square(spectrum.real) + np.square(spectrum.imag)
  frames = np.log(power @ filters(sample_rate, bands) + _FLOOR)
  frames -= frames.mean(axis=(-2, -1), keepdims=True)
  deviation = frames.std(axis=(-2, -1), keepdims=True)
  return (frames / np.maximum(deviation, 1e-5)).astype(np.float32)


@functools.cache
def filters(sample_rate: int, bands: int) -> np.ndarray:
  """Returns triangular filters whose corners are evenly spaced on the mel scale.

  mel(f) = 2595 · log10(1 + f / 700), from 0 to half the sample rate. A triangle that is
  narrower than the spacing of frequencies is widened to it, so that no band is empty.

  Returns:
    [F, M], with F frequencies of the transform.
  """
  size = _fft_size(_sizes(sample_rate)[0])
  highest = 2595 * np.log10(1 + sample_rate / 2 / 700)
  mels = np.linspace(0, highest, bands + 2)
  corners = 700 * (10 ** (mels / 2595) - 1)
  frequencies = np.arange(size // 2 + 1) * sample_rate / size
  spacing = sample_rate / size
  left = np.maximum(np.diff(corners)[:-1], spacing)
  right = np.maximum(np.diff(corners)[1:], spacing)
  distance = frequencies[:, None] - corners[1:-1]
  slope = np.where(distance < 0, -distance / left, distance / right)
  return np.maximum(0, 1 - slope).astype(np.float32)


def _sizes(sample_rate: int) -> tuple[int, int]:
  """Samples per window, and samples between windows."""
  return round(WINDOW_SECONDS * sample_rate), round(HOP_SECONDS * sample_rate)


def _fft_size(window: int) -> int:
  """The next power of two."""
  return 1 << (window - 1).bit_length()

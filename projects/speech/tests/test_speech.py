"""Speech: dialled digits, log-mel frames, CTC, folders and TFDS sets."""

import functools
import io
import itertools
import sys

import jax
import numpy as np
import pytest
import soundfile
import tensorflow_datasets as tfds

from projects.speech import ctc, mel, tones
from projects.speech.task import SpeechConfig
import tasks
from tasks import draws
from tests.tasks import generated_cases

RATE = 8000


make = functools.partial(
  generated_cases.make, "speech", "encoder", batch_size=8
)


def dial(indices, snr=10.0, max_digits=8, split="train", min_digits=1):
  options = {"min_digits": min_digits, "max_digits": max_digits}
  options["sample_rate"] = RATE
  key = draws.split_key(0, split)
  return tones.dial(key, np.asarray(indices), **options, snr=snr)


# Dialled digits.


def test_digits_are_the_tones_of_the_standard():
  """Between silences, the two strongest frequencies are those of ITU-T Q.23."""
  rows = ("123", "456", "789", "*0#")
  low, high = (697, 770, 852, 941), (1209, 1336, 1477)
  known = {
    digit: (low[r], high[c])
    for r, row in enumerate(rows)
    for c, digit in enumerate(row)
  }
  dialled = dial(range(40), snr=60.0)
  seen = set()
  for samples, end, digits in zip(*dialled, strict=True):
    loud = np.convolve(np.abs(samples[:end]), np.ones(40) / 40, "same")
    is_tone = loud > 0.1 * loud.max()
    edges = np.flatnonzero(np.diff(np.pad(is_tone, 1).astype(int)))
    starts, stops = edges[::2], edges[1::2]
    digits = [tones.DIGITS[d] for d in digits if d >= 0]
    assert len(starts) == len(digits)
    for start, stop, digit in zip(starts, stops, digits, strict=True):
      tone = samples[start + 30 : stop - 30]
      spectrum = np.abs(np.fft.rfft(tone * np.hanning(len(tone)), 8000))
      bands = ((600, 1000), (1100, 1600))
      for known_tone, band in zip(known[digit], bands, strict=True):
        peak = band[0] + np.argmax(spectrum[slice(*band)])
        assert abs(peak - known_tone) <= 4
      seen.add(digit)
  assert seen == set(tones.DIGITS)


def test_durations_are_from_the_shortest_to_the_longest():
  """Tones of 60 to 150 ms, then 40 to 120 of silence; 50 to 200 come first."""
  found = {"tone": [], "gap": [], "silence": []}
  for samples, end, _ in zip(*dial(range(400), snr=200.0), strict=True):
    loud = np.flatnonzero(np.abs(samples) > 1e-4 * np.abs(samples).max())
    breaks = np.flatnonzero(np.diff(loud) > 100)
    starts = loud[np.append(0, breaks + 1)]
    stops = loud[np.append(breaks, -1)] + 1
    found["tone"].extend(stops - starts)
    found["gap"].extend(np.append(starts[1:], end) - stops)
    found["silence"].append(starts[0])
  limits = {"tone": (60, 150), "gap": (40, 120), "silence": (50, 200)}
  for name, (low, high) in limits.items():
    milliseconds = np.array(found[name]) * 1000 / RATE
    np.testing.assert_allclose(milliseconds.min(), low, atol=2)
    np.testing.assert_allclose(milliseconds.max(), high, atol=2)
    np.testing.assert_allclose(milliseconds.mean(), (low + high) / 2, atol=6)


def test_every_number_of_digits_is_as_likely():
  digits = dial(range(600), min_digits=3, max_digits=5).digits
  assert digits.shape == (600, 5)
  values, counts = np.unique((digits >= 0).sum(1), return_counts=True)
  assert values.tolist() == [3, 4, 5]
  assert counts.min() > 160


@pytest.mark.parametrize("snr", [10.0, 0.0, -5.0])
def test_noise_has_the_power_that_was_asked_for(snr):
  """The same string with hardly any noise tells what is the tones' power."""
  noisy, clean = dial(range(30), snr), dial(range(30), 120.0)
  np.testing.assert_array_equal(noisy.digits, clean.digits)
  for row, end in enumerate(noisy.num_samples):
    n, c = noisy.samples[row], clean.samples[row]
    sounding = np.abs(c[:end]) > 0
    loud = np.convolve(np.abs(c[:end]), np.ones(16), "same") > 1e-2 * c.max()
    power = np.square(c[:end])[loud & sounding].mean()
    noise = np.square(n[:end] - c[:end]).mean()
    assert abs(10 * np.log10(power / noise) - snr) < 0.7


def test_noise_is_normal_and_white():
  raw = draws.words(draws.split_key(0, "noise"), np.arange(40), 20_000)
  numbers = tones._normal(raw)
  count = numbers.size
  assert abs(numbers.mean()) < 4 / count**0.5
  assert abs(numbers.var() - 1) < 4 * (2 / count) ** 0.5
  assert abs((numbers**3).mean()) < 4 * (15 / count) ** 0.5
  assert abs((numbers**4).mean() - 3) < 4 * (96 / count) ** 0.5
  neighbours = (numbers[:, 1:] * numbers[:, :-1]).mean()
  halves = (numbers[:, :20_000] * numbers[:, 20_000:]).mean()
  assert max(abs(neighbours), abs(halves)) < 4 / count**0.5


def test_lengths_gaps_and_levels_vary():
  dialled = dial(range(200), snr=60.0)
  lengths = (dialled.digits >= 0).sum(1)
  assert set(lengths) == set(range(1, 9))
  assert dialled.samples.shape[1] == tones.longest(8, RATE)
  assert dialled.num_samples.max() <= tones.longest(8, RATE)
  per_digit = dialled.num_samples / lengths
  assert per_digit.std() > 100
  levels = np.log10(np.abs(dialled.samples).max(1))
  assert 0.8 < np.ptp(levels) < 1.4  # ± 10 dB, and ± 3 of the loudest digit.


def test_levels_are_up_to_those_of_a_string_and_of_a_digit():
  """One digit is up to 13 dB above or below 1, which the power of two sines is."""
  dialled = dial(range(4000), snr=200.0, max_digits=1)
  found = []
  for samples in dialled.samples:
    places = np.flatnonzero(np.abs(samples) > 1e-3 * np.abs(samples).max())
    tone = samples[places[0] : places[-1] + 1]
    found.append(10 * np.log10(np.square(np.float64(tone)).mean()))
  assert 12 < max(found) < 13.2
  assert -13.2 < min(found) < -12
  np.testing.assert_allclose(np.var(found), (10**2 + 3**2) / 3, rtol=0.06)


def test_batches_are_padded_at_the_end():
  task = make(eval_size=11)
  batch, last = task.eval_batches("validation")
  assert last["weights"].any(1).sum() == 3
  frames, mask = batch["frames"], batch["source_mask"]
  assert frames.shape[1:] == task.input_shapes["frames"]
  # 0.2 + 8 · (0.15 + 0.12) = 2.36 seconds are 234 frames; a multiple of four is.
  assert frames.shape[1] == 236
  assert (np.diff(mask.astype(int), axis=1) <= 0).all()
  assert not frames[~mask].any()
  targets, weights = batch["targets"], batch["weights"]
  np.testing.assert_array_equal(targets > 0, weights > 0)
  assert task.decode(targets[0]) == "".join(str(i - 1) for i in targets[0] if i)
  assert task.encode_target("709") == [8, 1, 10]
  assert task.labels([8, 0, 10]) == ["7", "∅", "9"]
  with pytest.raises(ValueError, match="of '0123456789', got 'x'"):
    task.encode_target("7x")
  with pytest.raises(KeyError):
    next(task.eval_batches("test"))


# Frames.


def naive_log_mel(samples, rate, bands):
  """By the definition of the transform and of the scale, in float64."""
  window, hop = round(0.025 * rate), round(0.01 * rate)
  size = 1
  while size < window:
    size *= 2
  edges = [
    700 * (10 ** (m / 2595) - 1)
    for m in np.linspace(0, 2595 * np.log10(1 + rate / 2 / 700), bands + 2)
  ]
  rows = []
  for start in range(0, len(samples) - window + 1, hop):
    windowed = samples[start : start + window] * [
      0.5 - 0.5 * np.cos(2 * np.pi * n / (window - 1)) for n in range(window)
    ]
    row = []
    for m in range(bands):
      left = max(edges[m + 1] - edges[m], rate / size)
      right = max(edges[m + 2] - edges[m + 1], rate / size)
      total = 0.0
      for k in range(size // 2 + 1):
        f = k * rate / size - edges[m + 1]
        share = max(0.0, 1 - (-f / left if f < 0 else f / right))
        if share:
          angles = 2 * np.pi * k * np.arange(window) / size
          total += share * abs(np.sum(windowed * np.exp(-1j * angles))) ** 2
      row.append(np.log(total + 1e-10))
    rows.append(row)
  rows = np.array(rows)
  return (rows - rows.mean()) / rows.std()


@pytest.mark.parametrize(
  ("length", "rate", "bands"),
  [(200, 8000, 7), (701, 8000, 40), (900, 16000, 11)],
)
def test_frames_are_by_the_definition(length, rate, bands):
  samples = np.random.default_rng(0).standard_normal(length, np.float32)
  got = mel.log_mel(samples, rate, bands)
  expected = naive_log_mel(samples.astype(float), rate, bands)
  assert got.dtype == np.float32
  assert got.shape == expected.shape == (mel.num_frames(length, rate), bands)
  np.testing.assert_allclose(got, expected, atol=2e-4)
  np.testing.assert_allclose(
    mel.log_mel(30 * samples, rate, bands), got, atol=1e-4
  )


def test_every_band_hears_something():
  for rate, bands in ((8000, 40), (8000, 80), (16000, 80), (44100, 128)):
    assert (mel.filters(rate, bands).max(0) > 0).all()
  # Silence has finite frames.
  assert np.isfinite(mel.log_mel(np.zeros(400, np.float32), RATE, 40)).all()


# CTC.


def paths(length, symbols):
  return itertools.product(range(symbols), repeat=length)


def collapse(path):
  return [s for s, _ in itertools.groupby(path) if s]


def test_loss_is_the_sum_over_all_paths():
  """−log of the probability of all paths that collapse to the target."""
  rng = np.random.default_rng(0)
  logits = rng.standard_normal((4, 5, 3))
  targets = np.array([[1, 1], [2, 1], [2, 0], [0, 0]])
  weights = (targets > 0).astype(np.float32)
  lengths = [5, 4, 2, 3]
  mask = np.arange(5)[None] < np.array(lengths)[:, None]
  log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  total = 0.0
  for row in range(3):  # The last row has no symbols and counts nothing.
    target = [i for i in targets[row] if i]
    found = sum(
      np.exp(sum(log_probs[row, t, s] for t, s in enumerate(path)))
      for path in paths(lengths[row], 3)
      if collapse(path) == target
    )
    total -= np.log(found)
  nats, count = jax.jit(ctc.loss)(
    logits.astype(np.float32), mask, targets, weights
  )
  assert count == 5
  np.testing.assert_allclose(nats, total, rtol=1e-5)


def naive_distance(a, b):
  if not a or not b:
    return len(a) + len(b)
  return min(
    naive_distance(a[1:], b) + 1,
    naive_distance(a, b[1:]) + 1,
    naive_distance(a[1:], b[1:]) + (a[0] != b[0]),
  )


def test_greedy_decoding_and_edit_distance():
  rng = np.random.default_rng(0)
  logits = rng.standard_normal((60, 7, 4)).astype(np.float32)
  logits[:, :, 0] += 0.5
  lengths = rng.integers(0, 8, 60)
  mask = np.arange(7)[None] < lengths[:, None]
  targets = rng.integers(1, 4, (60, 5))
  weights = np.float32(np.arange(5)[None] < rng.integers(0, 6, (60, 1)))
  targets = np.where(weights > 0, targets, 0)
  found = np.asarray(jax.jit(ctc.greedy)(logits, mask))
  distances = jax.jit(ctc.edit_distance)(found, targets, weights)
  for row in range(60):
    path = logits[row, : lengths[row]].argmax(-1)
    said = [int(i) for i in found[row] if i]
    assert said == [int(i) for i in collapse(path)]
    expected = naive_distance(said, [int(i) for i in targets[row] if i])
    assert distances[row] == expected


def test_metric_is_edits_over_symbols():
  task = make(batch_size=2)
  batch = {
    "source_mask": np.ones((2, 16), bool),
    "targets": np.array([[3, 3, 4], [5, 0, 0]]),
    "weights": np.array([[1.0, 1, 1], [1, 0, 0]], np.float32),
  }
  # '3', blank, '3' without the 4, and '5' right.
  logits = 9 * np.eye(11, dtype=np.float32)[[[3, 0, 3, 0], [0, 5, 5, 0]]]
  sums = jax.jit(task.metric_sums)(logits, batch)
  rate = {"error_rate": tuple(sums["error_rate"])}
  assert task.summarize(rate) == {"error_rate": 0.25}
  more = {"loss": (3.0, 2.0), **rate}
  assert list(task.summarize(more).items()) == [
    ("error_rate", 0.25),
    ("loss", 1.5),
  ]
  assert task.summarize({}) == {}
  with pytest.raises(ValueError, match="got 5 of 16 frames"):
    task.metric_sums(np.zeros((2, 5, 11), np.float32), batch)


# Files.


@pytest.fixture
def folder(tmp_path):
  """Ten recordings of noise, from 0.3 to 0.75 seconds."""
  folder = tmp_path / "said"
  folder.mkdir()
  rng = np.random.default_rng(0)
  lines = []
  for i in range(10):
    samples = 0.1 * rng.standard_normal(2400 + 400 * i)
    soundfile.write(folder / f"{i}.wav", samples, RATE, subtype="PCM_16")
    lines.append(f"{i}.wav\t{'ab ba'[: 2 + i % 4]}\n")
  (folder / "transcripts.tsv").write_text("".join(lines))
  return folder


def heard_in(task, batches):
  """Frames of each recording, and what is said there."""
  names = ("frames", "source_mask", "targets")
  return {
    frames[mask].tobytes(): task.decode(ids)
    for batch in batches
    for frames, mask, ids in zip(*(batch[x] for x in names), strict=True)
    if mask.any()
  }


def test_a_folder_of_recordings(folder, tmp_path):
  task = make(source="folder", path=str(folder), held_out=0.3, batch_size=7)
  assert task.symbols == " ab"
  assert task.target_vocab_size == 4
  assert task.max_target_length == 5
  most = mel.num_frames(6000, RATE)
  assert task.input_shapes == {"frames": (-(-most // 4) * 4, 40)}
  [held_out] = task.eval_batches("validation")
  assert held_out["weights"].any(1).sum() == 3
  epoch = task.train_batch(0)
  # All ten are there once, as the file has them.
  heard = heard_in(task, (epoch, held_out))
  assert len(heard) == 10
  for i in range(10):
    samples, _ = soundfile.read(folder / f"{i}.wav", dtype="float32")
    frames = mel.log_mel(samples, RATE, 40)
    assert heard[frames.tobytes()] == "ab ba"[: 2 + i % 4]
  order = task.train_batch(1)["targets"]
  assert sorted(map(tuple, order)) == sorted(map(tuple, epoch["targets"]))
  # A run that is restored reads no data.
  task.save(tmp_path / "run")
  gone = {"source": "folder", "path": "gone"}
  again = make(**gone, workdir=tmp_path / "run", restore=True)
  assert again.symbols == task.symbols
  assert again.input_shapes == task.input_shapes
  read = again.read(str(folder / "3.wav"))
  assert read["source_mask"].sum() == mel.num_frames(3600, RATE)
  # The longest is 73 frames, hence there is room for 76.
  file = folder / "typed.wav"
  for count in (1, 76):
    file.write_bytes(recording(np.zeros(200 + 80 * (count - 1))))
    assert again.read(str(file))["source_mask"].sum() == count
  for samples, got in ((199, 0), (200 + 80 * 76, 77)):
    file.write_bytes(recording(np.zeros(samples)))
    with pytest.raises(tasks.DataError, match=f"1 to 76 frames .* got {got}$"):
      again.read(str(file))
  with pytest.raises(tasks.DataError, match=r"no\.wav: no such file$"):
    again.read(str(folder / "no.wav"))
  (folder / "transcripts.tsv").write_text("0.wav\tx\n1.wav\ty\n")
  with pytest.raises(tasks.DataError, match="does not fit the data"):
    make(source="folder", path=str(folder), workdir=tmp_path / "run")


@pytest.mark.parametrize(("share", "count"), [(0.01, 1), (0.25, 2), (0.99, 9)])
def test_one_recording_is_trained_and_one_is_held_out(folder, share, count):
  task = make(source="folder", path=str(folder), held_out=share, batch_size=20)
  [held_out] = task.eval_batches("validation")
  assert held_out["weights"].any(1).sum() == count


def recording(samples, rate=RATE, subtype="PCM_16"):
  """Content of a file."""
  file = io.BytesIO()
  soundfile.write(file, samples, rate, subtype=subtype, format="WAV")
  return file.getvalue()


LINES, FOURTH = "transcripts.tsv", "4.wav"


@pytest.mark.parametrize(
  ("name", "content", "message"),
  [
    (LINES, None, "said: no transcripts.tsv, with a line FILE<tab>TEXT for ea"),
    (LINES, b"0.wav\tone\n0.wav\ttwo\n", ", line 2: 0.wav appears twice"),
    (LINES, b"0.wav\tone\n./0.wav\ttwo\n", "2: ./0.wav appears twice"),
    (LINES, b"0.wav one\n", "transcripts.tsv, line 1: expected"),
    (LINES, b"0.wav\tab\n", "expected at least 2 recordings"),
    (LINES, b"", "expected at least 2 recordings"),
    (FOURTH, None, "transcripts.tsv, line 5: no such file: .*4.wav"),
    (FOURTH, recording(np.zeros(8000), 16000), "4.wav: expected 8000"),
    (FOURTH, recording(np.zeros((8000, 2))), "4.wav: expected one channel"),
    (FOURTH, b"RIFF and nothing", "4.wav: cannot be read as audio"),
    (
      FOURTH,
      recording(np.full(8000, np.nan), subtype="FLOAT"),
      "4.wav: expected finite samples",
    ),
    (FOURTH, recording(np.zeros(400)), "at least 0.065"),
  ],
  ids=lambda x: x if isinstance(x, str) else "",
)
def test_folders_that_cannot_be_read(folder, name, content, message):
  (folder / name).unlink()
  if content is not None:
    (folder / name).write_bytes(content)
  with pytest.raises(tasks.DataError, match=message) as info:
    make(source="folder", path=str(folder))
  assert "\n" not in str(info.value)


def test_repeated_symbols_need_a_blank(folder):
  # 0.3 seconds are 28 frames, hence 7 logits.
  (folder / "transcripts.tsv").write_text("0.wav\taababa\n1.wav\ta\n")
  make(source="folder", path=str(folder))
  (folder / "transcripts.tsv").write_text("0.wav\taababab\n1.wav\ta\n")
  message = r"at least 0\.305 seconds for the 7 symbols .*, got 0\.300$"
  with pytest.raises(tasks.DataError, match=message):
    make(source="folder", path=str(folder))


def test_without_soundfile(folder, monkeypatch):
  monkeypatch.setitem(sys.modules, "soundfile", None)
  with pytest.raises(tasks.DataError, match=r"^task.source: recordings are"):
    make(source="folder", path=str(folder))
  make()  # Dialled digits need no file.


def test_configs_that_cannot_be():
  generated_cases.assert_refused(
    SpeechConfig,
    *({"source": ""}, {"path": "", "source": "folder"}, {"path": "/tmp"}),
    *({"sample_rate": 2000}, {"max_digits": 4, "min_digits": 5}),
    *({"snr": float("nan")}, {"bands": 1}, {"held_out": 1.0}),
    {"snr": -1e4},
    # What nothing reads is refused.
    *({"held_out": 0.5}, {"text_feature": "label"}),
    {"snr": 3.0, "source": "folder", "path": "x"},
    {"max_digits": 3, "source": "spoken_digit"},
    *({"sample_rate": 3999}, {"bands": 257}, {"min_digits": 0}),
    {"sample_rate": 100, "source": "folder", "path": "x"},
  )
  SpeechConfig(sample_rate=4000, min_digits=8, max_digits=8, bands=2)
  SpeechConfig("folder", "x", sample_rate=101, bands=256)


# TFDS.


def test_spoken_digits_are_prepared_without_tensorflow(
  tmp_path, empty_cache, monkeypatch
):
  """The set's own builder, on files as its authors have them."""
  folder = tmp_path / "free-spoken-digit-dataset-1.0.9" / "recordings"
  folder.mkdir(parents=True)
  rng = np.random.default_rng(0)
  written = {}
  for digit in range(10):
    samples = rng.integers(-9000, 9000, 2000 + 80 * digit, np.int16)
    soundfile.write(folder / f"{digit}_somebody_0.wav", samples, RATE)
    frames = mel.log_mel(samples.astype(np.float32) / 2**15, RATE, 40)
    written[frames.tobytes()] = str(digit)
  monkeypatch.setattr("tasks.catalog._check_network", lambda *_: None)
  monkeypatch.setattr(
    tfds.download.DownloadManager,
    "download_and_extract",
    lambda self, url: str(tmp_path),
  )
  leaves = {"audio_feature": "audio", "text_feature": "label"}
  leaves["source"] = "spoken_digit"
  task = make(**leaves, batch_size=9)
  assert "tensorflow" not in sys.modules
  assert task.symbols == "0123456789"
  batches = (task.train_batch(0), *task.eval_batches("validation"))
  assert heard_in(task, batches) == written
  for changes, message in (
    ({"sample_rate": 16000}, "has 8000 samples per second, expected 16000"),
    ({"text_feature": "said"}, "^task.text_feature: spoken_digit has audio, "),
    ({"source": "no_such_set"}, "^task.source: TFDS has no 'no_such_set'"),
  ):
    with pytest.raises(tasks.DataError, match=message):
      make(**{**leaves, **changes})

"""Records of an invented comparison: three mechanisms, two seeds, a grid."""

import itertools
import json
import math

LEAF = "optimizer.learning_rate"
POINTS = (0.001, 0.003)
QUALITY = {"dense": 0.9, "linear": 0.6}
STEP_SECONDS = {"dense": 0.08, "linear": 0.02}
NOT_DECODED = "linear & others <cannot> decode"


def records(*, with_seconds=True):
  """Returns eight runs of dense and linear, a failed run and an impossible one.

  The higher learning rate is better for dense and worse for linear. The history
  has no seconds if `with_seconds` is False.
  """
  found = []
  for attention in QUALITY:
    for seed in (0, 1):
      for point in POINTS:
        found.append(_done(attention, seed, point, with_seconds))
  found.append(
    _record("performer", 0, 0.001)
    | {"status": "failed", "reason": "exit code 1: loss is <nan> at step 3"}
    | {"seconds": 3.0, "cpu_seconds": 4.0, "peak_bytes": 1e9}
  )
  found.append(
    _record("lsh", 0, 0.001, task="paper/recall")
    | {"status": "not supported", "reason": "lsh: a | b"}
  )
  return found


def scaling():
  """Returns times of two mechanisms, forward and decoding; one was not run."""
  rows = [
    {
      "mechanism": mechanism,
      "causal": causal,
      "part": part,
      "length": length,
      "seconds": length**power * 1e-6,
      "spread": length**power * 1e-7,
      "temp_bytes": None if part == "decode" else 100 * length**power,
    }
    for mechanism, power in (("dense", 2), ("linear", 1))
    for causal in (False, True)
    for part in ("forward", "decode")
    for length in (64, 128, 256)
  ]
  rows[-1] |= {"seconds": None, "spread": None}
  return rows


def write(folder, found, rows=()):
  """Leaves records and scaling where a comparison does."""
  (folder / "records").mkdir()
  for number, record in enumerate(found):
    path = folder / "records" / f"{number:02d}.json"
    path.write_text(json.dumps(record))
  lines = "".join(json.dumps(row) + "\n" for row in rows)
  (folder / "scaling.jsonl").write_text(lines)


def _record(attention, seed, point, task="copy", across=None):
  return {
    "task": task,
    "attention": attention,
    "seed": seed,
    "parameters": 1000,
    "unmatched_parameters": 1100,
    "reason": "",
    "grid": {LEAF: point},
    **({"across": across} if across else {}),
    "arguments": [
      f"--config=configs/{task}.py:{attention}",
      f"--config.seed={seed}",
      f"--config.{LEAF}={point}",
      *(f"--config.{leaf}={value}" for leaf, value in (across or {}).items()),
    ],
  }


def _done(attention, seed, point, with_seconds):
  is_high = point == POINTS[1]
  quality = QUALITY[attention] + 0.02 * seed
  quality += 0.05 if is_high == (attention == "dense") else 0.0
  history = [
    {
      "step": step,
      "split": "validation",
      "seconds": step * STEP_SECONDS[attention],
      "loss": math.exp(-step / 10) + 1 - quality,
      "token_accuracy": quality * (1 - math.exp(-step / 3)),
    }
    for step in (5, 10, 15)
  ]
  if not with_seconds:
    history = [
      {k: v for k, v in line.items() if k != "seconds"} for line in history
    ]
  final = history[-1] | {
    "exact_match": quality,
    "accuracy_depth_25": 0.5,
    "perplexity": math.inf,
    "bleu_signature": "nrefs:1",
  }
  train = {"step": 5, "split": "train", "loss": 9.0, "token_accuracy": 1.0}
  measured = {}
  # One run could not be measured.
  if (attention, seed, is_high) != ("dense", 1, True):
    measured = _measured(attention, seed)
  return _record(attention, seed, point) | {
    "status": "done" if measured else "not measured yet",
    "reason": "" if measured else "exit code 1: <b>gone</b>",
    "seconds": 60.0 + seed,
    "cpu_seconds": 100.0,
    "peak_bytes": 2.0**30,
    "final": final,
    "history": [train, *history[:-1], final],
    "measured": measured,
  }


def _measured(attention, seed):
  is_dense = attention == "dense"
  labels = ["a", " ", "$x$", "</s>"]
  weights = [[[0.25] * 4] * 4, [[1.0, 0.0, 0.0, 0.0]] * 4]
  return {
    "compile_seconds": 2.0,
    "step_seconds": STEP_SECONDS[attention] * (1 + 0.1 * seed),
    "tokens_per_second": 1e4,
    "train_flops": 3e8,
    "forward_flops": 1e8 if is_dense else 2e7,
    "temp_bytes": 2**25,
    "device_peak_bytes": None,
    "decode_tokens_per_second": 300.0 if is_dense else None,
    "cache_bytes": 2048 if is_dense else None,
    "approximation_error": 0.0 if is_dense else 0.3,
    "jax": "0.10.2",
    "device": "1 × cpu",
    "notes": {} if is_dense else {"decode_tokens_per_second": NOT_DECODED},
    "map": None
    if seed
    else {
      "title": "decoder layer 1, cross-attention",
      "query_axis": "target",
      "key_axis": "source",
      "query_labels": labels,
      "key_labels": labels,
      "weights": weights,
    },
  }


WIDTH, CONVOLUTION = "model.features", "model.short_convolution"


def across():
  """Returns runs of recall over widths, convolutions, a grid and lengths.

  The cache of dense attention grows with the length, the state of linear does not. The
  mechanism 'lsh' cannot run. The higher learning rate is better at width 64 and
  worse elsewhere.
  """
  found = []
  for attention, width, convolves in itertools.product(
    (*QUALITY, "lsh"), (16, 32, 64), (False, True)
  ):
    for seed, rate in itertools.product((0, 1), POINTS):
      point = {WIDTH: width, CONVOLUTION: convolves}
      record = _record(attention, seed, rate, task="recall", across=point)
      record["length"] = 64
      if attention == "lsh":
        record |= {"status": "not supported", "reason": "lsh: not causal"}
      else:
        record |= _at_lengths(attention, seed, rate, width, convolves)
      found.append(record)
  return found


def _at_lengths(attention, seed, rate, width, convolves):
  is_dense = attention == "dense"
  quality = (0.9 if is_dense else 0.5) + 0.001 * width + 0.02 * seed
  quality -= 0.0 if convolves else 0.1
  quality -= 0.0 if (rate == POINTS[1]) == (width == 64) else 0.05
  history = [
    {"step": step, "split": "validation", "seconds": float(step)}
    | {"loss": 1 / step, "accuracy": quality * step / 15}
    for step in (5, 10, 15)
  ]
  history += [
    {"step": 15, "split": split, "loss": 0.1, "accuracy": quality * share}
    for split, share in (("test", 1.0), ("length_32", 1.0))
  ]
  longer = {"length_128": 0.8, "length_256": 0.6 if is_dense else 0.2}
  history += [
    {"step": 15, "split": split, "loss": 0.2, "accuracy": quality * share}
    for split, share in longer.items()
  ]
  size = 256 * width if is_dense else width * width // 4
  return {
    "status": "done",
    "final": history[-1],
    "history": history,
    "measured": _measured(attention, seed)
    | {"cache_bytes": size + 24 * width * convolves},
  }

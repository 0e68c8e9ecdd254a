"""Columns of the summaries: what they show, in which unit."""

from typing import NamedTuple


class Column(NamedTuple):
  """What one column of a summary shows.

  Attributes:
    name: as in results.csv.
    title: as a reader sees it.
    unit: what the numbers are in; empty for a fraction or a count.
    scale: what results.csv is multiplied with.
    meaning: one line.
    others: column of the cores that other programs used meanwhile, of a time.
  """

  name: str
  title: str
  unit: str
  scale: float
  meaning: str
  others: str = ""


_TRAINING, _MEASURING = "others_cores", "measured_others_cores"


COSTS = (
  Column("parameters", "parameters", "", 1, "of the model, as it ran"),
  Column(
    "unmatched_parameters",
    "before matching",
    "",
    1,
    "parameters that the task's config alone would give the model",
  ),
  Column(
    "forward_flops",
    "forward",
    "GFLOP",
    1e-9,
    "floating-point operations of the forward pass of one batch",
  ),
  Column(
    "step_seconds",
    "step",
    "ms",
    1e3,
    "median time of a training step",
    _MEASURING,
  ),
  Column(
    "tokens_per_second",
    "training",
    "tokens/s",
    1,
    "target tokens that count in the loss, per second of training",
    _TRAINING,
  ),
  Column(
    "temp_bytes",
    "temporaries",
    "MiB",
    2**-20,
    "memory that XLA sets aside for the intermediate results of a training "
    "step",
  ),
  Column(
    "device_peak_bytes",
    "device peak",
    "MiB",
    2**-20,
    "highest use of the device's memory, where the device tells",
  ),
  Column(
    "decode_tokens_per_second",
    "decoding",
    "tokens/s",
    1,
    "tokens per second when it generates, token by token",
    _MEASURING,
  ),
  Column(
    "cache_bytes",
    "cache and state",
    "KiB",
    2**-10,
    "what all layers keep of one sequence of the greatest length while it is "
    "generated: keys and values, states, inputs of short convolutions",
  ),
  Column(
    "compile_seconds",
    "compiling",
    "s",
    1,
    "time to compile the training step",
    _MEASURING,
  ),
  Column(
    "seconds",
    "whole run",
    "min",
    1 / 60,
    "train.py from start to exit, with compiling and evaluating",
    _TRAINING,
  ),
  Column(
    "peak_bytes",
    "process peak",
    "MiB",
    2**-20,
    "largest resident memory of the training process",
  ),
)

BEST = Column(
  "best_quality",
  "best while training",
  "",
  1,
  "highest accuracy (token_accuracy where there is no other), or lowest "
  "error_rate, over all evaluations while it trains",
)
LEARNING_RATE = Column(
  "learning_rate", "learning rate", "", 1, "the highest of its schedule"
)
ERROR = Column(
  "approximation_error",
  "approximation error",
  "",
  1,
  "relative Frobenius distance of the attention's outputs from those of dense "
  "attention on the same trained queries, keys and values",
)

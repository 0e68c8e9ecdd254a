"""Configs of the training loop and the optimiser, as frozen dataclasses."""

from collections.abc import Mapping
import dataclasses
import re
from typing import Annotated, Any, Literal

from annotated_types import Ge, Interval
from pydantic.dataclasses import dataclass

from settings.fields import (
  STRICT,
  Count,
  Count32,
  Positive,
  Rate,
  Whole32,
  check_unread,
  rest,
)
from training.devices.mesh import DATA, MeshConfig


@dataclass(frozen=True, config=STRICT)
class OptimizerConfig:
  """The optimiser, its learning-rate schedule and its gradient.

  Attributes:
    name: 'adamw', any other optimiser of Optax or `optax.contrib` that takes a
      learning rate, such as 'muon', or 'package.module:factory' of a similar function.
    learning_rate: the peak learning rate.
    schedule: the schedule after the warm-up: 'constant', 'cosine' down to
      `final_fraction` of the peak after the last step, or 'inverse_sqrt' of the step.
    warmup_steps: number of steps in which the rate grows linearly to the peak.
    final_fraction: last learning rate of 'cosine', as a fraction of the peak.
    b1: decay of the first moment, if the optimiser has one. For this and the next
      three fields, None is the optimiser's default.
    b2: decay of the second moment, if the optimiser has one.
    eps: added to the root of the second moment, if the optimiser takes it.
    weight_decay: decoupled weight decay; never applied to biases, to scales, to the
      decay rates (A) and skips (D) of Mamba and its successors, to the gains of
      log-linear attention, or to the regularizer of MesaNet.
    clip_norm: largest global gradient norm; None does not clip.
    accumulate_steps: number of micro-batches that a batch is split into. Batch norm and
      the load-balance loss of experts use the statistics of each micro-batch.
    label_smoothing: fraction of each target that is spread over the whole vocabulary.
    ema_decay: decay of a running mean of the parameters in float32, such as 0.999;
      evaluation and generation then use that mean. 0 uses the parameters.
    options: all other fields, which are arguments of the optimiser, such as `ns_steps`
      of Muon.
  """

  name: str = "adamw"
  learning_rate: Positive = 1e-3
  schedule: Literal["constant", "cosine", "inverse_sqrt"] = "constant"
  warmup_steps: Whole32 = 0
  final_fraction: Annotated[float, Interval(ge=0, le=1)] = 0.0
  b1: Rate | None = None
  b2: Rate | None = None
  eps: Annotated[float, Ge(0)] | None = None
  weight_decay: Annotated[float, Ge(0)] | None = None
  clip_norm: Positive | None = None
  accumulate_steps: Count = 1
  label_smoothing: Rate = 0.0
  ema_decay: Rate = 0.0
  options: Mapping[str, Any] = dataclasses.field(
    default_factory=dict, hash=False
  )

  _rest = rest("options")


@dataclass(frozen=True, config=STRICT)
class LogConfig:
  """Where metrics are written in addition to metrics.jsonl.

  Attributes:
    tensorboard: whether to write TensorBoard event files in the workdir.
    wandb: whether to log to Weights & Biases, a separate package;
      WANDB_MODE=offline keeps the log in the workdir.
    project: name of the project in Weights & Biases.
  """

  tensorboard: bool = True
  wandb: bool = False
  project: str = "attention"


@dataclass(frozen=True, config=STRICT)
class TrainConfig:
  """The training loop.

  Attributes:
    num_steps: number of updates in the whole run.
    batch_size: rows of one update, over all devices and micro-batches.
    seed: determines the initial parameters, the order of the data and dropout.
    eval_every: steps between evaluations.
    checkpoint_every: steps between checkpoints.
    checkpoint_keep: 'newest' keeps the last three; 'best' also keeps the one of the
      best evaluation, which the final evaluation and later commands use.
    best_metric: metric on the first held-out split that selects the best evaluation
      and ends a run by `patience` or `stopping_threshold`.
    patience: number of evaluations without a gain in `best_metric` after which the
      run ends; 0 trains to the last step.
    stopping_threshold: value of `best_metric` that ends the run at the first evaluation
      to reach it; None trains to the last step.
    log_every: steps between lines in `metrics.jsonl`.
    redraw_every: steps between new draws of the constants, such as random features,
      rotations and blocks; 0 keeps the first ones.
    profile_steps: 'FIRST:LAST' profiles devices and host from the end of step FIRST
      to the end of step LAST, into the folder `profile` of the workdir.
    parallel: 'jit' over a mesh, or 'pmap'. Both compute the same numbers, except that
      with 'pmap' the dropout masks depend on the number of devices, and the
      load-balance loss of experts is a mean of that of each device.
    decode_method: how held-out examples are decoded at the end.
    mesh: number of devices along each axis; 'pmap' has only 'data'.
    log: see `LogConfig`.
    optimizer: see `OptimizerConfig`.
  """

  num_steps: Count32
  batch_size: Count
  seed: Whole32 = 0
  eval_every: Count32 = 1000
  checkpoint_every: Count32 = 1000
  checkpoint_keep: Literal["newest", "best"] = "newest"
  best_metric: str = "loss"
  patience: Whole32 = 0
  stopping_threshold: float | None = None
  log_every: Count32 = 100
  redraw_every: Whole32 = 0
  profile_steps: str = ""
  parallel: Literal["jit", "pmap"] = "jit"
  decode_method: Literal["greedy", "beam"] = "greedy"
  mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
  log: LogConfig = dataclasses.field(default_factory=LogConfig)
  optimizer: OptimizerConfig = dataclasses.field(
    default_factory=OptimizerConfig
  )

  @property
  def tracks_best(self) -> bool:
    """Whether the run tracks its best evaluation."""
    stops_early = self.patience > 0 or self.stopping_threshold is not None
    return stops_early or self.checkpoint_keep == "best"

  @property
  def profiled(self) -> range:
    """The profiled steps, counted from 0."""
    first, _, last = self.profile_steps.partition(":")
    return range(int(first or 0), int(last or 0))

  def __post_init__(self):
    if not self.tracks_best:
      check_unread(
        self,
        ("best_metric",),
        "checkpoint_keep='newest', patience=0 and no stopping_threshold",
      )
    elif self.eval_every >= self.num_steps:
      raise ValueError(
        f"eval_every: checkpoint_keep={self.checkpoint_keep!r}, patience="
        f"{self.patience} and stopping_threshold={self.stopping_threshold} need "
        "evaluations before the last step; expected less than "
        f"num_steps={self.num_steps}, got {self.eval_every}"
      )
    is_range = re.fullmatch(r"(\d+:\d+)?", self.profile_steps, re.ASCII)
    if not is_range or (
      self.profile_steps
      and not self.profiled.start < self.profiled.stop <= self.num_steps
    ):
      raise ValueError(
        "profile_steps: expected FIRST:LAST, such as 10:15, with FIRST below LAST and "
        f"LAST at most num_steps={self.num_steps}, got {self.profile_steps!r}"
      )
    if self.batch_size % self.optimizer.accumulate_steps:
      raise ValueError(
        f"batch_size: {self.batch_size} rows do not split into "
        f"{self.optimizer.accumulate_steps} equal micro-batches "
        "(optimizer.accumulate_steps)"
      )
    for axis, size in self.mesh.axis_sizes.items():
      if self.parallel == "pmap" and axis != DATA and size != 1:
        raise ValueError(
          f"mesh.{axis}: parallel='pmap' splits only rows, along 'data'; expected "
          f"1, got {size}; or parallel='jit'"
        )

"""What the loop and the optimiser need to know, as frozen dataclasses."""

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
  """How parameters are updated.

  Attributes:
    name: 'adamw', any other of Optax or `optax.contrib` that takes a learning
      rate, such as 'muon', or 'package.module:factory' of a function like them.
    learning_rate: the peak.
    schedule: after the warm-up: 'constant', 'cosine' down to `final_fraction`
      of the peak after the last step, or 'inverse_sqrt' of the step.
    warmup_steps: steps of linear growth to the peak.
    final_fraction: last learning rate of 'cosine' over the peak.
    b1: decay of the first moment, if the optimiser has one; None is its own
      default, as it is for the next three.
    b2: decay of the second moment, if the optimiser has one.
    eps: added to the root of the second moment, if the optimiser takes it.
    weight_decay: decoupled; never applied to what is named a bias or a scale, nor
      to the rates of decays (A) and skips (D) of Mamba and what followed it.
    clip_norm: largest global gradient norm; None does not clip.
    accumulate_steps: micro-batches that one batch is split into.
    label_smoothing: share of each target spread over the whole vocabulary.
    ema_decay: of a running mean of the parameters in float32, which evaluation and
      generation then use, as 0.999; 0 uses the parameters.
    options: any other leaf is an argument of the optimiser, as `ns_steps` of Muon.
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
  """Where metrics go beside metrics.jsonl.

  Attributes:
    tensorboard: event files in the folder of the run.
    wandb: Weights & Biases, a package of its own; WANDB_MODE=offline keeps the
      run in its folder.
    project: of Weights & Biases.
  """

  tensorboard: bool = True
  wandb: bool = False
  project: str = "attention"


@dataclass(frozen=True, config=STRICT)
class TrainConfig:
  """What the loop needs to know.

  Attributes:
    num_steps: updates in the whole run.
    batch_size: rows of one update, over all devices and micro-batches.
    seed: parameters, data order and dropout follow from it.
    eval_every: steps between evaluations.
    checkpoint_every: steps between checkpoints.
    checkpoint_keep: 'newest' keeps the last three; 'best' also the one of the best
      evaluation, which is what the run ends with and what is read from then on.
    best_metric: of the first held-out split; it says which evaluation is best.
    patience: evaluations without a gain in `best_metric` after which the run ends;
      0 goes on to the last step.
    log_every: steps between lines in `metrics.jsonl`.
    redraw_every: steps between new draws of what the model draws and does not
      train: random features, rotations, blocks; 0 keeps the first.
    profile_steps: 'FIRST:LAST' records what devices and host do from the end of
      the one step to the end of the other, in the folder `profile` of the run.
    parallel: how devices are driven; the numbers are the same.
    decode_method: how held-out examples are decoded at the end.
    mesh: how many devices lie along each axis; 'pmap' has 'data' alone.
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
  def asks_best(self) -> bool:
    """Whether it matters which evaluation is the best."""
    return self.checkpoint_keep == "best" or self.patience > 0

  @property
  def profiled(self) -> range:
    """The steps, from 0, that are recorded."""
    first, _, last = self.profile_steps.partition(":")
    return range(int(first or 0), int(last or 0))

  def __post_init__(self):
    if not self.asks_best:
      check_unread(
        self, ("best_metric",), "checkpoint_keep='newest' and patience=0"
      )
    elif self.eval_every >= self.num_steps:
      raise ValueError(
        f"eval_every: checkpoint_keep={self.checkpoint_keep!r} and "
        f"patience={self.patience} compare evaluations; expected less than "
        f"num_steps={self.num_steps}, got {self.eval_every}"
      )
    is_range = re.fullmatch(r"(\d+:\d+)?", self.profile_steps, re.ASCII)
    if not is_range or (
      self.profile_steps
      and not 0 <= self.profiled.start < self.profiled.stop <= self.num_steps
    ):
      raise ValueError(
        "profile_steps: expected FIRST:LAST, as 10:15, with FIRST below LAST and "
        f"LAST at most num_steps={self.num_steps}, got {self.profile_steps!r}"
      )
    if self.batch_size % self.optimizer.accumulate_steps:
      raise ValueError(
        f"batch_size: {self.batch_size} rows do not split into "
        f"{self.optimizer.accumulate_steps} equal micro-batches "
        "(optimizer.accumulate_steps)"
      )
    for axis, size in self.mesh.named.items():
      if self.parallel == "pmap" and axis != DATA and size != 1:
        raise ValueError(
          f"mesh.{axis}: parallel='pmap' splits rows alone, along 'data'; expected "
          f"1, got {size}; or parallel='jit'"
        )

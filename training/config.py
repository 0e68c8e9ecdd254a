"""What the loop and the optimiser need to know, as frozen dataclasses."""

from collections.abc import Mapping
import dataclasses
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
  rest,
)
from training.mesh import DATA, MeshConfig


@dataclass(frozen=True, config=STRICT)
class OptimizerConfig:
  """How parameters are updated.

  Attributes:
    name: 'adamw', any other of Optax or `optax.contrib` that takes a learning
      rate, such as 'muon', or 'package.module:factory' of a function like them.
    learning_rate: the peak.
    schedule: after the warm-up: 'constant', 'cosine' down to `final_fraction`
      of the peak at the last step, or 'inverse_sqrt' of the step.
    warmup_steps: steps of linear growth to the peak.
    final_fraction: last learning rate of 'cosine' over the peak.
    b1: decay of the first moment, of an optimiser that has one.
    b2: decay of the second moment, likewise.
    eps: added to the root of the second moment, likewise.
    weight_decay: decoupled; never applied to biases and norm scales.
    clip_norm: largest global gradient norm; None does not clip.
    accumulate_steps: micro-batches that one batch is split into.
    label_smoothing: share of each target spread over the whole vocabulary.
    options: any other leaf is an argument of the optimiser, as `ns_steps` of Muon.
  """

  name: str = "adamw"
  learning_rate: Positive = 1e-3
  schedule: Literal["constant", "cosine", "inverse_sqrt"] = "constant"
  warmup_steps: Whole32 = 0
  final_fraction: Annotated[float, Interval(ge=0, le=1)] = 0.0
  b1: Rate = 0.9
  b2: Rate = 0.999
  eps: Positive = 1e-8
  weight_decay: Annotated[float, Ge(0)] = 0.0
  clip_norm: Positive | None = None
  accumulate_steps: Count = 1
  label_smoothing: Rate = 0.0
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
    log_every: steps between lines in `metrics.jsonl`.
    redraw_every: steps between new draws of what the model draws and does not
      train: random features, rotations, blocks; 0 keeps the first.
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
  log_every: Count32 = 100
  redraw_every: Whole32 = 0
  parallel: Literal["jit", "pmap"] = "jit"
  decode_method: Literal["greedy", "beam"] = "greedy"
  mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
  log: LogConfig = dataclasses.field(default_factory=LogConfig)
  optimizer: OptimizerConfig = dataclasses.field(
    default_factory=OptimizerConfig
  )

  def __post_init__(self):
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

"""Builds the task, the model and the initial state of a run from its config.

It reads the data, and creates and traces the model, so that errors are found before
anything is compiled or written.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
import contextlib
import functools
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import psutil

from attention import mechanism as mechanisms
from attention.names import failure_location
import models
from models import attention_config
from models.published import load
from settings.errors import ConfigError
from settings.typed import mechanism, split
import tasks
from tasks import files
from tasks.base import save_vocabulary
from training import best, ownership
from training import optimizer as optimizer_lib
from training import workdir as workdir_lib
from training.devices import cluster, parallel
from training.experiment_config import ExperimentConfig
from training.state import TrainState, is_schedule_free, seed_and_peak

_SYMBOLS = ("vocab_size", "num_keys", "num_values", "num_fillers")
"""Config fields of tasks that are numbers of symbols."""


class Experiment(NamedTuple):
  """A run's config, task, model and initial state, as `loop.run` uses them.

  Attributes:
    config: the validated config.
    task: data, vocabulary and metric.
    model: the Linen module.
    optimizer: the optimiser that `make_step` creates.
    shapes: shapes and dtypes of the state.
    generate: `(variables, inputs, *, max_length, …) -> Generated`.
  """

  config: ExperimentConfig
  task: tasks.Task
  model: nn.Module
  optimizer: optax.GradientTransformation
  shapes: TrainState
  generate: Callable[..., Any]

  def init(self, mesh: jax.sharding.Mesh | None = None) -> TrainState:
    """Creates the state before the first step, random or with published weights.

    Args:
      mesh: the mesh over which the state is sharded; None is one device.
    """
    numbers = seed_and_peak(self.config.train)
    if self.config.weights:
      variables = _published_variables(self.config, self.model)
      state = _first_state(
        self.config.train, self.optimizer, variables, *numbers
      )
      return state if mesh is None else parallel.place_state(mesh, state)
    shardings = None if mesh is None else parallel.shardings(mesh, self.shapes)
    # A partial function, because `jit` hashes functions, and a run has no hash.
    draw = functools.partial(Experiment.draw, self)
    return jax.jit(draw, out_shardings=shardings)(*numbers)

  def draw(self, seed: Any, peak: Any) -> TrainState:
    """Creates the first state with random parameters and this peak learning rate."""
    variables = _random_variables(self.model, seed)
    return _first_state(
      self.config.train, self.optimizer, variables, seed, peak
    )


def begin(config: ExperimentConfig, workdir: Path) -> Experiment:
  """Creates a run, and writes its config and vocabulary to its workdir.

  It checks the workdir again under its lock, because another process may have started
  a run there since the first check.

  All processes of the run must call this function; they return after the first process
  has written.

  Raises:
    ConfigError: as in `create`; or the mesh does not fit the devices, the workdir has
      other content, the run began with other data, or the processes have different
      configs or data.
    RunError: another process uses the workdir.
  """
  # The processes would train on, each with its own learning rate.
  if cluster.differs(config.to_mapping()):
    raise ConfigError(
      "config: differs between the processes of this run; start all of them with the "
      "same config"
    )
  parallel.check_mesh(config.train, config.model)
  with files.record_digests() as notes:
    run = create(config, workdir)
  if config.train.tracks_best:
    best.check_metric(run)
  _check_data(workdir, notes)
  if cluster.differs(files.name_digests(notes)):
    raise ConfigError(
      "config.task: the processes of this run read different data"
    )
  cluster.wait("all processes have checked the folder")
  if jax.process_index() == 0:
    workdir_lib.make(workdir)
    # The lock protects the config of a run that another process trains there.
    with ownership.lock(workdir):
      workdir_lib.check(workdir, config)
      data = _check_data(workdir, notes)
      workdir_lib.write_config(workdir, config)
      run.task.save(workdir)
      save_vocabulary(workdir, {files.DATA: data} if notes else {})
  cluster.wait("the folder has been written")
  return run


def _check_data(workdir: Path, notes: Any) -> Any:
  """Calls `files.check_data`, and raises its error as a ConfigError."""
  try:
    return files.check_data(workdir, notes)
  except tasks.DataError as error:
    raise ConfigError(str(error)) from error


def create(
  config: ExperimentConfig,
  workdir: Path | None = None,
  restore: bool = False,
  check_memory: bool = True,
) -> Experiment:
  """Creates the task, the model and the optimiser, and traces them once.

  Args:
    config: validated.
    workdir: the workdir of the run; nothing is written there.
    restore: whether to take vocabulary and sizes from `workdir`, without reading data.
    check_memory: whether the run has to fit into the memory of this machine.

  Raises:
    ConfigError: data are missing or invalid, or sizes do not match.
  """
  train = config.train
  # A run that does not fit may still generate.
  checks_size = check_memory and not restore
  if checks_size:
    symbols = (getattr(config.task, field, None) or 0 for field in _SYMBOLS)
    check_size(config, max(symbols))
  task = _make_task(config, workdir, restore)
  if not restore:
    _check_generates(config, task)
  with _model_errors(config):
    model = models.create(config.model, **_sizes(config, task))
    variables = jax.eval_shape(
      functools.partial(_random_variables, model), train.seed
    )
  optimizer = optimizer_lib.make_optimizer(train.optimizer, train.num_steps)
  _check_optimizer(train, optimizer, variables["params"])
  shapes = jax.eval_shape(
    functools.partial(_first_state, train, optimizer),
    variables,
    *seed_and_peak(train),
  )
  if checks_size:
    state = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))
    lengths = task.max_source_length or 0, task.max_target_length or 0
    check_size(config, task.target_vocab_size, *lengths, state=state)
  if train.redraw_every and not jax.tree.leaves(
    shapes.collections["constants"]
  ):
    raise ConfigError(
      "config.redraw_every: this model has no random constants to redraw; "
      "expected 0"
    )
  if hasattr(task, "loss") and train.optimizer.label_smoothing:
    raise ConfigError(
      f"config.optimizer.label_smoothing: the task {config.task_name!r} has its "
      f"own loss; expected 0, got {train.optimizer.label_smoothing}"
    )

  def generate(variables, inputs, **options):
    if "source" in inputs and task.pad_id != models.PAD_ID:
      inputs = inputs | {"source_mask": inputs["source"] != task.pad_id}
    return models.generate(
      model,
      variables,
      **inputs,
      bos_id=task.bos_id,
      # Published models may have several ids that end a text.
      eos_id=getattr(task, "eos_ids", task.eos_id),
      pad_id=task.pad_id,
      **options,
    )

  return Experiment(config, task, model, optimizer, shapes, generate)


def check_size(
  config: ExperimentConfig, symbols: int, sources=0, targets=1, state=0
) -> None:
  """Raises ConfigError if a run certainly needs more memory than this machine has.

  The estimate for a batch counts the inputs of layers and the logits. The estimate for
  the state is `state` bytes, or at least three copies of the embedding tables and MLPs.
  """
  model, tokens = config.model, max(sources, targets)
  layers, width, inner = (
    size if isinstance(size := getattr(model, name, 0), int) else 0
    for name in ("num_layers", "features", "mlp_features")
  )
  rows = config.train.batch_size // config.train.optimizer.accumulate_steps
  positions = min(tokens, getattr(model, "num_latents", tokens))
  batch = rows * (2 * layers * width * positions + 4 * targets * symbols)
  state = max(state, 6 * width * (2 * layers * inner + symbols))
  needed, memory = batch + state, psutil.virtual_memory().total
  for device in jax.local_devices() if needed > memory else ():
    memory += (device.memory_stats() or {}).get("bytes_limit", 0)
  memory *= jax.process_count()  # Assumes equal hosts.
  if needed > memory:
    raise ConfigError(
      f"config.{'batch_size' if batch > state else 'model'}: parameters, moments "
      f"and {rows:,} × {tokens:,} tokens of {symbols:,} symbols take at least "
      f"{-(-needed // 10**9):,} GB, more than the {memory // 10**9} GB of memory here"
    )


def data_digests(configs: Iterable[ExperimentConfig]) -> dict[str, str]:
  """Returns the digests of the data and the published weights of runs, by name.

  Args:
    configs: the configs of the runs, whose data this function reads.

  Raises:
    ConfigError: data are missing or invalid.
  """
  with files.record_digests() as notes:
    for config in configs:
      _make_task(config, None, restore=False)
      if config.weights:
        for file in sorted(Path(config.weights).glob("*.safetensors")):
          files.note_file(file)
  return files.name_digests(notes)


def describe(experiment: Experiment, devices: Sequence[Any] = ()) -> str:
  """Describes mechanisms, parameters, steps and devices of a run in one line.

  Args:
    experiment: the run.
    devices: the devices that will run it; empty means the devices of JAX.
  """
  devices = devices or jax.devices()
  train = experiment.config.train
  model = experiment.config.model
  modules = " · ".join(
    field.removesuffix("_attention") for field in model.attentions
  )
  params = sum(leaf.size for leaf in jax.tree.leaves(experiment.shapes.params))
  line = (
    f"slots {models.slots(model)} ({modules}); {params:,} parameters, "
    f"{train.num_steps} steps of {train.batch_size} rows, "
    f"{len(devices)} × {devices[0].device_kind}"
  )
  remarks = optimizer_lib.remarks(train.optimizer, train.num_steps)
  return "; ".join([line, *remarks])


def dense_reasons(config_file: str, config: ExperimentConfig) -> list[str]:
  """Explains why attention modules use dense instead of the mechanism of the command.

  Args:
    config_file: `FILE.py:MECHANISM`, as typed.
    config: the config that the file returned for it.

  Returns:
    One line per attention module; none if no mechanism was typed.
  """
  fields = [
    field
    for field, layers in config.model.attentions.items()
    if [layer.name for layer in layers] == ["dense"]
  ]
  words = split(config_file.partition(":")[2]) if fields else []
  try:
    names = dict.fromkeys(mechanism(word)[0] for word in words)
    candidates = {name: mechanisms.example(name) for name in names}
  except ValueError:  # A file may define its own names.
    return []
  if "dense" in candidates:
    return []
  return [
    f"{field.removesuffix('_attention')}: dense, because {name} cannot {obstacle}"
    for field in fields
    for name, candidate in candidates.items()
    if (obstacle := attention_config.obstacle(candidate, field))
  ]


def _make_task(
  config: ExperimentConfig, workdir: Path | None, restore: bool
) -> tasks.Task:
  """Returns the task, with batches in the layout of the model."""
  model = config.model
  try:
    task = tasks.find(config.task_name).make(
      config.task,
      kind=model.layout,
      batch_size=config.train.batch_size,
      seed=config.train.seed,
      workdir=workdir,
      restore=restore,
    )
  except tasks.DataError as error:
    raise ConfigError(str(error)) from error
  except OSError as error:
    raise ConfigError(f"config.task: {error}") from error
  except tasks.LayoutError as error:
    known = f", the layout of {model.kind!r}" * (model.kind != model.layout)
    raise ConfigError(f"config.{error}{known}") from error
  except ValueError as error:
    raise ConfigError(f"config.{error}") from error
  if hasattr(model, "adapt_task") and not restore:
    task = model.adapt_task(task)
  return task


@contextlib.contextmanager
def _model_errors(config: ExperimentConfig) -> Iterator[None]:
  """Raises errors of a model and its mechanisms as a ConfigError."""
  try:
    yield
  except ValueError as error:
    raise ConfigError(f"config.model.{error}") from error
  except Exception as error:
    # A mechanism from an import path may raise any exception.
    paths = [
      attention.name
      for attentions in config.model.attentions.values()
      for attention in attentions
      if ":" in attention.name
    ]
    if not paths:
      raise
    raise ConfigError(
      f"config.model: {', '.join(paths)} raised "
      f"{failure_location(error, *paths)}"
    ) from error


def _random_variables(model, seed) -> Any:
  return models.initialize(model, jax.random.key(seed), model.example())


def _published_variables(config, model) -> Any:
  # The config has all mechanisms, including those of the folder.
  opened = load.open_folder(Path(config.weights), config.model.attentions)
  return load.read_variables(opened, model, jax.random.key(config.train.seed))


def _first_state(config, optimizer, variables, seed, peak) -> TrainState:
  has_ema = config.optimizer.ema_decay > 0
  return TrainState.first(variables, optimizer, seed, has_ema, peak)


def _check_optimizer(config, optimizer, params) -> None:
  """Raises ConfigError if the optimiser cannot update parameters of these shapes."""
  name = config.optimizer.name
  try:
    optimizer_lib.check_update(name, optimizer, params)
  except ValueError as error:
    raise ConfigError(f"config.optimizer.{error}") from error
  dtypes = {leaf.dtype for leaf in jax.tree.leaves(params)}
  narrow = [x.name for x in sorted(dtypes) if jnp.finfo(x).bits < 32]
  if narrow and is_schedule_free(jax.eval_shape(optimizer.init, params)):
    raise ConfigError(
      f"config.optimizer.name: {name} averages the parameters, for which fewer than "
      "32 bits are not precise enough; expected config.model.param_dtype='float32', "
      f"got {narrow[0]!r}"
    )


def _sizes(config: ExperimentConfig, task: tasks.Task) -> dict[str, Any]:
  """Returns the sizes for `models.create`, from the task and the model's config.

  Raises:
    ValueError: the model has fewer ids, or allows only shorter sequences, than the
      task.
  """
  sizes: dict[str, Any] = {
    "source_vocab_size": task.source_vocab_size,
    "target_vocab_size": task.target_vocab_size,
    "max_source_length": task.max_source_length,
    "max_target_length": task.max_target_length,
    "shared_vocabulary": task.shared_vocabulary,
    "input_shapes": tasks.input_shapes(task),
  }
  fields = {
    "source_vocab_size": "vocab_size",
    "target_vocab_size": "vocab_size",
    "max_source_length": "max_length",
    "max_target_length": "max_length",
  }
  if getattr(config.model, "head", "") == "class":
    # Classes are not in the vocabulary.
    del fields["target_vocab_size"]
  for name, field in fields.items():
    size = getattr(config.model, field, None)
    if size is None or sizes[name] is None:
      continue
    if size < sizes[name]:
      raise ValueError(
        f"{field}: expected at least the task's {sizes[name]}, got {size}"
      )
    sizes[name] = size
  return sizes


def _check_generates(config: ExperimentConfig, task: tasks.Task) -> None:
  """Checks that the model can decode if the task generates.

  Raises:
    ConfigError: the task generates, but a mechanism cannot decode.
  """
  reason = f", and the task {config.task_name!r} generates"
  for field, needs in models.GENERATING.items():
    needs = {need: what + reason for need, what in needs.items()}
    for attention in config.model.attentions.get(field, ()):
      try:
        models.check_supports(field, attention, needs)
      except ValueError as error:
        if _generates(task):
          raise ConfigError(f"config.model.{error}") from error


def _generates(task: tasks.Task) -> bool:
  batches = (next(iter(task.decode_batches(x)), None) for x in task.eval_splits)
  return any(batch is not None for batch in batches)

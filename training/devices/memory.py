"""An estimate of memory that refuses runs which certainly do not fit."""

import jax
import psutil

from settings.errors import ConfigError
from training.experiment_config import ExperimentConfig


def check(
  config: ExperimentConfig, symbols: int, sources=0, targets=1, held=0
) -> None:
  """Raises ConfigError if a run certainly needs more memory than there is.

  The estimate of a batch counts the inputs of layers and the logits. The estimate of
  the state counts `held` bytes, or three copies of the embedding tables and MLPs.
  """
  model, tokens = config.model, max(sources, targets)
  layers, width, wide = (
    size if isinstance(size := getattr(model, name, 0), int) else 0
    for name in ("num_layers", "features", "mlp_features")
  )
  rows = config.train.batch_size // config.train.optimizer.accumulate_steps
  seen = min(tokens, getattr(model, "num_latents", tokens))
  batch = rows * (2 * layers * width * seen + 4 * targets * symbols)
  state = max(held, 6 * width * (2 * layers * wide + symbols))
  need, memory = batch + state, psutil.virtual_memory().total
  for device in jax.local_devices() if need > memory else ():
    memory += (device.memory_stats() or {}).get("bytes_limit", 0)
  memory *= jax.process_count()  # Assumes equal hosts.
  if need > memory:
    raise ConfigError(
      f"config.{'batch_size' if batch > state else 'model'}: parameters, moments "
      f"and {rows:,} × {tokens:,} tokens of {symbols:,} symbols take at least "
      f"{-(-need // 10**9):,} GB, more than the {memory // 10**9} GB of memory here"
    )

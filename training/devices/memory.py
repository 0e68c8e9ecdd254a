"""The one estimate of memory: what surely does not fit is told before a run."""

import jax
import psutil

from settings.errors import ConfigError
from training.experiment_config import ExperimentConfig


def check(
  config: ExperimentConfig, symbols: int, sources=0, targets=1, held=0
) -> None:
  """Raises ConfigError where a run surely needs more memory than there is.

  Of a batch inputs of layers and logits; `held` bytes, or tables and MLPs thrice.
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
  memory *= jax.process_count()  # Hosts that are alike.
  if need > memory:
    raise ConfigError(
      f"config.{'batch_size' if batch > state else 'model'}: parameters, moments "
      f"and {rows:,} × {tokens:,} tokens of {symbols:,} symbols take at least "
      f"{-(-need // 10**9):,} GB, more than the {memory // 10**9} GB of memory here"
    )

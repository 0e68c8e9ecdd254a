"""Checkpoints of Orbax, with a digest of every leaf.

Orbax does not report a flipped byte or a changed dtype, so `restore` searches backwards
from the newest step for a checkpoint whose leaves have the saved digests.

With several processes, each one writes and reads the shards of its devices. The digest
of a leaf is computed from a sum over its numbers, to which each process contributes the
sum of its shards, so it does not depend on the sharding.
"""

from collections.abc import Mapping
import errno
import hashlib
from numbers import Integral
import operator
import pathlib
import re
import sys
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from settings.errors import ConfigError
from settings.hashing import splitmix64
from training.best import is_lower_better
from training.config import TrainConfig
from training.devices import cluster, process
from training.state import TrainState, seed_and_peak

_KEEP = 3

_BLOCK = 1 << 16
"""The number of values that are mixed at a time; they fit into a core's cache."""


def digests(tree: Any) -> dict[str, str]:
  """Computes a digest of every leaf, over its dtype, shape and numbers.

  With x_i the bits of number i in row-major order, and mix the finaliser of
  SplitMix64, a bijection of 64 bits,

    digest = SHA-256(dtype, shape, Σ_i mix(mix(i + 1) + x_i) mod 2⁶⁴)

  A change of one number always changes the digest, and so does a swap of two. If the
  leaves are sharded over several processes, all of them must call this function, and
  all get the digests of the whole leaves.

  Returns:
    Maps the paths of leaves to hexadecimal digests.
  """
  leaves = jax.tree.leaves_with_path(tree)
  totals = np.array([_sum(leaf) for _, leaf in leaves], np.uint64)
  if not all(_is_local(leaf) for _, leaf in leaves):
    totals = cluster.total(totals)
  named = {}
  for (path, leaf), total in zip(leaves, totals, strict=True):
    text = f"{np.dtype(leaf.dtype)}{np.shape(leaf)}{total}"
    digest = hashlib.sha256(text.encode()).hexdigest()
    named[jax.tree_util.keystr(path)] = digest
  return named


def _is_local(leaf: Any) -> bool:
  """Returns whether this process holds the whole leaf."""
  return not isinstance(leaf, jax.Array) or leaf.is_fully_addressable


def _sum(leaf: Any) -> int:
  """Returns the sum over the numbers of a leaf that are on this process."""
  if _is_local(leaf):
    return _sum_shard(np.asarray(leaf), (0,) * np.ndim(leaf), np.shape(leaf))
  sums = [
    _sum_shard(
      np.asarray(shard.data),
      tuple(axis.start or 0 for axis in shard.index),
      leaf.shape,
    )
    for shard in leaf.addressable_shards
    if shard.replica_id == 0  # Count each number once.
  ]
  return sum(sums) % 2**64


def _sum_shard(
  shard: np.ndarray, corner: tuple[int, ...], shape: tuple[int, ...]
) -> int:
  """Computes Σ mix(mix(i + 1) + x_i) over a shard at `corner` of an array."""
  bits = np.ascontiguousarray(shard).view(f"u{shard.dtype.itemsize}")
  bits, total = bits.reshape(-1), 0
  for start in range(0, bits.size, _BLOCK):
    values = bits[start : start + _BLOCK].astype(np.uint64)
    index = np.arange(start, start + len(values))
    if shard.shape != shape:
      local = np.unravel_index(index, shard.shape)
      whole = tuple(x + first for x, first in zip(local, corner, strict=True))
      index = np.ravel_multi_index(whole, shape)
    index_hash = splitmix64(index.astype(np.uint64) + np.uint64(1))
    mixed = splitmix64(index_hash + values)
    total += int(mixed.sum(dtype=np.uint64))
  return total % 2**64


def newest_step(workdir: pathlib.Path) -> int:
  """Returns the step of the last checkpoint, intact or not; 0 if there is none."""
  names = (path.name for path in workdir.glob("checkpoints/*"))
  return max((int(name) for name in names if name.isdigit()), default=0)


class Checkpoints:
  """The checkpoints of a run: the newest three, and the best if the config keeps it.

  Saves run in the background; `close` waits for them. A killed save leaves no partial
  checkpoint, because Orbax commits by renaming.

  Args:
    workdir: the workdir of the run.
    config: the config of the run, which determines whether the best checkpoint is kept,
      and by which metric.
    read_only: whether saving is disabled.
  """

  def __init__(
    self, workdir: pathlib.Path, config: TrainConfig, read_only: bool = False
  ):
    self._config = config
    keeps_best = config.checkpoint_keep == "best"
    self._best_metric = config.best_metric if keeps_best else ""
    policy = (
      _keep_best(self._best_metric) if keeps_best else {"max_to_keep": _KEEP}
    )
    self._manager = ocp.CheckpointManager(
      (workdir / "checkpoints").absolute(),
      options=ocp.CheckpointManagerOptions(
        create=not read_only, read_only=read_only, **policy
      ),
      item_names=("state", "record"),
    )

  def save(
    self,
    state: TrainState,
    record: Mapping[str, Any],
    best: float | None = None,
  ) -> None:
    """Saves `state` under its step, together with `record`.

    Deletes checkpoints of this and later steps, which `restore` found corrupt.

    Args:
      state: the state to save; with several processes, each saves its shards. It may
        be donated after this function returns.
      record: JSON-ready values, which `restore` returns.
      best: the metric, if it is better than in all earlier evaluations.
    """
    # On a CPU, arrays may share memory that is later donated.
    fields = _fields(jax.tree.map(_copy, state))
    step = int(fields["step"])
    for later in self._manager.all_steps():
      if later >= step:
        self._manager.delete(later)
    entry = {"digests": _named_digests(fields), "record": dict(record)}
    self._manager.save(
      step,
      args=ocp.args.Composite(
        state=ocp.args.StandardSave(fields), record=ocp.args.JsonSave(entry)
      ),
      metrics=None if best is None else {self._best_metric: best},
      force=True,
    )

  def restore(
    self, like: TrainState, step: int | None = None, best: bool = False
  ) -> tuple[TrainState, Mapping[str, Any]] | None:
    """Restores a checkpoint, by default the newest intact one.

    Reports each corrupt checkpoint that it skips, in one line on standard error.

    Args:
      like: the expected structure, shapes and dtypes; its values are not read. With
        several processes, it also has the sharding of each leaf.
      step: step of the checkpoint; None is the newest intact one.
      best: whether to try the best checkpoint, if there is one, before the newest.

    Returns:
      The state and its record; None if there is no checkpoint. Leaves are NumPy
      arrays; with several processes, they are arrays on the devices.

    Raises:
      ConfigError: there are checkpoints, but none is intact and has these shapes, or
        none is of `step`.
      OSError: the disk or the network failed, so the checkpoint may be intact.
    """
    self._manager.wait_until_finished()
    steps = sorted(self._manager.all_steps(), reverse=True)
    if best:
      best_step = self.best_step
      steps.sort(key=lambda number: number != best_step)
    is_whole = isinstance(step, Integral) and not isinstance(step, bool)
    if step is not None and not (is_whole and step in steps):
      raise ConfigError(f"step: expected one of {sorted(steps)}, got {step!r}")
    steps = steps if step is None else [step]
    misfit = None
    for number in steps:
      try:
        return self._restore_step(number, like)
      # Orbax and its file formats may raise any exception.
      except Exception as error:
        if isinstance(error, MemoryError) or _is_system_error(error):
          raise  # It may be intact, and the next save would delete it.
        reason = str(error).strip().split("\n")[0][:200]
        is_misfit = isinstance(error, _MisfitError)
        misfit = misfit or (reason if is_misfit else None)
        what = "is of other shapes" if is_misfit else "is corrupt"
        if jax.process_index() == 0:
          print(
            f"checkpoint {number} {what} and not used: {reason}",
            file=sys.stderr,
          )
    if misfit:
      raise ConfigError(
        f"{self._manager.directory}: the checkpoints are intact but belong to "
        f"another model: {misfit}; use the config and the JAX environment variables "
        f"of the run (here JAX_DEFAULT_PRNG_IMPL={process.generator()})"
      )
    if steps:
      raise ConfigError(
        f"{self._manager.directory}: none of the checkpoints {steps} is "
        "intact; remove the folder to start again"
      )
    return None

  def _restore_step(
    self, step: int, like: TrainState
  ) -> tuple[TrainState, Mapping[str, Any]]:
    """Restores the checkpoint of a step, and verifies its digests and shapes."""
    restored, failure = None, None
    expected: Any = {}
    entry: Any = {}
    try:
      entry = self._manager.restore(
        step, args=ocp.args.Composite(record=ocp.args.JsonRestore())
      )["record"]
      template = jax.tree.map(_template, like)
      if ".seed" not in entry["digests"]:
        template = _without_numbers(template)
      expected = _fields(template)
      restored = self._manager.restore(
        step,
        args=ocp.args.Composite(state=ocp.args.StandardRestore(expected)),
      )
    # If one process cannot read it, all processes try the previous checkpoint.
    except Exception as error:
      failure = error
    if cluster.any_of(restored is None):
      raise failure or ValueError("another process could not read it")
    assert restored is not None
    fields = dict(restored["state"])
    saved, restored_digests = entry["digests"], _named_digests(fields)
    for name in sorted(saved.keys() | restored_digests.keys()):
      if saved.get(name) != restored_digests.get(name):
        raise ValueError(f"digest of {name} is not the one saved")
    for (path, leaf), other in zip(
      jax.tree.leaves_with_path(fields), jax.tree.leaves(expected), strict=True
    ):
      if leaf.shape != other.shape:
        raise _MisfitError(
          f"{jax.tree_util.keystr(path)} has shape {leaf.shape}, expected "
          f"{other.shape}"
        )
    names = ("step", "seed", "params", "opt_state", "ema")
    number, seed, params, opt_state, ema = (
      fields.pop(name, None) for name in names
    )
    state = TrainState(number, seed, params, fields, opt_state, ema)
    if seed is None:
      state = _with_numbers(state, like, self._config)
    return state, entry["record"]

  @property
  def best_step(self) -> int | None:
    """The step of the best checkpoint; None if there is none."""
    return self._manager.best_step() if self._best_metric else None

  def close(self) -> None:
    """Waits until all checkpoints are written."""
    self._manager.wait_until_finished()
    self._manager.close()


class _MisfitError(ValueError):
  """An intact checkpoint has other shapes than expected."""


def _is_system_error(error: Exception) -> bool:
  """Returns whether the disk or system, and not a file's content, caused an error."""
  return isinstance(error, OSError) and error.errno in (
    *(errno.EIO, errno.EACCES, errno.EPERM, errno.ESTALE, errno.ENOMEM),
    *(errno.EMFILE, errno.ENFILE, errno.ETIMEDOUT, errno.ENOTCONN),
  )


def _keep_best(metric: str) -> dict[str, Any]:
  """Returns Orbax options that keep the newest checkpoints and the best one."""
  options = {
    "best_fn": operator.itemgetter(metric),
    "best_mode": "min" if is_lower_better(metric) else "max",
  }
  policies = ocp.checkpoint_managers
  best = policies.BestN(
    n=1,
    get_metric_fn=options["best_fn"],
    reverse=options["best_mode"] == "min",
    keep_checkpoints_without_metrics=False,
  )
  policy = policies.AnyPreservationPolicy([policies.LatestN(_KEEP), best])
  return options | {"preservation_policy": policy}


def _copy(leaf: Any) -> Any:
  """Copies a leaf: to the host, or each shard on its device."""
  return np.array(leaf) if _is_local(leaf) else jax.numpy.copy(leaf)


def _template(leaf: Any) -> Any:
  """Returns an array or a shape that specifies to Orbax how to read a leaf."""
  if jax.process_count() > 1 and leaf.sharding is not None:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
  return np.zeros(leaf.shape, leaf.dtype)


def _without_numbers(like: Any) -> Any:
  """Returns the state of older checkpoints, without seed and peak learning rate."""
  return like._replace(seed=None, opt_state=like.opt_state.inner_state)


def _with_numbers(state: Any, like: Any, config: TrainConfig) -> Any:
  """Adds the config's seed and peak learning rate to a state of `_without_numbers`."""
  seed, peak = seed_and_peak(config)
  opt_state = like.opt_state._replace(
    count=_copy(state.step),  # A copy, because the step is also donated.
    hyperparams={"peak": peak},
    inner_state=state.opt_state,
  )
  return state._replace(seed=seed, opt_state=opt_state)


def _fields(state: TrainState) -> dict[str, Any]:
  """Returns the fields that are stored; each collection is a separate field."""
  fields = {k: x for k, x in state._asdict().items() if x is not None}
  return fields | fields.pop("collections")


def _named_digests(fields: dict[str, Any]) -> dict[str, str]:
  """Maps names on disk, such as `.params['head']['kernel']`, to digests."""
  return {
    re.sub(r"^\['(\w+)'\]", r".\1", name): digest
    for name, digest in digests(fields).items()
  }

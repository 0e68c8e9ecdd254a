"""Checkpoints: Orbax, with a digest of every leaf next to the state.

Orbax restores a flipped byte or another dtype without a word, so `restore` walks
from the newest step to the first one whose leaves have the digests that were saved.

Of several processes each writes what its devices have, and reads what they will
have. The digest of a leaf is made of a sum over its numbers, to which each process
adds its share, however the leaf is cut.
"""

from collections.abc import Mapping
import errno
import hashlib
import operator
import pathlib
import re
import sys
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from settings.errors import ConfigError
from training.best import is_lower_better
from training.config import TrainConfig
from training.devices import cluster, process
from training.state import TrainState

_KEEP = 3

_BLOCK = 1 << 16
"""Numbers that are mixed at once; they stay in a core's cache."""


def digests(tree: Any) -> dict[str, str]:
  """A digest of every leaf, over its dtype, shape and numbers.

  With x_i the bits of number i in row-major order, and mix the finaliser of
  SplitMix64, a bijection of 64 bits,

    digest = SHA-256(dtype, shape, Σ_i mix(mix(i + 1) + x_i) mod 2⁶⁴)

  so one number that changes always changes it, and two that change places do.
  Where several processes have parts of the leaves, all have to ask, and all get
  the digests of the whole.

  Returns:
    path of the leaf → hexadecimal digest.
  """
  leaves = jax.tree.leaves_with_path(tree)
  totals = np.array([_sum(leaf) for _, leaf in leaves], np.uint64)
  if not all(_is_here(leaf) for _, leaf in leaves):
    totals = cluster.total(totals)
  named = {}
  for (path, leaf), total in zip(leaves, totals, strict=True):
    text = f"{np.dtype(leaf.dtype)}{np.shape(leaf)}{total}"
    digest = hashlib.sha256(text.encode()).hexdigest()
    named[jax.tree_util.keystr(path)] = digest
  return named


def _is_here(leaf: Any) -> bool:
  """Whether this process has all of it."""
  return not isinstance(leaf, jax.Array) or leaf.is_fully_addressable


def _sum(leaf: Any) -> int:
  """The sum over the numbers of a leaf, or over those that are this process's."""
  if _is_here(leaf):
    return _mixed(np.asarray(leaf), (0,) * np.ndim(leaf), np.shape(leaf))
  parts = [
    _mixed(
      np.asarray(shard.data),
      tuple(axis.start or 0 for axis in shard.index),
      leaf.shape,
    )
    for shard in leaf.addressable_shards
    if shard.replica_id == 0  # Each number once.
  ]
  return sum(parts) % 2**64


def _mixed(
  part: np.ndarray, corner: tuple[int, ...], shape: tuple[int, ...]
) -> int:
  """Σ mix(mix(i + 1) + x_i) over a part of an array, which begins at `corner`."""
  bits = np.ascontiguousarray(part).view(f"u{part.dtype.itemsize}").reshape(-1)
  total = 0
  for start in range(0, bits.size, _BLOCK):
    values = bits[start : start + _BLOCK].astype(np.uint64)
    places = np.arange(start, start + len(values))
    if part.shape != shape:
      local = np.unravel_index(places, part.shape)
      whole = tuple(x + first for x, first in zip(local, corner, strict=True))
      places = np.ravel_multi_index(whole, shape)
    mixed = _mix(_mix(places.astype(np.uint64) + np.uint64(1)) + values)
    total += int(mixed.sum(dtype=np.uint64))
  return total % 2**64


def _mix(x: np.ndarray) -> np.ndarray:
  """The finaliser of SplitMix64."""
  x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return x ^ (x >> np.uint64(31))


def newest_step(workdir: pathlib.Path) -> int:
  """The step of a run's last checkpoint, intact or not; 0 where there is none."""
  names = (path.name for path in workdir.glob("checkpoints/*"))
  return max((int(name) for name in names if name.isdigit()), default=0)


class Checkpoints:
  """The checkpoints of one run; the newest three are kept, and the best.

  Saving goes on in the background; `close` waits for it. A save that a kill
  interrupts leaves no trace, as Orbax commits by renaming.

  Args:
    workdir: of the run.
    config: of the run; it says whether the best is kept, and by which metric.
    read_only: nothing is saved.
  """

  def __init__(
    self, workdir: pathlib.Path, config: TrainConfig, read_only: bool = False
  ):
    self._config = config
    keeps_best = config.checkpoint_keep == "best"
    self._best_metric = config.best_metric if keeps_best else ""
    kept = (
      _keep_best(self._best_metric) if keeps_best else {"max_to_keep": _KEEP}
    )
    self._manager = ocp.CheckpointManager(
      (workdir / "checkpoints").absolute(),
      options=ocp.CheckpointManagerOptions(
        create=not read_only, read_only=read_only, **kept
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

    Steps from there on that are already on disk, which `restore` has found
    corrupt, make room.

    Args:
      state: what to save, of several processes the part of each; may be donated
        as soon as this returns.
      record: JSON-ready values to have back on restore.
      best: the metric, where it is better than that of any before.
    """
    # On a CPU arrays may share memory that is donated afterwards.
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
    """Restores a step, by default the newest that is intact.

    Each corrupt one on the way is told in one line on standard error.

    Args:
      like: structure, shapes and dtypes to expect; its values are not read. Of
        several processes it says where each leaf will lie (its sharding).
      step: of a checkpoint.
      best: the best one comes before the newest, where it was kept.

    Returns:
      state and its record; None without any checkpoint. Leaves are NumPy, of
      several processes they are arrays on the devices.

    Raises:
      ConfigError: there are checkpoints, and not one of them is intact and of these
        shapes; or none of `step`.
      OSError: the disk or the network fails, so that nobody knows.
    """
    self._manager.wait_until_finished()
    steps = sorted(self._manager.all_steps(), reverse=True)
    if best:
      best_step = self.best_step
      steps.sort(key=lambda number: number != best_step)
    if step is not None and step not in steps:
      raise ConfigError(f"step: expected one of {sorted(steps)}, got {step!r}")
    steps = steps if step is None else [step]
    misfit = None
    for number in steps:
      try:
        return self._restore_step(number, like)
      # Orbax and its formats raise exceptions of any type.
      except Exception as error:
        if isinstance(error, MemoryError) or _is_of_the_disk(error):
          raise  # It may be intact, and the next save would delete it.
        reason = str(error).strip().split("\n")[0][:200]
        is_misfit = isinstance(error, _MisfitError)
        misfit = misfit or (reason if is_misfit else None)
        fault = "is of other shapes" if is_misfit else "is corrupt"
        if cluster.is_first():
          print(
            f"checkpoint {number} {fault} and not used: {reason}",
            file=sys.stderr,
          )
    if misfit:
      raise ConfigError(
        f"{self._manager.directory}: the checkpoints are intact and of another "
        f"model: {misfit}; use the config of the run, and its variables of JAX "
        f"(here JAX_DEFAULT_PRNG_IMPL={process.generator()})"
      )
    if steps:
      raise ConfigError(
        f"{self._manager.directory}: none of the checkpoints {steps} is "
        "intact; remove the folder to start anew"
      )
    return None

  def _restore_step(
    self, step: int, like: TrainState
  ) -> tuple[TrainState, Mapping[str, Any]]:
    restored, fault = None, None
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
    # Whatever one process cannot read, all go on to the step before.
    except Exception as error:
      fault = error
    if cluster.any_of(restored is None):
      raise fault or ValueError("another process could not read it")
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
    """The step of the best one; None before there is a metric, or keeps none."""
    return self._manager.best_step() if self._best_metric else None

  def close(self) -> None:
    """Waits until everything is written."""
    self._manager.wait_until_finished()
    self._manager.close()


class _MisfitError(ValueError):
  """A checkpoint that is intact, of other shapes than are asked for."""


def _is_of_the_disk(error: Exception) -> bool:
  """Whether a file could not be read, where it is no fault of what is in it."""
  return isinstance(error, OSError) and error.errno in (
    *(errno.EIO, errno.EACCES, errno.EPERM, errno.ESTALE, errno.ENOMEM),
    *(errno.EMFILE, errno.ENFILE, errno.ETIMEDOUT, errno.ENOTCONN),
  )


def _keep_best(metric: str) -> dict[str, Any]:
  """Options of Orbax that keep the newest, to go on from, and the best."""
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
  both = policies.AnyPreservationPolicy([policies.LatestN(_KEEP), best])
  return options | {"preservation_policy": both}


def _copy(leaf: Any) -> Any:
  """A leaf that nothing else changes: in memory, or each part on its device."""
  return np.array(leaf) if _is_here(leaf) else jax.numpy.copy(leaf)


def _template(leaf: Any) -> Any:
  """What tells Orbax how to read a leaf."""
  if cluster.are_several() and leaf.sharding is not None:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
  return np.zeros(leaf.shape, leaf.dtype)


def _without_numbers(like: Any) -> Any:
  """The state as older checkpoints have it, before seed and peak were part of it."""
  return like._replace(seed=None, opt_state=like.opt_state.inner_state)


def _with_numbers(state: Any, like: Any, config: TrainConfig) -> Any:
  """A state of an older checkpoint, with seed and peak from the config of its run."""
  opt_state = like.opt_state._replace(
    count=_copy(state.step),  # Both are donated.
    hyperparams={"peak": np.float32(config.optimizer.learning_rate)},
    inner_state=state.opt_state,
  )
  return state._replace(seed=np.int32(config.seed), opt_state=opt_state)


def _fields(state: TrainState) -> dict[str, Any]:
  """What is on disk, each collection beside the others."""
  fields = {k: x for k, x in state._asdict().items() if x is not None}
  return fields | fields.pop("collections")


def _named_digests(fields: dict[str, Any]) -> dict[str, str]:
  """Digests by the names of what is on disk, as `.params['head']['kernel']`."""
  return {
    re.sub(r"^\['(\w+)'\]", r".\1", name): digest
    for name, digest in digests(fields).items()
  }

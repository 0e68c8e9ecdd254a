"""Checkpoints: Orbax, with a digest of every leaf next to the state.

Orbax restores a flipped byte or another dtype without a word. So each step
also keeps the SHA-256 of every leaf, and `restore` walks from the newest step
to the first one that is what was saved.
"""

from collections.abc import Mapping
import hashlib
import pathlib
import sys
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from process.errors import ConfigError
from training.state import TrainState

_KEEP = 3


def digests(tree: Any) -> dict[str, str]:
  """SHA-256 of every leaf, over its dtype, shape and bytes.

  Args:
    tree: any pytree of arrays.

  Returns:
    path of the leaf → hexadecimal digest.
  """
  found = {}
  for path, leaf in jax.tree.leaves_with_path(tree):
    array = np.ascontiguousarray(leaf)
    digest = hashlib.sha256(f"{array.dtype}{np.shape(leaf)}".encode())
    digest.update(array.tobytes())
    found[jax.tree_util.keystr(path)] = digest.hexdigest()
  return found


class Checkpoints:
  """The checkpoints of one run; the newest three are kept.

  Saving goes on in the background; `close` waits for it. A save that a kill
  interrupts leaves no trace, as Orbax commits by renaming.
  """

  def __init__(self, workdir: pathlib.Path, read_only: bool = False):
    self._manager = ocp.CheckpointManager(
      (workdir / "checkpoints").absolute(),
      options=ocp.CheckpointManagerOptions(
        max_to_keep=_KEEP, create=not read_only, read_only=read_only
      ),
      item_names=("state", "record"),
    )

  def save(self, state: TrainState, record: Mapping[str, Any]) -> None:
    """Saves `state` under its step, together with `record`.

    Steps from there on that are already on disk, which `restore` has found
    corrupt, make room.

    Args:
      state: what to save, whole in every process; may be donated as soon as
        this returns.
      record: JSON-ready values to have back on restore.
    """
    # Copies: on a CPU these may share memory that is donated afterwards.
    host = jax.tree.map(lambda leaf: np.array(leaf), state)
    step = int(host.step)
    for later in self._manager.all_steps():
      if later >= step:
        self._manager.delete(later)
    self._manager.save(
      step,
      args=ocp.args.Composite(
        state=ocp.args.StandardSave(_fields(host)),
        record=ocp.args.JsonSave(
          {"digests": digests(host), "record": dict(record)}
        ),
      ),
      force=True,
    )

  def restore(
    self, like: TrainState
  ) -> tuple[TrainState, Mapping[str, Any]] | None:
    """Restores the newest step that is intact.

    Each corrupt one on the way is told in one line on standard error.

    Args:
      like: structure, shapes and dtypes to expect; its values are not read.

    Returns:
      state (NumPy leaves) and its record; None without any checkpoint.

    Raises:
      ConfigError: there are checkpoints, and not one of them is intact.
    """
    steps = sorted(self._manager.all_steps(), reverse=True)
    for step in steps:
      try:
        return self._restore_step(step, like)
      # Orbax and its formats raise exceptions of any type.
      except Exception as error:
        reason = str(error).strip().split("\n")[0][:200]
        print(
          f"checkpoint {step} is corrupt and not used: {reason}",
          file=sys.stderr,
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
    template = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), like)
    restored = self._manager.restore(
      step,
      args=ocp.args.Composite(
        state=ocp.args.StandardRestore(_fields(template)),
        record=ocp.args.JsonRestore(),
      ),
    )
    state = TrainState(**restored["state"])
    saved, found = restored["record"]["digests"], digests(state)
    for name in sorted(saved.keys() | found.keys()):
      if saved.get(name) != found.get(name):
        raise ValueError(f"digest of {name} is not the one saved")
    for (path, leaf), (_, expected) in zip(
      jax.tree.leaves_with_path(state),
      jax.tree.leaves_with_path(like),
      strict=True,
    ):
      if leaf.shape != expected.shape:
        raise ValueError(
          f"{jax.tree_util.keystr(path)} has shape {leaf.shape}, expected "
          f"{expected.shape}"
        )
    return state, restored["record"]["record"]

  def close(self) -> None:
    """Waits until everything is written."""
    self._manager.wait_until_finished()
    self._manager.close()


def _fields(state: TrainState) -> dict[str, Any]:
  """What is on disk; a model without batch norm has no statistics there."""
  fields = state._asdict()
  if state.batch_stats is None:
    fields.pop("batch_stats")
  return fields

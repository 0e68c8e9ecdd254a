"""Imports naive references of flash-linear-attention for make_fla.py."""

import importlib.util
import itertools
import pathlib
from typing import Any

import numpy as np
import torch

OPS = pathlib.Path(importlib.util.find_spec("fla").origin).parent / "ops"
T, N, H, V = 29, 2, 4, 3
CUTS = (0, 5, 17, T)
"""Starts of segments; peers without segments are called once per segment."""

SEGMENT_IDS = np.searchsorted(CUTS, np.arange(T), side="right")[None] - 1


def peer(name: str) -> Any:
  """Imports fla/ops/`name`/naive.py."""
  path = OPS / name / "naive.py"
  spec = importlib.util.spec_from_file_location(name.replace("/", "_"), path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def heads_first(*tensors: torch.Tensor) -> list[torch.Tensor]:
  """Swaps the axes T and N of `[B, T, N, …]` or `[B, N, T, …]`."""
  return [x.transpose(1, 2) for x in tensors]


def segmented(call):
  """Wraps `call` to run once per segment, without an initial state."""

  def run(segment_ids=None, **given):
    del segment_ids
    parts = [
      call(**{n: x[:, a:b] for n, x in given.items()})["out"]
      for a, b in itertools.pairwise(CUTS)
    ]
    return {"out": torch.cat(parts, 1)}

  return run


PACKED = {
  "fixed": {"segment_ids": np.array([0, 2, 3])[SEGMENT_IDS]},
  "options": {"num_segments": 4, "return_state": True},
}
"""Four segments with their own states; one segment is empty."""


def packed(call):
  """Wraps `call` to run once per segment, with the segment's states."""

  def run(segment_ids=None, initial_state=None, **given):
    del segment_ids
    outs, states = [], list(initial_state.unbind(1))
    for (a, b), i in zip(itertools.pairwise(CUTS), (0, 2, 3), strict=True):
      part = {
        n: x if n in ("regularizer", "bonus") else x[:, a:b]
        for n, x in given.items()
      }
      outputs = call(**part, initial_state=states[i])
      outs.append(outputs["out"])
      states[i] = outputs["state"]
    return {"out": torch.cat(outs, 1), "state": torch.stack(states, 1)}

  return run


def states_of_segments(draw, given):
  """Adds an initial state per segment to `given`."""
  state = given["initial_state"]
  more = [draw.normal(*state.shape) for _ in range(3)]
  return given | {"initial_state": np.stack([state, *more], 1)}


def add_with_states(file, name, call, draw, given, *, witness, **facts):
  """Adds a case with a state, and one with a state per segment."""
  state = {"options": {"return_state": True}}
  file.add(name, call, witness=witness, given=given, **state, **facts)
  file.add(
    f"{name}_packed",
    packed(call),
    witness=f"{witness}, states of segments",
    given=states_of_segments(draw, given),
    **PACKED,
    **facts,
  )


def results(pair) -> dict[str, torch.Tensor]:
  """Names the results of a function that returns (out, state)."""
  return {"out": pair[0], "state": pair[1]}

"""Folders of weights in the format of Hugging Face; nothing is ever unpickled.

A folder has `config.json` and its tensors in `model.safetensors`, or in several
files that `model.safetensors.index.json` names.
"""

from collections.abc import Callable, Mapping
import functools
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import safetensors
from safetensors.numpy import save

from settings import atomic, json_text

CONFIG = "config.json"
TENSORS = "model.safetensors"
INDEX = "model.safetensors.index.json"

_DTYPES = {
  "F64": np.dtype(np.float64),
  "F32": np.dtype(np.float32),
  "F16": np.dtype(np.float16),
  "BF16": np.dtype(jnp.bfloat16),
  # Buffers may be integers, as a mechanism's constants; no weight is.
  "U32": np.dtype(np.uint32),
  "I64": np.dtype(np.int64),
  "I32": np.dtype(np.int32),
  "I16": np.dtype(np.int16),
  "I8": np.dtype(np.int8),
  "U8": np.dtype(np.uint8),
  "BOOL": np.dtype(np.bool_),
}

_POINTER = b"version https://git-lfs"
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")


class Tensor(NamedTuple):
  """An array and the file that has it.

  Attributes:
    read: returns the array, which is in memory only while the caller keeps it.
    file: the file.
  """

  read: Callable[[], np.ndarray]
  file: Path


Tensors = Mapping[str, Tensor]
"""Name of a tensor -> the tensor."""


def has_tensors(folder: Path) -> bool:
  """Whether a folder has weights, which a run does not have."""
  return any((folder / name).exists() for name in (TENSORS, INDEX))


def read_config(folder: Path) -> dict[str, Any]:
  """Reads `config.json`.

  Raises:
    FileNotFoundError: the folder or the file does not exist.
    ValueError: the file does not hold a JSON object.
  """
  if not folder.is_dir():
    raise FileNotFoundError(f"{folder}: no such folder")
  return _read_json(folder / CONFIG)


def read_generation_config(folder: Path) -> dict[str, Any]:
  """Reads `generation_config.json`; empty if the folder has none.

  Raises:
    ValueError: the file does not hold a JSON object.
  """
  path = folder / "generation_config.json"
  return _read_json(path) if path.exists() else {}


def read_tensors(folder: Path) -> Tensors:
  """Returns all tensors of a folder, which are read one at a time.

  Raises:
    FileNotFoundError: there is no file of tensors, or a shard is missing.
    ValueError: a file is truncated, empty or not in the format, or the index and the
      shards disagree.
  """
  if (folder / INDEX).exists():
    return _read_shards(folder)
  path = folder / TENSORS
  if not path.exists():
    pickle = next((p for p in _PICKLES if (folder / p).exists()), None)
    if pickle:
      raise ValueError(
        f"{folder / pickle}: is a pickle, which can run any code when it is "
        f"loaded; if you trust it, convert it to {TENSORS}"
      )
    raise FileNotFoundError(f"{path}: no such file, and no {INDEX} either")
  return _read_file(path)


def concatenate(tensors: Tensors) -> np.ndarray:
  """Concatenates tensors along their first axis.

  Raises:
    ValueError: a tensor differs from the first one along another axis.
  """
  arrays = {name: tensor.read() for name, tensor in tensors.items()}
  rest = next(iter(arrays.values())).shape[1:]
  for name, x in arrays.items():
    if not x.ndim or x.shape[1:] != rest:
      raise ValueError(
        f"{tensors[name].file}: {name}: expected rows of shape {rest}, got shape "
        f"{x.shape}"
      )
  return np.concatenate([*arrays.values()])


def write(
  folder: Path, config: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> None:
  """Writes `config.json` and `model.safetensors`, and creates the folder.

  Removes the index of shards that the folder had, because `read_tensors` would read
  those. In the hub's cache, files are links, whose targets do not change.
  """
  folder.mkdir(parents=True, exist_ok=True)
  content = save(
    # (`ascontiguousarray` would add an axis to a scalar.)
    {name: np.asarray(array, order="C") for name, array in arrays.items()},
    metadata={"format": "pt"},  # transformers rejects a file without it.
  )
  text = json.dumps(config, indent=2, sort_keys=True) + "\n"
  # A link is replaced, and not the file behind it.
  atomic.write_bytes(folder / TENSORS, content)
  (folder / INDEX).unlink(missing_ok=True)
  atomic.write_text(folder / CONFIG, text)


def _read_shards(folder: Path) -> Tensors:
  path = folder / INDEX
  weight_map = _read_json(path).get("weight_map")
  if not isinstance(weight_map, dict) or not all(
    isinstance(shard, str) for shard in weight_map.values()
  ):
    raise ValueError(f"{path}: expected 'weight_map', tensor -> file")
  tensors: dict[str, Tensor] = {}
  for shard in sorted(set(weight_map.values())):
    if Path(shard).name != shard:
      raise ValueError(f"{path}: expected files of this folder, got {shard!r}")
    part = _read_file(folder / shard)
    for name in part:
      if weight_map.get(name) != shard:
        raise ValueError(f"{folder / shard}: {name} is not in {INDEX}")
    tensors |= part
  for name, shard in weight_map.items():
    if name not in tensors:
      raise ValueError(f"{folder / shard}: {name} is missing; {INDEX} names it")
  return tensors


def _read_file(path: Path) -> dict[str, Tensor]:
  _check_location(path)
  if not path.stat().st_size:
    raise ValueError(f"{path}: the file is empty")
  try:
    with safetensors.safe_open(path, "np"):
      pass  # It checks the header.
  except safetensors.SafetensorError as error:
    raise ValueError(
      f"{path}: not a complete safetensors file ({error})"
    ) from None
  with path.open("rb") as file:
    length = int.from_bytes(file.read(8), "little")
    entries = json.loads(file.read(length))
  entries.pop("__metadata__", None)
  tensors = {}
  for name, tensor in entries.items():
    dtype = _DTYPES.get(tensor["dtype"])
    if dtype is None:
      raise ValueError(
        f"{path}: {name}: expected float32, bfloat16, float16 or float64, got "
        f"{tensor['dtype']}"
      )
    start, end = (8 + length + x for x in tensor["data_offsets"])
    read_bytes = functools.partial(
      np.fromfile, path, np.uint8, count=end - start, offset=start
    )
    read = functools.partial(
      _as_array, read_bytes, dtype, tuple(tensor["shape"])
    )
    tensors[name] = Tensor(read, path)
  return tensors


def _as_array(
  read: Callable[[], np.ndarray], dtype: np.dtype, shape: tuple[int, ...]
) -> np.ndarray:
  """Returns the bytes from `read` as an array."""
  return read().view(dtype).reshape(shape)


def _check_location(path: Path) -> None:
  """Raises an error if a file does not exist or is a link out of its folder.

  In the hub's cache, files are links to `blobs`, next to the folder of snapshots.
  """
  if not path.exists():
    raise FileNotFoundError(f"{path}: no such file")
  folder, real = path.parent.resolve(), path.resolve()
  if not {folder, folder.parent.parent / "blobs"} & {*real.parents}:
    raise ValueError(
      f"{path}: is a link to {real}, outside the folder; copy the file into the folder"
    )
  with path.open("rb") as file:
    if file.read(len(_POINTER)) == _POINTER:
      raise ValueError(
        f"{path}: is a Git LFS pointer, not the file; run `git lfs pull`"
      )


def _number(content: dict[str, Any]) -> Any:
  """Decodes infinity, which transformers 5 writes as `{"__float__": "Infinity"}`."""
  return math.inf if content == {"__float__": "Infinity"} else content


def _read_json(path: Path) -> dict[str, Any]:
  _check_location(path)
  try:
    text = path.read_text(encoding="utf-8")
    content = json_text.loads(text, object_hook=_number)
  except ValueError as error:
    raise ValueError(f"{path}: not JSON ({error})") from None
  if not isinstance(content, dict):
    raise ValueError(f"{path}: expected an object with named values")
  return content

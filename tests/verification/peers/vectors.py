"""Reads and writes test vectors that other programs, the peers, computed.

A file `<peer>.npz` has the cases of one peer. A case is a call of one of our functions
or mechanisms. It has the arguments, with our names and layouts, and the peer's results:

    given/<argument>      floating-point arguments, with gradients
    fixed/<argument>      masks, indices, segment ids
    result/<name>         out, and state or lse if the peer returns one
    cotangent/<name>      one per result
    gradient/<argument>   of Σ result · cotangent

An argument `params/<name>` is a trainable variable of a mechanism. To keep files small,
the numbers of all arrays are concatenated: multiples of 1/16, such as the arguments, as
integers; the others, rounded to `BITS`, as bytes, with the highest byte of all numbers
first. `index` is JSON: the peer's name, version and date, the facts of each case, and
the shape and dtype of each array.

Scripts run in the environments of the peers, so this file needs only NumPy.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import datetime
import json
import pathlib
from typing import Any, NamedTuple
import zlib

import numpy as np

HERE = pathlib.Path(__file__).parent

FOLDERS = ("given", "fixed", "result", "cotangent", "gradient")

BITS = {"gradient": 18}
"""Significant bits of the arrays of a folder; others keep all 24."""

Arrays = Mapping[str, np.ndarray]
Call = Callable[..., Mapping[str, Any]]


class Case(NamedTuple):
  """One call, and the results of a peer."""

  name: str
  peer: str
  version: str
  date: str
  witness: str
  """The peer's function."""
  mechanism: str
  function: str
  """The name of a function in `attention`, or of a factory."""
  options: dict[str, Any]
  """Options of the function or the factory."""
  call: dict[str, Any]
  """Options of the mechanism's `apply`."""
  definition: bool
  """Whether `attention.definitions` supports the call."""
  given: Arrays
  fixed: Arrays
  result: Arrays
  cotangent: Arrays
  gradient: Arrays

  def __repr__(self) -> str:
    return f"{self.mechanism}-{self.peer}-{self.name}"


class Draw:
  """Random arrays that depend only on the name of a case."""

  def __init__(self, name: str):
    self._draw = np.random.RandomState(zlib.crc32(name.encode()) & 0x7FFFFFFF)

  def normal(self, *shape: int, scale: float = 1.0) -> np.ndarray:
    """Returns normal numbers, rounded to multiples of 1/16."""
    return sixteenths(scale * self._draw.standard_normal(shape))

  def uniform(self, low: float, high: float, *shape: int) -> np.ndarray:
    """Returns uniform numbers, rounded to multiples of 1/16."""
    return sixteenths(self._draw.uniform(low, high, shape))

  def decays(self, *shape: int) -> np.ndarray:
    """Returns log decays `[B, T, …]` near 0, with two of −30 in the last head."""
    x = -np.abs(self.normal(*shape, scale=0.4))
    x[:, (shape[1] // 3, shape[1] - 5), -1] = -30.0
    return x

  def qkv(
    self, length: int = 29, heads: int = 2, kv_heads: int | None = None, value=3
  ) -> dict[str, np.ndarray]:
    """Returns queries and keys of width 4, and values of width `value`."""
    kv_heads = kv_heads or heads
    return {
      "query": self.normal(1, length, heads, 4),
      "key": self.normal(1, length, kv_heads, 4),
      "value": self.normal(1, length, kv_heads, value),
    }


def sixteenths(x: np.ndarray) -> np.ndarray:
  """Rounds to multiples of 1/16."""
  return (np.round(np.asarray(x) * 16) / 16).astype(np.float32)


def unit(x: np.ndarray) -> np.ndarray:
  """Scales vectors to a length of about 1."""
  return sixteenths(x / np.sqrt(np.sum(x**2, axis=-1, keepdims=True) + 1e-6))


def cotangents_of(
  results: Mapping[str, Any], draw: Draw, constant: Sequence[str]
) -> dict[str, np.ndarray]:
  """Draws a cotangent per result; it is 0 for results without gradients."""
  drawn = {n: draw.normal(*x.shape) for n, x in results.items()}
  return {n: 0 * x if n in constant else x for n, x in drawn.items()}


def torch_results(
  call: Call, given: Arrays, fixed: Arrays, draw: Draw, constant: Sequence[str]
) -> tuple[Arrays, Arrays, Arrays]:
  """Returns results of a torch function, cotangents and gradients."""
  import torch

  tensors = {n: torch.tensor(x, requires_grad=True) for n, x in given.items()}
  others = {n: torch.tensor(x) for n, x in fixed.items()}
  results = dict(call(**tensors, **others))
  cotangents = cotangents_of(results, draw, constant)
  total = sum(
    (x * torch.tensor(cotangents[n])).sum() for n, x in results.items()
  )
  grads = torch.autograd.grad(total, list(tensors.values()), allow_unused=True)
  gradients = {
    n: np.zeros_like(given[n]) if x is None else x.numpy()
    for n, x in zip(tensors, grads, strict=True)
  }
  return (
    {n: x.detach().numpy() for n, x in results.items()},
    cotangents,
    gradients,
  )


def jax_results(
  call: Call, given: Arrays, fixed: Arrays, draw: Draw, constant: Sequence[str]
) -> tuple[Arrays, Arrays, Arrays]:
  """Returns results of a JAX function, cotangents and gradients."""
  import jax

  with jax.default_matmul_precision("highest"):
    results, pullback = jax.vjp(lambda x: dict(call(**x, **fixed)), dict(given))
    cotangents = cotangents_of(results, draw, constant)
    (gradients,) = pullback(cotangents)
  return results, cotangents, gradients


class Vectors:
  """The cases of one peer, which `write` saves in one file."""

  def __init__(self, peer: str, version: str, differentiate=torch_results):
    today = datetime.date.today().isoformat()
    self._index: dict[str, Any] = {"peer": peer, "version": version}
    self._index |= {"date": today, "cases": {}}
    self._whole: list[np.ndarray] = []
    self._floats: list[np.ndarray] = []
    self._differentiate = differentiate

  def add(
    self,
    name: str,
    peer: Call,
    *,
    witness: str,
    mechanism: str,
    given: Arrays,
    function: str = "",
    fixed: Arrays | None = None,
    options: Mapping[str, Any] | None = None,
    call: Mapping[str, Any] | None = None,
    definition: bool = True,
    constant: Sequence[str] = (),
  ) -> Arrays:
    """Adds a case, whose results by name are `peer(**given, **fixed)`.

    Results named in `constant` have no gradients. `function` defaults to the
    mechanism's function, such as `mesa_attention`.
    """
    assert name not in self._index["cases"], name
    given = {n: np.asarray(x, np.float32) for n, x in given.items()}
    fixed = {n: np.asarray(x) for n, x in (fixed or {}).items()}
    draw = Draw(f"{name} cotangent")
    results, *rest = self._differentiate(peer, given, fixed, draw, constant)
    folders = dict(zip(FOLDERS, (given, fixed, results, *rest), strict=True))
    arrays = {}
    for folder, members in folders.items():
      for key, x in members.items():
        x = np.asarray(x)
        assert x.dtype != np.float64, (name, folder, key)
        assert np.isfinite(x).all(), (name, folder, key)
        whole = np.array_equal(np.round(x * 16), x * 16) and abs(x).max() < 2000
        if whole:
          self._whole.append((x * 16).astype(np.int16).ravel())
        else:
          self._floats.append(round_to_bits(x, BITS.get(folder, 24)).ravel())
        shape = ",".join(map(str, x.shape))
        arrays[f"{folder}/{key}"] = f"{x.dtype} {shape} {int(whole)}"
    self._index["cases"][name] = {
      "witness": witness,
      "mechanism": mechanism,
      "function": function or f"{mechanism}_attention",
      "options": dict(options or {}),
      "call": dict(call or {}),
      "definition": definition,
      "arrays": arrays,
    }
    return results

  def write(self, *parts: Callable[["Vectors"], None]) -> None:
    """Writes `<peer>.npz` beside this file, after each part has added its cases."""
    for add in parts:
      add(self)
    path = HERE / f"{self._index['peer']}.npz"
    floats = np.concatenate(self._floats).astype("<f4")
    np.savez_compressed(
      path,
      index=np.array(json.dumps(self._index)),
      whole=np.concatenate(self._whole),
      floats=floats.view(np.uint8).reshape(-1, 4)[:, ::-1].T,
    )
    count = len(self._index["cases"])
    print(path.name, count, "cases", path.stat().st_size // 1024, "KiB")


def round_to_bits(x: np.ndarray, bits: int) -> np.ndarray:
  """Rounds to `bits` significant bits."""
  fraction, exponent = np.frexp(x.astype(np.float64))
  rounded = np.round(fraction * 2.0**bits) / 2.0**bits
  return np.ldexp(rounded, exponent).astype(np.float32)


def read() -> Iterator[Case]:
  """Yields every case of every file; cases of `dense` also serve `flash`."""
  for path in sorted(HERE.glob("*.npz")):
    with np.load(path) as file:
      index, whole = json.loads(str(file["index"])), file["whole"]
      numbers = np.ascontiguousarray(file["floats"].T[:, ::-1]).view("<f4")
    stores = [numbers.ravel(), whole / np.float32(16)]
    cases = index.pop("cases")
    for name, facts in cases.items():
      folders: dict[str, Any] = {folder: {} for folder in FOLDERS}
      for key, words in facts.pop("arrays").items():
        dtype, shape, store = words.split(" ")
        shape = [int(size) for size in shape.split(",") if size]
        size = int(np.prod(shape, dtype=int))
        x, stores[int(store)] = np.split(stores[int(store)], [size])
        folder, argument = key.split("/", 1)
        folders[folder][argument] = x.reshape(shape).astype(dtype)
      case = Case(name=name, **index, **facts, **folders)
      yield case
      if case.mechanism == "dense":
        # Both functions have the same arguments.
        yield case._replace(
          name=f"{name}_flash", mechanism="flash", function="flash_attention"
        )

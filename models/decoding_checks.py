"""Checks of the arguments of `generate`."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array
import numpy as np

from attention.checks import check_at_least, check_number
from models.config import PAD_ID
from models.kind import Model
from models.sizes import check_id_mask, check_ids, known_ids

METHODS = ("greedy", "sample", "beam")


def check_model(model: Model, source: Any, source_mask: Any) -> None:
  """Raises ValueError unless a model can generate, with or without a source."""
  config = model.config
  if config.layout == "encoder" or not hasattr(model, "decode"):
    raise ValueError(
      f"model: kind '{config.kind}' cannot generate; use one with a decoder"
    )
  for decoder in config.attentions.get("decoder_attention", ()):
    if "decode" not in decoder.build().supports:
      raise ValueError(
        f"decoder_attention: {decoder.name} cannot decode token by token; "
        "generate with a mechanism whose `supports` has 'decode'"
      )
  if (source is None) != (config.layout == "decoder"):
    raise ValueError(
      f"source: kind '{config.kind}' "
      + ("has no encoder to read it" if source is not None else "needs it")
    )
  if source is None and source_mask is not None:
    raise ValueError("source_mask: expected None without a source, got one")


def check_method(
  method: str,
  vocab_size: int,
  *,
  temperature: float,
  top_k: int | None,
  beam_size: int,
  length_penalty: float,
  rng: Any,
) -> None:
  """Raises ValueError for an unknown method, or an option of another method."""
  if method not in METHODS:
    raise ValueError(
      f"method: expected one of {', '.join(METHODS)}, got '{method}'"
    )
  options = {
    "temperature": (temperature, 1.0, "sample"),
    "top_k": (top_k, None, "sample"),
    "beam_size": (beam_size, 4, "beam"),
    "length_penalty": (length_penalty, 0.6, "beam"),
  }
  for name, (value, default, reader) in options.items():
    if value != default and method != reader:
      raise ValueError(
        f"{name}: method '{method}' does not read it; use method '{reader}' "
        f"or leave it {default}, got {value}"
      )
  check_number("temperature", temperature)
  if temperature <= 0.0:
    raise ValueError(
      f"temperature: expected a finite number above 0, got {temperature}"
    )
  if top_k is not None:
    check_at_least("top_k", top_k, 1)
    if top_k > vocab_size:
      raise ValueError(f"top_k: expected 1 to {vocab_size}, got {top_k}")
  check_at_least("beam_size", beam_size, 1)
  check_number("length_penalty", length_penalty)
  if length_penalty < 0.0:
    raise ValueError(
      f"length_penalty: expected 0 or more, got {length_penalty}"
    )
  if method == "sample":
    _check_key(rng)


def _check_key(rng: Any) -> None:
  """Raises ValueError unless `rng` is one random key."""
  if rng is None:
    raise ValueError("rng: method 'sample' needs a key, got None")
  dtype = getattr(rng, "dtype", None)
  is_typed = dtype and jnp.issubdtype(dtype, jax.dtypes.prng_key)
  if dtype is None or rng.ndim != (0 if is_typed else 1):
    raise ValueError(
      f"rng: expected one key, such as jax.random.key(0), got {np.shape(rng)} "
      f"{dtype or type(rng).__name__}"
    )


def check_int(name: str, value: Any) -> None:
  """Raises ValueError unless a value is an int."""
  if not isinstance(value, int | np.integer) or isinstance(value, bool):
    raise ValueError(f"{name}: expected an int, got {value!r}")


def eos_ids(eos_id: Any, vocab_size: int) -> tuple[int, ...]:
  """Checks the ids that end a sequence, of which the model must have one."""
  ids = np.asarray(eos_id)
  is_int = ids.ndim < 2 and np.issubdtype(ids.dtype, np.integer)
  if not is_int or not ((ids >= -1) & (ids < vocab_size)).any():
    raise ValueError(
      f"eos_id: expected one or several ids from 0 to {vocab_size - 1}, or -1 for "
      f"none, got {eos_id!r}"
    )
  return tuple(np.atleast_1d(ids).tolist())


def source_ids(model: Model, source: Any, source_mask: Any) -> tuple[Any, Any]:
  """Checks the ids of the source, and their mask."""
  size = getattr(model, "source_vocab_size", None)
  if source is None or not size:
    return source, source_mask
  source = source if hasattr(source, "dtype") else np.asarray(source)
  check_ids("source", source)
  unmasked = source != PAD_ID
  if source_mask is not None:
    unmasked = source_mask = check_id_mask("source_mask", source_mask, source)
  return known_ids("source", source, size, unmasked), source_mask


def prompt_ids(
  source: Array | None,
  prompt: Array | None,
  prompt_length: Array | None,
  bos_id: int,
  vocab_size: int | None,
) -> tuple[np.ndarray, np.ndarray]:
  """Checks the prompt `[B, P]` and its lengths `[B]`, and fills in defaults.

  Without `vocab_size`, ids are passed to the model without checks.
  """
  if prompt is None:
    if prompt_length is not None:
      raise ValueError("prompt_length: expected a prompt with it, got None")
    check_int("bos_id", bos_id)
    if vocab_size is not None and not 0 <= bos_id < vocab_size:
      raise ValueError(f"bos_id: expected 0 to {vocab_size - 1}, got {bos_id}")
    ids = np.full((1 if source is None else len(source), 1), bos_id, np.int32)
  else:
    ids = np.asarray(prompt)
    check_ids("prompt", ids)
  batch, longest = ids.shape
  if source is not None and len(source) != batch:
    raise ValueError(
      f"prompt: expected {len(source)} rows, one per source, got {batch}"
    )
  lengths = np.full((batch,), longest, np.int32)
  if prompt_length is not None:
    lengths = np.asarray(prompt_length)
  is_int = np.issubdtype(lengths.dtype, np.integer)
  if (
    not is_int
    or lengths.shape != (batch,)
    or lengths.min() < 1
    or lengths.max() > longest
  ):
    raise ValueError(
      f"prompt_length: expected {batch} lengths of 1 to {longest}, got "
      f"{lengths.tolist()}"
    )
  if vocab_size is not None:
    unmasked = np.arange(longest)[None] < lengths[:, None]
    ids = known_ids("prompt", ids, vocab_size, unmasked)
  return np.asarray(ids, np.int32), lengths.astype(np.int32)

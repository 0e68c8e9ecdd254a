"""Position encodings for attention: T5, ALiBi, DeBERTa's buckets, rotary positions.

T5 and ALiBi add a bias to the logits that depends only on the distance of key from
query. Both are tables `[N, 2L+1]` for distances -L … L; larger distances use the outer
entries. Attention functions take them as `relative_bias`, without a T×S array. Their
`relative_keys` and `relative_queries` are the tables of Shaw et al., Transformer-XL and
DeBERTa (`attention.softmax.logits`), which are trained or projected from embeddings.
For Transformer-XL, the query is q + u and the bias scale · (v − u) · r. Rotary
positions rotate queries and keys before the mechanism.
"""

from collections.abc import Mapping
import math
import types
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
import numpy as np

from attention import checks
from attention.platform import backend


def t5_buckets(
  max_distance: int = 128, *, num_buckets: int = 32, is_causal: bool = False
) -> Int[np.ndarray, "D"]:
  """Returns T5's bucket of every distance s − t from -L to L, L = `max_distance`.

  Each small distance has its own bucket. Larger distances share buckets, spaced
  logarithmically up to L; the last bucket also contains all distances beyond L. Later
  keys have their own half of the buckets, or bucket 0 if causal, as in T5's code.

  Args:
    max_distance: L.
    num_buckets: the number for both directions together.
    is_causal: whether all buckets are for distances s − t ≤ 0.

  Returns:
    `[2L+1]` integers in [0, num_buckets).

  Raises:
    ValueError: `max_distance` is so small that no distances share a bucket.

  Paper: T5, section 2.1, arXiv:1910.10683, and its code's
  `_relative_position_bucket`.
  """
  checks.check_at_least("max_distance", max_distance, 1)
  checks.check_at_least("num_buckets", num_buckets, 1)
  checks.check_flag("is_causal", is_causal)
  per_direction = num_buckets if is_causal else num_buckets // 2
  exact = per_direction // 2
  if exact < 1 or max_distance <= exact:
    raise ValueError(
      f"max_distance: expected more than {exact}, half of the "
      f"{per_direction} buckets of a direction, and num_buckets of at least "
      f"{2 if is_causal else 4}, got {max_distance} and {num_buckets}"
    )
  distance = np.arange(-max_distance, max_distance + 1)
  size = np.maximum(-distance, 0) if is_causal else np.abs(distance)
  ratio = np.log(np.maximum(size, 1) / exact)
  ratio /= math.log(max_distance / exact)
  # T5 adds float32's epsilon, so that exact powers do not land one bucket too low.
  epsilon = np.finfo(np.float32).eps
  shared = exact + ((ratio + epsilon) * (per_direction - exact)).astype(int)
  bucket = np.where(size < exact, size, np.minimum(shared, per_direction - 1))
  return bucket if is_causal else bucket + per_direction * (distance > 0)


def t5_bias(
  embedding: Float[Array, "R N"],
  max_distance: int = 128,
  *,
  is_causal: bool = False,
) -> Float[Array, "N D"]:
  """Returns T5's relative bias: row `bucket(s − t)` of a trained embedding.

  Args:
    embedding: `[num_buckets, N]`; all layers of a stack of T5 share one.
    max_distance: L; larger distances share its bucket.
    is_causal: as in `t5_buckets`.

  Returns:
    `[N, 2L+1]` in the dtype of `embedding`, for `relative_bias`. T5's logits are not
    scaled: pass `scale=1.0` as well.

  Raises:
    ValueError: as in `t5_buckets`, or `embedding` does not have two axes.
  """
  if np.ndim(embedding) != 2:
    raise ValueError(
      f"embedding: expected [num_buckets, N], got shape {np.shape(embedding)}"
    )
  buckets = t5_buckets(
    max_distance, num_buckets=embedding.shape[0], is_causal=is_causal
  )
  return embedding[buckets].T


def deberta_buckets(
  longest: int, *, max_distance: int = 512, num_buckets: int | None = 256
) -> Int[np.ndarray, "D"]:
  """Returns the row of DeBERTa's position embeddings for every distance s − t.

    δ(t, s) = clip(bucket(t − s) + k, 0, 2k − 1)

  Without buckets, bucket(d) = d and k = `max_distance` (equation 3). With B buckets,
  k = B, bucket(d) = d for |d| ≤ m = ⌊B/2⌋, and larger distances share the buckets

    sign(d) · (m + ⌈(m − 1) · log(|d|/m) / log((max_distance − 1)/m)⌉)

  Args:
    longest: the longest distance |s − t|.
    max_distance: this and all larger distances share a row.
    num_buckets: B, the number per direction; None means no buckets.

  Returns:
    `[2 · longest + 1]` integers in [0, 2k).

  Raises:
    ValueError: an argument is not an int of at least 1 (2 for B), or no distances share
      a bucket.

  Papers: DeBERTa, section 3.1, arXiv:2006.03654; the buckets are those of the code of
  DeBERTa V2.
  """
  checks.check_at_least("longest", longest, 0)
  checks.check_at_least("max_distance", max_distance, 1)
  distance = np.arange(longest, -longest - 1, -1)
  if num_buckets is None:
    return np.clip(distance + max_distance, 0, 2 * max_distance - 1)
  checks.check_at_least("num_buckets", num_buckets, 2)
  middle = num_buckets // 2
  if max_distance < middle + 2:
    raise ValueError(
      f"max_distance: expected at least {middle + 2} with {num_buckets} buckets, "
      f"got {max_distance}"
    )
  size = np.abs(distance)
  # As in transformers, which rounds to float32.
  ratio = np.float32(np.maximum(size, middle) / middle)
  ratio = np.log(ratio) / np.log(np.float32((max_distance - 1) / middle))
  shared = middle + np.ceil(ratio * np.float32(middle - 1))
  bucket = np.where(size <= middle, distance, np.sign(distance) * shared)
  return np.clip(bucket.astype(int) + num_buckets, 0, 2 * num_buckets - 1)


def alibi_slopes(num_heads: int) -> Float[np.ndarray, "N"]:
  """Returns ALiBi's slopes, 2^(-8i/N) for i = 1 … N if N is a power of 2.

  For any other N, they are the slopes of the next lower power of 2, and then every
  other slope of the next higher one, as in the paper's code.

  Raises:
    ValueError: `num_heads` is not an int of at least 1.

  Paper: Train short, test long, section 3, arXiv:2108.12409.
  """
  checks.check_at_least("num_heads", num_heads, 1)
  power = 2 ** math.floor(math.log2(num_heads))
  slopes = 2.0 ** (-8.0 * np.arange(1, power + 1) / power)
  others = 2.0 ** (-4.0 * np.arange(1, 2 * power + 1, 2) / power)
  return np.concatenate([slopes, others])[:num_heads]


def alibi_bias(num_heads: int, max_length: int) -> Float[Array, "N D"]:
  """Returns ALiBi's bias, −slope · |s − t| for every distance in a sequence.

  Args:
    num_heads: N.
    max_length: the longest sequence; L = max_length − 1.

  Returns:
    `[N, 2L+1]` float32, for `relative_bias`, in both directions. A causal call, as in
    the paper, uses only the entries s ≤ t.

  Raises:
    ValueError: `num_heads` or `max_length` is not an int of at least 1.
  """
  checks.check_at_least("max_length", max_length, 1)
  distance = np.abs(np.arange(1 - max_length, max_length))
  table = -alibi_slopes(num_heads)[:, None] * distance[None, :]
  return jnp.asarray(table, jnp.float32)


def rotary_frequencies(
  features: int,
  theta: float = 10000.0,
  scaling: Mapping[str, Any] | None = None,
  *,
  length: int | Int[Array, ""] = 1,
) -> tuple[Float[Array | np.ndarray, "half"], float]:
  """Returns the frequencies of rotary positions: the angle of each pair per position.

  Without scaling they are ω_i = θ^(-2i/F) for F features. A model trained up to a
  length L uses other frequencies for longer texts. `scaling` selects them with the keys
  of `config.json`, 'rope_type' and the options of that type:

      linear   ω_i / factor                                           (Chen et al.)
      dynamic  ω_i of θ·(factor·n/L − factor + 1)^(F/(F−2)), where n is the
               larger of `length` and L = `max_position_embeddings`      (NTK, bloc97)
      llama3   (1 − s)·ω_i/factor + s·ω_i, where s grows from 0 to 1 between
               `low_freq_factor` and `high_freq_factor` rotations of pair i within
               L = `original_max_position_embeddings`                 (Llama 3.1)
      yarn     likewise, where s falls from 1 to 0 linearly in i between the pairs
               that rotate `beta_fast=32` and `beta_slow=1` times within L, whole
               numbers unless `truncate` is False                    (Peng et al.)

  YaRN also multiplies queries and keys by m(1), or by m(`mscale`) /
  m(`mscale_all_dim`), where m(a) = 1 + 0.1·a·ln(factor), or by `attention_factor`.
  Its ramp is that of its authors' code; the paper's is linear in the rotations.

  Args:
    features: F, even.
    theta: θ.
    scaling: 'rope_type' and its options; None means {'rope_type': 'default'}.
    length: the length of the sequence, which only 'dynamic' uses; it may be traced.

  Returns:
    `[F/2]` float32, in NumPy unless `length` is traced, and the factor by which to
    multiply the rotated features.

  Raises:
    ValueError: a type or option is unknown or missing, a value is not a number above
      0, F is odd, or θ of 'yarn' is at most 1. LongRoPE, which has a factor for every
      pair, is not supported.

  Papers: RoFormer, arXiv:2104.09864; position interpolation, arXiv:2306.15595;
  the code of Llama 3, whose section 3.4.2 is on long contexts, arXiv:2407.21783; YaRN,
  section 3, arXiv:2309.00071.
  """
  checks.check_at_least("features", features, 2)
  if features % 2:
    raise ValueError(f"features: expected an even number, got {features}")
  checks.check_number("theta", theta)
  if theta <= 0.0:
    raise ValueError(f"theta: expected a number above 0, got {theta}")
  options = {"rope_type": "default", **(scaling or {})}
  rope_type = options.pop("rope_type")
  if not isinstance(rope_type, str) or rope_type not in _SCALINGS:
    raise ValueError(
      f"rope_type: expected one of {', '.join(_SCALINGS)}, got {rope_type!r}"
    )
  scaled_frequencies, required, optional = _SCALINGS[rope_type]
  for name, value in options.items():
    if name not in required + optional:
      known = ", ".join(required + optional) or "no option"
      raise ValueError(f"{name}: {rope_type!r} has {known}, got {value!r}")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if name == "truncate":
      if not isinstance(value, bool):
        raise ValueError(f"truncate: expected true or false, got {value!r}")
    elif not (is_number and 0.0 < value < math.inf):
      raise ValueError(f"{name}: expected a number above 0, got {value!r}")
  for name in required:
    if name not in options:
      raise ValueError(f"{name}: missing; {rope_type!r} needs it")
  frequencies, factor = scaled_frequencies(theta, features, length, options)
  # Computed in float64 and rounded once.
  return frequencies.astype(np.float32), factor


def _plain(theta, features, length=1, options=None):
  del length, options
  return theta ** (-np.arange(0, features, 2) / features), 1.0


def _linear(theta, features, length, options):
  return _plain(theta, features)[0] / options["factor"], 1.0


def _dynamic(theta, features, length, options):
  factor, max_length = options["factor"], options["max_position_embeddings"]
  if features < 4:
    raise ValueError(f"features: 'dynamic' needs at least 4, got {features}")
  xp = jnp if isinstance(length, jax.core.Tracer) else np
  ratio = xp.maximum(length, max_length) / max_length
  theta_factor = (factor * ratio - factor + 1.0) ** (features / (features - 2))
  return _plain(theta * theta_factor, features)


def _llama3(theta, features, length, options):
  low, high = options["low_freq_factor"], options["high_freq_factor"]
  if low >= high:
    raise ValueError(f"high_freq_factor: expected above {low}, got {high}")
  plain, _ = _plain(theta, features)
  rotations = options[_MAX_LENGTH] * plain / (2.0 * math.pi)
  share = np.clip((rotations - low) / (high - low), 0.0, 1.0)
  return share * plain + (1.0 - share) * plain / options["factor"], 1.0


def _yarn(theta, features, length, options):
  factor, attention_factor = options["factor"], options.get("attention_factor")
  mscale, mscale_all = options.get("mscale"), options.get("mscale_all_dim")
  if (mscale is None) != (mscale_all is None):
    raise ValueError("mscale: expected it and mscale_all_dim, or neither")
  if attention_factor is not None and mscale is not None:
    raise ValueError("attention_factor: expected it or mscale, got both")
  if theta <= 1.0:
    raise ValueError(f"theta: 'yarn' needs a number above 1, got {theta}")

  def pair_index(rotations):
    log_wavelength = math.log(options[_MAX_LENGTH] / (rotations * 2 * math.pi))
    return features * log_wavelength / (2 * math.log(theta))

  def temperature(weight):
    return 1.0 + 0.1 * weight * math.log(max(factor, 1.0))

  first = pair_index(options.get("beta_fast", 32.0))
  last = pair_index(options.get("beta_slow", 1.0))
  if options.get("truncate", True):
    first, last = math.floor(first), math.ceil(last)
  first, last = max(first, 0), min(last, features - 1)
  width = last - first or 0.001
  ramp = np.clip((np.arange(features // 2) - first) / width, 0.0, 1.0)
  plain, _ = _plain(theta, features)
  if attention_factor is None:
    attention_factor = temperature(mscale or 1.0)
    attention_factor /= temperature(mscale_all or 0.0)
  return (1.0 - ramp) * plain + ramp * plain / factor, attention_factor


_MAX_LENGTH = "original_max_position_embeddings"
_LLAMA3 = "factor", "low_freq_factor", "high_freq_factor", _MAX_LENGTH
_YARN = "attention_factor beta_fast beta_slow mscale mscale_all_dim truncate"
_SCALINGS: Mapping[str, Any] = types.MappingProxyType(
  {
    "default": (_plain, (), ()),
    "linear": (_linear, ("factor",), ()),
    "dynamic": (_dynamic, ("factor", "max_position_embeddings"), ()),
    "llama3": (_llama3, _LLAMA3, ()),
    "yarn": (_yarn, ("factor", _MAX_LENGTH), tuple(_YARN.split())),
  }
)
"""`rope_type` -> its function, its required options and its optional ones."""


def sines(
  positions: Int[Array | np.ndarray, "B T"],
  frequencies: Float[Array | np.ndarray, "half"],
) -> tuple[
  Float[Array | np.ndarray, "B T half"], Float[Array | np.ndarray, "B T half"]
]:
  """Returns sin(p·ω_i) and cos(p·ω_i) for ω_i of `rotary_frequencies`, in float32.

  NumPy positions are constants of a program. On a CPU, so are their sines and cosines,
  which XLA:CPU would recompute for every head and example. On other platforms the
  program computes them: constants of all positions would be stored once per layer, and
  on every device even if the sequence is sharded.

  Raises:
    ValueError: positions are not integers `[B, T]`.
  """
  check_positions(positions)
  frequencies = frequencies.reshape(1, 1, -1)
  if isinstance(positions, np.ndarray):
    if backend.name() == "cpu":
      angles = positions[:, :, None].astype(np.float32) * frequencies
      return np.sin(angles), np.cos(angles)
    # Prevents constant folding in XLA.
    positions = jax.lax.optimization_barrier(jnp.asarray(positions))
  angles = positions[:, :, None].astype(np.float32) * frequencies
  return jnp.sin(angles), jnp.cos(angles)


def check_positions(
  positions: Int[Array | np.ndarray, "#B T"], inputs: Array | None = None
) -> None:
  """Raises ValueError unless positions are integers `[B, T]` or `[1, T]`.

  Args:
    positions: must not be floats: bfloat16 rounds positions above 2⁸.
    inputs: `[B, T, …]`, whose B and T must match; None checks no sizes.
  """
  expected = "integers [B, T] or [1, T]"
  if not hasattr(positions, "dtype"):
    raise ValueError(
      f"positions: expected {expected}, got {type(positions).__name__}; "
      "np.asarray(positions) makes an array"
    )
  shape, dtype = positions.shape, positions.dtype
  fits = len(shape) == 2 and jnp.issubdtype(dtype, jnp.integer)
  if len(shape) == 2 and inputs is not None:
    batch, length = inputs.shape[:2]
    fits &= shape[0] in (1, batch) and shape[1] == length
    expected += f" for inputs [{batch}, {length}, …]"
  if not fits:
    hint = "; give positions[None] if they are the same for all examples"
    raise ValueError(
      f"positions: expected {expected}, got {dtype} {shape}"
      + hint * (len(shape) == 1)
    )


def rotary(
  inputs: Float[Array, "B T N H"],
  positions: Int[Array | np.ndarray, "#B T"],
  *,
  theta: float = 10000.0,
  fraction: float = 1.0,
  scaling: Mapping[str, Any] | None = None,
) -> Float[Array, "B T N H"]:
  """Applies rotary positions: rotates pair i at position p by the angle p·ω_i.

  ω_i = θ^(-2i/H). The product of a query rotated at t and a key rotated at s depends
  only on t - s. The pairs are (x_i, x_{i+H/2}); the paper's are (x_{2i}, x_{2i+1}),
  which is the same up to a permutation of the features of the projections.

  Args:
    inputs: queries or keys `[B, T, N, H]`, H even.
    positions: `[B, T]` or `[1, T]`; a NumPy array is faster, see `sines`.
    theta: θ; the longest wavelength is nearly 2πθ positions.
    fraction: the fraction of the features, from the first, that are rotated; the others
      do not change. H in the formulas is the number of rotated features (GPT-NeoX).
    scaling: other ω_i for longer sequences, see `rotary_frequencies`; the length for
      'dynamic' is the largest position plus one.

  Returns:
    `[B, T, N, H]` in the dtype of `inputs`; the angles are float32.

  Raises:
    ValueError: the number of features to rotate is odd, an option is invalid, or inputs
      or positions have a wrong dtype or shape.

  Paper: RoFormer, section 3.4.2, arXiv:2104.09864.
  """
  annotations = {"inputs": Float[Array, "B T N H"]}
  checks.check_call({"inputs": inputs}, annotations, {}, ("inputs",))
  check_positions(positions, inputs)
  checks.check_number("fraction", fraction)
  if not 0.0 < fraction <= 1.0:
    raise ValueError(f"fraction: expected above 0, at most 1, got {fraction}")
  size = int(inputs.shape[-1] * fraction)
  if size % 2 or not size:
    raise ValueError(
      f"inputs: expected an even number of features to rotate in pairs, got "
      f"{size} of shape {inputs.shape}"
    )
  # In 32 bits, because 255 + 1 does not fit into uint8.
  length = positions.astype(np.int32).max(initial=0) + 1
  frequencies, factor = rotary_frequencies(size, theta, scaling, length=length)
  sin, cos = (factor * x[:, :, None] for x in sines(positions, frequencies))
  dtype = jnp.promote_types(inputs.dtype, jnp.float32)
  left, right = jnp.split(inputs[..., :size].astype(dtype), 2, axis=-1)
  rotated = [left * cos - right * sin, right * cos + left * sin]
  out = jnp.concatenate(rotated, axis=-1).astype(inputs.dtype)
  if size == inputs.shape[-1]:
    return out
  return jnp.concatenate([out, inputs[..., size:]], axis=-1)

"""The laws of attention functions, for any callable on `[B, T, N, H]`.

    from attention.testing import FUNCTION_LAWS, check_function

    @pytest.mark.parametrize("law", FUNCTION_LAWS)
    def test_attention(law):
      check_function(my_attention, laws=[law])

`Function` finds the options of a callable in its signature. `run_laws` returns the
outcome of each law; `check_function` raises if a law is broken. On the command line:
`python -m attention.testing jax.nn:dot_product_attention`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import functools
import inspect
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention.testing.function_laws import FUNCTION_LAWS, Law

OPTIONS: Mapping[str, tuple[str, ...]] = {
  "mask": ("mask", "attention_mask", "attn_mask"),
  "bias": ("bias", "attention_bias"),
  "is_causal": ("is_causal", "causal", "use_causal_mask"),
  "scale": ("scale", "softmax_scale", "sm_scale"),
  "window": ("window", "window_size", "sliding_window", "local_window_size"),
  "segment_ids": ("segment_ids",),
  "query_segment_ids": ("query_segment_ids", "q_segment_ids"),
  "key_segment_ids": ("key_segment_ids", "kv_segment_ids"),
  "cu_seqlens": ("cu_seqlens",),
  "initial_state": ("initial_state", "h0"),
  "return_state": (
    "return_state",
    "output_final_state",
    "return_final_state",
  ),
}
"""Maps each option of the laws to the names that it has in libraries."""

Layout = Literal["BTNH", "BNTH"]


@dataclasses.dataclass(frozen=True)
class Function:
  """A callable, and how the laws call it.

  Attributes:
    call: `(query, key, value, **options) -> out`, or `(out, state)` with
      `return_state`. If it requires more arguments, such as a gate, wrap it in a
      function that computes them from the key.
    path: its import path `package.module:name`, for reproductions.
    layout: the order of the axes of its arrays.
    names: maps options of the laws to their names in `call`; None finds them in the
      signature.
    is_causal: whether every call is causal; None if an option decides, or if the laws
      have to find out.
    num_heads: N.
    head_dim: H.
  """

  call: Callable[..., Any]
  path: str = ""
  layout: Layout = "BTNH"
  names: Mapping[str, str] | None = None
  is_causal: bool | None = None
  num_heads: int = 4
  head_dim: int = 8

  @functools.cached_property
  def own_names(self) -> Mapping[str, str]:
    """Maps options of the laws to their names in the signature of `call`."""
    if self.names is not None:
      return self.names
    parameters = _parameters(self.call)
    return {
      option: name
      for option, names in OPTIONS.items()
      for name in names
      if name in parameters
    }

  @functools.cached_property
  def options(self) -> frozenset[str]:
    """The options of the laws that `call` has."""
    own = set(self.own_names)
    if {"query_segment_ids", "key_segment_ids"} <= own:
      own |= {"segment_ids"}
    return frozenset(own)

  def __call__(self, query: Any, key: Any, value: Any, **options: Any) -> Any:
    """Calls the function, with the layout and the option names of the laws."""
    named = {
      self.own_names[name]: _array(x)
      for option, x in options.items()
      for name in _own_options(option, self.own_names)
    }
    arrays = [self._to_layout(jnp.asarray(x)) for x in (query, key, value)]
    out = self.call(*arrays, **named)
    if options.get("return_state"):
      return self._to_layout(out[0]), *out[1:]
    return self._to_layout(out[0] if isinstance(out, tuple) else out)

  def _to_layout(self, x: Any) -> Any:
    return jnp.swapaxes(x, 1, 2) if self.layout == "BNTH" else x

  def draw(self, length: int) -> list[np.ndarray]:
    """Draws query, key and value of a length, for two examples."""
    shape = 3, 2, length, self.num_heads, self.head_dim
    return [*np.random.default_rng(0).standard_normal(shape, np.float32)]

  @functools.cached_property
  def modes(self) -> tuple[bool, ...]:
    """Whether its calls are causal; both values if an option decides."""
    if self.is_causal is not None:
      return (self.is_causal,)
    if "is_causal" in self.options:
      return False, True
    if "initial_state" in self.options:
      return (True,)
    query, key, value = self.draw(7)
    out = np.asarray(self(query, key, value))
    key[:, 1:], value[:, 1:] = 0.5 * key[:, 1:], 0.5 * value[:, 1:]
    is_same = np.allclose(self(query, key, value)[:, 0], out[:, 0], atol=1e-6)
    return (bool(is_same),)

  @property
  def chooses(self) -> bool:
    """Whether an option determines if a call is causal."""
    return "is_causal" in self.options and self.is_causal is None

  def bound(self, mode: bool) -> Callable[..., Any]:
    """The function that laws get for causal calls or for non-causal calls."""
    return functools.partial(self, is_causal=mode) if self.chooses else self


class Outcome(NamedTuple):
  """The outcome of a law.

  Attributes:
    law: the name of the law.
    status: 'kept', 'broken', or 'none' if the law does not apply.
    reason: why it does not apply, or the error that breaks it.
    difference: the largest difference, relative to the largest expected value; infinite
      for NaN.
    length: T of the smallest call that breaks it.
    is_causal: whether that call is causal.
    reproduction: a Python program that shows the difference.
  """

  law: str
  status: Literal["kept", "broken", "none"]
  reason: str = ""
  difference: float = 0.0
  length: int = 0
  is_causal: bool = False
  reproduction: str = ""


def run_laws(
  function: Function,
  laws: Iterable[str] | None = None,
  lengths: Sequence[int] = (13, 131),
) -> list[Outcome]:
  """Runs laws on a function, in every mode and at every length.

  Args:
    function: the function.
    laws: names in `FUNCTION_LAWS`; None means all.
    lengths: T. If a law is broken, the smallest T that breaks it is searched for.

  Returns:
    One outcome per law.

  Raises:
    ValueError: the plain call fails, or a law is unknown.

  Cost: about a hundred small programs, a minute or two on one core.
  """
  names = list(FUNCTION_LAWS if laws is None else laws)
  for name in sorted(set(names) - {*FUNCTION_LAWS}):
    raise ValueError(f"laws: expected {', '.join(FUNCTION_LAWS)}, got {name!r}")
  _check_call(function, lengths[0])
  return [_outcome(function, FUNCTION_LAWS[name], lengths) for name in names]


def check_function(
  function: Callable[..., Any],
  *,
  laws: Iterable[str] | None = None,
  lengths: Sequence[int] = (13, 131),
  **how: Any,
) -> None:
  """Checks any attention function against the laws that apply to it.

  Args:
    function: a callable, or a `Function`.
    laws: names in `FUNCTION_LAWS`; None means all.
    lengths: T.
    **how: `layout`, `names`, `is_causal`, `num_heads`, `head_dim` of `Function`.

  Raises:
    AssertionError: laws are broken; the message has the statement, the difference and
      the reproduction of each.
    ValueError: the plain call fails, or a law is unknown.

  Cost: as `run_laws`.
  """
  __tracebackhide__ = True
  if not isinstance(function, Function):
    function = Function(function, _path(function), **how)
  outcomes = run_laws(function, laws, lengths)
  broken = [x for x in outcomes if x.status == "broken"]
  if broken:
    raise AssertionError("\n\n".join(describe(x) for x in broken))


def describe(outcome: Outcome) -> str:
  """Describes a broken law: its statement, the difference and the reproduction."""
  lines = outcome.reproduction.replace("\n", "\n    ")
  return (
    f"{outcome.law}: {FUNCTION_LAWS[outcome.law].statement}\n"
    f"  broken: {magnitude(outcome)}, at T = {outcome.length}\n    {lines}"
  )


def magnitude(outcome: Outcome) -> str:
  """The difference by which a law is broken, or the reason, in words."""
  if outcome.reason:
    return outcome.reason
  if not np.isfinite(outcome.difference):
    return "NaN or infinity"
  return f"off by {outcome.difference:.1e} of the largest expected value"


def _array(x: Any) -> Any:
  """Converts NumPy arrays to JAX arrays; Python numbers stay static."""
  return jax.tree.map(
    lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, x
  )


def _path(function: Callable[..., Any]) -> str:
  module = getattr(function, "__module__", "")
  return f"{module}:{getattr(function, '__qualname__', '')}" if module else ""


def _parameters(
  function: Callable[..., Any],
) -> Mapping[str, inspect.Parameter]:
  try:
    return inspect.signature(function).parameters
  except (TypeError, ValueError):
    return {}


def _check_call(function: Function, length: int) -> None:
  required = [
    name
    for name, x in _parameters(function.call).items()
    if x.default is x.empty and x.kind not in (x.VAR_POSITIONAL, x.VAR_KEYWORD)
  ]
  if len(required) > 3:
    raise ValueError(
      f"function: also needs {', '.join(required[3:])}; pass a function of "
      "(query, key, value) that computes them from the key"
    )
  shape = (2, length, function.num_heads, function.head_dim)
  try:
    out = function(*function.draw(length))
  except Exception as error:
    raise ValueError(
      f"function: the plain call on three arrays {list(shape)} raises "
      f"{type(error).__name__}: {_short(error)}"
    ) from error
  if np.shape(out) != shape:
    raise ValueError(
      f"function: expected a result {list(shape)}, got {list(np.shape(out))}"
    )


def _outcome(function: Function, law: Law, lengths: Sequence[int]) -> Outcome:
  """The outcome of a law: of the first call that breaks it, or of all calls."""
  missing = [x for x in law.needs if x not in function.options]
  if missing:
    return Outcome(law.name, "none", f"no option {missing[0]}")
  modes = [x for x in function.modes if x or not law.causal]
  if not modes:
    return Outcome(law.name, "none", "not causal")
  if law.heads and function.num_heads < 2:
    return Outcome(law.name, "none", "no heads")
  if law.devices > jax.device_count():
    return Outcome(law.name, "none", f"needs {law.devices} devices")
  refused = None
  for mode in modes:
    for length in lengths:
      status, reason, _ = trial = _try(function, law, mode, length)
      if status == "broken":
        return _smallest(function, law, mode, length, trial)
      refused = reason if status == "none" else refused
  if refused is not None:
    return Outcome(law.name, "none", f"refused: {refused}")
  return Outcome(law.name, "kept")


_Trial = tuple[Literal["kept", "broken", "none"], str, float]


def _try(function: Function, law: Law, mode: bool, length: int) -> _Trial:
  """The status of one call, a reason, and the difference."""
  try:
    results = law.run(function.bound(mode), *function.draw(length))
  except Exception as error:  # The function may raise anything.
    reason = f"{type(error).__name__}: {_short(error)}"
    is_refusal = law.may_refuse and isinstance(
      error, ValueError | TypeError | NotImplementedError | AssertionError
    )
    return ("none" if is_refusal else "broken"), reason, float("inf")
  got, expected = (jax.tree.leaves(x) for x in results)
  if [np.shape(x) for x in got] != [np.shape(x) for x in expected]:
    return "broken", "the shapes of the results differ", float("inf")
  error = max(map(_difference, got, expected))
  if law.differs:
    return (
      ("broken", "has no effect", 0.0) if error == 0 else ("kept", "", error)
    )
  return ("kept" if error <= law.tolerance else "broken"), "", error


def _difference(got: Any, expected: Any) -> float:
  """The largest difference, relative to the largest expected value or to 1."""
  got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
  if not np.isfinite(got).all():
    return float("inf")
  largest = np.abs(expected).max(initial=0.0)
  return float(np.abs(got - expected).max(initial=0.0) / (largest or 1.0))


def _smallest(
  function: Function, law: Law, mode: bool, length: int, trial: _Trial
) -> Outcome:
  """The outcome of the shortest call that breaks a law."""
  for shorter in (n for n in (2, 3, 4, 5, 7, 9, 13) if n < length):
    shorter_trial = _try(function, law, mode, shorter)
    has_reason = bool(shorter_trial[1]) == bool(trial[1])
    if shorter_trial[0] == "broken" and has_reason:
      length, trial = shorter, shorter_trial
      break
  lines = reproduction(function, law, mode, length)
  return Outcome(law.name, "broken", trial[1], trial[2], length, mode, lines)


def reproduction(function: Function, law: Law, mode: bool, length: int) -> str:
  """A program that prints the differences of a broken law."""
  module, _, name = function.path.partition(":")
  shape = f"(3, 2, {length}, {function.num_heads}, {function.head_dim})"
  adapter = _adapter(function, law, mode)
  return "\n".join(
    [
      "import jax, jax.numpy as jnp, numpy as np",
      *_devices(law),
      f"from {module} import {name} as {'function' if adapter else 'f'}",
      *adapter,
      f"q, k, v = np.random.default_rng(0).standard_normal({shape}, np.float32)",
      *law.lines,
      "print(jax.tree.map(lambda x, y: abs(np.subtract(x, y, dtype=float)).max(), "
      "got, expected))",
    ]
  )


def _devices(law: Law) -> list[str]:
  """The line that simulates the devices of a law on a CPU."""
  if law.devices == 1:
    return []
  return [f'jax.config.update("jax_num_cpu_devices", {law.devices})']


def _adapter(function: Function, law: Law, mode: bool) -> list[str]:
  """The line that adapts a function to the layout and options of a law, if needed."""
  own, call = function.own_names, "function({})"
  arrays = ["q", "k", "v"]
  parameters = [f"{x}=None" for x in law.needs if x != "is_causal"]
  arguments = [
    (own[name], option)
    for option in law.needs
    if option != "is_causal"
    for name in _own_options(option, own)
  ]
  if function.chooses:
    default = _parameters(function.call)[own["is_causal"]].default
    if "is_causal" in law.needs or mode is not default:
      parameters.append(f"is_causal={mode}")
      arguments.append((own["is_causal"], "is_causal"))
  if function.layout == "BNTH":
    arrays = [f"jnp.swapaxes({x}, 1, 2)" for x in arrays]
    call = "jnp.swapaxes(function({}), 1, 2)"
  elif all(x == y != "is_causal" for x, y in arguments):
    return []
  arguments = [f"{x}={y}" for x, y in arguments]
  call = call.format(", ".join([*arrays, *arguments]))
  return [f"f = lambda {', '.join(['q', 'k', 'v', *parameters])}: {call}"]


def _own_options(option: str, own: Mapping[str, str]) -> list[str]:
  """The options of a function that correspond to an option of the laws."""
  if option == "segment_ids" and option not in own:
    return ["query_segment_ids", "key_segment_ids"]
  return [option]


def _short(error: Exception) -> str:
  """The first line of a message, at most 120 characters."""
  line = (str(error).splitlines() or [""])[0]
  return line if len(line) <= 120 else line[:117] + "…"

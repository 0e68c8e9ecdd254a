"""A call equals the definition, values and gradients."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from attention.testing.calls import Case, assert_close, require, split
from attention.testing.mechanism import Check, Mechanism, in_float64

# What a mechanism does not support is left out of a call. So each option meets
# several others in both directions, with few programs to compile.
_CASES = {
  "plain": Case(num_kv_heads=4),
  "options": Case(
    ("mask", "scale", "segments", "bias", "relative_bias", "sinks"),
    num_kv_heads=1,
    value_dim=5,
  ),
  "more_options": Case(("full_mask", "relative", "logits_soft_cap")),
  "causal": Case(("causal", "mask", "segments", "relative", "log_forget")),
  "causal_options": Case(
    (
      *("causal", "full_mask", "scale", "segments", "bias", "sinks"),
      *("relative_bias", "relative_keys_by_head", "logits_soft_cap"),
    ),
    num_kv_heads=1,
  ),
  "one_position": Case(("causal",), length=1),
  "cross": Case(
    ("mask", "scale", "segments", "relative_keys_by_head"),
    length=7,
    source_length=13,
    value_dim=11,
  ),
  "causal_cross": Case(("causal", "mask"), length=7, source_length=13),
  "fewer_keys": Case(("causal", "mask"), length=13, source_length=7),
  "global": Case(("global", "global_qkv", "mask", "scale"), value_dim=5),
  "causal_global": Case(
    ("global", "causal", "segments", "sinks", "logits_soft_cap"), num_kv_heads=1
  ),
  "causal_global_qkv": Case(
    ("global", "global_qkv", "causal", "mask", "segments")
  ),
  # Longer than a block, so that states and windows cross from one to the next.
  "long": Case(("mask",), length=307, batch=1, num_kv_heads=4),
  "long_causal": Case(
    ("causal", "mask", "relative_keys", "log_forget", "sinks"),
    length=307,
    batch=1,
  ),
}
_ONCE = ("plain", "one_position", "cross", "causal_cross", "fewer_keys", "long")


def _value_and_gradient(mechanism: Mechanism, case: Case) -> None:
  """The call must equal the definition within 1e-5, and so must its gradients.

  With respect to query, key, value, params and tables. The message begins with
  the sizes and options of the call; compare the two on that call,
  `Case(…).draw()` of attention.testing, with fewer options. An option that cannot
  be honoured must leave `supports`; `scale` has to be taken by every mechanism.
  """
  case = case.limited(mechanism.supports)
  try:
    _equals_the_definition(mechanism, case)
  except AssertionError as error:
    raise AssertionError(f"{case}: {error}") from error


def _equals_the_definition(mechanism: Mechanism, case: Case) -> None:
  qkv, options = mechanism.draw(case)
  names = ("query", "key", "value") if len(qkv) == 3 else ("query", "value")
  tree = {
    **mechanism.variables(case.dims),
    "arrays": dict(zip(names, qkv, strict=True)),
    "options": options,
  }
  paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
  everything = [leaf for _, leaf in paths]
  # What a gradient is checked for: floating-point arrays but constants.
  chosen = {
    i: jax.tree_util.keystr(path)
    for i, (path, leaf) in enumerate(paths)
    if isinstance(leaf, np.ndarray | jax.Array)
    and jnp.issubdtype(leaf.dtype, jnp.floating)
    and path[0].key != "constants"
  }

  def called(function, others, leaves):
    merged = list(others)
    for i, leaf in zip(chosen, leaves, strict=True):
      merged[i] = leaf
    tree = treedef.unflatten(merged)
    arrays, options = tree.pop("arrays"), tree.pop("options")
    return function(tree, [arrays[x] for x in names], **options)

  rng = np.random.default_rng(1)
  shape = (*qkv[0].shape[:-1], case.value_dim)
  cotangent = rng.standard_normal(shape, np.float32)
  arrays, rebuild = split(everything)

  @jax.jit
  def run(arrays, leaves, cotangent):
    call = partial(called, mechanism.apply, rebuild(arrays))
    out, vjp = jax.vjp(call, leaves)
    return out, vjp(cotangent)[0]

  out, gradient = run(arrays, [everything[i] for i in chosen], cotangent)
  require(
    (out.shape, out.dtype) == (shape, jnp.float32),
    f"the result is {out.dtype} {out.shape}, expected float32 {shape}",
  )
  in_double = in_float64(everything)
  naive = partial(called, mechanism.define, in_double)
  leaves = [in_double[i] for i in chosen]
  assert_close(out, naive(leaves), 1e-5)
  gradient, names_of = in_float64(gradient), list(chosen.values())
  for name, grad in zip(names_of, gradient, strict=True):
    require(np.isfinite(grad).all(), f"the gradient of {name} is not finite")
  norm = np.sqrt(sum((x**2).sum() for x in gradient))
  directions = [rng.standard_normal(x.shape) for x in leaves]

  def difference(where):
    """Gradient and central difference along `directions` of some leaves."""
    step = 1e-6
    ahead, behind = (
      naive(
        [
          x + h * d if i in where else x
          for i, (x, d) in enumerate(zip(leaves, directions, strict=True))
        ]
      )
      for h in (step, -step)
    )
    found = sum((gradient[i] * directions[i]).sum() for i in where)
    return found, ((ahead - behind) * cotangent).sum() / (2 * step)

  def is_off(found, expected):
    return not abs(found - expected) <= 1e-5 * norm

  # All leaves at once; one by one only to say which of them are wrong.
  if is_off(*difference(range(len(leaves)))):
    each = {name: difference([i]) for i, name in enumerate(names_of)}
    wrong = [
      f"the gradient of {name} along a random direction is {found:.6g} and "
      f"should be {expected:.6g}, by central differences of the definition"
      for name, (found, expected) in each.items()
      if is_off(found, expected)
    ]
    raise AssertionError("\n".join(wrong) or "the sum of all gradients is off")


def _half_precision(mechanism: Mechanism) -> None:
  """Inputs in bfloat16 must give bfloat16 within 2e-2 of the definition.

  Compute logits, softmax and normalisers in float32
  (`preferred_element_type=jnp.float32`) and convert the result at the end.
  """
  options = ("causal",) if mechanism.directions[-1] else ()
  case = Case((*options, "mask", "segments")).limited(mechanism.supports)
  variables = mechanism.variables(case.dims)
  qkv, call = mechanism.draw(case)
  qkv[0] *= 4.0  # Logits near 10, which bfloat16 would round by 0.03.
  rounded = [jnp.asarray(x, jnp.bfloat16) for x in qkv]
  arrays, rebuild = split(call)

  @jax.jit
  def run(variables, qkv, arrays):
    return mechanism.apply(variables, qkv, **rebuild(arrays))

  out = run(variables, rounded, arrays)
  require(
    out.dtype == jnp.bfloat16,
    f"the result is {out.dtype}, expected the dtype of query, bfloat16",
  )
  assert_close(out, mechanism.define(variables, rounded, **call), 2e-2)


def _is_taken(mechanism: Mechanism, case: Case) -> bool:
  """Whether a mechanism takes what makes the case."""
  needed = {"causal", "global"}.intersection(case.options)
  kept = case.limited(mechanism.supports).options
  return (
    needed <= mechanism.supports
    and (case.keys == case.length or "cross" in mechanism.supports)
    and ("causal" in needed or not mechanism.record.causal_only)
    # Without options it would be the plain call.
    and (case != _CASES["more_options"] or bool(kept))
  )


CHECKS = (
  *(
    Check(
      f"value_and_gradient[{name}]",
      partial(_value_and_gradient, case=case),
      where=partial(_is_taken, case=case),
      every_setting=name not in _ONCE,
    )
    for name, case in _CASES.items()
  ),
  Check("bfloat16", _half_precision, every_setting=False),
)

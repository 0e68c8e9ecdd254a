"""Laws of values: calls equal the definition, in values and gradients."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention.mechanism import ATTENTIONS
from attention.testing.calls import (
  LONG_CAUSAL,
  Case,
  assert_close,
  require,
)
from attention.testing.mechanism import (
  LAWS,
  Check,
  Mechanism,
  forward,
  in_float64,
  law,
  separate,
  together,
  vjp_program,
)
from attention.weights import attention_weights

# Options that a mechanism does not support are omitted from a call. Each option is
# combined with several others in both directions, with few programs to compile.
_CASES = {
  # Without scale, so that the default scale has to come from H, not from V.
  "plain": Case(num_kv_heads=4, value_dim=5),
  "options": Case(
    ("mask", "scale", "segments", "bias", "relative_bias", "sinks"),
    num_kv_heads=1,
    value_dim=5,
  ),
  "more_options": Case(("full_mask", "relative", "logits_soft_cap")),
  # Without tables, the laws of masks share this program.
  "causal": Case(
    ("causal", "mask", "segments", "relative", "log_forget"), batch=8
  ),
  "causal_options": Case(
    (
      *("causal", "full_mask", "scale", "segments", "bias_by_example"),
      "sinks_by_query",
      *("relative_bias", "relative_keys_by_head", "logits_soft_cap"),
      "relative_queries_by_head",
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
  "causal_cross": Case(
    ("causal", "mask_of_all_examples"), length=7, source_length=13
  ),
  "fewer_keys": Case(("causal", "mask"), length=13, source_length=7),
  "global": Case(("global", "global_qkv", "mask", "scale"), value_dim=5),
  "causal_global": Case(
    ("global", "causal", "segments", "sinks_by_query", "logits_soft_cap"),
    num_kv_heads=1,
  ),
  "causal_global_qkv": Case(
    ("global", "global_qkv", "causal", "mask", "segments")
  ),
  "long": LONG_CAUSAL._replace(options=("mask",), num_kv_heads=4),
  "long_causal": LONG_CAUSAL,
}
_ONCE = ("plain", "one_position", "cross", "causal_cross", "fewer_keys", "long")


def value_and_gradient(mechanism: Mechanism, case: Case) -> None:
  """The call and its gradients must equal the definition within 1e-5.

  Gradients are those of query, key, value, params and tables. The message begins with
  the sizes and options of the call. Compare the mechanism and the definition on that
  call, `Case(…).draw()` of attention.testing, with fewer options. Remove unsupported
  options from `supports`; every mechanism must support `scale`.
  """
  case = mechanism.limited(case)
  try:
    _equals_the_definition(mechanism, case)
  except AssertionError as error:
    raise AssertionError(f"{case}: {error}") from error


def _equals_the_definition(
  mechanism: Mechanism, case: Case, **functions: Any
) -> None:
  qkv, call = mechanism.draw(case)
  call |= functions
  variables = mechanism.variables(case.dims)
  trained, others, flags = separate(mechanism, variables, qkv, call)
  rng = np.random.default_rng(1)
  shape = (*qkv[0].shape[:-1], case.value_dim)
  cotangent = rng.standard_normal(shape, np.float32)
  run = vjp_program(mechanism)
  out, gradient = run(trained, others, flags, cotangent)
  require(
    (out.shape, out.dtype) == (shape, jnp.float32),
    f"the result is {out.dtype} {out.shape}, expected float32 {shape}",
  )
  paths, treedef = jax.tree_util.tree_flatten_with_path(in_float64(trained))
  names = [jax.tree_util.keystr(path) for path, _ in paths]
  leaves = [leaf for _, leaf in paths]
  gradient = jax.tree.leaves(in_float64(gradient))

  step = 1e-6

  def define_at_steps(indices):
    """Evaluates the definition with leaves changed by ±step along their directions."""
    for h in (step, -step):
      changed = [
        x + h * d if i in indices else x
        for i, (x, d) in enumerate(zip(leaves, directions, strict=True))
      ]
      arguments = together(treedef.unflatten(changed), others, flags)
      yield mechanism.define(*arguments[:2], **arguments[2])

  def errors(indices, plus, minus):
    """Compares gradients of leaves with central differences of the definition."""
    got = sum((gradient[i] * directions[i]).sum() for i in indices)
    expected = ((plus - minus) * cotangent).sum() / (2 * step)
    if abs(got - expected) <= 1e-5 * norm:
      return []
    return [
      f"the gradient of {', '.join(names[i] for i in indices)} along a random "
      f"direction is {got:.6g} and should be {expected:.6g}, by central "
      "differences of the definition"
    ]

  directions = [rng.standard_normal(x.shape) for x in leaves]
  every = range(len(names))
  plus, minus = define_at_steps(every)
  # The mean of the two equals the definition up to O(step²).
  assert_close(out, (plus + minus) / 2, 1e-5)
  for name, grad in zip(names, gradient, strict=True):
    require(np.isfinite(grad).all(), f"the gradient of {name} is not finite")
  norm = np.sqrt(sum((x**2).sum() for x in gradient))
  # All leaves at once; one by one only to find which of them are wrong.
  if total_errors := errors(every, plus, minus):
    leaf_errors = [x for i in every for x in errors([i], *define_at_steps([i]))]
    raise AssertionError("\n".join(leaf_errors or total_errors))


def _supports_case(mechanism: Mechanism, case: Case) -> bool:
  """Whether a mechanism supports the essential options of a case."""
  needed = {"causal", "global"}.intersection(case.options)
  options = case.limited(mechanism.supports).options
  return (
    needed <= mechanism.supports
    and (case.keys == case.length or "cross" in mechanism.supports)
    and ("causal" in needed or not mechanism.record.causal_only)
    # Without options, the call would equal the plain one.
    and (case != _CASES["more_options"] or bool(options))
  )


LAWS += [
  Check(
    f"value_and_gradient[{name}]",
    partial(value_and_gradient, case=case),
    where=partial(_supports_case, case=case),
    every_setting=name not in _ONCE,
  )
  for name, case in _CASES.items()
]


@law(every_setting=False)
def bfloat16(mechanism: Mechanism) -> None:
  """Inputs in bfloat16 must give bfloat16 within 2e-2 of the definition.

  Compute logits, softmax and normalisers in float32
  (`preferred_element_type=jnp.float32`), and convert the result at the end to the dtype
  of the query, for all dtypes of key and value.
  """
  is_causal = mechanism.directions[-1]
  options = (
    ("causal", "mask", "segments") if is_causal else ("mask", "segments")
  )
  case = mechanism.limited(Case(options))
  qkv, call = mechanism.draw(case)
  qkv[0] = 4 * qkv[0]  # Logits near 10, which bfloat16 would round by 0.03.
  rounded = [jnp.asarray(x, jnp.bfloat16) for x in qkv]
  variables = mechanism.variables(case.dims)
  expected = mechanism.define(variables, rounded, **call)
  call.pop("is_causal", None)
  out = forward(mechanism, is_causal)(rounded, **call)
  require(
    out.dtype == jnp.bfloat16,
    f"the result is {out.dtype}, expected the dtype of query, bfloat16",
  )
  assert_close(out, expected, 2e-2)
  # Arrays of two dtypes are computed in the wider one.
  for arrays in ([qkv[0], *rounded[1:]], [rounded[0], *qkv[1:]]):
    out = forward(mechanism, is_causal)(arrays, **call)
    name = f"the result of arrays in {[str(x.dtype) for x in arrays]}"
    require(
      out.dtype == arrays[0].dtype,
      f"{name} is {out.dtype}, expected the query's dtype",
    )
    flags = {"is_causal": True} if is_causal else {}
    expected = mechanism.define(variables, arrays, **call, **flags)
    # Keys that are computed from inputs have their dtype, and operations that a user's
    # mechanism applies first, such as a norm, may keep the dtype of their array.
    may_round = "own_keys" in mechanism.supports
    may_round |= mechanism.factory not in ATTENTIONS.values()
    tolerance = 1e-5 if out.dtype == jnp.float32 else 2**-8
    assert_close(out, expected, 2e-2 if may_round else tolerance, name)


@law(every_setting=False)
def float16(mechanism: Mechanism) -> None:
  """Inputs in float16 must give float16 within 1e-2 of the definition.

  Logits beyond 65,504, the largest float16, must give finite results: compute logits in
  float32, and do not mask them by a number that overflows, such as -1e30.
  """
  is_causal = mechanism.directions[-1]
  qkv, call = mechanism.draw(mechanism.limited(Case(("mask",))))
  qkv = [x.astype(np.float16) for x in qkv]
  flags = {"is_causal": True} if is_causal else {}
  variables = mechanism.variables(Case().dims)
  run = forward(mechanism, is_causal)
  out = run(qkv, **call)
  require(out.dtype == np.float16, f"the result is {out.dtype}, not float16")
  assert_close(out, mechanism.define(variables, qkv, **call, **flags), 1e-2)
  if mechanism.bounded:
    large = [np.float16(300) * x for x in qkv[:-1]]
    out = run([*large, qkv[-1]], **call)
    require(np.isfinite(out).all(), "large logits give no finite result")


@law("value_heads", every_setting=False)
def values_of_more_heads(mechanism: Mechanism) -> None:
  """Neighbouring heads of values must share each head of queries and keys.

  The result must equal that for queries and keys repeated by
  `jnp.repeat(x, N // x.shape[2], axis=2)`, with the same gates.
  """
  qkv, _ = mechanism.draw(Case(num_kv_heads=4))
  query, key = (x[:, :, ::2] for x in qkv[:2])
  gates = mechanism.gates([query, key, qkv[2]])
  variables = mechanism.variables(Case().dims)
  apply = mechanism.factory(**mechanism.options).apply

  @jax.jit
  def run(query, key):
    return apply(variables, query, key, qkv[2], is_causal=True, **gates)

  expected = run(*(np.repeat(x, 2, axis=2) for x in (query, key)))
  assert_close(run(query, key), expected, 1e-6)


@law("mods", every_setting=False)
def mods(mechanism: Mechanism) -> None:
  """`apply` with score_mod and mask_mod must equal the definition within 1e-5.

  This holds for values and gradients, in both directions. The functions get the indices
  of the example, the head, the query and the key, and the score gets them before masks.
  """
  for is_causal in mechanism.directions:
    _equals_the_definition(
      mechanism,
      Case(("causal",) if is_causal else ()),
      score_mod=lambda x, b, n, t, s: x * (1 + 0.5 * b) - 0.2 * n * (t - s),
      mask_mod=lambda b, n, t, s: (t - s + n + b) % 3 != 1,
    )


@law("dropout", every_setting=False)
def dropout(mechanism: Mechanism) -> None:
  """Dropout must zero the given fraction of the weights, and scale up the others.

  The others are divided by 1 − dropout_rate. Another dropout_rng must drop other
  weights, and so must other examples, heads and queries. A rate of 0 must drop none. The
  gradient must have the dropped weights of the result.
  """
  is_causal = mechanism.directions[-1]
  qkv, _ = mechanism.draw(mechanism.limited(Case(batch=8)))
  query, key, value = mechanism.three(qkv)
  apply = partial(mechanism.record.apply, mechanism.variables(Case().dims))

  @partial(jax.jit, static_argnums=2)
  def weights(qk, seed, rate):
    call = {"is_causal": is_causal}
    if rate is not None:
      call |= {"dropout_rate": rate, "dropout_rng": jax.random.key(seed)}
    return attention_weights(apply, *qk, **call)

  whole, kept, dropped, other = (
    np.asarray(weights((query, key), seed, rate), np.float64)
    for seed, rate in ((0, None), (0, 0.0), (0, 0.4), (1, 0.4))
  )
  assert_close(kept, whole, 1e-6, "the weights for dropout_rate=0.0")
  require(
    (dropped != other).any(), "another dropout_rng drops the same weights"
  )
  ratio = np.divide(dropped, whole, out=np.zeros_like(whole), where=whole != 0)
  for axis, name in enumerate(("examples", "heads", "queries")):
    # Neighbours that have weights of the same keys.
    one, two = (np.moveaxis(x, axis, 0) for x in (ratio, whole))
    both = (two[1:] != 0) & (two[:-1] != 0)
    require(
      not np.allclose(one[1:][both], one[:-1][both], 1e-3),
      f"two {name} drop the same weights",
    )

  @jax.jit
  def result_and_gradient(value):
    call = {"is_causal": is_causal, "dropout_rate": 0.4}
    rng = jax.random.key(0)
    return jax.value_and_grad(
      lambda x: apply(query, key, x, **call, dropout_rng=rng).sum()
    )(value)

  # The result is linear in the values.
  total, gradient = result_and_gradient(value)
  product = np.float64(gradient * value).sum()
  error = abs(product - total) / np.abs(gradient * value).sum()
  require(
    error < 1e-5,
    f"the gradient of the values times the values is {product:.6g}, expected the "
    f"sum of the results, {total:.6g}",
  )
  sums = dropped.sum() / whole.sum()
  require(
    abs(sums - 1.0) < 0.1,
    f"the weights that remain sum to {sums:.2f} of the weights without dropout, "
    "expected 1 ± 0.1",
  )
  # The variance of a weight w is w² · rate / (1 − rate), or less if w is a sum of
  # several weights, as in LSH attention.
  variance = ((dropped - whole) ** 2).sum() / (whole**2).sum()
  require(
    0.15 < variance < 0.8,
    f"the variance of the weights is {variance:.2f} of their squares, expected at "
    "most 0.67 for dropout_rate=0.4",
  )

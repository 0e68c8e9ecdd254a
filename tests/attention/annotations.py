"""Calls every mechanism with its options and checks annotated shapes.

The checks are built whenever a function is defined, which takes longer than most
calls: so they have a process of their own, and nothing is computed.
"""

import jax
import jaxtyping


def main() -> int:
  """The number of calls."""
  jaxtyping.install_import_hook(["attention"], "beartype.beartype")
  from attention.testing import CHECKS
  from tests.attention.mechanisms import ONE_EACH

  count = 0
  for mechanism in ONE_EACH:
    for check in CHECKS:
      case = getattr(check.law, "keywords", {}).get("case")
      if case is None or not check.applies(mechanism):
        continue
      if not {"segments", "full_mask"} & {*case.options}:  # Of few options.
        continue
      case = mechanism.limited(case)
      qkv, call = mechanism.draw(case)
      others = {k: x for k, x in call.items() if isinstance(x, bool | float)}
      arrays = {k: x for k, x in call.items() if k not in others}
      variables = jax.eval_shape(
        lambda key, m=mechanism, dims=case.dims: m.record.init(key, dims),
        jax.random.key(0),
      )
      jax.eval_shape(
        lambda variables, qkv, arrays, m=mechanism, others=others: m.apply(
          variables, qkv, **arrays, **others
        ),
        variables,
        qkv,
        arrays,
      )
      count += 1
  return count


if __name__ == "__main__":
  print(main())

"""A product that XLA:CPU of jaxlib 0.10.2 to 0.12.0.1 compiles into garbage.

    XLA_FLAGS= python benchmarks/xla_cpu_fusion.py
    XLA_FLAGS=--xla_cpu_experimental_ynn_fusion_type= python benchmarks/xla_cpu_fusion.py

Needs jax alone, and nothing of this project. The program is one line,

    jax.jit(lambda x: (x @ jnp.full((32, 32), 3.0)).sum(-1))

and its optimised module is one fusion:

    fused (x: f32[512,32]) -> f32[512] {
      w = f32[32,32] broadcast(3), dimensions={}
      y = f32[512,32] dot(x, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
      ROOT reduce(y, 0), dimensions={1}, to_apply=add
    }
    kind=kCustom, backend_config={"fusion_config":{"kind":"__ynn_fusion"}}

It takes three things together: the product's right operand repeats along its
columns (a broadcast of a scalar, of a number for each batch, or of a column),
the broadcast is inside the fusion, and a reduction follows. The result then
depends on memory that was never written, so it changes with every compile. A left
operand that is a broadcast, a right one that is a row repeated, a whole array, and a
product with no reduction after it were right in every compile; random programs of
two to six operations with eight kinds of broadcasts showed no other cause. A
recurrence meets it where its first state, zeros, is read by queries in the same
program: `query @ zeros`, and a layer norm behind it.

This script prints how many of 12 compiles of each form are wrong.
"""

import jax
import jax.numpy as jnp
import numpy as np

X = np.random.default_rng(0).normal(size=(8, 64, 32)).astype(np.float32)
COLUMN = np.linspace(1, 2, 32, dtype=np.float32)[:, None]

FORMS = {
  "x @ constant, summed": lambda x: (x @ jnp.full((32, 32), 3.0)).sum(-1),
  "the same, greatest": lambda x: (x @ jnp.full((32, 32), 3.0)).max(-1),
  "x @ constant for each batch": lambda x: (
    x @ jnp.broadcast_to(x[:, :1, :1], (8, 32, 32))
  ).sum(-1),
  "x @ repeated column": lambda x: (
    x @ jnp.broadcast_to(COLUMN, (8, 32, 32))
  ).sum(-1),
  "x @ repeated row": lambda x: (
    x @ jnp.broadcast_to(COLUMN.T, (8, 32, 32))
  ).sum(-1),
  "constant @ x": lambda x: (jnp.full((64, 64), 3.0) @ x).sum(-1),
  "x @ constant": lambda x: x @ jnp.full((32, 32), 3.0),
  "x @ constant behind a barrier": lambda x: (
    x @ jax.lax.optimization_barrier(jnp.full((32, 32), 3.0))
  ).sum(-1),
}


def main() -> None:
  """Compiles every form anew, and holds each to the same operations in turn."""
  print(f"jax {jax.__version__}, wrong of 12 compiles:")
  for name, form in FORMS.items():
    expected, wrong = form(jnp.asarray(X)), 0
    for _ in range(12):
      jax.clear_caches()
      wrong += not np.allclose(jax.jit(form)(X), expected, rtol=1e-3, atol=1e-3)
    print(f"  {wrong:2}  {name}")


if __name__ == "__main__":
  main()

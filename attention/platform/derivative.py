"""Functions with a custom backward pass that also support forward mode.

`jax.custom_vjp` does not support `jax.jvp`, `jax.linearize` and `jax.jacfwd`. Here, the
derivative is one linear operation on the tangents,

    ẏ = J(x) ẋ

whose transpose is the custom backward pass. J is computed only if ẏ itself is needed,
so reverse mode costs the same as with `jax.custom_vjp`. In forward mode, JAX
differentiates the function itself.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
import jax.numpy as jnp
import numpy as np


def with_backward(
  forward: Callable[[Any], tuple[Any, Any]],
  backward: Callable[[Any, Any, Any], Any],
  plain: Callable[[Any], Any] | None = None,
) -> Callable[[Any], Any]:
  """Returns a function `x -> y` with a custom backward pass, for all transformations.

  The functions must not close over traced arrays.

  Args:
    forward: `x -> (y, saved)` of pytrees of arrays; y is differentiable in the
      floating-point leaves of x. JAX differentiates it in forward mode.
    backward: `(x, saved, y_grad) -> x_grad`, with the structure of x. Gradients of
      leaves that are not floats are ignored.
    plain: `x -> y`, an equivalent function for calls without derivatives; None means
      `forward`.

  Returns:
    `x -> y`. It supports forward mode, reverse mode, forward over reverse
    (`jax.hessian`) and `jax.vmap`, and reverse over reverse if all loops have static
    lengths.
  """

  @jax.custom_jvp
  def differentiable(x):
    return forward(x)[0] if plain is None else plain(x)

  @differentiable.defjvp
  def _(primals, tangents):
    (x,) = primals
    y, saved = forward(x)
    y_leaves, y_tree = jax.tree.flatten(y)
    x_tree = jax.tree.structure(x)
    vectors = x_tree.flatten_up_to(tangents[0])
    floats = _floats(jax.tree.leaves(x))
    # `vjp` reads dtypes and not `vectors`, as a parameter must not close over tracers.
    dtypes = [vectors[i].dtype for i in floats]
    y_floats = _floats(y_leaves)
    # Not for floats, because NumPy does not support symbolic batch sizes.
    zeros: list[Any] = [
      None if i in y_floats else np.zeros(leaf.shape, jax.dtypes.float0)
      for i, leaf in enumerate(y_leaves)
    ]
    residuals, residual_tree = jax.tree.flatten((x, saved))

    def jvp(residuals, vectors):
      x = jax.tree.leaves(residual_tree.unflatten(residuals)[0])

      def outputs(*leaves):
        leaves = _replace(x, floats, leaves)
        y = jax.tree.leaves(forward(x_tree.unflatten(leaves))[0])
        return [y[i] for i in y_floats]

      return jax.jvp(outputs, [x[i] for i in floats], list(vectors))[1]

    def vjp(residuals, y_grad):
      x, saved = residual_tree.unflatten(residuals)
      y_grad = y_tree.unflatten(_replace(zeros, y_floats, y_grad))
      x_grad = backward(x, saved, y_grad)
      x_grad = x_tree.flatten_up_to(x_grad)
      return [
        x_grad[i].astype(dtype) for i, dtype in zip(floats, dtypes, strict=True)
      ]

    y_tangent = _linear_p.bind(
      *residuals,
      *(vectors[i] for i in floats),
      num_residuals=len(residuals),
      jvp=jvp,
      vjp=vjp,
      avals=tuple(jax.typeof(y_leaves[i]) for i in y_floats),
    )
    return y, y_tree.unflatten(_replace(zeros, y_floats, y_tangent))

  return differentiable


def match_varying(tree: Any, like: Any = None) -> Any:
  """Casts arrays to vary over every mesh axis over which any of them, or of `like`,
  does.

  Inside `jax.shard_map`, loops and custom derivatives need arrays of one type.
  """
  return vary(tree, varying_axes(tree if like is None else like))


def varying_axes(tree: Any) -> frozenset[str]:
  """The mesh axes over which any of the arrays varies inside `jax.shard_map`."""
  leaves = jax.tree.leaves(tree)
  varying = (jax.typeof(x).manual_axis_type.varying for x in leaves)
  return frozenset().union(*varying)


def vary(tree: Any, axes: frozenset[str]) -> Any:
  """Casts arrays to also vary over the given mesh axes."""
  if not axes:
    return tree

  def cast(x):
    missing = tuple(axes - jax.typeof(x).manual_axis_type.varying)
    return jax.lax.pcast(x, missing, to="varying") if missing else x

  return jax.tree.map(cast, tree)


def _floats(leaves):
  """The indices of the floating-point leaves."""
  dtypes = [jnp.result_type(leaf) for leaf in leaves]
  return [i for i, t in enumerate(dtypes) if jnp.issubdtype(t, jnp.inexact)]


def _replace(leaves, indices, others):
  """Returns a list of `leaves` with those at `indices` replaced by `others`."""
  leaves = list(leaves)
  for i, other in zip(indices, others, strict=True):
    leaves[i] = other
  return leaves


_linear_p = Primitive("attention_jvp")
"""Computes J · vectors by `jvp(residuals, vectors)`, and Jᵀ · cotangents by `vjp`."""
_linear_p.multiple_results = True


def _apply(*arguments, num_residuals, jvp, vjp, avals):
  del vjp, avals
  return jvp(arguments[:num_residuals], arguments[num_residuals:])


def _jvp(primals, tangents, *, num_residuals, **params):
  nonzero = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]
  if all(i >= num_residuals for i in nonzero):
    residuals, vectors = primals[:num_residuals], tangents[num_residuals:]
    out = _linear_p.bind(*primals, num_residuals=num_residuals, **params)
    vectors = map(ad.instantiate_zeros, vectors)
    return out, _linear_p.bind(
      *residuals, *vectors, num_residuals=num_residuals, **params
    )

  def outputs(*arguments):
    arguments = _replace(primals, nonzero, arguments)
    return list(_apply(*arguments, num_residuals=num_residuals, **params))

  primals_in, tangents_in = (
    [x[i] for i in nonzero] for x in (primals, tangents)
  )
  return jax.jvp(outputs, primals_in, tangents_in)


def _transpose(cotangents, *arguments, num_residuals, jvp, vjp, avals):
  del jvp, avals
  grads = vjp(
    arguments[:num_residuals], [ad.instantiate_zeros(c) for c in cotangents]
  )
  vectors = arguments[num_residuals:]
  return [None] * num_residuals + [
    grad if ad.is_undefined_primal(vector) else None
    for grad, vector in zip(grads, vectors, strict=True)
  ]


def _batch(arguments, axes, *, num_residuals, jvp, vjp, avals):
  del avals
  size = next(
    x.shape[axis]
    for x, axis in zip(arguments, axes, strict=True)
    if axis is not None
  )
  batched = []
  for i, (x, axis) in enumerate(zip(arguments, axes, strict=True)):
    if axis is not None:
      x = jnp.moveaxis(x, axis, 0)
    elif i >= num_residuals:
      x = jnp.broadcast_to(x[None], (size, *np.shape(x)))
    batched.append(x)
  residual_axes = tuple(
    None if axis is None else 0 for axis in axes[:num_residuals]
  )
  params = {
    "num_residuals": num_residuals,
    "jvp": jax.vmap(jvp, (residual_axes, 0)),
    "vjp": jax.vmap(vjp, (residual_axes, 0)),
  }
  closed = jax.make_jaxpr(lambda *x: _apply(*x, avals=(), **params))(*batched)
  out = _linear_p.bind(*batched, avals=tuple(closed.out_avals), **params)
  return out, [0] * len(out)


_linear_p.def_impl(_apply)
_linear_p.def_abstract_eval(lambda *_, avals, **params: avals)
ad.primitive_jvps[_linear_p] = _jvp
ad.primitive_transposes[_linear_p] = _transpose
batching.primitive_batchers[_linear_p] = _batch
mlir.register_lowering(_linear_p, mlir.lower_fun(_apply, multiple_results=True))

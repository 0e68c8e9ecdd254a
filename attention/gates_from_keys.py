"""Gates without inputs: they are read from the keys."""

from attention import arguments, plug


def gates_from_keys(mechanism: plug.Attention) -> plug.Attention:
  """A mechanism whose gates are read from its keys.

  For callers that have queries, keys and values and nothing that they are
  projected from: benchmarks, pictures, the contract. F of its `Dims` is K·H. A
  mechanism without gates is returned as it is.
  """
  gates = mechanism.gates
  if gates is None:
    return mechanism

  def read(variables, key):
    return gates(variables, key.reshape(*key.shape[:2], -1))

  def apply(variables, query, key, value, **call):
    arguments.check_qkv(query, key, value)
    call = {**read(variables, key), **call}
    return mechanism.apply(variables, query, key, value, **call)

  def after_cache(function):
    def call(variables, cache, query, key, *rest, **call):
      call = {**read(variables, key), **call}
      return function(variables, cache, query, key, *rest, **call)

    return function and call

  def apply_sharded(variables, query, key, value, **call):
    assert mechanism.apply_sharded is not None
    call = {**read(variables, key), **call}
    return mechanism.apply_sharded(variables, query, key, value, **call)

  return mechanism._replace(
    apply=apply,
    decode=after_cache(mechanism.decode),
    prefill=after_cache(mechanism.prefill),
    apply_sharded=mechanism.apply_sharded and apply_sharded,
    gates=None,
  )

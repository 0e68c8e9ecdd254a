"""Gates without inputs: they are read from the keys."""

from attention import arguments, plug


def gates_from_keys(mechanism: plug.Attention) -> plug.Attention:
  """A mechanism whose gates are read from its keys.

  For callers that have queries, keys and values and nothing that they are
  projected from: benchmarks, pictures, the contract. F of its `Dims` is K·H. A
  mechanism without gates is returned as it is. One that makes its own keys
  ('own_keys') makes them from the keys.
  """
  gates = mechanism.gates
  if gates is None:
    return mechanism

  makes_keys = "own_keys" in mechanism.supports

  def read(variables, key, call):
    """The key that the mechanism is given, and its options."""
    found = gates(variables, key.reshape(*key.shape[:2], -1))
    return None if makes_keys else key, {**found, **call}

  def apply(variables, query, key, value, **call):
    arguments.check_qkv(query, key, key if value is None else value)
    key, call = read(variables, key, call)
    return mechanism.apply(variables, query, key, value, **call)

  def after_cache(function):
    def call(variables, cache, query, key, *rest, **call):
      key, call = read(variables, key, call)
      return function(variables, cache, query, key, *rest, **call)

    return function and call

  def apply_sharded(variables, query, key, value, **call):
    assert mechanism.apply_sharded is not None
    key, call = read(variables, key, call)
    return mechanism.apply_sharded(variables, query, key, value, **call)

  return mechanism._replace(
    apply=apply,
    decode=after_cache(mechanism.decode),
    prefill=after_cache(mechanism.prefill),
    apply_sharded=mechanism.apply_sharded and apply_sharded,
    gates=None,
  )

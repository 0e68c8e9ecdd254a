"""Faults of what mechanisms with a softmax share, positions and adapters."""

from tests.verification.mutants.mutant import Mutant, files

_PARTS = files("tests/attention", "sharding", "sequence")
_POSITIONS = files("tests/attention", "positions", "rotary")

MUTANTS = (
  # Who sees whom.
  Mutant(
    "attention/softmax/visible.py",
    "conditions.append((distance >= -self.left)[None, None])",
    "conditions.append((distance > -self.left)[None, None])",
    "sliding_window",
    "a window one narrower on the left",
  ),
  Mutant(
    "attention/softmax/visible.py",
    "conditions.append((distance <= self.right)[None, None])",
    "conditions.append((distance <= self.right + 1)[None, None])",
    "flash",
    "a query sees the next key",
  ),
  Mutant(
    "attention/softmax/visible.py",
    "conditions.append(query_ids == key_ids)",
    "conditions.append(query_ids >= key_ids)",
    "flash",
    "a segment sees those before it",
  ),
  Mutant(
    "attention/softmax/visible.py",
    "x = jnp.where(jnp.any(any_head, 1)[..., None, None], x, 0)",
    "x = jnp.where(jnp.any(any_head, 1)[..., None, None], x, x)",
    "flash",
    "NaN in hidden keys gets through",
  ),
  Mutant(
    "attention/softmax/tiles.py",
    "is_even = from_zero and self.source_length % self.width == 0",
    "is_even = from_zero",
    "flash",
    "the last block, which moves back, counts keys twice",
  ),
  Mutant(
    "attention/softmax/own_logits.py",
    'x += params["forget_bias"][None, None]',
    'x -= params["forget_bias"][None, None]',
    "flash",
    "the bias of a forget gate, which begins as 0, has the wrong sign",
  ),
  Mutant(
    "attention/softmax/mods.py",
    "consts = [arrays[i] for i in places]",
    "consts = [arrays[i] for i in order]",
    files("tests/attention", "mods_arrays"),
    "arrays of a score_mod take one another's places",
  ),
  # The softmax in tiles.
  Mutant(
    "attention/softmax/tiles.py",
    "m = jnp.maximum(jnp.max(x, -1, keepdims=True), _LOWEST / 2)",
    "m = jnp.max(x, -1, keepdims=True)",
    "sliding_window",
    "a query that sees nothing gets the mean of all values",
  ),
  Mutant(
    "attention/softmax/tiles.py",
    "m = jnp.maximum(m, sums[0])",
    "m = jnp.maximum(m, m)",
    "flash",
    "the maximum is that of the last block",
  ),
  Mutant(
    "attention/softmax/tiles.py",
    'delta = layout.dot("...v,...v->...", g, o)[..., None] - h',
    'delta = layout.dot("...v,...v->...", g, o)[..., None]',
    "flash",
    "the gradient of the log-sum-exp is left out",
  ),
  Mutant(
    "attention/softmax/tiles.py",
    "dp, dropped = dp * kept, p * kept",
    "dp, dropped = dp * kept, p",
    "flash",
    "gradients of values are without dropout",
  ),
  Mutant(
    "attention/softmax/tiles.py",
    "totals = jax.tree.map(lambda x: zeros(x, jnp.float32), arrays)",
    "totals = jax.tree.map(zeros, arrays)",
    files("tests/attention", "tiles"),
    "gradients of keys are summed in half precision",
  ),
  Mutant(
    "attention/platform/layout.py",
    "moved = jnp.clip(wanted, 0, source_length - width) - wanted",
    "moved = 0 * wanted",
    files("tests/attention", "tiles"),
    "gradients of a tile over an end go to other keys",
  ),
  Mutant(
    "attention/softmax/tiles.py",
    "share = jax.nn.sigmoid(lse - sinks)[..., None]",
    "share = jax.nn.sigmoid(lse - jax.lax.stop_gradient(sinks))[..., None]",
    "dense",
    "sinks get no gradient from the result",
  ),
  Mutant(
    "attention/softmax/rows.py",
    "largest = jnp.maximum(maximum, lowest)",
    "largest = jnp.maximum(0.0 * maximum, lowest)",
    "dense",
    "the maximum is not subtracted",
  ),
  # Scores.
  Mutant(
    "attention/softmax/logits.py",
    "queries = _at_distance(table, distance[::-1])",
    "queries = _at_distance(table, distance)",
    ("tests/attention/test_positions.py",),
    "relative queries of the opposite distances",
  ),
  Mutant(
    "attention/softmax/logits.py",
    "dx = (dx * self.scale).astype(query.dtype)",
    "dx = dx.astype(query.dtype)",
    "flash",
    "gradients without the scale",
  ),
  Mutant(
    "attention/softmax/logits.py",
    "part += jax.lax.dynamic_slice(total, at, part.shape)",
    "part += jnp.zeros_like(part)",
    "flash",
    "the gradient of a bias or table is that of the last tile",
  ),
  Mutant(
    "attention/softmax/logits.py",
    "return table[..., jnp.clip(distance, -longest, longest) + longest]",
    "return table[..., jnp.clip(distance, 1 - longest, longest) + longest]",
    "flash",
    "the farthest entry of a table is never read",
  ),
  Mutant(
    "attention/softmax/logits.py",
    "total = jnp.cumsum(tangents[0].astype(sums.dtype), axis=1)",
    "total = tangents[0].astype(sums.dtype)",
    "dense",
    "a forget gate has the gradient of its own position",
  ),
  Mutant(
    "attention/softmax/logits.py",
    "gates = jnp.where(jnp.swapaxes(mask[:, :, 0], 1, 2), gates, 0.0)",
    "gates = jnp.where(jnp.swapaxes(mask[:, :, 0], 1, 2), gates, gates)",
    "dense",
    "hidden positions forget",
  ),
  Mutant(
    "attention/softmax/dropout.py",
    "return jnp.where(is_kept, jnp.float32(1.0 / keep), 0.0)",
    "return jnp.where(is_kept, jnp.float32(1.0), 0.0)",
    "dense",
    "weights that dropout keeps are not divided by 1 − rate",
  ),
  # Caches.
  Mutant(
    "attention/dense.py",
    "seen=(slots <= index)[:, None],",
    "seen=(slots < index)[:, None],",
    "dense",
    "a decoded position does not see itself",
  ),
  Mutant(
    "attention/softmax/cache.py",
    "layout.put(cache.value, value, 0),\n    lengths,",
    "layout.put(cache.value, value, 0),\n    0 * lengths + key.shape[1],",
    "dense",
    "a prompt is as long as the longest",
  ),
  Mutant(
    "attention/sliding_window.py",
    "size = min(left * max(spacings) + 1, max_length)",
    "size = min(max(left * max(spacings), 1), max_length)",
    "sliding_window",
    "the ring of a window is one too short",
  ),
  # Windows, and sequences in parts.
  Mutant(
    "attention/softmax/windows.py",
    "near(query, key, value, visible & key_mask(is_other), rng=rngs[0]),",
    "near(query, key, value, visible, rng=rngs[0]),",
    "sliding_window",
    "global keys in the window count twice",
  ),
  Mutant(
    "attention/softmax/sharding.py",
    "pairs = [(i, i - hop) for i in range(size) if 0 <= i - hop < size]",
    "pairs = [(i, (i - hop) % size) for i in range(size)]",
    _PARTS,
    "the window of the first device reaches the last one",
  ),
  Mutant(
    "attention/softmax/sharding.py",
    "carry, _ = jax.lax.scan(step, carry, jnp.arange(1, size))",
    "carry, _ = jax.lax.scan(step, carry, jnp.arange(1, size - 1))",
    _PARTS,
    "the ring makes one step too few",
  ),
  # Positions and adapters.
  Mutant(
    "attention/positions.py",
    "return (1.0 - stretched) * plain + stretched * plain / factor, given",
    "return (1.0 - stretched) * plain + stretched * plain / factor, 1.0",
    _POSITIONS,
    "YaRN without its factor",
  ),
  Mutant(
    "attention/positions.py",
    "more = 2.0 ** (-4.0 * np.arange(1, 2 * power + 1, 2) / power)",
    "more = 2.0 ** (-4.0 * np.arange(2, 2 * power + 2, 2) / power)",
    _POSITIONS,
    "ALiBi's slopes of heads beyond a power of two",
  ),
  Mutant(
    "attention/attention_fn.py",
    'call["mask"] = _fold("mask", mask != 0, lead)',
    'call["mask"] = _fold("mask", mask == mask, lead)',
    files("tests/attention", "attention_fn"),
    "the mask of a Flax module is ignored",
  ),
  Mutant(
    "attention/attention_fn.py",
    "if broadcast_dropout:",
    "if broadcast_dropout is None:",
    files("tests/attention", "attention_fn"),
    "broadcast_dropout is accepted and ignored",
  ),
)

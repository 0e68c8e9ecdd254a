"""The scores of `additive_attention`, tile by tile.

With a = W q for every query and c = U k for every key, which are already
projected to A numbers for each head, and dx the gradient of the scores,

  z = tanh(a_t + c_s)        x_ts = v · z
  dz = dx · v · (1 − z²)     da_t = Σ_s dz     dc_s = Σ_t dz     dv = Σ_ts dx · z

Arrays of C·D·A numbers exist for one tile only. Every query head has its own
keys `[B, N, D, A]`, also where query heads share their values.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from attention.core.tile import Keys, Pull


class Additive(NamedTuple):
  """The `tile.Score` v·tanh(a + c). Its parameters are v `[N, A]`."""

  is_costly: bool = True

  def logits(
    self,
    query: Float[Array, "B K Q A"],
    keys: Keys,
    parameters: Float[Array, "N A"],
    rows: int,
  ) -> Float[Array, "B K Q D"]:
    """See `tile.Score`."""
    x = self._scores(self._hidden(query, keys, rows), parameters)
    return x.reshape(*query.shape[:3], -1)

  def vjp(
    self,
    query: Float[Array, "B K Q A"],
    keys: Keys,
    parameters: Float[Array, "N A"],
    rows: int,
  ) -> tuple[Float[Array, "B K D Q"], Pull]:
    """See `tile.Score`."""
    z = self._hidden(query, keys, rows)
    x = self._scores(z, parameters).reshape(*query.shape[:3], -1)

    def pull(dx):
      dx = jnp.swapaxes(dx, 2, 3).reshape(z.shape[:4])
      pairs = z.reshape(*z.shape[:2], -1, z.shape[4])
      dscore = jnp.einsum("bnx,bnxa->bna", dx.reshape(pairs.shape[:3]), pairs)
      dz = dx[..., None] * (1.0 - z * z)
      # v does not depend on t and s, so it multiplies the sums, not every pair.
      factor = parameters[None, :, None]
      dquery = (jnp.sum(dz, 3) * factor).reshape(query.shape)
      dkey = jnp.sum(dz, 2) * factor
      return jnp.swapaxes(dquery, 2, 3), dkey, jnp.sum(dscore, 0)

    return jnp.swapaxes(x, 2, 3), pull

  def _hidden(
    self, query: Float[Array, "B K Q A"], keys: Keys, rows: int
  ) -> Float[Array, "B N C D A"]:
    """The hidden units z of every pair."""
    query = query.reshape(query.shape[0], -1, rows, query.shape[3])
    return jnp.tanh(query[:, :, :, None] + keys.key[:, :, None])

  def _scores(
    self, z: Float[Array, "B N C D A"], v: Float[Array, "N A"]
  ) -> Float[Array, "B N X"]:
    """The scores v · z of all X = C·D pairs, as a product: a sum is slower."""
    pairs = z.reshape(*z.shape[:2], -1, z.shape[4])
    # Repeated for every example, so that the factors share a batch axis.
    v = jnp.broadcast_to(v, (z.shape[0], *v.shape))
    return jnp.einsum("bnxa,bna->bnx", pairs, v)

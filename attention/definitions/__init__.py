"""The mechanisms as their papers define them: naive, in float64 NumPy.

`attention.definitions.performer_attention` has the name and the arguments of
`attention.performer_attention`, except for dropout and arguments that only affect the
computation. It accepts whatever `np.asarray` accepts, and returns float64. Each
definition follows its paper and may use T×S memory. The fast functions are tested
against the definitions, and share no code with them. The definitions of mechanisms
that are recurrences are in the files that are named after them; many are in
`gated_linear` and `delta_rule`.
"""

from attention.definitions.additive import additive_attention
from attention.definitions.bigbird import bigbird_attention
from attention.definitions.compressed import (
  compressed_attention,
  compressed_entries,
)
from attention.definitions.delta_product import delta_product_attention
from attention.definitions.dense import dense_attention
from attention.definitions.differential import differential_attention
from attention.definitions.dsa import dsa_attention, dsa_indexer_loss
from attention.definitions.flash import flash_attention
from attention.definitions.gka import gka_attention
from attention.definitions.gsa import gsa_attention
from attention.definitions.latent import latent_attention
from attention.definitions.linear import linear_attention
from attention.definitions.linformer import linformer_attention
from attention.definitions.log_linear import log_linear_attention
from attention.definitions.lsh import lsh_attention
from attention.definitions.mamba import mamba_attention
from attention.definitions.mesa import mesa_attention
from attention.definitions.mlstm import mlstm_attention
from attention.definitions.moba import moba_attention
from attention.definitions.momentum_delta import momentum_delta_attention
from attention.definitions.multiplicative import multiplicative_attention
from attention.definitions.nsa import nsa_attention
from attention.definitions.nystrom import nystrom_attention
from attention.definitions.path import path_attention
from attention.definitions.performer import performer_attention
from attention.definitions.precond_delta import precond_delta_attention
from attention.definitions.recurrent import (
  delta_rule_attention,
  gated_linear_attention,
)
from attention.definitions.rg_lru import rg_lru_attention
from attention.definitions.rwkv6 import rwkv6_attention
from attention.definitions.rwkv7 import rwkv7_attention
from attention.definitions.selected import selected_attention
from attention.definitions.sliding_window import sliding_window_attention
from attention.definitions.stick_breaking import stick_breaking_attention
from attention.definitions.strided_2d import strided_2d_attention
from attention.definitions.titans import titans_attention
from attention.definitions.ttt_linear import ttt_linear_attention
from attention.definitions.window_2d import window_2d_attention
from attention.definitions.window_linear import window_linear_attention

__all__ = [
  "additive_attention",
  "bigbird_attention",
  "compressed_attention",
  "compressed_entries",
  "delta_product_attention",
  "delta_rule_attention",
  "dense_attention",
  "differential_attention",
  "dsa_attention",
  "dsa_indexer_loss",
  "flash_attention",
  "gated_linear_attention",
  "gka_attention",
  "gsa_attention",
  "latent_attention",
  "linear_attention",
  "linformer_attention",
  "log_linear_attention",
  "lsh_attention",
  "mamba_attention",
  "mesa_attention",
  "mlstm_attention",
  "moba_attention",
  "momentum_delta_attention",
  "multiplicative_attention",
  "nsa_attention",
  "nystrom_attention",
  "path_attention",
  "performer_attention",
  "precond_delta_attention",
  "rg_lru_attention",
  "rwkv6_attention",
  "rwkv7_attention",
  "selected_attention",
  "sliding_window_attention",
  "stick_breaking_attention",
  "strided_2d_attention",
  "titans_attention",
  "ttt_linear_attention",
  "window_2d_attention",
  "window_linear_attention",
]

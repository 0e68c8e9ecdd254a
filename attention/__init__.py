"""Attention as pure functions of arrays: one signature, one layout.

`out = f(query, key, value, *, mask=None, is_causal=False, scale=None, …)` with
`query [B, T, N, H]`, `key, value [B, S, K, H]`, result `[B, T, N, H]`.

Each function has a definition of the same name in `attention.definitions`, which
computes the paper's formula directly in float64. Tests compare the two.
"""

import importlib
from typing import TYPE_CHECKING, Any

# Mechanisms, in the order of all tables.
# isort: off
from attention.dense import dense, dense_attention
from attention.flash import flash, flash_attention
from attention.sliding_window import sliding_window, sliding_window_attention
from attention.bigbird import bigbird, bigbird_attention, bigbird_random_blocks
from attention.linear import (
  elu_plus_one,
  hedgehog_features,
  linear,
  linear_attention,
  taylor_features,
)
from attention.performer import (
  orthogonal_features,
  performer,
  performer_attention,
)
from attention.window_linear import window_linear, window_linear_attention
from attention.linformer import linformer, linformer_attention
from attention.lsh import lsh, lsh_attention, lsh_rotations
from attention.nystrom import nystrom, nystrom_attention
from attention.additive import additive, additive_attention
from attention.multiplicative import multiplicative, multiplicative_attention
from attention.window_2d import window_2d, window_2d_attention
from attention.strided_2d import strided_2d, strided_2d_attention
from attention.gated_linear import (
  gated_linear,
  gated_linear_attention,
  hgrn2,
  lightning,
  mamba2,
  retention,
)
from attention.mamba3 import mamba3
from attention.mamba import mamba, mamba_attention
from attention.rg_lru import rg_lru, rg_lru_attention
from attention.mlstm import MlstmState, mlstm, mlstm_attention
from attention.delta_rule import (
  comba,
  delta,
  delta_rule_attention,
  gated_delta,
  gated_delta_2,
  kimi_delta,
)
from attention.delta_product import delta_product, delta_product_attention
from attention.precond_delta import (
  PrecondState,
  precond_delta,
  precond_delta_attention,
)
from attention.momentum_delta import momentum_delta, momentum_delta_attention
from attention.rwkv6 import rwkv6, rwkv6_attention
from attention.rwkv7 import rwkv7, rwkv7_attention
from attention.mesa import mesa, mesa_attention
from attention.gka import gka, gka_attention
from attention.gsa import gsa, gsa_attention
from attention.ttt_linear import TttState, ttt_linear, ttt_linear_attention
from attention.titans import TitansState, titans, titans_attention
from attention.log_linear import log_linear, log_linear_attention
from attention.differential import differential, differential_attention
from attention.latent import latent, latent_attention
from attention.moba import moba, moba_attention
from attention.nsa import nsa, nsa_attention
from attention.stick_breaking import stick_breaking, stick_breaking_attention
from attention.path import path, path_attention
from attention.dsa import dsa, dsa_attention
from attention.compressed import compressed, compressed_attention
# isort: on

from attention.attention_fn import as_attention_fn
from attention.mechanism import ATTENTIONS, Attention, Dims
from attention.names import suggestion
from attention.platform import backend
from attention.positions import (
  alibi_bias,
  alibi_slopes,
  deberta_buckets,
  rotary,
  rotary_frequencies,
  t5_bias,
  t5_buckets,
)
from attention.recurrent.gates import gates_from_keys
from attention.softmax.entries import compressed_entries
from attention.softmax.indexer import dsa_indexer_loss
from attention.softmax.logits import Logits
from attention.softmax.mods import make_block_mask
from attention.softmax.selected_blocks import selected_attention
from attention.softmax.visible import (
  Visible,
  causal,
  key_mask,
  lengths,
  mask_mod,
  segments,
  window,
)
from attention.weights import attention_weights

backend.warn_of_faulty_fusion()

if TYPE_CHECKING:
  from attention import definitions as definitions

__version__ = "0.1.0"

__all__ = [
  "ATTENTIONS",
  "Attention",
  "Dims",
  "Logits",
  "MlstmState",
  "PrecondState",
  "TitansState",
  "TttState",
  "Visible",
  "additive",
  "additive_attention",
  "alibi_bias",
  "alibi_slopes",
  "as_attention_fn",
  "attention_weights",
  "bigbird",
  "bigbird_attention",
  "bigbird_random_blocks",
  "causal",
  "comba",
  "compressed",
  "compressed_attention",
  "compressed_entries",
  "deberta_buckets",
  "delta",
  "delta_product",
  "delta_product_attention",
  "delta_rule_attention",
  "dense",
  "dense_attention",
  "differential",
  "differential_attention",
  "dsa",
  "dsa_attention",
  "dsa_indexer_loss",
  "flash",
  "flash_attention",
  "elu_plus_one",
  "gated_delta",
  "gated_delta_2",
  "gated_linear",
  "gated_linear_attention",
  "gates_from_keys",
  "gka",
  "gka_attention",
  "gsa",
  "gsa_attention",
  "hedgehog_features",
  "hgrn2",
  "key_mask",
  "kimi_delta",
  "latent",
  "latent_attention",
  "lengths",
  "lightning",
  "linear",
  "linear_attention",
  "linformer",
  "linformer_attention",
  "log_linear",
  "log_linear_attention",
  "lsh",
  "lsh_attention",
  "lsh_rotations",
  "make_block_mask",
  "mask_mod",
  "mamba",
  "mamba2",
  "mamba3",
  "mamba_attention",
  "mesa",
  "mesa_attention",
  "mlstm",
  "mlstm_attention",
  "moba",
  "moba_attention",
  "momentum_delta",
  "momentum_delta_attention",
  "multiplicative",
  "multiplicative_attention",
  "nsa",
  "nsa_attention",
  "nystrom",
  "nystrom_attention",
  "orthogonal_features",
  "path",
  "path_attention",
  "performer",
  "performer_attention",
  "precond_delta",
  "precond_delta_attention",
  "retention",
  "rg_lru",
  "rg_lru_attention",
  "rotary",
  "rotary_frequencies",
  "rwkv6",
  "rwkv6_attention",
  "rwkv7",
  "rwkv7_attention",
  "segments",
  "selected_attention",
  "sliding_window",
  "sliding_window_attention",
  "stick_breaking",
  "stick_breaking_attention",
  "strided_2d",
  "strided_2d_attention",
  "window",
  "t5_bias",
  "t5_buckets",
  "taylor_features",
  "titans",
  "titans_attention",
  "ttt_linear",
  "ttt_linear_attention",
  "window_2d",
  "window_2d_attention",
  "window_linear",
  "window_linear_attention",
]


def __dir__() -> list[str]:
  """The public names, without imported modules."""
  return sorted([*__all__, "__version__", "definitions"])


def __getattr__(name: str) -> Any:
  """Imports the definitions on first use; no attention function needs them."""
  if name == "definitions":
    return importlib.import_module("attention.definitions")
  hint = suggestion(name, __all__)
  raise AttributeError(f"module 'attention' has no attribute {name!r}{hint}")

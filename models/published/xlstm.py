"""xLSTM 7B: Beck et al., arXiv:2405.04517 and arXiv:2503.13427."""

from collections.abc import Collection, Mapping
from typing import Any

from models import nested
from models.attention_config import AttentionConfig
from models.config import ModelConfig
from models.published import family, gemma2, mamba2
from models.published.family import Description, Family, Row
from models.published.keys import no_effect


def describe(
  hf_config: Mapping[str, Any], names: Collection[str], head: str
) -> Description:
  """Implements `Family.describe`."""
  del names
  features = family.size(hf_config, "hidden_size", 4096)
  layers = family.size(hf_config, "num_hidden_layers", 32)
  family.only(hf_config, "hidden_size", embedding_dim=features)
  family.only(hf_config, "num_hidden_layers", num_blocks=layers)
  family.only(
    hf_config,
    # Norms would also have biases.
    use_bias=False,
    add_out_norm=True,
    tie_word_embeddings=False,
    weight_mode="single",
  )
  heads = family.size(hf_config, "num_heads", 8)
  widths = {}
  for name, default in (("qk_dim_factor", 0.5), ("v_dim_factor", 1.0)):
    width = int(features * family.number(hf_config, name, default))
    if width < 1 or width % heads:
      raise ValueError(
        f"{name}: expected a multiple of {heads} (num_heads) features, got {width}"
      )
    widths[name] = width // heads
  multiple = family.size(hf_config, "ffn_round_up_to_multiple_of", 64)
  hidden = features * family.number(hf_config, "ffn_proj_factor", 2.667)
  options = {
    "gate_soft_cap": gemma2.cap(hf_config, "gate_soft_cap", 15.0),
    "epsilon": family.number(hf_config, "eps", 1e-6),
  }
  config = nested.make(
    ModelConfig,
    kind="decoder",
    num_layers=layers,
    num_heads=heads,
    head_dim=widths["qk_dim_factor"],
    value_dim=widths["v_dim_factor"],
    features=features,
    mlp_features=int((hidden + multiple - 1) // multiple * multiple),
    mlp_bias=False,
    gated=True,
    activation="silu",
    output_norm="group_scale",
    output_gate="sigmoid",
    position="none",
    norm="pre",
    norm_kind="rms",
    norm_epsilon=family.number(hf_config, "norm_eps", 1e-6),
    embedding_scale=1.0,
    tie_embeddings=False,
    logit_soft_cap=gemma2.cap(hf_config, "output_logit_soft_cap", 30.0),
    head=head,
    decoder_attention=AttentionConfig("mlstm", options),
  )
  vocab_size = family.size(hf_config, "vocab_size", 50304)
  return Description(config, vocab_size, vocab_size, mamba2.LONGEST)


_MODULE = "decoder_{i}/self_attention"
_PARTS = {
  "mlstm_layer.q": f"{_MODULE}/query",
  "mlstm_layer.k": f"{_MODULE}/key",
  "mlstm_layer.v": f"{_MODULE}/value",
  "mlstm_layer.ogate_preact": f"{_MODULE}/gate",
  "mlstm_layer.out_proj": f"{_MODULE}/out",
  "ffn.proj_up_gate": "decoder_{i}/mlp/gate",
  "ffn.proj_up": "decoder_{i}/mlp/hidden",
  "ffn.proj_down": "decoder_{i}/mlp/out",
}


def rows(config: ModelConfig) -> list[Row]:
  """Implements `Family.rows`."""
  theirs = "backbone.blocks.{i}"
  heads = config.num_heads
  by_head = family.Layout(
    lambda x, n: [x.reshape(heads, -1)], lambda xs: xs[0].reshape(-1)
  )
  table = family.table("backbone.embeddings", "target_embedding")
  for old, new in _PARTS.items():
    table += family.linear(f"{theirs}.{old}", new)
  table += family.norm(
    f"{theirs}.norm_mlstm", "decoder_{i}/self_attention_norm"
  )
  table += family.norm(f"{theirs}.norm_ffn", "decoder_{i}/mlp_norm")
  table.append(
    Row(
      f"{theirs}.mlstm_layer.multihead_norm.weight",
      (f"params/{_MODULE}/out_norm/scale",),
      by_head,
    )
  )
  for i, mechanism in enumerate(config.layers("decoder_attention")):
    # Another mechanism may have variables of the same names.
    own = f"params/decoder_{i}/self_attention/attention"
    for name in ("forget", "input") if mechanism.name == "mlstm" else ():
      gate = f"backbone.blocks.{i}.mlstm_layer.{name[0]}gate_preact"
      table += [
        Row(f"{gate}.weight", (f"{own}/{name}_kernel",), family.TRANSPOSED),
        Row(f"{gate}.bias", (f"{own}/{name}_bias",)),
      ]
  table += family.norm("backbone.out_norm", "decoder_norm")
  return table + family.table("lm_head", "output_embedding")


XLSTM = Family(
  name="xlstm",
  architectures={"xLSTMForCausalLM": "tokens"},
  describe=describe,
  rows=rows,
  prefix="backbone.",
  parts=("embeddings", "blocks", "out_norm"),
  without_effect=no_effect(
    "selects an implementation of the same function",
    "autocast_kernel_dtype chunk_size chunkwise_kernel inference_state_dtype "
    "max_inference_chunksize mode norm_reduction_force_float32 "
    "return_last_states sequence_kernel step_kernel",
  ),
)
"""Decoders with mLSTM layers whose outputs are normalised and gated."""

"""Writes transformers.npz: results of attention classes of transformers.

    python3.11 -m venv VENV
    VENV/bin/pip install torch==2.13.0 transformers==5.23.0
    OMP_NUM_THREADS=1 VENV/bin/python tests/verification/peers/make_transformers.py

Where a class computes queries, keys and values from its inputs, its projections are
replaced by modules that return those of a case.
"""

import types

from modules import ConstantModule, swap_heads
import numpy as np
import torch
from torch import nn
import transformers
from transformers_sparse import modeling, sparse
from vectors import Draw, Vectors, unit

T, N, H, V = 29, 2, 4, 3
CAUSAL = torch.full((T, T), torch.finfo(torch.float32).min).triu(1)[None, None]


def softmax(file: Vectors) -> None:
  """Adds sinks, soft caps and a bias, ALiBi and latent attention."""
  grouped = {"heads": 4, "kv_heads": 2}
  module = types.SimpleNamespace(num_key_value_groups=2, training=False)
  module.head_dim = H

  def sinks(query, key, value, sinks):
    given = swap_heads(query, key, value)
    module.sinks = sinks
    eager = modeling("gpt_oss").eager_attention_forward
    return {"out": eager(module, *given, CAUSAL, H**-0.5)[0]}

  def cap(query, key, value, bias):
    given = swap_heads(query, key, value)
    eager = modeling("gemma2").eager_attention_forward
    return {"out": eager(module, *given, bias, softcap=2.0)[0]}

  draw = Draw("hf sinks")
  capped = {"logits_soft_cap": 2.0}
  facts = {"mechanism": "dense"}
  file.add(
    "hf_sinks",
    sinks,
    witness="gpt_oss eager_attention_forward",
    given=draw.qkv(**grouped) | {"sinks": draw.normal(4)},
    options={"is_causal": True},
    **facts,
  )
  file.add(
    "hf_cap",
    cap,
    witness="gemma2 eager_attention_forward, a bias after the cap",
    given=draw.qkv(**grouped) | {"bias": draw.normal(1, 4, T, T)},
    options=capped,
    **facts,
  )

  def alibi(query, key, value):
    bloom = modeling("bloom")
    bias = bloom.build_alibi_tensor(torch.ones(1, T), 6, torch.float32)
    given = swap_heads(query, key, value)
    eager = modeling("gpt_oss").repeat_kv
    key, value = (eager(x, 2) for x in given[1:])
    logits = given[0] @ key.transpose(2, 3) * H**-0.5 + bias[None] + CAUSAL
    return {"out": (logits.softmax(-1) @ value).transpose(1, 2)}

  file.add(
    "hf_alibi",
    alibi,
    witness="bloom build_alibi_tensor",
    mechanism="dense",
    # Six heads, not a power of two.
    given=Draw("hf alibi").qkv(heads=6, kv_heads=3),
    options={"relative_bias": {"alibi_bias": [6, T]}, "is_causal": True},
  )
  differential(file)
  latent(file)


def differential(file: Vectors) -> None:
  """Adds DiffLlama, whose heads n and n + N are the halves of our head n."""
  diff = modeling("diffllama")
  config = transformers.DiffLlamaConfig(
    hidden_size=8 * H // 2,
    num_attention_heads=8,
    num_key_value_heads=4,
    attn_implementation="eager",
  )

  def halves(x):
    first, second = x.chunk(2, -1)
    return torch.cat([first, second], 2).flatten(2)

  def run(query, key, value, prepare):
    module = diff.DiffLlamaAttention(config, 1).eval()
    given = (halves(x) for x in (query, key, value))
    module.q_proj, module.k_proj, module.v_proj = map(ConstantModule, given)
    module.o_proj = nn.Identity()
    prepare(module)

    class Unscaled(nn.Module):
      def forward(self, x):
        return x / (1 - module.lambda_init)

    module.groupnorm = Unscaled()
    no_rotation = torch.ones(1, T, H // 2), torch.zeros(1, T, H // 2)
    out, _ = module(query.new_zeros(1, T, 1), no_rotation, CAUSAL)
    return {"out": out.unflatten(2, (4, H))}

  def call(query, key, value, weight):
    def prepare(module):
      for name in ("q1", "k1", "q2", "k2"):
        setattr(module, f"lambda_{name}", nn.Parameter(torch.zeros(H // 2)))
      module.lambda_init = weight

    return run(query, key, value, prepare)

  def with_params(query, key, value, **params):
    def prepare(module):
      for name in ("query_1", "key_1", "query_2", "key_2"):
        parameter = f"lambda_{name[0]}{name[-1]}"
        delattr(module, parameter)
        setattr(module, parameter, params[f"params/{name}"])
      module.lambda_init = 0.5

    return run(query, key, value, prepare)

  draw = Draw("hf differential")
  given = draw.qkv(heads=4, kv_heads=2, value=H)
  facts = {"witness": "DiffLlamaAttention", "mechanism": "differential"}
  file.add(
    "hf_differential",
    call,
    function="differential_attention",
    given=given | {"weight": np.array(0.4375)},
    options={"is_causal": True},
    **facts,
  )
  names = "query_1", "key_1", "query_2", "key_2"
  params = {f"params/{name}": draw.normal(H // 2) for name in names}
  file.add(
    "hf_differential_weight",
    with_params,
    function="differential",
    given=given | params,
    options={"start": 0.5},
    definition=False,
    **facts,
  )


def latent(file: Vectors) -> None:
  """Adds DeepSeek's multi-head latent attention, without rotary positions."""
  deepseek = modeling("deepseek_v3")
  heads, rank, nope_dim, rope_dim = 3, 5, 4, 2
  config = transformers.DeepseekV3Config(
    hidden_size=8,
    num_attention_heads=heads,
    num_key_value_heads=heads,
    q_lora_rank=None,
    kv_lora_rank=rank,
    qk_nope_head_dim=nope_dim,
    qk_rope_head_dim=rope_dim,
    v_head_dim=V,
    attn_implementation="eager",
  )

  def call(query, latent, key_kernel, value_kernel, shared_key):
    module = deepseek.DeepseekV3Attention(config, 0).eval()
    module.q_proj = ConstantModule(query.flatten(2))
    module.kv_a_proj_with_mqa = ConstantModule(
      torch.cat([latent, shared_key], -1)
    )
    module.kv_a_layernorm = module.o_proj = nn.Identity()
    kernel = torch.cat([key_kernel, value_kernel], -1).flatten(1)

    class Expand(nn.Module):
      def forward(self, x):
        return x @ kernel

    module.kv_b_proj = Expand()
    no_rotation = torch.ones(1, T, rope_dim), torch.zeros(1, T, rope_dim)
    out = module(query.new_zeros(1, T, 8), no_rotation, CAUSAL)[0]
    return {"out": out.unflatten(2, (heads, V))}

  draw = Draw("hf latent")
  file.add(
    "hf_latent",
    call,
    witness="DeepseekV3Attention",
    mechanism="latent",
    given={
      "query": draw.normal(1, T, heads, nope_dim + rope_dim),
      "latent": draw.normal(1, T, rank),
      "key_kernel": draw.normal(rank, heads, nope_dim, scale=0.5),
      "value_kernel": draw.normal(rank, heads, V, scale=0.5),
      "shared_key": draw.normal(1, T, rope_dim),
    },
    options={"is_causal": True},
  )


def positions(file: Vectors) -> None:
  """Adds rotary positions of every type, and T5's bias."""
  llama = modeling("llama")
  indices = np.arange(0, 7 * T, 7, dtype=np.int32)[None]
  trained = {"original_max_position_embeddings": 64}
  llama3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
  for name, scaling in {
    "default": {},
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 3.0, "max_position_embeddings": 64},
    "llama3": llama3 | trained,
    "yarn": {"factor": 4.0, "beta_fast": 8.0, "beta_slow": 1.0} | trained,
    "yarn_mscale": {"factor": 4.0, "mscale": 0.75, "mscale_all_dim": 0.5}
    | trained,
  }.items():
    kind = name.split("_")[0]
    theta = 10000.0 if kind == "default" else 500.0
    parameters = {"rope_type": kind, "rope_theta": theta, **scaling}
    length = parameters.pop("max_position_embeddings", 256)
    config = transformers.LlamaConfig(
      hidden_size=16,
      num_attention_heads=1,
      head_dim=16,
      max_position_embeddings=length,
      rope_parameters=parameters,
    )

    def call(inputs, positions, config=config):
      turn = llama.LlamaRotaryEmbedding(config)(inputs, positions)
      return {"out": llama.apply_rotary_pos_emb(inputs, inputs, *turn, 2)[0]}

    options = {"theta": theta}
    if kind != "default":
      options["scaling"] = {"rope_type": kind, **scaling}
    file.add(
      f"hf_rotary_{name}",
      call,
      witness=f"LlamaRotaryEmbedding, {name}",
      mechanism="positions",
      function="rotary",
      given={"inputs": Draw("hf rotary").normal(1, T, 2, 16)},
      fixed={"positions": indices},
      options=options,
      definition=False,
    )
  t5 = modeling("t5")
  for causal in (False, True):

    def call(embedding, causal=causal):
      config = transformers.T5Config(
        num_heads=3,
        relative_attention_num_buckets=12,
        relative_attention_max_distance=40,
        is_decoder=causal,
      )
      module = t5.T5Attention(config, has_relative_attention_bias=True)
      module.relative_attention_bias = nn.Module()
      module.relative_attention_bias.forward = lambda x: embedding[x]
      bias = module.compute_bias(41, 41, device="cpu")[0]
      return {"out": torch.cat([bias[:, -1, :-1], bias[:, 0]], -1)}

    file.add(
      f"hf_t5_{causal}",
      call,
      witness="T5Attention.compute_bias",
      mechanism="positions",
      function="t5_bias",
      given={"embedding": Draw("hf t5").normal(12, 3)},
      options={"max_distance": 40, "is_causal": causal},
      definition=False,
    )


def recurrences(file: Vectors) -> None:
  """Adds Gated DeltaNet, Kimi Delta Attention and lightning attention."""
  qwen, kimi = modeling("qwen3_next"), modeling("kimi_linear")
  recurrent = {
    "torch_recurrent_gated_delta_rule": qwen.torch_recurrent_gated_delta_rule,
    "torch_chunk_gated_delta_rule": qwen.torch_chunk_gated_delta_rule,
    "recurrent_kimi_delta_attention": kimi.recurrent_kimi_delta_attention,
  }
  cases = [(name, name, N) for name in recurrent]
  # Four value heads for two heads of queries and keys.
  cases += [(f"{name}_grouped", name, 4) for name in list(recurrent)[:2]]
  for case, name, heads in cases:
    draw, channels = Draw(case), "kimi" in name
    given = draw.qkv() | {"value": draw.normal(1, T, heads, V)}
    given["query"], given["key"] = unit(given["query"]), unit(given["key"])
    given |= {
      "beta": draw.uniform(0, 1, 1, T, heads),
      "log_decay": draw.decays(1, T, heads, *([H] if channels else [])),
      "initial_state": draw.normal(1, heads, H, V),
    }
    function = recurrent[name]

    def call(query, key, value, beta, log_decay, initial_state, run=function):
      given = query, key, value, log_decay, beta
      more = {"initial_state": initial_state, "output_final_state": True}
      out, state = run(*given, **more)
      return {"out": out, "state": state}

    file.add(
      f"hf_{case}",
      call,
      witness=f"{name}{', more heads of values' * (heads > N)}",
      mechanism="kimi_delta" if channels else "gated_delta",
      function="delta_rule_attention",
      given=given,
      options={"return_state": True},
    )
  minimax = modeling("minimax")
  config = transformers.MiniMaxConfig(
    hidden_size=4 * H,
    num_attention_heads=4,
    head_dim=H,
    num_hidden_layers=5,
    block_size=8,
    layer_types=["linear_attention"] * 5,
  )

  def call(query, key, value):
    module = minimax.MiniMaxLightningAttention(config, 2)
    module.qkv_proj = ConstantModule(
      torch.cat([query, key, value], -1).flatten(2)
    )
    module.act_fn = module.norm = module.out_proj = nn.Identity()
    # The gates are 1 in float32.
    module.output_gate = ConstantModule(torch.full((1, T, 4 * H), 40.0))
    out = module(query.new_zeros(1, T, 4 * H), None, torch.ones(1, T))[0]
    return {"out": out.unflatten(2, (4, H))}

  # Its layer is the third of five; 10⁻⁵ is added to their distance as well.
  file.add(
    "hf_lightning",
    call,
    witness="MiniMaxLightningAttention",
    mechanism="lightning",
    function="lightning",
    given=Draw("hf lightning").qkv(heads=4, value=H),
    options={"depth": 2 / (4 + 1e-5)},
    call={"scale": 1.0},
  )


if __name__ == "__main__":
  transformers.set_seed(0)
  file = Vectors("transformers", f"transformers {transformers.__version__}")
  file.write(softmax, positions, recurrences, sparse)

"""Finds published families, which are imported on demand."""

from collections.abc import Mapping
import types

from models.published.family import Family
from settings.import_paths import ImportPaths, registered

FAMILIES: Mapping[str, Family] = ImportPaths(
  types.MappingProxyType(
    {
      "bert": "models.published.bert:BERT",
      "modernbert": "models.published.modernbert:MODERNBERT",
      "roberta": "models.published.roberta:ROBERTA",
      "xlm-roberta": "models.published.roberta:XLM_ROBERTA",
      "distilbert": "models.published.distilbert:DISTILBERT",
      "electra": "models.published.electra:ELECTRA",
      "deberta-v2": "models.published.deberta_v2:DEBERTA_V2",
      "gpt2": "models.published.gpt2:GPT2",
      "gpt_neox": "models.published.gpt_neox:GPT_NEOX",
      "t5": "models.published.t5:T5",
      "llama": "models.published.llama:LLAMA",
      "mistral": "models.published.mistral:MISTRAL",
      "ministral3": "models.published.mistral:MINISTRAL3",
      "mixtral": "models.published.experts:MIXTRAL",
      "minimax": "models.published.minimax:MINIMAX",
      "qwen2": "models.published.qwen2:QWEN2",
      "qwen3": "models.published.qwen3:QWEN3",
      "qwen3_moe": "models.published.experts:QWEN3_MOE",
      "qwen3_next": "models.published.qwen3_next:QWEN3_NEXT",
      "qwen3_5_text": "models.published.qwen3_next:QWEN3_5",
      "qwen3_5_moe_text": "models.published.qwen3_next:QWEN3_5_MOE",
      "gpt_oss": "models.published.gpt_oss:GPT_OSS",
      "deepseek_v3": "models.published.deepseek:DEEPSEEK_V3",
      "deepseek_v32": "models.published.deepseek:DEEPSEEK_V32",
      "glm_moe_dsa": "models.published.deepseek:GLM_MOE_DSA",
      "deepseek_v4": "models.published.deepseek_v4:DEEPSEEK_V4",
      "kimi_linear": "models.published.kimi_linear:KIMI_LINEAR",
      "smollm3": "models.published.smollm3:SMOLLM3",
      "phi3": "models.published.phi3:PHI3",
      "granite": "models.published.granite:GRANITE",
      "starcoder2": "models.published.starcoder2:STARCODER2",
      "cohere2": "models.published.cohere2:COHERE2",
      "opt": "models.published.opt:OPT",
      "gemma": "models.published.gemma:GEMMA",
      "gemma2": "models.published.gemma2:GEMMA2",
      "gemma3_text": "models.published.gemma3:GEMMA3",
      "olmo2": "models.published.olmo:OLMO2",
      "olmo3": "models.published.olmo:OLMO3",
      "olmo_hybrid": "models.published.olmo:OLMO_HYBRID",
      "minimax_m3_vl_text": "models.published.minimax_m3:MINIMAX_M3",
      "mamba": "models.published.mamba:MAMBA",
      "falcon_mamba": "models.published.mamba:FALCON_MAMBA",
      "mamba2": "models.published.mamba2:MAMBA2",
      "falcon_h1": "models.published.falcon_h1:FALCON_H1",
      "nemotron_h": "models.published.nemotron_h:NEMOTRON_H",
      "recurrent_gemma": ("models.published.recurrent_gemma:RECURRENT_GEMMA"),
      "xlstm": "models.published.xlstm:XLSTM",
      "longformer": "models.published.longformer:LONGFORMER",
      "nystromformer": "models.published.nystromformer:NYSTROMFORMER",
      **registered("FAMILIES"),
    }
  )
)
"""`model_type` -> its family."""


READERS = ImportPaths({"run": "training.inference.published:from_run"})
"""Readers of other folders that `load_pretrained` opens: `folder -> Pretrained`."""


def find(model_type: str | None, architecture: str) -> Family | None:
  """Returns the family of an architecture of transformers, or None.

  Args:
    model_type: `model_type` of `config.json`; if its family has the class, no other
      family is imported.
    architecture: the class.
  """
  named = FAMILIES.get(model_type) if isinstance(model_type, str) else None
  if named is not None and architecture in named.architectures:
    return named
  for family in FAMILIES.values():
    if architecture in family.architectures:
      return family
  return None

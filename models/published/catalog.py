"""The published families, which are imported on demand."""

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
      "gpt2": "models.published.gpt2:GPT2",
      "gpt_neox": "models.published.gpt_neox:GPT_NEOX",
      "t5": "models.published.t5:T5",
      "llama": "models.published.llama:LLAMA",
      "mistral": "models.published.mistral:MISTRAL",
      "qwen2": "models.published.qwen2:QWEN2",
      "qwen3": "models.published.qwen3:QWEN3",
      "qwen3_next": "models.published.qwen3_next:QWEN3_NEXT",
      "gemma2": "models.published.gemma2:GEMMA2",
      "gemma3_text": "models.published.gemma3:GEMMA3",
      "olmo2": "models.published.olmo:OLMO2",
      "olmo3": "models.published.olmo:OLMO3",
      "mamba": "models.published.mamba:MAMBA",
      "falcon_mamba": "models.published.mamba:FALCON_MAMBA",
      "mamba2": "models.published.mamba2:MAMBA2",
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
"""Other folders that `load_pretrained` opens: `folder -> Pretrained`."""


def find(model_type: str | None, architecture: str) -> Family | None:
  """Returns the family of a class of transformers, or None.

  Args:
    model_type: of `config.json`, whose family alone is imported if it has it.
    architecture: the class.
  """
  named = FAMILIES.get(model_type) if isinstance(model_type, str) else None
  if named is not None and architecture in named.architectures:
    return named
  for family in FAMILIES.values():
    if architecture in family.architectures:
      return family
  return None

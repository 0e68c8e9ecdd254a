"""The published families, by their names and by their architectures."""

from collections.abc import Mapping
from types import MappingProxyType

from models.pretrained.bert import BERT
from models.pretrained.cvt import CVT
from models.pretrained.family import Family
from models.pretrained.gemma2 import GEMMA2
from models.pretrained.gpt2 import GPT2
from models.pretrained.gpt_neox import GPT_NEOX
from models.pretrained.llama import LLAMA
from models.pretrained.longformer import LONGFORMER
from models.pretrained.mamba2 import MAMBA2
from models.pretrained.mistral import MISTRAL
from models.pretrained.nystromformer import NYSTROMFORMER
from models.pretrained.olmo import OLMO2, OLMO3
from models.pretrained.perceiver import PERCEIVER
from models.pretrained.qwen3 import QWEN3
from models.pretrained.qwen3_next import QWEN3_NEXT
from models.pretrained.roberta import ROBERTA
from models.pretrained.swin import SWIN
from models.pretrained.t5 import T5
from models.pretrained.vit import DEIT, VIT
from models.pretrained.wav2vec2_conformer import WAV2VEC2_CONFORMER

FAMILIES: Mapping[str, Family] = MappingProxyType(
  {
    family.name: family
    for family in (
      BERT,
      ROBERTA,
      GPT2,
      GPT_NEOX,
      T5,
      LLAMA,
      MISTRAL,
      QWEN3,
      QWEN3_NEXT,
      GEMMA2,
      OLMO2,
      OLMO3,
      MAMBA2,
      LONGFORMER,
      NYSTROMFORMER,
      VIT,
      DEIT,
      SWIN,
      CVT,
      PERCEIVER,
      WAV2VEC2_CONFORMER,
    )
  }
)
"""`model_type` -> its family."""

ARCHITECTURES: Mapping[str, Family] = MappingProxyType(
  {
    architecture: family
    for family in FAMILIES.values()
    for architecture in family.architectures
  }
)
"""Class of transformers -> its family."""

"""The published families, by their names and by their architectures."""

from collections.abc import Mapping
from types import MappingProxyType

from models.pretrained.bert import BERT
from models.pretrained.family import Family
from models.pretrained.gpt2 import GPT2

FAMILIES: Mapping[str, Family] = MappingProxyType(
  {family.name: family for family in (BERT, GPT2)}
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

"""Reads the text model of a multimodal model."""

from collections import Counter
from collections.abc import Mapping, Sequence
import functools
import re
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from models.published import files
from models.published.keys import WITHOUT_EFFECT


class Text(NamedTuple):
  """How a multimodal model stores its text model.

  Attributes:
    architecture: class of the text model.
    renamed: `(pattern, replacement)` for names of its tensors.
    images: the prefixes of all other tensors.
    unread: keys of `config.json` on which no text depends.
    has_parts: whether files have a tensor for each projection of each expert.
    reads_inner_tie: whether a true `tie_word_embeddings` of the text model ties the
      head of the multimodal model.
  """

  architecture: str
  renamed: tuple[tuple[str, str], ...] = (
    (r"^model\.language_model\.", "model."),
  )
  images: tuple[str, ...] = ("model.visual.",)
  unread: tuple[str, ...] = (
    *("image_token_id", "video_token_id"),
    *("vision_start_token_id", "vision_end_token_id"),
  )
  has_parts: bool = False
  reads_inner_tie: bool = False


_MINIMAX_M3 = Text(
  "MiniMaxM3VLForCausalLM",
  has_parts=True,
  reads_inner_tie=True,
  renamed=(
    (r"^language_model\.lm_head\.", "lm_head."),
    (r"^language_model\.model\.", "model."),
    (r"\.block_sparse_moe\.e_score_", ".mlp.gate.e_score_"),
    (r"\.block_sparse_moe\.", ".mlp."),
    (r"\.index_([qk]_proj|[qk]_norm)\.", r".indexer.\1."),
  ),
  images=("vision_tower.", "multi_modal_projector.", "patch_merge_mlp."),
  unread=(
    *("image_token_index", "video_token_index"),
    *("merged_hidden_size", "projector_hidden_size"),
  ),
)

TEXTS: Mapping[str, Text] = MappingProxyType(
  {
    "Qwen3_5ForConditionalGeneration": Text("Qwen3_5ForCausalLM"),
    "Qwen3_5MoeForConditionalGeneration": Text("Qwen3_5MoeForCausalLM"),
    "MiniMaxM3SparseForConditionalGeneration": _MINIMAX_M3,
  }
)
"""Architecture of a multimodal model -> its text model."""

_CONFIG = "text_config"
_KNOWN = {
  *("architectures", "model_type", _CONFIG, "vision_config"),
  *("tie_word_embeddings", *WITHOUT_EFFECT),
}


def find(hf_config: Mapping[str, Any]) -> Text | None:
  """Returns the text model of a multimodal `config.json`; None for any other."""
  names = hf_config.get("architectures")
  is_one = isinstance(names, list) and len(names) == 1
  return TEXTS.get(names[0]) if is_one else None


def text_config(hf_config: Mapping[str, Any], text: Text) -> dict[str, Any]:
  """Returns the `config.json` of the text model.

  Args:
    hf_config: `config.json` of the multimodal model.
    text: result of `find`.

  Raises:
    ValueError: a key is unknown, or the text model has no config.
  """
  for key, value in hf_config.items():
    if key not in _KNOWN and key not in text.unread:
      raise ValueError(
        f"{key}: not supported for a text model; expected a config without it, got "
        f"{value!r:.80}"
      )
  own = hf_config.get(_CONFIG)
  if not isinstance(own, dict):
    raise ValueError(f"{_CONFIG}: expected an object, got {own!r:.80}")
  # The head belongs to the multimodal model.
  ties = hf_config.get("tie_word_embeddings") or False
  if text.reads_inner_tie:
    ties = ties or own.get("tie_word_embeddings") or False
  changes = {"architectures": [text.architecture], "tie_word_embeddings": ties}
  return {**own, **changes}


def text_tensors(tensors: files.Tensors, text: Text) -> dict[str, files.Tensor]:
  """Returns the tensors of the text model, named as in a model without images.

  Raises:
    ValueError: two tensors get the same name.
  """
  renamed_tensors = {}
  for name, tensor in tensors.items():
    if not name.startswith(text.images):
      for pattern, replacement in text.renamed:
        name = re.sub(pattern, replacement, name)
      if name in renamed_tensors:
        raise ValueError(
          f"{tensor.file}: {name}: appears twice, under two names"
        )
      renamed_tensors[name] = tensor
  return _join_parts(renamed_tensors) if text.has_parts else renamed_tensors


def _join_parts(
  tensors: Mapping[str, files.Tensor],
) -> dict[str, files.Tensor]:
  """Joins gate and up projections, and stacks the kernels of experts.

  Incomplete groups keep their names, so that the error names the missing tensor.
  """
  tensors = dict(tensors)

  def join(name, rows):
    """Replaces the tensors named in `rows`, each row one expert, if all exist."""
    names = [x for row in rows for x in row]
    if all(x in tensors for x in names):
      parts = [{x: tensors.pop(x) for x in row} for row in rows]
      read = functools.partial(_join, parts, name.endswith("_proj"))
      tensors[name] = files.Tensor(read, parts[0][rows[0][0]].file)

  for name in [x for x in tensors if x.endswith(".gate_proj.weight")]:
    prefix = name.removesuffix("gate_proj.weight")
    join(f"{prefix}gate_up_proj.weight", [[name, f"{prefix}up_proj.weight"]])
  matches = (
    re.fullmatch(r"(.*\.experts\.)\d+\.w1\.weight", x) for x in tensors
  )
  for prefix, count in Counter(x[1] for x in matches if x).items():
    for joined_name, kernels in (
      ("gate_up_proj", ("w1", "w3")),
      ("down_proj", ("w2",)),
    ):
      rows = [
        [f"{prefix}{i}.{x}.weight" for x in kernels] for i in range(count)
      ]
      join(prefix + joined_name, rows)
  return tensors


def _join(rows: Sequence[files.Tensors], is_stacked: bool) -> np.ndarray:
  """Concatenates the tensors of each row, and stacks the rows of experts."""
  arrays = [files.concatenate(row) for row in rows]
  for row, x in zip(rows, arrays, strict=True):
    if x.shape != arrays[0].shape:
      raise ValueError(
        f"{next(iter(row.values())).file}: {', '.join(row)}: expected shape "
        f"{arrays[0].shape}, got {x.shape}"
      )
  return np.stack(arrays) if is_stacked else arrays[0]

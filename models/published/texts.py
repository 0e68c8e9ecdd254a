"""The text model inside of a multimodal one."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from models.published import files
from models.published.keys import WITHOUT_EFFECT

TEXTS: Mapping[str, str] = MappingProxyType(
  {
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
  }
)
"""Architecture of a multimodal model -> that of its text model."""

_CONFIG = "text_config"
_TEXT, _IMAGES = "model.language_model.", "model.visual."
_KNOWN = {
  *("architectures", "model_type", _CONFIG, "vision_config"),
  *("image_token_id", "video_token_id"),
  *("vision_start_token_id", "vision_end_token_id", "tie_word_embeddings"),
  *WITHOUT_EFFECT,
}


def is_multimodal(theirs: Mapping[str, Any]) -> bool:
  """Whether a `config.json` is of a multimodal model whose text model is known."""
  names = theirs.get("architectures")
  return isinstance(names, list) and len(names) == 1 and names[0] in TEXTS


def text_config(theirs: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the `config.json` of the text model.

  Args:
    theirs: that of the multimodal model.

  Raises:
    ValueError: a key is unknown, or the text model has none.
  """
  for key, value in theirs.items():
    if key not in _KNOWN:
      raise ValueError(
        f"{key}: no text model depends on it; expected a config without it, got "
        f"{value!r:.80}"
      )
  own = theirs.get(_CONFIG)
  if not isinstance(own, dict):
    raise ValueError(f"{_CONFIG}: expected an object, got {own!r:.80}")
  # The head belongs to the multimodal model.
  outer = {k: theirs[k] for k in ("tie_word_embeddings",) if k in theirs}
  return {**own, **outer, "architectures": [TEXTS[theirs["architectures"][0]]]}


def text_tensors(tensors: files.Tensors) -> dict[str, files.Tensor]:
  """Returns the tensors of the text model by their names in one without images."""
  return {
    name.replace(_TEXT, "model.", 1): tensor
    for name, tensor in tensors.items()
    if not name.startswith(_IMAGES)
  }

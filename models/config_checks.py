"""Checks that the fields of a Transformer's config are compatible.

A failed check raises a ValueError of one line that starts with the name of the field.
"""

from typing import TYPE_CHECKING

from attention.positions import t5_buckets
from settings.fields import check, check_unread

if TYPE_CHECKING:
  from models.config import ModelConfig


def check_sublayers(config: "ModelConfig") -> None:
  """Checks the fields that choose the sub-layers of a layer."""
  slot = config.slot
  if config.layout != "decoder":
    fields = "self_attention", "second_attention"
    check_unread(slot, fields, f"kind is {config.kind!r}")
  if not slot.self_attention:
    reason = "self_attention is False"
    check_unread(slot, ("second_attention", "shared_norm"), reason)
    has_mlp = config.mlp_features > 0
    check(config, "mlp_features", has_mlp, f"at least 1 where {reason}")
  if slot.second_attention is not None:
    is_plain = config.position in ("rotary", "none")
    condition = "with second_attention"
    check(config, "position", is_plain, f"'rotary' or 'none' {condition}")
    check(config, "norm", config.norm == "pre", f"'pre' {condition}")
    check(config, "parallel", not config.parallel, f"False {condition}")
    check(slot, "streams", slot.streams == 1, f"1 {condition}")
    try:
      _ = config.second
    except ValueError as error:
      raise ValueError(f"second_attention.{error}") from None


def check_heads(config: "ModelConfig") -> None:
  """Checks that numbers of heads are divisible by each other."""
  heads, shared = config.num_heads, config.slot.num_qk_heads
  if config.head_dim is None and config.features % heads:
    raise ValueError(
      f"features: {config.features} is not divisible by num_heads {heads}"
    )
  if config.kv_heads < 1 or heads % config.kv_heads:
    raise ValueError(
      f"num_kv_heads: expected a divisor of num_heads {heads}, got "
      f"{config.num_kv_heads}"
    )
  groups = config.slot.out_groups
  if groups and heads % groups:
    raise ValueError(
      f"out_groups: expected a divisor of num_heads {heads}, got {groups}"
    )
  if shared and (heads % shared or config.kv_heads != heads):
    raise ValueError(
      f"num_qk_heads: expected a divisor of num_heads {heads}, without "
      f"num_kv_heads, got {shared}"
    )


def check_positions(config: "ModelConfig") -> None:
  """Checks the widths and tables that positions need."""
  fraction, width = config.slot.rotary_fraction, config.query_dim
  name = "head_dim"
  if config.head_dim is None:
    name += " (features / num_heads)"
  if (shared := config.slot.shared_key_dim) is not None:
    if shared >= width:
      raise ValueError(
        f"shared_key_dim: expected less than the head dimension {width}, got "
        f"{shared}"
      )
    name, width = "shared_key_dim", shared
  # A fraction of 1 is not multiplied: the width may be too large for a float.
  rotated = width if fraction == 1.0 else int(width * fraction)
  if config.position == "rotary" and (rotated % 2 or not rotated):
    raise ValueError(
      f"position: rotary rotates pairs and needs an even {name}, got "
      f"{width}, of which rotary_fraction {fraction} is rotated"
    )
  scaling = config.slot.rotary_scaling
  if config.position != "rotary" and scaling and scaling.rope_type != "default":
    raise ValueError(
      "rotary_scaling: expected None without position 'rotary', got "
      f"{scaling.scaling}"
    )
  if config.position == "sinusoidal" and config.features % 2:
    raise ValueError(
      "features: sinusoidal positions pair sines and cosines and need an "
      f"even width, got {config.features}"
    )
  reason = f"position is {config.position!r}"
  if config.position == "disentangled":
    slot, condition = config.slot, "None with position 'disentangled'"
    check_unread(slot, ("global_projections",), reason)
    check(slot, "latent_rank", slot.latent_rank is None, condition)
    # Shared projections are those of the layer's inputs.
    has_rank = slot.disentangled.shared_projections and slot.query_rank
    check(slot, "query_rank", not has_rank, condition)
  else:
    check_unread(config.slot, ("disentangled",), reason)
  if config.position == "t5":
    slot = config.slot
    options = {"num_buckets": slot.relative_buckets}
    try:
      for is_causal in (False, True):
        t5_buckets(slot.relative_distance, is_causal=is_causal, **options)
    except ValueError as error:
      raise ValueError(f"relative_distance: {error}") from None
  else:
    fields = "relative_buckets", "relative_distance"
    check_unread(config.slot, fields, reason)
  if config.position != "learned":
    fields = "position_offset", "position_padding", "position_skips_masked"
    check_unread(config.embedding, fields, reason)


def check_unread_fields(config: "ModelConfig") -> None:
  """Raises ValueError if a field is set that this model never reads."""
  kind = f"kind is {config.kind!r}"
  if config.layout != "encoder_decoder":
    check_unread(config, ("num_decoder_layers",), kind)
  if config.layout != "encoder":
    check_unread(config, ("head",), kind)
    fields = "position_padding", "token_types"
    check_unread(config.embedding, fields, kind)
    check_unread(config.slot, ("global_projections",), kind)
  else:
    fields = "short_convolution", "query_temperature"
    check_unread(config.slot, fields, kind)
  if not config.gated:
    fields = "gate_factor", "gate_slope", "gate_limit", "gate_offset"
    check_unread(config.mlp, fields, "gated is False")
  if not config.mlp_features:
    check_unread(config.mlp, ("num_experts",), "mlp_features is 0")
  if config.parallel:
    check_unread(config.slot, ("residual_factors",), "parallel is True")
    check_unread(config.mlp, ("mlp_residual_factors",), "parallel is True")
    check(config, "norm", config.norm != "residual", "another with parallel")
  if config.slot.streams > 1:
    check(config, "norm", config.norm == "pre", "'pre' with streams")
    check(config, "parallel", not config.parallel, "False with streams")
    check_unread(config.slot, ("residual_factors",), "there are streams")
    check_unread(config.mlp, ("mlp_residual_factors",), "there are streams")
  if config.layout != "decoder":
    check_unread(config.slot, ("streams",), kind)
    check_unread(config.mlp, ("router_table",), kind)
    check_unread(config, ("decoder_around",), kind)
    check_unread(config.embedding, ("position_skips_masked",), kind)
  if config.kind != config.layout:
    check_unread(config.embedding, ("embedding_dim",), kind)
  if config.kind != "encoder":
    check_unread(config.slot, ("encoder_around",), kind)
  if config.norm != "pre":
    norm = f"norm is {config.norm!r}"
    check_unread(config.slot, ("input_norm", "shared_norm"), norm)
  if not config.parallel:
    check_unread(config.slot, ("shared_norm",), "parallel is False")
  if config.head == "tokens":
    fields = ("mean_pooling", "pooler")
  else:
    fields = "logit_scale", "logit_soft_cap"
  if config.head == "hidden":
    fields += ("mean_pooling", "head_transform")
  check_unread(config.output, fields, f"head is {config.head!r}")
  if not config.output.pooler:
    check_unread(config.output, ("pooler_activation",), "there is no pooler")
  if not config.output.head_transform:
    fields = "transform_bias", "transform_activation"
    check_unread(config.output, fields, "there is no head_transform")

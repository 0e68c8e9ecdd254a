"""A layer of a Transformer, for encoders and decoders."""

from collections.abc import Callable, Iterable, Mapping
import itertools
import math
from typing import Any, cast

from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int
import numpy as np

from models.attention_config import AttentionConfig
from models.attention_module_config import SlotConfig
from models.attention_module_variants import (
  DisentangledAttention,
  GlobalAttention,
  ShawAttention,
)
from models.config import ModelConfig
from models.experts import Experts
from models.hyper_connections import HyperConnection
from models.mlp import Mlp
from models.multi_head_attention import MultiHeadAttention, apply_mechanism

Gates = Mapping[str, Array]
"""The gates of a mechanism, computed from the inputs of its layer."""


class Block(nn.Module):
  """A layer: self-attention, optional cross-attention and a feed-forward network.

  A layer may also have a second attention beside self-attention (Falcon-H1), or only
  one of self-attention and feed-forward network (Nemotron-H).

  Each is a residual sub-layer: norm(x + dropout(f(x))) with norm 'post',
  x + dropout(f(norm(x))) with norm 'pre', x + dropout(norm(f(x))) with 'output',
  x + dropout(norm(f(norm(x)))) with 'sandwich', and norm(x) + dropout(f(norm(x)))
  with 'residual'. The two terms may have factors. Parallel sub-layers all take the
  layer's input, and their sum is added to it. The initial values of the last kernel of
  each are scaled by 1/√(number of sub-layers), so that the residual stream has about
  the same scale at any depth (GPT-2, section 2.3).

  Attributes:
    config: the config of the model.
    self_mechanism: mechanism of self-attention.
    max_length: the length of the longest sequence.
    cross_mechanism: mechanism of cross-attention; None means no cross-attention.
    max_memory_length: the length of the encoder's longest output.
    is_decoder: whether the layer is a decoder's, with causal self-attention.
    attend: calls the mechanism of an attention module.
  """

  config: ModelConfig
  self_mechanism: AttentionConfig
  max_length: int
  cross_mechanism: AttentionConfig | None = None
  max_memory_length: int = 0
  is_decoder: bool = False
  attend: Callable[..., Array] = apply_mechanism

  def setup(self) -> None:
    """Creates the sub-layers and their norms."""
    config = self.config
    out_scale = 1.0 / math.sqrt(len(self.sublayers) * config.num_layers)
    module_config = config.slot
    if module_config.self_attention:
      self.self_attention = self.make_attention(
        self.self_mechanism,
        self.max_length,
        module_config if self.is_decoder else module_config.encoder,
        rotary=config.position == "rotary",
        out_scale=out_scale,
      )
    if module_config.second_attention is not None:
      second = cast(ModelConfig, config.second)
      self.second_attention = self.make_attention(
        module_config.second_attention.mechanism,
        self.max_length,
        second.slot,
        dims=second.dims(self.max_length),
        rotary=second.position == "rotary",
        out_scale=out_scale,
      )
    if self.cross_mechanism is not None:
      self.cross_attention = self.make_attention(
        self.cross_mechanism,
        self.max_memory_length,
        module_config.cross,
        MultiHeadAttention,
        out_scale=out_scale,
      )
    if config.mlp_features:
      network: Any = Experts if config.mlp.num_experts else Mlp
      self.mlp = network(config, out_scale)
    for name in self.sublayers:
      if name == "second_attention":
        continue  # It takes the normalized inputs of self-attention.
      is_first = name == "self_attention"
      if (
        module_config.input_norm if is_first else not module_config.shared_norm
      ):
        setattr(self, f"{name}_norm", config.make_norm())
      if config.norm == "sandwich":
        setattr(self, f"{name}_out_norm", config.make_norm())
      if module_config.streams > 1:
        setattr(self, f"{name}_streams", HyperConnection(config))
    self.dropout = nn.Dropout(config.dropout_rate)

  @property
  def sublayers(self) -> tuple[str, ...]:
    """The names of the sub-layers, in order."""
    slot = self.config.slot
    exists = {
      "self_attention": slot.self_attention,
      "second_attention": slot.second_attention is not None,
      "cross_attention": self.cross_mechanism is not None,
      "mlp": self.config.mlp_features > 0,
    }
    return tuple(name for name in exists if exists[name])

  @property
  def shares_gates(self) -> bool:
    """Whether self-attention takes the gates of an earlier layer."""
    has_attention = self.config.slot.self_attention
    return has_attention and self.self_attention.attention.shares_gates

  @nn.nowrap
  def make_attention(
    self,
    mechanism: AttentionConfig,
    max_length: int,
    config: SlotConfig,
    module_type: type[MultiHeadAttention] | None = None,
    **options: Any,
  ) -> MultiHeadAttention:
    """Creates an attention module; its type defaults to that of self-attention."""
    model = self.config
    options.setdefault("dims", model.dims(max_length))
    if module_type is None:
      module_type = MultiHeadAttention
      if config.global_projections:
        module_type = GlobalAttention
      elif model.position == "shaw":
        module_type = ShawAttention
      elif model.position == "disentangled":
        module_type = DisentangledAttention
    return module_type(
      attention=mechanism.build(),
      features=model.features,
      config=config,
      norm_epsilon=model.norm_epsilon,
      dropout_rate=model.attention_dropout_rate,
      dtype=model.dtype,
      param_dtype=model.param_dtype,
      attend=self.attend,
      **options,
    )

  def __call__(
    self,
    x: Float[Array, "B T *F"],
    memory: Float[Array, "B S F"] | None = None,
    *,
    positions: Int[Array | np.ndarray, "1 T"],
    mask: Bool[Array, "B 1 1 T"] | None = None,
    memory_mask: Bool[Array, "B 1 1 S"] | None = None,
    is_causal: bool = False,
    deterministic: bool = True,
    ids: Int[Array, "B T"] | None = None,
    shared_gates: Gates | None = None,
    **call: Any,
  ) -> Any:
    """Applies the layer to whole sequences; `call` has options of self-attention.

    With several residual streams, `x` and the result are `[B, T, n, F]`. With
    `shared_gates`, the gates of the nearest earlier layer, it also returns the gates
    for the next layer.
    """
    call |= {"positions": positions, "mask": mask, "is_causal": is_causal}

    next_gates = None if shared_gates is None else dict(shared_gates)

    def attend(module, x):
      gates = self._gates(module, x, positions, next_gates)
      return module(x, deterministic=deterministic, gates=gates, **call)

    def attend_across(x):
      return self.cross_attention(
        x, memory, deterministic=deterministic, mask=memory_mask
      )

    x = self._layer(x, attend, attend_across, deterministic, mask, ids)
    return x if shared_gates is None else (x, next_gates)

  def start(
    self, batch: int, max_length: int, memory: Float[Array, "B S F"] | None
  ) -> None:
    """Creates the caches for `decode` of up to `max_length` positions."""
    for name in self.sublayers:
      if name in ("self_attention", "second_attention"):
        getattr(self, name).start(batch, max_length)
    if memory is not None:
      self.cross_attention.project_memory(memory)

  def decode(
    self,
    x: Float[Array, "B P *F"],
    positions: Int[Array | np.ndarray, "*B P"],
    memory_mask: Bool[Array, "B 1 1 S"] | None,
    lengths: Int[Array, "B"] | None = None,
    ids: Int[Array, "B P"] | None = None,
    shared_gates: Gates | None = None,
    **tables: Float[Array, "N D"],
  ) -> Any:
    """Applies the layer to the next position, or to the prompt of a sequence.

    Args:
      x: `[B, P, F]`; P = 1 for the next position.
      positions: `[B, 1]`, or `[1, P]` for a prompt.
      memory_mask: `[B, 1, 1, S]`, the visible positions of the memory.
      lengths: `[B]`, the number of positions of the prompt to store in the cache; None
        for the next position.
      ids: `[B, P]`, for a router's table.
      shared_gates: as in a call.
      **tables: relative position tables of self-attention.
    """
    next_gates = None if shared_gates is None else dict(shared_gates)

    def attend(module, x):
      gates = self._gates(module, x, positions, next_gates)
      if lengths is None:
        return module.decode(x, positions, gates, **tables)
      return module.prefill(x, positions, lengths, gates, **tables)

    def attend_across(x):
      return self.cross_attention.attend_memory(x, memory_mask)

    x = self._layer(x, attend, attend_across, deterministic=True, ids=ids)
    return x if shared_gates is None else (x, next_gates)

  def _gates(
    self,
    module: MultiHeadAttention,
    x: Array,
    positions: Any,
    next_gates: dict[str, Array] | None,
  ) -> Gates | None:
    """Returns the gates of a module, or None to let the module compute them.

    Gates that self-attention computes are stored in `next_gates`.
    """
    if next_gates is None:
      return None
    if module.attention.shares_gates:
      return next_gates
    gates = module.make_gates(x, positions)
    if gates and module.name == "self_attention":
      next_gates.clear()
      next_gates.update(gates)
    return gates

  def _layer(
    self,
    x: Array,
    attend: Callable[[MultiHeadAttention, Array], Array],
    attend_across: Callable[[Array], Array],
    deterministic: bool,
    mask: Bool[Array, "B 1 1 T"] | None = None,
    ids: Int[Array, "B T"] | None = None,
  ) -> Array:
    """Applies the residual sub-layers in order."""
    kind, module_config = self.config.norm, self.config.slot

    def sublayer(name, x):
      if name == "mlp":
        # Padding does not count in the load-balance loss of experts.
        has_experts = self.config.mlp.num_experts > 0
        return self.mlp(x, mask, ids) if has_experts else self.mlp(x)
      if name == "cross_attention":
        return attend_across(x)
      module = getattr(self, name)
      return attend(module, module.config.input_factor * x)

    def residual(name, x):
      shares_norm = name == "second_attention" or module_config.shared_norm
      owner = "self_attention" if shares_norm else name
      # A sub-layer without a norm uses the identity.
      norm = getattr(self, f"{owner}_norm", lambda x: x)
      out = sublayer(name, norm(x) if kind in ("pre", "sandwich") else x)
      if kind == "sandwich":
        norm = getattr(self, f"{name}_out_norm")
      if kind in ("output", "sandwich"):
        out = norm(out)
      return self.dropout(out, deterministic=deterministic)

    if self.config.parallel:
      return sum((residual(name, x) for name in self.sublayers), start=x)
    factors = {
      "self_attention": module_config.residual_factors,
      "mlp": self.config.mlp.mlp_residual_factors,
    }
    if self.config.second is not None:
      _, beta = self.config.second.slot.residual_factors
      factors["second_attention"] = (1.0, beta)
    inputs = x
    for name in self.sublayers:
      if module_config.streams > 1:
        inputs, merge = getattr(self, f"{name}_streams")(x)
        x = merge(residual(name, inputs))
        continue
      if kind == "residual":
        x = getattr(self, f"{name}_norm")(x)
      alpha, beta = factors.get(name, (1.0, 1.0))
      # A second attention takes the inputs of the first.
      inputs = x if name != "second_attention" else inputs
      out = residual(name, inputs)
      x = alpha * x + beta * out
      if kind == "post":
        x = getattr(self, f"{name}_norm")(x)
    return x


def make_layers(
  config: ModelConfig,
  max_length: int,
  max_memory_length: int = 0,
  *,
  is_decoder: bool = False,
  attend: Callable[..., Array] = apply_mechanism,
) -> list[Block]:
  """Creates the layers of an encoder or a decoder, in `setup` of their module."""
  stack = "decoder" if is_decoder else "encoder"
  configs = config.decoder_configs if is_decoder else config.encoder_configs
  mechanisms = config.layers(f"{stack}_attention")
  cross_mechanisms: Any = itertools.repeat(None, len(mechanisms))
  if is_decoder and config.layout != "decoder":
    cross_mechanisms = config.layers("cross_attention")
  return [
    Block(
      layer_config,
      mechanism,
      max_length,
      cross_mechanism,
      max_memory_length,
      is_decoder=is_decoder,
      attend=attend,
    )
    for layer_config, mechanism, cross_mechanism in zip(
      configs, mechanisms, cross_mechanisms, strict=True
    )
  ]


def apply_layers(
  blocks: Iterable[nn.Module],
  x: Float[Array, "B T F"],
  *memory: Any,
  remat: str,
  **call: Any,
) -> Float[Array, "B T F"]:
  """Applies layers to whole sequences; `remat` 'block' recomputes each of them."""
  blocks = list(blocks)
  shared_gates = first_gates(blocks)

  def layer(block, shared_gates, *arrays):
    return block(*arrays, shared_gates=shared_gates, **call)

  if remat == "block":
    layer = nn.remat(layer)
  for block in blocks:
    x = layer(block, shared_gates, x, *memory)
    if shared_gates is not None:
      x, shared_gates = x
  return x


def first_gates(blocks: Iterable[Any]) -> Gates | None:
  """Returns the `shared_gates` of the first layer, or None if no layer shares gates."""
  return {} if any(block.shares_gates for block in blocks) else None

"""The config of feed-forward layers, with or without experts."""

import dataclasses
from typing import Annotated, Any, Literal

from annotated_types import Ge

from settings.fields import Count, Positive, Whole, check, check_unread, checked


@checked
class MlpConfig:
  """Config of feed-forward layers; by default one network without experts.

  Attributes:
    mlp_bias: whether the feed-forward layers have biases; each expert has its own.
    mlp_residual_factors: α and β of a feed-forward layer f: x becomes α·x + β·f(x).
    gate_factor: factor of the logits of gates (Falcon-H1).
    gate_slope: α; a gate g is activation(α·g) / α.
    gate_limit: c; before that, gates are clipped to at most c, and the features that
      they multiply to [−c, c] (gpt-oss); None means no limit.
    gate_offset: number added to the features that the gates multiply.
    num_experts: E, number of networks from which a router chooses for each token; 0
      means one network for all tokens.
    experts_per_token: k, number of networks that it chooses.
    expert_features: hidden width of each of them; None is `mlp_features`.
    expert_latent_features: width of the experts' inputs and outputs, which are
      projected from F and back to F (LatentMoE, Nemotron 3); None is F.
    shared_features: hidden width of one more network that all tokens pass through
      (DeepSeekMoE); 0 means none.
    shared_gate: whether its output is multiplied by the sigmoid of a projection of
      the inputs to one number (Qwen2-MoE).
    router_scores: function of the router's logits: 'softmax' (Switch), 'sigmoid'
      (DeepSeek-V3) or 'sqrt_softplus', the square root of softplus (DeepSeek-V4).
    router_table: number of ids of a constant table, in which the experts of a token
      are looked up instead of chosen by scores (hash layers, arXiv:2106.04426); 0
      means no table.
    router_bias: whether the router's logits have a bias.
    selection_bias: whether a constant is added to the scores by which experts are
      chosen, but not to their weights (DeepSeek-V3).
    expert_groups: number of groups of adjacent experts.
    groups_per_token: number of groups from which a token's experts are chosen: those
      with the largest sums of their two best scores (DeepSeek-V3).
    normalize_weights: whether the weights of a token's experts are divided by their
      sum.
    routed_scale: factor of the weights after that.
    balance_loss: factor of the load-balance loss in training.

  Raises:
    ValueError: two fields are incompatible.
  """

  mlp_bias: bool = True
  mlp_residual_factors: tuple[float, float] = (1.0, 1.0)
  gate_factor: float = 1.0
  gate_slope: Positive = 1.0
  gate_limit: Positive | None = None
  gate_offset: float = 0.0
  num_experts: Whole = 0
  experts_per_token: Count = 1
  expert_features: Count | None = None
  expert_latent_features: Count | None = None
  shared_features: Whole = 0
  shared_gate: bool = False
  router_scores: Literal["softmax", "sigmoid", "sqrt_softplus"] = "softmax"
  router_table: Whole = 0
  router_bias: bool = False
  selection_bias: bool = False
  expert_groups: Count = 1
  groups_per_token: Count = 1
  normalize_weights: bool = True
  routed_scale: Positive = 1.0
  balance_loss: Annotated[float, Ge(0)] = 0.0

  def __post_init__(self):
    if not self.num_experts:
      check_unread(self, (*WITHOUT_EXPERTS,), "num_experts is 0")
      return
    groups = self.expert_groups
    is_divisor = self.num_experts % groups == 0
    divisor = f"a divisor of num_experts {self.num_experts}"
    check(self, "expert_groups", is_divisor, divisor)
    is_fewer = self.groups_per_token <= groups
    fewer = f"at most expert_groups {groups}"
    check(self, "groups_per_token", is_fewer, fewer)
    available = self.num_experts // groups * self.groups_per_token
    is_enough = self.experts_per_token <= available
    enough = f"at most the {available} experts of groups_per_token"
    enough = f"at most num_experts {available}" if groups == 1 else enough
    check(self, "experts_per_token", is_enough, enough)
    if not self.shared_features:
      check_unread(self, ("shared_gate",), "shared_features is 0")


WITHOUT_EXPERTS: dict[str, Any] = {
  field.name: field.default
  for field in dataclasses.fields(MlpConfig)
  if field.name.startswith(("expert", "shared", "router", "selection"))
  or field.name
  in ("groups_per_token", "normalize_weights", "routed_scale", "balance_loss")
}
"""Maps fields of layers with experts to their values in a layer without experts."""

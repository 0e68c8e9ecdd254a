"""What turns the features of the last layer into a model's result."""

import dataclasses

from settings.checks import check


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadConfig:
  """What a head has beside its table or matrix; by default nothing.

  Attributes:
    pooler: a layer with tanh before the classes (BERT).
    head_transform: a layer with activation and norm before the logits of tokens
      (BERT).
    head_bias: whether logits have a bias.
    logit_scale: factor of what the softmax's table is multiplied with.
    logit_soft_cap: c; logits x of tokens become c · tanh(x / c) (Gemma 2). None
      caps nothing; attention has `logits_soft_cap` of its own.

  Raises:
    ValueError: a cap that is not above 0.
  """

  pooler: bool = False
  head_transform: bool = False
  head_bias: bool = False
  logit_scale: float = 1.0
  logit_soft_cap: float | None = None

  def __post_init__(self):
    cap = self.logit_soft_cap
    check(self, "logit_soft_cap", cap is None or cap > 0, "above 0, or None")

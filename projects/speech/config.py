"""The config of a Conformer, which validates itself."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from attention import Dims
from models.attention_config import AttentionFields, Layers
from models.attention_module_config import SlotConfig
from models.config import Activation, Dtype, ModelConfig
from settings.fields import Count, Rate, check, checked


@checked
class ExtractorConfig:
  """Convolutions that compute features from the samples of a recording.

  Attributes:
    features: channels of each convolution.
    kernel_sizes: kernel size of each convolution.
    strides: stride of each convolution.
    norm: 'group' normalises every channel of the first convolution over time;
      'layer' normalises the channels of every convolution at each time.
    use_bias: whether convolutions have biases.
    activation: activation after each convolution.
  """

  features: Annotated[tuple[Count, ...], Field(min_length=1)]
  kernel_sizes: tuple[Count, ...]
  strides: tuple[Count, ...]
  norm: Literal["group", "layer"] = "group"
  use_bias: bool = False
  activation: Activation = "gelu"

  def __post_init__(self):
    for field in ("kernel_sizes", "strides"):
      check(
        self,
        field,
        len(getattr(self, field)) == len(self.features),
        f"a number for each of {len(self.features)} convolutions",
      )


@checked
class ConformerConfig(AttentionFields):
  """An encoder of speech, with attention and convolution between feed-forward layers.

  Attributes:
    kind: 'conformer'.
    num_layers: number of blocks.
    num_heads: N.
    features: F, width of the residual stream.
    mlp_features: hidden width of both feed-forward layers.
    kernel_size: R, the odd kernel size of the depthwise convolution along time.
    activation: activation of the feed-forward layers and after batch norm; 'silu' in
      the paper.
    position: 'transformer_xl', sines of the distance with two trained biases, as in the
      paper; 'rotary' rotates queries and keys; 'rotary_inputs' rotates the inputs of
      their projections (Wav2Vec2Conformer); or 'none'.
    rotary_theta: base of the rotary wavelengths.
    mask_convolution: whether the convolution treats padding as zeros. Published weights
      were trained without masking.
    extractor: convolutions over samples; None means log-mel frames, which two
      convolutions subsample by four.
    dropout_rate: rate of dropout of sub-layer outputs.
    attention_dropout_rate: rate of dropout of attention weights.
    norm_epsilon: number that layer norms add to the variance.
    dtype: dtype of activations; logits and softmax are float32, or float64 with dtype
      'float64'.
    param_dtype: dtype of parameters.
    encoder_attention: mechanism, or several that blocks take in turn; None is dense.

  Paper: Conformer, arXiv:2005.08100.
  """

  module: ClassVar[str] = "projects.speech.model:create"

  kind: Literal["conformer"] = "conformer"
  num_layers: Count
  num_heads: Count
  features: Count
  mlp_features: Count
  kernel_size: Count = 31
  activation: Activation = "silu"
  position: Literal["transformer_xl", "rotary", "rotary_inputs", "none"] = (
    "transformer_xl"
  )
  rotary_theta: float = 10000.0
  mask_convolution: bool = True
  extractor: ExtractorConfig | None = None
  dropout_rate: Rate = 0.0
  attention_dropout_rate: Rate = 0.0
  norm_epsilon: float = 1e-5
  dtype: Dtype = "float32"
  param_dtype: Dtype = "float32"
  encoder_attention: Layers | None = None

  def __post_init__(self):
    is_odd = self.kernel_size % 2 == 1
    check(self, "kernel_size", is_odd, "an odd number of at least 1")
    if self.position == "transformer_xl" and self.features % 2:
      raise ValueError(
        "features: position 'transformer_xl' pairs sines and cosines and needs "
        f"an even width, got {self.features}"
      )
    self.fill_attention_fields()
    _ = self.block  # Validates the fields that a Transformer layer shares.
    if self.position == "transformer_xl":
      relative = "carry relative positions (position 'transformer_xl')"
      self.fill_attention_fields({"encoder_attention": {"relative": relative}})

  @property
  def block(self) -> ModelConfig:
    """The settings that a block shares with a Transformer layer."""
    return ModelConfig(
      kind="encoder",
      num_layers=self.num_layers,
      num_heads=self.num_heads,
      features=self.features,
      mlp_features=self.mlp_features,
      activation=self.activation,
      position="rotary" if self.position.startswith("rotary") else "none",
      slot=SlotConfig(attention_bias=True, rotary_theta=self.rotary_theta),
      norm="pre",
      norm_epsilon=self.norm_epsilon,
      dropout_rate=self.dropout_rate,
      attention_dropout_rate=self.attention_dropout_rate,
      dtype=self.dtype,
      param_dtype=self.param_dtype,
      encoder_attention=self.encoder_attention,
    )

  @property
  def layout(self) -> str:
    """The batch layout of an encoder."""
    return "encoder"

  @property
  def head(self) -> str:
    """'tokens', logits of every position, as in `ModelConfig`."""
    return "tokens"

  def dims(self, max_length: int) -> Dims:
    """The sizes from which a mechanism creates its variables."""
    heads = self.num_heads
    return Dims(heads, heads, self.query_dim, max_length, self.features)

  @property
  def query_dim(self) -> int:
    """H."""
    return self.features // self.num_heads

  @property
  def kv_heads(self) -> int:
    """K, equal to N."""
    return self.num_heads

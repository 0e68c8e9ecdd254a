"""The models as pure functions of (model, variables, …)."""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import functools
import importlib
import types
from typing import Any, cast

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attention import Attention, Dims
from models.config import ModelConfig
from models.conformer_config import ConformerConfig
from models.mechanism_variables import variable_shapes
from models.perceiver_config import PerceiverConfig
from models.pyramid_config import PyramidConfig
from models.rows import positions_apart
from models.seq2seq import Seq2Seq
from models.seq2seq_config import Seq2SeqConfig
from models.size import Config, Sizes, num_tokens
from models.transformer import Transformer

Batch = Mapping[str, Any]
"""'source' [B, S] and 'inputs' [B, T], as the kind needs, or 'image' [B, H, W, C],
or 'frames' [B, S, M] or 'audio' [B, S] with 'source_mask' [B, S]. A decoder's may
have 'patches' [B, R, C, P, P, D] of images and 'local' [B, T] with 'inputs'.

What a model reads of it says its `arguments`; all else is unread.
"""

Model = Any
"""What `create` makes: a Linen module whose `arguments` are read from a batch."""

_MODULES: Mapping[type, str] = types.MappingProxyType(
  {
    PyramidConfig: "models.pyramid",
    PerceiverConfig: "models.perceiver",
    ConformerConfig: "models.conformer",
  }
)
"""Config of a kind that is not a Transformer's -> the module whose `create` makes it."""


def create(
  config: Config,
  *,
  source_vocab_size: int | None,
  target_vocab_size: int,
  max_source_length: int | None,
  max_target_length: int | None,
  shared_vocabulary: bool = False,
  image_shape: tuple[int, int, int] | None = None,
  frames_shape: tuple[int, int] | None = None,
  patches_shape: tuple[int, int, int, int, int] | None = None,
) -> Model:
  """Makes the model of a config for a task's sizes; computes nothing.

  Equal arguments give equal models with equal hashes, so a compiled function
  may take the model as a static argument.

  Args:
    config: of the model.
    source_vocab_size: for kinds with an encoder.
    target_vocab_size: V, of decoder ids and of logits.
    max_source_length: the longest source, for kinds with an encoder.
    max_target_length: the longest sequence a decoder reads; of an encoder,
      the same as `max_source_length` or None.
    shared_vocabulary: source and target ids mean the same, so that tied
      embeddings share one table.
    image_shape: height, width and channels of images, for an encoder with
      `patch_size`; it has no `source_vocab_size` and no `max_source_length`.
    frames_shape: frames and bands of the longest recording, for a Conformer.
    patches_shape: rows, columns, height, width and channels of the patches of an
      image, which a decoder reads where an id is `PATCH_ID`.

  Returns:
    A Linen module.

  Raises:
    ValueError: a size is missing, or a mechanism cannot work at it (a rank
      above the length, …); the message starts with the argument or field.
  """
  sizes = Sizes(
    source_vocab_size,
    target_vocab_size,
    max_source_length,
    max_target_length,
    shared_vocabulary,
    image_shape,
    frames_shape,
    patches_shape,
  )
  if isinstance(config, ModelConfig | Seq2SeqConfig):
    return _transformer_or_seq2seq(config, sizes)
  module = importlib.import_module(_MODULES[type(config)])
  return module.create(config, sizes)


def _transformer_or_seq2seq(
  config: ModelConfig | Seq2SeqConfig, sizes: Sizes
) -> Transformer | Seq2Seq:
  """Makes a model of ids, or a Transformer of images."""
  (
    source_vocab_size,
    target_vocab_size,
    max_source_length,
    max_target_length,
    shared_vocabulary,
    image_shape,
    _,
    patches_shape,
  ) = sizes
  has_encoder = config.kind != "decoder"
  reads_ids = has_encoder
  if isinstance(config, ModelConfig) and config.patch_size is not None:
    max_source_length = _tokens_of_images(config, image_shape)
    max_target_length, reads_ids = None, False
  elif image_shape is not None:
    raise ValueError(
      "patch_size: expected the side of a patch, for a task of images, got None"
    )
  for name, size, needed in (
    ("source_vocab_size", source_vocab_size, reads_ids),
    ("max_source_length", max_source_length, has_encoder),
    ("target_vocab_size", target_vocab_size, True),
    ("max_target_length", max_target_length, config.kind != "encoder"),
  ):
    if needed and (size is None or size < 1):
      raise ValueError(f"{name}: kind '{config.kind}' needs it, got {size}")
  if shared_vocabulary and has_encoder:
    if source_vocab_size != target_vocab_size:
      raise ValueError(
        f"shared_vocabulary: source has {source_vocab_size} ids and target "
        f"{target_vocab_size}"
      )
  elif (
    isinstance(config, ModelConfig)
    and config.kind == "encoder"
    and config.head == "tokens"
    and config.tie_embeddings
  ):
    raise ValueError(
      "tie_embeddings: the softmax of an encoder can share the source's table "
      "only if source and target have one vocabulary; set it to False"
    )
  cycle = config.cycle if isinstance(config, ModelConfig) else (config,)
  for layer in cycle:
    _check_mechanisms(layer, max_source_length, max_target_length)
  of_model = (
    source_vocab_size or 0,
    target_vocab_size,
    max_source_length or 0,
    max_target_length or 0,
    shared_vocabulary,
  )
  if isinstance(config, Seq2SeqConfig):
    return Seq2Seq(config, *of_model)
  return Transformer(
    config, *of_model, image_shape=image_shape, patches_shape=patches_shape
  )


def _check_mechanisms(
  config: ModelConfig | Seq2SeqConfig,
  max_source_length: int | None,
  max_target_length: int | None,
) -> None:
  """Raises ValueError where a mechanism cannot work at the sizes of a layer."""
  for field, chosen in config.attentions.items():
    length = (
      max_target_length if field == "decoder_attention" else max_source_length
    )
    dims = Dims(
      config.num_heads,
      config.kv_heads,
      config.query_dim,
      length or 0,
      config.features,
    )
    for attention in chosen:
      try:
        variable_shapes(attention.build(), dims)
      except ValueError as error:
        raise ValueError(f"{field}: {error}") from error


def _tokens_of_images(
  config: ModelConfig, shape: tuple[int, int, int] | None
) -> int:
  """S of a model that reads images.

  Raises:
    ValueError: there are none, or a patch is larger than they are.
  """
  if shape is None:
    raise ValueError(
      f"patch_size: expected None for a task without images, got "
      f"{config.patch_size}"
    )
  size = config.patch_size or 0
  if size > min(shape[:2]):
    raise ValueError(
      f"patch_size: expected at most {min(shape[:2])}, the smaller side of the "
      f"images, got {size}"
    )
  return num_tokens(config, shape)


@functools.partial(jax.jit, static_argnums=0)
def initialize(model: Model, key: Array, batch: Batch) -> dict[str, Any]:
  """Draws the variables of a model.

  Args:
    model: from `create`.
    key: all of 'params' and 'constants' is drawn from it.
    batch: its shapes are read, its values are not.

  Returns:
    `{'params': …, 'constants': …}`; constants may be empty. Another key and
    its constants redraw random features.
  """
  ids, options = model.arguments(batch)
  variables = model.init(key, *ids, **options)
  return {"constants": {}, **variables}


def forward(
  model: Model,
  variables: Mapping[str, Any],
  batch: Batch,
  *,
  dropout_rng: Array | None = None,
) -> Float[Array, "B T V"]:
  """Logits of every position, teacher-forced.

  Args:
    model: from `create`.
    variables: from `initialize`, or trained.
    batch: 'source' and 'inputs' as the kind needs.
    dropout_rng: key of the dropout; None is without.

  Returns:
    `[B, T, V]` float32.
  """
  ids, options = model.arguments(batch)
  logits = model.apply(
    variables,
    *ids,
    **options,
    deterministic=dropout_rng is None,
    rngs=None if dropout_rng is None else {"dropout": dropout_rng},
  )
  return cast(Array, logits)


def forward_and_statistics(
  model: Model,
  variables: Mapping[str, Any],
  batch: Batch,
  *,
  dropout_rng: Array | None,
  axis_name: str | None = None,
) -> tuple[Float[Array, "B T V"], Mapping[str, Any]]:
  """As `forward`, of a model with batch norm that is being trained.

  Features are normed by the mean and variance of the batch, and the running
  ones, which `forward` norms by, move towards these.

  Args:
    model: from `create`.
    variables: with 'batch_stats'.
    batch: as the model reads it.
    dropout_rng: key of the dropout; None where there is none.
    axis_name: of a `pmap` whose devices have the rows of one batch.

  Returns:
    `[B, T, V]` float32, and the new 'batch_stats'.
  """
  ids, options = model.arguments(batch)
  logits, updated = model.apply(
    variables,
    *ids,
    **options,
    deterministic=False,
    axis_name=axis_name,
    rngs=None if dropout_rng is None else {"dropout": dropout_rng},
    mutable=["batch_stats"],
  )
  return cast(Array, logits), updated["batch_stats"]


@functools.partial(jax.jit, static_argnums=0)
def attention_maps(
  model: Model, variables: Mapping[str, Any], batch: Batch
) -> dict[str, Float[Array, "B N T S"]]:
  """The effective attention matrix of every layer.

  Args:
    model: from `create`.
    variables: from `initialize`, or trained.
    batch: 'source' and 'inputs' as the kind needs.

  Returns:
    'encoder_0/self_attention', 'decoder_0/self_attention',
    'decoder_0/cross_attention', …, each `[B, N, T, S]` float32. A recurrent
    model has 'decoder/cross_attention' alone; a Perceiver has
    'encoder/cross_attention' from its latents to the input and
    'decoder/cross_attention' from its outputs to the latents. Of a layer that is
    passed several times, the last time.
  """
  ids, options = model.arguments(batch)
  _, state = model.apply(variables, *ids, **options, mutable=["intermediates"])
  sown: Mapping[str, Any] = state["intermediates"]
  return {
    f"{block}/{slot}": matrices["attention_weights"][-1].astype(jnp.float32)
    for block, slots in sown.items()
    for slot, matrices in slots.items()
  }


def observe_attention(
  model: Model,
  variables: Mapping[str, Any],
  batch: Batch,
  observer: Callable[..., None],
) -> None:
  """Calls `observer` at every attention that a Transformer computes.

  Under `jax.jit` what the observer gets are tracers: it may compute with them
  and keep what it computes for as long as the trace lasts.

  Args:
    model: from `create`, not recurrent.
    variables: from `initialize`, or trained.
    batch: 'source' and 'inputs' as the kind needs.
    observer: `(attention, query, key, value, out, **call)`: the mechanism's
      record, what it was called with, and what it returned.
  """

  def replacement(
    place, attention, own, query, key, value, inputs, gates, **call
  ):
    del place, inputs
    call |= gates
    out = own(query, key, value, **call)
    observer(attention, query, key, value, out, **call)
    return out

  replace_attention(model, variables, batch, replacement)


@contextlib.contextmanager
def attention_in_parts(
  mesh: jax.sharding.Mesh, axis_name: str
) -> Iterator[None]:
  """Within it, attention is computed on the device that has its positions.

  Every call of a mechanism becomes one of `apply_sharded` inside
  `jax.shard_map` along one axis; the mesh's other axes are left to the compiler.
  Where the axis does not divide a length, positions are added at its end that
  nobody sees.

  Args:
    mesh: has the axis.
    axis_name: along which positions lie.
  """

  def intercept(following, args, kwargs, context):
    if context.method_name != "attend":
      return following(*args, **kwargs)
    module = context.module
    return _in_parts(
      module.attention, mesh, axis_name, module.mechanism, *args, **kwargs
    )

  with positions_apart(), nn.intercept_methods(intercept):
    yield


def _in_parts(
  attention: Attention,
  mesh: jax.sharding.Mesh,
  axis_name: str,
  variables: Any,
  query: Array,
  key: Array | None,
  value: Array | None,
  *,
  inputs: Array,
  **call: Any,
) -> Array:
  """`apply` on whole arrays, by `apply_sharded` on their parts."""
  apply = attention.apply_sharded
  if apply is None:
    raise ValueError("attention: the mechanism has no form for parts")
  size = mesh.shape[axis_name]
  # A mechanism that makes its own keys and values reads one sequence.
  length = query.shape[1]
  source_length = length if value is None else value.shape[1]
  missing = {"query": -length % size, "key": -source_length % size}

  if any(missing.values()) and not attention.ignores_padding:
    raise ValueError(
      f"attention: the mechanism needs a length that {size} devices divide, got "
      f"{length}; positions that are added would change what it does"
    )

  def padded(array, which, axis):
    if array is None:
      return None
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, missing[which])
    return jnp.pad(array, widths)

  if missing["key"] and call.get("mask") is None:
    call["mask"] = jnp.ones((1, 1, 1, source_length), bool)
  axes = {"mask": 3, "query_segment_ids": 1, "key_segment_ids": 1}
  axes |= dict.fromkeys(_gate_names(attention, variables, inputs), 1)
  parts, specs, rest = {}, {}, {}
  for name, option in call.items():
    if name in axes and option is not None:
      axis = axes[name]
      which = "query" if name.startswith("query") else "key"
      parts[name] = padded(option, which, axis)
      specs[name] = jax.P(*[None] * axis, axis_name)
    elif name == "global_qkv" and option is not None:
      sides = zip(option, ("query", "key", "key"), strict=True)
      parts[name] = tuple(padded(x, which, 1) for x, which in sides)
      specs[name] = (jax.P(None, axis_name),) * 3
    elif isinstance(option, Array):
      parts[name], specs[name] = option, jax.P()
    else:
      rest[name] = option
  rows = jax.P(None, axis_name)

  def local(variables, query, key, value, parts):
    return apply(
      variables, query, key, value, axis_name=axis_name, **parts, **rest
    )

  out = jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(jax.P(), rows, rows, rows, specs),
    out_specs=rows,
    axis_names={axis_name},
    check_vma=False,
  )(
    variables,
    padded(query, "query", 1),
    padded(key, "key", 1),
    padded(value, "key", 1),
    parts,
  )
  return out[:, :length]


def _gate_names(
  attention: Attention, variables: Any, inputs: Array
) -> tuple[str, ...]:
  """The options that a mechanism reads from its inputs; computes nothing."""
  if attention.gates is None:
    return ()
  return tuple(jax.eval_shape(attention.gates, variables, inputs))


def replace_attention(
  model: Model,
  variables: Mapping[str, Any],
  batch: Batch,
  replacement: Callable[..., Array],
) -> Float[Array, "B T V"]:
  """Logits with another function at every attention of a Transformer.

  Args:
    model: from `create`, not recurrent.
    variables: from `initialize`, or trained.
    batch: 'source' and 'inputs' as the kind needs.
    replacement: `(place, attention, own, query, key, value, **call) -> out`:
      the module's place in the model, such as 'decoder_0/self_attention'; its
      mechanism's record; that mechanism as a function of what follows; and what
      it is called with. `call` also has `inputs`, which the arrays are projected
      from, and `gates`, what that mechanism has read from them: they are its own,
      and no option of another one.

  Returns:
    `[B, T, V]` float32.
  """
  ids, options = model.arguments(batch)

  def intercept(following, args, kwargs, context):
    if context.method_name != "attend":
      return following(*args, **kwargs)
    module = context.module
    place = "/".join(module.path)
    attention = module.attention

    def own(query, key, value, inputs=None, gates=None, **call):
      del inputs
      call |= gates or {}
      return attention.apply(module.mechanism, query, key, value, **call)

    names = _gate_names(attention, module.mechanism, kwargs["inputs"])
    gates = {name: kwargs.pop(name) for name in names}
    return replacement(place, attention, own, *args, gates=gates, **kwargs)

  with nn.intercept_methods(intercept):
    return cast(Array, model.apply(variables, *ids, **options))

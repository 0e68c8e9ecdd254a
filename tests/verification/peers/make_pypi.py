"""Writes pypi.npz: results of packages of single mechanisms, and of Keras.

    python3.11 -m venv VENV
    VENV/bin/pip install torch==2.13.0 einops==0.8.2 keras==3.15.1
    VENV/bin/pip install --no-deps linformer==0.2.3 nystrom-attention==0.0.14 \
        performer-pytorch==1.1.4 reformer-pytorch==1.4.4 \
        local-attention==1.11.2 axial-positional-embedding==0.3.12 \
        hyper-connections==0.4.11
    KERAS_BACKEND=torch OMP_NUM_THREADS=1 VENV/bin/python \
        tests/verification/peers/make_pypi.py
"""

import sys
from unittest import mock

import keras
from linformer.linformer import LinformerSelfAttention
from modules import ConstantModule, swap_heads
from nystrom_attention import NystromAttention
from performer_pytorch import performer_pytorch as performer
import torch
from torch import nn
from vectors import Draw, Vectors

T, N, H, V = 29, 2, 4, 3


def low_rank(file: Vectors) -> None:
  """Adds Linformer, also with a shorter input, and Nyström attention."""
  draw = Draw("linformer")

  def call(query, key, value, key_projection, value_projection):
    module = LinformerSelfAttention(N * H, 33, k=5, heads=N)
    names = "to_q", "to_k", "to_v"
    for name, x in zip(names, (query, key, value), strict=True):
      setattr(module, name, ConstantModule(x.flatten(2)))
    del module.proj_k, module.proj_v
    module.proj_k, module.proj_v = key_projection, value_projection
    module.to_out = nn.Identity()
    out = module(query.new_zeros(1, query.shape[1], N * H))
    return {"out": out.unflatten(2, (N, H))}

  projections = {
    f"{name}_projection": draw.normal(33, 5, scale=0.4)
    for name in ("key", "value")
  }
  for length in (33, T):
    file.add(
      f"linformer_{length}",
      call,
      witness=f"linformer 0.2.3, {length} of 33 positions",
      mechanism="linformer",
      given=draw.qkv(length=length, value=H) | projections,
    )

  def landmarks(query, key, value):
    module = NystromAttention(
      N * H, H, N, num_landmarks=7, residual=False
    ).eval()
    joined = torch.cat([x.flatten(2) for x in (query, key, value)], -1)
    module.to_qkv, module.to_out = ConstantModule(joined), nn.Identity()
    out = module(query.new_zeros(1, 35, N * H))
    return {"out": out.unflatten(2, (N, H))}

  file.add(
    "nystrom",
    landmarks,
    witness="nystrom-attention 0.0.14",
    mechanism="nystrom",
    given=Draw("nystrom").qkv(length=35, value=H),
    options={"num_landmarks": 7, "shared_start": True},
  )


def features(file: Vectors) -> None:
  """Adds Performer, without the epsilon that its package adds to exponentials."""
  draw = Draw("performer")
  projection = draw.normal(11, H)
  given = draw.qkv()

  def call(query, key, value, projection, kernel, causal):
    query, key, value = swap_heads(query, key, value)
    if kernel == "softmax":
      options = {"projection_matrix": projection, "eps": 0.0}
      query = performer.softmax_kernel(query, is_query=True, **options)
      key = performer.softmax_kernel(key, is_query=False, **options)
    else:
      # Its features are not divided by the root of their number, as the paper's are.
      options = {"projection_matrix": projection / 11**0.5}
      query = performer.generalized_kernel(query, **options)
      key = performer.generalized_kernel(key, **options)
    if causal:
      options = {"chunk_size": 3, "eps": 0.0}
      run = performer.causal_linear_attention_noncuda
      out = run(query, key, value, **options)
    else:
      out = performer.linear_attention(query, key, value)
    return {"out": out.transpose(1, 2)}

  for kernel in ("softmax", "relu"):
    for causal in (False, True):
      file.add(
        f"performer_{kernel}{'_causal' * causal}",
        lambda kernel=kernel, causal=causal, **given: call(
          **given, kernel=kernel, causal=causal
        ),
        witness=f"performer-pytorch 1.1.4, {kernel} kernel",
        mechanism="performer",
        given=given | {"projection": projection},
        options={"kernel": kernel, "is_causal": causal},
      )

  def linear(query, key, value):
    query, key = (nn.functional.elu(x) + 1 for x in (query, key))
    out = performer.linear_attention(*swap_heads(query, key, value))
    return {"out": out.transpose(1, 2)}

  file.add(
    "linear_features",
    linear,
    witness="performer-pytorch 1.1.4, linear_attention",
    mechanism="linear",
    given=given,
  )


def hashes(file: Vectors) -> None:
  """Adds Reformer's attention, within buckets and with each pair counted once."""
  # The package imports another one for a layer that is not used here.
  with mock.patch.dict(sys.modules, product_key_memory=mock.MagicMock()):
    from reformer_pytorch.reformer_pytorch import LSHAttention
  length, size, rounds = 24, 4, 3
  draw = Draw("reformer")

  def call(query, value, rotations):
    module = LSHAttention(
      bucket_size=size,
      n_hashes=rounds,
      allow_duplicate_attention=False,
      attend_across_buckets=False,
    ).eval()
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (query, value)]
    drawn = rotations.transpose(0, 1)[None]
    with mock.patch("torch.randn", return_value=drawn):
      out = module(*flat)[0]
    return {"out": out.unflatten(0, (1, N)).transpose(1, 2)}

  file.add(
    "reformer",
    call,
    witness="reformer-pytorch 1.4.4, LSHAttention",
    mechanism="lsh",
    given={
      "query": draw.normal(1, length, N, H),
      "value": draw.normal(1, length, N, H),
    },
    fixed={"rotations": draw.normal(rounds, H, length // size // 2)},
    options={"chunk_size": size},
  )


def translation(file: Vectors) -> None:
  """Adds Keras's additive and multiplicative attention, one head at a time."""
  draw = Draw("keras")
  given = draw.qkv()

  def heads(attend, query, key, value, is_causal):
    outs = [
      attend(n, query[:, :, n], key[:, :, n], value[:, :, n], is_causal)
      for n in range(N)
    ]
    return {"out": torch.stack(outs, 2)}

  def additive(query, key, value, is_causal, **kernels):
    def attend(n, q, k, v, is_causal):
      layer = keras.layers.AdditiveAttention()
      q, k = q @ kernels["query_kernel"][n], k @ kernels["key_kernel"][n]
      layer.build([q.shape, v.shape, k.shape])
      layer._lock = False
      layer._tracker.unlock()
      layer.scale = kernels["score_kernel"][n]
      return layer([q, v, k], use_causal_mask=is_causal)

    return heads(attend, query, key, value, is_causal)

  def multiplicative(query, key, value, is_causal, kernel=None):
    def attend(n, q, k, v, is_causal):
      layer = keras.layers.Attention(use_scale=False)
      q = q if kernel is None else q @ kernel[n]
      return layer([q, v, k], use_causal_mask=is_causal)

    return heads(attend, query, key, value, is_causal)

  for causal in (False, True):
    suffix, options = "_causal" * causal, {"is_causal": causal}
    file.add(
      f"additive{suffix}",
      lambda causal=causal, **given: additive(**given, is_causal=causal),
      witness="keras 3.15.1, AdditiveAttention",
      mechanism="additive",
      given=given
      | {
        "query_kernel": draw.normal(N, H, 5),
        "key_kernel": draw.normal(N, H, 5),
        "score_kernel": draw.normal(N, 5),
      },
      options=options,
    )
    for general in (False, True):
      kernel = {"kernel": draw.normal(N, H, H)} if general else {}
      file.add(
        f"multiplicative{'_general' * general}{suffix}",
        lambda causal=causal, **given: multiplicative(
          **given, is_causal=causal
        ),
        witness="keras 3.15.1, Attention",
        mechanism="multiplicative",
        given=given | kernel,
        options=options,
      )


if __name__ == "__main__":
  file = Vectors("pypi", "packages named in each row")
  file.write(low_rank, features, hashes, translation)

"""Writes titans.npz: the neural memory of titans-pytorch, with a linear memory.

python3.11 -m venv VENV
VENV/bin/pip install torch==2.13.0 titans-pytorch==0.5.5
OMP_NUM_THREADS=1 VENV/bin/python tests/verification/peers/make_titans.py

A memory takes its gradients at the weights that it is given: one call of
`store_memories` is a mini-batch.
"""

import itertools

from modules import ConstantModule
from titans_pytorch import NeuralMemory
import torch
from torch import nn
from vectors import Draw, Vectors

T, N, H = 29, 2, 4


class Matrix(nn.Module):
  """A memory that is one matrix."""

  def __init__(self):
    super().__init__()
    self.weight = nn.Parameter(torch.zeros(H, H))

  def forward(self, x: torch.Tensor) -> torch.Tensor:
    """Returns the values of keys."""
    return x @ self.weight


def constant_memory(**given: torch.Tensor) -> NeuralMemory:
  """Returns a memory whose projections return the given tensors."""
  memory = NeuralMemory(
    dim=N * H,
    dim_head=H,
    heads=N,
    chunk_size=1,
    model=Matrix(),
    mem_model_norm_add_residual=False,
    pre_rmsnorm=False,
    store_memory_loss_fn=lambda prediction, value: (
      (prediction - value) ** 2
    ).sum(-1),
    adaptive_step_transform=lambda x: x,
  )
  for name, tensor in given.items():
    setattr(memory, name, ConstantModule(tensor))
  return memory


def call(size: int):
  """Returns a call with mini-batches of `size` positions."""

  def run(query, key, value, learning_rate, log_momentum, log_decay):
    # `[B·N, T]`, for one example.
    rate = learning_rate[0].T
    momentum, decay = (
      torch.logit(x)[0].T[..., None]
      for x in (torch.exp(log_momentum), -torch.expm1(log_decay))
    )
    state, weights, outs = None, None, []
    for start, end in itertools.pairwise((*range(0, T, size), T)):
      chunk = slice(start, end)
      memory = constant_memory(
        to_keys=key[:, chunk].flatten(2),
        to_values=value[:, chunk].flatten(2),
        to_adaptive_step=rate[:, chunk],
        to_momentum=momentum[None, :, chunk],
        to_decay_factor=decay[:, chunk],
      )
      updates, following = memory.store_memories(
        query[:, chunk].flatten(2), weights, state, return_surprises=False
      )
      state = following.states
      weights = state[0]
      # The first is the memory before the mini-batch.
      memories = updates["weight"][:, 1:]
      out = torch.einsum(
        "ntd,ntdv->tnv", query[0, chunk].transpose(0, 1), memories
      )
      outs.append(out / H**0.5)
    return {"out": torch.cat(outs)[None]}

  return run


def main() -> None:
  """Writes the vectors."""
  file = Vectors("titans", "titans-pytorch 0.5.5")
  for size in (1, 6):
    draw = Draw(f"titans {size}")
    file.add(
      f"titans_{size}",
      call(size),
      witness="NeuralMemory.store_memories with a linear memory",
      mechanism="titans",
      given=draw.qkv(T, value=H)
      | {
        "learning_rate": draw.uniform(0.0, 0.15, 1, T, N),
        "log_momentum": draw.uniform(-2.0, -0.1, 1, T, N),
        "log_decay": draw.uniform(-1.0, -0.1, 1, T, N),
      },
      options={"minibatch_size": size},
    )
  file.write()


if __name__ == "__main__":
  main()

"""Bytes between devices, of programs whose traffic is known by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from training import traffic

DEVICES = 4
ROWS, WIDTH = 8, 16
PART = 4 * (ROWS // DEVICES) * WIDTH


def sent(local, out=None):
  """What a function of a part of [8, 16] float32 sends, compiled on 4 devices."""
  mesh = jax.make_mesh(
    (DEVICES,),
    ("x",),
    axis_types=(jax.sharding.AxisType.Auto,),
    devices=jax.devices()[:DEVICES],
  )
  rows = jax.P("x")
  function = jax.shard_map(
    local,
    mesh=mesh,
    in_specs=rows,
    out_specs=rows if out is None else out,
    check_vma=False,
  )
  x = jnp.asarray(np.random.default_rng(0).normal(size=(ROWS, WIDTH)))
  text = jax.jit(function).lower(x.astype(jnp.float32)).compile().as_text()
  return traffic.sent(text)


def around(x, by=1):
  pairs = [(i, (i + by) % DEVICES) for i in range(DEVICES)]
  return jax.lax.ppermute(x, "x", pairs)


def test_each_kind():
  assert sent(around) == {"collective-permute": PART}
  assert sent(lambda x: x * jax.lax.psum(x, "x")) == {
    "all-reduce": 2 * PART * 3 / 4
  }
  gathered = sent(lambda x: x + jax.lax.all_gather(x, "x").sum((0, 1))[None])
  assert gathered == {"all-gather": 4 * PART * 3 / 4}
  scattered = sent(
    lambda x: (
      x[:, :4] + jax.lax.psum_scatter(x, "x", scatter_dimension=1, tiled=True)
    )
  )
  assert sum(scattered.values()) in (3 * PART / 4, 2 * PART * 3 / 4)
  turned = sent(
    lambda x: jax.lax.all_to_all(x, "x", 1, 0, tiled=True).reshape(x.shape)
  )
  assert sum(turned.values()) == PART * 3 / 4
  assert sent(lambda x: x + 1) == {}


def test_loops_count_as_often_as_they_run():
  def scanned(x):
    return jax.lax.scan(lambda x, i: (around(x) + i, None), x, jnp.arange(5.0))[
      0
    ]

  assert sent(scanned) == {"collective-permute": 5 * PART}

  def nested(x):
    return jax.lax.fori_loop(0, 3, lambda _, x: scanned(x) * 0.5, x)

  assert sent(nested) == {"collective-permute": 15 * PART}


def test_the_branch_that_sends_most():
  def either(x):
    return jax.lax.cond(
      x.sum() > 0, lambda x: around(around(x, 2)), lambda x: around(x, 3), x
    )

  assert sent(either) == {"collective-permute": 2 * PART}


@pytest.mark.parametrize(
  "groups",
  [
    "{{0,1,2,3},{4,5,6,7}}",
    "[2,4]<=[8]",
    "mesh['x'=2,'y'=4] {'y'}",
    "mesh['x'=2,'y'=4], device_ids=(7,6,5,4,3,2,1,0) {'y'}",
    "mesh['x'=8,'y'=2,'z'=2] {'x':(2)2,'z'}",
  ],
)
def test_groups_of_four_in_each_way_that_xla_writes_them(groups):
  text = f"""ENTRY %main (x: f32[6]) -> f32[24] {{
  ROOT %y = f32[24]{{0}} all-gather(%x), replica_groups={groups}, dimensions={{0}}
}}
"""
  assert traffic.sent(text) == {"all-gather": 24 * 4 * 3 / 4}

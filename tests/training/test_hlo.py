"""Bytes between devices, of programs whose traffic is known by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from training.devices import hlo

DEVICES = 4
ROWS, WIDTH = 8, 16
PART = 4 * (ROWS // DEVICES) * WIDTH


def sent(local):
  """What a function of a part of [8, 16] float32 sends, compiled on 4 devices."""
  devices, automatic = jax.devices()[:DEVICES], (jax.sharding.AxisType.Auto,)
  mesh = jax.make_mesh((DEVICES,), ("x",), automatic, devices=devices)
  specs = {"in_specs": jax.P("x"), "out_specs": jax.P("x")}
  function = jax.shard_map(local, mesh=mesh, **specs, check_vma=False)
  x = jnp.asarray(np.random.default_rng(0).normal(size=(ROWS, WIDTH)))
  text = jax.jit(function).lower(x.astype(jnp.float32)).compile().as_text()
  return hlo.bytes_sent(text)


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


def test_a_program_of_one_device_and_booleans_of_a_byte():
  reduced = "ROOT %y = pred[3,5]{1,0} all-reduce(%x), to_apply=%or"
  body = f"(x: pred[3,5]) -> pred[3,5] {{\n  {reduced}\n}}\n"
  for head, count in (("", 1), ("HloModule step, replica_count=4\n\n", 4)):
    text = f"{head}ENTRY %main {body}"
    expected = 2 * 15 * (count - 1) / count
    assert hlo.bytes_sent(text) == {"all-reduce": expected}


ONE_GATHER = """ENTRY %main (x: f32[6]) -> f32[24] {{
  ROOT %y = f32[24]{{0}} all-gather(%x), {groups}, dimensions={{0}}
}}
"""


@pytest.mark.parametrize(
  ("groups", "axes"),
  [
    ("{{0,1,2,3},{4,5,6,7}}", "y"),
    ("{{0,2,4,6},{1,3,5,7}}", "x, y"),
    ("[2,4]<=[8]", "y"),
    ("[2,4]<=[4,2]T(1,0)", "x, y"),
    ("mesh['x'=2,'y'=4] {'y'}", "y"),
    ("mesh['x'=2,'y'=4], device_ids=(7,6,5,4,3,2,1,0) {'y'}", "y"),
    ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}", "y"),
    ("mesh['a'=8,'b'=1] {'a':(2)4}", "y"),
    ("mesh['a'=4,'b'=1,'c'=2] {'a':(1)2,'c'}", "x, y"),
  ],
)
def test_groups_of_four_in_each_way_that_xla_writes_them(groups, axes):
  text = ONE_GATHER.format(groups=f"replica_groups={groups}")
  assert hlo.bytes_sent(text) == {"all-gather": 24 * 4 * 3 / 4}
  assert hlo.sent_along(text, {"x": 2, "y": 4}) == {
    (axes, "all-gather"): (1, 24 * 4 * 3 / 4)
  }


def test_groups_in_another_form_are_not_taken_for_all():
  with pytest.raises(ValueError, match="in an unknown format"):
    hlo.bytes_sent(ONE_GATHER.format(groups="replica_groups=torus<2>"))


# As XLA writes it for GPUs, on a mesh of data 2 × fsdp 4.
GPU = """HloModule step, num_partitions=8

%sum (a: f32[], b: f32[]) -> f32[] {
  ROOT %c = f32[] add(%a, %b)
}

%ring (t: (s32[], bf16[2,8])) -> (s32[], bf16[2,8]) {
  %sent = (bf16[2,8]{1,0}, bf16[2,8]{1,0}, u32[], u32[]) collective-permute-start(%v), channel_id=1, source_target_pairs={{0,4},{4,0},{1,5},{5,1}}
  %come = bf16[2,8]{1,0} collective-permute-done(%sent)
}

ENTRY %main (p: f32[4]) -> f32[] {
  %g = ((f32[4]{0}, /*index=1*/f32[2]{0}), (f32[16]{0}, f32[8]{0})) all-gather-start(%p, %q), channel_id=2, replica_groups=[2,4]<=[8], dimensions={0}
  %done = (f32[16]{0}, f32[8]{0}) all-gather-done(%g)
  %r = ((bf16[16]{0}), bf16[4]{0}) reduce-scatter-start(%h), channel_id=3, replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}, to_apply=%sum
  %a = ((bf16[10]{0}), bf16[10]{0}) all-reduce-start(%i), channel_id=4, replica_groups={{0,4},{1,5},{2,6},{3,7}}, to_apply=%sum
  %b = (f32[3]{0}, f32[5]{0}) all-reduce-start(%i, %j), channel_id=5, replica_groups={}, to_apply=%sum
  %alone = f32[100]{0} all-reduce(%k), channel_id=6, replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, to_apply=%sum
  %w = (s32[], bf16[2,8]) while(%t), condition=%below, body=%ring, backend_config={"known_trip_count":{"n":"6"}}
}
"""


def test_a_program_for_gpus_counted_by_hand():
  assert hlo.sent_along(GPU, {"data": 2, "fsdp": 4}) == {
    ("data", "all-reduce"): (1, 2 * 10 * 2 * 1 / 2),
    ("data", "collective-permute"): (6, 6 * 2 * 8 * 2),
    ("data, fsdp", "all-reduce"): (1, 2 * (3 + 5) * 4 * 7 / 8),
    ("fsdp", "all-gather"): (1, (16 + 8) * 4 * 3 / 4),
    ("fsdp", "reduce-scatter"): (1, 4 * 2 * 3),
  }
  assert hlo.trips(GPU) == [6]


# As XLA writes it for TPUs, where one gathering is spread over three fusions.
SPREAD = (
  ", channel_id=9, replica_groups=[2,4]<=[8], dimensions={0}, backend_config="
  '{"async_collective_fusion_config":{"flag_start":"%s","flag_end":"8"}}'
)
TPU = f"""HloModule step, num_partitions=8

%start (p: bf16[2,8]) -> bf16[8,8] {{
  %g.1 = bf16[8,8]{{1,0:T(8,128)(2,1)S(1)}} all-gather(%p){SPREAD % -1}
}}

%meanwhile (p: bf16[2,8]) -> bf16[8,8] {{
  %g.2 = bf16[8,8]{{1,0:T(8,128)(2,1)S(1)}} all-gather(%p){SPREAD % 2}
}}

%all-reduce-scatter.2 (input: bf16[8,8]) -> bf16[2,8] {{
  %a = bf16[8,8]{{1,0}} all-reduce(%input), channel_id=3, replica_groups=[2,4]<=[8], to_apply=%sum
  ROOT %part = bf16[2,8]{{1,0}} dynamic-slice(%a, %i, %zero)
}}

%condition (t: (s32[], bf16[2,8])) -> pred[] {{
  %last = s32[]{{:T(128)}} constant(5)
  %i = s32[]{{:T(128)}} get-tuple-element(%t), index=0
  ROOT %lt = pred[]{{:T(512)}} compare(%i, %last), direction=LT
}}

%ring_condition (t: (u32[], bf16[2,8])) -> pred[] {{
  %eight = u32[]{{:T(128)}} constant(8)
  %i.2 = u32[]{{:T(128)}} get-tuple-element(%t), index=1
  ROOT %lt.3 = pred[]{{:T(512)}} compare(%i.2, %eight), direction=LT
}}

%ring (t: (bf16[2,8], u32[])) -> (bf16[2,8], u32[]) {{
  %two.1 = u32[]{{:T(128)}} constant(2)
  %next = u32[]{{:T(128)}} add(%i.3, %two.1)
  %p.1 = bf16[2,8]{{1,0}} collective-permute(%v), channel_id=7, source_target_pairs={{{{0,1}},{{1,2}},{{2,3}},{{3,0}}}}
  ROOT %carried = (bf16[2,8]{{1,0}}, u32[]{{:T(128)}}) tuple(%p.1, %next)
}}

%other (t: (s32[], s32[])) -> pred[] {{
  ROOT %lt.2 = pred[]{{:T(512)}} compare(%i, %j), direction=LT
}}

%body (t: (s32[], bf16[2,8])) -> (s32[], bf16[2,8]) {{
  %one = bf16[8,8] fusion(%p), kind=kCustom, calls=%start
  %two = bf16[8,8] fusion(%p), kind=kLoop, calls=%meanwhile
  %end = bf16[8,8] fusion(%p), kind=kCustom, calls=%meanwhile
  %three = bf16[2,8] fusion(%p), kind=kCustom, calls=%all-reduce-scatter.2
}}

ENTRY %main (p: f32[4]) -> f32[] {{
  %w = (s32[], bf16[2,8]) while(%t), condition=%condition, body=%body
  %r = (bf16[2,8], u32[]) while(%s), condition=%ring_condition, body=%ring
  %x = (s32[], s32[]) while(%u), condition=%other, body=%nothing
}}
"""


def test_a_program_for_tpus_counted_by_hand():
  assert hlo.sent_along(TPU, {"data": 2, "fsdp": 4}) == {
    ("fsdp", "all-gather"): (5, 5 * 8 * 8 * 2 * 3 / 4),
    ("fsdp", "collective-permute"): (4, 4 * 2 * 8 * 2),
    ("fsdp", "reduce-scatter"): (5, 5 * 8 * 8 * 2 * 3 / 4),
  }
  assert sorted(hlo.trips(TPU)) == [4, 5]

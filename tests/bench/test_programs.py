# ruff: noqa: E501  libtpu writes long lines
"""The reader of compiled programs, on programs whose exchanges are known and on lines as libtpu writes them."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tfx_jax.bench.programs import Collective, Operation, collectives, read_program


def _compiled(body, shape, out_spec, num_devices=4):
    mesh = jax.make_mesh((8 // num_devices, num_devices), ("copy", "d"), axis_types=(AxisType.Auto,) * 2)
    fn = jax.shard_map(body, mesh=mesh, in_specs=P("d"), out_specs=out_spec)
    return jax.jit(fn).lower(jax.ShapeDtypeStruct(shape, jnp.float32)).compile().as_text()


@pytest.mark.parametrize(
    ("body", "out_spec", "kind", "num_bytes", "moved"),
    [
        # Of [4, 8] float32, 128 bytes, a device holds a row of 32.
        (lambda x: jax.lax.psum(x, "d"), P(), "all-reduce", 32, 2 * 32 * 3 / 4),
        (lambda x: jax.lax.all_gather(x, "d")[None], P("d"), "all-gather", 128, 128 * 3 / 4),
        (lambda x: jax.lax.ppermute(x, "d", [(0, 1), (1, 2), (2, 3), (3, 0)]), P("d"), "collective-permute", 32, 32),
        (lambda x: jax.lax.all_to_all(x, "d", 1, 0, tiled=True), P("d"), "all-to-all", 32, 32 * 3 / 4),
    ],
)
def test_one_exchange(body, out_spec, kind, num_bytes, moved):
    (found,) = collectives(_compiled(body, (4, 8), out_spec))
    assert (found.kind, found.num_bytes, found.count, found.devices) == (kind, num_bytes, 1, (0, 1, 2, 3))
    assert found.moved == moved


def test_loops_multiply():
    def body(x):
        def outer(x, _):
            return jax.lax.scan(lambda x, _: (jnp.sin(jax.lax.psum(x, "d") + x), None), x, length=5)[0], None

        return jax.lax.scan(outer, x, length=3)[0]

    (found,) = collectives(_compiled(body, (4, 8), P("d")))
    assert (found.kind, found.count) == ("all-reduce", 15)


def test_what_one_device_does_alone_is_no_exchange():
    assert collectives(_compiled(lambda x: jax.lax.psum(x, "d") + x, (1, 8), P("d"), num_devices=1)) == []


def test_programs_for_cpu_have_no_estimates():
    assert read_program(_compiled(lambda x: jnp.sin(x), (4, 8), P("d"))).operations == []


# The parts of a program of libtpu that are read: a loop of three turns without a known trip count, a fusion whose parts
# have estimates too, an exchange that is started here and ended there, and the tables of source lines.
LIBTPU = """HloModule jit_update, is_scheduled=true

FileNames
1 "/home/someone/tfx_jax/nn/stack.py"
2 "/usr/lib/flax/nnx/linear.py"

FunctionNames
1 "scan_layers"

FileLocations
1 {file_name_id=1 function_name_id=1 line=108 end_line=108 column=24 end_column=24}
2 {file_name_id=2 function_name_id=1 line=7 end_line=7 column=1 end_column=1}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=2 parent_frame_id=1}

%fused_computation (p.1: f32[8]) -> f32[8] {
  %part = f32[8]{0} add(%p.1, %p.1), backend_config={"window_config":{"estimated_cycles":"70"}}
}

%cond (p.2: (s32[], f32[8])) -> pred[] {
  %limit = s32[]{:T(128)} constant(3)
  ROOT %lt = pred[]{:T(512)} compare(%counter, %limit), direction=LT
}

%body (p.3: (s32[], f32[8])) -> (s32[], f32[8]) {
  %f = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused_computation, metadata={op_name="jit(f)/while/body/dot_general" stack_frame_id=2}, backend_config={"window_config":{"estimated_cycles":"100"}}
  %start = (f32[8]{0}, f32[32]{0}, u32[]{:S(2)}) all-gather-start(%f), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}, metadata={op_name="jit(f)/gather"}
  %done = f32[32]{0} all-gather-done(%start)
}

ENTRY %main (p.4: f32[8]) -> f32[8] {
  %w = (s32[], f32[8]{0}) while(%t), condition=%cond, body=%body
  %copy = f32[8]{0} copy(%y), metadata={op_name="jit(f)/copy" stack_frame_id=3}, backend_config={"window_config":{"estimated_cycles":"40"}}
  %unknown = f32[8]{0} fusion(%y), calls=%fused_computation, backend_config={"window_config":{"estimated_cycles":"9000000000000000"}}
  %sum = f32[16]{0} all-reduce(%y), replica_groups=[2,4]<=[8], to_apply=%add
}

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %plus = f32[] add(%a, %b)
}
"""


def test_loops_of_libtpu_turn_as_often_as_their_condition_says():
    program = read_program(LIBTPU)
    assert program.cycles == 3 * 100 + 40
    assert program.operations == [
        Operation("tfx_jax/nn/stack.py:108 dot_general", 300),
        Operation("flax/nnx/linear.py:7 copy", 40),
    ]


def test_what_is_started_counts_once_and_by_its_result():
    gather, total = collectives(LIBTPU)
    assert gather == Collective("all-gather", (0, 1, 2, 3), 128, 3, True, "jit(f)/gather")
    assert total == Collective("all-reduce", (0, 1, 2, 3), 64, 1, False, "")
    assert gather.moved == 3 * 128 * 3 / 4

# ruff: noqa: E501  libtpu writes long lines
"""The reader of compiled programs, on programs whose exchanges are known and on lines as libtpu writes them."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tfx_jax.planning.measure import without_compilation_cache
from tfx_jax.planning.programs import Collective, Kernel, Operation, collectives, read_program


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
# have estimates too, exchanges that are started here and ended there, as operations and as fusions, a sum of which a part
# is kept, and the tables of source lines.
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
  %meanwhile = f32[8]{0} fusion(%f), kind=kLoop, calls=%fused_computation
  %done = f32[32]{0} all-gather-done(%start)
}

ENTRY %main (p.4: f32[8]) -> f32[8] {
  %w = (s32[], f32[8]{0}) while(%t), condition=%cond, body=%body
  %copy = f32[8]{0} copy(%y), metadata={op_name="jit(f)/copy" stack_frame_id=3}, backend_config={"window_config":{"estimated_cycles":"40"}}
  %unknown = f32[8]{0} fusion(%y), calls=%fused_computation, backend_config={"window_config":{"estimated_cycles":"9000000000000000"}}
  %sum = f32[16]{0} all-reduce(%y), replica_groups=[2,4]<=[8], to_apply=%add
  %part = f32[4]{0} fusion(%y), kind=kCustom, calls=%all-reduce-scatter
  %begin = f32[8]{0} fusion(%y), kind=kCustom, calls=%fused_computation.1
  %middle = f32[8]{0} fusion(%begin), kind=kCustom, calls=%async_collective_fusion.2
  %end = f32[8]{0} fusion(%middle), kind=kCustom, calls=%fused_computation.3
}

%all-reduce-scatter (input: f32[16]) -> f32[4] {
  %all = f32[16]{0} all-reduce(%input), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  ROOT %slice = f32[4]{0} dynamic-slice(%all, %place), dynamic_slice_sizes={4}
}

%fused_computation.1 (p.5: f32[2]) -> f32[8] {
  %all-gather.1 = f32[8]{0} all-gather(%p.5), channel_id=7, replica_groups={{0,1,2,3},{4,5,6,7}}
}

%async_collective_fusion.2 (p.6: f32[2]) -> f32[8] {
  %all-gather.2 = f32[8]{0} all-gather(%p.6), channel_id=7, replica_groups={{0,1,2,3},{4,5,6,7}}
}

%fused_computation.3 (p.7: f32[2]) -> f32[8] {
  %all-gather.3 = f32[8]{0} all-gather(%p.7), channel_id=7, replica_groups={{0,1,2,3},{4,5,6,7}}
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
    gather, total, part, fused = collectives(LIBTPU)
    assert gather == Collective("all-gather", (0, 1, 2, 3), 128, 3, True, "jit(f)/gather")
    assert total == Collective("all-reduce", (0, 1, 2, 3), 64, 1, False, "")
    assert part == Collective("reduce-scatter", (0, 1, 2, 3), 16, 1, False, "")
    assert fused == Collective("all-gather", (0, 1, 2, 3), 32, 1, True, "")
    assert gather.moved == 3 * 128 * 3 / 4


def test_exchanges_of_equal_layers_may_share_a_channel_but_no_chain():
    """Layers that JAX compiles as calls of one function have the channels of that function."""
    fusions = "fused_computation.1", "fused_computation.3", "async_collective_fusion.5"
    calls = [f"  %f.{index} = f32[8]{{0}} fusion(%x), calls=%{name}" for index, name in enumerate(fusions)]
    lines = ["HloModule jit_update", "", "ENTRY %main (p: f32[8]) -> f32[8] {", *calls, "}", ""]
    for chain, name in zip((0, 1, 1), fusions, strict=True):
        sums = "all-reduce(%p), channel_id=7, replica_groups={{0,1}}, to_apply=%add"
        attributes = f'frontend_attributes={{chain_id="{chain}"}}'
        lines += [f"%{name} (p: f32[8]) -> f32[8] {{", f"  %s = f32[8]{{0}} {sums}, {attributes}", "}", ""]
    one = Collective("all-reduce", (0, 1), 32, 1, False, "")
    assert collectives("\n".join(lines)) == [one, one._replace(is_async=True)]


# Exchanges as XLA writes them for GPUs: all are started and ended, some of them at once.
CUDA = """HloModule jit_update, is_scheduled=true

%fused (p.1: bf16[8]) -> bf16[8] {
  ROOT %twice = bf16[8]{0} add(%p.1, %p.1)
}

ENTRY %main (p.4: bf16[8]) -> bf16[8] {
  %all-reduce-start = bf16[8]{0} all-reduce-start(%p.4), replica_groups=[1,8]<=[8], to_apply=%add, backend_config={"collective_backend_config":{"is_sync":true}}
  %all-reduce-done = bf16[8]{0} all-reduce-done(%all-reduce-start)
  %all-reduce-start.1 = f32[4]{0} all-reduce-start(%x), replica_groups=[1,8]<=[8], to_apply=%add
  %bitcast.1 = f32[4]{0} bitcast(%p.4)
  %reduce-scatter-start = ((f32[64]{0}, f32[16]{0}), (f32[8]{0}, f32[2]{0})) reduce-scatter-start(%y, %z), replica_groups=mesh['a'=8] {'a'}, dimensions={0}, to_apply=%add
  %all-reduce-done.1 = f32[4]{0} all-reduce-done(%all-reduce-start.1)
  %gemm = (bf16[8]{0}, s8[4]{0}) custom-call(%p.4, %p.4), custom_call_target="__cublas$gemm"
  %reduce-scatter-done = (f32[8]{0}, f32[2]{0}) reduce-scatter-done(%reduce-scatter-start)
}
"""


def test_exchanges_are_hidden_where_something_is_computed_meanwhile():
    eight = tuple(range(8))
    assert collectives(CUDA) == [
        Collective("all-reduce", eight, 16, 1, False, ""),
        Collective("all-reduce", eight, 16, 1, False, ""),
        Collective("reduce-scatter", eight, 40, 1, True, ""),
    ]


# Kernels of Pallas as libtpu writes them, attributes with line breaks included.
KERNELS = """HloModule jit_f, is_scheduled=true

ENTRY %main (p.4: bf16[2,8,64]) -> bf16[2,8,64] {
  %splash_mha_fwd_residuals.1 = (f32[2,8]{1,0}, bf16[2,8,64]{2,1,0:T(8,128)(2,1)S(1)}) custom-call(%i, %q, %k, %v), custom_call_target="tpu_custom_call", operand_layout_constraints={s8[1,4]{1,0}, bf16[2,8,64]{2,1,0}, bf16[2,16,64]{2,1,0}, bf16[2,16,64]{2,1,0}}, frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 128}"
}}, metadata={op_name="jit(f)/pallas_call"}, backend_config={"custom_call_config":{"body":"TUzv"}}
  %splash_mha_dkv_no_residuals.1 = bf16[2,16,64]{2,1,0} custom-call(%q, %k), custom_call_target="tpu_custom_call", operand_layout_constraints={bf16[2,8,64]{2,1,0}, bf16[2,16,64]{2,1,0}}
  %stated = f32[8]{0} custom-call(%x), custom_call_target="tpu_custom_call", operand_layout_constraints={f32[8]{0}}, backend_config={"custom_call_config":{"body":"TUzv","cost_estimate":{"flops":"12","transcendentals":"34","bytes_accessed":"56"}}}
  %other = f32[2,8,64]{2,1,0} custom-call(%x, %y), custom_call_target="tpu_custom_call", operand_layout_constraints={f32[2,8,64]{2,1,0}, f32[2,16,64]{2,1,0}}
  %buffer = f32[99]{0} custom-call(), custom_call_target="AllocateBuffer"
  ROOT %copy = bf16[2,8,64]{2,1,0} copy(%y), backend_config={"window_config":{"estimated_cycles":"40"}}
}
"""


def test_work_of_kernels_is_what_they_say_or_what_their_shapes_tell():
    program = read_program(KERNELS)
    pairs, arrays = 2 * 8 * 16, {length: 2 * length * 64 * 2 for length in (8, 16)}  # bytes in bfloat16
    assert program.kernels == [
        Kernel("pallas_call", 2 * 2 * pairs * 64, 2 * 8 * 4 + 4 + 2 * arrays[8] + 2 * arrays[16]),
        Kernel("made by the compiler", 2 * 4 * pairs * 64, arrays[8] + 2 * arrays[16]),
        Kernel("made by the compiler", 12, 56),
        Kernel("made by the compiler", 0, 2 * (2 * arrays[8] + arrays[16])),
    ]
    assert program.cycles == 40


@pytest.mark.aot
def test_a_splash_attention_has_the_work_of_all_pairs(tpu_devices):
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    kernel = splash.make_splash_mha_single_device(splash.MultiHeadMask([splash.FullMask((2048, 2048))] * 8))
    sharding = jax.sharding.SingleDeviceSharding(tpu_devices("v5e:1x1")[0])
    x = jax.ShapeDtypeStruct((8, 2048, 64), jnp.bfloat16, sharding=sharding)

    @jax.jit
    def forward_and_backward(query, key, value, gradient):
        out, pull_back = jax.vjp(kernel, query, key, value)
        return out, pull_back(gradient)

    # Kept programs of devices that are not there cannot be read again.
    with jax.default_matmul_precision("default"), without_compilation_cache():
        kernels = read_program(forward_and_backward.lower(x, x, x, x).compile().as_text()).kernels
    assert sorted(kernel.flops for kernel in kernels) == [2 * count * 8 * 2048**2 * 64 for count in (2, 3, 4)]
    assert all(4 * 8 * 2048 * 64 * 2 <= kernel.num_bytes < 10 * 8 * 2048 * 64 * 2 for kernel in kernels)
    assert all("splash_attention_kernel.py" in kernel.source for kernel in kernels)

"""Probes: programs with their inputs and the VM's outputs, as files for a device machine.

Two are raw PTX for sm_90a: a bf16 product through TMA and wgmma, and an exchange between CTAs of a cluster. Four are
the ptx backend's attention: outputs of the device and of the VM must agree bit by bit. Two come from CuTeDSL, as host
objects in both calling conventions.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from backends.cutedsl.compile.artifact import Artifact
from backends.cutedsl.compile.compile import compile_host_function
from megamoe.contract import (
    BufferArg,
    Executor,
    HostProgram,
    Launch,
    PackedFields,
    Program,
    RunOptions,
    ScalarArg,
    StreamArg,
    TensorArg,
    TensorMapArg,
    load_executor,
)


@dataclass(frozen=True)
class Probe:
    """`tensors`: inputs and outputs before the run. `expected`: the outputs after a run on the VM."""

    name: str
    program: Program | HostProgram
    tensors: Mapping[str, torch.Tensor]
    outputs: tuple[str, ...]
    expected: Mapping[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])

    def on(self, executor: Executor, device: str = "cpu") -> dict[str, torch.Tensor]:
        """Runs on `executor` and returns the outputs on the CPU. AssertionError with the sentence of a broken rule."""
        tensors = {name: tensor.clone().to(device) for name, tensor in self.tensors.items()}
        options = RunOptions(accumulate="hopper") if executor.name == "vm" else RunOptions()
        execution = executor.run(self.program, tensors, options)
        assert execution.violation is None, execution.violation
        return {name: tensors[name].cpu() for name in self.outputs}

    def with_expected(self) -> Probe:
        """This probe with the VM's outputs, under its bit-exact model of an H200's tensor core."""
        return Probe(self.name, self.program, self.tensors, self.outputs, self.on(load_executor("vm")))


def differences(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Counts the elements of each tensor that differ in any bit."""
    return {name: int((_bits(found[name]) != _bits(expected[name])).sum()) for name in expected}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(whole[tensor.element_size()])


def save(probe: Probe, path: Path) -> None:
    """Writes `probe` for `load`."""
    path.write_bytes(pickle.dumps(probe))


def load(path: Path) -> Probe:
    """Reads a file that `save` wrote. It is a pickle: load only files of your own."""
    return pickle.loads(path.read_bytes())


M = N = K = 64
TILE_BYTES = 2 * M * K
_ACCUMULATORS = ", ".join(f"%d{i}" for i in range(32))

# wgmma descriptors: 8 rows of 128 bytes are 1024 bytes apart (SBO 64), swizzle 128B is 1 in bits 63..62 (PTX ISA,
# "Matrix descriptor format"); the four k16 blocks of a swizzled row are 32 bytes apart. D: row 16 * warp + lane / 4
# (+ 8), column 8 * i + 2 * (lane % 4), as the PTX ISA draws the accumulator of wgmma.m64nNk16.
PRODUCT = f"""
.visible .entry product(.param .align 64 .b8 a_map[128], .param .align 64 .b8 b_map[128], .param .u64 out)
{{
.reg .b32 %t, %lane, %warp, %row, %a, %b, %bar, %zero, %x;
.reg .b32 %d<32>;
.reg .b64 %map, %da, %db, %high, %p, %at, %token;
.reg .pred %one, %done, %on;
mov.u32 %t, %tid.x; and.b32 %lane, %t, 31; shr.u32 %warp, %t, 5; mov.u32 %zero, 0;
setp.eq.u32 %one, %t, 0;
mov.u32 %a, smem; add.u32 %b, %a, {TILE_BYTES}; add.u32 %bar, %a, {2 * TILE_BYTES};
@!%one bra READY;
mbarrier.init.shared::cta.b64 [%bar], 1;
fence.mbarrier_init.release.cluster;
mbarrier.arrive.expect_tx.shared::cta.b64 %token, [%bar], {2 * TILE_BYTES};
mov.b64 %map, a_map; cvta.param.u64 %map, %map;
cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%a], [%map, {{%zero, %zero}}], [%bar];
mov.b64 %map, b_map; cvta.param.u64 %map, %map;
cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%b], [%map, {{%zero, %zero}}], [%bar];
READY: bar.sync 0;
LOADING: mbarrier.try_wait.parity.shared::cta.b64 %done, [%bar], 0;
@!%done bra LOADING;
mov.b64 %high, 0x4000004000000000;
shr.u32 %x, %a, 4; cvt.u64.u32 %da, %x; or.b64 %da, %da, %high;
shr.u32 %x, %b, 4; cvt.u64.u32 %db, %x; or.b64 %db, %db, %high;
wgmma.fence.sync.aligned;
BLOCKS
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
ld.param.u64 %p, [out];
shl.b32 %row, %warp, 4; shr.u32 %x, %lane, 2; add.u32 %row, %row, %x;
mul.wide.u32 %at, %row, {4 * N}; add.u64 %p, %p, %at;
and.b32 %x, %lane, 3; mul.wide.u32 %at, %x, 8; add.u64 %p, %p, %at;
STORES
ret;
}}
"""


def _blocks() -> str:
    lines: list[str] = []
    for block in range(K // 16):
        lines.append(f"setp.ne.u32 %on, {block}, 0;" if block == 0 else "setp.eq.u32 %on, 0, 0;")
        lines.append(
            f"wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {{{_ACCUMULATORS}}}, %da, %db, %on, 1, 1, 0, 0;"
        )
        lines.append("add.u64 %da, %da, 2; add.u64 %db, %db, 2;")
    return "\n".join(lines)


def _stores() -> str:
    lines: list[str] = []
    for i in range(N // 8):
        lines.append(f"st.global.v2.b32 [%p+{32 * i}], {{%d{4 * i}, %d{4 * i + 1}}};")
        lines.append(f"st.global.v2.b32 [%p+{32 * i + 8 * 4 * N}], {{%d{4 * i + 2}, %d{4 * i + 3}}};")
    return "\n".join(lines)


WORDS = 24_576
"""Words of dynamic shared memory that each CTA fills: 96 KiB, twice the size that needs no opt-in."""
EXCHANGE = f"""
.visible .entry exchange(.param .u64 out, .param .u32 factor)
{{
.reg .b32 %t, %rank, %peer, %cta, %i, %value, %x, %theirs, %factor;
.reg .b64 %p, %at;
.reg .pred %more;
mov.u32 %t, %tid.x; mov.u32 %rank, %cluster_ctarank; mov.u32 %cta, %ctaid.x; xor.b32 %peer, %rank, 1;
ld.param.u32 %factor, [factor];
mov.u32 %i, %t;
FILL: mad.lo.u32 %value, %cta, {WORDS}, %i; mul.lo.u32 %value, %value, %factor;
mov.u32 %x, smem; mad.lo.u32 %x, %i, 4, %x; st.shared.u32 [%x], %value;
add.u32 %i, %i, 128; setp.lt.u32 %more, %i, {WORDS}; @%more bra FILL;
barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
ld.param.u64 %p, [out]; mul.wide.u32 %at, %cta, {4 * WORDS}; add.u64 %p, %p, %at;
mov.u32 %i, %t;
DRAIN: mov.u32 %x, smem; mad.lo.u32 %x, %i, 4, %x; mapa.shared::cluster.u32 %theirs, %x, %peer;
ld.shared::cluster.u32 %value, [%theirs];
mul.wide.u32 %at, %i, 4; add.u64 %at, %p, %at; st.global.u32 [%at], %value;
add.u32 %i, %i, 128; setp.lt.u32 %more, %i, {WORDS}; @%more bra DRAIN;
barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
ret;
}}
"""

HEAD = ".version 8.0\n.target sm_90a\n.address_size 64\n.extern .shared .align 1024 .b8 smem[];\n"


def _tile(tensor: str) -> TensorMapArg:
    return TensorMapArg(tensor, "bf16", (K, M), (2 * K,), (K, M), "128B")


def product_probe() -> Probe:
    """out = a b^T for bf16 [64, 64]: tensor maps with swizzle, an mbarrier, four wgmma."""
    generator = torch.Generator().manual_seed(5)
    a, b = (torch.randn(M, K, generator=generator).to(torch.bfloat16) for _ in range(2))
    ptx = HEAD + PRODUCT.replace("BLOCKS", _blocks()).replace("STORES", _stores())
    args = (_tile("a"), _tile("b"), BufferArg("out"))
    launch = Launch("product", (1, 1, 1), (128, 1, 1), args, dynamic_smem=2 * TILE_BYTES + 64)
    tensors = {"a": a, "b": b, "out": torch.full((M, N), float("nan"))}
    return Probe("product", Program("sm_90a", ptx, (launch,)), tensors, ("out",))


def exchange_probe() -> Probe:
    """Each CTA of a pair hands 96 KiB to the other: a cluster launch with enough shared memory to need an opt-in."""
    args = (BufferArg("out"), ScalarArg("u32", 2_654_435_761))
    launch = Launch("exchange", (4, 1, 1), (128, 1, 1), args, cluster=(2, 1, 1), dynamic_smem=4 * WORDS)
    tensors = {"out": torch.full((4, WORDS), -1, dtype=torch.int32)}
    return Probe("exchange", Program("sm_90a", HEAD + EXCHANGE, (launch,)), tensors, ("out",))


CASES = (
    "fmha:hd=64,t=4,s_k=1330,batch=2",
    "fmha:hd=128,t=4,s_k=257,heads=8,kv_heads=2,causal=true",
    "fmha:hd=256,t=64,s_k=320,causal=true,window=129",
    "fmha:hd=512,t=40,s_k=384,causal=true",
)
NAMES = tuple(f"fmha-{case.partition('hd=')[2].partition(',')[0]}" for case in CASES)


def fmha_probes() -> list[Probe]:
    """One probe for each head dimension: partial tiles, grouped heads, a window, causal."""
    return [_fmha_probe(name, case) for name, case in zip(NAMES, CASES, strict=True)]


def _fmha_probe(name: str, case_id: str) -> Probe:
    from backends.ptx import BACKEND
    from megamoe.judge.arena import Arena
    from megamoe.ops import reference
    from megamoe.spec.load import load_specs

    spec = load_specs()["fmha"]
    case = spec.parse_case(case_id)
    program = BACKEND.build(case, "sm_90a")
    assert isinstance(program, Program)
    arena = Arena(spec, case, reference("fmha").make_inputs(case))
    return Probe(name, program, {key: tensor.clone() for key, tensor in arena.tensors.items()}, ("o", "lse"))


LENGTH = 4099
DEPTH = 192


def compiled_scale_add() -> Artifact:
    """y += alpha * x. It needs CuTeDSL but no device; UnsupportedError without CuTeDSL."""
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

    from conformance.vm.host.cutedsl_kernels import scale_add

    n = cute.sym_int32()
    x, y = (make_fake_compact_tensor(cutlass.Float32, (n,), assumed_align=16) for _ in range(2))
    return compile_host_function(scale_add, x, y, cutlass.Float32(1), make_fake_stream(), target="sm_90a")


def compiled_product() -> Artifact:
    """c = a b^T by TMA and wgmma; k is known at run time only. UnsupportedError without CuTeDSL."""
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

    from conformance.vm.host.cutedsl_kernels import product

    k = cute.sym_int32(divisibility=64)
    a, b = (make_fake_compact_tensor(cutlass.BFloat16, (M, k), stride_order=(1, 0), assumed_align=16) for _ in range(2))
    c = make_fake_compact_tensor(cutlass.Float32, (M, M), stride_order=(1, 0), assumed_align=16)
    return compile_host_function(product, a, b, c, make_fake_stream(), target="sm_90a")


def scale_add_probe() -> Probe:
    """LENGTH elements, not a multiple of a CTA's 128. A product with 2 is exact, so the sum has the same bits fused or
    not."""
    generator = torch.Generator().manual_seed(7)
    tensors = {name: torch.randn(LENGTH, generator=generator) for name in "xy"}
    vectors = {name: TensorArg(name, "f32", (LENGTH,), packed=PackedFields(dims=(0,))) for name in "xy"}
    arguments = {**vectors, "alpha": ScalarArg("f32", 2.0), "stream": StreamArg()}
    program = compiled_scale_add().program(arguments, convention="packed")
    return Probe("cutedsl-packed", program, tensors, ("y",))


def compiled_product_probe() -> Probe:
    """One tile over three blocks of k. The host function encodes two tensor maps with the device's driver."""
    generator = torch.Generator().manual_seed(8)
    operands = {name: torch.randn(M, DEPTH, generator=generator).to(torch.bfloat16) for name in "ab"}
    arguments = {name: TensorArg(name, "bf16", (M, DEPTH)) for name in "ab"}
    program = compiled_product().program({**arguments, "c": TensorArg("c", "f32", (M, M)), "stream": StreamArg()})
    return Probe("cutedsl-tvm_ffi", program, {**operands, "c": torch.full((M, M), float("nan"))}, ("c",))


def all_probes() -> list[Probe]:
    """Every probe for a device machine. Compiling two of them needs CuTeDSL."""
    return [product_probe(), exchange_probe(), compiled_product_probe(), scale_add_probe(), *fmha_probes()]

"""Cases of NVIDIA's CuTeDSL examples: each runs as a program, at small sizes, and compares with torch by itself.

Persistent kernels see two SMs, so that each CTA has two tiles or more. Left out are programs with fixed sizes that are
too large for the machine (02_naive_gemm, 03_gemm_tiled_smem and 01_copy_grid_stride), and programs for several devices,
for sm_103a and sm_120a, and for JAX.
"""

from __future__ import annotations

from collections.abc import Iterator

from conformance.witness.public import MAIN, Checkout, PublicCase
from megamoe.contract import Target

CUTLASS = Checkout("NVIDIA/cutlass", "7107b05535f8977f5ecb9d01ee203205b1fd9bc4", "nvidia-cutlass-dsl")
_FOLDER = "examples/python/CuTeDSL"
_ONCE = "--warmup_iterations 0 --iterations 1"

_HALF = "--ab_dtype Float16 --c_dtype Float16 --acc_dtype Float32"
_GEMM = "--mnkl 384,256,448,2"
_PAIR = "--use_2cta_instrs --mma_tiler_mn 256,128 --cluster_shape_mn 2,1"
_HOPPER = {
    "dense_gemm/dense_gemm.py": (
        "--mnkl 384,256,448,2",
        "--mnkl 256,384,320,1 --cluster_shape_mn 2,1 --tile_shape_mn 128,256",
        "--mnkl 256,256,512,1 --a_dtype Float8E4M3FN --b_dtype Float8E5M2 --cluster_shape_mn 1,2",
        "--mnkl 256,256,320,1 --a_major m --b_major n --c_major m",
    ),
    "dense_gemm/dense_gemm_persistent.py": (
        "--mnkl 512,384,448,1",
        "--mnkl 512,512,320,1 --cluster_shape_mn 2,1 --swizzle_size 2 --raster_order along_n",
        "--mnkl 256,256,640,2 --a_dtype Int8 --b_dtype Int8 --c_dtype Int32 --acc_dtype Int32",
    ),
    "dense_gemm/dense_gemm_fp8_2xacc.py": ("--mnkl 256,256,1024,1", "--mnkl 512,256,768,1 --cluster_shape_mn 1,1"),
    "dense_gemm/dense_gemm_fp8_gelu_persistent.py": ("--mnkl 512,256,512,1",),
    "grouped_gemm/grouped_gemm.py": (
        "--num_groups 3 --problem_sizes_mnkl (128,256,448,1),(256,128,320,1),(128,128,64,1)",
        "--num_groups 2 --problem_sizes_mnkl (256,256,448,1),(256,128,320,1) "
        "--tensormap_update_mode GMEM --cluster_shape_mn 2,1",
    ),
    "attention/fmha.py": (
        "--q_shape 1,256,2,128 --k_shape 1,512,2,128",
        "--q_shape 2,200,2,64 --k_shape 2,200,1,64 --is_causal",
        "--q_shape 1,256,4,128 --k_shape 1,384,2,128 --is_persistent",
    ),
    "cta_norm/cta_norm.py": ("--M 6 --N 1024", "--M 5 --N 2048 --norm_type rms"),
}
"""Options by file below cute/hopper/kernel."""
_AMPERE = {
    "kernel/elementwise/elementwise_add.py": ("--M 70 --N 300",),
    "kernel/elementwise/elementwise_apply.py": ("--M 64 --N 512", "--M 64 --N 512 --op mul"),
    "tutorial/elementwise_add_autotune.py": ("--M 70 --N 300",),
    "kernel/dense_gemm/sgemm.py": ("--mnk 256,256,64", "--mnk 300,136,40 --a_major k --b_major n --c_major m"),
    "kernel/dense_gemm/tensorop_gemm.py": ("--mnkl 256,256,320,1", "--mnkl 264,136,128,2 --a_major k --b_major k"),
    "kernel/attention/flash_attention_v2.py": (
        "--batch_size 1 --seqlen_q 200 --seqlen_k 300 --num_head 2 --head_dim 128",
        "--batch_size 1 --seqlen_q 256 --seqlen_k 256 --num_head 1 --head_dim 64 --is_causal",
    ),
    "kernel/attention/hstu_attention.py": ("--batch_size 1 --seqlen_q 256 --seqlen_kv 256 --num_head 1 --head_dim 64",),
}
_BLACKWELL = {
    "dense_gemm/dense_gemm.py": (
        f"{_GEMM} {_HALF}",
        f"{_GEMM} {_HALF} --use_tma_store",
        f"--mnkl 512,256,448,1 {_HALF} --use_tma_store {_PAIR}",
        "--mnkl 256,256,320,1 --use_tma_store",
    ),
    "dense_gemm/dense_gemm_persistent.py": (
        f"--mnkl 512,256,448,2 {_HALF} --use_tma_store",
        f"--mnkl 1024,256,448,1 {_HALF} --use_tma_store {_PAIR}",
        f"--mnkl 512,256,448,1 {_HALF}",
        "--mnkl 512,256,640,1 --ab_dtype Float8E4M3FN --c_dtype Float16 --use_tma_store",
        "--mnkl 512,256,320,1 --use_tma_store --a_major m --b_major n --c_major m",
    ),
    "dense_gemm/dense_gemm_persistent_dynamic.py": (
        f"--mnkl 512,256,448,1 {_HALF} --use_tma_store",
        f"--mnkl 1024,256,448,1 {_HALF} --use_tma_store {_PAIR}",
    ),
    "dense_gemm/dense_gemm_persistent_prefetch.py": (f"--mnkl 512,256,448,1 {_HALF} --use_tma_store",),
    "dense_gemm/dense_gemm_alpha_beta_persistent.py": (
        "--mnkl 512,256,448,1 --ab_dtype Float16 --c_dtype Float16 --d_dtype Float16 --alpha 0.5 --beta 2.0",
    ),
    "dense_gemm/dense_gemm_software_pipeline.py": (f"{_GEMM} {_HALF} --use_tma_store",),
    "blockscaled_gemm/dense_blockscaled_gemm_persistent.py": (
        "--mnkl 512,256,1024,1",
        "--mnkl 512,256,512,1 --sf_dtype Float8E8M0FNU --sf_vec_size 32",
        "--mnkl 512,256,512,1 --a_dtype Float8E4M3FN --b_dtype Float8E4M3FN --sf_dtype Float8E8M0FNU --sf_vec_size 32",
        "--mnkl 1024,256,1024,1 --mma_tiler_mn 256,128 --cluster_shape_mn 2,1",
    ),
    "blockscaled_gemm/dense_blockscaled_gemm_persistent_amax.py": ("--mnkl 512,256,1024,1",),
    "blockscaled_gemm/dense_blockscaled_gemm_persistent_prefetch.py": ("--mnkl 512,256,1024,1",),
    "blockscaled_grouped_gemm/grouped_blockscaled_gemm.py": (
        "--num_groups 2 --problem_sizes_mnkl (256,256,512,1),(128,128,768,1)",
    ),
    "blockwise_gemm/blockwise_gemm.py": ("--mnkl 512,256,512,1",),
    "blockwise_gemm/contiguous_grouped_gemm.py": ("--mnkl 256,256,512,2",),
    "blockwise_gemm/masked_grouped_gemm.py": ("--mnkl 256,256,512,2",),
    "grouped_gemm/grouped_gemm.py": (
        "--num_groups 3 --problem_sizes_mnkl (128,256,448,1),(256,128,320,1),(128,128,64,1)",
        "--num_groups 2 --problem_sizes_mnkl (256,256,448,1),(256,128,320,1) --tensormap_update_mode GMEM",
    ),
    "mixed_input_gemm/mixed_input_gemm.py": (
        "--mnkl 256,256,512,1",
        "--mnkl 256,256,512,1 --a_dtype Int8 --scale_granularity_m 0 --scale_granularity_k 0 --use_tma_store",
    ),
    "mixed_input_gemm/grouped_mixed_input_gemm.py": ("--mnkl 256,128,512,2",),
    "mixed_input_gemm/grouped_mixed_input_gemm_acc_scale.py": ("--mnkl 256,128,512,2",),
    "attention/fmha/fmha.py": (
        "--q_shape 1,512,2,128 --k_shape 1,384,2,128",
        "--q_shape 1,300,4,64 --k_shape 1,300,2,64 --is_causal --is_persistent --lse_calculation",
        "--q_shape 1,256,2,128 --k_shape 1,512,2,128 --window_size 100,20",
    ),
    "attention/fmha/fmha_bwd.py": ("--s_q 256 --s_k 256 --h_q 1 --h_k 1 --d 128 --is_causal",),
    "attention/mla/mla_decode_fp16.py": (
        "--seq_len_k 384 --split_kv 1",
        "--seq_len_k 512 --split_kv 2 --is_persistent",
    ),
    "attention/mla/mla_decode_fp8.py": ("--seq_len_k 384 --split_kv 1 --tolerance 0.5",),
    "attention/mixed_input_fmha/mixed_input_fmha_decode.py": ("--seqlen 512 --heads_q 8 --heads_k 1",),
    "attention/mixed_input_fmha/mixed_input_fmha_prefill_d256.py": ("--q_shape 1,1,256,256 --k_shape 1,1,384,256",),
    "attention/mixed_input_fmha/mixed_input_fmha_prefill_d512.py": ("--q_shape 1,1,128,512 --k_shape 1,1,256,512",),
    "attention/mamba2_ssd/mamba2_ssd.py": ("--gbehcdln 1,1,2,2,4,64,128,128",),
    "moe/torch_grouped_mm.py": ("--tokens 128 --experts 4 --top_k_select 2 --hidden 256 --intermediate 256",),
    "moe/torch_scaled_grouped_mm.py": (
        "--tokens 128 --experts 4 --top_k_select 2 --hidden 256 --intermediate 256",
        "--tokens 128 --experts 4 --top_k_select 2 --hidden 256 --intermediate 256 --kind nvfp4",
    ),
    "rmsnorm/rmsnorm.py": ("--M 6 --N 2048",),
}
"""Options by file below cute/blackwell/kernel."""
_TUTORIALS = {
    **{
        f"tutorial_gemm/fp16_gemm_{number}.py": ("--mnk 512,512,448",)
        for number in ("0", "1", "2", "3", "3_1", "4", "5")
    },
    "tutorial_gemm/fp16_gemm_6.py": ("--mnk 512,512,640",),
    "tutorial_gemm/nvfp4_gemm_0.py": ("--mnkl 256,256,1024,1",),
    "tutorial_gemm/nvfp4_gemm_1.py": ("--mnkl 512,512,1024,1",),
    "tutorial_tma/tma_v0.py": ("--M 256 --N 256 --num_warmup 0 --num_iters 1",),
    "tutorial_tma/tma_v1.py": ("--M 256 --N 256 --num_warmup 0 --num_iters 1",),
    "tutorial_tma/tma_v2.py": ("--M 256 --N 256 --num_warmup 0 --num_iters 1",),
}
"""Options by file below cute/blackwell/tutorial."""
_PRIMITIVES = (
    "async_pipeline", "bar_warp_sync", "barrier_cta_red", "barrier_cta_sync", "basic_types", "cp_async_bulk",
    "cp_async_bulk_prefetch", "cp_async_mbarrier_arrive_cluster", "cp_async_mbarrier_arrive_cta",
    "cp_async_shared_global", "cp_async_shared_global_swizzled", "elect_sync", "ldmatrix_stmatrix", "mapa", "mbarrier",
    "mbarrier_lifecycle", "pipeline_software_fill", "red", "reduction/block_smem_reduce",
    "reduction/cluster_smem_reduce", "reduction/thread_vector_reduce", "reduction/warp_vector_reduce", "redux_sync",
    "shfl_sync", "tma/tma_1cta_mbarrier", "tma/tma_load_store", "tma/tma_load_to_ldmatrix", "tma/tma_multicast",
    "tma/tma_pipeline_count2", "tma/tma_pipeline_pingpong", "tma/tma_pipeline_single_warp", "tma/tma_pipeline_warpspec",
    "tma/tma_store", "tma/tma_swizzle_modes", "tma/tma_tensormap_replace", "tutorial/01_hello_world",
    "tutorial/04_tma_load", "tutorial/06_softmax",
    "tutorial/07_vectorized_array", "tutorial/09_tma_4d_to_2d", "vote_sync", "warp_named_barrier",
)  # fmt: skip
_TENSOR_CORE_PRIMITIVES = (
    "reduction/cluster_tmem_reduce", "tcgen05/1cta_mma_a_from_tmem", "tcgen05/1cta_mma_basic",
    "tcgen05/1cta_mma_mn_major", "tcgen05/1cta_mma_pipeline", "tcgen05/2cta_mma_basic",
    "tcgen05/2cta_mma_blockscale_m128", "tcgen05/2cta_mma_tma_store", "tcgen05/clusterMxN_2cta_mma",
    "tcgen05/cp_narrow_a_to_tmem_mma", "tcgen05/mcast_clusterMxN_1cta_mma", "tcgen05/mcast_clusterMxN_2cta_mma",
    "tcgen05/slicek_m32n8k128", "tcgen05/tmem_ld_st", "tcgen05/tmem_ld_to_stmatrix_transpose",
    "tutorial/05_minimal_tensor_mma", "tutorial/10_minimal_tensor_mma_fp8",
    "tutorial/gemm_M128_N128_Kany_TN_warpspec_multistage",
)  # fmt: skip
_TASKS = {
    "01_copy_basics_ts/02_copy_tma.py": ("",),
    "02_gemm_simple_ts/01_fp16_bf16_gemm_3.py": ("--mnk 512,512,448",),
    "03_persistent_scheduling_dynamic_domain_ts/01_copy_persistent_skip_tile.py": ("",),
    "03_persistent_scheduling_dynamic_domain_ts/02_copy_varlen_dynamic_domain.py": ("",),
    "04_gemm_bf16_advanced_ts/01_fp16_bf16_gemm_3_cluster.py": ("--mnk 512,512,448",),
    "05_gemm_nvfp4_ts/01_gemm_nvfp4.py": ("--mnkl 512,512,1024,1",),
    "06_gemm_split_k_fp16_ts/01_gemm_split_k_fp16.py": ("--mnk 256,256,1024",),
    "07_group_pipeline_ts/01_merge_copy.py": ("",),
    "07_group_pipeline_ts/02_merge_gemm.py": ("",),
    "07_group_pipeline_ts/03_merge_gemm_resadd.py": ("",),
    "07_group_pipeline_ts/04_fork_load_gemm_act.py": ("",),
}
_LANGUAGE = (
    "call_bypass_dlpack", "call_from_jit", "cooperative_launch", "dynamic_smem_size", "inline_ptx", "smem_allocator",
    "programmatic_dependent_launch", "launch_completion_and_programmatic_events", "torch_fake_tensor",
    "tvm_ffi/ampere_gemm_with_fake_tensor", "tvm_ffi/jit_and_use_in_torch",
)  # fmt: skip
_UNTIMED = ("tutorial_gemm/", "tutorial_tma/", "hstu", "moe/")
"""Parts of the paths of programs without an option for iterations."""
_PROFILER = "it checks its result inside torch's profiler of CUDA, and there is no such device"
_HOST_ONLY = "it launches no kernel: host code prints a tensor of the host"
_ROUNDING = "it admits no two roundings to float16, and torch rounds one of a thousand products the other way on a CPU"
_SKIPPED = {
    "/moe/": _PROFILER,
    "call_bypass_dlpack": _ROUNDING,
    "call_from_jit": _ROUNDING,
    "ampere_gemm_with_fake_tensor": _ROUNDING,
    "torch_fake_tensor": _HOST_ONLY,
}
"""Parts of paths, and why those programs cannot run here."""


def _of(folder: str, options: dict[str, tuple[str, ...]], *targets: Target, timed: bool = True) -> Iterator[PublicCase]:
    for file, lines in options.items():
        path = f"{_FOLDER}/{folder}/{file}"
        once = _ONCE if timed and not any(part in path for part in _UNTIMED) else ""
        for line in lines:
            for target in targets:
                given = {"options": f"{line} {once}".strip()}
                skipped = next((why for part, why in _SKIPPED.items() if part in path), "")
                yield PublicCase("CuTeDSL examples", CUTLASS, path, target, MAIN, given, skipped=skipped)


def _plain(folder: str, names: tuple[str, ...], *targets: Target) -> Iterator[PublicCase]:
    yield from _of(folder, {f"{name}.py": ("",) for name in names}, *targets, timed=False)


CASES = (
    *_of("cute/ampere", _AMPERE, "sm_90a"),
    *_of("cute/hopper/kernel", _HOPPER, "sm_90a"),
    *_of("cute/blackwell/tutorial", _TUTORIALS, "sm_100a"),
    *_of("cute/blackwell/kernel", _BLACKWELL, "sm_100a"),
    *_plain("experimental/primitives", _PRIMITIVES, "sm_100a"),
    *_plain("experimental/primitives", _TENSOR_CORE_PRIMITIVES, "sm_100a"),
    *_of("experimental/task_scheduling/blackwell/tutorial", _TASKS, "sm_100a", timed=False),
    *_plain("dsl_tutorials", _LANGUAGE, "sm_90a"),
)

"""The physical floor: its two ceilings, and what a warm cache and a target change."""

from __future__ import annotations

import pytest

from megamoe.bench.timing import FLOOR_SLACK, Floor, floor_of
from megamoe.contract import DeviceFacts, Target
from megamoe.ops import reference
from megamoe.spec.load import load_specs

SPECS = load_specs()
DEVICE = DeviceFacts(
    name="H0",
    compute_capability="9.0",
    driver="580",
    toolkit="13.0",
    multiprocessors=132,
    memory_bytes=1 << 37,
    l2_bytes=50 << 20,
    copy_bytes_per_s=4e12,
    bf16_flops_per_s=8e14,
)
LONG = SPECS["fmha"].parse_case("fmha:hd=128,t=1,s_k=8192,batch=32,heads=64,kv_heads=8")
SHORT = SPECS["fmha"].parse_case("fmha:hd=128,t=128,s_k=512")
LAYER = SPECS["nvfp4_moe"].parse_case(
    "nvfp4_moe:hidden=7168,intermediate=3072,num_experts=48,tokens=8192,topk=6,load=slice"
)


def test_a_long_cache_is_bound_by_its_bytes() -> None:
    floor = floor_of(LONG, "sm_90a", DEVICE, "cold")
    assert floor is not None
    assert floor.by == "bytes"
    assert floor.us == pytest.approx(reference("fmha").minimum_bytes(LONG) / 4e12 * 1e6)


def test_a_large_batch_is_bound_by_its_flops() -> None:
    floor = floor_of(LAYER, "sm_90a", DEVICE, "cold")
    assert floor is not None
    assert floor.by == "flops"
    assert floor.us == pytest.approx(reference("nvfp4_moe").useful_flops(LAYER) / 8e14 * 1e6)


def test_only_a_target_with_fp4_tensor_cores_is_faster_than_bf16() -> None:
    hopper, blackwell = (floor_of(LAYER, target, DEVICE, "cold") for target in ("sm_90a", "sm_100a"))
    assert hopper is not None
    assert blackwell is not None
    assert blackwell.us < hopper.us
    targets: tuple[Target, ...] = ("sm_90a", "sm_100a")
    one, other = (floor_of(SHORT, target, DEVICE, "hot") for target in targets)
    assert one == other, "bf16 operands have one rate"


def test_what_fits_in_the_cache_need_not_come_from_memory_again() -> None:
    cold, hot = (floor_of(SHORT, "sm_90a", DEVICE, temperature) for temperature in ("cold", "hot"))
    assert cold is not None
    assert hot is not None
    assert (cold.by, hot.by) == ("bytes", "flops")
    long_hot, long_cold = (floor_of(LONG, "sm_90a", DEVICE, temperature) for temperature in ("hot", "cold"))
    assert long_hot is not None
    assert long_cold is not None
    assert long_cold.us - long_hot.us == pytest.approx((50 << 20) / 4e12 * 1e6)


def test_there_is_no_floor_without_a_measured_ceiling() -> None:
    bare = DEVICE.model_copy(update={"copy_bytes_per_s": None, "bf16_flops_per_s": None})
    assert floor_of(LONG, "sm_90a", bare, "cold") is None
    half = DEVICE.model_copy(update={"copy_bytes_per_s": None})
    floor = floor_of(LONG, "sm_90a", half, "cold")
    assert floor is not None
    assert floor.by == "flops"


def test_a_time_is_believed_down_to_a_little_below_the_floor() -> None:
    assert Floor(100.0, "bytes").limit_us == pytest.approx(100.0 * FLOOR_SLACK)
    assert 0.8 < FLOOR_SLACK < 1.0

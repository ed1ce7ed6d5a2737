"""Probes of the ptx backend's attention: outputs of the device and of the VM must agree bit by bit."""

from __future__ import annotations

from backends.ptx import BACKEND
from conformance.gpu.probe import Probe
from megamoe.contract import Program
from megamoe.judge.arena import Arena
from megamoe.ops import reference
from megamoe.spec.load import load_specs

CASES = (
    "fmha:hd=64,t=4,s_k=1330,batch=2",
    "fmha:hd=128,t=4,s_k=257,heads=8,kv_heads=2,causal=true",
    "fmha:hd=256,t=64,s_k=320,causal=true,window=129",
    "fmha:hd=512,t=40,s_k=384,causal=true",
)
NAMES = tuple(f"fmha-{case.partition('hd=')[2].partition(',')[0]}" for case in CASES)


def probes() -> list[Probe]:
    """One probe for each head dimension: ragged, grouped, with a window, causal."""
    return [_probe(name, case) for name, case in zip(NAMES, CASES, strict=True)]


def _probe(name: str, case_id: str) -> Probe:
    spec = load_specs()["fmha"]
    case = spec.parse_case(case_id)
    program = BACKEND.build(case, "sm_90a")
    assert isinstance(program, Program)
    arena = Arena(spec, case, reference("fmha").make_inputs(case))
    return Probe(name, program, {key: tensor.clone() for key, tensor in arena.tensors.items()}, ("o", "lse"))

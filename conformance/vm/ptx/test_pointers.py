"""Parameters that are pointers are told from numbers: by .ptr, or by what the kernel does with them."""

from __future__ import annotations

import pytest

from backends.vm.ptx.parser import parse

HEAD = ".version 8.7\n.target sm_100a\n.address_size 64\n"
LOADED = "ld.param.u64 %rd1, [a];"

KNOWN = {
    "stored to": (".u64", f"{LOADED} st.global.u32 [%rd1+4], 1;"),
    "read by a vector load": (".u64", f"{LOADED} ld.global.v2.u64 {{%rd2, %rd3}}, [%rd1];"),
    "read through a generic address": (".b64", f"{LOADED} ld.u32 %r1, [%rd1];"),
    "an atomic": (".u64", f"{LOADED} red.global.add.u32 [%rd1], 1;"),
    "converted": (".u64", f"{LOADED} cvta.to.global.u64 %rd2, %rd1;"),
    "declared": (".u64 .ptr .global .align 4", ""),
    "declared to be generic": (".u64 .ptr.align 1", ""),
    "declared with nothing else": (".u64 .ptr", ""),
}
UNKNOWN = {
    "unused": (".u64", LOADED),
    "stored as a value": (".u64", f"{LOADED} st.global.u64 [%rd2], %rd1;"),
    "overwritten before the access": (".u64", f"{LOADED} mov.u64 %rd1, %rd2; st.global.u32 [%rd1], 1;"),
    "overwritten by a vector": (
        ".u64", f"{LOADED} ld.global.v2.u64 {{%rd2, %rd1}}, [%rd3]; st.global.u32 [%rd1], 1;",
    ),
    "half of it": (".b64", "ld.param.u64 %rd1, [a+8]; st.global.u32 [%rd1], 1;"),
    "an address in shared memory": (".u64", f"{LOADED} st.shared.u32 [%rd1], 1;"),
    "four bytes": (".u32", "ld.param.u32 %r1, [a]; st.global.u32 [%r1], 1;"),
    "declared to be of shared memory": (".u64 .ptr .shared .align 4", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", [*KNOWN, *UNKNOWN])
def test_a_parameter_is_a_pointer_if_the_text_says_so(name: str) -> None:
    kind, body = {**KNOWN, **UNKNOWN}[name]
    text = f"{HEAD}.entry k(.param {kind} a) {{ .reg .u64 %rd<4>; .reg .u32 %r<2>; {body} ret; }}"
    (parameter,) = parse(text).functions["k"].params
    assert parameter.pointer == (name in KNOWN), f"a parameter that is {name}"

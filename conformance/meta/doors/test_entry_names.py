"""A kernel is found by the name that its C++ source gives it, in any spelling, and by no other."""

from __future__ import annotations

import re

import pytest

from megamoe.contract.machine import LaunchRefusedError
from megamoe.given import entry_names
from megamoe.given.entry_names import entry_named, is_named, short_source_name, source_name, with_source_names

ENTRIES = {
    "_ZN2ns1kIfLi3EEEvPT_S1_": "void ns::k<float, 3>(float*, float)",
    "_ZN2ns1kIiLj4EEEvPT_S1_": "void ns::k<int, 4u>(int*, int)",
    "_ZN12_GLOBAL__N_14kindILN2ns4ModeE1EEEvv": "void (anonymous namespace)::kind<(ns::Mode)1>()",
    "_Z2ovPKf": "ov(float const*)",
    "_Z2ovPj": "ov(unsigned int*)",
    "_ZN5OuterIiE5innerEv": "Outer<int>::inner()",
    "_Z4loneb": "lone(bool)",
    "plain": "extern C",
}
NAMED = {
    "k<float,3>": 0,
    "ns::k<float, 3>": 0,
    "ns::k< float , (int)3 >": 0,
    "k<float, 3>(float *, float)": 0,
    "k<int,4>": 1,
    "k<int, 4u>": 1,
    "ns::k<int,(unsigned int)4>": 1,
    "kind<(ns::Mode)1>": 2,
    "kind<1>": 2,
    "kind": 2,
    "ov(const float*)": 3,
    "ov(float const *)": 3,
    "ov(unsigned*)": 4,
    "ov(unsigned int *)": 4,
    "Outer<int>::inner": 5,
    "inner(void)": 5,
    "lone": 6,
    "plain": 7,
    "_Z2ovPj": 4,
}
UNNAMED = {
    "k": "more than one entry 'k'.*_ZN2ns1kIfLi3EEEvPT_S1_ (ns::k<float, 3>(float*, float)), .*, as listed",
    "ns::k": "more than one entry 'ns::k'",
    "ov": "more than one entry 'ov'.*_Z2ovPKf (ov(float const*)), _Z2ovPj (ov(unsigned int*))",
    "k<float,4>": "no entry 'k<float,4>'",
    "ns::k<float,33>": "did you mean 'ns::k<float, 3>'?",
    "other::k<float,3>": "no entry",
    "ov(int*)": "no entry",
    "s::k<float,3>": "no entry",
    "lone(int)": "no entry",
    "": "no entry ''",
}


@pytest.mark.parametrize("entry", NAMED)
def test_a_kernel_is_named_as_in_the_source(entry: str) -> None:
    assert entry_named(entry, ENTRIES) == list(ENTRIES)[NAMED[entry]]


@pytest.mark.parametrize("entry", UNNAMED)
def test_a_name_that_is_nobodys_or_that_of_several_is_refused(entry: str) -> None:
    sentence = re.escape(UNNAMED[entry]).replace(r"\.\*", ".*")
    with pytest.raises(LaunchRefusedError, match=sentence):
        entry_named(entry, ENTRIES)


def test_without_a_demangler_the_mangled_name_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry_names, "_demangler", lambda: None)
    assert entry_named("ns::k", {name: None for name in ENTRIES if "IiLj4" not in name}) == next(iter(ENTRIES))
    assert entry_named("_Z2ovPj", ENTRIES) == "_Z2ovPj"
    with pytest.raises(LaunchRefusedError, match=r"_Z2ovPj; name one by its mangled name \(there is no libstdc"):
        entry_named("ov", ENTRIES)


LONG = "_ZN2ns4loadIiSt17integral_constantIbLb0EES1_IbLb0EES1_IbLb0EEEEiv"
"""int ns::load<int, std::integral_constant<bool, false>, ...>(): a function of a template, so its type is mangled."""


def test_a_mangled_name_is_shown_as_in_the_source() -> None:
    shown = ["ns::k<float, 3>", "ns::k<int, 4u>", "kind<(ns::Mode)1>", "ov", "ov", "Outer<int>::inner", "lone", "plain"]
    assert list(map(source_name, ENTRIES)) == shown
    assert source_name(LONG).startswith("ns::load<int, std::integral_constant<bool, false>,"), source_name(LONG)
    assert (short_source_name(LONG), short_source_name("_Z2ovPj")) == ("ns::load", "ov")
    assert source_name("_ZNK3BoxIiE3getEv") == "Box<int>::get"
    said = "byte 4 of `_ZZ1kILi3EEvPfE3buf`, not of `own_Z`"
    assert with_source_names(said) == "byte 4 of `k<3>(float*)::buf`, not of `own_Z`"
    assert source_name("") == ""


@pytest.mark.parametrize(
    ("pattern", "speaks"),
    [
        ("*kIf*", True),
        ("_ZN2ns1kIfLi3EEEvPT_S1_", True),
        ("k<*>", True),
        ("ns::k<float, 3>", True),
        ("ns::k<float,*>(float*, float)", True),
        ("k", True),
        ("k<int*>", False),
        ("other::k<*>", False),
        ("s::k<*>", False),
    ],
)
def test_a_pattern_matches_the_mangled_name_or_the_one_in_the_source(pattern: str, speaks: bool) -> None:
    assert is_named("_ZN2ns1kIfLi3EEEvPT_S1_", pattern) == speaks


def test_a_pattern_matches_a_name_that_is_not_mangled() -> None:
    assert is_named("gemm_f16", "gemm_*")
    assert not is_named("gemm_f16", "gemm")

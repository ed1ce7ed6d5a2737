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


COMPILED = {
    "_Z5racy2IiENSt9enable_ifIXgtstT_Li2EEvE4typeEPS1_": "racy2<int>",
    "_Z1kILi3EENSt9enable_ifIXgtT_Li2EEvE4typeEPf": "k<3>",
    "_ZZ1kILi3EENSt9enable_ifIXgtT_Li2EEvE4typeEPfE3buf": "k<3>(float*)::buf",
    "_Z3shlILi2EENSt9enable_ifIXltrsT_Li1ELi4EEvE4typeERAlsLi1ET__f": "shl<2>",
    "_Z4lessIiEDTltfp_fp_ET_": "less<int>",
    "_Z5arrowI1PEDtptfp_1xEPT_": "arrow<P>",
    "_Z6oplessIN2ns1AILi5EEEEDTcldtfp_onltLi3EEET_": "opless<ns::A<5> >",
    "_Z1kIN2ns1AIXgtLi3ELi2EEEEEvPT_": "k<ns::A<((3)>(2))> >",
    "_Z1kIN2ns1AIXrsLi3ELi2EEEEEvPT_": "k<ns::A<(3)>>(2)> >",
    "_Z2fpIXadL_Z2ffiEEEvv": "fp<&(ff(int))>",
    "_Z6memberIXadL_ZNK1P1fEiEEEvv": "member<&(P::f(int) const)>",
    "_Z4packIiJfPFiiEEEvT_DpT0_": "pack<int, float, int (*)(int)>",
    "_Z3runIZ3lamvEUliE_EvT_": "run<lam()::{lambda(int)#1}>",
    "_Z4cretIiEPVKT_S0_": "cret<int>",
    "_Z4tretIiEyPFvT_E": "tret<int>",
    "_Z4gfunIiEPFiT_fES0_": "gfun<int>",
    "_Z1gIiEPFivES1_": "g<int>",
    "_Z4garrIiERA3_iT_": "garr<int>",
    "_ZNVK4cuda3std6atomicIiE4loadEi": "cuda::std::atomic<int>::load",
    "_ZNV12_GLOBAL__N_11BILi3EE2goEv": "B<3>::go",
    "_ZNKR2ns1AILi1EE4lrefEv": "ns::A<1>::lref",
    "_ZNKO2ns1AILi1EE4rrefEv": "ns::A<1>::rref",
    "_ZNR2ns1AILi1EE3refEv": "ns::A<1>::ref",
    "_ZL2clii.part.0.isra.1": "cl",
    "_ZZNK1PIiE3getEiE3buf": "P<int>::get(int) const::buf",
    "_ZN1X3getB5cxx11IiEEvT_": "X::get[abi:cxx11]<int>",
    "_ZN2ns1AILi1EEptEv": "ns::A<1>::operator->",
    "_ZNK2ns1AILi1EEltEi": "ns::A<1>::operator<",
    "_ZNK1SclIiEEbT_": "S::operator()<int>",
    "_ZNK2ns1AILi1EEcvbEv": "ns::A<1>::operator bool",
    "_ZN1ScvPT_IiEEv": "S::operator int*<int>",
    "_ZlsIiEbT_N2ns1AILi5EEE": "operator<< <int>",
    "_ZltIiEbT_N2ns1AILi5EEE": "operator< <int>",
    "_ZplIiEPT_N2ns1AILi5EEES1_": "operator+<int>",
    "_Zli2_wy": 'operator"" _w',
    "_Znami": "operator new[]",
}
"""Names that g++ 12 gives functions, or the ABI, with `source_name`."""


@pytest.mark.parametrize("mangled", COMPILED)
def test_any_name_of_a_compiler_is_shown_without_types_and_qualifiers(mangled: str) -> None:
    assert source_name(mangled) == COMPILED[mangled]


@pytest.mark.parametrize("mangled", COMPILED)
def test_what_names_an_entry_matches_it_as_a_pattern(mangled: str) -> None:
    """One rule for both doors."""
    shown = source_name(mangled)
    for asked in (shown, short_source_name(mangled), shown.rpartition("::")[2], shown.partition("<")[0], "k", "no"):
        try:
            named = entry_named(asked, {mangled: None}) == mangled
        except LaunchRefusedError:
            named = False
        assert named == is_named(mangled, asked), asked
        assert named or asked != shown
    assert not is_named(mangled, ">")
    with pytest.raises(LaunchRefusedError):
        entry_named(">", {mangled: None})


@pytest.mark.parametrize("pattern", ["k", "k<*>", "k<3>", "k*", "k<(int)3>", "k(float*)"])
def test_a_kernel_that_exists_under_a_condition_has_its_own_name(pattern: str) -> None:
    """The mangled name of a template has the type of what it returns."""
    assert is_named("_Z1kILi3EENSt9enable_ifIXgtT_Li2EEvE4typeEPf", pattern)


def test_a_scope_is_no_kernel() -> None:
    with pytest.raises(LaunchRefusedError):
        entry_named("Outer", ENTRIES)


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

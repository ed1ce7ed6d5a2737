"""The approximate functions give an H200's bits, both compiled and in NumPy."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from backends.vm.load import load
from backends.vm.machine.machine import Machine
from backends.vm.numerics import approx, mufu
from backends.vm.numerics.compiled import compiled
from conformance import ROOT
from conformance.silicon import mufu_on_device
from conformance.silicon.mufu import HASHES, RECORD, differing, function_of, model, operands_of, pairs, record

UNIT = (mufu.rcp, mufu.rsq, mufu.sqrt, mufu.ex2, mufu.lg2, mufu.sin, mufu.cos, mufu.tanh, mufu.rcp64h, mufu.rsq64h)
# A few blocks everywhere, and more where results vary: operands from 2^-9 to 2^8 of either sign.
BLOCKS = (*range(0, 1024, 257), *range(236, 270, 6), *range(748, 782, 8))
# Exponents 0 and 255, both signs, the ends of mantissas, and the steps of every function's ranges.
SPECIAL = np.array(
    [
        sign << 31 | exponent << 23 | mantissa
        for sign in (0, 1)
        for exponent in (0, 1, 2, 100, 118, 119, 125, 126, 127, 128, 129, 130, 134, 135, 252, 253, 254, 255)
        for mantissa in (0, 1, 0x3F_FFFF, 0x40_0000, 0x7F_FFFF)
    ],
    np.uint32,
)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


@pytest.mark.parametrize("name", [name for name in HASHES.files if operands_of(name) == "unary"])
def test_outputs_are_those_of_an_h200(name: str) -> None:
    """Blocks over the whole range of operands; `python -m conformance.silicon.mufu` checks all of them."""
    wrong = differing([name], BLOCKS)
    assert not wrong, f"blocks {wrong} of 2^22 outputs differ from the H200's"


@pytest.mark.parametrize("operands", ["div0", "div1", "div2"])
def test_quotients_are_those_of_an_h200(operands: str) -> None:
    """All divisions at once, because drawing their operands takes longer than dividing them."""
    names = [name for name in HASHES.files if operands_of(name) == operands]
    assert len(names) == 4, f"{operands}: {names}"
    wrong = differing(names, range(0, 64, 16))
    assert not wrong, f"blocks {wrong} of 2^22 quotients differ from the H200's"


def test_a_coefficient_that_is_one_off_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = mufu._EX2.c0.copy()
    rows[17] += 1 << 15
    monkeypatch.setattr(mufu._EX2, "c0", rows)
    compiled.cache_clear()
    try:
        assert differing(["ex2_ftz"], BLOCKS), "a wrong row must change the hash of a block that reads it"
    finally:
        compiled.cache_clear()


@pytest.mark.parametrize("function", UNIT, ids=lambda one: one.__name__)
def test_machine_code_is_the_numpy_source(function: object) -> None:
    drawn = np.random.default_rng(7).integers(0, 1 << 32, 1 << 15, dtype=np.uint64).astype(np.uint32)
    words = np.concatenate([SPECIAL, drawn])
    plain, made = function(words), compiled(function)(words)  # type: ignore[operator, arg-type]
    at = np.flatnonzero(plain != made)
    assert not len(at), f"of {words[at[0]]:08x} NumPy makes {plain[at[0]]:08x}, machine code {made[at[0]]:08x}"


def test_half_forms_cut_the_f32_result_off() -> None:
    """facts.md 7.4: truncated, not rounded. 2^0.5 in f16 is 0x3da8 both ways; 2^0.3 tells them apart."""
    x = np.arange(1 << 16, dtype=np.uint16)
    wide = approx.ex2(x.view(np.float16).astype(np.float32), ftz=True)
    rounded = wide.astype(np.float16).view(np.uint16)
    got = approx.half("ex2", "f16")
    finite = np.isfinite(wide) & (wide < 65504) & (wide >= 2.0**-14)
    assert np.all((got == rounded) | (got == rounded - 1), where=finite)
    assert np.any((got == rounded - 1) & finite), "some results must differ from the rounded ones"


def test_unknown_numpy_functions_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"np\.hypot cannot be traced"):
        compiled(lambda a: np.hypot(a, a))


def test_operands_of_unlike_shapes_are_refused() -> None:
    """The loop runs over raw memory: it would read a shorter operand beyond its end."""
    with pytest.raises(ValueError, match=r"unlike shapes: \(32,\), \(1,\)"):
        approx.div_full(np.ones(32, np.float32), np.ones(1, np.float32))


@pytest.mark.parametrize("name", [name for name in HASHES.files if name not in mufu_on_device.NOT_ASKED])
def test_the_kernel_that_asks_a_gpu_computes_these_hashes(name: str) -> None:
    """Two CTAs of 2048 outputs on the machine, against NumPy."""
    count, found, machine = 2048, np.zeros(2, np.uint64), Machine()
    params = [struct.pack("<Q", machine.memory.add("hashes", found.view(np.uint8)).base), struct.pack("<I", count)]
    entry = load(mufu_on_device.kernel(name)).entry(name)
    machine.launch(entry, (2, 1, 1), (mufu_on_device.THREADS, 1, 1), params)
    weights = 2 * np.arange(count, dtype=np.uint64) + np.uint64(1)
    for block in range(2):
        first = block * count
        words = (np.arange(first, first + count, dtype=np.uint32),)
        if name.startswith("div"):
            words = tuple(one[:count] for one in pairs(first, int(name[-1])))
        wanted = int(np.dot(function_of(name)(*words).astype(np.uint64), weights))
        assert int(found[block]) == wanted, f"{name}: block {block}"


def test_a_record_names_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """One block of each function, with a false hash of one."""
    held = {name: HASHES[name].copy() for name in ("ex2_ftz", "div_full_1")}
    held["ex2_ftz"][0] ^= 1
    monkeypatch.setattr("conformance.silicon.mufu.HASHES", _Held(held))
    monkeypatch.setattr("conformance.silicon.mufu.ProcessPoolExecutor", lambda *_: ThreadPoolExecutor(1))
    functions = record(1, 1024, device=False)["functions"]
    assert functions == {
        "ex2_ftz": {"outputs": 1 << 22, "blocks_that_differ": [0]},
        "div_full_1": {"outputs": 1 << 22, "blocks_that_differ": []},
    }


class _Held(dict[str, np.ndarray]):
    @property
    def files(self) -> list[str]:
        return list(self)


def test_the_recorded_full_run_is_of_this_model_and_finds_nothing() -> None:
    held = json.loads(RECORD.read_text("utf-8"))
    assert held["model"] == model(), (
        "approx.py, mufu.py or its tables changed: run python -m conformance.silicon.mufu "
        f"{RECORD.relative_to(ROOT)} --jobs N, some 15 minutes of one core"
    )
    assert set(held["functions"]) == set(HASHES.files)
    for name, one in held["functions"].items():
        assert one["outputs"] == len(HASHES[name]) << 22, f"{name}: not all outputs"
        for key in ("blocks_that_differ", "blocks_that_differ_on_the_device"):
            assert not one.get(key), f"{name}: {key}: {one[key]}"

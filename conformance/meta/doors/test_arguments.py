"""What a kernel's parameters may be given: arrays of plain memory, numbers of the right kind, addresses that exist."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from conformance.meta.doors.test_vm import ADDRESS, COUNT, FIRST, HEAD, SCALE, STRUCT
from megamoe.vm import Device, KernelFault, LaunchRefusedError

I32 = np.zeros(4, np.int32)
F32 = np.zeros(4, np.float32)


@pytest.fixture
def vm() -> Device:
    return Device("sm_100a")


class _Wrapping(torch.Tensor):
    """A tensor without memory of its own."""

    @classmethod
    def __torch_dispatch__(cls, *asked: object, **options: object) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise NotImplementedError


def _wrapping() -> torch.Tensor:
    return torch.Tensor._make_wrapper_subclass(_Wrapping, (4,), dtype=torch.float32)


def _emptied() -> torch.Tensor:
    made = torch.zeros(4)
    made.untyped_storage().resize_(0)
    return made


_PAIR = np.dtype([("a", np.float32), ("b", np.int32, (2,))])
STRANGE: dict[str, tuple[Any, str]] = {
    "objects": (
        np.zeros(4, object),
        r"the dtype object, .* references to Python objects; .*\.astype\(",
    ),
    "objects in a struct": (np.zeros(4, np.dtype([("a", object)])), "references to Python objects"),
    "strings of any length": (np.array(["a"], np.dtypes.StringDType()), "references to Python objects"),
    "text": (np.array(["ab"]), "the dtype <U2, text of 4 bytes a character; for a `char .` give bytes"),
    "text in a struct": (np.zeros(4, np.dtype([("a", "U3", (2,))])), "text of 4 bytes a character"),
    "the other byte order": (np.zeros(4, ">f4"), "the dtype >f4, in the byte order of another machine.*newbyteorder"),
    "the other byte order in a struct": (np.zeros(4, np.dtype([("a", ">f4")])), "in the byte order of another machine"),
    "80 bits": (np.zeros(4, np.longdouble), "which no GPU has"),
    "a mask": (np.ma.masked_array(F32, F32 > 0), "an array is masked, and a kernel sees no mask"),
    "a conjugate": (torch.zeros(4, dtype=torch.complex64).conj(), "stands for the conjugate .* t.resolve_conj()"),
    "a negative": (torch.zeros(4)._neg_view(), "stands for the negative .* t.resolve_neg()"),
    "a wrapper": (_wrapping(), "_Wrapping of 4 elements. has no memory of its own"),
    "a storage that was given back": (_emptied(), "has no memory of its own"),
}
"""Arrays whose elements are not what the bytes in memory say."""
PLAIN: dict[str, Any] = {
    "structs": np.zeros(4, _PAIR),
    "bytes": np.array([b"abcd", b"e"]),
    "dates": np.zeros(4, "datetime64[s]"),
    "complex numbers": np.zeros(4, np.complex128),
    "bools": np.zeros(4, np.bool_),
    "the memory of others": np.frombuffer(bytearray(16), np.float32),
    "a tensor's": torch.zeros(4).numpy(),
    "a fresh storage": torch.zeros(4, dtype=torch.complex64).conj().resolve_conj(),
}


@pytest.mark.parametrize("name", STRANGE)
def test_an_array_whose_memory_is_not_its_elements_is_refused(name: str, vm: Device) -> None:
    array, sentence = STRANGE[name]
    for options in ({"args": (array, I32)}, {"memory": [array]}, {"scratch": [array]}):
        left = {"args": (F32, I32), **options}
        with pytest.raises(LaunchRefusedError, match=sentence):
            vm.launch(FIRST, "first", 1, 1, *left.pop("args"), **left)


@pytest.mark.parametrize("name", PLAIN)
def test_an_array_of_plain_memory_is_taken(name: str, vm: Device) -> None:
    strange = [array for array, _ in STRANGE.values()]
    array = PLAIN[name]
    at = array.data_ptr() if isinstance(array, torch.Tensor) else array.ctypes.data
    vm.launch(FIRST, "first", 1, 1, array, np.array([at]))
    assert strange, "strange arrays that are alive disturb no search for what addresses point at"


def test_a_number_for_a_pointer_must_be_an_address(vm: Device) -> None:
    y, x = torch.zeros(4, dtype=torch.int32), np.zeros(4, np.int32)
    for wrong in (1, 12345, 0x3F80_0000, -1, np.int64(64)):
        with pytest.raises(
            LaunchRefusedError, match=rf"argument 0 .*is a pointer, .* {int(wrong) % (1 << 64):#x} .*array"
        ):
            vm.launch(FIRST, "first", 1, 1, wrong, x)
    for wrong in (1.0, 2.5, np.float64(0)):
        with pytest.raises(LaunchRefusedError, match=r"argument 0 .*cannot be .*; it takes an address: .* array"):
            vm.launch(FIRST, "first", 1, 1, wrong, x)
    vm.launch(FIRST, "first", 1, 1, y.data_ptr(), x)
    vm.launch(FIRST, "first", 1, 1, y, x.ctypes.data, memory=[x])
    assert y[0] == 7, "the address of a tensor that is alive is a pointer to it"
    for number in (0, 12345, y.data_ptr()):
        vm.launch(ADDRESS, "address", 1, 1, seen := np.zeros(1, np.int64), number)
        assert seen[0] == number, "what is not known to be a pointer may be any number"
    with pytest.raises(KernelFault, match="a null pointer"):
        vm.launch(FIRST, "first", 1, 1, 0, x)


def test_an_address_that_a_kernel_has_left_is_a_pointer(vm: Device) -> None:
    left = COUNT.replace("atom.global.add.u32 %r1, [counter], 1;\n  st.global.u32 [%rd1], %r1;",
                         "mov.u64 %rd2, counter;\n  st.global.u64 [%rd1], %rd2;")  # fmt: skip
    vm.launch(left, "count", 1, 1, at := np.zeros(1, np.int64))
    vm.launch(FIRST, "first", 1, 1, np.zeros(1, np.int32), int(at[0]))


FLOATS = (
    HEAD
    + """
.visible .entry floats(.param .u64 y, .param .b32 a, .param .f64 b)
{ .reg .u64 %rd<2>; .reg .b32 %r<2>; ld.param.u64 %rd1, [y]; ld.param.b32 %r1, [a]; st.global.b32 [%rd1], %r1; ret; }
"""
)


def test_a_float_is_no_whole_number(vm: Device) -> None:
    y, x = np.zeros(1, np.float32), np.zeros(32, np.float32)
    with pytest.raises(LaunchRefusedError, match=r"argument 3 .*cannot be 2\.0; it takes a whole number .* 2$"):
        vm.launch(SCALE, "scale", 1, 32, x, x.copy(), 1.0, 2.0, None)
    with pytest.raises(LaunchRefusedError, match=r"argument 1 of floats .*cannot be 1\.5.*np\.float32\(\.\.\.\)"):
        vm.launch(FLOATS, "floats", 1, 1, y, 1.5, 1.0)
    vm.launch(FLOATS, "floats", 1, 1, y, np.float32(1.5), 1.0)
    assert y[0] == 1.5, "32 bits of no stated kind take the bits of a NumPy float"
    for wrong in (None, torch.zeros(1), np.zeros(1)):
        with pytest.raises(LaunchRefusedError, match=r"argument 2 of floats .*is (no pointer|a scalar of 8 bytes)"):
            vm.launch(FLOATS, "floats", 1, 1, y, 1, wrong)


def test_an_array_for_a_scalar_is_told_how_to_give_a_number(vm: Device) -> None:
    for given in (torch.tensor(5), np.array(5), torch.zeros(3)):
        with pytest.raises(LaunchRefusedError, match=r"argument 3 .*a scalar of 2 bytes, and is given .*\.item\(\)"):
            vm.launch(SCALE, "scale", 1, 32, torch.zeros(32), torch.zeros(32), 1.0, given, None)
    with pytest.raises(LaunchRefusedError, match=r"is a struct of 16 bytes, and is given a ndarray .*\.tobytes\(\)"):
        vm.launch(STRUCT, "second", 1, 1, None, np.zeros(2, np.int64))

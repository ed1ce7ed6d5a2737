"""What a kernel's parameters may be given: arrays of plain memory, numbers of the right kind, addresses that exist."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch

from conformance.meta.doors.test_vm import ADDRESS, COUNT, FIRST, HEAD, SCALE, STRUCT, TMA
from megamoe.contract.machine import PixelBox
from megamoe.vm import Device, KernelFault, LaunchRefusedError
from megamoe.vm import tensor_map as made_map

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


def tensor_map(*args: Any, **options: Any) -> Any:
    """tensor_map, which checks what no type checker has seen."""
    return made_map(*args, **options)


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


SQUARE = torch.zeros(8, 8)
IMAGES = torch.zeros(2, 8, 8, 16)
NO_MAP: dict[str, tuple[Any, str]] = {
    "half an element": (lambda: tensor_map(SQUARE, (8.5, 8)), r"box of a tensor map is \(8\.5, 8\); .* whole numbers"),
    "a whole float": (lambda: tensor_map(SQUARE, (8.0, 8)), "box of a tensor map is"),
    "a bool": (lambda: tensor_map(SQUARE, (True, 8)), "box of a tensor map is"),
    "words": (lambda: tensor_map(SQUARE, ("8", "8")), "box of a tensor map is"),
    "a word": (lambda: tensor_map(SQUARE, "88"), "box of a tensor map is '88'"),
    "one number": (lambda: tensor_map(SQUARE, 8), "box of a tensor map is 8"),
    "none": (lambda: tensor_map(SQUARE, None), "box of a tensor map is None"),
    "strides": (lambda: tensor_map(SQUARE, (8, 8), element_strides=(1.0, 1)), "element_strides of a tensor map is"),
    "a swizzle": (lambda: tensor_map(SQUARE, (8, 8), 128), "swizzle .* is 128; it must be a name, as '128B'"),
    "a list": (lambda: tensor_map(SQUARE, (8, 8), ["128B"]), "swizzle of a tensor map is"),
    "a dtype": (lambda: tensor_map(SQUARE, (8, 8), dtype=torch.float16), "dtype of a tensor map is torch.float16"),
    "a fill": (lambda: tensor_map(SQUARE, (8, 8), oob_fill=0), "oob_fill of a tensor map is 0"),
    "a box of pixels": (lambda: tensor_map(IMAGES, (16,), im2col=(1, 1, 4)), "it must be a PixelBox"),
    "a corner": (
        lambda: tensor_map(IMAGES, (16,), im2col=PixelBox(cast("Any", (-1.5, 0)), (0, 0), 4)),
        "lower of a tensor map is",
    ),
    "pixels": (
        lambda: tensor_map(IMAGES, (16,), im2col=PixelBox((0, 0), (0, 0), cast("Any", "4"))),
        "pixels of a tensor map is",
    ),
    "no tensor": (lambda: tensor_map([1], (1,)), "of a torch tensor or a NumPy array, not of list"),
    "a field of structs": (
        lambda: tensor_map(np.zeros(64, np.dtype([("a", "f8"), ("b", "f4")]))["a"], (8,)), "strides are .12,. bytes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_MAP)
def test_a_parameter_of_a_map_that_is_no_number_is_refused_when_it_is_made(name: str) -> None:
    make, sentence = NO_MAP[name]
    with pytest.raises(ValueError, match=sentence):
        make()


def test_whole_numbers_of_any_kind_make_a_map() -> None:
    kinds = (8, np.int64(8), torch.tensor(8))
    maps = [tensor_map(SQUARE, (one, one), element_strides=[one, one]) for one in kinds]
    assert {(one.box, one.element_strides) for one in maps} == {((8, 8), (8, 8))}
    assert tensor_map(SQUARE, torch.Size((8, 4))).box == (4, 8)
    assert tensor_map(SQUARE, np.array([8, 4])).box == (4, 8)


@pytest.mark.parametrize(("box", "sentence"), [((-8, 8), r"box\[1\] is -8; 1 to 256"), ((8, 0), r"box\[0\] is 0")])
def test_a_number_that_the_driver_refuses_is_refused_at_the_launch(
    vm: Device, box: tuple[int, int], sentence: str
) -> None:
    with pytest.raises(LaunchRefusedError, match=sentence):
        vm.launch(TMA, "box", 1, 1, None, tensor_map(SQUARE, box))


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

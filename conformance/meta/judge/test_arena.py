"""Laws of the arena: it reports every stray write and every changed input, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megamoe.contract.counted import counted
from megamoe.judge.arena import (
    ALIGNMENT,
    POISON,
    SEAL_BYTES,
    Arena,
    Digests,
    Layout,
    Seal,
    SealedCopy,
    coordinate,
    home_of,
    is_poison,
    seal,
)
from megamoe.ops import reference
from megamoe.spec.load import load_specs

SHAPE = (3, 5, 7)
OUTPUTS = sorted(POISON, key=str)


def arena(guard: int = ALIGNMENT, rows: int = 3000) -> Arena:
    layouts = {
        "x": Layout((rows, 3), torch.bfloat16, "input"),
        "y": Layout(SHAPE, torch.bfloat16, "output"),
        "z": Layout((3,), torch.float32, "output"),
    }
    x = torch.arange(rows * 3).view(rows, 3).bfloat16()
    return Arena.of_layouts(layouts, {"x": x}, guard=guard)


def bytes_around(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The storage of `tensor` as bytes, and the tensor's first byte in it."""
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    return storage, int(tensor.storage_offset()) * tensor.dtype.itemsize


def test_a_fresh_arena_is_whole() -> None:
    assert arena().damage() is None, "nothing has been written"


@pytest.mark.parametrize("name", ["x", "y", "z"])
def test_tensors_are_aligned_and_contiguous(name: str) -> None:
    tensor = arena().tensors[name]
    assert tensor.data_ptr() % ALIGNMENT == 0, f"{name} starts at {tensor.data_ptr():#x}"
    assert tensor.is_contiguous(), f"{name} must be contiguous"


@pytest.mark.parametrize("guard", [256, 1024])
@pytest.mark.parametrize("name", ["x", "y", "z"])
def test_every_byte_of_both_bands_is_guarded(name: str, guard: int) -> None:
    room = arena(guard)
    storage, start = bytes_around(room.tensors[name])
    end = start + room.tensors[name].nbytes
    for place, side in [(start - 1 - i, "below") for i in range(guard)] + [(end + i, "above") for i in range(guard)]:
        storage[place] ^= 1
        damage = room.damage()
        distance = start - place if side == "below" else place - end
        assert damage is not None, f"a flipped bit {distance} bytes {side} {name} went unnoticed"
        assert f"{side} tensor {name}" in damage, damage
        assert f"the nearest {counted(distance, 'byte')} " in damage, damage
        storage[place] ^= 1
    assert room.damage() is None, "all is as it was"


def test_a_band_is_not_one_byte_repeated() -> None:
    """Bytes of one part of a band, copied over another part, must show."""
    room = arena()
    storage, start = bytes_around(room.tensors["y"])
    storage[start - 64 : start] = storage[start - 128 : start - 64].clone()
    assert "64 of 256 guard bytes below tensor y" in (room.damage() or ""), room.damage()


def test_writing_outputs_is_no_damage() -> None:
    room = arena()
    room.tensors["y"].fill_(1.0)
    room.tensors["z"].fill_(2.0)
    assert room.damage() is None, "outputs are there to be written"


@pytest.mark.parametrize("row", [0, 700, 2999])
def test_a_changed_input_is_named(row: int) -> None:
    room = arena()
    room.tensors["x"][row, 1] = -1.0
    damage = room.damage()
    first = row * 6 // SEAL_BYTES * SEAL_BYTES
    assert damage is not None, "a changed input went unnoticed"
    assert f"input x was changed between its bytes {first} and" in damage, damage
    assert f"from coordinate {coordinate(first // 2, (3000, 3))} on" in damage, damage


def test_a_signed_zero_is_a_change_too() -> None:
    room = arena()
    assert room.tensors["x"][0, 0] == 0.0, "the example needs a zero"
    room.tensors["x"][0, 0] = -0.0
    assert "input x was changed" in (room.damage() or ""), "inputs are compared by bits, not by value"


def test_several_damages_are_all_told() -> None:
    room = arena()
    room.tensors["x"][0, 0] = 9.0
    storage, start = bytes_around(room.tensors["z"])
    storage[start + 12] ^= 0xFF
    damage = room.damage() or ""
    assert "input x" in damage, damage
    assert "above tensor z" in damage, damage
    assert "0 bytes past its end at byte 12" in damage, damage


def test_what_was_wrong_when_it_was_taken_is_told_and_nothing_that_comes_later() -> None:
    room = arena()
    x, outside = room.tensors["x"], {name: bytes_around(room.tensors[name]) for name in ("x", "z")}
    x[0, 0] = 9.0
    for storage, start in outside.values():
        storage[start - 1] ^= 0xFF
    room.tensors["y"].fill_(1.0)
    damage = room.damage()
    room.taken()
    assert room.damage() == damage, "a look at what was taken differs from one at the block"
    assert damage is not None, "nothing is said of a changed input and two bands"
    assert all(word in damage for word in ("input x", "below tensor x", "below tensor z")), damage
    x.fill_(-1.0)
    for storage, _ in outside.values():
        storage.zero_()
    assert room.damage() == damage, "a late write reached what is judged"
    assert torch.equal(room.tensors["y"], torch.ones(SHAPE, dtype=torch.bfloat16)), "and what was written"
    assert room.unwritten() == {"y": 0, "z": 3}, "what nobody has written is still told"


@pytest.mark.parametrize("dtype", OUTPUTS, ids=str)
def test_outputs_are_poisoned(dtype: torch.dtype) -> None:
    room = Arena.of_layouts({"y": Layout(SHAPE, dtype, "output")}, {})
    y = room.tensors["y"]
    assert bool(is_poison(y).all()), f"{dtype} must hold poison before the first write"
    if dtype.is_floating_point:
        assert bool(torch.isnan(y.float()).all()), f"the poison of {dtype} must be NaN"
    assert room.unwritten() == {"y": 105}
    y.view(torch.uint8).flatten()[: 2 * dtype.itemsize] = 0
    assert room.unwritten() == {"y": 103}, "two elements were written"
    room.poison()
    assert room.unwritten() == {"y": 105}, "poison() prepares the outputs for a further run"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_a_computed_nan_is_not_poison(dtype: torch.dtype) -> None:
    y = torch.full(SHAPE, float("nan"), dtype=dtype)
    assert not is_poison(y).any(), "a kernel that computes NaN has written its output"


def test_poisoning_leaves_inputs_alone() -> None:
    room = arena()
    before = room.tensors["x"].clone()
    room.poison()
    assert torch.equal(room.tensors["x"], before), "inputs are not outputs"
    assert room.damage() is None


def test_inputs_are_copied_and_their_hash_tells_them_apart() -> None:
    spec = load_specs()["fmha"]
    case = spec.case(hd=64, t=3, s_k=5)
    inputs = reference("fmha").make_inputs(case)
    first, second = Arena(spec, case, inputs), Arena(spec, case, inputs)
    assert first.input_sha256 == second.input_sha256, "the same inputs have the same hash"
    assert set(first.tensors) == {"q", "k", "v", "o", "lse"}, "the arena has the tensors of the case"
    first.tensors["q"].zero_()
    assert torch.equal(second.tensors["q"], inputs["q"]), "two arenas share no memory, nor do they with their inputs"
    inputs["q"][0, 0, 0, 0] += 1
    changed = Arena(spec, case, inputs).input_sha256
    assert changed["q"] != second.input_sha256["q"], "another input has another hash"
    assert changed["k"] == second.input_sha256["k"], "k is as it was"


def test_digests_of_large_tensors_tell_them_apart_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """These digests use integer arithmetic on the tensor's device: bits, positions and whole blocks count."""
    monkeypatch.setattr("megamoe.judge.arena.HASHED", SEAL_BYTES)
    body = torch.arange(5 * SEAL_BYTES + 100).to(torch.uint8)
    body[SEAL_BYTES : 2 * SEAL_BYTES] = 7
    changed = {"nothing": body.clone()}
    for at in (0, SEAL_BYTES - 1, 3 * SEAL_BYTES, len(body) - 1):
        changed[f"a bit of byte {at}"] = body.clone()
        changed[f"a bit of byte {at}"][at] ^= 1
    changed["two blocks, exchanged"] = body[torch.arange(len(body)).view(-1)].clone()
    changed["two blocks, exchanged"][: 2 * SEAL_BYTES] = body[: 2 * SEAL_BYTES].roll(SEAL_BYTES)
    changed["two words, exchanged"] = body.clone()
    changed["two words, exchanged"][:16] = body[:16].roll(8)
    sealed = seal(body)
    for what, other in changed.items():
        same = what == "nothing"
        assert (seal(other).sha256() == sealed.sha256()) == same, f"{what} was changed"
        assert (sealed.broken(other) == []) == same, f"{what} was changed"
    assert sealed.broken(changed[f"a bit of byte {3 * SEAL_BYTES}"]) == [3], "it tells which block"


def test_only_large_tensors_of_a_device_are_at_home_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megamoe.judge.arena.ON_DEVICE", 4096)
    small, large = ({"x": Layout((size,), torch.uint8, "input")} for size in (1024, 8192))
    found = {(device, name): home_of(one, device) for device in ("cpu", "cuda") for name, one in
             (("small", small), ("large", large))}  # fmt: skip
    assert found.pop(("cuda", "large")) == "cuda", "its draws and references take minutes on a CPU"
    assert set(found.values()) == {"cpu"}, f"{found}: the verdict on a small case is the CPU's"


def test_a_case_without_lse_has_no_memory_for_it() -> None:
    spec = load_specs()["fmha"]
    case = spec.case(hd=64, t=3, s_k=5, lse=False)
    assert "lse" not in Arena(spec, case, reference("fmha").make_inputs(case)).tensors


@pytest.mark.parametrize(
    ("inputs", "guard", "sentence"),
    [
        ({}, 256, r"inputs \[\] were given; the case has \['x'\]"),
        ({"x": torch.zeros(2, 2), "w": torch.zeros(1)}, 256, r"inputs \['w', 'x'\] were given"),
        ({"x": torch.zeros(2, 3)}, 256, r"input x is torch.float32 of shape \(2, 3\).*shape \(2, 2\)"),
        ({"x": torch.zeros(2, 2).half()}, 256, r"input x is torch.float16"),
        ({"x": torch.zeros(2, 2)}, 0, "guard band of 0 bytes"),
        ({"x": torch.zeros(2, 2)}, 300, "guard band of 300 bytes"),
    ],
)
def test_wrong_inputs_are_refused_in_words(inputs: dict[str, torch.Tensor], guard: int, sentence: str) -> None:
    layouts = {"x": Layout((2, 2), torch.float32, "input")}
    with pytest.raises(ValueError, match=sentence):
        Arena.of_layouts(layouts, inputs, guard=guard)


def test_scaled_inputs_all_differ_from_what_they_were_and_come_back_bit_by_bit() -> None:
    spec = load_specs()["nvfp4_moe"]
    case = spec.parse_case("nvfp4_moe:hidden=128,intermediate=128,num_experts=2,tokens=3,topk=2")
    inputs = reference("nvfp4_moe").make_inputs(case)
    held = Arena(spec, case, inputs)
    with held.scaled_inputs(5):
        ratios = {name: held.tensors[name] / given for name, given in inputs.items() if given.is_floating_point()}
        first = {name: tensor.clone() for name, tensor in held.tensors.items()}
        for name in inputs.keys() - ratios.keys():
            assert torch.equal(held.tensors[name], inputs[name]), f"{name} holds codes or numbers of experts"
    # The steps between factors are much larger than the rounding of an fp32 product.
    factors = {name: {round(one, 4) for one in ratio.flatten().tolist()} for name, ratio in ratios.items()}
    assert all(len(found) == 1 and max(found) < 1 for found in factors.values()), f"{factors}: one factor a tensor"
    assert len(set.union(*factors.values())) == len(factors), "no two have the same, or one may undo the other"
    assert held.damage() is None, "the inputs are as they were"
    with held.scaled_inputs(5):
        assert all(torch.equal(first[name], held.tensors[name]) for name in inputs), "one seed, the same inputs"
    with held.scaled_inputs(6):
        assert not all(torch.equal(first[name], held.tensors[name]) for name in inputs), "another seed, other inputs"


def copied(bytes_: torch.Tensor) -> SealedCopy:
    return SealedCopy(bytes_.clone())


SEALS: tuple[Callable[[torch.Tensor], Seal], ...] = (Digests, copied)
SIZES = (0, 1, 7, 8, SEAL_BYTES, 3 * SEAL_BYTES + 5)


def body(size: int) -> torch.Tensor:
    return torch.randint(256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))


@pytest.mark.parametrize("kind", SEALS)
@pytest.mark.parametrize("size", SIZES)
def test_what_is_whole_is_whole(kind: Callable[[torch.Tensor], Seal], size: int) -> None:
    bytes_ = body(size)
    sealed = kind(bytes_)
    assert bool(sealed.whole(bytes_)), f"{size} bytes"
    assert sealed.broken(bytes_) == []


@pytest.mark.parametrize("kind", SEALS)
@pytest.mark.parametrize("size", [size for size in SIZES if size])
def test_one_flipped_bit_breaks_its_block_alone(kind: Callable[[torch.Tensor], Seal], size: int) -> None:
    bytes_ = body(size)
    sealed = kind(bytes_)
    for place in {0, size // 2, size - 1}:
        bytes_[place] ^= 0x80
        assert not bool(sealed.whole(bytes_)), f"bit flipped in byte {place} of {size}"
        assert sealed.broken(bytes_) == [place // SEAL_BYTES]
        bytes_[place] ^= 0x80
    assert bool(sealed.whole(bytes_))


@pytest.mark.parametrize("kind", SEALS)
def test_the_digest_is_that_of_what_was_sealed(kind: Callable[[torch.Tensor], Seal]) -> None:
    bytes_ = body(3 * SEAL_BYTES)
    before = Digests(bytes_).sha256()
    sealed = kind(bytes_)
    bytes_.zero_()
    assert sealed.sha256() == before, "whatever happens to the memory later"


def test_host_memory_is_sealed_by_digests() -> None:
    assert isinstance(seal(body(8)), Digests)
    given = body(8)
    assert isinstance(seal(body(8), given), Digests), "whatever else has these bytes"


def test_memory_of_a_device_is_sealed_by_what_was_copied_there() -> None:
    """A second copy of the weights of 384 experts would take 14 GB."""
    given, there = torch.empty(2, 3, device="meta"), torch.empty(24, dtype=torch.uint8, device="meta")

    def own(sealed: Seal) -> bool:
        assert isinstance(sealed, SealedCopy), f"{type(sealed).__name__} brings what it seals to the host"
        return sealed._bytes.untyped_storage()._cdata != given.untyped_storage()._cdata  # pyright: ignore

    assert not own(seal(there, given)), "the copy was copied"
    assert own(seal(there)), "nothing else has these bytes"
    assert own(seal(there, torch.empty(2, 3))), "a tensor of the host cannot be compared there"
    assert own(seal(there, given.mT)), "bytes of another order"

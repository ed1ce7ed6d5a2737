"""Memory for a kernel under test: guard bands around every tensor, poisoned outputs, sealed inputs.

Each tensor lies between two bands of a position-dependent pattern. It starts at a multiple of 256 bytes: enough for
tensor maps and the widest accesses, and the alignment of a fresh device allocation. The upper band follows without a
gap, so a store one byte past a ragged end is detected.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import mmap
import os
import random
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal, Protocol

import torch

from megamoe.contract.counted import counted
from megamoe.spec.draws import scrambled

if TYPE_CHECKING:
    from megamoe.contract import Case
    from megamoe.spec.spec import Spec


SEAL_BYTES: Final = 4096
# Bytes compared at once on a device. The result of a comparison needs as much memory again.
_CHUNK: Final = 1 << 30


class Seal(Protocol):
    """A seal on a tensor's memory (a vector of uint8), made after the memory was filled."""

    def whole(self, body: torch.Tensor) -> torch.Tensor:
        """Returns a bool scalar on the device of `body`: True if nothing has changed."""
        ...

    def broken(self, body: torch.Tensor) -> list[int]:
        """Indices of the changed blocks of SEAL_BYTES bytes of `body`, ascending."""
        ...

    def sha256(self) -> str:
        """Hexadecimal SHA-256 over the digests of the sealed blocks. Depends on the bytes alone."""
        ...


def seal(body: torch.Tensor, given: torch.Tensor | None = None) -> Seal:
    """Seals `body`: with digests in host memory, or with a copy on its device, so that checking needs no transfer.

    `given`: a tensor with the same bytes that nobody changes. It serves as the copy if it is on the device of `body`,
    contiguous and 8-byte aligned.
    """
    if body.device.type == "cpu":
        return Digests(body)
    if given is not None and given.device == body.device and given.is_contiguous() and _lies_in_words(given):
        return SealedCopy(given.view(-1).view(torch.uint8))
    return SealedCopy(body.clone())


def _lies_in_words(tensor: torch.Tensor) -> bool:
    return tensor.data_ptr() % 8 == 0 and tensor.storage_offset() * tensor.element_size() % 8 == 0


class Digests:
    """Seals with the SHA-256 of every block; a kernel could preserve plain sums while it changes bytes."""

    def __init__(self, body: torch.Tensor) -> None:
        self._hashes = _hashes(body)
        self._digests = _digests(body) if body.numel() > HASHED else self._hashes

    def whole(self, body: torch.Tensor) -> torch.Tensor:
        """See Seal."""
        return torch.tensor(_hashes(body) == self._hashes)

    def broken(self, body: torch.Tensor) -> list[int]:
        """See Seal."""
        return [i for i, (now, then) in enumerate(zip(_hashes(body), self._hashes, strict=True)) if now != then]

    def sha256(self) -> str:
        """See Seal."""
        return hashlib.sha256(b"".join(self._digests)).hexdigest()


class SealedCopy:
    """Seals with a copy of the bytes on the same device. Nobody changes the copy."""

    def __init__(self, copy: torch.Tensor) -> None:
        self._bytes = copy

    def whole(self, body: torch.Tensor) -> torch.Tensor:
        """See Seal."""
        words = body.numel() // 8 * 8
        parts = zip(
            (*body[:words].view(torch.int64).split(_CHUNK // 8), body[words:]),
            (*self._bytes[:words].view(torch.int64).split(_CHUNK // 8), self._bytes[words:]),
            strict=True,
        )
        return torch.stack([(now == then).all() for now, then in parts]).all()

    def broken(self, body: torch.Tensor) -> list[int]:
        """See Seal."""
        blocks = range(0, body.numel(), _CHUNK)
        found = [(body[i : i + _CHUNK] != self._bytes[i : i + _CHUNK]).nonzero().flatten() + i for i in blocks]
        return torch.cat(found).div(SEAL_BYTES, rounding_mode="floor").unique().tolist() if found else []

    def sha256(self) -> str:
        """See Seal."""
        return hashlib.sha256(b"".join(_digests(self._bytes))).hexdigest()


HASHED: Final = 1 << 29
"""Tensors of up to this many bytes are digested by SHA-256 on the host."""


def _digests(body: torch.Tensor) -> list[bytes]:
    """One digest per block: SHA-256, or 128 bits of integer arithmetic on the device for more than HASHED bytes."""
    if body.numel() > HASHED:
        mixed = _mixed(body).cpu().numpy()
        return [one.tobytes() for one in mixed]
    return _hashes(body)


def _hashes(body: torch.Tensor) -> list[bytes]:
    stored = body.cpu().numpy().data
    return [hashlib.sha256(stored[i : i + SEAL_BYTES]).digest() for i in range(0, len(stored), SEAL_BYTES)]


def _mixed(body: torch.Tensor) -> torch.Tensor:
    """int64 [blocks, 2]: two position-dependent sums over scrambled words. The last block is padded with 0."""
    words = SEAL_BYTES // 8
    places = scrambled(torch.arange(2 * words, device=body.device)).view(2, words)
    found: list[torch.Tensor] = []
    for part in body.split(_CHUNK // 8):
        filled = torch.nn.functional.pad(part, (0, -part.numel() % SEAL_BYTES))
        mixed = scrambled(filled.view(torch.int64).view(-1, words) + places[0])
        found.append(torch.stack((mixed.sum(dim=1), (mixed * places[1]).sum(dim=1)), dim=1))
    return torch.cat(found)


ALIGNMENT: Final = 256
POISON_RUN: Final = 16

# Quiet NaNs with a payload that no conversion or arithmetic produces (those give 0x7FFF, facts.md 7.3). A format
# without NaN payloads gets its only NaN, an integer a pattern that is neither zero nor all ones.
POISON: Final[Mapping[torch.dtype, bytes]] = {
    torch.bfloat16: b"\xd5\x7f",
    torch.float16: b"\x55\x7f",
    torch.float32: b"\xd5\xa5\xd5\x7f",
    torch.float64: b"\xd5\xa5\xd5\xa5\xd5\xa5\xfd\x7f",
    torch.float8_e4m3fn: b"\x7f",
    torch.float8_e5m2: b"\x7d",
    torch.uint8: b"\xa5",
    torch.int32: b"\xa5\xa5\xa5\xa5",
    torch.int64: b"\xa5\xa5\xa5\xa5\xa5\xa5\xa5\xa5",
}

# Far enough from 1 to change every output, near enough to 1 that no narrow format loses the values.
_SCALES: Final = tuple(step / 128 for step in range(64, 105))

# Size in bytes -> the integers of that size.
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

DTYPES: Final[Mapping[str, torch.dtype]] = {
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f32": torch.float32,
    "f64": torch.float64,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "u8": torch.uint8,
    "s32": torch.int32,
    "s64": torch.int64,
}


@dataclass(frozen=True, slots=True)
class Layout:
    """Shape (contiguous, last dimension fastest), dtype and role of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    role: Literal["input", "output"]

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Plot:
    """One tensor between its bands. `memory` (uint8): lower band, tensor, upper band. `offset`: of the tensor in the
    block."""

    layout: Layout
    memory: torch.Tensor
    guard: int
    offset: int

    @property
    def body(self) -> torch.Tensor:
        return self.memory[self.guard : self.memory.numel() - self.guard]

    @property
    def tensor(self) -> torch.Tensor:
        return self.body.view(self.layout.dtype).view(self.layout.shape)


class Arena:
    """The tensors of one case, by name, in `tensors`. Inputs are copied in; outputs hold POISON until written.

    All tensors lie in one block of memory. `guard`: bytes of each band, a positive multiple of 256. `shared`: a block
    of `block_bytes` bytes (uint8, aligned) that another process maps too. Inputs that already lie on a non-host
    `device` must not change: they seal their copies. Raises ValueError if an input is missing, superfluous, or has the
    wrong shape or dtype.
    """

    def __init__(
        self,
        spec: Spec,
        case: Case,
        inputs: Mapping[str, torch.Tensor],
        device: str | torch.device = "cpu",
        guard: int = ALIGNMENT,
        shared: torch.Tensor | None = None,
    ) -> None:
        self._lay_out(layouts_of(spec, case), inputs, device, guard, case.id, shared)

    @classmethod
    def of_layouts(
        cls,
        layouts: Mapping[str, Layout],
        inputs: Mapping[str, torch.Tensor],
        device: str | torch.device = "cpu",
        guard: int = ALIGNMENT,
    ) -> Arena:
        """An arena for tensors without a spec."""
        arena = cls.__new__(cls)
        arena._lay_out(layouts, inputs, device, guard, "arena", None)
        return arena

    def _lay_out(
        self,
        layouts: Mapping[str, Layout],
        inputs: Mapping[str, torch.Tensor],
        device: str | torch.device,
        guard: int,
        owner: str,
        shared: torch.Tensor | None,
    ) -> None:
        _check(layouts, inputs, guard, owner)
        self._pattern = _pattern(guard, device)
        self._place(layouts, _block(block_bytes(layouts, guard), device) if shared is None else shared)
        for plot in self._plots.values():
            plot.memory[:guard] = self._pattern
            plot.memory[plot.memory.numel() - guard :] = self._pattern
        for name, tensor in inputs.items():
            self.tensors[name].copy_(tensor)
        self._seals = {name: seal(self._plots[name].body, tensor) for name, tensor in inputs.items()}
        self._found = dict[str, list[str]]()
        self.poison()

    def _place(self, layouts: Mapping[str, Layout], block: torch.Tensor) -> None:
        guard, start = self._pattern.numel(), 0
        self._block, self._plots = block, dict[str, _Plot]()
        for name, layout in layouts.items():
            size = layout.nbytes + 2 * guard
            self._plots[name] = _Plot(layout, block[start : start + size], guard, start + guard)
            start += _aligned(size)
        self.tensors: dict[str, torch.Tensor] = {name: plot.tensor for name, plot in self._plots.items()}

    def taken(self) -> None:
        """Moves the outputs to a private copy that no other process can change, and releases the block.

        Inputs are checked here for the last time. Afterwards they are no longer tensors of the arena.
        """
        # Outputs first: checking large inputs takes long enough for a late writer to change them.
        private = {name: plot.memory.clone() for name, plot in self._plots.items() if name not in self._seals}
        self._found = {name: self._damage_to(name) for name in self._seals}
        self._block = self._block.new_empty(0)
        for name, plot in self._plots.items():
            self._plots[name] = replace(plot, memory=private.get(name, self._block))
        self.tensors = {name: self._plots[name].tensor for name in self.outputs}

    @property
    def told(self) -> list[dict[str, object]]:
        """Where each tensor lies in the block: name, offset in bytes, shape, and torch's dtype name."""
        return [
            {
                "name": name,
                "offset": plot.offset,
                "shape": list(plot.layout.shape),
                "dtype": str(plot.layout.dtype).removeprefix("torch."),
            }
            for name, plot in self._plots.items()
        ]

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the outputs, in the order of the spec."""
        return tuple(name for name, plot in self._plots.items() if plot.layout.role == "output")

    @property
    def input_sha256(self) -> dict[str, str]:
        """Hexadecimal SHA-256 of every input as given, over the digests of its blocks (Seal.sha256)."""
        return {name: sealed.sha256() for name, sealed in self._seals.items()}

    def poison(self) -> None:
        """Fills every output with POISON again, for another run on the same memory."""
        for name in self.outputs:
            _fill(self._plots[name].body, self._plots[name].layout.dtype)

    def scalable(self, without: Collection[str] = ()) -> list[str]:
        """The inputs that scaled_inputs changes."""
        return [name for name in self._seals if name not in without and self.tensors[name].dtype.is_floating_point]

    @contextmanager
    def scaled_inputs(self, seed: int, without: Collection[str] = ()) -> Iterator[None]:
        """Within the context, multiplies every floating-point input by its own number from _SCALES.

        `seed` draws the numbers: the same seed gives the same inputs, bit for bit. `without`: inputs to leave
        unchanged.
        """
        floats = self.scalable(without)
        given = {name: self.tensors[name].clone() for name in floats}
        for name, scale in zip(floats, random.Random(seed).sample(_SCALES, len(floats)), strict=True):
            self.tensors[name].mul_(scale)
        try:
            yield
        finally:
            for name, tensor in given.items():
                self.tensors[name].copy_(tensor)

    def unwritten(self, free: Mapping[str, torch.Tensor] | None = None) -> dict[str, int]:
        """Number of elements of each output that still hold POISON bit for bit. Elements marked in `free` do not count.

        The poison of an integer is also a legal value, so integers count only in runs of at least POISON_RUN bytes.
        """
        return {name: self._unwritten(name, (free or {}).get(name)) for name in self.outputs}

    def _unwritten(self, name: str, free: torch.Tensor | None) -> int:
        tensor = self.tensors[name]
        left = is_poison(tensor)
        if free is not None:
            left &= ~free.to(left.device)
        if not tensor.dtype.is_floating_point:
            left = _in_runs(left.flatten(), POISON_RUN // tensor.dtype.itemsize)
        return int(left.sum())

    def intact(self) -> bool:
        """Whether all guard bands and inputs are unchanged. Faster than `damage`, which describes the changes."""
        guard = self._pattern.numel()
        bands = [band for plot in self._plots.values() for band in (plot.memory[:guard], plot.memory[-guard:])]
        seals = [sealed.whole(self._plots[name].body) for name, sealed in self._seals.items()]
        return bool(torch.stack([*((band == self._pattern).all() for band in bands), *seals]).all())

    def damage(self) -> str | None:
        """Describes every changed guard band and input. None if there is no damage."""
        found = [sentence for name in self._plots for sentence in self._damage_to(name)]
        return "; ".join(found) or None

    def _damage_to(self, name: str) -> list[str]:
        if name in self._found:
            return self._found[name]
        plot, guard = self._plots[name], self._pattern.numel()
        size = plot.body.numel()
        lower = (plot.memory[:guard] != self._pattern).nonzero().flatten()
        upper = (plot.memory[guard + size :] != self._pattern).nonzero().flatten()
        found: list[str] = []
        if lower.numel():
            distance, value = guard - int(lower[-1]), int(plot.memory[lower[-1]])
            found.append(
                f"{lower.numel()} of {guard} guard bytes below tensor {name} were overwritten, the nearest "
                f"{counted(distance, 'byte')} before its first byte (now {value:#04x})"
            )
        if upper.numel():
            value = int(plot.memory[guard + size + int(upper[0])])
            found.append(
                f"{upper.numel()} of {guard} guard bytes above tensor {name} were overwritten, the nearest "
                f"{counted(int(upper[0]), 'byte')} past its end at byte {size} (now {value:#04x})"
            )
        return found + self._broken_seal(name)

    def _broken_seal(self, name: str) -> list[str]:
        if name not in self._seals:
            return []
        broken = self._seals[name].broken(self._plots[name].body)
        if not broken:
            return []
        layout = self._plots[name].layout
        first, last = broken[0] * SEAL_BYTES, min((broken[-1] + 1) * SEAL_BYTES, self._plots[name].body.numel())
        at = coordinate(first // layout.dtype.itemsize, layout.shape)
        return [f"input {name} was changed between its bytes {first} and {last - 1}, from coordinate {at} on"]


def layouts_of(spec: Spec, case: Case) -> dict[str, Layout]:
    """Layouts of the tensors of `case`, in the order of the spec. ValueError for a dtype not in DTYPES."""
    layouts: dict[str, Layout] = {}
    for name, tensor in spec.tensors_of(case).items():
        if tensor.dtype not in DTYPES:
            known = ", ".join(DTYPES)
            raise ValueError(f"{case.id}: tensor {name} has dtype {tensor.dtype!r}; memory can be had for {known}")
        layouts[name] = Layout(spec.shape(name, case), DTYPES[tensor.dtype], tensor.role)
    return layouts


def is_poison(tensor: torch.Tensor) -> torch.Tensor:
    """bool, of the tensor's shape: elements that hold POISON bit for bit. All False for a dtype without poison."""
    if tensor.dtype not in POISON:
        return torch.zeros(tensor.shape, dtype=torch.bool, device=tensor.device)
    bits = _BITS[tensor.dtype.itemsize]
    poison = torch.frombuffer(bytearray(POISON[tensor.dtype]), dtype=bits).item()
    return (tensor.detach().contiguous().reshape(-1).view(bits) == poison).view(tensor.shape)


def coordinate(element: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Index of an element of a contiguous tensor from its linear position."""
    index: list[int] = []
    for size in reversed(shape):
        element, remainder = divmod(element, size)
        index.append(remainder)
    return tuple(reversed(index))


def _in_runs(hit: torch.Tensor, length: int) -> torch.Tensor:
    """bool [n]: elements of `hit` (bool [n]) that are in a run of at least `length` hits."""
    _, counts = torch.unique_consecutive(hit, return_counts=True)
    return hit & (counts >= length).repeat_interleave(counts)


def _check(layouts: Mapping[str, Layout], inputs: Mapping[str, torch.Tensor], guard: int, owner: str) -> None:
    if guard < ALIGNMENT or guard % ALIGNMENT:
        raise ValueError(f"{owner}: a guard band of {guard} bytes; it must be a positive multiple of {ALIGNMENT}")
    wanted = {name for name, layout in layouts.items() if layout.role == "input"}
    if wanted != set(inputs):
        raise ValueError(f"{owner}: inputs {sorted(inputs)} were given; the case has {sorted(wanted)}")
    for name, layout in layouts.items():
        if layout.dtype not in POISON:
            raise ValueError(f"{owner}: tensor {name} has dtype {layout.dtype}, for which there is no poison")
        given = inputs.get(name)
        if given is not None and (tuple(given.shape) != layout.shape or given.dtype != layout.dtype):
            raise ValueError(
                f"{owner}: input {name} is {given.dtype} of shape {tuple(given.shape)}; "
                f"the case has {layout.dtype} of shape {layout.shape}"
            )


def _pattern(guard: int, device: str | torch.device) -> torch.Tensor:
    # 167 is odd, so all 256 byte values occur and a shifted copy of the band differs everywhere.
    return ((torch.arange(guard) * 167 + 89) % 256).to(torch.uint8).to(device)


def block_bytes(layouts: Mapping[str, Layout], guard: int = ALIGNMENT) -> int:
    """Bytes of the block for an arena of these tensors."""
    return sum(_aligned(layout.nbytes + 2 * guard) for layout in layouts.values())


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _block(size: int, device: str | torch.device) -> torch.Tensor:
    raw = torch.empty(size + ALIGNMENT, dtype=torch.uint8, device=device)
    start = -raw.data_ptr() % ALIGNMENT
    return raw[start : start + size]


@contextmanager
def shared_block(size: int) -> Iterator[tuple[int, torch.Tensor]]:
    """A zeroed block of `size` bytes, and the descriptor that another process maps it by. Its size is fixed."""
    descriptor = os.memfd_create("megamoe-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, max(size, 1))
        # A process that could shrink it could crash its readers.
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        yield descriptor, torch.frombuffer(mmap.mmap(descriptor, max(size, 1)), dtype=torch.uint8)
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class Lent:
    """A block of memory that another process maps: host memory by a descriptor, device memory by a handle."""

    block: torch.Tensor
    descriptor: int | None = None
    handle: Mapping[str, object] | None = None

    def give_up(self) -> None:
        """Releases the block on behalf of a process that has ended. Call it while the block still exists.

        Otherwise torch keeps the block for that process as long as this one lives.
        """
        if self.handle is not None:
            torch.UntypedStorage._release_ipc_counter_cuda(  # pyright: ignore[reportPrivateUsage]
                bytes.fromhex(str(self.handle["counter"])), self.handle["counter_offset"]
            )


@contextmanager
def lent_block(size: int, device: str) -> Iterator[Lent]:
    """A block of `size` bytes on `device` that another process can map."""
    if is_cuda(device):
        handle, block = device_block(size, device)
        yield Lent(block, handle=handle)
    else:
        with shared_block(size) as (descriptor, block):
            yield Lent(block, descriptor)


def is_cuda(device: str) -> bool:
    """Whether a torch device is a CUDA device."""
    return torch.device(device).type == "cuda"


ON_DEVICE: Final = 1 << 28
"""A case with at least this many bytes of tensors is drawn, judged and kept on the device that runs it."""


def home_of(layouts: Mapping[str, Layout], device: str) -> str:
    """Where the judge keeps the tensors and references of a case that runs on `device`: there if they are large, else
    on the CPU."""
    return device if is_cuda(device) and block_bytes(layouts) >= ON_DEVICE else "cpu"


def give_device_memory_back() -> None:
    """Returns this process's unused device memory, so that other processes can allocate it."""
    if torch.cuda.is_initialized():
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()


MIN_SEGMENT: Final = 32 << 20


def device_block(size: int, device: str) -> tuple[Mapping[str, object], torch.Tensor]:
    """A block of `size` bytes on a CUDA device, and the handle (as data) that another process maps it by.

    The block has a segment of its own, because the other process maps the whole segment.
    """
    with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
        raw = torch.empty(max(size, MIN_SEGMENT), dtype=torch.uint8, device=device)
    names = ("device", "memory", "size", "offset", "counter", "counter_offset", "event", "wait")
    parts = raw.untyped_storage()._share_cuda_()
    told = {name: part.hex() if isinstance(part, bytes) else part for name, part in zip(names, parts, strict=True)}
    return told, raw[:size]


def _fill(body: torch.Tensor, dtype: torch.dtype) -> None:
    poison = torch.tensor(list(POISON[dtype]), dtype=torch.uint8, device=body.device)
    body.view(-1, dtype.itemsize).copy_(poison.expand(body.numel() // dtype.itemsize, -1))

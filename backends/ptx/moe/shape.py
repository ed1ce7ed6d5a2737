"""The axes of a case, and the cases that the kernels refuse."""

from __future__ import annotations

from dataclasses import dataclass

from backends.ptx.moe.layout import SF_VEC_SIZE, TILE_M, max_row_tiles
from megamoe.codec.routing import expected_routes
from megamoe.contract import Case, Target, UnsupportedError

INTERLEAVES = (8, 16, 32, 64)
"""With these, a gate and its up are both in the half of a tile that a thread holds at a time."""
EXTENT_MULTIPLE = 128
"""hidden and intermediate are multiples of it, so that a tile of W1 is whole and no scale factor atom is shared."""


@dataclass(frozen=True, slots=True)
class SwigluVariant:
    """Compiled into the kernel. `interleave`: granularity of gate and up rows. `clamped`: gates are limited from above,
    ups from both sides. `weighted`: the top-k weight is applied before the requantisation."""

    interleave: int
    clamped: bool
    weighted: bool

    def gate_column(self, element: int) -> int:
        """The accumulator column of the gate of activation `element`; its up is `interleave` columns further."""
        group, inside = divmod(element, self.interleave)
        return 2 * self.interleave * group + inside


@dataclass(frozen=True, slots=True)
class MoeShape:
    """The axes of one case. `clamp` is 0 if the case has none. `bf16`: activations are bf16, else NVFP4. `sms`: the SMs
    to launch persistent CTAs for; None: the target's SM_COUNT. `expected_routes`: see megamoe.codec.routing."""

    hidden: int
    intermediate: int
    num_experts: int
    tokens: int
    topk: int
    variant: SwigluVariant
    clamp: float
    stage: str
    bf16: bool
    sms: int | None
    expected_routes: int

    @classmethod
    def of(cls, case: Case, target: Target) -> MoeShape:
        """Reads the case. Raises UnsupportedError for a case that the kernels do not support."""
        hidden, intermediate = case.int("hidden"), case.int("intermediate")
        for name, extent in (("hidden", hidden), ("intermediate", intermediate)):
            if extent % EXTENT_MULTIPLE:
                raise UnsupportedError(
                    f"{case.id}: {name} is {extent}; the {target} kernels need a multiple of {EXTENT_MULTIPLE}"
                )
        if case.int("interleave") not in INTERLEAVES:
            known = ", ".join(map(str, INTERLEAVES))
            raise UnsupportedError(f"{case.id}: interleave is {case['interleave']}; the {target} kernels have {known}")
        if case["activations"] == "bf16" and target != "sm_90a":
            raise UnsupportedError(f"{case.id}: the {target} kernels of the ptx backend have no bf16 activations")
        if case.int("sf_vec_size") != SF_VEC_SIZE:
            raise UnsupportedError(f"{case.id}: sf_vec_size is {case['sf_vec_size']}; NVFP4 has {SF_VEC_SIZE}")
        clamp = case["clamp"]
        variant = SwigluVariant(case.int("interleave"), clamp is not None, case["weight"] == "before")
        return cls(
            hidden=hidden,
            intermediate=intermediate,
            num_experts=case.int("num_experts"),
            tokens=case.int("tokens"),
            topk=case.int("topk"),
            variant=variant,
            clamp=0.0 if clamp is None else float(clamp),
            stage=str(case["stage"]),
            bf16=case["activations"] == "bf16",
            sms=None if case["sms"] is None else case.int("sms"),
            expected_routes=expected_routes(case),
        )

    @property
    def routes(self) -> int:
        """(token, choice) pairs."""
        return self.tokens * self.topk

    @property
    def row_tiles(self) -> int:
        """The most tiles of expert rows that the routes can need."""
        return max_row_tiles(self.routes, self.num_experts)

    @property
    def held_rows(self) -> int:
        """Rows of a tensor of expert rows: for a single stage as the spec says, for a layer as its workspaces need."""
        whole = (self.routes + (TILE_M - 1) * self.num_experts) // TILE_M * TILE_M
        return self.row_tiles * TILE_M if self.stage == "layer" else whole

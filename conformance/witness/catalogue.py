"""All witnesses, in the order of the record: by package, then by target."""

from __future__ import annotations

from conformance.witness import flash_attention, quack_gemm, quack_softmax, split_attention

WITNESSES = tuple(
    sorted(
        (
            *flash_attention.WITNESSES,
            *split_attention.WITNESSES,
            *quack_gemm.WITNESSES,
            *quack_softmax.WITNESSES,
        ),
        key=lambda one: (one.package, one.target),
    )
)

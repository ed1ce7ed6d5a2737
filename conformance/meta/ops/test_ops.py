"""The room of ops: which modules are ops, whatever they are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from megamoe import ops
from megamoe.ops import reference, referenced_ops
from megamoe.spec.load import load_specs


def test_every_op_has_a_spec_and_a_reference() -> None:
    """A module of the room is an op; a module of an op's own folder is not."""
    assert referenced_ops() == tuple(sorted(load_specs()))


def test_an_op_may_be_named_after_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No name is read by its prefix: fmha_x and nvfp4_moe_inputs are ops of their own."""
    for name in ("fmha_x", "nvfp4_moe_inputs"):
        (tmp_path / f"{name}.py").write_text(f"ABSOLUTE_SCALE = {{'{name}': 1.0}}\n")
    before = referenced_ops()
    monkeypatch.setattr(ops, "__path__", [*ops.__path__, str(tmp_path)])
    referenced_ops.cache_clear()
    try:
        assert referenced_ops() == tuple(sorted((*before, "fmha_x", "nvfp4_moe_inputs")))
        assert reference("fmha_x").ABSOLUTE_SCALE == {"fmha_x": 1.0}
        assert reference("nvfp4_moe_inputs").ABSOLUTE_SCALE == {"nvfp4_moe_inputs": 1.0}
        assert reference("fmha").ABSOLUTE_SCALE == {"lse": 1.0}
    finally:
        referenced_ops.cache_clear()


@pytest.mark.parametrize("op", ["attention", "fmha_inputs", "stages"])
def test_an_unknown_op_is_refused_with_a_sentence(op: str) -> None:
    with pytest.raises(ValueError, match=rf"no reference for op '{op}'; references exist for: .*fmha"):
        reference(op)

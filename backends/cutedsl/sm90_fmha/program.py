"""Forward attention on sm_90a as a program of the harness: compiled once a plan, called with sizes."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

from backends.cutedsl.attention import PARAMETERS, attention_call, sizes_of
from backends.cutedsl.compile.artifact import Artifact
from backends.cutedsl.compile.artifact_cache import ArtifactKey, cached_artifact, default_folder, imported
from backends.cutedsl.compile.compile import compile_host_function, compiler_version
from backends.cutedsl.compile.parameters import fake_values
from backends.cutedsl.device import H200_SM_COUNT
from backends.cutedsl.sm90_fmha.plan import Sm90FmhaPlan, kernel_plan, split_count
from megamoe.contract import HostProgram

if TYPE_CHECKING:
    from megamoe.contract import Case


def fmha_program(
    case: Case, plan: Sm90FmhaPlan | None = None, splits: int | None = None, max_ctas: int = H200_SM_COUNT
) -> HostProgram:
    """The call that performs `case`. `plan` and `splits` replace the rules of plan.py.

    A CTA takes several work items in turn where there are more than `max_ctas` of them.
    """
    sizes = sizes_of(case)
    return attention_call(compiled(plan or kernel_plan(sizes)), case, splits or split_count(sizes), max_ctas)


@functools.cache
def compiled(plan: Sm90FmhaPlan) -> Artifact:
    """The compiled kernel of one plan, from the user's cache if it is there.

    UnsupportedError if CuTeDSL is not installed.
    """
    key = ArtifactKey(
        name="sm90_fmha",
        sources=imported("sm90_fmha"),
        options={"hd": plan.hd, "share": plan.share},
        target="sm_90a",
        compiler=compiler_version(),
    )
    return cached_artifact(key, lambda: _compile(plan), default_folder(Path.home()))


def _compile(plan: Sm90FmhaPlan) -> Artifact:
    from backends.cutedsl.sm90_fmha.kernel import Sm90Fmha

    return compile_host_function(Sm90Fmha(plan), target="sm_90a", **fake_values(PARAMETERS, {"hd": plan.hd}, {}))

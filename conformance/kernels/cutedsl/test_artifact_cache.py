"""Laws of the artifact cache: an entry is used exactly when it is whole and made from the same key."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backends.cutedsl.compile.artifact import Artifact, Resources
from backends.cutedsl.compile.artifact_cache import (
    SUFFIX,
    ArtifactKey,
    Source,
    cached_artifact,
    imported,
    sources_in,
    sources_of,
)
from conformance import ROOT
from megamoe.contract.cache import UserCache, user_cache

ARTIFACT = Artifact(
    target="sm_100a",
    ptx=".version 9.4 // ü\n",
    cubin=bytes(range(256)),
    host_object=b"\x7fELF\r\n\0" * 40,
    entry="f",
    packed_entry="g",
    parameters=("q", "stream"),
    compiler="a compiler 1.0",
    resources={"kernel": Resources(128, 16)},
)


KERNELS = sorted(file.parent.name for file in (ROOT / "backends" / "cutedsl").glob("*/program.py"))
"""Listed from the disk, because the imports themselves are under test."""


class Builder:
    """Counts its builds."""

    def __init__(self, artifact: Artifact = ARTIFACT) -> None:
        self.artifact, self.calls = artifact, 0

    def __call__(self) -> Artifact:
        self.calls += 1
        return self.artifact


def key_in(folder: Path) -> ArtifactKey:
    """A key of two source files in `folder`."""
    for name in ("kernel.py", "tiles.py"):
        (folder / name).write_text(f"# {name}")
    return ArtifactKey("fmha", sources_in(folder), {"hd": 128, "causal": False}, "sm_100a", "a compiler 1.0")


def cache_in(folder: Path) -> UserCache:
    """The cache of a user whose home is `folder`."""
    found = user_cache("cutedsl", folder)
    assert found is not None
    return found


def entries(cache: UserCache) -> list[Path]:
    """All files in the cache."""
    return sorted(cache.folder.iterdir())


def test_an_artifact_is_built_once_and_comes_back_whole(tmp_path: Path) -> None:
    key, build = key_in(tmp_path), Builder()
    first = cached_artifact(key, build, cache_in(tmp_path))
    second = cached_artifact(key, build, cache_in(tmp_path))
    assert build.calls == 1, "the second request must be served from disk"
    assert first == second == ARTIFACT, "what comes back must be what was built, byte for byte"


def edit_source(key: ArtifactKey) -> ArtifactKey:
    """Returns the same key after an edit of one kernel file."""
    source = key.sources[0]
    (source.root / source.place).write_text("# another kernel")
    return replace(key, sources=sources_in(source.root))


@pytest.mark.parametrize(
    "change",
    [
        edit_source,
        lambda key: replace(key, name="moe"),
        lambda key: replace(key, options={**key.options, "hd": 64}),
        lambda key: replace(key, options={**key.options, "hd": "128"}),
        lambda key: replace(key, target="sm_90a"),
        lambda key: replace(key, compiler="a compiler 1.1"),
        lambda key: replace(key, sources=key.sources[:1]),
    ],
)
def test_whatever_changes_the_code_changes_the_entry(
    tmp_path: Path, change: Callable[[ArtifactKey], ArtifactKey]
) -> None:
    key, build = key_in(tmp_path), Builder()
    cached_artifact(key, build, cache_in(tmp_path))
    cached_artifact(change(key), build, cache_in(tmp_path))
    assert build.calls == 2, "a stale entry must not be used"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_entry_is_rebuilt_and_replaced(tmp_path: Path, data: st.DataObject) -> None:
    key, cache = key_in(tmp_path), cache_in(tmp_path)
    cached_artifact(key, Builder(), cache)
    (entry,) = entries(cache)
    whole = entry.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1), label="byte")
    cut = data.draw(st.booleans(), label="cut there instead of flipping a bit")
    entry.write_bytes(whole[:at] if cut else whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    build = Builder()
    assert cached_artifact(key, build, cache) == ARTIFACT
    assert build.calls == 1, f"an entry {'cut at' if cut else 'with a bit flipped in'} byte {at} was used"
    assert entry.read_bytes() == whole, "the damaged entry must be replaced by a whole one"


def test_an_entry_under_another_keys_name_is_not_used(tmp_path: Path) -> None:
    key, cache = key_in(tmp_path), cache_in(tmp_path)
    other = replace(key, name="moe")
    cached_artifact(key, Builder(), cache)
    (first,) = entries(cache)
    cached_artifact(other, Builder(), cache)
    (second,) = set(entries(cache)) - {first}
    second.write_bytes(first.read_bytes())
    build = Builder(replace(ARTIFACT, entry="moe"))
    assert cached_artifact(other, build, cache).entry == "moe", "an entry says whose it is, and is held to it"


@pytest.mark.parametrize("early", [False, True])
def test_what_was_compiled_from_text_that_is_no_longer_there_is_not_kept(tmp_path: Path, early: bool) -> None:
    key, cache = key_in(tmp_path), cache_in(tmp_path)

    def edit() -> Artifact:
        edit_source(key)
        return ARTIFACT

    if early:
        edit()
    assert cached_artifact(key, edit, cache) == ARTIFACT
    now, build = replace(key, sources=sources_in(tmp_path)), Builder()
    for one in (key, now):
        cached_artifact(one, build, cache)
    assert build.calls == 2, "neither the old text nor the new one is known to be what was compiled"


TREE = (
    "__init__.py",
    "compile/compile.py",
    "tcgen05.py",
    "shared/deep/rings.py",
    "sm100_fmha/program.py",
    "sm100_fmha/kernel.py",
    "sm100_fmha/deep/softmax.py",
    "sm100_moe/program.py",
    "sm100_moe/kernel.py",
    "sm100_moe/deep/rows.py",
)
Rule = Callable[[str, Sequence[Source]], Sequence[Source]]


def by_prefix(kernel: str, sources: Sequence[Source]) -> list[Source]:
    """The old rule: the prefix of a path marks a kernel's files, and a list names the shared ones."""
    return [source for source in sources if source.place.startswith((kernel, "__init__", "compile/"))]


def broken_promise(rule: Rule, folder: Path) -> str | None:
    """The first file of TREE whose edit changes a key that it should not, or fails to change one that it should."""
    for place in TREE:
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_text(f"# {place}")
    for kernel, other in (("sm100_fmha", "sm100_moe"), ("sm100_moe", "sm100_fmha")):
        for place in TREE:
            keys: list[str] = []
            for text in (f"# {place}", "# edited"):
                (folder / place).write_text(text)
                sources = tuple(rule(kernel, sources_in(folder)))
                keys.append(ArtifactKey(kernel, sources, {}, "sm_100a", "a compiler 1.0").text())
            (folder / place).write_text(f"# {place}")
            if (keys[0] != keys[1]) == place.startswith(f"{other}/"):
                return f"an edit of {place} {'leaves' if keys[0] == keys[1] else 'changes'} the key of {kernel}"
    return None


def test_a_key_covers_all_that_no_other_kernels_folder_holds(tmp_path: Path) -> None:
    assert (broken := broken_promise(sources_of, tmp_path / "tree")) is None, broken


def test_a_rule_of_prefixes_would_be_noticed(tmp_path: Path) -> None:
    """The planted fault: a helper that is outside the kernel's folder and not listed is not in the key."""
    assert broken_promise(by_prefix, tmp_path) == "an edit of tcgen05.py leaves the key of sm100_fmha"


def imports_of(path: Path) -> set[str]:
    """Modules that a file imports, and the names imported from them, which may be modules too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {str(node.module)} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_imports_nothing_of_ours_that_its_key_does_not_cover(kernel: str) -> None:
    """The contract is exempt: it has the types of the call and nothing of the compiled code."""
    covered = {
        f"{source.root.parent.name}.{source.root.name}.{source.place}".removesuffix(".py").replace("/", ".")
        for source in imported(kernel)
    }
    covered |= {module.removesuffix(".__init__") for module in covered}
    assert f"backends.cutedsl.{kernel}.program" in covered, f"edits of {kernel} would go unnoticed"
    for source in imported(kernel):
        assert source.sha256, f"{source.place} could not be read, so that edits of it go unnoticed"
        if source.place == "__init__.py":
            continue
        for name in imports_of(source.root / source.place):
            ours = name.startswith(("backends", "conformance", "megamoe"))
            known = name.startswith("megamoe.contract") or name in covered or name.rpartition(".")[0] in covered
            assert known or not ours, f"{source.place} imports {name}, which no key of {kernel} covers"


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> Artifact:
        raise RuntimeError("no such layout")

    key, cache = key_in(tmp_path), cache_in(tmp_path)
    with pytest.raises(RuntimeError, match="no such layout"):
        cached_artifact(key, fail, cache)
    assert not cache.folder.exists(), "nothing was built, so nothing is kept"


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    key, build = key_in(tmp_path), Builder()
    (tmp_path / ".cache").write_text("not a folder")
    for _ in range(2):
        assert cached_artifact(key, build, cache_in(tmp_path)) == ARTIFACT
    assert cached_artifact(key, build, None) == ARTIFACT
    assert build.calls == 3, "without a cache every request builds"


def test_machine_code_that_this_user_did_not_write_is_not_run(tmp_path: Path) -> None:
    """An edited entry with another host object, and with every check that needs no secret made right."""
    key, cache = key_in(tmp_path), cache_in(tmp_path)
    cached_artifact(key, Builder(), cache)
    (entry,) = entries(cache)
    evil = cache_in(tmp_path / "mallory")
    cached_artifact(key, Builder(replace(ARTIFACT, host_object=b"\x7fELF evil")), evil)
    entry.write_bytes(entries(evil)[0].read_bytes())
    assert cached_artifact(key, Builder(), cache) == ARTIFACT, "code that another key vouches for was taken"
    assert entry.suffix == SUFFIX, entry

"""The cost of compiling a CuTeDSL kernel, beside the bars of issue 3: `nox -s bench -- cutedsl`.

Each compilation runs in a fresh process with its own cache folder, and the benchmark times the whole process.
`extra_info` has the bar, and the seconds from the request for the kernel to its return, including the import of
CuTeDSL. No test asserts a time.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

COLD_BAR_SECONDS, CACHED_BAR_SECONDS = 10.0, 0.2
_ASK = """
import sys, time
from pathlib import Path
import backends.cutedsl.compile.compile as compiling
import backends.cutedsl.sm100_fmha.program as program
from megamoe.contract.cache import user_cache
compiling.user_cache = lambda name: user_cache(name, Path(sys.argv[2]))
begins = time.perf_counter()
program.compiled(int(sys.argv[1]))
print(time.perf_counter() - begins)
"""


def _seconds(hd: int, cache: Path) -> float:
    command = [sys.executable, "-c", _ASK, str(hd), str(cache)]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


@pytest.mark.parametrize("hd", [64, 128, 256, 512])
def test_compile_cold(benchmark: BenchmarkFixture, tmp_path: Path, hd: int) -> None:
    seconds = benchmark.pedantic(_seconds, args=(hd, tmp_path), rounds=1, iterations=1)
    benchmark.extra_info.update(seconds=round(seconds, 3), bar_seconds=COLD_BAR_SECONDS)


@pytest.mark.parametrize("hd", [64, 512])
def test_compile_from_cache(benchmark: BenchmarkFixture, tmp_path: Path, hd: int) -> None:
    _seconds(hd, tmp_path)
    assert list((tmp_path / ".cache/megamoe/cutedsl").iterdir()), "the first process left nothing in its cache"
    seconds = benchmark.pedantic(_seconds, args=(hd, tmp_path), rounds=3, iterations=1)
    benchmark.extra_info.update(seconds=round(seconds, 3), bar_seconds=CACHED_BAR_SECONDS)

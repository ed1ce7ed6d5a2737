"""megamoe.cuda_source: which compiler is used, what is reported if none works, and what NVRTC accepts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from megamoe import cuda_source
from megamoe.cuda_source import HOST_HEADERS, NO_HOST_CODE, NVRTC_MAY, compiled
from megamoe.vm import Device, KernelFault, LaunchRefusedError, UnsupportedError, as_ptx

NVRTC = cuda_source.nvrtc_binding()
with_nvrtc = pytest.mark.skipif(NVRTC is None, reason="NVRTC is not installed: the extra `cuda`")

Nvcc = Callable[[str, int], str]


@pytest.fixture
def nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nvcc:
    """Adds an nvcc ahead of NVRTC, after those added before: it prints `words` and exits with `status`."""
    places = list[str]()
    monkeypatch.setattr(cuda_source, "nvccs", lambda: places)

    def planted(words: str, status: int) -> str:
        place = tmp_path / f"nvcc{len(places)}"
        # Its last argument is its output file for the PTX.
        place.write_text(f'#!/bin/sh\nfor last; do :; done\necho "{words}" | tee "$last" >&2\nexit {status}\n')
        place.chmod(0o755)
        places.append(str(place))
        return str(place)

    return planted


@pytest.fixture
def no_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_source, "nvrtc_binding", lambda: None)


@pytest.fixture(
    params=[
        pytest.param("nvcc", marks=pytest.mark.skipif(not cuda_source.nvccs(), reason="there is no nvcc")),
        pytest.param("NVRTC", marks=with_nvrtc),
    ]
)
def one_compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each compiler in turn, without the other, and without what the other has compiled."""
    if request.param == "nvcc":
        monkeypatch.setattr(cuda_source, "nvrtc_binding", lambda: None)
    else:
        monkeypatch.setattr(cuda_source, "nvccs", list)
    cuda_source._compiled.cache_clear()
    yield
    cuda_source._compiled.cache_clear()


@pytest.mark.usefixtures("no_nvrtc")
@pytest.mark.parametrize(
    "lack",
    [
        "nvcc fatal : Unsupported gpu architecture 'compute_100a'",
        "gcc: No such file or directory nvcc fatal : Failed to preprocess host compiler properties.",
        "cuda_fp16.h:4504:10: fatal error: nv/target: No such file or directory",
    ],
)
def test_a_compiler_that_lacks_something_makes_room_for_the_next(nvcc: Nvcc, lack: str) -> None:
    first = nvcc(lack, 1)
    with pytest.raises(LaunchRefusedError) as refused:
        compiled(f"// alone: {lack}\n", "sm_100a")
    assert first in str(refused.value), "the refusal names the compiler"
    assert lack in str(refused.value), "and has its words"
    assert str(refused.value).endswith(NVRTC_MAY), "and says what would do without"
    nvcc("the PTX of the second", 0)
    assert compiled(f"// two: {lack}\n", "sm_100a") == "the PTX of the second\n"


@pytest.mark.usefixtures("no_nvrtc")
def test_an_error_of_the_source_is_said_once(nvcc: Nvcc) -> None:
    nvcc("source.cu(1): error: expected an identifier", 1)
    nvcc("the PTX of the second", 0)
    with pytest.raises(LaunchRefusedError, match=r"nvcc .* does not compile the source: .*expected an identifier$"):
        compiled("int x = ;\n", "sm_100a")


@with_nvrtc
def test_a_header_that_all_compilers_lack_is_said_once(nvcc: Nvcc) -> None:
    lack = "source.cu:1:10: fatal error: nobody_has.h: No such file or directory"
    places = [nvcc(lack, 1), nvcc(lack, 1)]
    with pytest.raises(LaunchRefusedError) as refused:
        compiled("#include <nobody_has.h>\n", "sm_100a")
    said = str(refused.value)
    assert said.count("nobody_has.h") == 1, said
    assert said.endswith(f"do not compile the source: {lack}"), said
    assert all(place in said for place in (*places, "NVRTC")), f"a compiler is not named: {said}"


def test_what_compilers_lack_is_said_once_each(nvcc: Nvcc, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_source, "nvrtc_binding", lambda: None)
    header, host = "x.cu:1:1: fatal error: a.h: No such file", "nvcc fatal : Cannot find compiler 'cl.exe'"
    for words in (f"{header} or directory", host, f"{header} or directory"):
        nvcc(words, 1)
    with pytest.raises(LaunchRefusedError) as refused:
        compiled("#include <a.h>\n", "sm_100a")
    said = str(refused.value)
    assert (said.count(header), said.count(host)) == (1, 1), said


@pytest.mark.usefixtures("no_nvrtc", "nvcc")
def test_no_compiler_at_all() -> None:
    with pytest.raises(UnsupportedError, match="neither nvcc nor NVRTC is here; the extra `cuda`"):
        compiled("// no compiler\n", "sm_100a")


@pytest.mark.usefixtures("no_nvrtc")
def test_a_source_of_one_line_is_no_name_of_a_file(nvcc: Nvcc) -> None:
    nvcc("PTX of one line", 0)
    assert as_ptx('extern "C" __global__ void in_one_line() {}', "sm_90a") == "PTX of one line\n"


def test_the_same_source_is_the_same_ptx(nvcc: Nvcc) -> None:
    """nvcc derives internal names from its folder, both in the text and in the bytes of line-table names."""
    text = 'extern "C" __global__ void attend() {}\n'

    def ptx_of(identity: str, text: str) -> str:
        name = f"_ZN37_INTERNAL_{identity}_9_source_cu_attend_12"
        nvcc(f"{name} \n.b8 {','.join(map(str, name.encode()))}", 0)
        cuda_source._compiled.cache_clear()
        found = compiled(text, "sm_90a")
        cuda_source.nvccs().clear()
        return found

    first = ptx_of("a1006271", text)
    assert "a1006271" not in first, first
    assert ptx_of("be3fd519", text) == first, "another folder, other PTX"
    assert ptx_of("be3fd519", f"// another\n{text}") != first, "another source has an identity of its own"


def test_an_edited_header_is_compiled_anew(nvcc: Nvcc, tmp_path: Path) -> None:
    place = Path(nvcc("$(cat one/inner.h)", 0))
    place.write_text(place.read_text().replace("one/", f"{tmp_path}/one/"))
    (tmp_path / "one").mkdir()
    source, outer, inner = tmp_path / "k.cu", tmp_path / "one" / "outer.h", tmp_path / "one" / "inner.h"
    source.write_text('#include "one/outer.h"\n')
    outer.write_text('# include "inner.h"\n# include "outer.h"\n')
    for content in ("first", "second"):
        inner.write_text(content)
        assert compiled(source.read_text(), "sm_100a", str(source)) == f"{content}\n", "a header of a header counts"


# With NVRTC itself

KERNEL = r"""
#include <cuda_runtime.h>
#include <cooperative_groups.h>
#include <cuda/barrier>
#include <cuda_fp16.h>
#include <cstdint>
#include <algorithm>
#include "part.h"
namespace cg = cooperative_groups;
constexpr int twice(int x) { return 2 * x; }
namespace ns {
template <typename T> __global__ void added(T *y, int n) {
  __shared__ cuda::barrier<cuda::thread_scope_block> all;
  if (threadIdx.x == 0) init(&all, blockDim.x);
  cg::this_thread_block().sync();
  all.wait(all.arrive());
  uint32_t i = threadIdx.x;
  if (i < n) y[i] = __hadd(y[i], __float2half(twice(std::max(part(1), 2))));
}
template __global__ void added<__half>(__half *, int);
}
"""
RACING = "\n__global__ void racing(int *y) {\n  __shared__ int s;\n  s = threadIdx.x;\n  *y = s;\n}\n"


@pytest.fixture
def nvrtc_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_source, "nvccs", list)


@with_nvrtc
@pytest.mark.usefixtures("nvrtc_alone")
def test_nvrtc_brings_headers_and_takes_those_of_the_kernel(tmp_path: Path) -> None:
    (tmp_path / "part.h").write_text("__device__ inline int part(int x) { return x + 1; }\n")
    (tmp_path / "k.cu").write_text(KERNEL)
    y = torch.zeros(40, dtype=torch.float16)
    for name in ("added", "ns::added"):
        Device("sm_100a", schedule="lazy", profile="strict").launch(tmp_path / "k.cu", name, 1, 64, y, 40)
    assert y.tolist() == [8] * 40


@with_nvrtc
@pytest.mark.usefixtures("nvrtc_alone")
def test_nvrtc_takes_what_stands_for_headers_of_the_host() -> None:
    includes = "".join(f"#include <{name}>\n" for name in HOST_HEADERS)
    uses = (
        "extern __shared__ int s[];\n"
        "__global__ void k(const __grid_constant__ CUtensorMap map, int64_t *y, std::uint8_t *z) {\n"
        "  static_assert(sizeof(CUtensorMap) == 128 && std::is_same_v<uint8_t, std::uint8_t>);\n"
        '  assert(y); memset(z, 0, 4); printf("%d", INT_MAX);\n'
        "  *y = INFINITY > FLT_MAX && M_PI > std::exp(1.0) && std::numeric_limits<float>::max() == FLT_MAX;\n"
        "}\n"
    )
    assert ".entry" in compiled(includes + uses, "sm_90a")


@with_nvrtc
@pytest.mark.usefixtures("nvrtc_alone")
def test_nvrtc_says_what_is_wrong_and_what_it_does_not_take(tmp_path: Path) -> None:
    file = str(tmp_path / "wrong.cu")
    with pytest.raises(LaunchRefusedError) as wrong:
        compiled("__global__ void k(int *y) {\n  *y = absent;\n}\n", "sm_100a", file)
    assert f'{file}(2): error: identifier "absent" is undefined' in str(wrong.value)
    assert NO_HOST_CODE not in str(wrong.value), "the kernel is wrong; host code has no part in it"
    kernel = "__global__ void k(int *y) { *y = 1; }\n"
    for text in (f"#include <vector>\n{kernel}", f"{kernel}int main() {{ k<<<1, 1>>>(nullptr); }}\n"):
        with pytest.raises(LaunchRefusedError) as host:
            compiled(text, "sm_100a")
        assert str(host.value).endswith(NO_HOST_CODE)


@pytest.mark.parametrize("alone", [False, pytest.param(True, marks=with_nvrtc)])
def test_lines_of_text_are_those_of_no_file(monkeypatch: pytest.MonkeyPatch, alone: bool) -> None:
    if alone:
        monkeypatch.setattr(cuda_source, "nvccs", list)
    vm = Device("sm_100a")
    # Two texts with the same line: one name that is the same in every run, and still two findings.
    for text in (RACING, RACING.replace("threadIdx.x;", "threadIdx.x + 1;")):
        with pytest.raises(KernelFault):
            vm.launch(text, "racing", 1, 64, torch.zeros(1, dtype=torch.int32))
    assert {str(one.place) for one in vm.findings} == {"source.cu:5:3"}
    assert len(vm.findings) == 2, "findings of two texts are two"


ROTATE = """
namespace mine {
template <typename T, int N>
__global__ void rotate(T* out, const T* in) { out[threadIdx.x] = in[(threadIdx.x + 1) % N]; }
}
"""


@pytest.mark.usefixtures("one_compiler")
@pytest.mark.parametrize("entry", ["mine::rotate<float, 32>", "rotate<float, 32>"])
def test_a_template_is_instantiated_for_its_launch(entry: str) -> None:
    x, y = torch.arange(32.0), torch.zeros(32)
    Device("sm_100a").launch(ROTATE, entry, 1, 32, y, x)
    assert torch.equal(y, x.roll(-1))


FILL = "template <class T, int N = 4> __global__ void fill(T* out) { out[threadIdx.x] = T(N); }\n"


@pytest.mark.skipif(not cuda_source.available(), reason="there is no compiler for CUDA C++")
@pytest.mark.parametrize(
    ("before", "entry", "value"),
    [
        pytest.param("", "fill<float>", 4, id="a default argument"),
        pytest.param("constexpr int N = 6;", "fill<float, N>", 6, id="a constant"),
        pytest.param("using real = float;", "fill<real, 0x10>", 16, id="an alias"),
        pytest.param("// namespace none {", "fill<float, 1>", 1, id="a namespace in a comment"),
        pytest.param("namespace a { using V = int; } namespace b { using V = int; } using V = float;", "fill<V, 2>", 2,
                     id="a name that namespaces have too"),
    ],
)  # fmt: skip
def test_a_template_is_found_however_its_arguments_are_spelt(before: str, entry: str, value: int) -> None:
    x = torch.zeros(32)
    Device("sm_100a").launch(f"{before}\n{FILL}", entry, 1, 32, x)
    assert (x == value).all(), f"{x[0]} instead of {value}"


SHOWN = "`template <typename T, int N> rotate(T* out, const T* in)`"


@pytest.mark.skipif(not cuda_source.available(), reason="there is no compiler for CUDA C++")
@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ("rotate", "a template is compiled only where it is instantiated: add `template __global__ void rotate<...>("),
        (
            "rotate<float, none>",
            'does not compile rotate<float, none>: identifier "none" is undefined; the source has ',
        ),
        ("rotate<float, 1, 2>", f"none; the source has one template of that name, {SHOWN}"),
        ("rotated<int, 1>", f'"rotated" is undefined; the source has no template of that name; it has {SHOWN}'),
    ],
)
def test_a_template_that_is_not_instantiated_is_said(entry: str, told: str) -> None:
    with pytest.raises(LaunchRefusedError) as refused:
        Device("sm_100a").launch(ROTATE, entry, 1, 32, None, None)
    assert "its entries are: none; " in str(refused.value)
    assert told in str(refused.value)


PLAIN = "__global__ void two(float* x) {}\n__global__ void two(int* x) {}\n"
CHECKED = "template <typename T>\n__global__ void sized(T* x) { static_assert(sizeof(T) == 4); }\n"


@pytest.mark.usefixtures("one_compiler")
def test_a_refused_entry_has_the_candidates_and_no_code_that_was_added(tmp_path: Path) -> None:
    two, sized = tmp_path / "two.cu", tmp_path / "sized.cu"
    two.write_text(PLAIN)
    sized.write_text(CHECKED)
    overloads = "its entries are: _Z3twoPf (two(float*)), _Z3twoPi (two(int*))"
    template = "; the source has one template of that name, `template <typename T> sized(T* x)`"
    for file, entry, end in (
        (two, "two(double*)", overloads),
        (two, "two<float>", overloads),
        (sized, "sized<nonsense>", f'does not compile sized<nonsense>: identifier "nonsense" is undefined{template}'),
        (sized, "sized<float, int>", f"its entries are: none{template}"),
        (sized, "sized<double>", f"does not compile sized<double>: {sized}(2): static assertion failed{template}"),
    ):
        with pytest.raises(LaunchRefusedError) as refused:
            Device("sm_100a").launch(file, entry, 1, 32, None)
        said = str(refused.value)
        assert said.startswith(f"{file}: the module has no entry {entry!r}; "), f"the file is not named first: {said}"
        assert said.endswith(end), f"{entry}: {said}"
        for internal in ("megamoe_", "megamoe-inst", "__nv", "add `template", "\n"):
            assert internal not in said, f"{internal!r} is nothing that the user wrote or should write: {said}"


OVERLOADED = """
namespace mine {
struct Pair { int a, b; };
template <typename T> __global__ void k(T* y, int n) { y[threadIdx.x] = n; }
template <typename T> __global__ void k(T* y, float n) { y[threadIdx.x] = n + 1; }
template <typename T> __global__ void k(T* y, const Pair* n, int) { y[threadIdx.x] = n ? 7 : 8; }
}
"""
INSTANTIATED = (f"{OVERLOADED}template __global__ void mine::k<float>(float*, int);\n"
                "template __global__ void mine::k<float>(float*, float);\n")  # fmt: skip


@pytest.mark.usefixtures("one_compiler")
def test_one_of_several_templates_is_chosen_by_its_parameters() -> None:
    for text, entry, args, value in (
        (OVERLOADED, "mine::k<float>(float*, int)", (3,), 3),
        (OVERLOADED, "k<float>(float *, float)", (3.0,), 4),
        (OVERLOADED, "k<float>(float*, Pair const*, int)", (None, 1), 8),
        (OVERLOADED, "mine::k(float*, float)", (3.0,), 4),
        (INSTANTIATED, "k<float>(float*, float)", (3.0,), 4),
        (INSTANTIATED, "k(float*, int)", (3,), 3),
    ):
        y = torch.zeros(32)
        Device("sm_100a").launch(text, entry, 1, 32, y, *args)
        assert (y == value).all(), f"{entry}: {y[0]} instead of {value}"
    candidates = "k(T* y, int n) and k(T* y, float n) and k(T* y, const Pair* n, int): ask for one"
    for entry, told, end in (
        ("k<float>", candidates, "--entry 'k<float>(...)'"),
        ("k<float>(float*, double)", candidates, "--entry 'k<float>(...)'"),
        ("k<none>(none*, int)", '"none" is undefined', "--entry 'k<none>(...)'"),
    ):
        with pytest.raises(LaunchRefusedError) as refused:
            Device("sm_100a").launch(OVERLOADED, entry, 1, 32, None, None)
        assert told in str(refused.value), refused.value
        assert str(refused.value).endswith(end), refused.value
        assert "megamoe" not in str(refused.value), refused.value
    for entry in ("k<float>", "k"):
        with pytest.raises(LaunchRefusedError, match=r"or by its mangled name$") as refused:
            Device("sm_100a").launch(INSTANTIATED, entry, 1, 32, None, None)
        assert "k<float>(float*, int)), " in str(refused.value), "the candidates are not named"


@pytest.mark.parametrize(
    ("text", "kernel"),
    [
        ("template <int N> __global__ void __launch_bounds__(128, 2) k(int* a) {}", "k"),
        ('template <class T = int>\nextern "C++" __global__ static void k(T a) {}', "k"),
        ("template <class T, class U = A<T>> static __global__ __launch_bounds__(64) void k(T a) {}", "k"),
        ("// template <int N> __global__ void k(int* a) {}", ""),
        ("template <int N> __device__ void f(int* a) {}\n__global__ void k(int* a) { f<1>(a); }", ""),
    ],
)
def test_templates_of_kernels_are_known_in_the_source(text: str, kernel: str) -> None:
    said = cuda_source.templates_wanting(text)
    assert (f"void {kernel}<...>(...)" in said) if kernel else not said

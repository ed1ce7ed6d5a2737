"""CUDA C++ to PTX: by nvcc, else by NVRTC, which needs no host compiler and ships CUDA's headers (13.3 and later).

If a compiler lacks something, such as a header or the target, the next one is tried. The first compiler that finds an
error in the source itself reports it.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from megamoe.contract.backend import UnsupportedError
from megamoe.contract.counted import counted
from megamoe.contract.machine import LaunchRefusedError
from megamoe.contract.scratch import scratch_folder

TEXT_NAME = "source.cu"
"""The file name that compiler messages and findings use for source given as text."""
NONE_HERE = (
    "CUDA C++ needs a compiler, and neither nvcc nor NVRTC is here; the extra `cuda` of megamoe has NVRTC, which needs "
    "no host compiler, and PTX needs none"
)
NVRTC_MAY = (
    "NVRTC, which is not here, needs no host compiler and brings CUDA's headers: the extra `cuda` of megamoe has it"
)
NO_HEADERS = "NVRTC of CUDA 13.3 and later brings CUDA's headers: the extra `cuda` of megamoe has it"
NO_HOST_CODE = (
    "NVRTC takes device code: leave host code, and headers for it, out by `#ifndef __CUDACC_RTC__`, or install nvcc"
)
_LACKING = re.compile(
    r"Unsupported gpu architecture|invalid value for --gpu-architecture|Failed to preprocess host compiler"
    r"|No such file or directory|annot open source file|Cannot find compiler|host compiler targets unsupported"
)
"""Compiler messages after which another compiler may succeed; every other error is the source's."""
_HEADER = re.compile(r'fatal error: (\S+): No such file|annot open source file "([^"]+)"')
_HOST_CODE = re.compile(r"annot open source file|<<<")

_OWN_HEADER = re.compile(r'^\s*#\s*include\s*"([^"\n]+)"', re.MULTILINE)

_STANDARD = ("algorithm", "array", "bit", "cstddef", "cstdint", "functional", "limits", "numeric", "tuple",
             "type_traits", "utility")  # fmt: skip
_MACROS = ("cfloat", "climits")
_CONSTANTS = """#pragma once
#include <cmath>
#ifndef INFINITY
#define INFINITY __builtin_huge_valf()
#endif
#ifndef NAN
#define NAN __builtin_nanf("")
#endif
#ifndef M_PI
#define M_PI 3.14159265358979323846
#endif
"""
_TENSOR_MAP = """#pragma once
typedef unsigned int cuuint32_t;
typedef unsigned long long cuuint64_t;
typedef struct CUtensorMap_st { alignas(128) cuuint64_t opaque[16]; } CUtensorMap;
"""
HOST_HEADERS = {
    **{name: f"#include <cuda/std/{name}>\nnamespace std {{ using namespace ::cuda::std; }}\n" for name in _STANDARD},
    **{name: f"#include <cuda/std/{name}>\n" for name in _MACROS},
    **{f"{name}.h": f"#include <c{name}>\n" for name in ("stddef", "stdint", "limits", "float")},
    "math.h": _CONSTANTS,
    "cmath": "#include <cuda/std/cmath>\nnamespace std { using namespace ::cuda::std; }\n#include <math.h>\n",
    "cuda.h": _TENSOR_MAP,
    # NVRTC has their device declarations built in.
    **dict.fromkeys(
        ("cuda_runtime.h", "cuda_runtime_api.h", "device_launch_parameters.h", "stdio.h", "cstdio", "stdlib.h",
         "cstdlib", "string.h", "cstring", "assert.h", "cassert"),
        "",
    ),
}  # fmt: skip
"""The host compiler's and CUDA driver's headers that NVRTC lacks, reduced to what kernels use of them."""


@dataclass(frozen=True, slots=True)
class _Source:
    """CUDA C++ from a file, or given as text (`file` is ""), for a target. `kernel`: a template to instantiate, or "",
    whose name may leave out the namespaces `spaces`; the types of its parameters choose among overloads."""

    text: str
    target: str
    file: str
    kernel: str = ""
    spaces: tuple[str, ...] = ()

    def placed(self, folder: Path) -> Path:
        """Writes it to `folder`. Line information and compiler messages name the original file, not this copy."""
        line = f"#line 1 {json.dumps(self.file, ensure_ascii=False)}\n" if self.file else ""
        place = folder / TEXT_NAME
        place.write_text(line + self.text + self._instantiation, "utf-8")
        return place

    @property
    def _instantiation(self) -> str:
        """Code after the source that makes nvcc compile `kernel`.

        A host function that takes its address leaves nothing in the PTX. NVRTC is asked for the kernel by name.
        """
        if not self.kernel:
            return ""
        using = " ".join(f"using namespace {one};" for one in self.spaces)
        address = f"void megamoe_instantiates() {{ (void)({self.address}); }}"
        return f'\n#line 1 "{_ADDED}"\n{using}\n#ifndef __CUDACC_RTC__\n{address}\n#endif\n'

    @property
    def address(self) -> str:
        """The expression for the address of `kernel`."""
        name, parameters = _parted(self.kernel)
        return f"(void (*){parameters})&{name}" if parameters else f"&{name}"

    @property
    def folder(self) -> str:
        """The folder of its own includes; empty for text."""
        return str(Path(self.file).parent) if self.file else ""


_ADDED = "megamoe-instantiation"
"""The file name that compiler messages use for the code behind the source."""
_NAMES = "__nv_name_map"
"""What NVRTC calls the kernel's name that it is asked for."""
_ERROR = re.compile(r"^(\S.*?)\((\d+)\): (?:catastrophic )?error(?: #[\w-]+)?: (.*)$", re.MULTILINE)


def _about_kernel(words: str) -> str:
    """A compiler's errors for a source that is right without `kernel`, without code that the user did not write."""
    errors = _ERROR.findall(words)
    own = [f"{file}({line}): {said}" for file, line, said in errors if file not in (_ADDED, _NAMES)]
    added = [said for file, _, said in errors if file in (_ADDED, _NAMES)]
    # Most errors in one expression follow from a single one: from an unknown name, if there is one.
    return "; ".join(dict.fromkeys(own or sorted(added, key=lambda said: "undefined" not in said)[:1])) or words


_NAMESPACE = re.compile(r"\bnamespace\s+(\w+(?:::\w+)*)\s*\{")
_TEMPLATE = re.compile(
    r"\btemplate\s*<[^;{}]*?>[^;{}()]*\b__global__\b(?:\s*\w+\s*\([^()]*\)|\s*\w+)*?\s*\bvoid\b"
    r"(?:\s*__\w+__\s*\([^()]*\))*\s+(\w+)\s*\("
)
_PLAIN = re.compile(r"[\w:]+")
_SPECIALISED = re.compile(r"[\w:]+<[\w\s:<>,*&+().-]+>")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def template_named(entry: str) -> str:
    """The entry k<float, 3>, k<float, 3>(float*) or k(float*), if it may name a template; else ""."""
    name, parameters = _parted(entry.strip())
    named = _SPECIALISED.fullmatch(name) or (parameters and _PLAIN.fullmatch(name))
    return f"{name}{parameters}" if named and not re.search(r"[;{}]", parameters) else ""


def _parted(entry: str) -> tuple[str, str]:
    """k<float> and (float*, int) of k<float>(float*, int)."""
    depth = 0
    for at in reversed(range(len(entry) if entry.endswith(")") else 0)):
        depth += (entry[at] == ")") - (entry[at] == "(")
        if not depth:
            return entry[:at].rstrip(), entry[at:]
    return entry, ""


def templates_named(text: str, entry: str) -> str:
    """Says which templates of kernels in CUDA C++ `text` the name of `entry` may mean, and how to choose one; which
    there are if it has none of that name; "" if there are none."""
    code, every = _templates(text)
    own = _own_name(entry)
    found = [one for one in every if one[1] == own]
    if len(found) == 1:
        return f"the source has one template of that name, {_shown(code, found[0])}"
    if not found:
        shown = " and ".join(_shown(code, one) for one in every)
        return f"the source has no template of that name; it has {shown}" if shown else ""
    shown = " and ".join(f"{own}{_bracketed(code, one.end() - 1, '()')}" for one in found)
    return (f"the source has {counted(len(found), 'template')} of that name, {shown}: ask for one with the types of "
            "its parameters behind the name, with the template's arguments in place: "
            f"--entry '{_parted(entry)[0]}(...)'")  # fmt: skip


def is_template(text: str, entry: str) -> bool:
    """Whether CUDA C++ `text` has a template of a kernel of that name."""
    return any(one[1] == _own_name(entry) for one in _templates(text)[1])


def _templates(text: str) -> tuple[str, list[re.Match[str]]]:
    """CUDA C++ `text` without comments, and the templates of kernels in it, whose first group is the name."""
    code = _COMMENT.sub(" ", text)
    return code, list(_TEMPLATE.finditer(code))


def _own_name(entry: str) -> str:
    """k of ns::k<float>(float*)."""
    return _parted(entry)[0].partition("<")[0].rpartition("::")[2].strip()


def _shown(code: str, template: re.Match[str]) -> str:
    """template <int N> k(float* x), for a match in `code`."""
    head = _bracketed(code, code.index("<", template.start()), "<>")
    return f"`template {head} {template[1]}{_bracketed(code, template.end() - 1, '()')}`"


def _bracketed(code: str, begin: int, pair: str) -> str:
    """What stands there between a pair of brackets, with them, on one line."""
    depth = 0
    for at in range(begin, len(code)):
        depth += (code[at] == pair[0]) - (code[at] == pair[1])
        if not depth:
            return " ".join(code[begin : at + 1].split())
    return "...".join(pair)


def templates_wanting(text: str) -> str:
    """Says how to get a kernel out of the templates in CUDA C++ `text`; "" if no kernel is a template."""
    _, found = _templates(text)
    if not found:
        return ""
    wanted = f"{found[0][1]}<...>"
    return (f"a template is compiled only where it is instantiated: add `template __global__ void {wanted}(...);`, "
            "with the types of its parameters, or ask for it with its template arguments: "
            f"--entry '{wanted}'")  # fmt: skip


class _WordsError(Exception):
    """A compiler's messages for a source that it does not compile."""


def compiled(text: str, target: str, file: str = "", kernel: str = "") -> str:
    """Compiles CUDA C++ `text`, read from the file with absolute name `file`, to PTX with the first compiler that can.

    `kernel`: a template to instantiate, as in k<float, 3> or, among overloads, k<float, 3>(float*); namespaces may be
    left out.

    LaunchRefusedError with the compilers' messages if the text does not compile; UnsupportedError if there is no
    compiler.
    """
    headers = tuple(_included(text, Path(file).parent, set())) if file else ()
    source, spaces = _Source(text, target, file, kernel), dict.fromkeys(_NAMESPACE.findall(_COMMENT.sub("", text)))
    if not kernel or not spaces:
        return _compiled(source, headers)
    try:
        return _compiled(source, headers)
    except LaunchRefusedError:
        # Only now, because names of several namespaces may be ambiguous together.
        return _compiled(replace(source, spaces=tuple(spaces)), headers)


def _included(text: str, folder: Path, seen: set[Path]) -> Iterator[tuple[str, str]]:
    """Its own headers, recursively, with their content: editing one of them must recompile the kernel."""
    for name in _OWN_HEADER.findall(text):
        place = folder / name
        if place in seen:
            continue
        seen.add(place)
        with suppress(OSError, UnicodeDecodeError):
            content = place.read_text("utf-8")
            yield str(place), content
            yield from _included(content, place.parent, seen)


@lru_cache(maxsize=64)
def _compiled(source: _Source, _headers: tuple[tuple[str, str], ...]) -> str:
    words, who = dict[str, str](), dict[str, list[str]]()
    for name, compiler in _compilers():
        try:
            return compiler(source)
        except _WordsError as problem:
            said = str(problem)
            if not _LACKING.search(said):
                what, said = (source.kernel, _about_kernel(said)) if source.kernel else ("the source", said)
                raise LaunchRefusedError(f"{name} does not compile {what}: {said}") from None
            # Compilers word the lack of one header differently.
            header = _HEADER.search(said)
            about = header[1] or header[2] if header else said
            words.setdefault(about, said)
            who.setdefault(about, []).append(name)
    if not words:
        raise UnsupportedError(NONE_HERE)
    told = [f"{_joined(who[about])} compile the source: {said}" for about, said in words.items()]
    raise LaunchRefusedError("; ".join(told if nvrtc_binding() is not None else [*told, NVRTC_MAY]))


def _joined(names: Sequence[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last} do not" if most else f"{last} does not"


def available() -> list[str]:
    """The installed CUDA C++ compilers, in the order in which they are tried."""
    return [name for name, _ in _compilers()]


def _compilers() -> Iterator[tuple[str, Callable[[_Source], str]]]:
    for place in nvccs():
        yield f"nvcc ({place})", partial(_by_nvcc, place)
    if (nvrtc := nvrtc_binding()) is not None:
        _, major, minor = nvrtc.nvrtcVersion()
        yield f"NVRTC {major}.{minor}", partial(_by_nvrtc, nvrtc, f"{major}.{minor}")


def nvccs() -> list[str]:
    """Every nvcc once: on the path, in /usr/local/cuda and in a wheel. The wheel's lacks the CCCL headers."""
    wheels = [str(place / "bin") for place in _wheel_folders()]
    places = (shutil.which("nvcc", path=path) for path in (None, "/usr/local/cuda/bin", *wheels))
    return list(dict.fromkeys(found for found in places if found))


def nvrtc_binding() -> Any:
    """cuda.bindings.nvrtc; None if it or the library is not installed."""
    try:
        nvrtc = importlib.import_module("cuda.bindings.nvrtc")
        code, *_ = nvrtc.nvrtcVersion()
    except Exception:  # the binding raises its own errors for a library that is not there
        return None
    return None if int(code) else nvrtc


def _wheel_folders() -> list[Path]:
    spec = importlib.util.find_spec("nvidia")
    places = (spec.submodule_search_locations or ()) if spec else ()
    return [Path(place) / "cu13" for place in places]


def _by_nvcc(compiler: str, source: _Source) -> str:
    with scratch_folder("nvcc") as folder:
        place, ptx = source.placed(folder), folder / "source.ptx"
        command = [compiler, "-ptx", f"-arch={source.target}", "-std=c++17", "-lineinfo", "--expt-relaxed-constexpr"]
        command += [f"-I{source.folder}"] if source.folder else []
        done = subprocess.run([*command, str(place), "-o", str(ptx)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise _WordsError((done.stderr or done.stdout).strip().replace(str(place), TEXT_NAME))
        return _with_own_id(ptx.read_text("utf-8").replace(str(place), TEXT_NAME), source)


_MODULE_ID = re.compile(r"(?<=_INTERNAL_)[0-9a-f]{8}(?=_)")
_DATA = re.compile(r"^\s*\.b8\s+([\d,\s]+)", re.MULTILINE)


def _with_own_id(ptx: str, source: _Source) -> str:
    """Replaces the ID that nvcc puts into names with internal linkage, derived from the temporary folder, by one
    derived from `source`.

    This way one source gives the same PTX in every run. The names occur in the text and, as bytes, in the function
    names of the line information.
    """
    own = sha256(f"{source.file}\0{source.text}".encode()).hexdigest()[:8]
    ptx = _MODULE_ID.sub(own, ptx)
    numbers = [one for line in _DATA.finditer(ptx) for one in re.compile(r"\d+").finditer(ptx, *line.span(1))]
    data = "".join(chr(int(one[0])) for one in numbers)
    pieces, end = list[str](), 0
    for found in _MODULE_ID.finditer(data):
        for number, char in zip(numbers[found.start() : found.end()], own, strict=True):
            pieces += [ptx[end : number.start()], str(ord(char))]
            end = number.end()
    return "".join([*pieces, ptx[end:]])


def _by_nvrtc(nvrtc: Any, version: str, source: _Source) -> str:
    with scratch_folder("nvrtc") as folder:
        place, headers, host = source.placed(folder), folder / "cuda", folder / "host"
        # Lets kernels call functions without annotation, as nvcc's --expt-relaxed-constexpr does.
        options = [f"--gpu-architecture={source.target.replace('sm_', 'compute_')}", "--std=c++17", "-lineinfo",
                   "-default-device"]  # fmt: skip
        options += [f"-I{source.folder}"] if source.folder else []
        if re.search(r"#\s*include", source.text):
            options += _bundled(nvrtc, headers)
            _write_host_headers(host)
            options.append(f"-I{host}")
        # Headers get the same name in every run.
        names = {str(place): TEXT_NAME, str(headers): f"/NVRTC-{version}", str(host): "/megamoe-host-headers"}

        def named(text: str) -> str:
            for path, name in names.items():
                text = text.replace(path, name)
            return text

        _, program = nvrtc.nvrtcCreateProgram(place.read_bytes(), str(place).encode(), 0, [], [])
        if source.kernel:
            nvrtc.nvrtcAddNameExpression(program, source.address.encode())
        try:
            code, *_ = nvrtc.nvrtcCompileProgram(program, len(options), [one.encode() for one in options])
            if not int(code):
                return named(_text(program, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX))
            words = named(_text(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)).strip()
        finally:
            nvrtc.nvrtcDestroyProgram(program)
        # There is no log if this version does not know an option.
        words = words or str(nvrtc.nvrtcGetErrorString(code)[1], "ascii")
        if _HOST_CODE.search(words):
            words += f"\n{NO_HOST_CODE if headers.exists() or 'open source file' not in words else NO_HEADERS}"
        raise _WordsError(words)


def _text(program: Any, get_size: Callable[..., Any], get: Callable[..., Any]) -> str:
    _, size = get_size(program)
    content = bytearray(size)
    get(program, content)
    return bytes(content).rstrip(b"\0").decode()


def _bundled(nvrtc: Any, folder: Path) -> list[str]:
    """Options for CUDA's headers: the ones bundled with NVRTC 13.3 and later, else those of a toolkit or of wheels."""
    with suppress(Exception):  # an older binding or library lacks the call
        code, info, *_ = nvrtc.nvrtcGetBundledHeadersInfo()
        if not int(code) and info.available:
            return [f"--use-bundled-headers={folder}"]
    places = [place / "include" for place in (*_wheel_folders(), Path("/usr/local/cuda"))]
    return [f"-I{one}" for place in places for one in (place, place / "cccl") if one.is_dir()]


def _write_host_headers(folder: Path) -> None:
    folder.mkdir()
    for name, text in HOST_HEADERS.items():
        (folder / name).write_text(text, "ascii")

"""The software GPU's own declarations against NVIDIA's cuda.h and nvml.h (of CUDA 13.0, from PyPI, test extra).

Signatures: each source is compiled once with NVIDIA's header in place of ours, so that a definition that differs from
its declaration is an error. Constants and layouts: from our headers' text a program is made that prints every
constant, and size and offset of every structure and field; compiled with either header it must print the same.
"""

from __future__ import annotations

import re
import subprocess
import sysconfig
from pathlib import Path

import pytest

from limosa.native.build import DRIVER, compilers
from limosa_softgpu.build import SOFTGPU

REAL = Path(sysconfig.get_paths()["purelib"]) / "nvidia" / "cu13" / "include"
CUDA_HEADERS = sorted(SOFTGPU.glob("api/*.h"))
NVML_HEADERS = [SOFTGPU / "nvml_api.h"]
SOURCES = sorted(SOFTGPU.glob("*.c"))
CUDA_FUNCTIONS, NVML_FUNCTIONS = DRIVER / "functions.list", SOFTGPU / "nvml_functions.list"
LISTED = re.compile(r"^FUNCTION\((\w+), (\w+), (\d+), ([01]), \w+\)", re.M)


@pytest.fixture(scope="module")
def compiler() -> list[str]:
    assert compilers(), "there is no C compiler"
    return compilers()[0]


def test_the_real_headers_are_here():
    """They come with the test extra; without them nothing on this page has been looked at."""
    for name in ("cuda.h", "nvml.h"):
        assert (REAL / name).is_file(), f"no {REAL / name}: pip install .[test]"
    assert "#define CUDA_VERSION 13000" in (REAL / "cuda.h").read_text()


# --- reading our headers -----------------------------------------------------------------------------------------


def plain(text: str) -> str:
    """C without comments, and without lines that are joined."""
    text = text.replace("\\\n", " ")
    return re.sub(r"//[^\n]*", " ", re.sub(r"/\*.*?\*/", " ", text, flags=re.S))


def blocks(text: str) -> list[tuple[str, str, str]]:
    """Every ``typedef enum|struct|union … { body } name;``: kind, body, name (the first one)."""
    found = []
    for start in re.finditer(r"typedef\s+(enum|struct|union)\s+\w*\s*\{", text):
        depth, at = 1, start.end()
        while depth:
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            at += 1
        name = re.match(r"\s*(\w+)", text[at:])
        assert name, text[start.start() : at]
        found.append((start[1], text[start.end() : at - 1], name[1]))
    return found


def fields(body: str, before: str = "") -> list[str]:
    """The fields of a structure's body, those of structures within as ``outer.inner``."""
    found: list[str] = []
    while body.strip():
        inner = re.match(r"\s*(struct|union)\s*\w*\s*\{", body)
        if inner:
            depth, at = 1, inner.end()
            while depth:
                depth += {"{": 1, "}": -1}.get(body[at], 0)
                at += 1
            end = body.index(";", at)
            name = body[at:end].strip()
            if name:
                found.append(before + name)
            found += fields(body[inner.end() : at - 1], f"{before}{name}." if name else before)
        else:
            end = body.index(";")
            for declared in body[:end].split(",") if "(" not in body[:end] else [body[:end]]:
                pointer = re.search(r"\(\s*\*\s*(?:CUDAAPI\s*)?(?:\*\s*)?(\w+)\s*\)\s*\(", declared)
                name = pointer or re.search(r"(\w+)\s*(?:\[[^\]]*\]\s*)*$", declared)
                assert name, declared
                found.append(before + name[1])
        body = body[end + 1 :]
    return found


def questions(headers: list[Path]) -> list[tuple[str, str]]:
    """What the program prints: a title, and an expression that is an integer."""
    asked: dict[str, str] = {}
    for header in headers:
        text = plain(header.read_text())
        for kind, body, name in blocks(text):
            asked[f"sizeof {name}"] = f"sizeof({name})"
            if kind == "enum":
                for entry in body.split(","):
                    if entry.strip():
                        constant = entry.partition("=")[0].strip()
                        asked[constant] = constant
                continue
            for field in fields(body):
                asked[f"{name}.{field}"] = f"offsetof({name}, {field})"
                asked[f"sizeof {name}.{field}"] = f"sizeof((({name} *)0)->{field})"
        for name, value in re.findall(r"^\s*#\s*define\s+(\w+)[ \t]+(\S[^\n]*)$", text, flags=re.M):
            if name not in ("CUDAAPI", "DECLDIR"):
                asked[name] = f"(unsigned long)({name})" if "*)" in value or "(CU" in value else name
        for name in re.findall(r"typedef\s+(?!enum|struct|union)[^;{(]*?(\w+)\s*;", text):
            asked[f"sizeof {name}"] = f"sizeof({name})"
        for name in re.findall(r"typedef\s+(?:struct|union)\s+\w+\s*\*\s*(\w+)\s*;", text):
            asked[f"sizeof {name}"] = f"sizeof({name})"
    return sorted(asked.items())


def program(api: str, asked: list[tuple[str, str]]) -> str:
    lines = [f'    printf("%s = %lld\\n", "{title}", (long long)({value}));' for title, value in asked]
    return "\n".join(
        ["#include <stddef.h>", f'#include "{api}"', "#include <stdio.h>", "int main(void)", "{", *lines, "}", ""]
    )


def answers(compiler: list[str], folder: Path, source: str, name: str, flags: list[str]) -> dict[str, str]:
    path = folder / f"{name}.c"
    path.write_text(source)
    built = subprocess.run(
        [*compiler, "-std=gnu11", "-w", *flags, "-o", str(path.with_suffix("")), str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert built.returncode == 0, f"{name} headers lack what ours have, or the other way round:\n{built.stderr[:5000]}"
    ran = subprocess.run([str(path.with_suffix(""))], capture_output=True, text=True, timeout=120, check=True)
    return dict(line.split(" = ") for line in ran.stdout.splitlines())


def differences(compiler: list[str], folder: Path, api: str, headers: list[Path], place: Path = SOFTGPU) -> list[str]:
    asked = questions(headers)
    ours = answers(compiler, folder, program(api, asked), "ours", ["-I", str(place)])
    real = answers(
        compiler, folder, program(api, asked), "real", ["-I", str(place), "-I", str(REAL), "-DSOFTGPU_REAL_HEADERS"]
    )
    assert len(ours) == len(asked)
    return [f"{title}: {ours[title]}, really {real[title]}" for title in ours if ours[title] != real[title]]


# --- the comparison ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("api", "headers", "least"), [("cuda_api.h", CUDA_HEADERS, 500), ("nvml_api.h", NVML_HEADERS, 80)]
)
def test_constants_and_layouts_are_the_real_ones(compiler, tmp_path, api, headers, least):
    assert len(questions(headers)) > least
    assert differences(compiler, tmp_path, api, headers) == []


@pytest.mark.parametrize("source", SOURCES, ids=[path.name for path in SOURCES])
def test_signatures_are_the_real_ones(compiler, source):
    """With NVIDIA's declarations in scope a definition of another type does not compile. Nor does what looks wrong."""
    flags = ["-std=gnu11", "-DSOFTGPU_REAL_HEADERS", "-Wall", "-Wextra", "-Werror"]
    ran = subprocess.run(
        [*compiler, *flags, "-isystem", str(REAL), "-fsyntax-only", str(source)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[:5000]


def test_a_wrong_declaration_is_noticed(compiler, tmp_path):
    """The comparison itself: a constant, a field's place and a structure's size that are not NVIDIA's."""
    text = (SOFTGPU / "nvml_api.h").read_text()
    for right, wrong in (
        ("NVML_ERROR_TIMEOUT = 10", "NVML_ERROR_TIMEOUT = 11"),
        ("    unsigned long long free;\n    unsigned long long used;", "    unsigned long long used, free;"),
        ("    unsigned int computeInstanceId;", "    unsigned long long computeInstanceId;"),
    ):
        assert right in text
        text = text.replace(right, wrong)
    (tmp_path / "nvml_api.h").write_text(text)
    found = differences(compiler, tmp_path, "nvml_api.h", [tmp_path / "nvml_api.h"], place=tmp_path)
    for title in ("NVML_ERROR_TIMEOUT", "nvmlMemory_t.free", "nvmlMemory_v2_t.used", "sizeof nvmlProcessInfo_v2_t"):
        assert any(line.startswith(title + ":") for line in found), (title, found)


def test_a_wrong_signature_is_noticed(compiler, tmp_path):
    source = tmp_path / "wrong.c"
    source.write_text(
        f'#include "{SOFTGPU}/nvml_api.h"\n'
        "nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned long length) { return 0; }\n"
    )
    with pytest.raises(AssertionError, match="nvmlDeviceGetName"):
        test_signatures_are_the_real_ones(compiler, source)


# --- the lists of functions --------------------------------------------------------------------------------------


def declared(compiler: list[str], header: str, *defines: str) -> set[str]:
    """The functions that a real header declares."""
    ran = subprocess.run(
        [*compiler, "-E", "-P", *[f"-D{d}" for d in defines], f"-I{REAL}", "-x", "c", str(REAL / header)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    prefix = header.removesuffix(".h").removesuffix("da")  # cu, nvml
    text = re.sub(r"typedef[^;{]*;", "", ran.stdout)
    return set(re.findall(rf"\b({prefix}[A-Z]\w*)\s*\((?!\s*\*)", text))


def listed(names: Path) -> set[str]:
    return set(re.findall(r"^FUNCTION\((\w+)", names.read_text(), flags=re.M))


def exported(library: Path) -> set[str]:
    ran = subprocess.run(["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True)
    return {line.split()[-1] for line in ran.stdout.splitlines()}


@pytest.mark.parametrize(
    ("header", "names", "library", "defines", "least"),
    [
        ("cuda.h", CUDA_FUNCTIONS, "libcuda.so.1", ["__CUDA_API_VERSION_INTERNAL"], 500),
        ("nvml.h", NVML_FUNCTIONS, "libnvidia-ml.so.1", ["NVML_NO_UNVERSIONED_FUNC_DEFS"], 390),
    ],
)
def test_every_function_is_there_or_a_stub(libraries, compiler, header, names, library, defines, least):
    real = declared(compiler, header, *defines)
    assert len(real) >= least
    assert real - listed(names) - {"nvmlErrorString"} == set()  # which returns no result
    there = exported(SOFTGPU / library)
    assert real - there == set()
    prefix = header.removesuffix(".h").removesuffix("da")
    assert {name for name in there if not name.startswith(prefix)} == set(), "something else is exported"


def test_nothing_is_listed_that_is_not_real(compiler):
    """A newer driver's function must be missing: programs ask for it to see how new the driver is."""
    assert listed(NVML_FUNCTIONS) - declared(compiler, "nvml.h", "NVML_NO_UNVERSIONED_FUNC_DEFS") == set()
    real = declared(compiler, "cuda.h", "__CUDA_API_VERSION_INTERNAL")
    real |= declared(compiler, "cuda.h", "CUDA_API_PER_THREAD_DEFAULT_STREAM")  # …_ptds, …_ptsz
    profiler = {"cuProfilerInitialize", "cuProfilerStart", "cuProfilerStop"}  # of a header of its own, cudaProfiler.h
    assert listed(CUDA_FUNCTIONS) - real - profiler == set()


# --- what cuGetProcAddress finds, and by which version ---------------------------------------------------------------


def columns() -> list[tuple[str, str, str, str]]:
    """symbol, base name, version, suffix of the variant for per-thread streams; of every line of functions.list."""
    found = []
    for symbol, base, version, per_thread in LISTED.findall(CUDA_FUNCTIONS.read_text()):
        suffix = re.search(r"_pt[sd][sz]$", symbol)
        assert bool(suffix) == (per_thread == "1"), symbol
        found.append((symbol, base, version, suffix[0] if suffix else ""))
    return found


def test_versions_and_stream_variants_are_the_real_ones():
    """NVIDIA names a type for each answer that cuGetProcAddress has: PFN_cuMemcpy_v7000_ptds."""
    text = "".join((REAL / name).read_text() for name in ("cudaTypedefs.h", "cudaProfilerTypedefs.h"))
    real = re.findall(r"\*PFN_(cu\w+?)_v(\d+)(_pt[sd][sz])?\)", text)
    assert len(real) > 600
    assert sorted(real) == sorted((base, version, suffix) for _, base, version, suffix in columns())


def belongs(compiler: list[str], lines: list[tuple[str, str, str, str]]) -> subprocess.CompletedProcess[str]:
    """Compile: is each symbol of the type that its base name has in that version?"""
    text = ["#define __CUDA_API_VERSION_INTERNAL", "#include <cudaTypedefs.h>"]
    text += [
        f"PFN_{base}_v{version} its_{symbol} = {symbol};"
        for symbol, base, version, suffix in lines
        if not suffix and not symbol.startswith("cuProfiler")  # a header of its own that is not in the packages
    ]
    return subprocess.run(
        [*compiler, "-Werror", "-fsyntax-only", f"-I{REAL}", "-x", "c", "-"],
        input="\n".join(text),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_each_version_is_that_of_its_symbol(compiler):
    ran = belongs(compiler, columns())
    assert ran.returncode == 0, ran.stderr


def test_a_symbol_at_another_ones_version_is_noticed(compiler):
    assert belongs(compiler, [("cuMemAlloc", "cuMemAlloc", "3020", "")]).returncode != 0

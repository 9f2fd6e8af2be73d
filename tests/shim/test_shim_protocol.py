"""Both ends of the control socket say the same; what the shim declares of the driver is what NVIDIA's header says."""

from __future__ import annotations

import re
import subprocess
import sysconfig
from pathlib import Path

import pytest

from limosa.ipc.packet import Wrong
from limosa.native.build import SHIM, compilers
from limosa.parking import answers, protocol

HEADER = (SHIM / "protocol.h").read_text()
REAL = Path(sysconfig.get_paths()["purelib"]) / "nvidia" / "cu13" / "include"
TYPES = {"CUhandle": "CUmemGenericAllocationHandle"}
# What ours calls an enumerator that NVIDIA's header has under a longer name.
CONSTANTS = {
    "LOCATION_DEVICE": "CU_MEM_LOCATION_TYPE_DEVICE",
    "ALLOCATION_PINNED": "CU_MEM_ALLOCATION_TYPE_PINNED",
    "HANDLE_POSIX_FD": "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR",
    "ACCESS_NONE": "CU_MEM_ACCESS_FLAGS_PROT_NONE",
    "ACCESS_READ": "CU_MEM_ACCESS_FLAGS_PROT_READ",
    "ACCESS_READWRITE": "CU_MEM_ACCESS_FLAGS_PROT_READWRITE",
    "CAPTURE_MODE_RELAXED": "CU_STREAM_CAPTURE_MODE_RELAXED",
    "DEVICE_PCI_BUS": "CU_DEVICE_ATTRIBUTE_PCI_BUS_ID",
    "DEVICE_PCI_SLOT": "CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID",
    "DEVICE_PCI_DOMAIN": "CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID",
    "ATTRIBUTE_CONTEXT": "CU_POINTER_ATTRIBUTE_CONTEXT",
    "ATTRIBUTE_BUFFER": "CU_POINTER_ATTRIBUTE_BUFFER_ID",
    "ATTRIBUTE_BLOCK": "CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID",
    "ATTRIBUTE_IS_LEGACY_IPC": "CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE",
    "ATTRIBUTE_RANGE_START": "CU_POINTER_ATTRIBUTE_RANGE_START_ADDR",
    "ATTRIBUTE_RANGE_SIZE": "CU_POINTER_ATTRIBUTE_RANGE_SIZE",
    "ATTRIBUTE_HANDLE_TYPES": "CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES",
    "ATTRIBUTE_MAPPING_SIZE": "CU_POINTER_ATTRIBUTE_MAPPING_SIZE",
    "ATTRIBUTE_MAPPING_BASE": "CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR",
    "LIMIT_STACK": "CU_LIMIT_STACK_SIZE",
}
FIELDS = {
    "CUmemLocation": ["type", "id"],
    "CUmemAllocationProp": [
        *("type", "requestedHandleTypes", "location", "win32HandleMetaData", "allocFlags"),
        *("allocFlags.compressionType", "allocFlags.gpuDirectRDMACapable", "allocFlags.usage"),
    ],
    "CUmemAccessDesc": ["location", "flags"],
}


def enumerators(text: str) -> dict[str, int]:
    """Every enumerator in C, with its number."""
    found = {}
    for body in re.findall(r"enum(?: \w+)? \{(.*?)\}", re.sub(r"/\*.*?\*/", "", text, flags=re.S), flags=re.S):
        last = -1
        for entry in filter(None, map(str.strip, body.split(","))):
            name, _, value = entry.partition("=")
            if re.fullmatch(r"\s*\w+\s*", name):
                last = int(value, 0) if value else last + 1
                found[name.strip()] = last
    return found


def test_both_ends_have_the_same_numbers() -> None:
    numbers = enumerators(HEADER)
    assert {name: n for name, n in numbers.items() if name.startswith("VERB_")} == {
        f"VERB_{verb.name}": verb.value for verb in protocol.Verb
    }
    assert {name: n for name, n in numbers.items() if name.startswith("STATE_")} == {
        f"STATE_{stand.name}": stand.value for stand in protocol.Stand
    }
    records = {name: getattr(protocol, name.removeprefix("RECORD_")) for name in numbers if name.startswith("RECORD_")}
    assert records == {name: n for name, n in numbers.items() if name.startswith("RECORD_")}
    defined = dict(re.findall(r"#define PROTOCOL_(\w+) (\w+)", HEADER))
    assert {name: int(value.rstrip("u"), 0) for name, value in defined.items() if name != "H"} == {
        "MAGIC": protocol.MAGIC,
        "VERSION": protocol.VERSION,
        "MOST": protocol.MOST,
        "KEPT_MOST": protocol.KEPT_MOST,
        "PLACES_MOST": protocol.PLACES_MOST,
        "WORDS": protocol.WORDS,
        "STAND_IN": protocol.STAND_IN,
    }
    comms = {name: n for name, n in numbers.items() if name.startswith("COMM_")}
    assert comms == {name: getattr(protocol, name.removeprefix("COMM_")) for name in comms}
    kinds = enumerators((SHIM / "comms.h").read_text())
    assert {name: n for name, n in kinds.items() if name.startswith("COUNT_")} == {
        f"COUNT_{kind.name}": kind.value for kind in protocol.Kind
    }
    assert {name: n for name, n in kinds.items() if name.startswith("PHASE_")} == {
        f"PHASE_{gate.name}": gate.value for gate in protocol.CommGate
    }
    left = [name for name in enumerators((SHIM / "count.h").read_text()) if name.startswith("LEFT_")]
    assert [name.removeprefix("LEFT_").lower() for name in left] == [*protocol.COUNT_KINDS, "kinds"]
    roles = {name: n for name, n in enumerators((SHIM / "hooks.h").read_text()).items() if name.startswith("ROLE_")}
    assert roles == {f"ROLE_{role.name}": role.value for role in protocol.Role}


def test_both_ends_have_the_same_sizes(tmp_path: Path) -> None:
    source = tmp_path / "sizes.c"
    source.write_text(
        '#include "protocol.h"\n#include "count.h"\n#include <stdio.h>\n'
        '#include "comms.h"\n'
        'int main(void) { printf("%zu %zu %zu %zu %zu %zu %zu %zu %zu\\n", '
        "sizeof(struct message), sizeof(struct record), sizeof(struct counts), sizeof(struct gpu_place), "
        "sizeof(struct comm_record), sizeof(struct pair_record), "
        "sizeof(struct want), sizeof(struct limit_record), sizeof(struct join_record)); }\n"
    )
    subprocess.run([*compilers()[0], "-I", str(SHIM), "-o", str(tmp_path / "sizes"), str(source)], check=True)
    said = subprocess.run([str(tmp_path / "sizes")], capture_output=True, text=True, check=True).stdout.split()
    assert list(map(int, said)) == [
        *(protocol.MESSAGE.size, protocol.RECORD.size, protocol.COUNTS.size, protocol.PLACE.size),
        *(protocol.COMM.size, protocol.COUNTED.size, protocol.WANT.size, protocol.LIMIT.size, protocol.JOIN.size),
    ]


def prints(folder: Path, name: str, header: str, questions: dict[str, str], include: Path) -> dict[str, str]:
    lines = [f'printf("{title} %llu\\n", (unsigned long long)({asked}));' for title, asked in questions.items()]
    source = folder / f"{name}.c"
    source.write_text(
        f'#include <stddef.h>\n#include <stdio.h>\n#include "{header}"\n'
        f"int main(void) {{ {' '.join(lines)} return 0; }}\n"
    )
    subprocess.run(
        [*compilers()[0], "-w", "-I", str(include), "-o", str(folder / name), str(source)], check=True, timeout=60
    )
    ran = subprocess.run([str(folder / name)], capture_output=True, text=True, check=True, timeout=60)
    return dict(line.rsplit(" ", 1) for line in ran.stdout.splitlines())


def test_layouts_and_sizes_are_nvidias(tmp_path: Path) -> None:
    ours, real = {}, {}
    for name in ["CUresult", "CUdevice", "CUdeviceptr", "CUcontext", "CUhandle", *FIELDS]:
        ours[f"sizeof {name}"], real[f"sizeof {name}"] = f"sizeof({name})", f"sizeof({TYPES.get(name, name)})"
    for name, fields in FIELDS.items():
        for field in fields:
            title = f"{name}.{field}"
            ours[title] = real[title] = f"offsetof({name}, {field})*1000 + sizeof((({name} *)0)->{field})"
    assert prints(tmp_path, "ours", "driver_api.h", ours, SHIM) == prints(tmp_path, "real", "cuda.h", real, REAL)


def test_constants_are_nvidias(tmp_path: Path) -> None:
    ours = enumerators((SHIM / "driver_api.h").read_text())
    ours = {name: n for name, n in ours.items() if not name.startswith(("F(", "REAL", "DRIVER", "#"))}
    plain = (SHIM / "plain.c").read_text()
    ours |= {name: n for name, n in enumerators(plain).items() if name.startswith("ATTRIBUTE_")}
    for source in (SHIM / "still.c",):
        ours |= {
            name: int(n) for name, n in re.findall(r"#define (\w+) (\d+)\b", source.read_text()) if name in CONSTANTS
        }
    assert {"CUDA_ERROR_OUT_OF_MEMORY", *CONSTANTS} <= set(ours)
    real = prints(tmp_path, "real", "cuda.h", {name: CONSTANTS.get(name, name) for name in ours}, REAL)
    assert {name: str(n) for name, n in ours.items()} == real


def test_every_function_that_the_shim_calls_takes_as_many_arguments_as_nvidias(tmp_path: Path) -> None:
    listed = re.findall(r"F\((cu\w+),\s*\(([^)]*)\)\)", (SHIM / "driver_api.h").read_text().replace("\\\n", " "))
    assert len(listed) > 30
    lines = ["#define __CUDA_API_VERSION_INTERNAL", '#include "cuda.h"']
    for name, arguments in listed:
        mine = [] if arguments.strip() == "void" else [one.strip() for one in arguments.split(",")]
        lines.append(f"int use_{name}(void) {{ return {name}({', '.join('0' * len(mine))}); }}")
    source = tmp_path / "calls.c"
    source.write_text("\n".join(lines))
    ran = subprocess.run(
        [*compilers()[0], "-w", "-fsyntax-only", "-I", str(REAL), str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr


def test_what_a_program_has_imported_and_not_mapped_yet_has_no_size() -> None:
    """NCCL does so while it makes a communicator. Of any other piece no size is a lie."""
    (found,) = answers.memories(protocol.RECORD.pack(7, 0, 0, 0, 1, protocol.SHARED, 0, 0), 1)
    assert (found.id, found.bytes, found.shared) == (7, 0, True)
    with pytest.raises(Wrong):
        list(answers.memories(protocol.RECORD.pack(7, 0, 0, 0, 1, 0, 0, 0), 1))

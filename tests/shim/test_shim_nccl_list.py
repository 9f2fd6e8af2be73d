"""The shim's list of NCCL's functions, held against what libraries export and what frameworks call.

A function that it does not have would be given the application's handle, behind which there is no communicator.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from soft_node import Node
from softgpu.far import Far

from limosa.native.build import SHIM
from limosa_softgpu.build import SOFTGPU

LISTED = re.compile(r"^NCCL\((\w+), (\w+), (-?\d+), -?\d+\)$", re.M)
TESTS = Path(__file__).parents[1] / "softgpu"

# All names are without "nccl".
EXPORTED_BY_2_28_9 = """
    AllGather AllReduce AlltoAll Bcast Broadcast CommAbort CommCount CommCuDevice CommDeregister CommDestroy
    CommFinalize CommGetAsyncError CommInitAll CommInitRank CommInitRankConfig CommInitRankScalable CommRegister
    CommRevoke CommShrink CommSplit CommUserRank CommWindowDeregister CommWindowRegister DevCommCreate
    DevCommDestroy Gather GetErrorString GetLastError GetUniqueId GetVersion GinBarrierCreateRequirement GroupEnd
    GroupSimulateEnd GroupStart LLA2ACalcSlots LLA2ACreateRequirement LsaBarrierCreateRequirement MemAlloc MemFree
    Recv RedOpCreatePreMulSum RedOpDestroy Reduce ReduceScatter ResetDebugInit ResetDebugInitInternal Scatter Send
    TeamLsa TeamRail TeamRankToLsa TeamRankToWorld TeamWorld
"""
NEW_IN_2_32_3 = """
    AllGatherConfig AllReduceConfig AlltoAllConfig BroadcastConfig CommGetUniqueId CommGrow CommMemStats
    CommQueryProperties CommResume CommSuspend GatherConfig GetCftDeviceLeInfo GetLsaDevicePointer
    GetLsaMultimemDevicePointer GetMultimemDeviceLeInfo GetMultimemDevicePointer GetPeerDeviceLeInfo
    GetPeerDevicePointer GinInboxA2ACreateRequirement GinOutboxCreateRequirement ParamBind ParamDumpAll ParamGet
    ParamGetAllParameterKeys ParamGetI16 ParamGetI32 ParamGetI64 ParamGetI8 ParamGetParameter ParamGetStr
    ParamGetU16 ParamGetU32 ParamGetU64 ParamGetU8 PutSignal ReduceConfig ReduceScatterConfig ScatterConfig
    SetEncryption Signal TeamCft TeamCftMultimem WaitSignal WinGetUserPtr
"""
FRAMEWORKS = {
    "PyTorch 2.11": """
    AllGather AllReduce AlltoAll Bcast Broadcast Reduce ReduceScatter Send Recv GroupStart GroupEnd GroupSimulateEnd
    CommInitAll CommInitRank CommInitRankConfig CommInitRankScalable CommSplit CommShrink CommDestroy CommAbort
    CommFinalize CommCount CommUserRank CommGetAsyncError CommRegister CommDeregister CommWindowRegister
    CommWindowDeregister DevCommCreate DevCommDestroy MemAlloc MemFree RedOpCreatePreMulSum RedOpDestroy GetUniqueId
    GetVersion GetErrorString GetLastError
    """,
    "XLA": """
    AllGather AllGatherConfig AllReduce AllReduceConfig AlltoAll AlltoAllConfig Bcast Broadcast BroadcastConfig
    CommAbort CommCount CommCuDevice CommDeregister CommDestroy CommFinalize CommGetAsyncError CommInitAll
    CommInitRank CommInitRankConfig CommInitRankScalable CommQueryProperties CommRegister CommShrink CommSplit
    CommUserRank CommWindowDeregister CommWindowRegister DevCommCreate DevCommDestroy GetErrorString GetLastError
    GetLsaDevicePointer GetLsaMultimemDevicePointer GetPeerDevicePointer GetUniqueId GetVersion GroupEnd
    GroupSimulateEnd GroupStart MemAlloc MemFree PutSignal Recv RedOpCreatePreMulSum RedOpDestroy Reduce
    ReduceScatter ReduceScatterConfig ResetDebugInit Send Signal WaitSignal
    """,
    "CuPy": """
    AllGather AllReduce Bcast Broadcast CommAbort CommCount CommCuDevice CommDestroy CommGetAsyncError CommInitAll
    CommInitRank CommUserRank GetErrorString GetUniqueId GetVersion GroupEnd GroupStart Recv Reduce ReduceScatter
    Send
    """,
}
NO_NCCL_HAS = {"ncclSoftgpuConfig"}
"""The software GPU's own, which stands for a function that is newer than the list."""
# By nccl.h and nccl_device.h of 2.32.3: which argument is a communicator of the host's.
COMMUNICATOR_AT = {
    0: """
        CommAbort CommCount CommCuDevice CommDeregister CommDestroy CommFinalize CommGetAsyncError
        CommGetUniqueId CommGrow CommMemStats CommQueryProperties CommRegister CommResume CommRevoke CommShrink
        CommSplit CommSuspend CommUserRank CommWindowDeregister CommWindowRegister DevCommCreate DevCommDestroy
        GetLastError GinBarrierCreateRequirement TeamCft TeamCftMultimem TeamLsa TeamRail TeamRankToLsa
        TeamRankToWorld TeamWorld WinGetUserPtr
    """,
    1: """
        RedOpDestroy
    """,
    2: """
        WaitSignal
    """,
    4: """
        AllGather AllGatherConfig AlltoAll AlltoAllConfig Bcast Recv RedOpCreatePreMulSum Send Signal
    """,
    5: """
        AllReduce AllReduceConfig Broadcast BroadcastConfig Gather GatherConfig ReduceScatter
        ReduceScatterConfig Scatter ScatterConfig
    """,
    6: """
        Reduce ReduceConfig
    """,
    9: """
        PutSignal
    """,
}


def listed() -> dict[str, tuple[str, int]]:
    """What the shim does with each function, and which argument is the communicator."""
    text = (SHIM.parent / "nccl" / "functions.list").read_text()
    found = {name: (what, int(comm)) for name, what, comm in LISTED.findall(text)}
    assert len(found) == text.count("\nNCCL("), "each line is understood, and no name is there twice"
    return found


def words(text: str) -> list[str]:
    return [f"nccl{word}" for word in text.split()]


def installed() -> Iterator[Path]:
    """Each libnccl.so.2 here: the software GPU's, and those of wheels."""
    yield SOFTGPU / "libnccl.so.2"
    for folder in filter(None, [*sys.path, *os.environ.get("LD_LIBRARY_PATH", "").split(":")]):
        for name in ("libnccl.so.2", "nvidia/nccl/lib/libnccl.so.2"):
            if (Path(folder) / name).is_file():
                yield Path(folder) / name


def test_it_has_what_released_libraries_export() -> None:
    exported = {*words(EXPORTED_BY_2_28_9), *words(NEW_IN_2_32_3)}
    assert exported - listed().keys() == set()
    assert listed().keys() - exported == set(), (
        "a name that no library has: misspelt, or the names here are to be renewed"
    )


def test_it_has_what_installed_libraries_export() -> None:
    for path in dict.fromkeys(installed()):
        said = subprocess.run(["nm", "-D", "--defined-only", path], capture_output=True, text=True, check=True).stdout
        there = {line.split()[-1].partition("@")[0] for line in said.splitlines()}
        functions = {name for name in there if re.match("nccl[A-Z]", name)} - NO_NCCL_HAS
        assert functions, path
        assert functions - listed().keys() == set(), path


def test_it_has_what_the_software_gpu_is_listed_with() -> None:
    soft = set(re.findall(r"FUNCTION\((\w+)\)", (SOFTGPU / "nccl_functions.list").read_text()))
    assert soft - listed().keys() == NO_NCCL_HAS


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_it_has_what_frameworks_call(framework: str) -> None:
    known = listed()
    assert set(words(FRAMEWORKS[framework])) - known.keys() == set()


def test_a_communicator_is_found_where_it_is() -> None:
    """Of a function that only passes NCCL would be given the application's handle."""
    known = listed()
    for place, names in COMMUNICATOR_AT.items():
        assert {name: known[name][1] for name in words(names)} == dict.fromkeys(words(names), place)
        assert [name for name in words(names) if known[name][0] == "PASS"] == []
    handed = {name for names in COMMUNICATOR_AT.values() for name in words(names)}
    assert {name for name, (_, place) in known.items() if place >= 0} - handed == set()


def test_a_result_of_three_numbers_comes_whole(new_node: Callable[..., Node], library: Path) -> None:
    """A team comes in two registers; and it is the real communicator that is asked."""
    node = new_node(memory="128MiB")
    far = Far(node, env={"LD_PRELOAD": str(library)})
    far(f"import sys; sys.path.insert(0, {str(TESTS)!r})")
    far("import nccl as N; N.device(0)")
    assert far("N.team(N.init(1, N.unique_id(), 0))") == [1, 0, 1]
    assert far("N.team(12345)") == [0, 0, 0]

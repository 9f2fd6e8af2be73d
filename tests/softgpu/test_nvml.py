"""libnvidia-ml.so.1 of the software GPU, asked through nvidia-ml-py in processes of a node."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# Runs what follows with NVML initialised; `tell` prints a value, `error` the name of an NVML error.
HEAD = """
import ctypes, json, sys
import pynvml as n
NAMES = {v: k for k, v in vars(n).items() if k.startswith("NVML_ERROR_")} | {0: "ok"}
def tell(value): print(json.dumps(value, default=lambda v: v.decode()))
def error(ask, *arguments, **options):
    try: ask(*arguments, **options)
    except n.NVMLError as e: return NAMES[e.value]
    return "ok"
"""
INIT = HEAD + "n.nvmlInit()\n"

# Takes memory: arguments are GPU and MiB; says its pid, then waits for a line.
HOLDER = """
import ctypes, sys, os
cuda = ctypes.CDLL("libcuda.so.1")
def ok(result): assert result == 0, result
device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
ok(cuda.cuInit(0))
ok(cuda.cuDeviceGet(ctypes.byref(device), int(sys.argv[1])))
ok(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
ok(cuda.cuCtxSetCurrent(context))
if int(sys.argv[2]): ok(cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(int(sys.argv[2]) << 20)))
print(os.getpid(), flush=True)
sys.stdin.readline()
"""
MIB = 1 << 20
CONTEXT = 8  # MiB that a context takes on a node with no --like
IDLE = 4


def ask(node, code, *arguments, init=True, **options):
    return json.loads(node.python((INIT if init else HEAD) + code, *arguments, **options).stdout)


def hold(node, gpu, mib):
    """Starts a process that holds memory on a GPU; returns it."""
    process = node.popen(
        [sys.executable, "-c", HOLDER, gpu, mib], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert int(process.stdout.readline()) == process.pid
    return process


def release(process):
    process.stdin.write("\n")
    process.stdin.close()
    assert process.wait(60) == 0


def listed(node, gpu, ask_for="nvmlDeviceGetComputeRunningProcesses"):
    code = f"h = n.nvmlDeviceGetHandleByIndex({gpu})\ntell([[p.pid, p.usedGpuMemory] for p in n.{ask_for}(h)])"
    return dict(ask(node, code))


def memory(node, gpu, version="None"):
    code = f"m = n.nvmlDeviceGetMemoryInfo(n.nvmlDeviceGetHandleByIndex({gpu}), {version})\n"
    return ask(node, code + "tell([m.total, m.used, m.free])")


# --- the system ----------------------------------------------------------------------------------------------


def test_versions(new_node):
    node = new_node(driver="570.133.20")
    assert ask(node, "tell([n.nvmlSystemGetDriverVersion(), n.nvmlSystemGetCudaDriverVersion_v2()])") == [
        "570.133.20",
        12080,
    ]
    assert ask(node, "tell(n.nvmlSystemGetNVMLVersion())") == "12.570.133.20"


def test_it_must_be_initialised_as_often_as_it_is_shut_down(node):
    code = (
        "out = []\n"
        "n._LoadNvmlLibrary()\n"
        "out.append(error(n.nvmlDeviceGetCount)); n.nvmlInit(); n.nvmlInit(); n.nvmlShutdown()\n"
        "out.append(error(n.nvmlDeviceGetCount)); n.nvmlShutdown(); out.append(error(n.nvmlDeviceGetCount))\n"
        "out.append(error(n.nvmlShutdown)); tell(out)"
    )
    found = ask(node, code, init=False)
    assert found == ["NVML_ERROR_UNINITIALIZED", "ok", "NVML_ERROR_UNINITIALIZED", "NVML_ERROR_UNINITIALIZED"]


def test_without_a_node_there_is_no_driver(libraries):
    """The library itself, loaded outside of a node."""
    from limosa_softgpu.node import environment

    code = HEAD + "tell([error(n.nvmlInit)])"
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60, check=True
    )
    assert json.loads(ran.stdout) == ["NVML_ERROR_DRIVER_NOT_LOADED"]


def test_every_error_has_words(node):
    words = ask(node, "tell({k: str(n.NVMLError(v)) for v, k in NAMES.items() if v})")
    real = ask(node, "tell([n.nvmlErrorString(v) for v in (0, 1, 10, 15, 999, 12345)])")
    assert real == ["Success", "Uninitialized", "Timeout", "GPU is lost", "Unknown Error", "Unknown Error"]
    assert all(text for text in words.values())


def test_a_process_has_a_name(node):
    assert ask(node, "import os; tell(n.nvmlSystemGetProcessName(os.getpid()))") == sys.executable
    assert ask(node, "tell(error(n.nvmlSystemGetProcessName, 2 ** 22 + 1))") == "NVML_ERROR_NOT_FOUND"


# --- which GPU -----------------------------------------------------------------------------------------------


def test_a_gpu_by_index_uuid_and_bus_id(new_node):
    node = new_node(gpus=4)
    code = """
out = []
for i in range(n.nvmlDeviceGetCount()):
    h = n.nvmlDeviceGetHandleByIndex(i)
    uuid, bus = n.nvmlDeviceGetUUID(h), n.nvmlDeviceGetPciInfo(h).busId
    again = [n.nvmlDeviceGetHandleByUUID(uuid), n.nvmlDeviceGetHandleByPciBusId(bus),
             n.nvmlDeviceGetHandleByPciBusId(bus[4:]), n.nvmlDeviceGetHandleByPciBusId(bus.lower()[9:])]
    out.append([i, [n.nvmlDeviceGetIndex(a) for a in again], uuid, bus, n.nvmlDeviceGetMinorNumber(h)])
tell(out)
"""
    found = ask(node, code)
    assert [row[0] for row in found] == [0, 1, 2, 3]
    for index, again, uuid, bus, minor in found:
        assert again == [index] * 4
        assert minor == index
        assert uuid.startswith("GPU-")
        assert len(uuid) == 40
        assert bus == f"00000000:0{index + 1}:00.0"
    assert len({row[2] for row in found}) == 4


def test_gpus_that_are_not_there(node):
    code = """
tell([error(n.nvmlDeviceGetHandleByIndex, 2), error(n.nvmlDeviceGetHandleByUUID, "GPU-" + "0" * 36),
      error(n.nvmlDeviceGetHandleByUUID, ""), error(n.nvmlDeviceGetHandleByPciBusId, "0000:77:00.0"),
      error(n.nvmlDeviceGetHandleByPciBusId, "nonsense")])
"""
    assert ask(node, code) == [
        "NVML_ERROR_INVALID_ARGUMENT",
        "NVML_ERROR_NOT_FOUND",
        "NVML_ERROR_NOT_FOUND",
        "NVML_ERROR_NOT_FOUND",
        "NVML_ERROR_INVALID_ARGUMENT",
    ]


def test_gpus_whose_nodes_cannot_be_opened_are_on_no_list(new_node):
    """As in a container: what is left is numbered anew."""
    node = new_node(gpus=3)
    code = """
hs = [n.nvmlDeviceGetHandleByIndex(i) for i in range(n.nvmlDeviceGetCount())]
tell([[[n.nvmlDeviceGetIndex(h), n.nvmlDeviceGetMinorNumber(h), n.nvmlDeviceGetPciInfo(h).busId[9:]] for h in hs],
      error(n.nvmlDeviceGetHandleByIndex, 2), error(n.nvmlDeviceGetHandleByPciBusId, "01:00.0")])
"""
    argv = ["unshare", "--mount", "sh", "-ec", 'mount --bind /dev/null /dev/nvidia0; exec "$0" "$@"']
    found = json.loads(node.run([*argv, sys.executable, "-c", INIT + code]).stdout)
    left = [[0, 1, "02:00.0"], [1, 2, "03:00.0"]]
    assert found == [left, "NVML_ERROR_INVALID_ARGUMENT", "NVML_ERROR_NOT_FOUND"]
    node.run(["chmod", "600", "/dev/nvidia0"])
    assert ask(node, "import os; os.setuid(65534)\n" + code)[0] == left


def test_pci_info(node):
    code = "p = n.nvmlDeviceGetPciInfo(n.nvmlDeviceGetHandleByIndex(1))\n"
    code += "tell([p.domain, p.bus, p.device, p.busId, p.busIdLegacy])"
    assert ask(node, code) == [
        0,
        2,
        0,
        "00000000:02:00.0",
        "0000:02:00.0",
    ]


def test_a_buffer_that_is_too_short(node):
    code = """
lib = ctypes.CDLL("libnvidia-ml.so.1")
h = n.nvmlDeviceGetHandleByIndex(0)
out = []
for ask, text in ((lib.nvmlDeviceGetUUID, "x" * 40), (lib.nvmlDeviceGetName, "Soft GPU H200")):
    for room in (len(text), len(text) + 1):
        out.append(NAMES[ask(h, ctypes.create_string_buffer(room), ctypes.c_uint(room))])
tell(out + [NAMES[lib.nvmlDeviceGetName(h, None, 9)], NAMES[lib.nvmlDeviceGetName(ctypes.c_void_p(77), None, 9)]])
"""
    assert ask(node, code) == ["NVML_ERROR_INSUFFICIENT_SIZE", "ok"] * 2 + ["NVML_ERROR_INVALID_ARGUMENT"] * 2


# --- what it is like -----------------------------------------------------------------------------------------


def test_names_and_compute_capabilities(new_node):
    node = new_node(gpus=4, chip=["H200", "A100", "T4", "B200"])
    code = """
hs = [n.nvmlDeviceGetHandleByIndex(i) for i in range(4)]
tell([[n.nvmlDeviceGetName(h), list(n.nvmlDeviceGetCudaComputeCapability(h)), error(n.nvmlDeviceGetMigMode, h)]
      for h in hs])
"""
    assert ask(node, code) == [
        ["Soft GPU H200", [9, 0], "ok"],
        ["Soft GPU A100", [8, 0], "ok"],
        ["Soft GPU T4", [7, 5], "NVML_ERROR_NOT_SUPPORTED"],
        ["Soft GPU B200", [10, 0], "ok"],
    ]


MODES = """
h = n.nvmlDeviceGetHandleByIndex(0)
tell([n.nvmlDeviceGetMigMode(h)[0], n.nvmlDeviceGetPersistenceMode(h), n.nvmlDeviceGetComputeMode(h)])
"""


def test_modes_are_what_the_node_was_told(node):
    assert ask(node, MODES) == [0, 1, 0]
    node.switches.mig(0)
    node.switches.persistence(0, False)
    node.switches.compute_mode(0, "exclusive_process")
    assert ask(node, MODES) == [1, 0, 3]
    node.switches.mig(0, False)
    gpu = node.limosa("gpus", "-o", "json").json["gpus"][0]
    assert (gpu["mig"], gpu["persistence"], gpu["compute_mode"]) == (False, False, "exclusive_process")


def test_modes_can_be_set_by_root_alone(node):
    code = """
import os
h = n.nvmlDeviceGetHandleByIndex(0)
n.nvmlDeviceSetPersistenceMode(h, 0); n.nvmlDeviceSetComputeMode(h, 2); n.nvmlDeviceSetMigMode(h, 1)
out = [n.nvmlDeviceGetMigMode(h)[0], n.nvmlDeviceGetPersistenceMode(h), n.nvmlDeviceGetComputeMode(h)]
out.append(error(n.nvmlDeviceSetComputeMode, h, 1)); out.append(error(n.nvmlDeviceSetComputeMode, h, 9))
os.setuid(65534)
out.append(error(n.nvmlDeviceSetPersistenceMode, h, 1))
tell(out)
"""
    assert ask(node, code) == [
        1,
        0,
        2,
        "NVML_ERROR_NOT_SUPPORTED",
        "NVML_ERROR_INVALID_ARGUMENT",
        "NVML_ERROR_NO_PERMISSION",
    ]


# --- memory and processes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["None", "n.nvmlMemory_v2"])
def test_memory(new_node, version):
    node = new_node(memory=["64MiB", "128MiB"])
    assert memory(node, 0, version) == [64 * MIB, IDLE * MIB, 60 * MIB]
    assert memory(node, 1, version) == [128 * MIB, IDLE * MIB, 124 * MIB]
    with node.switches.fill(1, leave=10 * MIB):
        assert memory(node, 1, version) == [128 * MIB, 118 * MIB, 10 * MIB]
        assert memory(node, 0, version) == [64 * MIB, IDLE * MIB, 60 * MIB]
    assert memory(node, 1, version) == [128 * MIB, IDLE * MIB, 124 * MIB]


def test_memory_of_a_version_that_there_is_not(node):
    code = """
lib = ctypes.CDLL("libnvidia-ml.so.1")
m = n.c_nvmlMemory_v2_t(); m.version = 7
tell(NAMES[lib.nvmlDeviceGetMemoryInfo_v2(n.nvmlDeviceGetHandleByIndex(0), ctypes.byref(m))])
"""
    assert ask(node, code) == "NVML_ERROR_ARGUMENT_VERSION_MISMATCH"


def test_processes_and_their_bytes(node):
    assert listed(node, 0) == {}
    first, second, third = hold(node, 0, 10), hold(node, 0, 3), hold(node, 1, 0)
    assert listed(node, 0) == {first.pid: (CONTEXT + 10) * MIB, second.pid: (CONTEXT + 4) * MIB}
    assert listed(node, 1) == {third.pid: CONTEXT * MIB}
    assert memory(node, 0)[1] == (IDLE + 2 * CONTEXT + 14) * MIB
    release(first)
    assert listed(node, 0) == {second.pid: (CONTEXT + 4) * MIB}
    second.kill()
    second.wait(60)
    assert listed(node, 0) == {}
    assert memory(node, 0)[1] == IDLE * MIB
    release(third)
    assert memory(node, 1)[1] == IDLE * MIB
    assert node.blocks() == []


def test_no_process_is_a_graphics_process(node):
    hold(node, 0, 2)
    assert listed(node, 0, "nvmlDeviceGetGraphicsRunningProcesses") == {}


def test_every_version_of_the_list(node):
    job = hold(node, 0, 2)
    code = """
lib = ctypes.CDLL("libnvidia-ml.so.1")
h = n.nvmlDeviceGetHandleByIndex(0)
class First(ctypes.Structure): _fields_ = [("pid", ctypes.c_uint), ("bytes", ctypes.c_ulonglong)]
class Second(ctypes.Structure):
    _fields_ = [*First._fields_, ("gi", ctypes.c_uint), ("ci", ctypes.c_uint)]
out = []
for name, kind in (("", First), ("_v2", Second), ("_v3", Second)):
    ask = lib["nvmlDeviceGetComputeRunningProcesses" + name]
    count, room = ctypes.c_uint(0), (kind * 3)()
    row = [NAMES[ask(h, ctypes.byref(count), None)], count.value]
    count.value = 3
    row += [NAMES[ask(h, ctypes.byref(count), room)], count.value, [getattr(room[0], f[0]) for f in kind._fields_]]
    row.append(NAMES[ask(h, ctypes.byref(ctypes.c_uint(3)), None)])
    out.append(row)
tell(out)
"""
    entry = [job.pid, (CONTEXT + 2) * MIB]
    whole = [*entry, 0xFFFFFFFF, 0xFFFFFFFF]
    size, argument = "NVML_ERROR_INSUFFICIENT_SIZE", "NVML_ERROR_INVALID_ARGUMENT"
    assert ask(node, code) == [
        [size, 1, "ok", 1, entry, argument],
        [size, 1, "ok", 1, whole, argument],
        [size, 1, "ok", 1, whole, argument],
    ]


def test_many_processes(new_node):
    """More than the library's first guess."""
    node = new_node(gpus=1, memory="512MiB")
    jobs = [hold(node, 0, 0) for _ in range(20)]
    assert listed(node, 0) == {job.pid: CONTEXT * MIB for job in jobs}


def test_clients_of_mps(node):
    job = hold(node, 0, 2)
    node.switches.mps()
    assert listed(node, 0) == {}
    assert listed(node, 0, "nvmlDeviceGetMPSComputeRunningProcesses") == {job.pid: (CONTEXT + 2) * MIB}
    node.switches.mps(False)
    assert listed(node, 0) == {job.pid: (CONTEXT + 2) * MIB}
    assert listed(node, 0, "nvmlDeviceGetMPSComputeRunningProcesses") == {}


CHECKPOINT = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
assert cuda.cuInit(0) == 0
zeros = ctypes.create_string_buffer(256)
for verb in sys.argv[2:]:
    result = cuda["cuCheckpointProcess" + verb](int(sys.argv[1]), zeros)
    assert result == 0, (verb, result)
"""


def test_a_checkpointed_process_is_on_no_list(node):
    job = hold(node, 0, 10)
    node.python(CHECKPOINT, job.pid, "Lock")
    assert listed(node, 0) == {job.pid: (CONTEXT + 10) * MIB}
    node.python(CHECKPOINT, job.pid, "Checkpoint")
    assert listed(node, 0) == {}
    assert memory(node, 0)[1] == IDLE * MIB  # really free for others
    node.python(CHECKPOINT, job.pid, "Restore", "Unlock")
    assert listed(node, 0) == {job.pid: (CONTEXT + 10) * MIB}
    release(job)


# --- what goes wrong -----------------------------------------------------------------------------------------


def test_a_gpu_that_fell_off_the_bus(node):
    code = """
h = n.nvmlDeviceGetHandleByIndex(1)
print("up", flush=True); sys.stdin.readline()
tell([error(f, h) for f in (n.nvmlDeviceGetUUID, n.nvmlDeviceGetMemoryInfo, n.nvmlDeviceGetComputeRunningProcesses)]
     + [error(n.nvmlDeviceGetHandleByIndex, 1), error(n.nvmlDeviceGetHandleByIndex, 0), n.nvmlDeviceGetCount()])
"""
    process = node.popen([sys.executable, "-c", INIT + code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "up\n"
    node.switches.lose(1)
    out, _ = process.communicate("\n", timeout=60)
    assert json.loads(out) == ["NVML_ERROR_GPU_IS_LOST"] * 4 + ["ok", 2]
    node.switches.lose(1, False)
    assert memory(node, 1)[0] == 64 * MIB


def test_what_is_not_implemented_says_so(node):
    code = """
h = n.nvmlDeviceGetHandleByIndex(0)
tell([error(n.nvmlDeviceGetUtilizationRates, h), error(n.nvmlDeviceGetPowerUsage, h),
      error(n.nvmlDeviceGetUtilizationRates, h)])
"""
    assert ask(node, code) == ["NVML_ERROR_NOT_SUPPORTED"] * 3
    noted = [line for line in node.log() if "nvmlDeviceGetUtilizationRates is not implemented" in line]
    assert len(noted) == 1
    assert any("nvmlDeviceGetPowerUsage is not implemented" in line for line in node.log())


def test_rules(node):
    """A result instead of the work, one after it, a delay; by function, for one call and for every one."""
    node.switches.add("function=nvmlDeviceGetName result=NVML_ERROR_TIMEOUT")
    code = "h = n.nvmlDeviceGetHandleByIndex(0)\ntell([error(n.nvmlDeviceGetName, h), error(n.nvmlDeviceGetName, h)])"
    assert ask(node, code) == ["NVML_ERROR_TIMEOUT", "ok"]
    node.switches.clear()
    rule = node.switches.add("function=nvmlDeviceGet* after=NVML_ERROR_UNKNOWN every=1")
    assert (
        ask(node, "tell([error(n.nvmlDeviceGetHandleByIndex, 0), error(n.nvmlDeviceGetCount)])")
        == ["NVML_ERROR_UNKNOWN"] * 2
    )
    node.switches.remove(rule)
    node.switches.add("function=nvmlSystemGetDriverVersion delay=0.3")
    code = "import time; a = time.monotonic(); n.nvmlSystemGetDriverVersion(); tell(time.monotonic() - a)"
    assert ask(node, code) >= 0.3
    assert any("nvmlDeviceGetName" in line for line in node.log())


def test_lies(node):
    job = hold(node, 0, 2)
    node.switches.add("function=nvmlDeviceGetMemoryInfo* lie=free:12345 every=1")
    node.switches.add("function=nvmlDeviceGetComputeRunningProcesses* lie=processes:none every=1")
    node.switches.add("function=nvmlDeviceGetName lie=name:NVIDIA-H200 every=1")
    assert memory(node, 0)[2] == 12345
    assert listed(node, 0) == {}
    assert ask(node, "tell(n.nvmlDeviceGetName(n.nvmlDeviceGetHandleByIndex(0)))") == "NVIDIA-H200"
    node.switches.clear()
    assert memory(node, 0)[2] == (64 - IDLE - CONTEXT - 2) * MIB
    assert listed(node, 0) == {job.pid: (CONTEXT + 2) * MIB}


@pytest.mark.parametrize(
    ("ask_for", "lie", "told", "truth"),
    [
        ("n.nvmlDeviceGetCount()", "nvmlDeviceGetCount lie=count:7", 7, 2),
        ("n.nvmlDeviceGetUUID(h)[:9]", "nvmlDeviceGetUUID lie=uuid:GPU-00000000", "GPU-00000", None),
        ("n.nvmlDeviceGetMinorNumber(h)", "nvmlDeviceGetMinorNumber lie=minor:5", 5, 0),
        ("n.nvmlDeviceGetMigMode(h)", "nvmlDeviceGetMigMode lie=mig:on", [1, 1], [0, 0]),
        ("n.nvmlDeviceGetPersistenceMode(h)", "nvmlDeviceGetPersistenceMode lie=persistence:off", 0, 1),
        ("n.nvmlSystemGetDriverVersion()", "nvmlSystemGetDriverVersion lie=driver:470.1", "470.1", "580.159.04"),
        ("n.nvmlSystemGetCudaDriverVersion_v2()", "nvmlSystemGetCudaDriverVersion lie=cuda:11040", 11040, 13000),
        ("n.nvmlDeviceGetMemoryInfo(h).total", "nvmlDeviceGetMemoryInfo lie=total:9", 9, 64 * MIB),
    ],
)
def test_everything_that_it_can_lie_about(node, ask_for, lie, told, truth):
    code = f"h = n.nvmlDeviceGetHandleByIndex(0)\nfirst = {ask_for}\ntell([first, {ask_for}])"
    node.switches.add(f"function={lie}")
    first, then = ask(node, code)
    assert first == told
    assert then == truth if truth is not None else then != told


def test_limosa_hears_the_lies(node):
    """What looks after jobs believes NVML: a lie reaches it, and is one that it can be tested with."""
    node.switches.add("function=nvmlDeviceGetCount every=1 lie=count:1")
    node.switches.add("function=nvmlSystemGetDriverVersion every=1 lie=driver:535.1")
    found = node.limosa("gpus", "-o", "json").json
    assert (len(found["gpus"]), found["driver_version"]) == (1, "535.1")


def test_a_call_that_hangs_until_its_rule_is_gone(node):
    rule = node.switches.add("function=nvmlDeviceGetCount_v2 hang")
    process = node.popen(
        [sys.executable, "-c", INIT + "print('up', flush=True); tell(n.nvmlDeviceGetCount())"], stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"up\n"
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.3)
    node.switches.remove(rule)
    assert process.communicate(timeout=60)[0] == b"2\n"


def test_rules_from_the_command_line(libraries):
    code = INIT + "tell(error(n.nvmlDeviceGetCount))"
    rules = ["--fault", "function=nvmlDeviceGetCount_v2 result=15", "--fault", "function=nvmlInit* delay=0"]
    ran = subprocess.run(
        [sys.executable, "-m", "limosa", "softgpu", *rules, "--", sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert json.loads(ran.stdout) == "NVML_ERROR_GPU_IS_LOST"

"""GPUs as records: named in every way, read from NVML's answers, "not available" typed."""

from __future__ import annotations

import ctypes
import os
import signal
from types import SimpleNamespace

import msgspec
import pynvml
import pytest
from recorded import MIB, TWO, gpu, machine

from limosa.errors import DriverTooOld, GpuUnavailable, InvalidMap, SymbolMissing, UnknownGpu
from limosa.gpu import nvml
from limosa.gpu.gpus import Gpu, GpuProcess, Inventory, find_gpu, parse_map
from limosa.gpu.names import uuid_bytes

SECOND = TWO.gpus[1]


@pytest.mark.parametrize(
    "spec",
    [
        1,
        "1",
        SECOND.uuid,
        SECOND.uuid[4:],
        SECOND.uuid.upper(),
        SECOND.uuid[:12],
        "00000000:10:00.0",
        "10:00.0",
        SECOND,
        SimpleNamespace(uuid=SECOND.uuid[4:]),
        SimpleNamespace(bytes=uuid_bytes(SECOND.uuid)),
    ],
)
def test_a_gpu_is_found_by_every_kind_of_name(spec: object):
    assert find_gpu(TWO, spec) == SECOND


def test_a_gpu_is_found_by_the_bindings_own_uuid():
    from cuda.bindings import driver

    buffer = ctypes.create_string_buffer(uuid_bytes(SECOND.uuid), 16)
    assert find_gpu(TWO, driver.CUuuid(ctypes.addressof(buffer))) == SECOND


@pytest.mark.parametrize("spec", [2, "2", -1, True, "", "GPU-", "GPU-0000", "11:00.0", "MIG-1", None, 1.0, b"1"])
def test_a_name_of_no_gpu_is_refused(spec: object):
    with pytest.raises(UnknownGpu, match="no GPU of this machine is called") as caught:
        find_gpu(TWO, spec)
    assert caught.value.exit_code == 2


def test_the_beginning_of_two_uuids_names_neither():
    twins = machine(gpu(0), gpu(1, uuid=gpu(0).uuid[:-1] + "f"))
    with pytest.raises(UnknownGpu):
        find_gpu(twins, gpu(0).uuid[:12])


def test_a_map_is_read_with_any_names():
    first = TWO.gpus[0].uuid
    assert parse_map(f"0={SECOND.uuid}, 10:00.0=0", TWO) == {first: SECOND.uuid, SECOND.uuid: first}


@pytest.mark.parametrize("text", ["", "0", "0=", "=1", "0=1=0", "0=1,", "0=1,0=0"])
def test_a_map_of_another_form_is_refused(text: str):
    with pytest.raises(InvalidMap):
        parse_map(text, TWO)


def test_an_inventory_goes_through_json_and_back():
    assert msgspec.json.decode(msgspec.json.encode(TWO), type=Inventory) == TWO


def test_what_a_job_holds_is_added_up_and_never_zero_where_it_is():
    assert TWO.held({4711, 4712}) == {TWO.gpus[0].uuid: 5000 * MIB}
    assert TWO.held({4712}) == {TWO.gpus[0].uuid: 1}
    assert TWO.held({1}) == {}
    assert TWO.driver_major == 580


class Answers:
    """NVML's module with the device calls answered from a table (functions or NVML error numbers)."""

    def __init__(self, **answers: object):
        self._answers = answers

    def __getattr__(self, name: str) -> object:
        if name not in self._answers:
            return getattr(pynvml, name)
        answer = self._answers[name]

        def call(*args: object, **kwargs: object) -> object:
            if isinstance(answer, int) and answer < 0:
                raise pynvml.NVMLError(-answer)
            return answer(*args, **kwargs) if callable(answer) else answer

        return call


def a_gpu(**changes: object) -> Gpu:
    answers = {
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetMemoryInfo": lambda handle, version=None: SimpleNamespace(total=100, used=10, free=80),
        "nvmlDeviceGetComputeMode": 3,
        "nvmlDeviceGetUUID": "GPU-0A1B2C3D-1111-2222-3333-444455556666",
        "nvmlDeviceGetName": b"NVIDIA H200",
        "nvmlDeviceGetMinorNumber": 5,
        "nvmlDeviceGetPciInfo": SimpleNamespace(busId=b"00000000:0F:00.0"),
        "nvmlDeviceGetMigMode": lambda handle: [1, 1],
        "nvmlDeviceGetPersistenceMode": 1,
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: [
            SimpleNamespace(pid=9, usedGpuMemory=None),
            SimpleNamespace(pid=7, usedGpuMemory=3),
            SimpleNamespace(pid=7, usedGpuMemory=4),
        ],
        "nvmlDeviceGetMPSComputeRunningProcesses": lambda handle: [],
    }
    return nvml._read(Answers(**{**answers, **changes}), 2)


def test_a_gpu_is_read_as_nvml_tells_it():
    assert a_gpu() == Gpu(
        index=2,
        uuid="GPU-0a1b2c3d-1111-2222-3333-444455556666",
        name="NVIDIA H200",
        memory_total=100,
        memory_used=10,
        memory_free=80,
        minor=5,
        pci_bus_id="00000000:0f:00.0",
        mig=True,
        persistence=True,
        compute_mode="exclusive_process",
        processes=[GpuProcess(7, 7), GpuProcess(9, 0)],
    )


def test_what_a_chip_does_not_support_is_left_out_and_other_failures_are_not_hidden():
    plain = a_gpu(
        nvmlDeviceGetMigMode=-pynvml.NVML_ERROR_NOT_SUPPORTED,
        nvmlDeviceGetMPSComputeRunningProcesses=-pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        nvmlDeviceGetMinorNumber=-pynvml.NVML_ERROR_NOT_SUPPORTED,
    )
    assert (plain.mig, plain.mps_processes, plain.minor) == (False, [], None)
    with pytest.raises(pynvml.NVMLError):
        a_gpu(nvmlDeviceGetComputeRunningProcesses=-pynvml.NVML_ERROR_GPU_IS_LOST)


def test_an_old_driver_is_asked_for_memory_in_the_old_way():
    def memory(handle: object, version: object = None) -> SimpleNamespace:
        if version:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        return SimpleNamespace(total=100, used=20, free=80)

    assert a_gpu(nvmlDeviceGetMemoryInfo=memory).memory_used == 20


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, DriverTooOld),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, DriverTooOld),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, DriverTooOld),
        (pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, SymbolMissing),
        (pynvml.NVML_ERROR_UNKNOWN, GpuUnavailable),
    ],
)
def test_each_way_of_not_being_there_has_its_kind(code: int, kind: type[GpuUnavailable]):
    error = nvml._unavailable(pynvml, pynvml.NVMLError(code))
    assert type(error) is kind
    assert error.exit_code == 12


def test_what_an_administrator_sets_is_asked_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation looks at the GPUs several times, also while the job stands still."""
    asked: list[str] = []
    now = [100.0]
    monkeypatch.setattr(nvml, "time", SimpleNamespace(monotonic=lambda: now[0]))
    for _ in range(3):
        nvml._keep("what", lambda: asked.append("asked"))
    assert asked == ["asked"]
    now[0] += nvml._KEPT_SECONDS + 0.1
    nvml._keep("what", lambda: asked.append("asked"))
    assert len(asked) == 2


@pytest.mark.root
def test_a_process_that_a_user_calls_an_mps_server_is_none_for_others() -> None:
    """Also where it may not be dumped, so that its files in /proc are root's."""
    libc = ctypes.CDLL(None)

    def call_itself(uid: int) -> int:
        reading, writing = os.pipe()
        if not (child := os.fork()):
            os.setresuid(uid, uid, uid)
            libc.prctl(15, b"nvidia-cuda-mps-control", 0, 0, 0)  # PR_SET_NAME
            libc.prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
            os.write(writing, b"x")
            signal.pause()
        os.read(reading, 1)
        os.close(reading)
        os.close(writing)
        return child

    for uid, counts in ((61002, False), (os.geteuid(), True)):
        child = call_itself(uid)
        try:
            assert nvml._mps_running() is counts
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)

"""Driver calls: what is validated before, what structures are filled, what errors become; without a driver typed."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import threading

import pytest

from limosa.errors import (
    BindingsTooOld,
    DriverError,
    DriverNoSuchProcess,
    DriverTimeout,
    DriverTooOld,
    GpuUnavailable,
    IllegalState,
    InvalidArgument,
    InvalidMap,
    NoCudaState,
    NoSuchProcess,
    NotAProcess,
    NotSupported,
    SymbolMissing,
    UnknownGpu,
)
from limosa.gpu import Process, binding, driver
from limosa.gpu.checks import check_pairs, check_process, check_timeout
from limosa.gpu.meanings import driver_error
from limosa.gpu.names import uuid_bytes
from limosa.gpu.process import mapping_by_uuid

A = "GPU-0a1b2c3d-1111-2222-3333-444455556666"
B = "GPU-ffffffff-1111-2222-3333-444455556666"
NO_DRIVER = not binding.libcuda_found()


@pytest.mark.parametrize("pid", [0, -1, True, "1", 1.0, None, 2**31])
def test_what_is_no_pid_is_refused_before_anything_else(pid: object):
    for make in (Process, driver.state, driver.lock, driver.checkpoint, driver.restore, driver.unlock):
        with pytest.raises(InvalidArgument) as caught:
            make(pid)  # type: ignore[operator]
        assert isinstance(caught.value, ValueError)
        assert isinstance(caught.value, TypeError)
        assert caught.value.exit_code == 2


def test_a_thread_or_a_dead_process_is_not_taken_for_a_process():
    seen: list[int] = []
    hold = threading.Event()
    thread = threading.Thread(target=lambda: (seen.append(threading.get_native_id()), hold.wait(60)))
    thread.start()
    try:
        while not seen:
            pass
        with pytest.raises(NotAProcess, match=f"thread of process {os.getpid()}"):
            check_process(seen[0])
    finally:
        hold.set()
        thread.join()
    with pytest.raises(NoSuchProcess):
        check_process(2**22 + 1)
    assert check_process(os.getpid()) == os.getpid()


@pytest.mark.parametrize("timeout", [-1, 2**32, 1.5, "1", False, None])
def test_what_is_no_timeout_is_refused(timeout: object):
    with pytest.raises(InvalidArgument, match="time-out"):
        check_timeout(timeout)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "mapping", [[(A, B)], {A: "0"}, {"x": A}, {A: B, B: B}, {A: B, A[4:]: A}, {A.upper(): B, A: A}]
)
def test_what_is_no_map_is_refused(mapping: object):
    with pytest.raises(InvalidMap):
        check_pairs(mapping)  # type: ignore[arg-type]


def test_a_map_becomes_pairs_of_bytes_and_an_empty_one_none():
    assert check_pairs({A: B[4:].upper()}) == [(uuid_bytes(A), uuid_bytes(B))]
    assert check_pairs({}) is None
    assert check_pairs(None) is None


def test_the_drivers_structures_are_filled_as_it_reads_them():
    bindings = binding.load_binding()
    (lock,), _ = binding.arguments(bindings, "cuCheckpointProcessLock", timeout_ms=1500)
    assert lock.timeoutMs == 1500
    pairs = [(uuid_bytes(A), uuid_bytes(B)), (uuid_bytes(B), uuid_bytes(A))]
    (restore,), keep = binding.arguments(bindings, "cuCheckpointProcessRestore", pairs=pairs)
    assert restore.gpuPairsCount == 2
    assert [(p.oldUuid.bytes, p.newUuid.bytes) for p in restore.gpuPairs] == pairs
    assert keep
    assert binding.arguments(bindings, "cuCheckpointProcessRestore", pairs=None)[0] == (None,)
    assert binding.arguments(bindings, "cuCheckpointProcessCheckpoint")[0] == (None,)
    assert binding.arguments(bindings, "cuCheckpointProcessUnlock")[0] == (None,)
    assert binding.arguments(bindings, "cuCheckpointProcessGetState")[0] == ()


@pytest.mark.parametrize(
    ("code", "kind", "exit_code"),
    [
        (600, DriverTimeout, 18),
        (401, IllegalState, 12),
        (801, NotSupported, 13),
        (3, NoCudaState, 12),
        (1, DriverError, 12),
        (12345, DriverError, 12),
    ],
)
def test_every_result_has_its_error_with_name_meaning_and_pid(code: int, kind: type[DriverError], exit_code: int):
    error = driver_error("cuCheckpointProcessLock", 4711, code)
    assert type(error) is kind
    assert error.exit_code == exit_code
    assert (error.fields["pid"], error.fields["code"]) == (4711, code)
    assert "4711" in error.message
    assert str(code) in error.message
    assert error.result
    assert error.fields["meaning"]


def test_the_drivers_own_words_are_kept_beside_ours():
    error = driver_error("f", 1, 401, name="CUDA_ERROR_ILLEGAL_STATE", words="illegal state")
    assert error.result == "CUDA_ERROR_ILLEGAL_STATE"
    assert error.fields["meaning"].endswith("(illegal state)")


def test_a_failure_on_a_process_that_has_gone_is_no_such_process():
    error = driver_error("cuCheckpointProcessCheckpoint", 4711, 304, process_gone=True)
    assert type(error) is DriverNoSuchProcess
    assert error.exit_code == 10


def test_the_drivers_answers_become_values_or_errors():
    bindings = binding.load_binding()
    result = bindings.CUresult
    assert driver._value(bindings, "f", 1, (result.CUDA_SUCCESS, 5)) == 5
    assert driver._value(bindings, "f", 1, (result.CUDA_SUCCESS,)) is None
    with pytest.raises(NotSupported) as caught:
        driver._value(bindings, "cuCheckpointProcessCheckpoint", os.getpid(), (result.CUDA_ERROR_NOT_SUPPORTED,))
    assert caught.value.result == "CUDA_ERROR_NOT_SUPPORTED"
    with pytest.raises(DriverError, match="INVALID_VALUE") as refused:
        driver._value(bindings, "cuCheckpointProcessRestore", os.getpid(), (result.CUDA_ERROR_INVALID_VALUE,))
    assert "every GPU" in refused.value.hint


def test_names_in_a_map_that_are_uuids_need_no_nvml():
    class Device:
        uuid = B[4:]

    assert mapping_by_uuid({A[4:]: Device()}) == {A: B}
    assert mapping_by_uuid(None) is None
    with pytest.raises(InvalidMap):
        mapping_by_uuid([A])  # type: ignore[arg-type]
    with pytest.raises(InvalidMap):
        mapping_by_uuid({A: B, A[4:]: A})
    with pytest.raises((UnknownGpu, GpuUnavailable)):
        mapping_by_uuid({3.5: A})


@pytest.mark.skipif(not NO_DRIVER, reason="there is a driver here: tests/gpu asks it")
def test_without_a_driver_every_call_says_so_and_it_is_found_once():
    process = Process.current()
    calls = (lambda: process.state, lambda: process.lock(5), process.checkpoint, process.suspend, process.toggle)
    for call in (driver.available, *calls):
        with pytest.raises(DriverTooOld, match="no NVIDIA driver") as caught:
            call()
        assert caught.value.exit_code == 12
    kept = binding._missing
    with pytest.raises(DriverTooOld):
        driver.available()
    assert binding._missing is kept


class Bindings:
    """The bindings as some machine would show them: what each call answers, in CUresult numbers."""

    def __init__(self, cuda: int = 13000, init: int = 0, symbols: bool = True):
        for name in (*binding.SYMBOLS, *binding._STRUCTURES) if symbols else ():
            setattr(self, name, None)
        self._cuda, self._init = cuda, init

    def cuDriverGetVersion(self) -> tuple[int, int]:
        return 0, self._cuda

    def cuInit(self, flags: int) -> tuple[int]:
        return (self._init,)


@pytest.mark.parametrize(
    ("bindings", "symbol", "kind"),
    [
        (Bindings(symbols=False), True, BindingsTooOld),
        (Bindings(cuda=12040), True, DriverTooOld),
        (Bindings(), False, SymbolMissing),
        (Bindings(init=100), True, GpuUnavailable),
        (Bindings(init=999), True, GpuUnavailable),
    ],
)
def test_each_way_of_not_being_available_has_its_kind(monkeypatch, bindings: object, symbol: bool, kind: type):
    monkeypatch.setattr(binding.importlib, "import_module", lambda name: bindings)
    monkeypatch.setattr(binding, "has_symbol", lambda *_: symbol)
    with pytest.raises(GpuUnavailable) as caught:
        binding.initialise()
    assert type(caught.value) is kind


def test_what_this_machine_can_do_is_told_without_an_exception():
    from limosa.gpu import driver_facts

    facts = driver_facts()
    assert facts.bindings_ok
    assert facts.bindings_version
    assert facts.available == (not facts.problem_id)
    if NO_DRIVER:
        assert facts.problem_id == "driver-too-old"
        assert facts.symbols == {}


def test_process_has_every_name_of_cuda_cores_class():
    from cuda.core import checkpoint

    assert {name for name in dir(checkpoint.Process) if not name.startswith("_")} <= set(dir(Process))


def test_process_takes_what_cuda_cores_class_takes():
    from cuda.core import checkpoint

    def taken(function):
        return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]

    theirs = {name: value for name, value in vars(checkpoint.Process).items() if not name.startswith("_")}
    for name, value in theirs.items():
        ours = vars(Process)[name]
        assert type(ours) is type(value), name
        if inspect.isfunction(value):
            assert taken(ours) == taken(value), name
    assert taken(Process) == taken(checkpoint.Process)
    for wrong in (0, -1, True, "1", 1.5, None):
        kinds = []
        for made in (Process, checkpoint.Process):
            with pytest.raises((TypeError, ValueError)) as caught:
                made(wrong)
            kinds.append(caught.value)
        assert isinstance(kinds[0], TypeError if isinstance(kinds[1], TypeError) else ValueError), wrong


def test_importing_the_room_loads_neither_driver_nor_nvml():
    program = (
        "import sys, limosa.gpu, limosa.gpu.driver, limosa.gpu.process, limosa.gpu.worker\n"
        "heavy = {'cuda.bindings.driver', 'pynvml', 'rich', 'click', 'torch', 'numpy', 'psutil'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr

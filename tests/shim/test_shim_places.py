"""Where a process's GPUs are: what it is answered, once the shim was told, by every way to the driver."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
from soft_node import Node
from softgpu.far import Far

from limosa.gpu.names import uuid_of_bytes
from limosa.parking.protocol import PLACE, PLACES_MOST, Verb
from limosa.parking.shim import Place, Shim, ShimError
from limosa.process.identity import Identity

# What a program is answered about its GPUs by each way: the same function, got in four ways.
LOOK = '''
def by(way, name, symbol):
    library = ctypes.CDLL(None if way == "direct" else "libcuda.so.1")
    if way in ("direct", "dlsym"):
        return library[symbol]
    found = ctypes.c_void_p()
    if way == "entry":
        at, state = ctypes.byref(found), ctypes.byref(ctypes.c_int())
        assert not library.cuGetProcAddress_v2(name, at, 13000, ctypes.c_uint64(0), state)
    else:
        assert not library.cuGetProcAddress(name, ctypes.byref(found), 11000, ctypes.c_uint64(0))
    return ctypes.CFUNCTYPE(ctypes.c_int)(found.value) if found.value else None

def asked(way, device):
    """UUID (both versions), bus id, bus, slot and domain as attributes, and which device has that bus id."""
    found = []
    for symbol in ("cuDeviceGetUuid_v2",) if way in ("entry", "old") else ("cuDeviceGetUuid", "cuDeviceGetUuid_v2"):
        uuid = (ctypes.c_char * 16)()
        function = by(way, b"cuDeviceGetUuid", symbol)
        function.argtypes = [ctypes.c_void_p, ctypes.c_int]
        assert not function(uuid, device)
        found.append(uuid.raw.hex())
    text = (ctypes.c_char * 32)()
    function = by(way, b"cuDeviceGetPCIBusId", "cuDeviceGetPCIBusId")
    function.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int]
    assert not function(text, 32, device)
    found.append(text.value.decode())
    function = by(way, b"cuDeviceGetAttribute", "cuDeviceGetAttribute")
    function.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int]
    for attribute in (33, 34, 50):
        value = ctypes.c_int()
        assert not function(ctypes.byref(value), attribute, device)
        found.append(value.value)
    function = by(way, b"cuDeviceGetByPCIBusId", "cuDeviceGetByPCIBusId")
    function.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    value = ctypes.c_int(-1)
    assert not function(ctypes.byref(value), text.value)
    return [*found, value.value]

def device_of(text):
    value = ctypes.c_int(-1)
    code = ctypes.CDLL("libcuda.so.1").cuDeviceGetByPCIBusId(ctypes.byref(value), text.encode())
    return [code, value.value]

def shortened(length):
    text = (ctypes.c_char * 32)()
    return [ctypes.CDLL("libcuda.so.1").cuDeviceGetPCIBusId(text, length, 0), text.value.decode()]
'''
WAYS = ["direct", "dlsym", "entry", "old"]
ELSEWHERE = ["0000abcd:ef:1d.3", "00000000:aa:00.0"]


@pytest.fixture
def looking(start: Callable[..., Far]) -> Far:
    """A job on two GPUs that can be asked where it is."""
    job = start()
    job(LOOK)
    return job


@pytest.fixture
def told(looking: Far) -> Any:
    """Tells the job's shim, by the operation's number and pairs of UUIDs with a bus id."""
    with Shim(Identity.of(looking.pid)) as shim:
        yield lambda operation, *places: shim.places(operation, [Place(*place) for place in places])


def uuids(job: Far) -> list[str]:
    return [uuid_of_bytes(bytes.fromhex(job(f"asked('dlsym', {device})")[0])) for device in (0, 1)]


def raw(uuid: str) -> str:
    return uuid.removeprefix("GPU-").replace("-", "")


@pytest.mark.parametrize("way", WAYS)
def test_it_is_answered_what_was_told(looking: Far, told: Any, way: str) -> None:
    """The driver here says the old UUID, as one would that never says another: what was told counts."""
    here, there = uuids(looking)
    told(1, (here, there, ELSEWHERE[0]), (there, here, ELSEWHERE[1]))
    *found, bus_id, bus, slot, domain, device = looking(f"asked({way!r}, 0)")
    assert set(found) == {raw(there)}
    assert (bus_id, bus, slot, domain, device) == ("ABCD:EF:1D.3", 0xEF, 0x1D, 0xABCD, 0)
    *found, bus_id, bus, slot, domain, device = looking(f"asked({way!r}, 1)")
    assert set(found) == {raw(here)}
    assert (bus_id, bus, slot, domain, device) == ("0000:AA:00.0", 0xAA, 0, 0, 1)


def test_what_nobody_told_is_the_drivers(looking: Far, start: Callable[..., Far]) -> None:
    bare = start(shim=False)
    bare(LOOK)
    for device in (0, 1):
        assert looking(f"asked('dlsym', {device})") == bare(f"asked('dlsym', {device})")


def test_the_latest_of_one_operation_counts(looking: Far, told: Any) -> None:
    """So what is undone, or told once more by whoever recovers it, is where it is, however often it was told."""
    here, there = uuids(looking)
    away = [(here, there, ELSEWHERE[0]), (there, here, ELSEWHERE[1])]
    home = [(here, here, ELSEWHERE[1]), (there, there, ELSEWHERE[0])]
    for places, first in ((away, there), (away, there), (home, here), (away, there)):
        told(1, *places)
        assert uuids(looking)[0] == first
    told(2, *away)
    assert uuids(looking) == [here, there], "another operation goes on where the last one ended"
    told(3, *home)
    assert uuids(looking) == [here, there]


def test_a_driver_that_says_where_it_is_is_believed(node: Node, looking: Far, told: Any) -> None:
    """As 580 does: then its UUID counts, and what was told adds the bus id, whoever moves it later."""
    here, there = uuids(looking)
    controller = Far(node)
    controller("ok(cu.cuInit(0))")
    swap = [(raw(here), raw(there)), (raw(there), raw(here))]
    for turn in range(3):
        controller.suspend(looking.pid)
        controller.resume(looking.pid, swap)
        if turn == 0:
            told(1, (here, there, ELSEWHERE[0]), (there, here, ELSEWHERE[1]))
        is_there = turn != 1
        assert uuids(looking) == ([there, here] if is_there else [here, there])
        assert looking("asked('dlsym', 0)")[2] == ("ABCD:EF:1D.3" if is_there else "0000:AA:00.0")


def test_a_bus_id_finds_the_gpu_that_is_there(looking: Far, told: Any) -> None:
    here, there = uuids(looking)
    old = looking("asked('dlsym', 0)")[2]
    told(1, (here, there, ELSEWHERE[0]), (there, here, ELSEWHERE[1]))
    for text in ("abcd:ef:1d.3", "0000ABCD:EF:1D.3"):
        assert looking(f"device_of({text!r})") == [0, 0]
    for text in ("aa:00.0", "0000:aa:00", "0:AA:0.0"):
        assert looking(f"device_of({text!r})") == [0, 1]
    assert looking(f"device_of({old!r})") == [0, 0], "from before, and no other GPU's by now"
    for text in ("", ":", "aa", "aa:", "aa:00.", "aa:00.0x", "1:2:3:4", "abcd:ef:1d.2", "100:0.0", "0:100:0"):
        assert looking(f"device_of({text!r})")[0] != 0, text


def test_room_for_the_text_is_asked_of_the_caller(looking: Far, told: Any) -> None:
    here, there = uuids(looking)
    told(1, (here, there, "12345678:ef:1d.3"), (there, here, ELSEWHERE[1]))
    assert looking("shortened(17)") == [0, "12345678:EF:1D.3"]
    assert looking("shortened(16)")[0] == 1
    assert looking("shortened(3)")[0] == 1


def test_the_devices_that_limosa_asks_for_are_still_the_drivers(looking: Far) -> None:
    """By them it knows which memory is where."""
    here, there = uuids(looking)
    with Shim(Identity.of(looking.pid)) as shim:
        shim.places(1, [Place(here, there, ELSEWHERE[0]), Place(there, here, ELSEWHERE[1])])
        assert shim.devices() == shim.saw() == [here, there]
    assert uuids(looking) == [there, here]


def test_what_is_none_is_refused(shim: Shim) -> None:
    deadline = shim._deadline()
    some = PLACE.pack(bytes(16), bytes(16), 0, 1, 2, 3, 0)
    for data in (b"", some[:-1], some + b"1", some[:8], some * PLACES_MOST + some[:8]):
        shim._send(Verb.PLACES, deadline, a=1, data=data)
        with pytest.raises(ShimError):
            shim._receive(Verb.PLACES, deadline)
    shim.places(1, [Place("GPU-" + "0" * 32, "GPU-" + "1" * 32, "00000000:01:00.0")] * (PLACES_MOST + 5))


def test_a_child_knows_it_too(looking: Far, told: Any) -> None:
    """What is forked has no driver of its own; what it begins itself is begun anew."""
    here, there = uuids(looking)
    told(1, (here, there, ELSEWHERE[0]), (there, here, ELSEWHERE[1]))
    looking(
        "def in_child():\n    pid = os.fork()\n    if pid:\n        return os.waitpid(pid, 0)[1]\n"
        "    os._exit(0 if device_of('abcd:ef:1d.3')[0] in (0, 3) else 1)"
    )
    assert looking("in_child()") == 0
    assert uuids(looking) == [there, here]


def test_it_may_be_told_while_it_is_asked(looking: Far, told: Any) -> None:
    """Each answer is whole: of one telling or of the next."""
    here, there = uuids(looking)
    looking("seen = set()\nasking = [True]\n")
    looking(
        "def ask():\n    while asking[0]:\n        seen.add(shortened(32)[1])\n"
        "threads = [threading.Thread(target=ask) for _ in range(3)]\n[one.start() for one in threads]"
    )
    source = random.Random(1)
    texts = {f"{source.randrange(1 << 16):04x}:{bus:02x}:{bus % 32:02x}.{bus % 8}" for bus in range(256)}
    end = time.monotonic() + 60
    while looking("len(seen)") < 6 and time.monotonic() < end:  # the threads have to get their turns
        for operation, text in enumerate(sorted(texts)):
            told(operation, (here, here, f"0000{text}"), (there, there, ELSEWHERE[1]))
    looking("asking[0] = False\n[one.join() for one in threads]")
    found = {one.lower() for one in looking("list(seen)")}
    assert len(found & texts) > 3
    assert len(found - texts) <= 1, "before the first"

"""The rules of the virtual memory calls: granularity, addresses, handles, access, descriptors."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from conformance.jobs import MIB, POSIX, Job, access, enum, prop

SPAN = 2 * MIB
Start = Callable[..., Job]
MINIMUM = enum("CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM")
RECOMMENDED = enum("CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED")


@pytest.fixture
def handle(work: Job) -> Iterator[int]:
    made = work.do("cuMemCreate", SPAN, prop(exportable=True), 0)
    yield made
    work.says("cuMemRelease", made)


@pytest.fixture
def place(work: Job) -> Iterator[int]:
    """An address range that is reserved for four handles."""
    made = work.do("cuMemAddressReserve", 4 * SPAN, 0, 0, 0)
    yield made
    for n in range(4):
        work.says("cuMemUnmap", made + n * SPAN, SPAN)
    work.says("cuMemAddressFree", made, 4 * SPAN)


@pytest.fixture
def mapped(work: Job, handle: int, place: int) -> int:
    """The address of memory that may be read and written."""
    work.do("cuMemMap", place, SPAN, 0, handle, 0)
    work.do("cuMemSetAccess", place, SPAN, access(), 1)
    return place


@pytest.mark.parametrize("option", [MINIMUM, RECOMMENDED], ids=["minimum", "recommended"])
def test_granularity_is_two_mebibytes(option: dict[str, str], work: Job) -> None:
    assert work.do("cuMemGetAllocationGranularity", prop(), option) == 2 * MIB


# --- create -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 4096, SPAN - 1, SPAN + 4096])
def test_create_takes_multiples_of_the_granularity_only(size: int, work: Job) -> None:
    assert work.says("cuMemCreate", size, prop(), 0) == "INVALID_VALUE"


def test_create_more_than_there_is(work: Job) -> None:
    assert work.says("cuMemCreate", 1 << 44, prop(), 0) == "OUT_OF_MEMORY"


@pytest.mark.parametrize("device", [-1, 2, 99])
def test_create_on_a_device_that_is_not_there(device: int, work: Job) -> None:
    assert work.says("cuMemCreate", SPAN, prop(device), 0) == "INVALID_DEVICE"


def test_create_with_flags(work: Job) -> None:
    assert work.says("cuMemCreate", SPAN, prop(), 1) == "INVALID_VALUE"


def test_create_of_no_type(work: Job) -> None:
    kind = enum("CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_INVALID")
    assert work.says("cuMemCreate", SPAN, prop(type=kind), 0) == "INVALID_VALUE"


def test_create_needs_no_context(start: Start) -> None:
    job = start().init()
    assert job.says("cuMemCreate", SPAN, prop(), 0) == "SUCCESS"


def test_properties_of_a_handle_are_those_that_it_was_made_with(handle: int, work: Job) -> None:
    told = work.do("cuMemGetAllocationPropertiesFromHandle", handle)
    place = told["location"]
    assert (told["type"], place["type"], place["id"], told["requestedHandleTypes"]) == (1, 1, 0, 1)


def test_release_of_a_handle_that_is_none(work: Job) -> None:
    assert work.says("cuMemRelease", 0) == "INVALID_VALUE"


# --- reserve ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 4096])
def test_reserve_takes_multiples_of_the_granularity_only(size: int, work: Job) -> None:
    assert work.says("cuMemAddressReserve", size, 0, 0, 0) == "INVALID_VALUE"


def test_reserve_aligns_as_it_is_told(work: Job) -> None:
    made = work.do("cuMemAddressReserve", SPAN, 64 * MIB, 0, 0)
    assert made % (64 * MIB) == 0
    work.do("cuMemAddressFree", made, SPAN)


def test_reserve_with_an_alignment_that_is_no_power_of_two(work: Job) -> None:
    assert work.says("cuMemAddressReserve", SPAN, 3 * MIB, 0, 0) == "INVALID_VALUE"


def test_reserve_with_flags(work: Job) -> None:
    assert work.says("cuMemAddressReserve", SPAN, 0, 0, 1) == "INVALID_VALUE"


def test_reserve_at_a_wanted_address(work: Job) -> None:
    wanted = work.do("cuMemAddressReserve", SPAN, 0, 0, 0)
    work.do("cuMemAddressFree", wanted, SPAN)
    made = work.do("cuMemAddressReserve", SPAN, 0, wanted, 0)
    assert made == wanted
    work.do("cuMemAddressFree", made, SPAN)


def test_reserve_at_an_address_that_is_taken_gives_another(place: int, work: Job) -> None:
    answer = work.ask("cuMemAddressReserve", SPAN, 0, place, 0)
    assert answer.result == "SUCCESS"
    assert not place <= answer.value < place + 4 * SPAN
    work.do("cuMemAddressFree", answer.value, SPAN)


@pytest.mark.parametrize("kind", ["wrong-size", "wrong-address", "not-reserved", "twice"])
def test_free_of_an_address_range(kind: str, work: Job) -> None:
    made = work.do("cuMemAddressReserve", 2 * SPAN, 0, 0, 0)
    if kind == "twice":
        work.do("cuMemAddressFree", made, 2 * SPAN)
    args = {"wrong-size": (made, SPAN), "wrong-address": (made + SPAN, SPAN), "not-reserved": (1 << 46, SPAN)}
    assert work.says("cuMemAddressFree", *args.get(kind, (made, 2 * SPAN))) == "INVALID_VALUE"
    if kind != "twice":
        work.do("cuMemAddressFree", made, 2 * SPAN)


def test_free_of_an_address_range_that_is_mapped(mapped: int, work: Job) -> None:
    assert work.says("cuMemAddressFree", mapped, 4 * SPAN) == "INVALID_VALUE"
    assert work.says("cuMemsetD8", mapped, 1, SPAN) == "SUCCESS"
    assert work.says("cuCtxSynchronize") == "SUCCESS"  # before it is unmapped: the memset may still be under way


# --- map --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["not-reserved", "too-long", "half", "offset", "unaligned", "zero", "flags"])
def test_map_with_a_wrong(kind: str, handle: int, place: int, work: Job) -> None:
    args = {
        "not-reserved": (1 << 46, SPAN, 0, handle, 0),
        "too-long": (place, 2 * SPAN, 0, handle, 0),
        "half": (place, MIB, 0, handle, 0),
        "offset": (place, SPAN, SPAN, handle, 0),
        "unaligned": (place + 4096, SPAN, 0, handle, 0),
        "zero": (place, 0, 0, handle, 0),
        "flags": (place, SPAN, 0, handle, 1),
    }
    result = "NOT_SUPPORTED" if kind in ("too-long", "half", "offset") else "INVALID_VALUE"
    assert work.says("cuMemMap", *args[kind]) == result


def test_map_where_something_is_mapped(mapped: int, handle: int, work: Job) -> None:
    assert work.says("cuMemMap", mapped, SPAN, 0, handle, 0) == "INVALID_VALUE"


def test_map_twice_shows_the_same_memory(mapped: int, handle: int, work: Job) -> None:
    second = mapped + SPAN
    work.do("cuMemMap", second, SPAN, 0, handle, 0)
    work.do("cuMemSetAccess", second, SPAN, access(), 1)
    work.stamped(mapped, 512, 21)
    work.check_stamps(second, 512, 21)


def test_several_handles_in_one_range_are_one_memory(place: int, work: Job) -> None:
    for n in range(2):
        made = work.do("cuMemCreate", SPAN, prop(), 0)
        work.do("cuMemMap", place + n * SPAN, SPAN, 0, made, 0)
        work.do("cuMemRelease", made)
    work.do("cuMemSetAccess", place, 2 * SPAN, access(), 1)
    work.do("cuMemsetD8", place + SPAN - 64, 9, 128)
    assert work.read(place + SPAN - 64, 128) == b"\x09" * 128


def test_a_mapping_lives_on_when_its_handle_is_released(place: int, work: Job) -> None:
    made = work.do("cuMemCreate", SPAN, prop(), 0)
    work.do("cuMemMap", place, SPAN, 0, made, 0)
    work.do("cuMemRelease", made)
    work.do("cuMemSetAccess", place, SPAN, access(), 1)
    work.check_stamps(work.stamped(place, 512, 22), 512, 22)


def test_contents_live_on_in_a_handle_that_is_mapped_nowhere(mapped: int, handle: int, work: Job) -> None:
    work.stamped(mapped, 512, 23)
    work.do("cuMemUnmap", mapped, SPAN)
    work.do("cuMemMap", mapped + SPAN, SPAN, 0, handle, 0)
    work.do("cuMemSetAccess", mapped + SPAN, SPAN, access(), 1)
    work.check_stamps(mapped + SPAN, 512, 23)


def test_unmap_of_a_reserved_range_where_nothing_is_mapped(mapped: int, work: Job) -> None:
    assert work.says("cuMemUnmap", mapped + SPAN, SPAN) == "SUCCESS"


@pytest.mark.parametrize("kind", ["half", "unaligned"])
def test_unmap_of(kind: str, mapped: int, work: Job) -> None:
    args = {"half": (mapped, MIB), "unaligned": (mapped + 4096, SPAN)}
    assert work.says("cuMemUnmap", *args[kind]) == "INVALID_VALUE"
    assert work.says("cuMemsetD8", mapped, 1, SPAN) == "SUCCESS"


def test_unmap_of_two_mappings_at_once(mapped: int, handle: int, work: Job) -> None:
    work.do("cuMemMap", mapped + SPAN, SPAN, 0, handle, 0)
    assert work.says("cuMemUnmap", mapped, 2 * SPAN) == "SUCCESS"


# --- access -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["cuMemcpyDtoH", "cuMemsetD8"])
@pytest.mark.parametrize("kind", ["reserved", "unmapped"])
def test_memory_that_cannot_be_reached(kind: str, call: str, place: int, handle: int, work: Job) -> None:
    if kind == "unmapped":
        work.do("cuMemMap", place, SPAN, 0, handle, 0)
        work.do("cuMemSetAccess", place, SPAN, access(), 1)
        work.do("cuMemUnmap", place, SPAN)
    args = (work.scratch, place, 64) if call == "cuMemcpyDtoH" else (place, 1, 64)
    assert work.says(call, *args) == "INVALID_VALUE"


def test_memory_that_is_mapped_without_access(job: Job) -> None:
    address = job.do("cuMemAddressReserve", SPAN, 0, 0, 0)
    job.do("cuMemMap", address, SPAN, 0, job.do("cuMemCreate", SPAN, prop(), 0), 0)
    assert job.says("cuMemcpyDtoH", job.scratch, address, 64) == "INVALID_VALUE"


@pytest.mark.parametrize("kind", ["not-mapped", "too-long", "half", "no-such-device"])
def test_set_access_to(kind: str, mapped: int, work: Job) -> None:
    args = {
        "not-mapped": (mapped + SPAN, SPAN, access(), 1),
        "too-long": (mapped, 2 * SPAN, access(), 1),
        "half": (mapped, MIB, access(), 1),
        "no-such-device": (mapped, SPAN, access(9), 1),
    }
    assert work.says("cuMemSetAccess", *args[kind]) == "INVALID_VALUE"


LOCATION = {"type": enum("CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE")}


@pytest.mark.parametrize(("device", "flags"), [(0, 3), (1, 0)])
def test_get_access(device: int, flags: int, mapped: int, work: Job) -> None:
    assert work.do("cuMemGetAccess", {"s": "CUmemLocation", "f": {**LOCATION, "id": device}}, mapped) == flags


@pytest.mark.parametrize("shown", [False, True])
@pytest.mark.parametrize("call", ["cuMemcpy", "cuMemcpyDtoD", "cuMemcpyPeer"])
def test_a_copy_to_the_other_gpu(call: str, shown: bool, mapped: int, work: Job) -> None:
    """Without peer access: what names no context finds virtual memory only where it was shown."""
    other = work.do("cuDevicePrimaryCtxRetain", 1)
    place = work.do("cuMemAddressReserve", SPAN, 0, 0, 0)
    work.do("cuMemMap", place, SPAN, 0, work.do("cuMemCreate", SPAN, prop(1), 0), 0)
    for device in (0, 1):
        for at in (mapped, place):
            if shown or device == (at == place):
                work.do("cuMemSetAccess", at, SPAN, access(device), 1)
    args = (place, other, mapped, work.context, 4096) if call == "cuMemcpyPeer" else (place, mapped, 4096)
    assert work.says(call, *args) == ("SUCCESS" if shown or call == "cuMemcpyPeer" else "INVALID_VALUE")


def test_read_only_access(mapped: int, work: Job) -> None:
    work.do("cuMemSetAccess", mapped, SPAN, access(write=False), 1)
    assert work.do("cuMemGetAccess", {"s": "CUmemLocation", "f": {**LOCATION, "id": 0}}, mapped) == 1
    assert work.says("cuMemcpyDtoH", work.scratch, mapped, 64) == "SUCCESS"


def test_memory_of_the_other_gpu(place: int, work: Job) -> None:
    made = work.do("cuMemCreate", SPAN, prop(1), 0)
    work.do("cuMemMap", place, SPAN, 0, made, 0)
    work.do("cuMemRelease", made)
    work.do("cuMemSetAccess", place, SPAN, access(0), 1)
    work.check_stamps(work.stamped(place, 512, 24), 512, 24)


def test_an_address_range_is_that_of_the_reservation_or_the_mapping(mapped: int, work: Job) -> None:
    assert work.do("cuMemGetAddressRange", mapped + 4096) == [mapped, SPAN]


# --- handles and descriptors ------------------------------------------------------------------------------------------


def test_retain_gives_the_handle_of_an_address(mapped: int, handle: int, work: Job) -> None:
    assert work.do("cuMemRetainAllocationHandle", mapped + 4096) == handle
    assert work.says("cuMemRelease", handle) == "SUCCESS"


@pytest.mark.parametrize("kind", ["reserved-only", "plain"])
def test_retain_of_an_address_without_a_handle(kind: str, place: int, memory: int, work: Job) -> None:
    assert work.says("cuMemRetainAllocationHandle", place if kind == "reserved-only" else memory) == "INVALID_VALUE"


def test_export_of_a_handle_that_was_not_made_for_it(work: Job) -> None:
    made = work.do("cuMemCreate", SPAN, prop(), 0)
    assert work.says("cuMemExportToShareableHandle", made, POSIX, 0) == "INVALID_VALUE"
    work.do("cuMemRelease", made)


def test_export_twice_gives_two_descriptors(handle: int, work: Job) -> None:
    found = [work.do("cuMemExportToShareableHandle", handle, POSIX, 0) for _ in range(2)]
    assert found[0] != found[1]
    for fd in found:
        work.run("close", fd)


def test_export_with_flags(handle: int, work: Job) -> None:
    assert work.says("cuMemExportToShareableHandle", handle, POSIX, 1) == "INVALID_VALUE"


@pytest.mark.parametrize("kind", ["own-process", "duplicate"])
def test_an_imported_handle_is_the_same_memory(kind: str, mapped: int, handle: int, work: Job) -> None:
    fd = work.do("cuMemExportToShareableHandle", handle, POSIX, 0)
    given = work.run("dup", fd) if kind == "duplicate" else fd
    imported = work.do("cuMemImportFromShareableHandle", given, POSIX)
    work.do("cuMemMap", mapped + SPAN, SPAN, 0, imported, 0)
    work.do("cuMemSetAccess", mapped + SPAN, SPAN, access(), 1)
    work.stamped(mapped, 512, 25)
    work.check_stamps(mapped + SPAN, 512, 25)
    work.do("cuMemUnmap", mapped + SPAN, SPAN)
    work.do("cuMemRelease", imported)
    work.run("close", fd)


@pytest.mark.parametrize("descriptor", ["of-a-file", "closed"])
def test_import_of_a_descriptor_that_is_none_of_memory(descriptor: str, work: Job) -> None:
    fd = work.run("dup", 2)
    if descriptor == "closed":
        work.run("close", fd)
    assert work.says("cuMemImportFromShareableHandle", fd, POSIX) == "UNKNOWN"


@pytest.fixture
def imported(start: Start, handle: int, work: Job) -> tuple[Job, int, int]:
    """Another process, the handle that it imported from ``work``, and the descriptor there."""
    other = start().start_up().load()
    fd = work.do("cuMemExportToShareableHandle", handle, POSIX, 0)
    there = other.run("take_fd", work.pid, fd)
    work.run("close", fd)
    return other, other.do("cuMemImportFromShareableHandle", there, POSIX), there


def use(job: Job, handle: int) -> int:
    """Map a handle somewhere; the address."""
    address = job.do("cuMemAddressReserve", SPAN, 0, 0, 0)
    job.do("cuMemMap", address, SPAN, 0, handle, 0)
    job.do("cuMemSetAccess", address, SPAN, access(), 1)
    return int(address)


def test_two_processes_see_the_same_memory(imported: tuple[Job, int, int], mapped: int, work: Job) -> None:
    other, theirs, _ = imported
    address = use(other, theirs)
    work.stamped(mapped, 512, 26)
    other.check_stamps(address, 512, 26)
    other.stamped(address, 512, 27)
    work.check_stamps(mapped, 512, 27)


def test_an_imported_handle_cannot_be_exported(imported: tuple[Job, int, int]) -> None:
    other, theirs, _ = imported
    assert other.says("cuMemExportToShareableHandle", theirs, POSIX, 0) == "INVALID_VALUE"


def test_the_descriptor_is_not_needed_after_the_import(imported: tuple[Job, int, int], mapped: int, work: Job) -> None:
    other, theirs, there = imported
    other.run("close", there)
    work.stamped(mapped, 512, 28)
    other.check_stamps(use(other, theirs), 512, 28)


def test_memory_lives_in_whoever_holds_a_handle(start: Start) -> None:
    first, second = start().start_up().load(), start().start_up().load()
    made = first.do("cuMemCreate", SPAN, prop(exportable=True), 0)
    first.stamped(use(first, made), 512, 29)
    fd = first.do("cuMemExportToShareableHandle", made, POSIX, 0)
    theirs = second.do("cuMemImportFromShareableHandle", second.run("take_fd", first.pid, fd), POSIX)
    first.kill()
    second.check_stamps(use(second, theirs), 512, 29)


def test_memory_lives_in_whoever_holds_a_descriptor(start: Start) -> None:
    first, second = start().start_up().load(), start().start_up().load()
    made = first.do("cuMemCreate", SPAN, prop(exportable=True), 0)
    first.stamped(use(first, made), 512, 30)
    fd = second.run("take_fd", first.pid, first.do("cuMemExportToShareableHandle", made, POSIX, 0))
    first.kill()
    second.check_stamps(use(second, second.do("cuMemImportFromShareableHandle", fd, POSIX)), 512, 30)


@pytest.mark.alone
@pytest.mark.parametrize("holder", ["handle", "mapping", "descriptor"])
def test_memory_is_free_when_the_last_holder_lets_go(holder: str, work: Job) -> None:
    size = 256 * MIB
    free = work.do("cuMemGetInfo")[0]
    made = work.do("cuMemCreate", size, prop(exportable=True), 0)
    if holder == "mapping":
        address = work.do("cuMemAddressReserve", size, 0, 0, 0)
        work.do("cuMemMap", address, size, 0, made, 0)
    if holder == "descriptor":
        fd = work.do("cuMemExportToShareableHandle", made, POSIX, 0)
    if holder != "handle":
        work.do("cuMemRelease", made)
    assert free - work.do("cuMemGetInfo")[0] >= size
    if holder == "handle":
        work.do("cuMemRelease", made)
    elif holder == "mapping":
        work.do("cuMemUnmap", address, size)
        work.do("cuMemAddressFree", address, size)
    else:
        work.run("close", fd)
    assert abs(free - work.do("cuMemGetInfo")[0]) <= 32 * MIB

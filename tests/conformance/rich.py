"""A job that has one of everything, so that one cycle can be asked about what survives it."""

from __future__ import annotations

from typing import Any

from conformance.jobs import MIB, POSIX, Job, access, enum, prop

SPAN = 2 * MIB
PITCH_HEIGHT = 16


class Rich:
    """The job before the cycle.

    Attributes:
        job: on GPU 0; thread "second" has a context on GPU 1, "made" one that cuCtxCreate has made, "bare" none.
        have: names → handles and addresses.
        before: what questions answered before the cycle (the same are asked after it).
        freed: an address that was freed before the cycle; ``freed_range`` is what was said of it right after it.
        moved: whether the cycle has exchanged its GPUs.
    """

    moved = False

    def __init__(self, job: Job):
        self.job = job.start_up().load()
        self.have: dict[str, Any] = {}
        self._memory()
        self._vmm()
        self._host()
        self._streams()
        self._contexts()
        self.freed = job.do("cuMemAlloc", 128 * MIB)
        job.do("cuMemFree", self.freed)
        self.freed_range = ""
        job.do("cuCtxSynchronize")
        self.before = {name: self.question(name) for name in QUESTIONS}

    def _memory(self) -> None:
        job, have = self.job, self.have
        have["plain"] = job.stamped(job.do("cuMemAlloc", MIB), 4096, 1)
        have["small"] = job.stamped(job.do("cuMemAlloc", 8), 1, 2)
        have["odd"] = job.stamped(job.do("cuMemAlloc", 1000), 125, 3)
        have["large"] = job.stamped(job.do("cuMemAlloc", 64 * MIB), 4096, 4)
        have["pitched"], have["pitch"] = job.do("cuMemAllocPitch", 100, PITCH_HEIGHT, 4)
        job.stamped(have["pitched"], 64, 5)
        have["async"] = job.do("cuMemAllocAsync", MIB, 0)
        job.stamped(have["async"], 512, 6)
        have["default_pool"] = job.do("cuDeviceGetDefaultMemPool", 0)
        have["pool"] = job.do(
            "cuMemPoolCreate",
            {
                "s": "CUmemPoolProps",
                "f": {
                    "allocType": enum("CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED"),
                    "location.type": enum("CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE"),
                    "location.id": 0,
                },
            },
        )
        have["pooled"] = job.do("cuMemAllocFromPoolAsync", MIB, have["pool"], 0)
        job.stamped(have["pooled"], 512, 7)

    def _vmm(self) -> None:
        job, have = self.job, self.have
        for name in ("vmm", "released", "exported"):
            handle = job.do("cuMemCreate", SPAN, prop(exportable=name == "exported"), 0)
            have[f"{name}_handle"] = handle
            have[name] = job.do("cuMemAddressReserve", SPAN, 0, 0, 0)
            job.do("cuMemMap", have[name], SPAN, 0, handle, 0)
            job.do("cuMemSetAccess", have[name], SPAN, access(), 1)
            job.stamped(have[name], 512, {"vmm": 8, "released": 9, "exported": 10}[name])
        job.do("cuMemRelease", have["released_handle"])
        have["fd"] = job.do("cuMemExportToShareableHandle", have["exported_handle"], POSIX, 0)
        have["reserved"] = job.do("cuMemAddressReserve", SPAN, 0, 0, 0)
        # Memory that is mapped nowhere while the job is checkpointed.
        have["unmapped_handle"] = job.do("cuMemCreate", SPAN, prop(), 0)
        job.do("cuMemMap", have["reserved"], SPAN, 0, have["unmapped_handle"], 0)
        job.do("cuMemSetAccess", have["reserved"], SPAN, access(), 1)
        job.stamped(have["reserved"], 512, 11)
        job.do("cuCtxSynchronize")
        job.do("cuMemUnmap", have["reserved"], SPAN)

    def _host(self) -> None:
        job, have = self.job, self.have
        have["pinned"] = job.pinned(8192)
        job.poke(have["pinned"], b"pinned!!" * 1024)
        have["pinned_device"] = job.do("cuMemHostGetDevicePointer", have["pinned"], 0)
        have["registered"] = job.run("memory", 8192)
        job.do("cuMemHostRegister", have["registered"], 8192, 2)  # DEVICEMAP
        job.poke(have["registered"], b"register" * 1024)
        have["registered_device"] = job.do("cuMemHostGetDevicePointer", have["registered"], 0)

    def _streams(self) -> None:
        job, have = self.job, self.have
        have["stream"] = job.do("cuStreamCreate", 1)
        have["urgent"] = job.do("cuStreamCreateWithPriority", 1, job.do("cuCtxGetStreamPriorityRange")[1])
        have["event"], have["later"] = job.do("cuEventCreate", 0), job.do("cuEventCreate", 0)
        have["never"] = job.do("cuEventCreate", 0)
        job.do("cuEventRecord", have["event"], have["stream"])
        have["spare"] = job.do("cuMemAlloc", 4096)
        job.fill(have["spare"], 512, 0, stream=have["stream"])
        job.do("cuEventRecord", have["later"], have["stream"])
        job.do("cuStreamSynchronize", have["stream"])
        have["callback"] = job.run("callback", "rich", "host", False, None)

    def _contexts(self) -> None:
        job, have = self.job, self.have
        job.do("cuCtxSetLimit", enum("CUlimit.CU_LIMIT_STACK_SIZE"), 4096)
        have["second_context"] = job.do("cuDevicePrimaryCtxRetain", 1, thread="second")
        job.do("cuCtxSetCurrent", have["second_context"], thread="second")
        have["on_second"] = job.do("cuMemAlloc", MIB, thread="second")
        job.do("cuMemsetD8", have["on_second"], 0x77, MIB, thread="second")
        job.do("cuCtxSynchronize", thread="second")
        job.do("cuCtxEnablePeerAccess", have["second_context"], 0)
        have["made_context"] = job.do("cuCtxCreate", None, 4, 0, thread="made")  # BLOCKING_SYNC
        have["on_made"] = job.do("cuMemAlloc", MIB, thread="made")
        job.do("cuMemsetD8", have["on_made"], 0x66, MIB, thread="made")
        job.do("cuCtxSynchronize", thread="made")
        job.do("cuCtxGetCurrent", thread="bare")

    def question(self, name: str) -> Any:
        """Ask something that has the same answer whenever it is asked."""
        return self.job.do(*QUESTIONS[name](self.have), thread=name.partition("@")[2] or "main")


def attribute(name: str) -> dict[str, str]:
    return enum(f"CUpointer_attribute.CU_POINTER_ATTRIBUTE_{name}")


# What does not change in a cycle; a part after "@" is the thread that asks.
QUESTIONS: dict[str, Any] = {
    "device-count": lambda h: ["cuDeviceGetCount"],
    "device-name": lambda h: ["cuDeviceGetName", 64, 0],
    "total-memory": lambda h: ["cuDeviceTotalMem", 0],
    "multiprocessors": lambda h: [
        "cuDeviceGetAttribute",
        enum("CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT"),
        0,
    ],
    "current-context": lambda h: ["cuCtxGetCurrent"],
    "current-context@second": lambda h: ["cuCtxGetCurrent"],
    "current-context@made": lambda h: ["cuCtxGetCurrent"],
    "current-context@bare": lambda h: ["cuCtxGetCurrent"],
    "current-device": lambda h: ["cuCtxGetDevice"],
    "current-device@second": lambda h: ["cuCtxGetDevice"],
    "context-flags@made": lambda h: ["cuCtxGetFlags"],
    "context-api-version": lambda h: ["cuCtxGetApiVersion", 0],
    "context-id": lambda h: ["cuCtxGetId", 0],
    "primary-context-state": lambda h: ["cuDevicePrimaryCtxGetState", 0],
    "primary-context-state-of-second": lambda h: ["cuDevicePrimaryCtxGetState", 1],
    "stack-limit": lambda h: ["cuCtxGetLimit", enum("CUlimit.CU_LIMIT_STACK_SIZE")],
    "priority-range": lambda h: ["cuCtxGetStreamPriorityRange"],
    "stream-priority": lambda h: ["cuStreamGetPriority", h["urgent"]],
    "stream-flags": lambda h: ["cuStreamGetFlags", h["stream"]],
    "stream-id": lambda h: ["cuStreamGetId", h["stream"]],
    "stream-context": lambda h: ["cuStreamGetCtx", h["stream"]],
    "event-query": lambda h: ["cuEventQuery", h["event"]],
    "never-recorded-event": lambda h: ["cuEventQuery", h["never"]],
    "elapsed-time": lambda h: ["cuEventElapsedTime", h["event"], h["later"]],
    "address-range": lambda h: ["cuMemGetAddressRange", h["plain"] + 4096],
    "address-range-of-async": lambda h: ["cuMemGetAddressRange", h["async"]],
    "pointer-type": lambda h: ["cuPointerGetAttribute", attribute("MEMORY_TYPE"), h["plain"]],
    "pointer-type-of-pinned": lambda h: ["cuPointerGetAttribute", attribute("MEMORY_TYPE"), h["pinned"]],
    "pointer-context": lambda h: ["cuPointerGetAttribute", attribute("CONTEXT"), h["plain"]],
    "pointer-ordinal": lambda h: ["cuPointerGetAttribute", attribute("DEVICE_ORDINAL"), h["plain"]],
    "pointer-ordinal-of-second": lambda h: ["cuPointerGetAttribute", attribute("DEVICE_ORDINAL"), h["on_second"]],
    "buffer-id": lambda h: ["cuPointerGetAttribute", attribute("BUFFER_ID"), h["plain"]],
    "default-pool": lambda h: ["cuDeviceGetDefaultMemPool", 0],
    "pool-bytes-in-use": lambda h: [
        "cuMemPoolGetAttribute",
        h["pool"],
        enum("CUmemPool_attribute.CU_MEMPOOL_ATTR_USED_MEM_CURRENT"),
    ],
    "pinned-device-address": lambda h: ["cuMemHostGetDevicePointer", h["pinned"], 0],
    "registered-device-address": lambda h: ["cuMemHostGetDevicePointer", h["registered"], 0],
    "pinned-flags": lambda h: ["cuMemHostGetFlags", h["pinned"]],
    "vmm-properties": lambda h: ["cuMemGetAllocationPropertiesFromHandle", h["vmm_handle"]],
    "vmm-access": lambda h: [
        "cuMemGetAccess",
        {
            "s": "CUmemLocation",
            "f": {"type": enum("CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE"), "id": 0},
        },
        h["vmm"],
    ],
    "loading-mode": lambda h: ["cuModuleGetLoadingMode"],
    "peer-can": lambda h: ["cuDeviceCanAccessPeer", 0, 1],
}

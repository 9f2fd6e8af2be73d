"""Where a process believes that it is before and after its GPUs were exchanged, and where it is.

    python tests/gpu/experiments/where_it_is.py [--without-nccl] [--libcudart PATH] [--libnccl PATH]

One process with memory on two GPUs is moved by ``limosa move PID --map 0=1,1=0``, and back; once by the driver alone
and once under the shim. Before and after each move it is asked, for each of its GPUs, what the driver says (direct
symbols, and the functions that cuGetProcAddress gives), the CUDA runtime (a property that it keeps may differ from an
answer), PyTorch where it is there, and what NCCL goes by (``busId`` in its log, bus ids in its dump of the topology) in
a communicator that is made for this and destroyed again. NVML says which GPUs there are, and what the process holds on
each: 64 MiB more on the one where its device 0 is.

Each line of the output is one JSON object; the last ones, ``"verdict"``, say which answers were those of where it is.
Needs two GPUs, cuda-bindings, Limosa in this Python, root or CAP_SYS_PTRACE as every move; libcudart and libnccl of
PyTorch or of NVIDIA's packages where they are there.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import glob
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MIB = 1 << 20
ATTRIBUTES = {"domain": 50, "bus": 33, "slot": 34}
WAYS = {"native": "", "shim": "LD_PRELOAD"}


# --- the process that is moved ----------------------------------------------------------------------------------------


def library(given: str, *patterns: str) -> str:
    """A library of PyTorch's or NVIDIA's packages; "" where there is none."""
    if given:
        return given
    for folder in sys.path:
        for pattern in patterns:
            if found := sorted(glob.glob(os.path.join(folder, "nvidia", pattern))):
                return found[-1]
    return ""


def bus_id(domain: int, bus: int, slot: int) -> str:
    return f"{domain:04x}:{bus:02x}:{slot:02x}.0"


def number(function: Any, *arguments: Any) -> int | str:
    """The int that a function writes to its first argument, or its error."""
    value = ctypes.c_int(-1)
    result = function(ctypes.byref(value), *arguments)
    return value.value if not result else f"error {result}"


def text(function: Any, device: int) -> str:
    value = ctypes.create_string_buffer(32)
    result = function(value, 32, device)
    return value.value.decode().lower() if not result else f"error {result}"


class Job:
    """It holds memory on two GPUs and says, each time that it is asked, what it is told."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.runtime = self.load(library(options.libcudart, "cuda_runtime/lib/libcudart.so*", "cu1*/lib/libcudart.so*"))
        self.nccl = None
        if not options.without_nccl:
            self.nccl = self.load(library(options.libnccl, "nccl/lib/libnccl.so*"))
        self.do(self.cuda.cuInit(0))
        for device, size in ((0, 192), (1, 128)):
            context, at = ctypes.c_void_p(), ctypes.c_uint64()
            self.do(self.cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
            self.do(self.cuda.cuCtxSetCurrent(context))
            self.do(self.cuda.cuMemAlloc_v2(ctypes.byref(at), ctypes.c_size_t(size * MIB)))
        self.torch: Any = None
        with contextlib.suppress(ImportError):
            import torch

            self.torch = torch if torch.cuda.is_available() else None

    @staticmethod
    def load(path: str) -> Any:
        with contextlib.suppress(OSError):
            return ctypes.CDLL(path) if path else None
        return None

    @staticmethod
    def do(result: int) -> None:
        if result:
            raise SystemExit(f"the driver says {result}")

    def by_address(self, name: str) -> Any:
        at, status = ctypes.c_void_p(), ctypes.c_int()
        more = (12000, ctypes.c_uint64(0), ctypes.byref(status))
        self.do(self.cuda.cuGetProcAddress_v2(name.encode(), ctypes.byref(at), *more))
        return ctypes.CFUNCTYPE(ctypes.c_int)(at.value or 0)

    def driver(self, get: Any, uuid: str, device: int) -> dict[str, Any]:
        raw = ctypes.create_string_buffer(16)
        result = get(uuid)(raw, device)
        return {
            "uuid": raw.raw.hex() if not result else f"error {result}",
            "bus_id": text(get("cuDeviceGetPCIBusId"), device),
            "attributes": self.together(lambda which: number(get("cuDeviceGetAttribute"), which, device)),
        }

    @staticmethod
    def together(ask: Any) -> Any:
        found = {name: ask(which) for name, which in ATTRIBUTES.items()}
        return bus_id(**found) if all(isinstance(value, int) for value in found.values()) else found

    def found_by(self, function: Any) -> dict[str, Any]:
        """Which device a bus id leads to, of each that NVML knows; the controller adds what is right."""
        return {name: number(function, name.encode()) for name in self.options.bus_ids.split(",")}

    def of_runtime(self, device: int) -> dict[str, Any]:
        runtime = self.runtime
        raw = ctypes.create_string_buffer(8192)
        get = getattr(runtime, "cudaGetDeviceProperties_v2", None) or runtime.cudaGetDeviceProperties
        result = get(raw, device)
        found: dict[str, Any] = {
            "bus_id": text(runtime.cudaDeviceGetPCIBusId, device),
            "attributes": self.together(lambda which: number(runtime.cudaDeviceGetAttribute, which, device)),
            "properties_uuid": raw.raw[256:272].hex() if not result else f"error {result}",
        }
        # pciBusID, pciDeviceID, pciDomainID stand one behind the other; where, differs between versions of CUDA.
        with contextlib.suppress(ImportError):
            from cuda.bindings import runtime as bindings

            result, told = bindings.cudaGetDeviceProperties(device)
            if not int(result):
                found["bindings_properties"] = bus_id(told.pciDomainID, told.pciBusID, told.pciDeviceID)
        return found

    def of_torch(self, device: int) -> dict[str, Any]:
        told = self.torch.cuda.get_device_properties(device)
        numbers = [getattr(told, name, None) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
        found = {"uuid": str(getattr(told, "uuid", "")).replace("-", "")}
        if None not in numbers:
            found["properties"] = bus_id(*numbers)
        return found

    def of_nccl(self) -> dict[str, Any]:
        """What NCCL goes by: a communicator over both GPUs, with its log and the topology that it found."""
        log, dump = Path(self.options.folder, "nccl.log"), Path(self.options.folder, "topology.xml")
        for path in (log, dump):
            path.unlink(missing_ok=True)
        communicators, devices = (ctypes.c_void_p * 2)(), (ctypes.c_int * 2)(0, 1)
        os.environ["NCCL_TOPO_DUMP_FILE"] = str(dump)
        result = self.nccl.ncclCommInitAll(communicators, 2, devices)
        if result:
            return {"error": result}
        for communicator in communicators:
            self.nccl.ncclCommDestroy(ctypes.c_void_p(communicator))
        # One log for all of the process's life: the last lines are this communicator's.
        lines = Path(self.options.log).read_text(errors="replace") if Path(self.options.log).exists() else ""
        found = re.findall(r"rank (\d) nranks 2 cudaDev (\d) nvmlDev (\d) busId (\w+)", lines)[-2:]
        topology = dump.read_text() if dump.exists() else ""
        return {
            "log": {rank: {"nvml_device": int(nvml), "bus_id": of_nccl(name)} for rank, _, nvml, name in found},
            "dump": re.findall(r'<pci busid="([^"]+)" class="0x0302', topology),
            "ranks": re.findall(r'<gpu dev="(\d)"[^>]* rank="(\d)"', topology),
        }

    def look(self) -> dict[str, Any]:
        by_name = {"cuDeviceGetUuid": "cuDeviceGetUuid_v2"}
        said: dict[str, Any] = {"devices": []}
        for device in (0, 1):
            direct = self.driver(lambda name: self.cuda[by_name.get(name, name)], "cuDeviceGetUuid", device)
            found = {"driver": direct, "driver_by_address": self.driver(self.by_address, "cuDeviceGetUuid", device)}
            if self.runtime is not None:
                found["runtime"] = self.of_runtime(device)
            if self.torch is not None:
                found["torch"] = self.of_torch(device)
            said["devices"].append(found)
        said["driver_by_bus_id"] = self.found_by(self.cuda.cuDeviceGetByPCIBusId)
        if self.runtime is not None:
            said["runtime_by_bus_id"] = self.found_by(self.runtime.cudaDeviceGetByPCIBusId)
        if self.nccl is not None:
            said["nccl"] = self.of_nccl()
        return said

    def serve(self) -> None:
        print(json.dumps({"pid": os.getpid()}), flush=True)
        for _ in sys.stdin:
            print(json.dumps(self.look()), flush=True)


def of_nccl(name: str) -> str:
    """NCCL writes ``busId f000`` for 0000:0f:00.0: domain, bus, slot and function as one number."""
    whole = int(name, 16)
    return bus_id(whole >> 20, whole >> 12 & 255, whole >> 4 & 255)


# --- who moves it -----------------------------------------------------------------------------------------------------


def gpus() -> list[dict[str, Any]]:
    """GPUs 0 and 1, as NVML has them."""
    import pynvml

    pynvml.nvmlInit()
    found = []
    for index in (0, 1):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        uuid = pynvml.nvmlDeviceGetUUID(handle)
        pci = pynvml.nvmlDeviceGetPciInfo(handle)
        held = {one.pid: one.usedGpuMemory for one in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
        uuid = uuid if isinstance(uuid, str) else uuid.decode()
        found.append(
            {
                "uuid": uuid.removeprefix("GPU-").replace("-", ""),
                "bus_id": bus_id(pci.domain, pci.bus, pci.device),
                "used": int(pynvml.nvmlDeviceGetMemoryInfo(handle).used),
                "held": held,
            }
        )
    return found


class Run:
    """One process, and what was said of it before and after each move."""

    def __init__(self, way: str, options: argparse.Namespace, folder: str):
        from limosa.parking import LIBRARY

        self.way, self.bad, log = way, dict[str, set[str]](), f"{folder}/nccl-{way}.log"
        env = {**os.environ, "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,GRAPH", "NCCL_DEBUG_FILE": log}
        env |= {WAYS[way]: str(LIBRARY)} if WAYS[way] else {}
        bus_ids = ",".join(gpu["bus_id"] for gpu in gpus())
        argv = [sys.executable, __file__, "--job", "--folder", folder, "--log", log, "--bus-ids", bus_ids]
        argv += [f"--libcudart={options.libcudart}", f"--libnccl={options.libnccl}"]
        argv += ["--without-nccl"] if options.without_nccl else []
        self.job = subprocess.Popen(argv, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.pid = int(self.answer()["pid"])

    def answer(self) -> dict[str, Any]:
        assert self.job.stdout is not None
        line = self.job.stdout.readline()
        if not line:
            raise SystemExit(f"the job has ended with {self.job.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def look(self, when: str, exchanged: bool) -> None:
        assert self.job.stdin is not None
        self.job.stdin.write("look\n")
        self.job.stdin.flush()
        said, there = self.answer(), gpus()
        held = [gpu["held"].get(self.pid) for gpu in there]
        print(json.dumps({"way": self.way, "when": when, "said": said, "nvml": there, "held": held}), flush=True)
        for device, answers in enumerate(said["devices"]):
            right = there[1 - device if exchanged else device]
            for who, told in answers.items():
                for what, value in told.items():
                    if value != right["uuid" if "uuid" in what else "bus_id"]:
                        self.bad.setdefault(f"{who} {what}", set()).add(when)
        for rank, told in said.get("nccl", {}).get("log", {}).items():
            if told["bus_id"] != there[1 - int(rank) if exchanged else int(rank)]["bus_id"]:
                self.bad.setdefault("nccl busId", set()).add(when)
        for who in ("driver_by_bus_id", "runtime_by_bus_id"):
            for place, gpu in enumerate(there):
                if who in said and said[who][gpu["bus_id"]] != (1 - place if exchanged else place):
                    self.bad.setdefault(who, set()).add(when)

    def move(self) -> None:
        argv = [sys.executable, "-m", "limosa", "move", str(self.pid), "--map", "0=1,1=0", "-o", "json"]
        ran = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=300)
        route = json.loads(ran.stdout).get("way") if ran.stdout.startswith("{") else ran.stderr.strip()
        print(json.dumps({"way": self.way, "move": ran.returncode, "route": route}), flush=True)
        if ran.returncode:
            raise SystemExit(ran.stderr)

    def all(self) -> None:
        try:
            self.look("before", exchanged=False)
            self.move()
            self.look("after", exchanged=True)
            self.move()
            self.look("back", exchanged=False)
        finally:
            self.job.kill()
            self.job.wait()
        wrong = {what: sorted(when) for what, when in sorted(self.bad.items())}
        print(json.dumps({"way": self.way, "verdict": {"not_where_it_is": wrong}}), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--libcudart", default="")
    parser.add_argument("--libnccl", default="")
    parser.add_argument("--without-nccl", action="store_true")
    parser.add_argument("--only", choices=list(WAYS))
    for hidden in ("--folder", "--log", "--bus-ids"):
        parser.add_argument(hidden, default="", help=argparse.SUPPRESS)
    parser.add_argument("--job", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        Job(options).serve()
        return 0
    with tempfile.TemporaryDirectory() as folder:
        for way in [options.only] if options.only else WAYS:
            Run(way, options, folder).all()
    return 0


if __name__ == "__main__":
    sys.exit(main())

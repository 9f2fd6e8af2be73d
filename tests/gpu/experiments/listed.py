"""On which GPUs NVML lists a process with memory on two, before and after the driver has restored it.

    python tests/gpu/experiments/listed.py [plain] [peers] [torch]

Bare driver calls, no Limosa: checkpoint and restore where it is, then with its two GPUs exchanged, and back. Each line
is one JSON object: the bytes that NVML counts for it, by GPU, and what is used of each GPU by anybody. "plain" has a
block on each of the two, "peers" has access from each to the other's as well, "torch" copies from one to the other as
PyTorch does. Needs three GPUs or more, cuda-bindings, nvidia-ml-py, root; "torch" PyTorch.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

CHILD = r"""
import sys
from cuda.bindings import driver
def done(answer):
    assert int(answer[0]) == 0, answer[0]
    return answer[1] if len(answer) > 1 else None
done(driver.cuInit(0))
for gpu in (0, 1):
    done(driver.cuCtxSetCurrent(done(driver.cuDevicePrimaryCtxRetain(done(driver.cuDeviceGet(gpu))))))
    address = done(driver.cuMemAlloc(32 << 20))
    done(driver.cuMemsetD8(address, 7, 32 << 20))
if sys.argv[1] == "peers":
    contexts = [done(driver.cuDevicePrimaryCtxRetain(done(driver.cuDeviceGet(gpu)))) for gpu in (0, 1)]
    for own, other in (contexts, contexts[::-1]):
        done(driver.cuCtxSetCurrent(own))
        done(driver.cuCtxEnablePeerAccess(other, 0))
print("ready", flush=True)
sys.stdin.read()
"""
TORCH = r"""
import sys, torch
first = torch.zeros(1 << 22, dtype=torch.int64, device="cuda:0")
assert bool((first.to("cuda:1").to("cuda:0") == 0).all().item())
torch.cuda.synchronize()
print("ready", flush=True)
sys.stdin.read()
"""


def done(answer: Any) -> Any:
    if int(answer[0]):
        raise RuntimeError(str(answer[0]))
    return answer[1] if len(answer) > 1 else None


def listed(nvml: Any, pid: int) -> dict[int, int]:
    """GPU → bytes, where it is listed."""
    found = {}
    for index in range(nvml.nvmlDeviceGetCount()):
        for process in nvml.nvmlDeviceGetComputeRunningProcesses(nvml.nvmlDeviceGetHandleByIndex(index)):
            if process.pid == pid:
                found[index] = process.usedGpuMemory
    return found


def used(nvml: Any) -> list[int]:
    """Bytes in use on each GPU, by whomever."""
    count = range(nvml.nvmlDeviceGetCount())
    return [nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByIndex(index)).used for index in count]


def tried(kind: str, cuda: Any, nvml: Any) -> None:
    """One kind of job, through all of it."""
    uuids = [done(cuda.cuDeviceGetUuid(gpu)) for gpu in range(done(cuda.cuDeviceGetCount()))]
    command = [sys.executable, "-c", TORCH if kind == "torch" else CHILD, kind]
    job = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def say(when: str) -> None:
        line = {"job": kind, "when": when, "bytes": listed(nvml, job.pid), "used": used(nvml)}
        print(json.dumps(line), flush=True)

    try:
        assert job.stdout is not None
        assert job.stdout.readline().strip() == "ready"
        say("before")
        for name, order in (("where it is", {}), ("exchanged", {0: 1, 1: 0}), ("back", {0: 1, 1: 0})):
            pairs = []
            for gpu in range(len(uuids)) if order else ():
                pair = cuda.CUcheckpointGpuPair()
                pair.oldUuid, pair.newUuid = uuids[gpu], uuids[order.get(gpu, gpu)]
                pairs.append(pair)
            lock = cuda.CUcheckpointLockArgs()
            lock.timeoutMs = 5000
            done(cuda.cuCheckpointProcessLock(job.pid, lock))
            done(cuda.cuCheckpointProcessCheckpoint(job.pid, None))
            say(f"{name}: checkpointed")
            args = cuda.CUcheckpointRestoreArgs()
            if pairs:
                args.gpuPairs, args.gpuPairsCount = pairs, len(pairs)
            done(cuda.cuCheckpointProcessRestore(job.pid, args))
            done(cuda.cuCheckpointProcessUnlock(job.pid, None))
            for seconds in (0, 2):
                time.sleep(seconds)
                say(f"{name}: {seconds} s after")
    finally:
        job.kill()
        job.wait()


def main() -> None:
    import pynvml
    from cuda.bindings import driver as cuda

    pynvml.nvmlInit()
    done(cuda.cuInit(0))
    for kind in sys.argv[1:] or ("plain", "peers", "torch"):
        tried(kind, cuda, pynvml)


if __name__ == "__main__":
    main()

"""On which GPUs NVML lists a process with memory on two, before and after the driver has restored it.

    python tests/gpu/experiments/listed.py

Bare driver calls, no Limosa: checkpoint and restore where it is, then with its two GPUs exchanged, and back. Each line
is one JSON object: the bytes that NVML counts for it, by GPU. Needs three GPUs or more, cuda-bindings, nvidia-ml-py,
root.
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


def main() -> None:
    import pynvml
    from cuda.bindings import driver as cuda

    pynvml.nvmlInit()
    done(cuda.cuInit(0))
    uuids = [done(cuda.cuDeviceGetUuid(gpu)) for gpu in range(done(cuda.cuDeviceGetCount()))]
    job = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert job.stdout is not None
        assert job.stdout.readline().strip() == "ready"
        print(json.dumps({"when": "before", "bytes": listed(pynvml, job.pid)}), flush=True)
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
            print(json.dumps({"when": f"{name}: checkpointed", "bytes": listed(pynvml, job.pid)}), flush=True)
            args = cuda.CUcheckpointRestoreArgs()
            if pairs:
                args.gpuPairs, args.gpuPairsCount = pairs, len(pairs)
            done(cuda.cuCheckpointProcessRestore(job.pid, args))
            done(cuda.cuCheckpointProcessUnlock(job.pid, None))
            for seconds in (0, 5):
                time.sleep(seconds)
                when = f"{name}: {seconds} s after"
                print(json.dumps({"when": when, "bytes": listed(pynvml, job.pid)}), flush=True)
    finally:
        job.kill()
        job.wait()


if __name__ == "__main__":
    main()

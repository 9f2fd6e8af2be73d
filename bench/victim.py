"""The PyTorch job of ``gpu.py``: computes all the while, stamps its memory, notices what is not as it left it.

    python victim.py FOLDER [--pair] [--contexts] [--device cuda:0]

FOLDER/order holds ``<number> <GB that change> <GB that nobody writes>``; when it does, the job checks what it holds,
lets go of it, holds that much (in tensors of 1 GB) and says ``HELD <number>``; ``rest`` in place of sizes
has it wait for the next order, ``stop`` ends it.
After each step CLOCK_MONOTONIC goes to FOLDER/ticks. ``--pair``: a second process does the same on the next GPU.
``--contexts``: it has a context on the second GPU, too, and nothing else there.
"""

import os
import subprocess
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tests", "gpu", "victims"))

import torch
from orders import IDLE, order
from pages import Pages
from stale import Stale

GB, TENSOR = 10**9, 10**9


class Held:
    """What it holds: memory that changes, in turns, and memory that stays as it is."""

    def __init__(self, device, changing, still):
        self.pages = 0  # no two are alike: what is alike is written to disk once
        self.changing = self._tensors(device, changing)
        self.still = self._tensors(device, still)
        self.turn = 0
        self.a = torch.rand(4096, 4096, device=device, dtype=torch.bfloat16) / 64
        self.b = self.a.clone()

    def _tensors(self, device, gigabytes):
        left, made = int(gigabytes * GB), []
        while left > 0:
            pages = Pages(device, min(left, TENSOR), window=64 << 20, first=self.pages)
            self.pages += pages.count
            made.append(pages)
            left -= TENSOR
        return made

    def step(self):
        for _ in range(4):
            self.b = torch.mm(self.a, self.b)
        if self.changing:
            self.changing[self.turn % len(self.changing)].step()
            self.turn += 1
        torch.cuda.synchronize()

    def check(self):
        for pages in self.changing + self.still:
            pages.check()


def main():
    folder = sys.argv[1]
    device = sys.argv[sys.argv.index("--device") + 1] if "--device" in sys.argv else "cuda:0"
    second = None
    if "--pair" in sys.argv:
        place = os.path.join(folder, "second")
        os.makedirs(place, exist_ok=True)
        second = subprocess.Popen([sys.executable, os.path.abspath(__file__), place, "--device", "cuda:1"])
    torch.cuda.set_device(device)  # as every rank does: without it a context on the first GPU comes beside its own
    torch.zeros(1, device=device)
    if "--contexts" in sys.argv:
        torch.cuda.synchronize("cuda:1")
    ticks = os.open(os.path.join(folder, "ticks"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    print("READY", flush=True)
    held, last, heard = None, "", time.monotonic()
    while True:
        told = order(folder, last)
        if told is None and held is None:
            if time.monotonic() - heard > IDLE:
                os._exit(4)
            time.sleep(0.02)
            continue
        try:
            if told is not None:
                last, words = told
                if held is not None:
                    held.check()
                    held = None
                    torch.cuda.empty_cache()
                if words == ["rest"]:
                    heard = time.monotonic()
                    print(f"RESTS {last}", flush=True)
                    continue
                if words == ["stop"]:
                    if second is not None and second.wait(60) != 0:
                        raise Stale("the second process ended badly")
                    print("DONE", flush=True)
                    os._exit(0)
                held, heard = Held(device, *map(float, words)), time.monotonic()
                held.step()
                print(f"HELD {last}", flush=True)
            held.step()
        except Stale as error:
            print(f"MISMATCH {error}", flush=True)
            os._exit(3)
        os.write(ticks, f"{time.monotonic():.6f}\n".encode())


if __name__ == "__main__":
    main()

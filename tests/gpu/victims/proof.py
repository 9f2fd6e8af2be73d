"""What the victims of the proofs share: a trace of results, one line a step, that its twin must write bit for bit.

A victim is started as ``python proof_*.py FOLDER [--hold N] …`` and writes ``<step> <CLOCK_MONOTONIC> <result>`` to
FOLDER/trace for each step. FOLDER/until holds the number of the step that is the last one. With ``--hold`` it waits
after that many steps until the file is there: an undisturbed twin does not take the GPU from those that are moved.
"""

import hashlib
import os
import time


class Trace:
    """The results so far."""

    def __init__(self, folder, hold=0, name="trace"):
        self.folder, self.hold, self.steps, self.last = folder, hold, 0, None
        self.file = os.open(os.path.join(folder, name), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def step(self, *values):
        """Writes a line; returns whether it was the last."""
        os.write(self.file, f"{self.steps} {time.monotonic():.6f} {':'.join(map(str, values))}\n".encode())
        if self.steps == 0:
            print("READY", flush=True)
        self.steps += 1
        while self.last is None:
            try:
                with open(os.path.join(self.folder, "until"), encoding="ascii") as file:
                    self.last = int(file.read())
            except FileNotFoundError:
                if self.steps != self.hold or os.path.exists(os.path.join(self.folder, "go")):
                    return False
                time.sleep(0.02)
        return self.steps >= self.last


def digest(*buffers):
    """A few bytes that tell whether these bytes are the same."""
    found = hashlib.sha256()
    for buffer in buffers:
        found.update(buffer)
    return found.hexdigest()[:32]


def done():
    """The last word; contexts that were moved need not be taken down, which is not what is tested."""
    os.write(1, b"DONE\n")  # whole, beside other ranks' lines
    os._exit(0)

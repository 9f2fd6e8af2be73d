"""``victim.py`` without a framework, for software GPUs, where the rows of ``gpu.py`` are tried: the same orders.

    python plain_victim.py FOLDER

$LIMOSA_BENCH_SCALE is what sizes are multiplied with.
"""

import os
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tests", "gpu", "victims"))

from orders import IDLE, order
from plain import PAGE, Plain

SCALE = float(os.environ.get("LIMOSA_BENCH_SCALE", "1"))
PIECE = 10**9 if SCALE == 1 else 32 << 20  # what the shim takes for large


class Held:
    """Pieces of memory with a number of their own each; those that change are stamped anew in turn."""

    def __init__(self, gpu, changing, still):
        self.gpu, self.pieces, self.turn = gpu, [], 0
        size = PIECE // PAGE * PAGE
        self.changing = round(changing * 1e9 * SCALE / PIECE) or 1
        for number in range(self.changing + round(still * 1e9 * SCALE / PIECE)):
            at = gpu.alloc(size)
            gpu.stamp(at, size, number)
            self.pieces.append([at, size, gpu.hash(at, size), number])

    def step(self):
        piece = self.pieces[self.turn % self.changing]
        self.look(piece)
        at, size, _, epoch = piece
        self.gpu.stamp(at, size, epoch + 1000)
        piece[2:] = self.gpu.hash(at, size), epoch + 1000
        self.turn += 1
        time.sleep(0.005)

    def look(self, piece):
        if self.gpu.hash(piece[0], piece[1]) != piece[2]:
            print(f"MISMATCH in what epoch {piece[3]} has written", flush=True)
            os._exit(3)

    def check(self):
        for piece in self.pieces:
            self.look(piece)

    def let_go(self):
        for piece in self.pieces:
            self.gpu.free(piece[0])


def main():
    folder, gpu = sys.argv[1], Plain()
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
        if told is not None:
            last, words = told
            heard = time.monotonic()
            if held is not None:
                held.check()
                held.let_go()
                held = None
            if words == ["rest"]:
                print(f"RESTS {last}", flush=True)
                continue
            if words == ["stop"]:
                print("DONE", flush=True)
                os._exit(0)
            held = Held(gpu, *map(float, words))
            print(f"HELD {last}", flush=True)
        held.step()
        os.write(ticks, f"{time.monotonic():.6f}\n".encode())


if __name__ == "__main__":
    main()

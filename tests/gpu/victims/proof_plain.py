"""Memory that is stamped and hashed without a framework: each result depends on all that was done before.

python proof_plain.py FOLDER [--mib 64] [--hold N] [--pace SECONDS]
"""

import argparse
import os
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from plain import Plain
from proof import Trace, done

PARTS = 16


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--hold", type=int, default=0)
    parser.add_argument("--pace", type=float, default=0.005)
    options = parser.parse_args()
    gpu, size = Plain(), options.mib << 20
    trace, at, part = Trace(options.folder, options.hold), gpu.alloc(size), size // PARTS
    gpu.stamp(at, size, 0)
    found, last = 0, False
    while not last:
        place = at + trace.steps % PARTS * part
        found = gpu.hash(place, part, found)
        gpu.stamp(place, part, trace.steps + 1 + found % 1000)
        last = trace.step(f"{found:x}")
        time.sleep(options.pace)
    done()


if __name__ == "__main__":
    main()

"""Run by test_crash: for each line of standard input, a child that writes or removes an image and dies at a step.

In: lines of JSON {dest, verb: "write" | "remove", mode: "n" | "step", n, step, last, when}. Out: how each child ended,
one number a line (-9 where it was killed). A program of its own, because it forks and must have no other threads.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

from image_material import DyingAtStep, DyingFiles, removal_step_of, step_of, write_chunked

from limosa.image import remove


def child(order: dict) -> None:
    names = step_of if order["verb"] == "write" else removal_step_of
    if order["mode"] == "n":
        files = DyingFiles(order["n"], order["when"])
    else:
        files = DyingAtStep(order["step"], order["when"], order["last"], names)
    dest = Path(order["dest"])
    if order["verb"] == "write":
        write_chunked(dest, files).close()
    else:
        remove(dest, files=files)


def main() -> None:
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                child(json.loads(line))
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()

"""A job that keeps stamping (epoch, page) into device memory and notices a page that is not what it wrote last.

    python stamping.py FOLDER [--gb 0.25] [--device cuda:0] [--interval 0.005] [--steps N]
        [--pinned] [--graph] [--two-gpus] [--managed] [--busy SECONDS]
        [--children N] [--ipc] [--nccl] [--jax]

READY once all is set up; then ``tick <n> <CLOCK_MONOTONIC>`` after each step: the longest gap is the pause as the job
felt it. When ``stop`` appears in FOLDER (or after --steps) everything is checked a last time: DONE, exit code 0. A page
that is wrong: ``MISMATCH …``, exit code 3. SIGUSR1 damages a word, to show that the victim would notice.
"""

import argparse
import os
import signal
import socket
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--gb", type=float, default=0.25)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--interval", type=float, default=0.005)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--ready", default="", help="a file to make once all is set up")
    parser.add_argument("--children", type=int, default=0)
    parser.add_argument("--rank", type=int, default=-1, help="with --port: one of two NCCL ranks")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--busy", type=float, default=0.0)
    for flag in ("pinned", "graph", "two-gpus", "managed", "ipc", "nccl", "jax"):
        parser.add_argument(f"--{flag}", action="store_true")
    return parser.parse_args()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def build(options):
    """The parts that this job is made of, in the order in which they are stepped."""
    size = int(options.gb * (1 << 30))
    if options.nccl:  # a parent that holds nothing and two ranks, one a GPU
        import family

        port = str(free_port())
        flags = [["--gb", str(options.gb), "--device", f"cuda:{r}", "--rank", str(r), "--port", port] for r in (0, 1)]
        return [family.Children(options.folder, flags)]
    if options.jax:
        import jax_pages

        return [jax_pages.JaxPages(size)]
    import parts
    from pages import Pages

    made = [Pages(options.device, size)]
    if options.rank >= 0:
        import family

        made.append(family.Rank(options.rank, 2, options.port, options.device))
    if options.pinned:
        made.append(parts.Pinned(options.device))
    if options.graph:
        made.append(parts.Graph(options.device))
    if options.two_gpus:
        made.append(parts.SecondGpu(size))
    if options.managed:
        made.append(parts.Managed(options.device))
    if options.busy:
        made.append(parts.Busy(options.busy))
    if options.ipc or options.children:
        import family

        if options.ipc:
            made.append(family.Shared(options.device, options.folder))
        flags = [["--gb", str(options.gb), "--device", options.device] for _ in range(options.children)]
        if flags:
            made.append(family.Children(options.folder, flags))
    return made


def main():
    options = arguments()
    os.makedirs(options.folder, exist_ok=True)
    from stale import Stale

    try:
        made = build(options)
        spoil = []
        signal.signal(signal.SIGUSR1, lambda *_: spoil.append(1))
        if options.ready:
            with open(options.ready, "w", encoding="ascii"):
                pass
        print("READY", flush=True)
        step = 0
        while True:
            step += 1
            last = os.path.exists(os.path.join(options.folder, "stop")) or step == options.steps
            if spoil:
                spoil.clear()
                made[0].spoil()
            for part in made:
                part.step()
                if hasattr(part, "agreed"):
                    last = part.agreed(last)
            print(f"tick {step} {time.monotonic():.6f}", flush=True)
            if last:
                break
            time.sleep(options.interval)
        for part in made:
            part.check()
    except Stale as error:
        print(f"MISMATCH {error}", flush=True)
        os._exit(3)
    print("DONE", flush=True)
    # A context that was moved need not be taken down: that is not what is tested here.
    os._exit(0)


if __name__ == "__main__":
    main()

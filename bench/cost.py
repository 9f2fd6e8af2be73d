"""What the shim costs a job that nobody moves: the same program with it and without, in turns, in one run.

    python bench/cost.py [--quads 9] [--only call,loop,training] [--json FILE]

call: nanoseconds that passing the gate adds to the cheapest call of the driver. loop: a launch of a small kernel, one
after the other, in PyTorch. training: a step of a GPT (12 layers of 768, bf16, AdamW, 24 × 1024 tokens: the GPU is what
it waits for) in PyTorch. Two processes live side by side, one under the shim; only one works at a time. They are asked
with, without, without, with: of such a quad the two sums are compared, so that what drifts evenly is on both sides; the
median of all quads counts. What waits for the processor (call, loop) does so on one and the same core, after as many
turns as it takes until both are steady. Exit code 0 where all is within the limits, 1 where not, 3 where something
could not be measured.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "src")]

from report import table, verdict  # noqa: E402

from limosa.native.build import build_shim, compilers  # noqa: E402
from limosa.parking import LIBRARY, preload  # noqa: E402

LIMITS = {"call": 40.0, "training": 0.5, "loop": 2.0, "collective": 60.0, "ddp": 0.3, "fsdp": 0.3}
NANOSECONDS = ("call", "collective")
"""What is added is told as such; of the others as a part."""
WORDS = {
    "collective": ("a call of ncclAllReduce", "ns"),
    "ddp": ("a step of GPT training, DDP on two ranks", "ms"),
    "fsdp": ("a step of GPT training, FSDP2 on two ranks", "ms"),
    "call": ("a driver call through the gate", "ns"),
    "training": ("a step of GPT training, PyTorch", "ms"),
    "loop": ("a launch of a small kernel, PyTorch", "µs"),
}
START_SECONDS, ROUND_SECONDS, WARM_SECONDS = 90.0, 60.0, 4.0
CORES = os.sched_getaffinity(0)


def training(device: str) -> Any:
    """A GPT and what makes one step of it; seconds a step of so many."""
    import torch
    from torch import nn

    tiny = device == "cpu"
    width, depth, heads, tokens, batch, words = (64, 2, 2, 32, 2, 256) if tiny else (768, 12, 12, 1024, 24, 50304)
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("high")

    class Gpt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.word, self.place = nn.Embedding(words, width), nn.Embedding(tokens, width)
            layer = nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            self.layers, self.norm = (
                nn.TransformerEncoder(layer, depth, enable_nested_tensor=False),
                nn.LayerNorm(width),
            )
            self.head = nn.Linear(width, words, bias=False)

        def forward(self, x: Any) -> Any:
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
            seen = self.word(x) + self.place(torch.arange(x.shape[1], device=x.device))
            return self.head(self.norm(self.layers(seen, mask=mask, is_causal=True)))

    model = Gpt().to(device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x = torch.randint(words, (batch, tokens), device=device)

    def steps(n: int) -> float:
        settle(device)
        begun = time.perf_counter()
        for _ in range(n):
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(model(x).view(-1, words), x.view(-1))
            loss.backward()
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        settle(device)
        return (time.perf_counter() - begun) / n * 1e3

    return steps


def loop(device: str) -> Any:
    """Small kernels one after the other: the processor is what it waits for; microseconds a launch."""
    import torch

    x = torch.zeros(1024, device=device)

    def launches(n: int) -> float:
        settle(device)
        begun = time.perf_counter()
        for _ in range(n):
            x.add_(1.0)
        settle(device)
        return (time.perf_counter() - begun) / n * 1e6

    return launches


def settle(device: str) -> None:
    """Wait for the device."""
    if device != "cpu":
        import torch

        torch.cuda.synchronize()


def work(device: str) -> None:
    """One of the two processes: says that it is ready, then answers "WHAT N" with a measurement."""
    made: dict[str, Any] = {}
    settle(device)
    print("ready", flush=True)
    for line in sys.stdin:
        what, n = line.split()
        if what not in made:
            os.sched_setaffinity(0, CORES)  # the threads that it starts, autograd's among them, have all of them
            made[what] = {"training": training, "loop": loop}[what](device)
            made[what](10)
            gc.collect()
            gc.disable()
            if what == "loop":
                os.sched_setaffinity(0, {core()})  # this thread alone: the driver's own stay where they are
        print(made[what](int(n)), flush=True)


def core() -> int:
    """Where what waits for the processor is measured: the last core, which the kernel itself uses least."""
    return max(CORES)


class Side:
    """A process that measures, under the shim or not."""

    def __init__(self, argv: Sequence[str], shim: bool, pin: bool = False):
        bare = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
        self.ready = False
        self.process = subprocess.Popen(
            argv, env=preload(bare) if shim else bare, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        if pin:
            os.sched_setaffinity(self.process.pid, {core()})

    def wait(self) -> None:
        """Until it is ready."""
        if not self.ready:
            self._limited(START_SECONDS, lambda: self._line("ready"))
            self.ready = True

    def ask(self, text: str) -> float:
        """One measurement."""
        assert self.process.stdin is not None
        print(text, file=self.process.stdin, flush=True)
        return float(self._limited(ROUND_SECONDS, self._line))

    def end(self) -> None:
        """It has done its work."""
        self.process.kill()
        self.process.wait()

    def _line(self, wanted: str = "") -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if not wanted or line.strip() == wanted:
                return line
        raise OSError(f"the program ended with {self.process.wait(10)}")

    def _limited(self, seconds: float, call: Any) -> Any:
        timer = threading.Timer(seconds, self.process.kill)
        timer.start()
        try:
            return call()
        finally:
            timer.cancel()


class Asks(Protocol):
    """What is compared: a process, or some, that measure when they are asked."""

    def wait(self) -> None:
        """Until it is ready."""

    def ask(self, text: str) -> float:
        """One measurement."""


def steady(sides: Sequence[Asks], text: str, seconds: float) -> None:
    """Has both work in turn until neither becomes faster or slower any more, for so long at most."""
    end, seen = time.monotonic() + seconds, [[side.ask(text)] for side in sides]
    while time.monotonic() < end:
        for side, values in zip(sides, seen, strict=True):
            values.append(side.ask(text))
        if all(len(v) >= 6 and max(v[-5:]) < 1.03 * min(v[-5:]) for v in seen):
            return


def compare(what: str, sides: Sequence[Asks], text: str, quads: int) -> dict[str, Any]:
    """Measures one thing with (the first side) and without.

    Returns:
        A row: "what", "with", "without", "added", "unit", "must", "ok", "spread" (of the middle half of all quads), and
        every quad.
    """
    for side in sides:
        side.wait()
    steady(sides, text, WARM_SECONDS)
    one, other = sides
    found = []
    for _ in range(quads):
        a, b, c, d = one.ask(text), other.ask(text), other.ask(text), one.ask(text)
        found.append(((a + d) / 2, (b + c) / 2))
    with_, without = (statistics.median(quad[i] for quad in found) for i in (0, 1))
    added = sorted(a - b if what in NANOSECONDS else (a / b - 1) * 100 for a, b in found)
    middle, unit = statistics.median(added), "ns" if what in NANOSECONDS else "%"
    return {
        "what": WORDS[what][0],
        "with": round(with_, 4),
        "without": round(without, 4),
        "unit": WORDS[what][1],
        "added": round(middle, 3),
        "must": f"≤ {LIMITS[what]:g} {unit}",
        "ok": middle <= LIMITS[what],
        "spread": [round(added[len(added) // 4], 3), round(added[-1 - len(added) // 4], 3)],
        "rounds": {"with": [a for a, _ in found], "without": [b for _, b in found]},
    }


def cost(quads: int = 9, only: str = "call,loop,training", device: str = "cuda") -> list[dict[str, Any]]:
    """All of it.

    Returns:
        Rows as :func:`compare` makes them; "ok" is None and "error" says why where there is no measurement.
    """
    problem = build_shim()
    rows: list[dict[str, Any]] = []
    part = 20 if device == "cpu" else 1
    # What is asked for at a time takes some tens of milliseconds: what the machine does beside it spoils few of many.
    amounts = {"call": ("2000000", 3 * quads), "loop": (f"loop {6000 // part}", 11 * quads)}
    amounts["training"] = (f"training {max(1, 2 // part)}", 4 * quads)
    torch = [sys.executable, __file__, "--work", device]
    kept: list[Side] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            if problem is not None or not LIBRARY.is_file():
                raise OSError(problem or "there is no shim")
            if set(only.split(",")) & {"loop", "training"}:
                kept = [Side(torch, shim) for shim in (True, False)]
            for what in only.split(","):
                try:
                    sides = [*kept]
                    if what == "call":
                        program, source = f"{folder}/cost", Path(__file__).with_name("cost.c")
                        argv = [*compilers()[0], "-O2", "-o", program, str(source), "-ldl"]
                        subprocess.run(argv, check=True, timeout=60)
                        for side in kept:  # they would start up beside it
                            side.wait()
                        sides = [Side([program], shim, pin=True) for shim in (True, False)]
                    text, times = amounts[what]
                    rows.append(compare(what, sides, text, times))
                except (OSError, ValueError, subprocess.SubprocessError, IndexError) as error:
                    rows.append(unmeasured(what, error))
                finally:
                    for side in sides if what == "call" else []:
                        side.end()
        except OSError as error:
            rows += [unmeasured(what, error) for what in only.split(",")]
        finally:
            for side in kept:
                side.end()
    return rows


def unmeasured(what: str, error: Exception) -> dict[str, Any]:
    """The row of what could not be measured."""
    row = {"what": WORDS[what][0], "with": None, "without": None, "unit": WORDS[what][1]}
    return {**row, "must": f"≤ {LIMITS[what]:g}", "ok": None, "error": str(error)}


def told(rows: Sequence[dict[str, Any]], path: str | None) -> int:
    """Prints rows as a table, and writes them down where asked; the exit code."""
    if path:
        Path(path).write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    head = ("what", "without the shim", "with it", "added", "limit", "")
    cells = [
        (r["what"], f"{r['without']} {r['unit']}", f"{r['with']} {r['unit']}", r["added"], r["must"], verdict(r["ok"]))
        if r["ok"] is not None
        else (r["what"], "", "", r["error"], r["must"], "not measured")
        for r in rows
    ]
    print(table(head, cells))
    return 3 if any(r["ok"] is None for r in rows) else 0 if all(r["ok"] for r in rows) else 1


def main() -> int:
    """Measure, say it, write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quads", type=int, default=9)
    parser.add_argument("--only", default="call,loop,training")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--json")
    parser.add_argument("--work", metavar="DEVICE")
    options = parser.parse_args()
    if options.work:
        work(options.work)
        return 0
    rows = cost(options.quads, options.only, options.device)
    return told(rows, options.json)


if __name__ == "__main__":
    sys.exit(main())

"""What the shim costs a job that nobody moves: the same program with it and without, in turns, in one run.

    python bench/cost.py [--rounds 15] [--only call,loop,training] [--json FILE]

call: nanoseconds that passing the gate adds to the cheapest call of the driver. training: a step of a GPT (12 layers
of 768, bf16, AdamW) in PyTorch. loop: a launch of a small kernel, one after the other. Two processes of each live side
by side, one under the shim, and are asked in turn, in changing order, so that clocks and temperatures are the same for
both; the medians of all rounds are compared, and of ratios that of each round's two. Exit code 0 where all is within
the limits, 1 where not, 3 where something could not be measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "src")]

from report import table, verdict  # noqa: E402

from limosa.native.build import build_shim, compilers  # noqa: E402
from limosa.parking import LIBRARY, preload  # noqa: E402

LIMITS = {"call": 40.0, "training": 0.5, "loop": 2.0}
WORDS = {
    "call": ("a driver call through the gate", "ns"),
    "training": ("a step of GPT training, PyTorch", "ms"),
    "loop": ("a launch of a small kernel, PyTorch", "µs"),
}
START_SECONDS, ROUND_SECONDS = 90.0, 20.0


def training(device: str) -> Any:
    """A GPT and what makes one step of it; seconds a step of so many."""
    import torch
    from torch import nn

    tiny = device == "cpu"
    width, depth, heads, tokens, batch, words = (64, 2, 2, 32, 2, 256) if tiny else (768, 12, 12, 1024, 8, 50304)
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


def work(what: str, device: str) -> None:
    """One of the two processes: says that it is ready, then answers each number with a measurement."""
    measure = {"training": training, "loop": loop}[what](device)
    for _ in range(3):
        measure(5 if what == "training" else 5000)
    print("ready", flush=True)
    for line in sys.stdin:
        print(measure(int(line)), flush=True)


class Side:
    """A process that measures, under the shim or not."""

    def __init__(self, what: str, shim: bool, device: str, program: Path):
        argv = [str(program)] if what == "call" else [sys.executable, __file__, "--work", what, "--device", device]
        bare = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
        self.process = subprocess.Popen(
            argv, env=preload(bare) if shim else bare, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def wait(self) -> None:
        """Until it is ready."""
        self._limited(START_SECONDS, lambda: self._line("ready"))

    def ask(self, n: int) -> float:
        """One measurement."""
        assert self.process.stdin is not None
        print(n, file=self.process.stdin, flush=True)
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


def compare(what: str, rounds: int, device: str, folder: Path) -> dict[str, Any]:
    """Measure one thing on both sides in turn.

    Returns:
        A row: "what", "with", "without", "added", "unit", "must", "ok", and every round.
    """
    program = folder / "cost"
    if what == "call":
        source = Path(__file__).with_name("cost.c")
        subprocess.run([*compilers()[0], "-O2", "-o", program, source, "-ldl"], check=True, timeout=60)
    amount = {"call": 2_000_000, "training": 10, "loop": 40_000}[what] // (20 if device == "cpu" else 1) or 1
    sides = {"with": Side(what, True, device, program), "without": Side(what, False, device, program)}
    found: dict[str, list[float]] = {"with": [], "without": []}
    try:
        for side in sides.values():
            side.wait()
        for turn in range(rounds):
            for name in sorted(sides, reverse=turn % 2 == 0):
                found[name].append(sides[name].ask(amount))
    finally:
        for side in sides.values():
            side.end()
    medians = {name: statistics.median(values) for name, values in found.items()}
    if what == "call":
        added, unit = medians["with"] - medians["without"], "ns"
    else:
        ratios = [a / b for a, b in zip(found["with"], found["without"], strict=True)]
        added, unit = (statistics.median(ratios) - 1) * 100, "%"
    return {
        "what": WORDS[what][0],
        "with": round(medians["with"], 4),
        "without": round(medians["without"], 4),
        "unit": WORDS[what][1],
        "added": round(added, 3),
        "must": f"≤ {LIMITS[what]:g} {unit}",
        "ok": added <= LIMITS[what],
        "rounds": found,
    }


def cost(rounds: int = 15, only: str = "call,loop,training", device: str = "cuda") -> list[dict[str, Any]]:
    """All of it.

    Returns:
        Rows as :func:`compare` makes them; "ok" is None and "error" says why where there is no measurement.
    """
    problem = build_shim()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for what in only.split(","):
            try:
                if problem is not None or not LIBRARY.is_file():
                    raise OSError(problem or "there is no shim")
                rows.append(compare(what, rounds, device, Path(folder)))
            except (OSError, ValueError, subprocess.SubprocessError, IndexError) as error:
                row = {"what": WORDS[what][0], "with": None, "without": None, "unit": WORDS[what][1]}
                rows.append({**row, "must": f"≤ {LIMITS[what]:g}", "ok": None, "error": str(error)})
    return rows


def main() -> int:
    """Measure, say it, write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="call,loop,training")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--json")
    parser.add_argument("--work")
    options = parser.parse_args()
    if options.work:
        work(options.work, options.device)
        return 0
    rows = cost(options.rounds, options.only, options.device)
    if options.json:
        Path(options.json).write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    head = ("what", "without the shim", "with it", "added", "limit", "")
    cells = [
        (r["what"], f"{r['without']} {r['unit']}", f"{r['with']} {r['unit']}", r["added"], r["must"], verdict(r["ok"]))
        if r["ok"] is not None
        else (r["what"], "", "", r["error"], r["must"], "not measured")
        for r in rows
    ]
    print(table(head, cells))
    return 3 if any(r["ok"] is None for r in rows) else 0 if all(r["ok"] for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

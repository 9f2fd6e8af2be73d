"""What ``limosa doctor`` says about the GPU's side: from what the driver's worker found out to checks in words."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from limosa.errors import LimosaError
from limosa.terms import Term

if TYPE_CHECKING:
    from limosa.gpu import DriverFacts


class Status(Term):
    """What a check comes to."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Check(msgspec.Struct, kw_only=True):
    """What one check found."""

    name: str  # stable ("driver", "criu", "ptrace_scope" …)
    # "ok", "warn" (something will be slower or is not possible) or "fail" (something needed does not work)
    status: Status
    detail: str  # what was found, in a sentence
    fix: str = ""  # what to type or to change, or ""
    exit_code: int = 0  # what a failure exits with; 0 unless status is "fail"
    more: str = ""  # what only some want to know, or ""


def ok(name: str, detail: str, more: str = "") -> Check:
    """A check that found all well."""
    return Check(name=name, status=Status.OK, detail=detail, more=more)


def warn(name: str, detail: str, fix: str = "") -> Check:
    """A check that found what is slower, or not possible, and not needed by all."""
    return Check(name=name, status=Status.WARN, detail=detail, fix=fix)


def fail(name: str, exit_code: int, detail: str, fix: str = "") -> Check:
    """A check that found what is needed and does not work."""
    return Check(name=name, status=Status.FAIL, detail=detail, fix=fix, exit_code=exit_code)


def gpu_present(sys_bus: Path = Path("/sys/bus/pci/devices"), dev: Path = Path("/dev")) -> bool:
    """Whether an NVIDIA GPU is on the PCI bus or has a device node, whatever the driver says."""
    for device in sys_bus.glob("*"):
        with contextlib.suppress(OSError):
            vendor = (device / "vendor").read_text().strip()
            if vendor == "0x10de" and (device / "class").read_text().startswith("0x03"):
                return True
    return any(re.fullmatch(r"nvidia\d+", node.name) for node in dev.glob("nvidia*"))


def facts_of(present: bool) -> DriverFacts | None:
    """What the driver's worker finds out, or None where there is no GPU to ask about."""
    if not present:
        return None
    from limosa import gpu

    try:
        with gpu.Driver() as driver:
            return driver.facts()
    except (LimosaError, OSError) as error:
        return gpu.DriverFacts(problem_id="driver-worker", problem=f"the driver's worker does not answer: {error}")


def driver_checks(facts: DriverFacts | None) -> list[Check]:
    """The checks "driver", "bindings", "symbols" and "persistence" from what was found; None: there is no GPU."""
    if facts is None:
        text = "no NVIDIA GPU in this machine: not needed (CPU jobs can be checkpointed)"
        return [ok(name, text) for name in ("driver", "bindings", "symbols", "persistence")]
    return [_driver(facts), _bindings(facts), _symbols(facts), _persistence(facts)]


def _driver(facts: DriverFacts) -> Check:
    if not facts.driver_version:
        fixing = facts.hint if facts.hint and "doctor" not in facts.hint else "install the NVIDIA driver; look at dmesg"
        return fail("driver", 12, facts.problem or "there is a GPU and no NVIDIA driver that works", fixing)
    text = f"NVIDIA {facts.driver_version}, CUDA {facts.cuda_version}, {facts.gpus} GPU{'s' * (facts.gpus != 1)}"
    text += " (software GPU: the driver in software, not a real one)" if facts.software else ""
    newer = "install driver 580 or newer"
    if not facts.can_suspend:
        return fail("driver", 12, f"{text}: too old to suspend jobs", newer)
    if not facts.available and facts.bindings_ok and not _missing(facts):  # else those checks say it
        return fail("driver", 12, f"{text}: {facts.problem}", facts.hint)
    if not facts.can_change_gpus:
        return warn("driver", f"{text}: suspends and resumes, cannot change GPUs", newer)
    if facts.mps:
        return warn("driver", f"{text}; MPS runs: its clients cannot be moved", "echo quit | nvidia-cuda-mps-control")
    if facts.mig:
        where = ", ".join(map(str, facts.mig))
        return warn("driver", f"{text}; MIG is on on GPU {where}: what runs there cannot be moved")
    return ok("driver", text)


def _bindings(facts: DriverFacts) -> Check:
    if facts.bindings_ok:
        return ok("bindings", f"cuda-bindings {facts.bindings_version} has the checkpoint calls")
    return fail("bindings", 12, facts.bindings_detail or facts.problem, "pip install -U cuda-bindings")


def _symbols(facts: DriverFacts) -> Check:
    if not facts.symbols:
        return warn("symbols", "not checked: there is no libcuda, or no bindings to ask it through")
    missing = _missing(facts)
    if missing:
        return fail("symbols", 12, f"libcuda lacks {', '.join(missing)}", "install driver 580 or newer")
    lacking = [name for name, there in facts.symbols.items() if not there]
    newer = f"; newer drivers also have {', '.join(lacking)}" if lacking else ""
    return ok("symbols", f"libcuda has cuCheckpointProcess*{newer}")


def _missing(facts: DriverFacts) -> list[str]:
    """The calls without which nothing can be suspended; others come with newer drivers."""
    return [n for n, there in facts.symbols.items() if not there and n.startswith("cuCheckpointProcess")]


def _persistence(facts: DriverFacts) -> Check:
    off = [str(index) for index, on in facts.persistence.items() if not on]
    if off:
        text = f"persistence mode is off on GPU {', '.join(off)}: restoring onto an idle GPU is slower or fails"
        return warn("persistence", text, "nvidia-smi -pm 1")
    return ok("persistence", "on" if facts.persistence else "no GPU")


def huge_pages(present: bool, path: Path = Path("/sys/kernel/mm/transparent_hugepage/enabled")) -> Check:
    """The check "transparent_huge_pages": the driver copies to host memory through them."""
    name = "transparent_huge_pages"
    try:
        mode = re.search(r"\[(\w+)\]", path.read_text())
    except OSError:
        return ok(name, "this kernel has none; the driver copies in small pages")
    chosen = mode[1] if mode else "?"
    if present and chosen != "always":
        text = f"{chosen}: the driver copies device memory to host memory about a third slower than with always"
        return warn(name, text, f"echo always > {path}")
    return ok(name, chosen)

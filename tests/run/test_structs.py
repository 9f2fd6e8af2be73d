"""Structs are known before several threads read them; nothing in the source reads one without."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
THREADS = """
import sys, threading, types
import msgspec
from limosa.structs import ready

sys.setswitchinterval(1e-6)
text = "import msgspec\\nclass A(msgspec.Struct):\\n"
text += "".join(f"    f{i}: 'dict[str, list[int]] | None' = None\\n" for i in range(40))
text += "class B(msgspec.Struct):\\n" + "".join(f"    g{i}: 'list[A]' = []\\n" for i in range(10))
module = sys.modules["made"] = types.ModuleType("made")
exec(text, module.__dict__)
data = msgspec.json.encode({f"g{i}": [{f"f{j}": {"a": [1]} for j in range(40)}] for i in range(10)})
together, right = threading.Barrier(4), []

def go():
    together.wait()
    right.append(msgspec.json.decode(data, type=ready(module.B)).g9[0].f39 == {"a": [1]})

threads = [threading.Thread(target=go) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert right == [True] * 4
"""


def test_four_threads_read_a_struct_that_nobody_has_read() -> None:
    for _ in range(8):  # without ``ready`` half of them end by SIGSEGV
        subprocess.run([sys.executable, "-c", THREADS], check=True, timeout=60)


def unready(source: str) -> list[int]:
    """The lines that read a Struct which nobody has made ready."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and ast.unparse(node.func).startswith("msgspec.")):
            continue
        function = ast.unparse(node.func).rpartition(".")[2]
        place = {"Decoder": 0, "convert": 1}.get(function)
        types = [k.value for k in node.keywords if k.arg == "type" and function in ("decode", "Decoder", "convert")]
        types += node.args[place : place + 1] if place is not None else []
        found += [node.lineno for one in types if not ast.unparse(one).startswith("ready(")]
    return found


@pytest.mark.parametrize(
    "line",
    [
        "msgspec.json.decode(data, type=Header)",
        "msgspec.msgpack.decode(data, type=type_)",
        "msgspec.convert(record.data, Rewind)",
        "msgspec.json.Decoder(Manifest)",
    ],
)
def test_one_that_is_not_made_ready_is_found(line: str) -> None:
    assert unready(line) == [1]


def test_whatever_is_read_was_made_ready() -> None:
    files = [path for path in SOURCE.rglob("*.py") if path.name != "structs.py"]
    assert len(files) > 200
    assert {str(path): lines for path in files if (lines := unready(path.read_text()))} == {}

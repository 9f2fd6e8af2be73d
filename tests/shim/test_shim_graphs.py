"""Copies in executable graphs: after a restore elsewhere the driver refuses new addresses; no program sees it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

PROGRAM = """
import ctypes
driver = ctypes.CDLL("libcuda.so.1")
class Copy(ctypes.Structure):
    _fields_ = [("words", ctypes.c_uint64 * 25)]
def copy(at):
    one = Copy()
    one.words[6], one.words[17] = at, 1
    return one
def given(at, graph=5, node=6):
    graph, node = ctypes.c_void_p(graph), ctypes.c_void_p(node)
    said = driver.cuGraphExecMemcpyNodeSetParams(graph, node, ctypes.byref(copy(at)), None)
    return said, driver.calls_made()
def by_node(at):
    words = (ctypes.c_uint64 * 32)(1)
    words[4 + 6], words[4 + 17] = at, 1
    said = driver.cuGraphExecNodeSetParams(ctypes.c_void_p(5), ctypes.c_void_p(6), words)
    return said, driver.calls_made()
"""


@pytest.fixture
def under(library: Path, compiled: Callable[..., Path]) -> Callable[..., str]:
    """Runs a program with the driver above, under the shim or without."""
    driver = compiled("graph_driver.c", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", name="libcuda.so.1")

    def go(code: str, *, shim: bool = True) -> str:
        env = {**os.environ, "LD_LIBRARY_PATH": str(driver.parent), **({"LD_PRELOAD": str(library)} if shim else {})}
        argv = [sys.executable, "-c", PROGRAM + code]
        return subprocess.run(argv, capture_output=True, text=True, env=env, timeout=60, check=True).stdout

    return go


def test_a_copy_gets_new_addresses_after_a_restore(under: Callable[..., str]) -> None:
    code = "print(given(2000)); driver.restored(); print(given(2100), given(2200))"
    assert under(code, shim=False) == "(0, 1)\n(1, 1) (1, 1)\n"
    # Refused, given what it has, asked again; from there on as before.
    assert under(code) == "(0, 1)\n(0, 3) (0, 1)\n"


def test_one_that_was_never_given_any(under: Callable[..., str]) -> None:
    """It has what the graph had that it was made from."""
    assert under("driver.restored(); print(given(2000))") == "(0, 3)\n"


def test_by_the_function_for_all_kinds_of_nodes(under: Callable[..., str]) -> None:
    code = "print(by_node(2000)); driver.restored(); print(by_node(2100), given(2200));"
    code += "driver.restored(); print(given(2300))"
    assert under(code) == "(0, 1)\n(0, 3) (0, 1)\n(0, 3)\n"


def test_what_is_wrong_is_refused_still(under: Callable[..., str]) -> None:
    """And the node has what it had."""
    assert under("print(given(2000), given(2000000)[0]); driver.restored(); print(given(2100))") == "(0, 1) 1\n(0, 3)\n"


@pytest.mark.parametrize(
    "call", ["cuGraphExecDestroy(ctypes.c_void_p(5))", "cuGraphExecUpdate_v2(ctypes.c_void_p(5), None, None)"]
)
def test_what_a_graph_had_is_forgotten_when_it_ends_or_is_updated(under: Callable[..., str], call: str) -> None:
    """The next graph may have the same number; what was given to another node stays known."""
    code = f"print(given(2000), given(2000, 7)[0]); driver.{call}; driver.restored(); print(given(2100))"
    assert under(code) == "(0, 1) 0\n(0, 3)\n"


def test_an_update_that_is_refused_changes_nothing(under: Callable[..., str]) -> None:
    code = "print(given(2000), driver.cuGraphExecUpdate_v2(ctypes.c_void_p(5), ctypes.c_void_p(9), None));"
    code += "driver.restored(); print(given(2100))"
    assert under(code) == "(0, 1) 910\n(0, 3)\n"


def test_many_nodes(under: Callable[..., str]) -> None:
    """Each is told apart: what one has is not another's."""
    code = """
for node in range(5000):
    assert given(100 + node, 9, 16 * node) == (0, 1)
for node in (4999, 2500):
    given(100 + node, 9, 16 * node); driver.restored(); print(given(50, 9, 16 * node))
"""
    assert under(code) == "(0, 3)\n(0, 3)\n"

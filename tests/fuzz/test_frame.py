"""The frame itself: a case that hangs, leaks, grows or raises fails the test, and can be run again alone."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import subprocess
import threading
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzz import frame, mutate


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setenv("LIMOSA_FUZZ", "400")
    monkeypatch.delenv("LIMOSA_FUZZ_SEED", raising=False)
    monkeypatch.delenv("LIMOSA_FUZZ_CASE", raising=False)


def run(cases, tried) -> None:
    for case in cases:
        with case:
            tried(case)


def test_half_of_the_cases_have_a_fixed_seed_and_half_a_new_one(fuzz):
    found = [(case.seed, case.number) for case in fuzz.cases()]
    again = [(case.seed, case.number) for case in fuzz.cases()]
    assert found[:200] == again[:200] == [(1, n) for n in range(200)]
    assert len(found) == 400
    assert found[200][0] != again[200][0]


def test_a_case_is_the_same_when_it_is_run_alone(fuzz, monkeypatch, capsys):
    made = {}

    def tried(case: frame.Case) -> None:
        made[case.seed, case.number] = mutate.mutated(case.random, [b"sample"])
        if case.number == 77:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(fuzz.cases(), tried)
    said = dict(word.split("=") for word in capsys.readouterr().err.split() if "=" in word)
    assert said == {"LIMOSA_FUZZ_SEED": "1", "LIMOSA_FUZZ_CASE": "77"}
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    (case,) = fuzz.cases()
    assert mutate.mutated(case.random, [b"sample"]) == made[1, 77]


def test_a_case_that_hangs_is_interrupted_even_where_every_exception_is_caught(fuzz):
    begin = time.monotonic()

    def hangs(_: frame.Case) -> None:
        while True:
            with contextlib.suppress(Exception):
                time.sleep(250)

    with pytest.raises(frame.Hung):
        run(fuzz.cases(limit=0.1), hangs)
    assert time.monotonic() - begin < 60


def test_a_few_cases_may_be_slow_and_no_more(fuzz, monkeypatch, capsys):
    now, slow = [0.0], set()
    monkeypatch.setattr(frame, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep))

    def tried(case: frame.Case) -> None:
        now[0] += 3 if (case.seed == frame.FIXED and case.number in slow) else 1

    slow |= set(range(10, 10 + frame.MOST_SLOW))
    run(fuzz.cases(limit=2), tried)
    assert capsys.readouterr().err.count("took 3.0 s") == frame.MOST_SLOW
    slow.add(150)
    with pytest.raises(AssertionError, match="several"):
        run(fuzz.cases(limit=2), tried)
    assert "case 150: took 3.0 s" in capsys.readouterr().err


def test_what_is_left_is_seen(fuzz):
    read, write = os.pipe()
    held, over = [], threading.Event()
    child = subprocess.Popen(["sleep", "60"])
    child.kill()
    child.wait()
    try:
        for what, leave in (
            ("descriptors", lambda: held.append(os.dup(read))),
            ("threads", lambda: threading.Thread(target=over.wait).start()),
            ("children", lambda: held.append(subprocess.Popen(["sleep", "60"]))),
        ):
            state = frame.Left()
            leave()
            with pytest.raises(AssertionError, match=what):
                state.check(0.1)
    finally:
        over.set()
        for one in held:
            if isinstance(one, int):
                os.close(one)
            else:
                one.kill()
                one.wait()
        os.close(read)
        os.close(write)


def test_a_case_that_takes_much_memory_is_named(fuzz, capsys):
    def grows(case: frame.Case) -> None:
        if case.number == 99:
            most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10  # of all that has run here
            bytearray(os.urandom(1)) * (most + (100 << 20))

    with pytest.raises(AssertionError, match="memory"):
        run(fuzz.cases(megabytes=32), grows)
    assert "LIMOSA_FUZZ_CASE=99" in capsys.readouterr().err


def test_mutations_change_what_they_are_given_and_nothing_else():
    source = random.Random(5)
    sample = {"a": [1, 2, {"b": "c"}], "d": None}
    made = [mutate.mutated_object(source, sample) for _ in range(500)]
    assert sample == {"a": [1, 2, {"b": "c"}], "d": None}
    assert sum(one == sample for one in made) < 50
    words = [mutate.mutated_words(source, ["move", "1", "--to", "2"], ["--swap"]) for _ in range(500)]
    assert sum(one == ["move", "1", "--to", "2"] for one in words) < 50
    assert not any("\0" in word for one in words for word in one)
    assert len({mutate.mutated(source, [b"{}", b"[1, 2, 3]"]) for _ in range(500)}) > 200


seen: list[bytes] = []


@frame.examples
@given(st.binary(max_size=8))
def test_hypothesis_within_the_frame(nothing_left, data):
    seen.append(data)
    assert len(data) <= 8

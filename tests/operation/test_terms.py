"""Words with a meaning are terms: the same text everywhere, and never compared as text in Limosa's own code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from limosa import gpu
from limosa.errors import UsageError
from limosa.gpu.names import LockResult
from limosa.operation import journal
from limosa.operation.doctor_gpu import Status
from limosa.operation.options import release_of
from limosa.operation.results import Plan
from limosa.operation.verbs import VERBS
from limosa.process.identity import Identity
from limosa.process.records import SuspendRecord
from limosa.terms import JobState, Release, Route, Term, Verdict

SOURCE = Path(__file__).parents[2] / "src/limosa"
TERMS: tuple[type[Term], ...] = (
    *(JobState, Release, Route, Verdict, Status, gpu.State, LockResult),
    *(journal.Phase, journal.Noted),
)
WORDS = {term.value for terms in TERMS for term in terms} | set(VERBS) | {"recover"}
OTHERS = {  # the same text, which means something else there
    "cli/options.py: one in ('all', 'any', 'everything')",  # no ids of refusals
    "cli/softgpu.py: name == 'all'",  # all rules
    "containers/containerd.py: record.labels.get(_RESTARTED) == 'running'",  # what its restart monitor calls it
    "native/loads.py: text != 'ok'",  # what a child process prints
    "operation/ways.py: 'refused' in str(error)",  # a part of a sentence
    # CRIU's own verbs and hooks
    "operation/steps/dumping.py: action != 'post-dump'",
    "process/criu/run.py: action in ('post-dump', 'post-restore')",
    "process/criu/run.py: kind == 'dump'",
    "process/criu/run.py: self.kind == 'dump'",
    "process/criu/run.py: self.kind == 'restore'",
    "process/hazards/connections.py: socket.family == 'unknown'",
    "process/launch.py: 'failed' in said",  # a key
    "process/observe.py: socket.family == 'unknown'",
}


def compared(tree: ast.AST) -> Iterator[tuple[str, set[str]]]:
    """Every comparison, and the text in it."""
    for node in ast.walk(tree):
        sides: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            sides = [node.value]
        parts = [p for s in sides for p in (s.elts if isinstance(s, (ast.Tuple, ast.Set, ast.List)) else [s])]
        text = {p.value for p in parts if isinstance(p, ast.Constant) and isinstance(p.value, str)}
        if text:
            yield ast.unparse(node), text


def test_no_word_is_compared_as_text() -> None:
    found = {
        f"{path.relative_to(SOURCE)}: {told}"
        for path in SOURCE.rglob("*.py")
        for told, text in compared(ast.parse(path.read_text()))
        if text & WORDS
    }
    assert found - OTHERS == set(), "compare with a term (limosa.terms, gpu.State, journal) or with a verb's name"
    assert OTHERS - found == set(), "no longer there: take it off the list"


@pytest.mark.parametrize(
    "code", ["job.state == 'running'", "'all' != r", "s in ('x', 'locked')", "{'checkpointed'} == s"]
)
def test_the_walk_sees_it(code: str) -> None:
    assert [text & WORDS for _, text in compared(ast.parse(code))] != [set()]


@pytest.mark.parametrize("term", [t for terms in TERMS for t in terms], ids=repr)
def test_it_is_its_text(term: Term) -> None:
    text = term.value
    assert type(text) is str
    assert [str(term), f"{term}", f"{term:s}", "%s" % term, format(term), "".join([term])] == [text] * 6  # noqa: UP031
    assert f"{term:<30}" == f"{text:<30}"
    assert term == text
    assert (hash(term), {term}, [term]) == (hash(text), {text}, [text])
    assert msgspec.json.encode({"a": term, term: 1}) == msgspec.json.encode({"a": text, text: 1})
    assert msgspec.json.decode(msgspec.json.encode(term), type=type(term)) is term


def test_results_are_the_same_json() -> None:
    plan = Plan(operation="move", pid=1, verdict=Verdict.REFUSED, way=Route.HOST)
    told = msgspec.json.decode(msgspec.json.encode(plan))
    assert (told["verdict"], told["way"]) == ("refused", "host")
    assert (plan.verdict, plan.way) == ("refused", "host")


def test_callers_may_say_text() -> None:
    assert release_of("memory-only") is Release.MEMORY_ONLY
    assert release_of(Release.ALL) is Release.ALL
    with pytest.raises(UsageError, match="release='some': all or memory-only"):
        release_of("some")  # type: ignore[arg-type]


def test_a_record_is_what_it_was() -> None:
    identity = Identity(pid=1, start_time=2)
    record = SuspendRecord(root=identity, release=Release.MEMORY_ONLY)
    data = msgspec.json.encode(record)
    assert b'"release":"memory-only"' in data
    assert msgspec.json.decode(data, type=SuspendRecord).release is Release.MEMORY_ONLY
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(data.replace(b"memory-only", b"some"), type=SuspendRecord)


def test_a_journal_is_read_whatever_state_and_phase_it_names() -> None:
    """Another version's may know more: what is not known is nothing that anybody looks for."""
    identity = Identity(pid=1, start_time=2)
    data = msgspec.json.encode(journal.Member(identity=identity, was=gpu.State.LOCKED))
    assert b'"was":"locked"' in data
    for said in ("locked", "seven", "checkpointed"):
        read = msgspec.json.decode(data.replace(b'"locked"', f'"{said}"'.encode()), type=journal.Member)
        assert (read.was, type(read.was)) == (said, str)
    record = msgspec.json.decode(b'{"step":"restore","phase":"begun"}', type=journal.Record)
    assert record.phase not in list(journal.Phase)
    assert record.step == journal.Noted.RESTORE


def test_what_a_verb_does_with_host_memory() -> None:
    assert [name for name, verb in VERBS.items() if verb.sets_aside] == ["suspend"]
    assert [name for name, verb in VERBS.items() if verb.takes_back] == ["resume"]

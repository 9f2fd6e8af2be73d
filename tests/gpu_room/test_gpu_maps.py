"""Maps: completed to a permutation, nothing moved that was not named, the impossible refused in words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded import gpu, machine

from limosa.errors import InvalidMap, UnknownGpu
from limosa.gpu.gpus import Gpu
from limosa.gpu.maps import changes_to, complete_map, identity_map

FOUR = [gpu(i) for i in range(4)]
A, B, C, D = (g.uuid for g in FOUR)
GB = 1 << 30


def test_one_pair_becomes_a_swap_where_the_destination_is_empty():
    assert complete_map({A: B}, FOUR[:2], {A: GB}, FOUR) == {A: B, B: A}


def test_gpus_that_were_not_named_stay():
    assert complete_map({A: B}, FOUR, {A: GB, C: GB}, FOUR) == {A: B, B: A, C: C, D: D}


def test_a_chain_is_closed_by_its_own_end():
    assert complete_map({A: B, B: C}, FOUR, {A: GB, B: GB}, FOUR) == {A: B, B: C, C: A, D: D}


def test_a_full_rotation_is_left_as_it_is():
    rotation = {A: B, B: C, C: D, D: A}
    assert complete_map(rotation, FOUR, dict.fromkeys(rotation, GB), FOUR) == rotation


def test_a_job_that_opens_only_its_own_gpus_gets_a_map_of_those():
    assert complete_map({B: D}, [FOUR[1], FOUR[3]], {B: GB}, FOUR) == {B: D, D: B}


def test_nothing_to_change_is_the_identity_over_all_that_can_be_opened():
    assert complete_map({}, FOUR[1:3], {B: GB}, FOUR) == identity_map(FOUR[1:3]) == {B: B, C: C}


def test_where_the_job_is_on_the_destination_too_both_must_be_named():
    with pytest.raises(InvalidMap, match="0=1,1=0") as caught:
        complete_map({A: B}, FOUR, {A: GB, B: GB}, FOUR)
    assert caught.value.hint == "--map 0=1,1=0"
    assert caught.value.exit_code == 2


def test_a_chain_that_pushes_the_job_off_its_end_names_the_whole_cycle():
    with pytest.raises(InvalidMap, match="on GPU 2, which would have to give way") as caught:
        complete_map({A: B, B: C}, FOUR, {A: GB, B: GB, C: 1}, FOUR)
    assert caught.value.hint == "--map 0=1,1=2,2=0"


def test_the_gpus_that_a_job_can_open_may_be_others_when_it_comes_back():
    assert complete_map({}, FOUR[:1], {A: GB}, FOUR, destinations=FOUR[1:2]) == {A: B}
    assert complete_map({A: B}, FOUR[:1], {A: GB}, FOUR, destinations=FOUR[:2]) == {A: B}
    assert complete_map({A: C}, FOUR[:2], {A: GB}, FOUR, destinations=FOUR[1:]) == {A: C, B: B}
    assert complete_map({A: B}, FOUR[:2], {A: GB}, FOUR, destinations=FOUR[1:3]) == {A: B, B: C}
    with pytest.raises(InvalidMap, match="no GPU is left"):
        complete_map({}, FOUR[:2], {A: GB}, FOUR, destinations=FOUR[:1])
    with pytest.raises(InvalidMap, match="cannot open the device node of GPU 0"):
        complete_map({A: A, B: C}, FOUR[:2], {A: GB}, FOUR, destinations=FOUR[1:])


def test_two_sources_on_one_gpu_are_refused():
    with pytest.raises(InvalidMap, match="GPU 0 and GPU 1 cannot both go to GPU 2"):
        complete_map({A: C, B: C}, FOUR, {A: GB, B: GB}, FOUR)


def test_another_chip_is_refused():
    mixed = [gpu(0), gpu(1, "NVIDIA A100-SXM4-80GB")]
    with pytest.raises(InvalidMap, match="only move between GPUs of the same model"):
        complete_map({A: B}, mixed, {A: GB}, mixed)


def test_what_is_filled_in_goes_to_the_same_chip_or_nowhere():
    """Where it comes back it can open other GPUs: one of another chip is no place, though it is the only one left."""
    mixed = [gpu(0), gpu(1, "NVIDIA A100-SXM4-80GB"), gpu(2)]
    assert complete_map({}, mixed[:1], {A: GB}, mixed, destinations=mixed[1:]) == {A: C}
    with pytest.raises(InvalidMap, match="no GPU is left"):
        complete_map({}, mixed[:1], {A: GB}, mixed, destinations=mixed[1:2])


def test_a_gpu_that_is_not_there_is_refused():
    with pytest.raises(UnknownGpu, match="GPU-ffff"):
        complete_map({A: "GPU-ffff"}, FOUR, {A: GB}, FOUR)


@pytest.mark.parametrize("changes", [{A: C}, {C: A}])
def test_a_gpu_of_which_the_job_can_open_no_node_is_refused(changes: dict[str, str]):
    with pytest.raises(InvalidMap, match="cannot open the device node of GPU 2") as caught:
        complete_map(changes, FOUR[:2], {A: GB}, FOUR)
    assert "0, 1" in caught.value.hint


def test_a_map_of_identities_is_refused():
    with pytest.raises(InvalidMap, match="changes nothing"):
        complete_map({A: A, B: B}, FOUR, {A: GB}, FOUR)


def test_to_means_the_gpu_that_the_job_is_on():
    assert changes_to(FOUR[1], {A: GB}, FOUR) == {A: B}
    assert changes_to(FOUR[1], {A: GB, C: GB}, FOUR, source=FOUR[2]) == {C: B}


@pytest.mark.parametrize(
    ("held", "source", "words"),
    [({}, None, "nothing on any GPU"), ({A: GB, C: GB}, None, "GPU 0, GPU 2"), ({A: GB}, FOUR[2], "nothing on GPU 2")],
)
def test_to_is_refused_where_it_is_not_clear_what_should_move(held: dict[str, int], source: Gpu | None, words: str):
    with pytest.raises(InvalidMap, match=words):
        changes_to(FOUR[1], held, FOUR, source)


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[str, str], list[Gpu], dict[str, int], list[Gpu]]:
    """Any changes, openable GPUs and holdings on a machine of up to eight GPUs of up to two chips."""
    count = draw(st.integers(1, 8))
    machine_gpus = [gpu(i, draw(st.sampled_from(["NVIDIA H200", "NVIDIA A100"]))) for i in range(count)]
    openable = [g for g in machine_gpus if draw(st.integers(0, 9)) > 0]
    uuids = st.sampled_from([g.uuid for g in machine_gpus])
    changes = draw(st.dictionaries(uuids, uuids, max_size=4))
    held = draw(st.dictionaries(uuids, st.integers(0, GB), max_size=4))
    return changes, openable, held, machine_gpus


def must_refuse(changes: dict[str, str], openable: list[Gpu], held: dict[str, int], names: dict[str, str]) -> bool:
    """The rules, said without building a map."""
    named = {*changes, *changes.values()}
    return (
        not named <= {g.uuid for g in openable}
        or len(set(changes.values())) < len(changes)
        or any(names[source] != names[destination] for source, destination in changes.items())
        or (bool(changes) and all(source == destination for source, destination in changes.items()))
        or any(held.get(uuid) for uuid in changes.values() if uuid not in changes)
    )


@given(cases())
def test_whatever_is_asked_the_answer_is_a_right_permutation_or_a_due_refusal(case: tuple):
    changes, openable, held, all_gpus = case
    names = {g.uuid: g.name for g in all_gpus}
    if must_refuse(changes, openable, held, names):
        with pytest.raises(InvalidMap, match=r"\w"):
            complete_map(changes, openable, held, all_gpus)
        return
    full = complete_map(changes, openable, held, all_gpus)
    can_open = [g.uuid for g in openable]
    assert list(full) == can_open
    assert sorted(full.values()) == sorted(can_open)
    assert changes.items() <= full.items()
    for source, destination in full.items():
        assert names[source] == names[destination]
        if source not in changes and source != destination:
            assert not held.get(source), "a pair that was filled in moves something of the job"
        if source not in changes and source not in changes.values():
            assert destination == source, "a GPU that nobody spoke of does not stay"


@given(st.integers(2, 8), st.data())
def test_every_single_change_among_equal_gpus_can_be_completed(count: int, data: st.DataObject):
    gpus = [gpu(i) for i in range(count)]
    source, destination = data.draw(st.permutations(gpus))[:2]
    full = complete_map({source.uuid: destination.uuid}, gpus, {source.uuid: GB}, machine(*gpus).gpus)
    assert full[source.uuid] == destination.uuid
    assert full[destination.uuid] == source.uuid

"""States, UUIDs and PCI bus ids: what is known is named, what is not is kept."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from limosa.gpu.names import State, normal_pci, normal_uuid, uuid_bytes, uuid_of_bytes

UUID = "GPU-0a1b2c3d-1111-2222-3333-444455556666"


def test_states_are_named_as_the_driver_numbers_them():
    names = ["running", "locked", "checkpointed", "failed", "checkpointing", "restoring"]
    assert [State.from_code(code) for code in range(6)] == names
    assert [State(name).code for name in names] == list(range(6))


def test_an_unknown_state_is_kept_with_its_number():
    state = State.from_code(7)
    assert (state, state.code, state.known, f"{state}") == ("7", 7, False, "7")
    assert state != State.RUNNING


def test_states_go_through_json_and_back_also_unknown_ones():
    class Record(msgspec.Struct):
        states: list[State]

    record = Record([State.LOCKED, State.from_code(9)])
    assert msgspec.json.encode(record) == b'{"states":["locked","9"]}'
    assert msgspec.json.decode(msgspec.json.encode(record), type=Record) == record


def test_a_word_that_is_no_state_is_refused():
    with pytest.raises(ValueError, match="frozen"):
        State("frozen")


@pytest.mark.parametrize("text", [UUID, UUID[4:], UUID.upper(), UUID[4:].replace("-", ""), f" {UUID} "])
def test_a_uuid_is_known_in_every_form(text: str):
    assert normal_uuid(text) == UUID


@pytest.mark.parametrize("text", ["", "0", "GPU-", UUID[:-1], UUID + "0", "MIG-" + UUID[4:], "0000:0f:00.0"])
def test_what_is_no_uuid_is_not_taken_for_one(text: str):
    assert normal_uuid(text) is None
    with pytest.raises(ValueError, match="not a GPU's UUID"):
        uuid_bytes(text)


@given(st.binary(min_size=16, max_size=16))
def test_uuid_text_and_bytes_are_one_to_one(raw: bytes):
    assert uuid_bytes(uuid_of_bytes(raw)) == raw
    assert normal_uuid(uuid_of_bytes(raw)) == uuid_of_bytes(raw)


@pytest.mark.parametrize("text", ["00000000:0F:00.0", "0000:0f:00.0", "0f:00.0", "0F:00"])
def test_a_pci_bus_id_is_known_in_every_form(text: str):
    assert normal_pci(text) == "00000000:0f:00.0"


@pytest.mark.parametrize("text", ["0", "0f", "0f:00.9", "x0f:00.0", UUID])
def test_what_is_no_pci_bus_id_is_not_taken_for_one(text: str):
    assert normal_pci(text) is None

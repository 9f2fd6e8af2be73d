"""Checks whose expectation is a guess: nobody has seen the real driver's answer yet.

Test id (what it begins with) → what to look at in a recording of the real driver (record.py). A line goes when its
answer has been seen and the check says what was seen.
"""

UNSEEN: dict[str, str] = {
    "test_seen.py::test_the_copys_mapping_is_asked_of_the_c_library_once_and_populated": "measured before, not by this",
    "test_entry.py::test_a_function_that_is_not_there_is_a_null_pointer_also_without_a_status": "the pointer",
    "test_seen.py::test_an_event_shared_by_legacy_ipc_maps_a_file_in_dev_shm": "measured with PyTorch, not by this",
    "test_refused.py::test_ipc_of_an_event": "measured with PyTorch, which shares memory, too",
    "test_states_outside.py::test_a_process_that_has_checkpointed_itself_is_seen_so": "the state, NVML",
    "test_states_outside.py::test_another_brings_back_a_process_that_has_checkpointed_itself": "both maps, the memory",
    "test_states_outside.py::test_a_process_that_has_checkpointed_itself_asks_for_its_state": "whether it answers",
    "test_states_outside.py::test_a_process_brings_itself_back": "whether the restore ends, and the unlock",
}

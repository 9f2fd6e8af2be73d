"""Checks whose expectation is a guess, or put together from pieces: nobody has seen the real driver's answer yet.

Test id (what it begins with) → what to look at in a recording of the real driver (record.py). A line goes when its
answer has been seen and the check says what was seen.
"""

UNSEEN: dict[str, str] = {
    "test_blocked.py::test_call_while_checkpointed": "put together from jobs that crashed while they were asked",
    "test_blocked.py::test_a_question_about_work_while_checkpointed": "which of the five make the job crash",
    "test_blocked.py::test_all_that_waited_succeeds_after_the_unlock": "results after the unlock",
    "test_blocked.py::test_calls_that_wait_do_not_change_the_state": "the state meanwhile",
    "test_entry.py::test_a_function_that_is_not_there": "pointer and status; the result without a status to write to",
    "test_maps.py::test_a_destination_that_is_covered": "the state afterwards",
    "test_refused.py::test_two_gpus_with_peer_access": "what else a process needs for a restore to fail",
    "test_states_inside.py::test_cycles_one_after_the_other": "with more time for each call",
    "test_states_inside.py::test_the_restore_thread_of_a_stopped_process_is_told": "that the id is right",
    "test_states_outside.py::test_a_thread_id_is_taken_for_its_process[restore": "with more time",
    "test_states_outside.py::test_a_process_cannot_checkpoint_itself": "what becomes of it",
    "test_times.py::test_another_step_while_a_lock_waits[Checkpoint": "blocks, or ILLEGAL_STATE",
    "test_times.py::test_a_second_lock_while_a_lock_waits": "blocks, or ILLEGAL_STATE",
    "test_times.py::test_a_controller_that_dies_while_its_lock_waits": "whether the lock still takes effect",
    "test_vmm.py::test_memory_is_free_when_the_last_holder_lets_go[handle": "bytes after the release",
}

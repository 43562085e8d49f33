"""The stand-in changes rarely: `make test` runs a few tests of each of its files, `make test-all` all."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent
SAMPLE = {
    "test_copies": {
        "test_a_copy_lands_later_and_reads_its_source_when_it_lands",
        "test_an_event_is_complete_after_what_was_recorded_before_it_only",
    },
    "test_faults": {
        "test_a_lost_device_fails_every_call_also_those_that_wait",
        "test_memory_runs_out_and_comes_back",
    },
    "test_kernels": {"test_a_kernel_reads_its_table_and_copies_when_it_runs"},
    "test_memory": {
        "test_fresh_memory_is_not_zero_and_keeps_what_is_written",
        "test_sizes_are_multiples_of_the_granularity",
    },
    "test_misuse": {
        "test_a_context_with_work_to_do_may_not_be_released",
        "test_memory_that_a_copy_still_uses_may_not_be_unmapped",
    },
    "test_nixl": {"test_nixl_reads_device_memory_of_another_process"},
    "test_sharing": {"test_descriptors_that_are_no_export_or_lack_rights_are_refused"},
}
"""Here and not as marks: what a test's file imports, its child imports, too."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            sample = SAMPLE[item.path.stem]
            assert sample <= vars(item.module).keys(), f"{HERE}/conftest.py names tests that are not there"
            if item.originalname not in sample:
                item.add_marker(pytest.mark.slow)

"""Which cases of costly tests every change is tried with; the others run at night.

Beside the marker `nightly` in files, which is for what is of its own kind. Here are tests with many
cases of one kind, of which every change tries each n-th, and tests that take long for what they
are likely to find.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

__all__ = ["CASES", "Tiers"]

#: of a test, by its file and name: of so many cases one; 0: none
CASES: Final[Mapping[str, Mapping[str, int]]] = {
    "procs/transparency/test_shard.py": {"test_script": 4},
    "procs/transparency/test_rounds.py": {
        "test_script": 2,
        "test_three_ranks": 3,
        "test_turns": 3,
        "test_turns_in_two_halves": 3,
        "test_rounds_in_two_halves": 2,
        "test_buckets_of_ours": 2,
    },
    "procs/transparency/test_grid.py": {
        "test_cell_trains_as_plain_ddp": 3,
        "test_three_owners": 3,
    },
    "procs/transparency/test_transparency.py": {
        "test_compiled": 2,
        "test_compiled_after_wrap": 2,
        "test_gradients_of_a_module_without_ddp": 3,
    },
    "procs/transparency/test_urgent.py": {
        "test_two_ranks": 4,
        "test_three_ranks": 4,
        "test_ranks_that_differ": 3,
    },
    "procs/transparency/test_groups.py": {
        "test_scripts": 3,
        "test_with_settings": 2,
        "test_two_by_two": 3,
    },
    "procs/pipelines/test_pipelines.py": {
        "test_whatever_the_script_does_between": 4,
        "test_whatever_carries_the_gradients": 3,
        "test_a_schedule_trains_as_reduced_at_the_end": 3,
        "test_however_the_stages_are_given": 3,
        "test_compressed_as_by_hooks_of_ddp": 4,
    },
    "procs/horovod/test_horovod.py": {
        "test_model": 4,
        "test_arguments": 3,
        "test_between_backward_and_step": 3,
        "test_backward": 3,
        "test_reading_and_writing_between_steps": 3,
        "test_stepping": 3,
    },
    "procs/horovod/test_horovod_facts.py": {"test_the_others_hear_of_a_timeout": 6},
    "procs/faults/test_faults_death.py": {
        "test_raises": 3,
        "test_dies_where_all_reduces_are_shard": 4,
        "test_dies_where_all_reduces_are_split": 3,
        "test_stopped": 3,
        "test_killed": 3,
        "test_ends_the_interpreter": 3,
    },
    "procs/faults/test_faults_disagreement.py": {
        "test_one_rank_skips_a_step_that_others_wait_for": 3
    },
    "procs/faults/test_faults_urgent.py": {"test_fault_in_a_section": 4},
    "procs/faults/test_faults_buffers.py": {"test_fault_in_front_of_a_broadcast": 4},
    "procs/faults/test_many_ranks.py": {
        "test_sixteen_ranks_train_alike_and_name_the_one_that_dies": 0
    },
    "procs/hazards/test_calls.py": {"test_a_gradient_costs_no_more_than_is_stored": 3},
    "procs/hazards/test_drawn.py": {"test_some_turns": 0},
    "procs/tuning/test_tuning_session.py": {"test_script": 4},
    "procs/graphs/test_graphs.py": {"test_forward_and_backward_equal_one_process": 3},
    "procs/run/test_run.py": {
        "test_lines_begin_with_the_name_where_the_script_sets_up_logging": 2,
        "test_sees_the_same": 5,
        "test_child_processes": 3,
        "test_ends_the_same": 3,
    },
    "procs/bench/test_bench_experts.py": {
        "test_all_systems_train_the_same_and_time_all_to_alls": 0
    },
    "procs/bench/test_bench_horovod.py": {"test_over_gloo_on_loopback": 0},
    "procs/burst/test_burst_run.py": {
        "test_a_rank_that_dies_in_the_middle_of_the_last_move_is_missed": 0,
        "test_a_last_step_that_is_lost_is_raised_or_fails_the_process": 2,
    },
    "procs/wave/test_waves.py": {
        "test_a_rank_that_dies_in_the_middle_of_the_last_message_is_missed": 0
    },
    "procs/mpi/test_kvstore_mpi.py": {"test_faults_are_named_on_every_survivor": 2},
    "unit/horovod/test_retrying.py": {"test_no_thread_is_left_at_exit": 2},
    "unit/tuning/test_controller.py": {
        "test_outliers_do_not_mislead_it": 8,
        "test_it_finds_what_is_nearly_the_best_within_its_budget": 6,
        "test_a_change_of_bandwidth_is_answered_once": 2,
    },
    "unit/tuning/test_online.py": {
        "test_from_the_first_step_to_a_file_that_is_used": 4,
        "test_another_model_on_the_same_cluster_begins_near": 0,
    },
    "unit/pipeline/test_search.py": {
        "test_without_orders_of_torch_it_is_no_worse_than_their_best_and_repeats_itself": 2
    },
    "unit/pipeline/test_exact.py": {"test_a_tight_memory_has_the_least_period_that_it_allows": 3},
    "unit/planned/test_fuzzed.py": {"test_generated_sequences_equal_plain_training": 3},
    "unit/commands/test_sim.py": {
        "test_a_curve_and_its_picture": 0,
        "test_a_straggler_slows_all_systems": 0,
    },
}


class Tiers:
    """Counts the cases of each test as they are collected."""

    def __init__(self) -> None:
        self._seen: Counter[tuple[str, str]] = Counter()

    def is_nightly(self, path: str, name: str) -> bool:
        """Whether the next case of the test ``name`` in the file ``path`` runs at night alone."""
        of_so_many = CASES.get(path, {}).get(name, 1)
        number = self._seen[path, name]
        self._seen[path, name] += 1
        return of_so_many == 0 or number % of_so_many > 0

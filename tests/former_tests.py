"""What became of each test that stood in a former commit: none vanishes without a line that says why.

``python -m tests.former_tests 4b586f1`` compares the names of all tests at that commit with those of this checkout and
fails where one is gone that FORMER does not name, or became one that is not there.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

_NAMES = "no manifest says what a directory is: names do, and a format to come has a directory of its own"
_PAST = "slabs, manifests and accounts of formats before 0.3 are gone; nothing was ever released"
_KEY = "its configuration key is gone"
_OPTION = "its option of the command line is gone"
_COMPLETION = "hicache-ext completion is gone"
_NUMBA = "nothing is compiled at run time, or kept: the native core is built with the package"
_PLAN = "plan replays LRU in Python: the same figures to every digit, without ghosts and memory of its own"

_ONE_WAY = "it has one way: numpy is as fast there as the native core was"

_BUILD = "the doctor builds nothing: it looks for the tools, and a server says at its start what failed"

FORMER = {
    "test_a_page_is_the_same_however_its_bytes_are_cut_into_segments": "-> test_a_stored_page_is_read_back",
    "test_a_machine_on_which_hicache_would_die_at_its_first_prompt_is_an_error_that_says_what_to_install": (
        "-> test_what_sglang_lacks_to_build_its_page_hashes_is_named_with_what_to_install"
    ),
    "test_each_thing_that_a_build_lacks_is_named": (
        "-> test_what_sglang_lacks_to_build_its_page_hashes_is_named_with_what_to_install"
    ),
    "test_where_sglang_cannot_be_imported_nothing_is_said_against_the_extension": _BUILD,
    "test_a_build_that_hangs_is_given_up": _BUILD,
    "test_the_drawing_is_the_tree": "errors are not drawn: their classes say it",
    "test_every_error_says_what_it_is": "-> test_every_error_is_of_our_base_and_says_what_it_is",
    "test_an_overlay_is_what_its_upper_layer_is": "-> test_an_overlay_is_a_disk_of_the_host",
    "test_what_is_added_or_renamed_as_announced_costs_nothing_and_is_named": (
        "-> test_what_is_added_or_renamed_as_announced_costs_nothing"
    ),
    "test_a_layer_that_the_driver_fails_is_copied_by_the_original_and_the_engine_given_up_after_three": (
        "-> test_a_layer_that_the_driver_fails_is_copied_by_the_original_and_the_engine_given_up"
    ),
    "test_an_identity_nobody_has_heard_of_is_cleared_by_the_disk_alone_during_a_rebuild": (
        "-> test_an_identity_nobody_has_heard_of_is_cleared_while_a_rebuild_may_find_its_pages"
    ),
    "test_pages_that_came_too_late_for_their_request_are_nearer_for_the_next": (
        "-> test_pages_that_came_too_late_leave_by_themselves_and_are_nearer_once_their_request_has_computed_them"
    ),
    "test_pages_that_were_cleared_after_they_were_fetched_come_no_nearer": (
        "what nobody reads in time is not promoted: the request that it was fetched for computes and stores it"
    ),
    "test_a_table_full_of_dead_members_takes_new_ones_and_one_of_live_ones_does_not": (
        "who writes a slot is asked for by the slot: there is no table of members that could be full"
    ),
    "test_where_to_remember_may_be_said_after_the_reading": (
        "-> test_weights_are_read_during_the_load_only_where_their_digests_can_be_remembered"
    ),
    "test_numpy_joins_what_it_split": "the codecs have one way, by the native core",
    "test_the_core_and_numpy_give_equal_bytes": "-> test_the_core_and_numpy_make_equal_planes_at_any_address",
    "test_free_slots_of_a_large_slab_are_found_a_portion_at_a_time": (
        "-> test_a_slab_that_wrongly_says_it_has_free_slots_is_looked_through_once"
    ),
    "test_without_renameat2_publishing_is_still_whole_or_nothing": ("-> test_of_two_writers_the_first_to_publish_wins"),
    "test_what_was_taken_stays_taken_when_the_lock_is_lost_on_the_way": "slots are taken under one lock",
    "test_the_core_finds_the_pages_and_addresses_that_numpy_finds": _ONE_WAY,
    "test_the_core_makes_of_any_words_the_keys_that_python_makes": _ONE_WAY,
    "test_the_golden_header_without_a_payload_checksum_is_written_byte_for_byte": (
        "-> test_the_golden_header_without_a_payload_checksum_is_read"
    ),
    "test_pages_of_both_are_looked_for_in_the_same_rooms": (
        "``auto`` wraps no codec any more: it is the lossless one, asked whether it pays"
    ),
    "test_killed_writers_leave_no_wrong_page_no_poisoned_key_and_a_right_account": (
        "-> test_killed_processes_leave_no_wrong_page_no_poisoned_key_and_sound_files"
    ),
    "test_killed_processes_leave_sound_slabs_and_no_wrong_page": (
        "-> test_killed_processes_leave_no_wrong_page_no_poisoned_key_and_sound_files"
    ),
    "test_writers_killed_in_containers_and_stopped_before_leave_the_same": (
        "-> test_containers_killed_and_stopped_leave_the_same"
    ),
    "test_containers_killed_and_stopped_leave_sound_slabs_and_no_wrong_page": (
        "-> test_containers_killed_and_stopped_leave_the_same"
    ),
    "test_killed_writers_of_encoded_and_sealed_pages_leave_the_same": (
        "-> test_killed_processes_leave_the_same_of_encoded_and_sealed_pages"
    ),
    "test_killed_processes_leave_sound_slabs_of_encoded_and_sealed_pages": (
        "-> test_killed_processes_leave_the_same_of_encoded_and_sealed_pages"
    ),
    "test_the_script_replays_a_trace_and_writes_its_results": "-> test_ours_serves_more_than_lru_among_scans",
    "test_without_the_trace_the_script_says_so_and_ends_well": "-> test_ours_serves_more_than_lru_among_scans",
    "test_clear_leaves_other_models_alone": "-> test_clear_leaves_other_models_and_strangers_files_alone",
    "test_clear_leaves_strangers_files_alone": "-> test_clear_leaves_other_models_and_strangers_files_alone",
    "test_results_are_lists_of_the_right_type": "-> test_ten_thousand_keys_are_answered",
    "test_an_older_release_is_refused_with_one_sentence": (
        "releases before 0.5.23 refuse --unified-cache-external-linker-backend dynamic themselves"
    ),
    "test_an_absent_page_is_a_miss": "-> test_keys_that_differ_in_one_byte_are_different_pages",
    "test_memory_is_left_alone_once_a_read_has_returned": "-> test_memory_is_left_alone_once_a_call_has_returned",
    "test_memory_may_be_reused_once_a_write_has_returned": "-> test_memory_is_left_alone_once_a_call_has_returned",
    "test_another_process_sees_the_pages_exactly_if_that_is_declared": (
        "-> test_processes_see_each_others_pages_exactly_if_declared"
    ),
    "test_pages_that_another_process_stored_are_read": "-> test_processes_see_each_others_pages_exactly_if_declared",
    "test_exists_counts_the_leading_run_and_never_more": "-> test_only_the_leading_run_counts_and_is_read",
    "test_a_missing_page_ends_the_run_of_a_read": "-> test_only_the_leading_run_counts_and_is_read",
    "test_a_read_of_what_was_never_written_is_soft": "-> test_only_the_leading_run_counts_and_is_read",
    "test_no_keys_are_no_pages": "-> test_only_the_leading_run_counts_and_is_read",
    "test_removed_pages_are_gone_and_can_be_stored_again": (
        "-> test_removed_pages_are_counted_once_and_gone_and_can_be_stored_again"
    ),
    "test_remove_counts_each_page_that_was_there_once": (
        "-> test_removed_pages_are_counted_once_and_gone_and_can_be_stored_again"
    ),
    "test_the_same_page_hash_under_another_identity_is_another_page": (
        "-> test_keys_that_differ_in_one_byte_are_different_pages"
    ),
    "test_contains_answers_page_by_page": "-> test_ten_thousand_keys_are_answered",
    "test_clear_leaves_other_identities_alone": "-> test_clear_tells_identities_apart_that_look_alike",
    "test_clear_of_an_identity_without_pages_is_zero_and_removes_nothing": (
        "-> test_clear_tells_identities_apart_that_look_alike"
    ),
    "test_an_identity_whose_pages_were_removed_is_not_counted_by_clear": (
        "-> test_removed_pages_are_counted_once_and_gone_and_can_be_stored_again"
    ),
    "test_a_closed_store_still_describes_itself": "-> test_a_closed_store_refuses_calls_and_may_be_closed_again",
    "test_register_identity_takes_any_document_twice": "-> test_identities_are_kept_exactly_if_that_is_declared",
    "test_latencies_fall_into_the_buckets_of_their_bounds": (
        "-> test_latencies_go_out_as_they_are_measured_in_the_buckets_of_their_bounds"
    ),
    "test_latencies_go_out_as_they_are_measured": (
        "-> test_latencies_go_out_as_they_are_measured_in_the_buckets_of_their_bounds"
    ),
    "test_what_one_thread_goes_through_no_other_changes": (
        "what was said is remembered by LimitedLog alone, under its lock"
    ),
    "test_a_tier_without_a_breaker_gets_its_timeout_since_nobody_would_try_it_again": (
        "every tier that has guards has a breaker"
    ),
    "test_a_writer_that_is_no_member_counts_until_it_was_silent_for_ten_minutes": (
        "-> test_an_account_with_a_writer_that_is_no_member_is_none_and_counted_anew"
    ),
    "test_the_file_of_a_writer_of_an_earlier_version_is_removed_after_ten_minutes": _PAST,
    "test_clear_leaves_strangers_files_where_they_were": (
        "-> test_clear_moves_strangers_files_aside_with_the_directory_around_them"
    ),
    "test_a_writer_of_an_earlier_version_counts_until_it_was_silent_for_ten_minutes": (
        "-> test_an_account_with_a_writer_that_is_no_member_is_none_and_counted_anew"
    ),
    "test_a_node_serves_what_the_tiers_policy_serves_page_by_page": (
        "-> test_a_node_serves_what_lru_that_frees_tails_first_serves"
    ),
    "test_a_node_on_paper_serves_about_what_an_index_that_is_held_to_the_same_candidate_serves": (
        "-> test_a_node_on_paper_serves_about_what_an_index_that_is_held_to_last_use_serves"
    ),
    "test_ghosts_that_are_forgotten_are_those_of_the_tiers_policy": _PLAN,
    "test_the_core_does_what_python_does": _PLAN,
    "test_the_core_does_what_python_does_with_conversations": _PLAN,
    "test_requests_of_no_node_and_fleets_beyond_all_memory_are_refused": _PLAN,
    "test_the_conversation_trace_is_served_as_the_policy_serves_it": (
        "-> test_the_conversation_trace_is_served_as_lru_serves_it"
    ),
    "test_without_the_native_core_a_sentence_says_what_to_do": "-> test_a_plan_is_made_without_the_native_core",
    "test_compiled_and_in_python_are_the_same": _PLAN,
    "test_ghosts_that_wrap_around_their_ring_are_those_of_the_tiers_policy": _PLAN,
    "test_a_load_larger_than_staging_memory_moves_on_in_portions": (
        "-> test_of_a_prompt_larger_than_staging_memory_the_beginning_is_restored_and_the_scheduler_waits_for_nothing"
    ),
    "test_a_request_that_waits_is_answered_from_memory_for_a_moment": (
        "-> test_a_request_that_nobody_asked_about_before_is_computed_and_no_store_is_asked"
    ),
    "test_a_store_that_hangs_costs_one_request_its_deadline": (
        "-> test_look_ups_and_loads_answer_at_once_while_every_call_of_the_store_hangs"
    ),
    "test_a_turn_of_a_streaming_session_is_not_looked_up_before_sglang_does": (
        "-> test_a_turn_of_a_streaming_session_is_computed_from_what_the_session_has"
    ),
    "test_memory_that_waits_for_nobody_makes_place_for_a_load": (
        "-> test_requests_that_find_no_memory_are_computed_and_no_store_is_taken_for_one_that_hangs"
    ),
    "test_what_cannot_be_read_ahead_is_computed": (
        "-> test_requests_that_find_no_memory_are_computed_and_no_store_is_taken_for_one_that_hangs"
    ),
    "test_what_is_being_read_ahead_keeps_no_load_from_its_pages": (
        "-> test_what_is_being_read_keeps_a_load_that_is_in_memory_from_nothing"
    ),
    **dict.fromkeys(
        (
            "test_bounce_memory_is_merged_when_it_comes_back",
            "test_guards_that_cannot_be_made_close_the_tiers_opened_before_them",
            "test_a_tier_whose_guards_cannot_be_made_is_closed",
        ),
        "memory of calls with a timeout is taken call by call, from the lender that transformed pages use",
    ),
    "test_a_page_larger_than_the_bounce_memory_is_refused_and_said_once": (
        "-> test_a_page_larger_than_the_bounce_memory_waits_until_nothing_is_lent"
    ),
    **dict.fromkeys(
        (
            "test_generic_calls_take_tensors_and_raw_addresses",
            "test_a_read_through_a_smaller_target_is_a_miss_and_removes_nothing_it_should_keep",
            "test_an_address_without_memory_behind_it_is_a_miss",
            "test_a_buffer_of_the_wrong_size_is_a_miss_and_no_damage",
            "test_pages_of_sglangs_own_size_are_found_after_a_restart_whatever_others_asked_for",
            "test_sizes_of_flat_pages_are_bounded",
        ),
        "SGLang makes no generic calls where interface_v1 is on, which the configuration requires",
    ),
    "TestHiCacheExtBackendGenericCalls": "as above; the tests of its class go on in the one above it",
    **dict.fromkeys(
        (
            "test_a_breaker_taken_over_goes_on_as_the_one_before_it_would",
            "test_evidence_against_a_tier_outlives_new_guards",
            "test_one_without_a_slow_start_that_takes_over_from_one_amid_its_own_is_in_full_use",
            "test_what_former_guards_have_left_behind_is_hidden_by_a_clear_too",
            "test_a_write_through_guards_that_are_just_put_is_hidden_by_a_clear_too",
            "test_guards_that_a_reload_makes_while_the_store_is_closed_are_closed",
            "test_new_guards_of_a_tier_that_is_down_probe_it_once_they_are_in_force_and_not_before",
        ),
        "a reload changes limits of the guards that there are, and makes no others",
    ),
    "test_a_breaker_that_was_taken_over_still_comes_back_by_itself": (
        "-> test_a_breaker_that_is_open_over_a_reload_still_comes_back_by_itself"
    ),
    "test_every_key_reaches_its_guard": _KEY,
    "test_every_guard_that_has_a_key_can_be_left_out": _KEY,
    "test_auto_is_what_is_left_out": _KEY,
    "test_the_picture_is_drawn_where_matplotlib_is": _OPTION,
    "test_a_password_is_rendered_as_a_reference": _OPTION,
    "test_a_descriptor_will_do_and_gets_a_description_of_its_own": "a lock is on a path: nothing locked a descriptor",
    **dict.fromkeys(
        (
            "test_the_environment_overrides_what_is_configured",
            "test_a_wrong_variable_is_named_with_what_is_allowed",
            "test_a_wrong_environment_variable_is_one_sentence_in_the_log_and_sglang_goes_on",
        ),
        "no variable overrides kernels.engine any more: one place says it",
    ),
    "test_a_store_that_refuses_a_condition_is_one_that_does_not_know_it": (
        "nothing is written on a condition: pages of every size are in packs, whose names nobody else has"
    ),
    "test_it_creates_conditionally_and_the_doctor_finds_nothing_wrong": "-> test_the_doctor_finds_nothing_wrong",
    "test_a_lead_of_less_than_a_hundredth_is_not_worth_a_change": (
        "-> test_a_lead_of_less_than_a_sixteenth_is_not_worth_a_change"
    ),
    "test_a_file_system_that_cannot_preallocate_gets_page_files": (
        "where the kernel cannot preallocate the C library writes: local file systems need no trial"
    ),
    **dict.fromkeys(
        (
            "test_a_directory_that_was_removed_is_noticed_and_the_next_one_is_another",
            "test_a_directory_that_was_renamed_is_noticed_and_the_next_one_is_another",
        ),
        "a path notices that, whatever its layout: -> test_another_directory_in_the_place_of_a_renamed_one_is_served",
    ),
    **dict.fromkeys(
        ("test_files_of_a_page_tier_without_unnamed_files_are_private_too", "TestPageFileStoreWithoutUnnamedFiles"),
        "page files are written under a temporary name on every file system",
    ),
    "test_stats_has_a_line_of_it": "hicache-ext curve shows it, and stats --json has it",
    "test_prompts_of_json_lines_are_told_by_their_lines": _OPTION,
    "test_every_combination_passes_config_check_and_says_why_for_each_tier": (
        "-> test_every_combination_passes_config_check"
    ),
    "test_bash_offers_commands_values_and_files": _COMPLETION,
    "test_a_script_for_each_shell_knows_every_command_and_is_sound": _COMPLETION,
    **dict.fromkeys(
        (
            "test_a_stretch_of_page_first_pages_is_one_rectangle",
            "test_rectangles_move_the_bytes_of_the_naive_plan",
        ),
        "copies as rectangles are gone: no installed server could use them",
    ),
    "test_unequal_numbers_of_tokens_are_refused": "-> test_unequal_numbers_of_tokens_are_refused",
    "test_repeated_measurements_keep_the_best_time_of_each_engine": "a situation that is measured twice is kept twice",
    "test_without_our_writer_sglangs_own_methods_run_and_are_timed": (
        "-> test_with_the_writer_off_sglangs_own_manager_reads_our_configuration_as_json"
    ),
    "test_every_method_that_the_scheduler_calls_and_that_moves_pages_is_hooked": (
        "-> test_our_manager_has_every_method_of_sglangs_that_the_scheduler_calls"
    ),
    "test_a_configured_engine_serves_what_it_can_and_the_fallback_the_rest": (
        "-> test_a_configured_engine_serves_what_it_can_and_sglangs_own_path_the_rest"
    ),
    "test_a_clear_that_can_move_only_page_files_deletes_them": (
        "all pages of an identity are below one directory, which is moved or is not"
    ),
    **dict.fromkeys(
        (
            "test_a_former_release_goes_on_with_its_slabs_beside_ours",
            "test_a_former_release_starts_empty_beside_slabs_of_this_version",
            "test_a_lock_that_cannot_be_opened_keeps_former_slabs_and_raises_nothing",
            "test_an_account_of_the_former_version_is_taken_over_and_counted",
            "test_former_slabs_are_counted_and_emptied_and_the_former_release_starts_empty",
            "test_killed_at_any_moment_of_the_emptying_the_former_release_starts_without_a_wrong_index",
            "test_only_files_with_our_names_are_counted_and_removed",
            "test_slabs_of_a_former_release_are_left_to_a_server",
            "test_slabs_of_a_former_release_are_reported_and_stay",
            "test_slabs_of_a_former_release_beside_ours_are_named_with_what_is_listed",
            "test_the_former_version_can_write_in_between",
            "test_the_note_that_the_index_is_in_order_is_gone_from_the_disk_before_the_index_goes",
            "test_their_size_is_looked_up_every_few_seconds_only",
            "test_tools_say_that_only_former_slabs_are_there_and_begin_nothing",
            "test_what_is_no_slab_of_a_former_release_is_neither_counted_nor_removed",
            "test_while_a_process_of_the_former_release_is_there_nothing_goes_and_that_is_said_once",
        ),
        _PAST,
    ),
    **dict.fromkeys(
        (
            "test_a_calibration_that_is_named_and_cannot_be_read_stops_the_start",
            "test_a_client_name_may_have_templates",
            "test_a_missing_prompt_is_completed_by_the_decode_node",
            "test_a_soft_pin_is_a_switch_or_a_time",
            "test_the_bound_of_open_files_reaches_the_store_of_each_path",
        ),
        _KEY,
    ),
    **dict.fromkeys(
        (
            "test_a_compiler_that_does_not_end_is_ended",
            "test_a_compiler_whose_server_was_killed_still_compiles_alone",
            "test_a_configured_directory_is_the_only_one_that_is_written_and_the_first_that_is_read",
            "test_a_disk_that_is_full_when_the_code_was_compiled_leaves_python_and_a_warning",
            "test_a_file_of_another_account_is_refused",
            "test_a_file_of_root_is_used_by_another_account",
            "test_a_file_that_cannot_be_removed_is_named",
            "test_a_file_that_cannot_be_written_to_its_end_leaves_nothing",
            "test_a_file_that_is_not_whole_and_plain_is_refused_and_kept_anew",
            "test_a_file_that_others_may_write_is_refused",
            "test_a_linked_directory_is_not_followed",
            "test_a_module_beside_the_servers_script_is_not_taken_for_one_of_pythons_own",
            "test_a_store_is_there_at_once_while_its_code_is_compiled_by_another_process",
            "test_a_store_without_compiled_code_works_and_says_once_why",
            "test_a_stored_result_is_loaded_where_nothing_can_be_written",
            "test_an_account_without_a_home_has_a_reason_too",
            "test_another_version_does_not_find_it",
            "test_code_for_another_processor_is_another_version",
            "test_compiled_code_is_refused_once_a_group_may_write_it",
            "test_code_that_was_damaged_is_compiled_anew",
            "test_everything_is_listed_and_nothing_changes",
            "test_how_the_compiler_ended_is_known",
            "test_it_is_found_where_nothing_can_be_written",
            "test_looking_makes_no_directory",
            "test_nothing_is_unpickled_of_a_file_that_is_refused",
            "test_of_processes_that_start_at_the_same_time_one_compiles",
            "test_outside_of_loading_nothing_is_compiled",
            "test_the_doctor_names_the_setting_where_compiled_code_cannot_be_kept",
            "test_the_doctor_says_before_and_after_that_code_is_compiled_and_keeps_json_clean",
            "test_the_first_directory_that_can_be_written_takes_it",
            "test_threads_that_need_it_at_the_same_time_have_one_code",
            "test_what_another_account_wrote_is_not_loaded_and_a_warning_says_so",
            "test_what_is_kept_is_found_and_readable_for_all_and_nothing_lies_beside_it",
            "test_what_is_listed_is_removed_and_what_others_keep_there_stays",
            "test_what_is_missing_is_not_compiled",
            "test_what_root_compiled_is_loaded_by_another_account",
            "test_where_compiled_code_cannot_be_kept_python_works_at_once_and_one_warning_names_the_setting",
            "test_where_no_directory_can_be_written_each_has_its_reason",
            "test_the_socket_of_a_server_that_runs_is_left_alone",
        ),
        _NUMBA,
    ),
    **dict.fromkeys(
        (
            "test_code_that_does_not_say_how_many_pages_it_moved_is_not_used",
            "test_code_that_makes_or_takes_other_pages_than_the_envelope_says_is_not_used",
            "test_kernels_that_do_something_else_than_numpy_are_not_used",
            "test_kernels_that_do_something_else_than_the_plain_ones_are_not_used",
            "test_kernels_that_make_other_keys_or_addresses_are_not_used",
        ),
        "the native core is of its sources or is not loaded; test_native_moves.py compares it with Python",
    ),
    **dict.fromkeys(
        (
            "TestNegativeCache",
            "test_a_look_up_that_a_write_overtakes_remembers_nothing",
            "test_a_look_up_that_failed_teaches_nothing",
            "test_a_mixed_batch_asks_only_for_what_may_be_there",
            "test_an_absent_page_is_asked_for_once_in_its_life",
            "test_only_the_first_gap_of_a_chain_is_remembered",
            "test_own_writes_are_seen_at_once",
            "test_the_negative_cache_is_bounded",
            "test_trouble_is_not_absence",
        ),
        "there is no negative cache; test_what_another_server_has_written_is_found_when_sglang_asks_again",
    ),
    "TestRedisServerWithoutCompiledCode": "-> TestRedisServerWithoutTheNativeCore",
    "test_a_full_disk_refuses_writes_keeps_reads_and_recovers": (
        "-> test_a_quota_below_the_capacity_keeps_the_newest_page_files_and_packs"
    ),
    "test_a_timer_that_compiled_code_set_is_not_taken_for_ones_own": "Python sets its timeout before each operation",
    "test_compiled_code_and_numpy_give_equal_bytes": "-> test_the_core_and_numpy_give_equal_bytes",
    "test_compiled_code_and_numpy_make_equal_planes": ("-> test_the_core_and_numpy_make_equal_planes_at_any_address"),
    "test_every_function_has_a_class_and_a_comment": "-> test_every_function_has_a_struct",
    "test_its_source_is_among_those_that_compiled_code_depends_on": _NUMBA,
    "test_pages_whose_pieces_fill_a_system_call_are_stored_beside_no_other_memory": (
        "-> test_pages_whose_pieces_fill_a_system_call_are_written_and_read"
    ),
    "test_planes_of_other_sizes_are_refused_before_compiled_code_sees_them": (
        "-> test_planes_of_other_sizes_are_refused_before_the_core_sees_them"
    ),
    "test_slabs_without_compiled_code_are_a_warning_that_says_why": (
        "-> test_slabs_without_the_native_core_are_an_error_that_says_why"
    ),
    "test_what_is_compiled_is_kept_until_one_of_its_modules_changes": _NUMBA,
    **dict.fromkeys(
        (
            "test_a_directory_that_holds_something_else_is_left_alone",
            "test_an_answer_that_the_template_leaves_out_begins_the_prompt_anew",
            "test_each_prompt_of_the_story_begins_with_the_last_prompt_and_its_answer",
            "test_the_json_of_the_demo_is_documented",
            "test_words_are_printed_whole_in_lines_and_without_control_characters",
        ),
        "hicache-ext demo is prove of a server of its own: it tells no story and keeps no directory",
    ),
    "test_wrong_input_gets_one_sentence": "-> test_a_key_that_cannot_be_read_gets_one_sentence",
    "test_your_own_prompts": _OPTION,
    "test_a_few_long_rows_stand_beside_each_other": "a table that does not fit has one form, rows one below the other",
    **dict.fromkeys(
        (
            "test_every_name_of_sglang_that_is_used_is_in_a_table_of_the_json",
            "test_for_people_the_table_of_names_is_one_sentence",
            "test_what_the_installed_sglang_lacks_is_named_in_that_sentence",
        ),
        "the doctor has a finding for each feature, which names what is missing, and no table beside them",
    ),
    "test_a_decode_node_that_would_copy_memory_given_away_is_refused": "SGLang 0.5.20 alone did so",
    "test_documented_extras_are_those_that_pip_can_install": "hints name packages, and no extras",
    "test_mode_off_has_no_rule": "a rule is made where it is on; test_imports.py sees that nothing else is",
    "test_without_an_endpoint_nothing_is_begun": "spans are made where they are on; test_imports.py sees the rest",
    "test_the_table_in_the_document_names_every_fault_and_the_case_that_finds_it": "the page has no such table now",
    "test_a_larger_slow_call_raises_the_least_that_a_call_gets": (
        "-> test_a_longer_timeout_does_not_raise_the_least_that_a_call_gets"
    ),
    "test_a_command_that_needs_a_package_says_in_one_sentence_which_extra_brings_it": (
        "-> test_a_command_that_needs_a_package_says_in_one_sentence_what_to_do"
    ),
    "test_the_extra_named_for_a_package_is_one_that_the_package_has": (
        "-> test_every_hint_to_install_names_a_checkout_or_a_package_of_our_list"
    ),
    "test_without_the_package_the_start_names_the_extra": "-> test_without_the_package_the_start_says_what_to_install",
    "test_a_full_host_pool_drops_by_policy_and_never_what_has_a_higher_priority": (
        "-> test_a_full_host_pool_drops_the_oldest_and_never_what_has_a_higher_priority"
    ),
    "test_a_manifest_that_a_downgrade_left_empty_beside_slabs_is_made_anew": _NAMES,
    "test_every_guard_can_be_left_out": _KEY,
    "test_pins_replicas_and_groups_are_taken_by_the_engine": ("-> test_pins_are_taken_by_the_engine"),
    "test_one_that_begins_open_is_probed_when_that_is_begun": (
        "-> test_one_that_begins_open_is_probed_once_somebody_asks_for_it"
    ),
    "test_pins_and_preferred_segments_are_taken_by_the_engine": "-> test_pins_are_taken_by_the_engine",
    "test_many_that_hang_are_left_behind_together_and_cost_a_bounded_number_of_threads": (
        "-> test_a_name_server_that_hangs_holds_up_no_start_and_no_look"
    ),
    "test_slabs_of_any_version_make_a_directory_one_of_slabs": "-> test_slabs_make_a_directory_one_of_slabs",
    "test_speculation_is_refused_unless_asked_for": (
        "-> test_speculation_is_refused_where_a_prefill_node_keeps_drafts_that_a_decode_node_does_not"
    ),
    "test_the_page_begins_with_what_it_comes_to": "-> test_later_turns_are_compared_round_by_round_with_the_spread",
    "test_the_page_begins_with_what_it_comes_to_and_with_the_spread": (
        "-> test_later_turns_are_compared_round_by_round_with_the_spread"
    ),
    **dict.fromkeys(
        (
            "TestTime",
            "test_a_point_has_the_rounds_that_its_share_has_time_for",
            "test_a_run_of_some_minutes_has_every_size_geometry_and_round_and_fewer_bytes",
            "test_a_run_that_takes_too_long_has_fewer_rounds_and_says_so",
            "test_a_run_with_time_makes_all_rounds",
            "test_both_nodes_of_a_pair_meet_in_one_room",
            "test_every_point_has_one_round_while_the_run_has_time",
            "test_text_endpoints_are_asked_in_text",
            "test_what_there_was_no_time_for_is_named",
        ),
        "the option of the benchmark is gone",
    ),
    **dict.fromkeys(
        (
            "test_a_published_command_line_has_no_paths",
            "test_a_published_command_line_names_no_relative_directory_either",
            "test_one_round_is_no_headline",
            "test_the_time_line_is_drawn",
            "test_what_is_published_names_no_path_of_the_machine",
        ),
        "benchmarks print tables and write JSON, and no pages or pictures",
    ),
    "test_a_missing_engine_is_reported_and_a_run_that_measured_nothing_does_not_end_with_0": (
        "-> test_a_contender_whose_package_is_missing_is_named_and_a_run_that_measured_nothing_does_not_end_with_0"
    ),
    "test_a_server_that_does_not_start_is_a_failure": "-> test_a_contender_that_cannot_be_opened_is_a_failure",
    "test_a_stopwatch_leaves_out_what_happens_between_the_calls": (
        "-> test_every_thread_moves_all_its_batches_and_nothing_is_left"
    ),
    "test_every_engine_and_contender_is_there_or_says_what_is_missing": "-> test_a_missing_engine_is_a_sentence",
    "test_rows_of_one_name_are_all_kept": "names of contenders are unique in a document",
    "test_exists_is_told_in_milliseconds_for_the_chain": "benchmarks/look_ups.py measures look-ups, of every tier",
    "test_tables_and_panels_have_every_arm": "-> test_tables_have_every_arm",
    "test_the_report_has_its_table_its_figures_and_its_picture": "-> test_the_report_has_its_table_and_its_figures",
    "test_what_counts_in_the_capacity_is_this_version_and_former_ones": (
        "-> test_only_this_version_counts_in_the_capacity"
    ),
    "test_what_opted_out_or_is_too_short_or_was_aborted_is_not_written": (
        "-> test_what_opted_out_or_is_too_short_is_not_written"
    ),
    **dict.fromkeys(
        (
            "test_the_span_of_a_read_tells_how_many_pages_came_back_inexactly",
            "test_who_counts_a_call_is_told_its_lossy_pages_alone",
        ),
        "a counter of the tier tells it, and no span",
    ),
    **dict.fromkeys(
        ("test_a_damaged_staged_page_is_no_hit", "test_a_page_damaged_in_the_buffer_is_not_promoted"),
        "a page is hashed once, when its tier reads it: the prefetch buffer is host memory as any other",
    ),
    **dict.fromkeys(
        (
            "TestSlabStoreWithoutCompiledCode",
            "test_compiled_and_plain_code_agree_to_the_bit",
            "test_numpy_leaves_out_only_uses_of_pages_that_were_used_just_now",
            "test_without_compiled_code_the_first_policy_stays",
        ),
        "without the native core there are no slabs (test_without_core.py)",
    ),
    **dict.fromkeys(
        (
            "test_a_page_that_was_removed_does_not_come_back_from_a_replica_that_lags",
            "test_a_replica_that_hangs_costs_one_deadline_and_no_primary",
            "test_a_server_that_is_named_as_its_own_replica_is_a_primary_and_stays_open",
            "test_replicas_share_the_reads_and_what_one_lacks_is_asked_of_the_primary",
            "test_while_the_primary_is_down_a_replica_answers",
        ),
        "replicas of Redis are not read",
    ),
    **dict.fromkeys(
        (
            "test_a_dead_server_of_a_proxy_costs_its_own_pages_only",
            "test_a_page_that_is_refused_alone_pauses_no_writes",
        ),
        "nothing is done for proxies of Redis",
    ),
    **dict.fromkeys(
        (
            "test_a_server_that_takes_no_more_connections_is_served_by_those_that_are_open",
            "test_connections_that_ended_are_replaced_also_after_one_was_refused",
        ),
        "a connection beyond maxclients is one that is refused, as any other",
    ),
    "test_a_reply_too_many_of_a_node_that_is_asked_during_a_move_makes_no_page_exist": "ASK is not followed",
    "test_clear_removes_what_development_versions_kept_as_objects_of_their_own": _PAST,
    "test_two_that_ask_at_once_share_one_probe": "only the thread of a breaker probes",
    "test_a_page_that_two_requests_wait_for_is_kept_for_both": (
        "-> test_a_page_is_kept_for_every_request_that_found_it_until_its_room_is_needed"
    ),
    "test_a_page_is_kept_for_every_request_that_found_it": (
        "-> test_a_page_is_kept_for_every_request_that_found_it_until_its_room_is_needed"
    ),
    "test_one_that_begins_open_is_probed_from_resume_on": (
        "-> test_one_that_begins_open_is_probed_once_somebody_asks_for_it"
    ),
    "test_to_resume_what_is_probed_already_delays_no_probe": "a breaker that begins open begins to be probed once",
    "test_slots_that_move_are_followed": "-> test_pages_of_slots_that_move_are_absent_until_the_map_names_their_node",
    "test_slots_that_move_are_followed_once_they_are_there": (
        "-> test_pages_of_slots_that_move_are_absent_until_the_map_names_their_node"
    ),
    "test_numpy_answers_what_compiled_code_does": "-> test_look_ups_and_ranks_are_those_of_the_rows",
    "test_stores_over_one_directory_share_it_until_the_last_one_goes": (
        "-> test_stores_of_one_process_share_the_index_of_their_directory_until_the_last_one_goes"
    ),
    "test_a_chain_looked_up_in_portions_ends_where_its_pages_end": "-> test_a_chain_ends_where_its_pages_end",
    **dict.fromkeys(
        (
            "test_a_lossless_codec_changes_nothing_at_all",
            "test_a_lossy_codec_within_the_bounds_is_given_a_configuration",
            "test_a_missed_bound_is_one_sentence_exit_code_1_and_no_configuration",
            "test_a_model_that_is_not_there_is_one_sentence",
            "test_a_process_that_was_prepared_for_sglang_measures_the_same",
            "test_predictions_of_nan_are_refused_and_never_taken_for_equal",
            "test_prefixes_fit_sliding_windows_and_every_kind_of_text_has_predictions",
            "test_too_few_predictions_tell_nothing",
            "test_what_cannot_be_used_is_refused_with_a_sentence",
            "test_without_a_bound_a_lossy_codec_is_measured_and_not_configured",
        ),
        "hicache-ext codec-check is gone: prove asks the real server, with the codec and without (docs/codecs.md)",
    ),
    "test_memory_that_the_library_knew_is_registered_again_with_a_new_client": (
        "a pool that is not reached at the start is opened later (late_open.py), with all its memory"
    ),
    "test_a_file_system_made_anew_on_the_same_device_is_another_one": (
        "nothing compares file systems: a path comes back as long as one is mounted where it was"
    ),
    "test_a_ttl_that_cannot_be_recorded_is_a_warning": "no ttl is recorded in a directory: its configuration has it",
    "test_stat_says_which_ttl_the_last_server_had": "-> test_stat_says_the_ttl_of_a_configuration",
    "test_a_directory_keeps_the_layout_its_manifest_names": "-> test_a_directory_keeps_the_layout_that_it_has",
    "test_a_directory_of_another_format_is_refused_in_one_sentence": _NAMES,
    "test_a_directory_of_somebody_else_is_refused_and_left_alone": _NAMES,
    "test_a_disk_that_is_gone_is_seen_by_its_manifests": (
        "-> test_a_disk_that_is_gone_is_seen_by_the_files_that_are_not_there"
    ),
    "test_a_first_start_that_stored_nothing_survives_too": (
        "-> test_a_directory_keeps_its_layout_from_the_first_start_on"
    ),
    "test_a_manifest_of_a_newer_format_is_refused_and_kept": _NAMES,
    "test_a_manifest_of_somebody_else_in_a_directory_named_v3_is_refused_and_kept": _NAMES,
    "test_a_manifest_that_a_downgrade_left_empty_costs_no_page_in_slabs": _NAMES,
    "test_a_manifest_that_another_process_makes_between_two_looks_is_no_damaged_one": (
        "-> test_a_layout_that_another_process_begins_meanwhile_is_seen"
    ),
    "test_a_manifest_that_cannot_be_read_is_reported_and_stays": _NAMES,
    "test_a_manifest_that_is_gone_is_made_anew_for_the_layout_that_is_there": (
        "-> test_a_directory_keeps_its_layout_from_the_first_start_on"
    ),
    "test_a_spoilt_manifest_does_not_let_the_other_layout_in": _NAMES,
    "test_a_spoilt_manifest_is_made_anew_where_all_that_is_left_beside_it_is_ours": (
        "-> test_a_directory_that_lost_its_pages_is_used_again"
    ),
    "test_an_unknown_format_in_the_directory_itself_is_refused_and_kept": _NAMES,
    "test_no_changed_bit_of_a_manifest_keeps_a_start_from_its_pages": _NAMES,
    "test_page_files_of_the_former_format_are_refused_and_stay_as_they_are": _PAST,
    "test_pages_alone_of_the_former_format_are_those_of_this_one": _PAST,
    "test_slabs_make_a_directory_one_of_slabs_whatever_became_of_its_manifest": (
        "-> test_slabs_make_a_directory_one_of_slabs"
    ),
    "test_slabs_of_this_version_are_in_a_directory_of_their_own_with_their_manifest": (
        "-> test_slabs_of_this_version_are_in_a_directory_of_their_own"
    ),
    "test_a_connection_that_turned_out_dead_costs_no_other_lane_its_own": (
        "-> test_where_one_connection_turned_out_dead_all_that_are_idle_go"
    ),
}
"""Name of a test that is gone -> why, or "-> " and the name that it has now."""


def names(sources: Iterator[str]) -> Counter[str]:
    """Count the functions and classes of tests by name."""
    return Counter(
        node.name
        for source in sources
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name.startswith(("test_", "Test"))
    )


def main(commit: str) -> int:
    """Print what is wrong; the exit code."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    listed = git("ls-tree", "-r", "--name-only", commit, "tests", "hicache_ext/testing").split()
    before = names(git("show", f"{commit}:{file}") for file in listed if file.endswith(".py"))
    files = [*ROOT.glob("tests/**/*.py"), *ROOT.glob("hicache_ext/testing/**/*.py")]
    now = names(file.read_text() for file in files)
    gone = sorted((before - now).keys())
    wrong = [f"{name} is gone, and nothing says why" for name in gone if name not in FORMER]
    for name, became in FORMER.items():
        if became.startswith("-> ") and became[3:] not in now:
            wrong.append(f"{name} is said to be {became[3:]}, which is not there")
    print(f"{before.total()} tests at {commit}, {now.total()} now; gone or renamed: {len(gone)}", *wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

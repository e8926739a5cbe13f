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

_PAST = "slabs, manifests and accounts of formats before 0.3 are gone; nothing was ever released"
_KEY = "its configuration key is gone"

FORMER = {
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
            "test_a_client_name_may_have_templates",
            "test_a_missing_prompt_is_completed_by_the_decode_node",
            "test_a_soft_pin_is_a_switch_or_a_time",
            "test_the_bound_of_open_files_reaches_the_store_of_each_path",
        ),
        _KEY,
    ),
    "test_words_are_printed_whole_in_lines_and_without_control_characters": (
        "-> test_an_answer_is_printed_in_lines_without_control_characters"
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
    "test_a_manifest_that_a_downgrade_left_empty_beside_slabs_is_made_anew": (
        "-> test_a_manifest_that_a_downgrade_left_empty_costs_no_page_in_slabs"
    ),
    "test_a_writer_of_an_earlier_version_counts_until_it_was_silent_for_ten_minutes": (
        "-> test_a_writer_that_is_no_member_counts_until_it_was_silent_for_ten_minutes"
    ),
    "test_eagle_and_plain_hashes_never_meet_and_neither_do_namespaces": "-> test_hashes_of_namespaces_never_meet",
    "test_every_guard_can_be_left_out": "-> test_every_guard_that_has_a_key_can_be_left_out",
    "test_pins_replicas_and_groups_are_taken_by_the_engine": (
        "-> test_pins_and_preferred_segments_are_taken_by_the_engine"
    ),
    "test_slabs_of_any_version_make_a_directory_one_of_slabs": (
        "-> test_slabs_make_a_directory_one_of_slabs_whatever_became_of_its_manifest"
    ),
    "test_speculation_is_refused_unless_asked_for": "-> test_speculation_is_refused",
    "test_the_page_begins_with_what_it_comes_to": "-> test_the_page_begins_with_what_it_comes_to_and_with_the_spread",
    "test_what_counts_in_the_capacity_is_this_version_and_former_ones": (
        "-> test_only_this_version_counts_in_the_capacity"
    ),
    "test_what_opted_out_or_is_too_short_or_was_aborted_is_not_written": (
        "-> test_what_opted_out_or_is_too_short_is_not_written"
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

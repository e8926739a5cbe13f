"""Every launch argument of SGLang is known for what it does to the bytes of a page, or counts in their identity."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from hicache_ext.testing.sglang_cpu import prepare_process

prepare_process()

from sglang.srt.server_args import ServerArgs  # noqa: E402

from hicache_ext.sglang import launch_arguments as lists  # noqa: E402
from hicache_ext.sglang.launch_arguments import given_arguments, shaping, unknown  # noqa: E402
from hicache_ext.sglang.releases import TESTED  # noqa: E402
from tests.releases.wheels import package_of  # noqa: E402

LISTS = {
    "harmless": lists.HARMLESS,
    "kernels": lists.KERNELS,
    "shaping": lists.SHAPING,
    "shaping as resolved": lists.SHAPING_AS_RESOLVED,
    "shaping files": lists.SHAPING_FILES,
    "told otherwise": lists.IDENTIFIED_OTHERWISE,
    "weights": lists.WEIGHTS,
}


def arguments_of(release: str) -> set[str]:
    """The fields of the classes that declare launch arguments: those with a namespace."""
    found = set()
    for file in (package_of(release) / "srt/arg_groups/fields").glob("*.py"):
        for one in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(one, ast.ClassDef) and "_NS_PATH" in ast.unparse(one):
                found |= {str(n.target.id) for n in one.body if isinstance(n, ast.AnnAssign)}  # type: ignore[union-attr]
    return found


@pytest.mark.parametrize("release", TESTED)
def test_every_argument_of_every_tested_release_is_in_exactly_one_list(release: str) -> None:
    arguments = arguments_of(release)
    assert len(arguments) > 500
    in_lists = {name: [title for title, names in LISTS.items() if name in names] for name in arguments}
    assert {name: titles for name, titles in in_lists.items() if len(titles) != 1} == {}


def test_no_list_has_an_argument_that_no_tested_release_has() -> None:
    known = set().union(*map(arguments_of, TESTED))
    assert {title: set(names) - known for title, names in LISTS.items() if set(names) - known} == {}


def test_the_record_of_this_release_has_the_arguments_that_its_sources_declare() -> None:
    from sglang.srt.arg_groups.arg_utils import record_fields

    from hicache_ext.sglang.releases import installed_release

    assert {field.name for field in record_fields(ServerArgs)} == arguments_of(installed_release())


def test_a_server_with_defaults_gave_nothing_but_its_model() -> None:
    assert given_arguments(ServerArgs(model_path="m")) == {"model_path": "m"}


def test_none_of_what_servers_usually_give_is_added_to_an_identity() -> None:
    usual: dict[str, Any] = {"attention_backend": "fa3", "tp_size": 4, "page_size": 64, "chunked_prefill_size": 8192}
    usual |= {
        "enable_hierarchical_cache": True,
        "api_key": "secret",
        "speculative_algorithm": "EAGLE",
        "quantization": "fp8",
    }
    assert shaping(given_arguments(ServerArgs(model_path="m", moe_runner_backend="triton", **usual))) == {}


def test_kernels_count_where_the_same_bits_were_asked_for() -> None:
    given = given_arguments(ServerArgs(model_path="m", attention_backend="fa3", enable_deterministic_inference=True))
    assert shaping(given) == {"attention_backend": "fa3", "enable_deterministic_inference": "true"}


class Next(ServerArgs, kw_only=True):  # type: ignore[call-arg,misc]
    """The arguments of a release to come."""

    new_knob: Any = None
    new_list: list[str] = msgspec.field(default_factory=list)


def test_an_argument_that_nobody_knows_counts_by_a_digest_when_it_is_given() -> None:
    assert shaping(given_arguments(Next(model_path="m"))) == {}
    given = given_arguments(Next(model_path="m", new_knob="s3cret", new_list=["a"]))
    facts = shaping(given)
    assert unknown(given) == tuple(sorted(facts)) == ("new_knob", "new_list")
    assert all(text.startswith("sha256:") and len(text) == 39 for text in facts.values())
    assert "s3cret" not in str(facts)
    others: list[Any] = ["s3cret2", 1, True, {"a": 1}, ["s3cret"], 1.5, "\udce9"]
    seen = {shaping(given_arguments(Next(model_path="m", new_knob=value)))["new_knob"] for value in others}
    assert len({*seen, facts["new_knob"]}) == len(others) + 1


@pytest.mark.parametrize("make", [lambda o: {"a": 1, "b": {*o}}, lambda o: dict.fromkeys(o, 1), lambda o: frozenset(o)])
def test_equal_values_have_equal_digests_whatever_their_order(make: Callable[[list[str]], Any]) -> None:
    one, other = (shaping({"new_knob": make(order)}) for order in (["x", "y", "z"], ["z", "y", "x"]))
    assert one == other


def test_values_of_any_kind_are_equal_in_every_process() -> None:
    class Thing:
        def __init__(self, of: int) -> None:
            self.of = of

    def facts(value: object) -> dict[str, str]:
        return shaping({"an_argument_to_come": value})

    assert facts(Thing(1)) == facts(Thing(1)) != facts(Thing(2))
    assert facts(object()) == facts(object())
    assert facts({1: "a", "b": 2}) == facts({"b": 2, 1: "a"}) != facts({1: "a", "b": 3})

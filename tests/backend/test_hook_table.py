"""The table of hooks: it fits this SGLang, and says in one sentence what a missing hook costs."""

from __future__ import annotations

import inspect
import pkgutil
import subprocess
import sys
from collections import defaultdict
from typing import Any

import pytest

from hicache_ext.testing.sglang_cpu import prepare_process

prepare_process()

from hicache_ext.sglang import kernel_hooks, plugin  # noqa: E402
from hicache_ext.sglang.used_names import (  # noqa: E402
    ADAPTERS,
    COPIES,
    HOOKED,
    HOOKS,
    WEIGHTS_UPDATES,
    Use,
    check_installed,
    features_off,
)

OFF = features_off(check_installed())
"""What this release cannot have."""
IN_FORCE = [hook for hook in plugin._wanted(HOOKED) if OFF.keys().isdisjoint(hook.features)]


@pytest.mark.parametrize("hook", IN_FORCE, ids=lambda hook: hook.target.split(".", 3)[-1])
def test_every_target_exists_in_this_sglang_and_is_hooked_once(hook: Use) -> None:
    assert callable(pkgutil.resolve_name(hook.target))
    assert [other.target for other in HOOKS].count(hook.target) == 1
    assert hook.function.__name__.startswith(hook.kind)


@pytest.mark.parametrize("hook", [hook for hook in HOOKS if hook.kind == "around"], ids=lambda hook: hook.target)
def test_a_hook_around_a_call_takes_the_original_first(hook: Use) -> None:
    assert next(iter(inspect.signature(hook.function).parameters)) == "original"


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.target)
def test_a_hook_takes_whatever_a_later_sglang_hands_over(hook: Use) -> None:
    kinds = {parameter.kind for parameter in inspect.signature(hook.function).parameters.values()}
    assert kinds >= {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}


@pytest.mark.parametrize("hook", IN_FORCE, ids=lambda hook: hook.target)
def test_a_hook_names_arguments_as_sglang_does_which_may_give_them_by_name(hook: Use) -> None:
    theirs = list(inspect.signature(inspect.unwrap(pkgutil.resolve_name(hook.target))).parameters)[1:]
    ours = list(inspect.signature(hook.function).parameters.values())[1 if hook.kind == "before" else 2 :]
    named = [
        parameter.name for parameter in ours if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    assert named == theirs[: len(named)]


def test_a_feature_without_a_hook_is_told_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = "sglang.srt.lora.lora_manager.LoRAManager.load_lora_weights"
    monkeypatch.setattr(plugin, "_is_hooked", lambda target: target != missing)
    assert {feature: words for feature, words in plugin.not_in_force().items() if feature not in OFF} == {
        ADAPTERS: f"the hook on {missing} is not in force (is SGLANG_PLUGINS set?): adapters cannot be told apart"
    }
    monkeypatch.setattr(plugin, "_is_hooked", lambda target: False)
    assert set(plugin.not_in_force()) == set(HOOKED) - ({COPIES} if not kernel_hooks.wants_hooks() else set())
    assert list(plugin.not_in_force([ADAPTERS])) == [ADAPTERS]


def test_a_target_that_this_sglang_lacks_is_not_in_force() -> None:
    assert not plugin._is_hooked("sglang.srt.no_such_module.Thing.call")
    assert not plugin._is_hooked("sglang.srt.managers.scheduler.Scheduler.no_such_call")


def test_hooks_are_registered_once_and_also_where_sglang_keeps_them_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    taken: list[str] = []
    register = HookRegistry.register

    def counting(target: str, *hook: Any) -> None:
        taken.append(target)
        register(target, *hook)

    monkeypatch.setattr(HookRegistry, "register", counting)
    monkeypatch.setattr(HookRegistry, "_hooks", defaultdict(list))
    plugin.register([ADAPTERS])
    plugin.register([ADAPTERS])
    assert taken == [hook.target for hook in HOOKS if ADAPTERS in hook.features]
    # What begins with an underscore may be another thing in the next release.
    monkeypatch.setattr(HookRegistry, "register", lambda target, *_: taken.append(target))
    monkeypatch.delattr(HookRegistry, "_hooks")
    plugin.register([WEIGHTS_UPDATES])
    assert [hook.target for hook in IN_FORCE if WEIGHTS_UPDATES in hook.features] == taken[4:]


AS_A_SERVER_STARTS = """
import sys
from hicache_ext.sglang import plugin
assert "sglang" not in sys.modules  # the rig prepares the process between our import and SGLang's
from hicache_ext.testing.sglang_cpu import install_mends
install_mends()
from sglang.srt.plugins import load_plugins
load_plugins()
print([feature.name for feature in plugin.not_in_force()])
"""


@pytest.mark.slow
def test_sglang_takes_every_hook_when_it_loads_its_plugins() -> None:
    run = subprocess.run([sys.executable, "-c", AS_A_SERVER_STARTS], capture_output=True, text=True, timeout=300)
    assert run.stdout.splitlines()[-1:] == [str([feature.name for feature in OFF])], run.stderr[-2000:]

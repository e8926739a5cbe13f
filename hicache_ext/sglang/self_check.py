"""Looks up what this package uses of SGLang (used_names.py) in the sources of the installed release.

It reads the sources instead of importing them: that works where SGLang cannot be imported (no GPU, another release
beside the installed one), sees what objects only have once they are made (``self.x = ...``), and changes nothing.
"""

from __future__ import annotations

import ast
import importlib.util
import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hicache_ext.sglang.releases import comes_with, installed_release
from hicache_ext.sglang.used_names import FEATURES, LAUNCH_ARGUMENTS, LINKER, STORAGE, USED, Feature, Use

_ARGUMENT_FIELDS = "sglang.srt.arg_groups.fields"
_DUTIES = {
    "sglang.srt.mem_cache.hicache_storage.HiCacheStorage": STORAGE,
    "sglang.srt.mem_cache.unified_cache.unified_cache_linker.UnifiedCacheLinker": LINKER,
}
"""Classes of SGLang that ours derive from, and what is lost where they ask for what ours do not have."""


@dataclass(frozen=True, slots=True)
class Checked:
    """``missing`` has one text per name that is not there, or not as it is used; ``new`` are parameters that SGLang may
    hand to a function of ours and that this package does not know: they are ignored."""

    use: Use
    expected: bool
    """Whether this release must have it."""
    missing: tuple[str, ...]
    new: tuple[str, ...] = ()

    @property
    def found(self) -> bool:
        return not self.missing

    def lacks(self, feature: Feature) -> bool:
        return self.expected and not self.found and feature in self.use.features


@cache
def check_installed() -> tuple[Checked, ...]:
    """Of the release that a server in this environment runs. Raises UnsupportedError where there is none."""
    return tuple(check(Sources.installed(), installed_release()))


def check(sources: Sources, release: str, used: Sequence[Use] = USED) -> Iterator[Checked]:
    """Each of ``used``, then what SGLang asks of a backend or a linker beyond that."""
    for use in used:
        yield Checked(use, belongs_to(release, use), *_looked_up(sources, use))
    for owner, feature in _DUTIES.items():
        ours = [use for use in used if use.owner == owner]
        answered = {name for use in ours for name in use.names}
        if ours and (duties := sorted(sources.abstract_methods(owner) - answered)):
            unanswered = tuple(f"{name}, which this package does not answer" for name in duties)
            yield Checked(Use(owner, tuple(duties), (feature,)), True, unanswered)


def belongs_to(release: str, use: Use) -> bool:
    gone = bool(use.before) and comes_with(release, use.before)
    return not gone and (not use.since or comes_with(release, use.since))


def lacking(checked: Collection[Checked], feature: Feature) -> str | None:
    """What this release lacks of what ``feature`` needs, as words for a sentence; None where it lacks nothing."""
    texts = [text for one in checked if one.lacks(feature) for text in one.missing]
    return None if not texts else texts[0] + (f" and {len(texts) - 1} more" if len(texts) > 1 else "")


def features_off(checked: Collection[Checked]) -> dict[Feature, str]:
    """The features that this release cannot have, each with what it lacks."""
    return {feature: words for feature in FEATURES if (words := lacking(checked, feature)) is not None}


def ignored_parameters(checked: Collection[Checked]) -> str | None:
    """The warning about what SGLang may hand over and this package does not know; None where it knows all."""
    texts = [f"{'.'.join(one.use.target.split('.')[-2:])}({', '.join(one.new)})" for one in checked if one.new]
    more = f" and {len(texts) - 3} more (hicache-ext doctor --json)" if len(texts) > 3 else ""
    return f"parameters that hicache_ext does not know are ignored: {', '.join(texts[:3])}{more}" if texts else None


def _looked_up(sources: Sources, use: Use) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """``missing`` and ``new`` of Checked."""
    known = sources.names_of(use.owner)
    if known is None:
        return (use.owner,), ()
    # A constructor may be generated.
    gone = [name for name in use.names if name != "__init__" and known.isdisjoint(name.split("|"))]
    if gone:
        return () if use.may_go else tuple(f"{use.owner}.{' or '.join(name.split('|'))}" for name in gone), ()
    if not use.takes and not use.answered:
        return (), ()
    parameters = sources.parameters(use.owner, use.names[0]) if not use.class_as else sources.handed_to_class(use)
    if parameters is None:
        # A class that is constructed in another way is given what it lacks, or says so itself.
        return () if use.class_as else (f"{use.target} as a function",), ()
    wanted = [name.removesuffix("?") for name in use.takes]
    there = [name for name in parameters.positional if name in wanted]
    new = [name for name in (*parameters.positional, *parameters.keywords) if name not in wanted]
    # What stands in front of a parameter that is known would be taken for it.
    in_front = parameters.positional[: parameters.positional.index(there[-1])] if there and use.answered else ()
    refused = [name for name in new if name in parameters.required or name in in_front]
    found = {*parameters.positional, *parameters.keywords}
    changes = [f"without {name}" for name in use.takes if name not in found and not name.endswith("?")]
    changes = [*([] if parameters.any_keyword else changes), *(f"with {name}" for name in refused)]
    if use.answered and there != [name for name in wanted if name in there]:
        changes.append("in another order")
    missing = (f"{use.target} as it is used (it is {', '.join(changes)})",) if changes else ()
    return missing, tuple(name for name in new if use.answered and name not in refused)


@dataclass(frozen=True, slots=True)
class _Parameters:
    positional: tuple[str, ...]
    """Those that can be given by position, in order."""
    keywords: tuple[str, ...]
    """Those that can be given by name alone."""
    required: frozenset[str]
    any_keyword: bool


class Sources:
    """The sources of one release of SGLang, parsed as they are asked for."""

    def __init__(self, package: Path) -> None:
        """``package``: the directory ``sglang``."""
        self._package = package
        self._modules: dict[str, ast.Module | None] = {}
        self._names: dict[str, set[str] | None] = {}
        self._imports: dict[str, dict[str, tuple[str, str]]] = {}
        self._lineages: dict[str, list[ast.ClassDef]] = {}

    @classmethod
    def installed(cls) -> Sources:
        """Those that ``import sglang`` would import here."""
        specification = importlib.util.find_spec("sglang")
        places = list(specification.submodule_search_locations or ()) if specification is not None else []
        return cls(Path(places[0]) if places else Path("/nonexistent"))

    def names_of(self, owner: str) -> set[str] | None:
        """What a module or class defines, members of base classes and of instances included."""
        if owner not in self._names:
            found: set[str] | None = None
            if owner == LAUNCH_ARGUMENTS:
                directory = self._path(_ARGUMENT_FIELDS)
                trees = [self._module(f"{_ARGUMENT_FIELDS}.{file.stem}") for file in sorted(directory.glob("*.py"))]
                nodes = [node for tree in trees if tree for node in ast.walk(tree)]
                found = set().union(*[_own_members(node) for node in nodes if isinstance(node, ast.ClassDef)])
            elif (module := self._module(owner)) is not None:
                found = {name for name, _ in _definitions(module)}.union(self._imports_of(owner))
            elif lineage := self._lineage(owner):
                found = set().union(*map(_own_members, lineage))
            self._names[owner] = found
        return self._names[owner]

    def parameters(self, owner: str, name: str) -> _Parameters | None:
        """Of a function without its ``self``; of a class that generates its constructor, its fields."""
        function = self._function(owner, name)
        if function is None:
            return self._fields(owner) if name == "__init__" else None
        arguments = function.args
        named = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
        required = set(named[: len(named) - len(arguments.defaults)])
        if self._module(owner) is None and not any("staticmethod" in ast.unparse(d) for d in function.decorator_list):
            named = named[1:]
        keywords = [argument.arg for argument in arguments.kwonlyargs]
        required |= {name for name, default in zip(keywords, arguments.kw_defaults, strict=True) if default is None}
        return _Parameters(tuple(named), tuple(keywords), frozenset(required), arguments.kwarg is not None)

    def handed_to_class(self, use: Use) -> _Parameters | None:
        """What a function hands to the class that it holds as ``use.class_as``; positions have the names of ``use``."""
        function = self._function(use.owner, use.names[0])
        calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)] if function is not None else []
        calls = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == use.class_as]
        if not calls:
            return None
        first = min(calls, key=lambda call: call.lineno)
        known = [name.removesuffix("?") for name in use.takes]
        positional = [*known, *(f"argument {number + 1}" for number in range(len(known), len(first.args)))]
        named = [keyword.arg for keyword in first.keywords if keyword.arg is not None]
        return _Parameters(
            tuple(positional[: len(first.args)]), tuple(named), frozenset(), len(named) < len(first.keywords)
        )

    def _fields(self, owner: str) -> _Parameters | None:
        """Of a dataclass, those of its base classes first."""
        lineage = self._lineage(owner)
        own = [node for one in reversed(lineage) for node in one.body if isinstance(node, ast.AnnAssign)]
        names = tuple(name for node in own for name in _assigned(node))
        required = frozenset(name for node in own if node.value is None for name in _assigned(node))
        return _Parameters(names, (), required, False) if lineage else None

    def abstract_methods(self, owner: str) -> set[str]:
        return {
            node.name
            for one in self._lineage(owner)[:1]
            for node in one.body
            if isinstance(node, ast.FunctionDef)
            and any("abstractmethod" in ast.unparse(decorator) for decorator in node.decorator_list)
        }

    def _path(self, module: str) -> Path:
        return self._package.joinpath(*module.split(".")[1:])

    def _module(self, name: str) -> ast.Module | None:
        if name not in self._modules:
            path = self._path(name)
            file = next((f for f in (path.with_suffix(".py"), path / "__init__.py") if f.is_file()), None)
            self._modules[name] = ast.parse(file.read_bytes()) if file is not None else None
        return self._modules[name]

    def _imports_of(self, module: str) -> dict[str, tuple[str, str]]:
        """Name here -> (module, name there) of what a module imports; the name there is "" for a module."""
        if module not in self._imports:
            found = self._imports[module] = {}
            for node in ast.walk(self._module(module) or ast.Module([], [])):
                if isinstance(node, ast.ImportFrom):
                    parent = module.rsplit(".", node.level)[0] if node.level else ""
                    source = ".".join(part for part in (parent, node.module or "") if part)
                    found |= {alias.asname or alias.name: (source, alias.name) for alias in node.names}
                elif isinstance(node, ast.Import):
                    found |= {alias.asname or alias.name: (alias.name, "") for alias in node.names}
        return self._imports[module]

    def _lineage(self, owner: str) -> list[ast.ClassDef]:
        """A class by its dotted name, and after it its base classes; imports are followed. Empty where it is not."""
        if owner not in self._lineages:
            self._lineages[owner] = []  # a circle of imports or bases ends here
            module, _, name = owner.rpartition(".")
            tree = self._module(module) if module.startswith("sglang") else None
            nodes = [node for defined, node in _definitions(tree) if defined == name] if tree is not None else []
            classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
            source, original = self._imports_of(module).get(name, ("", "")) if tree is not None else ("", "")
            if classes:
                # Of Generic[X] the part in front.
                bases = [base.value if isinstance(base, ast.Subscript) else base for base in classes[-1].bases]
                of_bases = [self._lineage(f"{module}.{ast.unparse(base)}") for base in bases]
                self._lineages[owner] = [classes[-1], *itertools.chain.from_iterable(of_bases)]
            elif original:
                self._lineages[owner] = self._lineage(f"{source}.{original}")
        return self._lineages[owner]

    def _function(self, owner: str, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
        if (module := self._module(owner)) is not None:
            nodes = [node for defined, node in _definitions(module) if defined == name]
        else:
            nodes = [node for one in self._lineage(owner) for node in one.body if getattr(node, "name", None) == name]
        return next((node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)), None)


def _definitions(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """What a module defines at its top, also inside ``if`` and ``try``."""
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop(0)
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node
        elif isinstance(node, ast.If | ast.Try | ast.ExceptHandler):
            pending += list(ast.iter_child_nodes(node))
        else:
            for name in _assigned(node):
                yield name, node


def _own_members(one: ast.ClassDef) -> set[str]:
    members: set[str] = set()
    for node in one.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            members.add(node.name)
            members |= {
                inner.attr
                for inner in ast.walk(node)
                if isinstance(inner, ast.Attribute)
                and isinstance(inner.ctx, ast.Store)
                and isinstance(inner.value, ast.Name)
                and inner.value.id == "self"
            }
        else:
            members.update(_assigned(node))
    return members


def _assigned(node: ast.AST) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]

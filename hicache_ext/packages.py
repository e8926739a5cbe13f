"""Packages that only some commands need. A missing one is a sentence that names the extra which brings it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys

from hicache_ext.errors import MissingPackageError

EXTRAS = {
    "sglang": "sglang",
    "torch": "sglang",
    "triton": "sglang",
    "transformers": "sglang",
    "tokenizers": "sglang",
    "safetensors": "sglang",
    "zmq": "sglang",
    "mooncake": "mooncake",
    "redis": "redis",
    "obstore": "object",
    "numba": "compiled",
    "zstandard": "codec",
    "matplotlib": "bench",
    "opentelemetry": "tracing",
    "cryptography": "seal",
}
"""Package as it is imported -> the extra of hicache-ext that installs it, itself or as a dependency."""


def missing_package(package: str, problem: str = "which is not installed") -> MissingPackageError:
    """The sentence for one package; ``problem`` is a relative clause."""
    requirement = f"hicache-ext[{EXTRAS[package]}]" if package in EXTRAS else package
    return MissingPackageError(package, requirement, problem)


def package_behind(error: ImportError) -> MissingPackageError | None:
    """The package whose absence ``error`` tells of. None where no other package is behind it: that is a bug."""
    package = (error.name or "").partition(".")[0]
    if not package or package == __package__ or package in sys.stdlib_module_names:
        return None
    if isinstance(error, ModuleNotFoundError) and error.name == package:
        return missing_package(package)
    return missing_package(package, f"which cannot be imported ({error})")


def installed_version(package: str) -> str | None:
    """The version of a package by the name that pip knows, or None; imports nothing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def need(*packages: str) -> None:
    """Raise MissingPackageError for the first of ``packages`` that is not installed; imports none of them."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise missing_package(package)

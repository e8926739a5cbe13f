"""Packages that only some commands need. A missing one is reported with one sentence that says what to do.

The sentence names the package itself, not an extra of hicache-ext: no index has hicache-ext, and an extra of a checkout
would install the checkout's current state.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys

from hicache_ext.errors import MissingPackageError

PACKAGES = {
    "mooncake": "mooncake-transfer-engine",
    "redis": "redis",
    "obstore": "obstore",
    "zstandard": "zstandard",
    "matplotlib": "matplotlib",
    "opentelemetry": "opentelemetry-sdk opentelemetry-exporter-otlp",
    "cryptography": "cryptography",
}
"""Import name -> arguments for pip. No other installation is ever advised: a package of that name on an index may be a
stranger's."""

FROM_SGLANG = frozenset({"sglang", "torch", "triton", "transformers", "tokenizers", "safetensors", "zmq", "gguf"})
"""Packages that come with SGLang, in the versions that it needs: nobody is told to install them."""


def how_to_install(package: str) -> str:
    """Return what to do if ``package`` is missing; "" for one in neither list."""
    if package in FROM_SGLANG:
        return "run it with the Python that SGLang is installed in"
    return f"pip install {PACKAGES[package]}" if package in PACKAGES else ""


def missing_package(package: str, problem: str = "which is not installed") -> MissingPackageError:
    """Return the error for a missing package; ``problem`` is a relative clause."""
    return MissingPackageError(package, how_to_install(package), problem)


def package_behind(error: ImportError) -> MissingPackageError | None:
    """Return the error for the package that caused ``error``; None if no other package did, which means a bug."""
    package = (error.name or "").partition(".")[0]
    if not package or package == __package__ or package in sys.stdlib_module_names:
        return None
    if isinstance(error, ModuleNotFoundError) and error.name == package:
        return missing_package(package)
    return missing_package(package, f"which cannot be imported ({error})")


def installed_version(package: str) -> str | None:
    """Return the version of a package by its name for pip, or None if missing; imports nothing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def need(*packages: str) -> None:
    """Raise MissingPackageError for the first of ``packages`` that is not installed; imports none of them."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise missing_package(package)

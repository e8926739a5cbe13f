"""Packages that only some commands need. A missing one is a sentence with what to do.

To be installed is the package itself: no index has hicache-ext, and an extra of a checkout would install what the
checkout is by now.
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
"""Package as it is imported -> what pip is to be given. Of no other package is an installation advised: whatever has
its name on an index may be a stranger's."""

OF_SGLANG = frozenset({"sglang", "torch", "triton", "transformers", "tokenizers", "safetensors", "zmq", "gguf"})
"""SGLang brings these, in the versions that it needs: nobody is told to install them."""


def how_to_install(package: str) -> str:
    """What to do where ``package`` is missing; empty for one that is in neither list."""
    if package in OF_SGLANG:
        return "run it with the Python that SGLang is installed in"
    return f"pip install {PACKAGES[package]}" if package in PACKAGES else ""


def missing_package(package: str, problem: str = "which is not installed") -> MissingPackageError:
    """The sentence for one package; ``problem`` is a relative clause."""
    return MissingPackageError(package, how_to_install(package), problem)


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

"""Observers of this process's calls, if ``tracing`` or ``record`` is configured: spans and a recording.

If not configured they are None, so that a call pays only for one name lookup and their modules are not imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hicache_ext.config.model import RecordConfig, TracingConfig

if TYPE_CHECKING:
    from hicache_ext.storage.tiering.recording import Recorder
    from hicache_ext.storage.tiering.tracing import Spans

spans: Spans | None = None
recorder: Recorder | None = None
"""Both are read without a lock."""


def begin_tracing(settings: TracingConfig | None) -> Spans | None:
    """Trace the calls of this process from now on, as configured. Raises ConfigError, MissingPackageError."""
    global spans
    if settings is None:
        return None
    from hicache_ext.storage.tiering.tracing import spans_of

    spans = spans_of(settings)
    return spans


def begin_recording(settings: RecordConfig | None, facts: Callable[[], Mapping[str, Any]]) -> Recorder | None:
    """Record the requests of this process from now on, as configured. Raises ConfigError."""
    global recorder
    if settings is None:
        return None
    from hicache_ext.storage.tiering.recording import Recorder

    recorder = Recorder(settings, facts)
    return recorder


def end(begun: Spans | Recorder | None) -> None:
    """End the spans or recording that ``begin_tracing`` or ``begin_recording`` returned."""
    global spans, recorder
    if begun is not None:
        spans = None if spans is begun else spans
        recorder = None if recorder is begun else recorder
        begun.close()

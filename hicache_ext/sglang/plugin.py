"""The entry point of SGLang's plugin group ``sglang.srt.plugins``.

SGLang calls ``register`` in each of its processes before anything runs, and only logs its exceptions. So the backend's
constructor checks that the hooks are in force (``hooks.not_in_force``).
"""

from __future__ import annotations

from hicache_ext.sglang import hooks
from hicache_ext.sglang.releases import refuse_old_release


def register() -> None:
    """Register all hooks. Called by SGLang, once a process. Raises UnsupportedError for an SGLang that is too old."""
    refuse_old_release()
    hooks.register()

"""Templates in paths and addresses, so that one file can be given to every node.

``{hostname}`` is this host's name and ``{env:NAME}`` an environment variable; ``{{`` and ``}}`` are plain braces. What
differs between the ranks or the starts of one server is not offered: capacity is a promise for a whole directory, and a
cache that moves at every start is never read.
"""

from __future__ import annotations

import os
import re
import socket

from hicache_ext.config.problems import quoted
from hicache_ext.errors import ConfigError

TEMPLATES_ALLOWED = "{hostname}, {env:NAME}, and {{ or }} for plain braces"

_PIECE = re.compile(r"\{\{|\}\}|\{[^{}]*\}|[{}]")
_SHELL_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_][A-Za-z0-9_]*)\}|([A-Za-z_][A-Za-z0-9_]*))", re.ASCII)
_ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


def is_environment_name(name: str) -> bool:
    """Whether ``name`` can be the name of an environment variable."""
    return _ENVIRONMENT_NAME.fullmatch(name) is not None


def expand_templates(text: str, key: str = "") -> str:
    """``text`` with every template replaced by its value on this node; ``ConfigError`` naming ``key`` if one cannot be.

    The value of an environment variable never appears in an error.
    """
    if (shell := _SHELL_VARIABLE.search(text)) is not None:
        # Taken as it is, it would make a directory of that name.
        problem = f"{quoted(shell[0])} is no template; did you mean {quoted(f'{{env:{shell[1] or shell[2]}}}')}?"
        raise ConfigError(key, problem, TEMPLATES_ALLOWED)
    return _PIECE.sub(lambda piece: _value(piece.group(), text, key), text)


def _value(piece: str, text: str, key: str) -> str:
    if piece in ("{{", "}}"):
        return piece[0]
    if piece in ("{", "}"):
        raise ConfigError(key, f"{quoted(text)} has a single {piece!r}", TEMPLATES_ALLOWED)
    name = piece[1:-1]
    if name == "hostname":
        return socket.gethostname()
    if name.startswith("env:") and is_environment_name(name[4:]):
        value = os.environ.get(name[4:], "")
        if not value:
            state = "empty" if name[4:] in os.environ else "not set"
            raise ConfigError(key, f"the environment variable {name[4:]} is {state}", "a variable with a value")
        return value
    if name in ("pid", "rank", "tp_rank"):
        reason = "a cache directory serves all ranks and starts of a server"
        raise ConfigError(key, f"the template {piece} is not offered: {reason}", TEMPLATES_ALLOWED)
    raise ConfigError(key, f"unknown template {quoted(piece)}", TEMPLATES_ALLOWED)

"""KV hints of requests, and the thread that acts on them: leases, pages to evict first, pages to fetch to a near tier.

Hints come in SGLang's envelope (``kv_hints`` of /generate and the engine, ``managers/kv_hints.py``), or, for front
ends without it, in ``sampling_params.custom_params``::

    {"hicache_ext": {"message_id": "turn-17", "hints": [{"action_type": "kv.retain", "payload": {"ttl_seconds": 600}}]}}

Names are those of SGLang's RFC #36224 and Dynamo's ``kv.fetch@1.0``: types ``kv.retain``, ``kv.release``,
``kv.prefetch``, ``kv.demote``, ``kv.supersede``, ``kv.no_store``, ``kv.priority``, with or without "kv.", of version
"1.0". docs/agents.md says what each does.

Requests are not trusted. Whatever they contain, nothing here raises; excess and oversized parts are ignored and
counted; of their text only message ids are kept (in memory), and none reaches a log or a label.
"""

from __future__ import annotations

import logging
import math
import threading
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from hicache_ext.page.hashes import namespace_seed, page_hashes
from hicache_ext.runtime.background import BackgroundLoop
from hicache_ext.runtime.log_limit import LimitedLog
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.storage.contract import tenants
from hicache_ext.storage.contract.abilities import TakesHints, ability, layers
from hicache_ext.storage.contract.store import PageStore

logger = logging.getLogger(__name__)

OPTIONS = "hicache_ext"
"""Key of ``custom_params``."""
_PROTOCOL, _VERSION = "0.1", "1.0"
TYPES = ("retain", "release", "prefetch", "demote", "supersede", "no_store", "priority")
_ONCE = ("retain", "prefetch")
"""Types of which only the last action of a request counts."""
_MOST_ACTIONS = 16
_MOST_TOKENS = 1 << 20
"""Limit of a prompt."""
_MOST_PAYLOAD_TOKENS = 1 << 17
"""Limit of a payload, which SGLang's scheduler takes 2 ms to copy."""
_LONGEST_ID = 128
_LARGEST_NUMBER = 1 << 31
IGNORED = ("unknown", "malformed", "dropped", "unsupported", "refused", "failed")

# -- parsing -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Action:
    """An action of any of ``TYPES`` except the last two, with a parsed payload."""

    type: str
    ttl_seconds: float = math.inf
    """For retain."""
    from_token: int = 0
    """For demote: the part of the prompt before this token is not demoted."""
    message_id: str = ""
    """For supersede: the superseded message."""
    to_prefill: bool = False
    """For prefetch: to the prefill nodes instead of this one."""
    tokens: array[int] | None = None
    """For prefetch: tokens of another prompt."""


@dataclass(slots=True)
class Said:
    """All hints of one request."""

    store: bool = True
    """False: a decode node writes nothing that the request generates."""
    no_store: bool = False
    """Whether nothing of the request is written anywhere, not even its prompt."""
    priority: int = 0
    message_id: str = ""
    tenant: str = ""
    """Tenant as named by the front end; any text."""
    actions: list[Action] = field(default_factory=list)
    understood: list[str] = field(default_factory=list)
    """Types of the accepted actions, for the counters."""
    ignored: Counter[str] = field(default_factory=Counter)


def said_by(envelope: Any, custom_params: Any) -> Said | None:
    """Parse SGLang's ``KvHintsEnvelope`` (or None) and ``custom_params``; return None if they hold no hints."""
    ours = custom_params.get(OPTIONS) if isinstance(custom_params, Mapping) else None
    if envelope is None and not isinstance(ours, Mapping):
        return None
    said = Said()
    if isinstance(ours, Mapping):
        said.store = ours.get("store") is not False
        said.priority = _priority(ours.get("priority")) or 0
        said.tenant = tenant if isinstance(tenant := ours.get("tenant"), str) and len(tenant) <= _LONGEST_ID else ""
        _take(said, ours.get("message_id"), ours.get("hints"))
    if envelope is not None:
        if getattr(envelope, "protocol_version", None) == _PROTOCOL:
            _take(said, getattr(envelope, "message_id", None), getattr(envelope, "actions", None))
        else:
            said.ignored["unknown"] += 1
    if said.no_store:
        # Neither hashes of such a prompt nor its id may be written, remembered or sent to others.
        kept = [one for one in said.actions if one.type == "release" or (one.type == "prefetch" and not one.to_prefill)]
        said.ignored["refused"] += len(said.actions) - len(kept) + bool(said.message_id)
        said.actions, said.message_id = kept, ""
    return said


def _take(said: Said, message_id: object, actions: object) -> None:
    if isinstance(message_id, str) and 0 < len(message_id) <= _LONGEST_ID:
        said.message_id = message_id
    elif message_id:
        said.ignored["malformed"] += 1
    if not isinstance(actions, list):
        said.ignored["malformed"] += actions is not None
        return
    said.ignored["malformed"] += max(0, len(actions) - _MOST_ACTIONS)
    for one in actions[:_MOST_ACTIONS]:
        if (reason := _understood(said, one)) is not None:
            said.ignored[reason] += 1


def _understood(said: Said, action: object) -> str | None:
    """Note one action, a mapping or SGLang's struct; return None, or the reason why it is ignored."""
    if not isinstance(action, Mapping):
        action = {name: getattr(action, name, None) for name in ("action_type", "action_version", "payload")}
    kind, payload = action.get("action_type"), action.get("payload")
    payload = {} if payload is None else payload
    if not isinstance(kind, str) or not isinstance(payload, Mapping):
        return "malformed"
    kind = kind.removeprefix("kv.")
    if kind not in TYPES or action.get("action_version", _VERSION) != _VERSION:
        return "unknown"
    if kind == "no_store":
        said.store, said.no_store = False, True
    elif kind == "priority":
        if (priority := _priority(payload.get("priority"))) is None:
            return "malformed"
        said.priority = priority
    elif (understood := _action(kind, payload)) is not None:
        others = [one for one in said.actions if one.type != kind or kind not in _ONCE]
        said.ignored["refused"] += len(said.actions) - len(others)
        said.actions = [*others, understood]
    else:
        return "malformed"
    said.understood.append(kind)
    return None


def _action(kind: str, payload: Mapping[Any, Any]) -> Action | None:
    if kind == "retain":
        seconds = payload.get("ttl_seconds", _LARGEST_NUMBER)
        return Action(kind, ttl_seconds=float(seconds)) if _is_number(seconds) and seconds > 0 else None
    if kind == "demote":
        token = payload.get("from_token", 0)
        return Action(kind, from_token=token) if isinstance(token, int) and _is_number(token) and token >= 0 else None
    if kind == "supersede":
        of = payload.get("message_id")
        return Action(kind, message_id=of) if isinstance(of, str) and 0 < len(of) <= _LONGEST_ID else None
    if kind == "prefetch":
        to, tokens = payload.get("to", "here"), payload.get("tokens")
        if not isinstance(to, str) or to not in ("here", "prefill"):
            return None
        if tokens is None:
            return Action(kind, to_prefill=to == "prefill")
        if not isinstance(tokens, list) or len(tokens) > _MOST_PAYLOAD_TOKENS:
            return None
        with suppress(TypeError, OverflowError):  # no numbers, or none of a token
            return Action(kind, to_prefill=to == "prefill", tokens=array("I", tokens))
        return None
    return Action(kind)


def _is_number(value: object) -> bool:
    """Return whether ``value`` is a finite number of bounded size, not NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST_NUMBER


def _priority(value: object) -> int | None:
    return value if isinstance(value, int) and _is_number(value) else None


# -- acting ------------------------------------------------------------------------------------------------------------

_MOST_WAITING = 256
_MOST_WAITING_TOKENS = 1 << 22
"""Tokens of all queued requests: 32 MiB."""
_MOST_MESSAGES = 4096
_MOST_REMEMBERED = 1 << 18
"""Pages of all remembered messages: some 20 MiB."""


class KvHints:
    """Acts on requests' hints, on its own thread. ``offer`` may be called from any thread and never waits.

    ``metrics`` counts ``action`` by type; ``ignored`` with the reason; ``page`` retained, released, demoted, and the
    outcome of those to be fetched.
    """

    def __init__(
        self,
        longest_lease: float,
        tiers: Callable[[], Sequence[PageStore]],
        page_size: Callable[[], int],
        bring_inward: Callable[[Sequence[bytes]], Mapping[str, int]],
        tell_prefill: Callable[[Sequence[str]], None] | None,
    ) -> None:
        """``longest_lease`` in seconds, 0: no hint is followed; ``page_size`` in tokens, 0 while it is unknown.
        ``tell_prefill`` sends a hint to prefill nodes; None if there are none."""
        self._longest_lease = longest_lease
        self._tiers = tiers
        self._page_size = page_size
        self._bring_inward = bring_inward
        self._tell_prefill = tell_prefill
        self.metrics = TierMetrics("kv_hints", prefix="kv_hints_")
        pages = ("retained", "released", "demoted", "present", "fetched", "absent", "dropped")
        self.metrics.declare({"action": TYPES, "ignored": IGNORED, "page": pages})
        self._waiting: deque[tuple[int, Said, Sequence[int], str | None, str | None]] = deque()
        """Queued requests: size, hints, prompt, extra key and cache salt."""
        self._waiting_tokens = 0
        self._lock = threading.Lock()
        self._messages: OrderedDict[tuple[bytes, str], list[bytes]] = OrderedDict()
        """(namespace, message id) -> pages of the message, most recent last."""
        self._remembered = 0
        self._log = LimitedLog(logger, 60.0)
        self._loop = BackgroundLoop("hicache-ext-kv-hints", self._act_on_waiting)

    def offer(
        self, said: Said, tokens: Sequence[int], extra_key: str | None, cache_salt: str | None, *, ignore: str = ""
    ) -> None:
        """Count a request's hints and queue them to be followed, unless there is a reason to ``ignore`` them."""
        self.metrics.add_many("action", Counter(said.understood))
        self.metrics.add_many("ignored", said.ignored)
        if not said.actions and not said.message_id:
            return
        if self._longest_lease <= 0:
            ignore = "refused"
        tokens = tokens[: 0 if ignore else _MOST_TOKENS]
        size = len(tokens) + len(extra_key or "") + len(cache_salt or "")
        size += sum(len(action.tokens or ()) for action in said.actions)
        with self._lock:
            if len(self._waiting) >= _MOST_WAITING or self._waiting_tokens + size > _MOST_WAITING_TOKENS:
                ignore = ignore or "dropped"
            if not ignore:
                self._waiting_tokens += size
                self._waiting.append((size, said, tokens, extra_key, cache_salt))
        if ignore:
            self.metrics.add("ignored", ignore, len(said.actions))
        else:
            self._loop.wake()

    def close(self, timeout: float) -> None:
        """Drop what is queued and end the thread, unless a store holds it for longer than ``timeout``."""
        self._loop.stop(timeout)

    def _act_on_waiting(self) -> float:
        while self._waiting and not self._loop.stopping:
            with self._lock:
                size, said, tokens, extra_key, cache_salt = self._waiting.popleft()
                self._waiting_tokens -= size
            try:
                owners = tenants.in_force()
                tenant = "" if owners is None else owners.tenant_of(said.tenant, extra_key, cache_salt)
                self.follow(said, tokens, namespace_seed(extra_key, cache_salt), tenant)
            except Exception as error:  # noqa: BLE001 - whatever a store raises, the next hint may be followed
                self.metrics.add("ignored", "failed")
                # Log only its type, because its text may contain a part of the request.
                self._log.log(logging.WARNING, "act", "hicache_ext: a hint was not followed: %s", type(error).__name__)
        return math.inf

    def follow(self, said: Said, tokens: Sequence[int], seed: bytes, tenant: str = "") -> None:
        """Follow the hints that came with the prompt ``tokens``; ``seed``: see page/hashes.py; ``tenant``: a configured
        one or "". Waits for the tiers, and raises what they raise, and HicacheExtError for invalid tokens."""
        size = self._page_size()
        if not size:
            self.metrics.add("ignored", "unsupported", len(said.actions))
            return
        hashes = page_hashes(tokens, size, seed)
        for action in said.actions:
            if action.type == "retain":
                self._retain(hashes, action.ttl_seconds, seed, tenant)
            elif action.type == "release":
                if any(self._each(lambda tier, names: tier.end_leases(names), hashes)):
                    self.metrics.add("page", "released", len(hashes))
            elif action.type == "demote":
                self._demote(hashes[-(-action.from_token // size) :])
            elif action.type == "supersede":
                # Ids are scoped by namespace, so that nobody can demote the pages of others by guessing an id.
                before, now = self._messages.get((seed, action.message_id), ()), set(hashes)
                self._demote([page_hash for page_hash in before if page_hash not in now])
            else:
                self._prefetch(action, hashes, size, seed)
        if said.message_id:
            self._remember((seed, said.message_id), hashes)

    def _each(self, act: Callable[[TakesHints, Sequence[bytes]], int], hashes: Sequence[bytes]) -> list[int]:
        """Return the answers of ``act`` for all tiers that take hints, given their own names of these pages."""
        answers = []
        for store in self._tiers() if hashes else ():
            if (tier := ability(store, TakesHints)) is None:
                continue
            names = hashes
            for layer in layers(store):
                names = layer.names_of(names) if hasattr(layer, "names_of") else names
            answers.append(act(tier, names))
        return answers

    def _retain(self, hashes: Sequence[bytes], seconds: float, seed: bytes, tenant: str) -> None:
        limit = owners.limits.get(tenant) if (owners := tenants.in_force()) is not None else None
        seconds = min(seconds, self._longest_lease, math.inf if limit is None else limit.lease)
        held = [0]
        if seconds > 0:
            held = self._each(lambda tier, names: tier.lease_pages(names, seconds, seed.hex()[:16]), hashes)
        self.metrics.add("page", "retained", max(held, default=0))
        if hashes and not any(held):
            self.metrics.add("ignored", "refused" if held else "unsupported")
            if held and tenant:
                self.metrics.add("tenant_refused", tenant)

    def _demote(self, hashes: Sequence[bytes]) -> None:
        """Mark pages to be evicted first; end the leases on prompts that end with one of them, too."""
        self._each(lambda tier, names: tier.end_leases(names), hashes)
        self.metrics.add("page", "demoted", sum(self._each(lambda tier, names: tier.demote_pages(names), hashes)))

    def _prefetch(self, action: Action, hashes: Sequence[bytes], size: int, seed: bytes) -> None:
        if action.tokens is not None:
            hashes = page_hashes(action.tokens, size, seed)
        if not action.to_prefill:
            self.metrics.add_many("page", self._bring_inward(hashes))
        elif self._tell_prefill is None:
            self.metrics.add("ignored", "unsupported")
        elif hashes:
            self._tell_prefill([page_hash.hex() for page_hash in hashes])

    def _remember(self, message: tuple[bytes, str], hashes: list[bytes]) -> None:
        self._remembered += len(hashes) - len(self._messages.pop(message, ()))
        self._messages[message] = hashes
        while len(self._messages) > _MOST_MESSAGES or self._remembered > _MOST_REMEMBERED:
            self._remembered -= len(self._messages.popitem(last=False)[1])

"""What an SGLang release can cost: the features that need names of it. Imports nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Feature:
    """What a user loses together when one of the names or hooks that it needs is missing.

    ``by_halves``: hooks that only watch; those that exist stay in force although the feature counts as off.
    """

    name: str
    loss: str
    by_halves: bool = False


STORAGE = Feature("storage", "the server cannot start with this backend")
WEIGHTS_UPDATES = Feature("weights updates", "do not update weights online", by_halves=True)
MODEL_WEIGHTS = Feature("weights at the start", "weights are identified by their files as they are after the load")
ADAPTERS = Feature("LoRA adapters", "adapters cannot be told apart", by_halves=True)
COPIES = Feature("copy engines", "copies between host and device stay with SGLang's own path")
DECODE_WRITER = Feature("decode writer", "a decode node writes as SGLang does")
DRAFTS = Feature("drafts of every rank", "rank 0 alone writes the draft of an MLA model, whose heads differ per rank")
EVENTS = Feature("KV events", "routers are told nothing")
PREFILL_COST = Feature("cost of prefill", "pull or recompute does not know what a prefill takes")
REQUEST_TRACES = Feature(
    "traces of requests", "spans of storage do not say which request they belong to, and nothing is recorded"
)

LINKER = Feature("external linker", "pages move through HiCache's host memory alone")

HOOKED = (WEIGHTS_UPDATES, MODEL_WEIGHTS, ADAPTERS, COPIES, DECODE_WRITER, DRAFTS, PREFILL_COST, REQUEST_TRACES)
"""Those that change functions of SGLang, through its plug-ins."""
FEATURES = (STORAGE, *HOOKED, EVENTS, LINKER)

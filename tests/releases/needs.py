"""A mark for tests of a feature that not every tested release of SGLang can have."""

from __future__ import annotations

import pytest

from hicache_ext.sglang.releases import comes_with, installed_release
from hicache_ext.sglang.used_names import Feature, check_installed, features_off


def needs(feature: Feature) -> pytest.MarkDecorator:
    """Leave the test out where the release lacks something; the reason of the skip says what."""
    words = features_off(check_installed()).get(feature)
    return pytest.mark.skipif(words is not None, reason=f"off in SGLang {installed_release()}, which lacks {words}")


def needs_release(release: str, why: str) -> pytest.MarkDecorator:
    """Leave the test out with an older release; ``why``: what the test is made of, and older ones have not."""
    return pytest.mark.skipif(not comes_with(installed_release(), release), reason=f"SGLang {release} on: {why}")

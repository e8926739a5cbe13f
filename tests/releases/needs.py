"""A mark for tests of a feature that not every tested release of SGLang can have."""

from __future__ import annotations

import pytest

from hicache_ext.sglang.features import Feature
from hicache_ext.sglang.releases import installed_release
from hicache_ext.sglang.self_check import check_installed, features_off


def needs(feature: Feature) -> pytest.MarkDecorator:
    """Leave the test out where the release lacks something; the reason of the skip says what."""
    words = features_off(check_installed()).get(feature)
    return pytest.mark.skipif(words is not None, reason=f"off in SGLang {installed_release()}, which lacks {words}")

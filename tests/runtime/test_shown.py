"""What may be shown of addresses and command lines."""

from __future__ import annotations

import pytest

from hicache_ext.runtime.shown import shown_address, shown_words


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("http://user:geheim@host:1/metrics", "http://***@host:1/metrics"),
        ("a=http://:geheim@host", "a=http://***@host"),
        ("http://host/metrics?token=geheim&x=1", "http://host/metrics?***"),
        ("http://host:30000", "http://host:30000"),
        ("/a/path@home", "/a/path@home"),
    ],
)
def test_an_address_is_shown_without_login_and_query(given: str, shown: str) -> None:
    assert shown_address(given) == shown


def test_a_command_line_is_shown_without_what_options_named_like_secrets_say() -> None:
    words = ["--api-key", "G1", "--admin-api-key=G2", "--endpoint", "a=http://u:G3@h:1", "--hf-token", "G4"]
    words += ["--system-tokens", "512", "--tokenizer-path=x", "--max-total-tokens", "9", "--tp", "2"]
    shown = list(shown_words(words))
    assert not any("G" in word for word in shown)
    assert shown[7:] == words[7:] and len(shown) == len(words)
    assert list(shown_words(["--some-key", "--tp", "2"])) == ["--some-key", "--tp", "2"]

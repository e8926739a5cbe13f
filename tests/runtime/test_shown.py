"""What may be shown of addresses, command lines, and text of others."""

from __future__ import annotations

import pytest

from hicache_ext.runtime.shown import LONGEST_SHOWN, shown_address, shown_text, shown_words


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


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("/models/Modèle 模型", "/models/Modèle 模型"),
        ("a\x1b[2Jb", "a\\x1b[2Jb"),
        ("a\nERROR b\r\t", "a\\nERROR b\\r\\t"),
        ("a\u202eb\u200bc\ufeff", "a\\u202eb\\u200bc\\ufeff"),
        ("\x9b31m\x00\x7f", "\\x9b31m\\x00\\x7f"),
        ("mod\udce9l", "mod\\udce9l"),
        (None, "None"),
        (7, "7"),
        (["a\x07"], "['a\\x07']"),
    ],
)
def test_text_of_others_is_one_printable_line(given: object, shown: str) -> None:
    assert shown_text(given) == shown
    assert shown_text(given).isprintable()


def test_text_of_others_is_cut() -> None:
    assert shown_text("x" * LONGEST_SHOWN) == "x" * LONGEST_SHOWN
    assert shown_text("x" * (LONGEST_SHOWN + 1)) == "x" * (LONGEST_SHOWN - 3) + "..."
    assert len(shown_text("\x1b" * 10**6)) == LONGEST_SHOWN
    assert shown_text("abcdef", 5) == "ab..."

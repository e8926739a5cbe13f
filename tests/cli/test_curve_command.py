"""``hicache-ext curve``, and the line of ``stats`` that says the same."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from hicache_ext.cli.main import main

KNOWS = """\
hicache_ext_tier_up{tier="local",tp_rank="0"} 1
hicache_ext_capacity_bytes{tier="local",tp_rank="0"} 1073741824
hicache_ext_hit_share_at_half{tier="local",tp_rank="0"} 0.1
hicache_ext_hit_share_at_capacity{tier="local",tp_rank="0"} 0.2
hicache_ext_hit_share_at_twice{tier="local",tp_rank="0"} 0.3
hicache_ext_hit_share_at_four_times{tier="local",tp_rank="0"} 0.5
hicache_ext_hit_share_at_half{tier="pool",tp_rank="0"} NaN
"""
DOES_NOT = (
    KNOWS.replace(" 0.", " NaN #").split("hicache_ext_hit")[0] + 'hicache_ext_hit_share_at_half{tier="local"} NaN\n'
)


class Answer(BaseHTTPRequestHandler):
    text = KNOWS

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.text.encode())

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_picture_has_a_bar_for_each_capacity(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["curve", url]) == 0
    title, *bars = capsys.readouterr().out.splitlines()
    assert title.startswith("local: ")
    assert [bar.count("#") for bar in bars] == [5, 10, 15, 25]
    assert ["now" in bar for bar in bars] == [False, True, False, False]
    assert bars[0].split()[0] == "512MiB" and bars[3].split()[0] == "4GiB"


def test_the_curve_as_json(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["curve", url, "--json"]) == 0
    (tier,) = json.loads(capsys.readouterr().out)["tiers"]
    assert tier == {
        "tier": "local",
        "capacity_bytes": 1 << 30,
        "hit_share_at": {"half": 0.1, "capacity": 0.2, "twice": 0.3, "four_times": 0.5},
    }


def test_where_no_tier_knows_the_command_says_so(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Answer, "text", DOES_NOT)
    assert main(["curve", url]) == 1
    assert "No tier knows yet" in capsys.readouterr().out

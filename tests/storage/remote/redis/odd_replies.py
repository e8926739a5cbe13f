"""What servers, proxies and bad luck may answer to a GET or a SET of three pages: a corpus for tests and the campaign.

``<0>`` is the right reply to the GET of page 0 and ``<value 0>`` what is between its line ends, ``<length>`` the length
of a value, ``<answer>`` the reply to the question behind the last request.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tests.rigs.redis_talks import ANSWER

TO_GET = (
    # As they should be.
    b"<0><1><2>",
    b"$-1\r\n<1>$-1\r\n",
    b"$-1\r\n$-1\r\n$-1\r\n",
    # One too many, one too few, in another order.
    b"$-1\r\n<0><1><2>",
    b"+OK\r\n<0><1><2>",
    b":0\r\n<0><1><2>",
    b"<0>$-1\r\n<1><2>",
    b"<0><1><2>$-1\r\n",
    b"<0><1><2>\r\n",
    b"<0><1><2>x",
    b"<0><1>",
    b"<0><0><1><2>",
    b"<1><0><2>",
    b"<2><1><0>",
    # Lengths that are none, or none of ours.
    b"$0<length>\r\n<value 0>\r\n<1><2>",
    b"$+<length>\r\n<value 0>\r\n<1><2>",
    b"$ <length>\r\n<value 0>\r\n<1><2>",
    b"$<length> \r\n<value 0>\r\n<1><2>",
    b"$<length>.0\r\n<value 0>\r\n<1><2>",
    b"$-<length>\r\n<value 0>\r\n<1><2>",
    b"$<length>0\r\n<value 0>\r\n<1><2>",
    b"$\r\n<1><2>",
    b"$0\r\n\r\n<1><2>",
    b"$-0\r\n\r\n<1><2>",
    b"$-2\r\n<1><2>",
    b"$-1<1><2>",
    b"$-11\r\n<1><2>",
    b"$536870912\r\n<1><2>",
    b"$99999999999999999999\r\n<1><2>",
    b"$18446744073709551615\r\n<1><2>",
    b"$4\r\nshrt\r\n<1><2>",
    # Line ends that are none.
    b"$<length>\n<value 0>\n<1><2>",
    b"$<length>\r<value 0>\r<1><2>",
    b"$<length>\n\r<value 0>\n\r<1><2>",
    b"$<length>\r\n<value 0><1><2>",
    b"$<length>\r\n<value 0>\n\r<1><2>",
    b"$<length>\r\n<value 0>\r\r<1><2>",
    b"$<length>\r\n\r\n<value 0><1><2>",
    b"\r\n<0><1><2>",
    # Of other types, RESP3 included.
    b"+<value 0>\r\n<1><2>",
    b"_\r\n<1><2>",
    b"*-1\r\n<1><2>",
    b"*1\r\n<0><1><2>",
    b"*3\r\n<0><1><2>",
    b">2\r\n+message\r\n+hello\r\n<0><1><2>",
    b"=<length>\r\n<value 0>\r\n<1><2>",
    b"$?\r\n;4\r\npart\r\n;0\r\n<1><2>",
    b"|1\r\n+ttl\r\n:3600\r\n<0><1><2>",
    b"!21\r\nSYNTAX invalid syntax\r\n<1><2>",
    b"#t\r\n<1><2>",
    # Errors.
    b"-\r\n<1><2>",
    b"-ERR no\r\n<1><2>",
    b"-LOADING Redis is loading the dataset in memory\r\n<1><2>",
    b"-WRONGTYPE Operation against a key holding the wrong kind of value\r\n<1><2>",
    b"-MOVED 1 127.0.0.1:1\r\n-ASK 1 :0\r\n<2>",
    b"<0>-ERR max number of clients reached\r\n",
    # No protocol at all.
    b"",
    b"\0",
    b"\r\n\r\n\r\n",
    b"\xff\xfe" * 30,
    b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n",
    b"$" + 5000 * b"1",
    5000 * b"a" + b"\r\n<1><2>",
)

TO_SET = (
    # As they should be: all are stored, some or all are there, one comes in between.
    b":0\r\n:0\r\n:0\r\n<answer>+OK\r\n+OK\r\n+OK\r\n<answer>",
    b":0\r\n:<length>\r\n:0\r\n<answer>+OK\r\n+OK\r\n<answer>",
    b":<length>\r\n:<length>\r\n:<length>\r\n<answer>",
    b":0\r\n:0\r\n:0\r\n<answer>+OK\r\n$-1\r\n+OK\r\n<answer>",
    # One too many, one too few.
    b":0\r\n:0\r\n:0\r\n:0\r\n<answer>+OK\r\n+OK\r\n+OK\r\n<answer>",
    b":<length>\r\n:0\r\n:0\r\n:0\r\n<answer>+OK\r\n+OK\r\n<answer>",
    b":0\r\n:0\r\n<answer>+OK\r\n+OK\r\n+OK\r\n<answer>",
    b":0\r\n:0\r\n:0\r\n<answer>+OK\r\n+OK\r\n+OK\r\n+OK\r\n<answer>",
    b":0\r\n:0\r\n:0\r\n<answer>$-1\r\n+OK\r\n+OK\r\n+OK\r\n<answer>",
    b":0\r\n:0\r\n:0\r\n<answer>+OK\r\n+OK\r\n<answer>",
    b":0\r\n:0\r\n:0\r\n<answer>+OK\r\n+OK\r\n+OK\r\n<answer>+OK\r\n",
    b":<length>\r\n:<length>\r\n:<length>\r\n<answer><answer>",
    b":<length>\r\n:<length>\r\n:<length>\r\n<answer>:0\r\n",
    b"<answer>:0\r\n:0\r\n:0\r\n",
    # Answers to other questions.
    b":0\r\n:0\r\n:0\r\n$16\r\n0123456789abcdeF\r\n+OK\r\n+OK\r\n+OK\r\n<answer>",
    b":0\r\n:0\r\n:0\r\n<answer>+OK\r\n+OK\r\n+OK\r\n$16\r\nfedcba9876543210\r\n",
    b":0\r\n:0\r\n:0\r\n+PONG\r\n+OK\r\n+OK\r\n+OK\r\n+PONG\r\n",
    b":0\r\n:0\r\n:0\r\n-NOPERM no PING\r\n+OK\r\n+OK\r\n+OK\r\n-NOPERM no PING\r\n",
    # Lengths that are none, or none of ours.
    b":1\r\n:0\r\n:0\r\n<answer>+OK\r\n+OK\r\n<answer>",
    b":-0\r\n:0\r\n:0\r\n<answer>+OK\r\n+OK\r\n+OK\r\n<answer>",
    b":0<length>\r\n:00\r\n:+0\r\n<answer>+OK\r\n+OK\r\n<answer>",
    b":-1\r\n:0\r\n:0\r\n<answer>+OK\r\n+OK\r\n<answer>",
    b":<length>0\r\n:0\r\n:0\r\n<answer>+OK\r\n+OK\r\n<answer>",
    b":9223372036854775808\r\n:0\r\n:0\r\n<answer>+OK\r\n+OK\r\n<answer>",
    b":99999999999999999999\r\n:0\r\n:0\r\n<answer>+OK\r\n+OK\r\n<answer>",
    b":\r\n:0\r\n:0\r\n<answer>+OK\r\n+OK\r\n+OK\r\n<answer>",
    b":0\n:0\n:0\n<answer>+OK\r\n+OK\r\n+OK\r\n<answer>",
    b"$1\r\n0\r\n:0\r\n:0\r\n<answer>+OK\r\n+OK\r\n+OK\r\n<answer>",
    b"+OK\r\n:0\r\n:0\r\n<answer>+OK\r\n+OK\r\n<answer>",
    # What is no OK.
    b":0\r\n:0\r\n:0\r\n<answer>$2\r\nOK\r\n+OK\r\n+OK\r\n<answer>",
    b":0\r\n:0\r\n:0\r\n<answer>+OK \r\n+OK\r\n+OK\r\n<answer>",
    b":0\r\n:0\r\n:0\r\n<answer>+ok\r\n+OK\r\n+OK\r\n<answer>",
    b":0\r\n:0\r\n:0\r\n<answer>+QUEUED\r\n+QUEUED\r\n+QUEUED\r\n<answer>",
    b":0\r\n:0\r\n:0\r\n<answer>:1\r\n:1\r\n:1\r\n<answer>",
    b":0\r\n:0\r\n:0\r\n<answer>+OK\r\n-OOM command not allowed\r\n+OK\r\n<answer>",
    b":0\r\n:0\r\n:0\r\n<answer>-READONLY\r\n-READONLY\r\n-READONLY\r\n<answer>",
    b":0\r\n:0\r\n:0\r\n<answer>+OK\r\n-MOVED 1 127.0.0.1:1\r\n+OK\r\n<answer>",
    # Errors, and no protocol at all.
    b"-WRONGTYPE no string\r\n:0\r\n:0\r\n<answer>+OK\r\n+OK\r\n<answer>",
    b"-MASTERDOWN\r\n",
    b"",
    b"\0" * 9,
    b":" + 5000 * b"0",
    5000 * b"a" + b"\r\n",
)

_MARK = re.compile(rb"<(?:value )?[0-9]>|<length>|<answer>")


def replies_of(template: bytes, values: Sequence[bytes]) -> bytes:
    """The bytes of one of them, where the pages have these ``values``."""

    def filled(mark: re.Match[bytes]) -> bytes:
        word = mark[0][1:-1]
        if word == b"length":
            return b"%d" % len(values[0])
        if word == b"answer":
            return ANSWER
        value = values[int(word[-1:])]
        return value if word.startswith(b"value") else b"$%d\r\n%b\r\n" % (len(value), value)

    return _MARK.sub(filled, template)

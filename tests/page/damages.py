"""Ways in which the bytes of an encoded page go wrong."""

from __future__ import annotations

import random
from collections.abc import Callable


def damaged_in_one_way(encoded: bytes, random_: random.Random, in_head: Callable[[], int]) -> bytes:
    """``in_head`` draws a place in its head."""
    damaged = bytearray(encoded)
    kind = random_.randrange(6)
    if kind == 0:
        damaged[random_.randrange(len(damaged))] ^= 1 << random_.randrange(8)
    elif kind == 1:
        del damaged[random_.randrange(len(damaged)) :]
    elif kind == 2:
        at = in_head()
        damaged[at] = random_.randrange(256)
    elif kind == 3:
        begin = random_.randrange(len(damaged))
        damaged[begin : begin + 64] = random_.randbytes(len(damaged[begin : begin + 64]))
    elif kind == 4:
        damaged[:] = random_.randbytes(len(damaged))
    else:
        damaged += random_.randbytes(random_.randrange(1, 100))
    return bytes(damaged)

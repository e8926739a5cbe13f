"""Which errors are evidence against a device, and not against a request."""

from __future__ import annotations

import errno
from collections.abc import Callable

Trouble = Callable[[Exception], None]
"""Called with every OSError that a store met and handled. Any thread; never raises."""


def no_trouble(_: Exception) -> None:
    """For a store that nobody watches."""


_DEVICE_ERRORS = frozenset(
    (
        errno.EIO,
        errno.EROFS,
        errno.ENODEV,
        errno.ENXIO,
        errno.ENOENT,
        errno.ESTALE,
        errno.ENOTCONN,
        errno.ETIMEDOUT,
        errno.EREMOTEIO,
        errno.ESHUTDOWN,
        errno.EUCLEAN,
    )
)
"""Errors of a device, a vanished mount or a broken file system. Not ENOSPC: stores handle a full disk themselves."""


def is_device_error(error: BaseException | None) -> bool:
    """Whether an error is evidence against the device."""
    return isinstance(error, OSError) and error.errno in _DEVICE_ERRORS

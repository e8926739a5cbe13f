"""The section ``record``: what requests asked storage for, written to files. See docs/plan.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field, WithJsonSchema

from hicache_ext.config import values
from hicache_ext.config.schema import Allowed, ConfigModel, checked

_PATH_ALLOWED = "an absolute path"
_SIZE_ALLOWED = "a size of 1MiB or more, such as 256MiB"


class RecordConfig(ConfigModel):
    """``record``: on where it is there."""

    required_because: ClassVar[Mapping[str, str]] = {"path": "required: the directory that recordings go to"}

    path: Annotated[
        str,
        Field(description="a directory for recordings alone; several processes may share it"),
        Allowed(_PATH_ALLOWED),
        checked(values.absolute_path(_PATH_ALLOWED)),
    ]
    size: Annotated[
        int,
        Field(description="of all files in it together; the oldest are removed"),
        Allowed(_SIZE_ALLOWED),
        checked(values.size(1 << 20, values.NO_LIMIT, _SIZE_ALLOWED)),
        WithJsonSchema({"anyOf": [{"type": "integer"}, {"type": "string"}]}),
    ] = 256 << 20

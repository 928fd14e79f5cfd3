"""Values with one JSON form: pydantic reads, checks and writes it by the types of their fields."""

from __future__ import annotations

import functools
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from tf_adapters.errors import PlanInputError, first_problem

_V = TypeVar("_V", bound="Value")


class Value:
    """A base of dataclasses whose fields have types that pydantic can check."""

    __pydantic_config__ = ConfigDict(populate_by_name=True)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values. A field that has its default is left out."""
        kind: Any = type(self)
        data: dict[str, Any] = _codec(kind).dump_python(self, mode="json", by_alias=True, exclude_defaults=True)
        return data

    @classmethod
    def from_json(cls: type[_V], data: Any) -> _V:
        """Read what ``to_json`` returns. Raises PlanInputError: one line that names the field and the value."""
        kind: Any = cls
        try:
            value: _V = _codec(kind).validate_python(data)
            return value
        except ValidationError as error:
            raise PlanInputError(first_problem(error)) from error


@functools.cache
def _codec(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)

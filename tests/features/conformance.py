"""Made by packaging/conformance for mypy alone: each door does what its Protocol says."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forestage.features import doors
    from forestage.features.data import epilog as data_epilog
    from forestage.features.data import reasons as data_reasons
    from forestage.features.registry import epilog as registry_epilog
    from forestage.features.registry import reasons as registry_reasons

    _data_epilog: doors.EpilogDoor = data_epilog
    _data_reasons: doors.ReasonsDoor = data_reasons
    _registry_epilog: doors.EpilogDoor = registry_epilog
    _registry_reasons: doors.ReasonsDoor = registry_reasons

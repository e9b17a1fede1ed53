"""Made by packaging/conformance for mypy alone: each door does what its Protocol says."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forestage.features import doors
    from forestage.features.data import epilog as data_epilog
    from forestage.features.data import reasons as data_reasons
    from forestage.features.data import status as data_status
    from forestage.features.metrics import commands as metrics_commands
    from forestage.features.peers import commands as peers_commands
    from forestage.features.peers import counts as peers_counts
    from forestage.features.peers import metrics as peers_metrics
    from forestage.features.peers import status as peers_status
    from forestage.features.prefetch import commands as prefetch_commands
    from forestage.features.prefetch import metrics as prefetch_metrics
    from forestage.features.prefetch import status as prefetch_status
    from forestage.features.prepare import commands as prepare_commands
    from forestage.features.prepare import hints as prepare_hints
    from forestage.features.registry import commands as registry_commands
    from forestage.features.registry import epilog as registry_epilog
    from forestage.features.registry import metrics as registry_metrics
    from forestage.features.registry import reasons as registry_reasons
    from forestage.features.registry import status as registry_status
    from forestage.features.report import commands as report_commands

    _data_epilog: doors.EpilogDoor = data_epilog
    _data_reasons: doors.ReasonsDoor = data_reasons
    _data_status: doors.StatusDoor = data_status
    _metrics_commands: doors.CommandsDoor = metrics_commands
    _peers_commands: doors.CommandsDoor = peers_commands
    _peers_counts: doors.CountsDoor = peers_counts
    _peers_metrics: doors.MetricsDoor = peers_metrics
    _peers_status: doors.StatusDoor = peers_status
    _prefetch_commands: doors.CommandsDoor = prefetch_commands
    _prefetch_metrics: doors.MetricsDoor = prefetch_metrics
    _prefetch_status: doors.StatusDoor = prefetch_status
    _prepare_commands: doors.CommandsDoor = prepare_commands
    _prepare_hints: doors.HintsDoor = prepare_hints
    _registry_commands: doors.CommandsDoor = registry_commands
    _registry_epilog: doors.EpilogDoor = registry_epilog
    _registry_metrics: doors.MetricsDoor = registry_metrics
    _registry_reasons: doors.ReasonsDoor = registry_reasons
    _registry_status: doors.StatusDoor = registry_status
    _report_commands: doors.CommandsDoor = report_commands

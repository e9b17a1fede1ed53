"""Made by packaging/conformance for mypy alone: each door is what doors.py says."""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from forestage.features import doors
    from forestage.features.data import epilog as data_epilog
    from forestage.features.data import explain as data_explain
    from forestage.features.data import prolog as data_prolog
    from forestage.features.data import reasons as data_reasons
    from forestage.features.data import service as data_service
    from forestage.features.data import status as data_status
    from forestage.features.data import step as data_step
    from forestage.features.data import submitted as data_submitted
    from forestage.features.data import sweep as data_sweep
    from forestage.features.metrics import commands as metrics_commands
    from forestage.features.metrics import sweep as metrics_sweep
    from forestage.features.metrics import tend as metrics_tend
    from forestage.features.peers import activation as peers_activation
    from forestage.features.peers import checks as peers_checks
    from forestage.features.peers import commands as peers_commands
    from forestage.features.peers import engine as peers_engine
    from forestage.features.peers import metrics as peers_metrics
    from forestage.features.peers import queried_node as peers_queried_node
    from forestage.features.peers import status as peers_status
    from forestage.features.peers import sweep as peers_sweep
    from forestage.features.peers import tend as peers_tend
    from forestage.features.prefetch import checks as prefetch_checks
    from forestage.features.prefetch import commands as prefetch_commands
    from forestage.features.prefetch import explain as prefetch_explain
    from forestage.features.prefetch import metrics as prefetch_metrics
    from forestage.features.prefetch import service as prefetch_service
    from forestage.features.prefetch import status as prefetch_status
    from forestage.features.prefetch import tend as prefetch_tend
    from forestage.features.prepare import commands as prepare_commands
    from forestage.features.prepare import hints as prepare_hints
    from forestage.features.prepare import tend as prepare_tend
    from forestage.features.registry import checks as registry_checks
    from forestage.features.registry import commands as registry_commands
    from forestage.features.registry import epilog as registry_epilog
    from forestage.features.registry import explain as registry_explain
    from forestage.features.registry import metrics as registry_metrics
    from forestage.features.registry import prolog as registry_prolog
    from forestage.features.registry import reasons as registry_reasons
    from forestage.features.registry import status as registry_status
    from forestage.features.registry import step as registry_step
    from forestage.features.registry import sweep as registry_sweep
    from forestage.features.report import commands as report_commands

    T = TypeVar("T")

    def _must_be(door: doors.Door[T]) -> Callable[[T], None]: ...

    _must_be(doors.EPILOG_AFTER_LEASE_DROP)(data_epilog.after_lease_drop)
    _must_be(doors.EXPLAIN_EXPLAIN_OUTCOME)(data_explain.explain_outcome)
    _must_be(doors.PROLOG_AFTER_LEASE)(data_prolog.after_lease)
    _must_be(doors.REASONS)(data_reasons)
    _must_be(doors.SERVICE_ROUTES)(data_service.routes)
    _must_be(doors.STATUS_READ_STATUS)(data_status.read_status)
    _must_be(doors.STEP_AFTER_LEASE)(data_step.after_lease)
    _must_be(doors.SUBMITTED_MUST_BE_POSSIBLE)(data_submitted.must_be_possible)
    _must_be(doors.SWEEP_FIELDS)(data_sweep.fields)
    _must_be(doors.SWEEP_IN_EACH_CACHE)(data_sweep.in_each_cache)
    _must_be(doors.SWEEP_LINES)(data_sweep.lines)
    _must_be(doors.COMMANDS)(metrics_commands)
    _must_be(doors.SWEEP_AFTERWARDS)(metrics_sweep.afterwards)
    _must_be(doors.TEND_EACH_MINUTE)(metrics_tend.each_minute)
    _must_be(doors.ACTIVATION_IS_ON)(peers_activation.is_on)
    _must_be(doors.CHECKS_FINDINGS)(peers_checks.findings)
    _must_be(doors.CHECKS_WANTS_UNIT)(peers_checks.wants_unit)
    _must_be(doors.COMMANDS)(peers_commands)
    _must_be(doors.ENGINE_HELPERS)(peers_engine.helpers)
    _must_be(doors.ENGINE_UPLOADED)(peers_engine.uploaded)
    _must_be(doors.METRICS_COUNT)(peers_metrics.count)
    _must_be(doors.METRICS_READ_METRICS)(peers_metrics.read_metrics)
    _must_be(doors.QUERIED_NODE_QUERY_NODE)(peers_queried_node.query_node)
    _must_be(doors.STATUS_READ_SENT)(peers_status.read_sent)
    _must_be(doors.STATUS_READ_STATUS)(peers_status.read_status)
    _must_be(doors.SWEEP_ASK_SLURM)(peers_sweep.ask_slurm)
    _must_be(doors.SWEEP_WITH_CACHE)(peers_sweep.with_cache)
    _must_be(doors.TEND_EACH_MINUTE)(peers_tend.each_minute)
    _must_be(doors.CHECKS_FINDINGS)(prefetch_checks.findings)
    _must_be(doors.COMMANDS)(prefetch_commands)
    _must_be(doors.EXPLAIN_EXPLAIN_OUTCOME)(prefetch_explain.explain_outcome)
    _must_be(doors.METRICS_READ_METRICS)(prefetch_metrics.read_metrics)
    _must_be(doors.SERVICE_ROUTES)(prefetch_service.routes)
    _must_be(doors.STATUS_READ_STATUS)(prefetch_status.read_status)
    _must_be(doors.TEND_EACH_MINUTE)(prefetch_tend.each_minute)
    _must_be(doors.TEND_WORKS_FOR_OTHERS)(prefetch_tend.works_for_others)
    _must_be(doors.COMMANDS)(prepare_commands)
    _must_be(doors.HINTS)(prepare_hints)
    _must_be(doors.TEND_EACH_MINUTE)(prepare_tend.each_minute)
    _must_be(doors.CHECKS_FINDINGS)(registry_checks.findings)
    _must_be(doors.COMMANDS)(registry_commands)
    _must_be(doors.COMMANDS_IMPORT_REFERENCE)(registry_commands.import_reference)
    _must_be(doors.EPILOG_BEFORE_LEASE_DROP)(registry_epilog.before_lease_drop)
    _must_be(doors.EXPLAIN_EXPLAIN_OUTCOME)(registry_explain.explain_outcome)
    _must_be(doors.METRICS_READ_METRICS)(registry_metrics.read_metrics)
    _must_be(doors.PROLOG_BEFORE_LEASE)(registry_prolog.before_lease)
    _must_be(doors.REASONS)(registry_reasons)
    _must_be(doors.STATUS_READ_STATUS)(registry_status.read_status)
    _must_be(doors.STEP_BEFORE_LEASE)(registry_step.before_lease)
    _must_be(doors.SWEEP_AFTERWARDS)(registry_sweep.afterwards)
    _must_be(doors.SWEEP_FIELDS)(registry_sweep.fields)
    _must_be(doors.SWEEP_LINES)(registry_sweep.lines)
    _must_be(doors.SWEEP_WITHOUT_CACHE)(registry_sweep.without_cache)
    _must_be(doors.COMMANDS)(report_commands)

"""Made by packaging/conformance for mypy alone: each door is what doors.py says."""

from typing import TYPE_CHECKING

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
    from forestage.features.peers import asked_node as peers_asked_node
    from forestage.features.peers import checks as peers_checks
    from forestage.features.peers import commands as peers_commands
    from forestage.features.peers import engine as peers_engine
    from forestage.features.peers import metrics as peers_metrics
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

    _data_epilog_after_lease_drop: doors.AfterLeaseDrop = data_epilog.after_lease_drop
    _data_explain_explain_outcome: doors.ExplainOutcome = data_explain.explain_outcome
    _data_prolog_after_lease: doors.PrologAfterLease = data_prolog.after_lease
    _data_reasons: doors.ReasonsDoor = data_reasons
    _data_service_routes: doors.ListRoutes = data_service.routes
    _data_status_read_status: doors.ReadStatus = data_status.read_status
    _data_step_after_lease: doors.StepAfterLease = data_step.after_lease
    _data_submitted_must_be_possible: doors.MustBePossible = data_submitted.must_be_possible
    _data_sweep_in_each_cache: doors.CleanUp = data_sweep.in_each_cache
    _data_sweep_lines: doors.SweepLines = data_sweep.lines
    _metrics_commands: doors.CommandsDoor = metrics_commands
    _metrics_sweep_afterwards: doors.CleanUp = metrics_sweep.afterwards
    _metrics_tend_each_minute: doors.ListParts = metrics_tend.each_minute
    _peers_activation_is_on: doors.IsOn = peers_activation.is_on
    _peers_asked_node_ask_node: doors.AskNode = peers_asked_node.ask_node
    _peers_checks_findings: doors.LookForFindings = peers_checks.findings
    _peers_checks_wants_unit: doors.WantsUnit = peers_checks.wants_unit
    _peers_commands: doors.CommandsDoor = peers_commands
    _peers_engine_helpers: doors.EngineHelpers = peers_engine.helpers
    _peers_engine_uploaded: doors.EngineUploaded = peers_engine.uploaded
    _peers_metrics_count: doors.Count = peers_metrics.count
    _peers_metrics_read_metrics: doors.ReadMetrics = peers_metrics.read_metrics
    _peers_status_read_sent: doors.ReadSent = peers_status.read_sent
    _peers_status_read_status: doors.ReadStatus = peers_status.read_status
    _peers_sweep_ask_slurm: doors.CleanUp = peers_sweep.ask_slurm
    _peers_sweep_with_cache: doors.CleanUp = peers_sweep.with_cache
    _peers_tend_each_minute: doors.ListParts = peers_tend.each_minute
    _prefetch_checks_findings: doors.LookForFindings = prefetch_checks.findings
    _prefetch_commands: doors.CommandsDoor = prefetch_commands
    _prefetch_explain_explain_outcome: doors.ExplainOutcome = prefetch_explain.explain_outcome
    _prefetch_metrics_read_metrics: doors.ReadMetrics = prefetch_metrics.read_metrics
    _prefetch_service_routes: doors.ListRoutes = prefetch_service.routes
    _prefetch_status_read_status: doors.ReadStatus = prefetch_status.read_status
    _prefetch_tend_each_minute: doors.ListParts = prefetch_tend.each_minute
    _prefetch_tend_works_for_others: doors.WorksForOthers = prefetch_tend.works_for_others
    _prepare_commands: doors.CommandsDoor = prepare_commands
    _prepare_hints: doors.HintsDoor = prepare_hints
    _prepare_tend_each_minute: doors.ListParts = prepare_tend.each_minute
    _registry_checks_findings: doors.LookForFindings = registry_checks.findings
    _registry_commands: doors.CommandsDoor = registry_commands
    _registry_commands_import_reference: doors.ImportReference = registry_commands.import_reference
    _registry_epilog_before_lease_drop: doors.BeforeLeaseDrop = registry_epilog.before_lease_drop
    _registry_explain_explain_outcome: doors.ExplainOutcome = registry_explain.explain_outcome
    _registry_metrics_read_metrics: doors.ReadMetrics = registry_metrics.read_metrics
    _registry_prolog_before_lease: doors.PrologBeforeLease = registry_prolog.before_lease
    _registry_reasons: doors.ReasonsDoor = registry_reasons
    _registry_status_read_status: doors.ReadStatus = registry_status.read_status
    _registry_step_before_lease: doors.StepBeforeLease = registry_step.before_lease
    _registry_sweep_afterwards: doors.CleanUp = registry_sweep.afterwards
    _registry_sweep_lines: doors.SweepLines = registry_sweep.lines
    _registry_sweep_without_cache: doors.CleanUp = registry_sweep.without_cache
    _report_commands: doors.CommandsDoor = report_commands

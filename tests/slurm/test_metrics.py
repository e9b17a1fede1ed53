"""Metrics of real jobs, as a real Prometheus has them through real node exporters."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import signal
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

import pytest
from cluster import Cluster
from host import wait_until
from jobs import Site, hooked
from spec import REPO, ClusterSpec

from forestage import events

NODES = ("n1", "n2")
TEXTFILES = "/var/lib/prometheus/node-exporter"
DASHBOARD = REPO / "packaging/grafana/forestage.json"
API = "http://127.0.0.1:9090/api/v1"
# One interpreter for all questions; they come as lines, as paths below the API.
ASK = f"""
import json, sys, urllib.request
for path in sys.stdin.read().splitlines():
    with urllib.request.urlopen("{API}/" + path, timeout=20) as answer:
        print(json.dumps(json.load(answer)["data"]))
"""
EXPORTER = (
    "prometheus-node-exporter",
    "--collector.disable-defaults",
    "--collector.textfile",
    f"--collector.textfile.directory={TEXTFILES}",
)

pytestmark = pytest.mark.long  # a cluster of its own, and servers


@pytest.fixture(scope="module")
def cluster_spec() -> ClusterSpec:
    spec = hooked(nodes=len(NODES))
    return dataclasses.replace(spec, node_dirs=(*spec.node_dirs, TEXTFILES))


class Prometheus:
    """It scrapes an exporter on each node once a second."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def query(self, *queries: str) -> list[list[dict[str, Any]]]:
        """For each query the series that it gives: `metric` its labels, `value` time and value."""
        paths = "\n".join(f"query?query={quote(query)}" for query in queries)
        done = self.cluster.run(["python3", "-c", ASK], user="root", input=paths)
        return [json.loads(line)["result"] for line in done.stdout.splitlines()]

    def value(self, query: str) -> float:
        (series,) = self.query(query)
        return float(series[0]["value"][1]) if series else float("nan")


@contextlib.contextmanager
def serving(cluster: Cluster, argv: list[str], node: str | None, user: str) -> Iterator[None]:
    """A server for as long as the block takes."""
    log = (cluster.state / "log" / f"{argv[0]}-{node}.log").open("w")
    server = cluster.popen(argv, user=user, node=node, cwd="/", stdout=log, stderr=log)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        server.wait(timeout=30)
        log.close()


@pytest.fixture
def prometheus(site: Site) -> Iterator[Prometheus]:
    cluster = site.cluster
    targets = [
        {"targets": [f"127.0.0.1:910{number}"], "labels": {"instance": node}}
        for number, node in enumerate(NODES)
    ]
    config = {
        "global": {"scrape_interval": "1s"},
        "scrape_configs": [{"job_name": "node", "static_configs": targets}],
    }
    cluster.write("/tmp/prometheus.yml", json.dumps(config))  # JSON is YAML
    options = ["--config.file=/tmp/prometheus.yml", "--storage.tsdb.path=/tmp/prometheus"]
    with contextlib.ExitStack() as stack:
        for number, node in enumerate(NODES):
            listen = f"--web.listen-address=127.0.0.1:910{number}"
            # As Debian's unit: a user that is nobody to the cache and the logs.
            argv = [*EXPORTER, listen]
            stack.enter_context(serving(cluster, argv, node, "prometheus"))
        listen = "--web.listen-address=127.0.0.1:9090"
        argv = ["prometheus", *options, listen]
        stack.enter_context(serving(cluster, argv, None, "root"))
        server = Prometheus(cluster)
        ready = ["python3", "-c", f"import urllib.request as u; u.urlopen('{API}/query?query=up')"]
        wait_until(
            lambda: cluster.run(ready, user="root", check=False).returncode == 0,
            60,
            lambda: f"no Prometheus\n{cluster.logs()}",
        )
        yield server


def write(site: Site, prometheus: Prometheus) -> None:
    """What the timer does on each node; returns when Prometheus has scraped what it wrote."""
    for node in NODES:
        site.command("metrics", node=node)
    for node in NODES:
        file = site.cluster.host_path(f"{TEXTFILES}/forestage.prom", node)
        wait_until(
            functools.partial(scraped, prometheus, node, int(file.stat().st_mtime)),
            60,
            lambda: f"not scraped\n{site.cluster.logs()}",
        )


def scraped(prometheus: Prometheus, node: str, since: int) -> bool:
    """Whether Prometheus has a node's file of then or later; node exporter tells whole seconds."""
    query = f'node_textfile_mtime_seconds{{instance="{node}"}} >= {since}'
    return bool(prometheus.query(query)[0])


def results(site: Site, node: str) -> Counter[tuple[str, str]]:
    """Hook and result of every request that a node's log tells of: the truth."""
    log = site.cluster.host_path("/var/log/forestage/events.jsonl", node)
    told = (event for event in events.read_events(log) if event.hook in ("prolog", "step"))
    return Counter((event.hook, event.outcome.result) for event in told)


def filled(query: str) -> str:
    """A panel's query as Grafana sends it."""
    known = {"$instance": ".*", "$cluster": ".*", "$__rate_interval": "1m", "$__range": "5m"}
    for name, value in known.items():
        query = query.replace(name, value)
    assert "$" not in query
    return query


def panels() -> dict[str, str]:
    """Each query of the dashboard, by the panel's title and its own letter."""
    dashboard = json.loads(DASHBOARD.read_text())
    return {
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in dashboard["panels"]
        for target in panel.get("targets", [])
    }


def work(site: Site) -> None:
    """Something of everything: copied, hit, declined, no room, evicted."""
    image = site.image("metrics", mib=2)
    for node in ("n1", "n1", "n2"):
        site.srun(image, node=node)
    site.srun("/shared/alice/nothing-there.sqsh", node="n1")
    site.configure(max_size="1M")
    site.srun(site.image("large", mib=4), node="n2")
    site.configure(low_watermark="0%")
    site.srun(image, node="n2")
    site.configure()


def test_metrics_in_prometheus_equal_the_event_logs_and_fill_each_dashboard_panel(
    site: Site, prometheus: Prometheus
) -> None:
    write(site, prometheus)
    base = {node: results(site, node) for node in NODES}

    work(site)
    with site.holding(site.image("held"), node="n1"):
        write(site, prometheus)
        assert prometheus.value('sum(forestage_leases{instance="n1"})') == 1
        must_show_the_truth(site, prometheus, base)
        must_fill_every_panel(prometheus)


def must_show_the_truth(
    site: Site, prometheus: Prometheus, base: Mapping[str, Counter[tuple[str, str]]]
) -> None:
    (series,) = prometheus.query("forestage_requests_total")
    for node in NODES:
        shown = {
            (one["metric"]["hook"], one["metric"]["result"]): int(one["value"][1])
            for one in series
            if one["metric"]["instance"] == node
        }
        truth = results(site, node)
        assert {what: number for what, number in shown.items() if number} == dict(truth)
        assert truth - base[node]
    assert prometheus.value('sum(forestage_requests_total{result="hit"})') >= 2
    assert prometheus.value('sum(forestage_declined_total{reason="missing"})') >= 1
    assert prometheus.value("sum(forestage_evictions_total)") >= 1
    spared, copied = "sum(forestage_spared_bytes_total)", "sum(forestage_copied_bytes_total)"
    assert prometheus.value(spared) >= 2 << 20
    assert prometheus.value(copied) >= 4 << 20


def must_fill_every_panel(prometheus: Prometheus) -> None:
    wanted = panels()
    found = prometheus.query(*map(filled, wanted.values()))
    empty = [name for name, series in zip(wanted, found, strict=True) if not series]
    assert empty == []
    of_jobs = dict(zip(wanted, found, strict=True))
    for title in ("Hit ratio A", "Kept off the shared file system A", "Waits, 95th percentile A"):
        assert float(of_jobs[title][0]["value"][1]) > 0, title

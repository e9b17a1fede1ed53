"""Accounting for a test cluster: slurmdbd on a MariaDB of its own, on the login."""

from __future__ import annotations

from cluster import Cluster
from host import wait_until

CONF = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=login
AccountingStoreFlags=job_script
"""
SLURMDBD = """\
AuthType=auth/munge
DbdHost=login
SlurmUser=root
StorageType=accounting_storage/mysql
StorageLoc=accounts
PidFile=/run/slurmdbd.pid
LogFile=/var/log/slurm/slurmdbd.log
"""
DATA = "/var/lib/accounts"
INSTALL = ["mariadb-install-db", "--no-defaults", "--user=root", f"--datadir={DATA}"]
# Nobody but root gets at its socket, and it has no other door.
DAEMON = f"""\
mkdir -m 0700 /run/mysqld
exec setsid --fork mariadbd --no-defaults --user=root --datadir={DATA} --skip-networking \
  --skip-grant-tables --socket=/run/mysqld/mysqld.sock >/var/log/slurm/mariadb.log 2>&1
"""


def keep(cluster: Cluster) -> None:
    """From now on the cluster, of the suite `accounting`, has accounts. Only while no job runs."""

    def root(*argv: str) -> bool:
        return cluster.run(argv, user="root", cwd="/", check=False).returncode == 0

    def until(*argv: str) -> None:
        wait_until(lambda: root(*argv), 90, lambda: f"{argv} fails\n{cluster.logs()}")

    cluster.run(INSTALL, user="root", cwd="/")
    cluster.run(["sh", "-c", DAEMON], user="root", cwd="/")
    cluster.write("/etc/slurm/slurmdbd.conf", SLURMDBD, mode=0o600)
    until("mariadb", "--no-defaults", "--execute=SELECT 1")
    cluster.run(["slurmdbd"], user="root", cwd="/")
    cluster.write("/etc/slurm/slurm.conf", cluster.read("/etc/slurm/slurm.conf") + CONF)
    until("sacctmgr", "--noheader", "show", "stats")
    root("sacctmgr", "--immediate", "add", "cluster", "forestage")
    pid = cluster.read("/run/slurmctld.pid").strip()
    cluster.run(["kill", pid], user="root")
    wait_until(
        lambda: not root("kill", "-0", pid), 60, lambda: f"slurmctld stays\n{cluster.logs()}"
    )
    cluster.run(["slurmctld"], user="root", cwd="/")
    cluster.wait_idle()

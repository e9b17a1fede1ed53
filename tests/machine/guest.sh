#!/bin/sh
# Makes a node of a Debian tree with Slurm, once its files from guest/ are there. Runs in the tree.
set -eu
for user in alice:21001 bob:21002; do
    useradd --create-home --uid "${user#*:}" --user-group --shell /bin/sh "${user%:*}"
done
mkdir -p /lustre /export/images /mnt/nvme
chmod 1777 /export /export/images
[ -e /etc/munge/munge.key ] || head -c 1024 /dev/urandom >/etc/munge/munge.key
chown -R munge: /etc/munge
chmod 600 /etc/munge/munge.key
systemctl enable agent address munge slurmctld slurmd nfs-server
# What a boot would wait for and no test needs.
systemctl mask getty@tty1 serial-getty@ttyS0 apt-daily.timer apt-daily-upgrade.timer \
    dpkg-db-backup.timer e2scrub_reap e2scrub_all.timer fstrim.timer rpcbind.service rpcbind.socket \
    rpc-statd.service rpc-statd-notify.service mdcheck_start.timer mdcheck_continue.timer \
    mdmonitor-oneshot.timer systemd-timesyncd logrotate.timer
mkdir -p /etc/systemd/journald.conf.d
printf '[Journal]\nStorage=volatile\n' >/etc/systemd/journald.conf.d/volatile.conf

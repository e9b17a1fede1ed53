"""A cluster under load: submits, cancels, reboots and so on as a script says, and keeps book."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import tricks
from ahead import Passes
from cluster import ClusterError
from jobs import CLI, SERVER, STAGER, Site
from load import AGAIN_AFTER, Mishap, Picture, Plan, Sources

from forestage.hooks import background_prolog

LOOK = 0.25  # seconds between two looks at the queue
TICK = 0.02  # seconds in which what is due may be late
STUCK = 180.0  # seconds in which no job ends: something hangs
# As squeue names what no job leaves any more; a job is none of these while it is COMPLETING.
OVER = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "TIMEOUT")
ELSEWHERE = " in the mount namespace of process "
VICTIMS: Mapping[str, str] = {
    "stager": STAGER,
    "server": SERVER,
    "prolog": background_prolog.PROCESS_NAME,
}
COLUMNS = "JobID:12,State:20,RestartCnt:8,Reason:80"


@dataclass
class Run:
    """A job that was submitted. `since`: how often each picture had been changed before it began.

    `rebooted`: a node of its was, while it was in the queue.
    """

    job: int
    plan: Plan
    since: Mapping[Picture, int]
    state: str = "PENDING"
    restarts: int = 0
    rebooted: bool = False
    delayed: int = 0  # which of its restarts was
    fate_at: float | None = None
    fate_came: str = ""  # the state in which it did

    def __str__(self) -> str:
        plan = self.plan
        wanted = "+".join(picture.name for picture in plan.pictures)
        what = f"{plan.user.name} {wanted} by {plan.way}, {plan.tasks} on {','.join(plan.nodes)}"
        what += f" with {plan.trick}" if plan.trick else ""
        fate = f", {plan.fate} {self.fate_came}" if self.fate_came else ""
        again = f", {self.restarts} restarts" + ", rebooted" * self.rebooted
        return f"job {self.job} of {what} in {plan.partition}{fate}{again}: {self.state}"

    @property
    def over(self) -> bool:
        return self.state in OVER

    @property
    def again(self) -> bool:
        """Whether it may have begun more than once."""
        requeued = self.plan.fate == "requeued" and self.fate_came not in ("", "over")
        return self.rebooted or requeued or self.restarts > 0


@dataclass
class Load:
    """One cluster's load, and what has become of it so far."""

    site: Site
    sources: Sources
    runs: dict[int, Run] = field(default_factory=dict)
    tally: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    kills: list[Mishap] = field(default_factory=list)  # those whose victim has not come yet
    ahead: Passes | None = None

    def carry_out(self, script: Iterable[Plan | Mishap], at_once: int) -> None:
        """To the end of the last job, with so many in the queue at once."""
        for act in script:
            if isinstance(act, Plan):
                self._until(lambda: len(self._unfinished()) < at_once)
                self._submit(act)
            else:
                self._befall(act)
        self._until(lambda: not self._unfinished())
        self.site.cluster.wait_idle(STUCK)
        self._look()

    def _until(self, done: Callable[[], bool]) -> None:
        # Looks are counted, not seconds: while the machine stands still nobody looks.
        ended, looks, looked = -1, 0, 0.0
        while not done():
            count, now = len(self.runs) - len(self._unfinished()), time.monotonic()
            if count != ended:
                ended, looks = count, 0
            elif looks > STUCK / LOOK:
                raise ClusterError(f"no job ends\n{self.site.cluster.overview()}")
            if now > looked + LOOK:
                self._look()
                if self.ahead is not None:
                    self.ahead.go_on()
                looks, looked = looks + 1, time.monotonic()
            self._strike()
            time.sleep(TICK)

    def _unfinished(self) -> list[Run]:
        return [run for run in self.runs.values() if not run.over]

    # Jobs

    def _submit(self, plan: Plan) -> None:
        now = self.sources.now()
        job = self.site.cluster.submit(plan.script, *plan.options, user=plan.user.name)
        run = self.runs[job] = Run(job, plan, now)
        if plan.since == "submitted":
            run.fate_at = time.monotonic() + plan.delay
        self.tally["jobs"] += 1
        self._strike()

    def _look(self) -> None:
        """Asks Slurm what its jobs and nodes are at."""
        now = self.sources.now()
        ask = f"squeue -h --states=all -O {COLUMNS}; sinfo -h -N -o 'node %N %T %E' | sort -u"
        for line in self._root(["sh", "-c", ask]).splitlines():
            words = line.split(maxsplit=3)
            if words[0] == "node":
                self._judge(line)
                continue
            run = self.runs[int(words[0])]
            run.state, run.restarts = words[1], int(words[2])
            if "held" in words[3].lower():
                self.problems.append(f"held: {line}")
            if run.state == "PENDING" and not run.again:
                run.since = now
            elif run.state == "PENDING" and run.delayed != run.restarts:
                start = ["scontrol", "update", f"JobId={run.job}", f"StartTime=now+{AGAIN_AFTER}"]
                if words[3].startswith("BeginTime") and not self._root(start):
                    run.delayed = run.restarts

    def _strike(self) -> None:
        """Lets come upon the jobs what is due."""
        for run in self._unfinished():
            if run.plan.fate != "ends" and not run.fate_came:
                self._come(run)
        self.kills = [kill for kill in self.kills if not self._killed(kill)]

    def _killed(self, kill: Mishap) -> bool:
        """Whether there was one to be killed."""
        living = self.site.named(kill.node, VICTIMS[kill.kind])
        if living:
            # It may have ended just now.
            argv = ["sh", "-c", f"kill -9 {living[0]} && echo killed"]
            said = self.site.cluster.run(argv, user="root", node=kill.node, check=False).stdout
            self.tally[f"killed {kill.kind}"] += bool(said)
            return bool(said)
        return False

    def _judge(self, line: str) -> None:
        state = line.split()[2]
        if "drain" in state or "fail" in state or "error" in state:
            self.problems.append(line)

    def _come(self, run: Run) -> None:
        begun = self.site.source(run.plan.begun(run.job))
        if run.fate_at is None and begun.exists():
            run.fate_at = time.monotonic() + run.plan.delay
        if run.fate_at is None or time.monotonic() < run.fate_at:
            return
        state = self._root(["squeue", "-h", "-j", str(run.job), "-o", "%T"], check=False).strip()
        if run.plan.fate == "requeued" and state != "RUNNING":  # a reboot has been faster
            run.fate_came = "over"
            return
        if state == "RUNNING" and not begun.exists():
            state = "in the prolog"
        verb = ["scancel"] if run.plan.fate == "cancelled" else ["scontrol", "requeue"]
        run.fate_came = state.lower() or "over"
        self._root([*verb, str(run.job)], check=False)
        self.tally[f"{run.plan.fate} {run.fate_came}"] += 1

    # What befalls all

    def _befall(self, mishap: Mishap) -> None:
        if mishap.kind in VICTIMS:
            self.kills.append(mishap)
            return
        self.tally[mishap.kind] += 1
        {
            "reboot": self._reboot,
            "evict": self._evict,
            "change": self._change,
            "sweep": self._sweep,
        }[mishap.kind](mishap)

    def _reboot(self, mishap: Mishap) -> None:
        self._look()
        for run in self._unfinished():
            run.rebooted = run.rebooted or mishap.node in run.plan.nodes
        self.site.cluster.node_reboot(mishap.node)
        tricks.furnish(self.site, mishap.node)

    def _evict(self, mishap: Mishap) -> None:
        what = mishap.picture.path if mishap.picture else "--all"
        code, said = self._command(["evict", what], mishap.node)
        if code not in (0, 1):  # 1: not here, or in use
            self.problems.append(f"evict {what} on {mishap.node}: {code} {said}")

    def _change(self, mishap: Mishap) -> None:
        picture = mishap.picture
        if picture is None:
            raise ClusterError(f"what is to be changed? {mishap}")
        self._look()
        # Under a reader, a file that changes in place would be torn, with forestage or without.
        read = any(picture in run.plan.pictures for run in self._unfinished())
        self.sources.change(picture, in_place=not read)
        self.tally[f"change {'by rename' if read else 'in place'}"] += 1

    def _sweep(self, mishap: Mishap) -> None:
        code, said = self._command(["sweep"], mishap.node)
        # Nothing can be laid over what somebody has taken along while a later redirect lies there,
        # and once its entry is evicted; what is left in the end is asked then.
        told = [line for line in said.splitlines() if line.startswith("Problem: ")]
        if code and not (told and all(ELSEWHERE in line for line in told)):
            self.problems.append(f"sweep on {mishap.node}: {code} {said}")

    def _command(self, words: list[str], node: str) -> tuple[int, str]:
        ran = self.site.cluster.run([CLI, *words], user="root", node=node, check=False)
        return ran.returncode, ran.stdout + ran.stderr

    def _root(self, argv: list[str], check: bool = True) -> str:
        return self.site.cluster.run(argv, user="root", check=check).stdout

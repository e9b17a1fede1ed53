"""packaging/slurm/job_submit.lua in a real slurmctld: what it notes of a submission, and what not.

On this machine's Slurm, and on those of the other trees with ./test --all or --suite NAME. What it
costs with hostile scripts is measured by bench/job-submit.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from collections.abc import Iterator

import pytest
from host import wait_until
from hostile import SCRIPTS
from jobs import Site, hooked
from spec import REPO, ClusterSpec
from suite import on_suite

from forestage.features.prefetch.queue_lines import parse_admin_comment

SHIPPED = REPO / "packaging/slurm/job_submit.lua"
COPY = "/etc/forestage/job_submit.lua"
OTHERS = [pytest.param(name, marks=pytest.mark.suite(name)) for name in ("trixie", "sid")]
# What a site has, and for some names of jobs what a test wants to know.
OWN = f"""\
local before = {{}}
for name in pairs(_G) do before[name] = true end
local found, note_images = pcall(dofile, "{COPY}")
local new = {{}}
for name in pairs(_G) do if not before[name] then new[#new + 1] = name end end

function slurm_job_submit(job_desc, part_list, submit_uid)
    if job_desc.name == "globals" then
        job_desc.admin_comment = "new=" .. table.concat(new, ",")
    elseif job_desc.name == "ticket" then
        job_desc.admin_comment = "ticket=42"
    elseif job_desc.name == "operator" then
        job_desc.admin_comment = "stage-seen=/of/an/operator"
    elseif job_desc.name == "uncaught" then
        error("of the site's own")
    elseif job_desc.name == "failing" then
        note_images(setmetatable({{}}, {{__index = function() error("no field, 100%s") end}}))
        return slurm.SUCCESS
    end
    if found then note_images(job_desc) end
    return slurm.SUCCESS
end

function slurm_job_modify(job_desc, job_rec, part_list, modify_uid)
    return slurm.SUCCESS
end
"""
_names = itertools.count(1)


@pytest.fixture(scope="module", params=["", *OTHERS])
def cluster_spec(request: pytest.FixtureRequest, machine: None) -> ClusterSpec:
    spec = hooked(nodes=1, JobSubmitPlugins="lua")
    files = {"/etc/slurm/job_submit.lua": OWN, COPY: SHIPPED.read_text()}
    spec = dataclasses.replace(spec, files={**spec.files, **files})
    return on_suite(spec, request.param) if request.param else spec


@pytest.fixture
def held(site: Site) -> Iterator[Site]:
    """Jobs are submitted and never run."""
    yield site
    site.cluster.run(["scancel", "--user=alice", "--state=PENDING"], user="root")


def noted(site: Site, job: int) -> str:
    """A job's admin comment, as it is, and that of each further component in a line."""
    shown = site.cluster.run(["scontrol", "show", "job", str(job)], user="root").stdout
    return "\n".join(re.findall(r"^ *AdminComment=(.*?) *$", shown, re.MULTILINE))


def batch(site: Site, script: str, *options: str) -> int:
    return site.cluster.submit(f"#!/bin/sh\n{script}\n", "--hold", *options)


def images(site: Site, script: str, *options: str) -> tuple[str, ...]:
    return parse_admin_comment(noted(site, batch(site, script, *options)))


def test_image_option_of_sbatch_and_of_its_script_is_noted_in_the_admin_comment(held: Site) -> None:
    job = batch(held, "true", "--container-image=/shared/a.sqsh")
    assert noted(held, job) == "stage-seen=/shared/a.sqsh"
    assert images(held, "#SBATCH --container-image=/shared/b.sqsh") == ("/shared/b.sqsh",)


@pytest.mark.parametrize("command", ["srun", "salloc"])
def test_image_option_of_srun_and_salloc_is_noted_in_the_admin_comment(
    site: Site, command: str
) -> None:
    image = site.image(command)
    ran = site.run([command, f"--container-image={image}", "true"])
    assert parse_admin_comment(noted(site, ran.job)) == (image,)


STEPS = {
    "srun --container-image=/a.sqsh true": ("/a.sqsh",),
    "srun -n2 --container-image='/a b,%.sqsh' true": ("/a b,%.sqsh",),
    'exec /usr/bin/srun --container-image="/ü.sqsh" true': ("/ü.sqsh",),
    "srun -n2 \\\n  --label \\\n  --container-image=/a.sqsh \\\n  true": ("/a.sqsh",),
    "x=$(srun --container-image=/a.sqsh cat)": ("/a.sqsh",),
    "srun --container-image=./a.sqsh true": ("/shared/alice/a.sqsh",),
    "srun --container-image=/a true\nsrun --container-image=/b true\nsrun --container-image=/a x": (
        "/a",
        "/b",
    ),
    "# srun --container-image=/a.sqsh true": (),
    "echo --container-image=/a.sqsh": (),
    "mysrun --container-image=/a.sqsh": (),
    "srun hostname\necho --container-image=/a.sqsh": (),
    "srun --container-image=$IMAGE true": (),
    "srun --container-image=/images/`date`.sqsh true": (),
    'srun --container-image="/never ended': (),
    "srun --container-image=nvcr.io#nvidia/pytorch:24.01-py3 true": (),
    "srun --container-image= true": (),
}


@pytest.mark.parametrize("script", STEPS)
def test_images_of_the_steps_in_a_script_are_noted_in_the_admin_comment(
    held: Site, script: str
) -> None:
    assert images(held, script) == STEPS[script]


def test_noted_image_option_precedes_the_step_images_and_is_not_expanded(
    held: Site,
) -> None:
    script = "srun --container-image=/b true"
    assert images(held, script, "--container-image=/$a{1}~\n.sqsh") == ("/$a{1}~\n.sqsh", "/b")


def test_noting_an_image_keeps_the_users_comment_and_the_existing_admin_comment(held: Site) -> None:
    comment = "x" * 1024  # the most that Slurm takes
    option = "--container-image=/a.sqsh"
    job = batch(held, "true", option, f"--comment={comment}", "--job-name=ticket")
    assert noted(held, job) == "ticket=42 stage-seen=/a.sqsh"
    squeue = ["squeue", "-h", "-j", str(job), "-o", "%k"]
    assert held.cluster.run(squeue).stdout.strip() == comment
    job = batch(held, "true", option, "--job-name=operator")
    assert noted(held, job) == "stage-seen=/of/an/operator"


def test_user_cannot_write_an_admin_comment(held: Site) -> None:
    job = batch(held, "true", "--container-image=/a.sqsh")
    update = ["scontrol", "update", f"JobId={job}", "AdminComment=stage-seen=/b"]
    assert held.cluster.run(update, check=False).returncode != 0
    assert noted(held, job) == "stage-seen=/a.sqsh"


def test_noted_image_is_visible_to_another_user_in_scontrol_show_job(held: Site) -> None:
    job = batch(held, "true", "--container-image=/shared/alice/a.sqsh")
    shown = held.cluster.run(["scontrol", "show", "job", str(job)], user="bob").stdout
    assert "AdminComment=stage-seen=/shared/alice/a.sqsh" in shown


def test_het_job_component_does_not_get_the_first_components_image(held: Site) -> None:
    options = ["--container-image=/a.sqsh", ":", "-n1", ":", "--container-image=/c.sqsh"]
    job = int(
        held.cluster.run(["sbatch", "--parsable", "-H", *options], input="#!/bin/sh\n").stdout
    )
    assert noted(held, job) == "stage-seen=/a.sqsh"


def test_noted_images_have_at_most_900_bytes_and_only_whole_paths(held: Site) -> None:
    long, fits = "/" + "ü" * 140, "/fits.sqsh"  # 6 bytes for each ü
    script = "\n".join(f"srun --container-image={path} true" for path in (long, long + "x", fits))
    job = batch(held, script)
    assert parse_admin_comment(noted(held, job)) == (long, fits)
    assert len(noted(held, job)) <= 900
    assert images(held, f"srun --container-image=/{'x' * 900} true") == ()


def test_script_is_searched_for_images_only_in_its_first_256_kib(held: Site) -> None:
    last = "srun --container-image=/last true\n"
    filler = "#" * 63 + "\n"
    near = filler * (256 * 16 - 3) + last
    assert images(held, near) == ("/last",)
    assert images(held, filler * 256 * 16 + last) == ()


@pytest.mark.parametrize("name", SCRIPTS)
def test_hostile_script_is_accepted_and_its_note_has_at_most_900_bytes(
    held: Site, name: str
) -> None:
    assert len(noted(held, batch(held, SCRIPTS[name]))) <= 900


def test_job_submit_lua_defines_no_global_name(held: Site) -> None:
    assert noted(held, batch(held, "true", "--job-name=globals")) == "new="


def test_error_in_job_submit_lua_is_logged_and_the_job_is_accepted(held: Site) -> None:
    job = batch(held, "true", "--job-name=failing", "--container-image=/a.sqsh")
    assert noted(held, job) == ""
    log = (held.cluster.state / "log/slurmctld.log").read_text()
    assert re.search("error: .*forestage: no image is noted for a job: .*no field, 100%s", log)


def test_uncaught_error_in_a_sites_own_job_submit_lua_refuses_the_job_only_on_slurm_26(
    held: Site,
) -> None:
    """Slurm 22.05 and 24.11 accept the job, 26.05 refuses it: no error may leave our function."""
    options = ["--hold", "--job-name=uncaught"]
    ran = held.cluster.run(["sbatch", *options], input="#!/bin/sh\n", check=False)
    assert (ran.returncode != 0) == held.cluster.spec.lower.endswith("/sid")


@pytest.mark.parametrize("broken", ["", "return function( end", "error('at once')"])
def test_missing_or_broken_job_submit_lua_refuses_no_job(held: Site, broken: str) -> None:
    own, copy = (held.cluster.host_path(path) for path in ("/etc/slurm/job_submit.lua", COPY))
    text = copy.read_text()
    try:
        copy.write_text(broken) if broken else copy.unlink()
        _reload(held, own.read_text())
        assert noted(held, batch(held, "true", "--container-image=/a.sqsh")) == ""
    finally:
        copy.write_text(text)
        _reload(held, own.read_text())
    assert images(held, "true", "--container-image=/a.sqsh") == ("/a.sqsh",)


def _reload(site: Site, own: str) -> None:
    """slurmctld reads a script again whose time, in seconds, is a later one."""
    mark = f"loaded {next(_names)}"
    path = site.cluster.host_path("/etc/slurm/job_submit.lua")
    later = path.stat().st_mtime + 2
    body = own.split("\n-- mark\n")[0]
    path.write_text(f'{body}\n-- mark\nslurm.log_info("%s", "{mark}")\n')
    os.utime(path, (later, later))
    log = site.cluster.state / "log/slurmctld.log"

    def loaded() -> bool:
        batch(site, "true")
        return mark in log.read_text()

    wait_until(loaded, 30, lambda: f"not loaded\n{site.cluster.logs()}")

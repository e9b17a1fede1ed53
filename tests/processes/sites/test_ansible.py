"""The Ansible role as files, without Ansible; tests/slurm/test_ansible.py runs it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import jinja2
import pytest
import yaml

REPO = Path(__file__).resolve().parents[3]
ROLE = REPO / "packaging/ansible/roles/forestage"
FILES = sorted((REPO / "packaging/ansible").rglob("*.yml"))
TASKS = sorted([*ROLE.glob("tasks/*.yml"), *ROLE.glob("handlers/*.yml")])
# Of a task, beside the module that it runs.
KEYWORDS = {
    *("name", "when", "loop", "register", "notify", "environment", "changed_when", "failed_when"),
    *("check_mode", "until", "retries", "delay"),
}


def tasks(file: Path) -> Iterator[dict[str, object]]:
    yield from yaml.safe_load(file.read_text())


def texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from texts(one)
    elif isinstance(value, list):
        for one in value:
            yield from texts(one)


@pytest.mark.parametrize("file", TASKS, ids=lambda file: file.name)
def test_ansible_task_has_a_name_and_uses_only_builtin_modules(file: Path) -> None:
    for task in tasks(file):
        assert task["name"]
        (module,) = task.keys() - KEYWORDS
        assert module.startswith("ansible.builtin."), module


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}-{file.name}")
def test_templates_of_the_ansible_role_can_be_parsed(file: Path) -> None:
    environment = jinja2.Environment(autoescape=True)
    for text in texts(yaml.safe_load(file.read_text())):
        environment.parse(text)


def test_ansible_variable_has_a_default_a_type_and_a_line_in_the_docs() -> None:
    defaults = yaml.safe_load((ROLE / "defaults/main.yml").read_text())
    options = yaml.safe_load((ROLE / "meta/argument_specs.yml").read_text())["argument_specs"]
    assert options["main"]["options"].keys() == defaults.keys()
    for name, option in options["main"]["options"].items():
        assert option.get("default", defaults[name]) == defaults[name], name
    said = (REPO / "docs/sites.md").read_text()
    assert [name for name in defaults if f"`{name}`" not in said] == []
    used = " ".join(file.read_text() for file in TASKS)
    own = set(re.findall(r"\b(forestage_\w+)", used)) - defaults.keys()
    registered = set(re.findall(r"register: (\w+)", used)) | {"forestage_plan"}
    assert own == registered


def test_ansible_check_mode_runs_only_commands_that_change_nothing() -> None:
    """check_mode: false is for those that look."""
    for file in TASKS:
        for task in tasks(file):
            command = str(task.get("ansible.builtin.command", ""))
            if task.get("check_mode") is False:
                assert task["changed_when"] is False
                assert "--yes" not in command
                assert re.search(r"forestage config|'--json'", command), command


def test_ansible_installs_the_package_before_and_removes_it_after_the_lines_in_slurms_files() -> (
    None
):
    """A Prolog that is missing drains its node."""
    present = [str(task["name"]) for task in tasks(ROLE / "tasks/present.yml")]
    assert present[-1] == "Configure and enable"
    absent = [str(task["name"]) for task in tasks(ROLE / "tasks/absent.yml")]
    order = ["Remove the lines from Slurm's files", "Have Slurm read them before the package goes"]
    order += ["Remove the links", "Remove the packages"]
    assert [name for name in absent if name in order] == order
    play = yaml.safe_load((REPO / "packaging/ansible/playbook.yml").read_text())
    assert play[0]["any_errors_fatal"] is True

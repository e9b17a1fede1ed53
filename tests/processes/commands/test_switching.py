"""`forestage off` and `on`."""

from __future__ import annotations

import os

import pytest

from commands import NOW, Site
from forestage.commands.command_context import ExitStatus


def test_off_prints_the_file_it_wrote_and_status_prints_the_reason(site: Site) -> None:
    done = site.run("off", "INC-42: wrong bytes?")
    assert done.exit_code == ExitStatus.OK
    assert f"{site.places.lasting_off_file}: INC-42: wrong bytes?" in done.output
    assert "`forestage on`" in done.output
    assert "INC-42: wrong bytes? (`forestage on` switches it on)" in site.run("status").output


def test_off_with_until_ends_after_that_time(site: Site) -> None:
    found = site.json("off", "INC-42", "--until", "6h")
    assert site.places.lasting_off_file.read_text().startswith(f"until {int(NOW) + 6 * 3600}\n")
    assert (found["off"], found["kept"]) == (True, True)
    site.places.lasting_off_file.write_text(f"until {int(NOW)}\nINC-42\n")
    assert "switched off" not in site.run("status").output


@pytest.mark.parametrize("until", ["soon", "0", "-1h"])
def test_off_with_an_invalid_duration_is_a_usage_error_and_writes_no_file(
    site: Site, until: str
) -> None:
    done = site.run("off", "--until", until)
    assert (done.exit_code, site.places.lasting_off_file.exists()) == (ExitStatus.USAGE, False)
    assert "6h" in done.output or "duration" in done.output


def test_off_writes_its_file_though_the_configuration_is_broken(site: Site) -> None:
    site.configure("nonsense: [")
    assert site.run("off").exit_code == ExitStatus.OK
    assert site.places.lasting_off_file.read_text() == "forestage off\n"
    done = site.run("on")
    assert done.exit_code == ExitStatus.OK
    assert "stays switched off: the configuration cannot be used" in done.output


def test_on_also_removes_the_file_of_an_upgrade_and_names_both_files(site: Site) -> None:
    site.places.disabled.parent.mkdir(parents=True)
    site.places.disabled.write_text("forestage is being upgraded\n")
    site.run("off", "INC-42")
    found = site.json("on")
    assert found["files"] == [str(site.places.disabled), str(site.places.lasting_off_file)]
    assert (found["off"], site.run("on").output) == (False, "Staging is on.\n")


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ("enabled: false\n", "`enabled: false` in {etc}"),
        (
            "enabled: false\npartitions: {debug: {enabled: true}}\n",
            "`enabled: false` in {etc} (not for all partitions)",
        ),
        ("partitions: {debug: {enabled: false}}\n", "`enabled: false` for 1 partition: debug"),
    ],
)
def test_on_names_the_setting_that_still_keeps_staging_off(
    site: Site, config: str, why: str
) -> None:
    site.configure(config)
    site.run("off")
    expected = f"Staging stays switched off: {why.format(etc=site.places.etc)}\n"
    assert site.run("on").output.endswith(expected)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_off_without_root_exits_with_permission_status(site: Site) -> None:
    site.places.etc.chmod(0o500)
    site.places.root.chmod(0o500)
    assert site.run("off").exit_code == ExitStatus.PERMISSION

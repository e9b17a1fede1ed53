"""`forestage off` and `on`."""

from __future__ import annotations

from commands import NOW, Site
from forestage.cli.world import Exit


def test_off_says_which_file_it_wrote_and_status_why(site: Site) -> None:
    done = site.run("off", "INC-42: wrong bytes?")
    assert done.exit_code == Exit.OK
    assert f"{site.places.kept_off}: INC-42: wrong bytes?" in done.output
    assert "`forestage on`" in done.output
    assert "INC-42: wrong bytes? (`forestage on` switches it on)" in site.run("status").output


def test_off_for_a_time_ends_by_itself(site: Site) -> None:
    found = site.json("off", "INC-42", "--until", "6h")
    assert site.places.kept_off.read_text().startswith(f"until {int(NOW) + 6 * 3600}\n")
    assert (found["off"], found["kept"]) == (True, True)
    site.places.kept_off.write_text(f"until {int(NOW)}\nINC-42\n")
    assert "switched off" not in site.run("status").output

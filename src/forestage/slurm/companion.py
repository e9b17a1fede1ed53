"""Whether Slurm on this node loads the SPANK companion: what `redirect: auto` goes by; and pyxis.

The companion leaves a mark below /run when slurmd or a step loads it (src/spank/plugin.c). So it
is known to fit this Slurm, and a node without it pays for one stat(2). The mark stays when the
admin takes the line out of plugstack.conf, so that file is read as well.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from forestage.config import CompanionPresence
from forestage.slurm.slurm_conf import SlurmConf, explain_read_error

if TYPE_CHECKING:
    from forestage.slurm import plugstack

PLUGIN = "forestage.so"
IMPORTER = "forestage-importer"  # the program's name, wherever it is installed


class CompanionState(msgspec.Struct, frozen=True):
    """Whether steps that start now get the companion; `why` it is unknown, with the file's name."""

    state: CompanionPresence
    why: str = ""


def read_companion_state(mark: Path, conf: SlurmConf) -> CompanionState:
    """Return whether steps that start now get the companion.

    A file of Slurm's that cannot be read says nothing about its plugins. slurmd has loaded the
    companion since the boot, as the mark is there, so a redirect for the whole node would be made
    for jobs whose steps are most likely shown their copies by the companion.
    """
    if not mark.exists():
        return CompanionState("absent")
    try:
        named = any(Path(one.path).name == PLUGIN for one in _read_plugins(conf))
    except (OSError, ValueError) as error:
        return CompanionState("unknown", explain_read_error(error))
    return CompanionState("loaded" if named else "absent")


def find_importer(conf: SlurmConf) -> str:
    """The program that pyxis asks for images of registries, its importer=; "" for none."""
    found = (one.find_argument("importer") for one in _read_plugins(conf) if "pyxis" in one.path)
    try:
        return next(found, "")
    except (OSError, ValueError):  # the importer imports by itself what nobody began for it
        return ""


def is_own_importer(program: str) -> bool:
    """Pure: whether that program is ours."""
    return Path(program).name == IMPORTER


def _read_plugins(conf: SlurmConf) -> "Iterator[plugstack.PluginLine]":
    """The plugins of plugstack.conf, as far as it can be read. Raises OSError, ValueError."""
    # Here: few nodes that have no companion need it.
    from forestage.slurm import plugstack

    yield from plugstack.read_plugins(plugstack.find_plugstack_path(conf), conf.read_text)

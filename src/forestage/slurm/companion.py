"""Whether Slurm on this node loads the SPANK companion: what `redirect: auto` goes by; and pyxis.

The companion leaves a mark below /run when slurmd or a step loads it (src/spank/forestage.c). So it
is known to fit this Slurm, and a node without it pays for one stat(2). The mark stays when the
admin takes the line out of plugstack.conf, so that file is read as well: half a millisecond.
"""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forestage.slurm import plugstack

PLUGIN = "forestage.so"
IMPORTER = "forestage-importer"  # the program's name, wherever it is installed


def is_loaded(mark: Path, conf: str) -> bool:
    """Whether steps that start now get the companion; `conf` is slurmd's $SLURM_CONF.

    False where that cannot be told: the companion acts all the same if it is there, and if it is
    not, nobody else would show a job its copy.
    """
    if not mark.exists():
        return False
    return any(Path(one.path).name == PLUGIN for one in _plugins(conf))


def importer(conf: str) -> str:
    """The program that pyxis asks for images of registries, its importer=; "" for none.

    `conf` is $SLURM_CONF as a step manager has it, or "": then slurm.conf is where it usually is.
    """
    found = (one.argument("importer") for one in _plugins(conf) if "pyxis" in one.path)
    return next(found, "")


def is_importer(program: str) -> bool:
    """Pure: whether that program is ours."""
    return Path(program).name == IMPORTER


def _plugins(conf: str) -> "list[plugstack.Plugin]":
    """The plugins of plugstack.conf; none where it cannot be read."""
    # Here: few nodes that have no companion need it.
    from forestage.slurm import plugstack, slurm_conf

    try:
        stack = plugstack.of(conf, slurm_conf.text_of)
        return list(plugstack.read(stack, slurm_conf.text_of))
    except (OSError, ValueError):
        return []

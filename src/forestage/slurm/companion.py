"""Whether Slurm on this node loads the SPANK companion: what `redirect: auto` goes by.

The companion leaves a mark below /run when slurmd or a step loads it (src/spank/forestage.c). So it
is known to fit this Slurm, and a node without it pays for one stat(2). The mark stays when the
admin takes the line out of plugstack.conf, so that file is read as well: half a millisecond.
"""

from pathlib import Path

PLUGIN = "forestage.so"


def is_loaded(mark: Path, conf: str) -> bool:
    """Whether steps that start now get the companion; `conf` is slurmd's $SLURM_CONF.

    False where that cannot be told: the companion acts all the same if it is there, and if it is
    not, nobody else would show a job its copy.
    """
    if not mark.exists():
        return False
    # Here: few nodes that have no companion need it.
    from forestage.slurm import plugstack
    from forestage.slurm.slurm_conf import settings

    def text(path: str) -> str:
        return Path(path).read_bytes().decode()

    try:
        named = {one.name: one.value for one in settings(conf, text)}
        stack = named.get("plugstackconfig") or str(Path(conf).with_name("plugstack.conf"))
        return any(Path(line.path).name == PLUGIN for line in plugstack.read(stack, text))
    except (OSError, ValueError):
        return False

"""Batch scripts that make a careless search slow: each as long as is searched, or longer."""

from __future__ import annotations

from collections.abc import Mapping

SCRIPTS: Mapping[str, str] = {
    "dashes": "-" * (256 << 10),
    "flags": "--container-image=" * 14000,
    "sruns": ("srun " * 200 + "--container-image=/\n") * 200,
    "backslashes": ("\\\n" * 500 + "srun --container-image=/a%%%%b") * 250,
    "quotes": ("`" * 900 + "srun --container-image='" + "x" * 800) * 100,
    "control": "".join(f"srun --container-image=/{chr(1) * 700}{n}\n" for n in range(300)),
    "long": "-" * (3 << 20),
    "no-line-ends": "srun " + "x" * (200 << 10) + " --container-image=/a",
}

"""The configuration: what is written holds; what is wrong is refused by file and key."""

import subprocess
import sys
from pathlib import Path


def test_loading_the_configuration_without_a_file_imports_no_heavy_modules(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from forestage.config import load_config;"
        f"load_config(pathlib.Path({str(tmp_path)!r}));"
        "print(*{'yaml', 'difflib', 'dataclasses', 'logging', 'click'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []

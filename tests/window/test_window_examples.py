"""The examples of docs/window.md run; where torch or WebDataset is missing, with a stand-in."""

from __future__ import annotations

import io
import runpy
import sys
import tarfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from copiers import copiers

from conftest import REPOSITORY, SIZE

EXAMPLES = REPOSITORY / "docs/examples"


def stand_in_for_torch() -> types.ModuleType:
    """Enough of torch.utils.data for one process."""
    data = types.ModuleType("torch.utils.data")
    vars(data).update(
        IterableDataset=type("IterableDataset", (), {}),
        get_worker_info=lambda: None,
        DataLoader=lambda data_set, **_: data_set,
    )
    return data


def stand_in_for_webdataset() -> types.ModuleType:
    """Its stages are functions of iterators."""
    made = types.ModuleType("webdataset")

    def samples(shards: Iterator[dict[str, str]]) -> Iterator[dict[str, Any]]:
        for shard in shards:
            with tarfile.open(shard["url"]) as tar:
                for member in tar:
                    file = tar.extractfile(member)
                    assert file
                    yield {"__url__": shard["url"], "__key__": member.name, "txt": file.read()}

    def pipe(first: Iterator[Any], *stages: Any) -> Iterator[Any]:
        for stage in stages:
            first = stage(first)
        return first

    vars(made).update(
        DataPipeline=pipe,
        SimpleShardList=lambda paths: iter([{"url": path} for path in paths]),
        split_by_worker=lambda shards: shards,
        tarfile_to_samples=lambda: samples,
    )
    return made


def missing(name: str) -> bool:
    try:
        __import__(name)
    except ImportError:
        return True
    return False


def test_torch_data_loader_example_reads_local_copies(
    job: Path,
    data_set: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if missing("torch"):
        for name in ("torch", "torch.utils"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        monkeypatch.setitem(sys.modules, "torch.utils.data", stand_in_for_torch())
    example = runpy.run_path(str(EXAMPLES / "window_torch.py"))
    example["main"](8 * SIZE, list(map(str, data_set)))
    total = 20 * SIZE
    assert capsys.readouterr().out == f"0 {total}\n1 {total}\n"
    assert len(copiers(job)) == 1


def test_webdataset_example_reads_local_copies(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = [tmp_path / f"{number}.tar" for number in range(6)]
    for number, path in enumerate(shards):
        with tarfile.open(path, "w") as tar:
            member = tarfile.TarInfo(f"{number:04}.txt")
            member.size = 2
            tar.addfile(member, io.BytesIO(b"%02d" % number))
    if missing("webdataset"):
        monkeypatch.setitem(sys.modules, "webdataset", stand_in_for_webdataset())
    example = runpy.run_path(str(EXAMPLES / "window_webdataset.py"))
    samples = list(example["pipeline"]("64KiB", map(str, shards)))
    assert [sample["txt"] for sample in samples] == [b"%02d" % number for number in range(6)]
    assert all(job in Path(sample["__url__"]).parents for sample in samples)

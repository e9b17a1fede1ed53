"""A window for WebDataset: its list of shards becomes one of local copies.

python window_webdataset.py 400GiB /lustre/laion/*.tar
"""

import sys

import webdataset
from forestage_window import window


class Local:
    """A stage of a pipeline: takes {"url": path}, and yields it with the local path."""

    def __init__(self, room, ahead=2):
        self.room, self.ahead = room, ahead

    def __call__(self, shards):
        shards = list(shards)  # this worker's, in this epoch's order
        # keep=2: the stage behind this one may ask for a shard before it opens the last one.
        paths = window([shard["url"] for shard in shards], self.room, ahead=self.ahead, keep=2)
        for shard, path in zip(shards, paths):
            yield {**shard, "url": path}


def pipeline(room, paths):
    return webdataset.DataPipeline(
        webdataset.SimpleShardList(list(paths)),
        webdataset.split_by_worker,
        Local(room),
        webdataset.tarfile_to_samples(),
    )


if __name__ == "__main__":
    print(sum(1 for _ in pipeline(sys.argv[1], sys.argv[2:])))

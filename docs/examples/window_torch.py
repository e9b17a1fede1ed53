"""A window for torch's DataLoader: each worker reads its share of the shards from the local copies.

python window_torch.py 400GiB /lustre/imagenet/*.tar
"""

import sys

from forestage_window import window
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Shards(IterableDataset):
    """The bytes of each shard; a real one would yield its samples."""

    def __init__(self, paths, room):
        self.paths, self.room = list(paths), room
        # Keeps the copier, and the copies, from one epoch to the next, in which workers are new.
        self.keeper = window((), room)

    def __iter__(self):
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        for path in window(self.paths[first::step], self.room, ahead=2):
            with open(path, "rb") as file:
                yield file.read()


def main(room, paths):
    loader = DataLoader(Shards(paths, room), batch_size=None, num_workers=4)
    for epoch in range(2):
        print(epoch, sum(len(shard) for shard in loader))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

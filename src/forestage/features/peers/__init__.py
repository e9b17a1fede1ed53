"""Chunks of images between nodes: of one job, and of others where `peers.reach` says so.

    engine              the door: which nodes help with a copy
    peer_copy           how the bytes of such a copy come
    activation          whether this node asks others, and the sign of its service
    ring                which node reads which chunk, and which nodes talk to each other
    peer_table          what a copy knows of each node around it
    schedule            which chunk each worker fetches next, and from which node
    addresses           where the service of each node is found
    auth                proof that a peer is root on a node of this cluster; MACs
    auth_key            Slurm's AuthType and keys, where slurmd finds them
    proven_node         which other node has shown that it has the same key
    silent_nodes        which nodes did not answer a short while ago
    connection          one HTTP connection to a peer, bounded in time
    protocol            a session and a chunk, as the client asks for them
    client              the nodes of a job: sessions and connections for all threads of a copy
    node_list           the nodes that a copy may ask besides those of its job
    slurm_nodes         the nodes of the cluster, as slurmctld and slurm.conf have them
    known_copies        which of these may have a copy
    chunk_readers       who read which chunks of a copy from the source
    wrong_data_notices  what one of them read is wrong
    local_chunks        the chunks that this node can give
    sessions            what the service remembers of its clients
    listen_sockets      at which addresses the service is found
    server              the service itself, `forestage peer`
    upload_counts       what the service has uploaded
    upload_totals       the same, over its restarts; for metrics

A job's hooks load none of these, but its stager the engine.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forestage.config import Config
    from forestage.features.peers.client import PeerClient
    from forestage.paths import NodePaths


def find_peer_client(
    config: "Config",
    node_name: str,
    nodelist: str,
    key: str,
    places: "NodePaths | None" = None,
    is_speculative: bool = False,
    chunks: int | None = None,
) -> "PeerClient | None":
    """The nodes that a copy may ask, on a node where peers are on; None if there is no other.

    `nodelist` as Slurm writes it: n[1-4,7]. `is_speculative`: no job waits for it. Without
    `chunks`, those of the copy, nodes share it however little each would save. Raises PeerError and
    OSError where the key file cannot be used, the latter also where the list of nodes cannot be
    read.
    """
    # One name has neither: then nothing is loaded.
    others = "," in nodelist or "[" in nodelist or config.peers.reach == "cluster"
    if not (node_name and others):
        return None
    from forestage.features.peers import client

    return client.find_client_of_nodes(
        config, node_name, nodelist, key, places, is_speculative, chunks
    )

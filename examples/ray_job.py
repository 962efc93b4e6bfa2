"""Run a ropewalk command on nodes of a Ray cluster, with one torchrun on each node.

    ray job submit --address http://HEAD:8265 --working-dir . -- python ray_job.py --nodes 2 --gpus 8 extend recipe.yaml

What follows the options is the ropewalk command. Submit it again with --resume to continue a run. Every node needs
ropewalk. Ray copies the working folder to each node, so the recipe must name documents and the output folder by
absolute paths on a file system that all nodes share.
"""

import argparse
import socket
import subprocess
import sys

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


def rendezvous() -> str:
    """Return an address of this node with a free port."""
    with socket.socket() as free:
        free.bind(("", 0))
        return f"{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"


def torchrun(node: int, nodes: int, processes: int, address: str, command: list[str]) -> int:
    """Start the processes of this node, and return the exit status of their torchrun."""
    host, port = address.rsplit(":", 1)
    place = [f"--nnodes={nodes}", f"--node-rank={node}", f"--master-addr={host}", f"--master-port={port}"]
    launcher = [sys.executable, "-m", "torch.distributed.run", *place, f"--nproc-per-node={processes}"]
    return subprocess.run([*launcher, "-m", "ropewalk", *command]).returncode


def main() -> int:
    """Reserve the nodes, and return the worst exit status."""
    parser = argparse.ArgumentParser(description="Run a ropewalk command on nodes of a Ray cluster.")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--gpus", type=int, default=8, help="GPUs of each node, each with one process")
    parser.add_argument("--processes", type=int, help="processes on each node; only without GPUs")
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, help="ropewalk command, such as: extend recipe.yaml"
    )
    given = parser.parse_args()
    ray.init()
    # Ray shows a task only the GPUs that it reserved, so one task has all GPUs of its node.
    reserved = {"CPU": 1, "GPU": given.gpus} if given.gpus else {"CPU": 1}
    group = placement_group([reserved] * given.nodes, strategy="STRICT_SPREAD")
    ray.get(group.ready())

    def on(node: int, function, *arguments):
        here = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node)
        needs = {"num_cpus": 1, "num_gpus": given.gpus, "max_retries": 0, "scheduling_strategy": here}
        return ray.remote(function).options(**needs).remote(*arguments)

    address = ray.get(on(0, rendezvous))
    shared = (given.nodes, given.gpus or given.processes, address, given.command)
    return max(ray.get([on(node, torchrun, node, *shared) for node in range(given.nodes)]))


if __name__ == "__main__":
    sys.exit(main())

"""Nodes on one machine: each a Linux network namespace with processes, a host name and a /dev/shm of its own, joined by links of a given rate.

    node0 [ranks]--eth0 ==tbf==+                       eth0 sends at the link's rate; within a node lo is as fast as memory
    node1 [ranks]--eth0 ==tbf==+== bridge [switch]
    ...

Nothing here has a name on the machine: the namespaces are those of a process, and the links lie in them. Each process dies with the one that
started it, by the kernel's hand, and its namespaces with it. So nothing is left behind, after a SIGKILL of the tests too.
netem, a link's delay, is not in every kernel: `latency_ms` is refused where it is not.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

ROOT = Path(__file__).parents[2]
PORT = 29500
# What starting ranks, and their end, may take on a machine with more of them than cores.
START_S = 240.0
_TOOLS = ("ip", "tc", "unshare", "nsenter", "setpriv", "mount")
# An own process tree (its first process ends them all), host name, mounts and network. The first one waits until its input ends.
_NAMESPACES = ["--net", "--uts", "--pid", "--mount", "--ipc", "--fork", "--kill-child", "--mount-proc"]
_FIRST = """
hostname "$1"
mount -t sysfs sysfs /sys
mount -t tmpfs tmpfs /dev/shm
mount --bind "$2" /etc/hosts
echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6
# Every TCP header is as long as the others, and nothing is sent twice for an answer that is late (tests/cluster/crossing.py).
echo 0 > /proc/sys/net/ipv4/tcp_sack
echo 0 > /proc/sys/net/ipv4/tcp_early_retrans
ip link set lo up
echo ready
exec cat
"""


@functools.cache
def why_no_nodes() -> str:
    """Return why no nodes can be made here; empty if they can."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"no {', '.join(missing)} (Debian: apt install iproute2 util-linux)"
    if os.geteuid() != 0:
        return "not root: network namespaces and links cannot be made"
    try:
        with Cluster(2, rate_mbit=1000):
            return ""
    except (OSError, RuntimeError) as error:
        return str(error)


@dataclass(frozen=True)
class Node:
    """One node.

    Args:
        number: its rank among the nodes.
        name: its host name.
        address: of its eth0.
        first: the process whose end is the node's, as the machine numbers it.
    """

    number: int
    name: str
    address: str
    first: int

    def enter(self, command: Sequence[str]) -> list[str]:
        """Return the command line that runs a command on this node."""
        return ["nsenter", "--target", str(self.first), "--net", "--uts", "--pid", "--mount", "--ipc", "--", *command]


class Cluster:
    """Some nodes and the links between them. Use as a context manager; a class because it holds processes.

    Args:
        num_nodes: how many.
        rate_mbit: what each node's link sends, in Mbit/s.
        latency_ms: delay of each link, by netem; 0 for none.

    Raises:
        RuntimeError: a namespace, a link or its shape cannot be made, with what the tool said.
    """

    def __init__(self, num_nodes: int, *, rate_mbit: float, latency_ms: float = 0.0) -> None:
        self.nodes: list[Node] = []
        self._num_nodes, self._rate_mbit, self._latency_ms = num_nodes, rate_mbit, latency_ms
        self._stack = ExitStack()
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Cluster:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="nodes")))
            addresses = {f"node{i}": f"10.0.0.{i + 1}" for i in range(self._num_nodes)}
            hosts = folder / "hosts"
            hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{a} {name}\n" for name, a in addresses.items()))
            self._switch = self._first(stack, "switch", hosts)
            _switch_run(self._switch, "ip link add bridge type bridge forward_delay 0")
            _switch_run(self._switch, "ip link set bridge up")
            for i, (name, address) in enumerate(addresses.items()):
                self.nodes.append(Node(i, name, address, self._first(stack, name, hosts)))
            for node in self.nodes:
                self._connect(node)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        for process in self._started:
            process.wait()

    def _first(self, stack: ExitStack, name: str, hosts: Path) -> int:
        """Start the first process of new namespaces and return its number on the machine."""
        command = [
            "setpriv",
            "--pdeathsig",
            "KILL",
            "unshare",
            *_NAMESPACES,
            "sh",
            "-ec",
            _FIRST,
            "sh",
            name,
            str(hosts),
        ]
        started = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        stack.callback(_end, started)
        assert started.stdout is not None
        said = started.stdout.readline()
        if said != "ready\n":
            raise RuntimeError(f"no namespaces can be made: {(said + started.stdout.read()).strip()}")
        return _children(started)[0]

    def _connect(self, node: Node) -> None:
        port = f"port{node.number}"
        _switch_run(
            self._switch, f"ip link add {port} type veth peer name eth0 address {_mac(node.number)} netns {node.first}"
        )
        _switch_run(self._switch, f"ip link set {port} master bridge up")
        for command in (
            f"ip addr add {node.address}/24 dev eth0",
            "ip link set eth0 up",
            # Neighbours are known: no ARP is among the bytes that are counted.
            *(
                f"ip neigh replace 10.0.0.{i + 1} lladdr {_mac(i)} dev eth0 nud permanent"
                for i in range(self._num_nodes)
                if i != node.number
            ),
        ):
            _run(node.enter(command.split()))
        for shape in shape_commands(self._rate_mbit, self._latency_ms):
            _run(node.enter(shape))

    def start(
        self, node: Node, command: Sequence[str], *, log: Path, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a command on a node, in this repository; what it says goes to a file."""
        with log.open("ab") as output:
            self._started.append(self._popen(node.enter(command), output, environment or {}))
        return self._started[-1]

    def _popen(self, command: list[str], output: IO[bytes], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        inherited = {k: v for k, v in os.environ.items() if k not in _OF_THIS_PROCESS}
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env={**inherited, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )

    def kill(self, node: Node) -> None:
        """SIGKILL all processes of a node at once, as if it lost its power but not its link: its kernel closes its connections."""
        os.kill(node.first, signal.SIGKILL)

    def cut(self, node: Node) -> None:
        """Take a node's link down: nothing arrives, and nothing says so."""
        _switch_run(self._switch, f"ip link set port{node.number} down")


# What the tests' own conftest or launcher sets, and a node's login shell would not.
_OF_THIS_PROCESS = ("GLOO_SOCKET_IFNAME", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def torchrun(
    cluster: Cluster,
    script: Sequence[str],
    *,
    ranks_per_node: int,
    log: Path,
    environment: Mapping[str, str] | None = None,
) -> list[subprocess.Popen[bytes]]:
    """Start `torchrun --nnodes ... -m script` on each node; the rendezvous is on node 0. Logs: `log` with the node's name."""
    started = []
    for node in cluster.nodes:
        options = [
            f"--nnodes={len(cluster.nodes)}", f"--node-rank={node.number}", f"--nproc-per-node={ranks_per_node}",
            f"--master-addr={cluster.nodes[0].address}", f"--master-port={PORT}",
        ]  # fmt: skip
        command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", *options, "-m", *script]
        started.append(cluster.start(node, command, log=log.with_suffix(f".{node.name}"), environment=environment))
    return started


def srun(
    cluster: Cluster,
    script: Sequence[str],
    *,
    ranks_per_node: int,
    log: Path,
    environment: Mapping[str, str] | None = None,
) -> list[subprocess.Popen[bytes]]:
    """Start `python -m script` as `srun` would: each task with what SLURM tells it, and nothing of torch's. Logs: as `torchrun`."""
    num_nodes, names = len(cluster.nodes), f"node[0-{len(cluster.nodes) - 1}]"
    started = []
    for node in cluster.nodes:
        for local in range(ranks_per_node):
            slurm = {
                "SLURM_JOB_ID": "4711",
                "SLURM_JOB_NAME": "train",
                "SLURM_JOB_NODELIST": names,
                "SLURM_JOB_NUM_NODES": str(num_nodes),
                "SLURM_LOCALID": str(local),
                "SLURM_NNODES": str(num_nodes),
                "SLURM_NODEID": str(node.number),
                "SLURM_NODELIST": names,
                "SLURM_NPROCS": str(num_nodes * ranks_per_node),
                "SLURM_NTASKS": str(num_nodes * ranks_per_node),
                "SLURM_NTASKS_PER_NODE": str(ranks_per_node),
                "SLURM_PROCID": str(node.number * ranks_per_node + local),
                "SLURM_STEP_NODELIST": names,
                "SLURMD_NODENAME": node.name,
            }
            command = [sys.executable, "-W", "ignore", "-m", *script]
            own = log.with_suffix(f".{node.name}")
            started.append(cluster.start(node, command, log=own, environment={**(environment or {}), **slurm}))
    return started


def wait(started: Sequence[subprocess.Popen[bytes]], *, timeout_s: float) -> list[int]:
    """Return the exit codes of all processes, in their order.

    Raises:
        subprocess.TimeoutExpired: one of them has not ended.
    """
    until = time.monotonic() + timeout_s
    return [process.wait(max(0.0, until - time.monotonic())) for process in started]


def shape_commands(rate_mbit: float, latency_ms: float = 0.0) -> list[list[str]]:
    """Return the commands that give a node's link a rate, and a delay where it is not 0; to be run on the node."""
    # A bucket that a timer which comes late does not overflow; a queue that never drops, for TCP itself keeps little in it.
    burst = max(16384, int(rate_mbit * 1e6 / 8 * 0.002))
    commands = [f"tc qdisc replace dev eth0 root handle 1: tbf rate {rate_mbit:g}mbit burst {burst} limit 67108864"]
    if latency_ms:
        commands.append(f"tc qdisc replace dev eth0 parent 1: netem delay {latency_ms:g}ms")
    return [command.split() for command in commands]


def _mac(number: int) -> str:
    return f"02:00:00:00:00:{number + 1:02x}"


def _switch_run(switch: int, command: str) -> None:
    _run(["nsenter", "--target", str(switch), "--net", "--", *command.split()])


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()}")


def _end(process: subprocess.Popen[str]) -> None:
    """End the first process of namespaces, and so all that runs in them: `unshare` reaps it and ends too."""
    for first in _children(process):
        with suppress(ProcessLookupError):
            os.kill(first, signal.SIGKILL)
    if not _children(process):
        process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _children(process: subprocess.Popen[str]) -> list[int]:
    try:
        return [int(each) for each in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    except OSError:
        return []

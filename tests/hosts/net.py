"""Hosts on one machine: network namespaces behind a switch, each with its own address, name, /dev/shm, view of the folders and
wall clock, and a link that can be shaped and cut. Needs root, `ip`, `tc` and `unshare`; all of it is gone after `close`."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.warm.launched import clock_of

TOOLS = ("ip", "tc", "unshare", "mount", "umount", "hostname")
# Packets of a share, drawn by chance, go to a class so slow that it holds one and drops the rest: netem is not everywhere.
_LOSS = (
    "qdisc replace dev {port} root handle 1: htb default 10",
    "class add dev {port} parent 1: classid 1:10 htb rate 10gbit quantum 60000",
    "class add dev {port} parent 1: classid 1:20 htb rate 8bit quantum 1500",
    "qdisc add dev {port} parent 1:20 pfifo limit 1",
    "filter add dev {port} parent 1: protocol all bpf bytecode {program} classid 1:20",
)
_DRAW = "4,32 0 0 4294963256,37 1 0 {most},6 0 0 4294967295,6 0 0 0"  # a random number; above `most` it is no match
_DISK = "mount -t tmpfs -o size=150m none"
_ENTER = f'hostname "$1"; mount --bind "$2" /dev/shm; for f in $3; do {_DISK} "$f"; done; shift 3; exec "$@"'


def why_not() -> str:
    """Why there can be no hosts here; empty when there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"no {', '.join(missing)} here"
    probe = f"ma{os.getpid()}p"
    tried = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if tried.returncode:
        return f"ip netns add: {tried.stderr.strip()}"
    words = ["ip", "netns", "exec", probe, "unshare", "--mount", "--uts", "hostname", "probe"]
    tried = subprocess.run(words, capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", probe])
    return f"unshare: {tried.stderr.strip()}" if tried.returncode else ""


def _do(words: str, *more: str) -> None:
    done = subprocess.run([*words.split(), *more], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{words} {' '.join(more)}: {done.stderr.strip()}")


class Host:
    """One host. `skew_s`: what its wall clock is ahead; `delay_us`: what its link takes, each way."""

    def __init__(self, net: Net, name: str, number: int, skew_s: int, delay_us: int) -> None:
        self.name, self.address, self.skew_s = name, f"10.77.{net.number}.{number}", skew_s
        self.space, self._port, self._net = f"{net.tag}{name}", f"{net.tag}{number}", net
        self.shm = net.folder / f"{name}-shm"
        self.shm.mkdir()
        _do(f"mount -t tmpfs tmpfs {self.shm}")
        _do(f"ip netns add {self.space}")
        self._wire: subprocess.Popen[bytes] | None = None
        self._standing: dict[tuple[Path, ...], subprocess.Popen[bytes]] = {}
        if delay_us:
            words = [str(net.built("delay")), net.switch, self._port, self.space, "eth0", str(delay_us)]
            self._wire = subprocess.Popen(words, stdout=subprocess.PIPE)
            if self._wire.stdout is None or self._wire.stdout.readline() != b"there\n":  # it says so, or ends
                raise RuntimeError(f"{' '.join(words)}: ended with status {self._wire.wait(10)}")
        else:
            _do(f"ip link add {self._port} netns {net.switch} type veth peer name eth0 netns {self.space}")
        _do(f"ip -n {net.switch} link set {self._port} master br0 up")
        _do(f"ip -n {self.space} addr add {self.address}/24 dev eth0")
        _do(f"ip -n {self.space} link set lo up")
        _do(f"ip -n {self.space} link set eth0 up")

    def enter(self, hides: Sequence[Path] = ()) -> tuple[str, ...]:
        """Words before a command that make it one of this host. `hides`: folders that are empty, small disks here."""
        skew = ("env", *(f"{name}={value}" for name, value in self.clock().items())) if self.skew_s else ()
        words = ("ip", "netns", "exec", self.space, "unshare", "--mount", "--uts", "sh", "-ec", _ENTER, "sh", self.name)
        return (*words, str(self.shm), " ".join(map(str, hides)), *skew)

    def clock(self) -> dict[str, str]:
        """In the environment of its processes: what sets their clock."""
        if not self.skew_s:
            return {}
        if not (library := clock_of(self._net.folder)).exists():
            raise RuntimeError(f"host {self.name} has a clock of its own, which needs a C compiler (cc)")
        return {"LD_PRELOAD": str(library), "MA_SKEW_S": str(self.skew_s)}

    def standing(self, hides: Sequence[Path] = ()) -> int:
        """Pid of a process that is on this host and does nothing, so that one that is forked elsewhere can come to it. `hides`: see
        `enter`."""
        if (key := tuple(hides)) not in self._standing:
            words = [*self.enter(hides), "sh", "-c", "echo there; exec sleep infinity"]
            made = self._standing[key] = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
            if made.stdout is None or made.stdout.readline() != b"there\n":
                raise RuntimeError(f"{' '.join(words)}: ended with status {made.wait(10)}")
        return self._standing[key].pid

    def shape(self, rate: str, queue: str = "burst 512kb latency 100ms") -> None:
        """Both directions of its link, e.g. 200mbit. `queue`: what passes at once, and how long packets may wait before they are
        dropped."""
        bucket = f"tbf rate {rate} {queue}"
        _do(f"tc -n {self.space} qdisc replace dev eth0 root {bucket}")
        _do(f"tc -n {self._net.switch} qdisc replace dev {self._port} root {bucket}")

    def lose(self, share: float, *, hears: bool = True, says: bool = True) -> None:
        """This share of the packets that it hears, and of those that it says; until `mend`."""
        program = _DRAW.format(most=int(share * (2**32 - 1)))
        for space, port, wanted in ((self._net.switch, self._port, hears), (self.space, "eth0", says)):
            for line in _LOSS if wanted else ():
                words = [program if word == "{program}" else word.format(port=port) for word in line.split()]
                _do(f"tc -n {space}", *words)

    def move(self) -> None:
        """It gets another address, and keeps no connection."""
        self.address = f"10.77.{self._net.number}.{100 + len(self._net.hosts)}"
        _do(f"ip -n {self.space} addr flush dev eth0")
        _do(f"ip -n {self.space} addr add {self.address}/24 dev eth0")

    def cut(self) -> None:
        """Nothing passes its link; connections stay half open."""
        _do(f"ip -n {self._net.switch} link set {self._port} down")

    def mend(self) -> None:
        """The link is back, as fast as it can be."""
        for space, port in ((self._net.switch, self._port), (self.space, "eth0")):
            subprocess.run(["tc", "-n", space, "qdisc", "del", "dev", port, "root"], capture_output=True)
        _do(f"ip -n {self._net.switch} link set {self._port} up")

    def kill(self) -> None:
        """Every process of it, at once."""
        pids = subprocess.run(["ip", "netns", "pids", self.space], capture_output=True, text=True).stdout.split()
        for pid in pids:
            try:
                os.kill(int(pid), 9)
            except ProcessLookupError:
                continue

    def unplug(self) -> None:
        """Take processes of ours away: those that stand there, and a wire that is one."""
        for process in (*self._standing.values(), *([self._wire] if self._wire is not None else ())):
            process.kill()
            process.communicate()


class Net:
    """The switch, and who is on it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.number = folder, os.getpid() % 250
        self.tag = f"ma{os.getpid() % 100000}"
        self.switch = f"{self.tag}sw"
        self.hosts: list[Host] = []
        folder.mkdir(parents=True, exist_ok=True)
        _do(f"ip netns add {self.switch}")
        _do(f"ip -n {self.switch} link add br0 type bridge forward_delay 0 stp_state 0")
        _do(f"ip -n {self.switch} link set br0 up")

    def host(self, name: str, *, skew_s: int = 0, delay_us: int = 0) -> Host:
        """One more."""
        made = Host(self, name, len(self.hosts) + 1, skew_s, delay_us)
        self.hosts.append(made)
        return made

    def built(self, name: str) -> Path:
        """A C file beside this one, compiled once: `delay` is a wire that takes its time."""
        made = self.folder / name
        if not made.exists():
            source = Path(__file__).with_name(f"{name}.c")
            subprocess.run(["cc", "-O2", "-o", str(made), str(source)], check=True)
        return made

    def close(self) -> None:
        """Kill what runs in it and take it away."""
        for host in self.hosts:
            host.kill()
            host.unplug()
            subprocess.run(["ip", "netns", "del", host.space])
            subprocess.run(["umount", "--lazy", str(host.shm)])
        subprocess.run(["ip", "netns", "del", self.switch])

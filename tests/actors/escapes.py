"""Ways out of a confined process, each a piece of Python, and the world outside that would feel it.

Code finds `victim` (a process), `scratch` (a folder with a file `old`), `port` (TCP), `path` and `name` (datagram sockets), and
`call(NAME, ...)` for a system call by its number.
"""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

SECRET = "sesame-7f3a"
NUMBERS = {  # on x86_64, on aarch64
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138), "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438), "fcntl": (72, 25), "ptrace": (101, 117), "socketpair": (53, 199),
    "process_vm_writev": (311, 271), "sendmmsg": (307, 269), "io_uring_setup": (425, 425), "openat2": (437, 437),
    "openat": (257, 56),
    "open_by_handle_at": (304, 265), "mount": (165, 40), "unshare": (272, 97), "setns": (308, 268), "bpf": (321, 280),
    "perf_event_open": (298, 241), "add_key": (248, 217), "keyctl": (250, 219), "userfaultfd": (323, 282),
    "inotify_init1": (294, 26),
    "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180), "memfd_create": (319, 279),
    "clone": (56, 220), "clone3": (435, 435), "sethostname": (170, 161), "setpriority": (141, 140), "ioprio_set": (251, 30),
    "seccomp": (317, 277), "landlock_create_ruleset": (444, 444), "process_madvise": (440, 440), "kcmp": (312, 272),
    "clock_gettime": (228, 113), "prctl": (157, 167), "timer_create": (222, 107), "mlock": (149, 228), "mmap": (9, 222),
    "futex": (202, 98), "membarrier": (324, 283), "execveat": (322, 281), "sched_setaffinity": (203, 122), "flock": (73, 32),
    "getsid": (124, 156), "sched_getaffinity": (204, 123), "sendto": (44, 206), "madvise": (28, 233), "memfd_secret": (447, 447),
}  # fmt: skip

PREAMBLE = f"""
import array, ctypes, fcntl, os, resource, signal, socket, struct, subprocess, sys, threading, time
_libc = ctypes.CDLL(None, use_errno=True)
def call(name, *args):
    found = _libc.syscall(ctypes.c_long({NUMBERS!r}[name][{int(platform.machine() == "aarch64")}]), *(
        one if isinstance(one, bytes) or one is None else ctypes.c_long(one) for one in args))
    if found < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found
def pair(kind=socket.SOCK_STREAM):
    return socket.socketpair(socket.AF_UNIX, kind)
def owned(cmd, arg, flag=0x2000):
    r, w = os.pipe()
    fcntl.fcntl(r, cmd, arg)
    fcntl.fcntl(r, 10, 9)
    fcntl.fcntl(r, fcntl.F_SETFL, flag)
    os.write(w, b"x")
"""

# Those whose effect can be felt at once where nothing holds them: a test runs them unconfined too.
FELT = {
    "owner of a pipe": "owned(8, victim)",
    "owner of a pipe: a group": "owned(8, -os.getpgid(victim))",
    "owner of a pipe by F_SETOWN_EX": "owned(15, struct.pack('ii', 1, victim))",
    "owner with garbage in the upper half": (
        "r, w = os.pipe(); call('fcntl', r, (1 << 32) | 8, victim); call('fcntl', r, (1 << 32) | 10, 9); "
        "fcntl.fcntl(r, 4, 0x2000); os.write(w, b'x')"
    ),
    "owner of a pair by ioctl": (
        "a, b = pair(); fcntl.ioctl(a, 0x8901, struct.pack('i', victim)); fcntl.fcntl(a, 10, 9); "
        "fcntl.ioctl(a, 0x5452, struct.pack('i', 1)); b.send(b'x')"
    ),
    "owner of a pair by SIOCSPGRP": (
        "a, b = pair(); fcntl.ioctl(a, 0x8902, struct.pack('i', victim)); fcntl.fcntl(a, 10, 9); "
        "fcntl.fcntl(a, 4, 0x2000); b.send(b'x')"
    ),
    "change of a folder": (
        "f = os.open(scratch, 0); fcntl.fcntl(f, 8, victim); fcntl.fcntl(f, 10, 9); fcntl.fcntl(f, 1026, 0x80000004 - (1 << 32)); "
        "open(scratch + '/more', 'w')"
    ),
    "kill": "os.kill(victim, 9)",
    "kill of a group": "os.killpg(os.getpgid(victim), 9)",
    "stop": "os.kill(victim, signal.SIGSTOP)",
    "tgkill": "call('tgkill', victim, victim, 9)",
    "tkill": "call('tkill', victim, 9)",
    "kill with garbage in the upper half": "call('kill', (1 << 40) | victim, 9)",
    "kill by a queued signal": "call('rt_sigqueueinfo', victim, 9, struct.pack('iiiiii', 9, 0, -1, 0, 0, 0) + bytes(104))",
    "kill by a handle": "call('pidfd_send_signal', call('pidfd_open', victim, 0), 9, 0, 0)",
    "limits of another": "resource.prlimit(victim, resource.RLIMIT_NOFILE, (7, 7))",
    "priority of another": "call('setpriority', 0, victim, 11)",
    "datagram to a name": "a, b = pair(socket.SOCK_DGRAM); a.sendto(b'hi', chr(0) + name)",
    "datagram to a path": "a, b = pair(socket.SOCK_DGRAM); a.sendto(b'hi', path)",
    "message with a descriptor": (
        "a, b = pair(socket.SOCK_DGRAM); a.sendmsg([b'hi'], [(1, 1, array.array('i', [a.fileno()]).tobytes())], 0, path)"
    ),
    "datagram of an own socket": "socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b'hi', path)",
    "datagram from a pair that is connected": "a, b = pair(socket.SOCK_DGRAM); a.connect(path); a.send(b'hi')",
    "connection by TCP": "socket.create_connection(('127.0.0.1', port)).send(b'hi')",
    "datagram by UDP": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'hi', ('127.0.0.1', port))",
    "a new file": "open(scratch + '/new', 'w')",
    "a new file by openat2": "call('openat2', -100, (scratch + '/new').encode(), struct.pack('QQQ', 0o101, 0o600, 0), 24)",
    "a new file by number": "call('openat', -100, (scratch + '/new').encode(), 0o101, 0o600)",
    "a new file with garbage in the upper half": "call('openat', -100, (scratch + '/new').encode(), (1 << 35) | 0o101, 0o600)",
    "an old file": "open(scratch + '/old', 'r+').write('x')",
    "an old file emptied at opening": "os.open(scratch + '/old', os.O_RDONLY | os.O_TRUNC)",
    "the end of a file": "open(scratch + '/old', 'a').write('x')",
    "unlink": "os.unlink(scratch + '/old')",
    "rename": "os.rename(scratch + '/old', scratch + '/other')",
    "link": "os.link(scratch + '/old', scratch + '/other')",
    "symlink": "os.symlink('/', scratch + '/other')",
    "a folder": "os.mkdir(scratch + '/folder')",
    "chmod": "os.chmod(scratch + '/old', 0)",
    "truncate": "os.truncate(scratch + '/old', 0)",
    "times": "os.utime(scratch + '/old', (1, 1))",
    "a pipe with a name": "os.mkfifo(scratch + '/pipe')",
    "a socket with a name": "socket.socket(socket.AF_UNIX).bind(scratch + '/socket')",
    "fork": "os.fork() or open(scratch + '/new', 'w'); time.sleep(0.3)",
    "a shell": "subprocess.run(['sh', '-c', 'echo > ' + scratch + '/new'])",
    "exec": "os.execv('/bin/sh', ['sh', '-c', 'echo > ' + scratch + '/new'])",
    "posix_spawn": "os.waitpid(os.posix_spawn('/bin/sh', ['sh', '-c', 'echo > ' + scratch + '/new'], {}), 0)",
    "a file read": "print(open(scratch + '/old').read())",
    "a file read by number": "f = call('openat', -100, (scratch + '/old').encode(), 0); print(os.read(f, 100))",
    "its own variables": "print(os.environ, open('/proc/self/environ').read())",
    "variables": "print(os.environ)",
}  # fmt: skip

# Refused with an error, or without effect; nothing outside would tell.
REFUSED = {
    "processors of another": "call('sched_setaffinity', victim, 8, struct.pack('Q', 1 << min(os.sched_getaffinity(victim))))",
    "word out of band": "a, b = pair(); fcntl.fcntl(b, 8, victim); fcntl.fcntl(b, 10, 9); a.send(b'x', socket.MSG_OOB)",
    "ptrace": "call('ptrace', 16, victim, 0, 0); time.sleep(0.3)",
    "the variables of its parent": "print(open('/proc/%d/environ' % os.getppid()).read())",
    "shadow": "open('/etc/shadow').read()",
    "passwords": "open('/etc/passwd').read()",
    "memory of another": "open('/proc/%d/mem' % victim, 'rb').read(1)",
    "descriptors of another": "os.listdir('/proc/%d/fd' % victim)",
    "links of another": "os.readlink('/proc/%d/cwd' % victim)",
    "writing into another": "call('process_vm_writev', victim, 0, 0, 0, 0, 0)",
    "a descriptor of another": "call('pidfd_getfd', call('pidfd_open', victim, 0), 0, 0)",
    "advice for another": "call('process_madvise', call('pidfd_open', victim, 0), 0, 0, 0, 0)",
    "comparison with another": "call('kcmp', os.getpid(), victim, 0, 0, 0)",
    "session of another": "call('getsid', victim)",
    "processors of another, read": "call('sched_getaffinity', victim, 128, ctypes.create_string_buffer(128).raw)",
    "clock of another": "call('clock_gettime', (~victim << 3) | 2, bytes(16))",
    "io_uring": "call('io_uring_setup', 8, bytes(120))",
    "many messages": "a, b = pair(); call('sendmmsg', a.fileno(), bytes(64), 1, 0)",
    "a pair with garbage in the upper half": "call('socketpair', (1 << 32) | 1, 2, 0, bytes(8))",
    "a pair of packets": "pair(socket.SOCK_SEQPACKET)",
    "an address on a stream": "a, b = pair(); call('sendto', a.fileno(), b'x', 1, 0, struct.pack('H', 1) + b'/x', 4)",
    "netlink": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "raw": "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
    "listening": "s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen()",
    "file by handle": "call('open_by_handle_at', -100, bytes(16), 0)",
    "unnamed file": "os.open(scratch, os.O_TMPFILE | os.O_RDWR)",
    "attribute": "os.setxattr(scratch + '/old', 'user.x', b'y')",
    "owner": "os.chown(scratch + '/old', 1, 1)",
    "device": "os.mknod(scratch + '/null', 0o20666, os.makedev(1, 3))",
    "mount": "call('mount', b'none', scratch.encode(), b'tmpfs', 0, None)",
    "chroot": "os.chroot(scratch)",
    "namespaces": "call('unshare', 0x10000000)",
    "namespace of another": "call('setns', call('pidfd_open', victim, 0), 0x40000000)",
    "bpf": "call('bpf', 0, bytes(64), 64)",
    "perf": "call('perf_event_open', bytes(128), victim, -1, -1, 0)",
    "keys": "call('add_key', b'user', b'k', b'v', 1, -3)",
    "keyctl": "call('keyctl', 0, -3, 1)",
    "userfaultfd": "call('userfaultfd', 1)",
    "inotify": "call('inotify_init1', 0)",
    "shared memory": "call('shmget', 0x7a7a, 4096, 0o1600)",
    "message queue": "call('msgget', 0x7a7a, 0o1600)",
    "semaphores": "call('semget', 0x7a7a, 1, 0o1600)",
    "posix queue": "call('mq_open', b'zz', 0o102, 0o600, None)",
    "memory as a file": "call('memfd_create', b'x', 0)",
    "secret memory": "call('memfd_secret', 0)",
    "exec of a descriptor": "call('execveat', 1, b'', None, None, 0x1000)",
    "clone": "call('clone', 17, 0, 0, 0, 0) or os._exit(0)",
    "clone3": "call('clone3', struct.pack('QQQQQQQQ', 0, 0, 0, 0, 17, 0, 0, 0), 64) or os._exit(0)",
    "name of the host": "call('sethostname', b'zz', 2)",
    "user": "os.setuid(os.getuid() + 1)",
    "session": "os.setsid()",
    "group of processes": "os.setpgid(0, 0)",
    "more memory": "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "another filter": "call('seccomp', 1, 0, bytes(16))",
    "another ruleset": "call('landlock_create_ruleset', bytes(8), 8, 0)",
    "capabilities": "call('prctl', 47, 2, 21, 0, 0)",
    "dumpable": "call('prctl', 4, 1, 0, 0, 0)",
    "lease": "f = os.open(sys.executable, 0); fcntl.fcntl(f, 1024, 0)",
    "lock": "f = os.open(sys.prefix, 0); call('flock', f, 2)",
    "lock of a range": "f = os.open(sys.executable, 0); fcntl.lockf(f, fcntl.LOCK_SH)",
    "seals": "r, w = os.pipe(); fcntl.fcntl(r, 1033, 1)",
    "size of a pipe": "r, w = os.pipe(); fcntl.fcntl(r, 1031, 1 << 20)",
    "queue of notifications": "os.pipe2(0x80)",
    "typing into the terminal": "fcntl.ioctl(0, 0x5412, b'x')",
    "timer": "call('timer_create', 1, struct.pack('qiiii', 0, 9, 4, victim, 0) + bytes(48), bytes(8))",
    "locked memory": "call('mlock', 0x10000, 4096)",
    "huge pages": "call('mmap', 0, 1 << 21, 3, 0x40022, -1, 0)",
    "borrowed priority": "call('futex', ctypes.addressof(ctypes.c_int()), 6, 0, 0, 0, 0)",
    "barrier for all": "call('membarrier', 1, 0, 0)",
    "pages poisoned": "call('madvise', 0x10000, 4096, 100)",
    "priority of input and output": "call('ioprio_set', 1, victim, 0x4000)",
}  # fmt: skip

# Other interfaces to the same calls: the process ends by it, or is refused.
OF_X86 = {
    "x32": "call.__globals__['_libc'].syscall(ctypes.c_long(0x40000000 | 62), ctypes.c_long(victim), ctypes.c_long(9))",
    "32 bits": (
        "import mmap; m = mmap.mmap(-1, 4096, prot=7); "
        "m.write(bytes.fromhex('53b825000000') + b'\\xbb' + struct.pack('I', victim) + bytes.fromhex('b909000000cd805bc3')); "
        "ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(m)))()"
    ),
}  # fmt: skip
X86 = OF_X86 if platform.machine() == "x86_64" else {}


class World:
    """What stands outside, and whether anything happened to it."""

    def __init__(self, folder: Path) -> None:
        self.scratch = folder / "scratch"
        self.scratch.mkdir()
        (self.scratch / "old").write_text(SECRET)
        self._stream, self._datagrams = socket.socket(), [socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2)]
        self._stream.bind(("127.0.0.1", 0))
        self._stream.listen()
        self.port = self._stream.getsockname()[1]
        self._udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._udp.bind(("127.0.0.1", self.port))
        self.path, self.name = str(folder / "socket"), f"escapes-{os.getpid()}-{id(self)}"
        self._datagrams[0].bind(self.path)
        self._datagrams[1].bind("\0" + self.name)
        for one in (self._stream, self._udp, *self._datagrams):
            one.setblocking(False)
        self.victim = subprocess.Popen(["sleep", "600"], start_new_session=True)
        self._looked = self._look()

    def told(self, code: str) -> str:
        """The code with what it may aim at."""
        told = {"victim": self.victim.pid, "scratch": str(self.scratch), "port": self.port, "path": self.path, "name": self.name}
        return "".join(f"{key} = {value!r}\n" for key, value in told.items()) + PREAMBLE + code

    def _look(self) -> list[object]:
        seen: list[object] = [socket.gethostname()]
        for path in [self.scratch, *sorted(self.scratch.iterdir())]:
            found = path.lstat()
            seen.append((path.name, found.st_mode, found.st_uid, found.st_size, found.st_mtime_ns, found.st_nlink))
        victim = psutil.Process(self.victim.pid)
        seen += [victim.nice(), victim.cpu_affinity(), victim.rlimit(psutil.RLIMIT_NOFILE)]
        return seen

    def felt(self, said: str) -> str:
        """What happened outside, or was told from there; empty: nothing."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return f"the victim ended with {self.victim.wait(0.02)}"
        if (status := psutil.Process(self.victim.pid).status()) not in (psutil.STATUS_SLEEPING, psutil.STATUS_RUNNING):
            return f"the victim is {status}"
        for one in (self._udp, *self._datagrams):
            with contextlib.suppress(BlockingIOError):
                return f"{one} got {one.recv(9)!r}"
        with contextlib.suppress(BlockingIOError):
            caller, _ = self._stream.accept()
            caller.close()
            return "somebody called by TCP"
        if SECRET in said:
            return f"it was told {SECRET}"
        return "" if (now := self._look()) == self._looked else f"{self._looked} became {now}"

    def close(self) -> None:
        self.victim.send_signal(signal.SIGCONT)
        self.victim.kill()
        self.victim.wait()
        for one in (self._stream, self._udp, *self._datagrams):
            one.close()


@contextlib.contextmanager
def world(folder: Path) -> Iterator[World]:
    found = World(folder)
    try:
        yield found
    finally:
        found.close()


def unconfined(code: str) -> str:
    """What it says when nothing holds it."""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, start_new_session=True, env=os.environ)
    return (ran.stdout + ran.stderr).decode(errors="replace")

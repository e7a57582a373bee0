"""Which system calls confined code may make, and with which arguments, by machine: one list, compiled for the kernel (seccomp).

Always true: what is not listed is refused; an argument is compared in all its 64 bits; nothing listed here names a process other
than the caller, an address of a socket, a signal's receiver, or a file to be written. Standard library only: the sandbox's own
process imports it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from typing import NamedTuple

ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000  # what seccomp does
REFUSE = ERRNO | errno.EPERM
_LOAD, _EQUAL, _AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06  # its instructions
_NUMBER_AT, _ARCH_AT, _ARGUMENTS_AT = 0, 4, 16  # of struct seccomp_data; both machines are little-endian
_X32 = 0x40000000  # from here on numbers of x86-64's second interface, which reach the same calls
OWN = -1
"""In a rule: the id of the confined process."""

MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Machine, as `platform.machine()` says it -> the kernel's number of its interface. Another one (32 bits) ends the process."""

# Name: (number on x86_64, on aarch64); -1: not there.
CALLS: dict[str, tuple[int, int]] = {
    # Most frequent first: the kernel goes through the list from the top.
    "read": (0, 63), "write": (1, 64), "futex": (202, 98), "mmap": (9, 222), "munmap": (11, 215), "close": (3, 57),
    "lseek": (8, 62), "newfstatat": (262, 79), "openat": (257, 56), "fstat": (5, 80), "brk": (12, 214), "mprotect": (10, 226),
    "mremap": (25, 216), "madvise": (28, 233), "pread64": (17, 67), "readv": (19, 65), "writev": (20, 66), "ioctl": (16, 29),
    "fcntl": (72, 25), "getdents64": (217, 61), "open": (2, -1), "stat": (4, -1), "lstat": (6, -1), "statx": (332, 291),
    "access": (21, -1), "faccessat": (269, 48), "faccessat2": (439, 439), "readlink": (89, -1), "readlinkat": (267, 78),
    "getcwd": (79, 17), "dup": (32, 23), "dup2": (33, -1), "dup3": (292, 24), "pipe": (22, -1), "pipe2": (293, 59),
    # Waiting.
    "poll": (7, -1), "ppoll": (271, 73), "select": (23, -1), "pselect6": (270, 72), "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21), "epoll_wait": (232, -1), "epoll_pwait": (281, 22), "eventfd2": (290, 19), "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115), "sched_yield": (24, 124), "alarm": (37, -1), "setitimer": (38, 103),
    "restart_syscall": (219, 128),
    # A pair of connected sockets, as asyncio has one to wake itself. No other socket can be made, and none be addressed.
    "socketpair": (53, 199), "sendto": (44, 206), "recvfrom": (45, 207),
    # Signals: handlers, and to itself.
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "rt_sigtimedwait": (128, 137),
    "sigaltstack": (131, 132), "kill": (62, 129), "tgkill": (234, 131),
    # Threads of its own, and its end.
    "clone": (56, 220), "set_tid_address": (218, 96), "set_robust_list": (273, 99), "rseq": (334, 293), "membarrier": (324, 283),
    "prctl": (157, 167), "exit": (60, 93), "exit_group": (231, 94),
    # What it is, and what time.
    "getpid": (39, 172), "gettid": (186, 178), "getppid": (110, 173), "getpgrp": (111, -1), "getpgid": (121, 155),
    "getsid": (124, 156), "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177),
    "uname": (63, 160), "times": (100, 153), "sysinfo": (99, 179), "getrusage": (98, 165), "getrlimit": (97, 163),
    "prlimit64": (302, 261), "sched_getaffinity": (204, 123), "gettimeofday": (96, 169), "clock_gettime": (228, 113),
    "clock_getres": (229, 114), "getrandom": (318, 278),
}  # fmt: skip
UNKNOWN = {"clone3": (435, 435)}
"""Answered as by a kernel that does not have them: the C library then asks by `clone`, whose flags can be seen."""


class Arg(NamedTuple):
    """A condition on one argument: all its bits within `mask` make one of `values`."""

    place: int
    values: tuple[int, ...]
    mask: int = (1 << 64) - 1


def _is(index: int, *values: int) -> Arg:
    return Arg(index, values)


def _only(index: int, bits: int, value: int = 0) -> Arg:
    """The argument is `value` and any of `bits`."""
    return Arg(index, (value,), ~bits & (1 << 64) - 1)


_THREAD = 0x3D0F00  # flags of a thread: memory, files, handlers shared, of this process
_CLONE_DETACHED = 0x400000  # means nothing; musl sets it
_SIZES = 0o740000  # large files, direct, folders only, no link: the machines differ in which bit is which
_OPENS = os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY | os.O_PATH | os.O_NOATIME | _SIZES  # for reading: O_RDONLY is no bit
_FUTEX = 0x80 | 0x100  # private; by the wall clock
_CLOCKS = range(12)  # beyond are clocks of other processes and of devices

RULES: dict[str, tuple[tuple[Arg, ...], ...]] = {
    # Not set: who gets a descriptor's signals and which (F_SETOWN, F_SETSIG, O_ASYNC), leases, watches, locks, seals.
    "fcntl": (
        (_is(1, fcntl.F_DUPFD, fcntl.F_DUPFD_CLOEXEC, fcntl.F_GETFD, fcntl.F_SETFD, fcntl.F_GETFL),),
        (_is(1, fcntl.F_SETFL), _only(2, os.O_NONBLOCK | os.O_APPEND | os.O_RDWR | os.O_WRONLY | 0o500000)),
    ),
    # TCGETS and TIOCGWINSZ of a terminal, bytes to be read, not to wait, close at exec. Nothing typed into one, no owner.
    "ioctl": ((_is(1, 0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451),),),
    "openat": ((_only(2, _OPENS),),),
    "open": ((_only(1, _OPENS),),),
    "pipe2": ((_only(1, os.O_NONBLOCK | os.O_CLOEXEC),),),  # no queue of the kernel's own messages
    "mmap": ((Arg(3, (0,), 0x40000),),),  # no huge pages out of the host's store
    "madvise": ((_is(2, *range(5), 8, *range(10, 12), *range(14, 18)),),),
    "futex": ((Arg(1, (0, 1, 3, 4, 5, 9, 10), ~_FUTEX & (1 << 64) - 1),),),  # no lending of priorities
    "membarrier": ((_is(0, 0, 8, 16),),),  # among its own threads
    "socketpair": ((_is(0, 1), _only(1, 0x80800, 1), _is(2, 0)),),  # AF_UNIX, a stream
    "sendto": ((_only(3, 0x4040), _is(4, 0), _is(5, 0)),),  # to its other end: no address, nothing out of band
    "recvfrom": ((_only(3, 0x142),),),
    "kill": ((_is(0, OWN),),),
    "tgkill": ((_is(0, OWN),),),
    "clone": ((_only(0, _CLONE_DETACHED, _THREAD),),),
    "prctl": ((_is(0, 15, 16),),),  # a thread's name
    "prlimit64": ((_is(0, 0),), (_is(0, OWN),)),
    "sched_getaffinity": ((_is(0, 0),), (_is(0, OWN),)),
    "getpgid": ((_is(0, 0),),),
    "getsid": ((_is(0, 0),),),
    "clock_gettime": ((_is(0, *_CLOCKS),),),
    "clock_getres": ((_is(0, *_CLOCKS),),),
    "clock_nanosleep": ((_is(0, *_CLOCKS),),),
}
"""Conditions of the calls that have some: alternatives, each a list of conditions that must all hold."""
ANSWERS = {"openat": ERRNO | errno.EROFS, "open": ERRNO | errno.EROFS}
"""What is said to a call that breaks its rule, where it is not EPERM."""

Instruction = tuple[int, int, int, int]


def call_filter(machine: str, pid: int) -> bytes:
    """The program that judges each system call of process `pid`."""
    column = list(MACHINES).index(machine)
    program: list[Instruction] = [
        (_LOAD, 0, 0, _ARCH_AT), (_EQUAL, 1, 0, MACHINES[machine]), (_RETURN, 0, 0, KILL),
        (_LOAD, 0, 0, _NUMBER_AT), (_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, KILL),
    ]  # fmt: skip
    for name, numbers in (CALLS | UNKNOWN).items():
        if numbers[column] < 0:
            continue
        if name in UNKNOWN:
            block: list[Instruction] = [(_RETURN, 0, 0, ERRNO | errno.ENOSYS)]
        else:
            block = _judged(RULES.get(name, ((),)), ANSWERS.get(name, REFUSE), pid)
        program += [(_EQUAL, 0, len(block), numbers[column]), *block]
    program.append((_RETURN, 0, 0, REFUSE))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _judged(alternatives: tuple[tuple[Arg, ...], ...], otherwise: int, pid: int) -> list[Instruction]:
    """Of a call whose number fits: allowed when all conditions of one alternative hold. A condition that fails jumps behind its
    alternative, so each ends with ALLOW and what follows is the next one."""
    block: list[Instruction] = []
    for conditions in alternatives:
        tests: list[Instruction] = []
        for one in reversed(conditions):
            tests = _test(one, pid, len(tests) + 1) + tests
        block += [*tests, (_RETURN, 0, 0, ALLOW)]
    return block if () in alternatives else [*block, (_RETURN, 0, 0, otherwise)]


def _test(one: Arg, pid: int, rest: int) -> list[Instruction]:
    """Goes on behind itself when the condition holds, else `rest` instructions further. The upper half first."""
    values = [pid if value == OWN else value for value in one.values]
    assert all(0 <= value < 1 << 32 for value in values), "an upper half other than 0 would need a test of each value's own"
    low_mask, high_mask = one.mask & 0xFFFFFFFF, one.mask >> 32
    at = _ARGUMENTS_AT + 8 * one.place
    low: list[Instruction] = [(_LOAD, 0, 0, at)]
    if low_mask != 0xFFFFFFFF:
        low.append((_AND, 0, 0, low_mask))
    for left, value in zip(range(len(values) - 1, -1, -1), values, strict=True):
        low.append((_EQUAL, left, 0 if left else rest, value))
    if not high_mask:
        return low
    high: list[Instruction] = [(_LOAD, 0, 0, at + 4)]
    if high_mask != 0xFFFFFFFF:
        high.append((_AND, 0, 0, high_mask))
    return [*high, (_EQUAL, 0, len(low) + rest, 0), *low]

"""The list of system calls, on both machines: the program that the kernel is given, run by an interpreter of its instructions."""

from __future__ import annotations

import fcntl
import os
import struct

import pytest

from actors.runtime.syscalls import ALLOW, CALLS, KILL, MACHINES, RULES, call_filter
from tests.actors.escapes import NUMBERS

PID = 77
HIGH = 1 << 32
NULL = 0


def judged(machine: str, number: int, *args: int, arch: int | None = None) -> int:
    """What the kernel would do. Of classic BPF the instructions that a filter has: load, and, jumps, return."""
    data = struct.pack("=iIQ6Q", number, MACHINES[machine] if arch is None else arch, 0, *(*args, *[0] * (6 - len(args))))
    program = [struct.unpack("=HBBI", step) for step in struct.iter_unpack("8s", call_filter(machine, PID)) for step in step]
    value, at = 0, 0
    while True:
        what, yes, no, operand = program[at]
        at += 1
        match what:
            case 0x20:
                (value,) = struct.unpack_from("=I", data, operand)
            case 0x54:
                value &= operand
            case 0x15:
                at += yes if value == operand else no
            case 0x35:
                at += yes if value >= operand else no
            case 0x06:
                return operand
            case _:
                raise AssertionError(f"instruction {what:#x}")


# Of each call that has a rule: arguments that go through, and those that do not. Each of the second differs in one thing.
WANTED: dict[str, tuple[list[tuple[int, ...]], list[tuple[int, ...]]]] = {
    "fcntl": (
        [(3, fcntl.F_DUPFD, 5), (3, fcntl.F_DUPFD_CLOEXEC, 5), (3, fcntl.F_GETFD), (3, fcntl.F_SETFD, 1), (3, fcntl.F_GETFL),
         (3, fcntl.F_SETFL, os.O_NONBLOCK), (3, fcntl.F_SETFL, os.O_RDWR | os.O_APPEND)],
        [(3, fcntl.F_SETFL, os.O_ASYNC), (3, fcntl.F_SETFL, HIGH), (3, HIGH | fcntl.F_GETFD), (3, 1 << 31, 1),
         *((3, cmd, 1) for cmd in (*range(5, 18), 36, 37, 38, 1024, 1025, 1026, 1031, 1032, 1033, 1034, 1036, 1038))],
    ),
    "ioctl": (
        [(1, request, 9) for request in (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)],
        [(1, request, 9) for request in (0x5402, 0x5412, 0x540E, 0x5410, 0x5452, 0x8901, 0x8902, 0x40049409, HIGH | 0x5421)],
    ),
    "openat": (
        [(3, 9, flags) for flags in (0, os.O_CLOEXEC | os.O_NONBLOCK, os.O_PATH, 0o740000)],
        [(3, 9, flags) for flags in (1, 2, 3, os.O_CREAT, os.O_TRUNC, os.O_APPEND, os.O_ASYNC, 0o20000000, HIGH)],
    ),
    "open": ([(9, 0), (9, os.O_CLOEXEC)], [(9, flags) for flags in (1, 2, 3, os.O_CREAT, os.O_TRUNC, os.O_ASYNC, 1 << 22, HIGH)]),
    "pipe2": ([(9, 0), (9, os.O_CLOEXEC | os.O_NONBLOCK)], [(9, 0x80), (9, HIGH)]),
    "mmap": ([(0, 4096, 3, 0x22), (0, 4096, 5, 2, 3, 0)], [(0, 4096, 3, 0x40022)]),
    "madvise": ([(0, 1, advice) for advice in (0, 4, 8, 14)], [(0, 1, advice) for advice in (9, 12, 18, 22, 100, 101, HIGH | 4)]),
    "futex": ([(9, op) for op in (0, 1, 128, 129, 9 | 384, 10 | 128)], [(9, op) for op in (2, 6, 7, 8, 11, 12, 13, 6 | 128, HIGH)]),
    "membarrier": ([(0,), (8,), (16,)], [(1,), (2,), (4,), (32,), (64,), (HIGH | 8,)]),
    "socketpair": (
        [(1, 1, 0, 9), (1, 1 | 0x80800, 0, 9)],
        [(1, 2, 0, 9), (1, 3, 0, 9), (1, 5, 0, 9), (2, 1, 0, 9), (1, 1, 1, 9), (HIGH | 1, 1, 0, 9), (1, HIGH | 1, 0, 9)],
    ),
    "sendto": (
        [(3, 9, 1, 0, NULL, 0), (3, 9, 1, 0x4040, NULL, 0)],
        [(3, 9, 1, 0, 9, 0), (3, 9, 1, 0, HIGH, 0), (3, 9, 1, 0, NULL, 16), (3, 9, 1, 1, NULL, 0), (3, 9, 1, 0x20000000, NULL, 0)],
    ),
    "recvfrom": ([(3, 9, 1, 0), (3, 9, 1, 0x142)], [(3, 9, 1, 1), (3, 9, 1, 0x2000), (3, 9, 1, HIGH)]),
    "kill": ([(PID, 9)], [(0, 9), (1, 9), (PID + 1, 9), ((1 << 64) - 1, 9), ((1 << 64) - PID, 9), (HIGH | PID, 9)]),
    "tgkill": ([(PID, 78, 9)], [(1, 1, 9), (0, 78, 9), ((1 << 64) - 1, 78, 9), (HIGH | PID, 78, 9)]),
    "clone": (
        [(0x3D0F00, 9), (0x7D0F00, 9)],
        [(17,), (0,), (0x4111,), (0x3D0F00 & ~0x10000,), (0x3D0F00 | 0x10000000,), (0x3D0F00 | 0x20000000,), (HIGH | 0x3D0F00,)],
    ),
    "prctl": ([(15, 9), (16, 9)], [(option, 1) for option in (1, 4, 22, 24, 28, 35, 36, 38, 47, 59, 0x59616D61, HIGH | 15)]),
    "prlimit64": ([(0, 7, 9, 9), (PID, 7, 9, 9)], [(1, 7, 9, 9), (PID + 1, 7, 0, 9), (HIGH, 7, 9, 9)]),
    "sched_getaffinity": ([(0, 8, 9), (PID, 8, 9)], [(1, 8, 9), (HIGH, 8, 9)]),
    "getpgid": ([(0,)], [(1,), (HIGH,)]),
    "getsid": ([(0,)], [(1,), (HIGH,)]),
    "clock_gettime": (
        [(clock, 9) for clock in range(12)], [(12, 9), ((1 << 64) - 6, 9), (~(PID << 3) & 0xFFFFFFFF, 9), (HIGH | 1, 9)]
    ),
    "clock_getres": ([(1, 9)], [(12, 9), ((1 << 64) - 6, 9), (HIGH, 9)]),
    "clock_nanosleep": ([(1, 0, 9)], [(12, 0, 9), ((1 << 64) - 6, 0, 9), (HIGH, 0, 9)]),
}  # fmt: skip
FREE = """
read write munmap close lseek newfstatat fstat brk mprotect mremap pread64 readv writev getdents64 stat lstat statx access faccessat
faccessat2 readlink readlinkat getcwd dup dup2 dup3 pipe poll ppoll select pselect6 epoll_create1 epoll_ctl epoll_wait epoll_pwait
eventfd2 nanosleep sched_yield alarm setitimer restart_syscall rt_sigaction rt_sigprocmask rt_sigreturn rt_sigtimedwait sigaltstack
set_tid_address set_robust_list rseq exit exit_group getpid gettid getppid getpgrp getuid geteuid getgid getegid uname times sysinfo
getrusage getrlimit gettimeofday getrandom
"""


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", RULES)
def test_a_call_with_a_rule_goes_through_by_its_arguments(machine: str, name: str) -> None:
    number = CALLS[name][list(MACHINES).index(machine)]
    if number < 0:
        pytest.skip(f"{machine} has no {name}")
    through, not_through = WANTED[name]
    assert [args for args in through if judged(machine, number, *args) != ALLOW] == []
    assert [args for args in not_through if judged(machine, number, *args) == ALLOW] == []


@pytest.mark.parametrize("machine", MACHINES)
def test_calls_without_a_rule_are_these_and_no_other(machine: str) -> None:
    """A call that is added has to be added here too, or be given a rule: somebody has thought twice."""
    column = list(MACHINES).index(machine)
    listed = {numbers[column] for numbers in CALLS.values()} - {-1}
    assert len(listed) == sum(numbers[column] >= 0 for numbers in CALLS.values()), "two calls of one number"
    assert {name for name in CALLS if name not in RULES} == set(FREE.split())
    assert {name: CALLS[name] for name in NUMBERS if name in CALLS} == {name: NUMBERS[name] for name in NUMBERS if name in CALLS}
    assert not listed & {numbers[column] for name, numbers in NUMBERS.items() if name not in CALLS}
    for number in range(1024):
        if number not in listed:
            assert judged(machine, number, PID, PID, PID) != ALLOW, number


@pytest.mark.parametrize("machine", MACHINES)
def test_another_interface_to_the_kernel_ends_the_process(machine: str) -> None:
    other = {MACHINES[one] for one in MACHINES} - {MACHINES[machine]} | {0x40000003, 0x40000028, 0}
    for arch in other:
        assert judged(machine, 0, arch=arch) == KILL
    for number in (0x40000000, 0x40000000 | 39, 0x7FFFFFFF, -1):
        assert judged(machine, number) == KILL


@pytest.mark.parametrize("machine", MACHINES)
def test_a_thread_is_asked_for_by_the_call_whose_flags_are_seen(machine: str) -> None:
    assert judged(machine, 435) == 0x00050000 | 38  # no such call: the C library falls back to clone


def test_every_rule_is_tried() -> None:
    assert set(WANTED) == set(RULES)

"""The system calls that a program may make: a list of what is allowed, as a filter for the kernel.

Everything that is not on the list is refused with EPERM, also what future kernels will add. A program of another
architecture is killed.
"""

from __future__ import annotations

import struct
from functools import lru_cache

Rule = tuple[int, int, int, int]

ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""The column of the tables below, and the kernel's name of the architecture."""

# Name, number on x86_64, number on aarch64; `-` where there is no such call.
_ALWAYS = """
read 0 63  write 1 64  readv 19 65  writev 20 66  pread64 17 67  pwrite64 18 68  preadv 295 69  pwritev 296 70
preadv2 327 286  pwritev2 328 287  open 2 -  openat 257 56  close 3 57  close_range 436 436  stat 4 -  fstat 5 80
lstat 6 -  newfstatat 262 79  statx 332 291  access 21 -  faccessat 269 48  faccessat2 439 439  lseek 8 62
mprotect 10 226  munmap 11 215  mremap 25 216  brk 12 214  madvise 28 233  msync 26 227  rt_sigaction 13 134
rt_sigprocmask 14 135  rt_sigreturn 15 139  rt_sigtimedwait 128 137  rt_sigpending 127 136  rt_sigsuspend 130 133
sigaltstack 131 132  pause 34 -  alarm 37 -  getitimer 36 102  setitimer 38 103  nanosleep 35 101
clock_nanosleep 230 115  clock_gettime 228 113  clock_getres 229 114  gettimeofday 96 169  time 201 -  times 100 153
getrusage 98 165  getpid 39 172  gettid 186 178  getppid 110 173  getuid 102 174  geteuid 107 175  getgid 104 176
getegid 108 177  getresuid 118 148  getresgid 120 150  getgroups 115 158  getpgrp 111 -  getpgid 121 155
getsid 124 156  getcwd 79 17  chdir 80 49  fchdir 81 50  mkdir 83 -  mkdirat 258 34  rmdir 84 -  unlink 87 -
unlinkat 263 35  rename 82 -  renameat 264 38  renameat2 316 276  link 86 -  linkat 265 37  symlink 88 -
symlinkat 266 36  readlink 89 -  readlinkat 267 78  truncate 76 45  ftruncate 77 46  fallocate 285 47  fsync 74 82
fdatasync 75 83  fadvise64 221 223  getdents 78 -  getdents64 217 61  umask 95 166  dup 32 23  dup2 33 -  dup3 292 24
pipe 22 -  pipe2 293 59  poll 7 -  ppoll 271 73  select 23 -  pselect6 270 72  epoll_create 213 -
epoll_create1 291 20  epoll_ctl 233 21  epoll_wait 232 -  epoll_pwait 281 22  eventfd2 290 19  flock 73 32
futex 202 98  set_robust_list 273 99  get_robust_list 274 100  set_tid_address 218 96  rseq 334 293
sched_yield 24 124  sched_getaffinity 204 123  sched_getparam 143 121  sched_getscheduler 145 120  getcpu 309 168
getpriority 140 141  arch_prctl 158 -  exit 60 93  exit_group 231 94  getrandom 318 278  uname 63 160
sysinfo 99 179  getrlimit 97 163  setrlimit 160 164  statfs 137 43  fstatfs 138 44  sendfile 40 71
copy_file_range 326 285  restart_syscall 219 128  membarrier 324 283  wait4 61 260  waitid 247 95
timerfd_create 283 85  timerfd_settime 286 86  timerfd_gettime 287 87  recvfrom 45 207  shutdown 48 210
"""
# Modes and times of files: only where every file that can be reached is the program's own or on a read-only mount.
_OWN_FILES = "chmod 90 -  fchmod 91 52  fchmodat 268 53  utime 132 -  utimes 235 -  utimensat 280 88  futimesat 261 -"
_NETWORK = """
connect 42 203  bind 49 200  listen 50 201  accept 43 202  accept4 288 242  sendto 44 206  sendmsg 46 211
recvmsg 47 212  sendmmsg 307 269  recvmmsg 299 243  setsockopt 54 208  getsockopt 55 209  getsockname 51 204
getpeername 52 205
"""
_GUARDED = """
fcntl 72 25  ioctl 16 29  prctl 157 167  prlimit64 302 261  kill 62 129  tgkill 234 131  clone 56 220
clone3 435 435  socketpair 53 199  socket 41 198  sendto 44 206  mmap 9 222
"""

# What makes a file, a folder or a link; `open` and `openat` with the flags of `_MAKES`. `clone` makes a thread.
_MAKING = "mkdir 83 -  mkdirat 258 34  link 86 -  linkat 265 37  symlink 88 -  symlinkat 266 36"
_OPENING = "open 2 -  openat 257 56"
_MAKES = 0o100 | 0o20000000  # O_CREAT, and the bit of O_TMPFILE that is its own

_EPERM, _ENOSYS = 1, 38
_RETURN, _LOAD, _AND, _EQUAL, _AT_LEAST, _ANY_BIT = 0x06, 0x20, 0x54, 0x15, 0x35, 0x45
_ALLOW: Rule = (_RETURN, 0, 0, 0x7FFF0000)
_DENY: Rule = (_RETURN, 0, 0, 0x00050000 | _EPERM)
_ABSENT: Rule = (_RETURN, 0, 0, 0x00050000 | _ENOSYS)
_KILL: Rule = (_RETURN, 0, 0, 0x80000000)
_ASK: Rule = (_RETURN, 0, 0, 0x7FC00000)

_CLONE_THREAD, _MAP_LOCKED, _MAP_HUGETLB, _O_ASYNC = 0x00010000, 0x2000, 0x40000, 0x2000
_F_SETFL = 4
_FCNTL = (0, 1, 2, 3, 5, 6, 7, 36, 37, 38, 1030)  # duplicate, flags, locks; not: owner, signal, lease, pipe size, seals
_IOCTL = (0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # is it a terminal, bytes to read, non-blocking
_PRCTL = (15, 16)  # the name of a thread
_INTERNET = (2, 10)
_UNIX, _STREAM = 1, 1


@lru_cache(maxsize=2)  # filled before the fork, where the program has the same number each time
def filter_program(architecture: str, *, pid: int, network: bool, own_files: bool) -> bytes:
    """The filter for the process `pid`, as the kernel wants it.

    `network` allows sockets of the internet; `own_files` allows to change modes and times of files.
    """
    column, audit = ARCHITECTURES[architecture]
    rules: list[Rule] = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, audit), _KILL]
    rules += [(_LOAD, 0, 0, 0), (_AT_LEAST, 0, 1, 0x40000000), _KILL]  # the x32 numbers of x86_64
    plain = _ALWAYS + (_OWN_FILES if own_files else "") + (_NETWORK if network else "")
    for number in numbers(plain, column).values():
        rules += [(_EQUAL, 0, 1, number), _ALLOW]
    guarded = numbers(_GUARDED, column)
    for name, block in _guards(pid=pid, network=network).items():
        rules += [(_EQUAL, 0, len(block), guarded[name]), *block]
    rules.append(_DENY)
    return b"".join(struct.pack("HBBI", *rule) for rule in rules)


@lru_cache(maxsize=1)
def asking_program(architecture: str) -> bytes:
    """A filter that has the kernel ask its listener before a file or a thread is made, and allows all else.

    It stands beside `filter_program`, which is asked first and whose refusals hold.
    """
    column, audit = ARCHITECTURES[architecture]
    rules: list[Rule] = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, audit), _ALLOW, (_LOAD, 0, 0, 0)]
    for number in (*numbers(_MAKING, column).values(), thread_call(architecture)):
        rules += [(_EQUAL, 0, 1, number), _ASK]
    for name, number in numbers(_OPENING, column).items():
        flags = _argument(1 if name == "open" else 2)
        rules += [(_EQUAL, 0, 4, number), flags, (_ANY_BIT, 0, 1, _MAKES), _ASK, _ALLOW]
    rules.append(_ALLOW)
    return b"".join(struct.pack("HBBI", *rule) for rule in rules)


def thread_call(architecture: str) -> int:
    """The number of the call that starts a thread."""
    return numbers(_GUARDED, ARCHITECTURES[architecture][0])["clone"]


def numbers(table: str, column: int) -> dict[str, int]:
    """The numbers of the calls in a table on one architecture.

    >>> numbers("open 2 -  openat 257 56", 1)
    {'openat': 56}
    """
    words = table.split()
    rows = zip(words[::3], words[1::3], words[2::3], strict=True)
    return {row[0]: int(row[1 + column]) for row in rows if row[1 + column] != "-"}


def _guards(*, pid: int, network: bool) -> dict[str, list[Rule]]:
    """Calls that are allowed with some arguments. Every block ends in a verdict."""
    no_async = [(_EQUAL, 0, 4, _F_SETFL), _argument(2), (_ANY_BIT, 1, 0, _O_ASYNC), _ALLOW, _DENY]
    guards: dict[str, list[Rule]] = {
        "fcntl": [_argument(1), *no_async, *_among(_FCNTL)],
        "ioctl": [_argument(1), *_among(_IOCTL)],
        "prctl": [_argument(0), *_among(_PRCTL)],
        "prlimit64": [_argument(0), *_among((0, pid))],
        "kill": [_argument(0), *_among((pid,))],
        "tgkill": [_argument(0), *_among((pid,))],
        "clone": [_argument(0), (_ANY_BIT, 0, 1, _CLONE_THREAD), _ALLOW, _DENY],
        "clone3": [_ABSENT],  # its flags cannot be looked at; the C library then takes clone
        "mmap": [_argument(3), (_ANY_BIT, 0, 1, _MAP_LOCKED | _MAP_HUGETLB), _DENY, _ALLOW],
        # A connected pair within the process, which asyncio needs; datagrams could be sent to other addresses.
        "socketpair": [
            _argument(0),
            *[(_EQUAL, 1, 0, _UNIX), _DENY],
            _argument(1),
            *[(_AND, 0, 0, 0xF), (_EQUAL, 0, 1, _STREAM), _ALLOW, _DENY],
        ],
    }
    if network:
        return guards | {"socket": [_argument(0), *_among(_INTERNET)]}
    to_peer = [_argument(4), (_EQUAL, 1, 0, 0), _DENY, _argument(4, high=True), (_EQUAL, 0, 1, 0), _ALLOW, _DENY]
    return guards | {"sendto": to_peer}


def _argument(index: int, *, high: bool = False) -> Rule:
    return (_LOAD, 0, 0, 16 + 8 * index + (4 if high else 0))


def _among(values: tuple[int, ...]) -> list[Rule]:
    allowed: list[Rule] = []
    for value in values:
        allowed += [(_EQUAL, 0, 1, value), _ALLOW]
    return [*allowed, _DENY]

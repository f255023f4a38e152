"""Programs that try to do harm, as data: `attempt(case)` runs one in the sandbox and looks for harm from the outside.

They run in an arena (`arena.py`), a process in namespaces of its own or of another user, whose victims it started
itself: where the sandbox breaks, nothing of this machine is hurt. `@victim@` and the like are filled in there.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SECRET = "the-secret-of-the-arena"
PRELUDE = """
import ctypes, os, sys, time, signal, resource, struct
libc = ctypes.CDLL(None, use_errno=True)
NUMBERS = {'ioprio_set': (251, 30), 'bpf': (321, 280), 'perf_event_open': (298, 241), 'userfaultfd': (323, 282),
    'add_key': (248, 217), 'keyctl': (250, 219), 'tkill': (200, 130), 'setpriority': (141, 140), 'mknodat': (259, 33),
    'kcmp': (312, 272), 'open_by_handle_at': (304, 265), 'fanotify_init': (300, 262), 'sync': (162, 81),
    'personality': (135, 92), 'sethostname': (170, 161), 'syslog': (103, 116), 'swapon': (167, 224),
    'reboot': (169, 142), 'init_module': (175, 105), 'acct': (163, 89), 'quotactl': (179, 60),
    'rt_tgsigqueueinfo': (297, 240), 'migrate_pages': (256, 238), 'move_pages': (279, 239), 'mq_open': (240, 180),
    'semget': (64, 190), 'msgget': (68, 186), 'timer_create': (222, 107), 'settimeofday': (164, 170)}
def call(name, *args):
    number = NUMBERS[name][0 if os.uname().machine == 'x86_64' else 1] if isinstance(name, str) else name
    return libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) if isinstance(a, int) else a for a in args])
def broke(what='done'):
    sys.stdout.write('BROKE: %s\\n' % (what,)); sys.stdout.flush()
def each(*actions):
    for action in actions:
        try: action()
        except (OSError, ValueError, MemoryError, AttributeError): pass
"""


@dataclass(frozen=True, slots=True)
class Attack:
    name: str
    code: str
    checks: tuple[str, ...] = ()
    """Tests that the program fails: one that passes has been forged."""
    stdin: str = ""
    limits: dict[str, Any] = field(default_factory=dict[str, Any])
    bites: bool = True
    """Whether it does harm where there is no sandbox at all, in the arena."""

    def __str__(self) -> str:
        return self.name


_SIGNALS = {
    "kill the victim": "os.kill(@victim@, 9)",
    "stop the victim": "os.kill(@victim@, signal.SIGSTOP)",
    "kill the parent": "os.kill(@parent@, 15)",
    "kill everyone": "os.kill(-1, 9)",
    "kill the group": "os.killpg(0, 9)",
    "kill the victim's group": "os.killpg(@victim@, 9)",
    "tgkill": "libc.tgkill(@victim@, @victim@, 9)",
    "tkill": "call('tkill', @victim@, 9)",
    "sigqueue": "libc.sigqueue(@victim@, 9, ctypes.c_void_p(0))",
    "tgsigqueueinfo": "call('rt_tgsigqueueinfo', @victim@, @victim@, 9, struct.pack('iiiiii', 9, 0, -1, 0, 0, 0) + bytes(104))",
    "pidfd": "p = call(434, @victim@, 0); call(424, p, 9, 0, 0)",
    "F_SETOWN on a pipe": """
import fcntl
r, w = os.pipe()
fcntl.fcntl(r, fcntl.F_SETOWN, @victim@)
fcntl.fcntl(r, 10, 9)
fcntl.fcntl(r, fcntl.F_SETFL, fcntl.fcntl(r, fcntl.F_GETFL) | 0x2000)
os.write(w, b'x')
time.sleep(0.05)""",
    "F_SETOWN_EX": """
import fcntl
r, w = os.pipe()
fcntl.fcntl(r, 15, struct.pack('ii', 1, @victim@))
fcntl.fcntl(r, 10, 9)
fcntl.fcntl(r, fcntl.F_SETFL, 0x2000)
os.write(w, b'x')
time.sleep(0.05)""",
    "FIOASYNC on a pair": """
import fcntl, socket
a, b = socket.socketpair()
each(lambda: fcntl.fcntl(a, 8, @victim@), lambda: fcntl.ioctl(a, 0x8901, struct.pack('i', @victim@)),
     lambda: fcntl.fcntl(a, 10, 9), lambda: fcntl.ioctl(a, 0x5452, struct.pack('i', 1)))
b.send(b'x')
time.sleep(0.05)""",
    "a lease that signals": """
import fcntl
open('leased', 'w').close()
f = os.open('leased', os.O_RDONLY)
each(lambda: fcntl.fcntl(f, 8, @victim@), lambda: fcntl.fcntl(f, 10, 9), lambda: fcntl.fcntl(f, 1024, fcntl.F_RDLCK))
each(lambda: os.open('leased', os.O_WRONLY | os.O_NONBLOCK))
time.sleep(0.05)""",
}
_PRIORITIES = {
    "nice of the user": "os.setpriority(os.PRIO_USER, 0, 19)",
    "nice of the victim": "os.setpriority(os.PRIO_PROCESS, @victim@, 19)",
    "nice of the parent": "os.setpriority(os.PRIO_PROCESS, @parent@, 19)",
    "nice of the group": "os.setpriority(os.PRIO_PGRP, os.getpgid(@victim@), 19)",
    "scheduler": "os.sched_setscheduler(@victim@, os.SCHED_IDLE, os.sched_param(0))",
    "scheduler of the parent": "os.sched_setscheduler(@parent@, os.SCHED_BATCH, os.sched_param(0))",
    "affinity": "os.sched_setaffinity(@victim@, {min(os.sched_getaffinity(0))})",
    "ioprio": "call('ioprio_set', 1, @victim@, (3 << 13))",
    "ioprio of the user": "call('ioprio_set', 3, os.getuid(), (3 << 13))",
    "limits of the victim": "resource.prlimit(@victim@, resource.RLIMIT_CORE, (0, 0))",
    "limits of the parent": "resource.prlimit(@parent@, resource.RLIMIT_CORE, (0, 0))",
    "out-of-memory score": "open('/proc/@victim@/oom_score_adj', 'w').write('900')",
}
_FILES = {
    "chmod": "os.chmod('@file@', 0o777)",
    "chmod through an open file": "os.fchmod(os.open('@file@', os.O_RDONLY), 0o777)",
    "chmod of a folder": "os.chmod('@folder@', 0o777)",
    "utime": "os.utime('@file@', (1, 1))",
    "setxattr": "os.setxattr('@file@', 'user.owned', b'1')",
    "chown": "os.chown('@folder@', os.getuid(), os.getgid()); open('@file@', 'a').close(); os.utime('@folder@')",
    "write": "open('@file@', 'w').write('owned')",
    "append": "open('@file@', 'a').write('owned')",
    "truncate": "os.truncate('@file@', 0)",
    "read": "print(open('@file@').read())",
    "read by descending": "print(open('../' * 30 + '@file@'.lstrip('/')).read())",
    "unlink": "os.unlink('@file@')",
    "rename away": "os.rename('@file@', '@folder@/other')",
    "rename into its own folder": "os.rename('@file@', 'mine')",
    "new file": "open('@folder@/new', 'w').write('x')",
    "new folder": "os.mkdir('@folder@/new')",
    "hard link": "os.link('@file@', 'mine'); open('mine', 'a').write('owned')",
    "hard link beside": "os.link('@file@', '@folder@/twin')",
    "symlink": "os.symlink('@file@', 'mine'); open('mine', 'a').write('owned')",
    "symlink beside": "os.symlink('/etc', '@folder@/link')",
    "symlink swapped in": """
os.mkdir('d')
open('d/note', 'w').write('x')
os.rename('d', 'e')
os.symlink('@folder@', 'd')
each(lambda: os.chmod('d/note', 0o777), lambda: os.utime('d/note', (1, 1)))
open('d/note', 'a').write('owned')""",
    "fifo beside": "os.mkfifo('@folder@/fifo')",
    "device": "os.mknod('disk', 0o60600, os.makedev(254, 0)); broke()",
    "lock": "import fcntl; f = open('@file@', 'r'); fcntl.flock(f, fcntl.LOCK_EX); broke('opened')",
    "open by handle": """
call('open_by_handle_at', -100, struct.pack('Ii', 8, 1) + bytes(8), 0) >= 0 and broke()""",
    "watch with fanotify": "call('fanotify_init', 0x200, 0) >= 0 and broke()",
    "list the home": "print(os.listdir('@folder@'))",
    "unicode names": "open('@folder@/\\u202egnp.exe\\ud800'.encode('utf-8', 'surrogatepass'), 'w').write('x')",
    "/tmp": "open('@tmp@/left', 'w').write('x')",
    "/dev/shm": "open('/dev/shm/kedge-left', 'w').write('x'); broke()",
    "/dev/mem": "os.open('/dev/mem', os.O_RDONLY); broke()",
    "raw disk": "[os.open('/dev/' + n, os.O_RDONLY) and broke(n) for n in ('vda', 'sda', 'nvme0n1') if os.path.exists('/dev/' + n)]",
    "terminal": "import fcntl; fcntl.ioctl(os.open('/dev/tty', os.O_RDWR), 0x5412, b'x'); broke()",
    "etc passwd": "print(open('/etc/passwd').read()) or broke()",
    "home": "print(os.listdir('@home@')) or broke()",
}
_PROCESSES = {
    "fork": "os.fork(); broke()",
    "vfork": "libc.vfork() == 0 and (broke(), os._exit(0))",
    "clone": "libc.syscall(56 if os.uname().machine == 'x86_64' else 220, 17, 0, 0, 0, 0) >= 0 and broke()",
    "clone3": "libc.syscall(435, struct.pack('QQQQQQQQ', 0, 0, 0, 0, 17, 0, 0, 0), 64) >= 0 and broke()",
    "exec": "sys.stdout.flush(); os.execv('/bin/sh', ['sh', '-c', 'echo BROKE'])",
    "exec of Python": "sys.stdout.flush(); os.execv('@python@', ['python', '-c', 'print(\"BROKE\")'])",
    "execveat": "libc.syscall(322 if os.uname().machine == 'x86_64' else 281, -100, b'/bin/true', 0, 0, 0); ",
    "posix_spawn": "os.waitpid(os.posix_spawn('/bin/sh', ['sh', '-c', 'echo BROKE'], {}), 0)",
    "subprocess": "import subprocess; print(subprocess.check_output('echo BROKE', shell=True))",
    "huge argv": "import subprocess; print(subprocess.run(['/bin/echo', 'BROKE'] + ['x' * 1000] * 1000))",
    "daemon that stays": """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for fd in range(64):
            each(lambda: os.close(fd))
        time.sleep(60)
    os._exit(0)""",
    "fork bomb": """
for _ in range(200):
    if os.fork() == 0:
        time.sleep(30)
        os._exit(0)""",
    "ptrace": "libc.ptrace(16, @victim@, 0, 0) == 0 and broke()",
    "seize": "libc.ptrace(0x4206, @victim@, 0, 0) == 0 and broke()",
    "memory of the parent": """
import re
for line in open('/proc/@parent@/maps'):
    if '[heap]' in line:
        start, end = (int(x, 16) for x in line.split()[0].split('-'))
        buffer = ctypes.create_string_buffer(64)
        vec = struct.pack('PN', ctypes.addressof(buffer), 64)
        far = struct.pack('PN', start, 64)
        libc.process_vm_readv(@parent@, vec, 1, far, 1, 0) > 0 and broke()""",
    "proc mem of the parent": "open('/proc/@parent@/mem', 'rb'); broke()",
    "environment of the parent": "print(open('/proc/@parent@/environ').read())",
    "own environment": "print(dict(os.environ), open('/proc/self/environ').read())",
    "command lines": "print([open('/proc/%s/cmdline' % p).read() for p in os.listdir('/proc') if p.isdigit()])",
    "descriptors of the parent": "print([os.readlink('/proc/@parent@/fd/' + n) for n in os.listdir('/proc/@parent@/fd')]); broke()",
    "kcmp": "call('kcmp', @victim@, @parent@, 1, 0, 0) >= 0 and broke()",
    "move pages": "call('move_pages', @victim@, 0, 0, 0, 0, 0) >= 0 and broke()",
}
_KERNEL = {
    "unshare": "libc.unshare(0x10000000) == 0 and broke()",
    "setns": "libc.setns(os.open('/proc/@parent@/ns/user', os.O_RDONLY), 0) == 0 and broke()",
    "mount": "libc.unshare(0x10020000); libc.mount(b'none', b'/', None, 0x44000, None) == 0 and broke()",
    "umount": "[libc.umount2(p, 2) == 0 and broke(p) for p in (b'/usr/lib', b'/proc', os.getcwd().encode())]",
    "chroot": "libc.unshare(0x10000000); os.mkdir('r'); os.chroot('r'); broke()",
    "pivot_root": "os.mkdir('r'); libc.pivot_root(b'r', b'r') == 0 and broke()",
    "io_uring": "libc.syscall(425, 8, bytes(120)) >= 0 and broke()",
    "bpf": "call('bpf', 0, struct.pack('IIII', 2, 4, 4, 1) + bytes(100), 112) >= 0 and broke()",
    "perf_event_open": "call('perf_event_open', struct.pack('IIQQQQQ', 1, 128, 0, 0, 0, 0, 0x61) + bytes(80), 0, -1, -1, 0) >= 0 and broke()",
    "userfaultfd": "call('userfaultfd', 1) >= 0 and broke()",
    "keys": "call('add_key', b'user', b'kedge', b'x', 1, -3) >= 0 and broke()",
    "keyctl": "call('keyctl', 1, 0) >= 0 and broke()",
    "personality": "call('personality', 0x0040000) >= 0 and broke()",
    "hostname": "libc.unshare(0x14000000); call('sethostname', b'owned', 5) == 0 and broke()",
    "clock": "call('settimeofday', struct.pack('qq', 1, 0), 0) == 0 and broke()",
    "kernel log": "call('syslog', 3, ctypes.create_string_buffer(100), 100) > 0 and broke()",
    "modules": "call('init_module', b'x', 1, b'') == 0 and broke()",
    "swap": "call('swapon', b'swap', 0) == 0 and broke()",
    "set-user-id": "open('s', 'w').close(); os.chmod('s', 0o4755); os.setuid(0); broke()",
    "capabilities back": """
header = struct.pack('Ii', 0x20080522, 0)
libc.capset(header, struct.pack('IIIIII', 1 << 21, 1 << 21, 0, 0, 0, 0)) == 0 and broke()""",
    "privileges by prctl": "libc.prctl(23, 21, 0, 0, 0) == 1 and libc.prctl(8, 1, 0, 0, 0) == 0 and broke()",
    "no filter by prctl": "libc.prctl(21, 0, 0, 0, 0) == 0 and broke()",
    "x32 calls": "libc.syscall(0x40000000 + 39) > 0 and broke()",
    "int 0x80": """
import mmap
code = bytes.fromhex('b814000000cd80c3')
m = mmap.mmap(-1, 4096, prot=7)
m.write(code)
f = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))
os.uname().machine == 'x86_64' and f() > 0 and broke()""",
    "raise own limits": "resource.setrlimit(resource.RLIMIT_AS, (-1, -1)); resource.setrlimit(resource.RLIMIT_NOFILE, (9999, 9999)); broke()",
    "sync the machine": "call('sync') == 0 and broke()",
}
_NETWORK = {
    "connect": "import socket; socket.create_connection(('127.0.0.1', @port@), timeout=1).send(b'x'); time.sleep(0.05)",
    "udp": "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', @port@))",
    "listen": "import socket; s = socket.create_server(('127.0.0.1', 0)); broke()",
    "unix socket": "import socket; s = socket.socket(socket.AF_UNIX); s.connect('@unix@'); s.send(b'x'); time.sleep(0.05)",
    "abstract socket": "import socket; s = socket.socket(socket.AF_UNIX); s.connect('\\0@abstract@'); s.send(b'x'); time.sleep(0.05)",
    "abstract socket from a pair": """
import socket
a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
a.sendto(b'x', '\\0@abstract@-datagram')""",
    "netlink": "import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0); broke()",
    "packet": "import socket; libc.unshare(0x50000000); socket.socket(socket.AF_PACKET, socket.SOCK_RAW); broke()",
    "vsock": "import socket; socket.socket(40, socket.SOCK_STREAM); broke()",
    "names": "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.connect(('127.0.0.1', 53)); broke()",
}
_MEMORY = {
    "SysV shared memory": """
libc.shmat.restype = ctypes.c_void_p
i = libc.shmget(0, 200 << 20, 0o1600)
a = libc.shmat(i, None, 0)
if i >= 0 and a not in (None, 2**64 - 1):
    ctypes.memset(a, 1, 200 << 20)
    broke()""",
    "SysV segments that stay": "libc.shmget(0x6b65, 1 << 20, 0o1600) >= 0 and broke()",
    "semaphores": "call('semget', 0x6b65, 1, 0o1600) >= 0 and broke()",
    "messages": "call('msgget', 0x6b65, 0o1600) >= 0 and broke()",
    "POSIX queue": "call('mq_open', b'kedge', 0o102, 0o600, 0) >= 0 and broke()",
    "memfd": """
f = os.memfd_create('x')
for _ in range(200):
    os.write(f, bytes(1 << 20))
broke()""",
    "anonymous mapping": "import mmap; m = mmap.mmap(-1, 400 << 20); m.write(b'x' * (400 << 20)); broke()",
    "shared mapping": "import mmap; m = mmap.mmap(-1, 400 << 20, flags=mmap.MAP_SHARED); broke()",
    "mapping of a sparse file": """
import mmap
f = open('sparse', 'w+b')
f.truncate(1 << 30)
m = mmap.mmap(f.fileno(), 1 << 30)
for at in range(0, 1 << 30, 4096): m[at] = 1
broke()""",
    "mlock": "b = ctypes.create_string_buffer(8 << 20); libc.mlock(b, 8 << 20) == 0 and broke()",
    "mlockall": "libc.mlockall(1) == 0 and broke()",
    "pipes": """
import fcntl
total = 0
for _ in range(30):
    r, w = os.pipe()
    total += fcntl.fcntl(w, 1031, 1 << 20)
total > 8 << 20 and broke(total)""",
    "list without end": "x = []\nfor _ in range(500): x.append(bytes(1 << 20))\nbroke()",
    "threads": """
import threading
threading.stack_size(32768)
for n in range(300):
    threading.Thread(target=time.sleep, args=(2,), daemon=True).start()
    time.sleep(0.0005)
broke()""",
    "descriptors": "for n in range(500): os.open('/dev/null', 0)\nbroke()",
    "timers": """
for n in range(2000):
    if call('timer_create', 1, 0, ctypes.byref(ctypes.c_int())) < 0: break
else: broke()""",
}
_DISK = {
    "many large files": """
for n in range(60):
    with open('f%d' % n, 'wb') as f:
        for _ in range(4): f.write(bytes(1 << 20))
        f.flush()
    time.sleep(0.01)
broke()""",
    "one large file": "f = open('f', 'wb')\nfor _ in range(60): f.write(bytes(1 << 20))\nbroke()",
    "many files": "for n in range(20000): open('f%d' % n, 'w').close()\nbroke()",
    "many folders": "for n in range(20000): os.mkdir('f%d' % n)\nbroke()",
    "many links": "open('f', 'w').close()\nfor n in range(20000): os.link('f', 'l%d' % n)\nbroke()",
    "many symlinks": "for n in range(20000): os.symlink('x' * 200, 'l%d' % n)\nbroke()",
    "fallocate": "f = open('f', 'wb')\nos.posix_fallocate(f.fileno(), 0, 60 << 20)\nbroke()",
    "unlinked but open": """
held = []
for n in range(40):
    f = open('f', 'wb', buffering=0); os.unlink('f')
    f.write(bytes(4 << 20)); held.append(f)
    time.sleep(0.01)
broke()""",
    "in folders that cannot be read": """
os.mkdir('d', 0o300)
for n in range(60):
    with open('d/f%d' % n, 'wb') as f: f.write(bytes(4 << 20))
    time.sleep(0.01)
broke()""",
}
_LEFTOVERS = {
    "1,300 nested folders": "for _ in range(1300): os.mkdir('d'); os.chdir('d')",
    "nested folders with long names": "for _ in range(300): os.mkdir('d' * 255); os.chdir('d' * 255)",
    "sparse files": "open('s', 'wb').truncate(15 << 20); open('t', 'wb').truncate(15 << 20)",
    "odd names": "[open(n, 'w').close() for n in (b'\\xff\\xfe', b'-rf', b'a\\nb', b'.' * 200, '\\u202e'.encode())]",
    "folders without rights": "os.umask(0); os.mkdir('a', 0); os.mkdir('b', 0o500); os.mkdir('c'); os.mkdir('c/d', 0o100)",
    "a socket file": "import socket; socket.socket(socket.AF_UNIX).bind('s')",
    "loop of links": "os.symlink('b', 'a'); os.symlink('a', 'b'); os.symlink('.', 'self')",
    "the folder itself": "import shutil; shutil.rmtree(os.getcwd(), ignore_errors=True); os.rmdir(os.getcwd())",
}
_STAYING = {
    "sleep": "time.sleep(60)",
    "loop": "while True: pass",
    "ignore every signal": "[each(lambda s=s: signal.signal(s, signal.SIG_IGN)) for s in range(1, 65)]\ntime.sleep(60)",
    "stop itself": "os.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(60)",
    "close every descriptor": "os.closerange(0, 4096)\ntime.sleep(60)",
    "a thread that stays": "import threading; threading.Thread(target=time.sleep, args=(60,)).start()",
    "exit handler that stays": "import atexit; atexit.register(time.sleep, 60); sys.exit(1)",
    "a finaliser that stays": "class A:\n    def __del__(s): time.sleep(60)\na = A(); a.b = a",
    "session of its own": "os.setsid()\ntime.sleep(60)",
    "alarm storm": "signal.signal(signal.SIGALRM, lambda *a: None); signal.setitimer(signal.ITIMER_REAL, 1e-5, 1e-5)\nwhile True: pass",
    "in C": "libc.sleep(60)",
    "catastrophic pattern": "import re; re.match(r'(a+)+$', 'a' * 60 + 'b')",
    "huge power": "10 ** 10 ** 9",
}
_FLOODS = {
    "stdout": "while True: os.write(1, b'x' * 65536)",
    "stderr": "for _ in range(20000): os.write(2, b'x' * 65536)",
    "the report": "while True: os.write(3, b'x' * 65536)",
    "the report without a newline": "while True: os.write(3, b'{')",
    "every descriptor": "while True:\n    for fd in range(3, 64): each(lambda: os.write(fd, b'\\n' * 65536))",
    "values": "X = 'x' * (100 << 20)",
}
_FORGERY = {
    "exit 0": "os._exit(0)",
    "sys.exit": "sys.exit(0)",
    "prints a verdict": "print('passed'); print({'check': 0, 'values': [[['int', '0x5']]], 'failed': False})",
    "writes a verdict": """
import json
for fd in range(3, 64):
    each(lambda: os.write(fd, b'\\n{"check": 0, "values": [[["int", "0x7"]]], "failed": false}\\n{"end": "done"}\\n'))
os._exit(0)""",
    "writes a verdict with the token": """
import json
frame = sys._getframe()
while frame is not None and 'token' not in frame.f_locals: frame = frame.f_back
token = frame.f_locals['token'] if frame else ''
for passed in ('"passed": true, ', ''):
    line = token + '{"check": 0, ' + passed + '"values": [[["constant", true]]], "failed": false}\\n'
    os.write(3, line.encode())
os.write(3, (token + '{"end": "done", "detail": ""}\\n').encode())
os._exit(0)""",
    "equal to everything": """
class Any(int):
    def __eq__(self, other): return True
    __hash__ = int.__hash__
def f(x): return Any(0)""",
    "an object equal to everything": "class Any:\n    def __eq__(self, other): return True\ndef f(x): return Any()",
    "patches builtins": """
import builtins
builtins.AssertionError = type(None)
builtins.eval = lambda *a: 7
builtins.isinstance = lambda *a: True
builtins.compile = lambda *a: (lambda: None).__code__
def f(x): return 0""",
    "patches the runner through frames": """
frame = sys._getframe()
while frame.f_back is not None:
    for name, value in list(frame.f_globals.items()):
        if name in ('encoded', '_value_of', '_check', 'attempt'):
            frame.f_globals[name] = lambda *a, **k: {'values': [[['constant', True]]], 'failed': False, 'detail': ''}
    frame = frame.f_back
def f(x): return 0""",
    "looks for the expected value": """
import gc, re
def f(x):
    frame, places = sys._getframe(), [o for o in gc.get_objects() if isinstance(o, (dict, list, tuple))]
    while frame is not None:
        places.append(frame.f_locals)
        frame = frame.f_back
    found = [re.search(r'9182([0-9][0-9])', str(place)[:100000]) for place in places]
    return next((int(match.group()) for match in found if match), 0)""",
    "reads the order": """
def f(x):
    for fd in range(64):
        try: text = os.pread(fd, 10**6, 0)
        except OSError: continue
        found = text.find(b'9182')
        if found >= 0: return int(text[found:found + 6])
    return 0""",
    "reports twice": """
frame = sys._getframe()
while frame is not None and 'report' not in frame.f_locals: frame = frame.f_back
report = frame.f_locals['report'] if frame else print
for _ in range(3): report(check=0, values=[[['int', hex(0)]]], failed=False, detail='')
def f(x): return 0""",
}
_NONSENSE = {
    "lines that are no report": """
frame = sys._getframe()
while frame is not None and 'token' not in frame.f_locals: frame = frame.f_back
token = frame.f_locals['token'].encode() if frame else b''
deep = b'{"check": 0, "failed": false, "values": ' + b'[' * 5000 + b']' * 5000 + b'}'
for line in (b'{', b'[]', b'3', b'{"check": []}', b'{"check": 0}', b'{"end": 5}', b'{"end": []}', b'[' * 99999, deep,
             b'{"check": 0, "failed": false, "values": [[["int", 5]]]}', b'{"check": 0, "failed": false, "values": 7}',
             b'{"check": 0, "failed": false, "values": [["set", [["list", []]]]]}',
             b'{"check": 0, "failed": false, "values": [[["int", "' + b'9' * 99999 + b'"]]]}',
             b'{"check": 0, "failed": false, "values": [[["range", [1, 2, 0]]]]}', b'{"check": 0, "failed": false}'):
    os.write(3, token + line + b'\\n')
os._exit(0)""",
    "a value of no end": "x = []; x.append(x)\ndef f(_): return x",
    "a value that raises": "class E(list):\n    def __iter__(s): raise SystemExit\n    def __bool__(s): raise ValueError\ndef f(_): return E([1])",
}


_WITHOUT_BITE = frozenset(
    {
        *(f"file: {name}" for name in ("chown", "device", "open by handle", "list the home", "/dev/mem", "raw disk")),
        *(
            f"kernel: {name}"
            for name in ("setns", "umount", "bpf", "clock", "kernel log", "modules", "swap", "x32 calls")
        ),
        *("file: terminal", "process: execveat", "kernel: capabilities back", "leftover: the folder itself"),
        *("memory: mlock", "memory: mlockall"),
    }
)
"""Attacks that do no harm in the arena even without a sandbox: its kernel, its user or its emptiness prevents them."""


def _simple(group: str, programs: dict[str, str], **limits: Any) -> list[Attack]:
    can_bite = group not in ("staying", "flood")
    named = {f"{group}: {name}": code for name, code in programs.items()}
    return [
        Attack(name, code, limits=limits, bites=can_bite and name not in _WITHOUT_BITE) for name, code in named.items()
    ]


def _all() -> list[Attack]:
    small = {"memory_mb": 256, "wall_s": 5.0, "disk_mb": 32, "files": 1024}
    expected = ("assert f(2) == 918273",)
    forged = [Attack(f"verdict: {name}", code, checks=expected, bites=False) for name, code in _FORGERY.items()]
    nonsense = [Attack(f"report: {name}", code, checks=expected, bites=False) for name, code in _NONSENSE.items()]
    return [
        *_simple("signal", _SIGNALS, **small),
        *_simple("priority", _PRIORITIES, **small),
        *_simple("file", _FILES, **small),
        *_simple("process", _PROCESSES, **small),
        *_simple("kernel", _KERNEL, **small),
        *_simple("network", _NETWORK, **small),
        *_simple("memory", _MEMORY, **small),
        *_simple("disk", _DISK, **small),
        *_simple("leftover", _LEFTOVERS, **small),
        *_simple("staying", _STAYING, wall_s=0.15, cpu_s=1),
        *_simple("flood", _FLOODS, wall_s=0.4, memory_mb=256),
        *forged,
        *nonsense,
    ]


CASES: tuple[Attack, ...] = tuple(_all())


class Arena:
    """The process in which attacks are tried. `problem` says why there is none on this machine."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="kedge-arena-")
        Path(self._folder).chmod(0o755)
        command = [sys.executable, str(Path(__file__).with_name("arena.py")), self._folder]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"KEDGE_KEY": SECRET},
            start_new_session=True,
        )
        self.layers, self.problem = list[str](), "the arena did not start"
        greeting = self._read()
        if greeting is not None:
            self.layers, self.problem = greeting["layers"], greeting["problem"]

    def attempt(self, case: Attack, isolation: str | None) -> str | None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"name": case.name, "isolation": isolation}) + "\n")
        self._process.stdin.flush()
        reply = self._read()
        if reply is None:
            self.close()
            return "the arena, in the place of the trainer, did not survive"
        return reply["harm"]

    def _read(self) -> dict[str, Any] | None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line.endswith("\n") else None

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        shutil.rmtree(self._folder, ignore_errors=True)


_arenas: list[Arena] = []


def arena() -> Arena:
    """The arena of this process; a new one where an attack has destroyed the last."""
    if not _arenas or (not _arenas[-1].problem and not _arenas[-1].is_alive):
        _arenas.append(Arena())
        atexit.register(_arenas[-1].close)
    return _arenas[-1]


def attempt(case: Attack, isolation: str | None = None) -> str | None:
    """Run an attack in the sandbox: None where it held, else what the attack achieved.

    `isolation` is a layer, the strongest that works here unless given, or `none` for no sandbox at all.
    """
    return arena().problem or arena().attempt(case, isolation)

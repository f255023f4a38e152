"""Programs that reach for what is not theirs: processes, files, the kernel, the network. `attacks` tries them."""

from __future__ import annotations

SIGNALS = {
    "kill the victim": "os.kill(@victim@, 9)",
    "stop the victim": "os.kill(@victim@, signal.SIGSTOP)",
    "kill the parent": "os.kill(@parent@, 15)",
    "kill everyone": "os.kill(-1, 9)",
    "kill the group": "os.killpg(0, 9)",
    "kill the victim's group": "os.killpg(@victim@, 9)",
    "tgkill": "libc.tgkill(@victim@, @victim@, 9)",
    "tkill": "call('tkill', @victim@, 9)",
    "sigqueue": "libc.sigqueue(@victim@, 9, ctypes.c_void_p(0))",
    "tgsigqueueinfo": """
call('rt_tgsigqueueinfo', @victim@, @victim@, 9, struct.pack('iiiiii', 9, 0, -1, 0, 0, 0) + bytes(104))""",
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
PRIORITIES = {
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
FILES = {
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
    "raw disk": """
r = [os.open('/dev/' + n, os.O_RDONLY) and broke(n) for n in ('vda', 'sda', 'nvme0n1') if os.path.exists('/dev/' + n)
r >= 0 and broke()""",
    "terminal": "import fcntl; fcntl.ioctl(os.open('/dev/tty', os.O_RDWR), 0x5412, b'x'); broke()",
    "etc passwd": "print(open('/etc/passwd').read()) or broke()",
    "home": "print(os.listdir('@home@')) or broke()",
}
PROCESSES = {
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
    "descriptors of the parent": """
print([os.readlink('/proc/@parent@/fd/' + n) for n in os.listdir('/proc/@parent@/fd')])
broke()""",
    "kcmp": "call('kcmp', @victim@, @parent@, 1, 0, 0) >= 0 and broke()",
    "move pages": "call('move_pages', @victim@, 0, 0, 0, 0, 0) >= 0 and broke()",
}
KERNEL = {
    "unshare": "libc.unshare(0x10000000) == 0 and broke()",
    "setns": "libc.setns(os.open('/proc/@parent@/ns/user', os.O_RDONLY), 0) == 0 and broke()",
    "mount": "libc.unshare(0x10020000); libc.mount(b'none', b'/', None, 0x44000, None) == 0 and broke()",
    "umount": "[libc.umount2(p, 2) == 0 and broke(p) for p in (b'/usr/lib', b'/proc', os.getcwd().encode())]",
    "chroot": "libc.unshare(0x10000000); os.mkdir('r'); os.chroot('r'); broke()",
    "pivot_root": "os.mkdir('r'); libc.pivot_root(b'r', b'r') == 0 and broke()",
    "io_uring": "libc.syscall(425, 8, bytes(120)) >= 0 and broke()",
    "bpf": "call('bpf', 0, struct.pack('IIII', 2, 4, 4, 1) + bytes(100), 112) >= 0 and broke()",
    "perf_event_open": """
r = call('perf_event_open', struct.pack('IIQQQQQ', 1, 128, 0, 0, 0, 0, 0x61) + bytes(80), 0, -1, -1, 0)
r >= 0 and broke()""",
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
    "raise own limits": """
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
resource.setrlimit(resource.RLIMIT_NOFILE, (9999, 9999))
broke()""",
    "sync the machine": "call('sync') == 0 and broke()",
}
NETWORK = {
    "connect": "import socket; socket.create_connection(('127.0.0.1', @port@), timeout=1).send(b'x'); time.sleep(0.05)",
    "udp": "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', @port@))",
    "listen": "import socket; s = socket.create_server(('127.0.0.1', 0)); broke()",
    "unix socket": """
import socket
s = socket.socket(socket.AF_UNIX)
s.connect('@unix@')
s.send(b'x')
time.sleep(0.05)""",
    "abstract socket": """
import socket
s = socket.socket(socket.AF_UNIX)
s.connect('\\0@abstract@')
s.send(b'x')
time.sleep(0.05)""",
    "abstract socket from a pair": """
import socket
a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
a.sendto(b'x', '\\0@abstract@-datagram')""",
    "netlink": "import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0); broke()",
    "packet": "import socket; libc.unshare(0x50000000); socket.socket(socket.AF_PACKET, socket.SOCK_RAW); broke()",
    "vsock": "import socket; socket.socket(40, socket.SOCK_STREAM); broke()",
    "names": """
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.connect(('127.0.0.1', 53))
broke()""",
}

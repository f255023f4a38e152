"""Programs that take more than their share, stay, leave things behind, or forge their verdict. `attacks` tries them."""

from __future__ import annotations

MEMORY = {
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
DISK = {
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
    "unlinked but mapped": """
libc.mmap.restype = ctypes.c_void_p
for n in range(60):
    f = os.open('f', os.O_RDWR | os.O_CREAT); os.unlink('f')
    os.write(f, bytes(4 << 20))
    libc.mmap(None, ctypes.c_size_t(4096), 1, 2, f, ctypes.c_long(0)); os.close(f)
    time.sleep(0.01)
broke()""",
    "many files, moved about": """
import threading
def move():
    while True: each(lambda: os.rename('a/d', 'b/d'), lambda: os.rename('b/d', 'a/d')); time.sleep(0.001)
[os.mkdir(name) for name in ('a', 'b', 'a/d')]
threading.Thread(target=move, daemon=True).start()
total = 0
def make(name):
    global total
    open(name, 'x').close()
    total += 1
for n in range(4000): each(lambda: make('a/d/f%d' % n), lambda: make('b/d/f%d' % n))
total > 1500 and broke(total)""",
    "many folders of one that will not stand still": """
import threading
def go_on():
    while True: os.kill(os.getpid(), signal.SIGCONT)
threading.Thread(target=go_on, daemon=True).start()
for n in range(20000): os.mkdir('f%d' % n)
broke()""",
    "in folders that cannot be read": """
os.mkdir('d', 0o300)
for n in range(60):
    with open('d/f%d' % n, 'wb') as f: f.write(bytes(4 << 20))
    time.sleep(0.01)
broke()""",
}
LEFTOVERS = {
    "1,300 nested folders": "for _ in range(1300): os.mkdir('d'); os.chdir('d')",
    "nested folders with long names": "for _ in range(300): os.mkdir('d' * 255); os.chdir('d' * 255)",
    "sparse files": "open('s', 'wb').truncate(15 << 20); open('t', 'wb').truncate(15 << 20)",
    "odd names": "[open(n, 'w').close() for n in (b'\\xff\\xfe', b'-rf', b'a\\nb', b'.' * 200, '\\u202e'.encode())]",
    "folders without rights": """
os.umask(0)
os.mkdir('a', 0)
os.mkdir('b', 0o500)
os.mkdir('c')
os.mkdir('c/d', 0o100)""",
    "a socket file": "import socket; socket.socket(socket.AF_UNIX).bind('s')",
    "loop of links": "os.symlink('b', 'a'); os.symlink('a', 'b'); os.symlink('.', 'self')",
    "the folder itself": "import shutil; shutil.rmtree(os.getcwd(), ignore_errors=True); os.rmdir(os.getcwd())",
}
STAYING = {
    "sleep": "time.sleep(60)",
    "loop": "while True: pass",
    "ignore every signal": "[each(lambda s=s: signal.signal(s, signal.SIG_IGN)) for s in range(1, 65)]\ntime.sleep(60)",
    "stop itself": "os.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(60)",
    "close every descriptor": "os.closerange(0, 4096)\ntime.sleep(60)",
    "a thread that stays": "import threading; threading.Thread(target=time.sleep, args=(60,)).start()",
    "exit handler that stays": "import atexit; atexit.register(time.sleep, 60); sys.exit(1)",
    "a finaliser that stays": "class A:\n    def __del__(s): time.sleep(60)\na = A(); a.b = a",
    "session of its own": "os.setsid()\ntime.sleep(60)",
    "alarm storm": """
signal.signal(signal.SIGALRM, lambda *a: None)
signal.setitimer(signal.ITIMER_REAL, 1e-5, 1e-5)
while True: pass""",
    "in C": "libc.sleep(60)",
    "catastrophic pattern": "import re; re.match(r'(a+)+$', 'a' * 60 + 'b')",
    "huge power": "10 ** 10 ** 9",
}
FLOODS = {
    "stdout": "while True: os.write(1, b'x' * 65536)",
    "stderr": "for _ in range(20000): os.write(2, b'x' * 65536)",
    "the report": "while True: os.write(3, b'x' * 65536)",
    "the report without a newline": "while True: os.write(3, b'{')",
    "every descriptor": "while True:\n    for fd in range(3, 64): each(lambda: os.write(fd, b'\\n' * 65536))",
    "values": "X = 'x' * (100 << 20)",
}
FORGERY = {
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
NONSENSE = {
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
    "a value that raises": """
class E(list):
    def __iter__(s): raise SystemExit
    def __bool__(s): raise ValueError
def f(_): return E([1])""",
}

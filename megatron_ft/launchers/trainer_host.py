"""The trainer host of a node: has imported torch and the framework, and forks trainers.

``python trainer_host.py SOCKET COMMAND...`` runs in the training command's own interpreter and
environment, so it imports nothing of this package.  It imports what the command's script names at
its top, as far as that is installed, and then forks a child for each request of warm_client.py.
The child becomes what ``COMMAND`` would be if it were started.

An import that starts a thread or opens a device cannot be forked.  The host looks after each one,
and replaces itself by a host that leaves that module out.
"""

from __future__ import annotations

import ast
import ctypes
import fcntl
import gc
import json
import os
import resource
import runpy
import select
import signal
import socket
import struct
import sys
import sysconfig
from importlib import import_module
from importlib.machinery import PathFinder, SourceFileLoader
from importlib.util import find_spec
from types import ModuleType
from typing import Any

LEFT_OUT = "MEGATRON_FT_HOST_LEFT_OUT"
"""Modules that an earlier image of this process found unfit, separated by commas."""
ROOM = "MEGATRON_FT_HOST_ROOM"
"""Makes the environment of the host larger than that of any trainer, which takes its place."""

SWITCHES = ("-u", "-O", "-OO", "-B")
"""Flags of Python that a command may have: the host is started with the same ones."""
OURS = ("megatron", "megatron_ft", "deepspeed_ext")
"""Packages that are imported from wherever they lie; others must be installed."""
TORCH = ("torch", "torch.distributed", "torch._dynamo", "megatron_ft.trainer.manager")
AHEAD = "megatron_ft.megatron.ahead"
"""For commands with the flag of Megatron's integration."""
DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/accel", "/dev/infiniband")

NO_FILE = 2
"""Python's own exit code where it cannot open its script."""

IMPORTS = "imports.json"
"""File next to the socket: modules that a trainer of this node had imported once it trained."""
LOOK_SECONDS = 1.0

REQUEST_SECONDS = 5.0
MOST_REQUEST_BYTES = 8 << 20
F_SETSIG = 10
_PEER = struct.Struct("3i")


def main() -> None:
    """Serve until killed; in a child, run what was asked for and end as Python does."""
    path, command = sys.argv[1], sys.argv[2:]
    del sys.path[0]  # the folder of this file
    environment = dict(os.environ)
    # C code may keep pointers to variables; those of children are written over the first ones.
    os.environ.clear()
    os.environ.update(environment)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    host = Host(path, environment)
    host.preload(modules_of(command))
    Child(host.serve(), host.changes()).run()


def say(text: str) -> None:
    """A line in the host's log."""
    print(f"megatron-ft: trainer host: {text}", file=sys.stderr, flush=True)


def bind(path: str) -> socket.socket:
    """Listen at ``path``; a host that an earlier supervisor left there is killed."""
    with socket.socket(socket.AF_UNIX) as older:
        try:
            older.connect(path)
            pid, uid, _ = peer_of(older)
            if uid == os.geteuid() and pid != os.getpid():
                os.kill(pid, signal.SIGKILL)
        except OSError:
            pass
    if os.path.lexists(path):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX)
    umask = os.umask(0o177)
    listener.bind(path)
    os.umask(umask)
    listener.listen(64)
    return listener


def peer_of(connection: socket.socket) -> tuple[int, int, int]:
    """Process, user and group at the other end, as the kernel knows them."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    pid, uid, gid = _PEER.unpack(raw)
    return pid, uid, gid


def split(command: list[str]) -> tuple[list[str], list[str]]:
    """Python's own flags in a command, as far as known here, and all words after them.  Pure."""
    words = command[1:]
    count = next((at for at, word in enumerate(words) if word not in SWITCHES), len(words))
    return words[:count], words[count:]


def modules_of(command: list[str]) -> list[str]:
    """Modules to import for a command, in order: torch's, its script's, the framework's."""
    _, words = split(command)
    named: list[str] = []
    try:
        with open(file_of(words[1]) if words[0] == "-m" else words[0], "rb") as file:
            named = imports_of(file.read())
    except (OSError, ValueError, SyntaxError, ImportError) as error:
        say(f"{command} cannot be looked into: {error}")
    framework = [AHEAD] if "--inmem-snapshot" in words else []
    return [*TORCH, *named, *framework]


def file_of(module: str) -> str:
    """The file that ``python -m`` runs, found without importing a package."""
    top, *parts = module.split(".")
    # An editable installation has a finder of its own.
    spec = PathFinder.find_spec(top, [os.getcwd(), *sys.path]) or find_spec(top)
    for part in [*parts, "__main__"]:
        if spec is None or spec.submodule_search_locations is None:
            break
        spec = PathFinder.find_spec(part, list(spec.submodule_search_locations))
    if spec is None or not spec.origin:
        raise ImportError(f"no module {module}")
    return spec.origin


def imports_of(source: bytes) -> list[str]:
    """Modules that a script imports at its top, conditions and ``try`` included.  Pure.

    ``from package import name`` gives ``package:name``.
    """
    found: list[str] = []
    waiting: list[ast.AST] = [ast.parse(source)]
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found += [f"{node.module}:{alias.name}" for alias in node.names]
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.expr):
            waiting += ast.iter_child_nodes(node)
    return found


def installed(name: str) -> bool:
    """True for a module of a package that is installed: a user's own may change, or act."""
    top = name.partition(".")[0]
    places = [sysconfig.get_path(place) for place in ("purelib", "platlib")]
    return top in OURS or PathFinder.find_spec(top, places) is not None


def unfit() -> str:
    """The reason why this process cannot be forked; "" if it can."""
    if len(os.listdir("/proc/self/task")) > 1:
        return "starts a thread"
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith(DEVICES):
            return f"opens {target}"
    return ""


class Host:
    """The process that imports and forks.

    ``environment`` is what it was started with.
    """

    def __init__(self, path: str, environment: dict[str, str]) -> None:
        self._path, self._listener, self._environment = path, bind(path), environment
        self._imports = os.path.join(os.path.dirname(path), IMPORTS)
        self._left_out = [*filter(None, environment.get(LEFT_OUT, "").split(","))]
        self._failed: set[str] = set()
        self._known = 0
        self._unfit = False
        self._poll = select.poll()
        self._poll.register(self._listener, select.POLLIN)
        self._children: dict[int, tuple[int, socket.socket]] = {}

    def preload(self, names: list[str], quiet: bool = False) -> None:
        """Import what is installed of ``names``; what fails is left to the trainers."""
        for name in names:
            module, _, member = name.partition(":")
            left = module in self._left_out or module in self._failed
            if left or name in sys.modules or not installed(module):
                continue
            try:
                # As the statement does: what the package itself does not have may be a module.
                __import__(module, fromlist=[member] if member else [])
            except (Exception, SystemExit) as error:
                self._failed.add(module)
                if not quiet:
                    say(f"{name} is left to the trainers: {type(error).__name__}: {error}")
            if why := unfit():
                say(f"{module} is left to the trainers: importing it {why}")
                self._left_out.append(module)
                self._unfit = True
                self._replace()
                return
        gc.collect()
        gc.freeze()  # pages of objects that nobody collects stay shared

    def _replace(self) -> None:
        """Begin anew without what was unfit, once no child is left whose end is to be reported."""
        if self._unfit and not self._children:
            again = {**self._environment, LEFT_OUT: ",".join(self._left_out)}
            os.execve(sys.executable, sys.orig_argv, again)

    def changes(self) -> dict[str, tuple[str | None, str | None]]:
        """Variables that imports have changed: before and after; None where there was none."""
        before, after = self._environment, os.environ
        names = before.keys() | after.keys()
        both = {name: (before.get(name), after.get(name)) for name in names}
        return {name: pair for name, pair in both.items() if pair[0] != pair[1]}

    def serve(self) -> dict[str, Any]:
        """Fork a child for each request, and report its end; returns in the children only."""
        while True:
            ready = self._poll.poll(LOOK_SECONDS * 1000)
            if not ready:
                self._learn()
            for descriptor, _ in ready:
                if descriptor in self._children:
                    self._poll.unregister(descriptor)
                    report(descriptor, *self._children.pop(descriptor))
                    self._replace()
                else:
                    connection, _ = self._listener.accept()
                    if (request := self._forked(connection)) is not None:
                        return request

    def _forked(self, connection: socket.socket) -> dict[str, Any] | None:
        """Fork for one client; the request in the child, None here."""
        why, request, pid = "the host is replaced, without a module that starts a thread", None, -1
        try:
            if not self._unfit:
                request = receive(connection)
                pid = os.fork()
        except (OSError, ValueError, KeyError, TypeError) as error:
            why = f"the trainer host cannot fork it: {error or type(error).__name__}"
            say(why)
        if request is None or pid < 0:
            tell(connection, {"pid": 0, "why": why})
            connection.close()
            for given in request["fds"] if request else ():
                os.close(given)
            return None
        if not pid:
            for pidfd, (_, other) in self._children.items():
                os.close(pidfd)
                other.close()
            self._listener.close()
            connection.close()
            return request
        for given in request["fds"]:
            os.close(given)
        pidfd = os.pidfd_open(pid)
        self._children[pidfd] = pid, connection
        self._poll.register(pidfd, select.POLLIN)
        tell(connection, {"pid": pid})
        return None

    def _learn(self) -> None:
        """Import what the node's first trainer has noted; end if the node's folder is gone."""
        if not os.path.lexists(self._path):
            sys.exit(0)
        try:
            noted = os.stat(self._imports).st_mtime_ns
            if noted != self._known and not self._unfit:
                self._known = noted
                with open(self._imports, "rb") as file:
                    self.preload([str(name) for name in json.load(file)], quiet=True)
        except (OSError, ValueError) as error:
            if not isinstance(error, FileNotFoundError):
                say(f"{self._imports} cannot be read: {error}")


def receive(connection: socket.socket) -> dict[str, Any]:
    """A request with its four descriptors; ValueError and others for what is none of this user."""
    connection.settimeout(REQUEST_SECONDS)
    fds: list[int] = []
    try:
        if peer_of(connection)[1] != os.geteuid():
            raise ValueError("the request is of another user")
        message, fds, _, _ = socket.recv_fds(connection, 1 << 16, 4)
        while piece := connection.recv(1 << 16):
            message += piece
            if len(message) > MOST_REQUEST_BYTES:
                raise ValueError("the request is too long")
        request: dict[str, Any] = json.loads(message)
        for name in ("argv", "env", "cwd"):
            request[name] = _decoded(request[name])
        if len(fds) != 4 or not fits(request):
            raise ValueError("its variables are longer than the place that /proc shows them in")
        return {**request, "fds": fds}
    except (OSError, ValueError, KeyError, TypeError):
        for given in fds:
            os.close(given)
        raise


def _decoded(given: Any) -> Any:
    """Text of the bytes that a client sends, one letter each, as this interpreter decodes them."""
    if isinstance(given, dict):
        return {_decoded(name): _decoded(value) for name, value in given.items()}
    if isinstance(given, list):
        return [_decoded(one) for one in given]
    return os.fsdecode(given.encode("latin-1"))


def tell(connection: socket.socket, answer: dict[str, Any]) -> None:
    """One line to a client, which may have gone."""
    try:
        connection.sendall(json.dumps(answer).encode() + b"\n")
    except OSError:
        pass


def report(pidfd: int, pid: int, connection: socket.socket) -> None:
    """End what a child has left behind in its group, reap it, and tell its client the status."""
    os.close(pidfd)
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    tell(connection, {"status": status})
    connection.close()


def regions() -> tuple[int, int, int, int]:
    """Start and end of the memory that /proc shows as arguments, then as environment (proc(5))."""
    with open("/proc/self/stat") as file:
        text = file.read()
    fields = text[text.rindex(")") + 2 :].split()
    start, end, first, last = (int(field) for field in fields[45:49])
    return start, end, first, last


def packed(environment: dict[str, str]) -> bytes:
    """Variables as the kernel shows them."""
    return b"".join(
        os.fsencode(name) + b"=" + os.fsencode(value) + b"\0" for name, value in environment.items()
    )


def fits(request: dict[str, Any]) -> bool:
    """True if the variables have room where /proc shows them."""
    _, _, start, end = regions()
    return len(packed(request["env"])) <= end - start


class Child:
    """A forked process on its way to be what a started one would be."""

    def __init__(
        self, request: dict[str, Any], changes: dict[str, tuple[str | None, str | None]]
    ) -> None:
        self._request, self._changes = request, changes

    def run(self) -> None:
        """Become the process, and run the command."""
        self._take_place()
        self._show()
        self._seed()
        _, words = split(self._request["argv"])
        sys.orig_argv = list(self._request["argv"])
        if words[0] == "-m":
            sys.argv = words[1:]
            self._begin(os.getcwd())
            sys.modules["__main__"] = ModuleType("__main__")
            runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
        else:
            sys.argv = words
            self._begin(os.path.dirname(os.path.realpath(words[0])))
            run_script(words[0])

    def _take_place(self) -> None:
        """Streams, session, working directory, limits, processors, signals."""
        given, fds = self._request, self._request["fds"]
        link = fds[3]
        os.set_inheritable(link, False)
        fcntl.fcntl(link, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(link, F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(link, fcntl.F_SETFL, fcntl.fcntl(link, fcntl.F_GETFL) | os.O_ASYNC)
        if select.select([link], [], [], 0)[0]:
            os._exit(1)  # the client has gone, and may run the command itself
        os.setsid()
        for source, target in zip(fds[:3], range(3), strict=True):
            os.dup2(source, target)
            os.close(source)
        sys.stdin = os.fdopen(0, closefd=False)
        os.chdir(given["cwd"])
        os.umask(given["umask"])
        for name, (soft, hard) in given["limits"].items():
            resource.setrlimit(getattr(resource, name), (soft, hard))
        os.sched_setaffinity(0, given["affinity"])
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in given["ignored"]:
            signal.signal(number, signal.SIG_IGN)

    def _show(self) -> None:
        """Have the request's arguments and variables, also for readers of /proc."""
        environment: dict[str, str] = self._request["env"]
        start, end, first, last = regions()
        argv = b"".join(os.fsencode(word) + b"\0" for word in self._request["argv"])
        for at, to, content in (
            (start, end, argv[: end - start - 1]),
            (first, last, packed(environment)),
        ):
            ctypes.memset(at, 0, to - at)
            ctypes.memmove(at, content, len(content))
        os.environ.clear()
        os.environ.update(after_imports(environment, self._changes))

    def _seed(self) -> None:
        """Fresh random states, and the number of threads, where imports have fixed them."""
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed()
        threads = os.environ.get("OMP_NUM_THREADS", "")
        if torch := sys.modules.get("torch"):
            torch.default_generator.seed()
            if threads.isdecimal() and int(threads) > 0:
                torch.set_num_threads(int(threads))

    def _begin(self, folder: str) -> None:
        """``sitecustomize``, which the host did not run, then the search path, as ``site`` does."""
        sys.modules.pop("sitecustomize", None)
        try:
            import_module("sitecustomize")
        except ImportError as error:
            if error.name != "sitecustomize":
                raise
        sys.path.insert(0, folder)


def after_imports(
    given: dict[str, str], changes: dict[str, tuple[str | None, str | None]]
) -> dict[str, str]:
    """``given`` as it would be after imports that have made ``changes``.  Pure."""
    found = dict(given)
    for name, (before, after) in changes.items():
        if given.get(name) == before:
            found.pop(name, None)
            found.update({} if after is None else {name: after})
    return found


def run_script(path: str) -> None:
    """Run a file as ``python FILE`` does: ``__main__`` stays its module to the very end."""
    name = os.path.abspath(path)
    loader = SourceFileLoader("__main__", name)
    main_module = ModuleType("__main__")
    vars(main_module).update(__file__=name, __loader__=loader, __builtins__=__builtins__)
    sys.modules["__main__"] = main_module
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        print(f"{sys.executable}: can't open file {name!r}: {error}", file=sys.stderr)
        sys.exit(NO_FILE)
    exec(compile(source, name, "exec", dont_inherit=True), vars(main_module))


if __name__ == "__main__":
    main()

"""Whatever we open: somebody else's, open to others, a link or no plain file is refused, unread."""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.arena.arena import Arena
from megatron_ft.checkpoint.disk_format import MANIFEST
from megatron_ft.checkpoint.drain import publish, write_shards
from megatron_ft.checkpoint.drained import open_checkpoint
from megatron_ft.checkpoint.live import open_live
from megatron_ft.checkpoint.load import open_shard, read_manifest
from megatron_ft.checkpoint.source import open_newest
from megatron_ft.cli import clean
from megatron_ft.core import private_files
from megatron_ft.core.environment import SOCKET_NAME, ProcessEnvironment
from megatron_ft.core.errors import ControlPlaneError, MegatronFTError, UntrustedFileError
from megatron_ft.erasure.worker import connect
from megatron_ft.launchers.virtual import VirtualCluster
from megatron_ft.rpc.client import TrainerClient
from megatron_ft.rpc.local_query import ask
from megatron_ft.rpc.messages import StatusRequest
from megatron_ft.smp.node_folder import NodeState, lock_folder
from megatron_ft.smp.processes import Writers
from megatron_ft.supervisor.job_state import JobState, read_record
from tests.support.disk_samples import Memory
from tests.support.tmpfs import mount_tmpfs

USER = 65534
"""Who runs the openers, so that this test's own user, root, is a stranger."""
CANARY = b"this must not have been read"
ADVICE = ("remove", "choose", "chmod", "copy")

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of others")


@dataclass(frozen=True)
class Kind:
    """Something that we open: how a good one is made (its path is returned), and who opens it."""

    make: Callable[[Path], Path]
    open: Callable[[Path], Any]
    shared: bool = False
    """Others may read it, and it may have several names."""


def _arena(folder: Path) -> Path:
    return Memory(folder).path("dp0")


def _checkpoint(folder: Path) -> Path:
    memory = Memory(folder / "memory")
    memory.commit(1, 10)
    target = folder / "drains" / "iter_0000010-1.1-00000000"
    with open_newest(open_live(memory.root, memory.job)) as shards:
        write_shards(shards, target)
        publish(target, shards.info, shards.job, shards.lineage, len(shards))
    return target


def _open_shard(path: Path) -> None:
    manifest = read_manifest(path.parent)
    with open_shard(path.parent, "dp0", manifest) as reader:
        reader.verify()


def _state(folder: Path) -> Path:
    JobState(folder / "state", "llm").close()
    return folder / "state"


def _node(folder: Path) -> Path:
    (folder / "node").mkdir(mode=0o700)
    return folder / "node"


def _file(name: str, content: bytes) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path = _node(folder) / name
        private_files.replace_file(path, content)
        return path

    return make


def _socket(folder: Path) -> Path:
    path = _node(folder) / SOCKET_NAME
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    path.chmod(0o600)
    return path


def _environment(path: Path) -> ProcessEnvironment:
    return ProcessEnvironment("job", "node", path.parent, 1)


def _ask(path: Path) -> None:
    try:
        ask(path, StatusRequest(), 0.1)
    except ControlPlaneError as error:
        assert "it is dead" in str(error)


def _as_trainer(path: Path) -> None:
    TrainerClient(_environment(path), 0).close()


def _as_encoder(path: Path) -> None:
    with connect(_environment(path), lambda: None):
        pass


FILES = {
    "arena": Kind(_arena, lambda path: Arena.open(path).close()),
    "state file with the secret": Kind(
        lambda folder: _state(folder) / "job.json", lambda path: read_record(path.parent, "llm")
    ),
    "lock of the state": Kind(
        lambda folder: _state(folder) / "lock", lambda path: JobState(path.parent, "llm").close()
    ),
    "node.json": Kind(_file("node.json", b"{}"), lambda path: NodeState.load(path.parent)),
    "writers.json": Kind(
        _file("writers.json", b"[]"), lambda path: Writers(path.parent, print).adopt()
    ),
    "smp.json": Kind(_file("smp.json", b"{}"), private_files.read_file),
    "smp.lock of the SMP": Kind(
        _file("smp.lock", b""), lambda path: lock_folder(path.parent, "job").close()
    ),
    "smp.lock of clean": Kind(
        _file("smp.lock", b""), lambda path: os.close(clean._open_lock(path) or -1)
    ),
    "manifest": Kind(
        lambda folder: _checkpoint(folder) / MANIFEST,
        lambda path: read_manifest(path.parent),
        shared=True,
    ),
    "drained shard": Kind(
        lambda folder: _checkpoint(folder) / "dp0.safetensors", _open_shard, shared=True
    ),
}
SOCKETS = {
    "socket of a question": Kind(_socket, _ask),
    "socket of a trainer": Kind(_socket, _as_trainer),
    "socket of an encoder": Kind(_socket, _as_encoder),
}
FOLDERS = {
    "folder of an arena": Kind(lambda f: _arena(f).parent, lambda f: Arena.open(f / "dp0.arena")),
    "state folder": Kind(_state, lambda folder: JobState(folder, "llm").close()),
    "node's folder of the SMP": Kind(_node, private_files.make_folder),
    "node's folder of a socket": Kind(
        lambda folder: _socket(folder).parent, lambda folder: _ask(folder / SOCKET_NAME)
    ),
    "root of the jobs": Kind(_node, lambda folder: VirtualCluster("job", ["n0"], folder)),
    "root for clean": Kind(_node, clean.find_jobs),
    "checkpoint": Kind(_checkpoint, read_manifest, shared=True),
    "checkpoint that is written": Kind(
        _checkpoint, lambda folder: write_shards({}, folder), shared=True
    ),
}
ALL = FILES | SOCKETS | FOLDERS


def each(kinds: dict[str, Kind]) -> Any:
    return pytest.mark.parametrize("kind", kinds.values(), ids=kinds.keys())


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that an ordinary user can reach; pytest's own are closed to all but its user."""
    with tempfile.TemporaryDirectory(prefix="private-", dir="/dev/shm") as name:
        if os.geteuid() == 0:
            os.chown(name, USER, USER)
        yield Path(name)


@contextmanager
def ordinary_user() -> Iterator[None]:
    """The kernel checks, and we look at, the effective user: no process of its own is needed."""
    if os.geteuid() != 0:
        yield
        return
    os.setegid(USER)
    os.seteuid(USER)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


def made(kind: Kind, folder: Path) -> Path:
    with ordinary_user():
        return kind.make(folder)


def opens(kind: Kind, path: Path) -> None:
    """As an ordinary user."""
    with ordinary_user():
        kind.open(path)


def refused(kind: Kind, path: Path) -> None:
    """It is refused by an error of ours that names it and says what to do, without being read."""
    with pytest.raises(MegatronFTError) as caught:
        opens(kind, path)
    message = str(caught.value)
    assert any(word in message for word in ADVICE), message
    assert path.name in message, message
    assert "damaged" not in message and CANARY.decode() not in message, message


def spoil(path: Path) -> None:
    """Whoever reads it says something of its content."""
    if path.is_file():
        path.write_bytes(CANARY * 100)


@each(ALL)
def test_what_is_ours_is_opened(kind: Kind, folder: Path) -> None:
    opens(kind, made(kind, folder))


@needs_root
@each(ALL)
@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_somebody_elses(kind: Kind, folder: Path, mode: int) -> None:
    path = made(kind, folder)
    spoil(path)
    os.chown(path, USER + 1, USER + 1)
    path.chmod(mode | (0o111 if path.is_dir() else 0))
    refused(kind, path)


@each(ALL)
@pytest.mark.parametrize("others", [0o040, 0o020, 0o004, 0o002])
def test_open_to_others(kind: Kind, folder: Path, others: int) -> None:
    """Checkpoints may be read by others, and their folders written by the user's group."""
    path = made(kind, folder)
    mode = 0o700 if path.is_dir() else 0o600
    path.chmod(mode | others)
    if is_allowed(kind, others):
        opens(kind, path)
        return
    spoil(path)
    refused(kind, path)


def is_allowed(kind: Kind, others: int) -> bool:
    reading = not others & 0o022
    if kind in (FOLDERS["checkpoint"], FOLDERS["checkpoint that is written"]):
        return others != 0o002
    if kind is FOLDERS["state folder"]:
        return True  # it is closed instead
    roots = ("folder of an arena", "root of the jobs", "root for clean")
    lock = FILES["smp.lock of clean"]  # nothing secret is in it
    return reading and (kind.shared or kind in (lock, *(FOLDERS[name] for name in roots)))


@each(ALL)
def test_a_link(kind: Kind, folder: Path) -> None:
    path = made(kind, folder)
    spoil(path)
    real = path.with_name("real")
    path.rename(real)
    path.symlink_to(real)
    refused(kind, path)


@each(FILES | SOCKETS)
@pytest.mark.parametrize("what", ["fifo", "folder"])
def test_no_plain_file(kind: Kind, folder: Path, what: str) -> None:
    """In particular a FIFO, which would keep its reader waiting."""
    path = made(kind, folder)
    path.unlink()
    with ordinary_user():
        os.mkfifo(path, 0o600) if what == "fifo" else path.mkdir(mode=0o700)
    refused(kind, path)


@each(FOLDERS)
def test_no_folder(kind: Kind, folder: Path) -> None:
    path = made(kind, folder)
    shutil.rmtree(path)
    with ordinary_user():
        path.write_bytes(CANARY)
    refused(kind, path)


@each(FILES)
def test_a_second_name(kind: Kind, folder: Path) -> None:
    path = made(kind, folder)
    os.link(path, folder / "second")
    if kind.shared:
        opens(kind, path)
    else:
        spoil(path)
        refused(kind, path)


@needs_root
def test_a_link_of_somebody_elses_on_the_way(folder: Path) -> None:
    (folder / "real").mkdir(mode=0o700)
    os.chown(folder / "real", USER, USER)
    way = folder / "way"
    way.symlink_to("real")
    os.lchown(way, USER + 1, USER)
    for kind in (FOLDERS["node's folder of the SMP"], FOLDERS["root of the jobs"]):
        with pytest.raises(MegatronFTError, match=f"user {USER + 1} made"):
            opens(kind, way / "below")
    os.lchown(way, USER, USER)
    opens(FOLDERS["node's folder of the SMP"], way / "below")


@needs_root
def test_a_server_of_somebody_elses_at_a_socket_of_ours(folder: Path) -> None:
    path = made(SOCKETS["socket of a question"], folder)
    path.unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        os.chown(path, USER, USER)
        path.chmod(0o600)
        listener.listen()
        with ordinary_user(), pytest.raises(MegatronFTError, match="served by a process of user 0"):
            ask(path, StatusRequest(), 1.0)


def test_exchanged_before_it_is_opened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that is put there after all that could be looked at before."""
    path = made(FILES["node.json"], folder)
    real_open = os.open

    def exchange(name: Any, flags: int, *rest: Any, **more: Any) -> int:
        if Path(name).name == path.name:
            path.unlink()
            path.symlink_to("/etc/passwd")
        return real_open(name, flags, *rest, **more)

    monkeypatch.setattr(os, "open", exchange)
    refused(FILES["node.json"], path)


def test_exchanged_after_it_was_opened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read is what was checked, not what has its name by then."""
    path = made(FILES["smp.json"], folder)
    real_fstat = os.fstat

    def exchange(descriptor: int) -> os.stat_result:
        info = real_fstat(descriptor)
        if os.path.samestat(info, path.stat()):
            path.rename(path.with_name("kept"))
            path.write_bytes(CANARY)
        return info

    monkeypatch.setattr(os, "fstat", exchange)
    with ordinary_user():
        assert private_files.read_file(path) == b"{}"


@each({name: kind for name, kind in FILES.items() if "lock" not in name})
def test_vanished(kind: Kind, folder: Path) -> None:
    """Absent means absent: the initial value, or an error of ours or of the system's."""
    path = made(kind, folder)
    path.unlink()
    try:
        opens(kind, path)
    except (MegatronFTError, FileNotFoundError) as error:
        assert "damaged" not in str(error)


def test_a_file_that_is_too_long(folder: Path) -> None:
    path = made(FILES["smp.json"], folder)
    with ordinary_user():
        os.truncate(path, 1 << 40)
        with pytest.raises(MegatronFTError, match="more than"):
            private_files.read_file(path)


def test_modes_of_what_is_made(folder: Path) -> None:
    """Whatever the umask."""
    old = os.umask(0)
    try:
        with ordinary_user():
            private_files.make_folder(folder / "made")
            private_files.replace_file(folder / "made" / "file", b"x")
        assert (folder / "made").stat().st_mode & 0o777 == 0o700
        assert (folder / "made" / "file").stat().st_mode & 0o777 == 0o600
        assert os.listdir(folder / "made") == ["file"]
    finally:
        os.umask(old)


def test_a_drain_is_readable_as_the_umask_says(folder: Path) -> None:
    for umask, expected in ((0o000, 0o644), (0o027, 0o640), (0o077, 0o600)):
        old = os.umask(umask)
        try:
            with ordinary_user():
                target = _checkpoint(folder / f"{umask:o}")
        finally:
            os.umask(old)
        modes = {path.stat().st_mode & 0o777 for path in target.iterdir()}
        assert modes == {expected}
        with ordinary_user():
            assert open_checkpoint(target).snapshots()


def test_what_shall_be_durable_is_synced_before_it_has_its_name_and_the_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power loss leaves the old file or the new one, and after the return the new one."""
    steps: list[tuple[str, int]] = []
    fsync, rename = os.fsync, Path.rename

    def synced(descriptor: int) -> None:
        steps.append(("sync", os.fstat(descriptor).st_ino))
        fsync(descriptor)

    def renamed(path: Path, target: Path) -> Path:
        steps.append(("rename", path.stat().st_ino))
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    path = tmp_path / "job.json"
    private_files.replace_file(path, b"content", durable=True)
    file, folder = path.stat().st_ino, tmp_path.stat().st_ino
    assert steps == [("sync", file), ("rename", file), ("sync", folder)]


def test_what_was_rewritten_once_needs_no_new_space(tmp_path: Path) -> None:
    """On a tmpfs that somebody else has filled."""
    for small in mount_tmpfs(tmp_path / "small", "size=1m,mode=0700"):
        path = small / "node.json"
        private_files.rewrite_file(path, b'{"first": 1}')
        with pytest.raises(OSError, match="space"), open(small / "filler", "wb", 0) as filler:
            while True:
                filler.write(bytes(4096))
        with pytest.raises(OSError, match="space"):
            private_files.replace_file(path, b"{}")
        for number in range(3):
            content = json.dumps({"a": number * 1000}).encode()
            private_files.rewrite_file(path, content)
            assert json.loads(private_files.read_file(path)) == {"a": number * 1000}
        assert path.stat().st_mode & 0o777 == 0o600


def test_a_rewritten_file_grows_and_shrinks_and_replaces_a_link(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    path.symlink_to("elsewhere")
    for content in ("x" * 10_000, "y", "z" * 5000):
        private_files.rewrite_file(path, json.dumps(content).encode())
        assert json.loads(private_files.read_file(path)) == content
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(("mode", "trusted"), [(0o1777, True), (0o777, False), (0o770, False)])
def test_a_folder_of_many_users_is_one_from_which_nobody_takes_names(
    tmp_path: Path, mode: int, trusted: bool
) -> None:
    """As /tmp and /dev/shm are."""
    path = tmp_path / "shared" / "file"
    path.parent.mkdir()
    path.parent.chmod(mode)
    if trusted:
        private_files.replace_file(path, b"content")
        assert private_files.read_file(path) == b"content"
    else:
        with pytest.raises(UntrustedFileError, match="others may put files there"):
            private_files.replace_file(path, b"content")

"""Compiled kernels kept: in memory for the process, on disk for all processes of the user.

The key is everything that can change the bits, by content: kernel headers, the rendered unit, the
architecture, NVRTC's version, the options. An entry is written beside its place and renamed, and
carries a checksum, so a reader sees a whole entry or none; what does not check is a miss. One
process compiles a key while others wait for its flock, which the kernel drops with the process.
A folder that cannot be used costs one `CacheWarning`; the process then goes on in memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import functools
import hashlib
import json
import logging
import os
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from chord import env
from chord.errors import CacheWarning, CompileError
from chord.jit import compiler, place, source
from chord.jit.compiler import CompileReport, Cubin, Origin
from chord.jit.params import FixedKernel
from chord.jit.place import ENTRY_SUFFIX, LOCK_SUFFIX, TEMPORARY_SUFFIX
from chord.plan.config import Config

_LOG = logging.getLogger("chord")

MESSAGE_AFTER_S = 5.0
# A compile takes seconds. Who holds a lock for longer is stuck: compile beside it.
GIVE_UP_AFTER_S = 120.0
_POLL_S = 0.02

_MAGIC = b"chord-kernel-1\n"
_DIGEST_BYTES = 32


def cubin_for(
    config: Config | FixedKernel, arch: str, addressing: str = "Indexed", *, ahead: bool = False
) -> Cubin:
    """Return the compiled kernel of a configuration: from memory, from disk, or compiled now.

    Args:
        config: The configuration, or a kernel without one.
        arch: Architecture to compile for, "sm_90a"; it need not be this machine's.
        addressing: How rows are found, a type of kernels/addressing; "" for a kernel without.
        ahead: Whether this call is there to compile, so that CHORD_JIT=cached does not forbid it.

    Raises:
        CompileError: It does not compile, or CHORD_JIT=cached and the cache does not give it.
    """
    unit, origin = _unit_of(config, arch, addressing)
    key = _key_of(unit, origin)
    describe = f"{origin.label} for {arch}"

    def build() -> Cubin:
        if env.jit_mode() == "cached" and not ahead:
            store = _STATE.store()
            closed = store.why_unreadable(key)
            if closed is not None:
                raise CompileError(
                    f"{describe} could not be read from the kernel cache ({closed}) and "
                    f"CHORD_JIT=cached forbids compiling; let this user read that folder, set "
                    f"CHORD_CACHE_DIR to one that it can read, or unset CHORD_JIT"
                )
            raise CompileError(
                f"{describe} is not in the kernel cache ({store.folder or 'memory only'}) and "
                f"CHORD_JIT=cached forbids compiling; run `chord compile --arch {arch}` or unset "
                f"CHORD_JIT"
            )
        _LOG.info("compile %s", describe)
        return dataclasses.replace(compiler.compile_unit(unit, arch), origin=origin)

    return _STATE.get_or_build(key, build, describe, ahead=ahead)


def is_kept(config: Config | FixedKernel, arch: str, addressing: str) -> bool:
    """Return whether the kernel of a configuration is on disk, for later processes to find.

    Args:
        config: The configuration, or a kernel without one.
        arch: The architecture.
        addressing: How rows are found.
    """
    return _STATE.store().read(_key_of(*_unit_of(config, arch, addressing))) is not None


def _unit_of(config: Config | FixedKernel, arch: str, addressing: str) -> tuple[str, Origin]:
    headers = source.headers_of(addressing, config)
    label = f"{config.label()} {addressing}".rstrip()
    origin = Origin(headers, _digest_of(headers), compiler.nvrtc_version(), label, arch)
    return source.render(config, addressing), origin


@functools.cache
def _digest_of(headers: tuple[str, ...]) -> str:
    return source.digest_headers(headers, source.KERNELS)


def _key_of(unit: str, origin: Origin) -> str:
    return cache_key(unit, origin.arch, origin.kernels, origin.nvrtc)


def cache_key(unit: str, arch: str, digest: str, nvrtc: str) -> str:
    """Return the key of a unit: a hash of all that can change its machine code."""
    parts = {
        "arch": arch,
        "kernels": digest,
        "nvrtc": nvrtc,
        "options": compiler.OPTIONS,
        "source": unit,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class DiskStore:
    """Checked entries in one folder, written whole; every failure to write is told once.

    Args:
        folder: Where entries lie; made with mode 0700 when the first is written. None keeps
            nothing.
        warn: Called with the reason when the folder cannot be used.
    """

    def __init__(self, folder: Path | None, warn: Callable[[str], None]) -> None:
        self.folder = folder
        self._warn = warn

    def path(self, key: str) -> Path | None:
        """Return where the entry of `key` lies, or None without a folder."""
        return None if self.folder is None else self.folder / f"{key}{ENTRY_SUFFIX}"

    def read(self, key: str) -> Cubin | None:
        """Return the entry of `key`; None if there is none, or one that does not check."""
        path = self.path(key)
        if path is None:
            return None
        try:
            return decode_entry(path.read_bytes())
        except OSError:
            return None

    def why_unreadable(self, key: str) -> str | None:
        """Return why it cannot be known whether the entry of `key` is there, or None."""
        path = self.path(key)
        if path is None:
            return None
        try:
            path.open("rb").close()
        except FileNotFoundError:
            return None
        except OSError as error:
            return f"{path}: {error.strerror or error}"
        return None

    def write(self, key: str, cubin: Cubin) -> None:
        """Write an entry beside its place, then rename it there."""
        path = self.path(key)
        if path is None:
            return
        temporary = None
        try:
            place.make(path.parent)
            descriptor, temporary = tempfile.mkstemp(
                TEMPORARY_SUFFIX, f"{key[:16]}.", path.parent
            )  # 0600
            with os.fdopen(descriptor, "wb") as file:
                file.write(encode_entry(cubin))
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError as error:
            if temporary is not None:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
            self._warn(f"{path.parent}: {error.strerror or error}")

    @contextlib.contextmanager
    def lock(self, key: str, describe: str) -> Iterator[None]:
        """Hold the key's lock, or go on without it where locks cannot be had."""
        descriptor = self._open_lock(key)
        try:
            if descriptor is not None:
                _wait_for_lock(descriptor, describe)
            yield
        finally:
            if descriptor is not None:
                # Unlock by name: a child forked meanwhile holds a copy of the descriptor.
                with contextlib.suppress(OSError):
                    fcntl.flock(descriptor, fcntl.LOCK_UN)
                os.close(descriptor)

    def _open_lock(self, key: str) -> int | None:
        path = self.path(key)
        if path is None:
            return None
        try:
            place.make(path.parent)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            return os.open(path.with_suffix(LOCK_SUFFIX), flags, 0o600)
        except OSError as error:
            self._warn(f"{path.parent}: {error.strerror or error}")
            return None


def _wait_for_lock(descriptor: int, describe: str) -> None:
    started = time.monotonic()
    told = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES, errno.EINTR):
                return  # no locks on this file system: duplicates are harmless
        waited = time.monotonic() - started
        if waited > GIVE_UP_AFTER_S:
            _LOG.warning("waited %.0f s for %s; compile it here as well", waited, describe)
            return
        if waited > MESSAGE_AFTER_S and not told:
            told = True
            _LOG.warning(
                "wait for another process to compile %s (at most %.0f s)",
                describe,
                GIVE_UP_AFTER_S,
            )
        time.sleep(_POLL_S)


def encode_entry(cubin: Cubin) -> bytes:
    """Return an entry's bytes: magic, checksum of the rest, a line of JSON, the cubin."""
    report = None if cubin.report is None else dataclasses.asdict(cubin.report)
    origin = None if cubin.origin is None else dataclasses.asdict(cubin.origin)
    head = {"report": report, "origin": origin, "code_bytes": len(cubin.code)}
    payload = json.dumps(head, sort_keys=True).encode() + b"\n" + cubin.code
    return _MAGIC + hashlib.sha256(payload).digest() + payload


def decode_entry(entry: bytes) -> Cubin | None:
    """Return the cubin of an entry, or None if the entry is not whole."""
    start = len(_MAGIC) + _DIGEST_BYTES
    digest, payload = entry[len(_MAGIC) : start], entry[start:]
    if not entry.startswith(_MAGIC) or hashlib.sha256(payload).digest() != digest:
        return None
    head, _, code = payload.partition(b"\n")
    try:
        fields = json.loads(head)
        report, origin = fields["report"], fields.get("origin")
        return Cubin(
            code=code,
            report=None if report is None else CompileReport(**report),
            origin=None
            if origin is None
            else Origin(**origin | {"headers": (*origin["headers"],)}),
        )
    except (ValueError, KeyError, TypeError):
        return None


@dataclasses.dataclass(frozen=True)
class Entry:
    """An entry on disk, or what is left of one.

    Attributes:
        path: The file.
        size: Its bytes.
        is_current: Whether this installation's kernels and NVRTC made it, so it can be used again.
    """

    path: Path
    size: int
    is_current: bool


def entries(folder: Path) -> list[Entry]:
    """Return what lies in a folder of kernels: entries, and files of writers that were killed."""
    found = []
    for path in sorted(folder.glob("*")):
        with contextlib.suppress(OSError):  # another process may delete it meanwhile
            if path.suffix == ENTRY_SUFFIX:
                content = path.read_bytes()
                cubin = decode_entry(content)
                is_current = cubin is not None and _is_current(cubin.origin)
                found.append(Entry(path, len(content), is_current))
            elif path.suffix == TEMPORARY_SUFFIX:
                state = path.stat()
                is_new = time.time() - state.st_mtime < GIVE_UP_AFTER_S
                found.append(Entry(path, state.st_size, is_new))
    return found


def prune(folder: Path) -> tuple[list[Entry], list[OSError]]:
    """Delete the entries that this installation cannot use; return those gone, and what failed."""
    gone, failed = [], []
    for entry in entries(folder):
        if entry.is_current:
            continue
        try:
            entry.path.unlink(missing_ok=True)
            gone.append(entry)
            if entry.path.suffix == ENTRY_SUFFIX:
                entry.path.with_suffix(LOCK_SUFFIX).unlink(missing_ok=True)
        except OSError as error:
            failed.append(error)
    return gone, failed


def _is_current(origin: Origin | None) -> bool:
    if origin is None or origin.nvrtc != compiler.nvrtc_version():
        return False
    try:
        return origin.kernels == _digest_of(origin.headers)
    except OSError:  # a header that is no more
        return False


class _State:
    """What one process has compiled or read, and its store; a forked child keeps the memory."""

    def __init__(self) -> None:
        self._memory: dict[str, Cubin] = {}
        self._store: tuple[Path | None, DiskStore] | None = None
        self._warned = False
        self.reset_locks()

    def reset_locks(self) -> None:
        """Forget locks that threads of a parent process held when it forked."""
        self._guard = threading.Lock()
        self._key_locks: dict[str, threading.Lock] = {}

    def get_or_build(
        self, key: str, build: Callable[[], Cubin], describe: str, *, ahead: bool = False
    ) -> Cubin:
        """Return the entry of `key`, made by `build` if neither memory nor disk has it."""
        cubin = self._memory.get(key)
        if cubin is not None:
            return cubin
        with self._guard:
            key_lock = self._key_locks.setdefault(key, threading.Lock())
        with key_lock:
            cubin = self._memory.get(key)
            if cubin is None:
                cubin = self._read_or_build(key, build, describe, ahead)
                self._memory[key] = dataclasses.replace(cubin, seconds=0.0, log="")
        return cubin

    def _read_or_build(
        self, key: str, build: Callable[[], Cubin], describe: str, ahead: bool
    ) -> Cubin:
        store = self.store()
        cubin = store.read(key)
        if cubin is not None:
            return cubin
        if env.jit_mode() == "cached" and not ahead:
            return build()
        with store.lock(key, describe):
            cubin = store.read(key)
            if cubin is None:
                cubin = build()
                store.write(key, cubin)
        return cubin

    def store(self) -> DiskStore:
        """Return the store of the folder that the environment names now."""
        named = env.cache_dir()
        if self._store is None or self._store[0] != named:
            found = place.find()
            if found.trouble is not None:
                self._warn(found.trouble)
            self._store = (named, DiskStore(found.folder, self._warn))
        return self._store[1]

    def _warn(self, reason: str) -> None:
        if self._warned:
            return
        self._warned = True
        warnings.warn(
            f"compiled kernels cannot be kept in the cache as asked ({reason}); this process goes "
            f"on, later ones may compile again: set CHORD_CACHE_DIR to a folder that you can write",
            CacheWarning,
            stacklevel=2,
        )


_STATE = _State()
os.register_at_fork(after_in_child=_STATE.reset_locks)

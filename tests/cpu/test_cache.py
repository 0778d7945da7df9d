"""The kernel cache under faults: field cases 7 (b) to (e) and 8 (a) to (c)."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import re
import resource
import signal
import stat
import subprocess
import sys
import textwrap
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from chord.errors import CacheWarning, CompileError
from chord.jit import cache, compiler, place
from chord.jit.compiler import CompileReport, Cubin
from chord.plan.config import DecodeConfig

CUBIN = Cubin(code=b"\x7fELF" + bytes(range(256)) * 40, report=CompileReport(80, 0, 0, 0))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CHORD_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels"


def never() -> Cubin:
    pytest.fail("compiled although the cache holds the kernel")


def fork_safe() -> multiprocessing.context.ForkContext:
    return multiprocessing.get_context("fork")


def run_in_child(body, *arguments: object) -> int:
    process = fork_safe().Process(target=body, args=arguments)
    process.start()
    process.join(60)
    assert process.exitcode is not None, "the child hangs"
    return process.exitcode


def test_an_entry_is_private_and_comes_back_whole(folder: Path) -> None:
    assert cache._State().get_or_build("key", lambda: CUBIN, "it") == CUBIN
    assert cache._State().get_or_build("key", never, "it") == CUBIN
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert not list(folder.glob("*.tmp"))


@pytest.mark.field_case(7)
@pytest.mark.parametrize("keep", [0.0, 0.5, 0.999])
def test_truncated_entries_are_misses_and_heal(folder: Path, keep: float) -> None:
    cache._State().get_or_build("key", lambda: CUBIN, "it")
    (entry,) = folder.glob("*.kernel")
    whole = entry.read_bytes()
    entry.write_bytes(whole[: int(len(whole) * keep)])
    assert cache._State().get_or_build("key", lambda: CUBIN, "it") == CUBIN
    assert entry.read_bytes() == whole


def test_every_flipped_byte_is_a_miss() -> None:
    whole = cache.encode_entry(CUBIN)
    assert cache.decode_entry(whole) == CUBIN
    for at in (0, 20, 50, 60, len(whole) // 2, len(whole) - 1):
        broken = bytearray(whole)
        broken[at] ^= 1
        assert cache.decode_entry(bytes(broken)) is None


def compile_slowly(log: str, wait_for: multiprocessing.synchronize.Barrier | None = None) -> None:
    def build() -> Cubin:
        with open(log, "a") as file:
            file.write("c")
        time.sleep(0.3)
        return CUBIN

    if wait_for is not None:
        wait_for.wait()
    got = cache._State().get_or_build("key", build, "it")
    os._exit(0 if got == CUBIN else 1)


@pytest.mark.field_case(7)
def test_sixteen_processes_compile_once(folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    barrier = fork_safe().Barrier(16)
    workers = [
        fork_safe().Process(target=compile_slowly, args=(str(log), barrier)) for _ in range(16)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0] * 16
    assert log.read_text() == "c"


@pytest.mark.field_case(7)
def test_a_killed_compiler_blocks_nobody(folder: Path, tmp_path: Path) -> None:
    for moment in range(10):
        log = tmp_path / f"log{moment}"
        worker = fork_safe().Process(target=compile_slowly, args=(str(log),))
        worker.start()
        time.sleep(0.02 + 0.035 * moment)  # before, during and after the compile
        os.kill(worker.pid, signal.SIGKILL)
        worker.join(10)
        started = time.monotonic()
        assert cache._State().get_or_build("key", lambda: CUBIN, "it") == CUBIN
        assert time.monotonic() - started < 2
        for entry in folder.glob("*.kernel"):
            entry.unlink()


@pytest.mark.field_case(7)
def test_a_lock_file_of_a_dead_process_does_not_block(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "key.lock").write_text("4194303\n")
    assert cache._State().get_or_build("key", lambda: CUBIN, "it") == CUBIN


@pytest.mark.field_case(7)
def test_waiting_is_said_and_ends(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cache, "MESSAGE_AFTER_S", 0.05)
    monkeypatch.setattr(cache, "GIVE_UP_AFTER_S", 0.2)
    folder.mkdir(parents=True)
    with open(folder / "key.lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert cache._State().get_or_build("key", lambda: CUBIN, "it") == CUBIN
    said = [record.message for record in caplog.records]
    assert said[0].startswith("wait for another process to compile it")
    assert "compile it here as well" in said[1]


@pytest.mark.field_case(7)
def test_a_fork_before_and_after_the_first_use_works(folder: Path) -> None:
    state = cache._State()

    def child() -> None:
        os._exit(0 if state.get_or_build("key", lambda: CUBIN, "it") == CUBIN else 1)

    with state._guard:  # as if another thread held it when the process forked
        os_fork_hook = state.reset_locks

        def child_after_reset() -> None:
            os_fork_hook()
            child()

        assert run_in_child(child_after_reset) == 0
    assert state.get_or_build("key", never, "it") == CUBIN
    assert run_in_child(child) == 0


def as_nobody(body) -> None:
    os.setgroups([])
    os.setgid(12345)
    os.setuid(12345)
    body()


def expect_one_warning() -> None:
    state = cache._State()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for key in ("one", "two", "one"):
            assert state.get_or_build(key, lambda: CUBIN, key) == CUBIN, "no kernel"
    named = [w for w in caught if w.category is CacheWarning]
    text = [str(w.message) for w in named]
    os._exit(0 if len(named) == 1 and "CHORD_CACHE_DIR" in text[0] else 1)


@pytest.mark.field_case(8)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_read_only_folder_costs_one_warning(folder: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    folder.mkdir(parents=True)
    for part in (folder, folder.parent):
        part.chmod(0o555)
    assert run_in_child(as_nobody, expect_one_warning) == 0
    assert not list(folder.iterdir())


@pytest.mark.field_case(8)
def test_a_folder_that_cannot_be_made_costs_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CHORD_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert run_in_child(expect_one_warning) == 0


def with_small_files(body) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    body()


@pytest.mark.field_case(8)
def test_a_full_disk_costs_one_warning_and_leaves_nothing_behind(folder: Path) -> None:
    assert run_in_child(with_small_files, expect_one_warning) == 0
    assert {path.suffix for path in folder.iterdir()} == {".lock"}


@pytest.mark.field_case(8)
def test_a_full_tmpfs_costs_one_warning(folder: Path) -> None:
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=4k,mode=700", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("tmpfs cannot be mounted here; the test above fills a quota instead")
    try:
        assert run_in_child(expect_one_warning) == 0
        assert not list(folder.glob("*.kernel")) and not list(folder.glob("*.tmp"))
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_folder_open_to_everyone_is_not_trusted(folder: Path) -> None:
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert run_in_child(expect_one_warning) == 0
    assert not list(folder.iterdir())


@pytest.mark.field_case(8)
@pytest.mark.parametrize("home", [None, "/", "/nonexistent"])
def test_without_a_home_a_private_temporary_folder_serves(
    home: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CHORD_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    if home is not None:
        monkeypatch.setenv("HOME", home)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert run_in_child(expect_one_warning) == 0
    private = tmp_path / f"chord-{os.geteuid()}"
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    assert len(list(private.glob("*.kernel"))) == 2


def test_a_temporary_folder_of_somebody_else_is_not_used(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    private = tmp_path / f"chord-{os.geteuid()}"
    private.mkdir()
    private.chmod(0o755)
    assert place._private_temporary_folder() is None
    private.rmdir()
    private.symlink_to(tmp_path)
    assert place._private_temporary_folder() is None


CONFIG = DecodeConfig(max_tokens=8, warps=8, block_k=128, stages=2)


def test_compiling_ahead_fills_the_cache_for_cached_mode(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr(compiler, "compile_unit", lambda *_: CUBIN)
    monkeypatch.setattr(cache, "_STATE", cache._State())
    monkeypatch.setenv("CHORD_JIT", "cached")
    assert not cache.is_kept(CONFIG, "sm_90a", "Indexed")
    with pytest.raises(CompileError, match="chord compile"):
        cache.cubin_for(CONFIG, "sm_90a")
    assert cache.cubin_for(CONFIG, "sm_90a", ahead=True).code == CUBIN.code
    assert cache.is_kept(CONFIG, "sm_90a", "Indexed")
    assert not cache.is_kept(CONFIG, "sm_100a", "Indexed")
    monkeypatch.setattr(cache, "_STATE", cache._State())
    monkeypatch.setattr(compiler, "compile_unit", lambda *_: pytest.fail("compiled again"))
    assert cache.cubin_for(CONFIG, "sm_90a").code == CUBIN.code


def test_what_other_kernels_or_compilers_left_is_pruned(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr(compiler, "compile_unit", lambda *_: CUBIN)
    monkeypatch.setattr(cache, "_STATE", cache._State())
    assert cache.entries(folder) == [] and cache.prune(folder) == ([], [])
    assert cache.cubin_for(CONFIG, "sm_90a").origin is not None
    (current,) = cache.entries(folder)
    assert current.is_current and current.size == current.path.stat().st_size

    origin = cache.cubin_for(CONFIG, "sm_90a").origin
    others = {
        "kernels": replace(origin, kernels="0" * 64),
        "nvrtc": replace(origin, nvrtc="12.0"),
        "header": replace(origin, headers=("gone.cuh",)),
        "unknown": None,
    }
    for name, other in others.items():
        (folder / f"{name}.kernel").write_bytes(cache.encode_entry(replace(CUBIN, origin=other)))
        (folder / f"{name}.lock").write_bytes(b"")
    (folder / "broken.kernel").write_bytes(b"chord")
    (folder / "killed.tmp").write_bytes(b"part")
    os.utime(folder / "killed.tmp", (0, 0))
    (folder / "writing.tmp").write_bytes(b"part")
    gone = {entry.path.name for entry in cache.prune(folder)[0]}
    assert gone == {"broken.kernel", "killed.tmp", *(f"{name}.kernel" for name in others)}
    left = {path.name for path in folder.iterdir()}
    assert left == {current.path.name, current.path.with_suffix(".lock").name, "writing.tmp"}
    monkeypatch.setattr(cache, "_STATE", cache._State())
    monkeypatch.setattr(compiler, "compile_unit", lambda *_: pytest.fail("compiled again"))
    assert cache.cubin_for(CONFIG, "sm_90a").code == CUBIN.code


def test_pruning_goes_on_after_a_file_that_stays(folder: Path, monkeypatch) -> None:
    folder.mkdir(parents=True)
    for name in ("a", "b", "c", "d"):
        (folder / f"{name}.kernel").write_bytes(b"old")
    unlink = Path.unlink

    def refuse(self: Path, missing_ok: bool = False) -> None:
        if self.name in ("a.kernel", "c.kernel"):
            raise PermissionError(13, "Permission denied", str(self))
        unlink(self, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    gone, failed = cache.prune(folder)
    assert [entry.path.name for entry in gone] == ["b.kernel", "d.kernel"]
    assert [Path(error.filename).name for error in failed] == ["a.kernel", "c.kernel"]
    assert sorted(path.name for path in folder.iterdir()) == ["a.kernel", "c.kernel"]


def test_a_folder_that_cannot_be_used_is_said(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    for named, said in (
        (tmp_path / "file" / "cache", r"file is not a folder"),
        (tmp_path / "new" / "cache", None),
        (tmp_path, None),
    ):
        monkeypatch.setenv("CHORD_CACHE_DIR", str(named))
        found = place.trouble()
        assert found is None if said is None else re.search(said, found or "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"], "looking leaves nothing"
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels").chmod(0o777)
    assert "can be written by everyone" in (place.trouble() or "")


def expect_trouble() -> None:
    said = place.trouble() or ""  # a parent of tmp_path may be closed to others, too
    os._exit(0 if re.search(r"cannot be written|Permission denied", said) else 1)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_read_only_folder_is_said(folder: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    folder.mkdir(parents=True)
    for part in (folder, folder.parent):
        part.chmod(0o555)
    assert run_in_child(as_nobody, expect_trouble) == 0


def test_cached_mode_refuses_what_is_not_there(folder: Path, monkeypatch) -> None:
    monkeypatch.setenv("CHORD_JIT", "cached")
    monkeypatch.setattr(cache, "_STATE", cache._State())
    monkeypatch.setattr(compiler, "compile_unit", lambda *_: pytest.fail("compiled"))
    with pytest.raises(CompileError, match=r"CHORD_JIT=cached .*chord compile --arch sm_90a"):
        cache.cubin_for(CONFIG, "sm_90a")
    assert not folder.exists()


def test_cached_mode_says_that_it_could_not_read(tmp_path: Path, monkeypatch) -> None:
    """A kernel may well be there: compiling it again would not help."""
    monkeypatch.setenv("CHORD_JIT", "cached")
    monkeypatch.setattr(cache, "_STATE", cache._State())
    (tmp_path / "kernels").write_text("a file is a folder that nobody can read, root included")
    monkeypatch.setenv("CHORD_CACHE_DIR", str(tmp_path))
    with pytest.raises(CompileError, match=r"could not be read .*Not a directory.*CHORD_JIT"):
        cache.cubin_for(CONFIG, "sm_90a")


def expect_unreadable() -> None:
    try:
        cache.cubin_for(CONFIG, "sm_90a")
    except CompileError as error:
        os._exit(0 if re.search(r"could not be read .*Permission denied", str(error)) else 1)
    os._exit(2)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_cached_mode_names_a_closed_folder(folder: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("CHORD_JIT", "cached")
    monkeypatch.setattr(cache, "_STATE", cache._State())
    tmp_path.chmod(0o755)
    folder.mkdir(parents=True)
    folder.chmod(0o700)
    assert run_in_child(as_nobody, expect_unreadable) == 0


@pytest.mark.field_case(8)
def test_works_without_nvcc_home_or_write_permission(tmp_path: Path) -> None:
    """Field case 8: only pip's NVRTC, no HOME, no PATH to a compiler."""
    script = textwrap.dedent(
        """
        import warnings
        warnings.simplefilter("error")
        import chord
        from chord.jit import compiler
        unit = 'extern "C" __global__ void chord_entry(int* p) { *p = 1; }'
        assert compiler.compile_unit(unit, "sm_90a").code[:4] == b"\\x7fELF"
        """
    )
    environment = {"PATH": "/usr/bin", "HOME": "/nonexistent", "TMPDIR": str(tmp_path)}
    for name in ("LD_LIBRARY_PATH", "PYTHONPATH"):
        if name in os.environ:
            environment[name] = os.environ[name]
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr

"""Where the cache goes and which JIT mode holds, for every state of the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from chord import env
from chord.errors import InputError


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in env.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def test_home_is_the_last_choice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert env.cache_dir() == tmp_path / ".cache" / "chord"
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert env.cache_dir() == Path("/somewhere/chord")
    monkeypatch.setenv("CHORD_CACHE_DIR", "/named")
    assert env.cache_dir() == Path("/named")


def test_tilde_and_empty_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CHORD_CACHE_DIR", "~/kernels")
    assert env.cache_dir() == tmp_path / "kernels"
    monkeypatch.setenv("CHORD_CACHE_DIR", "kernels")
    monkeypatch.chdir(tmp_path)
    assert env.cache_dir() == tmp_path / "kernels"
    monkeypatch.setenv("CHORD_CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the XDG rules say: ignore it
    assert env.cache_dir() == tmp_path / ".cache" / "chord"


def test_a_tilde_of_nobody_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHORD_CACHE_DIR", "~nobody-of-this-name/kernels")
    with pytest.raises(InputError, match=r"CHORD_CACHE_DIR='~nobody-of-this-name/kernels' begins"):
        env.cache_dir()


@pytest.mark.parametrize("home", [None, "", "/", "//", "/nonexistent", "relative"])
def test_no_usable_home_means_no_cache(monkeypatch: pytest.MonkeyPatch, home: str | None) -> None:
    if home is None:
        monkeypatch.delenv("HOME")
    else:
        monkeypatch.setenv("HOME", home)
    assert env.cache_dir() is None


def test_jit_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    assert env.jit_mode() == "auto"
    monkeypatch.setenv("CHORD_JIT", "cached")
    assert env.jit_mode() == "cached"
    monkeypatch.setenv("CHORD_JIT", "off")
    with pytest.raises(InputError, match=r"CHORD_JIT='off'.*auto or cached"):
        env.jit_mode()


def test_each_name_is_documented_once() -> None:
    names = [variable.name for variable in env.VARIABLES]
    assert len(set(names)) == len(names)
    source = Path(env.__file__).read_text()
    assert all(f'os.environ.get("{name}"' in source for name in names)

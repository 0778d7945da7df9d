"""The command line: every command runs without a GPU, says what it did, and fails with words."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import chord
from chord.bench import machine, records, scenarios
from chord.cli import app
from chord.cli.bench import line
from chord.errors import ChordError, InputError, UnsupportedError
from chord.jit import cache, compiler, place
from chord.jit.cache import DiskStore
from chord.jit.compiler import CompileReport, Cubin
from chord.jit.params import COMBINE

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="shows what happens without a GPU")


def run(*arguments: str, fails: type[ChordError] | None = None) -> str:
    result = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, arguments)
    if fails is not None:
        assert isinstance(result.exception, fails), result.output
        return str(result.exception)
    assert result.exit_code == 0, f"{result.output}\n{result.exception!r}"
    return result.output


def test_help_names_every_command() -> None:
    text = run("--help")
    for command in ("demo", "doctor", "compile", "cache", "bench", "tune", "explain"):
        assert command in text


def test_version_is_that_of_the_package() -> None:
    assert run("--version").strip() == run("-V").strip() == f"chord {chord.__version__}"


def test_demo_runs_and_is_correct() -> None:
    text = run("demo", "--tokens", "16", "--device", "cpu")
    assert re.search(r"correct: worst token is off by \d\.\de-0\d", text), text
    assert "safetensors" in text
    assert len(text.splitlines()) < 12


def test_demo_reports_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    right = chord.fused_moe
    monkeypatch.setattr(chord, "fused_moe", lambda *inputs: right(*inputs) * 1.1)
    result = CliRunner().invoke(app, ["demo", "--tokens", "4", "--device", "cpu"])
    assert result.exit_code == 1
    assert "WRONG" in result.output


def test_doctor_names_card_versions_cache_and_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHORD_CACHE_DIR", "/nonexistent/chord")
    text = run("doctor")
    for word in ("card", "driver", "torch", "nvrtc", "/nonexistent/chord", "CHORD_JIT"):
        assert word in text


def test_doctor_says_whether_vllm_finds_chord(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    plugin = importlib.metadata.EntryPoint("chord", "chord.integrations.vllm:register", "group")
    for version, plugins, words in (
        ("none", [plugin], "vllm none; Chord's plugin is installed"),
        ("0.33.0", [plugin], "vllm 0.33.0; Chord's plugin is installed for it: chord.integrations"),
        ("0.33.0", [], "vllm 0.33.0; Chord's entry point in vllm.general_plugins is NOT INSTALLED"),
    ):
        monkeypatch.setattr(machine, "distribution", lambda name, version=version: version)
        monkeypatch.setattr(
            importlib.metadata, "entry_points", lambda plugins=plugins, **_: plugins
        )
        before = set(sys.modules)
        assert words in " ".join(run("doctor").split())
        assert not {name for name in set(sys.modules) - before if name.startswith("vllm")}


def test_doctor_and_compile_say_that_a_cache_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CHORD_CACHE_DIR", str(tmp_path / "file"))
    text = " ".join(run("doctor").split())
    assert "CANNOT BE USED" in text and "is not a folder" in text and "set CHORD_CACHE_DIR" in text
    text = run("compile", "--arch", "sm_90a", fails=InputError)
    assert "cannot be kept" in text and "is not a folder" in text and "CHORD_CACHE_DIR" in text


def test_doctor_shows_all_although_a_variable_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHORD_JIT", "fast")
    monkeypatch.setenv("CHORD_VLLM", "off")
    monkeypatch.setenv("CHORD_CACHE_DIR", "~nobody-of-this-name/kernels")
    text = " ".join(run("doctor").split())
    assert "WRONG: CHORD_JIT='fast' is not a mode" in text
    assert "WRONG: CHORD_VLLM='off' is not a switch" in text
    assert "WRONG: CHORD_CACHE_DIR='~nobody-of-this-name/kernels'" in text
    assert "Environment variables:" in text


def test_compile_fails_where_a_kernel_was_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from chord.cli import compile as command

    monkeypatch.setenv("CHORD_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CHORD_JIT", "cached")
    monkeypatch.setattr(
        compiler, "compile_unit", lambda *_: Cubin(b"code", CompileReport(8, 0, 0, 0))
    )
    job = command._work("sm_90a")[0]
    monkeypatch.setattr(command, "_work", lambda arch: [job])
    monkeypatch.setattr(command, "ProcessPoolExecutor", lambda n, **_: ThreadPoolExecutor(n))
    assert "1 of 1 kernels are kept in" in run("compile")
    monkeypatch.setattr(cache._STATE, "_memory", {})
    monkeypatch.setattr(DiskStore, "write", lambda *_: None)
    for entry in tmp_path.rglob("*.kernel"):
        entry.unlink()
    result = CliRunner().invoke(app, ["compile"])
    assert result.exit_code == 1 and "0 of 1 kernels are kept in" in result.output


def test_cache_names_its_folder_and_prunes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHORD_CACHE_DIR", str(tmp_path))
    assert "0 file(s), 0.0 MiB" in run("cache", "--prune")
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "old.kernel").write_bytes(bytes(1 << 20))
    assert "1 file(s), 1.0 MiB of other kernels" in run("cache")
    text = run("cache", "--prune")
    assert text.startswith("deleted 1 file(s), 1.0 MiB") and "of other kernels" not in text
    assert not list((tmp_path / "kernels").iterdir())


def test_cache_and_doctor_on_a_folder_that_is_only_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHORD_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiler, "compile_unit", lambda *_: Cubin(b"code", None))
    monkeypatch.setattr(cache, "_STATE", cache._State())
    cache.cubin_for(COMBINE, "sm_90a", "")
    monkeypatch.setattr(place, "refuse_to_write", lambda folder: f"{folder} cannot be written")
    text = " ".join(run("doctor").split())
    assert "1 file(s)" in text and "READ ONLY" in text and "kernels that are there are used" in text
    assert "CANNOT BE USED" not in text
    text = run("cache")
    assert "1 file(s)" in text and "no kernel can be added: " in text

    def refuse(self: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    for name in ("old", "older"):
        (tmp_path / "kernels" / f"{name}.kernel").write_bytes(b"old")
    monkeypatch.setattr(Path, "unlink", refuse)
    text = run("cache", "--prune", fails=InputError)
    assert "old.kernel: Permission denied (and 1 more)" in text and "CHORD_CACHE_DIR" in text
    monkeypatch.setattr(Path, "glob", refuse)
    assert "kernels: Permission denied" in run("cache", fails=InputError)
    assert "CANNOT BE USED" in run("doctor")


def test_explain_names_choice_alternatives_and_rejections() -> None:
    text = run("explain", "-e", "48", "--n", "4096", "--k", "7168", "-r", "320", "--card", "h200")
    assert text.startswith("h200 Indexed E=48 N=4096 K=7168 routed=320")
    assert text.count("->  ") == 1
    assert "can run" in text
    table = [line for line in text.splitlines() if re.match(r"(->|  ) +[\d.]+ +\d+  ", line)]
    predicted = [float(line[2:].split()[0]) for line in table]
    assert predicted == sorted(predicted)
    overruled = not table[0].startswith("->")
    assert ("which the measured choice (->) overrules" in text) == overruled
    assert ("best first" in text) != overruled
    blackwell = run(
        "explain", "-e", "48", "--n", "4096", "--k", "7168", "-r", "9000", "--card", "b200"
    )
    assert "decode" in blackwell.splitlines()[1]
    masked = run(
        *("explain", "-e", "48", "--n", "4096", "--k", "7168", "-r", "384", "--card", "h200"),
        *("--addressing", "Masked"),
    )
    assert masked.startswith("h200 Masked E=48 N=4096 K=7168 routed=384 (8.0 rows an expert)")
    hinted = run(
        *("explain", "-e", "48", "--n", "4096", "--k", "7168", "-r", "24576", "--card", "h200"),
        *("--addressing", "masked", "--expected", "8"),
    )
    assert hinted.startswith("h200 Masked E=48 N=4096 K=7168 routed=24576 (8.0 rows an expert)")
    assert "decode" in hinted.splitlines()[1]
    full = run(
        *("explain", "-e", "48", "--n", "4096", "--k", "7168", "-r", "24576", "--card", "h200"),
        *("--addressing", "Masked"),
    )
    assert "prefill" in full.splitlines()[1]


def test_explain_refuses_with_the_rule() -> None:
    text = run("explain", "-e", "8", "--n", "4096", "--k", "100", "-r", "8", "--card", "h200",
               fails=UnsupportedError)  # fmt: skip
    assert "K=100" in text
    text = run("explain", "-e", "0", "--n", "4096", "--k", "64", "-r", "8", "--card", "h200",
               fails=UnsupportedError)  # fmt: skip
    assert "num_experts=0 must be at least 1" in text
    text = run("explain", "-e", "8", "--n", "64", "--k", "64", "-r", "8", "--card", "rtx",
               fails=InputError)  # fmt: skip
    assert "rtx" in text
    text = run("explain", "-e", "8", "--n", "64", "--k", "64", "-r", "8", "--card", "h200",
               "--expected", "4", fails=InputError)  # fmt: skip
    assert "--expected 4" in text and "goes with --addressing Masked" in text
    text = run("explain", "-e", "8", "--n", "72", "--k", "64", "-r", "8", "--card", "h200",
               "--addressing", "RoutedGateUp", fails=UnsupportedError)  # fmt: skip
    assert "N=72 is not a multiple of 16" in text


def test_bench_lists_its_suites() -> None:
    text = run("bench", "--list", "--peer", "humming")
    assert re.search(r"grouped: 48 experts, .*24 rows, about \d+ s with 1 peer", text), text
    assert len(text.splitlines()) == len(scenarios.SUITES) + 1
    assert re.search(r"layer: chord.fused_moe for EP8 decode, .*19 rows, about \d+ s", text), text


def test_tune_refuses_an_unknown_profile() -> None:
    assert "grouped_decode" in run("tune", "--profile", "decode", fails=InputError)


def test_compile_refuses_an_unknown_architecture() -> None:
    assert "sm_90a" in run("compile", "--arch", "sm_80", fails=InputError)


@no_gpu
def test_bench_without_a_gpu_says_so() -> None:
    assert "PyTorch sees none" in run("bench", "-s", "ep8_decode", fails=UnsupportedError)


def test_bench_refuses_an_unknown_suite() -> None:
    assert "ep8_decode" in run("bench", "-s", "nothing", fails=InputError)


def test_bench_refuses_what_matches_nothing_before_it_looks_for_a_card() -> None:
    assert "there is no peer 'marlin'" in run("bench", "--peer", "marlin", fails=InputError)
    assert "there is no peer" in run("bench", "--list", "--peer", "marlin", fails=InputError)
    text = run("bench", "-s", "tp8", "--projection", "gate", fails=InputError)
    assert "no case of tp8 has --projection gate and --count any; projections are gate_up" in text
    text = run("bench", "-s", "layer", "--count", "7", "--count", "9", fails=InputError)
    assert "no case of layer has --projection any and --count 7 or 9" in text


def test_bench_fails_where_a_peer_broke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record is written, but not as if the peer had been left out on purpose."""
    _, made = next(records.load_all(Path(__file__).parents[2] / "benchmarks" / "records"))
    words = ["humming: UnsupportedError: no configuration"]

    def run_suite(*_: object, on_fault: Callable[[str], None], **__: object) -> records.Record:
        for fault in words:
            on_fault(fault)
        return made

    monkeypatch.setattr("chord.bench.run.run_suite", run_suite)
    monkeypatch.setattr(machine, "card", lambda: "NVIDIA H200")
    monkeypatch.setattr(machine, "memory_model", lambda card: None)
    arguments = ["bench", "-s", "ep8_decode", "--peer", "humming", "--records", str(tmp_path)]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    words.append("humming: RuntimeError: launch failed [code]")
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert "1 times a peer failed, at last: humming: RuntimeError: launch failed [code]" in (
        result.output + result.stderr
    )
    assert len(list(tmp_path.glob("*.json"))) == 1


def test_brackets_are_printed_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the library that prints they can be a style; here they are part of a path."""
    folder = tmp_path / "a[b]c[" / "d]"
    folder.mkdir(parents=True)
    monkeypatch.setenv("CHORD_CACHE_DIR", str(folder))
    assert f"{folder}/kernels: 0 file(s)" in run("cache")
    monkeypatch.setenv("CHORD_JIT", "[b]")
    assert "CHORD_JIT='[b]' is not a mode" in run("doctor")


def test_a_card_without_a_memory_line_is_refused() -> None:
    assert machine.memory_model("NVIDIA H200").launch_us == 12.0
    with pytest.raises(UnsupportedError, match="H100"):
        machine.memory_model("NVIDIA H100 80GB HBM3")


def test_bench_line_has_times_floor_and_peer() -> None:
    entries = {
        "chord": records.Entry(190.0, 189.0, 192.0, 1.7e-3, "decode", 12.0),
        "humming": records.Entry(228.0, 227.0, 230.0, 1.7e-3, ""),
    }
    row = records.Row(
        "gate_up", 20, 160, 48, 4096, 7168, 46, 761_000_000, 174.0, "memory", 650.0, entries
    )
    text = line("ep8_decode", row)
    assert "1.09x floor" in text
    assert "1.20x chord" in text
    assert "4005 GB/s" in text


def test_errors_end_with_their_message_and_exit_code_1() -> None:
    command = [sys.executable, "-m", "chord", "compile", "--arch", "sm_80"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr.startswith("InputError: ")
    assert "Traceback" not in result.stderr


@pytest.mark.gpu
def test_demo_on_the_gpu() -> None:
    assert "correct" in run("demo", "--device", "cuda")

"""Field cases 7 and 8 on the card: many cold processes, and no place for a cache."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

TESTS = Path(__file__).parents[1]
CALL = """
import sys, time
sys.path.insert(0, {tests!r})
import torch, chord
from cases import exact_x, expected_rows, random_weights, topk_ids
weights = random_weights(48, 512, 7168, device="cuda")
experts = weights.pack()
x, ids = exact_x(16, 7168, device="cuda"), topk_ids(16, 8, 48, device="cuda")
where = chord.routing.align(ids, num_experts=48, block_m=16)
torch.cuda.synchronize()
started = time.perf_counter()
y = chord.indexed(x, experts, where.sorted_token_ids, where.expert_ids,
                  where.num_tokens_post_padded, 8, block_m=16)
torch.cuda.synchronize()
print(time.perf_counter() - started)
assert torch.equal(y, expected_rows(x, weights, ids, 8).bfloat16()), "the result is wrong"
"""


def start(environment: dict[str, str], *, warnings: str = "error") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable,
            "-W",
            f"{warnings}::UserWarning:chord",
            "-c",
            CALL.format(tests=str(TESTS)),
        ],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[float, str]:
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return float(output), errors


@pytest.mark.field_case(7)
def test_sixteen_cold_processes_share_one_compile(tmp_path: Path) -> None:
    environment = dict(os.environ, CHORD_CACHE_DIR=str(tmp_path / "alone"))
    alone, _ = finish(start(environment))
    environment["CHORD_CACHE_DIR"] = str(tmp_path / "together")
    processes = [start(environment) for _ in range(16)]
    slowest = max(finish(process)[0] for process in processes)
    assert len(list((tmp_path / "together").rglob("*.kernel"))) == 1
    # They start at different times, so whoever waits waits for less than one whole compile.
    assert slowest <= 2 * alone + 2


@pytest.mark.field_case(7)
def test_a_killed_process_leaves_a_usable_cache(tmp_path: Path) -> None:
    environment = dict(os.environ, CHORD_CACHE_DIR=str(tmp_path))
    killed = start(environment)
    while not list(tmp_path.rglob("*.lock")):
        assert killed.poll() is None, killed.communicate()[1]
        time.sleep(0.005)
    killed.kill()
    killed.wait()
    finish(start(environment))


@pytest.mark.field_case(8)
# Below a file, since some libraries make a HOME that is missing, which root may.
@pytest.mark.parametrize("home", ["/", "/dev/null/nowhere"])
def test_no_home_is_one_warning_and_a_right_result(home: str, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("CHORD_CACHE_DIR", "CUDA_HOME")}
    environment |= {"HOME": home, "TMPDIR": str(tmp_path)}
    environment.pop("XDG_CACHE_HOME", None)
    _, errors = finish(start(environment, warnings="always"))
    assert errors.count("CacheWarning") == 1 and "CHORD_CACHE_DIR" in errors

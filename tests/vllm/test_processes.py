"""The plugin as vLLM finds and calls it: by its entry point, in each process, also a spawned one.

Every test runs processes of its own: plugins are loaded once a process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

LOAD = """
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.model_executor.layers.quantization import get_quantization_config
"""


def run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **variables},
    )


def check(code: str, **variables: str) -> None:
    result = run(code, **variables)
    assert result.returncode == 0, result.stderr[-3000:]


def test_the_installed_entry_point_registers_and_touches_no_gpu() -> None:
    check(
        LOAD + "import sys, torch\n"
        "for name in ('chord', 'compressed-tensors', 'humming'):\n"
        "    config = get_quantization_config(name)\n"
        "    assert config.__module__ == 'chord.integrations.vllm.config', (name, config)\n"
        "from vllm.model_executor.custom_op import op_registry_oot\n"
        "runner = op_registry_oot['MoERunner']\n"
        "assert runner.__module__ == 'chord.integrations.vllm.runner', runner\n"
        "assert not torch.cuda.is_initialized(), 'the plugin initialised CUDA'\n"
        "late = {'cuda.core', 'matplotlib', 'typer'} & set(sys.modules)\n"
        "assert not late, f'the plugin imported {late}'\n"
    )


def test_switched_off_vllm_is_as_before() -> None:
    check(
        LOAD + "for name in ('compressed-tensors', 'humming'):\n"
        "    assert get_quantization_config(name).__module__.startswith('vllm.'), name\n"
        "from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS\n"
        "assert 'chord' not in QUANTIZATION_METHODS\n"
        "from vllm.model_executor.custom_op import op_registry_oot\n"
        "assert 'MoERunner' not in op_registry_oot\n",
        CHORD_VLLM="0",
    )


def test_a_switch_that_is_none_is_refused() -> None:
    result = run(LOAD, CHORD_VLLM="off")
    assert "CHORD_VLLM='off' is not a switch; set it to 0 or 1, or unset it" in result.stderr


SPAWN = """
import multiprocessing, pickle, sys, tempfile
from pathlib import Path

def child(path, answers):
    # As a spawned worker: the config is there before the plugins are.
    configs = pickle.loads(Path(path).read_bytes())
    from vllm.plugins import load_general_plugins
    load_general_plugins()
    answers.put([(type(config).__module__, type(config).__name__) for config in configs])

if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    from vllm.plugins import load_general_plugins
    load_general_plugins()
    from vllm.model_executor.layers.quantization import get_quantization_config
    from layers import config_of

    names = ("chord", "compressed-tensors", "humming")
    configs = [config_of(get_quantization_config(name)) for name in names]
    path = Path(tempfile.mkdtemp()) / "configs"
    path.write_bytes(pickle.dumps(configs))
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=child, args=(str(path), answers))
    process.start()
    found = answers.get(timeout=240)
    process.join()
    assert found == [(type(config).__module__, type(config).__name__) for config in configs], found
    assert all(module == "chord.integrations.vllm.config" for module, _ in found), found
"""


def test_configs_reach_spawned_workers(tmp_path: Path) -> None:
    script = tmp_path / "spawn.py"
    script.write_text(SPAWN)
    result = subprocess.run(
        [sys.executable, str(script), str(Path(__file__).parent)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-3000:]

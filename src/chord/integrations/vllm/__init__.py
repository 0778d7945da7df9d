"""Chord inside vLLM: nothing to configure, nothing patched.

vLLM calls `register` in each of its processes (entry point group `vllm.general_plugins`). It puts
three quantization configs into vLLM's own registry, which vLLM asks which method serves a layer,
and a runner of expert layers into vLLM's registry of layer classes:

    config.py      the three configs: what vLLM asks
    selection.py   which expert layers Chord takes, and in words why not
    method.py      weights of a layer: created, packed, reloaded
    experts.py     the computation, for both activation formats of vLLM
    runner.py      the end of a layer: scaled and added to where its experts are summed

`CHORD_VLLM=0` leaves vLLM as it is. docs/vllm.md is the user's page.
"""

from __future__ import annotations

from chord import env


def register() -> None:
    """Register Chord's configs and runner with vLLM, unless CHORD_VLLM=0; touches no GPU.

    Calling it again changes nothing: vLLM's registry keeps one class a name.

    Raises:
        InputError: CHORD_VLLM is neither 0 nor 1.
    """
    if not env.vllm_enabled():
        return
    from vllm.logger import init_logger
    from vllm.model_executor.layers.quantization import register_quantization_config

    from chord.integrations.vllm import config

    for name, config_class in config.CONFIGS.items():
        register_quantization_config(name)(config_class)
    try:
        from chord.integrations.vllm import runner
    except ImportError as error:  # a vLLM that is built otherwise
        init_logger("vllm.chord").warning(
            "Chord leaves the end of expert layers to vLLM: %s", error
        )
        return
    runner.register()

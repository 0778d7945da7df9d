"""One vLLM engine in a process of its own that does what `run.py` tells it, one thing at a time.

Started by `run.py`. Requests come as lines of JSON on stdin, answers go as lines of JSON to the
file descriptor given: stdout and stderr are vLLM's log.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import sys
import time
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_ALLOW_INSECURE_SERIALIZATION="1",  # apply_model hands a function to the worker
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_NO_USAGE_STATS="1",
)
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")

BEGIN = time.time()

import torch  # noqa: E402
import vllm.model_executor.model_loader.weight_utils as weight_utils  # noqa: E402

from vllm import LLM, SamplingParams  # noqa: E402

IMPORTED = time.time()

# Kernels of the expert layers by their names, for the share of the step. Chord's GEMMs and its
# sort and sum kernels begin with chord_; the others are Humming's and Marlin's GEMMs and what vLLM
# puts around them. silu_and_mul also serves shared experts and dense layers, on both sides.
EXPERTS = re.compile(r"chord_|humming|marlin|moe|expert|topk|grouped|process_input", re.IGNORECASE)


def make_engine(options: argparse.Namespace) -> LLM:
    """Start vLLM; dummy weights are random codes, so that nothing is timed on zeros."""
    stock = weight_utils.initialize_single_dummy_weight

    def random_codes(parameter: torch.Tensor, *args: Any, **more: Any) -> None:
        if parameter.dtype == torch.int32:
            parameter.data.random_(-(2**31), 2**31 - 1)
        else:
            stock(parameter, *args, **more)

    weight_utils.initialize_single_dummy_weight = random_codes
    mode: dict[str, Any] = {"enforce_eager": True}
    if options.graphs:
        sizes = [int(size) for size in options.graphs.split(",")]
        mode = {
            "compilation_config": {
                "mode": 0,
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": sizes,
            }
        }
    return LLM(
        model=options.model,
        load_format=options.load_format,
        skip_tokenizer_init=True,
        max_model_len=4096,
        moe_backend=options.moe_backend,
        quantization=options.quantization,
        gpu_memory_utilization=0.1,  # only what has to be free at the start
        kv_cache_memory_bytes=options.kv_gib << 30,  # several engines share the card
        max_num_batched_tokens=8192,
        max_num_seqs=128,
        enable_prefix_caching=False,
        enable_sleep_mode=options.sleep,
        **mode,
    )


def prompts(requests: int, length: int, seed: int, vocab: int) -> list[dict[str, list[int]]]:
    """Make prompts of random words."""
    chance = random.Random(seed)
    return [
        {"prompt_token_ids": [chance.randrange(10, vocab) for _ in range(length)]}
        for _ in range(requests)
    ]


class Engine:
    """What can be asked of the engine; every method's answer goes back as JSON."""

    def __init__(self, options: argparse.Namespace) -> None:
        begin = time.time()
        self.llm = make_engine(options)
        self.vocab = options.vocab
        self.started = {"import_s": IMPORTED - BEGIN, "start_s": time.time() - begin}

    def start(self) -> dict[str, Any]:
        """Say how long the start took, and who serves the expert layers."""

        def served(model: torch.nn.Module) -> list[str]:
            names = set()
            for module in model.modules():
                kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
                if kernel is not None:
                    names.add(type(kernel.fused_experts).__name__)
            return sorted(names)

        return {**self.started, "experts": self.llm.apply_model(served)[0]}

    def time(self, requests: int, length: int, new: int, seed: int) -> float:
        """Return the seconds that a batch takes, from the first prompt to the last word."""
        batch = prompts(requests, length, seed, self.vocab)
        sampling = SamplingParams(
            max_tokens=new, min_tokens=new, ignore_eos=True, temperature=0, detokenize=False
        )
        torch.cuda.synchronize()
        begin = time.time()
        self.llm.generate(batch, sampling, use_tqdm=False)
        torch.cuda.synchronize()
        return time.time() - begin

    def score(self, requests: int, length: int, new: int, seed: int) -> dict[str, Any]:
        """Return, for given prompts, the likeliest word and the given word's logprob at each place.

        And the words that greedy decoding adds, with their logprobs.
        """
        batch = prompts(requests, length, seed, self.vocab)
        sampling = SamplingParams(
            max_tokens=new,
            min_tokens=new,
            ignore_eos=True,
            temperature=0,
            detokenize=False,
            logprobs=1,
            prompt_logprobs=1,
        )
        top, given, words, logprobs = [], [], [], []
        for result in self.llm.generate(batch, sampling, use_tqdm=False):
            places = zip(result.prompt_token_ids[1:], result.prompt_logprobs[1:], strict=True)
            for word, candidates in places:
                top.append(min(candidates, key=lambda w: candidates[w].rank))
                given.append(candidates[word].logprob)
            answer = result.outputs[0]
            words.append(list(answer.token_ids))
            chosen = zip(answer.token_ids, answer.logprobs, strict=True)
            logprobs.append([candidates[word].logprob for word, candidates in chosen])
        return {"top": top, "given": given, "words": words, "logprobs": logprobs}

    def profile(self, requests: int, length: int, new: int, seed: int) -> dict[str, Any]:
        """Return the GPU microseconds of a batch by kernel, and the expert layers' share."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            self.time(requests, length, new, seed)
        times = {e.key: float(e.self_device_time_total) for e in recorded.key_averages()}
        total = sum(times.values())
        experts = sum(us for name, us in times.items() if EXPERTS.search(name))
        most = sorted(times.items(), key=lambda item: -item[1])[:15]
        return {
            "gpu_us": total,
            "expert_us": experts,
            "kernels": [[name[:90], round(us)] for name, us in most],
        }

    def sleep(self, level: int) -> None:
        """Sleep and wake up; after level 2 the weights are loaded from the checkpoint again."""
        self.llm.sleep(level=level)
        if level == 2:
            self.llm.wake_up(tags=["weights"])
            self.llm.collective_rpc("reload_weights")
            self.llm.wake_up(tags=["kv_cache"])
        else:
            self.llm.wake_up()

    def reload(self) -> None:
        """Load the weights from the checkpoint again, in place."""
        self.llm.collective_rpc("reload_weights")


def main() -> None:
    """Start, then serve requests until stdin ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--answers", type=int, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--vocab", type=int, required=True)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--moe-backend", default="auto")
    parser.add_argument("--quantization")
    parser.add_argument("--kv-gib", type=int, required=True)
    parser.add_argument("--graphs", default="")
    parser.add_argument("--sleep", action="store_true")
    options = parser.parse_args()
    with os.fdopen(options.answers, "w") as answers:
        engine = Engine(options)
        for line in sys.stdin:
            request = json.loads(line)
            answer = getattr(engine, request.pop("do"))(**request)
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()

"""Chord inside vLLM on a GPU: does it agree, how fast is it, how long does it take to start?

    python benchmarks/vllm/run.py --out FOLDER [--only agree|speed]

`agree`: a small model of the Kimi K2 architecture with a real INT4 checkpoint, served in every way
that ends in Chord, by Marlin and by Humming; words and logprobs compared; sleep and reload.
`speed`: what one rank of TP8 computes of Kimi K2 (dummy weights, 12 expert layers), Chord and stock
vLLM in turn, in one run. Both write into one record, `FOLDER/DATE-CARD-vllm.json`; one alone into
`FOLDER/DATE-CARD-vllm-PART.json`. The record is written after each case too, marked "unfinished":
a run that is cut off leaves what it measured.

vLLM 0.33 and Chord must be installed; for the stock side also humming-kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import models

from chord.bench import machine, records

HERE = Path(__file__).parent
PREFILL = (1, 4, 16)  # requests of 2048 words
DECODE = (8, 64, 128)  # requests that decode together
STEPS = 64
# On a busy host single prompts differ by 45 %, steps of decode by 30 % and for seconds on end.
ROUNDS = {"prefill": 8, "decode": 24}
# Threads that wait for each other in small CPU operations make a step late on a busy host.
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Way:
    """One way to start vLLM: what a user would type, and with Chord's plugin or without."""

    moe_backend: str = "auto"
    quantization: str | None = None
    plugin: bool = True
    sleep: bool = False
    compiles: bool = True  # False: a kernel that the cache has not is an error


WAYS = {
    "chord": Way(),
    "chord, --quantization chord": Way(quantization="chord"),
    "chord, --quantization humming": Way(quantization="humming"),
    "chord, --moe-backend humming": Way(moe_backend="humming"),
    "chord, sleep mode": Way(sleep=True),
    "marlin": Way(moe_backend="marlin"),
    "humming": Way(moe_backend="humming", plugin=False),
}
# Stock vLLM first: the first engine on a machine also fills vLLM's and Triton's own caches.
SPEED = {"stock auto": Way(plugin=False), "chord": Way()}


class Engine:
    """An engine process and the pipe to it."""

    def __init__(self, name: str, way: Way, logs: Path, cache: Path, **options: Any) -> None:
        read, write = os.pipe()
        arguments = [f"--answers={write}", f"--moe-backend={way.moe_backend}"]
        arguments += [f"--{key.replace('_', '-')}={value}" for key, value in options.items()]
        arguments += [f"--quantization={way.quantization}"] if way.quantization else []
        arguments += ["--sleep"] if way.sleep else []
        environment = {
            **os.environ,
            "CHORD_VLLM": str(int(way.plugin)),
            "CHORD_CACHE_DIR": str(cache),
            "CHORD_JIT": "auto" if way.compiles else "cached",
            **ENVIRONMENT,
        }
        self.name = name
        self.log = logs / f"{name.replace(' ', '_').replace(',', '')}-{time.time_ns() % 10**6}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "engine.py"), *arguments],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[write],
                env=environment,
                text=True,
            )
        os.close(write)
        self.answers = os.fdopen(read)

    def ask(self, do: str, **arguments: Any) -> Any:
        """Send a request and wait for its answer; show the end of the log if it dies."""
        assert self.process.stdin is not None, "the process was started with a pipe"
        try:
            self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self.process.stdin.flush()
            line = self.answers.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self.process.wait()
            tail = self.log.read_text()[-2500:]
            raise RuntimeError(f"{self.name}: the engine ended while it did {do!r}\n{tail}")
        return json.loads(line)

    def close(self) -> None:
        """End the process and give its memory back."""
        assert self.process.stdin is not None, "the process was started with a pipe"
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def agree(logs: Path) -> dict[str, Any]:
    """Compare words and logprobs of all ways on the small model; all engines run at once."""
    cache = Path(tempfile.mkdtemp())
    folder = models.write(Path(tempfile.mkdtemp()), models.small(), checkpoint=True)
    options = {"model": folder, "vocab": 4096, "kv_gib": 1, "graphs": "1,8,16"}
    asked = {"requests": 16, "length": 192, "new": 48}
    seeds = range(3, 9)

    def serve(name: str) -> dict[str, Any]:
        engine = Engine(name, WAYS[name], logs, cache, **options)
        try:
            result = engine.ask("start")
            scores = [engine.ask("score", **asked, seed=seed) for seed in seeds]
            result["score"] = {
                key: [value for score in scores for value in score[key]] for key in scores[0]
            }
            if WAYS[name].sleep:
                for step in ("reload", "sleep 1", "sleep 2"):
                    do, _, level = step.partition(" ")
                    engine.ask(do, **({"level": int(level)} if level else {}))
                    same = engine.ask("score", **asked, seed=seeds[0]) == scores[0]
                    result[f"same after {step}"] = same
            return result
        except Exception as error:
            traceback.print_exc()
            return {"failed": str(error)[-600:]}
        finally:
            engine.close()

    with ThreadPoolExecutor(len(WAYS)) as pool:
        results = dict(zip(WAYS, pool.map(serve, WAYS), strict=True))
    scores = {name: result.pop("score", None) for name, result in results.items()}
    pairs = [("chord", "marlin"), ("humming", "marlin"), ("chord", "humming")]
    pairs += [("chord", name) for name in WAYS if name.startswith("chord,")]
    return {
        "asked": {**asked, "seeds": list(seeds)},
        "engines": results,
        "pairs": {f"{a} | {b}": compare(scores[a], scores[b]) for a, b in pairs},
        "sides": count_sides(*(scores[name] for name in ("chord", "humming", "marlin"))),
    }


def count_sides(
    chord: dict[str, Any] | None, humming: dict[str, Any] | None, marlin: dict[str, Any] | None
) -> dict[str, Any]:
    """Count places where only one of two engines finds Marlin's word the likeliest.

    Two engines that differ by chance alone have counts apart by less than about twice the root of
    their sum: shares of agreement say nothing without it.
    """
    if chord is None or humming is None or marlin is None:
        return {"failed": "an engine did not answer"}
    counts = {"only chord": 0, "only humming": 0}
    for ours, theirs, word in zip(chord["top"], humming["top"], marlin["top"], strict=True):
        counts["only chord"] += ours == word != theirs
        counts["only humming"] += theirs == word != ours
    return counts


def compare(a: dict[str, Any] | None, b: dict[str, Any] | None) -> dict[str, Any]:
    """Say how far two engines agree.

    Given words: how often the likeliest next word is the same, and how far the given word's
    logprobs are apart. Own words: how many are the same before the first that differs, and how far
    these words' logprobs are apart.
    """
    if a is None or b is None:
        return {"failed": "an engine did not answer"}
    same = [x == y for x, y in zip(a["top"], b["top"], strict=True)]
    apart = [abs(x - y) for x, y in zip(a["given"], b["given"], strict=True)]
    shared, own = 0, []
    for index, (left, right) in enumerate(zip(a["words"], b["words"], strict=True)):
        for place, (x, y) in enumerate(zip(left, right, strict=True)):
            if x != y:
                break
            shared += 1
            own.append(abs(a["logprobs"][index][place] - b["logprobs"][index][place]))
    total = sum(map(len, a["words"]))
    return {
        "top1_agreement": sum(same) / len(same),
        "mean_abs_logprob": sum(apart) / len(apart),
        "greedy_words_before_difference": shared / total,
        "greedy_mean_abs_logprob": sum(own) / max(1, len(own)),
        "places": len(same),
    }


def speed(logs: Path, keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Time Chord and stock vLLM in turn, then start Chord again with its cache filled.

    `keep` gets what there is of the result after each case.
    """
    cache = Path(tempfile.mkdtemp())
    folder = models.write(Path(tempfile.mkdtemp()), models.slice_of_tp8(), checkpoint=False)
    options = {
        "model": folder,
        "vocab": 32000,
        "kv_gib": 10,
        "load_format": "dummy",
        "graphs": "1,8,64,128",
    }
    engines, starts = {}, {}
    try:
        for name, way in SPEED.items():  # one after the other, so that starts can be compared
            engines[name] = Engine(name, way, logs, cache, **options)
            starts[f"{name}, empty cache"] = engines[name].ask("start")
            print(name, starts[f"{name}, empty cache"], flush=True)
        times = measure(engines, lambda rows: keep({"times": rows, "starts": starts}))
        profiles = {
            name: {
                "prefill": engine.ask("profile", requests=4, length=2048, new=1, seed=7),
                "decode": engine.ask("profile", requests=64, length=8, new=34, seed=8),
            }
            for name, engine in engines.items()
        }
    finally:
        for engine in engines.values():
            engine.close()
    again = Engine("chord", Way(compiles=False), logs, cache, **options)
    try:
        starts["chord, full cache"] = again.ask("start")
    finally:
        again.close()
    return {"times": times, "starts": starts, "profiles": profiles}


def measure(
    engines: dict[str, Engine], on_row: Callable[[list[dict[str, Any]]], None]
) -> list[dict[str, Any]]:
    """Return a row a case: all times of each engine, and the best; rounds alternate engines."""
    for engine in engines.values():
        engine.ask("time", requests=8, length=1024, new=2, seed=1)
        engine.ask("time", requests=128, length=64, new=4, seed=2)
    rows = []
    for kind, count in [("prefill", n) for n in PREFILL] + [("decode", n) for n in DECODE]:
        seen: dict[str, list[float]] = {name: [] for name in engines}
        for step in range(ROUNDS[kind]):
            for name, engine in engines.items():
                if kind == "prefill":
                    batch = {"requests": count, "length": 2048, "new": 1, "seed": 10 + step}
                    seconds = min(engine.ask("time", **batch) for _ in range(2))
                else:
                    batch = {"requests": count, "length": 64, "seed": 20 + step}
                    short = min(engine.ask("time", new=2, **batch) for _ in range(2))
                    long = min(engine.ask("time", new=2 + STEPS, **batch) for _ in range(2))
                    seconds = (long - short) / STEPS
                seen[name].append(seconds * 1e3)
        row = {"case": f"{kind} {count}", "ms": seen}
        row["best_ms"] = {name: min(times) for name, times in seen.items()}
        base = row["best_ms"]["stock auto"]
        row["chord_is_faster_by"] = base / row["best_ms"]["chord"]
        rows.append(row)
        print(json.dumps(row), flush=True)
        on_row(rows)
    return rows


def main() -> None:
    """Run the parts asked for; what fails is in the record, and the exit status says so."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", choices=["agree", "speed"])
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    card = machine.card()
    versions = machine.versions()
    for name in ("vllm", "humming-kernels", "transformers", "triton"):
        versions[name] = machine.distribution(name)
    record: dict[str, Any] = {
        "suite": "vllm",
        "date": records.today(),
        "card": card,
        "versions": versions,
        "environment": ENVIRONMENT,
        "kernel_digest": machine.kernel_digest(),
    }
    stem = "-".join(
        [record["date"], records.card_slug(card), "vllm", *filter(None, [options.only])]
    )

    def write() -> None:
        (options.out / f"{stem}.json").write_text(json.dumps(record, indent=1) + "\n")

    def keep(result: dict[str, Any]) -> None:
        record["speed"] = {**result, "unfinished": True}
        write()

    failed = False
    parts = {"agree": lambda: agree(options.out), "speed": lambda: speed(options.out, keep)}
    for name, part in parts.items():
        if options.only not in (None, name):
            continue
        begin = time.time()
        try:
            record[name] = part()
        except Exception as error:
            traceback.print_exc()
            record[name] = {"failed": str(error)[-600:]}
        failed = failed or '"failed"' in json.dumps(record[name])
        record[name]["took_s"] = time.time() - begin
        write()
        print(json.dumps(record[name]), flush=True)
    raise SystemExit(failed)


if __name__ == "__main__":
    main()

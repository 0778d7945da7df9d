"""Write the tables of README.md, docs/performance.md and docs/vllm.md from the records.

    python benchmarks/tables.py           # after a benchmark run
    python benchmarks/tables.py --check   # write nothing, fail if a document is out of date

Of each suite the newest record counts. docs/performance.md is written whole; in the two others,
what stands between the two marks.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from chord.bench.cliffs import find_cliffs, is_sweep
from chord.bench.records import Record, Row, newest
from chord.bench.scenarios import LAYER
from chord.timing import IN_TURNS

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "benchmarks" / "records"

# The order of the sections; suites that are not named follow by name.
TITLES = {
    LAYER: "The whole layer",
    "ep8_decode": "EP8 decode (48 experts)",
    "ep16_decode": "EP16 decode (24 experts)",
    "ep32_decode": "EP32 decode (12 experts)",
    "tp8_decode": "TP8 at small batches (384 experts)",
    "ep8_prefill": "EP8 prefill (48 experts; tokens of all 8 ranks)",
    "tp8": "TP8 prefill (384 experts)",
    "ep8_sweep": "EP8 sweep over rows",
    "grouped": "Grouped rows, EP8 (48 experts)",
    "grouped_ep16": "Grouped rows, EP16 (24 experts)",
    "grouped_ep32": "Grouped rows, EP32 (12 experts)",
    "grouped_kimi_k2_tp8": "Grouped rows, Kimi K2 TP8 (384 experts)",
    "grouped_deepseek_v3": "Grouped rows, DeepSeek-V3 (256 experts)",
    "grouped_qwen3_235b": "Grouped rows, Qwen3-235B (128 experts)",
    "grouped_glm_4_5": "Grouped rows, GLM-4.5 (160 experts)",
    "grouped_glm_4_5_air": "Grouped rows, GLM-4.5-Air (128 experts)",
    "grouped_minimax_m2": "Grouped rows, MiniMax-M2 (256 experts)",
}
# Suite, series, projection and count of README's rows, where a record has them. The row that does
# worst against humming is always added.
README_ROWS = (
    ("ep8_decode", "", "gate_up", 20),
    ("ep8_decode", "", "down", 50),
    ("ep8_prefill", "", "gate_up", 1024),
    ("ep8_prefill", "", "gate_up", 16384),
    ("tp8", "", "down", 16384),
    ("grouped", "contiguous", "gate_up", 256),
    ("grouped", "masked", "gate_up", 16),
)
BEGIN, END = "<!-- results: written by benchmarks/tables.py -->", "<!-- end of results -->"

INTRODUCTION = """\
# Performance

Every row of the benchmark suites, as measured; written by `python benchmarks/tables.py` from the
records named above each table. Times are medians with a cold L2. The floor is what a kernel needs
that only moves the bytes, or the rate of a dense BF16 matmul of the same size in the same run,
whichever is longer (`chord bench` prints the formula). humming is humming-kernels{version} with its
own choice of tiles, torch is `torch._grouped_mm` with BF16 weights, what a model pays that was not
quantised; both in the same run. Nothing is measured on Blackwell yet.

`chord bench` and `chord tune` measure in turns: every round calls each contestant of a row once
(Chord, the peers and the dense matmul; for the tuner all candidates), in an order that rotates from
round to round, and the median is over rounds. A card changes its speed with power and heat while it
works, and all contestants are to meet the same. Before each call the L2 is flushed for longer than
the CPU takes to launch it, so that no launch is timed; where a record's `timer` does not say so, it
was flushed once, for about 60 us. It is flushed by writing, so that each call first writes back up
to an L2 of foreign lines, the peers' calls and the floor's as well.

Nearly all rows run at the card's power limit, so that a kernel's time is its energy. Where bytes
and multiplications take about equally long (40 to 170 rows an expert), the floor counts the longer
of the two, and a kernel pays for both: Chord's takes as much energy there as the dense matmul and a
bare stream of the weights together ([lab notes](lab/prefill.md), 91; `python benchmarks/variants.py
energy` measures it). So those rows stand further above the floor than others.
"""
IN_BLOCKS = (
    "Measured in blocks, not in turns: all calls of one contestant, then all of the next, so that",
    "ratios also hold what the card did in between.",
    "",
)


LAYER_WORDS = (
    "`chord.fused_moe` as a CUDA graph replays it, beside the same layer built from",
    "humming-kernels as vLLM builds it (align, GEMM, activation, GEMM, weighted sum; the record",
    "says whether align and sum are vLLM's own or Chord's kernels of the same purpose). Parts:",
    "both of Chord's GEMMs alone, plus the bytes of the top-k sum at memory speed.",
    "",
)


def newest_records(folder: Path) -> list[Record]:
    """Return the newest record of each suite, in the order of the sections."""
    order = list(TITLES)
    return sorted(
        newest(folder).values(),
        key=lambda one: order.index(one.suite) if one.suite in order else len(order),
    )


def table(rows: Iterable[tuple[str, Row]], first_column: str) -> Iterator[str]:
    """Yield the lines of a table: a label a row, floor, Chord, and each peer that any row has."""
    rows = list(rows)
    peers = [n for n in dict.fromkeys(n for _, row in rows for n in row.entries) if n != "chord"]
    head = [first_column, "rows", "floor us", "Chord us", "x floor"]
    head += [name for peer in peers for name in (f"{peer} us", f"{peer} / Chord")]
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for label, row in rows:
        us = row.entries["chord"].us
        cells = [label, str(row.routed), f"{row.floor_us:.0f}", f"{us:.0f}"]
        cells.append(f"{us / row.floor_us:.2f}")
        for peer in peers:
            other = row.entries.get(peer)
            cells += [f"{other.us:.0f}", f"{other.us / us:.2f}"] if other else ["-", "-"]
        yield f"| {' | '.join(cells)} |"


def layer_table(rows: Iterable[Row]) -> Iterator[str]:
    """Yield the lines of a table of whole layers, beside the baseline and the sum of the parts."""
    head = ["tokens", "rows", "Chord us", "x floor", "parts us", "Chord / parts"]
    head += ["humming us", "humming / Chord"]
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for row in rows:
        us, parts = row.entries["chord"].us, row.parts_us()
        cells = [str(row.tokens), str(row.routed), f"{us:.0f}", f"{us / row.floor_us:.2f}"]
        cells += [f"{parts:.0f}", f"{us / parts:.2f}"]
        other = row.entries.get("humming")
        cells += [f"{other.us:.0f}", f"{other.us / us:.2f}"] if other else ["-", "-"]
        yield f"| {' | '.join(cells)} |"


def section(record: Record) -> Iterator[str]:
    """Yield the lines of one record's section of docs/performance.md."""
    title = TITLES.get(record.suite, record.suite)
    yield f"## {title}"
    yield ""
    yield f"<!-- records: {record.file_stem} -->"
    yield ""
    if IN_TURNS not in record.timer:
        yield from IN_BLOCKS
    if is_sweep(record):
        found = find_cliffs(record)
        yield f"{len(record.rows)} counts, each about 8 % above the one before. Places where more"
        yield f"rows take less time, or 8 % more rows over 15 % more time: {len(found) or 'none'}."
        yield ""
        yield from (f"- {cliff.describe()}" for cliff in found)
        yield from [""] if found else []
    else:
        if record.suite == LAYER:
            yield from LAYER_WORDS
        for series in dict.fromkeys(row.series for row in record.rows):
            rows = [row for row in record.rows if row.series == series]
            if series:
                yield f"### {series[0].upper()}{series[1:]}"
                yield ""
            if record.suite == LAYER:
                yield from layer_table(rows)
            else:
                labelled = ((f"{row.projection} {row.tokens}", row) for row in rows)
                yield from table(labelled, f"projection, {rows[0].unit}")
            yield ""
    yield f"![{title}](../benchmarks/records/{record.file_stem}.png)"


def performance(records: list[Record]) -> str:
    """Return docs/performance.md."""
    versions = sorted({r.versions["humming"] for r in records if "humming" in r.versions})
    lines = [INTRODUCTION.format(version=f" {', '.join(versions)}" if versions else "")]
    for record in records:
        lines += [*section(record), ""]
    return "\n".join(lines)


def between_marks(name: str, text: str, lines: Iterable[str]) -> str:
    """Return a document with its results replaced.

    Raises:
        ValueError: The marks are missing.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"{name} must have the lines {BEGIN!r} and {END!r} once each")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n\n{chr(10).join(lines)}\n\n{END}{after}"


def vllm_results(folder: Path) -> Iterator[str]:
    """Yield the lines between the marks of docs/vllm.md, from what benchmarks/vllm/run.py wrote."""
    speed, speed_stem = newest_part(folder, "speed")
    agree, agree_stem = newest_part(folder, "agree")
    versions = speed["versions"]
    card = speed["card"].replace("NVIDIA ", "")
    yield from wrap(
        f"{card}, {speed['date']}, vLLM {versions['vllm']}, humming-kernels "
        f"{versions['humming-kernels']}. One rank of TP8 of Kimi K2 (384 experts, intermediate "
        "256, 12 expert layers of it, dummy weights), CUDA graphs; Chord and stock vLLM (`auto`, "
        "which is Humming) in turn in one run. Prefill: requests of 2,048 tokens; decode: a step "
        "of so many requests. Best of all rounds; the record has each."
    )
    yield ""
    yield f"<!-- records: vllm/{speed_stem}, vllm/{agree_stem} -->"
    yield ""
    yield "| case | Chord ms | stock ms | stock / Chord |"
    yield "|---|---|---|---|"
    for row in speed["speed"]["times"]:
        ms = row["best_ms"]
        yield (
            f"| {row['case']} | {ms['chord']:.2f} | {ms['stock auto']:.2f} | "
            f"{row['chord_is_faster_by']:.2f} |"
        )
    yield ""
    shares = speed["speed"]["profiles"]
    shared = "; ".join(
        f"{name} prefill {part['prefill']['expert_us'] / part['prefill']['gpu_us']:.0%}, decode "
        f"{part['decode']['expert_us'] / part['decode']['gpu_us']:.0%}"
        for name, part in shares.items()
    )
    starts = speed["speed"]["starts"]
    took = "; ".join(f"{name} {start['start_s']:.0f} s" for name, start in starts.items())
    yield from wrap(
        "Share of the experts' kernels in the time on the GPU, where kernels that overlap count "
        f"twice: {shared}. Engine start: {took}."
    )
    yield ""
    places = agree["agree"]["pairs"]["chord | marlin"]["places"]
    yield from wrap(
        "A small model of the same architecture with a real INT4 checkpoint, every way to start "
        f"it: at {places:,} places, how often the likeliest next word is the same, and how far "
        "the given words' logprobs are apart on average."
    )
    yield ""
    yield "| engines | same word | logprobs apart |"
    yield "|---|---|---|"
    for pair, result in agree["agree"]["pairs"].items():
        names = pair.replace(" | ", " and ")
        apart = result["mean_abs_logprob"]
        yield f"| {names} | {result['top1_agreement']:.4f} | {apart:.4f} |"
    sides = agree["agree"].get("sides")
    if sides is not None:
        yield ""
        yield from wrap(
            f"Marlin's likeliest word is that of Chord alone at {sides['only chord']} places, of "
            f"Humming alone at {sides['only humming']}."
        )


def wrap(text: str) -> list[str]:
    """Return a paragraph as lines."""
    return textwrap.wrap(text, 100, break_long_words=False, break_on_hyphens=False)


def newest_part(folder: Path, part: str) -> tuple[dict[str, Any], str]:
    """Return the newest record of vLLM that holds the whole of `part`, and its file's stem.

    Raises:
        ValueError: There is none.
    """
    for path in sorted(folder.glob("*.json"), reverse=True):
        record: dict[str, Any] = json.loads(path.read_text())
        if part in record and "unfinished" not in record[part]:
            return record, path.stem
    raise ValueError(f"no record in {folder} holds {part!r}; run benchmarks/vllm/run.py")


def readme_results(records: list[Record]) -> Iterator[str]:
    """Yield the lines between README's marks."""
    by_key = {
        (record.suite, row.series, row.projection, row.tokens): (record, row)
        for record in records
        if record.suite != LAYER
        for row in record.rows
    }
    ratios = {
        key: row.entries["humming"].us / row.entries["chord"].us
        for key, (_, row) in by_key.items()
        if "humming" in row.entries
    }
    wanted = [key for key in README_ROWS if key in by_key]
    if ratios:
        wanted.append(min(ratios, key=lambda key: ratios[key]))
    order = list(by_key)
    shown = sorted(dict.fromkeys(wanted), key=order.index)
    used = list({by_key[key][0].file_stem: by_key[key][0] for key in shown}.values())
    dates = ", ".join(sorted({record.date for record in used}))
    cards = ", ".join(sorted({record.card.replace("NVIDIA ", "") for record in used}))
    humming = ", ".join(sorted({r.versions["humming"] for r in used if "humming" in r.versions}))
    yield f"{cards}, {dates}, microseconds of one expert GEMM with a cold L2, beside the floor and"
    yield f"the peers of the same run. The row that does worst against humming-kernels {humming} is"
    yield "among them; all rows are in [docs/performance.md](docs/performance.md)."
    yield ""
    yield f"<!-- records: {', '.join(record.file_stem for record in used)} -->"
    yield ""
    labelled = []
    for key in shown:
        suite, series, projection, tokens = key
        name = TITLES.get(suite, suite).partition(" (")[0]
        name = f"{name}, {series}," if series else name
        labelled.append((f"{name} {projection} {tokens}", by_key[key][1]))
    yield from table(labelled, "case")


def documents(records_folder: Path = RECORDS) -> dict[Path, str]:
    """Return what the documents should be, by path."""
    records = newest_records(records_folder)
    readme, vllm = ROOT / "README.md", ROOT / "docs" / "vllm.md"
    in_vllm = vllm_results(records_folder / "vllm")
    return {
        readme: between_marks(readme.name, readme.read_text(), readme_results(records)),
        ROOT / "docs" / "performance.md": performance(records),
        vllm: between_marks(vllm.name, vllm.read_text(), in_vllm),
    }


def main() -> int:
    """Write the documents, or compare them; return 1 if --check found a difference."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, fail on a difference")
    check = parser.parse_args().check
    changed = {path: text for path, text in documents().items() if path.read_text() != text}
    for path, text in changed.items():
        print(f"{'out of date' if check else 'wrote'}: {path.relative_to(ROOT)}")
        if not check:
            path.write_text(text)
    return 1 if check and changed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Records: round trip, faults, staleness; and no number in README or docs that no record holds."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from types import ModuleType

import pytest

from chord import timing
from chord.bench import chart, layer, records, scenarios
from chord.errors import InputError

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "benchmarks" / "records"
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# A table whose heading has one of these is a table of measurements.
UNITS = re.compile(r"\b(us|TFLOPS|TFLOP/s|GB/s|TB/s|x floor|speed-?up)\b")
SOURCE = re.compile(r"<!--\s*records?:\s*([^>]*?)\s*-->")


def example() -> records.Record:
    entries = {
        "chord": records.Entry(190.0, 189.0, 192.0, 1.7e-3, "decode", 12.0),
        "humming": records.Entry(230.25, 229.0, 231.0, 1.7e-3, ""),
    }
    rows = [
        records.Row(
            name, 20, 160, 48, 4096, 7168, 46, 761_000_000, 174.02, "memory", 650.0, entries
        )
        for name in ("gate_up", "down")
    ]
    return records.Record(
        suite="ep8_decode",
        date="2026-01-31",
        card="NVIDIA H200",
        versions={"chord": "0.1"},
        kernel_digest="a" * 64,
        timer="words",
        floor="words",
        rows=rows,
    )


def test_round_trip(tmp_path: Path) -> None:
    path = records.save(example(), tmp_path / "made")
    assert path.name == "2026-01-31-h200-ep8_decode.json"
    assert records.load(path) == example()
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"rows": [{"entries": {}}]}', "null"])
def test_a_broken_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"x\.json"):
        records.load(path)


def test_another_schema_is_refused(tmp_path: Path) -> None:
    path = records.save(dataclasses.replace(example(), schema=99), tmp_path)
    with pytest.raises(InputError, match="schema 99"):
        records.load(path)


def test_stale_records_are_reported(tmp_path: Path) -> None:
    records.save(example(), tmp_path)
    assert records.stale(tmp_path, "a" * 64) == []
    (line,) = records.stale(tmp_path, "b" * 64)
    assert "2026-01-31-h200-ep8_decode.json" in line
    assert "aaaaaaaaaaaa" in line
    assert "bbbbbbbbbbbb" in line
    assert records.stale(tmp_path / "missing", "b") == []


def test_chart_is_drawn(tmp_path: Path) -> None:
    path = chart.draw(example(), tmp_path / "x.png")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_committed_records_are_whole() -> None:
    for path, record in records.load_all(RECORDS):
        assert path.stem == record.file_stem
        assert len(record.kernel_digest) == 64, path.name
        for row in record.rows:
            assert row.entries["chord"].row_error <= 5e-3, f"{path.name}: {row}"


# --- numbers in README and docs ---------------------------------------------------------------


def values_of(row: records.Row) -> list[float]:
    """Return every number that a table line about this row may show."""
    times = [row.floor_us, *(entry.us for entry in row.entries.values())]
    # Of a whole layer: its parts, alone.
    times.append(sum(e.us for name, e in row.entries.items() if name not in ("chord", "humming")))
    times = [time for time in times if time > 0]
    values: list[float] = [row.tokens, row.routed, row.experts, row.n, row.k, row.active_experts]
    values += [row.dense_tflops, row.routed / row.experts, *times]
    values += [slow / fast for slow, fast in permutations(times, 2)]
    for entry in row.entries.values():
        values += [entry.p10_us, entry.p90_us, entry.row_error]
        values += [] if entry.host_us is None else [entry.host_us]
        values += [2 * row.routed * row.n * row.k / entry.us / 1e6, row.num_bytes / entry.us / 1e3]
    return values


def shows(text: str, value: float) -> bool:
    """Whether `text`, such as "190" or "1.09" or "1.7e-3", is `value` rounded to its digits."""
    mantissa, _, exponent = text.lower().partition("e")
    decimals = len(mantissa.partition(".")[2])
    scale = 10.0 ** int(exponent or 0)
    return abs(float(mantissa) - value / scale) <= 0.5 * 10.0**-decimals * 1.0001


def lines_without_record(document: str, folder: Path) -> list[str]:
    """Return the complaints about one document's tables of measurements."""
    found: list[str] = []
    source: list[str] = []
    in_results = False
    lines = document.splitlines()
    for number, line in enumerate(lines, 1):
        if match := SOURCE.search(line):
            source = [stem.strip() for stem in match.group(1).split(",")]
        if not line.startswith("|"):
            in_results = False
            continue
        follows = lines[number] if number < len(lines) else ""
        if re.match(r"\|[\s:|-]+$", follows):
            in_results = bool(UNITS.search(line))
            if in_results and not source:
                found.append(f"line {number}: a table of measurements needs <!-- records: ... -->")
            continue
        if not in_results or re.match(r"\|[\s:|-]+$", line) or not source:
            continue
        missing = [stem for stem in source if not (folder / f"{stem}.json").is_file()]
        if missing:
            found.append(f"line {number}: there is no record {missing}")
            continue
        rows = [row for stem in source for row in records.load(folder / f"{stem}.json").rows]
        numbers = re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?:[eE]-?\d+)?", line.replace(",", ""))
        if not any(
            all(any(shows(text, value) for value in values_of(row)) for text in numbers)
            for row in rows
        ):
            found.append(f"line {number}: no row of {source} has all of {numbers}")
    return found


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_numbers_in_documents_are_in_records(path: Path) -> None:
    found = lines_without_record(path.read_text(), RECORDS)
    assert not found, f"{path.name}: " + "; ".join(found)


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look for their module
    spec.loader.exec_module(module)
    return module


def test_documents_are_what_the_records_make() -> None:
    for path, text in script("tables").documents().items():
        assert path.read_text() == text, f"{path.name} is old; run python benchmarks/tables.py"


def test_tables_hold_every_row_and_pass_the_check(tmp_path: Path) -> None:
    module = script("tables")
    one = example()
    grouped = dataclasses.replace(one, suite="grouped", rows=list(in_series(one.rows)))
    records.save(one, tmp_path)
    records.save(grouped, tmp_path)
    records.save(dataclasses.replace(one, date="2025-12-31"), tmp_path)
    newest = module.newest_records(tmp_path)
    assert [(r.suite, r.date) for r in newest] == [
        ("ep8_decode", "2026-01-31"),
        ("grouped", "2026-01-31"),
    ]
    page = module.performance(newest)
    assert page.count("| gate_up 20 | 160 | 174 | 190 | 1.09 | 230 | 1.21 |") == 2
    assert "### Masked" in page
    assert page.count("Measured in blocks, not in turns") == 2
    in_turns = [dataclasses.replace(record, timer=timing.method()) for record in newest]
    assert "Measured in blocks" not in module.performance(in_turns)
    assert "projection, rows per expert" in page
    assert lines_without_record(page, tmp_path) == []
    marks = f"# Title\n{module.BEGIN}\nreplace me\n{module.END}\nrest\n"
    text = module.between_marks("README.md", marks, module.readme_results(newest))
    assert "replace me" not in text and text.endswith(f"{module.END}\nrest\n")
    assert text.count("EP8 decode gate_up 20") == 1
    assert lines_without_record(text, tmp_path) == []
    assert module.between_marks("README.md", text, module.readme_results(newest)) == text
    with pytest.raises(ValueError, match=r"README.md must have .* once each"):
        module.between_marks("README.md", "# Title\n", [])


def test_results_in_vllm_are_those_of_the_newest_record(tmp_path: Path) -> None:
    module = script("tables")
    with pytest.raises(ValueError, match=r"holds 'speed'; run benchmarks/vllm/run\.py"):
        list(module.vllm_results(tmp_path))
    for path in (RECORDS / "vllm").glob("*.json"):
        (tmp_path / path.name).write_text(path.read_text())
    record, stem = module.newest_part(tmp_path, "speed")
    record["speed"]["times"][0]["best_ms"]["chord"] = 12.345
    (tmp_path / f"9{stem[1:]}.json").write_text(json.dumps(record))
    text = "\n".join(module.vllm_results(tmp_path))
    assert "| 12.35 |" in text or "| 12.34 |" in text
    assert f"vllm/9{stem[1:]}" in text
    record["speed"]["unfinished"] = True
    (tmp_path / f"9{stem[1:]}z.json").write_text(json.dumps(record))
    assert module.newest_part(tmp_path, "speed")[1] == f"9{stem[1:]}"
    assert "| chord and marlin |" in text


def in_series(rows: list[records.Row]) -> Iterator[records.Row]:
    """Yield the rows as a series that another peer has run."""
    for row in rows:
        entries = {"chord": row.entries["chord"], "torch": row.entries["humming"]}
        yield dataclasses.replace(row, entries=entries, series="masked", unit="rows per expert")


def test_a_sweep_is_told_by_its_cliffs() -> None:
    module = script("tables")
    first = example().rows[0]
    slower = {"chord": dataclasses.replace(first.entries["chord"], us=300.0)}
    rows = [
        dataclasses.replace(first, tokens=20, unit="rows"),
        dataclasses.replace(first, tokens=21, unit="rows", entries=slower),
    ]
    page = module.performance([dataclasses.replace(example(), suite="ep8_sweep", rows=rows)])
    assert "15 % more time: 1." in page
    assert "leaps from 190.0 us at 20 to 300.0 us at 21 rows" in page
    assert "| gate_up" not in page


def test_bars_are_of_rows_that_exist() -> None:
    """Each bar and each published time is of at least one row of its suite."""
    module = script("bars")
    for bar in module.BARS:
        suite = scenarios.suite_named(bar.suite)
        found = [
            case
            for projection in suite.projections
            for case in scenarios.cases(suite, projection)
            if case.series.name == bar.series and projection.name in bar.projections
        ]
        assert any(bar.counts[0] <= case.tokens <= bar.counts[1] for case in found), bar
    grouped = scenarios.suite_named("grouped")
    for (series, projection), times in module.PUBLISHED_US.items():
        (counts,) = (one.counts for one in grouped.series if one.name == series)
        assert set(times) == set(counts), (series, projection)


def test_bars_are_missed_in_words() -> None:
    module = script("bars")
    row = dataclasses.replace(example().rows[0], tokens=20, floor_us=180.0)
    assert list(module.misses("ep8_decode", row)) == []
    slow = dataclasses.replace(row, floor_us=170.0)
    assert list(module.misses("ep8_decode", slow)) == ["bar 1.10"]
    humming = records.Entry(185.0, 1.0, 1.0, 1e-3, "")
    behind = dataclasses.replace(row, entries={**row.entries, "humming": humming})
    (words,) = module.misses("ep8_decode", behind)
    assert words == "0.97 x faster than humming, bar 1.00"
    assert list(module.misses("tp8", behind)) == []  # humming is within 1.1 x floor
    masked = dataclasses.replace(row, tokens=8, series="masked", floor_us=230.0)
    entries = {"chord": records.Entry(250.0, 1.0, 1.0, 1e-3, "")}
    alone = dataclasses.replace(masked, entries=entries)
    published = "250 us, published elsewhere 249"
    assert list(module.misses("grouped", alone)) == ["not measured beside humming", published]
    indices = dataclasses.replace(alone, series="contiguous, m_indices")  # which humming has not
    assert list(module.misses("grouped", indices)) == []


def test_the_check_of_documents_can_fail(tmp_path: Path) -> None:
    stem = records.save(example(), tmp_path).stem
    head = "| case | tokens | floor us | chord us | x floor |\n|---|---|---|---|---|\n"
    good = f"<!-- records: {stem} -->\n\n{head}| gate_up | 20 | 174 | 190.0 | 1.09 |\n"
    assert lines_without_record(good, tmp_path) == []
    assert lines_without_record(good.replace("190.0", "188.0"), tmp_path) != []
    assert lines_without_record(good.replace("1.09", "1.05"), tmp_path) != []
    assert lines_without_record(good.replace(stem, "gone"), tmp_path) != []
    assert lines_without_record(head + "| gate_up | 20 | 174 | 190.0 | 1.09 |\n", tmp_path) != []
    assert lines_without_record("| field | bytes |\n|---|---|\n| codes | 2048 |\n", tmp_path) == []


def layer_row(us: float, humming: float) -> records.Row:
    """A row of the layer's record: 200 us of GEMMs and 10 us of top-k sum."""
    first = example().rows[0]
    times = {"chord": us, "humming": humming, "chord gate_up alone": 120.0}
    times |= {"chord down alone": 80.0, "top-k sum at memory speed": 10.0}
    entry = first.entries["chord"]
    entries = {name: dataclasses.replace(entry, us=time) for name, time in times.items()}
    return dataclasses.replace(
        first, projection="layer", series="EP8 decode", tokens=20, entries=entries
    )


def test_layers_are_held_to_the_baseline_and_to_the_parts() -> None:
    module = script("bars")
    assert list(module.misses("layer", layer_row(215.0, 260.0))) == []
    assert list(module.misses("layer", layer_row(230.0, 260.0))) == [
        "1.13 x faster than humming, bar 1.20",
        "1.10 x the sum of the parts, bar 1.08",
    ]
    series = {case.series.name for case in layer.layer_cases()}
    assert series == set(module.LAYER_AHEAD)
    assert len(list(layer.layer_cases())) == 19


def test_layers_have_a_table_of_their_own() -> None:
    record = dataclasses.replace(example(), suite="layer", rows=[layer_row(215.0, 260.0)])
    page = script("tables").performance([record])
    assert "### EP8 decode" in page
    assert re.search(r"\| 20 \| \d+ \| 215 \| [\d.]+ \| 210 \| 1.02 \| 260 \| 1.21 \|", page), page

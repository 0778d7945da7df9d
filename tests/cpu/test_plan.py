"""Planning: what may run, each refusal in words, the choice, profiles."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from chord import device as devices
from chord.errors import InputError, UnsupportedError
from chord.plan import cost, legality, select
from chord.plan.config import (
    MAX_DIRECT_K,
    Config,
    DecodeConfig,
    DirectConfig,
    PrefillConfig,
    config_from_fields,
    shipped_archs,
    shipped_configs,
)
from chord.plan.problem import GemmProblem

H200, B200 = devices.known("h200"), devices.known("b200")
GATE_UP = GemmProblem(num_experts=48, n=4096, k=7168, routed_rows=160)
# Down projection of a layer whose 2,048 features 8 ranks share.
SHORT = GemmProblem(num_experts=384, n=7168, k=256, routed_rows=64)
DECODE = DecodeConfig(max_tokens=16, warps=8, block_k=256, stages=4)
PREFILL = PrefillConfig(block_m=64, min_width=8, width_step=8, block_k=128, stages=4)
DIRECT = DirectConfig(max_tokens=16, warps=16, max_k=256)


def problem_for(config: Config) -> GemmProblem:
    """Return a problem that a legal configuration runs."""
    return SHORT if isinstance(config, DirectConfig) else GATE_UP


@pytest.mark.parametrize("arch", shipped_archs())
def test_shipped_configs_are_legal_on_their_card(arch: str) -> None:
    card = devices.known(arch)
    assert shipped_configs(arch)
    for config in shipped_configs(arch):
        assert legality.reject(config, problem_for(config), card) is None, config.label()
        assert legality.reject(config, SHORT, card) is None, config.label()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (dataclasses.replace(DECODE, max_tokens=12), "max_tokens=12 is not a multiple of 8"),
        (dataclasses.replace(DECODE, max_tokens=72), "max_tokens=72"),
        (dataclasses.replace(DECODE, warps=3), "96 features; at most"),
        (dataclasses.replace(DECODE, warps=32), "warps=32 with warp_features=32 makes"),
        (dataclasses.replace(DECODE, warp_features=48), "warp_features=48 is not 32 or 64"),
        (dataclasses.replace(DECODE, block_k=96), "block_k=96 is not a positive multiple of 64"),
        (dataclasses.replace(DECODE, stages=1), "stages=1 is not in 2.."),
        (dataclasses.replace(DECODE, stages=7), "bytes of shared memory"),
        (dataclasses.replace(DECODE, stages=16), "bytes of shared memory"),
        (dataclasses.replace(DECODE, stages=17), "stages=17 is not in 2..16"),
        (dataclasses.replace(DECODE, stages="4"), "stages='4' is not a whole number"),
        (dataclasses.replace(DIRECT, max_tokens=24), "max_tokens=24 is not 8 or 16"),
        (dataclasses.replace(DIRECT, max_tokens=12), "max_tokens=12 is not 8 or 16"),
        (dataclasses.replace(DIRECT, warps=0), "warps=0 is not an even number in 2..16"),
        (dataclasses.replace(DIRECT, warps=18), "warps=18 is not an even number in 2..16"),
        (dataclasses.replace(DIRECT, warps=7), "warps=7 is not an even number"),
        (dataclasses.replace(DIRECT, max_k=96), "max_k=96 is not a multiple of 64 in 64..256"),
        (dataclasses.replace(DIRECT, max_k=320), "max_k=320 is not a multiple of 64 in 64..256"),
        (dataclasses.replace(DIRECT, max_k=0), "max_k=0 is not a multiple"),
        (dataclasses.replace(DIRECT, warps=8.0), "warps=8.0 is not a whole number"),
        (DIRECT, "K=7168 is more than max_k=256"),
        (dataclasses.replace(PREFILL, width_step=4), "width_step=4 is not 8 or 16"),
        (dataclasses.replace(PREFILL, block_m=200), "block_m=200 is not a multiple of 8"),
        (dataclasses.replace(PREFILL, min_width=72), "min_width=72"),
        (dataclasses.replace(PREFILL, width_step=16), "does not reach block_m=64"),
        (dataclasses.replace(PREFILL, stages=17), "stages=17 is not in 2..16"),
        (dataclasses.replace(PREFILL, store_eights=0), "store_eights=0 is not in 1..8"),
        (dataclasses.replace(PREFILL, store_eights=9), "store_eights=9"),
    ],
)
def test_every_refused_config_says_why(config: Config, words: str) -> None:
    reason = legality.reject(config, GATE_UP, H200)
    assert reason is not None and words in reason


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_experts": 513}, "num_experts=513 is more than 512"),
        ({"num_experts": 0}, "num_experts=0 must be at least 1"),
        ({"n": 1 << 30}, "N=1073741824 is more than 1073741816"),
        ({"k": 7184}, "K=7184 is not a positive multiple of 32"),
        ({"n": 4100}, "N=4100 is not a positive multiple of 8"),
        ({"routed_rows": -1}, "routed_rows=-1"),
        ({"routed_rows": 1 << 31}, "counted in 32 bits"),
        ({"routed_rows": 5_000_000}, "exceeds 4793490 rows"),
        ({"addressing": "Sorted"}, "addressing 'Sorted'"),
    ],
)
def test_every_refused_problem_says_why(change: dict[str, int], words: str) -> None:
    problem = dataclasses.replace(GATE_UP, **change)
    reason = legality.reject(DECODE, problem, H200)
    assert reason is not None and words in reason
    with pytest.raises(UnsupportedError, match=words.split("(")[0].replace("..", r"\.\.")):
        select.decide(problem, H200)


@pytest.mark.parametrize("max_k", range(64, 257, 64))
@pytest.mark.parametrize("max_tokens", [8, 16])
@pytest.mark.parametrize("card", devices.known_cards())
def test_direct_runs_every_k_up_to_its_longest(card: str, max_tokens: int, max_k: int) -> None:
    """On every card, with as many warps as it may have."""
    config = DirectConfig(max_tokens, legality.MAX_DIRECT_WARPS, max_k)
    for k in (32, max_k - 32, max_k):
        problem = dataclasses.replace(SHORT, k=k)
        assert legality.reject(config, problem, devices.known(card)) is None
    longer = dataclasses.replace(SHORT, k=max_k + 32)
    reason = legality.reject(config, longer, devices.known(card))
    assert reason is not None and f"K={max_k + 32} is more than max_k={max_k}" in reason


def test_prefill_is_refused_on_blackwell_in_words() -> None:
    reason = legality.reject(PREFILL, GATE_UP, B200)
    assert reason is not None and "wgmma exists on Hopper alone" in reason


@pytest.mark.parametrize("addressing", legality.SORTED_ADDRESSINGS)
def test_tiles_of_sorted_rows_are_whole_boxes(addressing: str) -> None:
    odd = dataclasses.replace(PREFILL, block_m=72)
    problem = dataclasses.replace(GATE_UP, addressing=addressing)
    reason = legality.reject(odd, problem, H200)
    assert reason is not None and "block_m=72 is not a multiple of 16" in reason
    assert legality.reject(odd, GATE_UP, H200) is None
    assert legality.reject(PREFILL, problem, H200) is None


def test_tiles_are_counted_in_twenty_bits() -> None:
    many = GemmProblem(num_experts=1, n=8, k=32, routed_rows=100_000_000)
    reason = legality.reject(DECODE, many, H200)
    assert reason is not None and "tiles of 16 rows" in reason
    with pytest.raises(UnsupportedError, match="no configuration can run"):
        select.decide(many, H200)


def test_chunks_are_counted_in_31_bits() -> None:
    many = GemmProblem(num_experts=1, n=1 << 16, k=1 << 16, routed_rows=524_000)
    reason = legality.reject(DECODE, many, H200)
    assert reason is not None and "chunks of 256 features x 256 K" in reason
    assert legality.reject(PREFILL, many, H200) is None
    wide = GemmProblem(num_experts=1, n=1 << 28, k=256, routed_rows=8)
    reason = legality.reject(DIRECT, wide, H200)
    assert reason is not None and "chunks of 32 features x 256 K" in reason
    assert legality.reject(DIRECT, dataclasses.replace(wide, n=1 << 26), H200) is None


@pytest.mark.parametrize("card", devices.known_cards())
@pytest.mark.parametrize("rows", [0, 1, 64, 160, 1024, 16384, 131072, 299_600])
def test_decide_returns_a_legal_choice_with_its_reasons(card: str, rows: int) -> None:
    facts = devices.known(card)
    problem = dataclasses.replace(GATE_UP, routed_rows=rows)
    decision = select.decide(problem, facts)
    assert legality.reject(decision.config, problem, facts) is None
    assert decision.config in [config for config, _ in decision.considered]
    if decision.reason.startswith("cost model"):
        assert decision.considered[0][0] == decision.config
    times = [us for _, us in decision.considered]
    assert times == sorted(times) and all(us > 0 for us in times)
    assert decision.reason.startswith("cost model") or decision.reason.startswith("profile")


def test_decode_serves_few_rows_and_prefill_many() -> None:
    few = select.decide(dataclasses.replace(GATE_UP, routed_rows=16), H200, Path("none"))
    many = select.decide(dataclasses.replace(GATE_UP, routed_rows=16384), H200, Path("none"))
    assert few.config.kernel == "decode" and many.config.kernel == "prefill"


@pytest.mark.parametrize("rows", [8, 16, 32, 64, 512, 4096, 16384])
def test_direct_serves_a_short_k_where_few_rows_are(rows: int) -> None:
    problem = dataclasses.replace(SHORT, routed_rows=rows)
    decision = select.decide(problem, H200, Path("none"))
    assert (decision.config.kernel == "direct") is (rows < 512)


# Measured on an H200.
@pytest.mark.parametrize(
    ("rows", "us"), [(8, 10.4), (16, 13.3), (32, 17.9), (64, 27.1), (256, 60.1), (512, 87.1)]
)
def test_predictions_for_direct_are_near_what_was_measured(rows: int, us: float) -> None:
    problem = dataclasses.replace(SHORT, routed_rows=rows)
    assert cost.predict_us(DIRECT, problem, H200) == pytest.approx(us, rel=0.1)


def test_an_unknown_architecture_is_refused() -> None:
    ada = dataclasses.replace(H200, name="NVIDIA L40S", card="l40s", arch="sm_89a")
    with pytest.raises(UnsupportedError, match=r"shipped for sm_89a \(NVIDIA L40S\)"):
        select.decide(GATE_UP, ada)


def test_an_expectation_moves_the_choice_and_no_limit() -> None:
    """Masked rows: the buffer's size says what may run, the hint what will be in use."""
    slots = dataclasses.replace(GATE_UP, routed_rows=48 * 1024, addressing="Masked")
    few = dataclasses.replace(slots, expected_rows=48 * 8)
    assert few.rows_per_expert == 8 and few.flop == slots.flop / 128
    assert select.decide(slots, H200, Path("none")).config.kernel == "prefill"
    assert select.decide(few, H200, Path("none")).config.kernel == "decode"
    assert select.decide(dataclasses.replace(slots, expected_rows=0), H200, Path("none"))
    assert dataclasses.replace(slots, expected_rows=1 << 40).planned_rows == slots.routed_rows
    long = dataclasses.replace(few, routed_rows=5_000_000)
    assert "exceeds 4793490 rows" in (legality.reject(DECODE, long, H200) or "")


@pytest.mark.parametrize("addressing", legality.ADDRESSINGS)
def test_every_addressing_is_legal(addressing: str) -> None:
    problem = dataclasses.replace(GATE_UP, addressing=addressing)
    assert legality.reject(DECODE, problem, H200) is None
    assert legality.reject(PREFILL, problem, H200) is None
    short = dataclasses.replace(SHORT, addressing=addressing)
    assert legality.reject(DIRECT, short, H200) is None


@pytest.mark.parametrize("shape", [GATE_UP, SHORT], ids=["long K", "short K"])
def test_predictions_stay_above_the_floor(shape: GemmProblem) -> None:
    for rows in (1, 160, 4096, 65536):
        problem = dataclasses.replace(shape, routed_rows=rows)
        floor = cost.floor_us(problem, H200)
        legal = [
            config
            for config in shipped_configs("sm_90a")
            if legality.reject(config, problem, H200) is None
        ]
        assert (problem.k <= MAX_DIRECT_K) == any(config.kernel == "direct" for config in legal)
        for config in legal:
            assert cost.predict_us(config, problem, H200) >= 0.95 * floor


def test_load_histogram_counts_rows_and_experts() -> None:
    for rows in (1, 48, 480, 2000, 20_000):
        problem = dataclasses.replace(GATE_UP, routed_rows=rows)
        total = sum(count * experts for count, experts in problem.load_histogram)
        assert total == pytest.approx(rows, rel=0.02)
        assert problem.active_experts <= 48 + 1e-6


def write_profile(folder: Path, *changes: dict[str, object], **change: object) -> None:
    row: dict[str, object] = {
        "num_experts": 48,
        "n": 4096,
        "k": 7168,
        "addressing": "Indexed",
        "rows_from": 100,
        "rows_to": 200,
        "kernel": "decode",
        "config": {"max_tokens": 32, "warps": 8, "block_k": 256, "stages": 3},
        "us": 190.5,
        "date": "2026-11-29",
    }
    rows = [row | change | one for one in changes or ({},)]
    (folder / "h200.json").write_text(json.dumps({"card": "h200", "rows": rows}))
    select.profile_rows.cache_clear()


def test_a_profile_row_wins_over_the_model_where_it_was_measured(tmp_path: Path) -> None:
    write_profile(tmp_path)
    inside = select.decide(GATE_UP, H200, tmp_path)
    assert inside.config == DecodeConfig(max_tokens=32, warps=8, block_k=256, stages=3)
    assert inside.reason == "profile h200.json row 0, 190.5 us measured on 2026-11-29"
    for other in ({"routed_rows": 99}, {"routed_rows": 201}, {"n": 2048}):
        outside = select.decide(dataclasses.replace(GATE_UP, **other), H200, tmp_path)
        assert outside.reason.startswith("cost model")


def test_a_row_of_the_own_addressing_goes_before_one_that_stands_in(tmp_path: Path) -> None:
    own = {"addressing": "RoutedDown", "config": DECODE.fields(), "us": 180.0}
    write_profile(tmp_path, {}, own)
    for addressing, number in (("Indexed", 0), ("RoutedGateUp", 0), ("RoutedDown", 1)):
        problem = dataclasses.replace(GATE_UP, addressing=addressing)
        decision = select.decide(problem, H200, tmp_path)
        assert decision.reason.startswith(f"profile h200.json row {number},"), addressing
    problem = dataclasses.replace(GATE_UP, addressing="RoutedDown", routed_rows=201)
    assert select.decide(problem, H200, tmp_path).reason.startswith("cost model")


def test_an_illegal_profile_row_is_passed_over(tmp_path: Path) -> None:
    fields = {"max_tokens": 64, "warps": 8, "block_k": 256, "stages": 6}
    write_profile(tmp_path, config=fields)
    decision = select.decide(GATE_UP, H200, tmp_path)
    assert decision.reason.startswith("cost model")
    assert DecodeConfig(**fields) in [config for config, _ in decision.rejected]


def test_a_broken_profile_is_named(tmp_path: Path) -> None:
    write_profile(tmp_path, kernel="stream")
    with pytest.raises(InputError, match=r"profile .*h200\.json cannot be read.*stream"):
        select.decide(GATE_UP, H200, tmp_path)
    select.profile_rows.cache_clear()


def test_shipped_profiles_are_legal() -> None:
    cards = {path.stem.partition("_")[0] for path in select.PROFILES.glob("*.json")}
    for card in cards:
        facts = devices.known(card)
        for row in select.profile_rows(card):
            is_routed = row.addressing == "Indexed" or row.addressing.startswith("Routed")
            each = 1 if is_routed else row.num_experts
            for rows in (row.rows_from * each, row.rows_to * each):
                problem = GemmProblem(row.num_experts, row.n, row.k, rows, row.addressing)
                assert legality.reject(row.config, problem, facts) is None, row.source
                assert row.distance(problem) == 0, row.source


def test_configs_render_by_field_name_and_read_back() -> None:
    assert DECODE.to_cpp() == (
        "{.max_tokens = 16, .warps = 8, .block_k = 256, .stages = 4, .warp_features = 32}"
    )
    assert DIRECT.to_cpp() == "{.max_tokens = 16, .warps = 16, .max_k = 256}"
    assert DIRECT.label() == "direct max_tokens=16 warps=16 max_k=256"
    for config in (DECODE, DIRECT, PREFILL):
        assert config_from_fields(config.kernel, config.fields()) == config
    with pytest.raises(InputError, match="kernel 'stream' is not one of decode, direct, prefill"):
        config_from_fields("stream", {})
    with pytest.raises(InputError, match="do not make a decode configuration"):
        config_from_fields("decode", {"tokens": 8})


def test_known_cards() -> None:
    assert devices.known("SM_100a") == B200
    assert (H200.arch, H200.num_sms, H200.smem_per_block_optin) == ("sm_90a", 132, 232448)
    with pytest.raises(InputError, match="card 'a100' is not known; known are h100, h200"):
        devices.known("a100")

import json

import msgspec
import pytest

from kvd.cli.main import main
from kvd.errors import BadRequest
from kvd.layout import Full, Sliding
from kvd.layout.models import MODELS, LayerKind
from kvd.layout.presets import Attention
from kvd.plan.explain import explain
from tests.plan.layout_buffers import engine, model

HYBRID = model(
    LayerKind(Full(), (1,), (Attention(2, 4),)),
    LayerKind(Sliding(24), (0, 2), (Attention(2, 4),)),
)


def kvd_plan(*arguments: str) -> int:
    return main(["plan", *arguments])


def test_figures_add_up_over_groups() -> None:
    (spec,) = engine(HYBRID, "flash-hnd", block=16)
    figures = explain([spec], spec, 100)
    full, sliding = figures.groups
    assert (full.bytes, sliding.bytes) == (7 * 16 * 16, 3 * 2 * 16 * 16)
    assert figures.bytes == full.bytes + sliding.bytes
    assert figures.descriptors == full.descriptors + sliding.descriptors == 7 * 2 + 3 * 2 * 2
    assert figures.bytes_as_full == 7 * 3 * 16 * 16
    assert figures.largest == figures.smallest == 16 * 8


def test_adjacent_blocks_take_fewer_descriptors_than_scattered_ones() -> None:
    (spec,) = engine(HYBRID, "cross-layer-hnd", block=16)
    assert explain([spec], spec, 100, "adjacent").descriptors == 2
    assert explain([spec], spec, 100).descriptors == 7 + 3


def test_overlaid_groups_are_given_different_blocks() -> None:
    (spec,) = engine(HYBRID, "cross-layer-hnd", block=16, overlay=True)
    assert explain([spec], spec, 100, "adjacent").bytes == sum(g.bytes for g in explain([spec], spec, 100).groups)


def test_a_pool_that_is_too_small_is_named() -> None:
    (spec,) = engine(HYBRID, "flash-hnd", block=16, blocks=6)
    with pytest.raises(BadRequest, match="source: 100 tokens need 7 blocks, num_blocks = 6"):
        explain([spec], spec, 100)


@pytest.mark.parametrize("name", MODELS)
def test_every_example_is_explained(name: str, capsys) -> None:
    assert kvd_plan("flashinfer-hnd", "cross-layer-hnd", "10000", "--model", name, "--consumer-tp", "2", "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["bytes"] == sum(group["bytes"] for group in figures["groups"]) > 0
    assert figures["readers"] == [2]
    assert len(figures["groups"]) == len(MODELS[name].kinds)


def test_ranks_that_deal_tokens_out_are_explained(capsys) -> None:
    sizes = ("--producer-tp", "4", "--producer-cp", "4", "--consumer-tp", "2", "--consumer-cp", "2")
    assert kvd_plan("packed-nhd", "packed-nhd", "1024", "--model", "DeepSeek-V3", *sizes, "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["sources"] == [0, 2]
    assert figures["bytes"] == 1024 // 2 * 61 * 576 * 2


def test_the_table_fits_a_terminal_of_80_columns(capsys) -> None:
    assert kvd_plan("flash-hnd", "cross-layer-hnd", "100000", "--model", "Llama-4-Scout") == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert any("36 x chunked 8192" in line and "6144..6250" in line and "238 MiB" in line for line in lines)
    assert "73.7% less than with full attention everywhere" in lines


def test_layouts_are_read_from_files_too(tmp_path, capsys) -> None:
    one, many = tmp_path / "one.json", tmp_path / "many.json"
    one.write_bytes(msgspec.json.encode(engine(HYBRID, "flash-hnd", block=16)[0]))
    many.write_bytes(msgspec.json.encode(engine(HYBRID, "cross-layer-hnd", block=16, tp=2)))
    assert kvd_plan(str(many), str(one), "100", "--json") == 0
    assert json.loads(capsys.readouterr().out)["sources"] == [0, 1]
    assert kvd_plan(str(one), str(many), "100", "--rank", "1", "--json") == 0
    assert json.loads(capsys.readouterr().out)["sources"] == [0]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["flash-hnd", "no-such-file", "10"], "no-such-file is no layout, and cannot be read as a file"),
        (["flash-hnd", "flash-hnd", "0"], "tokens 0: must be from 1 to"),
        (["flash-hnd", "flash-hnd", "10", "--rank", "1"], "--rank 1: must be from 0 to 0"),
        (["flash-hnd", "flash-hnd", "10", "--consumer-tp", "3"], "heads = 8"),
        (["flash-hnd", "flash-hnd", "10", "--consumer-cp", "2"], "shard.cp_size = 2: must be from 1 to 1"),
        (["flash-hnd", "flash-hnd", "10", "--consumer-pp", "99"], "--consumer-pp 99: must be from 1 to 32"),
        (["flash-hnd", "flash-hnd", "10", "--consumer-block", "24"], "source has 16, destination has 24"),
    ],
)
def test_what_cannot_be_explained_says_why(arguments: list[str], reason: str, capsys) -> None:
    assert kvd_plan(*arguments) == 2
    assert reason in capsys.readouterr().err


def test_a_file_that_is_no_spec_is_refused(tmp_path, capsys) -> None:
    for content in (b"[1]", b"[", b"{}", b""):
        (tmp_path / "spec.json").write_bytes(content)
        assert kvd_plan(str(tmp_path / "spec.json"), "flash-hnd", "10") == 2
        assert "bad_spec" in capsys.readouterr().err


def test_a_file_of_very_many_levels_is_refused(tmp_path, capsys) -> None:
    (tmp_path / "deep").write_text("[" * 100_000)
    assert kvd_plan(str(tmp_path / "deep"), "flash-hnd", "100") == 2
    assert f"kvd plan: bad_spec: {tmp_path / 'deep'}: " in capsys.readouterr().err

"""The search times what fits, keeps what is faster by more than chance, and dispatch then takes it."""

import json

import pytest

from bench import tune
from bench.workloads import AttentionWorkload
from jattn_kernels.call import AttentionCall
from jattn_kernels.mosaic.sm90.decode.autotuned import TILES, VARIABLE, Arrangement
from jattn_kernels.mosaic.sm90.decode.tile_sizes import choose_decode_tiles, shape_of

WORKLOAD = AttentionWorkload(batch=32, ctx=4096)
RULE, OTHER = Arrangement(3, 2, 1), Arrangement(4, 1, 2)


def times(faster, seen=None):
    """A clock: 100 us, and what is told for one arrangement; it asks what the kernel would be compiled for."""

    def time_us(workload, implementation="mosaic"):
        sizes = choose_decode_tiles(workload.spec, 2, workload.verify)
        arrangement = Arrangement(sizes.stages, sizes.blocks_per_sm, sizes.warpgroups)
        if seen is not None:
            seen.append(arrangement)
        if arrangement == Arrangement(2, 1, 1):
            raise ValueError("does not compile")
        return faster.get(arrangement, 100.0)

    return time_us


def test_search_times_every_arrangement_the_rules_first():
    seen = []
    found = tune.search(WORKLOAD, times({OTHER: 90.0}, seen))
    assert len(seen) == len(set(seen)) > 5
    assert {RULE, OTHER} <= set(seen)
    assert found.timed[:2] == [(RULE, 100.0), (OTHER, 90.0)]
    assert len(found.timed) == len(seen) - 1  # one did not compile
    assert found.best == (OTHER, 90.0)


@pytest.mark.parametrize("faster", [{}, {OTHER: 99.0}, {RULE: 80.0, OTHER: 90.0}])
def test_what_may_be_chance_is_not_kept(faster):
    assert tune.search(WORKLOAD, times(faster)).best is None


def test_the_rules_own_choice_must_compile():
    def time_us(workload):
        raise ValueError("does not compile")

    with pytest.raises(ValueError, match="does not compile"):
        tune.search(WORKLOAD, time_us)


def test_main_writes_what_dispatch_then_takes(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(tune.CHOICES, "mosaic", ((WORKLOAD,), tune.decode_choice))
    monkeypatch.setattr(tune, "_time_us", times({OTHER: 90.0}))
    out = tmp_path / "tiles.jsonl"
    tune.main(["--out", str(out)])
    assert "Set JATTN_DECODE_TILES" in capsys.readouterr().out
    (row,) = (json.loads(text) for text in out.read_text().splitlines())
    assert row["time_us"] == 90.0
    by_rule, narrow = (choose_decode_tiles(WORKLOAD.spec, itemsize, 1) for itemsize in (2, 1))
    monkeypatch.setenv(VARIABLE, str(out))
    told = choose_decode_tiles(WORKLOAD.spec, 2, 1)
    assert (told.stages, told.blocks_per_sm, told.warpgroups) == OTHER
    assert told.block_rows == by_rule.block_rows
    assert choose_decode_tiles(WORKLOAD.spec, 1, 1) == narrow  # another shape


def test_main_adds_to_what_was_kept(tmp_path, monkeypatch):
    monkeypatch.setitem(tune.CHOICES, "mosaic", ((WORKLOAD,), tune.decode_choice))
    out = tmp_path / "tiles.jsonl"
    for best in (OTHER, Arrangement(2, 1, 2)):
        monkeypatch.setattr(tune, "_time_us", times({best: 90.0}))
        tune.main(["--out", str(out), "--only", WORKLOAD.name])
    assert len(out.read_text().splitlines()) == 2
    monkeypatch.setenv(VARIABLE, str(out))
    sizes = choose_decode_tiles(WORKLOAD.spec, 2, 1)
    assert (sizes.stages, sizes.blocks_per_sm, sizes.warpgroups) == (2, 1, 2)


def test_main_refuses_a_folder_that_is_not_there(tmp_path, capsys):
    with pytest.raises(SystemExit):
        tune.main(["--out", str(tmp_path / "none" / "tiles.jsonl")])
    assert "there is no folder for `--out`" in capsys.readouterr().err


def test_main_says_that_the_rule_stands(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(tune.CHOICES, "mosaic", ((WORKLOAD,), tune.decode_choice))
    monkeypatch.setattr(tune, "_time_us", times({}))
    tune.main(["--out", str(tmp_path / "tiles.jsonl")])
    assert "nothing to keep" in capsys.readouterr().out
    assert not (tmp_path / "tiles.jsonl").exists()


@pytest.mark.parametrize("text", ["no JSON", "{}", '{"block_rows": 8}', None])
def test_a_file_that_is_none_of_these_is_refused(tmp_path, monkeypatch, text):
    file = tmp_path / "tiles.jsonl"
    if text is not None:
        file.write_text(text)
    monkeypatch.setenv(VARIABLE, str(file))
    with pytest.raises(ValueError, match="JATTN_DECODE_TILES must name a file"):
        choose_decode_tiles(WORKLOAD.spec, 2, 1)


@pytest.mark.parametrize(
    ("arrangement", "match"), [((4, 4, 1), "do not fit"), ((3, 1, 2), "do not fit"), ((0, 1, 1), "at least 1")]
)
def test_sizes_that_do_not_fit_are_refused(tmp_path, monkeypatch, arrangement, match):
    shape = shape_of(WORKLOAD.spec, 2, 8)
    (tmp_path / "tiles.jsonl").write_text(TILES.line(shape, Arrangement(*arrangement)))
    monkeypatch.setenv(VARIABLE, str(tmp_path / "tiles.jsonl"))
    with pytest.raises(ValueError, match=match):
        choose_decode_tiles(WORKLOAD.spec, 2, 1)


def test_triton_takes_what_is_kept(tmp_path, monkeypatch, capsys):
    pytest.importorskip("triton", reason="the group `dev` has it")
    from jattn_kernels.triton.attention import tile_sizes

    workload = tune.TUNED_BY_TRITON[0]
    choice = tune.triton_choice(workload)
    other = next(one for one in choice.others if one != choice.rule)

    def time_us(_, implementation):
        assert implementation == "triton"
        told = tile_sizes.TILES.tuned(choice.shape)
        return 90.0 if told == other else 100.0

    monkeypatch.setattr(tune, "_time_us", time_us)
    out = tmp_path / "tiles.jsonl"
    tune.main(["--implementation", "triton", "--out", str(out), "--only", workload.name])
    assert "Set JATTN_TRITON_TILES" in capsys.readouterr().out
    monkeypatch.setenv("JATTN_TRITON_TILES", str(out))
    assert tile_sizes.TILES.tuned(choice.shape) == other
    out.write_text(tile_sizes.TILES.line(choice.shape, other._replace(block_n=7)))
    tile_sizes.TILES.read.cache_clear()
    with pytest.raises(ValueError, match="do not fit this GPU"):
        tile_sizes.choose_tiles(call_of(workload))


def call_of(workload):
    spec = workload.spec
    dtypes = {"q_dtype": "bfloat16", "kv_dtype": "bfloat16"}
    sizes = {"page_size": 16, "num_tokens": 1, "num_seqs": workload.batch}
    return AttentionCall(operation="paged_decode", spec=spec, **dtypes, **sizes)

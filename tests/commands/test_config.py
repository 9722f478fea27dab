"""Flags and the configuration file."""

import pytest

from mpipar.commands.config import LATER, Config, parse


def test_defaults_follow_from_the_ranks():
    assert (Config().resolved(4).dp, Config().resolved(4).tp) == (2, 2)
    assert (Config().resolved(1).dp, Config().resolved(1).tp) == (1, 1)
    assert (Config().resolved(3).dp, Config().resolved(3).tp) == (3, 1)
    assert Config(pp=2).resolved(4).tp == 2 and Config(pp=4).resolved(4).tp == 1
    assert Config(pp=2).resolved(2).micro_batches == 4 and Config().resolved(2).micro_batches == 1
    mlp = Config(model="mlp").resolved(1)
    assert (mlp.dim, mlp.global_batch) == (1024, 128)
    assert Config(lr=1.0).resolved(1).lr_min == 0.1


def test_flags_override_the_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('model = "gpt"\nlayers = 3\nglobal-batch = 8\ntied = false\nlayers_per_stage = [2, 1]\nlr = 1e-2\n')
    config = parse(["--config", str(path), "--layers", "5"])
    assert (config.layers, config.global_batch, config.tied, config.lr) == (5, 8, False, 1e-2)
    assert config.stage_layers() == [2, 1]
    assert parse([f"--config={path}"]).layers == 3


@pytest.mark.parametrize("arguments", [
    ["--layer", "3"], ["--layers", "x"], ["--model", "resnet"], ["--layers"], ["--config", "/none.toml"],
    ["--dtype", "float16"], ["stray"],
])
def test_bad_flags_are_one_line(arguments):
    with pytest.raises(ValueError) as error:
        parse(arguments)
    assert "\n" not in str(error.value) and len(str(error.value)) < 300


@pytest.mark.parametrize("name", sorted(LATER))
def test_what_does_not_exist_yet_is_refused_by_name(name, tmp_path):
    with pytest.raises(ValueError, match=f"--{name} does not exist yet"):
        parse([f"--{name}", "1"])
    path = tmp_path / "run.toml"
    path.write_text(f"{name} = 1\n")
    with pytest.raises(ValueError, match="does not exist yet"):
        parse(["--config", str(path)])


@pytest.mark.parametrize("text,words", [
    ("layers = ", "not valid TOML"), ("layerz = 3", "not an option: valid are"), ('layers = "x"', "not a number"),
])
def test_bad_files_are_one_line(text, words, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=words):
        parse(["--config", str(path)])


@pytest.mark.parametrize("config,words", [
    (Config(global_batch=32, dp=3), r"dp can be one of \[1, 2, 4"),
    (Config(global_batch=4, micro_batches=5), "at most 4"),
    (Config(dtype="bfloat16", gemm="blas"), "take --gemm numba"),
    (Config(layers=0), "--layers 0 is not valid"),
    (Config(steps=-1), "--steps -1 is not valid"),
    (Config(threads=0), "--threads 0 is not valid"),
    (Config(deterministic=True, dp=3, global_batch=6), "power of two"),
    (Config(deterministic=True, zero=2), "valid is zero=0"),
    (Config(overlap=True, zero=2), "with zero=2 there are none"),
    (Config(overlap=False, bucket_mb=1.0), "leave it out"),
    (Config(compress="bfloat16", dtype="float64"), "not float64"),
    (Config(compress="bfloat16", comm="shm"), "take auto or mpi"),
])
def test_numbers_that_do_not_fit_name_what_would(config, words):
    with pytest.raises(ValueError, match=words):
        config.resolved(config.dp or 1).check()


def test_overlap_is_on_off_or_not_said(tmp_path):
    path = tmp_path / "run.toml"
    for text, said in (("", None), ("overlap = true", True), ("overlap = false", False)):
        path.write_text(text)
        assert parse(["--config", str(path)]).overlap is said
        assert parse(["--config", str(path), "--no-overlap"]).overlap is False
        assert parse(["--overlap", "--config", str(path)]).overlap is True
    assert parse([]).overlap is None and parse(["--overlap"]).overlap is True and parse(["--no-overlap"]).overlap is False
    path.write_text("overlap = 1")
    with pytest.raises(ValueError, match="must be true or false"):
        parse(["--config", str(path)])
    assert parse(["--bucket-mb", "2.5", "--compress", "bfloat16"]).bucket_mb == 2.5


def test_layers_per_stage_must_be_numbers():
    with pytest.raises(ValueError, match="not a list of numbers"):
        Config(layers_per_stage="3,x").stage_layers()

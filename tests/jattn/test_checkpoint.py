"""Checkpoint folders, good and bad: what is read, and the sentence for what cannot be."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save, save_file

from jattn.checkpoint import Checkpoint

CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 4}
TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.arange(8).astype(ml_dtypes.bfloat16),
    "c": np.float16(2.5) * np.ones((1, 1, 2), np.float16),
    "d": np.arange(6).reshape(2, 3).astype(ml_dtypes.float8_e4m3fn),
    "none": np.zeros((0, 3), np.int64),
    "scalar": np.array(7, np.int32),
}


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "config.json", CONFIG)
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def sharded(tmp_path):
    write(tmp_path / "config.json", CONFIG)
    save_file({"a": TENSORS["a"]}, tmp_path / "one.safetensors")
    save_file({"b": TENSORS["b"]}, tmp_path / "two.safetensors")
    weight_map = {"a": "one.safetensors", "b": "two.safetensors"}
    write(tmp_path / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    return tmp_path


def raw(header, data=b""):
    """A safetensors file with any header."""
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(header).to_bytes(8, "little") + header + data


def entry(**changes):
    return {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}


def test_checkpoint_reads_every_tensor_in_its_dtype(folder):
    checkpoint = Checkpoint(folder)
    assert set(checkpoint.tensor_names) == set(TENSORS)
    for name, expected in TENSORS.items():
        tensor = checkpoint.read(name, expected.shape)
        assert tensor.dtype == expected.dtype
        np.testing.assert_array_equal(tensor, expected)


def test_checkpoint_reads_shards(sharded):
    checkpoint = Checkpoint(str(sharded))
    assert checkpoint.tensor_names == ("a", "b")
    for name in checkpoint.tensor_names:
        np.testing.assert_array_equal(checkpoint.read(name), TENSORS[name])


def test_checkpoint_tells_its_configuration(folder):
    checkpoint = Checkpoint(folder)
    assert checkpoint.config == CONFIG
    assert checkpoint.architecture == "LlamaForCausalLM"
    assert checkpoint.generation_config == {}
    write(folder / "generation_config.json", {"eos_token_id": 3})
    assert Checkpoint(folder).generation_config == {"eos_token_id": 3}


def test_checkpoint_reads_a_header_of_odd_length(folder):
    write(folder / "model.safetensors", raw(json.dumps(entry()).encode() + b" ", np.float32([1, 2]).tobytes()))
    np.testing.assert_array_equal(Checkpoint(folder).read("x"), [1, 2])


def test_missing_folder_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"`path` must be a checkpoint folder. Got '.*nowhere'"):
        Checkpoint(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("config.json", FileNotFoundError, r"`config\.json`"),
        (
            "model.safetensors",
            FileNotFoundError,
            r"must hold `model\.safetensors` or `model\.safetensors\.index\.json`",
        ),
    ],
)
def test_missing_file_is_named(folder, name, error, message):
    (folder / name).unlink()
    with pytest.raises(error, match=message):
        Checkpoint(folder)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(("content", "message"), [(b"{", "must be JSON"), (b"\xff", "must be JSON"), (b"[]", "object")])
def test_corrupt_json_is_named(folder, name, content, message):
    write(folder / name, content)
    with pytest.raises(ValueError, match=rf"{name} must be .*{message}|{name} {message}"):
        Checkpoint(folder)


@pytest.mark.parametrize("config", [{}, {"architectures": []}, {"architectures": None}, {"architectures": "Llama"}])
def test_missing_architecture_is_refused(folder, config):
    write(folder / "config.json", config)
    with pytest.raises(ValueError, match=r"config\.json must name the model's class in `architectures`. Got"):
        Checkpoint(folder)


@pytest.mark.parametrize(
    "pickle", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json", "model.pth"]
)
def test_pickle_is_refused(folder, pickle):
    (folder / "model.safetensors").rename(folder / pickle)
    with pytest.raises(ValueError, match=r"only as pickle, .* convert them to safetensors"):
        Checkpoint(folder)


@pytest.mark.parametrize("kept", [0, 4, 8, 20])
def test_file_cut_off_in_its_header_is_named(folder, kept):
    write(folder / "model.safetensors", save(TENSORS)[:kept])
    with pytest.raises(ValueError, match=r"model\.safetensors is truncated"):
        Checkpoint(folder)


def test_pointer_of_git_lfs_is_told_how_to_become_the_weights(folder):
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 12345\n"
    write(folder / "model.safetensors", pointer)
    with pytest.raises(ValueError, match=r"model\.safetensors is a pointer of Git LFS, .* `git lfs pull`"):
        Checkpoint(folder)


def test_tensor_that_is_cut_off_is_named(folder):
    tensors = {"first": np.zeros(4, np.float32), "second": np.zeros(4, np.float32)}
    write(folder / "model.safetensors", save(tensors)[:-1])
    with pytest.raises(
        ValueError, match=r"model\.safetensors is truncated: tensor 'second' ends at byte \d+, the file"
    ):
        Checkpoint(folder)


@pytest.mark.parametrize(
    "content",
    [
        raw(b"{nonsense"),
        raw([]),
        raw({"x": 1}),
        raw(entry(data_offsets=[0])),
        raw(entry(data_offsets=[-8, 0])),
        raw(entry(data_offsets=[8, 0]), bytes(8)),
        raw(entry(shape=[2.0])),
        raw(entry(shape=[-2])),
        raw(entry(shape=[3]), bytes(8)),
        raw(entry(dtype=["F32"])),
        raw(entry(dtype="F3", shape=[2]), bytes(8)),
        raw(entry(), bytes(9)),
    ],
)
def test_corrupt_file_is_named(folder, content):
    write(folder / "model.safetensors", content)
    with pytest.raises(ValueError, match=r"model\.safetensors is (corrupt|truncated)"):
        Checkpoint(folder)


def test_dtype_that_numpy_lacks_is_named(folder):
    write(folder / "model.safetensors", raw(entry(dtype="F4", shape=[16]), bytes(8)))
    with pytest.raises(NotImplementedError, match=r"stores tensor 'x' as F4"):
        Checkpoint(folder).read("x")


def test_missing_tensor_is_named(folder):
    with pytest.raises(ValueError, match=r"model\.safetensors must hold the tensor 'nope', which is missing"):
        Checkpoint(folder).read("nope")


def test_wrong_shape_is_named(folder):
    with pytest.raises(ValueError, match=r"'a' of .*model\.safetensors must have shape \[3, 2\]. Got \[2, 3\]"):
        Checkpoint(folder).read("a", (3, 2))


def test_missing_shard_is_named(sharded):
    (sharded / "two.safetensors").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"two\.safetensors is missing; model\.safetensors\.index\.json names it"
    ):
        Checkpoint(sharded)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({}, "must map each tensor to its file"),
        ({"weight_map": {"a": 1}}, "must map each tensor to its file"),
        ({"weight_map": {}}, "must map each tensor to its file"),
        ({"weight_map": {"a": "../one.safetensors"}}, "must name shards that lie in the folder itself"),
        ({"weight_map": {"b": "one.safetensors"}}, r"one\.safetensors must hold the tensor 'b'"),
    ],
)
def test_wrong_index_is_refused(sharded, index, message):
    write(sharded / "model.safetensors.index.json", index)
    with pytest.raises(ValueError, match=message):
        Checkpoint(sharded)


def test_cut_down_checkpoint_has_the_first_layers_alone(folder):
    names = ["embed", "norm", *(f"model.layers.{i}.weight" for i in range(12))]
    save_file({name: np.zeros(1, np.float32) for name in names}, folder / "model.safetensors")
    layer_types = [str(i) for i in range(12)]
    write(folder / "config.json", CONFIG | {"num_hidden_layers": 12, "layer_types": layer_types, "other": [1, 2]})
    checkpoint = Checkpoint(folder)
    cut = checkpoint.cut_down(2)
    assert set(cut.tensor_names) == {"embed", "norm", "model.layers.0.weight", "model.layers.1.weight"}
    assert cut.config == CONFIG | {"num_hidden_layers": 2, "layer_types": ["0", "1"], "other": [1, 2]}
    assert len(checkpoint.tensor_names) == 14
    assert checkpoint.config["num_hidden_layers"] == 12
    assert cut.read("model.layers.1.weight").shape == (1,)


@pytest.mark.parametrize(
    ("layers", "num_layers"), [({"num_hidden_layers": 2}, 3), ({"num_hidden_layers": 2}, 0), ({}, 1)]
)
def test_checkpoint_is_cut_to_layers_that_it_has(folder, layers, num_layers):
    write(folder / "config.json", CONFIG | layers)
    total = layers.get("num_hidden_layers")
    with pytest.raises(ValueError, match=rf"at most the checkpoint's `num_hidden_layers`={total}. Got {num_layers}"):
        Checkpoint(folder).cut_down(num_layers)


@pytest.mark.parametrize(("path", "is_name"), [("someone/a-model.1", True), ("/nowhere/at/all", False), ("one", False)])
def test_path_that_is_no_folder_but_may_be_a_name_tells_how_to_download_it(path, is_name):
    with pytest.raises(FileNotFoundError, match=r"`path` must be a checkpoint folder\. Got '.*'") as refused:
        Checkpoint(path)
    assert (f"`hf download {path} --local-dir" in str(refused.value)) == is_name

from __future__ import annotations

import json
import struct

import numpy
import pytest
from compiled_graphs.__main__ import main
from compiled_graphs.baking import stand_in
from safetensors.numpy import load_file, save_file


@pytest.fixture
def models(tmp_path):
    """A folder of models with one file, of 400 kB."""
    (tmp_path / "models" / "unet").mkdir(parents=True)
    save_file({"a": numpy.ones((1000, 100), numpy.float32)}, tmp_path / "models" / "unet" / "net.safetensors")
    return tmp_path / "models"


def test_a_header_stands_in_for_a_file(models, tmp_path, capsys):
    assert main(["headers", str(models), str(tmp_path / "headers")]) == 0
    assert "1 headers in" in capsys.readouterr().out
    header = tmp_path / "headers" / "unet" / "net.safetensors"
    assert header.stat().st_size < 200
    stand_in.write_stand_in(tmp_path / "net.safetensors", stand_in.read_header(header))
    tensors = load_file(tmp_path / "net.safetensors")
    assert {name: (t.shape, t.dtype) for name, t in tensors.items()} == {"a": ((1000, 100), numpy.float32)}
    assert not tensors["a"].any()


def test_no_header_is_written_over_weights(models, tmp_path, capsys):
    weights = (models / "unet" / "net.safetensors").read_bytes()
    (tmp_path / "link").symlink_to(models)
    (tmp_path / "others" / "unet").mkdir(parents=True)
    (tmp_path / "others" / "unet" / "net.safetensors").write_bytes(weights)
    for target, said in ((models, "is a part of"), (models / "headers", "is a part of"),
                         (tmp_path / "link", "is a part of"), (tmp_path / "others", "has weights")):  # fmt: skip
        assert main(["headers", str(models), str(target)]) == 2
        assert said in capsys.readouterr().out
        assert (models / "unet" / "net.safetensors").read_bytes() == weights
    assert (tmp_path / "others" / "unet" / "net.safetensors").read_bytes() == weights
    for _ in range(2):  # what it wrote itself it may write again
        assert main(["headers", str(models), str(tmp_path / "headers")]) == 0


def packed(text):
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    "data",
    [b"", b"1234567", b"\xff" * 20, packed(b"[]"), packed(b"{}x"), packed(b'{"a": 5}'),
     packed(json.dumps({"a": {"data_offsets": [0, 2**60]}}).encode())],
)  # fmt: skip
def test_a_file_without_a_header_is_named(tmp_path, data):
    path = tmp_path / "net.safetensors"
    path.write_bytes(data)
    with pytest.raises(stand_in.NotAHeader, match=r"net\.safetensors"):
        stand_in.write_stand_in(tmp_path / "other.safetensors", stand_in.read_header(path))


def test_a_broken_file_is_left_out_and_named_with_its_folder(models, tmp_path, capsys):
    (models / "vae").mkdir()
    (models / "vae" / "cut.safetensors").write_bytes(b"1234567")
    assert main(["headers", str(models), str(tmp_path / "headers")]) == 1
    said = capsys.readouterr().out
    assert "left out: cut.safetensors is not a safetensors file (vae/cut.safetensors)" in said
    assert "1 headers in" in said


def test_an_empty_folder_is_said(tmp_path, capsys):
    (tmp_path / "models").mkdir()
    assert main(["headers", str(tmp_path / "models"), str(tmp_path / "headers")]) == 1
    assert "0 headers in" in capsys.readouterr().out

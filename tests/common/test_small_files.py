"""Files that people name on the command line are read in bounded memory and time."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from common.environment.merge import parse_layers
from common.errors import UserError
from common.json_files import parse_json, read_json_lines, read_json_list, read_json_object
from common.small_files import parse_yaml, read_small_file
from data.blend import read_yaml
from data.manifest import load_manifest
from launcher import run_file
from launcher.load_cluster import load_cluster

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 20)
)
READERS: dict[str, Callable[[Path], object]] = {
    "run file": run_file.load,
    "cluster file": load_cluster,
    "blend": read_yaml,
    "environment file": lambda path: parse_layers(str(path)),
}


@pytest.mark.parametrize("reader", READERS)
def test_devices_pipes_and_large_files_are_refused(tmp_path: Path, reader: str) -> None:
    os.mkfifo(tmp_path / "pipe.env")
    (tmp_path / "large.env").write_bytes(b"# " + b"x" * (5 << 20))
    for path in (Path("/dev/zero"), tmp_path / "pipe.env", tmp_path / "large.env", tmp_path):
        with pytest.raises(UserError) as refused:
            READERS[reader](path)
        assert "not a regular file" in refused.value.found or "larger than 4 MiB" in refused.value.found


@pytest.mark.parametrize("reader", ["run file", "cluster file", "blend"])
@pytest.mark.parametrize("text", [BOMB, "a: &a [*a]\n", "a: " + "[\n" * 2_000, "a: 2024-99-99\n"])
def test_yaml_that_stands_for_endless_values_is_refused(tmp_path: Path, reader: str, text: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(UserError, match="a.yaml"):
        READERS[reader](tmp_path / "a.yaml")


def test_aliases_of_a_usual_size_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("a: &a [1, 2]\nb: *a\nc: *a\n")
    assert parse_yaml(read_small_file(tmp_path / "a.yaml")) == {"a": [1, 2], "b": [1, 2], "c": [1, 2]}
    with pytest.raises(yaml.YAMLError, match="more than 1,000,000 values"):
        parse_yaml(BOMB)


def test_deep_json_is_no_json(tmp_path: Path) -> None:
    deep = "[" * 100_000
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json(deep)
    path = tmp_path / "manifest.json"
    path.write_text(deep)
    assert (read_json_object(path), read_json_lines(path), read_json_list(path)) == (None, [], [])
    with pytest.raises(UserError, match="manifest.json"):
        load_manifest(tmp_path)

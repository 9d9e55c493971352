"""Data sets of the harness's own tasks in local folders: says which configurations a folder has, where nothing does.

The branch refs/convert/parquet of a data set holds CONFIG/SPLIT/0000.parquet and no README.md. The library `datasets`
then sees one configuration "default", and a task that asks for another one (each subject of C-Eval and CMMLU) fails.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import yaml

from common.files import write_atomic
from report.front_matter import read_front_matter

log = logging.getLogger("launch")


def describe_folders(benchmarks: Path) -> None:
    """Write the `configs` of every OWNER/NAME in `benchmarks` into its README.md, unless it has them.

    Raises:
        UserError: the front matter of a README.md cannot be read.
    """
    for folder in sorted(path for path in benchmarks.glob("*/*") if path.is_dir()):
        readme = folder / "README.md"
        front, text = read_front_matter(readme.read_text() if readme.is_file() else "", readme)
        configs = {} if "configs" in front else find_configs(folder)
        if configs:
            front["configs"] = [
                {"config_name": name, "data_files": [{"split": split, "path": path} for split, path in splits.items()]}
                for name, splits in configs.items()
            ]
            write_atomic(readme, f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---\n{text}")
            log.info("evaluation: %s: %d configurations by its folders", readme, len(configs))


def find_configs(folder: Path) -> dict[str, dict[str, str]]:
    """Config -> split -> pattern of its files, of CONFIG/SPLIT/*.parquet or CONFIG/SPLIT-*.parquet.

    A folder whose first level is `data`, or splits, has one configuration, which `datasets` finds by itself.
    """
    found: dict[str, dict[str, Any]] = {}
    for file in sorted(folder.glob("*/*.parquet")) + sorted(folder.glob("*/*/*.parquet")):
        config, *inner, name = file.relative_to(folder).parts
        split = inner[0].removeprefix("partial-") if inner else name.split("-")[0]
        pattern = f"{config}/{inner[0]}/*.parquet" if inner else f"{config}/{split}-*.parquet"
        found.setdefault(config, {}).setdefault(split, pattern)
    one = set(found) <= {"data", "default", "train", "validation", "test"}
    return {} if one else found

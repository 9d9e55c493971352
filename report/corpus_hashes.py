"""Check whether the corpora on the disk are still the ones that a run was trained on."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.files import file_sha256
from common.json_files import parse_json
from data.manifest import FILE_NAME, SPLITS
from report.read import at


@dataclass
class CorpusCheck:
    """The result of `check_corpora`.

    Args:
        differences: one phrase for each file that differs from its manifest.
        missing: files that no longer exist.
        files: number of files that were read in full and are unchanged.
    """

    differences: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    files: int = 0


def check_corpora(manifests: dict[str, Any], project: Path, quick: bool) -> CorpusCheck:
    """Compare the corpora with the manifests that a run recorded.

    Args:
        manifests: data.json: folder -> manifest at the time of training.
        project: what a relative folder is relative to, if the absolute path that the run recorded is not there.
        quick: compare manifests only; do not read the .bin and .idx.
    """
    checked = CorpusCheck()
    for name, manifest in manifests.items():
        folder = _locate(name, manifest, project)
        _compare_manifest(name, folder / FILE_NAME, manifest, checked)
        for path, expected in _hashed_files(folder, manifest):
            if not path.is_file():
                checked.missing.append(f"{name}/{path.name}")
            elif not isinstance(expected, str):
                checked.differences.append(f"{name}: no hash of {path.name} in data.json")
            elif not quick:
                _compare_hash(name, path, expected, checked)
    return checked


def _locate(name: str, manifest: Any, project: Path) -> Path:
    """The folder of a recorded corpus: its absolute path at the start of the run, or below the folder that holds runs/.

    Not the current folder, which may hold another corpus of that name.
    """
    recorded = at(manifest, "absolute_path")
    return Path(recorded) if isinstance(recorded, str) and Path(recorded).is_dir() else project / name


def _hashed_files(folder: Path, manifest: Any) -> list[tuple[Path, Any]]:
    """Each .bin and .idx of a corpus with its SHA-256 in the manifest."""
    return [
        (folder / f"{split}.{kind}", at(manifest, f"splits.{split}.{kind}_sha256"))
        for split in SPLITS
        for kind in ("bin", "idx")
    ]


def count_data_bytes(manifests: dict[str, Any], project: Path) -> int:
    """Bytes that a full check would read."""
    paths = [
        p for name, manifest in manifests.items() for p, _ in _hashed_files(_locate(name, manifest, project), manifest)
    ]
    return sum(path.stat().st_size for path in paths if path.is_file())


def _compare_manifest(name: str, path: Path, manifest: Any, checked: CorpusCheck) -> None:
    try:
        now = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        checked.missing.append(f"{name}/{path.name}")
        return
    if at(now, "splits") != at(manifest, "splits") or at(now, "tokenizer") != at(manifest, "tokenizer"):
        checked.differences.append(f"{name} was prepared again since (manifest.json differs)")


def _compare_hash(name: str, path: Path, expected: str, checked: CorpusCheck) -> None:
    found = file_sha256(path)
    if found != expected:
        checked.differences.append(f"{name}/{path.name}: {found[:12]} instead of {expected[:12]}")
    else:
        checked.files += 1

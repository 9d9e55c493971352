"""Whether the corpora on the disk are still the ones that a run was trained on."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.manifest import FILE_NAME, SPLITS
from report.read import at


@dataclass
class Checked:
    """What `hash_differences` found.

    Args:
        differences: one sentence for each file that is not what the manifest says.
        gone: files that are no longer there.
        files: how many were read in full and hold.
    """

    differences: list[str] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    files: int = 0


def hash_differences(manifests: dict[str, Any], project: Path, quick: bool) -> Checked:
    """Compare the corpora with the manifests a run recorded.

    Args:
        manifests: data.json: folder -> manifest at the time of training.
        project: what relative folders are relative to, if not the current directory.
        quick: compare manifests only; do not read the .bin and .idx.
    """
    checked = Checked()
    for name, manifest in manifests.items():
        folder = locate(name, project)
        _compare_manifest(name, folder / FILE_NAME, manifest, checked)
        for path, wanted in described(folder, manifest):
            if not path.is_file():
                checked.gone.append(f"{name}/{path.name}")
            elif not isinstance(wanted, str):
                checked.differences.append(f"{name}: no hash of {path.name} in data.json")
            elif not quick:
                _compare(name, path, wanted, checked)
    return checked


def locate(folder: str, project: Path) -> Path:
    """Where a recorded corpus folder is now: as written, or beside the folder that holds runs/."""
    path = Path(folder)
    return path if path.is_dir() or path.is_absolute() else project / path


def described(folder: Path, manifest: Any) -> list[tuple[Path, Any]]:
    """Each .bin and .idx of a corpus with the SHA-256 its manifest has for it."""
    return [
        (folder / f"{split}.{kind}", at(manifest, f"splits.{split}.{kind}_sha256"))
        for split in SPLITS
        for kind in ("bin", "idx")
    ]


def data_bytes(manifests: dict[str, Any], project: Path) -> int:
    """Bytes that a full check would read."""
    paths = [p for name, manifest in manifests.items() for p, _ in described(locate(name, project), manifest)]
    return sum(path.stat().st_size for path in paths if path.is_file())


def _compare_manifest(name: str, path: Path, manifest: Any, checked: Checked) -> None:
    try:
        now = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        checked.gone.append(f"{name}/{path.name}")
        return
    if at(now, "splits") != at(manifest, "splits") or at(now, "tokenizer") != at(manifest, "tokenizer"):
        checked.differences.append(f"{name} was prepared again since (its manifest.json differs)")


def _compare(name: str, path: Path, wanted: str, checked: Checked) -> None:
    with path.open("rb") as stream:
        digest = hashlib.sha256()
        while block := stream.read(1 << 20):
            digest.update(block)
    found = digest.hexdigest()
    if found != wanted:
        checked.differences.append(f"{name}/{path.name}: {found[:12]}, not {wanted[:12]}")
    else:
        checked.files += 1

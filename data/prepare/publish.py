"""The output folder of `data prepare`: what is there already, the space for it, and the last step.

OUTPUT/.partial holds request.json (what is being made), shards/ (pieces) and out/ (the finished files).
Publishing moves out/* into OUTPUT, manifest.json last.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from common.errors import UserError
from data.console import tell
from data.manifest import FILE_NAME, SPLITS, Manifest, TokenizerFacts, load_manifest
from data.prepare.input_files import Source

PARTIAL = ".partial"
INFLATION = {"gzip": 3.0, "zstd": 3.5, None: 1.0}
BYTES_A_TOKEN = 6  # generous, so that only a hopeless disk is refused up front
LIBRARIES = ("tokenizers", "transformers", "gigatoken", "numpy", "pyarrow")


@contextmanager
def locked(output: Path) -> Iterator[None]:
    """Hold the output folder; a second `data prepare` into it is refused.

    Raises:
        UserError: another process holds it.
    """
    handle = os.open(output, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise UserError(
            f"{output} is in use",
            expected="one preparation at a time",
            found="another one is writing there",
            do="wait for it, or choose another --output",
        ) from None
    try:
        yield
    finally:
        with suppress(OSError):  # only an empty folder goes: a failed run leaves none behind
            output.rmdir()
        os.close(handle)


def existing(
    output: Path, settings: dict[str, Any], sources: list[Source], facts: TokenizerFacts, overwrite: bool
) -> Manifest | None:
    """The corpus that is already in `output` if it is the one asked for; None if one is to be made.

    Raises:
        UserError: another corpus, or files of an unknown origin, are there.
    """
    if overwrite:
        return None
    if not (output / FILE_NAME).exists():
        stray = [name for name in SPLITS if (output / f"{name}.bin").exists()]
        if stray and not (output / PARTIAL).is_dir():
            raise UserError(
                f"{output} holds {stray[0]}.bin but no manifest",
                expected="an empty folder, or a corpus made by data prepare",
                found="token files of unknown origin",
                do="choose another --output, or replace them with --overwrite",
            )
        return None
    manifest = load_manifest(output)
    made_at = (output / FILE_NAME).stat().st_mtime_ns
    same_files = [(s.path, s.bytes) for s in sources] == [(s.path, s.bytes) for s in manifest.sources]
    changed = not same_files or any(source.mtime_ns > made_at for source in sources)
    differs = differences(settings, facts, manifest.settings, manifest.tokenizer)
    if changed:
        differs.append(f"inputs: {len(manifest.sources)} files then, now other or newer ones ({len(sources)})")
    if differs:
        raise _made_differently(output, "a corpus", differs)
    shutil.rmtree(output / PARTIAL, ignore_errors=True)
    tell(f"{output} is already prepared with these inputs and options")
    return manifest


def open_partial(
    output: Path,
    settings: dict[str, Any],
    sources: list[Source],
    facts: TokenizerFacts,
    resume: bool,
    overwrite: bool,
) -> Path:
    """The work folder, new or continued.

    Raises:
        UserError: an interrupted run with another tokenizer or other options left finished shards there.
    """
    partial = output / PARTIAL
    wanted = {
        "settings": settings,
        "tokenizer": dataclasses.asdict(facts),
        "sources": [dataclasses.asdict(source) for source in sources],
    }
    before = _read_request(partial)
    if before is not None and resume and before != wanted:
        differs = differences(settings, facts, before["settings"], TokenizerFacts(**before["tokenizer"]))
        if differs and not overwrite and any((partial / "shards").glob("*.json")):
            raise _made_differently(output, "an interrupted run", differs)
        tell("the inputs or options changed since the interrupted run: starting again")
    if before != wanted or not resume:
        shutil.rmtree(partial, ignore_errors=True)
    for name in ("shards", "out"):
        (partial / name).mkdir(parents=True, exist_ok=True)
    for left_over in (partial / "shards").glob("*.tmp"):
        left_over.unlink()
    part = partial / "request.json.tmp"
    part.write_text(json.dumps(wanted), encoding="utf-8")
    part.replace(partial / "request.json")
    return partial


def differences(
    settings: dict[str, Any], facts: TokenizerFacts, old: dict[str, Any], old_facts: TokenizerFacts
) -> list[str]:
    """What sets two requests apart, in words; empty when they agree."""
    found = [
        f"{name}: {old.get(name)!r} then, {value!r} now" for name, value in settings.items() if old.get(name) != value
    ]
    if facts.fingerprint != old_facts.fingerprint or facts.eod_id != old_facts.eod_id:
        then, now = (f"{f.source} ({f.fingerprint[:12]}, {f.vocab_size} ids)" for f in (old_facts, facts))
        found.insert(0, f"tokenizer: {then} then, {now} now")
    return found


def is_built(partial: Path) -> bool:
    """Whether only the publishing is left to do."""
    return (partial / "out" / FILE_NAME).exists()


def drop_if_useless(partial: Path) -> None:
    """Remove a work folder without a finished shard, so that a corrected command starts clean."""
    if not any((partial / "shards").glob("*.json")):
        shutil.rmtree(partial)


def publish(partial: Path, output: Path) -> Manifest:
    """Move the finished files into place, the manifest last, and remove the work folder."""
    # first, so that a kill between the last move and the end leaves no shards that look unmerged
    shutil.rmtree(partial / "shards", ignore_errors=True)
    (output / FILE_NAME).unlink(missing_ok=True)
    names = sorted(path.name for path in (partial / "out").iterdir() if path.name != FILE_NAME)
    for name in [*names, FILE_NAME]:
        if (output / name).is_dir():
            shutil.rmtree(output / name)
        (partial / "out" / name).replace(output / name)
    handle = os.open(output, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)
    shutil.rmtree(partial)
    return load_manifest(output)


def bytes_needed(sources: list[Source]) -> int:
    """A low estimate of the corpus on the disk, from the size of the inputs."""
    text = sum(
        source.bytes * (2.5 if source.format == "parquet" else INFLATION[source.compression]) for source in sources
    )
    return int(text / BYTES_A_TOKEN * 2)


def check_space(output: Path, sources: list[Source], share: float) -> None:
    """Refuse to start what cannot end: `share` is the part of the work that is left.

    Raises:
        UserError: less is free than a low estimate of what is needed.
    """
    if shutil.disk_usage(output).free < bytes_needed(sources) * share:
        raise _disk_full(output, sources, "not enough space for the corpus")


def explain(error: OSError, output: Path, sources: list[Source]) -> UserError:
    """The UserError for a failed read or write."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        for left_over in (output / PARTIAL / "shards").glob("*.tmp"):
            left_over.unlink(missing_ok=True)
        return _disk_full(output, sources, "the disk is full")
    return UserError(
        f"{error.filename or output} cannot be read or written",
        expected="readable inputs and a writable output folder",
        found=error.strerror or str(error),
        do="check the permissions, or choose another --output",
    )


def versions() -> dict[str, str]:
    """Versions of Python and the libraries that had a hand in it."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _read_request(partial: Path) -> dict[str, Any] | None:
    try:
        loaded = json.loads((partial / "request.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return loaded if isinstance(loaded, dict) else None


def _disk_full(output: Path, sources: list[Source], what: str) -> UserError:
    free = shutil.disk_usage(output).free
    return UserError(
        f"{output}: {what}",
        expected=f"about {bytes_needed(sources):,} bytes for the corpus, half as much again is safe",
        found=f"{free:,} bytes free",
        do="free space and run the same command again: it continues; or choose an --output on another disk",
    )


def _made_differently(output: Path, what: str, differs: list[str]) -> UserError:
    return UserError(
        f"{output} holds {what} made differently",
        expected="the same tokenizer, inputs and options",
        found="; ".join(differs),
        do="choose another --output, give the options of then, or start again with --overwrite",
    )

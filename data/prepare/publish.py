"""The output folder of `data prepare`: what it holds already, the space on its disk, and the last step.

OUTPUT/.partial holds request.json (what is being made), shards/ (shard files) and out/ (the finished files).
Publishing moves out/* into OUTPUT, manifest.json last.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import functools
import json
import logging
import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.json_files import parse_json
from data.manifest import FILE_NAME, PARTIAL_NAME, SPLITS, Manifest, TokenizerFacts, load_manifest
from data.prepare.input_files import Source
from data.prepare.record_errors import lost_hub_error

INFLATION = {"gzip": 3.0, "zstd": 3.5, None: 1.0}
TEXT_BYTES_PER_TOKEN = 6  # high, so that only a disk that is certainly too small is refused before the start
LIBRARIES = ("tokenizers", "transformers", "gigatoken", "numpy", "pyarrow")
log = logging.getLogger("launch")


@contextmanager
def lock_output(output: Path) -> Iterator[None]:
    """Lock the output folder; a second `data prepare` into it is refused.

    Raises:
        UserError: another process has locked it.
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
        with suppress(OSError):  # removes an empty folder only: a failed preparation leaves none behind
            output.rmdir()
        os.close(handle)


def find_existing(
    output: Path, settings: dict[str, Any], sources: list[Source], facts: TokenizerFacts, overwrite: bool
) -> Manifest | None:
    """The manifest of the corpus in `output` if it is the one asked for; None if it has to be made.

    Raises:
        UserError: another corpus, or files of an unknown origin, are there.
    """
    if overwrite:
        return None
    if not (output / FILE_NAME).exists():
        unknown = [name for name in SPLITS if (output / f"{name}.bin").exists()]
        if unknown and not (output / PARTIAL_NAME).is_dir():
            raise UserError(
                f"{output} holds {unknown[0]}.bin but no manifest",
                expected="an empty folder, or a corpus made by data prepare",
                found="token files of unknown origin",
                do="choose another --output, or replace them with --overwrite",
            )
        return None
    manifest = load_manifest(output)
    made_at = (output / FILE_NAME).stat().st_mtime_ns
    same_files = [(s.path, s.bytes) for s in sources] == [(s.path, s.bytes) for s in manifest.sources]
    changed = not same_files or any(source.mtime_ns > made_at for source in sources)
    differs = describe_differences(settings, facts, manifest.settings, manifest.tokenizer)
    if changed:
        differs.append(f"inputs: {len(manifest.sources)} files then, other or newer ones now ({len(sources)})")
    if differs:
        raise _made_differently_error(output, "a corpus", differs)
    shutil.rmtree(output / PARTIAL_NAME, ignore_errors=True)
    log.info("%s is already prepared with these inputs and options", output)
    return manifest


def open_partial(
    output: Path,
    settings: dict[str, Any],
    sources: list[Source],
    facts: TokenizerFacts,
    overwrite: bool,
) -> Path:
    """Create the work folder, or continue in the one of an interrupted run.

    Raises:
        UserError: an interrupted run with another tokenizer or other options left finished shards there.
    """
    partial = output / PARTIAL_NAME
    wanted = {
        "settings": settings,
        "tokenizer": dataclasses.asdict(facts),
        "sources": [dataclasses.asdict(source) for source in sources],
    }
    before = _read_request(partial)
    if before is not None and before != wanted:
        differs = describe_differences(settings, facts, before["settings"], TokenizerFacts(**before["tokenizer"]))
        if differs and not overwrite and any((partial / "shards").glob("*.json")):
            raise _made_differently_error(output, "an interrupted run", differs)
        log.info("the inputs or options have changed since the interrupted run: starting again")
    if before != wanted:
        shutil.rmtree(partial, ignore_errors=True)
    for name in ("shards", "out"):
        (partial / name).mkdir(parents=True, exist_ok=True)
    for left_over in (partial / "shards").glob("*.tmp"):
        left_over.unlink()
    part = partial / "request.json.tmp"
    part.write_text(json.dumps(wanted), encoding="utf-8")
    part.replace(partial / "request.json")
    return partial


def describe_differences(
    settings: dict[str, Any], facts: TokenizerFacts, old: dict[str, Any], old_facts: TokenizerFacts
) -> list[str]:
    """One text per difference between two requests; empty when they agree."""
    found = [
        f"{name}: {old.get(name)!r} then, {value!r} now" for name, value in settings.items() if old.get(name) != value
    ]
    if facts.fingerprint != old_facts.fingerprint or facts.eod_id != old_facts.eod_id:
        then, now = (f"{f.source} ({f.fingerprint[:12]}, {f.vocab_size} ids)" for f in (old_facts, facts))
        found.insert(0, f"tokenizer: {then} then, {now} now")
    return found


def is_built(partial: Path) -> bool:
    """Whether the finished files are there and only have to be published."""
    return (partial / "out" / FILE_NAME).exists()


def remove_without_shards(partial: Path) -> None:
    """Remove a work folder without a finished shard, so that a corrected command starts in an empty folder."""
    if not any((partial / "shards").glob("*.json")):
        shutil.rmtree(partial)


def publish(partial: Path, output: Path) -> Manifest:
    """Move the finished files into the output folder, the manifest last, and remove the work folder."""
    # first of all: if the process is killed after the last move, no shards are left that look unmerged
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
    """A low estimate of the size of the corpus on the disk, from the size of the inputs."""
    text = sum(
        source.bytes * (2.5 if source.format == "parquet" else INFLATION[source.compression]) for source in sources
    )
    return int(text / TEXT_BYTES_PER_TOKEN * 2)


def check_space(output: Path, sources: list[Source], share: float) -> None:
    """Check that the disk can hold the corpus.

    Args:
        share: the part of the work that is left, in 0..1.

    Raises:
        UserError: less space is free than a low estimate of what is needed.
    """
    if shutil.disk_usage(output).free < bytes_needed(sources) * share:
        raise _disk_full_error(output, sources, "not enough space for the corpus")


def explain_os_error(error: OSError, output: Path, sources: list[Source]) -> UserError:
    """Turn a failed read or write into a UserError."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        for left_over in (output / PARTIAL_NAME / "shards").glob("*.tmp"):
            left_over.unlink(missing_ok=True)
        return _disk_full_error(output, sources, "the disk is full")
    if error.errno is None and (on_hub := [source for source in sources if source.on_hub]):
        return lost_hub_error(on_hub[0], error)
    return UserError(
        f"{error.filename or output} cannot be read or written",
        expected="readable inputs and a writable output folder",
        found=error.strerror or str(error),
        do="check the permissions, or choose another --output",
    )


@functools.cache
def library_versions() -> dict[str, str]:
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
        loaded = parse_json((partial / "request.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return loaded if isinstance(loaded, dict) else None


def _disk_full_error(output: Path, sources: list[Source], what: str) -> UserError:
    free = shutil.disk_usage(output).free
    return UserError(
        f"{output}: {what}",
        expected=f"about {bytes_needed(sources):,} bytes for the corpus; 1.5 times as much is safe",
        found=f"{free:,} bytes free",
        do="free some space and run the same command again: it continues; or choose an --output on another disk",
    )


def _made_differently_error(output: Path, what: str, differs: list[str]) -> UserError:
    return UserError(
        f"{output} holds {what} made differently",
        expected="the same tokenizer, inputs and options",
        found="; ".join(differs),
        do="choose another --output, give the options used then, or start again with --overwrite",
    )

"""The files of a data set of the Hugging Face hub, `hf://OWNER/NAME[@REVISION][:CONFIG][/SPLIT]`, as sources.

They are read where they are, in ranges, with retries, and not downloaded first. A revision is resolved to a commit,
which is part of each source's path and so of the manifest: a preparation that is continued, or asked for again, reads
the same files although a branch has moved.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import unquote

from common.errors import UserError
from common.json_files import read_json_object
from data.manifest import FILE_NAME, PARTIAL_NAME
from data.prepare.input_files import HUB

if TYPE_CHECKING:
    from huggingface_hub.hf_api import DatasetInfo

TIMEOUT_S = 10.0  # for an answer about a data set
_SPEC = re.compile(
    r"hf://(?P<id>[\w.-]+/[\w.-]+)(?:@(?P<revision>[^:/]+))?(?::(?P<config>[^/]+))?(?:/(?P<split>[\w.-]+))?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
# in the path of a file, as the library `datasets` recognises splits of a data set that declares none
_SPLITS = {"train": "train|training", "validation": "validation|valid|val|dev", "test": "test|testing|eval|evaluation"}


def recorded_commits(output: Path) -> dict[str, str]:
    """The commit of each data set that the corpus in `output`, or the interrupted preparation there, was made of."""
    found = {}
    for file in (output / FILE_NAME, output / PARTIAL_NAME / "request.json"):
        for source in (read_json_object(file) or {}).get("sources", []):
            if match := re.match(rf"{HUB}([^@]+)@([0-9a-f]{{40}})/", str(source.get("path", ""))):
                found[match[1]] = match[2]
    return found


def find_hub_files(text: str, recorded: Mapping[str, str]) -> list[tuple[str, int, str]]:
    """The files of one split: path with commit, bytes, and SHA-256 where the hub has recorded it, else "".

    Args:
        recorded: commits by data set, which hold where `text` names a branch, a tag or nothing.

    Raises:
        UserError: no such data set, revision, config or split, no access, or a hub that cannot be reached.
    """
    match = _SPEC.fullmatch(text)
    if match is None:
        raise UserError(
            f"{text!r} names no data set",
            expected="hf://OWNER/NAME@REVISION, with :CONFIG and /SPLIT where it has several",
            found=repr(text),
            do="hf://HuggingFaceFW/fineweb-edu@main:sample-10BT/train",
        )
    name, revision = match["id"], unquote(match["revision"] or "main")
    if not _COMMIT.fullmatch(revision):
        revision = recorded.get(name, revision)
    info = _ask(name, revision)
    siblings = {one.rfilename: one for one in info.siblings or []}
    chosen = choose_files(list(siblings), dict(info.card_data or {}), match["config"], match["split"], text)
    found = []
    for path in chosen:
        lfs: Any = siblings[path].lfs
        found.append((f"{HUB}{name}@{info.sha}/{path}", int(siblings[path].size or 0), lfs.sha256 if lfs else ""))
    return found


def choose_files(files: list[str], card: dict[str, Any], config: str | None, split: str | None, text: str) -> list[str]:
    """The files of a config's split: by the `configs` of the data set's card, or else by folders and names.

    Raises:
        UserError: an unknown config or split; the ones that exist are named.
    """
    files = [file for file in files if not file.startswith(".") and Path(file).name.lower() != "readme.md"]
    configs = {str(one.get("config_name", "default")): one for one in card.get("configs") or []}
    if configs:
        default = next((key for key, one in configs.items() if one.get("default")), "default")
        name = config or (default if default in configs or len(configs) > 1 else next(iter(configs)))
        if name not in configs:
            raise _unknown("config", config or "", list(configs), text)
        splits = _declared_splits(configs[name], files)
    else:
        inside = [file for file in files if config is None or file.startswith(f"{config}/")]
        if config is not None and not inside:
            raise _unknown("config", config, sorted({file.split("/")[0] for file in files if "/" in file}), text)
        splits = _splits_by_name(inside)
    wanted = split or ("train" if "train" in splits else next(iter(splits), ""))
    if wanted not in splits or (split is None and wanted != "train" and len(splits) > 1):
        raise _unknown("split", split or "", list(splits), text)
    return sorted(splits[wanted])


def _declared_splits(config: dict[str, Any], files: list[str]) -> dict[str, list[str]]:
    from fsspec.utils import glob_translate

    declared: Any = config.get("data_files") or "**"
    rows = declared if isinstance(declared, list) else [declared]
    folder = f"{config['data_dir'].strip('/')}/" if config.get("data_dir") else ""
    splits: dict[str, list[str]] = {}
    for row in rows:
        split, patterns = (str(row["split"]), row["path"]) if isinstance(row, dict) else ("train", row)
        for pattern in patterns if isinstance(patterns, list) else [patterns]:
            like = re.compile(glob_translate(folder + str(pattern)))
            splits.setdefault(split, []).extend(file for file in files if like.match(file))
    return splits


def _splits_by_name(files: list[str]) -> dict[str, list[str]]:
    splits: dict[str, list[str]] = {}
    for split, words in _SPLITS.items():
        like = re.compile(rf"(^|[-._ 0-9/])({words})([-._ 0-9/]|$)")
        if found := [file for file in files if like.search(file)]:
            splits[split] = found
    return splits or {"train": files}


def _unknown(what: str, found: str, known: list[str], text: str) -> UserError:
    shown = ", ".join(known) or "none"
    mark = ":" if what == "config" else "/"
    base = text.rpartition(mark)[0] if found else text
    return UserError(
        f"{text}: {f'no {what} {found!r}' if found else f'several {what}s, and none is named'}",
        expected=f"one of {shown}",
        found=repr(found),
        do=f"{base}{mark}{known[0]}" if known else "look at the data set's page",
    )


def _ask(name: str, revision: str) -> DatasetInfo:
    from huggingface_hub import HfApi

    try:
        api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
        return api.dataset_info(name, revision=revision, files_metadata=True, timeout=TIMEOUT_S)
    except Exception as error:  # of huggingface_hub, requests and urllib3, without a common base
        _explain(error, name, revision)


def _explain(error: Exception, name: str, revision: str) -> NoReturn:
    from huggingface_hub import errors

    found = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:200]
    if isinstance(error, errors.RevisionNotFoundError):
        what, do = f"the data set {name} has no revision {revision!r}", f"hf://{name}@main, or a commit of its history"
    elif isinstance(error, errors.RepositoryNotFoundError | errors.GatedRepoError):
        page = f"https://huggingface.co/datasets/{name}"
        what = f"there is no data set {name}, or it is private or gated and this machine has no token that may read it"
        do = f"correct the name, or accept the terms on {page} and `huggingface-cli login` (or HF_TOKEN)"
    else:
        what = f"the hub cannot be reached for the data set {name}"
        do = "check the network, HF_ENDPOINT and HF_HUB_OFFLINE, or download the files and give their folder"
    raise UserError(what, expected="an answer of the hub", found=found, do=do) from None

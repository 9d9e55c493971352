"""Upload an exported model to the Hugging Face hub: checked and shown before anything is sent, private by default."""

from __future__ import annotations

import contextlib
import fnmatch
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import UserError
from common.json_files import read_json_object
from report.card import CARD, FILL_IN
from report.front_matter import read_front_matter

if TYPE_CHECKING:
    from rich.table import Table

log = logging.getLogger("launch")
TOKEN = "HF_TOKEN"
INDEX = "model.safetensors.index.json"
# beside the weights; anything else in the folder is named and not sent. evaluation.json stays, because it holds paths
# of this machine: its table is in the card
SENT = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", INDEX),
    *("*.gguf", "LICENSE*", CARD),
)


@dataclass(frozen=True)
class Upload:
    """What would be sent.

    Args:
        files: path in the repository -> size in bytes.
        left_out: names in the folder that are not sent.
    """

    folder: Path
    repo: str
    private: bool
    files: dict[str, int]
    left_out: list[str]

    def table(self) -> Table:
        """Files and sizes, for the terminal."""
        from rich.table import Table
        from rich.text import Text

        title = f"{self.folder} -> {self.repo} ({'private' if self.private else 'PUBLIC'})"
        table = Table("file", "MB", title=Text(title), title_justify="left")
        table.columns[1].justify = "right"
        for name, size in self.files.items():
            table.add_row(Text(name), f"{size / 1e6:,.2f}")
        table.add_section()
        table.add_row(f"{len(self.files)} files", f"{sum(self.files.values()) / 1e6:,.2f}")
        return table


def plan_upload(folder: Path, repo: str, *, private: bool = True) -> Upload:
    """Check the folder and list what would be sent. Needs no network and no token.

    Raises:
        UserError: the name is no repository's, the folder is no complete model, or its card has gaps.
    """
    _check_repo(repo)
    _check_model(folder)
    _check_card(folder)
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    patterns = (*SENT, *_weights(folder))
    sent = [name for name in names if (folder / name).is_file() and any(fnmatch.fnmatch(name, p) for p in patterns)]
    files = {name: (folder / name).stat().st_size for name in sent}
    return Upload(folder, repo, private, files, [name for name in names if name not in files])


def push(upload: Upload) -> str:
    """Create the repository if there is none, and upload the files in one commit.

    An existing repository keeps its visibility; a public one is refused for a private upload. The token is read from
    the environment variable HF_TOKEN only, is handed to huggingface_hub, and stands in no message.

    Returns:
        the address of the commit.

    Raises:
        UserError: no token, or the hub refuses.
    """
    token = os.environ.get(TOKEN, "").strip()
    if not token:
        raise UserError(
            "there is no token for the hub",
            expected=f"a token with write access in the environment variable {TOKEN}",
            found=f"{TOKEN} is {'empty' if TOKEN in os.environ else 'not set'}",
            do=f"make one at https://huggingface.co/settings/tokens, then: read -rs {TOKEN}; export {TOKEN}",
        )
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise UserError(
            "the hub is switched off",
            expected="HF_HUB_OFFLINE not set",
            found=f"HF_HUB_OFFLINE={os.environ['HF_HUB_OFFLINE']}",
            do="unset HF_HUB_OFFLINE, and push again",
        )
    from huggingface_hub import HfApi

    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=token)
    with _explained(upload, token):
        if api.repo_exists(upload.repo):
            if upload.private and not api.model_info(upload.repo).private:
                raise UserError(
                    f"{upload.repo} is public",
                    expected="a private repository, or --public",
                    found="a public one that exists already",
                    do="make it private in its settings, give another name, or add --public",
                )
        else:
            api.create_repo(upload.repo, private=upload.private)
            log.info("push: %s is created (%s)", upload.repo, "private" if upload.private else "public")
        done: Any = api.upload_folder(
            repo_id=upload.repo,
            folder_path=str(upload.folder),
            allow_patterns=list(upload.files),
            commit_message=f"Upload {upload.folder.name}",
        )
    return str(done.commit_url)


@contextlib.contextmanager
def _explained(upload: Upload, token: str) -> Iterator[None]:
    """Turn what the hub or the network raises into an error without the token."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # huggingface_hub, requests and the file transfer have a dozen types
        code = getattr(getattr(error, "response", None), "status_code", None)
        advice = {
            401: f"the token is not valid: set {TOKEN} to another one",
            403: f"the token has no write access to {upload.repo.split('/')[0]}: make one that has",
            404: "check the name, and that the token may see it",
        }
        text = " ".join(str(error).split()).replace(token, "***")[:300]
        raise UserError(
            f"{upload.repo}: the upload failed; files that had arrived are not visible before the commit",
            expected="a hub that accepts it",
            found=f"{type(error).__name__}: {text}",
            do=advice.get(code or 0, "correct what the message says, or try again: what has arrived is not sent again"),
        ) from None


def _check_repo(repo: str) -> None:
    if not re.fullmatch(r"[\w-][\w.-]{0,95}/[\w-][\w.-]{0,95}", repo) or repo.endswith((".git", ".")) or ".." in repo:
        raise UserError(
            f"{repo!r} cannot name a repository",
            expected="OWNER/NAME of letters, digits and . _ -",
            found=repr(repo),
            do="python launch.py push models/mine my-name/my-model",
        )


def _weights(folder: Path) -> list[str]:
    """The weight files that the index names; without one the only one."""
    index = read_json_object(folder / INDEX)
    return sorted(set(index.get("weight_map", {}).values())) if index else ["model.safetensors"]


def _check_model(folder: Path) -> None:
    """Config, tokenizer and every weight file that the index names.

    Raises:
        UserError: one of them is missing or empty.
    """
    wanted = ["config.json", "tokenizer.json", "tokenizer_config.json", *_weights(folder)]
    missing = [name for name in wanted if not (folder / name).is_file() or not (folder / name).stat().st_size]
    if missing:
        raise UserError(
            f"{folder} is no complete model",
            expected=", ".join(wanted),
            found="no such folder" if not folder.is_dir() else f"without {', '.join(missing)}",
            do="python launch.py convert export RUN models/mine",
        )
    eos = (read_json_object(folder / "config.json") or {}).get("eos_token_id")
    if not isinstance(eos, (int, list)) or isinstance(eos, bool):
        raise UserError(
            f"{folder} has no token that ends a text",
            expected="eos_token_id in config.json: without it generation never ends",
            found=repr(eos),
            do="copy it from the base model's config.json",
        )


def _check_card(folder: Path) -> None:
    """A model card whose front matter the user has completed.

    Raises:
        UserError: no card, or fields that are still to be filled in.
    """
    path = folder / CARD
    if not path.is_file():
        raise UserError(
            f"{folder} has no model card",
            expected=CARD,
            found="no such file",
            do=f"python launch.py card {folder} --license apache-2.0 --language en",
        )
    front, _ = read_front_matter(path.read_text(), path)
    gaps = [name for name in ("license", "language") if not front.get(name)]
    gaps = sorted({*gaps, *(name for name, value in front.items() if value in (FILL_IN, [FILL_IN]))})
    if gaps:
        options = " ".join(f"--{name.replace('_', '-')} ..." for name in gaps)
        raise UserError(
            f"the model card {path} is not complete",
            expected=" and ".join(gaps) + " in its front matter",
            found=", ".join(f"{name}: {front.get(name)}" for name in gaps),
            do=f"python launch.py card {folder} {options}, or edit the file",
        )

"""Load a tokenizer, compute its fingerprint, and find the id that ends a document.

The ids of a corpus mean nothing without their tokenizer: the fingerprint is written into the manifest and compared
with that of the model's tokenizer.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import UserError
from common.hub import is_hub_id

if TYPE_CHECKING:
    from transformers.tokenization_utils_fast import PreTrainedTokenizerFast

END_OF_DOCUMENT = "<|endoftext|>"  # of Qwen's tokenizers


def load_tokenizer(name_or_dir: str | Path) -> PreTrainedTokenizerFast:
    """Load a fast tokenizer from a local folder or by its hub id.

    Raises:
        UserError: no such folder, an id that cannot be reached, or a tokenizer without a fast version.
    """
    name = str(name_or_dir)
    if not Path(name).is_dir() and _looks_like_path(name):
        raise _loading_error(name, "no such folder")
    from transformers.models.auto.tokenization_auto import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, use_fast=True, trust_remote_code=False)  # asks no question
    except Exception as error:  # the hub raises a dozen types, from OSError to huggingface_hub's own
        raise _loading_error(name, _first_line(error)) from None
    if not tokenizer.is_fast:
        raise UserError(
            f"{name} has only a slow tokenizer ({type(tokenizer).__name__})",
            expected="a fast tokenizer (a folder with tokenizer.json)",
            found="a pure Python tokenizer, hundreds of times slower",
            do="convert it once with transformers and save_pretrained(), or name another tokenizer",
        )
    return tokenizer


def fingerprint(tokenizer: PreTrainedTokenizerFast) -> str:
    """SHA-256 (hex) of everything that decides the ids: model, merges, added tokens, normaliser, splitting.

    Path, file layout, and the padding and truncation state of the object have no influence: two loads of one
    tokenizer have the same fingerprint, and so has a saved copy.
    """
    behaviour = json.loads(backend_json(tokenizer))
    behaviour["padding"] = behaviour["truncation"] = None
    canonical = json.dumps(behaviour, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()


def backend_json(tokenizer: PreTrainedTokenizerFast) -> str:
    """The tokenizer.json text of the Rust tokenizer behind a transformers fast tokenizer."""
    return str(tokenizer.backend_tokenizer.to_str())


def eod_id(tokenizer: PreTrainedTokenizerFast) -> int:
    """The id that ends a document: `<|endoftext|>` if the vocabulary has it (Qwen), else eos_token.

    Raises:
        UserError: the tokenizer has neither, or its eos_token is not in the vocabulary.
    """
    vocabulary = tokenizer.get_vocab()
    token = END_OF_DOCUMENT if END_OF_DOCUMENT in vocabulary else tokenizer.eos_token
    if token is None or token not in vocabulary:
        raise UserError(
            f"{tokenizer.name_or_path} has no token that ends a document",
            expected=f"{END_OF_DOCUMENT} in the vocabulary, or an eos_token",
            found="neither" if token is None else f"eos_token {token!r}, which is not in the vocabulary",
            do="set eos_token in tokenizer_config.json",
        )
    return int(vocabulary[token])


def special_tokens(tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Texts of the tokens marked special, in the order of their ids: control tokens that no document should contain."""
    added = tokenizer.added_tokens_decoder
    return [added[number].content for number in sorted(added) if added[number].special]


def vocab_size(tokenizer: PreTrainedTokenizerFast) -> int:
    """One more than the highest id that the tokenizer can give, and at least `len(tokenizer)`."""
    highest: Any = max(tokenizer.get_vocab().values(), default=-1)
    return max(len(tokenizer), int(highest) + 1)


def _looks_like_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.endswith(".json") or ("/" in name and not is_hub_id(name))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"


def _loading_error(name: str, found: str) -> UserError:
    files = "tokenizer.json tokenizer_config.json vocab.json merges.txt --local-dir tokenizer"
    fetch = f"on a machine with network: huggingface-cli download {name} {files}; then --tokenizer tokenizer"
    return UserError(
        f"tokenizer {name!r} cannot be loaded",
        expected="a local folder with tokenizer.json, or a hub id that this machine can reach or has cached",
        found=found,
        do="correct the path, or give a hub id such as Qwen/Qwen2.5-0.5B" if _looks_like_path(name) else fetch,
    )

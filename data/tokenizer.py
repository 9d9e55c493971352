"""Loading a tokenizer, knowing it again, and finding the id that ends a document.

The ids of a corpus mean nothing without their tokenizer: the fingerprint made here is written into the
manifest and compared with the tokenizer that a model is given.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import UserError

if TYPE_CHECKING:
    from transformers.tokenization_utils_fast import PreTrainedTokenizerFast

QWEN_EOD = "<|endoftext|>"


def load_tokenizer(name_or_dir: str | Path) -> PreTrainedTokenizerFast:
    """Load a fast tokenizer from a local folder or by its hub id.

    Raises:
        UserError: no such folder, an id that cannot be reached, or a tokenizer without a fast version.
    """
    name = str(name_or_dir)
    if not Path(name).is_dir() and _looks_like_path(name):
        raise _unreachable(name, "no such folder")
    from transformers.models.auto.tokenization_auto import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, use_fast=True)
    except Exception as error:  # the hub raises a dozen kinds, from OSError to huggingface_hub's own
        raise _unreachable(name, _first_line(error)) from None
    if not tokenizer.is_fast:
        raise UserError(
            f"{name} has only a slow tokenizer ({type(tokenizer).__name__})",
            expected="a fast tokenizer (a folder with tokenizer.json)",
            found="a pure Python tokenizer, hundreds of times slower",
            do="convert it once with transformers and save_pretrained(), or name another tokenizer",
        )
    return tokenizer  # type: ignore[no-any-return]


def fingerprint(tokenizer: PreTrainedTokenizerFast) -> str:
    """SHA-256 (hex) over what decides the ids: model, merges, added tokens, normaliser, splitting.

    Path, file layout, and the padding and truncation state of the object do not enter: two loads of one
    tokenizer agree, and so does a saved copy.
    """
    behaviour = json.loads(backend_json(tokenizer))
    behaviour["padding"] = behaviour["truncation"] = None
    canonical = json.dumps(behaviour, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()


def backend_json(tokenizer: PreTrainedTokenizerFast) -> str:
    """The tokenizer.json text of the Rust tokenizer behind a transformers fast tokenizer."""
    return str(tokenizer.backend_tokenizer.to_str())


def eod_id(tokenizer: PreTrainedTokenizerFast) -> int:
    """The id that ends a document: `<|endoftext|>` where the vocabulary has it (Qwen), else eos_token.

    Raises:
        UserError: the tokenizer has neither, or the id lies outside its vocabulary.
    """
    vocabulary = tokenizer.get_vocab()
    token = QWEN_EOD if QWEN_EOD in vocabulary else tokenizer.eos_token
    if token is None or token not in vocabulary:
        raise UserError(
            f"{tokenizer.name_or_path} has no token that ends a document",
            expected=f"{QWEN_EOD} in the vocabulary, or an eos_token",
            found="neither" if token is None else f"eos_token {token!r}, which is not in the vocabulary",
            do="set eos_token in tokenizer_config.json",
        )
    return int(vocabulary[token])


def special_tokens(tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Texts of the tokens marked special, by id: control tokens that no document should produce by accident."""
    added = tokenizer.added_tokens_decoder
    return [added[number].content for number in sorted(added) if added[number].special]


def vocab_size(tokenizer: PreTrainedTokenizerFast) -> int:
    """One more than the highest id the tokenizer can give, and never less than `len(tokenizer)`."""
    highest: Any = max(tokenizer.get_vocab().values(), default=-1)
    return max(len(tokenizer), int(highest) + 1)


def _looks_like_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith(".json")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"


def _unreachable(name: str, found: str) -> UserError:
    return UserError(
        f"tokenizer {name!r} cannot be loaded",
        expected="a local folder with tokenizer.json, or a hub id that this machine can reach or has cached",
        found=found,
        do=f"give the path of a local copy; on a machine with network: "
        f"huggingface-cli download {name if not _looks_like_path(name) else 'Qwen/Qwen2.5-0.5B'} "
        "tokenizer.json tokenizer_config.json vocab.json merges.txt --local-dir tokenizer",
    )

"""The YAML front matter of a README.md, by which the hub knows models and data sets."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from common.errors import UserError
from common.small_files import parse_yaml

_FRONT = re.compile(r"\A---\n(.*?)^---\n", re.S | re.M)


def read_front_matter(card: str, path: Path) -> tuple[dict[str, Any], str]:
    """The YAML front matter of a card, and the text after it.

    Raises:
        UserError: the front matter is not a YAML mapping.
    """
    match = _FRONT.match(card)
    if match is None:
        return {}, card
    try:
        front = parse_yaml(match[1])
    except yaml.YAMLError as error:
        front = str(error)
    if not isinstance(front, dict):
        raise UserError(
            f"the front matter of {path} cannot be read",
            expected="YAML names and values between the two lines ---",
            found=" ".join(str(front).split())[:200],
            do=f"correct it, or remove {path}: it is then written anew",
        )
    return front, card[match.end() :]

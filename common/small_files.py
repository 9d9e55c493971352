"""Reading text and YAML files that people write, or that came from elsewhere: in bounded memory and time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

MAX_BYTES = 4 << 20
MAX_VALUES = 1_000_000


def read_small_file(path: str | Path) -> str:
    """The UTF-8 text of a regular file of at most 4 MiB.

    Raises:
        OSError: no such file, a device, pipe or folder, or a larger file.
        UnicodeDecodeError: not UTF-8.
    """
    path = Path(path)
    if path.exists() and not path.is_file():  # a device such as /dev/zero has no end, and a pipe may never begin
        raise OSError(f"{path} is not a regular file")
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise OSError(f"{path} is larger than {MAX_BYTES >> 20} MiB")
    return content.decode("utf-8")


def parse_yaml(text: str) -> Any:
    """The plain values of a YAML text.

    A YAML alias (`*name`) repeats a value at no cost, until somebody walks through the result: ten lines of them can
    stand for billions of values. They are counted first.

    Raises:
        yaml.YAMLError: no YAML, nested too deeply, or more than a million values with those that aliases stand for.
    """
    import yaml

    try:
        value = yaml.safe_load(text)
        if _count_values(value, {}) > MAX_VALUES:
            raise yaml.YAMLError(f"with its aliases (*name) it stands for more than {MAX_VALUES:,} values")
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply, or an alias (*name) contains itself") from None
    except ValueError as error:  # a date or number that does not exist
        raise yaml.YAMLError(str(error)) from None
    return value


def _count_values(value: Any, known: dict[int, int]) -> int:
    """Values in `value`, each alias counted as what it stands for; `known` holds the counts of objects by their id."""
    if not isinstance(value, dict | list):
        return 1
    if id(value) not in known:
        children = value.values() if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_count_values(child, known) for child in children)
    return known[id(value)]

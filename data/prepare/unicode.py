"""Characters on which two libraries can disagree because they were built with different Unicode versions.

Tokenisation looks up the properties of a character twice: the pre-tokeniser needs to know letters, numbers, marks and
spaces, NFC needs combining classes and decompositions. All libraries agree on characters whose properties have never
changed. The others are rare; documents that contain one are encoded by the HF tokenizer.
"""

from __future__ import annotations

import unicodedata
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

OLD = unicodedata.ucd_3_2_0
# all assigned characters above ASCII: planes 4 to 13 are empty, 15 and 16 are for private use
RANGES = (range(0x80, 0xD800), range(0xE000, 0x40000), range(0xE0000, 0xE1000))


def has_changed_characters(text: str) -> bool:
    """Whether the text has a character that has changed since Unicode 3.2, or that this Python does not know.

    Such a character is N'Ko's U+07FD: tokenizers 0.21 and gigatoken 0.10 order it differently.
    """
    import numpy as np

    if text.isascii():
        return False
    codes = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    return bool(_changed_table()[codes].any())


@cache
def _changed_table() -> npt.NDArray[np.bool_]:
    """bool[0x110000]: whether the code point has changed."""
    import numpy as np

    table = np.zeros(0x110000, dtype=bool)
    table[[code for codes in RANGES for code in codes if _has_changed(chr(code))]] = True
    return table


def _has_changed(character: str) -> bool:
    category = unicodedata.category(character)
    if category == "Cn":
        return True
    old = OLD.category(character)
    if (category[0] if category[0] in "LNMZ" else "") != (old[0] if old[0] in "LNMZ" else ""):
        return True
    if unicodedata.combining(character) != OLD.combining(character):
        return True
    return unicodedata.decomposition(character) != OLD.decomposition(character)

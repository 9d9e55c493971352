"""Characters on which two Unicode tables of different age can disagree.

Tokenisation looks characters up twice: the pre-tokeniser asks for letters, numbers, marks and spaces, NFC
for combining classes and decompositions. Two libraries built with different Unicode versions agree on all
characters whose properties never changed. The others are rare; documents with one go to the oracle.
"""

from __future__ import annotations

import unicodedata
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

OLD = unicodedata.ucd_3_2_0
# planes 4 to 13 hold nothing, 15 and 16 are for private use
RANGES = (range(0x80, 0xD800), range(0xE000, 0x40000), range(0xE0000, 0xE1000))


def has_changed_characters(text: str) -> bool:
    """Whether the text has a character that changed since Unicode 3.2, or is unknown to this Python.

    N'Ko's U+07FD is such a one: tokenizers 0.21 and gigatoken 0.10 order it differently.
    """
    import numpy as np

    if text.isascii():
        return False
    codes = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    return bool(_changed_table()[codes].any())


@cache
def _changed_table() -> npt.NDArray[np.bool_]:
    """bool[0x110000], True at the code points that changed."""
    import numpy as np

    table = np.zeros(0x110000, dtype=bool)
    table[[code for codes in RANGES for code in codes if _changed(chr(code))]] = True
    return table


def _changed(character: str) -> bool:
    category = unicodedata.category(character)
    if category == "Cn":
        return True
    old = OLD.category(character)
    if (category[0] if category[0] in "LNMZ" else "") != (old[0] if old[0] in "LNMZ" else ""):
        return True
    if unicodedata.combining(character) != OLD.combining(character):
        return True
    return unicodedata.decomposition(character) != OLD.decomposition(character)

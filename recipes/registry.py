"""Recipe names. Nothing heavy is imported here: `resolve` loads one module, NeMo only when it is built."""

from __future__ import annotations

import importlib

from common.errors import UserError, unknown_name
from recipes.plan import Recipe

RECIPES: dict[str, tuple[str, str]] = {
    "qwen25_tiny": ("recipes.qwen25:qwen25_tiny", "1.3M, tied, CPU, from scratch in about a minute"),
    "qwen25_tiny_cpt": ("recipes.qwen25:qwen25_tiny_cpt", "the tiny model continued on code with 25% replay, CPU"),
    "qwen25_500m_single": ("recipes.qwen25:qwen25_500m_single", "306M, untied, one GPU, sequence 2048, batch 1 x 4"),
    "qwen25_500m": ("recipes.qwen25:qwen25_500m", "494M, tied (Qwen2.5-0.5B), one GPU"),
    "qwen25_500m_dual": ("recipes.qwen25:qwen25_500m_dual", "494M, tied, two GPUs, 65% of each card"),
    "qwen25_500m_dual_conservative": ("recipes.qwen25:qwen25_500m_dual_conservative", "the same, 48% of each card"),
    "qwen25_500m_dual_aggressive": ("recipes.qwen25:qwen25_500m_dual_aggressive", "the same, 90% of each card"),
    "qwen25_500m_multinode": ("recipes.qwen25:qwen25_500m_multinode", "494M on 2 x 8 GPUs: TP 2, PP 2, VP 2, DP 4"),
    "qwen25_500m_cpt": ("recipes.qwen25:qwen25_500m_cpt", "Qwen2.5-0.5B continued on your text with replay, one GPU"),
}


def resolve(name: str) -> Recipe:
    """The recipe called `name`.

    Raises:
        UserError: the name is not registered; the nearest ones are offered.
    """
    if name not in RECIPES:
        raise unknown_name("recipe", name, RECIPES, "python launch.py recipes")
    module, function = RECIPES[name][0].split(":")
    found = getattr(importlib.import_module(module), function)
    if not isinstance(found, Recipe):
        raise UserError(
            f"recipe {name!r} is not built with @recipe(...)",
            expected=f"{module}.{function} decorated with recipes.plan.recipe",
            found=type(found).__name__,
            do=f"put @recipe(...) over it in {module.replace('.', '/')}.py",
        )
    return found

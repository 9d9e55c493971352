"""Print which folder imports which, top layer first: `make imports`. Every arrow points to a line further down."""

from __future__ import annotations

import sys
from pathlib import Path

import grimp

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def main() -> int:
    """Print the graph. Returns 1 if an arrow points up or to the same layer, which is marked."""
    contracts = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [[folder.strip() for folder in layer.split("|")] for layer in contracts[0]["layers"]]
    depth = {folder: number for number, layer in enumerate(layers) for folder in layer}
    graph = grimp.build_graph(*depth)
    wrong = 0
    for folder in depth:
        inside = graph.find_descendants(folder) | {folder}
        imported = {name.split(".")[0] for module in inside for name in graph.find_modules_directly_imported_by(module)}
        down = [name for name in depth if name in imported and depth[name] > depth[folder]]
        up = [f"{name} (UP)" for name in imported - {folder, *down}]
        wrong += len(up)
        print(f"{folder:<{max(map(len, depth))}} -> {', '.join(down + up) or 'nothing'}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

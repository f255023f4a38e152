"""What the source looks like as a house: `python tests/architecture/figures.py [FOLDER]` prints it, the tests hold it.

Imports inside functions count; imports under TYPE_CHECKING do not, for they are never done.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "kedge"


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    name: str
    file: Path
    tree: ast.Module
    lines: int


def read_modules(source: Path) -> dict[str, Module]:
    """All modules below the package folder `source`, by their dotted names."""
    modules: dict[str, Module] = {}
    for file in sorted(source.rglob("*.py")):
        parts = file.relative_to(source.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = file.read_text(encoding="utf-8")
        modules[name] = Module(name=name, file=file, tree=ast.parse(text), lines=text.count("\n"))
    return modules


def import_graph(modules: Mapping[str, Module]) -> dict[str, set[str]]:
    """Which of these modules each one imports."""
    return {name: set(_imported(module, modules)) - {name} for name, module in modules.items()}


def cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other, each one sorted (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph[node]):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                groups.append(sorted(group))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return groups


def folder_sizes(modules: Mapping[str, Module]) -> dict[Path, int]:
    """Modules in each folder, its `__init__` aside."""
    sizes: dict[Path, int] = {}
    for module in modules.values():
        if module.file.name != "__init__.py":
            sizes[module.file.parent] = sizes.get(module.file.parent, 0) + 1
    return sizes


def functions(modules: Mapping[str, Module]) -> Iterator[tuple[int, str]]:
    """Lines and place of every function."""
    for module in modules.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield (node.end_lineno or node.lineno) - node.lineno + 1, f"{module.name}.{node.name}"


def _imported(module: Module, modules: Mapping[str, Module]) -> Iterator[str]:
    package = module.name if module.file.name == "__init__.py" else module.name.rpartition(".")[0]
    for node in _done(module.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            origin = ".".join([*parents, node.module or ""]).strip(".")
            for alias in node.names:
                found = f"{origin}.{alias.name}" if f"{origin}.{alias.name}" in modules else origin
                if found in modules:
                    yield found


def _done(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node but those that stand under `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from _done(node)


def figures(source: Path) -> Sequence[str]:
    modules = read_modules(source)
    largest, count = max(folder_sizes(modules).items(), key=lambda item: item[1])
    found = cycles(import_graph(modules))
    longest = max(modules.values(), key=lambda module: module.lines)
    length, function = max(functions(modules))
    total = sum(module.lines for module in modules.values())
    return [
        f"largest folder     {count} modules ({largest.relative_to(source.parent)})",
        f"import cycles      {len(found)}",
        *(f"                   {' <-> '.join(group)}" for group in found),
        f"files              {len(modules)}",
        f"lines              {total:,}, {total / len(modules):.0f} a file",
        f"longest file       {longest.lines} lines ({longest.name})",
        f"longest function   {length} lines ({function})",
    ]


if __name__ == "__main__":
    print("\n".join(figures(Path(sys.argv[1]) if len(sys.argv) > 1 else SOURCE)))

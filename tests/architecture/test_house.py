"""The rules of the house: folders that can be surveyed, no import cycles, files and functions of a readable length."""

from __future__ import annotations

from figures import SOURCE, cycles, folder_sizes, functions, import_graph, read_modules

MOST_MODULES = 22
MOST_LINES = 400
LONGEST_FUNCTION = 76
"""Of a kernel, whose body is one computation; 60 elsewhere."""

MODULES = read_modules(SOURCE)


def test_no_module_imports_itself_through_others() -> None:
    assert cycles(import_graph(MODULES)) == []


def test_no_folder_is_a_corridor() -> None:
    sizes = {str(folder.relative_to(SOURCE)): size for folder, size in folder_sizes(MODULES).items()}
    assert {folder: size for folder, size in sizes.items() if size > MOST_MODULES} == {}


def test_files_and_functions_are_short() -> None:
    assert {name: module.lines for name, module in MODULES.items() if module.lines > MOST_LINES} == {}
    kernels = "kedge.rollout.kernels."
    long = {name: lines for lines, name in functions(MODULES) if lines > (LONGEST_FUNCTION if kernels in name else 60)}
    assert long == {}


def test_cycles_are_found_also_through_late_imports() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": set[str]()}
    assert cycles(graph) == [["a", "b", "c"]]


def test_charts_have_one_renderer() -> None:
    """SVG is written in `kedge.report.charts` alone."""
    others = [
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*")
        if path.suffix in (".py", ".j2", ".js") and "charts" not in path.parts and "<svg" in path.read_text("utf-8")
    ]
    assert others == []

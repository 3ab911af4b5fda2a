"""The picture in docs/architecture.md is true of the imports."""

import ast
import functools
import importlib
import pathlib
import re

import pytest

import aqtlite

pytestmark = pytest.mark.code("quick")

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "aqtlite"
PAGE = (ROOT / "docs" / "architecture.md").read_text()
PICTURE = PAGE.partition("```\n")[2].partition("```")[0]
# A row names its rooms, then says after several spaces what is in them.
FLOORS = [re.split(r" {3,}", row)[0].split() for row in PICTURE.splitlines()][::-1]
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
# The files of the way through the package, after the page itself.
WAY = re.findall(r"^\d+\. `([\w/]+\.py)`", PAGE, re.M)
# Rooms with the files that others import, besides the front; a row that begins with
# spaces continues the one above.
LEAVES = PAGE.partition("## Rooms that need not be entered")[2].split("```")[1]
DOORS = {
    room: set(doors)
    for room, *doors in map(
        str.split,
        re.sub(r"\n +", " ", LEAVES.strip()).replace("/", ".").splitlines(),
    )
}
FOLDERS = sorted(
    path.parent.relative_to(ROOT).as_posix() for path in PACKAGE.rglob("*/__init__.py")
)
# Documentation, examples and the demo use these only.
PUBLIC = {"aqtlite", *(f"aqtlite.{name}" for name in dir(aqtlite)), "aqtlite.flax.nnx"}


def room(module: str) -> str:
    """Room of a module of the package, by its dotted name."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "aqtlite"


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").exists()


def imports(tree: ast.AST) -> set[str]:
    """Modules of the package that the code imports."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for one in node.names:
                inner = f"{node.module}.{one.name}"
                package = node.module.partition(".")[0] == "aqtlite"
                names.add(inner if package and is_module(inner) else node.module)
    return {name for name in names if name.partition(".")[0] == "aqtlite"}


@functools.cache
def arrows() -> set[tuple[str, str]]:
    """(module, another module that it imports) of the whole package."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        if path.name == "__main__.py":
            continue
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for name in imports(ast.parse(path.read_text())):
            found.add((module.removesuffix(".__init__"), name))
    return found


def test_rooms_are_those_of_the_picture():
    modules = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__"}
    folders = {pathlib.Path(name).name for name in FOLDERS if name.count("/") == 1}
    assert set(FLOOR_OF) == {"aqtlite"} | modules | folders


def test_each_floor_imports_only_floors_below():
    upward = [
        (module, other)
        for module, other in arrows()
        if room(module) != room(other)
        and FLOOR_OF[room(other)] >= FLOOR_OF[room(module)]
    ]
    assert not upward


@pytest.mark.parametrize("leaves", DOORS)
def test_rooms_of_leaves_are_entered_by_their_doors(leaves):
    inside = f"aqtlite.{leaves}."
    doors = {inside + door for door in DOORS[leaves]}
    assert all(map(is_module, doors))
    entered = {
        (module, other)
        for module, other in arrows()
        if other.startswith(inside) and not f"{module}.".startswith(inside)
    }
    assert not {arrow for arrow in entered if arrow[1] not in doors}
    assert {other for _, other in entered} == doors, "a door that nobody takes"


def test_the_house_stays_small():
    assert len(FLOOR_OF) <= 28
    assert len(list(PACKAGE.glob("*.py"))) <= 6


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_says_what_to_read_first(folder):
    doc = importlib.import_module(folder.replace("/", ".")).__doc__
    names = re.search(r"\bRead\s+`([\w.]+)`", doc)
    assert names, f"{folder} does not name the file to read first"
    assert is_module(f"{folder.replace('/', '.')}.{names[1]}")


def test_each_file_of_the_way_opens_with_its_neighbours():
    assert len(WAY) == 14
    for before, path, after in zip([None, *WAY], WAY, [*WAY[1:], None], strict=False):
        opening = ast.get_docstring(ast.parse((PACKAGE / path).read_text()))
        first, last = re.findall(r"^(Before|Next): (.*)$", opening, re.M)
        assert (first[0], last[0]) == ("Before", "Next"), path
        assert before is None or f"`{before}`" in first[1], path
        assert after is None or f"`{after}`" in last[1], path


@pytest.mark.parametrize(
    "path",
    [
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").glob("*.py"),
        *(ROOT / "notebooks").glob("*.ipynb"),
        *(ROOT / "aqtlite_demo").glob("*.py"),
        ROOT / "README.md",
    ],
    ids=lambda path: path.name,
)
def test_users_are_shown_public_modules_only(path):
    text = path.read_text()
    names = set(re.findall(r"(?:from|import) (aqtlite[\w.]*)", text))
    private = {
        name
        for name in names
        if name not in PUBLIC and not name.startswith("aqtlite_demo")
    }
    assert not private

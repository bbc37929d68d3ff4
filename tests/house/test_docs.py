"""The docs name what exists: files, functions, links, public names; and they can be read: short lines, short sentences."""

import ast
import importlib
import re
import statistics
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "lightning_sp"
DOCS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
# What speaks of today's code; the log and the changelog speak of the code of their day.
LIVING = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "STYLE.md")),
    *(path for path in sorted((ROOT / "docs").glob("*.md")) if path.name not in ("LOG.md", "masks.md")),
    *sorted((ROOT / "docs/decisions").glob("*.md")),
]
BACKTICKED = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"^([\w./-]+\.(?:py|yaml|toml|md))(?::([\w.]+))?$")
FOLDER = re.compile(r"^[\w.-]+(?:/[\w.-]+)*/$")


def names(paths):
    return [str(path.relative_to(ROOT)) for path in paths]


def outside_code(text):
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


def find(name):
    """Where a file or folder of the docs lies: seen from the repository, or from the package."""
    return next((base / name for base in (ROOT, PACKAGE, ROOT / "docs") if (base / name).exists()), None)


@lru_cache
def definitions(path):
    """The functions, classes, methods and constants of a file, dotted."""
    found = set()

    def collect(body, prefix):
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(prefix + node.name)
                if isinstance(node, ast.ClassDef):
                    collect(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(prefix + node.target.id)
            elif isinstance(node, ast.Assign):
                found.update(prefix + target.id for target in node.targets if isinstance(target, ast.Name))

    collect(ast.parse(path.read_text()).body, "")
    return found


def resolves(name):
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[end:]:
            if not hasattr(found, attribute):
                return False
            found = getattr(found, attribute)
        return True
    return False


@pytest.mark.parametrize("doc", LIVING, ids=names(LIVING))
def test_what_a_doc_names_exists(doc):
    missing = []
    for name in BACKTICKED.findall(outside_code(doc.read_text())):
        if match := FILE.match(name):
            file, function = match.groups()
            path = find(file)
            if path is None or (function and function not in definitions(path)):
                missing.append(name)
        elif (FOLDER.match(name) and find(name) is None) or (
            re.fullmatch(r"lightning_sp(\.\w+)+", name) and not resolves(name)
        ):
            missing.append(name)
    assert not missing


@pytest.mark.parametrize("doc", DOCS, ids=names(DOCS))
def test_links_lead_somewhere(doc):
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", outside_code(doc.read_text()))
    assert not [link for link in links if "://" not in link and not (doc.parent / link).exists()]


@pytest.mark.parametrize("doc", DOCS, ids=names(DOCS))
def test_lines_fit_a_window(doc):
    long = [
        (number, len(line))
        for number, line in enumerate(doc.read_text().splitlines(), 1)
        if len(line) > 120 and not line.startswith("|")
    ]
    assert not long


def test_the_layers_drawn_are_those_of_the_contract():
    contract = re.search(r'name = "Layers".*?layers = \[\n(.*?)\n\]', (ROOT / "pyproject.toml").read_text(), re.S)[1]
    layers = [
        [name for name in re.findall(r"\((\w+)\)", line) if find(name) or find(f"{name}.py")]
        for line in contract.splitlines()
    ]
    section = re.search(r"^## Layers.*?^```\n(.*?)^```", (ROOT / "docs/architecture.md").read_text(), re.M | re.S)[1]
    drawn = [re.split(r"\s{2,}", line.strip())[0].split(" | ") for line in section.splitlines()]
    assert drawn == layers


def test_sentences_of_the_architecture_are_short():
    pages = [ROOT / "docs/architecture.md", *sorted((ROOT / "docs/decisions").glob("*.md"))]
    whole = "\n\n".join(outside_code(page.read_text()) for page in pages)
    text = re.sub(r"^(\||#).*$", "", whole, flags=re.M)
    blocks = re.split(r"\n\s*\n|\n(?=- )", text)
    sentences = [each for block in blocks for each in re.split(r"(?<=[.!?:])\s+", block.strip()) if each]
    assert statistics.median(len(each.split()) for each in sentences) <= 20


def test_the_glossary_has_few_terms_and_names_of_the_code():
    section = (ROOT / "docs/glossary.md").read_text().split("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("| ")][1:]
    assert 0 < len(rows) <= 40
    source = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    unknown = [
        name
        for _, _, code in rows
        for name in BACKTICKED.findall(code)
        if not FILE.match(name) and not re.search(rf"\b{re.escape(name.split('.')[-1])}\b", source)
    ]
    assert not unknown


def test_the_table_of_refusals_names_every_place_that_refuses():
    table = (ROOT / "docs/refusals.md").read_text()
    raising = [path for path in PACKAGE.rglob("*.py") if "raise SequenceParallelError(" in path.read_text()]
    places = {
        path.name if path.parent == PACKAGE else f"{path.parent.relative_to(PACKAGE).as_posix()}/" for path in raising
    }
    assert not [place for place in sorted(places) if f"`{place}`" not in table]


def test_commands_of_the_proof_name_tests_that_exist():
    commands = re.findall(r"`pytest ([^`]+)`", (ROOT / "docs/proof.md").read_text())
    paths = [word for command in commands for word in command.split() if word.startswith("tests")]
    assert paths
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_the_code_names_docs_that_exist():
    sources = [path for folder in ("lightning_sp", "benchmarks", "tools") for path in (ROOT / folder).rglob("*.py")]
    named = {doc for path in sources for doc in re.findall(r"docs/[\w/]+\.md", path.read_text())}
    assert not [doc for doc in sorted(named) if not (ROOT / doc).exists()]


def api_sections():
    """Module -> names, from the headings of the API page: `## lightning_sp.attention` and the bold or table names below."""
    sections = {}
    for part in re.split(r"^## ", (ROOT / "docs/api.md").read_text(), flags=re.M)[1:]:
        module, _, body = part.partition("\n")
        listed = re.findall(r"^(?:### |\| )`(\w+)`", body, flags=re.M)
        sections[module.strip("` ")] = set(listed)
    return sections


def test_the_api_page_lists_the_public_names():
    sections = api_sections()
    assert len(sections["lightning_sp"]) <= 15
    for name, listed in sections.items():
        module = importlib.import_module(name)
        exported = set(getattr(module, "__all__", {each for each in listed if hasattr(module, each)}))
        assert listed == exported, name

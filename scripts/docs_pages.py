"""What mkdocs takes from the code: tables of settings, figures, commands and reasons; public names.

A table stands where a page has ``<!-- settings -->`` or another name in its place.
The build fails if a public name has no docstring or no place in the reference.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import griffe
from mkdocs.exceptions import PluginError

from bytesched.cli import COMMANDS
from bytesched.config import FIELDS
from bytesched.doctor.advice import ADVICE

ROOT = Path(__file__).parents[1]
#: what third parties import from
FACES = (
    "bytesched",
    "bytesched.kvstore",
    "bytesched.plugins",
    "bytesched.plugins.burst",
    "bytesched.plugins.graphs",
    "bytesched.plugins.horovod",
    "bytesched.plugins.moe",
    "bytesched.plugins.pipelines",
    "bytesched.plugins.mpi_kvstore",
    "bytesched.plugins.wave",
    "bytesched.testing",
)


def on_pre_build(**_: Any) -> None:
    """Every public name has a docstring."""
    undocumented = [name for name, item in _public_names() if not item.docstring]
    if undocumented:
        raise PluginError(f"public names without a docstring: {', '.join(undocumented)}")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """A page with the tables that it asks for."""
    tables = {
        "settings": _settings,
        "figures": _figures,
        "commands": _commands,
        "reasons": _reasons,
        "changelog": _changelog,
    }
    for name, table in tables.items():
        mark = f"<!-- {name} -->"
        if mark in markdown:
            markdown = markdown.replace(mark, table())
    return markdown


def on_post_page(output: str, **_: Any) -> str:
    """A page that fetches nothing: the theme would load a script that searches in local files."""
    output = re.sub(r'<script src="https://unpkg.com/iframe-worker/[^>]*></script>', "", output)
    if fetched := re.findall(
        r'(?:src=|<link[^>]* href=)"(https?://[^"]*)"|class="mermaid"', output
    ):
        raise PluginError(f"the page would fetch {fetched} when it is read")
    return output


def on_post_build(config: Any, **_: Any) -> None:
    """Every public name stands in the reference."""
    pages = (Path(config["site_dir"]) / "reference" / "api").glob("*.html")
    anchors = set(re.findall(r'id="(bytesched[\w.]*)"', " ".join(p.read_text() for p in pages)))
    missing = [n for n, item in _public_names() if not anchors & {n, item.canonical_path}]
    if missing:
        raise PluginError(f"public names that are not in the reference: {', '.join(missing)}")


def _changelog() -> str:
    """As in the repository's root, with links from the folder of the reference."""
    return (ROOT / "CHANGELOG.md").read_text().replace("](docs/", "](../")


def _public_names() -> list[tuple[str, Any]]:
    """Each public name in full, and what it is."""
    loader = griffe.GriffeLoader(search_paths=[ROOT])
    loader.load("bytesched")
    loader.resolve_aliases()
    found = []
    for face in FACES:
        module = loader.modules_collection[face]
        for name in module.exports or []:
            item = module[str(name)]
            item = item.final_target if item.is_alias else item
            if item.is_module:  # a function with the name of its file
                item = item[str(name)]
            found.append((f"{face}.{name}", item))
    return found


def _settings() -> str:
    config = griffe.load("bytesched.config", search_paths=[ROOT])["Config"]
    return _table(
        ("setting", "default", ""),
        (
            (f"`{name}`", f"`{_shown(field.default)}`", _text(config[name]))
            for name, field in FIELDS.items()
        ),
    )


def _figures() -> str:
    figures = griffe.load("bytesched.figures", search_paths=[ROOT])["Figures"]
    rows = [
        (f"`{name}`", f"`{item.annotation}`", _text(item))
        for name, item in figures.attributes.items()
    ]
    rows.append(("`wait_ms/<module>`", "`float`", "The eight modules waited for longest."))
    return _table(("figure", "type", ""), rows)


def _commands() -> str:
    return _table(
        ("command", ""),
        ((f"`bytesched {name}`", command.line) for name, command in COMMANDS.items()),
    )


def _reasons() -> str:
    return _table(
        ("reason", "what happens", "what to do"),
        ((advice.shown, advice.happens, advice.cure) for advice in ADVICE),
    )


def _shown(value: object) -> str:
    return repr(value).replace("'", '"')


def _text(item: Any) -> str:
    return " ".join(item.docstring.value.split())


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)

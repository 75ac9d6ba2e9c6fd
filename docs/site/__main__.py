"""Writes the sources of the site, and checks what Sphinx makes of them.

python -m docs.site write docs/_build/source
python -m docs.site check docs/_build/html
"""

import pathlib
import sys
import time

from docs.site import api, check, hand_written


def write(folder: pathlib.Path) -> list[str]:
    """Writes all pages as Markdown; returns what is missing."""
    from docs.site import catalogue, settings  # these import the library, which a check does without

    pages = hand_written.pages() | api.pages() | settings.pages()
    pages |= catalogue.pages(folder / "images" / "attention")
    pages["attention"] = catalogue.index(pages["attention"])
    pages["models"] = pages["models"].replace("<!-- families -->", settings.families())
    for name, text in pages.items():
        path = folder / f"{name}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        text = text.strip() + "\n"
        if not path.exists() or path.read_text(encoding="utf-8") != text:  # Sphinx builds what is newer
            path.write_text(text, encoding="utf-8")
    for path in folder.rglob("*.md"):
        if path.relative_to(folder).with_suffix("").as_posix() not in pages:
            path.unlink()
    return api.missing()


def main(arguments: list[str]) -> int:
    """Runs one of the two steps; the exit status is 1 if it found problems."""
    step, folder = arguments[0], pathlib.Path(arguments[1])
    begin = time.monotonic()
    found = write(folder) if step == "write" else check.problems(folder)
    for line in found:
        print(line, file=sys.stderr)
    print(f"{step}: {len(found)} problems, {time.monotonic() - begin:.0f} s")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

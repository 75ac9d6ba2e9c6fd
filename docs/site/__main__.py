"""Writes the Markdown sources of the site, and checks the HTML that Sphinx makes of them.

python -m docs.site write docs/_build/source
python -m docs.site check docs/_build/html
"""

import pathlib
import shutil
import sys
import time

from docs.site import api, check, hand_written, llms, notebooks


def write(folder: pathlib.Path) -> list[str]:
    """Writes all pages as Markdown into a folder and deletes other pages there.

    Returns:
      One line for each public name without documentation.
    """
    from docs.site import catalogue, settings  # late imports: these import the library, which `check` does not need

    pages = hand_written.pages() | api.pages() | settings.pages()
    pages |= catalogue.pages(folder / "images" / "attention")
    pages["attention"] = catalogue.index(pages["attention"])
    pages["notebooks"] = notebooks.gallery(pages["notebooks"])
    pages["models"] = pages["models"].replace("<!-- families -->", settings.families())
    shutil.copytree(hand_written.PICTURES, folder / "notebooks", dirs_exist_ok=True)
    for name, text in pages.items():
        path = folder / f"{name}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        text = text.strip() + "\n"
        if not path.exists() or path.read_text(encoding="utf-8") != text:  # Sphinx rebuilds files with a newer date
            path.write_text(text, encoding="utf-8")
    (folder / "root").mkdir(exist_ok=True)
    (folder / "root" / "llms.txt").write_text(llms.text(pages), encoding="utf-8")
    for path in folder.rglob("*.md"):
        if path.relative_to(folder).with_suffix("").as_posix() not in pages:
            path.unlink()
    return api.missing()


def main(arguments: list[str]) -> int:
    """Runs a step.

    Args:
      arguments: ["write" or "check", folder].

    Returns:
      The exit status: 1 if the step found problems, otherwise 0.
    """
    step, folder = arguments[0], pathlib.Path(arguments[1])
    begin = time.monotonic()
    problems = write(folder) if step == "write" else check.problems(folder)
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"{step}: {len(problems)} problems, {time.monotonic() - begin:.0f} s")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

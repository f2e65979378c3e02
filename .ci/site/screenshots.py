"""Take the pictures of docs/ anew: `python .ci/site/screenshots.py`. It runs the demo in an empty folder (two minutes
on 2 cores) and photographs its pages in a headless Chromium, with the fonts Liberation.

With a FOLDER in which `shardvit demo` has run, pages are only photographed, or made from its runs. They are light, as
wide as README is on GitHub, and cut off at a height; 256 colours keep a picture below 100 kB.
"""

import argparse
import base64
import io
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from tests.launch.report.browser import Browser, font_config, open_browser, program  # noqa: E402

WIDTH, SCALE = 1200, 0.75  # a desktop's page, as small as README shows it


@dataclass(frozen=True)
class Picture:
    """A page of the demo (or made by a command in its folder), and what of it is shown."""

    name: str
    command: str
    page: str
    height: int
    first: str = "body"  # a selector: what stands at the top


PICTURES = (
    Picture("report.png", "", "runs/digits/report.html", 1800),
    Picture("show.png", "show digits --output look", "look/index.html", 1400),
)


def shardvit(command: str, folder: Path) -> None:
    """Run a command in that folder; CalledProcessError if it fails."""
    subprocess.run(
        [
            sys.executable,
            "-P",
            "-c",
            f"import sys; sys.path.insert(0, {str(ROOT)!r}); from shardvit.launch.cli import main; main()",
            *command.split(),
        ],
        cwd=folder,
        check=True,
    )


def photograph(browser: Browser, picture: Picture, folder: Path) -> bytes:
    """Return a PNG."""
    browser.open(folder / picture.page, width=WIDTH, height=picture.height)
    top = browser.run(f"document.querySelector({picture.first!r}).getBoundingClientRect().top + window.scrollY")
    clip = {"x": 0, "y": top, "width": WIDTH, "height": picture.height, "scale": SCALE}
    taken = browser.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
    small = io.BytesIO()
    image = Image.open(io.BytesIO(base64.b64decode(taken["data"]))).convert("RGB")
    image.quantize(256, dither=Image.Dither.NONE).save(small, "PNG", optimize=True)
    return small.getvalue()


def main() -> None:
    """Parse the command line, make the pages, take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="where `shardvit demo` has run")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as empty:
        folder = given.folder or Path(empty)
        chromium, fonts = program(), font_config("Liberation", Path(empty))
        if chromium is None or fonts is None:
            sys.exit("Chromium and the fonts Liberation are needed: apt-get install chromium fonts-liberation")
        if given.folder is None:
            shardvit("demo", folder)
        for picture in PICTURES:
            if picture.command:
                shardvit(picture.command, folder)
        with_signs = "<dir>/usr/share/fonts</dir><cachedir>"  # those that Liberation lacks
        fonts.write_text(fonts.read_text().replace("<cachedir>", with_signs))
        with open_browser(chromium, Path(empty), fonts=fonts) as browser:
            for picture in PICTURES:
                (ROOT / "docs" / picture.name).write_bytes(photograph(browser, picture, folder))
                print(ROOT / "docs" / picture.name)


if __name__ == "__main__":
    main()

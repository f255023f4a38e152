"""docs/gallery.md with its pictures and reports, and the pictures of the other pages.

    python benchmarks/studies/gallery.py                        # the demo and two rounds, pictures, reports, page
    python benchmarks/studies/gallery.py --all                  # and every recipe with a tiny model
    python benchmarks/studies/gallery.py --only pictures        # of runs that are in the work folder
    python benchmarks/studies/gallery.py --only page            # from the figures that are kept in docs/gallery

What is done stays in the work folder, and is not done again. Pictures need Chromium (Debian: apt-get install chromium).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gallery_page
import gallery_pictures
import gallery_runs

PARTS = ("runs", "pictures", "page")


def main() -> None:
    options = parse()
    parts = options.only or PARTS
    if "runs" in parts:
        for name in gallery_runs.names() if options.all else gallery_runs.FIRST:
            gallery_page.keep(name, gallery_runs.make(options.work, name), options.work)
    if "pictures" in parts:
        gallery_pictures.take(options.work)
    if "page" in parts:
        gallery_page.write()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/gallery"), help="Where the runs are.")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="Some of the parts.")
    parser.add_argument("--all", action="store_true", help="Every recipe with a tiny model.")
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""make pages: write every generated page that is stale."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from tools.pages.generated import built_in_cards, generated_files, is_stale
from tools.pages.sources import PageError, read_nodes

ROOT = Path(__file__).parents[2]
logger = logging.getLogger("tools.pages")


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    written = 0
    try:
        for name, text in generated_files(ROOT, built_in_cards(), read_nodes()):
            if is_stale(ROOT / name, text):
                (ROOT / name).parent.mkdir(parents=True, exist_ok=True)
                (ROOT / name).write_text(text, encoding="utf-8")
                logger.info("wrote %s", name)
                written += 1
    except PageError as error:
        logger.error("%s", error)
        return 1
    logger.info("%d pages written", written)
    return 0


if __name__ == "__main__":
    sys.exit(main())

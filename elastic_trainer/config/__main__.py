"""`python -m elastic_trainer.config [docs|defaults]` prints a generated file."""

import sys

from elastic_trainer.config.reference import configuration_page, default_yaml

PAGES = {"docs": configuration_page, "defaults": default_yaml}

if __name__ == "__main__":
    page = PAGES.get(" ".join(sys.argv[1:]) or "docs")
    if page is None:
        sys.exit("usage: python -m elastic_trainer.config [docs|defaults]")
    sys.stdout.write(page())

"""``python -m fusegen``."""

import sys

from fusegen.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

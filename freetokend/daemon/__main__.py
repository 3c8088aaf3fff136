"""`python -m freetokend.daemon`."""

import sys

from freetokend.daemon.main import main

if __name__ == "__main__":
    sys.exit(main())

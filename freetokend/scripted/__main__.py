"""`python -m freetokend.scripted`."""

import sys

from freetokend.scripted.main import main

if __name__ == "__main__":
    sys.exit(main())

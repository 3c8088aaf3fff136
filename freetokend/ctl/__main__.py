"""`python -m freetokend.ctl` is `freetokenctl`."""

from __future__ import annotations

import sys

from freetokend.ctl.main import main

sys.exit(main())

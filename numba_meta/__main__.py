"""`python -m numba_meta` is the `numba-meta` command."""

import sys

from numba_meta.cli import main

sys.exit(main())

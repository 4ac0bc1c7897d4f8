"""One rank that generates for ever: `endless.py FOLDER MODEL`. Leaves `ready.RANK` once a token was made."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numba_meta as nm
from numba_meta.comm.failure import ranks
from numba_meta.errors import NumbaMetaError

folder, path = Path(sys.argv[1]), sys.argv[2]


def main() -> int:
    try:
        with ranks() as launch, nm.load(path, ctx_size=256, ranks=launch) as model:
            while True:
                model.generate_ids((5, 6, 7), 32, ignore_eos=True)
                (folder / f"ready.{os.environ['OMPI_COMM_WORLD_RANK']}").touch()
    except NumbaMetaError as error:
        print(f"numba-meta: {error}", file=sys.stderr, flush=True)
        return error.exit_status


if __name__ == "__main__":
    sys.exit(main())

"""One rank that generates for ever: `endless.py FOLDER MODEL [DEVICES]`. Leaves `ready.RANK` once a token was made."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numba_meta as nm
from numba_meta.comm.failure import ranks
from numba_meta.errors import NumbaMetaError

folder, path, devices = Path(sys.argv[1]), sys.argv[2], (sys.argv[3:] or ["cpu:0"])[0]


def main() -> int:
    try:
        with ranks() as launch, nm.load(path, devices, ctx_size=256, exact=True, ranks=launch) as model:
            while True:
                model.generate_ids((5, 6, 7), 32, ignore_eos=True)
                (folder / f"ready.{os.environ['OMPI_COMM_WORLD_RANK']}").touch()
    except NumbaMetaError as error:
        print(f"numba-meta: {error}", file=sys.stderr, flush=True)
        return error.exit_status


if __name__ == "__main__":
    sys.exit(main())

"""One rank that plays cases: `play.py FOLDER CASES.json`. Leaves what each gave in `played.RANK.json`; fails in one line."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from ranks.playing import Case, play

from numba_meta.comm.failure import ranks
from numba_meta.errors import NumbaMetaError

folder, cases = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
own = os.environ["OMPI_COMM_WORLD_RANK"]


def main() -> int:
    (folder / f"started.{own}").touch()
    try:
        with ranks() as launch:
            played = [play(Case(**{**case, **case["of_rank"].get(own, {})}), launch) for case in cases]
            (folder / f"played.{own}.json").write_text(json.dumps(played))
    except NumbaMetaError as error:
        print(f"numba-meta: {error}", file=sys.stderr, flush=True)
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main())

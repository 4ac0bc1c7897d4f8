"""The exactness gate over the whole product of `tests/transport/product.py`: every configuration by every way to deliver its cache.

    python benchmarks/exactness_product.py --minutes 10       # as much as that of it, in an order that the seed fixes
    python benchmarks/exactness_product.py --part 3/8         # one of eight parts, for as many machines

A row is a run of some 50 steps on a tiny model, compared to the bit with a cache on the devices. The product has a million rows: in a
part of it configurations come in random order, with some random ways of each, three in four for a ring. Ways that force the ordered path
twice over are left out. Ends with status 1 where bits differ, and names every such row.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from command_line import count, run_main
from transport.product import CONFIGURATION, ORDERED, WAY, Configuration, Gate, Way, synthetic_models
from transport.scenario import difference


def check(gate: Gate, configuration: Configuration, way: Way) -> str | None:
    """What is wrong with a row; None where nothing is."""
    played = gate.deliver(configuration, way)
    wrong = difference(played, gate.reference(configuration))
    return wrong or (None if played.paths <= way.expected_paths else f"the paths {played.paths} were taken, expected {way.expected_paths}")


def draw_ways(order: random.Random, n: int | None) -> list[Way]:
    """Ways in random order, three in four of them for a ring as long as there are any; `n` of them, or all."""
    ways = [Way(*values) for values in itertools.product(*WAY.values())]
    order.shuffle(ways)
    forced = {way: sum(getattr(way, name) == value for name, value in ORDERED) for way in ways}
    ring, ordered = ([way for way in ways if forced[way] == n_forced] for n_forced in (0, 1))
    if n is None:
        return ring + ordered
    return (ring[: n - n // 4] + ordered[: n // 4])[:n]


def part_of(text: str) -> tuple[int, int]:
    """`3/8`: the third of eight parts."""
    part, _, n_parts = text.partition("/")
    if not (part.isdecimal() and n_parts.isdecimal() and 1 <= int(part) <= int(n_parts)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a part like 3/8")
    return int(part), int(n_parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, help="stop after so long; without it, when all is done")
    parser.add_argument("--ways", type=count(), help="so many ways of each configuration; all by default")
    parser.add_argument("--part", type=part_of, default="1/1", help="I/N: part I of N")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    part, n_parts = options.part
    order = random.Random(options.seed)
    configurations = [Configuration(*values) for values in itertools.product(*CONFIGURATION.values())][part - 1 :: n_parts]
    order.shuffle(configurations)
    end = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
    n_rows = n_wrong = n_pipelined = 0
    n_all = len(configurations) * len(draw_ways(order, options.ways))
    print(f"{len(configurations)} configurations: {n_all} rows", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        models = synthetic_models(Path(folder))
        for configuration in configurations:
            gate = Gate(models)  # forgets the references of others
            for way in draw_ways(order, options.ways):
                if time.monotonic() > end:
                    break
                wrong = check(gate, configuration, way)
                n_rows += 1
                n_pipelined += "pipelined" in way.expected_paths
                if n_rows % 100 == 0:
                    print(f"{n_rows} rows, {n_wrong} wrong", flush=True)
                if wrong:
                    n_wrong += 1
                    print(f"WRONG: {wrong}: {configuration} {way}", flush=True)
            if time.monotonic() > end:
                break
    print(f"{n_rows} of {n_all} rows, {n_pipelined} of them for a ring: {n_wrong} wrong")
    return 1 if n_wrong else 0


if __name__ == "__main__":
    run_main(main)

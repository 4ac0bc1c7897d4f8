"""`numba-meta devices`: what is here to run on, and what is missing for more."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence

import click

from numba_meta.cli.machine import CpuReport, GpuReport, Requirement, cpu_report, cuda_requirements, gpu_reports, mpi_requirements
from numba_meta.devices.parse import format_bytes


@click.command(short_help="List what is here to run on.")
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def devices(as_json: bool) -> None:
    """List the devices of this machine, with memory and measured speed, and what CUDA and MPI would need.

    \b
    Examples:
      numba-meta devices
      numba-meta devices --json
    """
    cpu, gpus, cuda, mpi = cpu_report(), gpu_reports(), cuda_requirements(), mpi_requirements()
    if as_json:
        data = {
            "cpu:0": dataclasses.asdict(cpu),
            **{f"cuda:{index}": dataclasses.asdict(gpu) for index, gpu in enumerate(gpus)},
            "cuda": [dataclasses.asdict(requirement) for requirement in cuda],
            "mpi": [dataclasses.asdict(requirement) for requirement in mpi],
        }
        click.echo(json.dumps(data, ensure_ascii=False))
        return
    for line in (*cpu_lines(cpu), *gpu_lines(gpus), *missing_lines("cuda", cuda), *missing_lines("mpi", mpi)):
        click.echo(line)


def cpu_lines(cpu: CpuReport) -> Iterator[str]:
    """The CPU device for a reader."""
    yield f"cpu:0  {cpu.name}"
    yield f"       cores    {cpu.n_usable_cores} usable of {cpu.n_cores}"
    yield f"       kernels  {cpu.kernels}"
    yield f"       memory   {format_bytes(cpu.free_bytes)} free of {format_bytes(cpu.memory_bytes)}"
    yield f"       copies   {cpu.copy_bandwidth / 1e9:.1f} GB/s read and written"


def gpu_lines(gpus: Sequence[GpuReport]) -> Iterator[str]:
    """The CUDA devices for a reader."""
    for index, gpu in enumerate(gpus):
        yield f"cuda:{index} {gpu.name}"
        if gpu.problem:
            yield f"       {gpu.problem}"
            continue
        yield f"       compute  capability {gpu.capability}, {gpu.n_multiprocessors} multiprocessors"
        yield f"       memory   {format_bytes(gpu.free_bytes)} free of {format_bytes(gpu.memory_bytes)}"
        near = [f"cuda:{peer}" for peer in gpu.peers]
        far = [f"cuda:{other}" for other, report in enumerate(gpus) if other != index and other not in gpu.peers and not report.problem]
        if near:
            yield f"       peers    reads the memory of {', '.join(near)}"
        if far:
            yield f"       peers    {', '.join(far)} through host memory"


def missing_lines(name: str, requirements: Sequence[Requirement]) -> Iterator[str]:
    """What of `requirements` is here and what is not, with the remedy."""
    yield f"{name:<7}{'all there' if all(each.present for each in requirements) else 'needs more'}"
    for requirement in requirements:
        yield f"       {requirement.name:<15}{'found' if requirement.present else f'missing: {requirement.remedy}'}"

"""`numba-meta plan`: what a load would decide and how fast it would be, from the header of a file; no weight is read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import click

from numba_meta.cli.options import LOAD_OPTIONS, SEQUENCE_OPTIONS, LoadOptions, counts, finite, gathered
from numba_meta.cli.plan_report import forecast_data, forecast_lines
from numba_meta.cli.session import check_load
from numba_meta.cli.terminal import Progress, say
from numba_meta.errors import UsageError

if TYPE_CHECKING:
    from numba_meta.models.loading.planner import ModelForecast, Speeds
    from numba_meta.schedule.predict import DeviceSpeeds, Needs

SPEED = click.FloatRange(min=0, min_open=True)


@click.command(short_help="Say what a load would decide, and how fast it would be.")
@click.argument("model")
@click.option("-d", "--contexts", type=counts(0), metavar="N,…", help="Tokens before the step.  [default: 512,2048,8192 … all]")
@click.option("--weights-gbps", type=SPEED, callback=finite, metavar="X", help="GB/s at which weights are read.  [default: measured]")
@click.option("--attention-gbps", type=SPEED, callback=finite, metavar="X", help="GB/s at which K and V are read.  [default: measured]")
@click.option("--calibrate", is_flag=True, help="Measure this machine again.")
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
@gathered("load", LoadOptions, *LOAD_OPTIONS, *SEQUENCE_OPTIONS)
def plan(
    model: str,
    contexts: tuple[int, ...] | None,
    weights_gbps: float | None,
    attention_gbps: float | None,
    calibrate: bool,
    as_json: bool,
    load: LoadOptions,
) -> None:
    """Say what loading MODEL with these options would decide, and how long a step would take after several contexts.

    Only the file's header is read. How fast this machine is gets measured once, in a few seconds, and is remembered. A device's
    link is the one of its `link=`, in GB/s, else as fast as memory is copied. For CUDA devices, which need not be here, decisions
    alone are foreseen.

    \b
    Examples:
      numba-meta plan smollm2 --no-kv-offload --device "cpu:0?link=5.3,cpu:0?link=2.7"
      numba-meta plan gemma3 --device cpu:0,cpu:0 --tensor-split 70,30 --contexts 1024,4096
      numba-meta plan smollm2 -nkvo --weights-gbps 30 --attention-gbps 20 --json
      numba-meta plan smollm2 -nkvo --device "cuda:0?mem=24G"
    """
    progress = Progress()
    forecast, name = forecast_model(model, load, contexts, weights_gbps, attention_gbps, calibrate, progress)
    progress.clear()
    from numba_meta.schedule.calibrate import measured_at

    at = measured_at(forecast.load.n_threads) if forecast.speeds else None
    if as_json:
        click.echo(json.dumps(forecast_data(name, forecast, at), ensure_ascii=False))
        return
    for line in forecast_lines(name, forecast, at):
        click.echo(line)


def forecast_model(
    model: str,
    load: LoadOptions,
    contexts: tuple[int, ...] | None,
    weights_gbps: float | None,
    attention_gbps: float | None,
    renew: bool,
    progress: Progress,
) -> tuple[ModelForecast, str]:
    """The forecast of a model file and the file's name."""
    from numba_meta.devices.host_memory import available_bytes
    from numba_meta.models.architectures.description import describe_model
    from numba_meta.models.files.gguf import read_gguf
    from numba_meta.models.files.pull import resolve_model
    from numba_meta.models.loading.load_plan import LoadOptions as Options
    from numba_meta.models.loading.load_plan import available_cores, beyond_training
    from numba_meta.models.loading.planner import plan_transport_of_model
    from numba_meta.models.text.tokenizer_check import tokenizer_problem

    check_devices(load.devices, {"--weights-gbps": weights_gbps, "--attention-gbps": attention_gbps, "--calibrate": renew})
    options = Options(**check_load(load))
    path = resolve_model(model, progress)
    file = read_gguf(path)
    try:
        speeds = choose_speeds(weights_gbps, attention_gbps, renew)
        described = describe_model(file)
        problem = tokenizer_problem(file.metadata, described.config.shape.n_vocab)
        forecast = plan_transport_of_model(described, options, contexts, speeds, available_bytes(), available_cores())
    finally:
        file.close()
    if problem:
        say(f"numba-meta: {path.name}: {problem}; only ids can be given to this model")
    if warning := beyond_training(described.config, forecast.load.cache_shape):
        say(f"numba-meta: {warning}")
    return forecast, path.name


def check_devices(devices: str, speed_options: Mapping[str, float | bool | None]) -> None:
    """Raises `UsageError` for devices of several ranks, of several kinds, and for options of speeds where no times are foreseen."""
    from numba_meta.models.loading.load_plan import plan_devices

    if ";" in devices:
        raise UsageError(f"--device {devices} has lists of several ranks, and plan forecasts one process; give one rank's list, without ;")
    (specs,) = plan_devices(devices)
    given = [option for option, value in speed_options.items() if value]
    if given and specs[0].kind == "cuda":
        raise UsageError(f"{given[0]} is about how fast CPU devices are, and no times are foreseen for {specs[0].name}; leave it out")


def choose_speeds(weights_gbps: float | None, attention_gbps: float | None, renew: bool) -> Speeds:
    """Speeds as they were measured on this machine, but for those that were given."""
    from numba_meta.schedule.calibrate import calibrate, given_speeds, is_known

    def speeds(needs: Sequence[Needs], n_threads: Sequence[int]) -> Sequence[DeviceSpeeds]:
        if renew or not is_known(needs, n_threads):
            say("numba-meta: measuring how fast this machine is; --calibrate measures again, best when nothing else runs")
        measured = calibrate(needs, n_threads, renew)
        return given_speeds(needs, 1e9 * (weights_gbps or 0), 1e9 * (attention_gbps or 0), measured)

    return speeds

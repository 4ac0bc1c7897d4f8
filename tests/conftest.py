"""What every test shares: the two real models, a clean environment, hypothesis profiles, and slow tests after quick ones."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from synthetic import write_model

DATA = Path(__file__).parent / "data"
MODELS_VARIABLE = "NUMBA_META_TEST_MODELS"

# A shell's background job ignores Ctrl-C, and so would the programs that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline: a first call may compile a kernel, and CI machines are shared.
settings.register_profile("quick", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", parent=settings.get_profile("quick"), max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests run last, so that a whole run first tells what the quick ones say. Those for a GPU need one."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)
    for_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if for_gpu:
        from numba_meta.devices.cuda_driver import n_gpus

        there = n_gpus()
        for item in for_gpu:
            marker = item.get_closest_marker("gpu")
            needed = marker.args[0] if marker and marker.args else 1
            if there < needed:
                wanted, have = "a CUDA GPU" if needed == 1 else f"{needed} CUDA GPUs", there or "none"
                item.add_marker(pytest.mark.skip(reason=f"needs {wanted}; this machine has {have}"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how long each part took: the quick one has a limit of 15 minutes."""
    seconds = {"quick": 0.0, "slow": 0.0}
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds["slow" if "slow" in report.keywords else "quick"] += report.duration
    terminalreporter.write_line("time in tests: " + ", ".join(f"{part} {spent:.1f} s" for part, spent in seconds.items()))


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take away the user's own NUMBA_META_* settings but for where models lie; a test that needs one sets it."""
    for name in list(os.environ):
        if name.startswith("NUMBA_META_") and name not in (MODELS_VARIABLE, "NUMBA_META_CACHE"):
            monkeypatch.delenv(name)


def _real_model(name: str) -> Path:
    folder = os.environ.get(MODELS_VARIABLE)
    if folder:
        path = Path(folder) / f"{name}.gguf"
        if not path.is_file():
            pytest.fail(f"{MODELS_VARIABLE} is set to {folder}, which holds no {name}.gguf")
        return path
    from numba_meta.models.files.pull import resolve_model

    return resolve_model(name)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct, Q4_1: from the folder in NUMBA_META_TEST_MODELS, else the user's cache (pulled if missing)."""
    return _real_model("smollm2")


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """Gemma 3 270M, Q4_K_M: from the folder in NUMBA_META_TEST_MODELS, else the user's cache (pulled if missing)."""
    return _real_model("gemma3")


@pytest.fixture(scope="session")
def llama_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, 384 wide, 6 heads over 3 KV heads of 64, 512 neurons, 397 tokens; a context of 2,048."""
    path = tmp_path_factory.mktemp("uneven") / "llama.gguf"
    types = {"default": "q4_0", "attn_v": "q8_0"}
    return write_model(path, n_embd=384, n_head=6, n_head_kv=3, n_ff=512, context_length=2048, types=types)


@pytest.fixture(scope="session")
def gemma_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, 256 wide, 4 heads over one KV head of 64, with norms of Q and K and a sliding window; a context of 2,048."""
    path = tmp_path_factory.mktemp("uneven") / "gemma.gguf"
    return write_model(path, "gemma3", n_embd=256, n_head=4, n_head_kv=1, head_dim=64, n_ff=512, context_length=2048)


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """Reference outputs: `smollm2.json`, `gemma3.json`, `numpy_f32_*.json`, `ppl_text.txt`."""
    return DATA

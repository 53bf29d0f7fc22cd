"""The estimate beside what the real llama-server allocates: its own buffer lines, three contexts, two cache types."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from qmflask.askserver import AskError, ask, buffer_rows, free_port
from qmflask.cli import main
from qmflask.host import Host
from qmflask.memory.estimate import Estimate, Row, Settings, estimate
from qmflask.memory.gguf import GGUFError
from qmflask.memory.llama import read_command
from qmflask.memory.samples import MIB
from qmflask.modelfiles import read_model
from tests import llama
from tests.parts import other_gguf

CONTEXTS = (512, 4096, 32768)
#: What the issue asks for; the shapes that the replay knows exactly stay within a tenth of it.
ALLOWED, EXACT = 0.05, 0.005

MakeModel = Callable[..., Path]


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    folder = tmp_path_factory.mktemp("models")

    def make(name: str, *options: str) -> Path:
        path = folder / f"{name}.gguf"
        if not path.exists():
            writer = getattr(other_gguf, name, None)
            if writer is not None:
                writer(path)
            else:
                llama.make_gguf(path, *options)
        return path

    return make


def compare(server: Path, model: Path, *options: str) -> tuple[Estimate, int]:
    """The estimate for this command line, and the bytes that the server says it has allocated for it."""
    argv = [str(server), "-m", str(model), "--host", "127.0.0.1", "--port", str(free_port()), "-t", "1", "-ngl", "0"]
    argv += ["--no-warmup", *options]
    command = read_command(argv)
    assert command is not None
    draft = read_model(command.draft) if command.draft else None
    found = estimate(read_model(model), command.settings, None, draft, command.draft_settings)
    rows = ask(argv, {}, timeout=60)
    assert all(row.vram == 0 for row in rows)
    files = [(model, command.settings), *([(Path(command.draft), command.draft_settings)] if command.draft else [])]
    real = sum(row.ram for row in rows) - sum(newer_input(file, settings.micro_batch) for file, settings in files)
    print(f"{model.stem} {' '.join(options)}: estimated {found.ram / MIB:.2f} MiB, allocated {real / MIB:.2f} MiB")
    return found, real


def newer_input(model: Path, micro_batch: int) -> int:
    """What the stand-in's llama.cpp allocates more than the binary's older one: a second input for each batch."""
    return 0 if llama.is_binary() else 4 * read_model(model).number("embedding_length") * micro_batch


def within(found: Estimate, real: int, share: float) -> bool:
    return abs(found.ram - real) <= share * real + 0.02 * MIB


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("cache", ["f16", "q8_0"])
@pytest.mark.parametrize(
    "preset",
    ["tiny", "5m", "50m", *(pytest.param(n, marks=pytest.mark.heavy) for n in ("200m", "400m", "moe300m"))],
)
def test_generated_models(llama_server: Path, make_model: MakeModel, preset: str, cache: str, context: int) -> None:
    # The tiny preset's heads are too small for blocks of 32.
    heads = ("--head", "2", "--kv", "1") if preset == "tiny" and cache != "f16" else ()
    model = make_model(f"{preset}{len(heads)}", "--preset", preset, *heads)
    options = ("-c", str(context), "-np", "1", "-ctk", cache, "-ctv", cache)
    found, real = compare(llama_server, model, *options)
    assert within(found, real, EXACT if cache == "f16" else ALLOWED)


@pytest.mark.parametrize(
    "options",
    [
        ("-c", "4096"),
        ("-c", "4096", "-np", "4"),
        ("-c", "1000", "-np", "1", "-ub", "200"),
        ("-c", "4096", "-np", "3", "-kvu"),
        ("-np", "1"),
    ],
)
def test_slots_and_batches(llama_server: Path, make_model: MakeModel, options: tuple[str, ...]) -> None:
    assert within(*compare(llama_server, make_model("5m0", "--preset", "5m"), *options), EXACT)


@pytest.mark.parametrize("dtype", ["q8_0", "q4_0", "f32"])
def test_tensor_types(llama_server: Path, make_model: MakeModel, dtype: str) -> None:
    model = make_model(f"typed-{dtype}", "--preset", "5m", "--dtype", dtype)
    # Repacking copies quantised weights to suit the processor, which the header cannot tell.
    assert within(*compare(llama_server, model, "-c", "2048", "-np", "1", "--no-repack"), EXACT)


@pytest.mark.parametrize("options", [("--experts", "8"), ("--arch", "qwen3")])
def test_experts_and_other_layers(llama_server: Path, make_model: MakeModel, options: tuple[str, ...]) -> None:
    model = make_model("-".join(options).strip("-"), "--preset", "5m", *options)
    assert within(*compare(llama_server, model, "-c", "2048", "-np", "1"), EXACT)


@pytest.mark.parametrize("options", [("-c", "512"), ("-c", "4096")])
def test_without_flash_attention(llama_server: Path, make_model: MakeModel, options: tuple[str, ...]) -> None:
    model = make_model("5m0", "--preset", "5m")
    assert within(*compare(llama_server, model, *options, "-np", "1", "-fa", "off"), ALLOWED)


@pytest.mark.parametrize(
    "options",
    [
        ("-c", "512", "-np", "1"),
        ("-c", "8192", "-np", "1"),
        ("-c", "8192", "-np", "4"),
        ("-c", "8192"),
        ("-c", "8192", "-np", "1", "--swa-full"),
    ],
)
def test_sliding_windows(llama_server: Path, make_model: MakeModel, options: tuple[str, ...]) -> None:
    assert within(*compare(llama_server, make_model("gemma3"), *options), EXACT)


@pytest.mark.parametrize("name", ["lfm2", "mamba"])
@pytest.mark.parametrize("options", [("-c", "512", "-np", "1"), ("-c", "8192", "-np", "4")])
def test_hybrid_and_recurrent_models(
    llama_server: Path, make_model: MakeModel, name: str, options: tuple[str, ...]
) -> None:
    assert within(*compare(llama_server, make_model(name), *options), ALLOWED)


@pytest.mark.parametrize(
    "options",
    [
        ("-c", "512", "-np", "1"),
        ("-c", "8192", "-np", "1"),
        ("-c", "8192", "-np", "4"),
        ("-c", "8192", "-np", "1", "-ctk", "q8_0", "-ctv", "q8_0"),
    ],
)
def test_latent_attention(llama_server: Path, make_model: MakeModel, options: tuple[str, ...]) -> None:
    assert within(*compare(llama_server, make_model("deepseek2"), *options), ALLOWED)


@pytest.mark.parametrize(
    "shape",
    [
        (768, 3072, 12, 12, 224, 16),
        pytest.param((1024, 4096, 24, 16, 336, 14), marks=pytest.mark.heavy),
        pytest.param((1152, 4304, 27, 16, 896, 14), marks=pytest.mark.heavy),
    ],
    ids=lambda shape: "-".join(map(str, shape)),
)
def test_a_projector(llama_server: Path, make_model: MakeModel, tmp_path: Path, shape: tuple[int, ...]) -> None:
    """The server tells what it will take before it loads it."""
    model, path = make_model("5m0", "--preset", "5m"), tmp_path / "projector.gguf"
    other_gguf.projector(path, *shape, out=192)
    argv = [str(llama_server), "-m", str(model), "--mmproj", str(path), "--host", "127.0.0.1", "-c", "512", "-ngl", "0"]
    rows = ask([*argv, "--port", str(free_port()), "-t", "2", "-np", "1"], {}, timeout=100)
    told = next(row.ram for row in rows if row.name == "projector")
    found = estimate(read_model(model), Settings(gpu_layers=0), read_model(path)).rows[-1]
    print(f"projector {shape}: estimated {found.ram / MIB:.2f} MiB, told {told / MIB:.2f} MiB")
    assert found.name == "projector" and abs(found.ram - told) <= ALLOWED * told


def test_a_draft_model(llama_server: Path, make_model: MakeModel) -> None:
    model, draft = make_model("50m0", "--preset", "50m"), make_model("5m0", "--preset", "5m")
    assert within(*compare(llama_server, model, "-c", "4096", "-np", "1", "-md", str(draft), "-ngld", "0"), ALLOWED)


def test_what_a_running_server_holds(llama_server: Path, make_model: MakeModel) -> None:
    """The measured figure (issue 4): anonymous memory and the share of files, within 10 % of the kernel's own."""
    model = make_model("50m0", "--preset", "50m")
    port = free_port()
    argv = [str(llama_server), "-m", str(model), "--host", "127.0.0.1", "--port", str(port), "-c", "4096", "-np", "1"]
    process = subprocess.Popen([*argv, "-t", "1"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        assert any("listening on" in line for line in process.stderr), "the server is up"
        measured = Host().tree([process.pid])
        status = Path(f"/proc/{process.pid}/status").read_text()
        anonymous = int(status.split("RssAnon:")[1].split()[0]) * 1024
        rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
        share = int(rollup.split("Pss_File:")[1].split()[0]) * 1024
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
    assert measured is not None
    assert abs(measured.held - (anonymous + share)) <= 0.1 * (anonymous + share)
    assert measured.held > 78e6 + 48 * MIB, "the file and the cache"


def test_a_split_model_is_read_as_one(make_model: MakeModel, tmp_path: Path) -> None:
    whole = read_model(make_model("5m0", "--preset", "5m"))
    import gguf
    import numpy as np

    for number in (1, 2):
        writer = gguf.GGUFWriter(str(tmp_path / f"part-{number:05d}-of-00002.gguf"), "llama")
        writer.add_uint16("split.count", 2)
        writer.add_tensor(f"blk.{number}.x.weight", np.zeros((4, 8), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    found = read_model(tmp_path / "part-00001-of-00002.gguf")
    assert [tensor.size for tensor in found.tensors] == [128, 128]
    with pytest.raises(GGUFError, match="name the first"):
        read_model(tmp_path / "part-00002-of-00002.gguf")
    (tmp_path / "part-00002-of-00002.gguf").unlink()
    with pytest.raises(GGUFError, match="part-00002-of-00002"):
        read_model(tmp_path / "part-00001-of-00002.gguf")
    assert whole.splits == 1


def test_files_that_cannot_be_read_say_why(tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").touch()
    (tmp_path / "other.gguf").write_text("hello, this is no model")
    for name, why in (("empty", "empty"), ("other", "not a GGUF file"), ("missing", "No such file")):
        with pytest.raises(GGUFError, match=why):
            read_model(tmp_path / f"{name}.gguf")


def test_a_server_that_cannot_load_says_so(llama_server: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(AskError, match="the server ended with exit code 1"):
        ask([str(llama_server), "-m", str(broken), "--port", str(free_port())], {}, 30)
    with pytest.raises(AskError, match=r"SIGILL .*built for another CPU"):
        ask(["sh", "-c", "kill -ILL $$"], {}, 30)
    with pytest.raises(AskError, match="cannot start"):
        ask(["/no/such/server"], {}, 30)
    with pytest.raises(AskError, match="not up in time"):
        ask(["sh", "-c", "sleep 60"], {}, 0.1)


def test_buffers_on_cards_and_on_the_host() -> None:
    log = (
        "load_tensors:        CUDA0 model buffer size =  4000.50 MiB\n"
        "load_tensors:   CPU_Mapped model buffer size =   100.00 MiB\n"
        "llama_kv_cache:      CUDA0 KV buffer size =   512.00 MiB\n"
        "llama_kv_cache:      CUDA1 KV buffer size =   512.00 MiB\n"
        "sched_reserve:       CUDA0 compute buffer size =   300.00 MiB\n"
        "sched_reserve:   CUDA_Host compute buffer size =    20.00 MiB\n"
    )
    assert [(row.name, row.vram // MIB, row.ram // MIB) for row in buffer_rows(log)] == [
        ("weights", 4000, 100),
        ("cache", 1024, 0),
        ("compute buffer", 300, 20),
    ]


def test_a_projector_is_told_apart_and_where_it_is() -> None:
    log = "srv: [mtmd] estimated worst-case memory usage of mmproj is 599.28 MiB\nclip_ctx: CLIP using {} backend\n"
    size = round(599.28 * MIB)
    assert buffer_rows(log.format("CPU")) == [Row("projector", 0, size)]
    assert buffer_rows(log.format("CUDA0")) == [Row("projector", size, 0)]


# --- the command --------------------------------------------------------------------------------------------------


def test_the_command_prints_a_table_and_keys(make_model: MakeModel) -> None:
    model = make_model("50m0", "--preset", "50m")
    done = CliRunner().invoke(main, ["estimate", str(model), "--ctx", "32768", "--parallel", "1"])
    assert done.exit_code == 0, done.output
    assert "cache f16/f16" in done.output and "384.0 MiB" in done.output
    assert "estVramGB: 0.5" in done.output


def test_asking_the_server_agrees(llama_server: Path, make_model: MakeModel) -> None:
    model = make_model("5m0", "--preset", "5m")
    words = ["estimate", str(model), "--ctx", "4096", "--ngl", "0", "--json"]
    told = json.loads(CliRunner().invoke(main, words).output)
    asked = CliRunner().invoke(main, [*words, "--ask-server", "--server", str(llama_server)])
    assert asked.exit_code == 0, asked.output
    assert json.loads(asked.output)["ram"] - newer_input(model, 512) == pytest.approx(told["ram"], rel=EXACT)


def test_all_models_of_a_configuration(make_model: MakeModel, tmp_path: Path) -> None:
    model = make_model("5m0", "--preset", "5m")
    config = tmp_path / "config.yaml"
    config.write_text(
        "models:\n"
        f"  gpu: {{cmd: 'llama-server -m {model} -c 4096 -np 1 --port ${{PORT}}', estVramGB: 3}}\n"
        f"  cpu: {{cmd: 'llama-server -m {model} -c 512 --port ${{PORT}}'}}\n"
        "  other: {cmd: 'serve --port ${PORT}'}\n"
        "groups: {small: {pool: ram, members: [cpu]}}\n"
    )
    done = CliRunner().invoke(main, ["estimate", "--config", str(config), "--json"])
    assert done.exit_code == 1, "one of them could not be estimated"
    found = json.loads(done.stdout)
    assert found["gpu"]["vram"] > 15 * MIB
    assert (found["cpu"]["vram"], found["cpu"]["ram"] > 10 * MIB) == (0, True)
    assert "names no GGUF file" in found["other"]["error"]
    text = CliRunner().invoke(main, ["estimate", "--config", str(config)])
    assert "estVramGB is 3 now" in text.stdout
    assert "not estimated: other" in text.stderr


@pytest.mark.parametrize("words", [[], ["a.gguf", "--config", "b"], ["a.gguf", "--ubatch", "0"]])
def test_wrong_usage(words: list[str]) -> None:
    assert CliRunner().invoke(main, ["estimate", *words]).exit_code == 2

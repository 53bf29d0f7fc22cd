"""`qmflask init`: names, kinds, card or processor, and text that loads; on headers made here and on files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from qmflask.cli import firstconfig, main
from qmflask.cli.firstconfig import Found, decide, kind_of, names_of
from qmflask.config import Source, load
from qmflask.memory.gguf import Header
from qmflask.memory.samples import GIB
from tests.unit.test_estimate import header_bytes


def header(context: int = 4096, **more: Any) -> Header:
    """A llama of two layers whose weights take 1 GiB."""
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.context_length": context,
        "llama.embedding_length": 1024,
        "llama.feed_forward_length": 4096,
        "llama.attention.head_count": 16,
        "llama.attention.head_count_kv": 4,
        **{key.replace("__", "."): value for key, value in more.items()},
    }
    from qmflask.memory.gguf import Tensor

    tensors = [Tensor(f"blk.{n}.ffn_up.weight", (1024, 4096), "f16", GIB // 2) for n in (0, 1)]
    tensors += [Tensor(name, (1024, 1000), "f16", 2_048_000) for name in ("token_embd.weight", "output.weight")]
    return Header(3, metadata, tuple(tensors))


def test_names() -> None:
    paths = ["/m/Qwen3-30B-A3B-Q4_K_M.gguf", "/m/big-00001-of-00003.gguf", "/m/x-Q4_0.gguf", "/m/x-Q8_0.gguf"]
    assert names_of(paths) == ["qwen3-30b-a3b", "big", "x-q4_0", "x-q8_0"]
    assert names_of(["/a/m-UD-Q4_K_XL.gguf", "/b/n.F16.gguf"]) == ["m", "n"]
    assert names_of(["/a/x.gguf", "/b/x.gguf"]) == ["x", "x-2"]


def test_which_files_are_models() -> None:
    assert firstconfig.is_model("a.gguf") and firstconfig.is_model("a-00001-of-00002.gguf")
    assert not firstconfig.is_model("a-00002-of-00002.gguf") and not firstconfig.is_model("mmproj-a.gguf")
    assert firstconfig.is_projector("mmproj-a.gguf") and not firstconfig.is_model("a.txt")


def test_kinds() -> None:
    assert kind_of(header()) == "chat"
    assert kind_of(header(llama__pooling_type=1)) == "embedding"
    assert kind_of(header(llama__pooling_type=4)) == "reranker"


@pytest.mark.parametrize(
    ("vram", "ram", "pool"), [(8, 16, "vram"), (1, 16, "ram"), (0, 16, "ram"), (8, 0, "vram"), (1, 1, None)]
)
def test_card_or_processor(vram: int, ram: int, pool: str | None) -> None:
    entry = decide("m", Found("/m.gguf", header()), 16384, vram * GIB, ram * GIB)
    assert (entry.pool if entry.estimate else None) == pool
    if entry.estimate:
        assert entry.context == 4096, "no more than the model knows"


def test_a_smaller_context_before_the_processor() -> None:
    wide = decide("m", Found("/m.gguf", header(1 << 20)), 1 << 20, 64 * GIB, 0)
    narrow = decide("m", Found("/m.gguf", header(1 << 20)), 1 << 20, 2 * GIB, 0)
    assert wide.context == 1 << 20 and narrow.pool == "vram" and 4096 <= narrow.context < 1 << 20
    assert narrow.estimate is not None and narrow.estimate.vram <= 2 * GIB


def test_text_loads_and_says_what_was_decided() -> None:
    found = [Found("/models/a b: #1.gguf", header()), Found("/e.gguf", header(llama__pooling_type=1))]
    entries = [decide(name, one, 4096, 8 * GIB, 16 * GIB) for name, one in zip(("a: b", "e"), found, strict=True)]
    entries.append(decide("cpu", Found("/c.gguf", header()), 4096, 0, 16 * GIB))
    entries.append(decide("huge", Found("/h.gguf", header()), 4096, 1, 1))
    text = firstconfig.text(entries, "/opt/llama-server", 8 * GIB, 16 * GIB, ["x.gguf: not a GGUF file"])
    config = load([Source("f", text)], {}, strict=True).config
    assert list(config.models) == ["a: b", "e", "cpu"]
    assert config.models["a: b"].launch(5).argv[-6:] == ("-m", "/models/a b: #1.gguf", "-c", "4096", "-ngl", "99")
    assert "--embeddings" in config.models["e"].launch(5).argv and config.models["e"].group == "small"
    assert config.models["cpu"].pool == "ram" and config.models["cpu"].est_ram > GIB
    assert config.groups["small"].persistent and config.vram_budget == 8 * GIB
    assert "# left out: x.gguf" in text and '# "huge"' in text


def test_budgets_leave_something() -> None:
    vram, ram = firstconfig.budgets(24 * GIB, 64 * GIB)
    assert (vram / GIB, ram / GIB) == (23.5, 48) and firstconfig.budgets(0, GIB) == (0, GIB // 2)


def test_the_command(tmp_path: Path) -> None:
    folder, target = tmp_path / "models", tmp_path / "qmflask.yaml"
    folder.mkdir()
    args = ["init", str(folder), "-o", str(target), "--vram", "8", "--ram", "16", "--server", "no-such-server"]
    (folder / "broken.gguf").write_bytes(b"nothing")
    result = CliRunner().invoke(main, args)
    assert result.exit_code == 1 and "no GGUF model" in result.output and not target.exists()
    metadata = {"general.architecture": "llama", "llama.block_count": 1, "llama.embedding_length": 64}
    data = header_bytes(metadata | {"llama.attention.head_count": 4}, {"token_embd.weight": ((64, 32), 1)})
    (folder / "Tiny-Q8_0.gguf").write_bytes(data + bytes(4096))
    result = CliRunner().invoke(main, args)
    assert result.exit_code == 0, result.output
    assert f"qmflask serve --config {target}" in result.output and "no-such-server is not in PATH" in result.output
    document = yaml.safe_load(target.read_text())
    assert list(document["models"]) == ["tiny"] and document["vramBudgetGB"] == 8
    assert CliRunner().invoke(main, args).exit_code == 1, "a file that is there is kept"
    assert CliRunner().invoke(main, [*args, "--force"]).exit_code == 0

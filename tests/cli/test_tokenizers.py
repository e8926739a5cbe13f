"""A model whose tokenizer cannot be loaded is one sentence, for every command that takes a prompt."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from hicache_ext.cli.main import main
from hicache_ext.config.model import ExtraConfig
from hicache_ext.config.render import as_yaml

pytestmark = pytest.mark.skipif(find_spec("sglang") is None, reason="missing: the package sglang")


@pytest.mark.parametrize("command", ["explain", "warm"])
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("nowhere", "--model: '{model}': there is no such directory"),
        ("empty", "--model: '{model}' holds no tokenizer (tokenizer.json, tokenizer_config.json, ...)"),
        ("config.json", "--model: '{model}' is a file"),
    ],
)
def test_a_model_without_a_tokenizer_is_one_sentence_that_names_what_is_missing(
    command: str, name: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "prompt.txt").write_text("Once upon a time")
    file = tmp_path / "hicache.yaml"
    tiers = {name: {"type": "file", "path": str(tmp_path / name), "capacity": "64MiB"} for name in ("near", "far")}
    file.write_text(as_yaml(ExtraConfig.around({"tiers": tiers, "promote_to": "near"})))
    model = str(tmp_path / name)
    assert main([command, str(file), "--prompt", str(tmp_path / "prompt.txt"), "--model", model]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == sentence.format(model=model) + (
        "; allowed: the directory or name of the model"
    )


@pytest.mark.thorough
def test_a_prompt_is_tokenized_in_a_process_of_its_own_beside_a_torchvision_that_was_built_for_cuda(
    tmp_path: Path,
) -> None:
    from tests.rigs.tiny_model import make_tiny_model

    model = make_tiny_model(tmp_path / "model")
    (tmp_path / "prompt.txt").write_text("Once upon a time")
    code = (
        "import sys; from hicache_ext.cli.inputs import tokenizer_of; "
        f"print(len(tokenizer_of({str(model)!r}).encode('Once upon a time')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert not done.returncode, done.stderr
    assert int(done.stdout) > 0

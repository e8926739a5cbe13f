"""What a codec does to a model, measured on a tiny one: figures, bounds, and what is refused."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hicache_ext.cli import codec_check
from hicache_ext.cli.inputs import our_texts
from hicache_ext.cli.main import main
from hicache_ext.errors import UnsupportedError
from tests.cli.test_every_command import documented, fields_of, is_documented
from tests.rigs.tiny_model import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.sglang]

pytest.importorskip("transformers")
pytest.importorskip("zstandard")

Check = Callable[..., tuple[int, Any, str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture
def check(model: str, capsys: pytest.CaptureFixture[str]) -> Check:
    """The exit code, the document, and what was said on standard error."""

    def check_(*words: str) -> tuple[int, Any, str]:
        code = main(["codec-check", model, "--page-size", "16", *words, "--json"])
        printed = capsys.readouterr()
        return code, json.loads(printed.out) if printed.out else None, printed.err

    return check_


@pytest.mark.thorough
def test_a_lossless_codec_changes_nothing_at_all(check: Check) -> None:
    code, report, _ = check("--codec", "lossless")
    assert code == 0
    assert (report["mean_kl"], report["agreement"], report["worst_kl"]) == (0.0, 1.0, 0.0)
    assert report["predictions"] >= 2000 and report["ratio"] > 1.1
    assert report["configuration"] == {"tiers": {"NAME": {"codec": "lossless"}}}


@pytest.mark.thorough
@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_a_lossy_codec_within_the_bounds_is_given_a_configuration(check: Check, codec: str) -> None:
    code, report, _ = check("--codec", codec, "--max-kl", "0.5", "--min-agreement", "0.1")
    assert code == 0
    assert report["mean_kl"] > 0 and report["ratio"] > 1.9
    assert report["worst_kl"] == max(text["worst_kl"] for text in report["texts"])
    assert sum(text["predictions"] for text in report["texts"]) == report["predictions"]
    assert report["configuration"] == {"tiers": {"NAME": {"codec": codec}}}
    assert all(is_documented(field, documented()["codec-check"]) for field in fields_of(report))


@pytest.mark.thorough
@pytest.mark.parametrize("bound", [("--max-kl", "1e-12"), ("--min-agreement", "1")])
def test_a_missed_bound_is_one_sentence_exit_code_1_and_no_configuration(check: Check, bound: tuple[str, str]) -> None:
    code, report, said = check("--codec", "fp8", *bound)
    assert code == 1 and report["configuration"] is None
    assert said.strip() == report["problem"] and report["problem"].startswith(f"fp8 misses {bound[0]}")


@pytest.mark.thorough
def test_without_a_bound_a_lossy_codec_is_measured_and_not_configured(check: Check, model: str, capsys: Any) -> None:
    assert check("--codec", "int8")[1]["configuration"] is None
    assert main(["codec-check", model, "--page-size", "16"]) == 0
    assert "name what you bear" in capsys.readouterr().out


def test_too_few_predictions_tell_nothing(check: Check, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("A few words, and no more. " * 10)
    code, report, said = check("--prompts", str(file), "--max-kl", "1")
    assert code == 1 and report["configuration"] is None and "too few to tell" in said


@pytest.mark.parametrize(
    ("content", "words", "sentence"),
    [
        ("", (), "--prompts: the file is empty"),
        ("short", (), "--prompts: no text is long enough"),
        ("x", ("--max-kl", "-1"), "--max-kl: '-1' is not accepted"),
        ("x", ("--min-agreement", "97"), "--min-agreement: '97' is not accepted"),
        ("x", ("--page-size", "0"), "--page-size: '0' is not accepted"),
    ],
)
def test_what_cannot_be_used_is_refused_with_a_sentence(
    check: Check, tmp_path: Path, content: str, words: tuple[str, ...], sentence: str
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text(content)
    code, report, said = check("--prompts", str(file), *words)
    assert (code, report) == (2, None) and said.startswith(sentence)


def test_a_model_that_is_not_there_is_one_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["codec-check", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert said.startswith("the model") and "Traceback" not in said


def test_prefixes_fit_sliding_windows_and_every_kind_of_text_has_predictions(model: str) -> None:
    under_test = codec_check.ModelUnderTest(model)
    for text in our_texts().values():
        pieces = list(codec_check._pieces(under_test.tokens(text), 64))
        assert pieces and all(len(tokens) <= 896 for tokens in pieces)


def test_predictions_of_nan_are_refused_and_never_taken_for_equal() -> None:
    logits = torch.tensor([[1.0, 2.0, -math.inf], [0.0, 1.0, 2.0]])
    broken = logits.clone()
    broken[1] = math.nan
    assert codec_check._agreement(logits, logits).kl == 0
    for pair in ((logits, broken), (broken, logits), (broken, broken)):
        with pytest.raises(UnsupportedError, match="NaN"):
            codec_check._agreement(*pair)


@pytest.mark.thorough
def test_a_process_that_was_prepared_for_sglang_measures_the_same(check: Check, model: str) -> None:
    program = (
        "import sys\n"
        "from hicache_ext.testing.sglang_cpu import prepare_process\n"
        "prepare_process()\n"
        "from hicache_ext.cli.main import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    words = ("--page-size", "16", "--codec", "fp8", "--json")
    prepared = subprocess.run(
        [sys.executable, "-c", program, "codec-check", model, *words], capture_output=True, text=True, timeout=300
    )
    assert prepared.returncode == 0, prepared.stderr[-2000:]
    assert json.loads(prepared.stdout)["texts"] == check(*words[2:4])[1]["texts"]

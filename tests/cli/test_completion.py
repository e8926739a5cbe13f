"""``hicache-ext completion``: in a real bash; for the other shells, that their scripts are sound."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from hicache_ext.cli.main import COMMANDS, main
from tests.cli.commands import EVERY_COMMAND

BASH = """
source {script}
complete -p hicache-ext >/dev/null || exit 1
function=$(complete -p hicache-ext | sed 's/.*-F \\([^ ]*\\).*/\\1/')
COMP_WORDS=({words} ""); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
COMP_LINE="${{COMP_WORDS[*]}}"; COMP_POINT=${{#COMP_LINE}}
$function hicache-ext "" "${{COMP_WORDS[COMP_CWORD-1]}}" 2>/dev/null
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("hicache-ext", {command.name for command in COMMANDS}),
        ("hicache-ext config", {"check", "render", "schema"}),
        ("hicache-ext bench", {"file", "pool", "kernels", "multiturn", "compare"}),
        ("hicache-ext explain --role", {"prefill", "decode", "both"}),
        ("hicache-ext stat", {"hicache.yaml", "tokens.json"}),
    ],
)
def test_bash_offers_commands_values_and_files(
    words: str, offered: set[str], workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", "bash"]) == 0
    script = workplace / "completion.bash"
    script.write_text(capsys.readouterr().out)
    text = BASH.format(script=shlex.quote(str(script)), words=words)
    done = subprocess.run(["bash", "--norc", "-c", text], capture_output=True, text=True, check=True)
    found = set(done.stdout.split())
    assert offered <= found if "stat" in words else offered == found


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_for_each_shell_knows_every_command_and_is_sound(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert [name for command in EVERY_COMMAND for name in command.split() if name not in script] == []
    if shutil.which(shell) is not None:
        subprocess.run([shell, "-n"], input=script, text=True, check=True, capture_output=True)

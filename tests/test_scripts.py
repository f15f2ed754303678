"""scripts/*.sh without a network: fake programs in the places of Python, git and nvidia-smi record what is asked for.

They also stand in for systems that the tests do not run on: a macOS without `timeout`, a Git Bash on Windows.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIB = ROOT / "scripts" / "lib.sh"

pytestmark = pytest.mark.skipif(not shutil.which("bash") or os.name == "nt", reason="needs bash")

# With $NO_OLD_TORCHVISION it refuses 0.16.2, as pip does on Python 3.12 and newer. It imports any package it accepted.
# $TORCH is the version of torch that it has. Its lines end as on Windows.
PYTHON = """#!/usr/bin/env bash
case "$*" in
    *sys.version_info*) exit 0 ;;
    *'{8: "<3.5"'*) printf '<3.7\\r\\n' ;;
    "-c "*"from importlib.metadata"*) printf 'torch==%s\\r\\n' "${TORCH:-2.13.0}" ;;
    "-c import "*) grep -q "${2#import }" "$CG_HOME/asked" ;;
    *torchvision==0.16.2*) [ -z "${NO_OLD_TORCHVISION:-}" ] && echo "$@" >>"$CG_HOME/asked" ;;
    "-m pip install"*) echo "$@" >>"$CG_HOME/asked" ;;
esac
"""
# What Windows has in the place of a Python that is not installed.
STORE_STUB = 'echo "Python was not found; run without arguments to install from the Microsoft Store" >&2\nexit 49'
OLD = 'case "$*" in *version_info*) exit 1 ;; esac'


class Machine:
    """A folder of programs that is the whole PATH, and a home of the environment."""

    def __init__(self, folder: Path) -> None:
        self.programs = folder / "programs"
        self.home = folder / "home"
        self.programs.mkdir()
        self.home.mkdir()
        needed = "bash env cat cksum cp dirname basename grep head mkdir mv rm sed sleep sort tail touch tr chmod"
        for name in needed.split():
            (self.programs / name).symlink_to(shutil.which(name))
        self.program("uname", "echo Linux")

    def program(self, name: str, text: str) -> None:
        """Make a program of bash's text."""
        path = self.programs / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!{shutil.which('bash')}\n{text}\n")
        path.chmod(0o755)

    def python(self, bin_folder: str = "bin") -> None:
        """Put the fake Python into the environment."""
        path = self.home / "venv" / bin_folder / "python"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(PYTHON)
        path.chmod(0o755)

    def bash(self, command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a command after lib.sh; whether it fails is for the test to say."""
        home = str(self.home)
        variables = {"PATH": str(self.programs), "HOME": home, "COMPILED_GRAPHS_HOME": home, "CG_HOME": home}
        return subprocess.run(
            ["bash", "-c", f'. "{LIB}"; {command}'],
            env={**variables, **environment},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def noted(self, name: str) -> str:
        """Return what the fakes wrote into a file. No argument of theirs may have kept the end of a line of Windows."""
        path = self.home / name
        text = path.read_bytes().decode() if path.exists() else ""
        assert "\r" not in text
        return text


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


@pytest.fixture
def installed(machine, tmp_path):
    """Return a function that runs `install_comfyui` on a checkout and returns the arguments that pip got."""
    machine.python()
    comfyui = tmp_path / "ComfyUI"
    comfyui.mkdir()
    (comfyui / "requirements.txt").write_text("torch\ntorchvision\naiohttp>=3.11.8\ncomfy-kitchen==0.2\n")

    def install(**environment: str) -> list[str]:
        done = machine.bash(f'install_comfyui "{comfyui}"', **environment)
        assert done.returncode == 0, done.stderr
        return machine.noted("asked").split()

    return install


@pytest.mark.parametrize("no_old_torchvision", ["", "1"], ids=["python 3.11", "python 3.12 and newer"])
def test_unnamed_imports_of_comfyui_are_installed(installed, no_old_torchvision):
    """ComfyUI imports packages that its requirements do not name. They are installed on every Python."""
    asked = installed(NO_OLD_TORCHVISION=no_old_torchvision)
    assert {"requests", "torchsde", "spandrel"} <= set(asked)
    assert ("torchvision==0.16.2" in asked) is not bool(no_old_torchvision)


def test_a_second_run_installs_nothing(installed):
    assert installed() == installed()


def test_an_index_of_torch_is_that_of_its_companions(installed):
    asked = " ".join(installed(NO_OLD_TORCHVISION="1", TORCH_INDEX="https://torch.example", TORCH="2.13.0+cu130"))
    for package in ("torchaudio", "torchvision"):
        assert re.search(rf"--index-url https://torch\.example (?:--no-deps|-c \S+) {package}\b", asked)
    assert "--index-url https://torch.example --no-deps torchsde" not in asked


# Which Python


def venv_maker(machine: Machine, name: str) -> None:
    """Make a Python of this name that can make environments, in which the fake Python is."""
    copy = machine.programs / "fake-python"
    copy.write_text(PYTHON)
    copy.chmod(0o755)
    machine.program(
        name,
        'echo "${0##*/} $*" >>"$CG_HOME/called"\n'
        '[ "${1:-}" != -3 ] || shift\n'
        '[ "${2:-}" = venv ] || exit 0\n'
        'mkdir -p "$3/${VENV_BIN:-bin}"\n'
        'cp "${0%/*}/fake-python" "$3/${VENV_BIN:-bin}/python"',
    )


@pytest.mark.parametrize(
    ("programs", "taken"),
    [
        ({"python3": "good", "py": "good"}, "python3 -m venv"),
        ({"python3": "stub", "py": "good", "python": "stub"}, "py -3 -m venv"),
        ({"python3": "stub", "python": "good"}, "python -m venv"),
        ({"python3": "old", "python": "old", "python3.12": "good"}, "python3.12 -m venv"),
    ],
    ids=["Linux", "Windows, python3 is the Store's stub", "Windows without py", "macOS, python3 is Xcode's 3.9"],
)
def test_the_first_python_that_runs_is_taken(machine, programs, taken):
    for name, kind in programs.items():
        if kind == "good":
            venv_maker(machine, name)
        else:
            machine.program(name, STORE_STUB if kind == "stub" else OLD)
    done = machine.bash("make_venv")
    assert done.returncode == 0, done.stderr
    assert taken in machine.noted("called")
    assert taken.partition(" -m")[0] in done.stdout


def test_without_a_python_one_sentence_says_so(machine):
    for name in ("python3", "python"):
        machine.program(name, STORE_STUB)
    done = machine.bash("make_venv")
    assert done.returncode == 1
    assert done.stderr.startswith("error: Python 3.10 or newer is needed")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(("named", "why"), [("nowhere", "no such program"), ("mine", "older than 3.10")])
def test_a_python_that_was_named_and_is_none_is_refused(machine, named, why):
    venv_maker(machine, "python3")
    machine.program("mine", OLD)
    done = machine.bash("make_venv", PYTHON=named)
    assert done.returncode == 1
    assert why in done.stderr
    assert not machine.noted("called")


def test_on_windows_the_environments_programs_are_in_scripts(machine):
    venv_maker(machine, "py")
    done = machine.bash('make_venv && echo "$CG_HOME/venv/$BIN/python"', OS="Windows_NT", VENV_BIN="Scripts")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("/venv/Scripts/python\n")


# Which torch


def nvidia(machine: Machine, answer: str) -> None:
    machine.program("nvidia-smi", f'[ "$1" = -L ] || printf "{answer}"')


@pytest.mark.parametrize(
    ("answer", "index"),
    [
        (r"581.29, 12.0\r\n581.29, 8.9\r\n", "cu130"),
        (r"572.16, 8.9\r\n", "cu128"),
        (r"581.29, 6.1\r\n", "cu126"),
        (r"Field compute_cap is not valid\n", "cu128"),
    ],
    ids=["a new driver", "an older driver", "Pascal", "a driver that says nothing"],
)
def test_windows_gets_torch_with_cuda_from_its_own_index(machine, answer, index):
    """The package index's torch for Windows is for the CPU."""
    machine.python("Scripts")
    nvidia(machine, answer)
    done = machine.bash("install_torch", OS="Windows_NT", TORCH="2.10.0")
    assert done.returncode == 0, done.stderr
    torch, triton = machine.noted("asked").splitlines()
    assert torch.endswith(f"--index-url https://download.pytorch.org/whl/{index} torch>=2.8")
    assert triton.endswith("triton-windows<3.7")
    assert "index-url" not in triton


@pytest.mark.parametrize(
    ("system", "gpu", "environment", "asked"),
    [
        ("MINGW64_NT-10.0-26100", False, {"OS": "Windows_NT"}, "torch>=2.8"),
        ("Darwin", False, {}, "torch>=2.8"),
        ("Linux", True, {}, "torch>=2.8"),
        ("Linux", False, {}, "torch==2.13.0+cpu"),
        ("Linux", False, {"TORCH_INDEX": "https://torch.example"}, "--index-url https://torch.example torch>=2.8"),
    ],
    ids=["Windows without a GPU", "macOS", "Linux and WSL with a GPU", "Linux without one", "an index of one's own"],
)
def test_torch_fits_the_system(machine, system, gpu, environment, asked):
    machine.python("Scripts" if environment.get("OS") else "bin")
    machine.program("uname", f"echo {system}")
    if gpu:
        nvidia(machine, "581.29, 8.9")
    done = machine.bash("install_torch", **environment)
    assert done.returncode == 0, done.stderr
    assert machine.noted("asked").splitlines() == [f"-m pip install --disable-pip-version-check {asked}"]


# Which ComfyUI


@pytest.mark.parametrize("name", [None, "timeout"], ids=["macOS has none", "Windows' own is another program"])
def test_comfyui_is_cloned_without_timeout(machine, name):
    if name:
        machine.program(name, "exit 1")
    machine.program("git", 'echo "$*" >>"$CG_HOME/called"; [ "$1" != clone ] || { mkdir "$5"; touch "$5/main.py"; }')
    done = machine.bash("find_comfyui clone")
    assert done.stdout == f"{machine.home}/ComfyUI\n"
    assert (machine.home / "ComfyUI" / "main.py").exists()
    assert "some 40 MB" in done.stderr
    assert [line.split()[0] for line in machine.noted("called").splitlines()] == ["ls-remote", "clone"]


@pytest.mark.parametrize(
    ("git", "why"),
    [
        (None, "git is not installed"),
        ("echo 'fatal: Could not resolve host: github.com' >&2; exit 128", "Could not resolve host"),
        ("exec sleep 50", "no answer"),
        ('[ "$1" = ls-remote ]', "failed or took too long"),
        ('[ "$1" = ls-remote ] || exec sleep 50', "failed or took too long"),
    ],
    ids=["no git", "no network", "no answer", "a clone that fails", "a clone that hangs"],
)
def test_without_comfyuis_repository_it_says_why_and_what_else_there_is(machine, git, why):
    if git:
        machine.program("git", git)
    start = time.monotonic()
    done = machine.bash('ASK_LIMIT=1 CLONE_LIMIT=1; comfyui=$(find_comfyui clone); echo "found=$comfyui"')
    assert time.monotonic() - start < 30
    assert done.stdout == "found=\n"
    assert why in done.stderr
    assert "June 2024" in done.stderr
    assert "COMFYUI_PATH=" in done.stderr


def test_a_command_within_its_time_keeps_its_status(machine):
    assert machine.bash("within 20 bash -c 'exit 7'").returncode == 7
    assert machine.bash("within 1 sleep 50").returncode == 124
    assert machine.bash("within 20 true").returncode == 0


# quickstart.sh and test.sh as a whole


@pytest.fixture
def copy(machine, tmp_path):
    """Copy the scripts to where nothing else of this repository is. Return a function that runs one of them."""
    shutil.copytree(ROOT / "scripts", tmp_path / "copy" / "scripts")
    (tmp_path / "copy" / "pyproject.toml").touch()
    machine.python()
    machine.program("pytest", "true")

    def run(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        home = str(machine.home)
        variables = {"PATH": str(machine.programs), "HOME": home, "COMPILED_GRAPHS_HOME": home, "CG_HOME": home}
        command = ["bash", str(tmp_path / "copy" / "scripts" / script), *arguments]
        return subprocess.run(
            command, env={**variables, **environment}, capture_output=True, text=True, timeout=60, check=False
        )

    return run


@pytest.mark.parametrize(("gpu", "size"), [(False, "500 MB"), (True, "3 GB")])
def test_quickstart_says_first_what_it_downloads_and_where_to(machine, copy, gpu, size):
    if gpu:
        nvidia(machine, "581.29, 8.9")
    done = copy("quickstart.sh")
    assert done.returncode == 0, done.stderr
    first = done.stdout.splitlines()[:4]
    assert re.search(rf"downloads about {size}\b.* into {re.escape(str(machine.home))}", first[1])
    assert "minutes" in first[2]
    again = copy("quickstart.sh")
    assert not re.search("downloads about", again.stdout)
    assert str(machine.home) in again.stdout.splitlines()[1]


def test_no_script_asks_for_more_than_the_bash_of_macos_has():
    """That is bash 3.2: there, an empty array counts as unset under `set -u`."""
    for path in [*sorted((ROOT / "scripts").glob("*.sh"))]:
        text = re.sub(r"(?m)#.*$", "", path.read_text(encoding="utf-8"))
        assert not re.findall(
            r"\$\{\w+(?:,,|\^\^|@[A-Z])|\b(?:mapfile|readarray|declare -A|local -[nA]|coproc)\b", text
        ), path
        assert not re.findall(r"\b(?:timeout|realpath|readlink -f|sed -i|wait -n|grep -P)\b", text), path
        assert not re.findall(r"&>>|\|&", text), path


def test_an_empty_list_of_arguments_is_no_unset_variable():
    """Of the arrays, those that can be empty are expanded in the way that bash 3.2 takes."""
    assert '${which[@]+"${which[@]}"}' in (ROOT / "scripts" / "test.sh").read_text(encoding="utf-8")


def test_scripts_keep_their_line_ends_on_windows():
    if not shutil.which("git") or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    names = ["scripts/lib.sh", "scripts/quickstart.sh", ".ci/run"]
    command = ["git", "-C", str(ROOT), "check-attr", "eol", "--", *names]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert told == [f"{name}: eol: lf" for name in names]


def test_no_test_begins_after_the_end_of_its_time(tmp_path):
    tests = ROOT / "tests"
    command = [sys.executable, "-c", "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))", "-p", "no:xdist"]
    command += ["-c", str(tests / "pytest.ini"), str(tests / "compiler" / "common" / "test_bounded_json.py")]
    environment = {**os.environ, "COMPILED_GRAPHS_TESTS_END": "0"}
    told = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment).stdout
    skipped = re.search(r"(\d+) tests were not run: the time for tests is over", told)
    assert skipped, told
    assert f"{skipped[1]} skipped in" in told

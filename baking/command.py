"""The command `bake`: graphs of workflows and of networks by name, made before anybody asks for them."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..compiler.backends import NAMES
from ..compiler.common import boot
from ..compiler.hosts.comfy.known_networks import DTYPES, NETWORKS
from . import client, stand_in
from .client import OnProgress, PromptError
from .comfy_process import PACKAGE, ComfyError, ComfyProcess, find_comfyui
from .workflow import NodeTypes, Prompt, WorkflowError, ancestors, is_link, to_prompt

MEGABYTE = 10**6
SOCKETS = {"MODEL": "model", "VAE": "vae", "CONTROL_NET": "control_net", "CLIP": "clip"}
"""Types of what is compiled, and the inputs of our nodes that bring it."""
OURS = "CG_CompileModel"
END = "CG_BakeEnd"
BEFORE = "before sampling"
ELSEWHERE = "Inductor compiles for the GPU that it runs on. Run bake on such a GPU, with this store or with --bundle."

Say = Callable[[str], None]


@dataclass(frozen=True)
class Job:
    """One thing to bake."""

    name: str
    prompt: Callable[[NodeTypes], Prompt]
    """Returns what is run, without ends. Raises WorkflowError."""


@dataclass
class Tally:
    """What has been made so far."""

    keys: set[str] = field(default_factory=set)
    made: int = 0
    failures: int = 0
    """Networks and graphs that could not be had, or are wrong."""
    place: str = ""
    """The server's store."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command's arguments."""
    parser.add_argument(
        "workflows", metavar="WORKFLOW", nargs="*", type=Path, help="a workflow, or a prompt for the API"
    )
    named = f"a network by name: {', '.join(NETWORKS)}; with a dtype, one of {', '.join(DTYPES)}"
    parser.add_argument("--model", metavar="NAME[:DTYPE]", action="append", default=[], type=_network, help=named)
    parser.add_argument("--comfyui", metavar="FOLDER", type=Path, help="ComfyUI's code, if it is not found")
    parser.add_argument("--store", metavar="PLACE", help="folder or URL; by default the store of this ComfyUI")
    parser.add_argument("--backend", choices=NAMES, help="by default what the workflow says")
    parser.add_argument("--headers", metavar="FOLDER", type=Path, help="headers that stand in for missing weights")
    parser.add_argument("--arch", metavar="CAPABILITY", action="append", default=[], help="a GPU's, such as 8.9")
    parser.add_argument(
        "--run", dest="whole", action="store_true", help="run each workflow whole, for what only a step compiles"
    )
    parser.add_argument("--verify", action="store_true", help="run each graph once on random weights against eager")
    parser.add_argument("--bundle", metavar="FILE", type=Path, help="also write the graphs to this file")
    parser.epilog = "What follows -- is for ComfyUI, such as -- --base-directory /data --use-sage-attention."


def _network(text: str) -> tuple[str, str]:
    name, _, dtype = text.partition(":")
    if name not in NETWORKS:
        raise argparse.ArgumentTypeError(
            f"the sizes of {name} are not known. Known are {', '.join(NETWORKS)}. For others give a workflow, "
            "and --headers where there are no weights"
        )
    dtype = dtype or NETWORKS[name].dtype
    if dtype not in DTYPES:
        raise argparse.ArgumentTypeError(f"there is no dtype {dtype}; choose one of {', '.join(DTYPES)}")
    return name, dtype


def run(options: argparse.Namespace, say: Say) -> int:
    """Bake, and return the exit status: 0 if everything could be had."""
    if not options.workflows and not options.model:
        say("There is nothing to bake: name workflows, or networks with --model.")
        return 2
    tally, store = Tally(), _absolute(options.store or os.environ.get("COMPILED_GRAPHS_STORE", ""))
    try:
        with tempfile.TemporaryDirectory(prefix="compiled_graphs_") as folder:
            comfyui = find_comfyui(options.comfyui)
            kinds = _write_stand_ins(options, comfyui, Path(folder), say)
            variables = {"COMPILED_GRAPHS_STORE": store} if store else {}
            with ComfyProcess(comfyui, options.comfyui_options, Path(folder), kinds, variables) as server:
                types = server.get("/object_info")
                for job in _jobs(options):
                    _bake(server, job, types, options, tally, say)
    except (ComfyError, stand_in.NotAHeader, OSError) as error:
        for line in str(error).splitlines():
            say(line)
        return 2
    tally.failures += _say_of_others(options.arch, say)
    found = len(tally.keys) - tally.made
    say(f"{tally.made} graphs compiled, {found} found in {tally.place or 'the store'}. {_failures(tally.failures)}")
    if options.bundle and tally.keys:
        from .bundle import write_from_store

        tally.failures += write_from_store(options.bundle, store or tally.place, tally.keys, say)
    return 1 if tally.failures else 0


def _absolute(store: str) -> str:
    """Return where a store is for ComfyUI, which runs in a folder of its own."""
    return store if "://" in store or not store else str(Path(store).expanduser().absolute())


def _failures(count: int) -> str:
    return f"{count} could not be had: see above." if count else "Nothing is missing."


def _jobs(options: argparse.Namespace) -> Iterator[Job]:
    for path in options.workflows:
        yield Job(path.name, lambda types, path=path: to_prompt(_read(path), types))
    for name, dtype in options.model:
        yield Job(f"{name}, {dtype}", lambda types, name=name, dtype=dtype: _prompt_of(_file_of(name, dtype)))


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WorkflowError(f"it cannot be read ({error.strerror})") from None
    except ValueError:
        raise WorkflowError("it is not JSON") from None


def _file_of(name: str, dtype: str) -> str:
    return f"baking_{name}_{dtype}.safetensors"


def _prompt_of(file: str) -> Prompt:
    loader = {"class_type": "UNETLoader", "inputs": {"unet_name": file, "weight_dtype": "default"}}
    return {"1": loader, "2": {"class_type": OURS, "inputs": {"model": ["1", 0]}}}


def _write_stand_ins(options: argparse.Namespace, comfyui: Path | None, folder: Path, say: Say) -> list[str]:
    """Write the files that stand in for weights. Return the kinds of models that they are."""
    models, headers = folder / "models", folder / "headers"
    given = stand_in.headers_in(options.headers) if options.headers else {}
    if options.headers and not given:
        raise ComfyError(f"There is no header of a safetensors file in {options.headers}.")
    if options.model:
        headers.mkdir()
        _write_known(comfyui, headers, options.model, say)
        given |= {f"unet/{path.name}": path for path in headers.iterdir()}
    for name, path in given.items():
        stand_in.write_stand_in(models / name, stand_in.read_header(path))
    return sorted({name.split("/")[0] for name in given})


def _write_known(comfyui: Path | None, folder: Path, networks: Iterable[tuple[str, str]], say: Say) -> None:
    """Have another process, which imports ComfyUI, write the headers of networks."""
    wanted = [text for name, dtype in networks for text in (name, dtype, str(folder / _file_of(name, dtype)))]
    module = "compiler.hosts.comfy.known_networks"
    command = boot.command(sys.executable, PACKAGE.name, PACKAGE, module, str(comfyui or ""), *wanted)
    done = subprocess.run(command, env=boot.environment(), capture_output=True, text=True, encoding="utf-8")
    if done.returncode:
        raise ComfyError(f"ComfyUI cannot build a network: {done.stderr.strip().splitlines()[-1]}")
    for line in done.stdout.splitlines():
        say(line)


def _bake(
    server: ComfyProcess, job: Job, types: NodeTypes, options: argparse.Namespace, tally: Tally, say: Say
) -> None:
    """Have one job compiled, and say what came of it."""
    try:
        whole = _prepared(job.prompt(types), types, options.backend)
        ends = _ends(whole, types)
        if not ends:
            raise WorkflowError("it has no Compile Model, VAE Speedup, ControlNet Speedup, CLIP Speedup or Load Graph")
        with _bar(job.name) as progress:
            if options.whole:
                client.run(server, whole, progress)
            prompt = ancestors(whole, [node for node, _ in ends]) | _end_nodes(ends, options.verify)
            outputs = client.run(server, prompt, progress)
    except (WorkflowError, PromptError) as error:
        say(f"{job.name}: {error}")
        tally.failures += 1
        return
    finally:
        server.free_memory()
    for node, slot in ends:
        report = json.loads(outputs[_end_id(node, slot)]["text"][0])
        if report:
            _say_report(f"{job.name}, node {node}", report, tally, say)


def _prepared(prompt: Prompt, types: NodeTypes, backend: str | None) -> Prompt:
    """Return the prompt with our nodes set to compile at once, by the backend that was asked for."""
    for node in prompt.values():
        described = types.get(node["class_type"], {}).get("input", {})
        known = {**described.get("required", {}), **described.get("optional", {})}
        if _is_ours(node["class_type"], types):
            changes = {"when": BEFORE, "backend": backend}
            node["inputs"] |= {name: value for name, value in changes.items() if value and name in known}
    return prompt


def _is_ours(kind: str, types: NodeTypes) -> bool:
    """Whether a class of nodes is of this extension. ComfyUI of 2024 does not say where a class is from."""
    module = types.get(OURS, {}).get("python_module")
    return kind in types and (types[kind].get("python_module") == module if module else kind.startswith("CG_"))


def _ends(prompt: Prompt, types: NodeTypes) -> list[tuple[str, int]]:
    """Return the outputs of our nodes that something compiled comes out of."""
    found = []
    for name, node in prompt.items():
        kind = node["class_type"]
        outputs = types[kind]["output"] if _is_ours(kind, types) else ()
        links = {key for key, value in node["inputs"].items() if is_link(value)}
        found += [
            (name, slot)
            for slot, type_ in enumerate(outputs)
            if type_ in SOCKETS and (len(outputs) == 1 or SOCKETS[type_] in links)
        ]
    return found


def _end_id(node: str, slot: int) -> str:
    return f"bake-{node}-{slot}"


def _end_nodes(ends: Iterable[tuple[str, int]], check: bool) -> Prompt:
    return {
        _end_id(node, slot): {"class_type": END, "inputs": {"thing": [node, slot], "check": check}}
        for node, slot in ends
    }


@contextmanager
def _bar(name: str) -> Iterator[OnProgress]:
    """Show how far a job is, where somebody looks on."""
    from tqdm import tqdm

    with tqdm(desc=name, unit="graph", leave=False, disable=None) as bar:

        def show(done: int, total: int) -> None:
            bar.total, bar.n = total, done
            bar.refresh()

        yield show


def _say_report(name: str, report: Mapping[str, Any], tally: Tally, say: Say) -> None:
    """Say which graphs a network has got, what they take, and what could not be had."""
    graphs = [graph for graph in report["graphs"] if graph["key"] not in tally.keys]
    made = [graph for graph in graphs if graph["source"] == "compiled"]
    seconds, size = sum(graph["seconds"] for graph in made), sum(graph["size"] for graph in report["graphs"])
    say(
        f"{name}: {report['network']}, {report['backend']}: {report['compiled']} of {report['kinds']} block types, "
        f"{len(report['graphs'])} graphs, {size / MEGABYTE:.1f} MB, {len(made)} of them compiled now ({seconds:.1f} s)"
    )
    tally.keys |= {graph["key"] for graph in graphs}
    tally.place = report["store"]
    tally.made += len(made)
    for region, reason in report["reasons"]:
        say(f"  not had: {region}: {reason}")
    for region in report["waiting"]:
        say(f"  not had: {region}: its graphs are made when the model runs. --run runs the workflow.")
    wrong = _say_checks(report["graphs"], say)
    tally.failures += len(report["reasons"]) + len(report["waiting"]) + wrong


def _say_checks(graphs: Sequence[Mapping[str, Any]], say: Say) -> int:
    """Say what the comparison with eager has shown. Return how many graphs are wrong."""
    checked = [graph for graph in graphs if "check" in graph]
    wrong = [graph for graph in checked if graph["check"]["wrong"]]
    skipped = [graph for graph in checked if graph["check"]["skipped"]]
    if checked:
        agree = len(checked) - len(wrong) - len(skipped)
        say(f"  {agree} of {len(checked)} graphs agree with eager on random weights")
    for graph in wrong:
        say(f"  wrong, and removed: {graph['region']}: {graph['check']['wrong']}")
    for graph in skipped:
        say(f"  not compared: {graph['region']}: {graph['check']['skipped']}")
    return len(wrong)


def _say_of_others(wanted: Iterable[str], say: Say) -> int:
    """Say which of the GPUs that were asked for could not be had."""
    import torch

    here = ".".join(map(str, torch.cuda.get_device_capability())) if torch.cuda.is_available() else ""
    others = [each for each in wanted if each.removeprefix("sm_") not in (here, here.replace(".", ""))]
    for each in others:
        say(f"Not had for compute capability {each}: {ELSEWHERE}")
    return len(others)


def write_headers(options: argparse.Namespace, say: Say) -> int:
    """Write the headers of a folder of models to another folder."""
    try:
        written, left = stand_in.copy_headers(options.models, options.target)
    except (stand_in.NotAHeader, OSError) as error:
        say(str(error))
        return 2
    for reason in left:
        say(f"left out: {reason}")
    for name, size in written.items():
        say(f"{size / 1000:10.1f} kB  {name}")
    say(f"{len(written)} headers in {options.target}{os.sep}")
    return 0 if written and not left else 1

"""How servers that share a store start cold, at once: how often each graph is compiled, and who waits for whom.

    python benchmarks/fleet.py                        # ten processes, a folder
    python benchmarks/fleet.py --place s3             # the same on S3, by moto's server (pip install moto[server] s3fs)
    python benchmarks/fleet.py --killed 2             # two more are killed while they compile

A process stands for a server: it has the store and the locks of one, and a small network in place of a model. All
begin when the last of them is ready. Prints JSON; the exit status is 0 if each graph was compiled once in all, and no
process waited for another longer than the compile and what the store takes to show it.
"""

import argparse
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SLACK = {"folder": 2.0, "s3": 6.0}
"""Seconds that a process may wait longer than a compile takes: for its turn on a busy machine, and for claims."""
BUCKET = "graphs"
READY, COMPILING = "ready", "compiling"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--servers", type=int, default=10)
    parser.add_argument("--place", choices=SLACK, default="folder")
    parser.add_argument("--backend", default="eager", help="a slow compiler makes waiting longer")
    parser.add_argument("--kinds", type=int, default=3, help="different blocks of the network")
    parser.add_argument("--least", type=float, default=1.0, help="seconds that each compile takes at least")
    parser.add_argument("--killed", type=int, default=0, help="processes that are killed while they compile")
    parser.add_argument("--role", choices=["server", "victim"])
    options = parser.parse_args()
    if options.role:
        serve(options)
        return 0
    with tempfile.TemporaryDirectory() as folder, store(options.place, folder) as variables:
        variables |= {"COMPILED_GRAPHS_TRUST": str(Path(folder, "trust")), "OMP_NUM_THREADS": "1"}
        report = measure(options, variables)
    print(json.dumps(report, indent=2))
    return 0 if report["as it should be"] else 1


@contextlib.contextmanager
def store(place, folder):
    """Yield the variables that name an empty store."""
    if place == "folder":
        yield {**os.environ, "COMPILED_GRAPHS_STORE": str(Path(folder, "store"))}
        return
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    names = {"AWS_ACCESS_KEY_ID": "nobody", "AWS_SECRET_ACCESS_KEY": "nothing", "AWS_DEFAULT_REGION": "us-east-1"}
    variables = {**os.environ, **names, "AWS_ENDPOINT_URL": f"http://{host}:{port}"}
    try:
        boto3.client(
            "s3",
            endpoint_url=variables["AWS_ENDPOINT_URL"],
            aws_access_key_id="nobody",
            aws_secret_access_key="nothing",
            region_name="us-east-1",
        ).create_bucket(Bucket=BUCKET)
        yield variables | {"COMPILED_GRAPHS_STORE": f"s3://{BUCKET}/fleet"}
    finally:
        server.stop()


def start(options, role, variables):
    command = [sys.executable, __file__, "--role", role, "--backend", options.backend]
    command += ["--kinds", str(options.kinds), "--least", str(options.least)]
    process = subprocess.Popen(command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return process


def wait_for(process, line):
    for said in process.stdout:
        if said.strip() == line:
            return
    raise SystemExit(f"a process ended before it said {line}")


def begin(process):
    process.stdin.write("go\n")
    process.stdin.flush()


def measure(options, variables):
    victims = [start(options, "victim", variables) for _ in range(options.killed)]
    servers = [start(options, "server", variables) for _ in range(options.servers)]
    for process in (*victims, *servers):
        wait_for(process, READY)
    for victim in victims[:1]:  # the others wait for the first, and compile when it is gone
        begin(victim)
        wait_for(victim, COMPILING)
    began = time.perf_counter()
    for process in (*victims[1:], *servers):
        begin(process)
    for place, victim in enumerate(victims):
        if place:
            wait_for_any(victim, servers)
        victim.send_signal(signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM)
        victim.wait()
    reports = [json.loads(process.communicate()[0].splitlines()[-1]) for process in servers]
    seconds = time.perf_counter() - began
    later = start(options, "server", variables)
    wait_for(later, READY)
    begin(later)
    return summary(options, reports, seconds, json.loads(later.communicate()[0].splitlines()[-1]))


def wait_for_any(victim, servers):
    """Give a victim time to take its turn: it may never come, if the servers are faster."""
    for _ in range(20):
        if any(process.poll() is not None for process in servers):
            return
        time.sleep(0.1)


def summary(options, reports, seconds, later):
    outcomes = [each for report in reports for each in report["graphs"]]
    compiled = [each for each in outcomes if each["source"] == "compiled"]
    loaded = [each for each in outcomes if each["source"] == "disk"]
    waits = [wait for report in reports for wait in report["waits"]]
    compile_seconds = max((hold for report in reports for hold in report["holds"]), default=0.0)
    stale = 31.0 * options.killed if options.place == "s3" else 0.0
    bound = compile_seconds + SLACK[options.place] + stale
    after = {source: sum(each["source"] == source for each in later["graphs"]) for source in ("compiled", "disk")}
    right = (
        len(compiled) == options.kinds
        and max(waits, default=0.0) <= bound
        and after == {"compiled": 0, "disk": options.kinds}
        and not any(each["source"] == "eager" for each in outcomes)
    )
    return {
        "place": options.place,
        "backend": options.backend,
        "servers": options.servers,
        "killed while compiling": options.killed,
        "graphs": options.kinds,
        "compiled in all": len(compiled),
        "loaded": len(loaded),
        "longest compile, s": round(compile_seconds, 2),
        "longest wait for another server, s": round(max(waits, default=0.0), 2),
        "all ready after, s": round(seconds, 2),
        "seconds of each server": sorted(round(report["seconds"], 2) for report in reports),
        "a later server": {**after, "seconds": round(later["seconds"], 2)},
        "as it should be": right,
    }


def package(name):
    """Import a module of this package, whose folder may have any name."""
    sys.path.insert(0, str(ROOT.parent))
    return importlib.import_module(f"{ROOT.name}.compiler.{name}")


def serve(options):
    """Be one server: say that it is ready, wait for the word, get all graphs, and print where they came from."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.first, self.second = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

        def forward(self, x):
            return x + self.second(functional.gelu(self.first(x)))

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(
                nn.ModuleList(Block(16 * (kind + 1)) for _ in range(2)) for kind in range(options.kinds)
            )

        def forward(self, x):
            return [
                block(functional.pad(x, (0, part[0].first.in_features - 16))) for part in self.parts for block in part
            ]

    class Compiler:
        """A backend whose compiles take a while. A victim's never end."""

        def __init__(self, backend):
            self.backend, self.name = backend, backend.name
            self.capture_context, self.rounds = backend.capture_context, False

        def __getattr__(self, name):
            return getattr(self.backend, name)

        def compile(self, exported):
            print(COMPILING, flush=True)
            time.sleep(options.least if options.role == "server" else 3600)
            return self.backend.compile(exported)

    class TimedStore:
        """A store that notes how long this process waits for others, and others for it."""

        def __init__(self, store):
            self.store, self.waits, self.holds = store, [], []

        def __getattr__(self, name):
            return getattr(self.store, name)

        @contextlib.contextmanager
        def exclusive(self, key):
            asked = time.perf_counter()
            with self.store.exclusive(key):
                got = time.perf_counter()
                self.waits.append(got - asked)
                yield
            self.holds.append(time.perf_counter() - got)

    network = Network()
    backend = package("backends").BACKENDS[options.backend]
    store = TimedStore(package("storage.store").open_store(os.environ["COMPILED_GRAPHS_STORE"]))
    host = package("common.host").Host()
    target = package("runtime.region_kinds").Target(torch.device("cpu"), Compiler(backend), host)
    regions = package("identity.regions").find_regions(network)
    cache = package("compile_cache.graph_cache").GraphCache(store)
    compiled = package("runtime.compiled_model").CompiledModel(network, regions, target, cache)
    backend.warm_up()
    store.keys()  # connects
    print(READY, flush=True)
    sys.stdin.readline()
    graphs = []

    def note(progress):
        if progress.done:
            graphs.append({"source": progress.source, "seconds": progress.seconds})

    start = time.perf_counter()
    compiled.prepare(lambda copy, at: copy(torch.empty(at.batch, at.tokens, 16)), note)
    seconds = time.perf_counter() - start
    print(json.dumps({"graphs": graphs, "seconds": seconds, "waits": store.waits, "holds": store.holds}), flush=True)


if __name__ == "__main__":
    sys.exit(main())

"""What baking has made of a MODEL, a VAE, a CONTROL_NET or a CLIP, as plain data."""

from __future__ import annotations

from typing import Any

from ...registry.explanations import reason_words
from ...runtime.random_check import check_graphs
from . import process
from .compile import compiled_model, finish, patcher_of


def baked(thing: Any, check: bool = False) -> dict[str, Any]:
    """Return which graphs an object has, and why it lacks others; nothing for one that is not compiled.

    With `check`, each graph runs once on random weights, and one that disagrees with eager is taken out of the store.
    """
    patcher = patcher_of(thing)
    compiled = compiled_model(thing) if patcher is not None else None
    if compiled is None:
        return {}
    finish(patcher)
    process.registry().cache.renewals.finish()  # the server ends soon
    results = check_graphs(compiled) if check else {}
    kinds = compiled.kinds()
    entries = [entry for kind in kinds for entry in kind.entries]
    for entry in entries:
        if (result := results.get(entry.graph.key)) and result.wrong:
            process.registry().cache.evict(entry)
    return {
        "store": process.registry().cache.store.place,
        "network": compiled.network_name(),
        "backend": compiled.backend,
        "kinds": len(kinds),
        "compiled": sum(bool(kind.graphs) for kind in kinds),
        "waiting": [kind.region for kind in kinds if not kind.graphs and not kind.reasons],
        "reasons": [[kind.region, str(reason_words(reason))] for kind in kinds for reason in kind.reasons],
        "graphs": [
            {
                "key": entry.graph.key,
                "region": entry.graph.spec.region,
                "source": entry.source,
                "seconds": entry.seconds,
                "size": entry.size,
                **({"check": vars(results[entry.graph.key])} if entry.graph.key in results else {}),
            }
            for entry in {entry.graph.key: entry for entry in entries}.values()
        ],
    }

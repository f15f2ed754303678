"""Files that others signed: they run where the owner trusts their signer, and no changed byte gets through."""

from __future__ import annotations

import json
import os
import random
import stat
import sys
from contextlib import suppress

import pytest
from compiled_graphs.compiler.identity.graph_spec import GraphSpec
from compiled_graphs.compiler.storage.graph_file import (
    GraphFileError,
    StoredGraph,
    UntrustedFile,
    read_graphs,
    read_signature,
    write_graphs,
)
from compiled_graphs.compiler.storage.private_files import UnusableKey
from compiled_graphs.compiler.storage.signers import FINGERPRINT, Maker, Signature, Signer, fingerprint
from compiled_graphs.compiler.storage.store import FolderStore
from compiled_graphs.compiler.storage.trust import Trust

pytest.importorskip("cryptography")


@pytest.fixture
def maker(tmp_path):
    """A machine that signs for others."""
    trust = Trust(tmp_path / "maker")
    trust.maker.make()
    return trust


@pytest.fixture
def mine(tmp_path):
    return Trust(tmp_path / "mine")


def graph(code=b"code"):
    spec = GraphSpec(
        region="Block", device="cpu", weights=(), inputs=(), guards=(), mutated=(), outputs=(True,), tree="[1, {}]"
    )
    return StoredGraph("ab" * 32, "ab", "[]", "eager", {"torch": "2.13.0"}, spec, code)


def signer_of(trust):
    return Signer(fingerprint(trust.maker.public()), "Alice")


def test_a_file_runs_where_its_signer_is_trusted_and_only_while_he_is(maker, mine):
    data = write_graphs([graph()], maker)
    with pytest.raises(UntrustedFile, match="has not trusted this signer"):
        read_graphs(data, mine)
    assert mine.signers.add(signer_of(maker))
    assert not mine.signers.add(signer_of(maker)), "once is enough"
    assert read_graphs(data, mine) == [graph()]
    assert [[each.is_foreign for each in read_graphs(data, owner)] for owner in (mine, maker)] == [[True], [False]]
    assert mine.signers.remove(signer_of(maker).fingerprint)
    assert not mine.signers.remove(signer_of(maker).fingerprint)
    with pytest.raises(UntrustedFile):
        read_graphs(data, mine)


def test_a_store_names_its_signer_too(maker, mine, tmp_path):
    FolderStore(tmp_path / "store", maker).put(graph())
    store = FolderStore(tmp_path / "store", mine)
    assert store.get(graph().key) is None
    mine.signers.add(signer_of(maker))
    assert store.get(graph().key) == graph()


def test_a_note_is_read_where_no_key_of_ones_own_can_be_made(maker, mine, tmp_path, monkeypatch):
    name = "cd" * 32
    FolderStore(tmp_path / "store", maker).put_note(name, b"[1]")
    mine.signers.add(signer_of(maker))

    def read_only(trust):
        raise UnusableKey("no key can be written")

    monkeypatch.setattr(Trust, "_read_or_make_key", read_only)
    assert FolderStore(tmp_path / "store", mine).note(name) == b"[1]"


def test_a_note_of_a_store_is_read_where_its_signer_is_trusted(maker, mine, tmp_path):
    name = "cd" * 32
    FolderStore(tmp_path / "store", maker).put_note(name, b"[1]")
    store = FolderStore(tmp_path / "store", mine)
    assert store.note(name) is None
    mine.signers.add(signer_of(maker))
    assert store.note(name) == b"[1]"
    (tmp_path / "store" / f"{'ef' * 32}.wanted.json").write_bytes(
        (tmp_path / "store" / f"{name}.wanted.json").read_bytes()
    )
    assert store.note("ef" * 32) is None, "its name is signed, too"


def test_the_signer_is_named_only_if_his_trust_is_all_that_is_missing(maker, mine):
    data = write_graphs([graph()], maker)
    assert refusal(data, mine).signer == signer_of(maker).fingerprint
    wrong = data.replace(graph().fingerprint.encode(), graph().fingerprint[::-1].encode())
    assert wrong != data
    assert refusal(wrong, mine).signer == ""
    assert refusal(write_graphs([graph()], Trust(mine.folder / "another")), mine).signer == ""


def refusal(data, trust):
    with pytest.raises(UntrustedFile) as refused:
        read_graphs(data, trust)
    return refused.value


def test_a_machine_without_such_a_key_signs_for_itself_alone(mine, maker):
    data = write_graphs([graph()], mine)
    assert read_signature(data) is None
    assert read_graphs(data, mine) == [graph()]
    with pytest.raises(UntrustedFile, match="not made on this machine"):
        read_graphs(data, maker)


def test_its_own_files_need_neither_a_signer_nor_the_library(maker, monkeypatch):
    data = write_graphs([graph()], maker)
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    assert read_graphs(data, maker) == [graph()]


def test_without_the_library_others_stay_untrusted_and_the_reason_says_what_to_install(maker, mine, monkeypatch):
    data = write_graphs([graph()], maker)
    mine.signers.add(signer_of(maker))
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    with pytest.raises(UntrustedFile, match="pip install cryptography"):
        read_graphs(data, mine)
    with pytest.raises(UnusableKey, match="pip install cryptography"):
        maker.maker.make()


def test_another_key_takes_the_place_of_the_first_which_is_kept(maker, mine):
    old = write_graphs([graph()], maker)
    mine.signers.add(signer_of(maker))
    first = signer_of(maker)
    assert maker.maker.make() != first.fingerprint
    assert sorted(path.name for path in maker.folder.iterdir()) == ["key", "signing_key", "signing_key.1"]
    assert read_graphs(old, mine) == [graph()], "what the first one signed still runs"
    with pytest.raises(UntrustedFile):
        read_graphs(write_graphs([graph()], maker), mine)


def test_a_signature_on_something_else_is_none_on_a_manifest(maker):
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    public = key.public_key().public_bytes_raw().hex()
    assert not Signature(public, key.sign(b"manifest").hex()).is_valid(b"manifest")


@pytest.mark.skipif(os.name == "nt", reason="Windows keeps permissions elsewhere")
def test_keys_and_lists_that_others_can_reach_are_not_used(maker, mine):
    data = write_graphs([graph()], maker)
    mine.signers.add(signer_of(maker))
    for path in (maker.folder / "signing_key", mine.folder / "signers"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        path.chmod(0o666)
    with pytest.raises(OSError, match="chmod 600"):
        maker.maker.public()
    with pytest.raises(UntrustedFile, match="chmod 600"):
        read_graphs(data, mine)


def test_a_key_that_is_none_is_named(maker):
    (maker.folder / "signing_key").write_bytes(b"short")
    with pytest.raises(UnusableKey, match="is not a key"):
        Maker(maker.folder).public()
    assert maker.countersign(b"manifest") is None, "what is saved is then signed for this machine alone"


@pytest.mark.parametrize("line", ["", "SHA256:short Alice", "\x1b[2J", "x" * 5000])
def test_a_line_that_names_nobody_is_passed_over(line, maker, mine):
    mine.signers.add(signer_of(maker))
    path = mine.folder / "signers"
    path.write_text(f"{line}\n{path.read_text()}")
    assert mine.signers.read() == [signer_of(maker)]


def test_a_fingerprint_is_as_ssh_prints_it(maker):
    assert FINGERPRINT.fullmatch(signer_of(maker).fingerprint)


def parts(data):
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def built(header, blobs):
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + blobs


def edited(rng, data, other):
    """Return a file with one edit of its structure: fields removed, exchanged with another file's, or changed."""
    header, blobs = parts(data)
    metadata, theirs = header["__metadata__"], parts(other)[0]["__metadata__"]
    manifest = json.loads(metadata["compiled_graphs"])
    (entry,) = manifest["graphs"]
    field = rng.choice(sorted(entry))
    edits = [
        lambda: metadata.pop(rng.choice(sorted(metadata))),
        lambda: metadata.update({name: theirs[name] for name in rng.sample(sorted(theirs), rng.randint(1, 3))}),
        lambda: entry.update({field: rng.choice([None, "", 1, [], {}, "ab" * 32, True])}),
        lambda: entry["spec"].update({rng.choice(sorted(entry["spec"])): rng.choice([[], "x", [["x"]], 3])}),
        lambda: entry["environment"].update(torch="9.9.9"),
        lambda: manifest["graphs"].append(dict(entry, key="cd" * 32)),
        lambda: header[entry["key"]].update(data_offsets=[0, rng.randrange(len(blobs) + 9)]),
    ]
    rng.choice(edits)()
    if rng.random() < 0.8:
        metadata["compiled_graphs"] = metadata.get("compiled_graphs") and json.dumps(manifest, sort_keys=True)
    if rng.random() < 0.3:
        place = rng.randrange(len(blobs))
        blobs = blobs[:place] + bytes([blobs[place] ^ 1 << rng.randrange(8)]) + blobs[place + 1 :]
    return built({name: value for name, value in header.items() if value is not None}, blobs)


def test_no_edit_of_a_signed_file_gives_another_graph(maker, mine, tmp_path):
    """A file by a trusted signer, edited by somebody who also has a file and a key of his own."""
    attacker = Trust(tmp_path / "attacker")
    attacker.maker.make()
    mine.signers.add(signer_of(maker))
    data, other = write_graphs([graph()], maker), write_graphs([graph(b"evil")], attacker)
    rng, refused = random.Random(29), 0
    for _ in range(1500):
        try:
            found = read_graphs(edited(rng, data, other), mine)
        except (GraphFileError, OSError):
            refused += 1
        else:
            assert found == [graph()], "an edit without a meaning may stay unseen"
    assert refused > 1000
    for place in range(len(data)):
        changed = data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :]
        with suppress(GraphFileError):
            assert read_graphs(changed, mine) == [graph()]

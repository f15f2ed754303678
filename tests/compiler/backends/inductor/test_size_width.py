from __future__ import annotations

import threading
from types import SimpleNamespace

import sympy
from compiled_graphs.compiler.backends.inductor import size_width
from compiled_graphs.compiler.backends.inductor.size_width import short_sizes
from compiled_graphs.compiler.common.torch_compat import MissingName, triton_codegen
from torch._inductor.codegen.common import ArgName, SizeArg

KERNEL = ("ks0", "ks1", "xnumel")


def types(size_dtype):
    """Return the types of a kernel's arguments, as Inductor writes them."""
    signature = [SizeArg(name, sympy.Symbol("s0", integer=True)) for name in KERNEL]
    names = [ArgName(name) for name in KERNEL]
    return triton_codegen.get().signature_to_meta(signature, size_dtype=size_dtype, argdefs=names)


def test_torch_gives_sizes_64_bits_by_itself():
    """Where no supported torch does any more, `size_width` can go."""
    assert types("tl.int32") == {"ks0": "i64", "ks1": "i64", "xnumel": "i32"}


def test_sizes_have_32_bits_in_kernels_that_count_with_32():
    with short_sizes():
        assert types("tl.int32") == {"ks0": "i32", "ks1": "i32", "xnumel": "i32"}


def test_sizes_keep_64_bits_in_kernels_that_count_with_64():
    with short_sizes():
        assert types("tl.int64") == {"ks0": "i64", "ks1": "i64", "xnumel": "i64"}


def test_other_threads_keep_64_bits():
    seen = []
    with short_sizes():
        thread = threading.Thread(target=lambda: seen.append(types("tl.int32")))
        thread.start()
        thread.join()
    assert seen[0]["ks0"] == "i64"


def test_torch_has_its_own_again_afterwards():
    before = triton_codegen.get().signature_to_meta
    with short_sizes():
        assert triton_codegen.get().signature_to_meta is not before
    assert triton_codegen.get().signature_to_meta is before


def test_a_torch_that_lacks_the_name_stays_as_it_is(monkeypatch):
    def missing():
        raise MissingName("torch._inductor.codegen.triton")

    monkeypatch.setattr(size_width, "triton_codegen", SimpleNamespace(get=missing))
    with short_sizes():
        assert types("tl.int32")["ks0"] == "i64"

"""Small networks that behave like real diffusion models, and helpers that size, call and compile them."""

from __future__ import annotations

import logging
import weakref
from types import MethodType

import torch
from compiled_graphs.compiler.backends.eager.backend import EagerBackend
from compiled_graphs.compiler.common.host import Host
from compiled_graphs.compiler.common.tensor_slots import tensor_slots
from compiled_graphs.compiler.identity.fingerprint import fingerprint
from compiled_graphs.compiler.identity.regions import find_regions
from compiled_graphs.compiler.runtime.compiled_model import CompiledModel, Options
from compiled_graphs.compiler.runtime.region_kinds import Target
from compiled_graphs.compiler.runtime.running_call import RunningCall, entered
from compiled_graphs.compiler.tracing.export import export_region
from compiled_graphs.compiler.tracing.shape_discovery import Sizes, discover_requests
from torch import nn
from torch.nn import functional

CPU = torch.device("cpu")
WIDTH = 16


class ResidualBlock(nn.Module):
    def __init__(self, channels=8, embedding=12):
        super().__init__()
        self.norm = nn.GroupNorm(2, channels)
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.embed = nn.Linear(embedding, channels)

    def forward(self, x, emb):
        return x + self.conv(functional.silu(self.norm(x))) + self.embed(emb)[:, :, None, None]


class ConvolutionNetwork(nn.Module):
    def __init__(self, channels=8, depth=3):
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.ModuleList(ResidualBlock(channels) for _ in range(depth))

    def forward(self, x, emb):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, emb)
        return x

    def inputs(self, sizes):
        return torch.randn(sizes.batch, 3, sizes.height, sizes.width), torch.randn(sizes.batch, 12)


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x, mask=None):
        q, k, v = (t.unflatten(2, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=2))
        return self.out(functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))


class TransformerBlock(nn.Module):
    def __init__(self, width=WIDTH, heads=2, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.gate = nn.Parameter(torch.ones(width))
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x, mask=None):
        x = x + self.attention(functional.layer_norm(x, x.shape[-1:], eps=self.eps), mask)
        return x + self.mlp(x) * self.gate


class StreamBlock(nn.Module):
    """Writes its first result into its first input."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.image = nn.Linear(width, width)
        self.text = nn.Linear(width, width)

    def forward(self, image, text):
        image.add_(self.image(image) + text.mean(1, keepdim=True))
        return image, self.text(text), None


class StreamNetwork(nn.Module):
    def __init__(self, depth=2):
        super().__init__()
        self.blocks = nn.ModuleList(StreamBlock() for _ in range(depth))

    def forward(self, image, text):
        for block in self.blocks:
            image, text, _ = block(image, text)
        return image, text

    def inputs(self, sizes):
        return torch.randn(sizes.batch, sizes.height, WIDTH), torch.randn(sizes.batch, sizes.tokens, WIDTH)


class OptionsBlock(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.linear = nn.Sequential(nn.Linear(width, width))

    def forward(self, x, scale=1.0, reverse=False, shift=0):
        x = self.linear(x.flip(1) if reverse else x) * scale
        return x.roll(shift, 1)


class KeywordBlock(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.linear = nn.Sequential(nn.Linear(width, width))

    def forward(self, x, **extras):
        x = self.linear(x)
        return x if extras.get("bias") is None else x + extras["bias"]


class HostedBlock(nn.Module):
    """Gets its host's bookkeeping as an argument, and looks up one key in it."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.linear = nn.Sequential(nn.Linear(width, width))

    def forward(self, x, host_options=None):
        x = self.linear(x)
        for patch in (host_options or {}).get("block_patches", []):
            x = patch(x)
        return x


class PairBlock(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.query = nn.Linear(width, width)

    def forward(self, x, context):
        return self.query(x) * 3 - context


class DictBlock(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.linear = nn.Sequential(nn.Linear(width, width))

    def forward(self, x):
        y = self.linear(x)
        return {"sum": x + y, "nothing": None, "pair": (y, [y * 2])}


class TableBlock(nn.Module):
    """A block with a buffer that is one number for all channels, as LTX's decoder has it."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.tensor([0.5, 1.0]).unsqueeze(1).expand(2, WIDTH), persistent=False)

    def forward(self, x):
        shift, scale = self.table
        return x + self.proj(x) * scale + shift


class Stack(nn.Module):
    """Blocks of one class over tokens. Each block gets the arguments after the first."""

    def __init__(self, block, depth=2, **settings):
        super().__init__()
        self.blocks = nn.ModuleList(block(**settings) for _ in range(depth))

    def forward(self, x, *args, **kwargs):
        for block in self.blocks:
            x = block(x, *args, **kwargs)
        return x

    def inputs(self, sizes):
        return (torch.randn(sizes.batch, sizes.tokens, WIDTH),)


def transformer(depth=2, **settings):
    return Stack(TransformerBlock, depth, **settings)


def host_map_attention(q, k, v):
    """Attention between the pixels of feature maps, with VAEs' calling convention. Takes views of its inputs."""
    batch, channels = q.shape[:2]
    q, k, v = (t.view(batch, 1, channels, -1).transpose(2, 3) for t in (q, k, v))
    output = nn.functional.scaled_dot_product_attention(q.contiguous(), k.contiguous(), v.contiguous())
    return output.transpose(2, 3).reshape(batch, channels, *[int(output.shape[2] ** 0.5)] * 2)


def host_attention(
    q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False, **options
):
    """Attention with ComfyUI's calling convention."""
    if not skip_reshape:
        q, k, v = (t.reshape(t.shape[0], t.shape[1], heads, -1).transpose(1, 2) for t in (q, k, v))
    out = functional.scaled_dot_product_attention(
        q.to(attn_precision or q.dtype), k.to(attn_precision or k.dtype), v.to(attn_precision or v.dtype), mask
    )
    return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


def sizes(batch=2, height=6, width=9, tokens=7):
    return Sizes(batch=batch, frames=3, height=height, width=width, tokens=tokens)


def call(network, at):
    """Call a network at some sizes, as a probe does."""
    return network(*network.inputs(at))


def call_with(**arguments):
    """Return a model call with further arguments. A function among them returns the value for the sizes."""

    def run(network, at):
        made = {name: value(at) if callable(value) else value for name, value in arguments.items()}
        return network(*network.inputs(at), **made)

    return run


def install(network, registry, backend=None, host=None, current_call=None, device=CPU, **options):
    """Put a compiled model's forwards in place, with nothing prepared.

    `current_call` returns what makes the running call again; without it, nobody can.
    """
    target = Target(device, backend or EagerBackend(), host or Host())
    compiled = CompiledModel(network, find_regions(network), target, registry.cache, Options(**options))
    for path, forward in compiled.forwards().items():
        network.get_submodule(path).forward = forward
    if current_call is not None:
        network.forward = EnteredForward(network, compiled, current_call)
    return compiled


class EnteredForward:
    """Calls a network as its entrance does: its regions know the running call."""

    def __init__(self, network, compiled, current_call):
        self.network, self.compiled, self.current_call = weakref.ref(network), compiled, current_call

    def __call__(self, *args, **kwargs):
        with entered(RunningCall(self.compiled, self.current_call)):
            return type(self.network()).forward(self.network(), *args, **kwargs)

    def __deepcopy__(self, memo):
        copied = memo[id(self.network())]
        return MethodType(type(copied).forward, copied)


def compile_network(network, registry, backend=None, host=None, probe=call, **options):
    compiled = install(network, registry, backend, host, **options)
    compiled.prepare(probe)
    return compiled


def variants_of(network, probe=call, host=None):
    host = host or Host()
    regions = {region: fingerprint(region.module, host) for region in find_regions(network)}
    return discover_requests(network, regions, CPU, host, probe)


def export(network, probe=call):
    """Export the only graph that a network with one kind of region needs."""
    (variant,) = variants_of(network, probe)
    return export_region(variant, Host())


def twins(make):
    """Return two networks that have the same weights."""
    one, other = make(), make()
    other.load_state_dict(one.state_dict())
    return one, other


def weights_of(module):
    return [group[name] for _, (group, name) in tensor_slots(module)]


def said(caplog):
    """Return the messages that the package has logged at level INFO and above."""
    records = [record for record in caplog.records if record.name.startswith("compiled_graphs")]
    return [record.getMessage() for record in records if record.levelno >= logging.INFO]
